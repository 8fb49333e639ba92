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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from yafsdp_cc.pipelining.messages import Encoding
from yafsdp_cc.pipelining.settings import DIGEST

if TYPE_CHECKING:
    from yafsdp_cc.pipelining.messages import SenderState
    from yafsdp_cc.pipelining.settings import StageCompression


class Visit(NamedTuple):
    """The samples of one micro-batch: their slots in a cache, and which of them are new."""

    slots: list[int]
    seen: list[int]
    """Rows of the micro-batch whose samples the cache has from an earlier micro-batch."""
    fresh: list[int]
    """Rows of the micro-batch whose samples are new to the cache."""
    digest: Tensor
    """Checksums [DIGEST] uint8 that identify the samples' ids and the step."""


class SampleCache:
    """The cached activations on one side of a boundary, in host memory or in memory-mapped files.

    A full cache drops the sample that was used longest ago. Both sides of a boundary visit the same ids in the same
    order, and so have the same samples in the same slots.

    While the stage computes, a thread reads activations for the next micro-batch and writes those of the last one, in
    the order of the micro-batches.

    Args:
        device: device of the stage.
        name: beginning of the names of memory-mapped files; the index of a tensor is added.
    """

    def __init__(self, compression: StageCompression, device: torch.device, name: str) -> None:
        self.slots: OrderedDict[int, int] = OrderedDict()
        """Slot, a row of the tensors in ``values``, of each sample by its id; the sample used longest ago is first."""
        self.values: dict[int, Tensor] = {}
        """Cached activations [samples, elements], by the tensor's index among those that cross the boundary."""
        self.dtype, self.encoding = compression.cache_dtype, compression.of_changes()
        self.differ: list[Tensor] = []
        """For each message that has arrived in this step, whether its sample ids or step differ from this side's."""
        self._samples, self._folder = compression.cache_samples or 0, compression.cache_folder
        self._device, self._name = device, name
        self.visits: list[Visit] = []
        self._before: dict[tuple[int, int], Future[Tensor]] = {}
        self._writes: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, "sample-cache")

    def begin_step(self, micro_batches: list[list[int]], step: int) -> None:
        """Assign slots of the cache to samples of step ``step``, a number that both stages at the boundary have."""
        self.visits = [self._visit(ids, step) for ids in micro_batches]
        self.differ.clear()
        self._before.clear()
        self._prefetch(0)

    def end_step(self) -> bool:
        """Wait until all activations are cached; return whether a message had other sample ids or another step."""
        for write in self._writes:
            write.result()
        self._writes.clear()
        return bool(self.differ) and bool(torch.stack(self.differ).any())

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
        self.slots = OrderedDict(zip(state["ids"], state["slots"], strict=True))
        for place, kept in state["values"].items():
            self._values(int(place), kept.shape[1])[state["slots"]] = kept

    def known(self, chunk: int, place: int, elements: int) -> Tensor:
        """Return the activations [samples, elements] fp32 of those samples of a micro-batch that are in the cache."""
        if (chunk, place) not in self._before:
            self._values(place, elements)
            self._read(chunk, place)
        return self._before[chunk, place].result().to(self._device, torch.float32)

    def _visit(self, ids: Sequence[int], step: int) -> Visit:
        """Give every sample of a micro-batch a slot.

        An id that occurs twice has one slot: both samples are sent relative to the activation cached before the
        micro-batch, and the later one is stored.
        """
        if len(set(ids)) > self._samples:
            raise ValueError(
                f"cache_samples={self._samples}: a micro-batch has {len(set(ids))} different samples, all of which "
                "have to be in the cache. Give as many as the data set has"
            )
        slots = self.slots
        seen = [row for row, sample in enumerate(ids) if sample in slots]
        fresh = [row for row, sample in enumerate(ids) if sample not in slots]
        for sample in ids:
            if sample in slots:
                slots.move_to_end(sample)
        for sample in ids:
            if sample not in slots:
                is_full = len(slots) == self._samples
                slots[sample] = slots.popitem(last=False)[1] if is_full else len(slots)
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

    def _prefetch(self, chunk: int) -> None:
        if chunk < len(self.visits):
            for place in self.values:
                self._read(chunk, place)

    def _read(self, chunk: int, place: int) -> None:
        visit = self.visits[chunk]
        slots = torch.tensor([visit.slots[row] for row in visit.seen], dtype=torch.int64, device="cpu")
        self._before[chunk, place] = self._thread.submit(self.values[place].index_select, 0, slots)

    def write(self, chunk: int, place: int, kept: Tensor) -> None:
        """Cache the activations ``kept`` [samples, elements] of a micro-batch, and read those of the next one."""
        # of a sample that occurs twice in the micro-batch, cache the last row
        last = {slot: row for row, slot in enumerate(self.visits[chunk].slots)}
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

        self._writes.append(self._thread.submit(write))
        self._before.pop((chunk, place), None)
        if place == max(self.values):
            self._prefetch(chunk + 1)


class Changes(Encoding):
    """Messages of one activation [samples, ...] in this step: the one of index ``place`` in micro-batch ``chunk``.

    A message holds changes of the activations that both sides cache, then activations of new samples, then a digest.
    """

    def __init__(self, cache: SampleCache, chunk: int, place: int) -> None:
        self._cache, self._chunk, self._place = cache, chunk, place
        _, self._seen, self._fresh, self._digest = cache.visits[chunk]

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
