"""What one batch changes of a training run before the optimizer's step: saved before it, put back if it is skipped.

    saved      gradients that there are, also those kept unsharded and partial sums over replicas
               residuals, momentum, phases, codecs and counts of compressed sums
               buffers of modules (running means, for instance)
               random states: torch's, Python's and NumPy's
    not saved  weights, which no forward or backward changes; nor what ranks have gathered of them: that is the same on
               all ranks, and current, whether the batch counts or not

Copies are of whole storages, made on the device that these are on, and kept for the next batch.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from yafsdp_cc.compression.all_gather import DeltaAllGather
from yafsdp_cc.compression.error_feedback import CompressionError, Encoder
from yafsdp_cc.compression.powersgd import LowRank
from yafsdp_cc.compression.reduce_scatter import CompressedSum
from yafsdp_cc.compression.schedule import CompressionObserver, LocalClip

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.state import FSDPState

_COMPRESSION = (CompressedSum, CompressionObserver, CompressionError, Encoder, LocalClip, LowRank)
"""Classes whose attributes are the state of compression."""
_CONTAINERS = (dict, list, tuple, set, deque)


class BatchRollback:
    """Saves and restores what one batch changes of a sharded model's training."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], Tensor] = {}
        """By address and bytes of a storage, its copy."""
        self._saved: dict[tuple[int, int], Tensor] = {}
        """By the same, the storage itself, as long as it is to be restored."""
        self._objects: dict[int, tuple[Any, dict[str, Any]]] = {}
        """By id, objects of ``_COMPRESSION`` and their attributes."""
        self._undo: list[Callable[[], object]] = []
        """Restores what is not in storages, in any order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(each.nbytes for each in self._copies.values())

    @torch.no_grad()
    def save(self, state: FSDPState) -> None:
        """Save all of it, as it is now. No forward or backward is under way, and nothing is saved yet."""
        state.wait_for_transfers()
        self._save_gradients(state)
        for group in state.groups:
            self._save_kept_gradients(group)
        self._save_unreduced(state)
        self._save_compression(state)
        self._save_engine(state)
        self._save_buffers(state.model)
        self._save_random_states(state.context.device)
        self._copies = {key: each for key, each in self._copies.items() if key in self._saved}

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back. Nothing is in flight, and ``FSDPState.reset`` has run."""
        for undo in self._undo:
            undo()
        for thing, attributes in self._objects.values():
            _replace(vars(thing), attributes)
        for key, storage in self._saved.items():
            storage.copy_(self._copies[key])

    def discard(self) -> None:
        """Forget what was saved, but for the memory of copies."""
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
        if held is None or held.device != whole.device:
            held = self._copies[key] = torch.empty_like(whole)
        held.copy_(whole)

    # Gradients -----------------------------------------------------------------------------------------------------

    def _save_gradients(self, state: FSDPState) -> None:
        ignored = {parameter for spec in state.specs for parameter in spec.ignored}
        for parameter in (*(param.parameter for param in state.params), *ignored):
            grad = parameter.grad
            if grad is not None and grad.layout is not torch.strided:
                grad = grad.clone()  # of an ignored embedding, sparse
            elif grad is not None:
                self._save_tensor(grad)
            self._undo.append(partial(setattr, parameter, "grad", grad))

    def _save_kept_gradients(self, group: ParamGroup) -> None:
        """Save what ``set_requires_gradient_sync(False)`` has kept of a group for a later reduce."""
        grads, deferred = group.grads, {flat: list(used) for flat, used in group.deferred.items()}
        written = [param.written for param in group.params]
        if grads is not None:
            self._save_tensor(grads.buffer.data)

        def undo() -> None:
            group.grads, group.deferred = grads, deferred
            for param, was_written in zip(group.params, written, strict=True):
                param.written = was_written
            if grads is not None:
                grads.buffer.owner = group

        self._undo.append(undo)

    def _save_unreduced(self, state: FSDPState) -> None:
        """Save gradients of replicated parameters, and sums over the ranks of a shard, that are to be summed later."""
        replicated, context = state.replicated, state.context
        written = [param.written for param in replicated.params]
        for param in replicated.params:
            if param.written and param.unsharded_grad is not None:
                self._save_tensor(param.unsharded_grad)
        reduced = [(flat, list(used)) for flat, used in context.reduced]

        def undo() -> None:
            for param, was_written in zip(replicated.params, written, strict=True):
                param.written = was_written
            context.reduced = reduced

        self._undo.append(undo)
        if context.replicas is None:
            return
        self._undo.append(partial(setattr, context.replicas, "sums", context.replicas.sums))
        for output in context.replicas._outputs:
            self._undo.append(partial(setattr, output, "used", None if output.used is None else list(output.used)))
            if output.used is not None:
                self._save_tensor(output.total)

    # Compression ---------------------------------------------------------------------------------------------------

    def _save_compression(self, state: FSDPState) -> None:
        for flat in state.flats:
            if flat.trainable:
                state.context.bind_reduce(flat)  # residuals are made with this: they would be forgotten, else
            self._save_object(flat.reduce_scatter)
            self._save_object(flat.all_reduce)
            if isinstance(flat.all_gather, DeltaAllGather):
                for name in ("always_exact", "compression_error"):
                    self._undo.append(partial(setattr, flat.all_gather, name, getattr(flat.all_gather, name)))
        self._save_object(state.context.observers)
        counters = state.context.counters
        self._undo.append(partial(setattr, counters, "chosen", dict(counters.chosen)))

    def _save_object(self, thing: Any) -> None:
        """Save what compression keeps in ``thing``: a tensor, a container or an object of ``_COMPRESSION``."""
        kind = _kind_of(thing)
        if kind is Tensor:
            self._save_tensor(thing)
        elif kind is list:
            for each in thing.values() if isinstance(thing, dict) else thing:
                self._save_object(each)
        elif kind is object and id(thing) not in self._objects:
            attributes = {name: _shallow(value) for name, value in vars(thing).items()}
            self._objects[id(thing)] = thing, attributes
            for each in attributes.values():
                self._save_object(each)

    # The rest ------------------------------------------------------------------------------------------------------

    def _save_engine(self, state: FSDPState) -> None:
        """Save settings that a loop changes from one micro-batch to the next, and what prefetches come from."""
        for spec in state.specs:
            self._undo.append(partial(setattr, spec.settings, "reduces", spec.settings.reduces))
        self._undo.append(partial(setattr, state, "_orders", dict(state._orders)))
        for name in ("_seen", "_has_new_grads"):  # by which ranks find alike what to gather anew
            self._undo.append(partial(setattr, state, name, getattr(state, name)))
        fingerprint = vars(state.context.fingerprint)
        self._undo.append(partial(_replace, fingerprint, {name: _shallow(each) for name, each in fingerprint.items()}))

    def _save_buffers(self, model: nn.Module) -> None:
        for module in model.modules():
            if module._buffers:
                self._undo.append(partial(_replace, module._buffers, dict(module._buffers)))
                for buffer in module._buffers.values():
                    if buffer is not None and not buffer.is_meta:
                        self._save_tensor(buffer)

    def _save_random_states(self, device: torch.device) -> None:
        self._undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        if device.type != "cpu":
            backend = torch.get_device_module(device)
            self._undo.append(partial(backend.set_rng_state, backend.get_rng_state(device), device))
        self._undo.append(partial(random.setstate, random.getstate()))
        if (numpy := sys.modules.get("numpy")) is not None:
            self._undo.append(partial(numpy.random.set_state, numpy.random.get_state()))


def _kind_of(value: Any) -> type | None:
    """Return what a value is to compression: a tensor, a container (list), an object of its; None: nothing else."""
    kind = type(value)
    if kind not in _kinds:
        meanings = ((Tensor, Tensor), (_CONTAINERS, list), (_COMPRESSION, object))
        _kinds[kind] = next((meaning for classes, meaning in meanings if issubclass(kind, classes)), None)
    return _kinds[kind]


_kinds: dict[type, type | None] = {}
"""By type of the value: a comparison with each class in turn would take longer than the copies of a small model."""


def _shallow(value: Any) -> Any:
    """Return ``value``, or a copy where it is a container that may be changed in place."""
    return copy.copy(value) if _kind_of(value) is list and not isinstance(value, tuple) else value


def _replace(target: dict[str, Any], content: dict[str, Any]) -> None:
    target.clear()
    target.update(content)
