"""Stochastic Gradient Push: in every step each replica gives half of its weights to one other replica; no sum runs over
all replicas.

Replica i of n has biased weights x and a push-sum weight w, 1 at first. The model shows z = x / w. In step k:

    x ← x + (z after the optimizer's step - z before it)         the gradient is that at z
    keep x / 2 and w / 2, send x / 2 and w / 2 to one replica
    x ← x + x received,  w ← w + w received,  z ← x / w

What a replica sends is subtracted from its own x and w: the mixing weights P are column-stochastic, so that neither the
sum of x over replicas nor that of w changes (Σw = n, messages in flight included), and all z converge to Σx / n. The
peer in step k is 2^(k mod ⌈log₂ n⌉) ranks further (the directed exponential graph): with n a power of two, a value has
been everywhere after log₂ n steps. With ``overlap`` 1 the message of step k is waited for in step k + 1. Then a part of
x and w is always in flight, w settles near 2/3, and an update of x by the optimizer is one of z by about 1.5 times as
much.

**Encoded messages.** A message of x / 2 itself would lose as much in every step, however near replicas are. So sender
and receiver both keep an estimate h of the sender's z on each edge of the graph, and a message holds what is missing:

    m = C(z - h),  h ← h + D(m)         by both, in the same bits
    v = w / 2                           sent as it is
    sender:    x ← x - v·h,  w ← w - v
    receiver:  x ← x + v·h,  w ← w + v

The amount moved is v·h, with an error of v·(z - h), and both sides compute it to the bit: whatever the codec loses
remains with the sender, and Σx is as with exact messages. h follows z as EF21's estimates follow gradients: z, unlike
x, does not change with w, so z - h is what the last few steps have changed, and errors vanish as z comes to rest.
Replicas begin with the same weights, which are the first h.

An error ε = h - z is passed on: it moves a sender by -ε / 2 and a receiver by ε / 2. Each of the E edges of a rank is
used once in E steps, so at most E ε are added to z until the next message updates h by this and by ε itself; a codec
that loses a share ω of squares then leaves √ω (1 + E) ε. Errors die out where ω (1 + E)² < 1; a codec that loses more
is refused (int4 loses 1/61: enough for 64 replicas). So is any that loses more than 1/32: codecs of three bits and
fewer clip elements far larger than the rest, in which errors were seen to grow between two replicas.

Source: Stochastic Gradient Push for Distributed Deep Learning (Assran, Loizou, Ballas, Rabbat, 2019, algorithms 1 and
2); push-sum: Kempe et al., 2003. Differences: CHOCO-SGD (Koloskova et al., 2019, algorithm 2); here by edge, and
with push-sum weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import BLOCK, codec_of
from yafsdp_cc.compression.error_feedback import EF21, Residual, lost_share
from yafsdp_cc.engine.cuda_streams import comm_stream
from yafsdp_cc.replicas.optimizer_state import mean_state, write_state
from yafsdp_cc.replicas.sync import LocalBuffer, ReplicaSync, sum_over

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from yafsdp_cc.engine.communicator import Works
    from yafsdp_cc.engine.streams import CommHandle

_HEADER_TAG, _DATA_TAG = 3, 4
_NO_STEP = -1
"""Step number in the header from a replica that makes no more steps before ``finish`` sums over all replicas."""
_COUNTED = 1 << 20
"""Number modulo which headers of messages, which are fp32, hold the number of the step."""
_ROUNDING = 1e-3
"""Limit for rounding errors of the mean push-sum weight, 1. A message lost among up to 250 replicas exceeds it."""
_MOST_LOST = 1 / 32
"""Largest share of a message, as ``lost_share`` measures it, that a codec may lose."""


class Gossip(ReplicaSync):
    """Let each replica exchange weights with one other per step, instead of a sum over all (Stochastic Gradient Push).

    The loop stays as it is: ``loss.backward()``, ``optimizer.step()``. Replicas have weights and optimizer states of
    their own, near each other; ``.grad`` is the replica's own mean gradient. ``synchronize_replicas`` and ``save`` give
    all of them the exact mean of the weights and of the optimizer's state: before them a state dict holds only the
    replica's own. Every replica must call ``optimizer.step()`` equally often: a slow one delays the one that it sends
    to, in the same step with ``overlap=0`` and in the next one with ``overlap=1``.

    Buffers take, for each element of a shard: with exact messages 12 bytes (biased weights, a sent and a received
    message); with a codec 8 (biased weights, scratch), 8 for each edge of the rank (⌈log₂ n⌉; ring: 1), and messages.

    Args:
        graph: who sends to whom: ``"exponential"``; or ``"ring"``, always to the next replica, if links to replicas
            further away are slow. Around a ring of n replicas a value takes n - 1 steps.
        overlap: steps after which a message is waited for: 0, within its step; 1, in the next one.
        codec: codec of messages (``"int8"``, ``"int4"``, ...), which hold differences; None: exact, in fp32.

    Raises:
        ValueError: ``graph``, ``overlap`` or ``codec`` is unknown, or the codec loses too much for so many replicas.
    """

    def __init__(
        self, graph: Literal["exponential", "ring"] = "exponential", overlap: int = 0, codec: str | None = None
    ) -> None:
        super().__init__()
        if graph not in _GRAPHS:
            raise ValueError(f"there is no graph {graph!r}, only {', '.join(_GRAPHS)}")
        if overlap not in (0, 1):
            raise ValueError(f"overlap={overlap}: 0 waits for messages in their step, 1 in the next one")
        if codec is not None:
            codec_of(codec, BLOCK)
        self.graph, self.overlap, self.codec = graph, overlap, codec
        self._steps = 0
        """Number of steps since all replicas had the same weights."""
        self._is_in_flight = False

    def prepare(self) -> None:
        like = self.locals()
        self._biased = LocalBuffer(like, 1 if self.codec is None else BLOCK)
        """Biased weights x of push-sum, fp32."""
        self._push_weight = torch.ones((), dtype=torch.float32, device=self.device)
        """Push-sum weight w."""
        self._distances = _GRAPHS[self.graph](self.comm.world)
        edges = len(self._distances)
        most = min(_MOST_LOST, (1 + edges) ** -2)
        if self.codec is not None and (lost := lost_share(self.codec, BLOCK)) >= most:
            raise ValueError(
                f"codec={self.codec!r} loses {lost:.1%} of what a message should hold, and errors of more than "
                f"{most:.1%} grow among {self.comm.world} replicas: take int4 or int8"
            )
        self._minus_sent: list[Residual] = []
        """Minus the estimate h that each receiving peer has of this rank's weights: EF21 residuals; empty if exact."""
        self._of_source: list[Tensor] = []
        """Estimate h of the weights of each peer that sends to this rank; empty if exact."""
        message = torch.zeros_like(self._biased.data)
        numel, self._codec = message.numel(), None if self.codec is None else codec_of(self.codec, BLOCK)
        if self._codec is not None:
            self._scratch, self._counts = torch.empty_like(message), self._biased.counts()
            self._minus_sent = [Residual.zeros(1, numel, torch.float32, BLOCK, self.device) for _ in range(edges)]
            self._of_source = [torch.zeros_like(message) for _ in range(edges)]
            message = torch.zeros(1, self._codec.message_bytes(numel), dtype=torch.uint8, device=self.device)
        self._sent, self._received = message, torch.zeros_like(message)
        self._sent_header = torch.zeros(2, dtype=torch.float32, device=self.device)
        """Header that precedes each message: number of the step, and push-sum weight."""
        self._received_header = torch.zeros_like(self._sent_header)
        self._stream = comm_stream(self.device)
        self._header_handle, self._handle = self._stream.handle(), self._stream.handle()
        self._restart()

    def planned_bytes(self) -> int:
        """Return the bytes that this rank sends per step."""
        return self._sent.nbytes + self._sent_header.nbytes if self.comm.world > 1 else 0

    def memory(self) -> Mapping[str, int]:
        estimates = sum(each.nbytes for each in self._minus_sent) + sum(each.nbytes for each in self._of_source)
        if self._codec is not None:
            estimates += self._scratch.nbytes + self._counts.nbytes
        named = {
            "biased weights": self._biased.nbytes + self._push_weight.nbytes,
            "messages to and from peers": 2 * (self._sent.nbytes + self._sent_header.nbytes),
            "estimates of peers": estimates,
        }
        return {name: nbytes for name, nbytes in named.items() if nbytes}

    # Around a step -------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        self._take_changes()

    def _take_changes(self) -> None:
        """Recompute biased weights of parameters that were changed since the last step, as by a loaded state dict."""
        if self._is_in_flight:
            self.refuse_changes(
                "while a message with older weights is on its way, which mixes into it (with overlap=0 none is)",
                warns=True,
            )
        changed = set(self.changed())
        for name, biased, local in zip(self.parameters, self._biased.views, self.locals(), strict=True):
            if name in changed:
                torch.mul(local, self._push_weight, out=biased)

    def after_step(self, optimizer: Optimizer) -> None:
        if self.comm.world == 1:
            return
        for biased, local in zip(self._biased.views, self.locals(), strict=True):
            before = (biased / self._push_weight).to(local.dtype)
            biased.add_(local).sub_(before)
        step, self._steps = self._steps, self._steps + 1
        self._exchange(step)
        self._show()

    def _exchange(self, step: int) -> None:
        """Send this step's message, and receive that of this step, or with ``overlap`` 1 that of the step before."""
        if self._is_in_flight:
            self._wait(step - 1)
        self._push(step % len(self._distances))
        self._write_header(step % _COUNTED)
        if self._is_in_flight:
            self._receive(step - 1)
        self._start(step, self._header_handle, self._sent_header, self._received_header, _HEADER_TAG)
        self._start(step, self._handle, self._sent.view(-1), self._received.view(-1), _DATA_TAG)
        self._is_in_flight = True
        if self.overlap == 0:
            self._wait(step)
            self._receive(step)

    def _start(self, step: int, handle: CommHandle, sent: Tensor, received: Tensor, tag: int) -> None:
        """Start to send to one peer and to receive from another, so that a replica waits for its sender alone: over
        NCCL in one exchange in which other ranks get no data, over gloo by point-to-point messages."""
        group, world, rank = self.comm.group, self.comm.world, self.comm.rank
        distance = self._distances[step % len(self._distances)]
        to, source = (rank + distance) % world, (rank - distance) % world

        def exchange(async_op: bool) -> Works:
            if sent.is_cpu:
                return [group.recv([received], source, tag), group.send([sent], to, tag)]
            theirs, ours = [0] * world, [0] * world
            theirs[source], ours[to] = received.numel(), sent.numel()
            options = AllToAllOptions()
            options.asyncOp = async_op
            work = group.alltoall_base(received, sent, theirs, ours, options)
            return [] if work is None else [work]

        self._stream.wait_for_caller()
        self._stream.issue(handle, exchange)

    def _write_header(self, step: int) -> None:
        self._sent_header[0] = step
        self._sent_header[1] = self._push_weight

    def _wait(self, step: int) -> None:
        """Wait until the message of a step has arrived, and this rank's own has been sent."""
        self._header_handle.wait()
        self._check_header(step % _COUNTED)
        self._handle.wait()

    def _check_header(self, step: int) -> None:
        if self.device.type != "cpu":
            return  # reading a header on a GPU would wait for the network
        if int(self._received_header[0]) != step:
            raise RuntimeError(
                f"replicas have made different numbers of steps (this one {self._steps} since they had the same "
                "weights): every replica must call optimizer.step() equally often, a GradScaler that skips a step on "
                "one of them included"
            )

    def _push(self, edge: int) -> None:
        """Move half of this rank's weights to the message, and halve ``_push_weight``, which is sent with them."""
        weight, biased = self._push_weight.mul_(0.5), self._biased.data
        if self._codec is None:
            self._sent.copy_(biased.mul_(0.5))
            return
        residual = self._minus_sent[edge]
        shown = torch.div(biased, 2 * weight, out=self._scratch).unsqueeze(0)
        error_feedback.encode(self._codec, shown, self._sent, counts=self._counts, residual=residual, recursion=EF21)
        biased.addcmul_(residual.values[0], weight)

    def _receive(self, step: int) -> None:
        """Add the message of a step to this rank's weights."""
        weight, biased = self._received_header[1], self._biased.data
        if self._codec is None:
            biased.add_(self._received)
        else:
            estimate = self._of_source[step % len(self._distances)]
            error_feedback.decode_differences(self._codec, self._received, estimate.numel(), estimate, self._scratch)
            biased.addcmul_(estimate, weight)
        self._push_weight.add_(weight)
        self._is_in_flight = False

    def _show(self) -> None:
        for biased, local in zip(self._biased.views, self.locals(), strict=True):
            local.copy_(biased / self._push_weight)
        self.remember_weights()

    # Between steps -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        if self.comm.world == 1:
            return
        self._take_changes()
        self._complete()
        totals = torch.stack([self._push_weight, torch.full_like(self._push_weight, self._steps)])
        sum_over(self.comm, totals)
        total, steps = totals.tolist()
        if steps == 0:
            return
        sum_over(self.comm, self._biased.data)
        self._push_weight.fill_(total)
        if not abs(total / self.comm.world - 1) < _ROUNDING:
            raise RuntimeError(f"push-sum weights of {self.comm.world} replicas add up to {total}: a message was lost")
        self._show()
        self._restart()
        if (optimizer := self.optimizer) is not None:
            names = [f"replica {place}" for place in range(self.comm.world)]
            write_state(self.parameters, optimizer, mean_state(self.parameters, optimizer.state, self.comm, names))

    def _complete(self) -> None:
        """Receive all messages in flight, and check that all replicas have made the same steps."""
        if self._is_in_flight:
            self._wait(self._steps - 1)
            self._receive(self._steps - 1)
        self._write_header(_NO_STEP)
        self._start(self._steps, self._header_handle, self._sent_header, self._received_header, _HEADER_TAG)
        self._header_handle.wait()
        self._check_header(_NO_STEP)

    def load_state(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        if self._is_in_flight:
            self._header_handle.wait()
            self._handle.wait()
        self._restart()

    def _restart(self) -> None:
        """Restart push-sum from the model's weights, which are the same on all replicas."""
        for biased, local in zip(self._biased.views, self.locals(), strict=True):
            biased.copy_(local)
        self._push_weight.fill_(1.0)
        for residual in self._minus_sent:
            torch.neg(self._biased.data, out=residual.values[0])
        for estimate in self._of_source:
            estimate.copy_(self._biased.data)
        self._steps, self._is_in_flight = 0, False
        self.remember_weights()


# Graphs ------------------------------------------------------------------------------------------------------------


_GRAPHS: dict[str, Callable[[int], list[int]]] = {
    "exponential": lambda world: [1 << power for power in range(max(1, (world - 1).bit_length()))],
    "ring": lambda world: [1],
}
"""For each graph, the distances in ranks to the peers of a rank, given the number of ranks."""
