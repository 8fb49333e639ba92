"""Replicas that train by themselves and meet rarely: DiLoCo, also in fragments or by sparse messages (SparseLoCo).

Each replica makes H steps of its own optimizer from the outer weights θ, to θᵢ. Then

    Δᵢ = θ − θᵢ            the outer gradient of replica i
    Δ  = mean of Δᵢ        over replicas, exact or of encoded messages
    m  ← μ m + Δ           outer Nesterov momentum
    θ  ← θ − lr (Δ + μ m)
    θᵢ ← θ

``fragments``: parameters are divided into P runs, each of which has an outer step every H steps, H/P steps after the
one before it: a P-th of the bytes at a time. ``delay``: the sum of a fragment is on its way while the next τ steps are
made, and then θᵢ ← α θᵢ + (1 − α) θ.

``codec``: a message holds C(β eᵢ + Δᵢ) and eᵢ is what it loses. SparseLoCo is ``codec="topk2bit"``, lr = 1, μ = 0.

Source: DiLoCo (Douillard et al., 2023, algorithm 1); Streaming DiLoCo (Douillard et al., 2025, algorithm 2);
SparseLoCo (Sarfi et al., 2025, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import BLOCK, codec_of
from yafsdp_cc.compression.codecs import TopK2Bit
from yafsdp_cc.compression.error_feedback import Residual
from yafsdp_cc.engine.cuda_streams import comm_stream
from yafsdp_cc.ranks.mesh import writable
from yafsdp_cc.replicas.membership import AllReplicas, Task
from yafsdp_cc.replicas.optimizer_state import StateValue, mean_state, write_state
from yafsdp_cc.replicas.sync import (
    LocalBuffer,
    ReplicaSync,
    StepCount,
    held_of,
    local_of,
    read_grads,
    set_grad,
    sum_over,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.engine.streams import CommHandle
    from yafsdp_cc.replicas.membership import Membership, Round

_SPARSE_BLOCK = 4096
_MOMENTUM, _RESIDUAL, _START = "outer_momentum", "outer_residual", "outer_start"
"""Names of an ``Outer``'s state in checkpoints; checkpoints of earlier versions need these names unchanged."""


class Outer(ReplicaSync):
    """Let replicas train by themselves for some steps, and then make an outer step with their mean change (DiLoCo).

    The training loop is unchanged: ``loss.backward()``, ``optimizer.step()``. The optimizer's state is each replica's
    own. ``synchronize_replicas`` and ``save`` end the round at once: all replicas then have the outer weights, and the
    mean of the optimizers' states, so that a checkpoint is like that of ordinary training, for any number of replicas.

    Buffers (4 bytes for each element of a shard): outer weights, momentum and gradient; a codec's residual; the sum in
    synchronous steps, and of a ``membership`` without codec. Then a codec's messages. With ``membership``: on the host.

    Args:
        every: number of steps in a round.
        lr: learning rate of the outer step.
        momentum: Nesterov momentum of the outer step; 0: none.
        sync_steps: number of synchronous steps, with sums of gradients, at the beginning and after loading weights of
            other training; outer momentum hurts without them.
        fragments: number of runs of parameters that are exchanged one at a time.
        delay: number of steps that a replica makes during an exchange.
        mix: share of a replica's own weights in the result of an exchange with a ``delay``, 0 to 1.
        codec: codec of the outer gradients, with error feedback: ``"topk2bit"``, ``"int4"``, ...; None: exact sums in
            fp32.
        decay: β, share of the residual that the next message carries.
        membership: for replicas that come and go; None: the replicas are those of the mesh, and one that fails ends
            all.
    """

    writes_weights = False

    def __init__(
        self,
        every: int = 30,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        sync_steps: int = 0,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.5,
        codec: str | None = None,
        decay: float = 0.95,
        membership: Membership | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= fragments <= every:
            raise ValueError(f"fragments={fragments} is to be from 1 to the steps of a round, every={every}")
        if not 0 <= delay <= every // fragments:
            raise ValueError(
                f"delay={delay}, but one of {fragments} fragments is exchanged every {every // fragments} steps: an "
                "exchange has to arrive before the next one starts"
            )
        if not (lr > 0 and 0 <= momentum < 1 and 0 <= mix <= 1 and 0 <= decay <= 1 and sync_steps >= 0):
            raise ValueError(
                f"lr={lr}, momentum={momentum}, mix={mix}, decay={decay}, sync_steps={sync_steps}: lr is to be "
                "positive, momentum from 0 to less than 1, mix and decay from 0 to 1, sync_steps not negative"
            )
        if membership is not None and sync_steps:
            raise ValueError(f"sync_steps={sync_steps}: replicas that come and go cannot sum gradients in every step")
        self.every, self.lr, self.momentum, self.sync_steps = every, lr, momentum, sync_steps
        self.fragments, self.delay, self.mix, self.codec, self.decay = fragments, delay, mix, codec, decay
        self.membership = membership
        block = _SPARSE_BLOCK if codec == TopK2Bit.name else BLOCK
        self._codec = None if codec is None else codec_of(codec, block)
        self._step = 0
        self._left = sync_steps
        """Number of synchronous steps to come."""
        self._total: LocalBuffer | None = None
        """Sum of the gradients over replicas in synchronous steps; None before and after these steps."""
        self._moved = False
        """Whether this replica has made local steps since the last ``finish``."""
        self._made = 0
        """Number of local steps so far."""
        self._pending: _Exchange | None = None
        self._arrives = 0
        """Number of steps made, ``_made``, at which the exchange under way is completed."""

    def connect(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        if self.membership is None:
            super().connect(model, mesh)
        elif mesh is not None:
            raise ValueError("an Outer with a membership finds its replicas by itself: pass mesh=None")
        else:
            alike = {"lr": self.lr, "momentum": self.momentum, "fragments": self.fragments, "codec": self.codec}
            self.membership.join([*(f"{name}={value!r}" for name, value in alike.items()), *self.described(model)])
        self._model, self._joined = model, (*self._frozen.items(), *model.named_buffers())

    def prepare(self) -> None:
        place = self.device if self.membership is None else torch.device("cpu")
        self._rounds: AllReplicas | Membership = self.membership or AllReplicas(self.comm)
        self._stream = comm_stream(place)
        self._count = None if self.membership else StepCount(self.comm, self._stream, len(self.parameters))
        """Comparison of the replicas' numbers of steps; None if these may differ."""
        is_repeated = self.membership is not None
        runs = _runs(list(self.parameters.values()), self.fragments)
        self._fragments = [_Fragment(each, place, self._codec, self.momentum > 0, is_repeated) for each in runs]
        count = len(self._fragments)
        self._due = {(n + 1) * self.every // count: n for n in range(count)}
        if self.membership is not None:
            self._exchange(Task((), False))  # a newcomer takes weights, and contributes from the next round on

    def planned_bytes(self) -> int:
        if self._codec is None:
            total = sum(self.comm.all_reduce_bytes(each.outer.nbytes) for each in self._fragments)
        else:
            total = (self.comm.world - 1) * sum(self._codec.message_bytes(each.numel) for each in self._fragments)
        return -(-total // self.every)

    def memory(self) -> Mapping[str, int]:
        def of(name: str) -> int:
            found = (getattr(each, name) for each in self._fragments)
            return sum(each.nbytes for each in found if each is not None)

        rows = {"outer weights": of("outer"), "outer momentum": of("momentum"), "outer gradients": of("delta")}
        rows |= {"lost by messages": of("residual"), "messages": (1 + self.comm.world) * of("message")}
        rows["sums of outer gradients"] = of("total")
        rows["counts of steps"] = 0 if self._count is None else self._count.nbytes
        if self._left:
            rows["sums of the synchronous start"] = 4 * sum(each.numel() for each in self.locals())
        return {name: size for name, size in rows.items() if size}

    # Around a step -------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        if not (self._left or self._moved or self.membership):
            for each in self._fragments:  # the program may have loaded weights since the last round
                each.load()
        if not self._left:
            return
        members = list(self.parameters.values())
        total = self._total = self._total or LocalBuffer(self.locals())
        read_grads([each.grad for each in members], total.views)
        self._start_count([each.grad is not None for each in members])
        every = self._check_count()
        sum_over(self.comm, total.data)
        for parameter, view, used in zip(members, total.views, every, strict=True):
            set_grad(parameter, view if used else None, self.comm.world)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._left:
            self._left -= 1
            self._begin()
            return
        self._step += 1
        self._moved = True
        self._made += 1
        for each in self._fragments:
            each.steps += 1
        if self._pending is not None and self._made >= self._arrives:
            self._complete(self.mix)
        if (due := self._due.get(self._step)) is not None:
            self._start(Task((due,), False))
            if not self.delay:
                self._complete(0.0)
        self._step %= self.every
        self.remember_weights()

    def _begin(self) -> None:
        self._step, self._moved = 0, False
        for each in self._fragments:
            each.load()
            each.steps = 0
        if not self._left:
            self._total = None

    # Exchanges -----------------------------------------------------------------------------------------------------

    def _exchange(self, task: Task) -> None:
        self._start(task)
        self._complete(0.0)

    def _start(self, task: Task) -> None:
        for n in task.fragments:
            self._fragments[n].find_gradient(self.decay)
        self._arrives = self._made + self.delay
        self._start_count()
        self._issue(task)

    def _start_count(self, used: Sequence[bool] = ()) -> None:
        """Start to compare the replicas' numbers of steps, by one collective of the same size wherever replicas meet.

        Args:
            used: in a synchronous step, whether each parameter has a gradient.
        """
        if self._count is not None:
            self._count.start(self._made + self.sync_steps - self._left + bool(used), used)

    def _check_count(self) -> list[bool]:
        """Raise if replicas' numbers of steps differ; return whether each parameter has a gradient on any replica."""
        return [] if self._count is None else self._count.used()

    def _issue(self, task: Task) -> None:
        """Open a round for ``task``, which fixes its members, and start its exchange."""
        current = self._rounds.open(task)
        self.comm = current.comm
        exchange = self._pending = _Exchange(current, self._stream.handle())
        if any(n >= len(self._fragments) for n in current.task.fragments):
            raise ValueError(f"a round of fragments {current.task.fragments}: this replica has {len(self._fragments)}")
        if not current.contributes:
            self._take_position(current.task)

        def issue(async_op: bool) -> list[Any]:
            works: list[Any] = []
            if len(current.contributors) < current.comm.world:  # replicas that contribute nothing receive weights
                works += [current.comm.group.broadcast(each, current.source) for each in self._transferred()]
            for n in current.task.fragments:
                works += self._send(exchange, n, async_op)
            return works

        self._stream.wait_for_caller()
        try:
            self._stream.issue(exchange.handle, issue)
        except RuntimeError as error:
            exchange.error = error

    def _send(self, exchange: _Exchange, n: int, async_op: bool) -> Sequence[Any]:
        fragment, comm = self._fragments[n], exchange.round.comm
        contributes = exchange.round.contributes
        if fragment.message is None:
            total = fragment.delta.data
            if fragment.total is not None:  # an exchange may fail and be repeated, so the outer gradient is kept
                total = fragment.total.data
                total.copy_(fragment.delta.data) if contributes else total.zero_()
            exchange.buffers[n] = total
            return comm.all_reduce(total, async_op)
        exchange.buffers[n] = messages = fragment.message.new_zeros(comm.world, fragment.message.shape[1])
        own = messages.narrow(0, comm.rank, 1)
        if contributes:
            own.copy_(fragment.message)
        return comm.all_gather(messages.view(-1), own.view(-1), async_op)

    def _complete(self, mix: float) -> None:
        """Wait for the exchange under way, and make the outer step."""
        self._check_count()
        while True:
            exchange = self._pending
            assert exchange is not None
            residuals: list[Tensor] = []
            state: list[StateValue] = []
            if exchange.error is None:
                try:
                    exchange.handle.wait()
                    if (current := exchange.round).task.ends:
                        residuals = self._mean_residuals(current)
                        states = {} if self.optimizer is None or not current.contributes else self.optimizer.state
                        state = mean_state(self.parameters, states, current.comm, current.names)
                except RuntimeError as error:
                    exchange.error = error
            if self._rounds.close(exchange.error):
                break
            self._issue(exchange.round.task if exchange.round.contributes else Task((), False))
        self._pending = None
        current = exchange.round
        for n in current.task.fragments if current.contributors else ():
            fragment = self._fragments[n]
            delta = fragment.delta.data
            if self._codec is None:
                torch.div(exchange.buffers[n], len(current.contributors), out=delta)
            else:
                delta.zero_()
                for sender in current.contributors:  # decoding all at once would need a buffer for each message
                    message = exchange.buffers[n].narrow(0, sender, 1)
                    error_feedback.decode_sum(self._codec, message, fragment.numel, delta, 0, delta)
                fragment.delta.zero_padding()
                delta.div_(len(current.contributors))
            fragment.step(self.lr, self.momentum)
            if current.contributes:
                fragment.adopt(mix)
        if not current.contributes:
            for fragment in self._fragments:
                fragment.adopt()
                fragment.steps = 0
                if fragment.residual is not None:
                    fragment.residual.clear()
            for local, taken in zip(self._untrained(), self._staged, strict=True):
                writable(local).copy_(taken.view(local.dtype).view(local.shape))
        if self.optimizer is not None:
            write_state(self.parameters, self.optimizer, state)
        for fragment, mean in zip(self._fragments, residuals, strict=False):
            if fragment.residual is not None:
                fragment.residual.values.copy_(mean)

    def _transferred(self) -> list[Tensor]:
        """Return the tensors that a newcomer receives: outer weights and momentum, and untrained tensors as bytes."""
        copies = [each.resolve_conj().resolve_neg().to("cpu", copy=True).contiguous() for each in self._untrained()]
        self._staged = [each.view(-1).view(torch.uint8) for each in copies]
        found = [each.outer.data for each in self._fragments]
        found += [each.momentum.data for each in self._fragments if each.momentum is not None]
        return [*found, *(each for each in self._staged if each.numel())]

    def _untrained(self) -> list[Tensor]:
        """Return the frozen parameters and buffers that existed when this replica joined, in their shapes of then.

        Of a buffer that a forward assigned anew, return the new tensor if alike, but no cache that it made or grew.
        """
        present: dict[str, Tensor] = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        found = []
        for name, joined in self._joined:
            old, new = held_of(joined), held_of(present.get(name, joined))
            found.append(new if (new.shape, new.dtype, new.layout) == (old.shape, old.dtype, old.layout) else old)
        return found

    def _take_position(self, task: Task) -> None:
        """Set ``_step``, the step within a round, to that of the replicas whose weights this replica takes."""
        self._step = 0
        if task.fragments and not task.ends:
            self._step = next(step for step, n in self._due.items() if n == task.fragments[0]) % self.every

    # Between steps -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        if self._moved:
            self.refuse_changes(
                "after a step amid a round, of whose end it is a part now, as of a step of this replica", warns=True
            )
        if self._pending is not None:
            self._complete(self.mix)
        self._start_count()
        self._check_count()
        if not self._moved:
            return
        moved = tuple(n for n, each in enumerate(self._fragments) if each.steps)
        self._exchange(Task(moved, True))
        for each in self._fragments:
            each.adopt()
        self._begin()  # the next round starts from the parameters: outer weights in the parameters' dtype

    def _mean_residuals(self, current: Round) -> list[Tensor]:
        """Return the mean over replicas of each fragment's residual. A collective."""
        found = []
        for residual in (each.residual for each in self._fragments if each.residual is not None):
            mean = residual.values.clone() if current.contributes else torch.zeros_like(residual.values)
            sum_over(current.comm, mean)
            found.append(mean.div_(len(current.contributors)))
        return found

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        found = {} if self._left else self._outer_state()
        if self.sync_steps and not found:  # else a load could not tell how many synchronous steps were made
            done = float(self.sync_steps - self._left)
            found[_START] = [torch.full_like(each, done, dtype=torch.float32) for each in self.locals()]
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        if self._pending is not None:  # end the exchange in flight without applying it: it is about the old weights
            if self._count is not None:
                self._count.wait()
            self._pending.handle.wait()
            self._rounds.close(None)
            self._pending = None
        done = [int(each.view(-1)[0]) for each in state.get(_START, ()) if each.numel()]
        is_over = _MOMENTUM in state or _RESIDUAL in state  # only checkpoints of an ``Outer`` have these
        self._left = 0 if is_over else max(0, self.sync_steps - max(done, default=0))
        self._begin()
        for name, views in self._outer_state().items():
            torch._foreach_zero_(views)
            for view, values in zip(views, state.get(name, ()), strict=False):
                view.copy_(values)

    def _outer_state(self) -> dict[str, list[Tensor]]:
        """Return views of outer momentum and residual, as far as they exist, by their names in checkpoints."""
        found: dict[str, list[Tensor]] = {}
        for each in self._fragments:
            if each.momentum is not None:
                found.setdefault(_MOMENTUM, []).extend(each.momentum.views)
            if each.residual is not None:
                found.setdefault(_RESIDUAL, []).extend(each.outer.split(each.residual.values[0]))
        return found


@dataclass
class _Exchange:
    """An outer exchange that was started and has not been applied."""

    round: Round
    handle: CommHandle
    buffers: dict[int, Tensor] = field(default_factory=dict)
    """Buffers of the exchange by index of the fragment: the sum, or the messages of all members."""
    error: RuntimeError | None = None


class _Fragment:
    """Parameters that are exchanged together.

    Args:
        place: device of the buffers.
        is_repeated: whether an exchange may fail and be repeated.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        place: torch.device,
        codec: Codec | None,
        has_momentum: bool,
        is_repeated: bool,
    ) -> None:
        self.parameters, self._codec = parameters, codec
        block = 1 if codec is None else codec.block
        like = self.weights
        # Each parameter begins with a block of its own: a parameter that all ranks of a replica hold must be encoded
        # alike on these ranks.
        self.outer, self.delta = LocalBuffer(like, block, place), LocalBuffer(like, block, place)
        self.numel = self.outer.data.numel()
        self.momentum = LocalBuffer(like, block, place) if has_momentum else None
        self.total = LocalBuffer(like, 1, place) if is_repeated and codec is None else None
        """Buffer of the sum over replicas, if ``delta`` must stay unchanged for a repeated exchange; else None."""
        self.message: Tensor | None = None
        self.residual: Residual | None = None
        if codec is not None:
            self._counts = self.delta.counts()
            self.message = torch.zeros(1, codec.message_bytes(self.numel), dtype=torch.uint8, device=place)
            self.residual = Residual.zeros(1, self.numel, torch.float32, block, place)
        self.steps = 0
        """Number of local steps since the fragment's last exchange."""
        self.load()

    @property
    def weights(self) -> list[Tensor]:
        return [local_of(each) for each in self.parameters]

    def load(self) -> None:
        """Copy the parameters' present weights to the outer weights."""
        torch._foreach_copy_(self.outer.views, self.weights)

    def find_gradient(self, decay: float) -> None:
        """Write Δ = θ − θᵢ, outer minus present weights, to ``delta``, and encode Δ + ``decay`` · residual.

        θ is rounded to the weights' dtype, as when this replica began from it: the rounding error is no movement.
        """
        torch._foreach_copy_(self.delta.views, self.weights)
        for outer, delta, weights in zip(self.outer.views, self.delta.views, self.weights, strict=True):
            torch.sub(outer.to(weights.dtype), delta, out=delta)
        self.steps = 0
        if self._codec is not None and self.message is not None and self.residual is not None:
            self.residual.multiply(decay)
            row = self.delta.data.unsqueeze(0)
            error_feedback.encode(self._codec, row, self.message, counts=self._counts, residual=self.residual)

    def step(self, lr: float, momentum: float) -> None:
        """Make the outer step with the mean outer gradient Δ in ``delta``."""
        delta = self.delta.data
        if self.momentum is not None:
            self.momentum.data.mul_(momentum).add_(delta)
            delta.add_(self.momentum.data, alpha=momentum)
        self.outer.data.sub_(delta, alpha=lr)

    def adopt(self, mix: float = 0.0) -> None:
        """Set the weights to (1 - ``mix``) · outer weights + ``mix`` · present weights."""
        outer, weights = self.outer.views, self.weights
        if mix:
            own = [each.to(device=found.device, dtype=found.dtype) for each, found in zip(weights, outer, strict=True)]
            outer = list(torch._foreach_lerp(outer, own, mix))
        torch._foreach_copy_(weights, outer)


def _runs(parameters: Sequence[nn.Parameter], count: int) -> Iterator[list[nn.Parameter]]:
    """Yield ``count`` runs of adjacent parameters with about equally many elements; fewer if some are too large."""
    sizes = [each.numel() for each in parameters]
    middles = [after - size / 2 for after, size in zip(accumulate(sizes), sizes, strict=True)]
    places = [int(count * middle / max(sum(sizes), 1)) for middle in middles]
    for _, run in groupby(zip(places, parameters, strict=True), key=lambda each: each[0]):
        yield [parameter for _, parameter in run]
