"""The training loop every contestant runs: torch's own, cut into four phases that can be clocked or profiled."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from bench.contestants import Contestant
    from bench.models import Spec

PHASES = ("forward", "backward", "clip", "step")


class Training:
    """One contestant at work on this rank's batch: default AdamW (a loop on CPU) behind `clip_grad_norm_`."""

    def __init__(self, contestant: Contestant, spec: Spec) -> None:
        self.contestant = contestant
        self.model = contestant.build(spec)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = spec.batch(dist.get_rank())
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, phase: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()) -> None:
        with phase("forward"):
            loss = self.model(*self.batch)
        with phase("backward"):
            loss.backward()
        with phase("clip"):
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with phase("step"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def optimizer_bytes(self) -> int:
        """Of this rank's optimizer state."""
        return sum(
            local(value).nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, or the tensor."""
    return getattr(tensor, "_local_tensor", tensor)


class Clock:
    """Milliseconds per phase: processor time of all threads of the process (gloo's too), and wall time."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.cpu[phase] = 1e3 * (time.process_time() - cpu)
        self.wall[phase] = 1e3 * (time.perf_counter() - wall)
