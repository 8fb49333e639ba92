"""Caches of each sample's activation on both sides of a pipeline boundary (AQ-SGD).

At first a sample's activation a is sent exactly, in the dtype of the cache, and both sides store it as m. Later
messages hold the change, which both sides add to m; the receiver computes and back-propagates at m:

    message = Q(a − m)     m ← m + decoded(message)

Both sides decode the message by the same function, so that their caches are equal to the bit.

Source: Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Quantization with Guarantees",
2022, algorithm 1.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from yafsdp_cc.pipelining.messages import Encoding, SenderState

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_STATE = SenderState(error_feedback=False)


class Visit(NamedTuple):
    """The slots of one micro-batch's samples in a cache."""

    slots: list[int]
    seen: list[bool]
    """Whether the cache has each sample from an earlier micro-batch."""


class SampleIndex:
    """Maps samples to slots of a cache. When it is full, the sample that was used longest ago is dropped.

    Both sides of a boundary visit the same ids in the same order, and so have the same samples in the same slots.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._slots: OrderedDict[int, int] = OrderedDict()
        """Slot of each sample by its id, the one used longest ago first."""

    def visit(self, ids: Sequence[int]) -> Visit:
        """Give every sample of a micro-batch a slot.

        An id that occurs twice has one slot: both samples are sent relative to the activation cached before the
        micro-batch, and the later one is stored.
        """
        if len(set(ids)) > self._samples:
            raise ValueError(
                f"cache_samples={self._samples}: a micro-batch has {len(set(ids))} different samples, all of which "
                "have to be in the cache. Give as many as the data set has"
            )
        seen = [sample in self._slots for sample in ids]
        for sample in ids:
            if sample in self._slots:
                self._slots.move_to_end(sample)
        for sample in ids:
            if sample not in self._slots:
                full = len(self._slots) == self._samples
                self._slots[sample] = self._slots.popitem(last=False)[1] if full else len(self._slots)
        return Visit([self._slots[sample] for sample in ids], seen)

    @property
    def ids(self) -> list[int]:
        """Ids of the samples in the cache, the one used longest ago first."""
        return list(self._slots)

    @property
    def slots(self) -> list[int]:
        """Slots of the samples in the cache, in the order of ``ids``."""
        return list(self._slots.values())

    def load(self, ids: Sequence[int], slots: Sequence[int]) -> None:
        """Load the ``ids`` and ``slots`` of another index."""
        self._slots = OrderedDict(zip(ids, slots, strict=True))


class SampleCache:
    """The cached activations on one side of a boundary, in host memory or in memory-mapped files.

    While the stage computes, a thread reads activations for the next micro-batch and writes those of the last one, in
    the order of the micro-batches.

    Args:
        dtype: dtype of cached activations, and of those sent for new samples.
        encoding: encoding of changes, with a row for each sample.
        folder: existing folder for memory-mapped files; None: host memory.
        name: beginning of the files' names; the index of a tensor is added.
    """

    def __init__(
        self,
        samples: int,
        dtype: torch.dtype,
        encoding: Encoding,
        device: torch.device,
        folder: Path | None,
        name: str,
    ) -> None:
        self.index = SampleIndex(samples)
        self.values: dict[int, Tensor] = {}
        """Cached activations [samples, elements], by the tensor's index among those that cross the boundary."""
        self._samples, self._dtype, self._encoding = samples, dtype, encoding
        self._device, self._folder, self._name = device, folder, name
        self._visits: list[Visit] = []
        self._ids: list[list[int]] = []
        self._before: dict[tuple[int, int], Future[Tensor]] = {}
        self._writes: list[Future[None]] = []
        self._thread: ThreadPoolExecutor | None = None

    def begin_step(self, micro_batches: list[list[int]]) -> None:
        """Assign slots to the samples of a step."""
        self._ids = micro_batches
        self._visits = [self.index.visit(ids) for ids in micro_batches]
        self._before.clear()
        self._prefetch(0)

    def end_step(self) -> None:
        """Wait until all activations are written."""
        for write in self._writes:
            write.result()
        self._writes.clear()

    def message_bytes(self, chunk: int, shape: Sequence[int]) -> int:
        """Return the bytes of the message of a tensor [samples, ...] of micro-batch ``chunk``."""
        seen = sum(self._visits[chunk].seen)
        fresh = (shape[0] - seen) * math.prod(shape[1:]) * self._dtype.itemsize
        return self._encoding.message_bytes((seen, *shape[1:]), torch.float32) + fresh

    def encode(self, chunk: int, place: int, values: Tensor, message: Tensor, seed: int) -> None:
        """Write the message of ``values`` [samples, ...], and update the cache as the receiver will."""
        seen = self._rows(chunk, True)
        if len(seen):
            flat = values.flatten(1) if values.dim() > 1 else values.view(-1, 1)
            change = flat[seen].to(torch.float32) - self._known(chunk, place, flat.shape[1])
            size = self._encoding.message_bytes(change.shape, torch.float32)
            self._encoding.encode(change, message[:size], _NO_STATE, seed)
        if len(fresh := self._rows(chunk, False)):
            new = values[fresh].to(self._dtype).reshape(-1).view(torch.uint8)
            message[message.numel() - new.numel() :].copy_(new)
        self.decode(chunk, place, message, torch.empty_like(values))

    def decode(self, chunk: int, place: int, message: Tensor, values: Tensor) -> None:
        """Decode a message into ``values`` [samples, ...], and cache the result."""
        rows, elements = values.shape[0], math.prod(values.shape[1:])
        seen, fresh = self._rows(chunk, True), self._rows(chunk, False)
        taken = torch.empty(rows, elements, dtype=self._dtype, device=values.device)
        before = torch.zeros_like(taken)
        size = self._encoding.message_bytes((len(seen), elements), torch.float32)
        if len(seen):
            known = self._known(chunk, place, elements)
            before[seen] = known.to(self._dtype)
            change = torch.empty_like(known)
            self._encoding.decode(message[:size], change)
            taken[seen] = known.add_(change).to(self._dtype)
        if len(fresh):
            taken[fresh] = message[size:].view(self._dtype).view(len(fresh), elements)
        values.copy_(taken.view(values.shape))
        # non-finite activations reach the loss, but are not cached: changes would never make them finite again
        kept = torch.where(taken.isfinite(), taken, before)
        self._write(self._visits[chunk].slots, place, kept)
        self._before.pop((chunk, place), None)
        if place == max(self.values):
            self._prefetch(chunk + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the ids and slots of the samples, and their activations."""
        ids, slots = self.index.ids, self.index.slots
        rows = torch.tensor(slots, dtype=torch.int64, device="cpu")
        return {"ids": ids, "slots": slots, "values": {place: kept[rows] for place, kept in self.values.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        if max(state["slots"], default=0) >= self._samples:
            raise ValueError(
                f"cache_samples={self._samples}: the state has a sample in slot {max(state['slots'])}; give as many as "
                "when it was saved"
            )
        self.index.load(state["ids"], state["slots"])
        rows = torch.tensor(state["slots"], dtype=torch.int64, device="cpu")
        for place, kept in state["values"].items():
            self._values(int(place), kept.shape[1])[rows] = kept

    def digest(self, chunk: int) -> int:
        """Return a 32-bit checksum of the ids of a micro-batch."""
        return zlib.crc32(torch.tensor(self._ids[chunk], dtype=torch.int64, device="cpu").numpy().tobytes())

    def _rows(self, chunk: int, seen: bool) -> Tensor:
        """Return the rows of a micro-batch whose samples are in the cache (``seen``), or those whose are not."""
        rows = [row for row, each in enumerate(self._visits[chunk].seen) if each == seen]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").to(self._device)

    def _known(self, chunk: int, place: int, elements: int) -> Tensor:
        """Return the cached activations of a micro-batch's samples, [samples, elements] fp32."""
        if (chunk, place) not in self._before:
            self._values(place, elements)
            self._read(chunk, place)
        return self._before[chunk, place].result().to(self._device, torch.float32)

    def _values(self, place: int, elements: int) -> Tensor:
        if place not in self.values:
            shape = (self._samples, elements)
            if self._folder is None:
                self.values[place] = torch.zeros(shape, dtype=self._dtype, device="cpu")
            else:
                file = self._folder / f"{self._name}-{place}.cache"
                flat = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=self._dtype, device="cpu")
                self.values[place] = flat.view(shape)
        return self.values[place]

    def _prefetch(self, chunk: int) -> None:
        if chunk < len(self._visits):
            for place in self.values:
                self._read(chunk, place)

    def _read(self, chunk: int, place: int) -> None:
        visit, values = self._visits[chunk], self.values[place]
        slots = [slot for slot, seen in zip(visit.slots, visit.seen, strict=True) if seen]
        rows = torch.tensor(slots, dtype=torch.int64, device="cpu")
        self._before[chunk, place] = self._submit(values.index_select, 0, rows)

    def _write(self, slots: list[int], place: int, kept: Tensor) -> None:
        last = {slot: row for row, slot in enumerate(slots)}  # of a sample that occurs twice the last row counts
        rows = torch.tensor(list(last.values()), dtype=torch.int64, device="cpu")
        into = torch.tensor(list(last), dtype=torch.int64, device="cpu")
        values = self._values(place, kept.shape[1])
        written = None
        if kept.is_cuda:
            written = torch.cuda.Event()
            written.record()

        def write() -> None:
            if written is not None:
                written.synchronize()
            values.index_copy_(0, into, kept.cpu()[rows])

        self._writes.append(self._submit(write))

    def _submit(self, work: Any, *args: Any) -> Future[Any]:
        self._thread = self._thread or ThreadPoolExecutor(1, "sample-cache")
        return self._thread.submit(work, *args)
