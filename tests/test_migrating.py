"""The examples and tables of docs/fsdp2.md and docs/recipes.md hold: averages of weights are those of one process."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import pickle
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import yafsdp_cc
from tests.internals import module_methods, state_of
from tests.models import VOCABULARY, Transformer
from tests.ranks import ranks
from tests.twins import seeded, whole

DOCS = Path(__file__).parent.parent / "docs"


def example(name: str) -> Any:
    """What the examples of ``docs/recipes.md`` define as ``name``."""
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    text = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    wanted = [
        node
        for node in ast.parse(text).body
        if isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "name", "") == name
    ]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(wanted, []), "docs/recipes.md", "exec"), names)
    return names[name]


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    draws = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 12), generator=draws)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "blocks" in name


def close(found: Tensor, truth: Tensor, name: str) -> None:
    distance = (found.double() - truth.double()).norm() / (truth.double().norm() + 1e-30)
    assert distance <= 1e-5, f"{name} is off by {distance:.1e}"


# -- Muon -------------------------------------------------------------------------------------------------------------


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for name, p in model.named_parameters() if is_matrix(name, p)]
    others = [p for name, p in model.named_parameters() if not is_matrix(name, p)]
    return matrices, others


@ranks(2)
def test_muon_on_shards_is_refused() -> None:
    model = yafsdp_cc.shard(seeded(Transformer))
    optimizer = torch.optim.Muon(split(model)[0])
    loss(model, 0, dist.get_rank()).backward()
    with pytest.raises(NotImplementedError, match=r"torch.optim.Muon .*'blocks\.\d\..*has them whole"):
        optimizer.step()


# -- averages ---------------------------------------------------------------------------------------------------------


@ranks(2)
def test_an_average_equals_one_process() -> None:
    swapped: Callable[..., AbstractContextManager[None]] = example("swapped")
    model, plain = yafsdp_cc.shard(seeded(Transformer)), seeded(Transformer)
    ours, theirs = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    weights = list(model.parameters())
    average = [p.detach().clone() for p in weights]
    truth = [p.detach().clone() for p in plain.parameters()]
    world = dist.get_world_size()
    for step in range(3):
        loss(model, step, dist.get_rank()).backward()
        (sum(loss(plain, step, rank) for rank in range(world)) / world).backward()  # type: ignore[union-attr]
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(average, weights, 0.1)
            torch._foreach_lerp_(truth, list(plain.parameters()), 0.1)
    before = [whole(p.detach()).clone() for p in weights]
    with torch.no_grad():
        told = loss(model, 9, 0)
        with swapped(weights, average):
            found = loss(model, 9, 0)
        assert torch.equal(loss(model, 9, 0), told)
        for p, value in zip(plain.parameters(), truth, strict=True):
            p.copy_(value)
        close(found, loss(plain, 9, 0), "evaluation")
    for (name, p), was, mean, value in zip(model.named_parameters(), before, average, truth, strict=True):
        assert torch.equal(whole(p.detach()), was), name
        close(whole(mean), value, name)


@ranks(2)
def test_an_averaged_model_equals_one_process() -> None:
    def fresh(plain: nn.Module) -> AveragedModel:
        return AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    plain, model = seeded(Transformer), seeded(Transformer)
    average, truth = fresh(model), fresh(plain)
    yafsdp_cc.shard(model)
    yafsdp_cc.shard(average.module)
    with torch.no_grad():
        for step in range(3):
            for one in (plain, model):
                for p in one.parameters():
                    p.mul_(1.5 + step)
            average.update_parameters(model)
            truth.update_parameters(plain)
        close(loss(average, 9, 0), loss(truth, 9, 0), "evaluation")
    for (name, p), value in zip(average.named_parameters(), truth.parameters(), strict=True):
        close(whole(p.detach()), value.detach(), name)


# -- differences from FSDP2 -------------------------------------------------------------------------------------------


def bottom_up(**options: Any) -> Any:
    model: Any = seeded(Transformer)
    for each in model.blocks:
        yafsdp_cc.fully_shard(each, **options)
    return yafsdp_cc.fully_shard(model, **options)


def gathered(model: nn.Module) -> int:
    """Bytes that one micro-batch gathers."""
    state_of(model)  # is made before the first forward, on all ranks
    before = yafsdp_cc.counters_of(model).gathered_bytes
    loss(model, 0, dist.get_rank()).backward()
    return yafsdp_cc.counters_of(model).gathered_bytes - before


@ranks(2)
def test_differences_from_fsdp2() -> None:
    model = bottom_up(reshard_after_forward=False)
    assert gathered(model) == gathered(model) > 0  # an optimizer of torch's has not shown itself
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert gathered(model) > 0
    assert gathered(model) == 0  # until the weights change
    weight = model.blocks[0].qkv.weight
    assert weight.to_local().ndim == 1
    assert isinstance(weight, DTensor)  # after the backward, too
    model = bottom_up(reshard_after_forward=True)
    root = sum(p.numel() * 4 for name, p in model.named_parameters() if "blocks" not in name and p.ndim == 2) // 2
    gathered(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert gathered(model) - gathered(model) >= root  # which keeps its slot
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(2.0)
    for refused, error in (
        (lambda: torch.save(model.state_dict(), io.BytesIO()), TypeError),
        (lambda: pickle.dumps(model), TypeError),
        (lambda: copy.deepcopy(model), ValueError),
        (lambda: AveragedModel(model), ValueError),
        (lambda: model.to(torch.bfloat16), RuntimeError),
        (lambda: share_comm_ctx([model]), NotImplementedError),
    ):
        with pytest.raises(error):
            refused()


# -- the tables -------------------------------------------------------------------------------------------------------


def test_every_name_of_fsdp2_has_a_row() -> None:
    methods = [name for name in vars(FSDPModule) if not name.startswith("_")]
    policy = list(MixedPrecisionPolicy.__dataclass_fields__)
    # torch's decorator hides the signature; ours is the same, and the parity tests call both
    arguments = list(inspect.unwrap(yafsdp_cc.fully_shard).__kwdefaults__)
    of_torch = list(fully_shard.__wrapped__.__kwdefaults__)
    assert [each for each in arguments if each != "dp_mesh_dims" or each in of_torch] == [  # torch 2.11 has none
        *of_torch,
        "compression",
        "ownership",
    ]
    page = (DOCS / "fsdp2.md").read_text(encoding="utf-8")
    for name in (*arguments, *policy, *methods, "register_fsdp_forward_method", "share_comm_ctx", "UnshardHandle"):
        assert re.search(rf"^\| `{name}\b", page, re.MULTILINE), f"{name} has no row"
    for name in methods:
        assert name in module_methods() or name == "set_reduce_scatter_divide_factor", f"{name} is torch's own"
