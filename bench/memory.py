"""Peak memory of a few steps, each contestant in fresh ranks: resident bytes, and live tensor bytes counted exactly."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function

from bench.contestants import bytes_owned
from bench.counting import MARK, walk
from bench.training import Training

if TYPE_CHECKING:
    from bench.contestants import Contestant
    from bench.models import Spec


def resident(contestant: Contestant, spec: Spec) -> dict[str, int]:
    """Resident bytes of this process above what it had before the model: at their peak in the steps, and after them.

    The peak is the kernel's own (VmHWM), reset once the model is wrapped. It includes what the allocator keeps and
    buffers of the transport, and moves by some MiB from run to run.
    """
    before = _status("VmRSS")
    training = Training(contestant, spec)
    _give_back()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(spec.steps):
        training.step()
    peak = _status("VmHWM")
    _give_back()
    return {"peak_resident": peak - before, "settled_resident": _status("VmRSS") - before}


def counted(contestant: Contestant, spec: Spec) -> dict[str, Any]:
    """Live bytes of tensors as the profiler sees them allocated and freed, from before the model is built."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function(f"{MARK}build"):
            training = Training(contestant, spec)
            gc.collect()
        for number in range(spec.steps):
            with record_function(f"{MARK}{number}"):
                training.step()
    results = profiler.profiler.kineto_results
    starts = sorted(
        (event.start_ns(), event.name()[len(MARK) :]) for event in results.events() if event.name().startswith(MARK)
    )
    peaks = {name: 0 for _, name in starts}
    live = dict(peaks)
    allocations = (event for event in walk(results.experimental_event_tree()) if event.tag.name == "Allocation")
    for event in sorted(allocations, key=lambda event: event.start_time_ns):
        name = [name for start, name in starts if start <= event.start_time_ns][-1:]
        if name:
            live[name[0]] = event.extra_fields.total_allocated
            peaks[name[0]] = max(peaks[name[0]], live[name[0]])
    build_peak, wrapped = peaks.pop("build"), live.pop("build")
    return {
        "peak_counted": max(peaks.values()),
        "peak_build": build_peak,
        "live_wrapped": wrapped,
        "live_after_steps": list(live.values()),
        "optimizer_state": training.optimizer_bytes(),
        **(bytes_owned(training.model) if contestant.is_ours else {}),
    }


def _status(field: str) -> int:
    """Bytes in a line of /proc/self/status."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def _give_back() -> None:
    """Return what is free to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
