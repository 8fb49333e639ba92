"""A profiled training step shows the whole schedule, by unit."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # by the optimizer, at a second for every rank if not before the fork
from torch import nn
from torch.profiler import ProfilerActivity, profile

import yafsdp_cc
from tests.ranks import on_ranks

BLOCKS = ("0", "1", "2")


def train_one_step() -> list[str]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in BLOCKS))
    yafsdp_cc.shard(model, units=list(model), sync_module_states=True)
    return [event["name"] for event in ranges_of_a_step(model)]


def ranges_of_a_step(model: nn.Module) -> list[dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        model(torch.ones(2, 64)).sum().backward()
        with yafsdp_cc.profiling.span("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    shown = [event for event in events if event.get("name", "").startswith("YaFSDP::")]
    return sorted(shown, key=lambda event: event["ts"])


def test_every_unit_is_in_the_trace() -> None:
    for names in on_ranks(2, train_one_step):
        shown = Counter(names)
        for block in BLOCKS:
            assert shown[f"YaFSDP::forward ({block})"] == 1
            assert shown[f"YaFSDP::backward ({block})"] == 1
            assert shown[f"YaFSDP::reduce ({block})"] == 1
            assert shown[f"YaFSDP::gather ({block})"] in (1, 2), "forward, and backward where the buffer was reused"
        assert shown["YaFSDP::clip"] == shown["YaFSDP::replicated"] == 1
        assert names.index("YaFSDP::forward (2)") < names.index("YaFSDP::backward (2)")
        assert names.index("YaFSDP::reduce (2)") < names.index("YaFSDP::reduce (0)")


def train_an_adapter() -> dict[str, list[int]]:
    """Two steps of a unit of which a part is frozen and kept: what the second one sends, by kind of range."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False).requires_grad_(False), nn.Linear(64, 16))
    yafsdp_cc.shard(model, units=[model], sync_module_states=True, reshard_after_forward=False)
    ranges_of_a_step(model)
    sent: dict[str, list[int]] = {"gather": [], "reduce": []}
    for event in ranges_of_a_step(model):
        kind = event["name"].removeprefix("YaFSDP::").partition(" ")[0]
        if kind in sent:
            sent[kind].append(event["args"]["bytes"])
    return sent


def test_only_what_is_sent_counts() -> None:
    adapter = 64 * 16 * 4 // 2  # this rank's half, to the other one
    for sent in on_ranks(2, train_an_adapter):
        assert sent == {"gather": [adapter], "reduce": [adapter]}, "the frozen part stays where it is"
