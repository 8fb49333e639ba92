"""A small model whose weights follow by encoded changes, and the rule that they follow, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from tests.compression.ledger import loss_of, sharded
from tests.internals import codec_of, unsharded_params
from yafsdp_cc import Compression

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def following(codec: str = "int4", **more: Any) -> Any:
    return sharded(Compression(gradients="fp32", weights=codec), **{"zero_stage": 2, **more})


def masters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def look(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        model(torch.ones(1, 40))
    return unsharded_params(model)


def is_exact(model: nn.Module, seen: dict[str, Tensor]) -> bool:
    true = masters(model)
    return all(view.equal(true[name].to(view.dtype)) for name, view in seen.items())


def gathered(model: nn.Module) -> int:
    return yafsdp_cc.counters_of(model).gathered_bytes


def changed_bytes(model: nn.Module) -> int:
    return yafsdp_cc.plan_of(model).communication.gather_forward


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def told(codec: str, weight: Tensor, whole: Tensor) -> Tensor:
    """What ``whole`` becomes, by the rule: a block of 256 elements is of one parameter, and its end may be empty."""
    values = torch.zeros(1, -(-weight.numel() // 256) * 256)
    values[0, : weight.numel()] = weight.flatten() - whole.flatten().float()
    counts = torch.full((1, values.numel() // 256), 256, dtype=torch.int32)
    counts[0, -1] = (weight.numel() - 1) % 256 + 1
    said, kind = torch.empty_like(values), codec_of(codec)
    message = torch.empty(1, kind.message_bytes(values.numel()), dtype=torch.uint8)
    kind.encode(values, counts, message)
    kind.decode(message, said)
    return (whole.float() + said[0, : weight.numel()].view_as(whole)).to(whole.dtype)


def writes(model: Any) -> list[Callable[[], None]]:
    """What changes the third unit's weight and is no optimizer step: written whole, in place, loaded as it is now."""
    weight, state = model[2].weight, {name: each.clone() for name, each in model.state_dict().items()}

    def write_whole() -> None:
        with yafsdp_cc.whole_parameters(model, write=True):
            model[2].weight.data.mul_(2.0)

    def write_in_place() -> None:
        with torch.no_grad():
            weight.mul_(3.0)

    def load() -> None:
        model.load_state_dict(state)

    return [write_whole, write_in_place, load]
