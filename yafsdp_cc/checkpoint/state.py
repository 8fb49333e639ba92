"""The state of a model and its optimizer under full parameter names, in the form of torch's ``get_state_dict``.

torch's own function makes an optimizer that has not stepped yet take a step with zero gradients, and gives state to
every parameter. Here saving changes nothing, and a restored optimizer has state where the saved one had it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from yafsdp_cc.checkpoint.plain import check_plain

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.optim import Optimizer

MODEL, OPTIMIZER = "model", "optimizer"

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and checkpoint wrappers put into names; torch's state dicts leave it out too."""


def state_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """What a checkpoint of both holds: ``{"model": {name: tensor}, "optimizer": {"state": ..., "param_groups": ...}}``.

    Tensors are the live ones.

    Raises:
        ValueError: the optimizer has a parameter that is none of the model's.
        TypeError: the state has something in it that a checkpoint cannot hold safely.
    """
    state: dict[str, Any] = {MODEL: get_model_state_dict(model)}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer_state(model, optimizer)
    for name, value in state.items():
        check_plain(value, name, keys=(str,))
    return state


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with full names in place of numbers.

    Raises:
        ValueError: it has a parameter that is none of the model's.
    """
    packed = optimizer.state_dict()
    names = names_in_order(model, optimizer)
    return {
        "state": {names[number]: dict(state) for number, state in packed["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in packed["param_groups"]
        ],
    }


def restore_optimizer(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Give the optimizer the state that ``optimizer_state`` returned, or one loaded into ``room_for_optimizer``."""
    names = names_in_order(model, optimizer)
    numbers = {name: number for number, name in enumerate(names)}
    groups = {tuple(sorted(group["params"])): group for group in saved["param_groups"]}
    packed = optimizer.state_dict()["param_groups"]
    param_groups = [
        {**group, **groups[tuple(sorted(names[number] for number in group["params"]))], "params": group["params"]}
        for group in packed
    ]
    state = {numbers[name]: values for name, values in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def room_for_optimizer(model: nn.Module, contents: Metadata) -> dict[str, Any]:
    """What torch loads the optimizer's part of a checkpoint into: tensors cut like their parameters, and gaps.

    ``contents`` must have such a part, and state for parameters of the model only.
    """
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    room: dict[str, Any] = {}
    for key, path in contents.planner_data.items():
        if path[0] != OPTIMIZER:
            continue
        stored, value = contents.state_dict_metadata[key], None
        if isinstance(stored, TensorStorageMetadata):
            value = torch.empty(stored.size, dtype=stored.properties.dtype)
            if path[1] == "state" and path[-1] != "step" and stored.size == (parameter := parameters[path[2]]).shape:
                value = torch.zeros_like(parameter.detach(), dtype=stored.properties.dtype)
        set_element(room, path, value)
    return {"state": {}, **room[OPTIMIZER]}


def plain_name(name: str) -> str:
    """A parameter's name in a state dict."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_in_order(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in the order in which its state dict counts them.

    Raises:
        ValueError: one of them is none of the model's.
    """
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ValueError(
                    f"parameter {place} of the optimizer's group {index}, {list(parameter.shape)}, is none of the "
                    f"model's: make the optimizer from model.parameters(), after shard()"
                )
            found.append(names[parameter])
    return found
