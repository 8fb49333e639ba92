"""A codec of the user's own: as described in docs/compression.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import yafsdp_cc
from tests.ranks import on_ranks
from yafsdp_cc import Compression
from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import Codec, Noise, Scaled, codec_of, largest_of, mark_nonfinite, step_of


class Threes(Scaled):
    """Minus, nothing or plus the largest of a block, one byte each."""

    name = "threes"
    needs_feedback = True

    def payload_bytes(self, n: int) -> int:
        return n

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        scales, payload = self.parts(message, values.shape[1])
        scale, inverse = step_of(largest_of(self.blocks(values)), 1)
        scale, codes = mark_nonfinite(scale, (self.blocks(values) * inverse.unsqueeze(-1)).round_())
        scales.copy_(scale)
        payload.view(torch.int8).copy_(codes.flatten(1))

    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, payload = self.parts(message, values.shape[1])
        codes = payload.view(torch.int8).to(torch.float32)
        self.blocks(values).copy_(self.blocks(codes) * scales.unsqueeze(-1))


def trained() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30))
    yafsdp_cc.shard(model, units=[nn.Linear], compression="threes")
    plan = yafsdp_cc.plan_of(model)
    (own,) = (choice for choice in plan.choices if choice.codec == "threes")
    assert own.reduce == plan.communication.reduce > 0
    for _ in range(3):
        model(torch.ones(2, 40)).sum().backward()
    counters = yafsdp_cc.counters_of(model)
    assert counters.reduced_bytes == 3 * (plan.communication.reduce + plan.communication.replicated)


def test_a_codec_of_ones_own_is_taken_by_name_and_planned():
    on_ranks(2, trained)


def test_it_runs_in_plain_torch():
    assert error_feedback.ops_for(torch.device("cpu"), codec_of("threes")) is None


def test_its_need_of_feedback_is_checked():
    with pytest.raises(ValueError, match="gradients='threes' with feedback=False"):
        Compression("threes", feedback=False)


@pytest.mark.parametrize("taken", ["int8", "powersgd"])
def test_a_name_is_taken_once(taken: str):
    before = type(codec_of("int8"))
    with pytest.raises(ValueError, match=f"there is a codec '{taken}' already; give .*Other another name"):

        class Other(Threes):
            name = taken

    assert type(codec_of("int8")) is before


def test_a_module_may_be_loaded_again():
    body = dict(Threes.__dict__)
    again: type[Codec] = type("Threes", (Scaled,), {**body, "__qualname__": Threes.__qualname__})
    assert type(codec_of("threes")) is again
