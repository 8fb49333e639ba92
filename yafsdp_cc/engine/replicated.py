"""Replicated parameters, and what ranks tell each other at the end of a backward.

Norms, biases and other tiny parameters are whole on every rank: sharding them would save nothing and cost a collective
each. Their gradients are summed once per backward, in fp32 (fp64 if one of them is) and never encoded, in one buffer
that also carries which parameters each rank has used and a fingerprint of the collectives that it has issued:

    | gradients of the replicated parameters | used parameters | fingerprint |
"""

from __future__ import annotations

import itertools
import time
import zlib
from array import array
from collections import deque
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.layout import VECTOR, align
from yafsdp_cc.engine.param import ShardedGrad
from yafsdp_cc.engine.streams import PinnedReadback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from yafsdp_cc.engine.communicator import CommContext, Communicator, Works
    from yafsdp_cc.engine.param import Divisor, FSDPParam
    from yafsdp_cc.engine.streams import CommStream


class ReplicatedFlatParam:
    """Replicated parameters of one dtype in one flat buffer, and their copies in the dtype of the forward.

    Args:
        params: in the order of the buffer.
        values: [numel], the parameters' own dtype: what the optimizer updates.
        compute_dtype: of the forward.
        divisor: of summed gradients; may be replaced at any time.
    """

    def __init__(
        self, params: Sequence[FSDPParam], values: Tensor, compute_dtype: torch.dtype, divisor: Divisor
    ) -> None:
        self.params = params
        self.divisor = divisor
        self.start = self.end = 0
        """Where its gradients lie in the buffer that is summed."""
        self.sharded_grad: ShardedGrad | None = None
        self._compute_dtype = compute_dtype
        self.use_sharded(values)

    def use_sharded(self, values: Tensor) -> None:
        """Take ``values`` [numel] for the parameters."""
        self.sharded = values
        copies = self._make_copies(values)
        self._has_copies = copies is not None
        self._copied = self._seen = -1
        self.computed = values.detach() if copies is None else copies
        self.leaves = [
            self.computed.narrow(0, param.extent.offset, param.extent.numel).view(param.extent.shape)
            for param in self.params
        ]
        """What forwards see of each parameter."""

    def _make_copies(self, values: Tensor) -> Tensor | None:
        """Return room for copies of the values; None where the forward sees the values themselves."""
        return torch.empty_like(values, dtype=self._compute_dtype) if values.dtype != self._compute_dtype else None

    def _copy(self) -> None:
        self.computed.copy_(self.sharded)

    def refresh(self) -> None:
        """Bring the copies up to date with the values."""
        if self._has_copies and self._copied != self.sharded._version:
            self._copy()
            self._copied = self.sharded._version
        self._seen = self.computed._version

    def check_unwritten(self) -> None:
        """Raise a ``RuntimeError`` where a forward has written to the copies."""
        if self._has_copies and self.computed._version != self._seen:
            self._copied = -1  # they are made anew
            names = ", ".join(f"'{param.spec.name}'" for param in self.params[:3])
            raise RuntimeError(
                f"a forward has written in place to one of {names}, ..., whose values in {self.computed.dtype} are "
                "copies: the change is lost. Change parameters outside of the forward"
            )

    def make_sharded_grad(self) -> ShardedGrad:
        """Return the buffer of gradients, made when the first parameter is to be trained."""
        if self.sharded_grad is None:
            self.sharded_grad = ShardedGrad(torch.zeros_like(self.sharded), self.params)
        return self.sharded_grad

    @property
    def copied_bytes(self) -> int:
        return self.computed.nbytes if self._has_copies else 0

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of the forward."""
        grad = self.sharded_grad.buffer.nbytes if self.sharded_grad is not None else 0
        return self.sharded.nbytes + self.copied_bytes + grad

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, beside the device."""
        return 0


class ReplicatedParams:
    """All replicated parameters of a root, and their reduction.

    Args:
        flats: of all modules.
        flags: how many numbers are summed beside the gradients.
        context: of the reduces' stream.
        stream: of the reduces.
        replicas: the communicator of the ranks that hold the same shard; None without replicas.
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
        self._leaves: tuple[Tensor, ...] = tuple(leaf for flat in flats for leaf in flat.leaves)
        self._comm, self._stream, self._replicas = context.comm, stream, replicas
        self._handle = stream.handle()
        self._elements = 0
        for flat in flats:
            flat.start, self._elements = self._elements, self._elements + flat.sharded.numel()
            flat.end = self._elements
        self._flags = array("d", bytes(8 * flags))
        self._flags_tensor = torch.frombuffer(self._flags, dtype=torch.float64)
        size = align(self._elements + flags, VECTOR * self._comm.world)
        double = any(flat.sharded.dtype == torch.float64 for flat in flats)
        device = self._comm.device
        self._summands = torch.zeros(size, dtype=torch.float64 if double else torch.float32, device=device)
        self._totals = torch.zeros_like(self._summands) if self._comm.world > 1 else self._summands
        self._readback = PinnedReadback(flags, self._summands.dtype, device)
        self._reduce_scatter = ExactReduceScatter(size, self._summands.dtype)
        self._reduce_scatter.bind(context)
        for flat in flats:
            for param in flat.params:
                start = flat.start + param.extent.offset
                param.unsharded_grad = self._summands.narrow(0, start, param.extent.numel).view(param.extent.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is summed."""
        return self._summands.dtype

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends in one reduction."""
        sent = 2 * self._comm.peer_bytes(self._summands.nbytes)
        return sent if self._replicas is None else sent + self._replicas.all_reduce_bytes(self._chunk_bytes)

    @property
    def _chunk_bytes(self) -> int:
        return self._summands.nbytes // self._comm.world

    @property
    def device_bytes(self) -> int:
        buffers = self._summands.nbytes + (self._totals.nbytes if self._totals is not self._summands else 0)
        return buffers + sum(flat.device_bytes for flat in self.flats)

    @property
    def host_bytes(self) -> int:
        return sum(flat.host_bytes for flat in self.flats)

    # In forwards -------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring the copies in the dtype of the forward up to date."""
        for flat in self.flats:
            flat.refresh()

    def trainable(self) -> tuple[list[FSDPParam], list[Tensor]]:
        """Return the parameters that require a gradient, and what forwards see of them."""
        params, leaves = [], []
        for param, leaf in zip(self.params, self._leaves, strict=True):
            requires_grad = param.parameter.requires_grad
            if leaf.requires_grad is not requires_grad:
                leaf.requires_grad_(requires_grad)
            if requires_grad:
                params.append(param)
                leaves.append(leaf)
        return params, leaves

    def register_unsharded(self, only: Iterable[FSDPParam] | None = None) -> None:
        """Let the modules' forwards see the values in their dtype, of all parameters or ``only`` of some."""
        chosen = None if only is None else set(only)
        for param, leaf in zip(self.params, self._leaves, strict=True):
            if chosen is None or param in chosen:
                param.register_unsharded(leaf)

    def register_sharded(self) -> None:
        """Let the modules see the parameters themselves again."""
        for param in self.params:
            param.register_sharded()

    def check_unwritten(self) -> None:
        """Raise a ``RuntimeError`` where a forward has written to a copy."""
        for flat in self.flats:
            flat.check_unwritten()

    # In backwards ------------------------------------------------------------------------------------------------

    def accumulate_grads(self, params: Sequence[FSDPParam], grads: Sequence[Tensor | None]) -> None:
        """Write the gradients of a backward into the buffer that is summed: copied on first touch, added afterwards."""
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                param.accumulate_grad(grad)
        for param, leaf in zip(self.params, self._leaves, strict=True):
            if leaf.grad is not None:  # from ops that reentrant checkpointing ran again
                param.accumulate_grad(leaf.grad)
                leaf.grad = None

    def all_reduce(self, flags: Sequence[float]) -> Tensor:
        """Sum the gradients and ``flags`` over all ranks; return the summed flags, on the device."""
        for param in self.params:
            if not param.written:
                assert param.unsharded_grad is not None
                param.unsharded_grad.zero_()
        self._flags[:] = array("d", flags)
        self._readback.send(self._flags_tensor, self._summands.narrow(0, self._elements, len(flags)))
        if self._comm.world > 1 or self._replicas is not None:
            self._stream.wait_for_caller()
            self._stream.issue(self._handle, self._exchange)
            self._handle.wait()
        return self._totals.narrow(0, self._elements, len(flags))

    def _exchange(self, async_op: bool) -> Works:
        for work in self._reduce_scatter.start(self._summands, async_op):
            work.wait()
        total = self._reduce_scatter.finish_whole(self._summands)
        if self._replicas is not None:
            for work in self._replicas.all_reduce(total, async_op):
                work.wait()
        own = self._comm.own_chunk(self._totals)
        if own.data_ptr() != total.data_ptr():
            own.copy_(total)
        return self._comm.all_gather(self._totals, own, async_op)

    def add_to_grads(self) -> list[bool]:
        """Add the summed gradients, divided, to ``.grad``; return which parameters this rank had written."""
        written = [param.written for param in self.params]
        first = 0
        for flat in self.flats:
            last = first + len(flat.params)
            if any(param.parameter.requires_grad for param in flat.params):
                total = self._totals.narrow(0, flat.start, flat.end - flat.start)
                flat.make_sharded_grad().add([(0, total)], flat.divisor, written[first:last])
            first = last
        self.reset()
        return written

    def reset(self) -> None:
        """Forget what was written and not reduced."""
        for param in self.params:
            param.written = False


class UnusedParameters:
    """Which parameters have a gradient after a backward: those that any rank has used, though each knows its own alone.

    Args:
        reduced: parameters whose sums were added in this backward, and which of them this rank has written.
        count: how many parameters the model has.
        is_fed: whether a sum has brought something of a parameter that nobody may have used, by error feedback.
    """

    def __init__(
        self,
        reduced: Iterable[tuple[Sequence[FSDPParam], Sequence[bool]]],
        count: int,
        is_fed: Callable[[FSDPParam], bool],
    ) -> None:
        self.flags = [0.0] * count
        """1 where this rank knows of a gradient; to be summed over ranks."""
        self._reduced = list(reduced)
        self._unused: list[FSDPParam] = []
        for params, written in self._reduced:
            for param, was_written in zip(params, written, strict=True):
                if was_written:
                    self.flags[param.index] = 1.0
                elif param.parameter.requires_grad:
                    self._unused.append(param)
                    if param.parameter.grad is None and is_fed(param):
                        self.flags[param.index] = 1.0

    def hand_out_grads(self, totals: Tensor, has_peers: bool) -> None:
        """Give parameters that another rank alone has used their ``.grad``, and run post-accumulate-grad hooks.

        Args:
            totals: ``flags``, summed over ranks.
            has_peers: whether there is another rank.
        """
        # Their gradients stay None unless another rank has some; where they have one already, there is nothing to ask.
        unused = [param for param in self._unused if param.parameter.grad is None]
        if unused and has_peers:
            counts = totals[: len(self.flags)].tolist()  # on CUDA the host waits here for the whole backward
            for param in unused:
                if counts[param.index]:
                    param.parameter.grad = param.grad
        for param in dict.fromkeys(param for params, _ in self._reduced for param in params):
            hooks = param.parameter._post_accumulate_grad_hooks
            if hooks and param.parameter.grad is not None:
                for hook in hooks.values():
                    hook(param.parameter)


# What ranks have issued --------------------------------------------------------------------------------------------

_FACTOR, _MASK = 1_000_003, (1 << 61) - 1
_DIGITS, _BASE = 5, 64
_SHOWN = 6
"""Operations of each rank that an error names."""
_TIMEOUT, _GLANCE = 5.0, 0.05
"""Seconds that all ranks together have to answer, and that each has at least."""
_fingerprints = itertools.count()


class CollectiveFingerprint:
    """A running hash of the issued collectives, to tell ranks that run different programs from ranks that are late.

    It crosses ranks as ``sums``: five digits below 64 and their squares, whose sums over N ranks are exact in fp32 up
    to 4,096 ranks. All ranks agree on a digit d if and only if N * Σd² = (Σd)².

    Args:
        rank: among the ``world`` ranks of the model.
        store: by which ranks that fail tell what they have done.
        first: the first of these ranks among all.
    """

    WIDTH = 2 * _DIGITS
    """How many numbers ``sums`` has."""

    def __init__(self, rank: int, world: int, store: Store, first: int) -> None:
        self._rank = rank
        self._world = world
        self._store = store
        self._key = f"yafsdp_cc/fingerprint/{first}/{next(_fingerprints)}"
        self._count = 0
        self._hash = 0
        self._last: deque[str] = deque(maxlen=64)

    def record(self, kind: str, name: str) -> None:
        """Note one operation of the group ``name``."""
        text, code = _operation(kind, name)
        self._hash = (self._hash * _FACTOR + code) & _MASK
        self._count += 1
        self._last.append(text)

    def sums(self) -> list[float]:
        """Return the fingerprint as numbers to be summed over ranks."""
        digits = [float((self._hash >> 31) // _BASE**place % _BASE) for place in range(_DIGITS)]
        return digits + [digit * digit for digit in digits]

    def check(self, totals: Sequence[float]) -> None:
        """Raise a ``RuntimeError`` where ``sums``, summed over ranks, show that these have issued different things."""
        pairs = zip(totals[:_DIGITS], totals[_DIGITS:], strict=True)
        if any(self._world * squares != total * total for total, squares in pairs):
            raise RuntimeError(
                "ranks ran units in different orders, so their gradients are worthless; every rank must run the same "
                f"forward (parameters inside a unit may go unused)\n{self._compare()}"
            )

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return the failure of a collective, with what the other ranks were doing."""
        return RuntimeError(
            f"{error}\nEvery rank must issue the same operations in the same order; what they did last:\n"
            f"{self._compare()}"
        )

    def _compare(self) -> str:
        """Return what the ranks did last, side by side, as far as they answer."""
        mine = f"{self._count} operations, the last: {', '.join(list(self._last)[-_SHOWN:])}"
        self._store.set(f"{self._key}/{self._rank}", mine)
        return "\n".join(f"  rank {rank}: {answer}" for rank, answer in enumerate(self._answers()))

    def _answers(self) -> Iterator[str]:
        until = time.monotonic() + _TIMEOUT
        for rank in range(self._world):
            try:
                left = max(until - time.monotonic(), _GLANCE)
                self._store.wait([f"{self._key}/{rank}"], timedelta(seconds=left))
                yield self._store.get(f"{self._key}/{rank}").decode()
            except (RuntimeError, ValueError):
                yield "no answer"


@cache
def _operation(kind: str, name: str) -> tuple[str, int]:
    text = f"{kind} {name}"
    return text, zlib.crc32(text.encode())
