"""What one step does, counted by `torch.profiler` in a step that nobody times.

*Ops* are ATen calls, nested ones too. A *copy-like op* is a call of `COPIES` with no other one inside it, so that
`clone`, `contiguous`, `to`, `_foreach_copy_` and `split_with_sizes_copy` count once for each tensor they copy (all
of them end in `copy_`) and a `cat` counts once; copies of a single element (Python scalars) do not count.
*Allocated bytes* are the sum of all allocations, whatever is freed.

Each allocation is charged to the innermost thing around it that has an owner: a Python frame by its file, a `c10d`
op, or the backward node of a Python `autograd.Function` (the models here have none: such a node is the engine's).
A hook's `empty` is therefore the engine's, and the matmul of a module that the engine called is the model's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function

from bench.training import PHASES, Training

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COPIES = frozenset(
    f"aten::{name}" for name in ("copy_", "cat", "_chunk_cat", "_foreach_copy_", "split_with_sizes_copy")
)

MARK = "bench::"

OWNERS = (
    ("torch/distributed/distributed_c10d.py", "wire"),
    ("torch/distributed/fsdp/", "engine"),
    ("torch/nn/parallel/", "engine"),
    ("yafsdp_cc/", "engine"),
    ("torch/optim/", "optimizer"),
    ("torch/nn/utils/clip_grad.py", "clip"),
    ("torch/nn/modules/module.py", "model"),
    ("torch/nn/modules/", "model"),
    ("bench/models.py", "model"),
    ("bench/training.py", "model"),
)
"""A part of a file's path, and who owns an allocation made there. Frames of other files belong to their callers."""


@dataclass
class Counts:
    """One step on one rank. Per phase, but for `owners` and `sites`, which are of forward and backward."""

    ops: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    copies: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    allocated: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    owners: Counter[str] = field(default_factory=Counter)
    """Bytes allocated, by owner."""
    sites: Counter[str] = field(default_factory=Counter)
    """Bytes the engine allocated, by place."""

    def as_dict(self) -> dict[str, Any]:
        return {name: dict(value) for name, value in vars(self).items()}


def count(training: Training) -> Counts:
    """Run one step under the profiler and count."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as profiler:
        training.step(lambda phase: record_function(MARK + phase))
    results = profiler.profiler.kineto_results
    phases = _Phases(results.events())
    counts = Counts()
    for event in walk(results.experimental_event_tree()):
        phase = phases.at(event.start_time_ns)
        if phase is None:
            continue
        kind = event.tag.name
        if kind == "TorchOp" and event.name.startswith("aten::"):
            counts.ops[phase] += 1
            counts.copies[phase] += _is_copy(event)
        elif kind == "Allocation" and event.extra_fields.alloc_size > 0:
            size = event.extra_fields.alloc_size
            counts.allocated[phase] += size
            if phase in ("forward", "backward"):
                owner, site = _owner(event)
                counts.owners[owner] += size
                if owner == "engine":
                    counts.sites[site] += size
    return counts


class _Phases:
    """When each phase ran. By time: in the event tree a range ends with the Python frame that opened it."""

    def __init__(self, events: Iterable[Any]) -> None:
        self.spans = [
            (event.start_ns(), event.start_ns() + event.duration_ns(), event.name()[len(MARK) :])
            for event in events
            if event.name().startswith(MARK)
        ]

    def at(self, moment: int) -> str | None:
        return next((name for start, end, name in self.spans if start <= moment < end), None)


def walk(roots: Iterable[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)


def _around(event: Any) -> Iterator[Any]:
    """The events around ``event``, from the inside out."""
    while event.parent is not None:
        event = event.parent
        yield event


def _is_copy(event: Any) -> bool:
    if event.name not in COPIES or any(inner.name in COPIES for inner in walk(event.children)):
        return False
    into = event.extra_fields.inputs[0] if event.extra_fields.inputs else None
    return getattr(into, "sizes", None) != [] and getattr(into, "sizes", None) != [1]


def _owner(allocation: Any) -> tuple[str, str]:
    """Who made an allocation, and where: the op nearest to it and the frame that has an owner."""
    op = None
    for event in _around(allocation):
        kind = event.tag.name
        if kind == "TorchOp":
            op = op or event.name
            if event.name.startswith(("c10d::", "gloo:", "nccl:")):
                return "wire", event.name
            if event.name.endswith("Backward") and "::" not in event.name:
                return "engine", f"{event.name} > {op}"
        elif kind == "PyCall":
            path = event.extra_fields.callsite.file_name
            for part, owner in OWNERS:
                if part in path:
                    return owner, f"{event.name[event.name.rfind('/') + 1 :]} > {op}"
    return "model", str(op)
