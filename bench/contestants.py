"""Who is compared: each contestant is a recipe that turns the same model into one that trains on all ranks.

Sharded contestants cut at the same places (every block, then the rest) and take the same `MixedPrecisionPolicy`;
*alone* and *ddp* compute in bf16 by holding bf16 weights. The training loop and the optimizer are the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.models import GPT, Spec

OURS = "yafsdp_cc"
ALONE = "alone"


@dataclass(frozen=True)
class Contestant:
    """A name, the recipe in words, and the recipe."""

    name: str
    recipe: str
    wrap: Callable[[GPT, MixedPrecisionPolicy], nn.Module]
    dtype: torch.dtype = torch.float32
    """Of the weights the model is built with."""
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 (frozen)

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)

    def build(self, spec: Spec) -> nn.Module:
        return self.wrap(spec.build(self.dtype), self.policy)


def contestants(precision: str) -> list[Contestant]:
    """All contestants at ``precision``. In bf16 the sharded ones come twice: gradients reduced in fp32 and in bf16."""
    plain = [
        Contestant(ALONE, "the model on this rank's batch, no communication", lambda model, policy: model),
        Contestant("ddp", "DistributedDataParallel(model)", lambda model, policy: DistributedDataParallel(model)),
    ]
    sharded = [
        Contestant("fsdp2", "fully_shard each block (reshard_after_forward=True), then the root", _fsdp2),
        Contestant("fsdp2-keep", "fully_shard each block (reshard_after_forward=False), then the root", _fsdp2_keep),
        Contestant("fsdp2-a2a", "fsdp2 with set_custom_reduce_scatter(all-to-all + local sum)", _fsdp2_a2a),
        Contestant(OURS, "yafsdp_cc.shard(model)", _ours),
    ]
    if precision == "fp32":
        return plain + sharded
    if precision != "bf16":
        raise ValueError(f"precision is fp32 or bf16, not {precision!r}")
    bf16 = torch.bfloat16
    return [
        *(replace(one, recipe=f"{one.recipe}, bf16 weights", dtype=bf16) for one in plain),
        *(
            replace(
                one,
                name=f"{one.name}/{name}",
                recipe=f"{one.recipe}, MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype={name})",
                policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=dtype),
            )
            for name, dtype in (("fp32", torch.float32), ("bf16", bf16))
            for one in sharded
        ),
    ]


def engine_is_here() -> bool:
    """Whether the engine itself can take part."""
    import yafsdp_cc

    return hasattr(yafsdp_cc, "shard")


def bytes_owned(model: nn.Module) -> dict[str, int]:
    """What the engine's plan said it would own and what it counts, in bytes."""
    import yafsdp_cc

    plan: Any = yafsdp_cc.plan_of(model)
    counters: Any = yafsdp_cc.counters_of(model)
    names = ("owned_bytes", "gathered_bytes", "reduced_bytes", "spills")
    return {"planned_bytes": plan.owned_bytes, **{name: getattr(counters, name) for name in names}}


def _fsdp2(model: GPT, policy: MixedPrecisionPolicy, *, reshard: bool = True) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
    # The root keeps its weights until backward in both recipes: torch's own default.
    fully_shard(model, mp_policy=policy)
    return model


def _fsdp2_keep(model: GPT, policy: MixedPrecisionPolicy) -> nn.Module:
    return _fsdp2(model, policy, reshard=False)


def _fsdp2_a2a(model: GPT, policy: MixedPrecisionPolicy) -> nn.Module:
    _fsdp2(model, policy)
    reduce: Any = AllToAllReduce()  # torch's protocol for it has no public name
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(reduce)
    return model


def _ours(model: GPT, policy: MixedPrecisionPolicy) -> nn.Module:
    import yafsdp_cc

    sharded: nn.Module = yafsdp_cc.shard(model, mp_policy=policy)
    return sharded


class AllToAllReduce:
    """FSDP2's reduce-scatter as one all-to-all and a local sum: gloo's own is a clone and a whole all-reduce.

    Its receive buffer is kept between calls, so that FSDP2 is not charged for allocating it.
    """

    def __init__(self) -> None:
        self.received: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"the all-to-all reduce sums or averages, not {op}")
        key = (input_tensor.numel(), input_tensor.dtype)
        if key not in self.received:
            self.received[key] = torch.empty_like(input_tensor)
        received = self.received[key]
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None
