"""Error feedback as it is defined: in plain torch, whether there are native kernels or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import Codec


@contextmanager
def _plain_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YAFSDP_CC_NATIVE", "0")
        yield


def encode(*arguments: Any, **named: Any) -> None:
    with _plain_torch():
        error_feedback.encode(*arguments, **named)


def accumulate(*arguments: Any, **named: Any) -> None:
    with _plain_torch():
        error_feedback.accumulate(*arguments, **named)


def decode_sum(codec: Codec, messages: Tensor, own: Tensor | None, place: int, total: Tensor) -> None:
    with _plain_torch():
        error_feedback.decode_sum(codec, messages, total.shape[0], own, place, total)
