"""Tang et al., "1-bit Adam", 2021, algorithm 1, in fp64 on one process: what ``ReplicatedOneBitAdam`` is held against.

Its own layout, its own loops; of the package it uses the codecs' plain-torch definitions alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.internals import codec_of

BLOCK = 256


def padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


class Paper:
    """All workers and servers of a run.

    Args:
        weights: where it starts.
        world: workers, and servers.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        world: int,
        codec: str,
        *,
        rate: float,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        warmup: int,
    ) -> None:
        self.shapes = [each.shape for each in weights]
        self.world, self.codec = world, codec_of(codec)
        self.rate, self.betas, self.eps, self.decay, self.warmup = rate, betas, eps, decay, warmup
        self.chunk = padded(-(-sum(padded(each.numel(), BLOCK) for each in weights) // world), BLOCK)
        self.used = self.flat([torch.ones_like(each) for each in weights])
        counts = self.used.view(-1, BLOCK).sum(1).to(torch.int32)
        self.counts = counts.view(world, -1)
        self.x = self.flat(weights)
        self.m, self.v = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.worker = torch.zeros(world, world * self.chunk, dtype=torch.float64)
        self.server = torch.zeros(world * self.chunk, dtype=torch.float64)
        self.steps = 0

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Each from a block of its own on, fp64."""
        whole, start = torch.zeros(self.world * self.chunk, dtype=torch.float64), 0
        for each in tensors:
            whole[start : start + each.numel()] = each.detach().reshape(-1).double()
            start += padded(each.numel(), BLOCK)
        return whole

    def parts(self, whole: Tensor) -> list[Tensor]:
        found, start = [], 0
        for shape in self.shapes:
            found.append(whole[start : start + shape.numel()].view(shape))
            start += padded(shape.numel(), BLOCK)
        return found

    def compressed(self, h: Tensor) -> Tensor:
        """C(h), chunk by chunk."""
        values = h.view(self.world, -1).float()
        message = torch.zeros(self.world, self.codec.message_bytes(self.chunk), dtype=torch.uint8)
        self.codec.encode(values, self.counts, message)
        said = torch.empty_like(values)
        self.codec.decode(message, said)
        return said.double().view(-1) * self.used

    def step(self, gradients: Sequence[Tensor]) -> None:
        """With the gradients of all workers, flat."""
        self.steps += 1
        beta1, beta2 = self.betas
        if self.steps <= self.warmup:
            g = sum(gradients) / self.world
            self.m = beta1 * self.m + (1 - beta1) * g
            self.v = beta2 * self.v + (1 - beta2) * g * g
            seen = self.steps
        else:
            said = []
            for worker, gradient in enumerate(gradients):
                h = beta1 * self.m + (1 - beta1) * gradient + self.worker[worker]
                said.append(self.compressed(h))
                self.worker[worker] = h - said[-1]
            h = sum(said) / self.world + self.server
            self.m = self.compressed(h)
            self.server = h - self.m
            seen = self.warmup
        root = (self.v / (1 - beta2**seen)).sqrt() + self.eps
        update = self.m / (1 - beta1**self.steps) / root
        if self.steps > self.warmup:  # not the paper's
            furthest = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
            update = update.clamp(-furthest, furthest)
        self.x = self.x * (1 - self.rate * self.decay) - self.rate * update
