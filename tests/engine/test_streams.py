"""The CUDA lane, whose streams and events are modelled on the CPU: whatever runs at once must not share bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import yafsdp_cc
from tests import internals
from tests.models import WIDTH, Checkpointed, Mlp
from tests.ranks import RankError, on_ranks, ranks
from tests.soak import also
from tests.streams import DEVICE, Clock, Collective, Stream, streams
from tests.twins import inputs, same_gradients, square, twins
from yafsdp_cc.engine.cuda_streams import CudaCommStream

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(3):
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def accumulates(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for synchronises in (True, False, False, True, True):
        model.set_requires_gradient_sync(synchronises)
        model(x).square().mean().backward()
        optimizer.step()


def evaluates(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(2):
        model.blocks[0][0].unshard(async_op=True)
        with torch.no_grad():
            model(x)
        steps(model, optimizer, x)


def unshards_in_vain(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    other = torch.cuda.Stream()
    for awaits in (False, True):
        for drop_on in (torch.cuda.current_stream(), other):
            loss = model(x).square().mean()  # its backward needs the shared buffers: unshard() takes overflow buffers
            handle = model.blocks[0][0].unshard(async_op=True)
            if awaits:
                handle.wait()
                other.wait_event(torch.cuda.current_stream().record_event())
            with torch.cuda.stream(drop_on):
                if awaits:
                    model.blocks[0][0].weight.sum()
                model.blocks[0][0].reshard()
            loss.backward()


def two_passes(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(2):
        (model(x).square().mean() + model(x + 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def to_the_input(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(2):
        x = x.detach().requires_grad_()
        torch.autograd.grad(model(x).square().mean(), x)
    steps(model, optimizer, x.detach())


def penalised(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    # In the middle of a backward, when the reduces of these weights are under way.
    late = [model.blocks[0][0].weight, model.leave.weight]
    model.enter.register_forward_hook(lambda *args: args[-1] + sum(p.pow(2).sum() + p.to_local().norm() for p in late))
    for _ in range(2):
        (model(x).square().mean() + late[0].full_tensor().norm()).backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def interrupted(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    def fail(_: Any) -> None:
        raise KeyError

    for _ in range(2):
        x = x.detach().requires_grad_()
        x.register_hook(fail)
        loss, inner = model(x).square().mean(), model.blocks[1].register_full_backward_hook(lambda *_: fail(None))  # type: ignore[union-attr,index]
        with pytest.raises(KeyError):
            loss.backward()
        inner.remove()
        steps(model, optimizer, x.detach())


PROGRAMS = [steps, accumulates, evaluates, unshards_in_vain, two_passes, to_the_input, penalised, interrupted]


def saves_the_network_between_replicas(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for sums in (False, True, False, False, True):
        model.set_requires_all_reduce(sums)
        model(x).square().mean().backward()
        if sums:
            optimizer.step()
            optimizer.zero_grad()


class FrozenFirst(Mlp):
    """The first block is larger than the others, and frozen."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        wide = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
        self.blocks[0] = wide.requires_grad_(False)


def unfreezes(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    steps(model, optimizer, x)
    model.blocks[0].requires_grad_(True)  # buffers that sums share grow in the middle of the next backward
    steps(model, optimizer, x)


def replicas_of(ranks: int) -> Any:
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))


def run(
    program: Callable[..., None],
    kind: type[nn.Module],
    policy: MixedPrecisionPolicy | None,
    apart: bool,
    replicates: bool = False,
    **options: Any,
) -> int:
    torch.manual_seed(0)
    if replicates:
        options["mesh"] = replicas_of(dist.get_world_size())
    with streams() as watched:
        model: Any = yafsdp_cc.shard(kind(4), mp_policy=policy, separate_reduce_group=apart, **options)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        program(model, optimizer, torch.randn(4, WIDTH))
    assert dist.is_initialized()
    return watched.accesses


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(
    ("policy", "kind", "world"),
    [
        (None, Mlp, 1),
        (None, Checkpointed, 2),
        (BF16, Checkpointed, 1),
        (BF16, Mlp, 2),
        also(None, Mlp, 2),
        also(None, Checkpointed, 1),
        also(BF16, Checkpointed, 2),
        also(BF16, Mlp, 1),
    ],
    ids=lambda value: "fp32" if value is None else "bf16" if value is BF16 else getattr(value, "__name__", value),
)
def test_nothing_races(policy: MixedPrecisionPolicy | None, kind: type[nn.Module], world: int, program: Any) -> None:
    assert on_ranks(world, run, program, kind, policy, world == 2)[0] > 1000


@pytest.mark.parametrize("program", [*PROGRAMS, saves_the_network_between_replicas])
@pytest.mark.parametrize("codec", ["none", also("int8")])
@pytest.mark.parametrize("world", [2, also(4)])
def test_nothing_races_with_replicas(world: int, codec: str, program: Any) -> None:
    options: dict[str, Any] = {"compression": codec} if codec != "none" else {}
    job = functools.partial(run, program, Mlp, BF16, False, True, **options)
    assert on_ranks(world, job)[0] > 1000


def test_unfreezing_races_with_no_sum_over_replicas() -> None:
    job = functools.partial(run, unfreezes, FrozenFirst, None, False, True, compression="int8")
    assert on_ranks(2, job)[0] > 1000


@ranks(4)
def test_only_the_end_of_a_backward_waits_for_sums_over_replicas() -> None:
    torch.manual_seed(0)
    with streams() as watched:
        model: Any = yafsdp_cc.shard(Mlp(6), mesh=replicas_of(4))
        square(model, torch.randn(4, WIDTH)).backward()
        loss = square(model, torch.randn(4, WIDTH))
        issued: list[tuple[str, Stream, Clock, Clock]] = []
        internals.watch_communicator(lambda kind, call: issued.append((kind, *watched.clocks_around(call))))
        loss.backward()
    *during, _, _ = issued  # the last two are the sums of the replicated parameters
    kinds = [kind for kind, *_ in during]
    assert kinds.count("all_reduce") == kinds.count("reduce_scatter") > 5
    assert kinds.count("all_gather") > 3
    for place, (kind, stream, _, after) in enumerate(during):
        if kind == "all_reduce":
            for other, _, before, _ in during[place + 1 :]:
                assert other == kind or before.get(stream, 0) < after[stream], f"{other} waits for a sum over replicas"


@ranks(2)
def test_one_rank_of_a_shard_exchanges_nothing_with_itself() -> None:
    with streams() as watched:
        model: Any = yafsdp_cc.shard(
            Mlp(2), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        )
        sharding = len(watched.collectives)
        square(model, torch.randn(4, WIDTH)).backward()
        assert {each.ranks for each in watched.collectives[sharding:]} == {(0, 1)}


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("factor", "accumulates"), [(4, "aten::add_"), (3, "aten::addcdiv_")])
@ranks(1)
def test_a_division_costs_no_more_than_the_copy_it_replaces(factor: int, accumulates: str, reduce: torch.dtype) -> None:
    """Between collectives a reduce launches what brings its sum to ``.grad``, divided and cast on the way."""
    with streams() as watched:
        policy = MixedPrecisionPolicy(reduce_dtype=reduce)
        model: Any = yafsdp_cc.shard(Mlp(6), mp_policy=policy, separate_reduce_group=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
        chunks = internals.chunk_numels(model)
        for move in ("aten::div", accumulates):  # the first gradient, and one added to it
            loss = square(model, torch.randn(4, WIDTH))
            watched.launches.clear()
            loss.backward()
            lane = next(on for on, name, _ in watched.launches if name == move and on is not watched.compute)
            launched = [(name, nbytes) for on, name, nbytes in watched.launches if on is lane]
            assert [name for name, _ in launched] == [move] * len(chunks)
            divisor = 0 if move == "aten::add_" else 4
            moved = sorted(nbytes for name, nbytes in launched if name == move)
            assert moved == sorted((reduce.itemsize + 4) * numel + divisor for numel in chunks)  # the sum, and .grad


@pytest.mark.parametrize("factor", [3.0, 4.0])
@ranks(1)
def test_gradients_are_divided_and_then_added(factor: float) -> None:
    model, plain = twins(Mlp)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
    truth: dict[str, Tensor] = {}
    for step in range(3):
        (x,) = inputs(step=step)
        square(model, x).backward()
        plain.zero_grad()
        square(plain, x).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            truth[name] = truth.get(name, 0) + parameter.grad / factor
    same_gradients(model, truth)


# -- the model itself -------------------------------------------------------------------------------------------------


def pinned(count: int = 4) -> Tensor:
    return torch.zeros(count, device="cpu", pin_memory=True)


def reads_before_the_copy() -> None:
    host = pinned()
    host.copy_(torch.ones(4), non_blocking=True)
    host.tolist()


def writes_before_the_copy() -> None:
    host = pinned()
    torch.ones(4).copy_(host, non_blocking=True)
    host.fill_(1.0)


def frees_what_another_stream_reads() -> None:
    x, side = torch.ones(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    del x
    torch.zeros(4)


def adds_gradients_of_another_stream() -> None:
    x, side = torch.ones(4, requires_grad=True), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = (x * 2).sum()
    y.backward()  # from a stream that has not waited for y


@pytest.mark.parametrize(
    "program",
    [reads_before_the_copy, writes_before_the_copy, frees_what_another_stream_reads, adds_gradients_of_another_stream],
    ids=lambda program: program.__name__,
)
def test_a_missing_wait_is_a_race(program: Callable[[], None]) -> None:
    with pytest.raises(RankError, match=r"are not in order|freed before"):
        on_ranks(1, watched_run, program)


def watched_run(program: Callable[[], None]) -> None:
    with streams():
        program()


def waits() -> None:
    """The same with what orders them."""
    host, event, side = pinned(), torch.cuda.Event(), torch.cuda.Stream()
    host.copy_(torch.ones(4), non_blocking=True)
    event.record()
    event.synchronize()
    assert host.tolist() == [1.0] * 4
    x = torch.ones(4, requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = (x * 2).sum()
    x.detach().record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    y.backward()
    gradient = x.grad
    assert gradient is not None
    gradient.record_stream(torch.cuda.current_stream())
    assert gradient.sum().item() == 8  # joined with this stream, and read by a host that waits
    assert torch.empty(4).isnan().all()
    del x, y
    torch.zeros(4)


@ranks(1)
def test_waits_are_seen() -> None:
    watched_run(waits)


@ranks(1)
def test_who_waits_lets_the_next_collective_begin() -> None:
    with streams() as model:
        comm: Any = CudaCommStream(DEVICE)
        first, second, caller = comm.handle(), comm.handle(), model.current
        other, ready = Stream(), torch.Event("cuda")
        with torch.cuda.stream(other):
            made = torch.ones(4)
            ready.record(other)

        def start(async_op: bool) -> Any:
            assert model.current is comm.side
            made.add_(1)
            return ()

        comm.issue(first, lambda _: ())
        comm.issue(second, start, after=ready)
        begun = dict(comm.side.clock)
        assert model.current is caller
        first.wait()
        assert caller.clock[other] == other.clock[other]  # what the second operation waits for is over,
        assert caller.clock.get(comm.side, 0) < begun[comm.side]  # and the second operation need not be
        second.wait()
        assert caller.clock[comm.side] == begun[comm.side]


def two_groups(swaps: bool) -> None:
    """Issues on two communicators, on one rank perhaps in the other order."""
    names = [dist.new_group([0, 1]).group_name for _ in range(2)]
    with streams() as watched:
        for number in (1, 0) if swaps and dist.get_rank() else (0, 1):
            watched.collectives.append(Collective(names[number], (0, 1), "allreduce_", 4))


def splits_on_its_own() -> None:
    """Makes a group by its own ranks alone."""
    with streams():
        if dist.get_rank() < 2:
            dist.new_group([0, 1], use_local_synchronization=True)


def skips_one() -> None:
    with streams():
        if dist.get_rank():
            dist.all_reduce(torch.ones(4), group=dist.new_group([1], use_local_synchronization=True))


def test_communicators_are_compared() -> None:
    on_ranks(2, two_groups, False)
    with pytest.raises(RankError, match="in different orders"):
        on_ranks(2, two_groups, True)
    with pytest.raises(RankError, match="ncclCommSplit"):
        on_ranks(3, splits_on_its_own)
    with pytest.raises(RankError, match="ncclCommSplit"):
        on_ranks(2, skips_one)


def shards_in_a_part() -> None:
    """Shards over two of three ranks, with a communicator of its own for reduces."""
    with streams():
        mesh = DeviceMesh("cpu", [0, 1])
        if dist.get_rank() < 2:
            model = yafsdp_cc.shard(Mlp(2), mesh=mesh, separate_reduce_group=True)
            model(torch.randn(4, WIDTH)).square().mean().backward()


def test_groups_of_a_part_of_the_ranks_are_not_split_from_all() -> None:
    on_ranks(3, shards_in_a_part)
