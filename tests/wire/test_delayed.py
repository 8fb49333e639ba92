"""Sums that land one backward late: the same ones, each once, whatever comes between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.engine import test_streams as programs
from tests.models import WIDTH, Mlp
from tests.optim.slopes import SETTINGS, Slope, Slopes, drawn, trained, weights
from tests.ranks import on_ranks
from tests.streams import streams
from tests.wire.delays import Account, alike, backward, found, late
from tests.wire.ledger import loss_of, sharded, unsaid
from yafsdp_cc import Compression
from yafsdp_cc.engine.module import root_of

# What lands, and when ------------------------------------------------------------------------------------------------


def as_without_but_later(codec: str, feedback: bool) -> None:
    model = sharded(late(codec, feedback=feedback))
    prompt = sharded(Compression(codec, residual="fp32", feedback=feedback))
    before: dict[str, Tensor | None] = dict.fromkeys(found(model))
    for step in range(5):
        landed = backward(model, step)
        assert alike(landed, before), step
        before = backward(prompt, step)
    counters = [yafsdp_cc.counters_of(each) for each in (model, prompt)]
    assert counters[0].reduced_bytes == counters[1].reduced_bytes


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("codec", ["int8", "onebit", "powersgd"])
def test_sums_are_those_of_the_backward_before_to_the_bit(world, codec):
    on_ranks(world, as_without_but_later, codec, True)


@pytest.mark.parametrize("world", [1, 2])
def test_so_they_are_without_feedback_and_with_one_rank(world):
    on_ranks(world, as_without_but_later, "int8", False)


def rounded(step: int, rank: int) -> list[Tensor]:
    """What bf16 says as it is."""
    return [each.bfloat16().float() for each in drawn(step, rank)]


def steps_by_hand() -> None:
    settings: dict[str, Any] = SETTINGS | {"foreach": False}
    model: Any = yafsdp_cc.shard(Slopes(), units=[Slope], compression=late("bf16"))
    plain: Any = Slopes()
    optimizers = [torch.optim.AdamW(each.parameters(), **settings) for each in (model, plain)]
    ranks = range(dist.get_world_size())
    for step in range(6):
        model(rounded(step, dist.get_rank())).backward()
        for index, part in enumerate(plain.parts):
            if step:
                part.weight.grad = torch.stack([rounded(step - 1, rank)[index] for rank in ranks]).mean(0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(weights(model)[::2], list(plain.parameters())[::2], strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def test_steps_are_those_of_the_optimizer_given_gradients_one_step_late():
    on_ranks(2, steps_by_hand)


def nobody_waits() -> None:
    model = sharded(late())
    for step in range(2):
        backward(model, step)
        for unit in root_of(model).units:
            encoded = root_of(model).reductions.encoded_of(unit.flats[0])
            assert encoded is not None
            assert encoded.late is not None
            assert encoded.late.is_under_way
            assert encoded._post._ticket.works


def test_nobody_has_waited_for_a_sum_at_the_end_of_a_backward():
    on_ranks(2, nobody_waits)


def some_delayed() -> None:
    model, prompt = sharded(late(delayed=("2.*", "4.weight"))), sharded("int8")
    before = found(prompt)
    for step in range(3):
        landed, now = backward(model, step), backward(prompt, step)
        truth = {"0.weight": now["0.weight"], "2.weight": before["2.weight"], "4.weight": before["4.weight"]}
        assert all((truth[name] is None) is (landed[name] is None) for name in truth)
        before = now


def test_a_parameter_that_is_not_named_is_not_late():
    on_ranks(2, some_delayed)


# Nothing is lost -----------------------------------------------------------------------------------------------------


def micro_batches(codec: str, held: bool) -> None:
    account = Account(sharded(late(codec)))
    for step in range(5):
        account.step(step, 3, held)
        account.check()


@pytest.mark.parametrize("held", [True, False], ids=["held", "sent"])
@pytest.mark.parametrize("codec", ["onebit", "topk"])
def test_all_that_is_due_lands_is_left_or_is_under_way(codec, held):
    on_ranks(2, micro_batches, codec, held)


class Some(Slopes):
    """Uses some of its parts."""

    def forward(self, slopes: list[Any]) -> Tensor:
        used = [part(slope) for part, slope in zip(self.parts, slopes, strict=True) if slope is not None]
        return torch.stack(used).sum()


def of_some() -> None:
    model: Any = yafsdp_cc.shard(Some(), units=[Slope], compression=late(feedback=False))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = drawn(0, rank)
    model([first[0] if rank else 0 * first[0], *first[1:]]).backward()
    model.zero_grad()
    model([None, *drawn(1, rank)[1:]]).backward()  # of all ranks
    gradient = model.parts[0].weight.grad.full_tensor()
    truth = sum(drawn(0, each)[0] for each in range(1, ranks)) / ranks
    assert (gradient - truth).abs().max() < 0.02
    model.zero_grad()
    model([None, *drawn(2, rank)[1:]]).backward()
    assert model.parts[0].weight.grad is None
    assert model.parts[1].weight.grad is not None


def test_what_a_backward_does_not_come_to_lands_at_its_end():
    on_ranks(2, of_some)


class Halves(Slope):
    """Two weights in one unit, of which one may go unused."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(shape)
        self.other = nn.Parameter(torch.randn(shape) / 10)

    def forward(self, slope: Tensor, other: bool = False) -> Tensor:
        total = super().forward(slope)
        return total + (self.other * slope).sum() if other else total


def by_one_rank_alone() -> None:
    torch.manual_seed(0)
    model: Any = yafsdp_cc.shard(nn.ModuleList([Halves((60, 40))]), units=[Halves], compression=late())
    rank = dist.get_rank()
    for step, used in enumerate([True, False, False, False]):
        model[0](drawn(step, rank)[0], used and rank == 1).backward()
        assert (model[0].other.grad is not None) is (step == 1), step
        if step == 1:
            truth = drawn(0, 1)[0] / 2
            assert (model[0].other.grad.full_tensor() - truth).abs().max() < 0.05
        model.zero_grad()


def test_gradients_are_told_of_late_where_one_rank_alone_has_some():
    on_ranks(2, by_one_rank_alone)


def interrupted() -> None:
    model, prompt = sharded(late(feedback=False)), sharded(Compression("int8", feedback=False))
    truth = [backward(prompt, step) for step in range(2)]
    backward(model, 0)
    backward(model, 1)

    def fail(*_: Any) -> None:
        raise KeyError

    handle = model[2].register_full_backward_pre_hook(fail)
    with pytest.raises(KeyError):
        loss_of(model, 2).backward()
    handle.remove()
    model.zero_grad()
    landed = backward(model, 3)
    assert landed["4.weight"] is None  # it had landed, and what was sent after it is dropped
    assert all(landed[name].equal(truth[1][name]) for name in ("0.weight", "2.weight"))
    assert all(each is not None for each in backward(model, 4).values())


def test_an_interrupt_drops_what_its_backward_has_sent_and_nothing_else():
    on_ranks(2, interrupted)


def changed_between() -> None:
    model, prompt = sharded(late("int4")), sharded(Compression("int4", residual="fp32"))
    before = None
    for step in range(6):
        landed = backward(model, step)
        assert before is None or alike(landed, before), step
        before = backward(prompt, step)
        for each in (model, prompt):
            if step in (1, 3):
                each.set_reshard_after_forward(step == 3)  # puts the engine together again
            for flat in (flat for unit in root_of(each).units for flat in unit.flats if step == 2):
                flat.codec = "bf16"  # as the guard does
                root_of(each).reductions.encode_anew(flat)


def test_sums_under_way_land_in_another_assembly_and_beside_another_codec():
    on_ranks(2, changed_between)


# Beside a GradScaler -------------------------------------------------------------------------------------------------


def scaled() -> None:
    model, with_scaler = sharded(late("onebit")), sharded(late("onebit"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    yafsdp_cc.follow_scaler(with_scaler, scaler)
    optimizers = [torch.optim.AdamW(each.parameters(), foreach=False) for each in (model, with_scaler)]
    for step in range(7):
        loss_of(model, step).backward()
        optimizers[0].step()
        scaler.scale(loss_of(with_scaler, step)).backward()
        scaler.step(optimizers[1])
        scaler.update()
        for each in optimizers:
            each.zero_grad()
    assert scaler.get_scale() == 8192
    assert all(a.equal(b) for a, b in zip(weights(model), weights(with_scaler), strict=True))


def test_sums_land_in_units_of_the_scale_that_there_is():
    on_ranks(2, scaled)


def not_finite() -> None:
    model: Any = yafsdp_cc.shard(Slopes(), units=[Slope], compression=late(block=64))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    yafsdp_cc.follow_scaler(model, scaler)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, range(2), scaler)
    before = weights(model)
    first, *others = drawn(2, dist.get_rank())
    if dist.get_rank() == 1:
        first[0, 0] = torch.inf
    scales = []
    for slopes in ([first, *others], drawn(3, dist.get_rank()), drawn(4, dist.get_rank())):
        scaler.scale(model(slopes)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        assert all(a.equal(b) for a, b in zip(before, weights(model), strict=True)) is (len(scales) < 3)
    assert scales == [512, 256, 256]  # of the bias at once, of the weight a step later
    assert all(each.isfinite().all() for each in (*weights(model), *unsaid(model).values()))


def test_what_is_not_finite_is_skipped_when_it_lands():
    on_ranks(2, not_finite)


# On CUDA's lanes ----------------------------------------------------------------------------------------------------


def on_streams(program: str) -> int:
    torch.manual_seed(0)
    with streams() as watched:
        model: Any = yafsdp_cc.shard(Mlp(4), compression=late())
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        getattr(programs, program)(model, optimizer, torch.randn(4, WIDTH))
    return watched.accesses


@pytest.mark.parametrize("program", ["steps", "accumulates", "interrupted"])
def test_nothing_races_on_streams(program):
    assert on_ranks(2, on_streams, program)[0] > 1000
