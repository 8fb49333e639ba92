"""The printed plan."""

from __future__ import annotations

import json
from dataclasses import replace

from yafsdp_cc.plan.report import (
    WIDTH,
    Plan,
    PlannedBuffers,
    PlannedCommunication,
    PlannedDtypes,
    PlannedReplicated,
    PlannedUnit,
    human,
)


def example(layers: int = 24) -> Plan:
    def unit(name: str, buffer: int) -> PlannedUnit:
        return PlannedUnit(name, "block", 7, 7, 12_582_912, 12_583_040, ("float32",), buffer)

    edge = replace(
        unit("model.embed_tokens", 0), role="edge", parameters=1, trainable=0, dtypes=("bfloat16", "float32")
    )
    blocks = [unit(f"model.layers.{index}", index % 2) for index in range(layers)]
    return Plan(
        world=4,
        units=(edge, *blocks, replace(edge, name="lm_head", buffer=1)),
        buffers=(
            PlannedBuffers("block", 2, 50_332_160, 2, 50_332_160),
            PlannedBuffers("edge", 2, 50_332_160, 0, 0),
        ),
        replicated=PlannedReplicated(49, 50_176, 602_112),
        communication=PlannedCommunication(900_000_000, 800_000_000, 700_000_000, 401_408),
        parameter_shard_bytes=1_000_000,
        gradient_shard_bytes=2_000_000,
        receive_bytes=3,
        adamw_bytes=2_000_000,
    )


def test_totals() -> None:
    plan = example()
    buffers = 4 * 50_332_160
    assert plan.memory["weight buffers"] == buffers
    assert plan.memory["gradient buffers"] == buffers // 2
    assert plan.owned_bytes == 3_000_003 + buffers + buffers // 2 + 602_112
    assert plan.communication.total == 2_400_401_408
    assert plan.elements == 26 * 12_582_912 + 50_176
    assert plan.parameters == 24 * 7 + 2 + 49


def test_units_within_one_another_are_one_line() -> None:
    plan = example()
    one, *_ = (unit for unit in plan.units if "layers" in unit.name)
    nested = replace(plan, units=[replace(one, name="layers.0"), replace(one, name="layers.0.inner")])
    assert any(line.startswith("layers.0 ... inner  x2") for line in str(nested).splitlines())


def test_equal_units_are_one_line() -> None:
    text = str(example())
    lines = text.splitlines()
    assert lines[0] == "26 units on 4 ranks, 327,205,888 parameters in 219 tensors"
    (blocks,) = [line for line in lines if "model.layers" in line]
    expected = "model.layers.0 ... 23  x24  block        7          7  12,582,912  12,583,040       fp32     0/1"
    assert blocks == expected
    assert all(len(line) <= WIDTH for line in lines)
    assert f"{example().owned_bytes:,}" in text
    assert "2.2 GiB" in text


def test_dtypes_are_named_by_what_they_are_of() -> None:
    rows = (
        PlannedDtypes(170, "float32", "bfloat16", "bfloat16", "int8"),
        PlannedDtypes(1049, "float32", "bfloat16", "none", "float32"),
    )
    assert "dtypes" not in str(example()).split("\n\n")[2]
    assert str(replace(example(), dtypes=rows)).split("\n\n")[2].splitlines() == [
        "dtypes              parameters  forward  gathered  reduced",
        "  of 170 tensors          fp32     bf16      bf16     int8",
        "  of 1,049 tensors        fp32     bf16      none     fp32",
    ]


def test_long_names_keep_both_ends() -> None:
    plan = example()
    name = "a_very_long_module_name_at_the_front.with.many.parts.and.then.the_end"
    lines = str(replace(plan, units=(*plan.units, replace(plan.units[1], name=name)))).splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    assert any(line.startswith("a_very") and "the_end" in line for line in lines)


def test_as_dict_is_json() -> None:
    plan = example()
    read = json.loads(json.dumps(plan.as_dict()))
    assert read["owned_bytes"] == plan.owned_bytes
    assert read["memory"]["receive buffer"] == 3
    assert read["units"][1]["dtypes"] == ["float32"]


def test_human_bytes() -> None:
    assert [human(size) for size in (0, 1023, 1024, 13_212_057, 2**40 - 1, 2**41)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "12.6 MiB",
        "1.0 TiB",
        "2.0 TiB",
    ]
