"""Who owns which matrix whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.models import Mlp, Transformer
from yafsdp_cc.plan import assign_owners, find_units
from yafsdp_cc.plan.ownership import newton_schulz_flops


def owners_of(model: nn.Module, ownership: object = "matrix", world: int = 4) -> dict[str, int]:
    found = assign_owners(find_units(model), ownership, world)  # type: ignore[arg-type]
    return {each.name: rank for each, rank in found.items()}


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
    assert all(rank + other == 1 for rank, other in zip(*[iter(found.values())] * 2, strict=True))


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
    with pytest.raises(ValueError, match=r"no block of this model has one: name parameters"):
        assign_owners(find_units(model, units=[model]), "matrix", 2)
