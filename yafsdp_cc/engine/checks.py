"""What is checked before anything is sharded. Checks that may fail on one rank alone are made collective.

``refused_together`` has every rank refuse what one rank refuses; ``check_settings`` and ``check_equal`` compare
arguments and parameters; ``check_trial_exchange`` sends a few numbers the way that weights and gradients will go.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.communicator import CommContext, ScratchBuffers
from yafsdp_cc.engine.mesh import backend_of, broadcast_from_first
from yafsdp_cc.engine.tensor_parallel import local_tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.engine.communicator import Communicator
    from yafsdp_cc.plan import OwnedParameter

T = TypeVar("T")

_CHECKSUM_BLOCK = 1 << 20
"""Bytes of a tensor summed at once: bounds the memory of a checksum."""


# On one rank -------------------------------------------------------------------------------------------------------


def check_types(
    *, ignored_params: Collection[nn.Parameter] | None = None, **arguments: tuple[object, Any, str]
) -> None:
    """Raise a ``TypeError`` that names the first of ``arguments`` (value, types, what it takes) of a wrong type."""
    ignored = {
        f"ignored_params[{index}]": (each, nn.Parameter, "parameters themselves, not their names")
        for index, each in enumerate(ignored_params or ())
    }
    for name, (value, kinds, wanted) in (arguments | ignored).items():
        if not isinstance(value, kinds):
            raise TypeError(f"{name} takes {wanted}; got {value!r}")


def policy_dtypes(mp_policy: object) -> dict[str, tuple[object, Any, str]]:
    """Return what ``check_types`` is to check of a mixed-precision policy, besides that it is one."""
    kinds, wanted = (torch.dtype, type(None)), "a torch.dtype, such as torch.bfloat16"
    return {
        f"mp_policy.{name}": (getattr(mp_policy, name, None), kinds, wanted)
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
    }


def check_no_hooks(owned: Sequence[OwnedParameter]) -> None:
    """Raise a ``ValueError`` that names the first parameter with hooks, which would be lost."""
    for each in owned:
        if each.parameter._backward_hooks or each.parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"'{each.name}' has hooks, which would be lost with the whole parameter: after sharding, call "
                "register_post_accumulate_grad_hook on the sharded one"
            )


def check_modules(model: nn.Module, call: str) -> None:
    """Raise a ``ValueError`` where ``call`` would make something of ``model`` that cannot be trained."""
    if torch.is_inference_mode_enabled():
        raise ValueError(f"{call} under torch.inference_mode() would make weights that cannot be trained")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"'{name}' has max_norm={module.max_norm}: its forward writes to its weight, which would be lost with "
                "the gathered copy. Renormalise under yafsdp_cc.whole_parameters(model, write=True) instead"
            )


# Across ranks ------------------------------------------------------------------------------------------------------


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
    """Refuse on every rank what one rank refuses within, so that none waits for it in vain.

    Raises:
        ValueError: on the other ranks, with that rank's message.
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
    """Compare the arguments of a ``call`` across ranks.

    Raises:
        ValueError: on every rank, naming the first that differs.
    """
    mine = {name: repr(value) for name, value in settings.items()}
    everybody = all_gather_objects(mine, across)
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
    if len(set(all_gather_objects(digest, across))) == 1:
        return
    everybody = all_gather_objects(lines, across)
    for index in range(max(map(len, everybody))):
        found = [theirs[index] if index < len(theirs) else None for theirs in everybody]
        if len(set(found)) > 1:
            table = "\n".join(f"  rank {rank}: {line or 'has no more parameters'}" for rank, line in enumerate(found))
            remedy = (
                "Build the model from the same seed on every rank, or pass sync_module_states=True to shard() to take "
                "rank 0's weights"
                if len({tuple(line._replace(checksum=0) for line in theirs) for theirs in everybody}) == 1
                else "Build the same model on every rank: names, shapes, dtypes and requires_grad have to agree"
            )
            raise ValueError(
                f"the ranks' models differ, first in parameter '{next(line for line in found if line).name}':\n{table}"
                f"\n{remedy}"
            )
    raise AssertionError("digests differ but no line does")


def broadcast_values(tensors: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Give every rank the elements of the first rank's tensors."""
    for tensor in tensors:
        whole = tensor.contiguous()
        broadcast_from_first(whole.view(-1).view(torch.uint8), mesh)  # bytes: not every dtype is carried
        if whole is not tensor:
            tensor.copy_(whole)


def all_gather_objects(item: T, across: Sequence[dist.ProcessGroup]) -> list[T]:
    """Return every rank's item, in the order of a mesh whose last dimension comes first."""
    items = [item]
    for group in across:
        theirs: list[list[T]] = [items] * group.size()
        dist.all_gather_object(theirs, items, group=group)
        items = [each for some in theirs for each in some]
    return items


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit sum of the tensor's bytes, each 32-bit word weighted by its place: swapped ones are seen too."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, data.numel(), _CHECKSUM_BLOCK):
        block = data[start : start + _CHECKSUM_BLOCK]
        if block.numel() % 4:
            block = torch.nn.functional.pad(block, (0, 4 - block.numel() % 4))
        words = block.view(torch.int32).to(torch.int64)
        weights = torch.arange(1, 2 * words.numel(), 2, device=words.device)
        total = (total * 1_000_003 + int((words * weights).sum())) & (2**64 - 1)
    return total


@torch.no_grad()
def check_trial_exchange(gather: Communicator, reduce: Communicator) -> None:
    """Send a few numbers the way that weights and gradients will go, where the backend is not sure to carry them.

    It also makes NCCL's communicators, on every rank in the same order and while nothing else is in flight.

    Raises:
        ValueError: it fails, or a wrong sum comes back.
    """
    device, world, n = gather.device, gather.world, 32
    if device.type != "cuda" or world == 1:
        return
    for dtype in (torch.float32, torch.bfloat16):
        gathered = torch.zeros(world * n, dtype=dtype, device=device)
        own = gather.own_chunk(gathered).fill_(float(gather.rank % 128 + 1))  # exact in bf16
        ones = torch.ones(world * n, dtype=dtype, device=device)
        trial = ExactReduceScatter(world * n, dtype)
        trial.bind(CommContext(reduce, ScratchBuffers(device), lambda kind, name: None))
        try:
            # As on a stream: issued for the current one, and waited for where there is something to wait for.
            for work in (*gather.all_gather(gathered, own, async_op=False), *trial.start(ones, async_op=False)):
                work.wait()
            found, total = gathered.view(world, n)[:, 0].tolist(), trial.finish_whole(ones).tolist()
        except RuntimeError as error:
            raise ValueError(
                f"backend '{backend_of(gather.group, device)}' cannot carry {dtype} tensors of {device}: pass a mesh "
                f"whose process group has NCCL for CUDA, one GPU per rank ({error})"
            ) from error
        # NCCL sums in the dtype that is sent, and bf16 has no odd numbers above 256: every hop may round.
        is_near = all(abs(each - world) <= 0.02 * world for each in total)
        if found != [float(rank % 128 + 1) for rank in range(world)] or not is_near:
            raise ValueError(f"a trial exchange of {dtype} over {world} ranks gave {total[:4]}…: a broken backend?")
