"""Runs whose learning rates and betas a scheduler changes, saved after any step, go on as they would have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, SequentialLR

import yafsdp_cc
from tests.optim.lossless import loss_of, whole
from tests.optim.test_family import FAMILY, narrow
from tests.ranks import on_ranks
from tests.soak import SOAK, also
from yafsdp_cc import Compression

STEPS, MORE = 8, 2
OPTIMIZERS: dict[str, Callable[..., Any]] = {**FAMILY, "adamw": partial(torch.optim.AdamW, lr=0.01)}


def one_cycle(optimizer: Any) -> Any:
    """It cycles betas or momentum too."""
    return OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + MORE + 1)


def warmed_cosine(optimizer: Any) -> Any:
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS + MORE)
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=3), cosine], milestones=[3])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "constant": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
    "one-cycle": one_cycle,
    "cosine": warmed_cosine,
}
CODECS: dict[str, Compression] = {
    "exact": Compression("fp32"),
    "int8": Compression("int8"),
    "onebit": Compression("onebit", residual="int8"),
    "stochastic": Compression("int8", feedback=False),
    "lossless": Compression("lossless", residual="fp32"),
}


class Run(NamedTuple):
    """A training run, and how it steps."""

    model: Any
    optimizer: Any
    schedule: Any
    scaler: Any
    clips: bool

    @staticmethod
    def of(kind: str, schedule: str, codec: str, scales: bool, clips: bool) -> Run:
        model = yafsdp_cc.shard(narrow(), units=[nn.Linear], compression=CODECS[codec])
        limit = {"max_grad_norm": 0.5} if clips and kind in ("adam-momentum", "lamb-momentum") else {}
        optimizer = OPTIMIZERS[kind](model.parameters(), **limit)
        scaler = torch.amp.GradScaler("cpu", enabled=scales, init_scale=2.0**8, growth_interval=3)
        if scales:
            yafsdp_cc.follow_scaler(model, scaler)
        return Run(model, optimizer, SCHEDULES[schedule](optimizer), scaler, clips)

    def step(self, step: int, batch: int) -> None:
        self.scaler.scale(loss_of(self.model, step, batch)).backward()
        if self.clips:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()

    def save(self, path: Path) -> None:
        more = {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict()}
        yafsdp_cc.save(path, self.model, self.optimizer, **more)

    def load(self, path: Path) -> None:
        extra = yafsdp_cc.load(path, self.model, self.optimizer)
        self.schedule.load_state_dict(extra["schedule"])
        self.scaler.load_state_dict(extra["scaler"])
        if self.scaler.is_enabled():
            yafsdp_cc.follow_scaler(self.model, self.scaler)


def saved(path: Path, cells: list[Any], same_batch: bool, places: list[int]) -> None:
    """Train each of ``cells``, and write its state after the steps ``places``, and its weights after all of them."""
    for cell in cells:
        run, found = Run.of(*cell), []
        for step in range(max(places) + 1 + MORE):
            run.step(step, 0 if same_batch else dist.get_rank())
            found.append(whole(run.model.parameters()))
            if step in places:
                run.save(path / "-".join(map(str, cell)) / str(step))
        if dist.get_rank() == 0:
            torch.save(found, path / "-".join(map(str, cell)) / "truth.pt")


def resumed(path: Path, cells: list[Any], same_batch: bool, places: list[int], within: float) -> None:
    for cell in cells:
        folder = path / "-".join(map(str, cell))
        truth = torch.load(folder / "truth.pt")
        for place in places:
            run = Run.of(*cell)
            run.load(folder / str(place))
            for step in range(place + 1, place + 1 + MORE):
                run.step(step, 0 if same_batch else dist.get_rank())
            for mine, theirs in zip(whole(run.model.parameters()), truth[place + MORE], strict=True):
                off = float((mine - theirs).norm() / theirs.norm())
                assert off <= within, (cell, place, off)


def cells_of(kind: str, *, codecs: list[str]) -> list[Any]:
    """All that ``kind`` can be used with: the momentum form and 0/1 Adam need residuals."""
    found = itertools.product([kind], SCHEDULES, codecs, [False, True], [False, True])
    return [cell for cell in found if cell[2] != "stochastic" or kind.endswith(("gradient", "adamw"))]


SHORT = {
    "adam-momentum": [("one-cycle", "onebit", True, True), ("one-cycle", "int8", False, False)],
    "sgd-momentum": [("one-cycle", "onebit", False, True)],
    "lamb-momentum": [("one-cycle", "int8", True, False)],
    "zero-one": [("one-cycle", "onebit", True, False)],
    "sgd-gradient": [("cosine", "stochastic", False, False)],
    "adamw": [("one-cycle", "stochastic", True, True)],
}


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    cells = [(kind, *cell) for kind, some in SHORT.items() for cell in some]
    on_ranks(2, saved, tmp_path, cells, False, [1, 5])
    on_ranks(2, resumed, tmp_path, cells, False, [1, 5], 0.0)


@pytest.mark.parametrize("kind", [also(kind) for kind in OPTIMIZERS])
def test_every_run_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    cells = cells_of(kind, codecs=["exact", "int8", "onebit", "stochastic"])
    places = list(range(STEPS))
    on_ranks(2, saved, tmp_path, cells, False, places, timeout=3000.0)
    on_ranks(2, resumed, tmp_path, cells, False, places, 0.0, timeout=3000.0)


@pytest.mark.parametrize("kind", ["adam-momentum", *(also(kind) for kind in OPTIMIZERS if kind != "adam-momentum")])
@pytest.mark.parametrize(("writers", "readers"), [(2, 4), also(4, 2)])
def test_a_run_goes_on_at_other_numbers_of_ranks(kind: str, writers: int, readers: int, tmp_path: Path) -> None:
    """With a codec that loses nothing, and the same batch on all ranks: within rounding."""
    cells = [(kind, schedule, "lossless", True, False) for schedule in SCHEDULES]
    places = [0, 2, 3, 7] if SOAK else [2, 7]
    on_ranks(writers, saved, tmp_path, cells, True, places)
    on_ranks(readers, resumed, tmp_path, cells, True, places, 2e-5)
