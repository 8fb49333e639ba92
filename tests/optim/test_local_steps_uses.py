"""Local steps of ZeroOneAdam beside a scaler, micro-batches, parameters that some use, kept weights and the guard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import yafsdp_cc
from tests.optim.apart import BETAS, DECAY, are_alike, made, mesh_of, trained
from tests.optim.slopes import BLOCK, SHAPES, Slope, Slopes, drawn, weights
from tests.ranks import on_ranks
from tests.soak import also
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.optim import ZeroOneAdam


def beside_a_scaler() -> None:
    (plain, ours), (scaled, theirs) = made(2), made(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    yafsdp_cc.follow_scaler(scaled, scaler)

    def step(number: int, slopes: list[Tensor]) -> None:
        scaler.scale(scaled(slopes)).backward()
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()

    for number in range(1, 15):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.01 * number
        plain(drawn(number, dist.get_rank())).backward()
        ours.step()
        ours.zero_grad()
        step(number, drawn(number, dist.get_rank()))
    assert scaler.get_scale() > 1024
    assert all(one.equal(other) for one, other in zip(weights(plain), weights(scaled), strict=True))
    before, scale = weights(scaled), scaler.get_scale()
    first, *others = drawn(15, dist.get_rank())
    if dist.get_rank() == 3:  # in one replica, which makes steps by itself
        first[0, 0] = torch.inf
    step(15, [first, *others])
    assert scaler.get_scale() == scale / 2
    assert theirs.steps == 14
    assert all(one.equal(other) for one, other in zip(weights(scaled), before, strict=True))
    for number in range(15, 17):
        step(number, drawn(number, dist.get_rank()))
    assert are_alike(scaled, mesh_of(2))
    assert all(each.isfinite().all() for each in weights(scaled))


def test_a_scaler_changes_nothing_and_skips_a_step_in_all_replicas():
    on_ranks(4, beside_a_scaler)


def in_micro_batches() -> None:
    (once, ours), (twice, theirs) = made(2, "lossless"), made(2, "lossless")
    for step in range(1, 17):
        batches = [drawn(2 * step + half, dist.get_rank()) for half in range(2)]
        once([sum(parts) for parts in zip(*batches, strict=True)]).backward()
        for half, batch in enumerate(batches):
            twice.set_requires_all_reduce(half == 1)
            twice(batch).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(weights(once), weights(twice), strict=True))
    trained(twice, theirs, range(17, 20))
    twice.set_requires_all_reduce(False)
    twice(drawn(40, dist.get_rank())).backward()
    with pytest.raises(RuntimeError, match="replicas cannot meet while gradients of micro-batches"):
        theirs.meet()
    twice.set_requires_all_reduce(True)
    twice(drawn(41, dist.get_rank())).backward()
    theirs.step()
    assert are_alike(twice, mesh_of(2))


def test_micro_batches_are_one_step():
    on_ranks(4, in_micro_batches)


class Choosy(Slope):
    """Uses its weight only where a batch says so."""

    def forward(self, slope: Any) -> Tensor:
        found: Tensor = self.bias.sum() if slope is None else super().forward(slope)
        return found


def used_by_one() -> None:
    mesh, rank = mesh_of(2), dist.get_rank()
    compression = yafsdp_cc.Compression("onebit", residual="fp32", block=BLOCK)
    plain = Slopes()
    plain.parts = torch.nn.ModuleList(Choosy(shape) for shape in SHAPES)
    model: Any = yafsdp_cc.shard(plain, units=[Choosy], compression=compression, mesh=mesh)
    optimizer = ZeroOneAdam(model.parameters(), 1e-2, BETAS, refreshes=1, local_steps=4)
    start = weights(model)
    phases = []
    for step in range(1, 16):
        late, middle, last = drawn(step, rank)
        slopes = [late if step >= 10 and rank == 3 else None, middle if rank < 2 or step == 1 else None, last]
        phases.append(optimizer.phase.value)
        model(slopes).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = weights(model)
        assert now[0].equal(start[0]) is (step < 12), step
    # 1, 3, 7 and 15 by the rule with κ = 1; and after the meeting that follows the first use, by one rank in step 10.
    assert [step for step, phase in enumerate(phases, 1) if phase == "exact"] == [1, 3, 7, 12, 15]
    assert are_alike(model, mesh)
    counts = torch.stack([optimizer.state[each]["step"] for each in model.parameters()])
    most = counts.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert counts.equal(most)


def test_what_one_replica_uses_is_known_to_all_when_they_have_met():
    on_ranks(4, used_by_one)


def kept_whole() -> None:
    model, optimizer = made(2, zero_stage=2, compression={"weights": "int4"}, settings={"local_steps": 2})
    units = root_of(model).units

    def differ(step: int) -> list[bool]:
        """Whether whole weights that ranks keep are others than those of the shards."""
        trained(model, optimizer, range(step, step + 1))
        with torch.no_grad():
            model(drawn(0, 0))
        parts = [each.weight.full_tensor().flatten() for each in model.parts]
        wholes = [unit.home.wholes[0][: part.numel()] for unit, part in zip(units, parts, strict=True)]
        return [not whole.equal(part) for whole, part in zip(wholes, parts, strict=True)]

    trained(model, optimizer, range(1, 14))
    assert all(differ(14))
    assert not any(differ(15))  # they have met, and go on by themselves


def test_whole_weights_that_are_kept_are_alike_too_when_replicas_have_met():
    on_ranks(4, kept_whole)


def watched() -> None:
    model, optimizer = made(2, "int8", settings={"refreshes": 4, "local_steps": 16})
    for step in range(1, 125):
        model(drawn(0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 30:
            optimizer.meet()
    assert yafsdp_cc.counters_of(model).chosen == {}


def test_messages_of_many_steps_are_not_taken_for_gradients_that_grow():
    on_ranks(4, watched)


def further(codec: str, dtype: torch.dtype, compression: dict[str, Any]) -> None:
    """Many more steps, at first one and then up to 16 without a word."""
    mesh = mesh_of(2)

    def fresh(**more: Any) -> Any:
        return yafsdp_cc.shard(Slopes().to(dtype), units=[Slope], mesh=mesh, **more)

    exact, start = fresh(), [each.detach() for each in Slopes().parameters()]
    model = fresh(compression=yafsdp_cc.Compression(codec, block=BLOCK, **compression))
    settings: dict[str, Any] = {"lr": 1e-2, "betas": BETAS, "weight_decay": DECAY}
    ours = ZeroOneAdam(model.parameters(), **settings, refreshes=4, local_steps=16)
    theirs = torch.optim.AdamW(exact.parameters(), **settings)
    steps = 0
    while steps < 120 or ours.lead.are_apart:
        slopes = [each.to(dtype) for each in drawn(steps, dist.get_rank())]
        for each, optimizer in ((model, ours), (exact, theirs)):
            each(slopes).backward()
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
    assert are_alike(model, mesh)
    trios = zip(weights(exact), weights(model), start, strict=True)
    far = [float((a - b).norm() / (a - c).norm()) for a, b, c in trios]
    assert 0 < max(far) < (0.7 if codec == "powersgd" else 0.35), far


@pytest.mark.parametrize(
    ("codec", "dtype", "compression"),
    [
        ("onebit", torch.float32, {"residual": "int8"}),
        also("int8", torch.bfloat16, {"feedback": False}),
        also("powersgd", torch.float32, {}),
    ],
)
def test_replicas_go_where_adamw_goes(codec, dtype, compression):
    on_ranks(4, further, codec, dtype, compression)
