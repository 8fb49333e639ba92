"""Sums over replicas that are one step late, and weights predicted from each replica's own gradient meanwhile.

    step t          forward and backward at predicted weights ──► own gradient g
    network                 sum of step t-1 ─────────────────► G        sum of step t ────────── ...
    optimizer                                 weights ← step(weights, G);  start the sum of g
                                              predicted ← step(weights, g), of which only the weights are kept

The sum of a step may take until the end of the next step, and sends as many bytes as in synchronous training. Replicas
all commit the same sums to the same weights, and so keep the same optimizer state. With one replica G is g, and
training is synchronous but for the last gradient, which ``finish`` commits.

``half_batches`` predicts from the sum of one half of a batch while that of the other half is on its way, so that all
replicas predict the same weights. A step of the optimizer is two calls, A and B:

    call A   gradient a of step t at predicted weights; wait for the sum GB of step t-1;  start the sum of a
             weights ← step(weights, (GA + GB) / 2), of step t-1: shown
    call B   gradient b of step t at weights;           wait for the sum GA of step t;    start the sum of b
             predicted ← step(weights, GA): shown

A sum may take until the end of the next half batch, and a step sends twice the bytes.

Source: OD-SGD (Xu et al., 2020, section 3: local update with the own gradient while the global one is on its way), here
with any optimizer, shards and encoded sums. ACCO: Accumulate While You Communicate (Nabli et al., 2024, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import BLOCK, codec_of
from yafsdp_cc.compression.error_feedback import Residual
from yafsdp_cc.engine.cuda_streams import comm_stream
from yafsdp_cc.replicas.sync import (
    LocalBuffer,
    ReplicaSync,
    StepCount,
    local_of,
    read_grads,
    runs_of,
    set_grad,
    step_on,
    sum_over,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from yafsdp_cc.engine.communicator import Works

_RESIDUAL = "residual"


@dataclass
class _Step:
    """A step of the optimizer whose sum over replicas is in flight."""

    used: Sequence[bool]
    """Whether each parameter has a gradient on this replica; once the sum has arrived, on any replica."""
    settings: list[dict[str, Any]]
    """Settings of the optimizer's parameter groups when the gradients were made."""


class Overlap(ReplicaSync):
    """Sum gradients over replicas during the next step, which computes at predicted weights (local prediction).

    The loop stays as it is: ``loss.backward()``, ``optimizer.step()``. ``.grad`` is the replica's own mean gradient,
    which ``clip_grad_norm_`` clips. Between steps parameters have predicted values. ``synchronize_replicas``, ``save``
    and ``state_dict()`` of model and optimizer first wait for the sum in flight and commit it.

    Buffers, by element of a shard: sum, own gradient, a codec's residual (4 bytes each), committed weights; messages.

    With ``half_batches`` call ``backward`` and ``optimizer.step()`` once for each half of a batch; a learning rate
    scheduler then counts halves, too. Of a step's two learning rates the one of its second half counts. If
    ``synchronize_replicas`` or ``state_dict()`` is called after the first half of a step, that half is committed as a
    step of its own, and the next call is again a first half. Give parameters that ``shard`` ignores another optimizer.

    Args:
        codec: codec of the sums (``"int8"``, ``"int4"``, ``"onebit"``, ...), with error feedback; None: exact sums in
            fp32.
        half_batches: predict from the sum of half a batch, for links with room for two sums per step.
    """

    finishes_alone = True

    def __init__(self, codec: str | None = None, half_batches: bool = False) -> None:
        super().__init__()
        self.codec, self.half_batches = codec, half_batches
        self._codec = None if codec is None else codec_of(codec, BLOCK)
        self._pending: _Step | None = None
        self._first: _Step | None = None
        """First half of a step, with its sum in ``_kept``, while the sum of the second half is in flight; else None."""
        self._steps = 0
        # State that ``before_step`` leaves for ``after_step``
        self._grads: list[Tensor | None] = []
        self._settings: list[dict[str, Any]] = []
        self._given: Sequence[Mapping[str, Any]] = []
        """Settings of parameter groups during the optimizer's own step."""
        self._is_second = False

    def prepare(self) -> None:
        like = self.locals()
        self._total = LocalBuffer(like, 1 if self._codec is None else BLOCK)
        self._stream = comm_stream(self.device)
        self._handle = self._stream.handle()
        others = ", and with half_batches=True state_dict() between the same two steps"
        self._count = StepCount(self.comm, self._stream, len(like), others)
        if self._codec is not None:
            numel = self._total.data.numel()
            size = self._codec.message_bytes(numel)
            self._messages = torch.zeros(self.comm.world, size, dtype=torch.uint8, device=self.device)
            self._counts = self._total.counts()
            self._residual = Residual.zeros(1, numel, torch.float32, BLOCK, self.device)
        self._kept = LocalBuffer(like, self._total.align)
        """This replica's own gradients during a step; while ``_first`` is not None, the sum of that half."""
        self._committed = [each.clone() for each in like]

    def planned_bytes(self) -> int:
        counts = self.comm.all_reduce_bytes(self._count.nbytes)
        if self._codec is None:
            return counts + self.comm.all_reduce_bytes(self._total.nbytes)
        return counts + (self.comm.world - 1) * self._messages[0].nbytes

    def memory(self) -> Mapping[str, int]:
        encoded = 0 if self._codec is None else self._messages.nbytes + self._residual.nbytes + self._counts.nbytes
        return {
            "sum over replicas": self._total.nbytes + encoded + self._count.nbytes,
            "own gradients": self._kept.nbytes,
            "committed weights": sum(each.nbytes for each in self._committed),
        }

    # Around a step -------------------------------------------------------------------------------------------------

    def check_parameters(self, optimizer: Optimizer) -> None:
        super().check_parameters(optimizer)
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is not None and parameter in self._ignored:
                raise ValueError(
                    f"'{self._ignored[parameter]}' is an ignored parameter, and Overlap makes steps one step late, "
                    "with that step's learning rate: give ignored parameters an optimizer of their own"
                )

    def before_step(self, optimizer: Optimizer) -> None:
        members = list(self.parameters.values())
        self._grads = [each.grad for each in members]
        self._settings = self._given = _settings_of(optimizer)
        own = _Step([grad is not None for grad in self._grads], [_copied(group) for group in self._settings])
        arrived, self._pending = self._pending, own
        if arrived is not None:
            self._refuse_changes()
            self._wait(arrived)
        total, kept = self._total, self._kept
        self._is_second = self.half_batches and arrived is not None and self._first is None
        if self._is_second:
            self._first = arrived
            kept.data.copy_(total.data)
            read_grads(self._grads, total.views)
            self._hide()
        elif arrived is None:  # without the sum of an earlier step this one commits nothing
            read_grads(self._grads, kept.views)
            total.data.copy_(kept.data)
            self._hide()
            torch._foreach_copy_(self._committed, self.locals())
        else:
            divisor = self._join_halves(arrived)
            read_grads(self._grads, kept.views)
            self._show(arrived, divisor)
            total.data.copy_(kept.data)
            self._given = arrived.settings
            _set_settings(optimizer, arrived.settings)
        self._steps += 1
        self._count.start(self._steps, own.used)
        self._stream.issue(self._handle, self._issue, None if self._codec is None else self._decode)

    def _issue(self, async_op: bool) -> Works:
        """Start a sum over replicas. With a codec all decode equal messages in rank order, and so hold equal bits."""
        if self._codec is None:
            return self.comm.all_reduce(self._total.data, async_op)
        own = self._messages.narrow(0, self.comm.rank, 1)
        values = self._total.data.unsqueeze(0)
        error_feedback.encode(self._codec, values, own, counts=self._counts, residual=self._residual)
        return self.comm.all_gather(self._messages.view(-1), own.view(-1), async_op)

    def _decode(self) -> None:
        assert self._codec is not None
        total = self._total.data
        error_feedback.decode_sum(self._codec, self._messages, total.numel(), None, 0, total)
        self._total.zero_padding()

    def after_step(self, optimizer: Optimizer) -> None:
        _check_settings(optimizer, self._given)
        _set_settings(optimizer, self._settings)
        for parameter, grad in zip(self.parameters.values(), self._grads, strict=True):
            parameter.grad = grad
        if not self._is_second:
            torch._foreach_copy_(self._committed, self.locals())
            for grad, view in zip(self._grads, self._kept.views, strict=True):
                if grad is not None:
                    local_of(grad).copy_(view)
        if self._is_second or not self.half_batches:
            self._predict(optimizer)
        self._grads, self._settings, self._given = [], [], []
        self.remember_weights()

    def _refuse_changes(self, *, warns: bool = False) -> None:
        """Raise, or warn, if the program has changed the predicted weights, which committed ones are to overwrite."""
        when = "between two steps of an optimizer, where both hold predicted weights: the change would be lost"
        self.refuse_changes(when, warns=warns)

    def _hide(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _wait(self, step: _Step) -> None:
        """Wait for the sum of a step, and set ``step.used`` to the parameters with a gradient on any replica."""
        self._count.wait()
        if self.device.type == "cpu" or not all(step.used):  # reading counts on a GPU would wait for the network
            step.used = self._count.used()
        self._handle.wait()

    def _join_halves(self, second: _Step) -> int:
        """Add the sum of a step's first half, if there is one, to that of the second; return the mean's divisor."""
        first, self._first = self._first, None
        if first is None:
            return self.comm.world
        second.used = [one or other for one, other in zip(first.used, second.used, strict=True)]
        self._total.data.add_(self._kept.data)
        return 2 * self.comm.world

    def _show(self, step: _Step, divisor: int) -> None:
        """Put the mean of a step's gradients in ``.grad``, and the committed weights in the parameters."""
        for parameter, total, used in zip(self.parameters.values(), self._total.views, step.used, strict=True):
            set_grad(parameter, total if used else None, divisor)
        torch._foreach_copy_(self.locals(), self._committed)

    def _predict(self, optimizer: Optimizer) -> None:
        """Predict weights by a step with ``.grad`` or the sum of the first half, and restore the optimizer's state."""
        first, members = self._first, list(self.parameters.values())
        for part in runs_of(members):
            run = members[part]
            shown = [each.grad for each in run]
            if first is not None:
                for each, view, used in zip(run, self._kept.views[part], first.used[part], strict=True):
                    each.grad = None
                    set_grad(each, view if used else None, self.comm.world)
            before: dict[Tensor, Any] = {each: dict(optimizer.state[each]) for each in run if each in optimizer.state}
            tensors = [each for state in before.values() for each in state.values() if isinstance(each, Tensor)]
            kept = [(local, local.clone()) for local in map(local_of, tensors)]
            step_on(optimizer, run)
            for each, grad in zip(run, shown, strict=True):
                each.grad = grad
                optimizer.state.pop(each, None)
            optimizer.state.update(before)
            for local, values in kept:
                local.copy_(values)

    # Between steps -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        optimizer = self.optimizer
        if self._pending is not None:
            self._refuse_changes(warns=True)
        step, self._pending = self._pending, None
        if step is None or optimizer is None:
            return
        members = list(self.parameters.values())
        shown, settings = [each.grad for each in members], _settings_of(optimizer)
        self._hide()
        self._wait(step)
        if self.half_batches and self._first is None:
            # count the second half of the step as made: a replica that does make it then fails by unequal counts
            self._steps += 1
        self._show(step, self._join_halves(step))
        _set_settings(optimizer, step.settings)
        try:
            step_on(optimizer, members)
        finally:
            _set_settings(optimizer, settings)
        for parameter, grad in zip(members, shown, strict=True):
            parameter.grad = grad

    def compare_steps(self) -> None:
        self._count.start(self._steps)
        self._count.used()

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        if self._codec is None:
            return {}
        values = self._residual.values
        sum_over(self.comm, values)
        values.div_(self.comm.world)
        return {_RESIDUAL: self._total.split(values[0])}

    def load_state(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        if self._pending is not None:
            self._count.wait()
            self._handle.wait()
        self._pending = self._first = None
        if self._codec is not None:
            self._residual.clear()
            for view, values in zip(
                self._total.split(self._residual.values[0]), state.get(_RESIDUAL, ()), strict=False
            ):
                view.copy_(values)


# Optimizers --------------------------------------------------------------------------------------------------------


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, with the same tensors, which schedulers may write to."""
    return [{name: value for name, value in each.items() if name != "params"} for each in optimizer.param_groups]


def _set_settings(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Set ``settings`` in parameter groups; groups added since are unchanged."""
    for group, values in zip(optimizer.param_groups, settings, strict=False):
        group.update(values)


def _check_settings(optimizer: Optimizer, given: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ``ValueError`` if an optimizer step has changed the settings ``given``, as a predicted step would too."""
    for group, values in zip(optimizer.param_groups, given, strict=False):
        for name in (name for name, value in values.items() if group[name] is not value):
            raise ValueError(
                f"a step of {type(optimizer).__name__} writes {name!r} to its param_groups, and Overlap, "
                "which makes steps that it undoes, undoes what is in optimizer.state alone: take Outer or Gossip for it"
            )


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in settings.items()}
