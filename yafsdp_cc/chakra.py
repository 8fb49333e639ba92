"""A step's computations and collectives as Chakra execution traces, which network simulators such as ASTRA-sim read.

Source: Sridharan et al., "Chakra: Advancing Performance Benchmarking and Co-design using Standardized Execution
Traces" (2023), and the schema of MLCommons, version 1.0, of which ``_SCHEMA`` names the fields that are written. A file
has a ``GlobalMetadata`` and then ``Node`` messages, each after its length as a varint.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from yafsdp_cc.plan import Plan
    from yafsdp_cc.plan.step_time import Event

VERSION = "1.0.0"
COMPUTE, COLLECTIVE = 4, 7
"""Types of nodes."""
ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = 0, 2, 6, 7
"""Types of collectives."""
_NUMBERS = {"string": 9, "uint64": 4, "int32": 5, "int64": 3, "bool": 8, "message": 11}
"""Of the types of fields in descriptors."""
_SCHEMA = {
    "GlobalMetadata": {"version": (1, "string")},
    "AttributeProto": {
        "name": (1, "string"),
        "int64_val": (9, "int64"),
        "uint64_val": (13, "uint64"),
        "bool_val": (27, "bool"),
    },
    "Node": {
        "id": (1, "uint64"),
        "name": (2, "string"),
        "type": (3, "int32"),  # an enumeration there, which is written alike
        "data_deps": (5, "repeated uint64"),
        "duration_micros": (7, "uint64"),
        "attr": (10, "repeated message"),
    },
}


def write_traces(prefix: Path, events: Sequence[Event], plan: Plan, flops_per_second: float, encoded: bool) -> None:
    """Write a trace for each rank, ``PREFIX.0.et`` and so on. All ranks do the same.

    Args:
        prefix: of the files' paths.
        events: of a step.
        plan: of the model on one rank.
        flops_per_second: that a rank achieves; gives computations their duration.
        encoded: whether gradients are, and so go by an all-to-all.

    Raises:
        ValueError: protobuf is not installed.
    """
    kinds = _messages()
    out = BytesIO()
    _write(out, kinds["GlobalMetadata"](version=VERSION))
    ahead: dict[bool, int] = {}
    for index, event in enumerate(events):
        waits = {*event.after, *((ahead[event.is_compute],) if event.is_compute in ahead else ())}
        ahead[event.is_compute] = index
        node = kinds["Node"](id=index, name=f"{event.kind} {event.unit}".strip(), data_deps=sorted(waits))
        node.attr.add(name="is_cpu_op", bool_val=False)
        if event.is_compute:
            node.type, node.duration_micros = COMPUTE, round(1e6 * event.amount / flops_per_second)
            node.attr.add(name="num_ops", int64_val=round(event.amount))
        else:
            kind, size = _collective(event, plan.world, encoded)
            node.type = COLLECTIVE
            node.attr.add(name="comm_type", int64_val=kind)
            node.attr.add(name="comm_size", int64_val=size)
        _write(out, node)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for rank in range(plan.world * plan.replicas):
        prefix.with_name(f"{prefix.name}.{rank}.et").write_bytes(out.getvalue())


def _collective(event: Event, ranks: int, encoded: bool) -> tuple[int, int]:
    """Return the type of a collective, and its size as simulators count it: an all-gather's is one rank's part."""
    others = max(ranks - 1, 1)
    if event.kind == "all_gather":
        return ALL_GATHER, round(event.amount / others)
    if event.kind == "all_reduce":
        return ALL_REDUCE, round(event.amount / 2 / others * ranks)
    return ALL_TO_ALL if encoded else REDUCE_SCATTER, round(event.amount / others * ranks)


def _messages() -> dict[str, Any]:
    """Return the classes of messages."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise ValueError("traces are written with protobuf: pip install 'yafsdp_cc[trace]'") from None
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for field, (number, kind) in fields.items():
            repeats, _, scalar = kind.rpartition(" ")
            added = message.field.add(name=field, number=number, type=_NUMBERS[scalar], label=3 if repeats else 1)
            if scalar == "message":
                added.type_name = ".ChakraProtoMsg.AttributeProto"
            if field.endswith("_val"):
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}")) for name in _SCHEMA
    }


def _write(out: BytesIO, message: Any) -> None:
    """Append a message after its length as a varint."""
    content = message.SerializeToString(deterministic=True)
    size = len(content)
    while size > 0x7F:
        out.write(bytes([size & 0x7F | 0x80]))
        size >>= 7
    out.write(bytes([size]) + content)
