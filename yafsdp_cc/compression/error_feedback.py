"""Error feedback: what a message loses is remembered, and added to the next one.

    h = g + η·E            what a message should hold; g is the gradient
    m = C(h)               the message: C encodes, D decodes
    E = E + b·g − a·D(m)   the residual: what is left for the next message

With b = 1, a·ΣD(m) = Σg + E₀ − E_T, summed over messages, whatever the codec: nothing is lost, only late. η = a = 1 is
the classic form (Seide et al., 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, algorithm 2); η < 1 is
LoCo (Xie et al., 2024, equation 4) with E in place of its e / (1 − β); a = 1 − β makes E the momentum as well
(``reduce_scatter``).

b = 0 is EF21 (Richtárik et al., 2021, algorithm 2): −E = ΣD(m) is an estimate of g that sender and receiver both keep,
and a message holds by how much the gradient differs from it. The receiver uses the estimate, not the message: the less
gradients change from one message to the next, the nearer the estimate is to them.

The residual E has the unit of one rank's gradient of its own mean loss, not scaled by the number of ranks. A block with
a non-finite element leaves its residual unchanged.

``encode``, ``accumulate``, ``decode_sum`` and ``decode`` run one native kernel where the extension has one; the torch
code below the kernel call in each function defines the same bits. The native extension is ``_native.so`` beside this
file, built from ``csrc`` by ``setup.py``; it registers operators as ``torch.ops.yafsdp_cc``, for CPU and CUDA. Kernels
for CUDA are compiled when they are first launched, by the NVRTC that comes with torch. ``YAFSDP_CC_NATIVE=0`` chooses
plain torch; ``1`` raises where the extension is not built, or cannot compile for a GPU; ``auto``, the default, falls
back to plain torch and logs one warning.
"""

from __future__ import annotations

import ctypes
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from yafsdp_cc.compression.codec import codec_of, largest_of, step_of

if TYPE_CHECKING:
    from yafsdp_cc.compression.codec import Codec, Noise
    from yafsdp_cc.engine.communicator import CommContext, Works
    from yafsdp_cc.engine.layout import Layout
    from yafsdp_cc.engine.param import Divisor, FlatParam, FSDPParam

PART = 327_680
"""Elements that ``start`` of ``decode_sum`` is a multiple of: whole tiles of topk, whole fives of ternary's blocks."""


class Recursion(NamedTuple):
    """The three coefficients of the error-feedback recursion."""

    carry: float = 1.0
    """Share η of the residual that is added to the gradient before encoding."""
    taken: float = 1.0
    """Share a of a decoded message that is subtracted from the residual."""
    added: float = 1.0
    """Share b of a gradient that is added to the residual."""


CLASSIC = Recursion()
EF21 = Recursion(added=0.0)


class Residual(NamedTuple):
    """The gradients that messages of one buffer have lost so far."""

    values: Tensor
    """Values [messages, n] in fp32, bf16 or int8; n is a multiple of ``block``."""
    scales: Tensor
    """Scales [messages, blocks] fp32 of int8 values; [messages, 0] for other dtypes."""
    block: int
    """Elements that share a scale."""

    @classmethod
    def zeros(cls, messages: int, n: int, dtype: torch.dtype, block: int, device: torch.device) -> Residual:
        """Return a residual of zeros."""
        values = torch.zeros(messages, n, dtype=dtype, device=device)
        blocks = n // block if dtype == torch.int8 else 0
        scales = torch.zeros(messages, blocks, dtype=torch.float32, device=device)
        return cls(values, scales, block)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def span(self, first: int, messages: int, n: int) -> Residual:
        """Return a view of ``messages`` rows of ``n`` elements, from the residual's element ``first`` on.

        Messages of one residual may differ in length: then only views by ``span`` have a meaningful shape.
        """
        values = self.values.view(-1)[first : first + messages * n].view(messages, n)
        start, blocks = (first // self.block, n // self.block) if self.scales.numel() else (0, 0)
        scales = self.scales.view(-1)[start : start + messages * blocks].view(messages, blocks)
        return Residual(values, scales, self.block)

    def of(self, chunks: PeerChunks) -> Residual:
        """Return a view of the residual of the messages that hold ``chunks``."""
        return self.span(chunks.before, *chunks.values.shape)

    def load(self) -> Tensor:
        """Return a copy of the residual in fp32."""
        if self.values.dtype != torch.int8:
            return self.values.to(torch.float32, copy=True)
        return (self._blocks(self.values).to(torch.float32) * self.scales.unsqueeze(-1)).flatten(1)

    def store(self, fresh: Tensor, where: Tensor | None = None) -> None:
        """Overwrite the residual with ``fresh`` [messages, n] fp32, but only in blocks for which ``where`` is true."""
        blocks = self._blocks(fresh)
        if self.values.dtype == torch.int8:
            scale, inverse = step_of(largest_of(blocks), 127)
            blocks = (blocks * inverse.unsqueeze(-1)).round().clamp_(-127, 127)
            self.scales.copy_(scale if where is None else torch.where(where, scale, self.scales))
        stored = blocks.to(self.values.dtype)
        if where is not None:
            stored = torch.where(where.unsqueeze(-1), stored, self._blocks(self.values))
        self.values.copy_(stored.flatten(1))

    def clear(self) -> None:
        """Set the residual to zero."""
        self.values.zero_()
        self.scales.zero_()

    def multiply(self, factor: float) -> None:
        """Multiply the residual by ``factor``, as by a loss scale that changes; exact for powers of two."""
        (self.scales if self.values.dtype == torch.int8 else self.values).mul_(factor)

    def _blocks(self, values: Tensor) -> Tensor:
        return values.view(values.shape[0], values.shape[1] // self.block, self.block)


def encode(
    codec: Codec,
    gradients: Tensor,
    message: Tensor,
    *,
    counts: Tensor | None = None,
    residual: Residual | None = None,
    recursion: Recursion = CLASSIC,
    scale: float = 1.0,
    noise: Noise | None = None,
) -> None:
    """Encode ``gradients`` into ``message``, and store in ``residual`` what the message loses.

    Args:
        gradients: [messages, n], floating-point; zero in padding.
        message: [messages, bytes] uint8, overwritten.
        counts: [messages, blocks] int32, how many leading elements of each block are not padding; None: all.
        residual: error feedback's state after earlier messages, overwritten; None: no error feedback.
        scale: factor that gradients are multiplied by first: one over the loss scale.
        noise: random numbers for stochastic rounding, without a residual.
    """
    if not gradients.numel():  # the chunk of a rank that owns no element is empty
        return
    if (ops := ops_for(message.device, codec)) is not None:
        number, values = _NUMBERS[codec.name], _readable(gradients)
        kept = (None, None) if residual is None else (residual.values, residual.scales)
        drawn = (-1, 0) if noise is None else noise
        ops.encode(
            values, message, number, codec.block, counts, *kept, *recursion, scale, *drawn, stream_of(message.device)
        )
        return
    g = gradients.to(torch.float32) * scale
    if residual is None:
        codec.encode(g, counts, message, noise)
        return
    before = residual.load()
    codec.encode(g + recursion.carry * before, counts, message)
    decoded = torch.empty_like(g)
    codec.decode(message, decoded)
    left = before + recursion.added * g - (decoded if recursion.taken == 1 else recursion.taken * decoded)
    if counts is not None:
        blocks = left.unflatten(1, (-1, residual.block))
        blocks.masked_fill_(torch.arange(residual.block, device=left.device) >= counts.unsqueeze(-1), 0.0)
    residual.store(left, codec.is_finite(message, g.shape[1]))


def accumulate(gradients: Tensor, residual: Residual, *, scale: float = 1.0) -> None:
    """Add gradients [messages, n] to the residual, for a later message; blocks that are not finite are left out."""
    if (ops := ops_for(gradients.device)) is not None:
        ops.accumulate(_readable(gradients), *residual, scale, stream_of(gradients.device))
        return
    due = residual.load() + gradients.to(torch.float32) * scale
    residual.store(due, largest_of(due.unflatten(1, (-1, residual.block))).isfinite())


def decode_sum(
    codec: Codec, messages: Tensor, n: int, own: Tensor | None, place: int, total: Tensor, start: int = 0
) -> None:
    """Fill ``total`` with a range of the sum of decoded messages in order, ``own`` inserted before message ``place``.

    Args:
        messages: [messages, bytes] uint8.
        own: as long as ``total``, floating-point: this rank's gradients, which were not encoded; None for none. It may
            be ``total`` itself where ``place`` is 0.
        place: index of the message before which ``own`` is added.
        total: fp32, overwritten with ``total.numel()`` elements of the sum.
        start: index of the sum's element that ``total`` begins with, a multiple of ``PART``; without a native kernel
            ``start`` must be 0, and ``total`` [n].
    """
    if not total.numel():
        return
    own = None if own is None else _readable(own)
    if (ops := ops_for(messages.device, codec)) is not None:
        number = _NUMBERS[codec.name]
        ops.decode_sum(messages, number, codec.block, n, own, place, total, start, stream_of(messages.device))
        return
    values = total.new_empty(messages.shape[0], total.shape[0])
    codec.decode(messages, values)
    parts = list(values)
    if own is not None:
        parts.insert(place, own.to(torch.float32))
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)


def decode_differences(codec: Codec, messages: Tensor, n: int, estimate: Tensor, total: Tensor, start: int = 0) -> None:
    """Add decoded differences (EF21) to ``estimate``, a range of the sum's elements, and copy it to ``total``.

    A sender leaves the residual of a non-finite block unchanged. ``estimate`` leaves out that block of the message,
    too, so that it stays the sum of the senders' residuals; in ``total`` the block is not finite.

    Args:
        codec, messages, n, start: as of ``decode_sum``.
        estimate: fp32, the elements from ``start`` on of the sum over senders of all messages so far; overwritten.
        total: as long as ``estimate``, fp32; overwritten.
    """
    decode_sum(codec, messages, n, estimate, 0, total, start)
    if total.is_cpu and isfinite(total.sum().item()):  # only on a CPU: the host would have to wait for a GPU's sum
        estimate.copy_(total)
        return
    part = torch.empty_like(total)
    held = codec.is_finite(messages, n)[:, start // codec.block : (start + total.numel()) // codec.block]
    for message, is_held in zip(messages.split(1), held, strict=True):
        decode_sum(codec, message, n, None, 0, part, start)
        part.view(-1, codec.block).masked_fill_(is_held.logical_not().unsqueeze(-1), 0.0)
        estimate.add_(part)


def decode(codec: Codec, messages: Tensor, values: Tensor) -> None:
    """Decode ``messages`` [messages, bytes] into ``values`` [messages, n] of any floating-point dtype."""
    ops = ops_for(messages.device, codec)
    if ops is not None and values.dtype != torch.float64:
        ops.decode(messages, _NUMBERS[codec.name], codec.block, values, stream_of(messages.device))
    elif values.dtype == torch.float32:
        codec.decode(messages, values)
    else:
        decode(codec, messages, decoded := torch.empty_like(values, dtype=torch.float32))
        values.copy_(decoded)


def _readable(values: Tensor) -> Tensor:
    """Return ``values`` in a dtype that native kernels read."""
    return values.to(torch.float32) if values.dtype == torch.float64 else values


def stream_of(device: torch.device) -> int:
    """Return the handle of the CUDA stream that native kernels are launched on; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


# What messages lose ------------------------------------------------------------------------------------------------


@cache
@torch.no_grad()
def lost_share(codec: str, block: int) -> float:
    """Return the share of the squares of normal noise that a message loses: 0.36 by onebit, 0.016 by int4."""
    made = codec_of(codec, block)
    noise = torch.Generator("cpu").manual_seed(0)
    values = torch.randn(1, 64 * block, generator=noise, dtype=torch.float32, device="cpu")
    message = torch.zeros(1, made.message_bytes(values.shape[1]), dtype=torch.uint8, device="cpu")
    made.encode(values.clone(), None, message)
    decoded = torch.empty_like(values)
    made.decode(message, decoded)
    return ((values - decoded).square().sum() / values.square().sum()).item()


SUMS = 3
SAMPLES = 16
"""Most parts of messages, each of ``PART`` elements, that one call of ``CompressionError.observe`` decodes."""
_GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio's fraction: its multiples modulo 1 are evenly spread, however many there are."""


class CompressionError:
    """Measures how well a codec suits the gradients it encodes: the share ω = ‖h − D(m)‖² / ‖h‖² that messages lose.

    h is the value to encode and D(m) the decoded message. E is the residual after the message, so h and h − D(m) come
    from residual, message and, in EF21 and LoCo, gradient: h − D(m) = η·E − (1 − η·a)·D(m) + (1 − η·b)·g.

    A codec that keeps a share δ = 1 − ω of each message has residuals of at most ‖E‖² ≤ 4·ω/δ²·‖g‖² (Karimireddy et
    al., "Error Feedback Fixes SignSGD", 2019, lemma 3), so that messages which keep up with gradients g keep no less
    than about δ²/4 of h. ``least`` is this bound for half the δ that the codec has on normal noise, because the
    elements of real gradients differ far more in size; where residuals are momentum (a < 1), in which noise averages
    out, it is lower by another √a.

    Args:
        kept: the share of normal noise that the codec's messages keep.
        rank: rank of the sender; ranks take their samples from different parts of the gradients.
    """

    def __init__(self, device: torch.device, kept: float, recursion: Recursion = CLASSIC, rank: int = 0) -> None:
        self.recursion = recursion
        self._shift = rank * _GOLDEN % 1
        self.least = (max(kept, 0.0) / 4) ** 2 * recursion.taken**0.5
        """Least share of the values' squares that messages must keep: below it residuals grow."""
        self.sums = torch.zeros(SUMS, dtype=torch.float64, device=device)
        """Sums of squares [3] fp64: of what messages lost, of what they should hold, and of what they hold."""
        self.seen = False
        """Whether messages were made since the measurement began: alike on all ranks, also on one that sends none."""

    @torch.no_grad()
    def observe(self, codec: Codec, messages: Tensor, residual: Residual, gradients: Tensor) -> None:
        """Add to ``sums`` squares of what ``messages`` of ``gradients`` lost and hold; the messages left ``residual``.

        If messages have more than ``SAMPLES`` parts, decode a fixed sample and scale its sums up: each part takes a
        kernel launch, and there are as many messages as ranks.
        """
        n = residual.values.shape[1]
        step = n if ops_for(messages.device, codec) is None else min(PART, n)
        parts = [(row, start, min(start + step, n)) for row in range(len(messages)) for start in range(0, n, step)]
        count = max(1, SAMPLES * PART // max(step, PART))  # without native kernels a part is a whole message
        if len(parts) > count:
            parts = [parts[int((place + self._shift) * len(parts) / count)] for place in range(count)]
        lost = torch.cat([residual.span(row * n + start, 1, end - start).load()[0] for row, start, end in parts])
        decoded = torch.empty_like(lost)
        sizes = [end - start for _, start, end in parts]
        for (row, start, _), part in zip(parts, decoded.split(sizes), strict=True):
            decode_sum(codec, messages[row : row + 1], n, None, 0, part, start)
        carry, taken, added = self.recursion
        lost.mul_(carry).sub_(decoded, alpha=1 - carry * taken)
        if carry * added != 1:
            given = torch.cat([gradients[row, start:end] for row, start, end in parts])
            lost.add_(given, alpha=1 - carry * added)
        self.add(lost, lost + decoded, decoded, share=len(lost) / residual.values.numel())

    @torch.no_grad()
    def add(self, *parts: Tensor, share: float = 1.0) -> None:
        """Add the squares of ``parts``, a ``share`` of all elements: values lost, values to encode, decoded values."""
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
        self.sums.addcmul_(norms, norms, value=1 / share)


# Encoders of whole buffers -----------------------------------------------------------------------------------------

SENT, RECEIVED, SUM = "sent messages", "received messages", "decoded sum"
"""Names of the scratch buffers that all sums of a stream share."""


@dataclass(frozen=True)
class PlainBuffer:
    """A buffer that belongs to no ``FlatParam``, such as one of FSDP2 or DDP."""

    name: str
    layout: Layout
    rank: int
    device: torch.device
    divisor: Divisor
    reduce_dtype: torch.dtype = torch.float32
    sum_dtype: torch.dtype = torch.float32
    trainable: bool = True
    params: Sequence[FSDPParam] = ()


SummedBuffer: TypeAlias = "FlatParam | PlainBuffer"


class Feedback(NamedTuple):
    """The error feedback that one ``start`` of an ``Encoder`` applies."""

    residual: Residual | None
    recursion: Recursion
    noise: Noise | None
    """Random numbers for stochastic rounding, where there is no residual."""
    error: CompressionError | None


class Encoder(ABC):
    """Makes messages of a buffer's values, exchanges them, and decodes their sum.

    Each encoder serves one ``reduce_scatter.CompressedSum``, which keeps the residual. There are four encoders: codecs
    or low rank (``powersgd``), for a reduce-scatter or an all-reduce.
    """

    context: CommContext
    step: int
    """Number of elements that one call of ``decode`` fills, and of which its argument ``start`` is a multiple."""
    nbytes = 0
    """Bytes of the encoder's own buffers, scratch buffers not counted."""

    def bind(self, context: CommContext) -> None:
        """Bind to the communicator of ``context``, and reserve scratch buffers for messages."""
        self.context = context

    @property
    @abstractmethod
    def kept(self) -> float:
        """The share of normal noise that messages keep, between 0 and 1."""

    @abstractmethod
    def start(self, values: Tensor, feedback: Feedback, async_op: bool) -> Works:
        """Encode ``values``, store what the messages lose in the residual, and start the exchange."""

    @abstractmethod
    def decode(self, own: Tensor | None, start: int, total: Tensor) -> None:
        """Fill ``total`` fp32 with elements from ``start`` on of the sum of all messages.

        Args:
            own: for a reduce-scatter, this rank's gradients from ``start`` on, not encoded; None for an all-reduce.
            start: a multiple of ``step``.
            total: overwritten.
        """

    def decode_differences(self, estimate: Tensor, start: int, total: Tensor) -> None:
        """Add messages to ``estimate`` and write it to ``total``, as the module's function of this name does."""
        raise NotImplementedError(f"{type(self).__name__} does not encode differences to an estimate")

    @abstractmethod
    def sent_bytes(self) -> int:
        """Return the number of bytes that this rank will send in the next call of ``start``."""

    def planned_bytes(self) -> int:
        """Return the bytes that this rank sends in a call of ``start``, on average."""
        return self.sent_bytes()


class PeerChunks(NamedTuple):
    """A run of other ranks' chunks in a buffer, adjacent and equally long."""

    ranks: range
    values: Tensor
    """View of the run's chunks in the buffer, [ranks, chunk]."""
    before: int
    """Number of elements of other ranks' chunks before this run."""


def other_chunks(buffer: Tensor, layout: Layout, rank: int) -> list[PeerChunks]:
    """Return runs of other ranks' chunks in ``buffer``: one below and one above ``rank`` if chunks are equally long.

    Args:
        buffer: laid out by ``layout``, or one number for each block of a buffer laid out so.
    """
    block = layout.numel // max(buffer.numel(), 1)
    found = []
    for run in layout.known_runs.get(rank) or layout.runs(without=rank):
        first, last = layout.starts[run.start] // block, layout.starts[run.stop] // block
        before = first - (layout.chunks[rank] // block if run.start > rank else 0)
        found.append(PeerChunks(run, buffer[first:last].view(len(run), -1), before))
    return found


# The native extension ----------------------------------------------------------------------------------------------

LIBRARY = Path(__file__).with_name("_native.so")
MODES = ("0", "1", "auto")
NVRTC = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
"""The library by which torch itself finds NVRTC and CUDA's driver; it does not exist in a torch without CUDA."""
OPERATORS = ("encode", "accumulate", "decode_sum", "decode", "update", "update_lamb")

_NUMBERS = {"fp32": 0, "bf16": 1, "fp8": 2, "int8": 3, "int4": 4, "ternary": 5, "onebit": 6, "topk": 7}
_NUMBERS |= {"int6": 8, "int3": 9, "int2": 10}
"""Number by which native kernels know each codec."""
_BUILD = (
    "to build: YAFSDP_CC_NATIVE=1 pip install --no-build-isolation --force-reinstall --no-deps yafsdp_cc, "
    "or --editable ."
)

_logger = logging.getLogger("yafsdp_cc")


def ops_for(device: torch.device, codec: Codec | None = None) -> Any:
    """Return the native operators that take tensors of ``device`` and know ``codec``, or None.

    Raises:
        RuntimeError: there are no operators for ``device``, and ``YAFSDP_CC_NATIVE=1`` demands them.
        ValueError: ``YAFSDP_CC_NATIVE`` is something else than 0, 1 or auto.
    """
    if codec is not None and codec.name not in _NUMBERS:
        return None
    return _ops_for(device, os.environ.get("YAFSDP_CC_NATIVE", "auto"))


@cache
def _ops_for(device: torch.device, mode: str) -> Any:
    if mode not in MODES:
        raise ValueError(f"YAFSDP_CC_NATIVE={mode}: {', '.join(MODES)} are known")
    if mode == "0":
        return None
    missing = _load() or _lacks(device)
    if not missing:
        return torch.ops.yafsdp_cc
    if mode == "1":
        raise RuntimeError(f"YAFSDP_CC_NATIVE=1, but {missing}")
    factor = "10 to 90 times " if device.type == "cpu" else ""  # bench/kernels.py measures these factors
    _logger.warning("gradients are encoded by plain torch, %sslower: %s", factor, missing)
    return None


@cache
def _load() -> str:
    """Load the native library; return why that failed and how to mend it, or ""."""
    if not LIBRARY.exists():
        return f"the native extension is not built; {_BUILD}"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"the native extension cannot be loaded ({error}); {_BUILD}"
    if missing := [name for name in OPERATORS if not hasattr(torch.ops.yafsdp_cc, name)]:
        return f"{LIBRARY} is of an older source, without {', '.join(missing)}; {_BUILD}"
    for name in OPERATORS:  # they return nothing
        torch.library.register_fake(f"yafsdp_cc::{name}", lambda *_: None, allow_override=True)
    return ""


def _lacks(device: torch.device) -> str:
    """Return why the loaded library cannot serve ``device``, or ""; for a GPU it compiles one kernel as a test."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"the native extension has no kernels for {device.type}"
    lacks = ctypes.CDLL(str(LIBRARY)).yafsdp_cc_cuda_lacks
    lacks.restype = ctypes.c_char_p
    why = lacks(bytes(NVRTC), torch.cuda.current_device() if device.index is None else device.index)
    return f"kernels cannot be compiled for {device}: {why.decode(errors='replace')}" if why else ""
