"""Models with ``compression="auto"`` in the hands of a test."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tests.wire.ledger import loss_of, sharded
from yafsdp_cc import Compression
from yafsdp_cc.engine.chooser import Chooser
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.engine.problem import Problem
from yafsdp_cc.wire.choice import Leg, Option
from yafsdp_cc.wire.pace import Pace

EVERY = ("fp32", "int8", "int4", "onebit", "bf16")
AUTO = Compression("auto", residual="fp32", candidates=EVERY[1:])


def chooser_of(model: nn.Module) -> Chooser:
    found = root_of(model).chooser
    assert found is not None
    return found


def untold(compression: Any, **more: Any) -> Any:
    """A sharded model that does not choose by itself."""
    model = sharded(compression, **more)
    chooser_of(model).due = 1 << 30
    return model


def switch(model: nn.Module, codecs: list[str], near: Any = MappingProxyType({})) -> None:
    """Have the units' gradients encoded by these from now on, and between near ranks as ``near`` says."""
    units = root_of(model).units
    legs = tuple(Leg(0.0, (Option(codec, 0.0),)) for codec in codecs)
    chooser_of(model).apply(Problem(units, legs, 1.0, Pace(0.0, 0.0), 1.0), [0] * len(legs), near)


def step_of(model: Any, number: int) -> None:
    """Forward, backward and an optimizer step, after which the next forward counts one more."""
    loss_of(model, number).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    model.zero_grad()
