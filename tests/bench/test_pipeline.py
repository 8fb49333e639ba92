"""Suite ``pipeline``: its tables, and that its model in stages is the demo's model."""

from __future__ import annotations

import pytest
import torch

from bench import pipeline
from bench.contestants import PIPELINE
from tests.netlab.labs import lab_of
from tests.versions import COMPRESSED_STAGES
from yafsdp_cc.tools.demo.model import GPT


def test_parts_are_the_model() -> None:
    torch.manual_seed(0)
    model = GPT(width=32, depth=4, heads=2, context=16)
    tokens = torch.randint(256, (2, 16))
    found = tokens
    for stage in range(2):
        found = pipeline.Part(model, stage, 2)(found)
    assert torch.equal(found, model(tokens))


def test_tables_compare_with_exact_sends() -> None:
    timed = {
        "exact": {"seconds": 2.0, "to_unshaped": 4.0, "sent_bytes": 3e6},
        "aq-sgd int4 / int8": {"seconds": 0.5, "to_unshaped": 1.25, "sent_bytes": 0.5e6},
    }
    *_, ours = pipeline.timing_table(timed).splitlines()
    assert ours.split() == ["aq-sgd", "int4", "/", "int8", "0.500", "1.25", "4.00", "x", "0.500", "6.00", "x"]
    learnt = {
        "exact": {"by_epoch": [[3.0, 2.0], [3.0, 2.2]], "held_out": [2.0, 3.0]},
        "direct int4 / int8": {"by_epoch": [[3.0, 2.1], [3.0, 2.31]], "held_out": [2.5, 2.55]},
    }
    *_, ours = pipeline.loss_table(learnt).splitlines()
    assert ours.split() == ["direct", "int4", "/", "int8", "2.2050", "+5.00%", "+5.00%", "+5.00%", "2.5250", "+1.00%"]


@COMPRESSED_STAGES
def test_turns_count_what_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "TIMED_WIDTH", 64)
    monkeypatch.setattr(pipeline, "TIMED_BATCH", 4)
    names = ("torch", "exact", "aq-sgd int4 / int8")
    with lab_of(ranks=2) as lab:
        figures = pipeline._timed(lab, {name: PIPELINE[name] for name in names}, ["50mbit", "unshaped"], 1, 1)
    for each in figures.values():
        exact = 4 * 128 * 64 * 4  # each way, and each rank sends one
        assert exact < each["torch"]["sent_bytes"] < 1.2 * exact
        assert exact < each["exact"]["sent_bytes"] < 1.2 * exact
        assert each["aq-sgd int4 / int8"]["sent_bytes"] < 0.3 * exact
    assert figures["unshaped"]["exact"]["to_unshaped"] == 1.0
