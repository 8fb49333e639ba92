"""Sums over replicas that are one step late, and weights predicted from each replica's own gradient meanwhile.

    step t          forward and backward at predicted weights ──► own gradient g
    network                 sum of step t-1 ─────────────────► G        sum of step t ────────── ...
    optimizer                                 weights ← step(weights, G);  start the sum of g
                                              predicted ← step(weights, g), of which only the weights are kept

The sum of a step has until the end of the next one, at the bytes of synchronous training. All replicas commit the same
sums to the same weights, and so keep the same optimizer state. With one replica G is g, and training is synchronous but
for the last gradient, which ``finish`` commits.

Source: OD-SGD (Xu et al., 2020, section 3: local update with the own gradient while the global one is on its way), here
with any optimizer, shards and encoded sums. ``half_batches``: ACCO (Nabli et al., 2024, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yafsdp_cc.replicas.messages import BackgroundSum
from yafsdp_cc.replicas.sync import (
    LocalBuffer,
    ReplicaSync,
    elementwise,
    local_of,
    settings_of,
    step_on,
    with_settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

_COUNTER = 2
"""Flags before those of parameters: the number of the step, and its square."""
_COUNTED = 64
"""Steps are counted modulo this: sums of squares stay exact in fp32 for up to 4,096 replicas."""
_RUN = 1 << 22
"""Elements whose optimizer state is copied at a time."""


_RESIDUAL = "residual"


@dataclass
class _Step:
    """A step whose sum is on its way."""

    used: list[bool]
    """Which parameters have a gradient on this replica."""
    settings: list[dict[str, Any]]
    """Of the optimizer's parameter groups."""


class Overlap(ReplicaSync):
    """Hide the sum over replicas behind the next step (local prediction).

    The loop stays as it is: ``loss.backward()``, ``optimizer.step()``. ``.grad`` is the replica's own mean gradient,
    so ``clip_grad_norm_`` clips that. Between steps parameters have predicted values. ``synchronize_replicas``,
    ``save`` and ``state_dict()`` of model and optimizer commit what is on its way first.

    Buffers, for each element of a shard: the sum under way and the own gradient (4 bytes each), the committed weights.

    Args:
        codec: of the sums (``"int8"``, ``"int4"``, ``"onebit"``, ...), with error feedback; None: exact sums in fp32.

    Raises:
        ValueError: there is no such codec.
    """

    finishes_alone = True

    def __init__(self, codec: str | None = None) -> None:
        super().__init__()
        self.codec = codec
        self._pending: _Step | None = None
        self._versions: list[int] = []
        """Of the parameters, as they were predicted."""
        self._steps = 0

    def __repr__(self) -> str:
        return f"Overlap(codec={self.codec!r})"

    def prepare(self) -> None:
        like = self.locals()
        self._flags = torch.zeros(_COUNTER + len(like), dtype=torch.float32, device=self.device)
        self._sum = BackgroundSum(self.comm, like, self._flags, self.codec)
        self._own = LocalBuffer(like)
        self._committed = [each.clone() for each in like]

    def planned_bytes(self) -> int:
        return self._sum.sent_bytes()

    def memory(self) -> Mapping[str, int]:
        return {
            "sum over replicas": self._sum.nbytes + self._flags.nbytes,
            "own gradients": self._own.nbytes,
            "committed weights": sum(each.nbytes for each in self._committed),
        }

    def check(self, optimizer: Optimizer) -> None:
        elementwise(optimizer, "sync='overlap'")

    # Around a step -------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        members = list(self.parameters.values())
        self._grads = [each.grad for each in members]
        grads = [None if grad is None else local_of(grad) for grad in self._grads]
        for view, grad in zip(self._own.views, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)
        own = _Step([grad is not None for grad in grads], settings_of(optimizer))
        arrived, self._pending = self._pending, own
        if arrived is None:  # nothing to commit: the step finds no gradient
            for parameter in members:
                parameter.grad = None
            torch._foreach_copy_(self._committed, self.locals())
        else:
            self._check_unchanged()
            self._restore(arrived)
            for group, settings in zip(optimizer.param_groups, arrived.settings, strict=True):
                group.update(settings)
        self._start(own)

    def after_step(self, optimizer: Optimizer) -> None:
        own = self._pending
        assert own is not None
        for group, settings in zip(optimizer.param_groups, own.settings, strict=True):
            group.update(settings)
        torch._foreach_copy_(self._committed, self.locals())
        for parameter, grad, view in zip(self.parameters.values(), self._grads, self._own.views, strict=True):
            parameter.grad = grad
            if grad is not None:
                local_of(grad).copy_(view)
        self._grads = []
        self._predict(optimizer)
        self._versions = [each._version for each in self.locals()]

    def _check_unchanged(self) -> None:
        """Raise where somebody has changed the predicted weights, which the committed ones are about to overwrite."""
        for name, local, version in zip(self.parameters, self.locals(), self._versions, strict=True):
            if local._version != version:
                raise RuntimeError(
                    f"'{name}', or a parameter that shares its buffer, was changed between two steps of an optimizer, "
                    "where both hold predicted weights: the change would be lost. Call "
                    "yafsdp_cc.synchronize_replicas(model) on all ranks before it"
                )

    def _start(self, own: _Step) -> None:
        torch._foreach_copy_(self._sum.total.views, self._own.views)
        count = self._steps % _COUNTED
        self._steps += 1
        self._flags.copy_(torch.tensor([count, count * count, *own.used], dtype=torch.float32))
        self._sum.start()

    def _restore(self, step: _Step) -> None:
        """Wait for the sum of a step: have its mean in ``.grad``, and the weights that it is to be committed to."""
        self._sum.wait()
        used = self._used_somewhere(step)
        for parameter, total, is_used in zip(self.parameters.values(), self._sum.total.views, used, strict=True):
            if not is_used:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.div(total, self.comm.world, out=local_of(parameter.grad))
        torch._foreach_copy_(self.locals(), self._committed)

    def _used_somewhere(self, step: _Step) -> Sequence[bool]:
        """Return which parameters have a gradient on some replica."""
        if self.device.type != "cpu" and all(step.used):
            return step.used  # reading flags would have the host wait for the network
        total, squares, *counts = self._flags.tolist()
        if self.comm.world * squares != total * total:
            raise RuntimeError(
                f"replicas have made different numbers of steps (this one {self._steps}): the sum of gradients is of "
                "different ones. Every replica must call optimizer.step() equally often, a GradScaler that skips a "
                "step on one of them included"
            )
        return [count > 0 for count in counts]

    def _predict(self, optimizer: Optimizer) -> None:
        """Make a step with the own gradient, of which only the weights are kept."""
        for run in _runs(list(self.parameters.values())):
            before = {each: dict(optimizer.state.get(each, {})) for each in run}
            kept = {
                each: {name: local_of(value).clone() for name, value in state.items() if isinstance(value, Tensor)}
                for each, state in before.items()
            }
            step_on(optimizer, run)
            for each, state in before.items():
                for name, values in kept[each].items():
                    local_of(state[name]).copy_(values)
                if state:
                    optimizer.state[each] = state
                else:
                    optimizer.state.pop(each, None)

    # Between steps -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        step, self._pending = self._pending, None
        optimizer = None if self._optimizer is None else self._optimizer()
        if step is None or optimizer is None:
            return
        members = list(self.parameters.values())
        with torch.no_grad():
            shown = [each.grad for each in members]
            for parameter in members:
                parameter.grad = None
            self._restore(step)
            with with_settings(optimizer, step.settings):
                step_on(optimizer, members)
            for parameter, grad in zip(members, shown, strict=True):
                parameter.grad = grad

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        residual = self._sum.mean_residual()
        return {_RESIDUAL: residual} if residual else {}

    def load_state(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        if self._pending is not None:
            self._sum.wait()
            self._pending = None
        self._sum.load_residual(state.get(_RESIDUAL, ()))


def _runs(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield neighbours of about ``_RUN`` elements of this rank together."""
    run: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        run.append(parameter)
        elements += local_of(parameter).numel()
        if elements >= _RUN:
            yield run
            run, elements = [], 0
    if run:
        yield run
