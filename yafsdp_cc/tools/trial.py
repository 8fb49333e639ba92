"""One rank of ``yafsdp-cc try``: a user's script under one setting, watched for some steps and then ended.

A step ends with ``optimizer.step()`` of the first optimizer that makes one, also under gradient accumulation,
Transformers' Trainer and Accelerate. The loss of a step is the tensor that a backward starts from. The first steps are
for the loss, on a fast network. Then rank 0 slows the network down if asked to, records one step and times others.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean, median_low
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.optim.optimizer import register_optimizer_step_post_hook

from yafsdp_cc import api
from yafsdp_cc.config import RUN
from yafsdp_cc.optim import OneBitAdam
from yafsdp_cc.sharding.assembly import state_of
from yafsdp_cc.tools.cli.capture import Recording, synchronize
from yafsdp_cc.tools.metrics import peak_memory
from yafsdp_cc.tools.netlab.links import UNSHAPED, Links

if TYPE_CHECKING:
    from yafsdp_cc.engine.state import FSDPState
    from yafsdp_cc.plan import Plan

LOSS_SHARE = 0.6
"""Share of a run's time after which it makes no more steps for the loss, even if not all were made."""
LEAST_SECONDS = 10.0
"""Seconds that a run has at least for its steps, however long its start took."""
REPLACED = {
    "compression": ("compression",),
    "precision": ("mp_policy",),
    "shard": ("reshard_after_forward", "zero_stage"),
}
"""Arguments of ``shard`` and ``fully_shard``, by the section of run files whose settings replace them."""


class Asked(NamedTuple):
    """Settings that ``yafsdp-cc try`` gives to a run of the script."""

    folder: str
    ends: float
    """Time at which the run should have ended, in seconds since the epoch."""
    steps: int
    timed: int
    """Largest number of timed steps; before these come at most ``steps`` steps for the loss."""
    settings: dict[str, Any]
    """Settings of the engine that overrule the script and the run file."""
    row: str
    """Name of the settings; under ``fsdp2`` torch's engine shards, under ``OneBitAdam`` this replaces torch's Adam."""
    clip: float | None
    """Largest norm that the script passes to ``clip_grad_norm_``, if known; ``OneBitAdam`` clips by it."""
    bandwidth: str | None
    """Rate of the links between ranks from the recorded step on, if they are in a ``netlab.Lab``; else None."""


@contextmanager
def on_trial(wanted: str) -> Iterator[None]:
    """Watch the script that runs in the ``with`` block; write figures also if the script ends before the trial does."""
    trial = Trial(Asked(**json.loads(wanted)))
    try:
        yield
    except SystemExit as error:
        failed = error.code not in (None, 0)
        trial.write(error=f"SystemExit: {error.code}" if failed else None, ended=True)
        raise
    except Exception as error:
        trial.write(error=f"{type(error).__name__}: {error}")
        raise
    trial.write(ended=True)


class Trial:
    """Counts optimizer steps, keeps their losses, and ends this process together with those of the other ranks."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._folder = asked, Path(asked.folder)
        self._began = self._ends = asked.ends
        self._is_first = os.environ.get("RANK", "0") == "0"
        self._optimizer: Any = None
        self._modules: list[nn.Module] = []
        self._called: set[str] = set()
        self._replaced: set[str] = set()
        self._plans: list[Plan] = []
        self._clip: float | None = None
        self._roots: list[Tensor] = []
        self._losses: list[list[Tensor]] = []
        self._recording: Recording | None = None
        self._marks: list[tuple[float, int, int]] = []
        """Time, and bytes of weights and of gradients sent so far, after the recorded step and after each timed one."""
        self._peak = 0
        if self._is_first and asked.bandwidth:
            Links.here().set_bandwidth(UNSHAPED)
        self._replace_settings()
        self._replace_functions()
        register_optimizer_step_post_hook(self._after_step)

    # What the script finds in place of its own ------------------------------------------------------------------------

    def _replace_settings(self) -> None:
        chosen = self._asked.settings
        sections = {name.partition(".")[0] for name in chosen} - {"shard"}
        given = json.loads(os.environ.get(RUN, "{}"))
        kept = {name: one for name, one in given.items() if name.partition(".")[0] not in sections}
        self._replaced.update(name.partition(".")[0] for name in given.keys() - kept.keys())
        os.environ[RUN] = json.dumps(kept | {name: (value, "yafsdp-cc try") for name, value in chosen.items()})

    def _replace_functions(self) -> None:
        chosen = fsdp.fully_shard if self._asked.row == "fsdp2" else api.fully_shard
        vars(api)["shard"] = self._watched(api.shard, "shard")
        vars(api)["fully_shard"] = self._watched(chosen, "fully_shard")
        of_torch = self._watched(chosen, "fully_shard", "torch")
        for name in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp"):
            if name in sys.modules:
                vars(sys.modules[name])["fully_shard"] = of_torch
        backward, clip = torch.autograd.backward, nn.utils.clip_grad_norm_

        @functools.wraps(backward)
        def watched_backward(tensors: Any, *args: Any, **given: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self._roots += [root.detach().clone() for root in roots if root.numel() == 1]
            backward(tensors, *args, **given)

        @functools.wraps(clip)
        def watched_clip(parameters: Any, max_norm: float, *args: Any, **given: Any) -> Tensor:
            self._clip = float(max_norm)
            return clip(parameters, max_norm, *args, **given)

        vars(torch.autograd)["backward"] = watched_backward
        vars(nn.utils)["clip_grad_norm_"] = watched_clip
        if self._asked.row == "OneBitAdam":
            for kind in ("Adam", "AdamW"):
                one_bit = _one_bit(kind, self._asked)
                vars(torch.optim)[kind] = one_bit
                vars(sys.modules[f"torch.optim.{kind.lower()}"])[kind] = one_bit

    def _watched(self, function: Callable[..., Any], *called: str) -> Callable[..., Any]:
        """Wrap ``shard`` or ``fully_shard`` so that arguments which the trial's settings replace are dropped."""
        replaced = {each for name in self._asked.settings for each in REPLACED[name.partition(".")[0]]}
        if function is fsdp.fully_shard:
            replaced |= {"compression", "ownership"}  # torch's ``fully_shard`` lacks these arguments

        @functools.wraps(function)
        def watched(module: Any, *args: Any, **given: Any) -> Any:
            self._called.update(called)
            self._replaced.update(f"{name}=" for name in replaced & given.keys())
            result = function(module, *args, **{name: each for name, each in given.items() if name not in replaced})
            self._modules += result if isinstance(result, list) else [result]
            return result

        return watched

    # Steps ------------------------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        if self._asked.row == "OneBitAdam" and not isinstance(optimizer, OneBitAdam):
            kind = type(optimizer).__name__
            raise TypeError(f"OneBitAdam replaces torch's Adam and AdamW, and this script has {kind}")
        if not self._losses:  # allow some seconds for steps, however slow the start was
            self._began = time.time()
            self._ends = max(self._asked.ends, self._began + LEAST_SECONDS)
            for each in self._engines():  # not later: at its end the script may destroy process groups
                with suppress(RuntimeError):  # no plan before a forward: this step trains another model
                    self._plans.append(api.plan_of(each.model))
        self._losses.append(self._roots)
        self._roots = []
        if self._is_first:
            self._lead(optimizer)
        if self._last_step() <= len(self._losses):
            self._end()

    def _lead(self, optimizer: torch.optim.Optimizer) -> None:
        """Decide on rank 0 whether the next step is made, and whether its loss is recorded or its time is taken.

        No other rank finishes a step before rank 0 has finished the one before, as ranks sum gradients in each step. So
        all ranks see which step is the last before they have made it.
        """
        if self._recording is None:
            late = time.time() > self._began + LOSS_SHARE * (self._ends - self._began)
            if len(self._losses) >= self._asked.steps or late:
                self._peak = peak_memory()
                if self._asked.bandwidth:
                    Links.here().set_bandwidth(self._asked.bandwidth)
                self._recording = Recording(True, 1, 1, self._asked.folder)
            return
        marks = self._marks
        if not marks:
            self._recording.after_step(optimizer)
        synchronize()
        sent = [each.context.counters for each in self._engines()]
        marks.append(
            (time.perf_counter(), sum(one.gathered_bytes for one in sent), sum(one.reduced_bytes for one in sent))
        )
        if len(marks) > 1 and self._last_step() == sys.maxsize:
            late = time.time() + marks[-1][0] - marks[-2][0] > self._ends
            if late or len(marks) >= self._asked.timed:
                (self._folder / "last.part").write_text(str(len(self._losses) + 1))
                (self._folder / "last.part").replace(self._folder / "last")

    def _last_step(self) -> int:
        path = self._folder / "last"
        return int(path.read_text()) if path.exists() else sys.maxsize

    def _end(self) -> NoReturn:
        """End this process once all ranks have made the last step: what the script does at its end is not on trial."""
        self.write()
        with suppress(RuntimeError, ValueError):  # another rank may have left already, or there is no group
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # Figures ----------------------------------------------------------------------------------------------------------

    def write(self, error: str | None = None, ended: bool = False) -> None:
        """Write this rank's figures into the folder of the run."""
        own: dict[str, Any] = {"time": time.time(), "error": error, "ended": ended}
        if error is None:
            device = next((each.device for module in self._modules for each in module.parameters()), None)
            # leave out steps after the warm-up in which OneBitAdam sums exactly: they are rare in a long run
            steps = [[after - before for before, after in zip(*two, strict=True)] for two in pairwise(self._marks)]
            most = 1.1 * min((each for *_, each in steps), default=0) if self._asked.row == "OneBitAdam" else inf
            timed = [each for each in steps if each[-1] <= most]
            own |= {
                "losses": [mean(each.item() for each in roots) for roots in self._losses if roots],
                "timed": [seconds for seconds, *_ in timed],
                "sent": median_low(sum(each) for _, *each in timed) if timed else 0,
                "peak": self._peak or peak_memory(),
                "planned": sum(plan.owned_bytes for plan in self._plans),
                "dtypes": sorted({each.forward for plan in self._plans for each in plan.dtypes}),
                "emulates_bf16": device is not None and api.emulates_bf16(device),
                "called": sorted(self._called),
                "replaced": sorted(self._replaced),
                "clip": self._clip,
                "ranks": int(os.environ.get("WORLD_SIZE", "1")),
            }
        path = self._folder / f"figures-{os.environ.get('RANK', '0')}.json"
        path.with_suffix(".part").write_text(json.dumps(own))
        path.with_suffix(".part").replace(path)

    def _engines(self) -> Iterable[FSDPState]:
        """Return the engines of all modules that ``yafsdp_cc`` has sharded."""
        return dict.fromkeys(state for module in self._modules if (state := state_of(module)) is not None)


def _one_bit(kind: str, asked: Asked) -> type[OneBitAdam]:
    """Return a subclass of ``OneBitAdam`` that takes the arguments of torch's ``Adam`` or ``AdamW``."""

    class OneBit(OneBitAdam):
        def __init__(self, params: Any, *args: Any, **given: Any) -> None:
            for name in ("foreach", "fused", "capturable", "differentiable"):  # arguments that choose torch's kernels
                given.pop(name, None)
            if wrong := [name for name in ("amsgrad", "maximize") if given.pop(name, False)]:
                raise ValueError(f"OneBitAdam has no {wrong[0]}, which this script passes to {kind}")
            if kind == "Adam" and given.setdefault("weight_decay", 0.0):
                raise ValueError("OneBitAdam decays weights as AdamW does, and this script passes weight_decay to Adam")
            warmup_steps = max(1, asked.steps // 2)
            # no refreshes (exact sums for the second moment) where steps are only timed: they are rare in a real run
            refreshes = 4 if asked.steps > warmup_steps + 4 else 0
            super().__init__(
                params, *args, warmup_steps=warmup_steps, refreshes=refreshes, max_grad_norm=asked.clip, **given
            )

    return OneBit
