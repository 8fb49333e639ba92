"""Codecs encode a chunk of numbers in fewer bytes and decode it. The built-in ones are in ``codecs``; a user's own
codec is a subclass of ``Codec`` in any file (docs/compression.md, "A codec of your own").

    values    [messages, n] fp32        n is a multiple of the block
    message   [messages, bytes] uint8   one row for each rank that receives a message

A codec's ``encode`` and ``decode`` are plain torch and define its format to the byte; native kernels give the same
bytes and bits (``error_feedback``). Codecs neither communicate nor know of error feedback.

Messages are little-endian, of version ``FORMAT``, and of a size known from the number of elements alone. A codec with
scales has one fp32 scale for each block, all before the payload. A block whose largest or mean magnitude, from which
the scale is computed, is not finite gets the scale NaN, which decodes to NaN throughout the block.
"""

from __future__ import annotations

import inspect
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, reduce, wraps
from itertools import accumulate, product
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from yafsdp_cc.engine.layout import Layout

FORMAT = 1
"""Version of all message formats: ranks compare it before they exchange anything."""

BLOCK = 256
"""Number of adjacent elements that share a scale by default."""

BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)

_ROW = 64
"""Bytes that every message is padded to a multiple of."""

_LANES = 64
"""Number of running sums by which ``block_sum`` adds up a block: it fixes the order of additions, and so the format."""

LOW_RANK = "powersgd"
"""The name of low-rank compression, which is no ``Codec`` but all-reduces factors (``compression.powersgd``)."""

AUTO = "auto"
"""The name that lets ``CodecAutotuner`` choose the least lossy codec, or none, with which compute hides a reduce."""

_codecs: dict[str, type[Codec]] = {}


class Noise(NamedTuple):
    """Random numbers for stochastic rounding, computed from a counter, without a generator's state."""

    seed: int
    """Hash, 32 bits, of the parameters' name, the rank and the number of the message."""
    first: int = 0
    """Index, in the whole buffer, of the first element that is rounded."""

    def uniform(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Return numbers in [0, 1), multiples of 2⁻²⁴, for elements from ``first`` on in row-major order."""
        index = torch.arange(self.first, self.first + shape.numel(), device=device).bitwise_and_(_WORD)
        return (hashed(index ^ self.seed) >> 8).to(torch.float32).mul_(2.0**-24).view(shape)


_WORD = 0xFFFFFFFF


def hashed(words: Tensor) -> Tensor:
    """Mix 32-bit words (int64 in, int64 out): two multiplications between three xor-shifts."""
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) & _WORD
    words = words ^ (words >> 15)
    words = (words * 0x846CA68B) & _WORD
    return words ^ (words >> 16)


class Codec(ABC):
    """A format that encodes numbers in fewer bytes.

    A subclass with a ``name`` registers itself under that name. ``decode`` refuses messages of the wrong size, and
    ``codec_of`` a user's codec that does not do what these methods ask for.

    Args:
        block: elements that share a scale, a power of two from 64 to 4,096.
    """

    name: ClassVar[str]
    rounds_randomly: ClassVar[bool] = False
    """Whether ``encode`` takes noise, with which the decoded values are right on average."""
    needs_feedback: ClassVar[bool] = False
    """Whether a message loses a large part of the gradient, and in the same direction every time."""

    def __init__(self, block: int = BLOCK) -> None:
        if block not in BLOCKS:
            raise ValueError(f"block={block}: a block has a power of two of elements, from 64 to 4096")
        self.block = block

    def __init_subclass__(cls) -> None:
        if "decode" in cls.__dict__:
            cls.decode = _of_its_size(cls.decode)  # type: ignore[method-assign, assignment]
        if "name" in cls.__dict__:
            if not (cls.name and isinstance(cls.name, str)):
                raise TypeError(f"{cls.__qualname__}.name = {cls.name!r}: the name of a codec is a string")
            known = _codecs.get(cls.name)
            # Refuse another class of this name only: a module that is loaded again defines the same class again.
            if cls.name in (LOW_RANK, AUTO) or (known is not None and _path(known) != _path(cls)):
                raise ValueError(f"there is a codec {cls.name!r} already; give {cls.__qualname__} another name")
            _codecs[cls.name] = cls

    @abstractmethod
    def body_bytes(self, n: int) -> int:
        """Return the bytes that encode ``n`` elements."""

    def message_bytes(self, n: int) -> int:
        """Return the bytes of a message of ``n`` elements, padding at its end included; 0 if ``n`` is 0."""
        return -(-self.body_bytes(n) // _ROW) * _ROW if n else 0

    def blocks(self, values: Tensor) -> Tensor:
        """Return ``values`` [messages, n] as [messages, blocks, block]."""
        return values.view(values.shape[0], values.shape[1] // self.block, self.block)

    @abstractmethod
    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        """Write ``values`` into ``message``.

        Args:
            values: [messages, n] fp32; zero in padding.
            counts: [messages, blocks] int32, how many leading elements of each block are not padding; None: all.
            message: [messages, message_bytes(n)] uint8.
            noise: for stochastic rounding, if ``rounds_randomly``; None: to nearest.
        """

    @abstractmethod
    def decode(self, message: Tensor, values: Tensor) -> None:
        """Fill ``values`` [messages, n] fp32 from ``message`` [messages, message_bytes(n)] uint8."""

    @abstractmethod
    def is_finite(self, message: Tensor, n: int) -> Tensor:
        """Return [messages, blocks] bool: whether all elements of each block were finite.

        A block that was not finite decodes to NaN somewhere, and error feedback leaves its residual unchanged.
        """


def _of_its_size(decode: Callable[[Any, Tensor, Tensor], None]) -> Callable[[Any, Tensor, Tensor], None]:
    @wraps(decode)
    def checked(codec: Codec, message: Tensor, values: Tensor) -> None:
        size = codec.message_bytes(values.shape[1])
        if message.shape != (len(values), size):
            raise ValueError(
                f"{len(values)} messages of {codec.name} with {values.shape[1]} elements each are "
                f"{[len(values), size]} bytes, and these are {list(message.shape)}"
            )
        decode(codec, message, values)

    return checked


def kind_of(name: str) -> type[Codec]:
    """Return the class of the codec ``name``."""
    if name in (LOW_RANK, AUTO):
        known = ", ".join(sorted(_codecs))
        raise ValueError(f"{name!r} is for gradients of a sharded model alone; here a codec is needed: {known}")
    if name not in _codecs:
        raise ValueError(f"there is no codec {name!r}, only {', '.join([*sorted(_codecs), LOW_RANK, AUTO])}")
    return _codecs[name]


def codec_of(name: str, block: int = BLOCK) -> Codec:
    """Make the codec ``name``.

    Raises:
        ValueError: there is none; or it is a user's own, and does otherwise than ``Codec`` asks for.
    """
    kind = kind_of(name)
    if _is_own(kind):
        _check(kind, block)
    return kind(block)


def _path(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


# Codecs of the user's own ------------------------------------------------------------------------------------------


def _is_own(kind: type[Codec]) -> bool:
    return not kind.__module__.startswith("yafsdp_cc.")


def own_files(codecs: Iterable[str | None]) -> dict[str, int]:
    """Return what ranks compare of users' own codecs: the CRC-32 of each one's module; 0 if that has no file."""
    sums: dict[str, int] = {}
    for kind in (kind_of(name) for name in codecs if name and name != LOW_RANK):
        if _is_own(kind) and kind.__module__ != "__main__":  # scripts of ranks may differ in what concerns no codec
            what = f"the CRC-32 of the file of codec {kind.name!r}"
            sums[what] = 0
            with suppress(OSError, TypeError):
                sums[what] = zlib.crc32(Path(inspect.getfile(kind)).read_bytes())
    return sums


@cache
def _check(kind: type[Codec], block: int) -> None:
    """Raise a ``ValueError`` that says what a codec does otherwise than ``Codec`` asks for.

    The codec is tried on the CPU, and on a GPU where that raises and the program uses one.
    """
    fault, cause = "", None
    for device in ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",):
        try:
            with _disable_current_modes(), torch.device(device), torch.random.fork_rng(()), torch.no_grad():
                fault, cause = _fault_of(kind, block, device), None
            break
        except Exception as error:
            fault, cause = f"it raised {type(error).__name__}: {error}", error
    if fault:
        raise ValueError(f"codec {kind.name!r} ({'.'.join(_path(kind))}): {fault}") from cause


def _fault_of(kind: type[Codec], block: int, device: str) -> str:
    """Return what a codec does wrong with three messages of four blocks, or ""."""
    sender, receiver, other = map(kind, (block, block, BLOCKS[block == BLOCKS[0]]))
    if sender.block != block or other.block == block:
        return "its `block` is not what it is made with: def __init__(self, block=256, ...): super().__init__(block)"
    n, fixed = 4 * block, torch.Generator("cpu").manual_seed(0)
    values = torch.randn(3, n, dtype=torch.float32, device="cpu", generator=fixed).to(device)
    values[0, :block] = values[2, 2 * block + 5 :] = 0
    counts = torch.full((3, 4), block, dtype=torch.int32, device=device)
    counts[2, 2], counts[2, 3] = 5, 0

    def encoded(codec: Codec, counts: Tensor | None = None, noise: Noise | None = None, filling: int = 0) -> Tensor:
        message = torch.full((3, codec.message_bytes(n)), filling, dtype=torch.uint8, device=device)
        codec.encode(values.clone(), counts, message, *filter(None, [noise]))
        return message

    def decoded(codec: Codec, message: Tensor) -> Tensor:
        found = torch.full((len(message), n), torch.nan, dtype=torch.float32, device=device)
        codec.decode(message, found)
        return found

    noises = (None, Noise(1)) if kind.rounds_randomly else (None,)
    for counted, noise in product((None, counts), noises):
        message = encoded(sender, counted, noise)
        found, is_finite = decoded(receiver, message), sender.is_finite(message, n)
        if not found.isfinite().all():
            return (
                "decode leaves some of `values` as they were (its result is not used), or makes NaN of finite numbers"
            )
        if not torch.equal(decoded(sender, message), found):
            return "decode makes two results of one message: it draws numbers, or takes what the message does not hold"
        if not torch.equal(decoded(receiver, message[1:]), found[1:]):
            return "decode makes other numbers of a message if there are others before it: each is sent alone"
        if not torch.equal(decoded(receiver, encoded(receiver, counted, noise, filling=255)), found):
            return "encode makes two messages of the same values: it draws numbers, counts, or leaves bytes unwritten"
        if is_finite.shape != (3, 4) or is_finite.dtype != torch.bool or not is_finite.all():
            what = f"{is_finite.dtype} {list(is_finite.shape)}"
            return f"is_finite returns {what}, or False for finite numbers, and has to be torch.bool [messages, blocks]"
    for odd in (torch.inf, torch.nan):
        values[1, block + 3] = odd
        message = encoded(sender)
        if sender.is_finite(message, n)[1, 1] or decoded(receiver, message)[1].isfinite().all():
            return (
                f"a block with an element {odd} is taken for finite: decode it to NaN or infinity, and let is_finite "
                "be False for it. largest_of(block) is not finite then, and mark_nonfinite marks a scale that is not"
            )
    return ""


# What codecs share -------------------------------------------------------------------------------------------------


class Scaled(Codec):
    """A codec whose message is ``[scales | payload]``, one fp32 scale for each block."""

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Return the bytes of the payload of ``n`` elements."""

    def body_bytes(self, n: int) -> int:
        return 4 * (n // self.block) + self.payload_bytes(n)

    def parts(self, message: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return the scales [messages, blocks] fp32 and the payload [messages, bytes] uint8 of messages."""
        first = 4 * (n // self.block)
        return message[:, :first].view(torch.float32), message[:, first : first + self.payload_bytes(n)]

    def is_finite(self, message: Tensor, n: int) -> Tensor:
        scales, _ = self.parts(message, n)
        return scales.isnan().logical_not_()


def block_sum(magnitudes: Tensor) -> Tensor:
    """Sum over the last dimension of [..., block], in the order of additions that message formats prescribe.

    Of 64 lanes, lane l adds elements l, l + 64, l + 128, ... one after another; then the upper half of the lanes is
    added to the lower half until one is left.
    """
    first, *others = magnitudes.split(_LANES, -1)
    total: Tensor = sum(others, start=first)
    while total.shape[-1] > 1:
        lower, upper = total.chunk(2, -1)
        total = lower + upper
    return total[..., 0]


def sizes(blocks: Tensor, counts: Tensor | None) -> Tensor:
    """Return the number of elements of each block, without padding, as fp32, at least 1."""
    if counts is None:
        return blocks.new_full(blocks.shape[:-1], float(blocks.shape[-1]))
    return counts.clamp(min=1).to(torch.float32)


_SMALLEST = torch.finfo(torch.float32).smallest_normal


def step_of(largest: Tensor, levels: float) -> tuple[Tensor, Tensor]:
    """Return the scale, largest / levels, and its inverse; both 0 where the scale would be denormal."""
    scale = largest * torch.tensor(1.0 / levels, dtype=torch.float32, device="cpu")
    scale = torch.where(scale < _SMALLEST, 0.0, scale)
    return scale, torch.where(scale > 0, 1.0 / scale, 0.0)


def largest_of(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block; it is not finite if any element is not."""
    return blocks.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(-1).view(torch.float32)


def mark_nonfinite(scale: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and codes as messages hold them: scale NaN and codes 0 for a block whose scale is not finite."""
    bad = scale.isfinite().logical_not_()
    return scale.masked_fill(bad, float("nan")), codes.masked_fill(bad.unsqueeze(-1), 0)


def split_bits(codes: Tensor, bits: int) -> Tensor:
    """Return the lowest ``bits`` of ``codes`` [..., block] uint8 as [..., block · bits / 8] uint8.

    The codes are cut into planes of 8, 4, 2 and 1 bits, each at most once, the lowest bits first. A plane of w bits has
    block · w / 8 bytes; in its byte j, bits w·k to w·k + w - 1 belong to element k · block · w / 8 + j.
    """
    planes = []
    for low, width in _planes(bits):
        pieces = (codes >> low & 2**width - 1).unflatten(-1, (8 // width, -1)).unbind(-2)
        planes.append(reduce(or_, (piece << width * k for k, piece in enumerate(pieces))))
    return torch.cat(planes, -1)


def joined_bits(split: Tensor, bits: int) -> Tensor:
    """Return the codes [..., block] uint8 that ``split_bits`` divided, with zeros in their upper bits."""
    block = split.shape[-1] * 8 // bits
    planes = split.split([block * width // 8 for _, width in _planes(bits)], -1)
    codes = []
    for (low, width), plane in zip(_planes(bits), planes, strict=True):
        pieces = [plane >> width * k & 2**width - 1 for k in range(8 // width)]
        codes.append(torch.cat(pieces, -1) << low)
    return reduce(or_, codes)


def _planes(bits: int) -> list[tuple[int, int]]:
    """Return the lowest bit and the width of each plane that codes of ``bits`` are cut into (``split_bits``)."""
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    return list(zip(accumulate(widths, initial=0), widths, strict=False))


def counts_of(layout: Layout, block: int, device: torch.device, ranks: range) -> Tensor | None:
    """Return how many elements of parameters, not padding, each block of equal chunks has.

    Args:
        ranks: adjacent ranks whose chunks are equally long.

    Returns:
        [ranks, blocks of a chunk] int32; None if every block is full.
    """
    starts = torch.arange(layout.starts[ranks.start], layout.starts[ranks.stop], block, device="cpu")
    counts = torch.zeros_like(starts)
    for extent in layout.extents:  # each extent begins with a new block: no block has elements of two extents
        inside = (starts >= extent.offset) & (starts < extent.end)
        counts += inside * (extent.end - starts).clamp(max=block)
    return None if bool((counts == block).all()) else counts.to(torch.int32).to(device).view(len(ranks), -1)
