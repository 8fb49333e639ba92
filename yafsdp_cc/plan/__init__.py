"""The plan of a sharded model: what is gathered together, and what it costs; printable before the first step.

``report`` has ``Plan`` and its printed tables; ``memory`` makes the ``Plan`` of an engine.
"""

from yafsdp_cc.plan.report import Plan

__all__ = ["Plan"]
