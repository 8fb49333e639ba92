"""The plan of a sharded model: what is gathered together, and what it costs; printable before the first step.

``report`` is the plan and its tables; ``memory`` fills it from an engine.
"""

from yafsdp_cc.plan.report import Plan

__all__ = ["Plan"]
