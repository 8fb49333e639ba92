"""Mistakes in the use of ``fully_shard`` are named where they are made."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import Transformer
from tests.ranks import ranks
from yafsdp_cc import fully_shard

TOKENS = torch.zeros(1, 2, dtype=torch.long)


def outside_in(model: Any) -> None:
    fully_shard(model)
    fully_shard(model.blocks[0])


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        fully_shard(model)


def with_a_hook(model: Any) -> None:
    model.head.weight.register_post_accumulate_grad_hook(print)
    fully_shard(model)


def with_a_norm_kept_small(model: Any) -> None:
    model.embed.max_norm = 0.1
    fully_shard(model)


def with_a_write_to_a_small_parameter(model: Any) -> None:
    model.norm.register_forward_pre_hook(lambda norm, _: norm.weight.mul_(0.5))
    fully_shard(model)
    model(TOKENS)


def with_a_write_to_an_input(model: Any) -> None:
    model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0].mul_(0.5),))
    fully_shard(model.blocks[1])
    fully_shard(model)
    model(TOKENS)


WRITES = "written in place to one of its inputs, or to a small parameter"
MISTAKES: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda m: fully_shard(m, mp_policy=torch.bfloat16), TypeError, "mp_policy takes MixedPrecisionPolicy("),
    (lambda m: fully_shard(m, mesh=2), TypeError, "mesh takes a DeviceMesh, for example"),
    (lambda m: fully_shard(m, offload_policy=True), TypeError, "offload_policy takes OffloadPolicy()"),
    (lambda m: fully_shard(m, ignored_params={"head.weight"}), TypeError, "parameters themselves, not their names"),
    (lambda m: fully_shard([]), ValueError, "takes a module or a list of modules, got []"),
    (outside_in, ValueError, "'norm1.weight' of this Attention was sharded by a call on a module around it"),
    (in_inference_mode, ValueError, "fully_shard() under torch.inference_mode()"),
    (with_a_hook, ValueError, "'head.weight' has hooks, which would be lost"),
    (with_a_norm_kept_small, ValueError, "'embed' has max_norm=0.1"),
    (with_a_write_to_a_small_parameter, RuntimeError, WRITES),
    (with_a_write_to_an_input, RuntimeError, WRITES),
]


@ranks(2)
def test_mistakes_are_named() -> None:
    for mistake, kind, says in MISTAKES:
        model = Transformer(2)
        with pytest.raises(kind, match=f"(?s){re.escape(says)}"):
            mistake(model)


@ranks(2)
def test_a_module_named_twice_in_a_list_is_sharded_once() -> None:
    torch.manual_seed(0)
    model, plain = Transformer(2), Transformer(2)
    plain.load_state_dict(model.state_dict())
    fully_shard([model.head, model.norm, model.head])
    fully_shard(model)
    for each in (model, plain):
        each(TOKENS + dist.get_rank()).square().mean().backward()
    expected = plain.head.weight.grad
    assert isinstance(expected, Tensor)
    dist.all_reduce(expected)
    assert torch.allclose(whole(model.head), expected / 2, rtol=1e-4, atol=1e-7)


def whole(linear: nn.Linear) -> Tensor:
    gradient: Any = linear.weight.grad
    tensor: Tensor = gradient.full_tensor()
    return tensor
