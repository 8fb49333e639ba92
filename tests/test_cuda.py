"""The engine on a GPU: one rank over NCCL, and two ranks of one GPU over NCCL and over gloo.

What streams and events put in order is checked without a GPU, too, by ``tests/engine/test_streams.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.func import functional_call

import yafsdp_cc
from tests import reference
from tests.internals import poisoned_buffers
from tests.models import VOCABULARY, Transformer
from tests.ranks import on_ranks, ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NCCL = "cpu:gloo,cuda:nccl"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 6
NAP = 2_000_000
"""Cycles: about a millisecond, longer than anything these models compute."""


# -- helpers ----------------------------------------------------------------------------------------------------------


def twins(policy: MixedPrecisionPolicy | None = None, **options: Any) -> tuple[Any, nn.Module]:
    """The same model sharded and plain, both on the GPU."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Transformer(blocks=5, width=64).cuda())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    return yafsdp_cc.shard(models[0], mesh=mesh, mp_policy=policy, **options), models[1]


def batch(step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (4, 33), generator=generator).cuda()


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def in_bf16(plain: nn.Module) -> Callable[[Tensor], Tensor]:
    """What ``BF16`` computes, with weights that stay fp32."""
    return lambda x: functional_call(plain, {name: p.bfloat16() for name, p in plain.named_parameters()}, (x,))


def same(model: nn.Module, plain: nn.Module, within: float) -> None:
    for name, parameter in model.named_parameters():
        whole: Any = parameter.full_tensor()
        off = reference.far_apart(whole.cpu(), plain.get_parameter(name).detach().cpu())
        assert off <= within, f"{name}: off by {off:.1e}"  # also fails for NaN


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def adamw(*models: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, **options) for model in models]


# -- parity -----------------------------------------------------------------------------------------------------------


def trains(policy: MixedPrecisionPolicy | None, options: dict[str, Any], **of_shard: Any) -> None:
    model, plain = twins(policy, **of_shard)
    ours, theirs = adamw(model, plain, **options)
    forward = in_bf16(plain) if policy else plain
    for at in range(STEPS):
        step(model, ours, loss_of(model, batch(at)))
        step(plain, theirs, loss_of(forward, batch(at)))
        if at == 2:
            with torch.no_grad():
                torch.testing.assert_close(loss_of(model, batch(99)), loss_of(forward, batch(99)), rtol=1e-3, atol=0)
    same(model, plain, 1e-2 if policy else 1e-4)


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_steps_are_those_of_the_plain_model(policy: MixedPrecisionPolicy | None, options: dict[str, Any]) -> None:
    on_ranks(1, trains, policy, options, backend=NCCL)


def accumulates(synchronises: bool, **of_shard: Any) -> None:
    model, plain = twins(**of_shard)
    ours, theirs = adamw(model, plain)
    for at in range(STEPS):
        last = at % 3 == 2
        model.set_requires_gradient_sync(synchronises or last)
        for one in (model, plain):
            loss_of(one, batch(at)).backward()
        if last:
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    same(model, plain, 1e-4)


@pytest.mark.parametrize("synchronises", [True, False])
def test_gradients_accumulate(synchronises: bool) -> None:
    on_ranks(1, accumulates, synchronises, backend=NCCL)


def scales(**of_shard: Any) -> None:
    model, plain = twins(**of_shard)
    optimizers, scalers = adamw(model, plain), [torch.amp.GradScaler("cuda", init_scale=2.0**8) for _ in range(2)]
    for at in range(STEPS):
        for one, optimizer, scaler in zip((model, plain), optimizers, scalers, strict=True):
            loss = loss_of(one, batch(at))
            scaler.scale(loss * float("inf") if at == 3 else loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**7
    same(model, plain, 1e-4)


def test_grad_scaler_skips_a_step() -> None:
    on_ranks(1, scales, backend=NCCL)


# -- order ------------------------------------------------------------------------------------------------------------


@contextmanager
def late(model: Any, where: str, seed: int) -> Iterator[None]:
    """Naps on the compute stream and around collectives, in places drawn at random, with NaN in unused buffers."""
    draw = random.Random(seed)

    def nap(stream: str) -> None:
        if stream in where and draw.random() < 0.5:
            torch.cuda._sleep(NAP)

    hooks = [block.register_forward_pre_hook(lambda *_: nap("compute")) for block in model.blocks]
    hooks += [block.register_full_backward_pre_hook(lambda *_: nap("compute")) for block in model.blocks]
    try:
        with poisoned_buffers(model, lambda: nap("lane")):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _ordered(where: str, seed: int, side: bool) -> None:
    model, plain = twins()
    ours, theirs = adamw(model, plain)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with late(model, where, seed):
        for at in range(STEPS):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = loss_of(model, batch(at))
            torch.cuda.current_stream().wait_stream(stream)
            step(model, ours, loss)
            if at % 2:
                with torch.no_grad():
                    loss_of(model, batch(at))
            step(plain, theirs, loss_of(plain, batch(at)))
    same(model, plain, 1e-4)


@pytest.mark.parametrize("side", [False, True], ids=["one stream", "forward on a side stream"])
@pytest.mark.parametrize("where", ["compute", "lane", "compute lane"])
@ranks(1, backend=NCCL)
def test_late_streams_change_nothing(where: str, side: bool) -> None:
    for seed in range(3):
        _ordered(where, seed, side)


# -- what a step must not do ------------------------------------------------------------------------------------------


def allocations(model: nn.Module) -> int:
    """How many blocks a forward and a backward take from the allocator, after two steps."""
    (optimizer,) = adamw(model)
    for at in range(2):
        step(model, optimizer, loss_of(model, batch(at)))
    tokens = batch(2)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    loss_of(model, tokens).backward()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


@ranks(1, backend=NCCL)
def test_the_engine_allocates_nothing() -> None:
    model, plain = twins()
    assert allocations(model) <= allocations(plain)


@ranks(1, backend=NCCL)
def test_the_host_never_waits_for_the_device() -> None:
    model, _ = twins(BF16)
    (optimizer,) = adamw(model)
    batches = [batch(at) for at in range(STEPS)]
    for at, tokens in enumerate(batches):
        if at == 2:
            torch.cuda.set_sync_debug_mode("error")
        step(model, optimizer, loss_of(model, tokens))
    torch.cuda.set_sync_debug_mode("default")


# -- two ranks --------------------------------------------------------------------------------------------------------


def two_ranks(apart: bool, registered: bool = False, **of_shard: Any) -> None:
    model, plain = twins(separate_reduce_group=apart, **of_shard)
    for unit in (model, *model.blocks):
        unit.set_allocate_memory_from_process_group_for_comm(registered)
    ours, theirs = adamw(model, plain)
    for at in range(STEPS):
        loss_of(model, batch(at, dist.get_rank())).backward()
        ours.step()
        ours.zero_grad()
        (sum(loss_of(plain, batch(at, rank)) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        theirs.step()
        theirs.zero_grad()
    same(model, plain, 1e-4)


@pytest.mark.parametrize("apart", [False, True])
def test_two_ranks_of_one_gpu_over_gloo(apart: bool) -> None:
    on_ranks(2, two_ranks, apart, backend="gloo")


@pytest.mark.parametrize("apart", [False, True])
def test_two_ranks_over_nccl(apart: bool) -> None:
    on_ranks(2, two_ranks, apart, backend=NCCL)


def test_two_ranks_whose_buffers_nccl_has_registered() -> None:
    on_ranks(2, two_ranks, False, True, backend=NCCL)


def two_ranks_bound_to_their_device(folder: Path) -> None:
    """As ``torchrun`` examples have it: torch then makes NCCL's communicators at once, and others by splitting them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    device = torch.device("cuda", torch.cuda.current_device())
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(NCCL_ALONE, store=store, rank=rank, world_size=world, device_id=device)
    two_ranks(False)
    two_ranks(True)


def test_two_ranks_bound_to_their_device_over_nccl(tmp_path: Path) -> None:
    on_ranks(2, two_ranks_bound_to_their_device, tmp_path, backend=NCCL_ALONE)


def collectives_on_two_streams() -> tuple[str, list[tuple[float, float, str]]]:
    """The device, and begin, end and name of the kernels of collectives that two streams issue at once."""
    ours, whole = torch.ones(1 << 22, device="cuda"), torch.ones(1 << 23, device="cuda")
    dist.all_gather_into_tensor(whole, ours)  # makes the communicator
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            for start in (dist.all_gather_into_tensor, lambda whole, ours: dist.reduce_scatter_tensor(ours, whole)):
                with torch.cuda.stream(torch.cuda.Stream()):
                    start(torch.ones_like(whole), torch.ones_like(ours))
        torch.cuda.synchronize()
    names = "ncclDevKernel_AllGather", "ncclDevKernel_ReduceScatter"
    kernels = [each for each in profile.events() if each.name.startswith(names)]
    spans = sorted((each.time_range.start, each.time_range.end, each.name) for each in kernels)
    return torch.cuda.get_device_name(), spans


def test_collectives_of_a_communicator_take_turns_whatever_their_streams() -> None:
    """As ``bench.modelled`` takes for granted."""
    for device, spans in on_ranks(2, collectives_on_two_streams, backend=NCCL_ALONE):
        if device == "simulated":  # there gloo plays NCCL, and launches no kernels whose times could be compared
            pytest.skip("the device is simulated, and NCCL's kernels are what this is about")
        assert [sum(kind in name for *_, name in spans) for kind in ("AllGather", "ReduceScatter")] == [3, 3]
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def without_nccl() -> str:
    with pytest.raises(ValueError, match="no backend for them") as error:
        twins()
    return str(error.value)


def test_a_group_without_cuda_is_refused() -> None:
    on_ranks(2, without_nccl, backend="cpu:gloo")


# -- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoints(folder: Path, **of_shard: Any) -> None:
    model, fresh = twins(**of_shard)[0], twins(**of_shard)[0]
    [ours] = adamw(model)
    for at in range(2):
        step(model, ours, loss_of(model, batch(at, dist.get_rank())))
    saving = yafsdp_cc.save(folder, model, ours, asynchronous=True, random=torch.cuda.get_rng_state())
    expected = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    step(model, ours, loss_of(model, batch(2, dist.get_rank())))  # changes what was copied, not what is written
    saving.result()
    [again] = adamw(fresh)
    torch.cuda.set_rng_state(yafsdp_cc.load(folder, fresh, again)["random"])
    assert all(parameter.full_tensor().equal(expected[name]) for name, parameter in fresh.named_parameters())
    step(fresh, again, loss_of(fresh, batch(2, dist.get_rank())))
    full = yafsdp_cc.full_state_dict(fresh)
    assert all(value.is_cpu for value in full.values())
    yafsdp_cc.unshard_model(fresh, device="cpu")
    for name, parameter in fresh.named_parameters():
        torch.testing.assert_close(parameter.data, model.get_parameter(name).full_tensor().cpu(), rtol=0, atol=1e-6)
        assert dist.get_rank() > 0 or full[name].equal(parameter.data)


def test_checkpoints_over_nccl(tmp_path: Path) -> None:
    on_ranks(1, checkpoints, tmp_path / "step", backend=NCCL)


def test_checkpoints_of_two_ranks_over_gloo(tmp_path: Path) -> None:
    on_ranks(2, checkpoints, tmp_path / "step", backend="gloo")


# -- offloading to host memory ----------------------------------------------------------------------------------------

OFFLOADED, PAGEABLE = CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)
NCCL_ALONE = "nccl"
"""No backend for tensors in host memory: whatever crosses ranks has to be brought to the GPU."""


def offloads(policy: MixedPrecisionPolicy | None, options: dict[str, Any], offload: CPUOffloadPolicy) -> None:
    trains(policy, options, offload_policy=offload)


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_offloaded_steps_are_those_of_the_plain_model(
    policy: MixedPrecisionPolicy | None, options: dict[str, Any]
) -> None:
    on_ranks(1, offloads, policy, options, OFFLOADED, backend=NCCL_ALONE)


def test_offloaded_steps_in_pageable_memory() -> None:
    on_ranks(1, offloads, BF16, {}, PAGEABLE, backend=NCCL_ALONE)


@ranks(1, backend=NCCL_ALONE)
def test_offloaded_gradients_accumulate_and_scale() -> None:
    accumulates(True, offload_policy=OFFLOADED)
    accumulates(False, offload_policy=OFFLOADED)
    scales(offload_policy=OFFLOADED)


@ranks(1, backend=NCCL_ALONE)
def test_what_is_offloaded_lies_on_the_host() -> None:
    """Where everything is, and how much of it."""
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model: Any = Transformer(blocks=5, width=64)  # on the CPU
    model.register_buffer("noted", torch.zeros(3))
    mesh = init_device_mesh("cuda", (1,))
    yafsdp_cc.shard(model, mesh=mesh, mp_policy=BF16, offload_policy=OFFLOADED)
    plan, counters = yafsdp_cc.plan_of(model), yafsdp_cc.counters_of(model)
    assert (counters.owned_bytes, counters.host_bytes) == (plan.owned_bytes, plan.host_bytes)
    held = torch.cuda.memory_allocated() - before
    assert plan.owned_bytes <= held <= plan.owned_bytes + (64 << 10)  # each is rounded up, and a few are tiny
    (optimizer,) = adamw(model)
    step(model, optimizer, loss_of(model, batch(0)))
    loss_of(model, batch(1)).backward()
    assert model.noted.is_cuda
    for parameter in model.parameters():
        assert parameter.is_cpu
        assert parameter.device_mesh.device_type == "cuda"
        assert parameter.to_local().is_pinned()
        assert parameter.grad.to_local().is_pinned()
        assert all(value.is_cpu for value in optimizer.state[parameter].values())
        assert parameter.full_tensor().is_cpu
        assert parameter.norm().isfinite()
    with torch.device("meta"):
        empty = Transformer(blocks=2)
    yafsdp_cc.fully_shard(empty, mesh=mesh, offload_policy=OFFLOADED)
    with pytest.raises(RuntimeError, match=r"'.*' was sharded with CPUOffloadPolicy and so belongs to host memory"):
        empty.to_empty(device="cuda")
    empty.to_empty(device="cpu")
    assert all(parameter.to_local().is_pinned() for parameter in empty.parameters())


@pytest.mark.parametrize("where", ["compute", "lane", "compute lane"])
@ranks(1, backend=NCCL_ALONE)
def test_the_host_waits_for_late_copies(where: str) -> None:
    """Streams are late, and the host reads and writes the moment that it may."""
    for seed in range(3):
        model, plain = twins(BF16, offload_policy=OFFLOADED)
        ours, theirs = adamw(model, plain)
        forward = in_bf16(plain)
        with late(model, where, seed):
            for at in range(STEPS):
                with torch.no_grad():
                    found = loss_of(model, batch(at))
                    torch._foreach_mul_(list(model.parameters()), 0.999)
                    truth = loss_of(forward, batch(at))
                    torch._foreach_mul_(list(plain.parameters()), 0.999)
                torch.testing.assert_close(found, truth, rtol=1e-2, atol=0)
                loss_of(model, batch(at)).backward()
                loss_of(model, batch(at + 1)).backward()
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
                ours.step()
                ours.zero_grad(set_to_none=at % 2 == 0)
                ((loss_of(forward, batch(at)) + loss_of(forward, batch(at + 1))) / 2).backward()
                theirs.step()
                theirs.zero_grad()
        same(model, plain, 1e-2)


@ranks(1, backend=NCCL_ALONE)
def test_offloaded_passes_allocate_nothing_and_do_not_stop_for_a_copy() -> None:
    """A pass takes no memory on either side for what it offloads, and no copy stops the host in its midst."""
    model, other = twins(BF16, offload_policy=OFFLOADED)[0], twins(BF16)[0]
    assert allocations(model) <= allocations(other)
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    tokens = batch(3)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(2):
        loss_of(model, tokens).backward()
    torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned


def two_ranks_offload(apart: bool) -> None:
    two_ranks(apart, offload_policy=OFFLOADED)


@pytest.mark.parametrize("apart", [False, True])
def test_two_ranks_of_one_gpu_offload_over_gloo(apart: bool) -> None:
    on_ranks(2, two_ranks_offload, apart, backend="gloo")


@pytest.mark.parametrize("apart", [False, True])
def test_two_ranks_offload_over_nccl(apart: bool) -> None:
    on_ranks(2, two_ranks_offload, apart, backend=NCCL_ALONE)


def checkpoints_offloaded(folder: Path) -> None:
    checkpoints(folder, offload_policy=OFFLOADED)


def test_checkpoints_of_what_is_offloaded(tmp_path: Path) -> None:
    on_ranks(1, checkpoints_offloaded, tmp_path / "nccl", backend=NCCL_ALONE)
    on_ranks(2, checkpoints_offloaded, tmp_path / "gloo", backend="gloo")
