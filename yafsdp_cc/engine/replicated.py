"""Replicated parameters, and what ranks tell each other about gradients.

Norms, biases and other tiny parameters are whole on every rank: sharding them would save nothing and cost a collective
each. Their gradients are summed once per backward, in fp32 (fp64 if one of them is) and never encoded, in one buffer
that also carries which parameters each rank has used:

    | gradients of the replicated parameters | used parameters |
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.layout import VECTOR, align
from yafsdp_cc.engine.param import FlatParam
from yafsdp_cc.engine.streams import PinnedCopy

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.engine.communicator import CommContext, Communicator, Works
    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.streams import CommStream


class ReplicatedFlatParam(FlatParam):
    """Replicated parameters of one dtype: every rank's chunk is the whole buffer. Forwards may see cast copies.

    Args:
        rest: arguments of ``FlatParam``; ``layout`` is that of a single rank.
    """

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        for param in self.params:
            param.flat = None  # replicated parameters are never gathered, and are reduced together
        self.use_sharded(self.sharded)

    def use_sharded(self, sharded: Tensor) -> None:
        super().use_sharded(sharded)
        copies = self._new_copies()
        self.has_copies = copies is not None
        self.copied_version = self.seen_version = -1
        self.computed = sharded.detach() if copies is None else copies
        """Values of the parameters [numel] in the dtype of the forward: ``sharded`` itself, or copies."""
        self.leaves = [param.local_range(self.computed) for param in self.params]
        """View of ``computed`` for each parameter, which forwards read as the parameter."""
        self.gate_inputs = [leaf.detach() for leaf in self.leaves]
        """Aliases of ``leaves`` that enter the root gate. If ``leaves`` entered the gate, autograd would set their
        ``.grad`` only after the gate's backward, also for operations that read a leaf without the gate."""

    def _new_copies(self) -> Tensor | None:
        """Allocate copies in the dtype of the forward; return None if the parameters have that dtype themselves."""
        is_same = self.sharded.dtype == self.compute_dtype
        return None if is_same else torch.empty_like(self.sharded, dtype=self.compute_dtype)

    def check_unwritten(self) -> None:
        """Raise a ``RuntimeError`` where a forward has written to the cast copies."""
        if self.has_copies and self.computed._version != self.seen_version:
            self.copied_version = -1  # make the next forward copy the shards again
            names = ", ".join(f"'{param.spec.name}'" for param in self.params[:3])
            raise RuntimeError(
                f"a forward has written in place to one of {names}, ..., whose values in {self.computed.dtype} are "
                "copies: the change is lost. Change parameters outside of the forward"
            )

    @property
    def copied_bytes(self) -> int:
        return self.computed.nbytes if self.has_copies else 0

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self.copied_bytes


class ReplicatedParams:
    """All replicated parameters of a root, and their reduction.

    Args:
        flats: flat parameters of all modules.
        flags: number of flags that are summed beside the gradients.
        context: communicator and scratch buffers of the reduces.
        stream: stream of the reduces.
        replicas: communicator of the ranks that hold the same shard; None without replicas.
    """

    def __init__(
        self,
        flats: Sequence[ReplicatedFlatParam],
        flags: int,
        context: CommContext,
        stream: CommStream,
        replicas: Communicator | None,
    ) -> None:
        self.flats = tuple(flats)
        self.params: tuple[FSDPParam, ...] = tuple(param for flat in flats for param in flat.params)
        self.leaves: tuple[Tensor, ...] = tuple(leaf for flat in flats for leaf in flat.leaves)
        self._gate_inputs = tuple(each for flat in flats for each in flat.gate_inputs)
        self._comm, self._stream, self._replicas = context.comm, stream, replicas
        self._handle = stream.handle()
        sizes = [flat.sharded.numel() for flat in flats]
        self._elements = sum(sizes)
        self._flags = array("d", bytes(8 * flags))
        self._flags_tensor = torch.frombuffer(self._flags, dtype=torch.float64)
        size = align(self._elements + flags, VECTOR * self._comm.world)
        self.dtype = torch.float64 if any(flat.sharded.dtype == torch.float64 for flat in flats) else torch.float32
        """Dtype of the buffer of gradients and flags that is summed over ranks."""
        self._summands = torch.zeros(size, dtype=self.dtype, device=self._comm.device)
        self._totals = self._summands if self._comm.reduces_in_place else torch.zeros_like(self._summands)
        nbytes = self._summands.nbytes
        part = nbytes if self._comm.reduces_in_place else nbytes // self._comm.world
        over_replicas = 0 if replicas is None else replicas.all_reduce_bytes(part)
        self.sent_bytes = self._comm.all_reduce_bytes(nbytes) + over_replicas
        """Number of bytes that this rank sends in one reduction."""
        self._totals_by_flat = self._totals[: self._elements].split(sizes)
        self._readback = PinnedCopy(flags, self.dtype, self._comm.device)
        self._reduce_scatter = ExactReduceScatter(size, self.dtype)
        self._reduce_scatter.bind(context)
        for flat, grads in zip(flats, self._summands[: self._elements].split(sizes), strict=True):
            for param in flat.params:
                param.unsharded_grad = param.local_range(grads)

    @property
    def device_bytes(self) -> int:
        buffers = self._summands.nbytes + (self._totals.nbytes if self._totals is not self._summands else 0)
        return buffers + sum(flat.device_bytes for flat in self.flats)

    @property
    def host_bytes(self) -> int:
        return sum(flat.host_bytes for flat in self.flats)

    def refresh(self) -> None:
        """Copy all parameters to the dtype of the forward, also where torch has counted no write to a shard."""
        # ``.data``: torch must not count a write of unchanged weights, as an earlier graph may need the copies
        copies = [
            (flat, flat.computed.data if flat.copied_version == flat.version else flat.computed)
            for flat in self.flats
            if flat.has_copies
        ]
        # one kernel fills all copies that are on the device of their shards
        if near := [(flat, copy) for flat, copy in copies if not flat.host_bytes]:
            torch._foreach_copy_([copy for _, copy in near], [flat.sharded for flat, _ in near])
        for flat, copy in copies:
            if flat.host_bytes:
                flat.read(copy)
            flat.copied_version = flat.version
        for flat in self.flats:
            flat.seen_version = flat.computed._version

    def register_unsharded(self, only: Iterable[FSDPParam] | None = None) -> tuple[list[FSDPParam], list[Tensor]]:
        """Let the modules read the replicated parameters, or ``only`` some, in the dtype of the forward.

        Returns:
            The parameters that require a gradient, and the tensors that enter the root gate for them.
        """
        chosen = None if only is None else set(only)
        trained, inputs = [], []
        for param, leaf, gate_input in zip(self.params, self.leaves, self._gate_inputs, strict=True):
            if leaf.requires_grad is not param.parameter.requires_grad:
                leaf.requires_grad_(param.parameter.requires_grad)
            if chosen is None or param in chosen:
                param.register_unsharded(leaf)
            if leaf.requires_grad:
                trained.append(param)
                inputs.append(gate_input)
        return trained, inputs

    def register_sharded(self) -> None:
        """Let the modules read the replicated parameters themselves again."""
        for param in self.params:
            param.register_sharded()

    def accumulate_grads(self, params: Sequence[FSDPParam], grads: Sequence[Tensor | None]) -> None:
        """Write the gradients of a backward into the buffer that is summed: copied on first touch, added afterwards."""
        found = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None and p.parameter.requires_grad]
        fresh = {p: g for p, g in found if not (p.written or g.is_sparse or p.factor != 1)}
        if fresh:  # one kernel copies all first gradients
            torch._foreach_copy_(cast("list[Tensor]", [p.unsharded_grad for p in fresh]), list(fresh.values()))
        for param, grad in found:
            if param in fresh:
                param.written = True
            else:
                param.accumulate_grad(grad)
        for param, leaf in zip(self.params, self.leaves, strict=True):
            if leaf.grad is not None:  # reentrant checkpointing has run a backward of its own, which ends at the leaf
                param.accumulate_grad(leaf.grad)
                leaf.grad = None

    def all_reduce(self, flags: Sequence[float]) -> Tensor:
        """Sum the gradients and ``flags`` over all ranks; return the summed flags, on the device."""
        if unwritten := [param.unsharded_grad for param in self.params if not param.written]:
            torch._foreach_zero_(cast("list[Tensor]", unwritten))
        self._flags[:] = array("d", flags)
        self._readback.send(self._flags_tensor, self._summands.narrow(0, self._elements, len(flags)))
        if self._comm.world > 1 or self._replicas is not None:
            self._stream.wait_for_caller()
            self._stream.issue(self._handle, self._exchange)
            self._handle.wait()
        return self._totals.narrow(0, self._elements, len(flags))

    def _exchange(self, async_op: bool) -> Works:
        comm, in_place = self._comm, self._comm.reduces_in_place  # over NCCL one all-reduce of fp32 or fp64
        for work in (comm.all_reduce if in_place else self._reduce_scatter.start)(self._summands, async_op):
            work.wait()
        total = self._totals if in_place else comm.own_chunk(self._totals)
        for start, part in () if in_place else self._reduce_scatter.finish(self._summands):
            total.narrow(0, start, part.numel()).copy_(part)
        if self._replicas is not None:
            for work in self._replicas.all_reduce(total, async_op):
                work.wait()
        return () if in_place else comm.all_gather(self._totals, total, async_op)

    def add_to_grads(self) -> None:
        """Add the summed gradients, divided, to ``.grad``."""
        for flat, total in zip(self.flats, self._totals_by_flat, strict=True):
            if flat.takes_sums:
                flat.add_to_grad([(0, total)], [param.written for param in flat.params])
        for param in self.params:
            param.written = False


def usage_flags(reduced: Mapping[FSDPParam, bool], count: int, is_fed: Callable[[FSDPParam], bool]) -> list[float]:
    """Return flags to be summed over ranks: 1 for each of ``count`` parameters that this rank knows a gradient of.

    Args:
        reduced: parameters whose sums were added in this backward, and whether this rank wrote a gradient of each.
        is_fed: tells whether error feedback has brought a gradient of a parameter that perhaps no rank has used.
    """
    flags = [0.0] * count
    for param, was_written in reduced.items():
        if was_written or (_asks(param) and is_fed(param)):
            flags[param.index] = 1.0
    return flags


def _asks(param: FSDPParam) -> bool:
    """Return whether ``hand_out_grads`` has to know if another rank has used ``param``, which this rank has not."""
    parameter = param.parameter
    return (parameter.requires_grad or param.is_owed) and (
        parameter.grad is None or bool(parameter._post_accumulate_grad_hooks)
    )


def hand_out_grads(reduced: Mapping[FSDPParam, bool], flags: Tensor | None) -> list[FSDPParam]:
    """Give parameters that another rank alone has used their ``.grad``; return those that any rank has used, in order.
    Hooks are to run for those alone: an optimizer in a hook must not move others, whose ``.grad`` may be older.
    ``flags`` are ``usage_flags`` of ``reduced``, summed over ranks; None without other ranks."""
    used = {param for param, was_written in reduced.items() if was_written}
    asked = [param for param in reduced if param not in used and _asks(param)]
    if asked and flags is not None:
        counts = flags.tolist()  # on CUDA the host waits here for the whole backward
        for param in asked:
            if counts[param.index]:
                used.add(param)
                param.parameter.grad = param.grad if param.parameter.grad is None else param.parameter.grad
    for param in reduced:
        param.is_withheld = param.is_owed = False
    return [param for param in reduced if param in used]
