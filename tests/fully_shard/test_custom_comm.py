"""Sums of bf16 gradients: FSDP2's, by an object that is called as there, and the engine's own, which are nearer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from tests.fully_shard.programs import Sums
from tests.models import WIDTH
from tests.ranks import ranks
from tests.twins import numbers, seeded, square, whole


def _gradient(api: Any, dtype: torch.dtype, *, custom: bool = False) -> Tensor:
    model: Any = api.fully_shard(
        seeded(lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype),
    )
    if custom:
        model.set_custom_reduce_scatter(Sums())
    square(model, numbers(4, WIDTH, seed=dist.get_rank())).backward()
    return whole(model.weight.grad).double()


@ranks(4)
def test_a_custom_reduce_scatter_rounds_bf16_sums_as_fsdp2_does_and_exact_ones_do_not() -> None:
    theirs, ours = _gradient(torch_fsdp, torch.bfloat16), _gradient(yafsdp_cc, torch.bfloat16)
    assert torch.equal(_gradient(yafsdp_cc, torch.bfloat16, custom=True), theirs)
    truth = _gradient(yafsdp_cc, torch.float32)
    assert (ours - truth).norm() < 0.1 * (theirs - truth).norm()
