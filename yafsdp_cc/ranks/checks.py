"""Checks across ranks: ``refused_together`` raises on every rank what one rank alone refuses."""

from __future__ import annotations

import itertools
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

T = TypeVar("T")


def all_gather_objects(item: T, across: Sequence[dist.ProcessGroup]) -> list[T]:
    """Return every rank's ``item``, in row-major order of a mesh with groups ``across``, the last dimension's first.

    Raises:
        RuntimeError: a rank does not take part.
    """
    items = [item]
    with suppress(RuntimeError, ValueError):  # there is no process group, or its store cannot be cloned
        _own_store()
    for group in (each for each in across if each.size() > 1):
        try:
            theirs: list[list[T]] = [pickle.loads(each) for each in _all_gather_bytes(pickle.dumps(items), group)]
        except RuntimeError as error:
            raise RuntimeError(
                f"what ranks check together has failed: {missing_in(group) or 'one'} has ended, or is in another "
                f"collective, such as a forward or full_tensor() under `if rank == 0`; see its own output\n{error}"
            ) from error
        items = [each for some in theirs for each in some]
    return items


_SHORT = 512
"""Bytes of an object up to which one collective is enough; torch's all_gather_object always makes two."""


def _all_gather_bytes(content: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return every rank's ``content``, by a second collective if that of some rank is longer than ``_SHORT``."""
    device, size, lengths = dist.distributed_c10d._get_object_coll_device(group), 0, [_SHORT]
    while size < max(lengths):
        size = max(lengths)
        message = bytearray(len(content).to_bytes(8, "little") + content[:size].ljust(size))
        own = torch.frombuffer(message, dtype=torch.uint8).to(device)
        everyones = own.new_empty(group.size(), own.numel())
        dist.all_gather([*everyones], own, group=group)
        found = [each.tobytes() for each in everyones.cpu().numpy()]
        lengths = [int.from_bytes(each[:8], "little") for each in found]
    return [each[8 : 8 + length] for each, length in zip(found, lengths, strict=True)]


_missing: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
_questions: Counter[str] = Counter()
"""Results of ``missing_in`` by group, and how often it has asked by the group's name: one failure leads to others."""
_stores: weakref.WeakKeyDictionary[Store, Store] = weakref.WeakKeyDictionary()
"""Clone of each default store, made before a failure: to connect to a store that is gone takes its time-out."""


def _own_store() -> Store:
    """Return a clone of the default store, as a wait on the default store itself would block its connection."""
    store = dist.distributed_c10d._get_default_store()
    if store not in _stores:
        _stores[store] = store.clone()  # type: ignore[attr-defined]  # torch's stub
    return _stores[store]


def missing_in(group: dist.ProcessGroup) -> str:
    """Return "no answer from rank 3, which" if rank 3 does not report the group's failure to the store, else ""."""
    if group not in _missing:
        with suppress(RuntimeError, ValueError, KeyError):  # the store or the group is gone
            store, name, ranks = _own_store(), group.group_name, dist.get_process_group_ranks(group)
            _questions[name] += 1
            key = f"yafsdp_cc/failed/{name}/{_questions[name]}"
            store.set(f"{key}/asked", "")
            # ``wait`` raises if the store is gone, so that no rank is blamed for that
            store.wait([f"{key}/asked"], timedelta(seconds=1))
            if silent := exchange_over_store(store, key, group.rank(), ranks, "")[0]:
                _missing[group] = f"no answer from {named_ranks(silent)}, which"
    return _missing.get(group, "")


_TIMEOUT, _GLANCE = 5.0, 0.05
"""Seconds that ``exchange_over_store`` waits for the texts of all ranks together, and at least for each text."""


def exchange_over_store(store: Store, key: str, rank: int, ranks: Sequence[int], text: str) -> tuple[list[int], str]:
    """Exchange texts between ranks where collectives fail; return the silent ranks, and all ranks' texts as lines.

    ``rank`` is the index of this rank among ``ranks``.
    """
    until, answers = time.monotonic() + _TIMEOUT, []
    with suppress(RuntimeError, ValueError):  # the store may be gone with the rank or launcher whose process held it
        store.set(f"{key}/{rank}", text)
    for other in range(len(ranks)):
        try:
            store.wait([f"{key}/{other}"], timedelta(seconds=max(until - time.monotonic(), _GLANCE)))
            answers.append(store.get(f"{key}/{other}").decode())
        except (RuntimeError, ValueError):
            answers.append(text if other == rank else "no answer")
    silent = [each for each, answer in zip(ranks, answers, strict=True) if answer == "no answer"]
    return silent, table_of_ranks(answers, ranks)


@contextmanager
def refused_together(*across: dist.ProcessGroup) -> Iterator[None]:
    """Raise on every rank what one rank raises within the block, so that no other rank waits for it in vain.

    The other ranks raise a ``ValueError``, with the message of the rank that raised.
    """
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:
        refusal = error
    refusals = all_gather_objects(None if refusal is None else str(refusal), across)
    if refusal is not None:
        raise refusal
    for rank, text in enumerate(refusals):
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")


def check_settings(settings: Mapping[str, object], across: Sequence[dist.ProcessGroup], call: str = "shard()") -> None:
    """Raise a ``ValueError`` on every rank that names the first argument of a ``call`` that differs between ranks."""
    mine = {name: repr(value) for name, value in settings.items()}
    everybody = all_gather_objects(mine, across)
    for name in mine:
        found = [theirs[name] for theirs in everybody]
        if len(set(found)) > 1:
            raise ValueError(
                f"{name} differs between ranks; every rank must call {call} alike:\n{table_of_ranks(found)}"
            )


def check_dense(named: Iterable[tuple[str, object]], what: str) -> None:
    """Raise a ``ValueError`` that names the first tensor in ``named`` that is not dense, as ``what`` requires."""
    for name, each in named:
        if isinstance(each, torch.Tensor) and (each.layout is not torch.strided or each.is_nested or each.is_quantized):
            raise ValueError(
                f"{what} takes dense tensors, and '{name}' is sparse, nested or quantised ({each.layout}): register "
                "a dense buffer, or, for checkpoints alone, pass persistent=False to register_buffer"
            )


_NAMED = 8
"""Largest number of ranks that an error message names."""


def named_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0, 3" or, for many ranks, the first eight and the number of the others."""
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED]))}{more}"


def table_of_ranks(entries: Iterable[object], ranks: Iterable[int] | None = None) -> str:
    """Return ``entries`` as lines of an error message, one for each of ``ranks`` (by default ranks 0, 1, ...)."""
    numbers = itertools.count() if ranks is None else ranks
    return "\n".join(f"  rank {rank}: {entry}" for rank, entry in zip(numbers, entries, strict=False))


_CHECKSUM_BLOCK = 1 << 20
"""Number of bytes of a tensor that ``checksum`` sums at a time, to bound its memory."""


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit sum of the tensor's bytes, each 32-bit word weighted by its index, so that swapped words show."""
    data = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    total = 0
    for block in data.split(_CHECKSUM_BLOCK):
        words = torch.nn.functional.pad(block, (0, -block.numel() % 4)).view(torch.int32).to(torch.int64)
        weights = 2 * torch.arange(words.numel(), device=words.device) + 1
        total = (total * 1_000_003 + int((words * weights).sum())) & (2**64 - 1)
    return total
