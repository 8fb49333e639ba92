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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from yafsdp_cc.pipelining.messages import Encoding
from yafsdp_cc.pipelining.settings import DIGEST

if TYPE_CHECKING:
    from yafsdp_cc.pipelining.messages import SenderState


class Visit(NamedTuple):
    """One micro-batch's samples in a cache."""

    slots: list[int]
    seen: list[int]
    """Rows of the micro-batch whose samples the cache has from an earlier one."""
    fresh: list[int]
    """Rows of the other samples."""
    digest: Tensor
    """Checksums [DIGEST] uint8 that identify the samples' ids and the step."""


class SampleCache:
    """The cached activations on one side of a boundary, in host memory or in memory-mapped files.

    Both sides of a boundary visit the same ids in the same order, and so have the same samples in the same slots.

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
        folder: str | Path | None,
        name: str,
    ) -> None:
        self.slots: dict[int, int] = {}
        """Slot of each sample by its id."""
        self.values: dict[int, Tensor] = {}
        """Cached activations [samples, elements], by the tensor's index among those that cross the boundary."""
        self.dtype, self.encoding = dtype, encoding
        self.differ: list[Tensor] = []
        """Whether each message that has arrived in this step was about other samples than this side's."""
        self._samples, self._device, self._folder, self._name = samples, device, folder, name
        self._visits: list[Visit] = []

    def begin_step(self, micro_batches: list[list[int]], step: int) -> None:
        """Assign slots to the samples of a step, whose number both sides know."""
        self._visits = [self._visit(ids, step) for ids in micro_batches]
        self.differ.clear()

    def end_step(self) -> bool:
        """Return whether a message was about other samples."""
        return bool(self.differ) and bool(torch.stack(self.differ).any())

    def changes(self, chunk: int, place: int) -> Changes:
        """Return the encoding of the tensor of index ``place`` of micro-batch ``chunk``, for this step."""
        return Changes(self, chunk, place, self._visits[chunk])

    def state_dict(self) -> dict[str, Any]:
        """Return the ids and slots of the samples, and their activations."""
        ids, slots = list(self.slots), list(self.slots.values())
        return {"ids": ids, "slots": slots, "values": {place: kept[slots] for place, kept in self.values.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        last = max(state["slots"], default=0)
        if last >= self._samples:
            raise ValueError(
                f"cache_samples={self._samples}: the state has a sample in slot {last}; give as many as when it "
                "was saved"
            )
        self.slots = dict(zip(state["ids"], state["slots"], strict=True))
        for place, kept in state["values"].items():
            self._values(int(place), kept.shape[1])[state["slots"]] = kept

    def known(self, chunk: int, place: int, elements: int) -> Tensor:
        """Return the cached activations of the samples of a micro-batch that have any, [samples, elements] fp32."""
        visit = self._visits[chunk]
        slots = [visit.slots[row] for row in visit.seen]
        return self._values(place, elements)[slots].to(self._device, torch.float32)

    def _visit(self, ids: Sequence[int], step: int) -> Visit:
        """Give every sample of a micro-batch a slot.

        An id that occurs twice has one slot: both samples are sent relative to the activation cached before the
        micro-batch, and the later one is stored.
        """
        slots = self.slots
        seen = [row for row, sample in enumerate(ids) if sample in slots]
        fresh = [row for row, sample in enumerate(ids) if sample not in slots]
        for sample in ids:
            slots.setdefault(sample, len(slots))
        if len(slots) > self._samples:
            raise ValueError(
                f"cache_samples={self._samples}: {len(slots)} samples have come, all of which have to be in the cache. "
                "Give as many as the data set has; cache_folder keeps them in files"
            )
        checksum = zlib.crc32(torch.tensor(ids, dtype=torch.int64, device="cpu").numpy().tobytes())
        digest = torch.tensor([checksum, step & 0xFFFFFFFF], dtype=torch.uint32, device="cpu").view(torch.uint8)
        return Visit([slots[sample] for sample in ids], seen, fresh, digest.to(self._device))

    def _values(self, place: int, elements: int) -> Tensor:
        if place not in self.values:
            shape = (self._samples, elements)
            if self._folder is None:
                self.values[place] = torch.zeros(shape, dtype=self.dtype, device="cpu")
            else:
                file = Path(self._folder, f"{self._name}-{place}.cache")
                flat = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=self.dtype, device="cpu")
                self.values[place] = flat.view(shape)
        return self.values[place]

    def write(self, chunk: int, place: int, kept: Tensor) -> None:
        """Cache the activations ``kept`` [samples, elements] of a micro-batch."""
        # of a sample that occurs twice the last row counts
        last = {slot: row for row, slot in enumerate(self._visits[chunk].slots)}
        self._values(place, kept.shape[1])[list(last)] = kept.cpu()[list(last.values())]


class Changes(Encoding):
    """Messages of one tensor [samples, ...] of a micro-batch.

    A message holds the changes of the samples that both sides have, then the other samples themselves, then a digest.
    """

    def __init__(self, cache: SampleCache, chunk: int, place: int, visit: Visit) -> None:
        self._cache, self._chunk, self._place = cache, chunk, place
        _, self._seen, self._fresh, self._digest = visit

    def message_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        exact = len(self._fresh) * math.prod(shape[1:]) * self._cache.dtype.itemsize
        return self._cache.encoding.message_bytes((len(self._seen), *shape[1:]), torch.float32) + exact + DIGEST

    def encode(self, values: Tensor, message: Tensor, state: SenderState, seed: int) -> None:
        """Write the message of ``values``, and update the cache as the receiver will."""
        cache, body = self._cache, message[:-DIGEST]
        if self._seen:
            flat = values.flatten(1) if values.dim() > 1 else values.view(-1, 1)
            change = flat[self._seen].to(torch.float32) - cache.known(self._chunk, self._place, flat.shape[1])
            size = cache.encoding.message_bytes(change.shape, torch.float32)
            cache.encoding.encode(change, body[:size], state, seed)
        if self._fresh:
            new = values[self._fresh].to(cache.dtype).reshape(-1).view(torch.uint8)
            body[body.numel() - new.numel() :].copy_(new)
        message[-DIGEST:] = self._digest
        self._apply(body, torch.empty_like(values))

    def decode(self, message: Tensor, values: Tensor) -> None:
        """Decode a message into ``values``, and cache the result."""
        self._cache.differ.append((message[-DIGEST:] != self._digest).any())
        self._apply(message[:-DIGEST], values)

    def _apply(self, body: Tensor, values: Tensor) -> None:
        cache, seen, fresh = self._cache, self._seen, self._fresh
        rows, elements = values.shape[0], math.prod(values.shape[1:])
        taken = torch.empty(rows, elements, dtype=cache.dtype, device=values.device)
        before = torch.zeros_like(taken)
        size = cache.encoding.message_bytes((len(seen), elements), torch.float32)
        if seen:
            known = cache.known(self._chunk, self._place, elements)
            before[seen] = known.to(cache.dtype)
            change = torch.empty_like(known)
            cache.encoding.decode(body[:size], change)
            taken[seen] = known.add_(change).to(cache.dtype)
        if fresh:
            taken[fresh] = body[size:].view(cache.dtype).view(len(fresh), elements)
        values.copy_(taken.view(values.shape))
        # non-finite activations reach the loss, but are not cached: changes would never make them finite again
        cache.write(self._chunk, self._place, torch.where(taken.isfinite(), taken, before))
