"""Where parameters, gradients and optimizer state lie: ZeRO's stages, replicas and second shards, through ``shard``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from tests.models import WIDTH, Mlp, Transformer
from tests.ranks import ranks
from tests.soak import also
from tests.twins import added, inputs, means, mine, same_gradients, sgd, square, step_both, trains_on, twins


def owned_as_planned(model: nn.Module) -> None:
    assert yafsdp_cc.counters_of(model).owned_bytes == yafsdp_cc.plan_of(model).owned_bytes


def sent_as_planned(model: nn.Module, before: tuple[int, int]) -> None:
    """A step has sent what the plan says."""
    counted, planned = yafsdp_cc.counters_of(model), yafsdp_cc.plan_of(model).communication
    assert counted.gathered_bytes - before[0] == planned.gather_forward + planned.gather_backward
    assert counted.reduced_bytes - before[1] == planned.reduce + planned.replicated + planned.replicas


def sent(model: nn.Module) -> tuple[int, int]:
    counted = yafsdp_cc.counters_of(model)
    return counted.gathered_bytes, counted.reduced_bytes


# -- ZeRO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_a_stage_of_zero(stage: int) -> None:
    model, plain = twins(Mlp, zero_stage=stage)
    optimizers = sgd(model, plain)
    trains_on(model, plain, square, [inputs()], within=1e-6)
    for first in (0, 3):
        before = sent(model)
        for step in range(first, first + 3):
            model.set_requires_gradient_sync(stage != 1 or step == first + 2)
            square(model, mine(inputs(step=step))).backward()
        truth = added(*(means(plain, square, inputs(step=step)) for step in range(first, first + 3)))
        same_gradients(model, truth, within=1e-6)
        step_both(model, plain, truth, optimizers)
        gathered, reduced = (after - then for after, then in zip(sent(model), before, strict=True))
        planned = yafsdp_cc.plan_of(model).communication
        once = planned.gather_forward
        assert gathered == once if stage < 3 else gathered > 2 * once
        assert reduced == (planned.reduce + planned.replicated) * (1 if stage == 1 else 3)
    owned_as_planned(model)
    assert yafsdp_cc.counters_of(model).overflow_buffers == 0


@ranks(1)
def test_a_stage_that_is_none_is_refused() -> None:
    for options, said in (
        ({"zero_stage": 4}, "takes 1, 2 or 3, got 4"),
        ({"zero_stage": 2, "reshard_after_forward": True}, "leave one of them out"),
    ):
        with pytest.raises(ValueError, match=said):
            yafsdp_cc.shard(Mlp(), **options)  # type: ignore[arg-type]


# -- replicas ---------------------------------------------------------------------------------------------------------


def replicated() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize("world", [also(2), 4])
@pytest.mark.parametrize("reduce", [None, torch.bfloat16])
@ranks("world")
def test_replicas(world: int, reduce: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce)
    model, plain = twins(Mlp, mesh=replicated(), mp_policy=policy)
    if reduce is None:
        trains_on(model, plain, square, [inputs(step=step) for step in range(3)], within=1e-6)
    before = sent(model)
    square(model, mine(inputs())).backward()
    same_gradients(model, means(plain, square, inputs()), within=1e-6 if reduce is None else 1e-2)
    sent_as_planned(model, before)
    owned_as_planned(model)
    weight = model.blocks[0][0].weight
    copies = [torch.empty_like(weight.to_local()) for _ in range(2)]
    dist.all_gather(copies, weight.to_local().detach(), group=weight.device_mesh.get_group("replicate"))
    assert torch.equal(*copies)


@ranks(4)
def test_replicas_are_made_equal_or_compared() -> None:
    def build() -> Any:
        torch.manual_seed(dist.get_rank() // 2)  # the replicas differ, the ranks of each do not
        return Mlp()

    with pytest.raises(ValueError, match=r"(?s)rank 2: '.*weight'.*sync_module_states"):
        yafsdp_cc.shard(build(), mesh=replicated())
    model = yafsdp_cc.shard(build(), mesh=replicated(), sync_module_states=True)
    torch.manual_seed(0)
    trains_on(model, Mlp(), square, [inputs()], within=1e-6)


@ranks(4)
def test_parameters_that_only_one_replica_uses() -> None:
    model, plain = twins(Choosy, mesh=replicated())
    steps = [[(x, rank // 2 == 0) for rank, x in enumerate(inputs(step=step))] for step in range(2)]
    trains_on(model, plain, square, steps, within=1e-6)


class Choosy(Mlp):
    def forward(self, x: Any) -> Any:
        x, which = x
        x = self.enter(x)
        for block in self.blocks:
            x = x + (block(x) if which else block(x).detach())
        return self.leave(x)


# -- second shards ----------------------------------------------------------------------------------------------------


@ranks(4)
def test_a_second_shard_is_gathered_from_until_weights_change() -> None:
    model, plain = twins(Transformer, reshard_after_forward=2)
    tokens = [torch.arange(12).view(2, 6) + rank for rank in range(4)]
    trains_on(model, plain, square, [tokens], within=1e-6)
    before = sent(model)
    square(model, mine(tokens)).backward()
    sent_as_planned(model, before)
    gathered = sent(model)[0]
    square(model, mine(tokens)).backward()  # the weights are the same: nothing comes from afar
    planned = yafsdp_cc.plan_of(model).communication
    assert sent(model)[0] - gathered < planned.gather_forward
    owned_as_planned(model)


class TwoEntrances(nn.Module):
    """Its first two units take turns in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.rest = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rest(self.one(x) + self.other(x))
        return out


@ranks(2)
def test_what_is_prefetched_is_not_gathered_twice() -> None:
    model, plain = twins(TwoEntrances, units=[nn.Sequential, "one", "other"])
    for step in range(3):
        before = sent(model)
        trains_on(model, plain, square, [inputs(step=step)], within=1e-6)
        sent_as_planned(model, before)


def between_embeddings() -> nn.Module:
    return nn.Sequential(nn.Embedding(512, 256), nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 512))


def hooked() -> nn.Module:
    model = between_embeddings()
    model[0].register_forward_hook(lambda module, _, output: output * module.weight.square().mean())
    return model


def normed() -> nn.Module:
    model = between_embeddings()
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[0])
    return model


class Squared(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * weight


def parametrized() -> nn.Module:
    model = between_embeddings()
    nn.utils.parametrize.register_parametrization(model[0], "weight", Squared())
    return model


def indices(step: int) -> list[torch.Tensor]:
    return [(each * 100).long().abs() % 512 for each in inputs(step=step)]


@pytest.mark.parametrize("build", [hooked, normed, parametrized])
@ranks(2)
def test_an_embedding_whose_backward_reads_weights_has_them(build: Any) -> None:
    model, plain = twins(build, units=["1", "2"])
    for step in range(2):
        trains_on(model, plain, square, [indices(step)], within=1e-5)


@ranks(2)
def test_an_embedding_is_not_gathered_for_its_backward() -> None:
    """The head has taken the one buffer of both, and the backward of an embedding reads no weights."""
    model, plain = twins(between_embeddings, units=["1", "2"])
    assert yafsdp_cc.plan_of(model).communication.gather_backward == 0
    for step in range(2):
        before = sent(model)
        trains_on(model, plain, square, [indices(step)], within=1e-6)
        sent_as_planned(model, before)
