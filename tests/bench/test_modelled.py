"""The modelled network: what is sent has the size it would have, and both engines train over it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import yafsdp_cc
from bench import paced, worlds
from bench.modelled import Fabric, LinkCost, ModelledGroup, begin
from tests.ranks import on_ranks
from tests.soak import LONG

FABRIC = Fabric(between_machines=LinkCost(15e-6, 1 / 25e9), within_machine=LinkCost(5e-6, 1 / 350e9), machine=4)


def join(world: int, device: str) -> Any:
    """This process as a rank of a modelled world."""
    dist.destroy_process_group()
    begin(1, world, FABRIC, device)
    return init_device_mesh(device, (world,), mesh_dim_names=("shard",))


def on(device: str, body: Any) -> None:
    # Beside a GPU nothing may be forked: torch's optimizers ask CUDA, on a CPU too, whether a graph is being captured.
    on_ranks(1, body, device, backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "")


DEVICES = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))],
)


def collectives(device: str) -> None:
    mesh = join(4, device)
    with torch.device(device):
        exchange()
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, {"rank": 1})
    assert everybody == [{"rank": 1}] * 4
    dist.barrier()
    assert mesh.size() == 4


def exchange() -> None:
    assert (dist.get_world_size(), dist.get_rank()) == (4, 1)
    mine, whole = torch.arange(3.0), torch.empty(12)
    dist.all_gather_into_tensor(whole, mine)
    assert whole.equal(mine.repeat(4))
    sent = torch.arange(12.0)
    chunk = torch.empty(3)
    dist.reduce_scatter_tensor(chunk, sent)
    assert chunk.equal(4 * sent[3:6])
    dist.all_gather_into_tensor(whole, chunk)
    assert whole.equal(4 * sent)  # as an all-reduce
    dist.all_gather_into_tensor(whole, chunk)
    assert whole.equal(chunk.repeat(4))
    dist.reduce_scatter_tensor(sent[3:6], sent, op=dist.ReduceOp.AVG)
    assert sent.equal(torch.arange(12.0))
    received = torch.empty(12)
    dist.all_to_all_single(received, sent)
    assert received.equal(sent[3:6].repeat(4))
    dist.all_to_all_single(received[:6], sent[:6], [2, 0, 1, 3], [2, 0, 1, 3])
    assert received[:6].equal(sent[:6])
    with pytest.raises(ValueError, match="modelled ranks send what they receive"):
        dist.all_to_all_single(received[:2], sent[:2], [2, 0, 0, 0], [0, 0, 0, 2])
    for op, times in ((dist.ReduceOp.SUM, 4), (dist.ReduceOp.MAX, 1), (dist.ReduceOp.AVG, 1)):
        total = torch.ones(2)
        assert dist.all_reduce(total, op=op, async_op=True).wait()
        assert total.equal(torch.full((2,), float(times)))
    for dtype in (torch.float64, torch.int64, torch.bfloat16):
        total = torch.arange(3).to(dtype)
        dist.all_reduce(total)
        assert total.equal(4 * torch.arange(3).to(dtype))
    with pytest.raises(ValueError, match=r"have no .*PRODUCT"):
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.PRODUCT)
    for numel, dtype in ((1 << 20, torch.float32), (12_345, torch.bfloat16), (7, torch.uint8)):
        part = torch.randint(100, (numel,)).to(dtype)
        parts = torch.empty(4 * numel, dtype=dtype)
        assert dist.all_gather_into_tensor(parts, part, async_op=True).wait()
        assert parts.equal(part.repeat(4))
        if dtype != torch.uint8:
            dist.reduce_scatter_tensor(part, parts, op=dist.ReduceOp.AVG)
            assert part.equal(parts[:numel])


@DEVICES
def test_every_rank_has_the_same_numbers(device):
    on(device, collectives)


def test_groups_within_a_machine_have_its_links():
    assert FABRIC.is_one_machine(range(4))
    assert FABRIC.is_one_machine([5, 7])
    assert not FABRIC.is_one_machine([3, 4])


def net(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(3)])


def trains(device: str) -> None:
    mesh = join(64, device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact: Any = yafsdp_cc.shard(net(device), units=[nn.Sequential], mesh=mesh, mp_policy=policy)
    coded: Any = yafsdp_cc.shard(net(device), units=[nn.Sequential], mesh=mesh, mp_policy=policy, compression="int8")
    torchs: Any = net(device)
    for block in torchs:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(torchs, mesh=mesh, mp_policy=policy)
    for model in (exact, coded, torchs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(torch.randn(4, 64, device=device)).float().square().mean().backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert all(parameter.grad is not None for parameter in model.parameters())
            assert torch.isfinite(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            optimizer.step()
            optimizer.zero_grad()
    weights = 3 * 64 * 64
    for model in (exact, coded):
        planned = yafsdp_cc.plan_of(model)
        counters = yafsdp_cc.counters_of(model)
        assert planned.world == 64
        assert counters.owned_bytes == planned.owned_bytes
        assert counters.gathered_bytes >= 3 * 2 * weights * 63 // 64
    assert yafsdp_cc.counters_of(coded).reduced_bytes < yafsdp_cc.counters_of(exact).reduced_bytes / 2


@DEVICES
def test_both_engines_train_over_it(device):
    on(device, trains)


def sums_as_nccl_does(device: str) -> None:
    mesh, counts = join(64, device), Counter[str]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    def counted(name: str) -> Any:
        call = getattr(ModelledGroup, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return count

    model: Any = yafsdp_cc.shard(net(device), units=[nn.Sequential], mesh=mesh)
    loss = model(torch.randn(4, 64, device=device)).square().mean()
    for name in ("_reduce_scatter_base", "alltoall_base"):
        setattr(ModelledGroup, name, counted(name))
    with Counting():
        loss.backward()
    assert counts["_reduce_scatter_base"] == len(list(model.children()))
    assert counts["alltoall_base"] == 0
    assert counts["aten::add_"] < 10, counts  # on gloo one for each rank and unit


@DEVICES
def test_gradients_are_reduce_scattered_as_over_nccl(device):
    on(device, sums_as_nccl_does)


def never_waits_as_it_encodes(device: str) -> None:
    model: Any = yafsdp_cc.shard(net(device), units=[nn.Sequential], mesh=join(64, device), compression="int2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randn(4, 64, device=device) for _ in range(14)]  # the 2nd, 5th and 10th forward measure messages
    for at, batch in enumerate(batches):
        if at == 2:
            torch.cuda.set_sync_debug_mode("error")
        loss = model(batch).square().mean()
        yafsdp_cc.watch_loss(model, loss if at % 2 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_host_never_waits_for_the_device_to_judge_messages():
    on("cuda", never_waits_as_it_encodes)


def test_ranges_on_a_gpu_are_no_kernels():
    def event(name: str, start: float, end: float, is_range: bool = False) -> Any:
        kind = torch.autograd.DeviceType.CUDA
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=kind, time_range=span, is_user_annotation=is_range)

    events = [
        event("modelled_transfer", 0, 4000),
        event("FSDP::all_gather (blocks.0)", 0, 4000, True),  # as FSDP2 wraps its collectives
        event("Memcpy DtoD (Device -> Device)", 3000, 5000),
        event("gemm", 5000, 6000),
    ]
    found = worlds.figures_of(events)
    assert (found["exposed_ms"], found["communicated_ms"]) == (3.0, 4.0)
    assert (found["kernels"], found["copies"]) == (2, 1)


@LONG
def test_a_world_runs(tmp_path):
    out = tmp_path / "worlds.json"
    command = [
        sys.executable,
        "bench/worlds.py",
        "--device",
        "cpu",
        "--model",
        "tiny",
        "--world",
        "64",
        "--length",
        "32",
    ]
    command += ["--rounds", "2", "--steps", "1", "--contestants", "alone,fsdp2,ours,ours int8", "--json", str(out)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (figures,) = json.loads(out.read_text())["cases"].values()
    assert set(figures) == {"alone", "fsdp2", "ours", "ours int8"}
    assert figures["alone"]["sent_bytes"] == 0
    assert figures["ours int8"]["sent_bytes"] < figures["ours"]["sent_bytes"] < 1.02 * figures["fsdp2"]["sent_bytes"]
    assert "tiny, 64 ranks, 25 GB/s, 32 tokens" in printed


@LONG
def test_its_kernels_compile(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc: CUDA sources compile where its compiler is, with or without a GPU")
    moves = [(kind, paced._COPY) for kind in paced._COPIED.values()]
    for kind, move in (*moves, *((kind, paced._SUM) for kind in paced.SUMMED_DTYPES.values())):
        (tmp_path / "carry.cu").write_text(paced.source_of(kind, move))
        for arch in ("sm_80", "sm_90"):
            command = ["nvcc", f"-arch={arch}", "-cubin", "-Werror", "all-warnings", "-o", "carry.cubin", "carry.cu"]
            subprocess.run(command, cwd=tmp_path, check=True)
