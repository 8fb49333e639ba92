"""Writes a training run's figures to ``metrics.jsonl``, for ``yafsdp-cc report``, and shows its progress.

Each line is a JSON object with an ``"event"``: first ``"start"``, then ``"step"`` and ``"eval"``, at last ``"end"``. A
resumed run appends to the earlier file.
"""

from __future__ import annotations

import json
import os
import resource
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from yafsdp_cc.api import counters_of, plan_of
from yafsdp_cc.fsdp2.module import require_state, sharded_parts
from yafsdp_cc.ranks.checks import all_gather_objects, refused_together

FILE = "metrics.jsonl"


class Metrics:
    """Write and show the loss, speed, bytes, memory and times of a run. A collective: all ranks call it alike.

    Between reports a step takes some ten microseconds, and neither waits for the device nor communicates.

    Args:
        model: any module; bytes and plans are those of sharded modules: ``model`` or modules in it.
        folder: folder of the run, made if missing. The first rank writes ``metrics.jsonl`` in it, and continues an
            existing one, whose lines of steps after ``first_step`` are superseded.
        total_steps: number of optimizer steps that the run will make, if known.
        first_step: number of steps already made by the run that this one resumes.
        every: steps between reports, besides the first and last step; 0: only ``report`` and steps with values report.
        show: print a line for each report.
        tensorboard: write the same figures for TensorBoard into the folder, too.
        wandb: give the same figures to Weights & Biases, offline unless ``WANDB_MODE`` says otherwise.
        settings: settings of the run, such as its learning rate, to write into the ``start`` line.

    Raises:
        ValueError: ``metrics.jsonl`` cannot be written, or a library that is asked for is missing; on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        total_steps: int | None = None,
        first_step: int = 0,
        every: int = 10,
        show: bool = True,
        tensorboard: bool = False,
        wandb: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._sharded = [part for _, part in sharded_parts(model)]
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.path = Path(folder) / FILE
        self.is_first = self._ranks == 1 or dist.get_rank() == 0
        self.steps_made = self._first = first_step = int(first_step)  # JSON would have NumPy's number as text
        self._total, self._every = total_steps, every
        self._outputs: list[Callable[[dict[str, Any]], object]] = []
        self._opened = ExitStack()
        self._began = self._since = self._stepped = time.perf_counter()
        with refused_together(dist.distributed_c10d._get_default_group()) if self._ranks > 1 else nullcontext():
            if self.is_first:
                self._open(dict(settings or {}), show, tensorboard, wandb)
        for each in self._sharded:
            require_state(each)
        plans = [plan_of(each) for each in self._sharded]
        planned = {"plan": "\n\n".join(map(str, plans)), "planned_bytes": sum(plan.owned_bytes for plan in plans)}
        own = {"time": time.time(), "first_step": first_step, "ranks": self._ranks, "torch": torch.__version__}
        own["device"] = next((each.device.type for each in model.parameters()), "cpu")
        theirs = {name: value for name, value in (settings or {}).items() if name not in planned}
        self._write("start", {**theirs, **own, **(planned if plans else {})})
        # time the sharded module itself: a LightningModule around it calls it in training_step, not in a forward
        self._clock = _StepClock(self._sharded[0] if len(self._sharded) == 1 else model)
        self._opened.callback(self._clock.close)
        self._pending = self._tokens = 0
        self._counted = self._sent()

    def step(self, loss: Tensor | float | None = None, *, tokens: int = 0, **values: Tensor | float) -> None:
        """Count an optimizer step; report if one is due, or if there are further values.

        Args:
            loss: loss of this step. A tensor of one element is averaged over the ranks, a collective; a number is taken
                as it is.
            tokens: number of tokens of all ranks together in this step.
            values: further figures of the step, such as ``lr``.
        """
        self.steps_made += 1
        self._pending += 1
        self._tokens = self._tokens + tokens  # ``tokens`` may be on a GPU: it is read only for a report
        at_edge = self.steps_made in (self._first + 1, self._total)
        if values or (self._every and (at_edge or self.steps_made % self._every == 0)):
            self.report(**({} if loss is None else {"loss": loss}), **values)
        self._stepped = time.perf_counter()

    def report(self, **values: Tensor | float) -> None:
        """Report now the steps since the last report; tensors are averaged over the ranks, a collective."""
        means = self._means(values)
        found = self._speed() if self._pending else {}  # no times in a step's second report
        self._write("step", {**means, **found, **self._memory(), "step": self.steps_made})

    def _speed(self) -> dict[str, Any]:
        """Return seconds and bytes of a step, and tokens per second, as means since the last call."""
        seconds, steps, sent = time.perf_counter() - self._since, self._pending, self._sent()
        found: dict[str, Any] = {"s_per_step": seconds / steps} | self._clock.parts(steps)
        if self._tokens:
            found["tokens_per_s"] = round(int(self._tokens) / seconds)
        for name, now in sent.items():
            found[f"{name}_per_step"] = (now - self._counted[name]) // steps
        self._pending = self._tokens = 0
        self._since, self._counted = time.perf_counter(), sent
        return found

    def record(self, **values: Tensor | float) -> None:
        """Write figures that are of no step, such as ``val_loss``; time since the last step then counts for no step."""
        self._write("eval", {**self._means(values), "step": self.steps_made})
        now = time.perf_counter()
        self._since += now - max(self._stepped, self._since)
        self._stepped = now

    def close(self, **values: Any) -> None:
        """Write the ``end`` line and close the file; nothing of the run is written after it."""
        self._write("end", {**values, **self._memory(), "step": self.steps_made})
        self._outputs.clear()
        self._opened.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(**({} if error is None else {"error": f"{type(error).__name__}: {error}"}))

    def _open(self, settings: dict[str, Any], show: bool, tensorboard: bool, wandb: bool) -> None:
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            json.dumps(settings, default=str)
            # unbuffered, so that written lines survive any end of the run
            self._file = self._opened.enter_context(self.path.open("ab+", buffering=0))
            if self._file.tell():
                self._file.seek(-1, os.SEEK_END)
                # end the half line that an earlier, killed run has left
                self._file.write(b"" if self._file.read(1) == b"\n" else b"\n")
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"Metrics: {self.path} cannot be written: {error}") from error
        self._outputs.append(self._append)
        if tensorboard:
            library = _imported("tensorboard", "torch.utils.tensorboard")
            self._outputs.append(partial(_to_tensorboard, self._opened.enter_context(library.SummaryWriter(folder))))
        if wandb:
            mode = os.environ.get("WANDB_MODE", "offline")
            run = _imported("wandb", "wandb").init(dir=folder, mode=mode, config=settings)
            self._outputs.append(partial(_to_wandb, self._opened.enter_context(run)))
        if show:
            self._outputs.append(partial(_show, self._total))

    def _append(self, values: dict[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``; if the disk is full, training goes on and further figures are lost."""
        line = json.dumps(values, default=str).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            warnings.warn(f"Metrics: {self.path} ends here: {error.strerror}", stacklevel=2)
            self._outputs.remove(self._append)

    def _write(self, event: str, values: dict[str, Any]) -> None:
        own = {"event": event, "seconds": round(time.perf_counter() - self._began, 3)}
        written = own | values | own  # ``own`` comes first in the line, and overrides equal names in ``values``
        for name, value in written.items():
            if isinstance(value, float) and not isfinite(value):
                written[name] = None
        for output in list(self._outputs):
            output(written)

    def _means(self, values: dict[str, Tensor | float]) -> dict[str, float]:
        """Return ``values`` as numbers, tensors as their means over the ranks."""
        group = [dist.distributed_c10d._get_default_group()] if self._ranks > 1 else []
        numbers = {name: _number(name, value) for name, value in values.items()}
        own = {name: number for name, number in numbers.items() if isinstance(values[name], Tensor)}
        if own:
            everywhere = all_gather_objects(own, group)
            if other := next((each for each in everywhere if each.keys() != own.keys()), None):
                raise ValueError(f"Metrics: ranks gave tensors of different names, {sorted(own)} and {sorted(other)}")
            numbers |= {name: sum(each[name] for each in everywhere) / len(everywhere) for name in own}
        return numbers

    def _sent(self) -> dict[str, int]:
        return self._counters("gathered_bytes", "reduced_bytes")

    def _memory(self) -> dict[str, int]:
        return {"peak_memory_bytes": peak_memory(), **self._counters("owned_bytes", "overflow_buffers")}

    def _counters(self, *names: str) -> dict[str, int]:
        found = [counters_of(each) for each in self._sharded]
        return {name: sum(getattr(each, name) for each in found) for name in names} if found else {}


def _number(name: str, value: Tensor | float) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Metrics: {name} has shape {tuple(value.shape)}: pass one number, such as its mean")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)  # float() of a tensor with a graph warns
    except (TypeError, ValueError) as error:
        raise ValueError(f"Metrics: {name} is {value!r}: pass a number, or a tensor of one element") from error


def peak_memory() -> int:
    """Return the peak bytes of tensors on the GPU; without a GPU, those of the whole process in host memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _StepClock:
    """Times forwards, backwards and optimizer steps, by CUDA events on a GPU; only ``parts`` waits for the events."""

    def __init__(self, model: nn.Module) -> None:
        self._on_cuda = any(each.is_cuda for each in model.parameters())
        self._marks: list[tuple[str, Any]] = []
        self._handles = [
            model.register_forward_pre_hook(lambda *_: self._mark_forward("forward"), prepend=True),
            model.register_forward_hook(lambda *_: self._mark_forward("backward")),
            register_optimizer_step_pre_hook(lambda *_: self._mark("optimizer")),
            register_optimizer_step_post_hook(lambda *_: self._mark("")),
        ]

    def _mark_forward(self, begins: str) -> None:
        # skip forwards without gradients, which are of validations, and compiled graphs, in which no time can be taken
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._mark(begins)

    def _mark(self, begins: str) -> None:
        if not self._on_cuda:
            self._marks.append((begins, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((begins, event))

    def parts(self, steps: int) -> dict[str, float]:
        """Return mean seconds of a step's parts since the last call. A backward ends as a forward or update begins."""
        found: dict[str, float] = defaultdict(float)
        if self._on_cuda and self._marks:
            self._marks[-1][1].synchronize()
        for (name, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                found[name] += begin.elapsed_time(end) / 1e3 if self._on_cuda else end - begin
        del self._marks[:-1]
        return {f"{name}_s": total / steps for name, total in found.items()}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


# Where figures go ----------------------------------------------------------------------------------------------------


def _to_tensorboard(writer: Any, values: dict[str, Any]) -> None:
    if "step" in values:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                writer.add_scalar(name, value, values["step"])


def _to_wandb(run: Any, values: dict[str, Any]) -> None:
    if "step" in values:
        run.log({name: value for name, value in values.items() if value is not None}, step=values["step"])


def _imported(option: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"Metrics({option}=True) needs {option}: pip install {option} ({error})") from error


def _show(total: int | None, values: dict[str, Any]) -> None:
    if values["event"] not in ("step", "eval"):
        return
    shown = [f"step {values['step']:4}{f'/{total}' if total else ''}"]
    for name in ("loss", "val_loss"):
        if name in values:
            number = "not finite" if values[name] is None else f"{values[name]:.3f}"
            shown.append(f"{name.replace('_', ' ')} {number}")
    if "tokens_per_s" in values:
        shown.append(f"{values['tokens_per_s']:6,} tokens/s")
    if "gathered_bytes_per_step" in values:
        gathered, reduced = (values[f"{name}_bytes_per_step"] / 1e6 for name in ("gathered", "reduced"))
        shown.append(f"gathered {gathered:.1f} MB, reduced {reduced:.1f} MB a step")
    print(*shown, sep="   ", flush=True)
