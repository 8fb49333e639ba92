"""Models and optimizers in the three forms that exchange checkpoints, and what is in them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch._dynamo  # which sharding imports: here, once, and not in every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import yafsdp_cc
import yafsdp_cc.api
import yafsdp_cc.checkpoint.load
from tests.models import VOCABULARY, Transformer

FORMS = ("ours", "fsdp2", "plain")
HYBRID = ("ours", "fsdp2")
"""The forms that two replicas may have."""


def job(
    form: str, seed: int = 0, steps: int = 0, replicas: int = 1, **kwargs: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in one of the forms and its AdamW, after some steps."""
    torch.manual_seed(seed)
    model: nn.Module = Transformer(2, **kwargs)
    mesh = None
    if form != "plain" and replicas > 1:
        shape = replicas, dist.get_world_size() // replicas
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if form == "ours":
        yafsdp_cc.shard(model, mesh=mesh)
    elif form == "fsdp2":
        mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = grouped(model)
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over two groups, as it is usual: no decay for vectors."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        fused=True,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on tokens of its own for each step and rank; the loss."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    tokens = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything, whole, under full names: equal contents are equal jobs."""
    found: dict[str, Any] = {name: whole(value) for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[parameter]}/{key}": whole(value) for key, value in state.items()}
    for index, group in enumerate(optimizer.param_groups):
        for key in group.keys() - {"params"}:  # torch makes lists of tuples on some of its ways
            found[f"group {index}/{key}"] = list(group[key]) if isinstance(group[key], tuple) else group[key]
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    different = [
        name for name in a if not (a[name].equal(b[name]) if isinstance(a[name], Tensor) else a[name] == b[name])
    ]
    assert not different, different


def in_a_process(body, *args):
    """The exit status of ``body(*args)`` in a process of its own: a signal's number if one has ended it."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            status = body(*args) or 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
