"""Replicated parameters, and what ranks tell each other about gradients and collectives.

Norms, biases and other tiny parameters are whole on every rank: sharding them would save nothing and cost a collective
each. Their gradients are summed once per backward, in fp32 (fp64 if one of them is) and never encoded, in one buffer
that also carries which parameters each rank has used:

    | gradients of the replicated parameters | used parameters |
"""

from __future__ import annotations

import itertools
import re
import time
import zlib
from array import array
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.distributed.distributed_c10d import _get_default_store

from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.layout import VECTOR, align
from yafsdp_cc.engine.mesh import backend_of, exchange_over_store, is_python_group, timeout_of
from yafsdp_cc.engine.param import FlatParam
from yafsdp_cc.engine.streams import PinnedReadback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.communicator import CommContext, Communicator, Works
    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.streams import CommStream


class ReplicatedFlatParam(FlatParam):
    """Replicated parameters of one dtype: every rank's chunk is the whole buffer. The forward may see copies of it.

    Args:
        rest: as of ``FlatParam``; ``layout`` is that of one rank.
    """

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        for param in self.params:
            param.flat = None  # nothing of it is gathered, and reduces are those of all flat parameters together
        self.use_sharded(self.sharded)

    def use_sharded(self, sharded: Tensor) -> None:
        super().use_sharded(sharded)
        copies = self._new_copies()
        self.has_copies = copies is not None
        self.copied_version = self.seen_version = -1
        self.computed = sharded.detach() if copies is None else copies
        """[numel], in the dtype of the forward."""
        self.leaves = [param.local_range(self.computed) for param in self.params]
        """What forwards see of each parameter."""

    def _new_copies(self) -> Tensor | None:
        """Return room for copies in the dtype of the forward; None where that sees the parameters themselves."""
        is_same = self.sharded.dtype == self.compute_dtype
        return None if is_same else torch.empty_like(self.sharded, dtype=self.compute_dtype)

    def copy_target(self) -> Tensor:
        """Return the copies, to be made anew: a change that torch has counted is one to an earlier forward's graph."""
        return self.computed.data if self.copied_version == self.version else self.computed

    def check_unwritten(self) -> None:
        """Raise a ``RuntimeError`` where a forward has written to the copies."""
        if self.has_copies and self.computed._version != self.seen_version:
            self.copied_version = -1  # they are made anew
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
        sizes = [flat.sharded.numel() for flat in flats]
        self._elements = sum(sizes)
        self._flags = array("d", bytes(8 * flags))
        self._flags_tensor = torch.frombuffer(self._flags, dtype=torch.float64)
        size = align(self._elements + flags, VECTOR * self._comm.world)
        dtype = torch.float64 if any(flat.sharded.dtype == torch.float64 for flat in flats) else torch.float32
        self._summands = torch.zeros(size, dtype=dtype, device=self._comm.device)
        self._totals = self._summands if self._comm.reduces_in_place else torch.zeros_like(self._summands)
        self._totals_by_flat = self._totals[: self._elements].split(sizes)
        self._readback = PinnedReadback(flags, dtype, self._comm.device)
        self._reduce_scatter = ExactReduceScatter(size, dtype)
        self._reduce_scatter.bind(context)
        for flat, grads in zip(flats, self._summands[: self._elements].split(sizes), strict=True):
            for param in flat.params:
                param.unsharded_grad = param.local_range(grads)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is summed."""
        return self._summands.dtype

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends in one reduction."""
        nbytes = self._summands.nbytes
        part = nbytes if self._comm.reduces_in_place else nbytes // self._comm.world
        over_replicas = 0 if self._replicas is None else self._replicas.all_reduce_bytes(part)
        return self._comm.all_reduce_bytes(nbytes) + over_replicas

    @property
    def device_bytes(self) -> int:
        buffers = self._summands.nbytes + (self._totals.nbytes if self._totals is not self._summands else 0)
        return buffers + sum(flat.device_bytes for flat in self.flats)

    @property
    def host_bytes(self) -> int:
        return sum(flat.host_bytes for flat in self.flats)

    # In forwards -------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring the copies in the dtype of the forward up to date, also where torch has seen no write to the shards."""
        copies = [(flat, flat.copy_target()) for flat in self.flats if flat.has_copies]
        if near := [(flat, copy) for flat, copy in copies if not flat.host_bytes]:  # in one kernel
            torch._foreach_copy_([copy for _, copy in near], [flat.sharded for flat, _ in near])
        for flat, copy in copies:
            if flat.host_bytes:
                flat.read(copy)
            flat.copied_version = flat.version
        for flat in self.flats:
            flat.seen_version = flat.computed._version

    def trainable(self) -> tuple[list[FSDPParam], list[Tensor]]:
        """Return the parameters that require a gradient, and what forwards see of them."""
        params, leaves = [], []
        for param, leaf in zip(self.params, self._leaves, strict=True):
            if leaf.requires_grad is not param.parameter.requires_grad:
                leaf.requires_grad_(param.parameter.requires_grad)
            if leaf.requires_grad:
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
        fresh = {p: g for p, g in zip(params, grads, strict=True) if g is not None and not (p.written or g.is_sparse)}
        if fresh:  # in one kernel
            torch._foreach_copy_(cast("list[Tensor]", [p.unsharded_grad for p in fresh]), list(fresh.values()))
        for param, grad in zip(params, grads, strict=True):
            if param in fresh:
                param.written = True
            elif grad is not None:
                param.accumulate_grad(grad)
        for param, leaf in zip(self.params, self._leaves, strict=True):
            if leaf.grad is not None:  # from ops that reentrant checkpointing ran again
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
        comm, in_place = self._comm, self._comm.reduces_in_place  # NCCL's all-reduce: as it is in fp32, the same sum
        for work in (comm.all_reduce if in_place else self._reduce_scatter.start)(self._summands, async_op):
            work.wait()
        total = self._summands if in_place else self._reduce_scatter.finish_whole(self._summands)
        if self._replicas is not None:
            for work in self._replicas.all_reduce(total, async_op):
                work.wait()
        if in_place:
            return ()
        return comm.all_gather(self._totals, comm.own_chunk(self._totals).copy_(total), async_op)

    def add_to_grads(self) -> None:
        """Add the summed gradients, divided, to ``.grad``."""
        for flat, total in zip(self.flats, self._totals_by_flat, strict=True):
            if flat.trainable:
                flat.make_sharded_grad()
                flat.add_to_grad([(0, total)], [param.written for param in flat.params])
        self.reset()

    def reset(self) -> None:
        """Forget what was written and not reduced."""
        for param, leaf in zip(self.params, self._leaves, strict=True):
            param.written, leaf.grad = False, None


# Unused parameters -------------------------------------------------------------------------------------------------


def usage_flags(reduced: Mapping[FSDPParam, bool], count: int, is_fed: Callable[[FSDPParam], bool]) -> list[float]:
    """Return 1 for each of ``count`` parameters that this rank knows a gradient of, to be summed over ranks.

    Args:
        reduced: parameters whose sums were added in this backward, and whether this rank has written to them.
        is_fed: whether a sum has brought something of a parameter that nobody may have used, by error feedback.
    """
    flags = [0.0] * count
    for param, was_written in reduced.items():
        if was_written or (param.parameter.requires_grad and param.parameter.grad is None and is_fed(param)):
            flags[param.index] = 1.0
    return flags


def hand_out_grads(reduced: Iterable[FSDPParam], flags: Tensor | None) -> None:
    """Give parameters that another rank alone has used their ``.grad``, and run post-accumulate-grad hooks.

    Args:
        flags: ``usage_flags``, summed over ranks; None without other ranks.
    """
    # Their gradients stay None unless another rank has some; where they have one already, there is nothing to ask.
    unused = [param for param in reduced if param.parameter.requires_grad and param.parameter.grad is None]
    if unused and flags is not None:
        counts = flags.tolist()  # on CUDA the host waits here for the whole backward
        for param in unused:
            if counts[param.index]:
                param.parameter.grad = param.grad
    for param in reduced:
        param.is_withheld = False
        hooks = param.parameter._post_accumulate_grad_hooks
        if hooks and param.parameter.grad is not None:
            for hook in hooks.values():
                hook(param.parameter)


# What ranks issue --------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1
_LONG, _SHORT = 1_000_003, 256 * 1_000_003
"""Factors of hashes: multiplied by the second one eight times, one has nothing left of what it was."""
_SHOWN = 6
"""Operations, and frozen parameters, of each rank that an error names."""
_KNOWN = 1 << 16
"""Contexts that a rank keeps in mind: all ranks forget theirs at the same operation."""
_FEW, _PROMPT = 16, 0.003
"""So many ranks look for the verdict often, for so many seconds: some stores sleep between two looks."""
_AGREED, _DIFFERENT = "agreed", "different"
FINAL_REDUCE = "final reduce"
"""The kind of the operation behind which gradients are final."""


class Operation(NamedTuple):
    """A collective, or some that are issued together, by what all ranks must have alike."""

    kind: str
    name: str
    """Of the group."""
    wanted: tuple[bool, ...]
    """Which of the parameters require a gradient, where it sums gradients."""
    factors: tuple[float, ...]
    """By what sums are divided."""

    def next_number(self, before: Operation) -> tuple[int, int] | None:
        """Return which number in the name has changed since ``before``, and by how much, if nothing else has."""
        if self._replace(name="") != before._replace(name=""):
            return None
        ours, theirs = re.split(r"(\d+)", self.name), re.split(r"(\d+)", before.name)
        places = [place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other]
        if len(ours) != len(theirs) or len(places) != 1 or places[0] % 2 == 0:
            return None
        return places[0], int(ours[places[0]]) - int(theirs[places[0]])


class CollectiveFingerprint:
    """What ranks compare of the collectives that they are about to issue.

    Two ranks that issue different ones hang, end (gloo, where a message is too long) or mix up numbers. So an operation
    is issued at once only where ranks expect it: it has followed all since the last final reduce before, or followed
    the eight before it the last time, or it goes on from unit to unit as those before it. Any other one waits until all
    ranks have told the store that theirs is the same. All ranks expect alike, for they have agreed on all before: where
    some are to issue what is expected and others are not, these do not meet, and all of them time out by name.

    Args:
        rank: among the ``ranks`` of the model.
        ranks: the numbers of these ranks among all.
        group: some or all of them; fake ranks, and those that Python plays, give no answers and are not asked.
    """

    def __init__(self, rank: int, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> None:
        self._rank, self._world, self._store = rank, len(ranks), _get_default_store()
        self._has_peers = self._world > 1 and not is_python_group(group) and backend_of(group, device) != "fake"
        self._key = f"yafsdp_cc/fingerprint/{zlib.crc32(repr(list(ranks)).encode())}"
        if self._has_peers:
            self._store = self._store.clone()  # type: ignore[attr-defined]  # skip_together waits in that of all
            if (timeout := timeout_of(group)) is not None:
                self._store.set_timeout(timeout)
            self._key += f"/{self._store.add(f'{self._key}/times of {rank}', 1)}"  # all of these ranks count alike
        self._count = self._path = self._context = 0
        self._hashes: dict[Operation, int] = {}
        self._followers: dict[int, int] = {}
        """Hashes of what has come behind paths and contexts the last time."""
        self._last: deque[Operation] = deque(maxlen=_SHOWN)
        self._questions = itertools.count()  # goes on also where a batch is rolled back
        self._answered = ""

    def record(self, kind: str, name: str) -> None:
        """Note what has become of the group ``name``, on which the operations behind it are to depend."""
        operation = Operation(kind, name, (), ())
        self._add(operation, self._hash(operation))

    def agree(self, kind: str, name: str, flats: Sequence[FlatParam] = ()) -> None:
        """Return once all ranks are known to issue the same operation of the group ``name`` next.

        Args:
            kind: of the operation.
            name: of the group.
            flats: whose gradients it sums.

        Raises:
            RuntimeError: ranks issue different operations, or one does not come.
        """
        wanted = tuple([param.parameter.requires_grad for flat in flats for param in flat.params])
        operation = Operation(kind, name, wanted, tuple([flat.divisor.factor for flat in flats]))
        known = self._hashes.get(operation) or self._hash(operation)
        if self._has_peers and self._followers.get(self._path) != known:
            self._follow(operation, flats)
        self._add(operation, known)

    def _hash(self, operation: Operation) -> int:
        return self._hashes.setdefault(operation, zlib.crc32(repr(tuple(operation)).encode()))

    def _add(self, operation: Operation, known: int) -> None:
        self._path = 0 if operation.kind == FINAL_REDUCE else (self._path * _LONG + known + 1) & _MASK
        self._context = (self._context * _SHORT + known + 1) & _MASK
        self._count += 1
        self._last.append(operation)

    def _follow(self, operation: Operation, flats: Sequence[FlatParam]) -> None:
        """Ask all ranks unless they expect this operation, and expect it the next time."""
        usual = self._followers.get(self._path, self._followers.get(self._context))
        if not (self._goes_on(operation) if usual is None else usual == self._hash(operation)):
            self._ask(operation, flats)
        if len(self._followers) > _KNOWN:
            self._followers.clear()
        self._followers[self._path] = self._followers[self._context] = self._hash(operation)

    def _goes_on(self, operation: Operation) -> bool:
        """Return whether the last operations went on by a unit, perhaps in turns of two or three, and this one does."""
        for period in range(1, _SHOWN // 2 + 1):
            before = list(self._last)[-2 * period :: period]
            if len(before) == 2 and (step := before[1].next_number(before[0])) is not None:
                return operation.next_number(before[1]) == step
        return False

    def _ask(self, operation: Operation, flats: Sequence[FlatParam]) -> None:
        """Ask all ranks for their next operation: one number has how many have answered, and the sum of the hashes."""
        key = f"{self._key}/{next(self._questions)}"
        own = zlib.crc32(f"{self._hash(operation)} {self._path}".encode())
        try:
            answers = self._store.add(key, (1 << 48) + own)
            if answers >> 48 == self._world:
                verdict = _AGREED if answers & ((1 << 48) - 1) == self._world * own else _DIFFERENT
                self._store.set(f"{key}/over", verdict)
                self._forget(self._answered)
            else:
                until, pause = time.monotonic() + _PROMPT, 1e-4
                while self._world <= _FEW and time.monotonic() < until and not self._store.check([f"{key}/over"]):
                    time.sleep(pause)
                    pause *= 2
                verdict = self._store.get(f"{key}/over").decode()
        except RuntimeError as error:
            raise self.explain(error, self._described(operation, flats)) from error
        if verdict != _AGREED:
            differ = RuntimeError("ranks were about to issue different ones")
            raise self.explain(differ, self._described(operation, flats))
        self._answered = key

    def _forget(self, key: str) -> None:
        """Remove what ranks have agreed on: all of them have read it, for they have answered the next question."""
        with suppress(RuntimeError):  # not all stores can
            for each in (key, f"{key}/over") if key else ():
                self._store.delete_key(each)

    def _described(self, operation: Operation, flats: Sequence[FlatParam]) -> str:
        frozen = [p.spec.name for flat in flats for p in flat.params if not p.parameter.requires_grad]
        factors = sorted(set(operation.factors) - {self._world})
        return (
            f"; next: {operation.kind} {operation.name}"
            + (f" without {', '.join(frozen[:_SHOWN])}, frozen ({len(frozen)} in all)" if frozen else "")
            + (f", divided by {factors}" if factors else "")
        )

    def explain(self, error: RuntimeError, following: str = "") -> RuntimeError:
        """Return the failure of a collective, with what the other ranks were doing, and this one was about to do."""
        last = ", ".join(f"{each.kind} {each.name}" for each in self._last)
        mine = f"{self._count} operations, the last: {last}{following}"
        reason, table = exchange_over_store(self._store, f"{self._key}/last", self._rank, self._world, mine)
        return RuntimeError(
            f"an operation failed: {reason}: the same forwards and backwards, requires_grad and "
            "set_requires_gradient_sync (parameters inside a unit may go unused).\n"
            f"What ranks did last:\n{table}\n{error}"
        )
