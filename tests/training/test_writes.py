"""Weights that are written past torch's version counters: what a forward computes with is what was written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import on_ranks, ranks
from tests.soak import also
from tests.twins import agrees, inputs, mine, same_weights, seeded, square, whole


def by_address(local: Tensor, change: float) -> None:
    changed = local + change
    ctypes.memmove(local.data_ptr(), changed.data_ptr(), local.nbytes)


def by_storage(local: Tensor, change: float) -> None:
    local.new_empty(0).set_(local.untyped_storage(), local.storage_offset(), local.shape).add_(change)


def by_numpy(local: Tensor, change: float) -> None:
    local.numpy()[...] += change


def in_inference(local: Tensor, change: float) -> None:
    with torch.inference_mode():
        local.data.add_(change)


WAYS: list[Callable[[Tensor, float], Any]] = [
    lambda local, change: local.add_(change),
    lambda local, change: local.data.add_(change),
    lambda local, change: torch.from_dlpack(local).add_(change),
    lambda local, change: nn.Parameter(local).data.add_(change),
    by_numpy,
    by_storage,
    by_address,
    in_inference,
]


def sharded(how: str, model: nn.Module) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.float64) if how == "cast" else MixedPrecisionPolicy()
    if how in ("kept", "dropped"):
        for block in model.blocks:
            yafsdp_cc.fully_shard(block, reshard_after_forward=how == "dropped")
        return yafsdp_cc.fully_shard(model)
    more: dict[str, Any] = {"zero_stage": int(how[-1])} if how.startswith("zero") else {}
    if how == "offloaded":
        more["offload_policy"] = CPUOffloadPolicy()
    if how == "secondary":
        more["reshard_after_forward"] = 2
    if how == "replicas":
        more["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return yafsdp_cc.shard(model, mp_policy=policy, **more)


PLACES = ["zero3", "zero2", "zero1", "kept", "dropped", "offloaded", "cast", "secondary"]


@torch.no_grad()
def write(way: Callable[[Tensor, float], Any], parameters: Iterable[Any], plain: nn.Module, change: float) -> None:
    for parameter in parameters:
        local = parameter.detach().to_local()
        if local.numel():
            way(local, change)
    for parameter in plain.parameters():
        parameter.add_(change)


@pytest.mark.parametrize("how", PLACES)
@ranks(2)
def test_a_write_by_hand_is_seen_by_the_next_forward(how: str) -> None:
    """After a forward without gradients, one with them, and a backward."""
    plain = seeded(Mlp)
    model = sharded(how, seeded(Mlp))
    parameters = list(model.parameters())  # after some forwards, it shows unsharded ones
    plain = plain.double() if how == "cast" else plain
    x = mine(inputs()).double() if how == "cast" else mine(inputs())
    for place, way in enumerate(WAYS):
        for after in range(3):
            with torch.set_grad_enabled(after > 0):
                if after == 2:
                    model.zero_grad()
                    square(model, x).backward()
                else:
                    model(x)
            write(way, parameters, plain, 0.01 * (place + 1) * (-1) ** after)
            if after == 2:
                model.zero_grad()
            agrees(model, plain, x, within=1e-5)


class DataSGD(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group["lr"])

    def update(self, parameter: Tensor, grad: Tensor, lr: float) -> None:
        parameter.data.add_(grad.data, alpha=-lr)


class AddressLion(DataSGD):
    """Its kernel is given addresses."""

    def update(self, parameter: Tensor, grad: Tensor, lr: float) -> None:
        average = self.state[parameter].setdefault("average", torch.zeros_like(grad))
        if parameter.numel():
            by_address(parameter.detach(), -0.01 * lr * torch.sign(average.lerp(grad, 0.1)))
        average.lerp_(grad, 0.01)


class Alike(nn.Module):
    """Blocks of one matrix, all of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def trained(how: str, kind: Callable[..., Any], is_exact: bool, build: Callable[[], nn.Module] = Mlp) -> None:
    """Two micro-batches a step, an evaluation with other weights now and then."""
    model, plain = sharded(how, seeded(build)), seeded(build)
    shards = {p: nn.Parameter(p.detach().to_local()) for p in model.parameters()}
    optimizer, twin = kind([each for each in shards.values() if each.numel()]), kind(plain.parameters())
    for step in range(4):
        for micro in range(2):
            square(model, mine(inputs(step=2 * step + micro))).backward()
            for x in inputs(step=2 * step + micro):
                (square(plain, x) / len(inputs())).backward()
        for parameter, shard in shards.items():
            shard.grad = None if parameter.grad is None else parameter.grad.to_local()
        optimizer.step()
        model.zero_grad()
        if is_exact:
            twin.step()
            same_weights(model, plain, within=1e-6)
        else:
            for name, parameter in model.named_parameters():
                plain.get_parameter(name).data.copy_(whole(parameter.detach()))
        plain.zero_grad()
        if step % 2:
            model.eval()
            write(WAYS[1], shards, plain, 0.1)
            with torch.no_grad():
                agrees(model, plain, mine(inputs()), within=1e-6)
            write(WAYS[1], shards, plain, -0.1)
            model.train()
        agrees(model, plain, mine(inputs()), within=1e-6)


def eight_bit(library: str) -> Callable[..., Any]:
    optim = pytest.importorskip(f"{library}.optim")
    made: Callable[..., Any] = optim.AdamW8bit
    return made


@pytest.mark.parametrize("how", [*PLACES[:6], "secondary"])
@ranks(2)
def test_steps_that_torch_does_not_count(how: str) -> None:
    for kind in (DataSGD, AddressLion):
        trained(how, kind, True)


def test_steps_on_replicas_that_torch_does_not_count() -> None:
    on_ranks(4, trained, "replicas", AddressLion, True)


@pytest.mark.parametrize(
    ("how", "library"),
    [
        ("zero3", "torchao"),
        ("zero3", "bitsandbytes"),
        ("zero2", "bitsandbytes"),
        also("zero2", "torchao"),
        *(also(how, library) for how in ("zero1", "kept", "offloaded") for library in ("torchao", "bitsandbytes")),
    ],
)
def test_steps_of_eight_bit_optimizers(how: str, library: str) -> None:
    """Forwards see the weights that 8-bit optimizers write, whose blocks of state differ from those on whole matrices.

    torchao compiles its step anew for each shape of a parameter.
    """
    on_ranks(2, trained, how, eight_bit(library), False, Alike if library == "torchao" else Mlp)
