"""Who takes part in each suite. Names and settings alone, so that a misspelt one is told before torch is imported."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple


class Contestant(NamedTuple):
    """The function that makes it, of ``trainees`` or ``exchanges``, and what this is told."""

    maker: str
    told: dict[str, Any]
    beside: str
    """Whose figures its own are held against."""


def _trains(maker: str, **told: Any) -> Contestant:
    return Contestant(maker, told, beside="fsdp2 bf16")


def _sums(maker: str, **told: Any) -> Contestant:
    return Contestant(maker, told, beside="torch reduce-scatter")


def _gathers(maker: str, **told: Any) -> Contestant:
    return Contestant(maker, told, beside="torch all-gather")


TRAINING = {
    "fsdp2 fp32": _trains("fsdp2"),
    "fsdp2 bf16": _trains("fsdp2", bf16=True),
    "fsdp2 bf16 + compress int8/int8": _trains("fsdp2", bf16=True, gradients="int8", weights="int8"),
    "ddp fp32": _trains("ddp"),
    "ddp fp16 hook": _trains("ddp", fp16_hook=True),  # the one for bf16 wants NCCL
    "ddp powersgd": _trains("ddp_powersgd"),
    "ours exact bf16": _trains("ours"),
    "ours int8 / int8 weights": _trains("ours", gradients="int8", weights="int8"),
    "ours int4 / int8 weights": _trains("ours", gradients="int4", weights="int8"),
    "ours auto / int8 weights": _trains("ours", gradients="auto", weights="int8"),
    "ours onebit / int8 weights": _trains("ours", gradients="onebit", weights="int8"),
    "ours onebit / int8 kept": _trains("ours", gradients="onebit", weights="int8", zero_stage=2),
    "ours powersgd / int8 weights": _trains("ours", gradients="powersgd", weights="int8"),
    "ours 1-bit adam": _trains("one_bit_adam"),
    "ours 1-bit adam int4 changes": _trains("one_bit_adam", weights="int4"),
    "ours 1-bit adam warm-up": _trains("one_bit_adam", phase="exact"),
    "ours 1-bit adam refresh": _trains("one_bit_adam", phase="both"),
}

PHASES = {
    "ours 1-bit adam": {
        "exact": "ours 1-bit adam warm-up",
        "kept": "ours 1-bit adam warm-up",
        "both": "ours 1-bit adam refresh",
    }
}
"""Of contestants whose steps are not all alike: who stands for steps of another phase when time is taken."""

LEARNS_AS = {"ours auto / int8 weights": "ours int4 / int8 weights"}
"""Whose loss stands for that of another: ``auto`` chooses by the network, and leaves out no more than int4 does."""

SLOW = (
    "fsdp2 fp32",
    "fsdp2 bf16",
    "ddp fp32",
    "ddp powersgd",
    "ours exact bf16",
    "ours auto / int8 weights",
    "ours 1-bit adam",
)
"""Who trains for its loss against wall-clock."""

if find_spec("deepspeed") is not None:
    TRAINING["deepspeed zero-3 bf16"] = _trains("zero_3")

EXCHANGES = {
    "torch reduce-scatter": _sums("torch_reduce_scatter"),
    "torch all-to-all + sum": _sums("torch_all_to_all"),
    "ours exact": _sums("exact_reduce"),
    "ours int8": _sums("encoded_reduce", codec="int8"),
    "ours int4": _sums("encoded_reduce", codec="int4"),
    "ours onebit": _sums("encoded_reduce", codec="onebit"),
    "torch all-gather": _gathers("torch_all_gather"),
    "ours gather exact": _gathers("exact_gather"),
    "ours gather int8": _gathers("encoded_gather", codec="int8"),
}
