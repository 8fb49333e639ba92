"""Checks of a codec of the user's own, before it encodes a gradient: of its methods, and of its file on all ranks."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yafsdp_cc.compression.codec import LOW_RANK, Codec, Noise, kind_of

_MESSAGES, _BLOCKS = 2, 4


def own_files(codecs: Iterable[str | None]) -> dict[str, int]:
    """Return what ranks compare of each codec that is not this package's: the CRC-32 of its file, 0 without a file."""
    sums: dict[str, int] = {}
    for kind in (kind_of(name) for name in codecs if name and name != LOW_RANK):
        if not kind.__module__.startswith("yafsdp_cc."):
            what = f"the file of codec {kind.name!r}"
            sums[what] = 0
            with suppress(OSError, TypeError):  # a class that was typed into a shell has no file
                sums[what] = zlib.crc32(Path(inspect.getfile(kind)).read_bytes())
    return sums


@cache
@torch.no_grad()
def check_own(kind: type[Codec], block: int, device: torch.device) -> None:
    """Raise a ``ValueError`` that says what a codec does otherwise than ``Codec`` asks for.

    Args:
        kind: class of the codec.
        block: number of elements of a block.
        device: device of the values and messages that are tried.
    """
    cause: Exception | None = None
    try:
        fault = _fault(kind(block=block), block, device)
    except Exception as error:
        cause, fault = error, f"it raised {type(error).__name__}: {error}"
    if fault:
        raise ValueError(f"codec {kind.name!r} ({kind.__module__}.{kind.__qualname__}): {fault}") from cause


def _fault(codec: Codec, block: int, device: torch.device) -> str:
    if codec.block != block:
        return f"it has blocks of {codec.block} elements and not {block}: hand them on, super().__init__(block)"
    made = torch.randn(_MESSAGES, _BLOCKS * block, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    made[0, :block] = 0
    finite = made.to(device, torch.float32)
    returned: list[Any] = []
    changed = False

    def encoded(values: Tensor, filling: int) -> Tensor:
        nonlocal changed
        size = codec.message_bytes(values.shape[1])
        message = torch.full((len(values), size), filling, dtype=torch.uint8, device=device)
        given = values.clone()
        returned.append(codec.encode(given, None, message, Noise(1) if codec.rounds_randomly else None))
        changed |= not torch.equal(given.view(torch.int32), values.view(torch.int32))
        return message

    def decoded(message: Tensor) -> Tensor:
        values = torch.full_like(finite, torch.nan)
        returned.append(codec.decode(message, values))
        return values

    message = encoded(finite, 0)
    values = decoded(message)
    if any(each is not None for each in returned):
        return "encode or decode returns something: write into `message` and `values`, as message.copy_(...) does"
    if changed:
        return "encode changes the values that it is given: compute with a copy"
    if not values.isfinite().all():
        return "decode leaves some of `values` as they were, or makes NaN of finite numbers, such as a block of zeros"
    if not torch.equal(decoded(message), values):
        return "decode makes two results of one message: all ranks have to get the same numbers"
    if not torch.equal(decoded(encoded(finite, 255)), values):
        return "encode makes two messages of the same values: it draws numbers, counts, or leaves bytes unwritten"
    for odd in (torch.inf, torch.nan):
        values = finite.clone()
        values[1, block + 3] = odd
        message = encoded(values, 0)
        found = codec.is_finite(message, values.shape[1])
        if found.shape != (_MESSAGES, _BLOCKS) or found.dtype != torch.bool:
            return f"is_finite returns {found.dtype} {list(found.shape)}, and not torch.bool [messages, blocks]"
        if found[1, 1] or not found[0].all() or decoded(message)[1].isfinite().all():  # blocks may be marked together
            return (
                f"a block with an element {odd} is taken for finite, or another message is not: decode it to NaN, "
                "and let is_finite be False for it. largest_of(block) is not finite then; mark_nonfinite marks a scale"
            )
    return ""
