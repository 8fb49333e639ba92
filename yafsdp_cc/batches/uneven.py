"""Data that ends on some ranks before others: all ranks continue together, and means are over ranks with a batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from yafsdp_cc.batches.skipped import check_outside_of_block
from yafsdp_cc.fsdp2.module import require_state
from yafsdp_cc.ranks.checks import all_gather_objects, refused_together
from yafsdp_cc.ranks.mesh import all_groups, all_reduce_over
from yafsdp_cc.replicas.sync import refuse_sync

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.state import FSDPState

Batch = TypeVar("Batch")


class UnevenBatches:
    """Iterates over the batches of this rank for as long as any rank has one; made by ``uneven``."""

    weight: float
    """Weight of this rank's batch in a mean over ranks: the number of ranks divided by the number of ranks that have a
    batch; 0 if this rank's own batches have ended. Multiply reported values by it."""

    def __init__(self, states: Sequence[FSDPState]) -> None:
        self._mesh = states[0].context.info.mesh
        self._found = [(param, param.factor) for state in states for param in state.params]
        """Parameters and the factors of their gradients before this block, which an ``uneven`` around it may set."""
        self._begun = 0
        self._open = {0: 1.0}
        """Weights of batches by the number of their loop, the innermost loop last; the block itself is number 0. The
        entry of a loop that was left is removed when Python frees the loop, or when a loop around it goes on."""
        self._weigh()

    def __call__(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this rank's ``batches``, then its last one again with weight 0, until the batches of all ranks have
        ended.

        Each turn of the loop is a collective of three numbers. A rank without batches gets the first one of another
        rank. Another loop, an evaluation for example, may lie within this one; after it, also by ``break``, this loop's
        weight holds again. The weight of a batch that ``next`` has taken holds until the next batch is taken.

        Raises:
            RuntimeError: other ranks have left the loop by ``break``, or because their ``batches`` have raised; or the
                loop goes on after a loop around it has, by ``zip`` for example, or after the block has ended.
        """
        # A chain calls ``iter(batches)``, which may raise on one rank, only for the first batch, in ``_turns``.
        return _Loop(partial(self._turns, chain.from_iterable([batches]), []))

    def _turns(self, own: Iterator[Batch], last: list[Batch]) -> Iterator[Batch]:
        """Yield the batches of ``own``, then the entry of ``last``, this rank's last batch or one of another rank."""
        self._begun = number = self._begun + 1
        if self._open:  # ``_open`` is empty after the end of the block
            self._open[number] = self.weight
        try:
            while True:
                check_outside_of_block("the loop over uneven batches")
                if number not in self._open:
                    raise RuntimeError(
                        "this loop over uneven batches goes on after one around it has, or after the block, and a "
                        "gradient has one weight: zip the data, as in batches(zip(images, texts)), put one loop within "
                        "the other, or go on with the data, own = iter(loader), by another batches(own)"
                    )
                for inner in sorted(self._open):
                    if inner > number:
                        self._open.pop(inner, None)
                try:
                    batch = next(own, _END)
                except Exception:
                    with suppress(RuntimeError):
                        self._count(0)  # as this is no loop's number, all ranks raise
                    raise
                has_data = batch is not _END
                count = self._count(number, has_data)
                if not count:
                    return
                if not last and count < self._mesh.size():
                    last[:] = [_offered(batch, has_data, all_groups(self._mesh))]
                if has_data:
                    last[:] = [tree_map(_copied, batch, is_leaf=_is_row)]
                self._open[number] = self._mesh.size() / count if has_data else 0.0
                self._weigh()
                yield batch if has_data else tree_map(_copied, last[0], is_leaf=_is_row)
        finally:
            if self._open.pop(number, None) is not None:
                self._weigh()

    def _weigh(self) -> None:
        self.weight = [1.0, *self._open.values()][-1]
        for param, _ in self._found:
            param.factor = self.weight

    def end(self) -> None:
        """Restore the factors that parameters had before the ``uneven`` block, whichever loops were left."""
        self._open.clear()
        self._weigh()
        for param, factor in self._found:
            param.factor = factor

    def _count(self, place: int, has_data: bool = False) -> int:
        """Return the number of ranks with a batch; raise unless all ranks pass one ``place``, a loop's number or 0."""
        numbers = torch.tensor([has_data, place, place**2], device=self._mesh.device_type)
        all_reduce_over(all_groups(self._mesh), numbers, dist.ReduceOp.SUM, self._mesh)
        count, total, squares = map(int, numbers.tolist())
        if self._mesh.size() * squares != total**2:  # the variance of places is zero only if all are equal
            raise RuntimeError(
                "some ranks have left the loop over uneven batches, in which the others go on: by break or return, "
                "which belong after the same batch on all ranks, or because what makes their batches has raised"
            )
        return count


_END: Any = object()


class _Loop(Iterator[Batch]):
    """Makes a generator of batches to which ``for`` alone refers: ``break`` frees it even while this object lives."""

    def __init__(self, begin: Callable[[], Iterator[Batch]]) -> None:
        self._begin = begin
        self._taken: Iterator[Batch] | None = None  # a generator that ``next`` has begun

    def __iter__(self) -> Iterator[Batch]:
        taken, self._taken = self._taken, None
        return taken or self._begin()

    def __next__(self) -> Batch:
        self._taken = iter(self)
        return next(self._taken)


def _offered(batch: Any, has_data: bool, across: Sequence[dist.ProcessGroup]) -> Any:
    """Return ``batch``, or another rank's if this rank has none; raise on all ranks if a batch cannot be pickled."""
    try:
        with refused_together(*across):
            message = pickle.dumps(batch) if has_data else None
        offered = all_gather_objects(message, across)
        with refused_together(*across):
            return batch if has_data else pickle.loads(next(each for each in offered if each is not None))
    except Exception as error:
        raise RuntimeError(
            "uneven gives a rank without batches the first batch of another rank, by pickle, which has failed "
            f"({error}): define classes of batches in a module, or have a batch on every rank"
        ) from error


def _copied(leaf: Any) -> Any:
    """Return ``leaf``, a copy if a loop may pop its entries; ``tree_map`` copies the plain containers around leaves."""
    with suppress(TypeError):  # some mappings refuse to be copied, those of open files for example
        return copy(leaf) if isinstance(leaf, (list, MutableMapping)) else leaf
    return leaf


def _is_row(each: Any) -> bool:
    """Return whether ``each`` is a list of numbers or texts alone, perhaps thousands, to be copied as one leaf."""
    return isinstance(each, list) and all(isinstance(entry, (int, float, str)) for entry in each)


_hooked: set[Tensor] = set()
"""Ignored parameters whose gradients an ``uneven`` block weighs by a hook; a block within it adds no second hook."""


def _weighed(param: FSDPParam, grad: Tensor) -> Tensor:
    """Return ``grad``, of an ignored parameter, times the factor of ``param``, a sharded parameter of its model."""
    return grad * param.factor if param.factor else torch.zeros_like(grad)


@contextmanager
def uneven(model: nn.Module, *others: nn.Module) -> Iterator[UnevenBatches]:
    """Train one model, or several, on as many batches as each rank has. A collective, at both ends.

    ::

        with yafsdp_cc.uneven(model) as batches:
            for batch in batches(loader):
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    A rank whose loader has ended repeats its last batch with zero gradients, so that it takes part in collectives and
    updates its shards; gradients are averaged over the ranks that had a batch. All ranks leave the loop after the same
    number of batches; all ranks must ``break`` or ``return`` together. The weight applies to gradients of parameters,
    whichever of the models' modules or methods are called; terms of a loss that read sharded parameters outside of them
    (weight decay, penalties) are not weighted, nor are models that are not given, such as an encoder in front.

    Args:
        model: the model that was passed to ``shard``.
        others: further models that are trained on these batches, sharded across the same ranks.

    Yields:
        An ``UnevenBatches``: call it on this rank's batches; it has the ``weight`` of each.

    Raises:
        ValueError: a model is not sharded, only a part of a sharded model, sharded with ``sync``, or on other ranks
            than the first one; or a layer exchanges gradients between ranks.
        RuntimeError: on all ranks: some ranks have left the loop and others have not.
    """
    models = (model, *others)
    states = [require_state(each) for each in models]
    refuse_sync("uneven", *models)
    for each, state in zip(models, states, strict=True):
        if state.model is not each:
            raise ValueError(f"uneven takes the whole sharded model; this {type(each).__name__} is a part of one")
    mixing = [name for each in models for name, part in each.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    meshes = {frozenset(spec.info.mesh.mesh.flatten().tolist()) for state in states for spec in state.specs}
    if mixing or len(meshes) > 1:
        what = f"the SyncBatchNorm '{mixing[0]}'" if mixing else "parameters on other ranks (experts, another model)"
        raise ValueError(
            f"uneven weighs each rank's gradients by its own batch, and those of {what} come from others' batches: "
            "have as many batches on all ranks, by DistributedSampler(drop_last=True)"
        )
    batches = UnevenBatches(states)

    hooks: dict[Tensor, RemovableHandle] = {}
    for state in states:
        for ignored in {each for spec in state.specs for each in spec.ignored} - _hooked - hooks.keys():
            if (ignored.is_floating_point() or ignored.is_complex()) and not ignored.is_inference():
                is_trained = ignored.requires_grad  # hook frozen ones, too: the loop may unfreeze them
                hooks[ignored] = ignored.requires_grad_().register_hook(partial(_weighed, state.params[0]))
                ignored.requires_grad_(is_trained)
    _hooked.update(hooks)
    try:
        yield batches
        batches._count(0)
    finally:
        batches.end()
        _hooked.difference_update(hooks)
        for hook in hooks.values():
            hook.remove()
