"""Named ranges around what the engine does, for Nsight Systems (NVTX) and ``torch.profiler`` (Kineto).

A ``Span`` is made once per kind, unit and number of bytes, with all attributes that a tool needs. Opening it costs a
few checks while no tool records. Ranges are handles, not a stack: a forward that ends by an exception (the early stop
of non-reentrant checkpointing does) never closes its range, and a gather outlives the code that started it.

The engine itself opens gather, forward, backward, reduce and replicated ranges, and ``shard`` turns on the optimizer's.
Clipping is a plain torch function, so the loop marks it::

    with yafsdp_cc.profiling.span("clip"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

try:
    import nvtx
except ModuleNotFoundError:  # without nvtx, Kineto alone shows ranges
    nvtx = None

Kind = Literal[
    "gather", "forward", "backward", "reduce", "replicated", "clip", "step", "choice", "iteration", "encode", "decode"
]

_domain = nvtx and nvtx.get_domain("yafsdp_cc")
# NVTX knows since its import whether a tool is attached to this process: if none is, event attributes are None.
NVTX_LISTENS = bool(_domain) and _domain.get_event_attributes(message="probe") is not None

_COLORS: dict[Kind, str] = {
    "gather": "blue",
    "forward": "green",
    "backward": "orange",
    "reduce": "red",
    "replicated": "purple",
    "clip": "yellow",
    "step": "cyan",
    "choice": "white",
    "iteration": "grey",
    "encode": "magenta",
    "decode": "pink",
}


class Handle(NamedTuple):
    """An open range: the objects that Kineto and NVTX returned for it."""

    record: Any | None
    nvtx_range: Any | None


class Span:
    """The range ``YaFSDP::kind (name)``, which may be opened any number of times, even while it is open.

    ``byte_count`` is the NVTX payload, and in Kineto a keyword argument shown under ``record_shapes=True``.
    """

    __slots__ = ("_attributes", "_bytes", "_entered", "title")

    def __init__(self, kind: Kind, name: str = "", byte_count: int = 0) -> None:
        self.title = f"YaFSDP::{kind} ({name})" if name else f"YaFSDP::{kind}"
        self._bytes = {"bytes": byte_count}
        self._attributes = NVTX_LISTENS and _domain.get_event_attributes(
            message=self.title, color=_COLORS[kind], category=kind, payload=byte_count
        )
        self._entered: list[Handle | None] = []

    def start(self) -> Handle | None:
        """Open the range and return its handle, for ``end`` elsewhere; None while no tool records.

        A handle that is never ended ends when it is freed (Kineto) or with the trace (NVTX).
        """
        if not (profiler._is_profiler_enabled or NVTX_LISTENS):
            return None
        nvtx_range = _domain.start_range(self._attributes) if NVTX_LISTENS else None
        if not profiler._is_profiler_enabled:
            return Handle(None, nvtx_range)
        record = _RecordFunctionFast(self.title, [], self._bytes)
        record.__enter__()
        return Handle(record, nvtx_range)

    def end(self, handle: Handle | None) -> None:
        """Close the range that ``start`` opened."""
        if handle is None:
            return
        if handle.record is not None:
            handle.record.__exit__(None, None, None)
        if handle.nvtx_range is not None:
            _domain.end_range(handle.nvtx_range)

    def __enter__(self) -> Span:
        self._entered.append(self.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self._entered.pop())


@cache
def span(kind: Kind, name: str = "", byte_count: int = 0) -> Span:
    """Return the one ``Span`` with these arguments, for a ``with`` in a training loop."""
    return Span(kind, name, byte_count)


@cache
def mark_optimizer_steps() -> None:
    """Make every ``step()`` of every torch optimizer of this process a range ``YaFSDP::step`` from now on.

    The ranges are made for NVTX alone, while a tool listens: Kineto has torch's own, ``Optimizer.step#AdamW.step``.
    """
    if not NVTX_LISTENS:
        return
    step, handles = span("step"), dict[int, "Handle | None"]()

    def before(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        handles[id(optimizer)] = step.start()

    def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        step.end(handles.pop(id(optimizer), None))

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
