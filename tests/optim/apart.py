"""Slopes on replicas that make steps by themselves, and 0/1 Adam's local steps in float64, written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tests.optim.lossless  # noqa: F401 - registers its codec
from tests.optim.slopes import BLOCK, SHAPES, Slopes, drawn, sharded
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.optim import ZeroOneAdam

KAPPA, MOST = 3, 3
EXACT = {1, 2, 3, 5, 7, 9, 13, 17, 21, 29}
MEETINGS = {4, 6, 8, 12, 16, 20, 24, 27, 28}
"""By hand: between exact sums that are 2, 4 and 8 steps apart, at most 3 steps without a word."""
BETAS, EPS, DECAY = (0.8, 0.95), 1e-8, 0.1
MESHES = pytest.mark.parametrize(("world", "replicas"), [(2, 2), (4, 2), (4, 4)])


def mesh_of(replicas: int) -> Any:
    shape = replicas, dist.get_world_size() // replicas
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def made(replicas: int, codec: str = "onebit", **more: Any) -> tuple[Any, ZeroOneAdam]:
    settings = {"local_steps": MOST, **more.pop("settings", {})}
    model = sharded(codec, mesh=mesh_of(replicas), **more)
    return model, made_by(model, **settings)


def made_by(model: Any, **settings: Any) -> ZeroOneAdam:
    names = dict(model.named_parameters())
    groups = [
        {"params": [each for name, each in names.items() if kind in name], "weight_decay": decay}
        for kind, decay in (("weight", DECAY), ("bias", 0.0))
    ]
    return ZeroOneAdam(groups, 1e-2, BETAS, EPS, **({"refreshes": KAPPA} | settings))


def rate(step: int, kind: str) -> float:
    """It changes between two meetings, and is 0 from one to the next."""
    return 0.0 if 10 <= step <= 12 else (0.01 if kind == "weight" else 0.02) * (1 + step % 3)


def trained(model: Any, optimizer: Any, steps: range, clip: float | None = None) -> None:
    """Steps that are counted from 1 on."""
    for step in steps:
        for group, kind in zip(optimizer.param_groups, ("weight", "bias"), strict=False):
            group["lr"] = rate(step, kind)
        model(drawn(step, dist.get_rank())).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def are_alike(model: Any, mesh: Any, tensors: list[Any] | None = None) -> bool:
    """Whether replicas have the same bits, on all ranks."""
    parts = [each.to_local() for each in tensors or list(model.parameters())]
    local = torch.cat([each.detach().flatten() for each in parts])
    others = [torch.empty_like(local) for _ in range(mesh.size(0))]
    dist.all_gather(others, local, group=mesh.get_group("replicate"))
    differs = torch.tensor([float(any(not local.equal(other) for other in others))])
    dist.all_reduce(differs)
    assert differs in (0, dist.get_world_size())
    return not differs


class Reference:
    """All of ``Slopes`` in float64, as every replica has it; ``shards`` ranks in each."""

    def __init__(self, model: Any, replicas: int, codec: str) -> None:
        self.replicas, self.shards, self.codec = replicas, dist.get_world_size() // replicas, codec
        self.chunks = [unit.flats[0].layout.chunk for unit in root_of(model).units]
        start = [each.detach().double() for each in Slopes().parameters()]
        self.x = [list(start) for _ in range(replicas)]
        self.m = [[torch.zeros_like(each) for each in start] for _ in range(replicas)]
        self.v = [torch.zeros_like(each) for each in start]
        self.unsaid = [[torch.zeros_like(each) for each in start] for _ in range(replicas)]
        self.seen = 0
        self._begin()

    def _begin(self) -> None:
        self.anchor = list(self.x[0])
        self.u = [[torch.zeros_like(each) for each in self.v] for _ in range(self.replicas)]
        self.sum, self.reach, self.kept = ([start] * len(self.v) for start in (0.0, 0.0, 1.0))
        self.steps = 0

    def gradients(self, step: int, replica: int, clip: float | None) -> list[Tensor]:
        """The mean over the ranks of a replica, or of all for −1."""
        ranks = range(self.shards * self.replicas) if replica < 0 else range(self.shards)
        slopes = [drawn(step, rank + self.shards * max(replica, 0)) for rank in ranks]
        means = [torch.stack([slope[index].double() for slope in slopes]).mean(0) for index in range(len(SHAPES))]
        found = [each for mean in means for each in (mean, mean.sum(1))]
        if clip is None:
            return found
        norm = torch.cat([each.flatten() for each in found]).norm()
        return [each * min(1.0, clip / (float(norm) + 1e-6)) for each in found]

    def step(self, step: int, clip: float | None = None) -> None:
        if step in EXACT:
            gradients = [self.gradients(step, -1, clip)] * self.replicas
            self.seen += 1
            self.v = [BETAS[1] * v + (1 - BETAS[1]) * g**2 for v, g in zip(self.v, gradients[0], strict=True)]
        else:
            gradients = [self.gradients(step, replica, clip) for replica in range(self.replicas)]
            self.steps += 1
        furthest = 1.0 if step > KAPPA else torch.inf
        for index, v in enumerate(self.v):
            kind, decay = ("bias", 0.0) if index % 2 else ("weight", DECAY)
            lr, root = rate(step, kind), (v / (1 - BETAS[1] ** self.seen)).sqrt() + EPS
            rest, eta = 1 - lr * decay, lr / (1 - BETAS[0] ** step)
            if step not in EXACT:
                self.sum[index] = rest * self.sum[index] + eta
                self.reach[index] = rest * self.reach[index] + lr
                self.kept[index] *= rest
            for replica in range(self.replicas):
                m = BETAS[0] * self.m[replica][index] + (1 - BETAS[0]) * gradients[replica][index]
                self.m[replica][index] = m
                if step in EXACT:
                    moved = lr * (m / root / (1 - BETAS[0] ** step)).clamp(-furthest, furthest)
                    self.x[replica][index] = self.x[replica][index] * rest - moved
                else:
                    self.u[replica][index] = rest * self.u[replica][index] + eta * m
                    self._place(replica, index, root)
            if step in MEETINGS:
                self._meet(index, root)
        if step in EXACT or step in MEETINGS:
            self._begin()

    def _place(self, replica: int, index: int, root: Tensor) -> None:
        moved = (self.u[replica][index] / root).clamp(-self.reach[index], self.reach[index])
        self.x[replica][index] = self.anchor[index] * self.kept[index] - moved

    def _meet(self, index: int, root: Tensor) -> None:
        said = []
        for replica in range(self.replicas):
            total = self.sum[index]
            due = self.u[replica][index] / total if total else self.m[replica][index]
            due = due * self.steps * self.shards + self.unsaid[replica][index]
            if index % 2 or self.codec == "lossless":
                said.append(due)
                continue
            said.append(self._said(due, self.chunks[index // 2]))
            self.unsaid[replica][index] = due - said[-1]
        mean = torch.stack(said).mean(0) / self.shards / self.steps
        for replica in range(self.replicas):
            self.m[replica][index] = mean
            self.u[replica][index] = mean * self.sum[index]
            self._place(replica, index, root)

    def _said(self, due: Tensor, chunk: int) -> Tensor:
        """What one bit says: signs, times the mean magnitude of each block of each chunk."""
        whole = torch.zeros(chunk * self.shards, dtype=torch.float64)
        filled = torch.zeros_like(whole)
        whole[: due.numel()], filled[: due.numel()] = due.flatten(), 1
        blocks, inside = whole.view(-1, BLOCK), filled.view(-1, BLOCK)
        scales = (blocks.abs() * inside).sum(1) / inside.sum(1).clamp(min=1)
        signs = torch.where(blocks.signbit(), -1.0, 1.0) * scales.unsqueeze(1)
        return signs.flatten()[: due.numel()].view(due.shape)
