"""Saves the state that one batch changes before the optimizer's step, and restores it if the batch is skipped.

    saved      gradients, also those kept unsharded and partial sums over replicas
               residuals, momentum, phases, codecs and counts of compressed sums
               buffers of modules (running means, for instance)
               random states: torch's, Python's and NumPy's
    not saved  weights, which no forward or backward changes; nor gathered weights, which are current on all ranks,
               whether the batch counts or not

Whole storages are copied, on their own device, and the copies are reused for the next batch.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from yafsdp_cc.compression.all_gather import DeltaAllGather
from yafsdp_cc.compression.error_feedback import CompressionError, Encoder
from yafsdp_cc.compression.powersgd import LowRank
from yafsdp_cc.compression.reduce_scatter import CompressedSum
from yafsdp_cc.compression.schedule import CompressionObserver, LocalClip
from yafsdp_cc.engine.step_state import shallow_copy

if TYPE_CHECKING:
    from torch import nn

    from yafsdp_cc.engine.state import FSDPState

_COMPRESSION = (CompressedSum, CompressionObserver, CompressionError, Encoder, LocalClip, LowRank)
"""Classes whose attributes hold the state of compression."""
_CONTAINERS = (dict, list, tuple, set, deque)


class BatchRollback:
    """Saves and restores the training state of a sharded model that one batch changes."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], Tensor] = {}
        """Copy of each saved storage, by the storage's address and number of bytes."""
        self._saved: dict[tuple[int, int], Tensor] = {}
        """Saved storages by address and number of bytes, until ``discard``."""
        self._objects: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Objects of ``_COMPRESSION`` and copies of their attributes, by the object's id."""
        self._undo: list[Callable[[], object]] = []
        """Functions, to be called in any order, that restore what lies outside of storages and ``_objects``."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the copies of saved storages take."""
        return sum(each.nbytes for each in self._copies.values())

    @torch.no_grad()
    def save(self, state: FSDPState) -> None:
        """Copy the state of engine and model; call ``save`` once before ``restore``, in no forward or backward."""
        state.wait_for_transfers()
        self._undo += [each.save_members() for each in state.step_states()]
        self._save_gradients(state)
        self._save_compression(state)
        for spec in state.specs:  # the batch may call ``set_requires_gradient_sync``
            self._undo.append(
                partial(setattr, spec.settings, "requires_gradient_sync", spec.settings.requires_gradient_sync)
            )
        self._save_buffers(state.model)
        self._save_random_states(state.context.device)
        self._copies = {key: each for key, each in self._copies.items() if key in self._saved}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the saved state. No collective may be in flight, and ``FSDPState.reset`` must have run."""
        for undo in self._undo:
            undo()
        for thing, attributes in self._objects.values():
            _replace(vars(thing), attributes)
        for key, storage in self._saved.items():
            storage.copy_(self._copies[key])

    def discard(self) -> None:
        """Forget the saved state; the next ``save`` reuses the memory of the copies."""
        self._saved.clear()
        self._objects.clear()
        self._undo.clear()

    def _save_tensor(self, tensor: Tensor) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key in self._saved or not storage.nbytes():
            return
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._saved[key] = whole
        held = self._copies.get(key)
        if held is None or held.device != whole.device or held.is_inference():
            held = self._copies[key] = torch.empty_like(whole)
        held.copy_(whole)

    def _saved_as(self, tensor: Tensor | None) -> Tensor | None:
        """Save ``tensor`` and return it; return a copy of a sparse or nested one, which has no storage to copy."""
        if tensor is not None and tensor.layout is not torch.strided:
            return tensor.clone()
        if tensor is not None and not tensor.is_meta:
            self._save_tensor(tensor)
        return tensor

    # Gradients -----------------------------------------------------------------------------------------------------

    def _save_gradients(self, state: FSDPState) -> None:
        ignored = {parameter for spec in state.specs for parameter in spec.ignored}
        for parameter in (*(param.parameter for param in state.params), *ignored):
            self._undo.append(partial(setattr, parameter, "grad", self._saved_as(parameter.grad)))
        for group in state.groups:
            if group.grads is not None:  # ``set_requires_gradient_sync(False)`` keeps gradients for a later reduce
                self._save_tensor(group.grads.buffer.data)
        for param in state.replicated.params:
            if param.written and param.unsharded_grad is not None:
                self._save_tensor(param.unsharded_grad)
        for output in () if state.context.replicas is None else state.context.replicas.outputs:
            if output.used is not None:
                self._save_tensor(output.total)

    # Compression ---------------------------------------------------------------------------------------------------

    def _save_compression(self, state: FSDPState) -> None:
        for flat in state.flats:
            if flat.trainable:
                # make residuals now: ``restore`` would keep the values of those that the batch makes
                state.context.bind_reduce(flat)
            self._save_object(flat.reduce_scatter)
            self._save_object(flat.all_reduce)
            if isinstance(flat.all_gather, DeltaAllGather):
                for name in ("always_exact", "compression_error"):
                    self._undo.append(partial(setattr, flat.all_gather, name, getattr(flat.all_gather, name)))
        self._save_object(state.context.observers)
        counters = state.context.counters
        self._undo.append(partial(setattr, counters, "chosen", dict(counters.chosen)))

    def _save_object(self, thing: Any) -> None:
        """Save the state of compression in ``thing``: a tensor, a container or an object of ``_COMPRESSION``."""
        kind = _kind_of(thing.__class__)
        if kind is Tensor:
            self._save_tensor(thing)
        elif kind is list:
            for each in thing.values() if isinstance(thing, dict) else thing:
                self._save_object(each)
        elif kind is object and id(thing) not in self._objects:
            attributes = {name: shallow_copy(value) for name, value in vars(thing).items()}
            self._objects[id(thing)] = thing, attributes
            for each in attributes.values():
                self._save_object(each)

    # Buffers, random states --------------------------------------------------------------------------------------

    def _save_buffers(self, model: nn.Module) -> None:
        # a buffer that several modules share is saved once, by its id
        buffers = {id(buffer): buffer for module in model.modules() for buffer in module._buffers.values()}
        saved = {key: self._saved_as(buffer) for key, buffer in buffers.items()}
        for module in model.modules():
            if module._buffers:
                held = {name: saved[id(buffer)] for name, buffer in module._buffers.items()}
                self._undo.append(partial(_replace, module._buffers, held))

    def _save_random_states(self, device: torch.device) -> None:
        self._undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        if device.type != "cpu":
            backend = torch.get_device_module(device)
            self._undo.append(partial(backend.set_rng_state, backend.get_rng_state(device), device))
        self._undo.append(partial(random.setstate, random.getstate()))
        if (numpy := sys.modules.get("numpy")) is not None:
            self._undo.append(partial(numpy.random.set_state, numpy.random.get_state()))


@cache  # comparing a class with all of these takes longer than copying a small model
def _kind_of(kind: type) -> type | None:
    """Return how a member of class ``kind`` is saved: as a Tensor, a list (any container) or an object of compression;
    None: by reference."""
    meanings = ((Tensor, Tensor), (_CONTAINERS, list), (_COMPRESSION, object))
    return next((meaning for classes, meaning in meanings if issubclass(kind, classes)), None)


def _replace(target: dict[str, Any], content: dict[str, Any]) -> None:
    target.clear()
    target.update(content)
