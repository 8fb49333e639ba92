"""Exact collectives in NCCL's arithmetic: sums in the dtype that is sent, in ring or tree order, on 2 to 512 ranks.

``tests/nccl.py`` plays the ranks; the truth is float64, and FSDP2's factors where the two differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

import yafsdp_cc
from tests.internals import set_nccl_sums, state_of
from tests.nccl import CPU, ORDERS, Hang, Nccl, Rank, ring, tree
from tests.ranks import ranks
from tests.soak import also
from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.engine.cuda_streams import comm_stream
from yafsdp_cc.engine.param import Divisor, ShardedGrad
from yafsdp_cc.engine.replicated import ReplicatedParams, usage_flags
from yafsdp_cc.ranks import checks
from yafsdp_cc.sharding.links import check_trial_exchange, refused_over_store

WORLDS = [2, 3, 4, 6, 7, 8, 16, 17, 24, 31, 47, 64, also(128), also(256), 512]
MANY = [2, 3, 7, 8, 24, 47, also(128), also(512)]
"""Of tests for which a rank does more than a sum."""
HALF = torch.float16
LOWEST_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}

every_order = pytest.mark.parametrize("order", ORDERS)
every_world = pytest.mark.parametrize("world", WORLDS)


def context_of(rank: Any) -> CommContext:
    return CommContext(Communicator(rank, CPU), ScratchBuffers(CPU), lambda kind, name: None)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean_of(rank: Any, grads: Tensor) -> Tensor:
    """This rank's chunk of the mean of all ranks' ``grads``, fp32, the way that a group's gradients take."""
    context = context_of(rank)
    reduce = ExactReduceScatter(grads.numel(), grads.dtype)
    reduce.bind(context)
    assert reduce.start(grads, False) == []
    buffer = torch.zeros(grads.numel() // rank.size())
    ShardedGrad(buffer, ()).add(reduce.finish(grads), Divisor(rank.size(), CPU), ())
    return buffer


def means(world: int, order: str, grads: Tensor) -> Tensor:
    """The mean of ``grads`` [world, n], n divisible by world, of all ranks together."""
    found = Nccl(world, ORDERS[order]).run(lambda rank: mean_of(rank, grads[rank.rank()].clone()))
    return torch.cat(found)


# The trial exchange --------------------------------------------------------------------------------------------------


def new_store() -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    return store


def tries(store: dist.HashStore, rank: Any) -> str:
    comm = Communicator(rank, CPU)
    check_trial_exchange([(comm, comm)], None, refused_over_store(store, "trial", comm.rank, comm.world))
    comm.all_reduce(torch.ones(comm.world), False)  # what comes next: it hangs where some ranks alone have raised
    return "works"


@every_order
@every_world
def test_the_trial_of_a_sound_backend_passes(world: int, order: str) -> None:
    assert Nccl(world, ORDERS[order]).run(partial(tries, new_store())) == ["works"] * world


def average(contributions: Tensor) -> Tensor:
    return ring(contributions) / contributions.shape[0]


def without_the_last_rank(contributions: Tensor) -> Tensor:
    return tree(contributions[:-1])


def with_a_rank_twice(contributions: Tensor) -> Tensor:
    return ring(contributions) + contributions[0]


def one_chunk_later(contributions: Tensor) -> Tensor:
    return ring(contributions).roll(1, 0)


def wrong_for_one_rank(contributions: Tensor) -> Tensor:
    total = ring(contributions)
    total[-1] -= contributions[0, -1]
    return total


def not_a_number(contributions: Tensor) -> Tensor:
    return ring(contributions) * math.nan


SOME = [2, 3, 8, 17, 64, also(128), also(256), also(512)]
BROKEN = [average, without_the_last_rank, with_a_rank_twice, one_chunk_later, wrong_for_one_rank, not_a_number]


@pytest.mark.parametrize("add", BROKEN)
@pytest.mark.parametrize("world", SOME)
def test_the_trial_of_a_broken_backend_fails_on_every_rank(world: int, add: Callable[[Tensor], Tensor]) -> None:
    found = Nccl(world, add).run(partial(tries, new_store()))
    assert [type(each) for each in found] == [ValueError] * world, found
    assert all("broken backend?" in str(each) for each in found)


def test_the_other_ranks_hear_which_rank_refuses() -> None:
    found = Nccl(8, wrong_for_one_rank).run(partial(tries, new_store()))
    message = "a trial sum of torch.float32 over 8 ranks gave 0.0 rather than 1.0 in element 0, and 2 of 32 are wrong"
    assert [str(each).startswith("rank 7: ") for each in found] == [True] * 7 + [False]
    assert all(message in str(each) for each in found)


def test_a_trial_can_be_repeated() -> None:
    store = new_store()

    def twice(rank: Rank) -> list[str]:
        return [tries(store, rank), tries(store, rank)]

    assert Nccl(5).run(twice) == [["works", "works"]] * 5
    found = Nccl(5, average).run(partial(tries, store))
    assert [type(each) for each in found] == [ValueError] * 5
    assert Nccl(5).run(partial(tries, store)) == ["works"] * 5


def test_a_gather_in_the_wrong_order_is_found() -> None:
    class Shuffled(Nccl):
        def _compute(self, calls: Any) -> None:
            super()._compute(calls)
            if calls[0].key[0] == "all-gather":
                calls[2].output.copy_(calls[2].output.view(self.world, -1).roll(128, 0).view(-1))

    found = Shuffled(256).run(partial(tries, new_store()))
    assert [type(each) for each in found] == [ValueError] * 256
    assert all("a trial all-gather of torch.float32" in str(each) for each in found)


def test_a_backend_that_raises_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_TIMEOUT", 0.1)

    def body(store: dist.HashStore, rank: Any) -> None:
        comm = Communicator(rank, CPU)
        if comm.rank == 2:
            # One rank alone is to fail, before it meets the others.
            comm.all_gather = no_device  # type: ignore[method-assign]
        check_trial_exchange([(comm, comm)], None, refused_over_store(store, "trial", comm.rank, comm.world))

    def no_device(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such device")

    *others, found = Nccl(3).run(partial(body, new_store()))
    assert isinstance(found, ValueError)
    assert "backend 'nccl' cannot carry torch.float32 tensors" in str(found)
    assert "no such device" in str(found)
    assert [type(each) for each in others] == [Hang] * 2  # until the watchdog of NCCL ends them


def expects_ranks_plus_one(rank: Any) -> None:
    """The first rule that this project had, which demanded an exact sum of numbers that bf16 cannot add up."""
    comm, world = Communicator(rank, CPU), rank.size()
    whole = torch.zeros(world * 32, dtype=torch.bfloat16)
    comm.all_gather(whole, torch.full((32,), float(comm.rank + 1), dtype=torch.bfloat16), False)
    comm.reduce_scatter(whole, False)
    found = comm.own_chunk(whole).tolist()
    if found != [float(world * (comm.rank + 1))] * 32:
        raise ValueError("a broken backend?")
    comm.all_reduce(torch.ones(world), False)


@pytest.mark.parametrize(("world", "failing"), [(2, 0), (8, 0), (16, 0), (17, 1), (24, 6), (32, 16), (64, 47)])
def test_what_the_first_rule_reported(world: int, failing: int) -> None:
    """It took sound backends of 17 ranks and more for broken ones, on some ranks; the others waited for these."""
    found = Nccl(world).run(expects_ranks_plus_one)
    assert [type(each) for each in found].count(ValueError) == failing
    assert [type(each) for each in found].count(Hang) == (world - failing if failing else 0)


# Means ---------------------------------------------------------------------------------------------------------------


def fsdp2_factors(world: int, dtype: torch.dtype) -> tuple[float, float]:
    """What FSDP2 divides by before and after the sum; over NCCL, an average multiplies by 1/N in the dtype sent."""
    group: Any = SimpleNamespace(size=lambda: world)
    before, after, op, _ = _get_gradient_divide_factors(group, None, dtype, "cuda")
    if before is None:
        assert op == dist.ReduceOp.AVG
        return 1 / torch.tensor(1 / world, dtype=dtype).item(), 1.0
    return before, after or 1.0


def fsdp2_means(world: int, order: str, grads: Tensor) -> Tensor:
    before, after = fsdp2_factors(world, grads.dtype)
    sums = ORDERS[order]((grads * (1 / before)).view(world, world, -1))
    return (sums.view(-1) / after).float()


def error_of(found: Tensor, grads: Tensor) -> float:
    """The relative root mean square error of the mean."""
    truth = grads.double().mean(0)
    return ((found.double() - truth).square().mean() / truth.square().mean()).sqrt().item()


@every_order
@pytest.mark.parametrize("world", [*WORLDS[:-1], also(512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_means_are_no_worse_than_those_of_fsdp2(dtype: torch.dtype, world: int, order: str) -> None:
    for make in (torch.clone, torch.abs):  # of either sign, and all of one
        ours, theirs = 0.0, 0.0
        for octave in (0, 0.25, 0.5, 0.75):  # where a sum lies between two powers of two sets how much is rounded off
            grads = make(drawn(world, world, world * max(4, 1024 // world))).mul(2**octave).to(dtype)
            ours += error_of(means(world, order, grads), grads) / 4
            theirs += error_of(fsdp2_means(world, order, grads), grads) / 4
        assert ours <= 1.05 * math.hypot(theirs, 2.0**-25), (ours, theirs)  # the division itself rounds, to fp32
        hops = world if order == "ring" else world.bit_length()
        assert ours <= 2.0 ** -LOWEST_BITS[dtype] * hops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_fp16_is_scaled(dtype: torch.dtype) -> None:
    huge = torch.finfo(dtype).max / 16
    grads = torch.full((8, 16), huge, dtype=dtype)
    assert means(8, "ring", grads).equal(torch.full((16,), huge))
    least = torch.finfo(dtype).smallest_normal
    assert means(8, "ring", grads.fill_(least)).equal(torch.full((16,), least))


@every_order
@every_world
def test_a_mean_in_fp16_does_not_overflow_where_the_sum_does(world: int, order: str) -> None:
    value = 60_000 / math.sqrt(world)
    grads = torch.full((world, world * 2), value, dtype=HALF)
    assert grads[0, 0] * world == math.inf
    assert means(world, order, grads).sub(value).abs().max() <= 2.0**-9 * value * (math.sqrt(world) + 1)


def test_fp16_has_the_range_that_fsdp2_gives_it() -> None:
    """A loss scale that works with FSDP2 works here: the factor is never smaller, and the same for powers of two."""
    for world in range(2, 1025):
        reduce = ExactReduceScatter(world, HALF)
        reduce.bind(context_of(Nccl(world).rank(0)))
        before, _ = fsdp2_factors(world, HALF)
        assert before <= reduce._scale < 2 * math.sqrt(world)
        assert reduce._scale == before or world.bit_count() > 1


@every_order
@pytest.mark.parametrize("world", [2, 8, 17, 64])
def test_small_gradients_in_fp16_lose_no_more_than_the_scale_takes(world: int, order: str) -> None:
    grads = drawn(world, world, world * 8).mul(1e-5).to(HALF)
    reduce = ExactReduceScatter(world, HALF)
    reduce.bind(context_of(Nccl(world).rank(0)))
    worst = (means(world, order, grads).double() - grads.double().mean(0)).abs().max()
    assert worst <= 2.0**-25 * reduce._scale  # half of the distance of subnormal numbers


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [8, 17])
def test_a_sum_in_bf16_is_divided_with_the_bits_of_one_that_is_cast_first(world: int, of: torch.dtype) -> None:
    """As CUDA devices do it, which cast within the kernel: the first gradient, and another one added to it."""
    grads = drawn(world, 2, world, world * 8).to(torch.bfloat16)

    def body(rank: Any, casts: bool) -> Tensor:
        divisor, buffer = Divisor(rank.size(), CPU), torch.zeros(8, dtype=of)
        divisor.casts = not casts
        reduce = ExactReduceScatter(world * 8, torch.bfloat16, casts=casts)
        reduce.bind(context_of(rank))
        sharded = ShardedGrad(buffer, ())
        for step, add in enumerate((sharded._set, sharded._add)):
            own = grads[step, rank.rank()].clone()
            reduce.start(own, False)
            ((_, total),) = reduce.finish(own)
            assert total.dtype == (torch.float32 if casts else torch.bfloat16)
            add(buffer, total, divisor)
        return buffer

    cast, as_sent = (torch.cat(Nccl(world).run(partial(body, casts=casts))) for casts in (True, False))
    assert cast.equal(as_sent)
    assert error_of(cast, grads.double().sum(0)) < 0.02


def test_sums_in_bf16_stop_growing() -> None:
    """A ring of 512 ranks adds 1 to 256 in vain, with FSDP2's average as with a sum: reduce in fp32 instead."""
    ones = torch.ones(512, 512, dtype=torch.bfloat16)
    half = torch.full((512,), 0.5)
    assert means(512, "ring", ones).equal(half)
    assert fsdp2_means(512, "ring", ones).equal(half)
    assert means(512, "tree", ones).equal(torch.ones(512))
    assert means(512, "ring", ones.float()).equal(torch.ones(512))


@every_order
@pytest.mark.parametrize("world", [2, 3, 8, 17, 64, also(512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_one_rank_has_not_finite_no_rank_takes_for_finite(dtype: torch.dtype, world: int, order: str) -> None:
    grads = drawn(world, world, world * 4).to(dtype)
    chunks = grads.view(world, world, 4)
    for owner in range(world):
        chunks[(owner + 1) % world, owner, 0] = math.nan
        chunks[(owner + world // 2) % world, owner, 1] = math.inf
        chunks[owner, owner, 2], chunks[owner - 1, owner, 2] = math.inf, -math.inf
    found = means(world, order, grads).view(world, 4)
    assert found[:, 0].isnan().all()
    assert (found[:, 1] == math.inf).all()
    assert found[:, 2].isnan().all()
    assert found[:, 3].isfinite().all()


# Replicated parameters and flags --------------------------------------------------------------------------------------


def reduce_replicated(world: int, add: Any) -> None:
    """Every rank's replicated parameters and flags through one reduction, against float64."""
    models = [yafsdp_cc.shard(nn.Sequential(nn.LayerNorm(7), nn.LayerNorm(33, bias=False))) for _ in range(world)]
    grads = drawn(world, world, 47)

    def body(rank: Any) -> tuple[list[Tensor], list[float]]:
        index = rank.rank()
        flats = state_of(models[index]).replicated.flats
        for flat in flats:
            flat.divisor = Divisor(world, CPU)
        params = [param for flat in flats for param in flat.params]
        for number, param in enumerate(params):
            param.index = number
        used = {param: (index + number) % 3 == 0 for number, param in enumerate(params)}
        flags = usage_flags(used, len(params), lambda param: False)
        sums = ReplicatedParams(flats, len(flags), context_of(rank), comm_stream(CPU), None)
        sums.accumulate_grads(params, [each.view(-1) for each in grads[index].split([7, 7, 33])])
        totals = sums.all_reduce(flags).tolist()
        sums.add_to_grads()
        return [param.parameter.grad.to_local() for param in params], totals

    found = Nccl(world, add).run(body)
    for error in found:
        if isinstance(error, Exception):
            raise error
    truth = grads.double().mean(0)
    for means_of_rank, counts in found:
        assert counts == [sum((index + number) % 3 == 0 for index in range(world)) for number in range(3)]
        assert all(one.equal(other) for one, other in zip(means_of_rank, found[0][0], strict=True))
        assert (torch.cat(means_of_rank).double() - truth).abs().max() <= 2.0**-20


@every_order
@pytest.mark.parametrize("world", MANY)
@ranks(1)
def test_replicated_parameters_and_flags(world: int, order: str) -> None:
    reduce_replicated(world, ORDERS[order])


# Messages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 17, 64, also(512)])
def test_messages_to_each_other_rank(world: int) -> None:
    """Nothing goes to the rank itself: its own split is empty."""

    def message(sender: int, receiver: int) -> Tensor:
        return torch.tensor([sender % 256, sender // 256, receiver % 256, receiver // 256, 7], dtype=torch.uint8)

    def body(rank: Any) -> bool:
        comm = Communicator(rank, CPU)
        peers = [peer for peer in range(world) if peer != comm.rank]
        received = torch.zeros(world - 1, 5, dtype=torch.uint8)
        comm.exchange(received, torch.stack([message(comm.rank, peer) for peer in peers]), False)
        return received.equal(torch.stack([message(peer, comm.rank) for peer in peers]))

    assert Nccl(world).run(body) == [True] * world


@pytest.mark.parametrize("world", [2, 3, 17, 64])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn]
)
def test_gathers_of_every_dtype(dtype: torch.dtype, world: int) -> None:
    shards = drawn(world, world, 6).mul(9).round().to(dtype)

    def body(rank: Any) -> bool:
        comm = Communicator(rank, CPU)
        output = torch.zeros(world * 6).to(dtype)
        comm.all_gather(output, shards[comm.rank], False)
        return output.view(torch.uint8).equal(shards.view(-1).view(torch.uint8))

    assert Nccl(world).run(body) == [True] * world


@pytest.mark.parametrize("world", [2, 3, 17, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_all_to_all_is_summed_in_rank_order(dtype: torch.dtype, world: int) -> None:
    """The way of backends without NCCL's reduce-scatter: in fp32 and not scaled, bit for bit."""
    grads = drawn(world, world, world * 5).mul(20_000).to(dtype)

    def body(rank: Any) -> Tensor:
        context = context_of(rank)
        context.comm.reduces_in_place = False
        reduce = ExactReduceScatter(world * 5, dtype)
        reduce.bind(context)
        own = grads[context.comm.rank].clone()
        reduce.start(own, False)
        return torch.cat([part.clone() for _, part in reduce.finish(own)])

    truth = torch.zeros(world * 5)
    for each in grads:
        truth += each.float()
    assert torch.cat(Nccl(world).run(body)).equal(truth)


# The engine on gloo ranks that add as NCCL does -----------------------------------------------------------------------


@every_order
@ranks(4)
def test_fp16_gradients_of_a_model_whose_sum_would_overflow(order: str) -> None:
    set_nccl_sums(ORDERS[order])
    policy = MixedPrecisionPolicy(param_dtype=HALF)
    model = yafsdp_cc.shard(
        nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))), units=[nn.Linear], mp_policy=policy
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1 / 64)
    inputs = torch.full((1, 64), 30_000.0 + dist.get_rank())
    model(inputs).sum().backward()
    for parameter in model.parameters():
        grad = parameter.grad.to_local()
        assert (grad / 30_000 - 1).abs().max() <= 0.01


@ranks(3)
def test_a_backend_that_gives_one_rank_a_wrong_sum_is_refused_by_all() -> None:
    set_nccl_sums(wrong_for_one_rank)
    with pytest.raises(ValueError, match=r"rank 2: a trial sum|^a trial sum"):
        yafsdp_cc.shard(nn.Linear(64, 64, bias=False), units=[nn.Linear])


@every_order
@ranks(2)
def test_a_gradient_of_one_rank_that_is_not_finite_skips_the_step_of_all(order: str) -> None:
    set_nccl_sums(ORDERS[order])
    policy = MixedPrecisionPolicy(param_dtype=HALF)
    model = yafsdp_cc.shard(nn.Linear(64, 64, bias=False), units=[nn.Linear], mp_policy=policy)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    inputs = torch.ones(1, 64)
    if dist.get_rank() == 1:
        inputs[0, 0] = math.inf
    scaler.scale(model(inputs).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(one.equal(other.to_local()) for one, other in zip(before, model.parameters(), strict=True))


@ranks(4)
def test_replicas_hear_of_a_wrong_sum_among_other_ranks() -> None:
    mesh_of_replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    set_nccl_sums(wrong_for_one_rank if dist.get_rank() < 2 else ring)
    with pytest.raises(ValueError, match=r"a trial sum of torch\.float32 over 2 ranks"):
        yafsdp_cc.shard(nn.Linear(64, 64, bias=False), units=[nn.Linear], mesh=mesh_of_replicas)


@ranks(2)
def test_a_wrong_sum_over_replicas_is_refused() -> None:
    mesh_of_replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    set_nccl_sums(ring)
    # Leaves each replica its own summand, so that the sum over replicas is wrong, and no other.
    Communicator.all_reduce = lambda self, tensor, async_op: ()  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"a trial sum over replicas of torch\.float32 over 2 ranks"):
        yafsdp_cc.shard(nn.Linear(64, 64, bias=False), units=[nn.Linear], mesh=mesh_of_replicas)


@every_order
@ranks(4)
def test_fp16_gradients_with_replicas(order: str) -> None:
    set_nccl_sums(ORDERS[order])
    mesh_of_replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=HALF)
    model = yafsdp_cc.shard(nn.Linear(64, 64, bias=False), units=[nn.Linear], mp_policy=policy, mesh=mesh_of_replicas)
    model(torch.full((1, 64), 40_000.0 + 100 * dist.get_rank())).sum().backward()
    (parameter,) = model.parameters()
    assert (parameter.grad.to_local() / 40_150 - 1).abs().max() <= 0.01


# Chunks that are not equal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, HALF])
def test_unequal_chunks_are_summed_at_their_owners_and_gathered_from_them(dtype: torch.dtype) -> None:
    """Whole numbers, whose sums no order rounds; one rank owns nothing."""
    chunks = (5, 0, 9, 2)
    grads = drawn(0, 4, 16).mul(4).round().to(dtype)

    def body(rank: Any) -> tuple[Tensor, Tensor]:
        context = context_of(rank)
        reduce = ExactReduceScatter(16, dtype, chunks=chunks)
        reduce.bind(context)
        whole = grads[rank.rank()].clone()
        reduce.start(whole, False)
        total = torch.zeros(chunks[rank.rank()])
        for start, part in reduce.finish(whole):
            total[start : start + part.numel()] = part
        gathered = torch.full((16,), -1.0, dtype=dtype)
        own = context.comm.own_chunk(gathered, chunks).copy_(total)
        context.comm.all_gather(gathered, own, False, chunks)
        assert reduce.sent_bytes == reduce.planned_bytes() == (16 - len(total)) * dtype.itemsize
        return total, gathered

    found = Nccl(4, ring).run(body)
    true = grads.float().sum(0)
    assert torch.cat([total for total, _ in found]).equal(true)
    assert all(gathered.float().equal(true) for _, gathered in found)
