"""A codec of the user's own: as described in docs/compression.md."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.ranks import on_ranks
from tests.twins import refusal
from yafsdp_cc import Compression
from yafsdp_cc.compression import codec, error_feedback
from yafsdp_cc.compression.codec import Codec, Noise, Scaled, codec_of, largest_of, mark_nonfinite, step_of
from yafsdp_cc.compression.own_codec import check_own


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


@pytest.mark.parametrize("name", sorted(codec._codecs))
@pytest.mark.parametrize("block", [64, 256, 4096])
def test_what_is_asked_of_a_codec_is_what_those_of_the_package_do(name: str, block: int) -> None:
    check_own(type(codec_of(name)), block, torch.device("cpu"))


def returns(codec: Codec, message: Tensor, values: Tensor) -> Tensor:
    return torch.zeros_like(values)


def half_fills(codec: Codec, message: Tensor, values: Tensor) -> None:
    values[:, ::2] = 0


def draws(codec: Codec, message: Tensor, values: Tensor) -> None:
    values.normal_()


def raises(codec: Codec, message: Tensor, values: Tensor) -> None:
    values.copy_(torch.ones(3))


def leaves_bytes(codec: Threes, values: Tensor, counts: Tensor | None, message: Tensor, noise: Any = None) -> None:
    codec.parts(message, values.shape[1])[0].fill_(0.5)


def doubles(codec: Threes, values: Tensor, counts: Tensor | None, message: Tensor, noise: Any = None) -> None:
    Threes.encode(codec, values.mul_(2), counts, message)


def takes_the_median(codec: Threes, values: Tensor, counts: Tensor | None, message: Tensor, noise: Any = None) -> None:
    scales, payload = codec.parts(message, values.shape[1])
    scale, codes = mark_nonfinite(codec.blocks(values).abs().median(-1).values, codec.blocks(values).sign())
    scales.copy_(scale)
    payload.view(torch.int8).copy_(codes.nan_to_num_().flatten(1))


def of_every_element(codec: Codec, message: Tensor, n: int) -> Tensor:
    return torch.ones(len(message), n, dtype=torch.bool)


@pytest.mark.parametrize(
    ("method", "wrong", "told"),
    [
        ("decode", returns, "encode or decode returns something: write into `message` and `values`"),
        ("decode", half_fills, "decode leaves some of `values` as they were"),
        ("decode", draws, "decode makes two results of one message"),
        ("decode", raises, r"it raised RuntimeError: .*size of tensor a \(\d+\) must match"),
        ("encode", leaves_bytes, "encode makes two messages of the same values"),
        ("encode", doubles, "encode changes the values that it is given"),
        ("encode", takes_the_median, "a block with an element inf is taken for finite"),
        (
            "is_finite",
            of_every_element,
            r"is_finite returns torch.bool \[2, 1024\], and not torch.bool \[mess",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_codec_that_does_otherwise_is_told_what(method: str, wrong: Callable[..., Any], told: str) -> None:
    kind = type(wrong.__name__, (Threes,), {"name": wrong.__name__, "__module__": __name__, method: wrong})
    gradients = torch.randn(1, 256)
    message = torch.zeros(1, codec_of(kind.name).message_bytes(256), dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"^codec '{wrong.__name__}' \({__name__}.{wrong.__name__}\): {told}"):
        error_feedback.encode(codec_of(kind.name), gradients, message)


def test_a_codec_is_made_of_its_block() -> None:
    class Share(Threes):
        name = "share"

        def __init__(self, share: float = 0.01) -> None:
            super().__init__()

    class Unfinished(Scaled):
        name = "unfinished"

    class Fixed(Threes):
        name = "fixed"

        def __init__(self, block: int = 256) -> None:
            super().__init__()

    for each in (Share, Unfinished):
        with pytest.raises(TypeError, match=rf"codec '{each.name}' cannot be made: .*\(self, block=256\)"):
            codec_of(each.name)
    with pytest.raises(ValueError, match=r"codec 'fixed' .*: it has blocks of 256 elements and not 64: hand them on"):
        check_own(Fixed, 64, torch.device("cpu"))
    with pytest.raises(TypeError, match=r"Seven.name = 7: the name of a codec is a string"):
        type("Seven", (Threes,), {"name": 7})


def of_another_file(folder: Path) -> str:
    file = folder / f"{dist.get_rank()}.py"
    file.write_text(f"# {dist.get_rank()}\nfrom {__name__} import Threes\nclass Mine(Threes): name = 'mine'\n")
    runpy.run_path(str(file))
    with mock.patch.object(inspect, "getfile", return_value=str(file)):
        return refusal(lambda: yafsdp_cc.shard(nn.Linear(64, 64), compression="mine"))


def test_ranks_with_other_files_of_a_codec_are_told(tmp_path: Path) -> None:
    for told in on_ranks(2, of_another_file, tmp_path):
        assert re.search("the file of codec 'mine' differs between ranks.*\n  rank 0: .*\n  rank 1: ", told)
