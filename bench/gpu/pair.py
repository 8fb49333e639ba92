"""Losses and weights of this engine beside those of FSDP2, to the bit: over NCCL, on one rank or on two of one GPU.

    python bench/gpu/pair.py --world 2 --json bench/out/pair2.json
    python bench/gpu/pair.py --device cpu --shape 2,64,4,256,2,32       # over gloo, to see it run

Two ranks share the GPU: each takes a host name of its own towards NCCL (``tests.ranks.ranks_of_one_gpu``) and sends
over sockets, some 15 ms for a collective. So this is about bits, and the seconds mean nothing.

Exact sums are held against FSDP2, which is held against itself, too: what a program that runs twice does not repeat
cannot be asked of another. FSDP2's norms are units of their own whose sums are in fp32 under every policy, as those of
replicated parameters are here. Int8 and OneBitAdam are held against their definitions in plain torch
(``YAFSDP_CC_NATIVE=0``). Attention is computed by SDPBackend.MATH, since the backward of flash attention adds in no
fixed order. Over gloo, FSDP2's sums in bf16 are rounded otherwise than NCCL's, and are not expected to be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import yafsdp_cc
from bench.common import about, names, save
from bench.models import GPT, Spec
from bench.trainers import shard_by_fsdp2
from tests.ranks import ranks_of_one_gpu
from yafsdp_cc.optim import OneBitAdam
from yafsdp_cc.ranks.groups import backend_of
from yafsdp_cc.table import table

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}
ENCODED = "bf16"
"""The policy under which encoded sums are compared."""
SHAPE = (6, 512, 8, 4096, 2, 256)
"""Blocks, width, heads, vocabulary, sequences of a rank and their length."""
LIMIT = 600
"""Seconds until ranks that hang are given up; a flight ends them sooner."""


class Row(NamedTuple):
    """A way to train, and the row before it that it has to equal to the bit."""

    name: str
    truth: str
    is_fsdp2: bool = False
    settings: dict[str, Any] = {}  # noqa: RUF012 - of ``shard``; never written
    one_bit: bool = False
    is_plain: bool = False
    """Whether plain torch encodes and decodes: the definitions."""


EXACT = (
    Row("FSDP2", "", is_fsdp2=True),
    Row("FSDP2 again", "FSDP2", is_fsdp2=True),
    Row("ours", "FSDP2"),
    Row("ours, keeps weights", "FSDP2", settings={"reshard_after_forward": False}),
)
APART = Row("ours, two communicators", "FSDP2", settings={"separate_reduce_group": True})
CODED = (
    Row("int8, defined", "", settings={"compression": "int8"}, is_plain=True),
    Row("int8", "int8, defined", settings={"compression": "int8"}),
    Row("OneBitAdam, defined", "", settings={"compression": "onebit"}, one_bit=True, is_plain=True),
    Row("OneBitAdam", "OneBitAdam, defined", settings={"compression": "onebit"}, one_bit=True),
)


def rows(policy: str, world: int) -> tuple[Row, ...]:
    """Return what is compared under a policy: a rank alone sends nothing by a second communicator, nor encoded."""
    more = () if world == 1 else (APART, *CODED) if policy == ENCODED else (APART,)
    return (*EXACT, *more)


class Trained(NamedTuple):
    """What a run has come to."""

    losses: list[float]
    digest: str
    """Of names and bytes of all weights."""
    weights: Tensor
    """All of them, fp32 [numel], on the CPU."""


def train(row: Row, policy: MixedPrecisionPolicy, spec: Spec, mesh: DeviceMesh, steps: int) -> Trained:
    """Train the same model on the same numbers as any other row."""
    torch.manual_seed(0)
    model: Any = GPT(spec).to(mesh.device_type)
    if row.is_fsdp2:
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                fully_shard(module, mesh=mesh, mp_policy=replace(policy, reduce_dtype=torch.float32))
        shard_by_fsdp2(model, policy, mesh=mesh)
    else:
        yafsdp_cc.shard(model, units=list(model.blocks), mesh=mesh, mp_policy=policy, **row.settings)
    make: Any = partial(torch.optim.AdamW, fused=True)
    if row.one_bit:
        make = partial(OneBitAdam, warmup_steps=2, refreshes=1)
    optimizer, losses = make(model.parameters(), lr=1e-3), []
    for step in range(steps):
        tokens, targets = (each.to(mesh.device_type) for each in spec.batch(1000 * step + mesh.get_rank()))
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    parameters = sorted(model.named_parameters())
    whole = {name: parameter.full_tensor().detach().cpu() for name, parameter in parameters}
    digest = hashlib.sha256()
    for name, weight in whole.items():
        digest.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    flat = torch.cat([weight.flatten().float() for weight in whole.values()])
    return Trained([loss.item() for loss in losses], digest.hexdigest(), flat)


def compare(spec: Spec, mesh: DeviceMesh, steps: int, sender: Any) -> None:
    """Send the figures of each row once it has run."""
    for name, policy in POLICIES.items():
        known: dict[str, Trained] = {}
        for row in rows(name, mesh.size()):
            start = time.monotonic()
            with mock.patch.dict(os.environ, {"YAFSDP_CC_NATIVE": "0"} if row.is_plain else {}):
                found = known[row.name] = train(row, policy, spec, mesh, steps)
            figures: dict[str, Any] = {"rank": mesh.get_rank(), "policy": name, "row": row.name, "truth": row.truth}
            figures["backend"] = backend_of(mesh.get_group(), torch.device(mesh.device_type))
            figures |= {"loss": found.losses[-1], "loss_of_fsdp2": known[EXACT[0].name].losses[-1]}
            if truth := known.get(row.truth):
                figures["same_losses"] = found.losses == truth.losses
                figures["same_weights"] = found.digest == truth.digest
                figures["off"] = ((found.weights - truth.weights).norm() / truth.weights.norm()).item()
            sender.send(figures | {"seconds": round(time.monotonic() - start, 1)})


def run(rank: int, options: argparse.Namespace, store: str, sender: Any) -> None:
    """Be a rank."""
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        backend = "gloo"
        if options.device == "cuda":
            os.environ |= ranks_of_one_gpu(rank) | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            torch.cuda.set_device(0)
            backend = "cpu:gloo,cuda:nccl"
        world: int = options.world
        dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world)
        blocks, width, heads, vocabulary, sequences, length = map(int, options.shape)
        spec = Spec("pair", blocks, width, heads, vocabulary, sequences, length, rounds=0, steps=0)
        with sdpa_kernel(SDPBackend.MATH):
            compare(spec, init_device_mesh(options.device, (world,)), options.steps, sender)
        sender.send(None)
    except BaseException:
        sender.send(f"rank {rank}: {traceback.format_exc()}")


def show(figures: list[dict[str, Any]]) -> None:
    cells = [
        [
            f"{each['policy']}: {each['row']}",
            each["truth"] or "-",
            *("-" if key not in each else "yes" if each[key] else "NO" for key in ("same_losses", "same_weights")),
            f"{each['off']:.1e}" if "off" in each else "-",
            f"{each['loss']:.6f}",
            f"{each['seconds']:.1f}",
        ]
        for each in figures
        if each["rank"] == 0
    ]
    print(table(["", "held against", "losses", "weights", "off by", "last loss", "s"], *cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--world", type=int, choices=(1, 2), default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", type=names, default=SHAPE, help="blocks,width,heads,vocabulary,sequences,length")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    context, folder = multiprocessing.get_context("spawn"), tempfile.TemporaryDirectory()
    pipes = [context.Pipe(duplex=False) for _ in range(options.world)]
    ranks = [
        context.Process(target=run, args=(rank, options, f"{folder.name}/store", sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for each, (_, sender) in zip(ranks, pipes, strict=True):
        each.start()
        sender.close()
    results: dict[str, Any] = {"about": about(["python", "bench/gpu/pair.py", *sys.argv[1:]]), "world": options.world}
    results["rows"], results["failures"], running = [], [], [receiver for receiver, _ in pipes]
    while running and not results["failures"]:
        ready = multiprocessing.connection.wait(running, LIMIT)
        if not ready:
            results["failures"].append(f"nothing for {LIMIT} s")
        for receiver in ready:
            try:
                found = receiver.recv()  # type: ignore[attr-defined]
            except EOFError:
                found = "a rank died without a word"
            if found is None:
                running.remove(receiver)  # type: ignore[arg-type]
            elif isinstance(found, str):
                results["failures"].append(found)
            else:
                results["rows"].append(found)
        save(options.json, results)
    show(results["rows"])
    print("\n".join(results["failures"]))
    expected = [each for each in results["rows"] if each["backend"] == "nccl" or each["policy"] != "bf16 sums"]
    off = [each for each in expected if not (each.get("same_losses", True) and each.get("same_weights", True))]
    for each in ranks:  # those that hang do not end by themselves
        each.kill()
    sys.exit(bool(off or results["failures"]))


if __name__ == "__main__":
    main()
