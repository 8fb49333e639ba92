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
from yafsdp_cc.tools.estimate import plan_over


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


@pytest.mark.parametrize("block", [64, 256, 4096])
@pytest.mark.parametrize("name", sorted(codec._codecs))
def test_codecs_of_the_package_do_what_a_codec_has_to(name: str, block: int) -> None:
    assert codec._fault_of(type(codec_of(name)), block, "cpu") == ""


def encodes_in_place(
    codec: Threes, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None
) -> Tensor:
    Threes.encode(codec, values.mul_(2), counts, message)
    return message


def decodes_and_returns(codec: Threes, message: Tensor, values: Tensor) -> Tensor:
    Threes.decode(codec, message, values)
    return values


def test_a_codec_may_compute_in_place_and_name_its_argument_as_it_likes() -> None:
    def made(codec: Threes, size: int = 256, share: float = 0.1) -> None:
        Threes.__init__(codec, size)

    body = {"encode": encodes_in_place, "decode": decodes_and_returns, "__init__": made}
    type("Other", (Threes,), {"__module__": __name__, "name": "other", **body})
    try:
        assert codec_of("other", 128).block == 128
        assert error_feedback.lost_share("other", 128) > 0
    finally:
        del codec._codecs["other"]


def returns(codec: Codec, message: Tensor, values: Tensor) -> Tensor:
    return torch.zeros_like(values)


def half_fills(codec: Codec, message: Tensor, values: Tensor) -> None:
    values[:, ::2] = 0


def draws(codec: Codec, message: Tensor, values: Tensor) -> None:
    values.normal_()


def raises(codec: Codec, message: Tensor, values: Tensor) -> None:
    values.copy_(torch.ones(3))


def keeps(codec: Any, message: Tensor, values: Tensor) -> None:
    if not hasattr(codec, "sign"):
        codec.sign = torch.randn(1)
    Threes.decode(codec, message, values)
    values.mul_(codec.sign)


def takes_the_first(codec: Threes, message: Tensor, values: Tensor) -> None:
    Threes.decode(codec, message, values)
    values.mul_(codec.parts(message, values.shape[1])[0][0, 1])


def leaves_bytes(codec: Threes, values: Tensor, counts: Tensor | None, message: Tensor, noise: Any = None) -> None:
    codec.parts(message, values.shape[1])[0].fill_(0.5)


def ignores_counted(codec: Threes, values: Tensor, counts: Tensor | None, message: Tensor, noise: Any = None) -> None:
    if counts is None:
        Threes.encode(codec, values, counts, message)


def averages(codec: Threes, values: Tensor, counts: Tensor | None, message: Tensor, noise: Any = None) -> None:
    Threes.encode(codec, values, counts, message)
    codec.parts(message, values.shape[1])[0].div_(1 if counts is None else counts)


def takes_the_median(codec: Threes, values: Tensor, counts: Tensor | None, message: Tensor, noise: Any = None) -> None:
    scales, payload = codec.parts(message, values.shape[1])
    scale, codes = mark_nonfinite(codec.blocks(values).abs().median(-1).values, codec.blocks(values).sign())
    scales.copy_(scale)
    payload.view(torch.int8).copy_(codes.nan_to_num_().flatten(1))


def of_every_element(codec: Codec, message: Tensor, n: int) -> Tensor:
    return torch.ones(len(message), n, dtype=torch.bool)


def of_no_block(codec: Codec, message: Tensor, n: int) -> Tensor:
    return torch.zeros(len(message), n // codec.block, dtype=torch.bool)


def takes_a_share(codec: Codec, share: float = 0.01) -> None:
    Codec.__init__(codec)


@pytest.mark.parametrize(
    ("method", "wrong", "told"),
    [
        ("decode", returns, r"decode leaves some of `values` as they were \(its result is not used\)"),
        ("decode", half_fills, "decode leaves some of `values` as they were"),
        ("decode", draws, "decode makes two results of one message"),
        ("decode", raises, r"it raised RuntimeError: .*size of tensor a \(\d+\) must match"),
        ("decode", keeps, "decode makes two results of one message: .* takes what the message does not hold"),
        ("decode", takes_the_first, "decode makes other numbers of a message if there are others before it"),
        ("encode", leaves_bytes, "encode makes two messages of the same values"),
        ("encode", ignores_counted, "decode leaves .* or makes NaN|encode makes two messages of the same values"),
        ("encode", averages, "decode leaves .* or makes NaN of finite numbers"),
        ("encode", takes_the_median, "a block with an element inf is taken for finite"),
        ("is_finite", of_every_element, r"is_finite returns torch.bool \[3, 1024\], or False"),
        ("is_finite", of_no_block, r"is_finite returns torch.bool \[3, 4\], or False for finite numbers"),
        ("__init__", takes_a_share, r"its `block` is not what it is made with: def __init__\(self, block=256, ...\)"),
        ("payload_bytes", lambda codec, n: n / 8, "it raised TypeError"),
    ],
    ids=lambda value: getattr(value, "__name__", "-"),
)
def test_a_codec_that_does_otherwise_is_told_what(method: str, wrong: Callable[..., Any], told: str) -> None:
    name = f"{method} that {wrong.__name__}"
    type("Wrong", (Threes,), {"__module__": __name__, "name": name, method: wrong})
    try:
        for make in (codec_of, lambda name: error_feedback.lost_share(name, 256)):
            with pytest.raises(ValueError, match=rf"^codec '{name}' \({__name__}.Wrong\): {told}"):
                make(name)
    finally:
        del codec._codecs[name]


def test_a_codec_without_all_methods_and_a_name_that_is_none_are_told() -> None:
    type("Unfinished", (Scaled,), {"name": "unfinished"})
    try:
        with pytest.raises(ValueError, match=r"codec 'unfinished' .*: it raised TypeError: Can't instantiate abstract"):
            codec_of("unfinished")
    finally:
        del codec._codecs["unfinished"]
    with pytest.raises(TypeError, match=r"Seven.name = 7: the name of a codec is a string"):
        type("Seven", (Threes,), {"name": 7})


@pytest.mark.parametrize("name", ["threes", "topk2bit"])
def test_a_plan_is_made_with_it(name: str) -> None:
    for device in ("cpu", "cuda"):
        plan = plan_over(lambda: nn.Linear(256, 256), (4,), device=device, compression=name)
        assert name in {choice.codec for choice in plan.choices}


def of_another_file(folder: Path) -> str:
    file = folder / f"{dist.get_rank()}.py"
    file.write_text(f"# {dist.get_rank()}\nfrom {__name__} import Threes\nclass Mine(Threes): name = 'mine'\n")
    runpy.run_path(str(file))
    with mock.patch.object(inspect, "getfile", return_value=str(file)):
        return refusal(lambda: yafsdp_cc.shard(nn.Linear(64, 64), compression="mine"))


def test_ranks_with_other_files_of_a_codec_are_told(tmp_path: Path) -> None:
    for told in on_ranks(2, of_another_file, tmp_path):
        assert re.search(
            "the CRC-32 of the file of codec 'mine' differs between ranks.*\n  rank 0: .*\n  rank 1: ", told
        )
