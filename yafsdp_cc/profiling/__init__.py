"""See what the engine does: ranges for Nsight Systems and ``torch.profiler``."""

from yafsdp_cc.profiling.spans import Span, mark_optimizer_steps, span

__all__ = ["Span", "mark_optimizer_steps", "span"]
