"""What a program launches on CUDA, counted on a device that is not there (``yafsdp_cc.tools.fake_ranks``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from yafsdp_cc.tools import fake_ranks

launched = {"kernels": 0, "collectives": 0, "waits": 0}
"""In the present step: kernels, and copies, which are enqueued like them (``kernels_of``); calls of process groups; and
where the host reads a number of the device, or waits for an event that this step has recorded."""
_steps = [0]


class Event(fake_ranks.Event):
    """Counts waits for events of the present step."""

    step = -1

    def record(self, *_: Any) -> None:
        self.step = len(_steps)

    def synchronize(self) -> None:
        launched["waits"] += self.step == len(_steps)


class Device(fake_ranks.FakeDevice):
    """Counts what the host reads."""

    def read(self, method: str, tensor: Tensor) -> Any:
        launched["waits"] += not _is_on_host(tensor)
        return super().read(method, tensor)


def _is_on_host(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or hasattr(tensor, "was_pinned")


_FREE = {"empty", "empty_strided", "new_empty", "empty_like", "detach", "lift_fresh", "alias", "_unsafe_view"}
_FOREACH_BLOCK = 65536
"""Elements of a block of a ``_foreach`` kernel (``MultiTensorApply.cuh``: ``kChunkSize``)."""
_FOREACH_LIMITS = {12: (320, (110, 64, 48, 36, 30)), 13: (2240, (770, 448, 336, 252, 210))}
"""By CUDA's version: blocks of one such kernel, and its tensors in 1, 2, ... lists."""
_CAT_TENSORS = 128
"""Of one kernel of ``cat`` (``Shape.cu``: ``CAT_ARRAY_BATCH_SIZE``)."""
_LONGEST = 1 << 31
"""Bytes that the offsets of an elementwise kernel reach; it halves longer tensors (``Loops.cuh``: ``gpu_kernel``)."""
cuda_version = 13
"""With which torch is built: its wheels are by default."""


def _is_dense(tensor: Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() == 0 or sum((size - 1) * stride for size, stride in sizes) == tensor.numel() - 1


def foreach_kernels(lists: Sequence[Sequence[Tensor]], *, may_cast: bool) -> int:
    """Return the kernels of a ``_foreach`` operation on CUDA.

    One takes a limited number of blocks, and of tensors. Where tensors differ in shape or strides, are not dense, or,
    unless it ``may_cast``, in dtype, there is one kernel for each.

    Source: torch, ``MultiTensorApply.cuh``: ``multi_tensor_apply``; ``ForeachUtils.h``: ``can_use_fast_route``;
    ``ForeachBinaryOpList.cu``: ``foreach_tensor_copy_list_kernel_cuda_``.
    """
    rows = list(zip(*lists, strict=True))
    dtypes = [{tensor.dtype for tensor in each} for each in lists]
    is_fast = all(len(each) == 1 for each in dtypes) and (may_cast or len(set.union(*dtypes)) == 1)
    for first, *others in rows:
        alike = all(each.shape == first.shape and each.stride() == first.stride() for each in others)
        is_fast &= alike and _is_dense(first)
    if not is_fast:
        return len(rows)
    most_blocks, most_tensors = _FOREACH_LIMITS[cuda_version]
    kernels = blocks = tensors = 0
    for first, *_ in rows:
        left = -(-first.numel() // _FOREACH_BLOCK)
        tensors += left > 0
        while left:
            taken = min(left, most_blocks - blocks)
            left, blocks = left - taken, blocks + taken
            if blocks == most_blocks or (not left and tensors == most_tensors[len(lists) - 1]):
                kernels, blocks, tensors = kernels + 1, 0, int(left > 0)
    return kernels + (blocks > 0)


def kernels_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Return what an operation enqueues on CUDA: kernels and copies.

    Source: torch, as named beside each; those of this package are one kernel each (``csrc/cuda``).
    """
    library, name = func._schema.name.split("::")
    if library in ("c10d", "prim", "profiler") or func.is_view or name in _FREE:
        return 0
    if name in ("split_with_sizes_copy", "chunk_cat"):  # TensorShape.cu: the tensors' addresses are copied first
        tensors = [args[0], *kwargs["out"]] if name == "split_with_sizes_copy" else [*args[0], kwargs["out"]]
        assert all(map(_is_dense, tensors)), "not its fast path"
        return 2
    lists = [each for each in args if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor)]
    if name == "all_gather_copy_in":  # _fsdp_collectives.py: a _foreach_copy_ into parts of the second argument
        return foreach_kernels(
            [[torch.empty_like(each, dtype=args[1].dtype) for each in args[0]], args[0]], may_cast=True
        )
    if name.startswith("_foreach_"):
        if not name.endswith("_"):
            lists.append(lists[0])
        return foreach_kernels(lists, may_cast=name == "_foreach_copy_")
    if name == "cat":
        return -(-len(lists[0]) // _CAT_TENSORS) if len({each.dtype for each in lists[0]}) == 1 else len(lists[0])
    if name == "copy_" and all(map(_is_on_host, args[:2])):
        return 0
    longest = max((each.nbytes for each in args if isinstance(each, Tensor)), default=0)
    return 1 if library != "aten" else 1 << max(-(-longest // _LONGEST) - 1, 0).bit_length()


class Launches(TorchDispatchMode):
    """Counts operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        launched["kernels"] += kernels_of(func, args, kwargs or {})
        launched["collectives"] += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


@contextmanager
def mesh_of(world: int, kind: str) -> Iterator[Any]:
    """Be a rank of ``world`` ranks with a device of this kind each."""
    with fake_ranks.fake_ranks((world,), kind, Device(), Event, (Launches(),)) as mesh:
        yield mesh


def step(forward: Callable[[], Tensor]) -> dict[str, int]:
    """Run the forward and backward of a loss within ``mesh_of``; return what they have launched."""
    _steps.append(0)
    launched.update(dict.fromkeys(launched, 0))
    loss = forward()
    # Tensor.backward would run without the mode that makes factories fake.
    _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
    return dict(launched)
