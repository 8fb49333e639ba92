"""Contestants of each suite, as names and settings only, so that a misspelt name is refused before torch is
imported."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple


class Contestant(NamedTuple):
    """A function of ``trainers`` or ``exchanges``, and its keyword arguments."""

    maker: str
    settings: dict[str, Any]
    baseline: str
    """Name of the contestant that ratios are relative to."""


def trains(maker: str, **settings: Any) -> Contestant:
    """Return a contestant of the suites ``train`` and ``slow``."""
    return Contestant(maker, settings, baseline="fsdp2 bf16")


def _sums(maker: str, **settings: Any) -> Contestant:
    return Contestant(maker, settings, baseline="torch reduce-scatter")


def _gathers(maker: str, **settings: Any) -> Contestant:
    return Contestant(maker, settings, baseline="torch all-gather")


def _all_reduces(maker: str) -> Contestant:
    return Contestant(maker, {}, baseline=ALL_REDUCE)


TRAINING = {
    "fsdp2 fp32": trains("fsdp2"),
    "fsdp2 bf16": trains("fsdp2", bf16=True),
    "fsdp2 bf16 + compress int8/int8": trains("fsdp2", bf16=True, gradients="int8", weights="int8"),
    "ddp fp32": trains("ddp"),
    "ddp fp16 hook": trains("ddp", fp16_hook=True),  # DDP's hook for bf16 needs NCCL
    "ddp powersgd": trains("ddp_powersgd"),
    "ours exact bf16": trains("ours"),
    "ours int8 / int8 weights": trains("ours", gradients="int8", weights="int8"),
    "ours int4 / int8 weights": trains("ours", gradients="int4", weights="int8"),
    "ours auto / int8 weights": trains("ours", gradients="auto", weights="int8"),
    "ours onebit / int8 weights": trains("ours", gradients="onebit", weights="int8"),
    "ours onebit / int8 kept": trains("ours", gradients="onebit", weights="int8", zero_stage=2),
    "ours powersgd / int8 weights": trains("ours", gradients="powersgd", weights="int8"),
    "ours 1-bit adam": trains("one_bit_adam"),
    "ours 1-bit adam int4 changes": trains("one_bit_adam", weights="int4"),
    "ours 1-bit adam warm-up": trains("one_bit_adam", phase="exact"),
    "ours 1-bit adam refresh": trains("one_bit_adam", phase="both"),
}
if find_spec("deepspeed") is not None:
    TRAINING["deepspeed zero-3 bf16"] = trains("Zero3")

PHASES = {
    "ours 1-bit adam": {
        "exact": "ours 1-bit adam warm-up",
        "kept": "ours 1-bit adam warm-up",
        "both": "ours 1-bit adam refresh",
    }
}
"""For contestants whose steps have several phases: the contestant that times each other phase."""

LEARNS_AS = {"ours auto / int8 weights": "ours int4 / int8 weights"}
"""Contestants whose loss is taken from another: the loss of ``auto`` depends on the network, and int4's bounds it."""

SLOW = (
    "fsdp2 fp32",
    "fsdp2 bf16",
    "ddp fp32",
    "ddp powersgd",
    "ours exact bf16",
    "ours auto / int8 weights",
    "ours 1-bit adam",
)
"""Contestants of the suite ``slow``."""


def _stages(**settings: Any) -> Contestant:
    return Contestant("stages", settings, baseline="exact")


PIPELINE = {
    "torch": Contestant("torch_stages", {}, baseline="exact"),
    "exact": _stages(),
    "direct int4 / int8": _stages(forward="int4", backward="int8"),
    "hadamard int4 / int8": _stages(forward="int4", backward="int8", hadamard=True),
    "aq-sgd int4 / int8": _stages(forward="int4", backward="int8", forward_delta=True),
    "direct int3 / int6": _stages(forward="int3", backward="int6"),
    "aq-sgd int3 / int6": _stages(forward="int3", backward="int6", forward_delta=True),
    "aq-sgd hadamard int3 / int6": _stages(forward="int3", backward="int6", forward_delta=True, hadamard=True),
    "direct int2 / int4": _stages(forward="int2", backward="int4"),
    "hadamard int2 / int4": _stages(forward="int2", backward="int4", hadamard=True),
    "aq-sgd int2 / int4": _stages(forward="int2", backward="int4", forward_delta=True),
    "aq-sgd hadamard int2 / int4": _stages(forward="int2", backward="int4", forward_delta=True, hadamard=True),
    "exact / int4": _stages(backward="int4"),
    "exact / int4 lazy": _stages(backward="int4", error_feedback=True),
    "exact / int4 lazy epilogue": _stages(backward="int4", error_feedback=True, epilogue_only=True),
    "exact / powersgd": _stages(backward="powersgd"),
    "exact / powersgd lazy": _stages(backward="powersgd", error_feedback=True),
    "exact / powersgd lazy epilogue": _stages(backward="powersgd", error_feedback=True, epilogue_only=True),
}
"""Contestants of the suite ``pipeline``: codecs of forward / backward."""

ALL_REDUCE = "torch all-reduce"
"""Baseline of contestants that leave the whole sum on every rank."""
EXCHANGES = {
    "torch reduce-scatter": _sums("torch_reduce_scatter"),
    "torch all-to-all + sum": _sums("torch_all_to_all"),
    "ours exact": _sums("reduce_scatter"),
    "ours int8": _sums("reduce_scatter", codec="int8"),
    "ours int4": _sums("reduce_scatter", codec="int4"),
    "ours onebit": _sums("reduce_scatter", codec="onebit"),
    "torch all-gather": _gathers("torch_all_gather"),
    "ours gather exact": _gathers("all_gather"),
    "ours gather int8": _gathers("all_gather", codec="int8"),
    ALL_REDUCE: _all_reduces("torch_all_reduce"),
    "ours exact + gather": _all_reduces("exact_all_reduce"),
    "parameter server": _all_reduces("parameter_server"),
    "direct": _all_reduces("direct"),
    "ring": _all_reduces("ring"),
    "halving and doubling": _all_reduces("halving_and_doubling"),
    "tree": _all_reduces("tree"),
}


def _replicas(maker: str, **settings: Any) -> Contestant:
    return Contestant(maker, settings, baseline="synchronous")


REPLICAS = {
    "synchronous": _replicas("synchronous"),
    "overlap": _replicas("Overlap"),
    "overlap int8": _replicas("Overlap", codec="int8"),
    "half batches": _replicas("Overlap", half_batches=True),
    "gossip": _replicas("Gossip"),
    "gossip late": _replicas("Gossip", overlap=1),
    "diloco": _replicas("Outer", every=30),
    "diloco streaming": _replicas("Outer", every=30, fragments=3, delay=5),
    "sparseloco": _replicas("Outer", every=30, lr=1.0, momentum=0.0, codec="topk2bit", delay=5),
}
"""Contestants of the suite ``replicas``: classes of ``yafsdp_cc.replicas``."""
