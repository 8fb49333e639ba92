"""The native extension is asked for, done without, or missed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from yafsdp_cc.compression import error_feedback

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As where there was no compiler."""
    monkeypatch.setattr(error_feedback, "LIBRARY", tmp_path / "_native.so")
    monkeypatch.setattr(error_feedback, "_load", error_feedback._load.__wrapped__)
    error_feedback._ops_for.cache_clear()
    yield
    error_feedback._ops_for.cache_clear()


@pytest.mark.usefixtures("unbuilt")
def test_without_it_plain_torch_is_used_and_that_is_finite_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("YAFSDP_CC_NATIVE", raising=False)
    with caplog.at_level(logging.WARNING, "yafsdp_cc"):
        assert error_feedback.ops_for(CPU) is None
        assert error_feedback.ops_for(CPU) is None
    assert len(caplog.messages) == 1
    for part in ("by plain torch", "times slower", "is not built", "pip install --no-build-isolation"):
        assert part in caplog.messages[0]


@pytest.mark.usefixtures("unbuilt")
def test_absence_can_be_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YAFSDP_CC_NATIVE", "1")
    with pytest.raises(RuntimeError, match=r"=1, but the native extension is not built; to build: .*pip install"):
        error_feedback.ops_for(CPU)


@pytest.mark.usefixtures("unbuilt")
def test_a_file_that_is_no_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error_feedback.LIBRARY.write_bytes(b"nothing")
    monkeypatch.setenv("YAFSDP_CC_NATIVE", "1")
    with pytest.raises(RuntimeError, match=r"cannot be loaded \("):
        error_feedback.ops_for(CPU)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("YAFSDP_CC_NATIVE", "0")
    assert error_feedback.ops_for(CPU) is None
    assert not caplog.messages
    monkeypatch.setenv("YAFSDP_CC_NATIVE", "yes")
    with pytest.raises(ValueError, match="YAFSDP_CC_NATIVE=yes: 0, 1, auto are known"):
        error_feedback.ops_for(CPU)
