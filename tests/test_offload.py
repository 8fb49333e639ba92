"""Shards in host memory. On CPUs the same code runs as on GPUs: the same copies, through the same room, and the same
waits; so numbers are held against those of an engine that offloads nothing, and the order of things against streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import yafsdp_cc
from tests import internals
from tests.checkpoint.jobs import contents, grouped, same, train
from tests.engine import test_streams
from tests.engine.test_streams import BF16, steps
from tests.fully_shard import programs as fsdp2
from tests.fully_shard.run import Run
from tests.internals import set_staging_bytes
from tests.models import VOCABULARY, WIDTH, Checkpointed, Mlp, Transformer
from tests.ranks import RankError, on_ranks, ranks
from tests.streams import streams
from tests.twins import seeded

OFFLOADED = CPUOffloadPolicy()


# -- numbers ----------------------------------------------------------------------------------------------------------


@contextmanager
def offloading() -> Iterator[None]:
    """``yafsdp_cc.fully_shard`` offloads unless told otherwise."""
    plain = yafsdp_cc.fully_shard

    def fully_shard(module: Any, **options: Any) -> Any:
        return plain(module, **{"offload_policy": OFFLOADED, **options})

    yafsdp_cc.fully_shard = fully_shard
    try:
        yield
    finally:
        yafsdp_cc.fully_shard = plain


def keeps_gradients(api: Any) -> Run:
    """Zeroes them in place, holds on to some, replaces others."""
    run = Run(api)
    kept = []
    for step in range(3):
        run.backward()
        kept.append(run.model.head.weight.grad)
        run.look()
        run.optimizer.zero_grad(set_to_none=step == 1)
        run.backward()
        run.model.blocks[0].up.weight.grad = run.model.blocks[0].up.weight.grad * 2
        run.model.blocks[1].up.weight.grad = None
        run.backward()
        run.step()
    run.figures |= {f"kept {step}": gradient.full_tensor() for step, gradient in enumerate(kept)}
    return run


def offloads_in_part(api: Any) -> Run:
    model: Any = seeded(Transformer)
    for index, block in enumerate(model.blocks):
        api.fully_shard(block, **({"offload_policy": OffloadPolicy()} if index == 1 else {}))
    api.fully_shard(model)
    run = Run.of_sharded(api, model)
    run.steps()
    return run


def divides_beforehand(api: Any) -> Run:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = seeded(Transformer)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        api.fully_shard(block, mesh=mesh["dp"])
    api.fully_shard(model, mesh=mesh["dp"])
    run = Run.of_sharded(api, model)
    run.steps()
    return run


PROGRAMS = [
    [fsdp2.in_bf16, fsdp2.tied, keeps_gradients, offloads_in_part, fsdp2.with_frozen_parameters],
    [fsdp2.accumulates_without_communication, fsdp2.accumulates_without_the_end, fsdp2.from_meta],
    [fsdp2.unshards_by_hand, fsdp2.changes_its_mind_about_resharding],
]
ON_MESHES = [fsdp2.with_replicas_summed_at_the_end, fsdp2.gathers_from_a_second_shard, divides_beforehand]


@pytest.mark.parametrize("programs", PROGRAMS, ids=lambda programs: programs[0].__name__)
def test_numbers_are_those_without(programs: list[Any]) -> None:
    on_ranks(2, _side_by_side, programs)


def test_numbers_are_those_without_on_other_meshes() -> None:
    on_ranks(4, _side_by_side, ON_MESHES)


def _side_by_side(programs: list[Any]) -> None:
    set_staging_bytes(1 << 13)  # less than a shard
    for program in programs:
        truth = program(yafsdp_cc).done()
        with offloading():
            run = program(yafsdp_cc)
        assert yafsdp_cc.plan_of(run.model).host_bytes > 0
        found = run.done()
        assert found.keys() == truth.keys(), found.keys() ^ truth.keys()
        different = [name for name in truth if not found[name].equal(truth[name])]
        assert not different, f"{program.__name__}: {different}"


def compressed(offload: OffloadPolicy) -> list[Tensor]:
    model: Any = seeded(Transformer)
    compression = yafsdp_cc.Compression(gradients="int4", weights="int8")
    yafsdp_cc.shard(model, compression=compression, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        draws = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randint(VOCABULARY, (2, 12), generator=draws)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


@ranks(2)
def test_numbers_are_those_without_where_weights_and_gradients_are_encoded() -> None:
    set_staging_bytes(1 << 13)
    truth, found = compressed(OffloadPolicy()), compressed(OFFLOADED)
    assert all(one.equal(other) for one, other in zip(truth, found, strict=True))


def owned(offload: OffloadPolicy) -> list[Tensor]:
    model: Any = nn.Sequential(nn.Linear(64, 64, bias=False))
    nn.init.constant_(model[0].weight, 0.1)
    options: Any = {"zero_stage": 2, "mp_policy": BF16, "offload_policy": offload}
    yafsdp_cc.shard(model, units=[model[0]], ownership=["0.weight"], **options)
    assert dist.get_rank() == 0 or not model[0].weight.to_local().numel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.full((2, 64), 1.0 + dist.get_rank())).float().square().mean().backward()
        optimizer.step()
    return [model[0].weight.full_tensor()]


@ranks(2)
def test_numbers_are_those_without_where_a_rank_owns_no_weights() -> None:
    assert owned(OFFLOADED)[0].equal(owned(OffloadPolicy())[0])


# -- the order of copies ----------------------------------------------------------------------------------------------


def edits(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Writes to parameters and gradients wherever that is allowed."""
    parameters = list(model.parameters())
    for _ in range(2):
        with torch.no_grad():
            model(x)
            torch._foreach_mul_(parameters, 0.99)
        model(x)  # without a backward
        with torch.no_grad():
            torch._foreach_mul_(parameters, 0.99)
        model.blocks[0][0].unshard()
        with torch.no_grad():
            torch._foreach_mul_(parameters, 0.99)
        model.blocks[1][0].unshard(async_op=True)
        model(x).square().mean().backward()
        for parameter in parameters:
            parameter.grad.mul_(0.5)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.set_is_last_backward(False)
        model(x).square().mean().backward()
        model.set_is_last_backward(True)
        model(x).square().mean().backward()
        assert all(parameter.full_tensor().isfinite().all() for parameter in parameters)
        optimizer.zero_grad()


def run(program: Callable[..., None], kind: type[nn.Module], policy: MixedPrecisionPolicy | None) -> int:
    """How many copies between host and device a program makes."""
    set_staging_bytes(1 << 10)
    torch.manual_seed(0)
    with streams() as watched:
        model: Any = yafsdp_cc.shard(kind(4), mp_policy=policy, offload_policy=OFFLOADED)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        cut = watched.blocks
        program(model, optimizer, torch.randn(4, WIDTH))
        # None of them stops the host but three norms, which go to the device to be summed, and back, and what ranks
        # exchange once, before the first forward.
        assert program is not steps or watched.blocks == cut + 6 + 2
    return watched.crossings


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_races(world: int) -> None:
    assert min(on_ranks(world, _each, world)[0]) > 100


def _each(world: int) -> list[int]:
    if world == 1:
        return [run(program, Mlp, None) for program in (edits, test_streams.two_passes, test_streams.to_the_input)]
    crossed = [run(program, Mlp, None) for program in (test_streams.accumulates, test_streams.interrupted)]
    return [*crossed, run(steps, Checkpointed, BF16), run(edits, Checkpointed, BF16)]


BROKEN = [
    (internals.break_host_wait, steps, None),
    (internals.break_copy_events, steps, None),
    (internals.break_wait_for_copies, edits, None),
    (internals.break_staging_buffers, edits, BF16),
]


@pytest.mark.parametrize(("break_it", "program", "policy"), BROKEN)
def test_the_model_of_streams_sees_races(break_it: Any, program: Any, policy: Any) -> None:
    with pytest.raises(RankError, match="are not in order"):
        on_ranks(1, _broken, break_it, program, policy)


def _broken(break_it: Callable[[], None], program: Any, policy: Any) -> None:
    break_it()
    run(program, Mlp, policy)


# -- beside training --------------------------------------------------------------------------------------------------


@ranks(2)
def test_collectives_go_by_way_of_the_device() -> None:
    """What crosses ranks outside of the lanes is first brought where an NCCL group would look for it."""
    model, optimizer = _job(offload_policy=OFFLOADED)
    nn.functional.cross_entropy(model(_TOKENS).flatten(0, 1), _TOKENS.flatten()).backward()
    before = _numbers(model, optimizer)
    brought: list[Tensor] = []

    def bring(found: Tensor, _: Any) -> Tensor:
        brought.append(found.clone())
        return brought[-1]

    def watched(collective: Any, place: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            moved = {each.untyped_storage()._cdata for each in brought}
            assert args[place].untyped_storage()._cdata in moved, collective
            return collective(*args, **kwargs)

        return call

    internals.watch_collectives(bring, watched)
    after = _numbers(model, optimizer)
    assert len(brought) > 10
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))


def _numbers(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(1)
    weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    same = torch.tensor([torch.equal(weight, weight), torch.equal(weight, weight * 2)])
    extremes = torch.stack([weight.max().full_tensor(), weight.min().full_tensor()])
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    with torch.no_grad():
        drawn = [nn.init.normal_(parameter.clone()).full_tensor() for parameter in (weight, bias)]
    return [norm.full_tensor(), same, extremes, weight.grad.full_tensor(), torch.rand_like(bias).full_tensor(), *drawn]


_TOKENS = torch.arange(24).view(2, 12)


def _job(seed: int = 0, count: int = 0, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = yafsdp_cc.shard(Transformer(2), **options)
    optimizer = grouped(model)
    for step in range(count):
        train(model, optimizer, step)
    return model, optimizer


@ranks(2)
def test_checkpoints_and_whole_weights(tmp_path: Path) -> None:
    model, optimizer = _job(count=2, offload_policy=OFFLOADED)
    for index, options in enumerate([{}, {"offload_policy": OFFLOADED}]):
        path = tmp_path / str(index)
        saving = yafsdp_cc.save(path, model, optimizer, asynchronous=index == 0)
        before = contents(model, optimizer)
        train(model, optimizer, 9)  # changes what was copied, not what is written
        saving.result()
        other, theirs = _job(seed=1, count=1, **options)
        yafsdp_cc.load(path, other, theirs)
        same(contents(other, theirs), before)
        train(other, theirs, 9)
        same(contents(other, theirs), contents(model, optimizer))
        model, optimizer = other, theirs
    truth = {name: value.full_tensor() for name, value in model.state_dict().items()}
    full = yafsdp_cc.full_state_dict(model)
    assert not full or all(full[name].equal(value) for name, value in truth.items())
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    fresh, _ = _job(seed=2, offload_policy=OFFLOADED)
    set_model_state_dict(fresh, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    with torch.no_grad(), yafsdp_cc.whole_parameters(fresh, write=True):
        assert all(parameter.equal(truth[name]) for name, parameter in fresh.named_parameters())
        fresh.head.weight.mul_(0.5)
    truth["head.weight"] = truth["head.weight"] * 0.5
    assert fresh(_TOKENS).isfinite().all()
    yafsdp_cc.unshard_model(fresh)
    assert all(parameter.equal(truth[name]) for name, parameter in fresh.named_parameters())


@ranks(2)
def test_plan_counts_host_and_device_apart() -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = yafsdp_cc.plan_of(_job(mp_policy=bf16)[0])
    model, optimizer = _job(count=1, mp_policy=bf16, offload_policy=OFFLOADED)
    nn.functional.cross_entropy(model(_TOKENS).flatten(0, 1).float(), _TOKENS.flatten()).backward()
    plan, counters, parameters = yafsdp_cc.plan_of(model), yafsdp_cc.counters_of(model), list(model.parameters())
    assert (counters.owned_bytes, counters.host_bytes) == (plan.owned_bytes, plan.host_bytes)
    assert plan.host is not None
    shards = _bytes(parameter.to_local() for parameter in parameters)
    gradients = _bytes(parameter.grad.to_local() for parameter in parameters)
    assert shards == gradients == plan.host_bytes // 2
    assert plan.host.parameters == plain.parameter_shard_bytes
    states = [value.to_local() for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert plan.host.adamw == plan.adamw_bytes == sum(state.nbytes for state in states)
    assert (plan.parameter_shard_bytes, plan.gradient_shard_bytes) == (0, 0)
    assert plan.replicated.bytes + plan.host.replicated == plain.replicated.bytes
    assert plan.owned_bytes + plan.host_bytes == plain.owned_bytes + plan.transfer_bytes
    largest = max(unit.padded for unit in plan.units) // 2 * 4
    assert 2 * largest < plan.transfer_bytes < 3 * largest  # of weights, of gradients, and of small weights
    assert plan.as_dict()["host_bytes"] == plan.host_bytes
    assert "offloaded to host memory" in str(plan)
    assert "of it in host memory" in str(plan)
    assert "host memory" not in str(plain)
    assert plain.host_bytes == 0


def _bytes(tensors: Iterator[Tensor]) -> int:
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class Allocations(TorchDispatchMode):
    """How many operations give a tensor of memory of its own."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        owned = [each for each in func._schema.returns if each.alias_info is None]
        self.count += len(owned) if isinstance(result, (Tensor, tuple, list)) else 0
        return result


def test_a_step_allocates_no_more_than_without() -> None:
    counts = on_ranks(1, _allocates)[0]
    assert counts[0] == counts[1]


def _allocates() -> list[int]:
    counts = []
    for policy in (None, OFFLOADED):
        model = yafsdp_cc.shard(Mlp(6), mp_policy=BF16, offload_policy=policy)
        for _ in range(2):
            model(torch.ones(4, WIDTH)).square().mean().backward()
        with Allocations() as seen:
            model(torch.ones(4, WIDTH)).square().mean().backward()
        counts.append(seen.count)
    return counts


@ranks(1)
def test_what_cannot_be_is_refused_by_name() -> None:
    with torch.device("meta"):
        model: Any = Mlp()
    yafsdp_cc.fully_shard(model, offload_policy=OFFLOADED)
    with pytest.raises(RuntimeError, match=r"'.*weight' was sharded with CPUOffloadPolicy .* belongs to host memory"):
        model.to_empty(device="meta")
    wanted = r"offload_policy takes OffloadPolicy\(\) or CPUOffloadPolicy\(\); got True"
    for call in (yafsdp_cc.shard, yafsdp_cc.fully_shard):
        with pytest.raises(TypeError, match=wanted):
            call(Mlp(), offload_policy=True)
