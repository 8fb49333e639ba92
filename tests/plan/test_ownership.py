"""Who owns which matrix whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.models import Mlp, Transformer
from yafsdp_cc.sharding.ownership import assign_owners, newton_schulz_flops
from yafsdp_cc.sharding.units import find_units


def owners_of(model: nn.Module, ownership: object = "matrix", world: int = 4) -> dict[str, int]:
    found = assign_owners(find_units(model), ownership, world)  # type: ignore[arg-type]
    return {each.name: owners.ranks[0] for each, owners in found.items()}


def test_matrices_of_blocks_have_owners_and_nothing_else() -> None:
    model = Transformer(3)
    found = owners_of(model)
    assert found.keys() == {
        name for name, each in model.named_parameters() if name.startswith("blocks") and each.ndim == 2
    }
    assert set(found.values()) == {0, 1, 2, 3}
    assert owners_of(model, "flat") == {}


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_rank_has_as_much_to_compute(world: int) -> None:
    model = Transformer(24)
    shapes = {name: each.shape for name, each in model.named_parameters()}
    work = [0] * world
    for name, rank in owners_of(model, world=world).items():
        work[rank] += newton_schulz_flops(shapes[name])
    assert max(work) <= 1.2 * sum(work) / world


def test_matrices_of_a_unit_are_spread() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(6)])
    found = assign_owners(find_units(model, units=list(model)), "matrix", 2)
    ranks = [rank for owners in found.values() for rank in owners.ranks]
    assert all(rank + other == 1 for rank, other in zip(*[iter(ranks)] * 2, strict=True))


class Experts(nn.Module):
    """A dense matrix and two stacks of six."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(32, 64, bias=False)
        self.up, self.down = nn.Parameter(torch.zeros(6, 64, 32)), nn.Parameter(torch.zeros(6, 32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_stacks_are_divided_between_their_matrices(world: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[Experts() for _ in range(8)], nn.Sequential(*[nn.Linear(64, 32) for _ in range(5)]))
    units = find_units(model, units=list(model))
    found = assign_owners(units, ["*.up", "*.down", "*.weight"], world, alignment=256)
    work = [0.0] * world
    for each, (ranks, is_assembled) in found.items():
        assert not is_assembled
        assert len(ranks) == (6 if each.parameter.ndim == 3 else 1)
        for rank in ranks:
            work[rank] += newton_schulz_flops(each.parameter.shape) / len(ranks)
    assert max(work) <= 1.2 * sum(work) / world
    for unit in units.units:  # one range of its buffer for each rank
        ranks = [rank for each in unit.parameters if each in found for rank in sorted(found[each].ranks)]
        assert "Experts" not in repr(unit.modules) or ranks == sorted(ranks)


def test_borders_are_aligned() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(2)])
        for each in model:
            each.experts = nn.Parameter(torch.zeros(12, 8, 16))
            each.odd = nn.Parameter(torch.zeros(12, 5, 5))
    found = assign_owners(find_units(model, units=list(model)), ["*.experts", "*.odd"], 2, alignment=256)
    assert {each.name.split(".")[1]: len(owners.ranks) for each, owners in found.items()} == {"experts": 6, "odd": 1}


def test_units_of_few_matrices_are_sharded_evenly_where_weights_are_gathered_twice() -> None:
    model = nn.Sequential(*[Experts() for _ in range(2)])
    for world, keeps, is_assembled in ((13, False, False), (14, False, True), (14, True, False)):
        found = assign_owners(
            find_units(model, units=list(model)), ["*.up", "*.down", "*.weight"], world, keeps_unsharded=keeps
        )
        assert all(owners.is_assembled == is_assembled for owners in found.values())
        assert all(owners.ranks == tuple(sorted(owners.ranks)) for owners in found.values())
    by_rank = [rank for owners in found.values() for rank in owners.ranks]
    assert len(by_rank) == 26


def test_operations_of_an_iteration() -> None:
    assert newton_schulz_flops((3, 5)) == newton_schulz_flops((5, 3)) == 2 * (2 * 3 * 3 * 5) + 2 * 27
    assert newton_schulz_flops((7, 3, 5)) == 7 * newton_schulz_flops((3, 5))


def test_patterns_name_parameters() -> None:
    assert owners_of(Mlp(2), ["blocks.*.weight"], 2).keys() == owners_of(Mlp(2), "matrix", 2).keys()
    assert "enter.weight" in owners_of(Mlp(2), ["*.weight"], 2)
    assert math.prod(Mlp().leave.weight.shape) < 256
    assert owners_of(Mlp(), ["leave.weight"])["leave.weight"] == 0  # so small that every rank has it


@pytest.mark.parametrize(
    ("ownership", "message"),
    [
        ("matrices", r"\"flat\", \"matrix\" or a list .* got 'matrices': one pattern is \['matrices'\]"),
        (["enter.wieght"], "'enter.wieght', which fits no parameter .* did you mean 'enter.weight'"),
        (["enter.*"], r"'enter.bias' by 'enter.\*', which has 1 dimensions, \[32\]"),
    ],
)
def test_what_is_refused(ownership: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        owners_of(Mlp(), ownership)


def test_a_model_without_blocks_is_told_to_name_matrices() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    with pytest.raises(ValueError, match=r"there is none beside embeddings: name parameters"):
        assign_owners(find_units(model, units=[model]), "matrix", 2)
