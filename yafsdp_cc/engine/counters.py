"""What an engine counts about itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """What the engine has done since ``shard``, on this rank.

    ``gathered_bytes`` and ``reduced_bytes`` are what this rank sent for weights and for gradients (the small group
    counts with the latter); ``spills`` how often a unit needed a buffer of its own because its slot was in use.
    """

    gathered_bytes: int = 0
    reduced_bytes: int = 0
    spills: int = 0
    owned_bytes: int = 0
    """Bytes of all buffers that the engine owned on its device when ``counters_of`` was last called."""
    host_bytes: int = 0
    """The same of those that were offloaded to host memory."""
    chosen: dict[str, str] = field(default_factory=dict)
    """With ``compression="auto"``: the present codec of each unit's gradients; ``"fp32"`` is exact. With the guard: the
    same of units that have gone back to more bits."""
    why: str = ""
    """In one line, what was measured when a codec was changed last."""
