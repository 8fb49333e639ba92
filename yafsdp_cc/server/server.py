"""Workers that train at their own pace: each rank is a worker, and serves its shard of the weights to all.

    worker         pull()            forward, backward    push()
                   │ weights [n/r]                        │ gradient [n/r]
    its own shard  ▼ and every other rank's               ▼ optimizer step there, whenever it arrives

Every rank has a thread for each other rank, which serves that rank's requests in order. So a rank's push comes before
its next pull at every shard; pushes of different ranks arrive in any order, which differs between shards.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from yafsdp_cc.compression.codec import BLOCK, codec_of
from yafsdp_cc.compression.error_feedback import Residual, decode, encode
from yafsdp_cc.ranks.checks import all_gather_objects, check_dense, check_settings
from yafsdp_cc.ranks.mesh import writable

if TYPE_CHECKING:
    from types import TracebackType

REQUEST, ANSWER, NOTHING = 1, 2, 3
"""Tags of messages; no message is ever sent with NOTHING."""
PUSH, PULL, CLOSE = range(3)
"""Codes of the requests that a worker sends; a gradient follows PUSH."""
_FOREVER = timedelta(days=365)
"""Time that a thread waits for a request: so long that only a broken connection ends the wait."""
_servers = itertools.count()


class ParameterServer:
    """Train a model by asynchronous SGD: every rank pulls weights and pushes gradients at its own pace.

    ::

        with yafsdp_cc.server.ParameterServer(model, torch.optim.SGD, lr=0.1, delay_compensation=0.04) as server:
            for batch in loader:
                server.pull()
                loss_of(model, batch).backward()
                server.push()

    The model stays a plain module. Each push is a step of the optimizer: with SGD, r ranks move the weights as far as
    one rank at r times the learning rate. Buffers of modules are each rank's own, and gradients must be finite. Of r
    ranks, each sends and receives 2 (r - 1) / r times the bytes of the weights per step, and holds a copy of its shard
    for each worker. The constructor and the end of the block are collectives. Training begins with the weights of rank
    0, frozen ones that are plain tensors included.

    Args:
        model: a plain model on any device whose trainable parameters have one floating dtype.
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW``.
        max_staleness: how many pushes a worker may be ahead of the slowest before ``pull`` waits; None: any number. 0
            is synchronous training, with the sum of all gradients.
        codec: codec of pushed gradients, such as "int8", with error feedback (fp32); None: exact. Pulls are exact.
        timeout: seconds to wait for the slowest rank, or for an answer.
        settings: ``delay_compensation``, ``adaptive``, ``mean_square_decay``, ``lr_lambda`` of ``ServerShard``, and
            arguments of the optimizer, such as ``lr``.

    Raises:
        ValueError: nothing to train, several dtypes, a sharded model, a sparse parameter, an argument that
            ``ServerShard`` refuses, or arguments or parameters that differ between ranks.

    Source:
        Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014, section 3. ``ServerShard``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
        *,
        max_staleness: int | None = 4,
        codec: str | None = None,
        timeout: float = 300.0,
        **settings: Any,
    ) -> None:
        self._codec = None if codec is None else codec_of(codec)
        self._params = _checked_params(model, needs_fp32=codec is not None)
        self._rank, world = dist.get_rank(), dist.get_world_size()
        self._peers = [rank for rank in range(world) if rank != self._rank]
        self._timeout = timedelta(seconds=timeout)
        self._group: Any = dist.new_group(backend="gloo", timeout=self._timeout)
        # ranks do not compare lr_lambda: functions of two processes never compare equal
        alike = {name: value for name, value in settings.items() if name != "lr_lambda"}
        alike |= {"optimizer": optimizer, "max_staleness": max_staleness, "codec": codec}
        frozen = [param for param in model.parameters() if not param.requires_grad and type(param) is nn.Parameter]
        alike["parameters"] = [
            (name, list(each.shape), each.dtype, each.requires_grad)
            for name, each in model.named_parameters()
            if each.requires_grad or type(each) is nn.Parameter
        ]
        check_settings({"arguments or parameters": alike}, [self._group], "ParameterServer()")
        self._store, self._key = _get_default_store(), f"yafsdp_cc/server/{next(_servers)}"

        count = sum(param.numel() for param in self._params)
        chunk = -(-count // (world * BLOCK)) * BLOCK
        self._weights = torch.zeros(world, chunk, dtype=self._params[0].dtype, device="cpu")
        self._grads = self._messages = torch.zeros_like(self._weights)
        self._residual: Residual | None = None
        self._padding = world * chunk - count
        _copy(self._params, self._views(self._weights))
        dist.broadcast(self._weights, 0, self._group)
        for param in frozen:
            host = param.detach().resolve_conj().resolve_neg().cpu().contiguous()
            dist.broadcast(host.view(-1).view(torch.uint8), 0, self._group)  # as bytes: gloo does not send every dtype
            writable(param).copy_(host)
        if self._codec is not None:
            starts = torch.arange(0, world * chunk, BLOCK, device="cpu").view(world, -1)
            self._counts = (count - starts).clamp(0, BLOCK).to(torch.int32)
            message = (world, self._codec.message_bytes(chunk))
            self._messages = torch.zeros(message, dtype=torch.uint8, device="cpu")
            self._residual = Residual.zeros(world, chunk, torch.float32, BLOCK, self._weights.device)

        own = self._weights[self._rank].clone()
        self.shard = ServerShard(own, world, optimizer, max_staleness=max_staleness, **settings)
        """The shard that this rank serves; only for reading."""
        self._pushes, self._has_pulled, self._is_closed, self._failure = 0, False, False, ""
        self._sends: list[tuple[int, Any]] = []
        """Sends under way, whose tensors must not be changed."""
        self._changed = threading.Condition()
        """Lock of ``shard`` and ``_failure``, notified when either changes."""
        self._threads = [threading.Thread(target=self._serve, args=(peer,), daemon=True) for peer in self._peers]
        for thread in self._threads:
            thread.start()

    # The worker ------------------------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Write the latest weights into the model, once no worker is too far behind.

        Raises:
            RuntimeError: a rank has ended, hangs, or is too far behind for too long; the message names it.
        """
        self._send(PULL)
        answers = [self._start(dist.irecv, self._weights[peer], peer, ANSWER) for peer in self._peers]
        self._weights[self._rank] = self._pulled_by(self._rank)
        self._wait(answers, 2 * self._timeout)  # a peer may have to wait for others before it answers
        self._sends.clear()  # requests are received in order: a peer that has answered has received all of them
        _copy(self._views(self._weights), self._params)
        self._has_pulled = True

    def push(self) -> None:
        """Send the gradients to the ranks that serve their shards, and clear them. A gradient of None counts as zeros.

        Raises:
            RuntimeError: there was no ``pull`` since the last push, or one of the errors of ``pull`` has occurred.
        """
        if not self._has_pulled:
            raise RuntimeError("push() without pull(): a gradient belongs to the weights that were pulled before it")
        self._grads.zero_()
        for param, view in zip(self._params, self._views(self._grads), strict=True):
            if param.grad is not None:
                view.copy_(param.grad.to_dense() if param.grad.is_sparse else param.grad)
                param.grad = None
        if self._codec is not None:
            encode(self._codec, self._grads, self._messages, counts=self._counts, residual=self._residual)
        self._send(PUSH, self._messages)
        self._update(self._rank, self._messages[self._rank])
        self._has_pulled, self._pushes = False, self._pushes + 1

    def close(self) -> None:
        """Stop pushing, serve until all ranks have stopped, and leave the final weights in the model. A collective.

        Raises:
            RuntimeError: a rank has ended, or ranks that still work have pushed nothing for too long.
        """
        self._send(CLOSE)
        with self._changed:
            self._finish(self._rank)
            while (working := self.shard.working()) and not self._failure:
                if not self._changed.wait(self._timeout.total_seconds()):
                    raise self._error(f"ranks {working} have neither pushed nor closed for {self._timeout}")
            if self._failure:
                raise self._error(self._failure)
        dist.all_gather(list(self._weights), self.shard.weights.detach(), self._group)
        _copy(self._views(self._weights), self._params)
        self._is_closed = True

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the server; after an error in the block, tell the other ranks of the error instead."""
        try:
            if kind is not None and not self._is_closed:
                self._error(f"rank {self._rank} has failed: {kind.__name__}: {error}")
            elif not self._is_closed:
                self.close()
        finally:
            for thread in self._threads:  # a thread that still waits in C++ would abort the interpreter at its exit
                thread.join(self._timeout.total_seconds())

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of a checkpoint, which includes all earlier pushes of any rank. A collective."""
        with self._at_rest():
            residual = None if self._residual is None else self._residual.values.clone()
            shard = self.shard.state_dict()
        ranks = len(self._weights)
        return {"rank": self._rank, "ranks": ranks, "pushes": self._pushes, "shard": shard, "residual": residual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's part of a checkpoint, in place of all earlier pushes; call ``pull`` next. A collective."""
        world = len(self._weights)
        if (state["rank"], state["ranks"]) != (self._rank, world):
            raise ValueError(
                f"rank {self._rank} of {world} cannot resume from the part of rank {state['rank']} of {state['ranks']}"
                ": each rank needs its own part, and as many ranks as saved"
            )
        if (state["residual"] is None) != (self._residual is None):
            raise ValueError(
                "a checkpoint saved with a codec resumes only with a codec, others only without: change codec="
            )
        with self._at_rest():
            self.shard.load_state_dict(state["shard"])
            self._pushes, self._has_pulled = state["pushes"], False
            if self._residual is not None:
                self._residual.values.copy_(state["residual"])

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Lock the shard once every earlier push of any rank is in it, until all ranks are done. A collective."""
        self._check_open()
        with self._naming():
            clocks = all_gather_objects(self._pushes, [self._group])
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._failure or self.shard.clocks == clocks, self._timeout.total_seconds()
            )
            if not done or self._failure:
                raise self._error(f"not all pushed gradients arrived within {self._timeout}")
            yield
        with self._naming():
            dist.barrier(self._group)  # else a rank that is ahead could push to a shard that is still copied

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return a view of each parameter's elements in ``flat`` [ranks, chunk], in the parameter's shape."""
        parts = flat.flatten().split([param.numel() for param in self._params] + [self._padding])
        return [part.view_as(param) for part, param in zip(parts, self._params, strict=False)]

    # Messages --------------------------------------------------------------------------------------------------------

    def _send(self, request: int, messages: Tensor | None = None) -> None:
        """Start to send a request to all other ranks, and to each its row of ``messages``.

        Nobody waits for the sends: gloo's send to a rank that ends at that time may never return, unlike a receive.
        """
        self._check_open()
        for peer in self._peers:
            for part in (torch.tensor([request], device="cpu"), *([] if messages is None else [messages[peer]])):
                self._sends.append(self._start(dist.isend, part, peer, REQUEST))

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this ParameterServer is closed: call pull, push and state_dict before its block ends")

    def _start(self, operation: Callable[..., Any], tensor: Tensor, peer: int, tag: int) -> tuple[int, Any]:
        with self._naming(peer):
            return peer, operation(tensor, peer, self._group, tag=tag)

    def _wait(self, works: Sequence[tuple[int, Any]], timeout: timedelta) -> None:
        for peer, work in works:
            with self._naming(peer):
                work.wait(timeout)

    @contextmanager
    def _naming(self, peer: int | None = None) -> Iterator[None]:
        """Replace errors of a collective, or of a message to or from ``peer``, by the first error of any rank."""
        try:
            yield
        except RuntimeError as error:
            told = f"rank {peer} has ended without close(), or does not answer: see its output"
            raise self._error(str(error) if peer is None else told) from error

    def _error(self, reason: str) -> RuntimeError:
        """Return an error with the first reason that any rank has reported, ``reason`` if this rank is the first, and
        break this rank's connections, so that the other ranks fail, too."""
        with self._changed:
            if not self._failure and self._peers:
                with suppress(RuntimeError):  # the rank that hosts the store may have ended
                    reason = self._store.compare_set(self._key, "", reason).decode()
                self._failure = reason
                self._changed.notify_all()
                # gloo breaks all connections of a group when a wait times out, which frees threads that still wait
                with suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                    work: Any = dist.irecv(nothing, self._peers[0], self._group, tag=NOTHING)
                    work.wait(timedelta(milliseconds=1))
        return RuntimeError(f"parameter server: {self._failure}")

    # The server: runs in one thread per peer, and for this rank's own pushes and pulls in the worker's thread --------

    def _serve(self, peer: int) -> None:
        request = torch.full((1,), PULL, dtype=torch.int64, device="cpu")
        message = torch.empty_like(self._messages[0])
        try:  # exceptions are noted by ``_error``: the worker's own thread raises them at its next request
            while request != CLOSE:
                self._wait([self._start(dist.irecv, request, peer, REQUEST)], _FOREVER)
                if request == PULL:
                    self._wait([self._start(dist.isend, self._pulled_by(peer), peer, ANSWER)], self._timeout)
                elif request == PUSH:
                    self._wait([self._start(dist.irecv, message, peer, REQUEST)], self._timeout)
                    self._update(peer, message)
                elif request != CLOSE:
                    raise self._error(f"rank {peer} has sent {request.item():g}, which is no request")
            self._finish(peer)
        except Exception as error:  # lr_lambda, for example, may raise: other ranks would wait until their timeout
            self._error(f"rank {self._rank} has failed: {type(error).__name__}: {error}")

    def _update(self, worker: int, message: Tensor) -> None:
        gradient = message
        if self._codec is not None:
            gradient = torch.empty_like(self._weights[0])
            decode(self._codec, message[None], gradient[None])
        with self._changed:
            self.shard.push(worker, gradient)
            self._changed.notify_all()

    def _pulled_by(self, worker: int) -> Tensor:
        """Return the weights for a worker, once no other worker is too far behind it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or not self.shard.behind(worker), self._timeout.total_seconds()
            )
            if self._failure or (behind := self.shard.behind(worker)):
                raise self._error(self._failure or f"rank {worker} has waited {self._timeout} for ranks {behind}")
            return self.shard.pull(worker)

    def _finish(self, worker: int) -> None:
        with self._changed:
            self.shard.finish(worker)
            self._changed.notify_all()


def _checked_params(model: nn.Module, *, needs_fp32: bool) -> list[nn.Parameter]:
    check_dense(model.named_parameters(), "ParameterServer")
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not named:
        raise ValueError(f"ParameterServer: {type(model).__name__} has no parameter that requires a gradient")
    dtype = torch.float32 if needs_fp32 else next(iter(named.values())).dtype
    for name, param in named.items():
        if isinstance(param, DTensor):
            raise ValueError(f"ParameterServer: '{name}' is sharded; pass the plain model, without shard()")
        if param.dtype != dtype:
            why = "a codec takes" if needs_fp32 else "others are"
            raise ValueError(f"ParameterServer: '{name}' is {param.dtype}, where {why} {dtype}: model.to({dtype})")
    return list(named.values())


@torch.no_grad()
def _copy(sources: list[Tensor] | list[nn.Parameter], destinations: list[Tensor] | list[nn.Parameter]) -> None:
    torch._foreach_copy_([*destinations], [*sources])


# A shard of the weights ---------------------------------------------------------------------------------------------

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose update of an element depends on that element alone, so that weights can be divided anywhere."""
EPSILON = 1e-7
"""ε of adaptive delay compensation."""


class ServerShard:
    """A shard of the weights that is updated by gradients of workers, computed on older weights, in the order in which
    they come. A ``ServerShard`` neither communicates nor waits.

    A gradient g that was computed on w_bak, the weights that its worker pulled last, becomes

        g + λ g ⊙ g ⊙ (w - w_bak)          λ = delay_compensation, or λ = delay_compensation / √(mean square of g + ε)

    and the optimizer makes one step with this result. With ``max_staleness=0`` a step waits for the gradients of all
    workers that still push, and is made with their sum in rank order.

    Args:
        weights: [n], of any floating dtype; updated in place.
        lr_lambda: function from the number of updates so far to a factor on the learning rate; None: 1.
        delay_compensation: λ, or λ₀ if ``adaptive``; 0: asynchronous SGD as it is.
        adaptive: whether λ₀ is divided by the root of a running mean of squared gradients.
        mean_square_decay: decay of that mean, from 0 to less than 1: m in the paper. With 0 the compensation of an
            element is λ₀ |g| (w - w_bak), which bounds the effect of a gradient much larger than those before it.

    Source:
        Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, 2017, equations 10 and 14.
        Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, 2013, section 2.
    """

    def __init__(
        self,
        weights: Tensor,
        workers: int,
        optimizer: type[torch.optim.Optimizer],
        *,
        lr_lambda: Callable[[int], float] | None = None,
        delay_compensation: float = 0.0,
        adaptive: bool = False,
        mean_square_decay: float = 0.95,
        max_staleness: int | None = None,
        **defaults: Any,
    ) -> None:
        if not issubclass(optimizer, ELEMENTWISE):
            known = ", ".join(f"torch.optim.{each.__name__}" for each in ELEMENTWISE)
            raise ValueError(f"optimizer={optimizer.__name__}: a parameter server needs an elementwise one: {known}")
        if delay_compensation < 0 or (max_staleness or 0) < 0:
            raise ValueError(f"{delay_compensation=}, {max_staleness=}: neither can be negative")
        if not 0 <= mean_square_decay < 1:
            raise ValueError(f"{mean_square_decay=}: from 0 to less than 1")
        self.weights = nn.Parameter(weights)
        self.pulled = [weights.clone() for _ in range(workers)]
        """Weights [n] that each worker pulled last: w_bak."""
        self.clocks: list[float] = [0] * workers
        """Number of pushes of each worker; infinity once it has finished."""
        self.version = 0
        self.delays: Counter[int] = Counter()
        """Histogram of delays: the number of updates between a worker's pull and the update by its next push."""
        self._optimizer = optimizer([self.weights], **defaults)
        self._rate, self._lr_lambda = self._optimizer.param_groups[0]["lr"], lr_lambda
        self._compensation, self._max_staleness = delay_compensation, max_staleness
        self._mean_square = torch.zeros_like(weights) if adaptive else None
        self._mean_square_decay = mean_square_decay
        self._pulled_version = [0] * workers
        self._held: dict[int, Tensor] = {}
        """Gradients of the round under way by worker, with ``max_staleness=0``."""

    def behind(self, worker: int) -> list[int]:
        """Return the workers that ``worker`` must wait for before it pulls."""
        if self._max_staleness is None:
            return []
        least = self.clocks[worker] - self._max_staleness
        return [other for other, clock in enumerate(self.clocks) if clock < least]

    def working(self) -> list[int]:
        """Return the workers that may push again."""
        return [worker for worker, clock in enumerate(self.clocks) if clock != math.inf]

    def pull(self, worker: int) -> Tensor:
        """Return the weights [n], unchanged until the same worker pulls again."""
        self._pulled_version[worker] = self.version
        return self.pulled[worker].copy_(self.weights.detach())

    def push(self, worker: int, gradient: Tensor) -> None:
        """Update the weights by a worker's gradient [n], which must not change until that worker pulls again."""
        self.clocks[worker] += 1
        if self._max_staleness == 0:
            self._held[worker] = gradient
            self._finish_round()
        else:
            self._update(self._compensated(worker, gradient), self.version - self._pulled_version[worker])

    def finish(self, worker: int) -> None:
        """Count ``worker`` as finished: no other worker and no round of gradients waits for it any more."""
        self.clocks[worker] = math.inf
        self._finish_round()

    def _finish_round(self) -> None:
        if self._held and self._held.keys() >= set(self.working()):
            first, *others = (self._held[worker] for worker in sorted(self._held))
            self._held = {}
            self._update(sum(others, start=first), delay=0)

    @torch.no_grad()
    def _compensated(self, worker: int, gradient: Tensor) -> Tensor:
        if not self._compensation:
            return gradient
        squared = gradient.square()
        correction = self._compensation * squared * (self.weights - self.pulled[worker])
        if self._mean_square is not None:
            self._mean_square.lerp_(squared, 1 - self._mean_square_decay)
            correction /= (self._mean_square + EPSILON).sqrt_()
        return correction.add_(gradient)

    def _update(self, gradient: Tensor, delay: int) -> None:
        if self._lr_lambda is not None:
            self._optimizer.param_groups[0]["lr"] = self._rate * self._lr_lambda(self.version)
        self.weights.grad = gradient
        self._optimizer.step()
        self.weights.grad = None
        self.version += 1
        self.delays[delay] += 1

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizer state, version and clocks, for a resumed run in which every worker pulls first."""
        state = {
            "weights": self.weights.detach(),
            "optimizer": self._optimizer.state_dict(),
            "rate": self._rate,
            "mean_square": self._mean_square,
            "version": self.version,
            "clocks": self.clocks,
            "held": self._held,
        }
        return copy.deepcopy(state)  # the next push changes the tensors in place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the ``state_dict`` of a shard of the same length, with as many workers.

        Raises:
            ValueError: the state was saved with another optimizer, or another ``adaptive``.
        """
        group = self._optimizer.param_groups[0].keys()
        if state["optimizer"]["param_groups"][0].keys() != group:
            raise ValueError(f"the checkpoint is of another optimizer than {type(self._optimizer).__name__}")
        if (state["mean_square"] is None) != (self._mean_square is None):
            saved = state["mean_square"] is not None
            raise ValueError(f"the checkpoint was made with adaptive={saved}: pass that, in place of {not saved}")
        state = copy.deepcopy(state)  # an optimizer takes the tensors of its state over, and steps change them in place
        self.weights.detach().copy_(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._rate = state.get("rate", self._rate)  # checkpoints of earlier releases have no rate
        self._mean_square, self.version = state["mean_square"], state["version"]
        self.clocks, self._held = state["clocks"], state["held"]
