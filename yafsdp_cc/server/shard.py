"""One rank's shard of the weights, which gradients of all workers update in the order in which they come.

``ServerShard`` neither communicates nor waits: ``server`` does both.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose update of an element depends on that element alone, so that weights can be divided anywhere."""
EPSILON = 1e-7
"""ε of adaptive delay compensation."""


class ServerShard:
    """Update a shard of the weights by gradients that workers have computed on older weights.

    A gradient g that was computed on w_bak, the weights that its worker pulled last, becomes

        g + λ g ⊙ g ⊙ (w - w_bak)          λ = delay_compensation, or λ = delay_compensation / √(mean square of g + ε)

    before the optimizer makes one step with it. With ``max_staleness=0`` a step waits for the gradients of all workers
    that still push, and is made with their sum in rank order.

    Args:
        weights: [n], of any floating dtype; updated in place.
        workers: number of workers.
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW``.
        lr_lambda: function from the number of updates so far to a factor on the learning rate; None: 1.
        delay_compensation: λ, or λ₀ if ``adaptive``; 0: asynchronous SGD as it is.
        adaptive: whether λ₀ is divided by the root of a running mean of squared gradients.
        mean_square_decay: decay of that mean, from 0 to less than 1: m in the paper. With 0 the compensation of an
            element is λ₀ |g| (w - w_bak), which bounds the effect of a gradient much larger than those before it.
        max_staleness: how many pushes a worker may be ahead of the slowest when it pulls; None: any.
        defaults: settings of the optimizer, ``lr`` among them.

    Raises:
        ValueError: another optimizer, or an argument that is out of range.

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
            raise ValueError(f"optimizer={optimizer.__name__}: a parameter server updates elements, by {known}")
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
        """Do not wait for this worker any more."""
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
        """Return weights, optimizer state, versions and clocks, for a resumed run in which every worker pulls first."""
        return {
            "weights": self.weights.detach().clone(),
            "optimizer": self._optimizer.state_dict(),
            "mean_square": self._mean_square,
            "version": self.version,
            "clocks": self.clocks,
            "held": self._held,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the ``state_dict`` of a shard of the same length, with as many workers.

        Raises:
            ValueError: the optimizer or ``adaptive`` was another.
        """
        group = self._optimizer.param_groups[0].keys()
        if state["optimizer"]["param_groups"][0].keys() != group:
            raise ValueError(f"the checkpoint is of another optimizer than {type(self._optimizer).__name__}")
        if (state["mean_square"] is None) != (self._mean_square is None):
            raise ValueError(f"adaptive={self._mean_square is not None}, and in the checkpoint it was not: change it")
        self.weights.detach().copy_(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._mean_square, self.version = state["mean_square"], state["version"]
        self.clocks, self._held = list(state["clocks"]), dict(state["held"])
