"""Whether all ranks hold the same model, before it is cut."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_cc.engine.ranks import of_first
from yafsdp_cc.engine.tensor_parallel import local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.plan import OwnedParameter

T = TypeVar("T")

_BLOCK = 1 << 20
"""Bytes of a tensor summed at once: bounds the memory of a checksum."""


class _Line(NamedTuple):
    """What must be equal of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    checksum: int

    def __str__(self) -> str:
        kind = "trainable" if self.trainable else "frozen"
        return f"'{self.name}' {list(self.shape)} {self.dtype}, {kind}, checksum {self.checksum & 0xFFFFFFFF:08x}"


@contextmanager
def refused_together(*across: dist.ProcessGroup) -> Iterator[None]:
    """What one rank refuses within, every rank refuses, so that none waits for it in vain.

    Raises:
        ValueError: on the other ranks, with what that rank has said.
    """
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:
        refusal = error
    said = all_gathered(None if refusal is None else str(refusal), across)
    if refusal is not None:
        raise refusal
    for rank, text in enumerate(said):
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")


def check_settings(settings: Mapping[str, object], across: Sequence[dist.ProcessGroup], call: str = "shard()") -> None:
    """Compare the arguments of a ``call`` across ranks.

    Raises:
        ValueError: on every rank, naming the first that differs.
    """
    mine = {name: repr(value) for name, value in settings.items()}
    everybody = all_gathered(mine, across)
    for name in mine:
        if len({theirs[name] for theirs in everybody}) > 1:
            table = "\n".join(f"  rank {rank}: {theirs[name]}" for rank, theirs in enumerate(everybody))
            raise ValueError(f"{name} differs between ranks; every rank must call {call} alike:\n{table}")


@torch.no_grad()
def check_equal(owned: Sequence[OwnedParameter], across: Sequence[dist.ProcessGroup], *, values: bool) -> None:
    """Compare names, shapes, dtypes and ``requires_grad`` across ranks, and with ``values`` the elements too.

    Raises:
        ValueError: on every rank, naming the first parameter that differs.
    """
    lines = [
        _Line(
            each.name,
            tuple(each.parameter.shape),
            str(each.parameter.dtype).removeprefix("torch."),
            each.parameter.requires_grad,
            checksum(local_tensor(each.parameter)) if values and not each.parameter.is_meta else 0,
        )
        for each in owned
    ]
    digest = hashlib.sha256("\n".join(map(repr, lines)).encode()).digest()
    digests = all_gathered(digest, across)
    if len(set(digests)) == 1:
        return
    everybody = all_gathered(lines, across)
    for index in range(max(map(len, everybody))):
        said = [theirs[index] if index < len(theirs) else None for theirs in everybody]
        if len(set(said)) > 1:
            table = "\n".join(f"  rank {rank}: {line or 'has no more parameters'}" for rank, line in enumerate(said))
            remedy = (
                "Build the model from the same seed on every rank, or pass sync_module_states=True to shard() to take "
                "rank 0's weights"
                if len({tuple(line._replace(checksum=0) for line in theirs) for theirs in everybody}) == 1
                else "Build the same model on every rank: names, shapes, dtypes and requires_grad have to agree"
            )
            raise ValueError(
                f"the ranks' models differ, first in parameter '{next(line for line in said if line).name}':\n{table}\n"
                f"{remedy}"
            )
    raise AssertionError("digests differ but no line does")


def broadcast(tensors: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Give every rank the elements of the first rank's tensors."""
    for tensor in tensors:
        whole = tensor.contiguous()
        of_first(whole.view(-1).view(torch.uint8), mesh)  # bytes: not every dtype is carried
        if whole is not tensor:
            tensor.copy_(whole)


def all_gathered(item: T, across: Sequence[dist.ProcessGroup]) -> list[T]:
    """Every rank's item, in the order of a mesh whose last dimension comes first."""
    items = [item]
    for group in across:
        theirs: list[list[T]] = [items] * group.size()
        dist.all_gather_object(theirs, items, group=group)
        items = [each for some in theirs for each in some]
    return items


def checksum(tensor: Tensor) -> int:
    """A 64-bit sum of the tensor's bytes, each 32-bit word weighted by its place: swapped elements are seen too."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, data.numel(), _BLOCK):
        block = data[start : start + _BLOCK]
        if block.numel() % 4:
            block = torch.nn.functional.pad(block, (0, 4 - block.numel() % 4))
        words = block.view(torch.int32).to(torch.int64)
        weights = torch.arange(1, 2 * words.numel(), 2, device=words.device)
        total = (total * 1_000_003 + int((words * weights).sum())) & (2**64 - 1)
    return total
