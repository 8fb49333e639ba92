"""Adafactor of sharded parameters against ``torch.optim.Adafactor`` in a single process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import yafsdp_cc
from tests.ranks import on_ranks, ranks
from tests.test_tensor_parallel import Net, divided
from tests.twins import seeded, whole

SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.7, "weight_decay": 0.1},  # which 1 / √step limits from the third step on
    {"lr": 0.02, "d": 1.5, "eps": (1e-12, 1e-2), "beta2_decay": -0.6, "maximize": True},
]


class Shapes(nn.Module):
    """A vector, matrices of which ranks have parts of rows, a stack, a convolution, and what is replicated."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"wide": (7, 130), "tall": (301, 5), "stack": (3, 21, 17), "conv": (9, 8, 3, 3), "small": (4, 6)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.vector, self.number = nn.Parameter(torch.randn(40)), nn.Parameter(torch.tensor(0.5))

    def forward(self) -> Tensor:
        return sum((p.square().sum() for p in self.parameters()), torch.tensor(0.0))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = (p for _, p in sorted(model.named_parameters()))
    return [{"params": [first], **SETTINGS[0]}, {"params": rest, **SETTINGS[1]}]


def set_gradients(model: nn.Module, step: int) -> None:
    """The same gradients however the model is sharded; one parameter has none in one of the steps."""
    for place, (name, parameter) in enumerate(sorted(model.named_parameters())):
        draws = torch.Generator().manual_seed(1000 * step + place)
        gradient = torch.randn(parameter.shape, generator=draws) * 0.1 ** (place % 3)
        parameter.grad = None if (step, name) == (1, "tall") else torch.empty_like(parameter).copy_(gradient)


def same(found: Any, truth: Tensor, name: str) -> None:
    value = whole(found) if isinstance(found, DTensor) else found
    distance = (value.detach().double() - truth.detach().double()).norm() / truth.detach().double().norm()
    assert distance <= 1e-6, f"{name} is off by {distance:.1e}"


def compare(model: nn.Module, optimizer: Any, plain: nn.Module, truth: Any) -> None:
    for name, parameter in plain.named_parameters():
        own = model.get_parameter(name)
        same(own, parameter, name)
        assert optimizer.state[own].keys() == truth.state[parameter].keys()
        for key, value in truth.state[parameter].items():
            assert optimizer.state[own][key].shape == value.shape
            same(optimizer.state[own][key], value, f"{key} of {name}")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = seeded(Shapes)
    return plain, torch.optim.Adafactor(groups(plain))


def of_shapes(replicas: bool = False) -> Any:
    """In one unit, whose parameters begin and end in the midst of rows."""
    count = dist.get_world_size()
    shape, names = ((2, count // 2), ("replicate", "shard")) if replicas else ((count,), ("shard",))
    return yafsdp_cc.fully_shard(seeded(Shapes), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


def equals_one_process(folder: str) -> None:
    model, (plain, truth) = of_shapes(dist.get_world_size() == 4), pair()
    optimizer = yafsdp_cc.optim.Adafactor(groups(model))
    reduces, all_reduce = [], dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        reduces.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    train(model, optimizer, range(2))
    set_gradients(model, 2)
    dist.all_reduce = counted
    optimizer.step()
    dist.all_reduce = all_reduce
    assert len(reduces) == 2  # of rows, columns and weights; of updates
    train(plain, truth, range(3))
    compare(model, optimizer, plain, truth)
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}, checkpoint_id=folder
    )
    of_plain = yafsdp_cc.optim.Adafactor(groups(model))
    of_plain.load_state_dict(copy.deepcopy(truth.state_dict()))  # groups are in the same order
    for step in (3, 4):
        set_gradients(model, step)
        of_plain.step()
    train(plain, truth, range(3, 5))
    compare(model, of_plain, plain, truth)


def resumes(folder: str) -> None:
    model, (plain, truth) = of_shapes(), pair()
    optimizer = yafsdp_cc.optim.Adafactor(groups(model))
    train(plain, truth, range(5))
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    again = yafsdp_cc.optim.Adafactor(groups(model))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, again, full if dist.get_rank() == 0 else {}, options=options)
    train(model, again, range(3, 5))
    compare(model, again, plain, truth)


@pytest.mark.parametrize(("world", "other"), [(2, 3), (4, 2)])
def test_equals_one_process_and_resumes_on_other_ranks(world: int, other: int, tmp_path: Any) -> None:
    on_ranks(world, equals_one_process, str(tmp_path / "checkpoint"))
    on_ranks(other, resumes, str(tmp_path / "checkpoint"))


@ranks(4)
def test_refuses_what_tensor_parallelism_has_divided() -> None:
    model = seeded(Net)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    divided(model, mesh["tp"], everything=False)
    yafsdp_cc.shard(model, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"tensor parallelism has divided, .*: take torch\.optim\.AdamW"):
        yafsdp_cc.optim.Adafactor(model.parameters())


@ranks(2)
def test_in_half_precision_and_refused() -> None:
    model, plain = yafsdp_cc.fully_shard(seeded(Shapes).bfloat16()), seeded(Shapes).bfloat16().float()
    optimizer, truth = yafsdp_cc.optim.Adafactor(model.parameters()), torch.optim.Adafactor(plain.parameters())
    for parameter, whole_one in zip(model.parameters(), plain.parameters(), strict=True):
        whole_one.grad = torch.randn_like(whole_one).bfloat16().float()
        parameter.grad = torch.empty_like(parameter).copy_(whole_one.grad)
    truth.defaults["eps"] = optimizer.defaults["eps"]
    for group in truth.param_groups:
        group["eps"] = (torch.finfo(torch.bfloat16).eps, 1e-3)
    for each in (optimizer, truth):
        each.step()
    for parameter, whole_one in zip(model.parameters(), plain.parameters(), strict=True):
        assert optimizer.state[parameter].get("row_var", torch.zeros(1)).dtype == torch.float32
        assert (whole(parameter).float() - whole_one.bfloat16().float()).abs().max() <= 2**-7 * whole_one.abs().max()
    half = torch.optim.Adafactor(seeded(Shapes).bfloat16().parameters())
    for each in half.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    half.step()
    optimizer.load_state_dict(half.state_dict())
    assert optimizer.state[model.number]["variance"].dtype == torch.float32
    assert whole(optimizer.state[model.number]["variance"]) == 1
    optimizer.step()
    with pytest.raises(ValueError, match=r"parameter \[3, 21, 17\] that is not sharded|is not sharded"):
        yafsdp_cc.optim.Adafactor(plain.parameters())
    with pytest.raises(NotImplementedError, match=r"torch.optim.Adafactor takes means .*yafsdp_cc.optim.Adafactor has"):
        torch.optim.Adafactor(model.parameters()).step()


class Scores(nn.Module):
    """Matrices of one row and of one column, whose means are of their own shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.column = nn.Parameter(torch.randn(1, 600)), nn.Parameter(torch.randn(600, 1))


@ranks(2)
def test_resumes_means_of_the_shape_of_their_parameter(tmp_path: Any) -> None:
    model, plain = (seeded(Scores) for _ in range(2))
    yafsdp_cc.fully_shard(model)
    optimizer, truth = yafsdp_cc.optim.Adafactor(groups(model)), torch.optim.Adafactor(groups(plain))
    train(model, optimizer, range(2))
    yafsdp_cc.save(tmp_path / "state", model, optimizer)
    resumed = yafsdp_cc.optim.Adafactor(groups(model))
    yafsdp_cc.load(tmp_path / "state", model, resumed)
    train(model, resumed, range(2, 4))
    train(plain, truth, range(4))
    compare(model, resumed, plain, truth)
