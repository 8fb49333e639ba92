"""What one step does, counted by `torch.profiler` in a step that nobody times.

*Ops* are ATen calls, nested ones too. *Copies* are calls of `COPIES` with no other one inside, so that `clone`,
`contiguous`, `to`, `_foreach_copy_` and `split_with_sizes_copy` count once for each tensor they copy (all of them end
in `copy_`) and a `cat` counts once; copies of a single element (Python scalars) do not count. *Allocated* bytes are the
sum of all allocations, whatever is freed.

Each allocation is charged to the innermost owner around it: a Python frame by its file, a `c10d` op, or the backward
node of a Python `autograd.Function` (the models here have none: such a node is the engine's). A hook's `empty` is
therefore the engine's, and the matmul of a module that the engine called is the model's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

COPIES = frozenset(
    f"aten::{name}" for name in ("copy_", "cat", "_chunk_cat", "_foreach_copy_", "split_with_sizes_copy")
)
_MARK = "bench::"
_OWNERS = {
    "torch/distributed/distributed_c10d.py": "communication",
    "torch/distributed/fsdp/": "engine",
    "torch/nn/parallel/": "engine",
    "yafsdp_cc/": "engine",
    "torch/optim/": "optimizer",
    "torch/nn/utils/clip_grad.py": "clip",
    "torch/nn/modules/": "model",
    "bench/models.py": "model",
    "bench/engine.py": "model",
}
"""Owners by a part of a file's path. Frames of other files belong to their callers."""


@dataclass
class Counts:
    """One step on one rank, by phase; ``owners`` and ``sites`` are of forward and backward."""

    ops: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    allocated: Counter[str] = field(default_factory=Counter)
    owners: Counter[str] = field(default_factory=Counter)
    """Bytes allocated, by owner."""
    sites: Counter[str] = field(default_factory=Counter)
    """Bytes allocated by the engine, by place."""


def count(step: Callable[[Callable[[str], Any]], None]) -> Counts:
    """Count one ``step``, which opens a context for each of its phases by name."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as profiler:
        step(lambda phase: record_function(_MARK + phase))
    results = profiler.profiler.kineto_results
    # Phases by time: in the event tree a range ends with the Python frame that opened it.
    phases = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name()[len(_MARK) :])
        for event in results.events()
        if event.name().startswith(_MARK)
    ]
    counts = Counts()
    for event in _walk(results.experimental_event_tree()):
        phase = next((name for start, end, name in phases if start <= event.start_time_ns < end), None)
        kind = event.tag.name
        if phase is None:
            continue
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


def _walk(roots: Iterable[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)


def _is_copy(event: Any) -> bool:
    if event.name not in COPIES or any(inner.name in COPIES for inner in _walk(event.children)):
        return False
    target = event.extra_fields.inputs[0] if event.extra_fields.inputs else None
    return getattr(target, "sizes", None) not in ([], [1])


def _owner(allocation: Any) -> tuple[str, str]:
    """Return the owner of an allocation and its place: the nearest op and the frame that has an owner."""
    op, event = None, allocation
    while (event := event.parent) is not None:
        kind = event.tag.name
        if kind == "TorchOp":
            op = op or event.name
            if event.name.startswith(("c10d::", "gloo:", "nccl:")):
                return "communication", event.name
            if event.name.endswith("Backward") and "::" not in event.name:
                return "engine", f"{event.name} > {op}"
        elif kind == "PyCall":
            path = event.extra_fields.callsite.file_name
            for part, owner in _OWNERS.items():
                if part in path:
                    return owner, f"{event.name[event.name.rfind('/') + 1 :]} > {op}"
    return "model", str(op)
