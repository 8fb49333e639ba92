"""Compressed sums by themselves, without an engine: plain-torch error feedback, and an account of all numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.compression import definition
from tests.ranks import on_ranks as on_kept_ranks
from yafsdp_cc import Compression
from yafsdp_cc.compression.all_reduce import CompressedAllReduce
from yafsdp_cc.compression.codec import codec_of, counts_of
from yafsdp_cc.compression.error_feedback import EF21, PlainBuffer, Recursion, Residual, other_chunks
from yafsdp_cc.compression.reduce_scatter import CompressedReduceScatter
from yafsdp_cc.compression.schedule import CompressionSchedule, Phase
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.engine.layout import Layout
from yafsdp_cc.engine.param import Divisor

# Streams of random numbers and scratch buffers are of a body alone.
on_ranks = partial(on_kept_ranks, fresh=True)
CPU = torch.device("cpu")
CODECS = ("fp32", "bf16", "fp8", "int8", "int4", "ternary", "onebit", "topk", "topk2bit", "powersgd")
SHAPES = ((37, 50), (111,), (64, 65), (3, 5, 7))


OWNERS: list[list[int]] = []
"""Who owns which shape whole; empty: chunks are equal."""


def layout() -> Layout:
    return Layout.of(SHAPES, dist.get_world_size(), owners=OWNERS)


def owned(body: Callable[..., None], *args: Any) -> None:
    """Run a body with shapes that lie whole on one rank each, of which the middle one of three has none."""
    last = dist.get_world_size() - 1
    OWNERS[:] = [[0], [0], [last], [last]]
    body(*args)


def context() -> CommContext:
    assert dist.group.WORLD is not None
    return CommContext(Communicator(dist.group.WORLD, CPU), ScratchBuffers(CPU), lambda kind, name: None)


def buffer(dtype: torch.dtype = torch.float32, whole: bool = False) -> PlainBuffer:
    """As of a reduce-scatter; ``whole``: of an all-reduce, in which ranks have the same chunk, the first of two."""
    world = dist.get_world_size()
    place, rank = (Layout.of(SHAPES, 2), 0) if whole else (layout(), dist.get_rank())
    return PlainBuffer("weight", place, rank, CPU, Divisor(world, CPU), reduce_dtype=dtype)


def gradients(place: Layout, step: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of a rank (None: of all ranks, summed in double precision), zero where there is no element."""
    if rank is None:
        return sum((gradients(place, step, each).double() for each in range(dist.get_world_size())), torch.zeros(()))
    draws = torch.Generator().manual_seed(100 * step + rank)
    whole = torch.zeros(place.numel)
    for extent in place.extents:
        whole[extent.offset : extent.end] = torch.randn(extent.numel, generator=draws)
    return whole.to(dtype)


def scheduled(codec: str, **more: Any) -> CompressionSchedule:
    return CompressionSchedule(Compression(codec, residual="fp32", **more))


def summed(compressed: Any, grads: Tensor) -> Tensor:
    """Return the sum of one pass [chunk] of either kind of collective."""
    for work in compressed.start(grads, async_op=True):
        work.wait()
    if isinstance(compressed, CompressedAllReduce):
        compressed.finish(grads)
        return grads
    total = torch.full((compressed.chunk,), float("nan"))
    for start, part in compressed.finish(grads):
        total[start : start + part.numel()] = part
    return total


def all_unsent(compressed: Any) -> Tensor:
    """Return what all ranks have not sent yet for this rank's chunk."""
    unsent: Tensor = compressed.unsent()
    dist.all_reduce(unsent)
    return (unsent if isinstance(compressed, CompressedAllReduce) else part_of(compressed, unsent)).double()


def made(kind: Any, schedule: CompressionSchedule, codec: str, dtype: torch.dtype = torch.float32) -> Any:
    compressed = kind(buffer(dtype, whole=kind is CompressedAllReduce), schedule, codec)
    compressed.bind(context())
    return compressed


def part_of(compressed: Any, whole: Tensor) -> Tensor:
    """Return the chunk of ``whole`` that this rank's sum is of."""
    first, last = compressed.flat.layout.starts[compressed.flat.rank :][:2]
    return whole[first:last]


def elements_of(compressed: Any, chunk: Tensor) -> Tensor:
    """Return a chunk without padding, where a codec may decode anything."""
    inside = torch.zeros(compressed.flat.layout.numel, dtype=torch.bool)
    for extent in compressed.flat.layout.extents:
        inside[extent.offset : extent.end] = True
    return chunk[part_of(compressed, inside)]


def is_close(found: Tensor, true: Tensor, tolerance: float = 3e-6) -> bool:
    return bool((found.double() - true.double()).norm() <= tolerance * true.double().norm())


# Against the definition


def against_definition() -> None:
    """Messages, residuals and sums in rank order, by ``error_feedback`` on every rank for all ranks."""
    world, rank, place = dist.get_world_size(), dist.get_rank(), layout()
    counts = counts_of(place, 256, CPU, range(rank, rank + 1))
    first, last = place.starts[rank : rank + 2]
    for codec, carry, dtype in itertools.product(CODECS[1:-1], (1.0, 0.5), (torch.float32, torch.bfloat16)):
        compressed = made(CompressedReduceScatter, scheduled(codec, carry=carry), codec, dtype)
        residuals = [Residual.zeros(1, place.chunks[rank], torch.float32, 256, CPU) for _ in range(world)]
        for step in range(3):
            found = summed(compressed, gradients(place, step, rank, dtype))
            due = torch.empty_like(found)
            own = gradients(place, step, rank, dtype)[first:last]
            messages = []
            for peer in range(world):
                if peer == rank:
                    continue
                kind, chunk = codec_of(codec), gradients(place, step, peer, dtype)[first:last]
                message = torch.zeros(1, kind.message_bytes(place.chunks[rank]), dtype=torch.uint8)
                definition.encode(
                    kind,
                    chunk.unsqueeze(0),
                    message,
                    counts=counts,
                    residual=residuals[peer],
                    recursion=Recursion(carry),
                )
                messages.append(message)
            definition.decode_sum(codec_of(codec), torch.cat(messages), own, rank, due)
            assert found.equal(due), (codec, carry, step)


@pytest.mark.parametrize("world", [2, 3])
def test_a_reduce_scatter_does_what_error_feedback_defines(world):
    on_ranks(world, against_definition)
    on_ranks(2, owned, against_definition)


def all_ranks_alike() -> None:
    for codec in CODECS:
        compressed = made(CompressedAllReduce, scheduled(codec), codec)
        for step in range(3):
            total = summed(compressed, part_of(compressed, gradients(Layout.of(SHAPES, 2), step, dist.get_rank())))
            others = [torch.empty_like(total) for _ in range(dist.get_world_size())]
            dist.all_gather(others, total)
            assert all(each.equal(total) for each in others), codec


def test_an_all_reduce_gives_all_ranks_the_same_bits():
    on_ranks(3, all_ranks_alike)


# Nothing is lost


def account(kind: Any, codecs: tuple[str, ...], switch: tuple[str, ...]) -> None:
    for codec in codecs:
        compressed, schedule = (made(kind, s := scheduled(codec), codec), s)
        place, true, found = compressed.flat.layout, torch.zeros(()), torch.zeros(())
        for step, then in enumerate(switch):
            compressed.set_codec(then or codec)
            for micro in range(3 if step == 1 and compressed.codec_name != "fp32" else 1):
                grads = gradients(place, 10 * step + micro, dist.get_rank())
                true = true + part_of(compressed, gradients(place, 10 * step + micro))
                if kind is CompressedAllReduce:
                    grads = part_of(compressed, grads).clone()
                elif micro < 2 and step == 1 and compressed.defers:
                    compressed.defer(grads)
                    continue
                found = found + summed(compressed, grads).double()
            assert is_close(elements_of(compressed, found + all_unsent(compressed)), elements_of(compressed, true))
        assert schedule.phase is Phase.ENCODED
        if codec not in ("fp32", "bf16"):
            assert all_unsent(compressed).norm() > 0 or not compressed.chunk


@pytest.mark.parametrize("world", [2, 4])
def test_what_was_summed_and_what_is_unsent_is_all(world):
    on_ranks(world, account, CompressedReduceScatter, CODECS, ("",) * 4)
    on_ranks(world, account, CompressedAllReduce, CODECS, ("",) * 4)


def test_what_was_summed_and_what_is_unsent_is_all_of_unequal_chunks():
    on_ranks(3, owned, account, CompressedReduceScatter, CODECS, ("",) * 4)


def test_changing_the_codec_loses_nothing():
    """Also to exact sums, the first of which adds the residuals, and to low rank and back."""
    on_ranks(3, account, CompressedReduceScatter, ("int4", "onebit"), ("", "powersgd", "fp32", "fp32", "bf16", "int4"))
    on_ranks(3, account, CompressedAllReduce, ("int4",), ("", "powersgd", "bf16", "int4"))
    switch = ("", "powersgd", "fp32", "fp32", "bf16", "int4")
    on_ranks(3, owned, account, CompressedReduceScatter, ("int4", "onebit"), switch)


def handed_over() -> None:
    compressed = made(CompressedReduceScatter, scheduled("auto"), "auto")
    assert compressed.is_tuned
    assert compressed.codec_name == "fp32"
    place, rank = layout(), dist.get_rank()
    assert is_close(summed(compressed, gradients(place, 0, rank)), part_of(compressed, gradients(place, 0)))
    compressed.set_codec("int4")
    summed(compressed, gradients(place, 1, rank))
    due = all_unsent(compressed)
    assert due.norm() > 0
    compressed.set_codec("fp32")
    assert is_close(all_unsent(compressed), due)
    assert is_close(summed(compressed, gradients(place, 2, rank)), part_of(compressed, gradients(place, 2)) + due)
    assert compressed.residual is None


def test_exact_sums_take_in_what_codecs_left_at_once():
    on_ranks(2, handed_over)
    on_ranks(3, handed_over)
    on_ranks(2, owned, handed_over)


# Differences (EF21)


def held_by_senders(compressed: Any) -> Tensor:
    """Return the sum over ranks of what each has sent so far of this rank's chunk."""
    if isinstance(compressed, CompressedAllReduce):
        dist.all_reduce(found := -compressed.residual.values[0])
        return found
    whole = torch.zeros(compressed.flat.layout.numel)
    for chunks in other_chunks(whole, compressed.flat.layout, compressed.flat.rank):
        chunks.values.copy_(-compressed.residual.of(chunks).load())
    dist.all_reduce(whole)
    return part_of(compressed, whole)


def differences(kind: Any) -> None:
    """Sums are those of ranks' estimates h ← h + D(C(g − h)), which owners hold as senders do, whatever happens."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for codec in ("int4", "topk", "bf16"):
        schedule = scheduled(codec, feedback="ef21")
        assert schedule.recursion == EF21
        compressed = made(kind, schedule, codec)
        place, made_of = compressed.flat.layout, codec_of(codec)
        senders = [peer for peer in range(world) if kind is CompressedAllReduce or peer != rank]
        chunk = part_of(compressed, gradients(place, 0, 0)).numel()
        estimates = torch.zeros(world, chunk)
        for step in range(4):
            alike = [gradients(place, 7, peer) + 0.01 * gradients(place, step, peer) for peer in range(world)]
            if step == 2 and rank == 0:
                alike[0][0 if kind is CompressedAllReduce else place.starts[-2]] = torch.inf  # of the last rank's chunk
            grads = alike[rank] if kind is CompressedReduceScatter else part_of(compressed, alike[rank]).clone()
            found = summed(compressed, grads.clone())
            assert is_close(compressed.estimate, held_by_senders(compressed), 1e-6), (codec, step)
            is_bad = torch.tensor(float(not found.isfinite().all()))
            dist.all_reduce(is_bad)
            assert bool(is_bad) == (step == 2)
            if step >= 2 or not chunk:
                continue
            for peer in senders:
                message = torch.zeros(1, made_of.message_bytes(chunk), dtype=torch.uint8)
                due = (part_of(compressed, alike[peer]) - estimates[peer]).unsqueeze(0)
                made_of.encode(due, None, message)
                made_of.decode(message, decoded := torch.empty_like(due))
                estimates[peer] += decoded[0]
            own = 0 if kind is CompressedAllReduce else part_of(compressed, alike[rank])
            assert is_close(found, estimates.sum(0) + own, 1e-5), (codec, step)
        true = gradients(place, 7) + 0.01 * gradients(place, 3)
        if codec == "int4" and chunk:  # one message of a gradient would be 0.12 off
            assert is_close(found, part_of(compressed, true), 0.02)
        assert not compressed.unsent().any()
        before = compressed.estimate.clone()
        compressed.rescale(4.0)
        assert compressed.estimate.equal(4 * before)
        assert is_close(compressed.estimate, held_by_senders(compressed), 1e-6)
        for work in compressed.start(grads, async_op=True):
            work.wait()
        compressed.reset()  # what was sent has come to no estimate
        assert not compressed.estimate.any()
        assert not compressed.residual.values.any()
        again = part_of(compressed, alike[rank]).clone() if kind is CompressedAllReduce else alike[rank]
        summed(compressed, again.clone())
        compressed.set_codec("fp32")
        assert is_close(summed(compressed, again), part_of(compressed, true))  # nothing was owed


def test_owners_hold_what_senders_have_encoded():
    on_ranks(3, differences, CompressedReduceScatter)
    on_ranks(3, owned, differences, CompressedReduceScatter)
    on_ranks(2, differences, CompressedAllReduce)


# Phases


def phases() -> None:
    """EXACT, KEPT, ENCODED and BOTH in any order; the exact mean is that of the gradients, whatever is encoded."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for kind, codec in itertools.product((CompressedReduceScatter, CompressedAllReduce), ("int4", "powersgd")):
        schedule = scheduled(codec, warmup_steps=1)
        compressed = made(kind, schedule, codec)
        place, true, found = compressed.flat.layout, torch.zeros(()), torch.zeros(())
        order = [Phase.EXACT, Phase.ENCODED, Phase.BOTH, Phase.KEPT, Phase.ENCODED, Phase.BOTH, Phase.EXACT]
        for step, phase in enumerate(order):
            schedule.phase = phase
            grads, due = gradients(place, step, rank), part_of(compressed, gradients(place, step))
            total = summed(compressed, part_of(compressed, grads).clone() if kind is CompressedAllReduce else grads)
            true, found = true + due, found + total.double()
            assert (compressed.exact_mean is not None) == phase.keeps_exact
            if phase.keeps_exact:
                assert is_close(compressed.exact_mean, due / world)
                compressed.exact_mean = None
            if not phase.encodes:
                assert is_close(total, due)
            assert is_close(elements_of(compressed, found + all_unsent(compressed)), elements_of(compressed, true))


@pytest.mark.parametrize("world", [2, 3])
def test_every_phase_sums_as_it_is_defined(world):
    on_ranks(world, phases)


def not_finite() -> None:
    """A rank's bad block reaches the owner as such; what no residual takes in is not lost in silence either."""
    place, rank = layout(), dist.get_rank()
    for codec, deferred in itertools.product(("int8", "powersgd"), (False, True)):
        compressed = made(CompressedReduceScatter, scheduled(codec), codec)
        summed(compressed, gradients(place, 0, rank))
        before = compressed.residual.values.clone()
        grads = gradients(place, 1, rank)
        if rank == 0:
            grads[place.starts[1]] = torch.inf  # of rank 1's chunk
        if deferred:
            compressed.defer(grads)
            grads = gradients(place, 2, rank)
        total = summed(compressed, grads)
        bad = torch.tensor(float(not total.isfinite().all()))
        dist.all_reduce(bad)
        assert bad > 0, (codec, deferred)
        assert compressed.residual.values.isfinite().all()
        if rank == 0 and codec == "int8" and not deferred:
            assert compressed.residual.values[0, :256].equal(before[0, :256])
        assert summed(compressed, gradients(place, 3, rank)).isfinite().all()


def test_what_is_not_finite_is_seen_and_poisons_no_residual():
    on_ranks(2, not_finite)


def alone() -> None:
    for codec in ("int4", "powersgd"):
        compressed = made(CompressedReduceScatter, scheduled(codec), codec)
        compressed.defer(gradients(layout(), 0, 0))
        total = summed(compressed, gradients(layout(), 1, 0))
        assert is_close(total, gradients(layout(), 0) + gradients(layout(), 1))
        compressed.set_codec("fp32")
        assert is_close(summed(compressed, gradients(layout(), 2, 0)), gradients(layout(), 2))


def test_a_rank_alone_sums_exactly():
    on_ranks(1, alone)


# The momentum form


def momentum(kind: Any) -> None:
    """With a codec that loses nothing, sums divided by the ranks are the moving average of the mean gradient."""
    rank, world, beta = dist.get_rank(), dist.get_world_size(), 0.8
    for share in (1 - beta, 1.0):
        schedule = scheduled("fp8")
        compressed = made(kind, schedule, "fp8")
        compressed._encoder.codec = codec_of("fp32")
        compressed._encoder._size = codec_of("fp32").message_bytes(compressed.chunk)
        compressed._encoder._sizes = [compressed._encoder._size] * world
        compressed._encoder.bind(compressed.context)
        schedule.beta, schedule.share = beta, share
        compressed.momentum = torch.zeros(compressed.chunk)
        place, average = compressed.flat.layout, torch.zeros(compressed.chunk).double()
        for step in range(5):
            grads = gradients(place, step, rank)
            due = part_of(compressed, gradients(place, step)) / world
            if step == 2 and kind is CompressedReduceScatter:
                compressed.defer(grads)
                grads = gradients(place, 9, rank)
                due += part_of(compressed, gradients(place, 9)) / world
            average = beta * average + share * due
            total = summed(compressed, part_of(compressed, grads).clone() if kind is CompressedAllReduce else grads)
            assert is_close(total / world, average, 1e-5), (share, step)


@pytest.mark.parametrize("kind", [CompressedReduceScatter, CompressedAllReduce])
def test_in_the_momentum_form_a_sum_is_the_momentum(kind):
    on_ranks(2, momentum, kind)


def compression_error() -> None:
    """The share that messages lose of noise without a residual, and none of what low rank can hold."""
    place, rank = layout(), dist.get_rank()
    for codec, lost in (("int8", 0.00005), ("int4", 0.016), ("onebit", 0.36)):
        compressed = made(CompressedReduceScatter, scheduled(codec), codec)
        error = compressed.watch()
        assert not error.seen
        summed(compressed, gradients(place, 0, rank))
        assert error.seen
        left, due, _ = error.sums.tolist()
        assert left / due == pytest.approx(lost, rel=0.3)
        compressed.compression_error = None
        summed(compressed, gradients(place, 1, rank))
        assert error.sums.tolist()[1] == due


def test_what_messages_lose_is_measured():
    on_ranks(2, compression_error)


def allocations() -> None:
    """After a first pass of everything, no buffer of the size of a chunk is made."""
    place, rank = layout(), dist.get_rank()
    compressed = made(CompressedReduceScatter, scheduled("int4"), "int4")
    grads = gradients(place, 0, rank)
    for _ in range(2):
        compressed.defer(grads)
        for work in compressed.start(grads, async_op=True):
            work.wait()
        for _ in compressed.finish(grads):
            pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        compressed.defer(grads)
        for work in compressed.start(grads, async_op=True):
            work.wait()
        for _ in compressed.finish(grads):
            pass
    assert max(event.cpu_memory_usage for event in profile.events()) < 4 * place.chunks[0]


def test_steady_state_allocates_nothing():
    on_ranks(2, allocations)
