"""A training run whose figures can be held against another's."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.models import VOCABULARY, Transformer
from tests.twins import seeded, whole

Api = Any
Figures = dict[str, Tensor]


class Run:
    """One model sharded bottom-up through ``api``, its optimizer, and all that is to be compared."""

    def __init__(self, api: Api, model: nn.Module | None = None, apart: bool = False, **options: Any) -> None:
        self.api = api
        self.model: Any = seeded(Transformer) if model is None else model
        for block in self.model.blocks:
            api.fully_shard(block, **options)
        if apart:
            api.fully_shard(self.model.embed, **options)
            api.fully_shard([self.model.norm, self.model.head], **options)
        api.fully_shard(self.model, **options)
        self._start(self.model.parameters())

    @classmethod
    def of_sharded(cls, api: Api, model: nn.Module, ignored: Collection[nn.Parameter] = ()) -> Run:
        """Of a model that the program has sharded itself."""
        run = cls.__new__(cls)
        run.api, run.model = api, model
        run._start(parameter for parameter in model.parameters() if parameter not in ignored)
        return run

    def _start(self, parameters: Iterable[nn.Parameter]) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
        self.figures: Figures = {}
        self.count = 0

    def loss(self, model: Any = None) -> Tensor:
        self.count += 1
        draws = torch.Generator().manual_seed(100 * self.count + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (2, 12), generator=draws)
        logits = (self.model if model is None else model)(tokens)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def backward(self) -> None:
        loss = self.loss()
        self.figures[f"loss {self.count}"] = loss.detach().clone()
        loss.backward()

    def look(self) -> None:
        """Take down the gradients."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.figures[f"{self.count} gradient of {name}"] = whole(parameter.grad).clone()

    def step(self) -> None:
        self.look()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.figures[f"{self.count} norm"] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int = 2) -> None:
        for _ in range(count):
            self.backward()
            self.step()

    def done(self) -> Figures:
        for name, value in self.model.state_dict().items():
            self.figures[f"weight {name}"] = (whole(value) if isinstance(value, DTensor) else value).clone()
        return self.figures


def differences(truth: Figures, found: Figures, within: float | None = None) -> list[str]:
    """Return what is not equal: by a norm-relative distance of ``within``, or 1e-5 for weights and 1e-6 for others."""
    if found.keys() != truth.keys():
        return [f"one of them has no {sorted(found.keys() ^ truth.keys())}"]
    off = []
    for name, value in truth.items():
        distance = (found[name].double() - value.double()).norm() / (value.double().norm() + 1e-30)
        if not distance <= (within or (1e-5 if "weight" in name else 1e-6)):
            off.append(f"{name} is off by {distance:.1e}")
    return off
