"""Large GPTs in modelled worlds, on one GPU: this engine and FSDP2 over the same links, and no sharding at all.

    python bench/worlds.py --json bench/out/worlds.json                      # CASES
    python bench/worlds.py --model 8b --world 256 --rate 25 --length 2048    # one
    python bench/worlds.py --device cpu --model tiny --world 8               # to see it run
    yafsdp-cc report DIR/3b-256-ours.json.gz                                 # of --traces DIR

A world of many ranks is this process and the time that its links would take (``modelled.py``). Parameters
are held and updated in fp32 (fused AdamW), computed in bf16; gradients are summed in fp32. Contestants run one after
another, each in a process of its own, since a GPU holds the state of one; times are medians of rounds. One that would
not fit on the card is left out (``needed_bytes``). Figures are written after each contestant.

*Step* is wall time of a run of steps that ends in a synchronisation; *bound* is the larger of the links' own time for
the bytes sent and the step of the model alone, over the step. *Host* is the time until the last step was enqueued, per
step: in a world of one rank alone it is the engine's, since each modelled collective is launched from Python, as NCCL's
are not. *Exposed* is the time in which something is communicated and nothing computed, from a Kineto trace of one step;
*GB/s* are the bytes sent over the time in which something is communicated, which a link is to reach. *Reserved* is the
most memory that torch's allocator held from CUDA; *blocks* are those that it handed out in a step, *segments* and
*retries* what it asked CUDA for, and in vain, in all timed steps together. *ours apart* has a communicator for gathers
and one for reduces, so that both can be on the network at once; *ours int8 weights* gathers in int8, too, and keeps
gradients in bf16 until they are encoded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from bench.common import about, names, save
from bench.modelled import Fabric, LinkCost, begin
from bench.models import GPT, Spec
from bench.trainers import shard_by_fsdp2
from yafsdp_cc.table import table
from yafsdp_cc.tools.report.overlap import joined, length, without

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16 = replace(POLICY, reduce_dtype=torch.bfloat16)
INT8_WEIGHTS = yafsdp_cc.Compression("int8", weights="int8")
WARM_UP, GIGA, RATE = 3, 1e9, 1e-5
NEAR, DELAY = 350, 15e-6
"""GB/s between ranks of a machine, and seconds that a collective takes however small it is."""


def _spec(name: str, blocks: int, width: int, heads: int, vocabulary: int = 32_000) -> Spec:
    return Spec(name, blocks, width, heads, vocabulary, sequences=1, length=0, rounds=0, steps=0)


SPECS = {
    spec.name: spec
    for spec in (
        _spec("tiny", 2, 64, 4, vocabulary=256),
        _spec("small", 32, 256, 4, vocabulary=4096),  # so that the host is what a step waits for
        _spec("1b", 20, 2048, 16),
        _spec("3b", 24, 3072, 24),
        _spec("8b", 38, 4096, 32),
        _spec("70b", 86, 8192, 64),
    )
}


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
    """Whether blocks keep only their inputs for the backward."""
    compiles: bool = False
    """Whether blocks are compiled."""

    def __str__(self) -> str:
        ranks = f"{self.world} rank" + "s" * (self.world != 1)
        more = ", recomputed" * self.recomputes + ", compiled" * self.compiles
        return f"{self.model}, {ranks}, {self.rate:g} GB/s, {self.length} tokens{more}"


CASES = (
    Case("3b", 256, 50, 8192, ("alone", "fsdp2", "ours", "ours int8")),
    Case("small", 1, 50, 256, ("alone", "fsdp2", "ours")),
    Case("8b", 256, 50, 4096, ("fsdp2", "ours")),
)


def _alone(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Weights in bf16, no communication; see ``MasterWeights``."""
    return model.to(torch.bfloat16).to_empty(device=mesh.device_type)


def _fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return shard_by_fsdp2(model, POLICY, mesh=mesh).to_empty(device=mesh.device_type)


def _ours(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> nn.Module:
    return yafsdp_cc.shard(model, mesh=mesh, **{"mp_policy": POLICY, **settings})


CONTESTANTS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "alone": _alone,
    "fsdp2": _fsdp2,
    "ours": _ours,
    "ours apart": lambda model, mesh: _ours(model, mesh, separate_reduce_group=True),
    "ours int8": lambda model, mesh: _ours(model, mesh, compression="int8"),
    "ours int8 weights": lambda model, mesh: _ours(model, mesh, compression=INT8_WEIGHTS, mp_policy=BF16),
    "ours int4": lambda model, mesh: _ours(model, mesh, compression="int4"),
}


class MasterWeights:
    """AdamW on fp32 copies of bf16 parameters; in a world of many ranks of none: a rank's share is next to nothing."""

    def __init__(self, parameters: list[nn.Parameter], *, is_sharded: bool) -> None:
        self._parameters = parameters
        self._updated = [] if is_sharded else parameters
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
        for parameter in self._parameters:
            parameter.grad = None


class Steps:
    """A contestant's training loop, which never waits for a number."""

    def __init__(self, name: str, case: Case, mesh: DeviceMesh) -> None:
        self.device = torch.device(mesh.device_type)
        spec = replace(SPECS[case.model], length=case.length)
        with torch.device("meta"):
            model = GPT(spec)
        for block in model.blocks:
            if case.recomputes:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            if case.compiles:
                block.compile()
        self.model = CONTESTANTS[name](model, mesh)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
        parameters = list(self.model.parameters())
        if name == "alone":
            self.optimizer: Any = MasterWeights(parameters, is_sharded=case.world > 1)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
        self.batch = [tensor.to(self.device) for tensor in spec.batch(0)]

    def step(self) -> None:
        loss: torch.Tensor = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, steps: int) -> tuple[float, float]:
        """Return the seconds of a step, and of the host for it."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        enqueued = time.perf_counter()
        self.synchronize()
        return (time.perf_counter() - start) / steps, (enqueued - start) / steps

    def warm_up(self) -> None:
        for _ in range(WARM_UP):
            self.step()
        self.synchronize()

    def turns(self, rounds: int, steps: int) -> dict[str, Any]:
        """Return the seconds of ``rounds`` turns of ``steps`` steps, and what torch's allocator did in all of them."""
        if self.device.type != "cuda":
            return {"turns": [self.timed(steps) for _ in range(rounds)]} | dict.fromkeys(ALLOCATED, 0)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        turns = [self.timed(steps) for _ in range(rounds)]
        after = torch.cuda.memory_stats()
        blocks, segments, retries = (after[name] - before[name] for name in _COUNTED)
        found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), blocks / (rounds * steps)
        return {"turns": turns} | dict(zip(ALLOCATED, (*found, segments, retries), strict=True))

    def traced(self, trace: Path | None) -> dict[str, Any]:
        """Return, of one step, milliseconds exposed, numbers of kernels and copies, and when, in microseconds.

        Args:
            trace: where Kineto's trace of the step is written.
        """
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # The first step under a profiler waits for the start of CUPTI, and is not recorded.
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        with torch.profiler.profile(activities=activities, schedule=schedule) as profile:
            for _ in range(2):
                self.step()
                self.synchronize()
                profile.step()
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(trace))
        return figures_of(profile.events())


ALLOCATED = ("peak_bytes", "reserved_bytes", "blocks", "segments", "retries")
_COUNTED = ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries")


def figures_of(events: Iterable[Any]) -> dict[str, Any]:
    """Return what ``Steps.traced`` does, of the events of a profile."""
    on_device = [each for each in events if each.device_type == torch.autograd.DeviceType.CUDA]
    # Ranges of record_function, such as FSDP2's around its collectives, are shown on the GPU, too, and are no kernels.
    ran = [each for each in on_device if not each.is_user_annotation]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in ran:
        spans[is_communication(event.name)].append((event.time_range.start, event.time_range.end))
    communicated, computed = joined(spans[True]), joined(spans[False])
    return {
        "exposed_ms": length(without(communicated, computed)) / 1e3,
        "communicated_ms": length(communicated) / 1e3,
        "kernels": len(spans[False]),
        "copies": sum("copy" in event.name or event.name.startswith("Memcpy") for event in ran),
        "communicated_us": communicated,
        "computed_us": computed,
    }


def is_communication(kernel: str) -> bool:
    """Return whether a collective runs this kernel."""
    return kernel == "modelled_transfer" or kernel.startswith("nccl")


def flops(case: Case) -> float:
    """Return those of a forward and backward: 6 per token and element of a matrix, and causal attention."""
    spec = SPECS[case.model]
    matrices = 12 * spec.blocks * spec.width**2 + spec.vocabulary * spec.width
    return 6.0 * case.length * (matrices + spec.blocks * case.length * spec.width)


def activation_bytes(case: Case) -> int:
    """Return what a forward in bf16 keeps for the backward, and what the loss takes."""
    spec = SPECS[case.model]
    token = 40 * spec.width  # twenty numbers: inputs and outputs of two norms, q, k, v, attention, twelve of the MLP
    kept = spec.blocks * 2 * spec.width + token if case.recomputes else spec.blocks * token
    return case.length * (kept + 16 * spec.vocabulary)  # logits in bf16 and fp32, the softmax, and two gradients


def needed_bytes(name: str, case: Case) -> int:
    """Estimate the memory of a contestant: states, buffers and activations, and a tenth for what torch rounds up."""
    spec = SPECS[case.model]
    block, edges = 12 * spec.width**2, 2 * spec.vocabulary * spec.width
    numel = spec.blocks * block + edges
    if name == "alone":  # weights and gradients in bf16; masters, their gradients and two moments in fp32
        states = numel * (4 if case.world > 1 else 20)
    else:  # weights, gradients and two moments in fp32; two blocks and both edges: bf16 twice, and a sum in fp32
        states = 16 * numel // case.world + 8 * (2 * block + edges)
        if name in ENCODED:  # residuals in bf16, messages, decoded
            states += 2 * numel + 8 * (block + edges)
    return int(1.1 * (states + activation_bytes(case))) + CONTEXT


ENCODED = ("ours int8", "ours int8 weights", "ours int4")
CONTEXT = 2 << 30
"""Bytes that CUDA, cuBLAS and the profiler take."""


def lacking(name: str, case: Case, card: int) -> str:
    """Return why a contestant is left out on a card of so many bytes, or nothing."""
    needed = needed_bytes(name, case)
    return f"needs {needed / 2**30:.0f} GiB of {card / 2**30:.0f}" if needed > card else ""


def measure(name: str, case: Case, device: str, rounds: int, steps: int, traces: Path | None = None) -> dict[str, Any]:
    """Return all figures, in a process of its own, which is a rank of the case's world from then on."""
    fabric = Fabric(LinkCost(DELAY, 1 / (case.rate * GIGA)), LinkCost(DELAY, 1 / (NEAR * GIGA)))
    traffic = begin(0, case.world, fabric, device)
    mesh = init_device_mesh(device, (case.world,), mesh_dim_names=("shard",))
    run = Steps(name, case, mesh)
    run.warm_up()
    sent = traffic.sent_bytes
    run.step()
    sent = traffic.sent_bytes - sent
    figures = run.traced(traces and traces / f"{case.model}-{case.world}-{name.replace(' ', '-')}.json.gz")
    figures |= run.turns(rounds, steps)
    rate = GIGA * (case.rate if case.world > Fabric._field_defaults["machine"] else NEAR)
    step, host = (median(times) for times in zip(*figures["turns"], strict=True))
    return figures | {
        "sent_bytes": sent,
        "step_ms": 1e3 * step,
        "host_ms": 1e3 * host,
        "tflops": flops(case) / step / 1e12,
        "links_ms": 1e3 * sent / rate,
        "gb_per_s": sent / figures["communicated_ms"] / 1e6 if figures["communicated_ms"] else 0.0,
    }


def _in_process(pipe: Any, *args: Any) -> None:
    """Send what was measured, or why nothing was, once told to begin."""
    try:
        pipe.recv()
        pipe.send(measure(*args))
    except EOFError:  # whoever would have told has gone
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


class Measurement:
    """``measure`` in a process of its own, which imports what it needs while others are measured.

    Args:
        args: arguments of ``measure``.
    """

    def __init__(self, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(target=_in_process, args=(pipe, *args), daemon=True)
        self._process.start()
        pipe.close()

    def run(self) -> dict[str, Any] | str:
        """Return what was measured, or why nothing was."""
        try:
            self._pipe.send(None)
            found: dict[str, Any] | str = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            found = "the process died"
        self._process.join()
        return found


def show(case: Case, figures: dict[str, Any]) -> None:
    alone = figures.get("alone", {"step_ms": 0.0})["step_ms"]
    fsdp2 = figures.get("fsdp2", {"step_ms": 0.0})["step_ms"]
    rows = []
    for name, each in figures.items():
        bound, step = max(alone, each["links_ms"]), each["step_ms"]
        # Without the model alone, how fast a step can be is not known.
        row = [name, f"{step:.1f}", f"{step / fsdp2:.3f}" if fsdp2 else "-", f"{bound / step:.3f}" if alone else "-"]
        row += [f"{each['host_ms']:.1f}", f"{each['tflops']:.1f}", f"{each['sent_bytes'] / GIGA:.2f}"]
        traced = [f"{each['gb_per_s']:.1f}", f"{each['exposed_ms']:.1f}"]
        traced += [f"{each[key] / 2**30:.2f}" for key in ("peak_bytes", "reserved_bytes")]
        traced += [f"{each[key]:.0f}" for key in ("kernels", "copies", "blocks", "segments", "retries")]
        rows.append(row + (traced if each["computed_us"] else ["-"] * len(traced)))
    head = ("", "step ms", "of fsdp2", "bound", "host ms", "TFLOP/s", "GB sent")
    on_cuda = ("GB/s", "exposed", "peak GiB", "reserved", "kernels", "copies", "blocks", "segments", "retries")
    print(f"\n{case}\n{table((*head, *on_cuda), *rows)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SPECS, help="one case instead of the usual ones")
    parser.add_argument("--world", type=int, default=256)
    parser.add_argument("--rate", type=float, default=25.0, help="GB/s of each rank's link to other machines")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--recompute", action="store_true", help="keep only the inputs of blocks for the backward")
    parser.add_argument("--compile", action="store_true", help="compile blocks")
    some = f"of {', '.join(CONTESTANTS)}"
    parser.add_argument("--contestants", type=names, default=["alone", "fsdp2", "ours"], help=some)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each turn")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--traces", type=Path, help="a folder for a trace of each contestant's step")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: --device cpu --model tiny shows how it runs")
    if unknown := [name for name in options.contestants if name not in CONTESTANTS]:
        parser.error(f"there is no contestant {unknown[0]!r}: {', '.join(CONTESTANTS)}")
    cases = CASES
    if options.model:
        world = (options.model, options.world, options.rate, options.length)
        cases = (Case(*world, tuple(options.contestants), options.recompute, options.compile),)
    results: dict[str, Any] = {"about": about(["python", "bench/worlds.py", *sys.argv[1:]]), "cases": {}, "missing": {}}
    card = torch.cuda.get_device_properties(0).total_memory if options.device == "cuda" else sys.maxsize
    failed = False
    for case in cases:
        figures = results["cases"][str(case)] = {}
        reasons = {name: lacking(name, case, card) for name in case.contestants}
        settings = case, options.device, options.rounds, options.steps, options.traces
        begun = {name: Measurement(name, *settings) for name, reason in reasons.items() if not reason}
        for name, reason in reasons.items():
            found = f"left out, {reason}" if reason else begun[name].run()
            failed |= not reason and isinstance(found, str)
            if isinstance(found, str):
                results["missing"][f"{case}, {name}"] = found
                print(f"{case}, {name}: {found}", file=sys.stderr)
            else:
                figures[name] = found
            save(options.json, results)
        if figures:
            show(case, figures)
    sys.exit(failed)


if __name__ == "__main__":
    main()
