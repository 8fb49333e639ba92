"""The state of a model and its optimizers under full parameter names, in the form of torch's ``get_state_dict``.

torch's own function makes an optimizer that has not stepped yet take a step with zero gradients, and gives state to
every parameter. Here saving changes nothing, and a restored optimizer has state where the saved one had it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None
"""What users give: one, several of different parameters of one model, or none."""

MODEL, OPTIMIZER = "model", "optimizer"

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and checkpoint wrappers put into names; torch's state dicts leave it out too."""
_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def as_sequence(optimizers: Optimizers) -> Sequence[Optimizer]:
    """Return the optimizers that were given."""
    if optimizers is None:
        return ()
    return optimizers if isinstance(optimizers, (list, tuple)) else (optimizers,)


def state_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return ``{"model": {name: tensor}, "optimizer": {"state": ..., "param_groups": ...}}``, with the live tensors.

    The states of several optimizers are put together, and so are their groups of parameters, as by ``get_state_dict``.

    Raises:
        ValueError: an optimizer has a parameter that is none of the model's, or another optimizer's, too.
        TypeError: the state has something in it that a checkpoint cannot hold safely.
    """
    state: dict[str, Any] = {MODEL: get_model_state_dict(model)}
    if optimizers:
        values: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for optimizer, names in zip(optimizers, names_in_order(model, optimizers), strict=True):
            packed = optimizer.state_dict()  # with numbers in place of names
            values |= {names[number]: dict(each) for number, each in packed["state"].items()}
            groups += [
                {**group, "params": [names[each] for each in group["params"]]} for group in packed["param_groups"]
            ]
        state[OPTIMIZER] = {"state": values, "param_groups": groups}
    for name, value in state.items():
        check_plain(value, name, keys=(str,))
    return state


def empty_optimizer_state(model: nn.Module, contents: Metadata) -> dict[str, Any]:
    """Return what torch loads the optimizer's part of a checkpoint into: tensors cut like their parameters, and gaps.

    ``contents`` must have such a part, and state for parameters of the model only.
    """
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    empty: dict[str, Any] = {}
    for key, path in contents.planner_data.items():
        if path[0] != OPTIMIZER:
            continue
        stored, value = contents.state_dict_metadata[key], None
        if isinstance(stored, TensorStorageMetadata):
            value = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
            if path[1] == "state" and path[-1] != "step" and stored.size == (parameter := parameters[path[2]]).shape:
                value = torch.zeros_like(parameter.detach(), dtype=stored.properties.dtype)
        set_element(empty, path, value)
    return {"state": {}, **empty[OPTIMIZER]}


def restore_optimizers(model: nn.Module, optimizers: Sequence[Optimizer], saved: dict[str, Any]) -> None:
    """Give the optimizers the state that was loaded into ``empty_optimizer_state``, each that of its parameters."""
    groups = {tuple(sorted(group["params"])): group for group in saved["param_groups"]}
    for optimizer, names in zip(optimizers, names_in_order(model, optimizers), strict=True):
        numbers = {name: number for number, name in enumerate(names)}
        packed = optimizer.state_dict()["param_groups"]
        param_groups = [
            {**group, **groups[tuple(sorted(names[number] for number in group["params"]))], "params": group["params"]}
            for group in packed
        ]
        state = {numbers[name]: values for name, values in saved["state"].items() if name in numbers}
        optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def plain_name(name: str) -> str:
    """Return a parameter's name in a state dict."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_in_order(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[str]]:
    """Return the names of each optimizer's parameters, in the order in which its state dict counts them.

    Raises:
        ValueError: one of them is none of the model's, or another optimizer's, too.
    """
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    owners: dict[str, int] = {}
    found: list[list[str]] = []
    for number, optimizer in enumerate(optimizers):
        found.append([])
        which = "the optimizer" if len(optimizers) == 1 else f"optimizer {number}"
        for index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in names:
                    raise ValueError(
                        f"parameter {place} of {which}'s group {index}, {list(parameter.shape)}, is none of the "
                        f"model's: make the optimizer from model.parameters(), after shard()"
                    )
                name = names[parameter]
                if owners.setdefault(name, number) != number:
                    raise ValueError(
                        f"optimizers {owners[name]} and {number} both have '{name}', and a checkpoint keeps one state "
                        "of each parameter: give it to one of them, or save them at two paths"
                    )
                found[-1].append(name)
    return found


def check_plain(
    value: Any, name: str, keys: tuple[type, ...] = (str, int, float, bool), tensors: tuple[type, ...] | None = None
) -> None:
    """Raise a ``TypeError`` that names the first thing inside ``value`` that is neither plain data nor a tensor.

    Args:
        value: what to look through.
        name: its own name.
        keys: the types that keys of dicts may have.
        tensors: the exact types that tensors may have; None: any.
    """
    kind = type(value)
    if kind in _SCALARS or (isinstance(value, Tensor) and (tensors is None or kind in tensors)):
        return
    if kind in (dict, OrderedDict):
        for key, inner in value.items():
            if type(key) not in keys:
                wanted = " or ".join(each.__name__ for each in keys)
                raise TypeError(f"{name} has a key {key!r}, a {_full_name(type(key))}; a checkpoint keeps {wanted}")
            check_plain(inner, f"{name}[{key!r}]", keys, tensors)
    elif kind in (list, tuple):
        for index, inner in enumerate(value):
            check_plain(inner, f"{name}[{index}]", keys, tensors)
    else:
        raise TypeError(
            f"{name} is a {_full_name(kind)}, which could only be loaded by running code from the file: "
            + _advice(value)
        )


def _full_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _advice(value: object) -> str:
    if isinstance(value, DTensor):
        return "parameters go into the checkpoint with the model; .full_tensor() makes a plain tensor of another one"
    if type(value).__module__.partition(".")[0] == "numpy":
        return "save torch.from_numpy(...) of an array, .item() of a number"
    for method in ("state_dict", "get_state"):
        if callable(getattr(value, method, None)):
            return f"save its .{method}()"
    return "save plain data (numbers, strings, bytes, lists, tuples, dicts) and tensors"
