"""Encodings of tensors between stages, by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yafsdp_cc.compression.codec import codec_of
from yafsdp_cc.pipelining.messages import Encoded, Encoding, Exact, LowRank, SenderState, relative_error, rotate


def sent(encoding: Encoding, values: Tensor, state: SenderState | None = None, seed: int = 0) -> Tensor:
    """What the receiver has of ``values``."""
    message = torch.empty(encoding.message_bytes(values.shape, values.dtype), dtype=torch.uint8)
    encoding.encode(values, message, state or SenderState(error_feedback=False), seed)
    received = torch.empty_like(values, memory_format=torch.contiguous_format)
    encoding.decode(message, received)
    return received


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(4, 16, 32), (3, 7, 5), (2, 0, 4), (5,), ()])
def test_every_shape_and_dtype_arrives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape, dtype=dtype)
    assert torch.equal(sent(Exact(), values), values)
    for by_sample in (False, True):
        for hadamard in (False, True):
            encoding = Encoded(codec_of("int8"), hadamard=hadamard, by_sample=by_sample)
            assert (sent(encoding, values) - values).norm() <= 0.03 * values.norm()
    assert (sent(LowRank(32), values) - values).norm() <= 0.02 * values.norm()  # as many columns as there are


def test_what_is_not_contiguous_is_sent_in_its_order() -> None:
    values = torch.randn(8, 32, 4).transpose(1, 2)
    assert torch.equal(sent(Exact(), values), values)
    assert torch.equal(sent(Encoded(codec_of("fp32")), values), values)


def test_stochastic_rounding_is_right_on_average() -> None:
    values = torch.randn(2, 256)
    encoding = Encoded(codec_of("int4"))
    average = torch.stack([sent(encoding, values, seed=seed) for seed in range(500)]).mean(0)
    nearest = sent(Encoded(codec_of("int4"), rounding="nearest"), values)
    assert (average - values).norm() < 0.2 * (nearest - values).norm()


def test_a_rotation_spreads_outliers_and_goes_back() -> None:
    values = torch.randn(3, 512)
    torch.testing.assert_close(rotate(rotate(values, 256), 256, back=True), values)
    torch.testing.assert_close(rotate(values, 256).norm(), values.norm())
    for each in (torch.ones(1, 256), torch.eye(1, 256)):
        assert rotate(each, 256).abs().max() < 0.25 * each.norm()
    outliers = values.clone()
    outliers[:, ::128] = 100.0
    loss = [(sent(Encoded(codec_of("int4"), hadamard=each), outliers) - outliers).norm() for each in (False, True)]
    assert loss[1] < 0.5 * loss[0]


@pytest.mark.parametrize("name", ["int4", "int3", "int2", "ternary", "onebit", "fp8"])
def test_scaled_rounding_loses_what_is_at_right_angles(name: str) -> None:
    """Of every block, and of numbers whose squares overflow."""
    values = torch.randn(4, 300) * torch.tensor([[1e30], [1.0], [1e-30], [0.0]])
    values[1, :200] *= 10
    received = sent(Encoded(codec_of(name, 64), rounding="scaled", by_sample=True), values)
    for before, after in zip(values[:3].double(), received[:3].double(), strict=True):
        for x, y in zip(before.split(64), after.split(64), strict=True):
            torch.testing.assert_close(x @ y, x @ x, rtol=1e-5, atol=0.0)
    assert not received[3].any()
    drawn = torch.randn(8, 256)  # so it is behind a rotation
    lost = drawn - sent(Encoded(codec_of(name), hadamard=True, rounding="scaled", by_sample=True), drawn)
    assert (lost * drawn).sum(1).abs().max() < 1e-4 * 256


def test_factors_start_from_those_of_the_last_message() -> None:
    torch.manual_seed(0)
    right = torch.linalg.qr(torch.randn(64, 64)).Q * torch.logspace(0, -2, 64)
    state, encoding, errors = SenderState(error_feedback=False), LowRank(4), []
    for _ in range(6):
        values = torch.randn(4, 32, 64) @ right.t()
        errors.append(((sent(encoding, values, state) - values).norm() / values.norm()).item())
    best = torch.linalg.svdvals(values.view(-1, 64))
    least = (best[4:].norm() / best.norm()).item()
    assert errors[0] > 1.1 * least
    assert errors[-1] < 1.05 * least


@pytest.mark.parametrize("encoding", [Encoded(codec_of("int8"), by_sample=True), LowRank(4)])
def test_what_is_not_finite_arrives_and_is_not_kept(encoding: Encoding) -> None:
    state = SenderState(error_feedback=True)
    values, bad = torch.randn(2, 16, 16), torch.full((2, 16, 16), float("inf"))
    first = sent(encoding, values, state)
    assert state.residual is not None
    before = state.residual.values.clone()
    assert not sent(encoding, bad, state).isfinite().any()
    assert torch.equal(state.residual.values, before)
    both = first + sent(encoding, values, state)
    torch.testing.assert_close(both + state.residual.values.view(2, 16, 16), 2 * values)


def test_fewer_samples_leave_the_residual_of_the_others() -> None:
    torch.manual_seed(0)
    values = torch.randn(5, 3, 100)
    for encoding in (Encoded(codec_of("onebit"), by_sample=True), LowRank(2)):
        state, received = SenderState(error_feedback=True), torch.zeros(5, 3, 100)
        for rows in (2, 5, 3, 1):
            received[:rows] += sent(encoding, values[:rows], state)
        assert state.residual is not None
        left = state.residual.values.view(5, -1)[:, :300].reshape(5, 3, 100)
        due = values * torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0]).view(5, 1, 1)
        torch.testing.assert_close(received + left, due)


def test_padding_has_no_part_in_what_a_residual_adds_to() -> None:
    torch.manual_seed(0)
    values, whole = torch.randn(4, 10), torch.zeros(4, 10)
    encoding, state = Encoded(codec_of("onebit"), by_sample=True), SenderState(error_feedback=True)
    for _ in range(32):
        whole += sent(encoding, values, state)
    assert (whole - 32 * values).norm() < 0.1 * (32 * values).norm()


def test_the_error_of_codecs() -> None:
    assert relative_error("int4", 256, "stochastic") == pytest.approx(0.18, abs=0.01)
    assert relative_error("int4", 256, "nearest") == pytest.approx(0.13, abs=0.01)
    assert relative_error("ternary", 256, "stochastic") > 1
    nearest, scaled = (relative_error("int2", 256, rounding) for rounding in ("nearest", "scaled"))
    assert scaled**2 == pytest.approx(nearest**2 / (1 - nearest**2), rel=0.02)
