"""Llama-style models in modelled worlds, on one GPU: this engine and FSDP2 over the same wire, and no sharding at all.

    python bench/worlds.py --json bench/out/worlds.json                      # CASES, about three minutes
    python bench/worlds.py --model 8b --world 256 --rate 25 --length 2048    # one
    python bench/worlds.py --device cpu --model tiny --world 8               # to see it run

A world of many ranks is this process and the time that its links would take (``yafsdp_cc.bench.modelled``). Parameters
are held and updated in fp32 (fused AdamW), computed in bf16; gradients are summed in fp32. Contestants take turns in
rounds whose order rotates; times are medians. *Step* is wall time of a run of steps that ends in a synchronisation;
*host* is the time until the last was enqueued, per step; *exposed* is the time in which something crosses the wire and
nothing is computed, from a Kineto trace of one step; *bound* is the larger of the wire's own time for the bytes sent
and the step of the model alone. The head's logits stay in bf16. Written where there was no GPU: it has not run on one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from yafsdp_cc.bench.turns import in_turns

import yafsdp_cc
from bench.llama import SHAPES, Block, Llama
from bench.spans import joined, without
from yafsdp_cc.bench import machine
from yafsdp_cc.bench.modelled import Fabric, LinkCost, begin

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WARM_UP, GIGA, RATE = 3, 1e9, 1e-5
NEAR, DELAY = 350, 15e-6
"""GB/s between ranks of a machine, and seconds that a collective takes however small it is."""


class Case(NamedTuple):
    """A model in a world."""

    model: str
    world: int
    rate: float
    """GB/s of each rank's link to other machines."""
    length: int
    """Tokens of the one sequence that each rank has."""
    contestants: tuple[str, ...]
    recomputes: bool = False
    """Whether blocks keep their inputs alone for the backward."""
    compiles: bool = False
    """Whether blocks are compiled."""

    def __str__(self) -> str:
        ranks = f"{self.world} rank" + "s" * (self.world != 1)
        more = ", recomputed" * self.recomputes + ", compiled" * self.compiles
        return f"{self.model}, {ranks}, {self.rate:g} GB/s, {self.length} tokens{more}"


CASES = (
    Case("8b", 256, 25, 2048, ("fsdp2", "ours", "ours int8")),
    Case("8b", 256, 100, 8192, ("alone", "fsdp2", "ours")),
    Case("1b", 1, 50, 8192, ("alone", "fsdp2", "ours")),
    Case("1b", 8, 50, 4096, ("alone", "fsdp2", "ours")),
)


def _alone(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Weights in bf16, no communication; see ``Masters``."""
    return model.to_empty(device=mesh.device_type).to(torch.bfloat16)


def _fsdp2(model: nn.Module, mesh: DeviceMesh, *, apart: bool = False) -> nn.Module:
    assert isinstance(model, Llama)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    sharded: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=POLICY)
    if apart:
        sharded.set_separate_reduce_scatter_group()  # torch 2.12 and newer
    return model.to_empty(device=mesh.device_type)


def _ours(model: nn.Module, mesh: DeviceMesh, **told: Any) -> nn.Module:
    sharded: nn.Module = yafsdp_cc.shard(model, mesh=mesh, mp_policy=POLICY, **told)
    return sharded


CONTESTANTS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "alone": _alone,
    "fsdp2": _fsdp2,
    "fsdp2 apart": lambda model, mesh: _fsdp2(model, mesh, apart=True),
    "ours": _ours,
    "ours apart": lambda model, mesh: _ours(model, mesh, separate_reduce_group=True),
    "ours int8": lambda model, mesh: _ours(model, mesh, compression="int8"),
    "ours int4": lambda model, mesh: _ours(model, mesh, compression="int4"),
}


class Masters:
    """AdamW on copies in fp32 of what is computed in bf16; of none, where a share of it would be next to nothing."""

    def __init__(self, held: list[nn.Parameter], *, is_sharded: bool) -> None:
        self._held = held
        self._updated = [] if is_sharded else held
        self._masters = [parameter.detach().float().requires_grad_() for parameter in self._updated]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._adam = None if is_sharded else torch.optim.AdamW(self._masters, lr=RATE, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        if self._adam is not None:
            torch._foreach_copy_([master.grad for master in self._masters], [each.grad for each in self._updated])
            self._adam.step()
            torch._foreach_copy_(self._updated, self._masters)

    def zero_grad(self) -> None:
        for parameter in self._held:
            parameter.grad = None


class Steps:
    """A contestant's training loop."""

    def __init__(self, name: str, case: Case, mesh: DeviceMesh) -> None:
        self.device = torch.device(mesh.device_type)
        with torch.device("meta"):
            model = Llama(SHAPES[case.model])
        for block in model.blocks:
            assert isinstance(block, Block)
            block.recomputes = case.recomputes
            if case.compiles:
                block.compile()
        self.model = CONTESTANTS[name](model, mesh)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
        held = list(self.model.parameters())
        if name == "alone":
            self.optimizer: Any = Masters(held, is_sharded=case.world > 1)
        else:
            self.optimizer = torch.optim.AdamW(held, lr=RATE, fused=True)
        text = torch.randint(SHAPES[case.model].vocabulary, (1, case.length + 1), device=self.device)
        self.batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step(self) -> None:
        loss: torch.Tensor = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rest(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, steps: int) -> tuple[float, float]:
        """Seconds of a step, and of the host for it."""
        self.rest()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        enqueued = time.perf_counter()
        self.rest()
        return (time.perf_counter() - start) / steps, (enqueued - start) / steps

    def traced(self) -> dict[str, Any]:
        """Of one step: milliseconds exposed, how many kernels and copies ran, and when, in microseconds."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            self.step()
            self.rest()
        work = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        wire = joined((begun, ended) for name, begun, ended in work if is_wire(name))
        rest = joined((begun, ended) for name, begun, ended in work if not is_wire(name))
        return {
            "exposed_ms": sum(ended - begun for begun, ended in without(wire, rest)) / 1e3,
            "kernels": sum(not is_wire(name) for name, *_ in work),
            "copies": sum("copy" in name.lower() or "memcpy" in name.lower() for name, *_ in work),
            "wire_us": wire,
            "rest_us": rest,
        }


def is_wire(kernel: str) -> bool:
    """Whether that is what a collective runs."""
    return kernel == "carry" or kernel.startswith("nccl")


def measure(case: Case, device: str, rounds: int, steps: int) -> dict[str, Any]:
    """In a process of its own, which is a rank of the case's world from then on."""
    traffic = begin(0, case.world, Fabric(LinkCost(DELAY, 1 / (case.rate * GIGA)), LinkCost(DELAY, 1 / (NEAR * GIGA))))
    mesh = init_device_mesh(device, (case.world,), mesh_dim_names=("shard",))
    runs: dict[str, Steps] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name in case.contestants:
        on_cuda = device == "cuda"
        held = torch.cuda.memory_allocated() if on_cuda else 0
        runs[name] = Steps(name, case, mesh)
        for count in range(WARM_UP):
            if on_cuda and count == WARM_UP - 1:
                torch.cuda.reset_peak_memory_stats()
            runs[name].step()
        runs[name].rest()
        peak = torch.cuda.max_memory_allocated() - held if on_cuda else 0
        sent = traffic.sent_bytes
        traced = runs[name].traced()
        figures[name] = {"peak_bytes": peak, "sent_bytes": traffic.sent_bytes - sent, **traced}
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _, name in in_turns(list(runs), rounds):
        turns[name].append(runs[name].timed(steps))
    rate = GIGA * (case.rate if case.world > Fabric._field_defaults["machine"] else NEAR)
    flops = SHAPES[case.model].flops(case.length, case.length)
    for name, each in figures.items():
        step, host = (median(times) for times in zip(*turns[name], strict=True))
        each |= {"step_ms": 1e3 * step, "host_ms": 1e3 * host, "tflops": flops / step / 1e12, "turns": turns[name]}
        each["wire_ms"] = 1e3 * each["sent_bytes"] / rate
    return figures


def apart(case: Case, device: str, rounds: int, steps: int, sender: Any) -> None:
    """Send what was measured, or why nothing was."""
    try:
        sender.send(measure(case, device, rounds, steps))
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")


def show(case: Case, figures: dict[str, Any]) -> None:
    alone = figures.get("alone", {"step_ms": 0.0})["step_ms"]
    fsdp2 = figures.get("fsdp2", {"step_ms": 0.0})["step_ms"]
    print(f"\n{case}")
    print(
        f"{'':<14}{'step ms':>10}{'of fsdp2':>10}{'bound':>8}{'exposed':>9}{'host ms':>9}{'TFLOP/s':>9}{'GB sent':>9}",
        end="",
    )
    print(f"{'peak GiB':>10}{'kernels':>9}{'copies':>8}")
    for name, each in figures.items():
        bound, step, traced = max(alone, each["wire_ms"]), each["step_ms"], bool(each["rest_us"])
        cells = (
            (f"{step:.1f}", 10, True),
            (f"{step / fsdp2:.3f}" if fsdp2 else "", 10, fsdp2),
            (f"{bound / step:.3f}", 8, bound),
            (f"{each['exposed_ms']:.1f}", 9, traced),
            (f"{each['host_ms']:.1f}", 9, True),
            (f"{each['tflops']:.1f}", 9, True),
            (f"{each['sent_bytes'] / GIGA:.2f}", 9, True),
            (f"{each['peak_bytes'] / 2**30:.2f}", 10, each["peak_bytes"]),
            (str(each["kernels"]), 9, traced),
            (str(each["copies"]), 8, traced),
        )
        row = "".join((text if known else "-").rjust(width) for text, width, known in cells)
        print(f"{name:<14}{row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, help="one case instead of the usual ones")
    parser.add_argument("--world", type=int, default=256)
    parser.add_argument("--rate", type=float, default=25.0, help="GB/s of each rank's link to other machines")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--recompute", action="store_true", help="keep the inputs of blocks alone for the backward")
    parser.add_argument("--compile", action="store_true", help="compile blocks")
    parser.add_argument("--contestants", default="alone,fsdp2,ours", help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each turn")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: --device cpu --model tiny shows how it runs")
    cases = CASES
    if options.model:
        names = tuple(options.contestants.split(","))
        if unknown := [name for name in names if name not in CONTESTANTS]:
            parser.error(f"there is no contestant {unknown[0]!r}: {', '.join(CONTESTANTS)}")
        world = (options.model, options.world, options.rate, options.length)
        cases = (Case(*world, names, options.recompute, options.compile),)
    results: dict[str, Any] = {"about": machine.about(["python", "bench/worlds.py", *sys.argv[1:]]), "cases": {}}
    context = multiprocessing.get_context("spawn")
    for case in cases:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=apart, args=(case, options.device, options.rounds, options.steps, sender))
        process.start()
        sender.close()
        try:
            figures = receiver.recv()
        except EOFError:
            figures = "the process died"
        process.join()
        results["cases"][str(case)] = figures
        if isinstance(figures, str):
            print(f"\n{case}: {figures}", file=sys.stderr)
        else:
            show(case, figures)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    if any(isinstance(figures, str) for figures in results["cases"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
