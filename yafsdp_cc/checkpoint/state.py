"""The state of a model and its optimizers under full parameter names, in the form of torch's ``get_state_dict``.

torch's ``get_state_dict`` makes an optimizer that has not stepped yet take a step with zero gradients, and gives state
to every parameter. This module changes nothing on saving, and a restored optimizer has state only for parameters for
which the saved one had it.
"""

from __future__ import annotations

import copy
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_structure

from yafsdp_cc.fsdp2.module import WRAPPERS, ShardedModule
from yafsdp_cc.optim import Adafactor, MatrixOptimizer, OneBitAdam
from yafsdp_cc.optim.adam import adamw_state
from yafsdp_cc.optim.one_bit import OneBitOptimizer
from yafsdp_cc.ranks.checks import check_dense

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None
"""Type of the argument ``optimizer``: one, several with different parameters of one model, or None."""

MODEL, OPTIMIZER = "model", "optimizer"

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, io.BytesIO)
_WHOLE = "yafsdp_cc.whole"
"""Mark in files of an extra state that is stored as one object; earlier versions' checkpoints need it unchanged."""


def host_copy(value: Any) -> Any:
    """Return a copy in host memory of a state's value if training may change it in place; other values unchanged."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Counter):  # torch's ``tree_map`` takes dicts and lists apart, but no ``Counter``
        return Counter(tree_map(host_copy, dict(value)))
    return copy.copy(value) if isinstance(value, io.BytesIO) else value


def as_sequence(optimizers: Optimizers) -> Sequence[Optimizer]:
    if optimizers is None:
        return ()
    return optimizers if isinstance(optimizers, (list, tuple)) else (optimizers,)


def paths_in(contents: Metadata, part: str) -> dict[str, tuple[Any, ...]]:
    """Return the paths of a checkpoint's entries below ``part``, such as ``MODEL``, by the entries' keys."""
    paths = (contents.planner_data or {}).items()
    return {key: path[1:] for key, path in paths if path[0] == part and len(path) > 1}


def state_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return ``{"model": {name: tensor}, "optimizer": {"state": ..., "param_groups": ...}}``, with the live tensors.

    The states and parameter groups of several optimizers are joined, as by ``get_state_dict``.

    Raises:
        ValueError: an optimizer has a parameter that is none of the model's, or another optimizer's, too.
        TypeError: the state contains an object that a checkpoint cannot hold safely.
    """
    state: dict[str, Any] = {MODEL: {}}
    for name, value in model_state(model).items():
        check_dense([(name, value)], "a checkpoint")
        check_plain(value, f"{MODEL}[{name!r}]")
        if is_extra_state(name) and not _is_put_together_again(value):
            value = (_WHOLE, value)
        state[MODEL][name] = value.detach() if isinstance(value, Tensor) else value
    if optimizers:
        values: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for optimizer, names in zip(optimizers, names_in_order(model, optimizers), strict=True):
            packed = optimizer.state_dict()  # a state dict of an optimizer has numbers in place of names
            values |= {names[number]: dict(each) for number, each in packed["state"].items()}
            for group in packed["param_groups"]:
                groups.append({**group, "params": [names[each] for each in group["params"]]})
        state[OPTIMIZER] = {"state": values, "param_groups": groups}
        check_plain(state[OPTIMIZER], OPTIMIZER, in_pieces=True)
    return state


# The model -----------------------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of DDP, and of wrappers of ``torch.compile`` or checkpointing applied after sharding."""
    while not isinstance(model, ShardedModule) and (
        inner := [m for n, m in model.named_children() if n in WRAPPERS or isinstance(model, DistributedDataParallel)]
    ):
        [model] = inner
    return model


def plain_name(name: str) -> str:
    """Return a name in a state dict without the parts that wrappers, such as ``torch.compile``, add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@torch.no_grad()
def model_state(model: nn.Module) -> dict[str, Any]:
    """Return what ``model.state_dict()`` holds, hooks and all, under names without wrappers.

    torch's ``get_model_state_dict`` looks for a module's attribute behind each name, and fails for names that hooks
    have made. The values are the parameters and buffers themselves, unless a hook has replaced them.
    """
    return {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}


def load_model_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Load ``values``, under names without wrappers, by ``model.load_state_dict``, with its hooks and extra states.

    A module whose extra state is not among the ``values`` is not changed.
    """
    state = model.state_dict(keep_vars=True)  # ``state._metadata`` has the versions of modules, for loading
    gone = [name for name in state if plain_name(name) not in values]
    for name in gone:
        del state[name]
    for name in state:
        state[name] = values[plain_name(name)]
    model.load_state_dict(state, strict=not any(map(is_extra_state, gone)))


def is_extra_state(name: str) -> bool:
    """Return whether a name in a state dict is that of a module's extra state."""
    return name.rpartition(".")[2] == "_extra_state"


def _is_put_together_again(value: Any) -> bool:
    """Return whether torch's checkpoints, which store dicts and lists in pieces, restore ``value`` unchanged."""
    if isinstance(value, dict):
        fits = type(value) is not Counter and all(type(key) is str and "." not in key for key in value)
        return bool(value) and fits and all(map(_is_put_together_again, value.values()))
    return not isinstance(value, list) or all(map(_is_put_together_again, value))


def empty_extra_states(contents: Metadata) -> dict[str, Any]:
    """Return placeholders for a checkpoint's extra states, whose forms and sizes may differ from the model's."""
    paths = paths_in(contents, MODEL).items()
    return _empty(contents, {key: (plain_name(name), *path) for key, (name, *path) in paths if is_extra_state(name)})


def unpacked(value: Any) -> Any:
    """Return an extra state from a loaded placeholder of ``empty_extra_states``."""
    return value[1] if isinstance(value, tuple) and value[:1] == (_WHOLE,) else value


def _empty(
    contents: Metadata, paths: Mapping[str, tuple[Any, ...]], parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return placeholders nested by ``paths``: tensors on the CPU or sharded like ``parameters``, None for the rest."""
    empty: dict[str, Any] = {}
    for key, path in paths.items():
        stored, value = contents.state_dict_metadata[key], None
        if isinstance(stored, TensorStorageMetadata):
            value = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
            parameter = parameters[path[1]] if parameters and path[0] == "state" and path[-1] != "step" else value
            if parameter is not value and parameter.shape == stored.size:
                value = torch.zeros_like(parameter.detach(), dtype=stored.properties.dtype)
        set_element(empty, path, value)
    return empty


# The optimizers ------------------------------------------------------------------------------------------------------


def empty_optimizer_state(model: nn.Module, contents: Metadata) -> dict[str, Any]:
    """Return placeholders for a checkpoint's optimizer state: tensors sharded like parameters, None for non-tensors.

    ``contents`` must have an optimizer part, and state for parameters of the model only.
    """
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    return {"state": {}, **_empty(contents, paths_in(contents, OPTIMIZER), parameters)}


def restore_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], saved: dict[str, Any], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Give each optimizer its parameters' part of ``saved``, the state that was read into ``empty_optimizer_state``.

    torch's ``load_state_dict`` casts state to its parameter's dtype. State whose saved dtype was not its parameter's
    (saved ones are in ``dtypes``, by name) gets its saved dtype again, except in optimizers of this package, which
    choose dtypes themselves. An optimizer with a ``step`` of torch's can use, but for scalars, only the dtype of the
    parameter and its ``grad_dtype`` (any, if that is None).
    """
    groups = defaultdict[tuple[str, ...], list[dict[str, Any]]](list)  # several groups may have no parameters
    for group in saved["param_groups"]:
        groups[tuple(sorted(group["params"]))].append(group)
    for optimizer, names in zip(optimizers, names_in_order(model, optimizers), strict=True):
        numbers = {name: number for number, name in enumerate(names)}
        param_groups = []
        for group in optimizer.state_dict()["param_groups"]:
            alike = groups[tuple(sorted(names[number] for number in group["params"]))]
            param_groups.append({**group, **(alike.pop(0) if alike else {}), "params": group["params"]})
        state = {numbers[name]: values for name, values in saved["state"].items() if name in numbers}
        for group in () if isinstance(optimizer, OneBitAdam) else param_groups:
            for number in (each for each in group["params"] if "variance_step" in state.get(each, ())):
                state[number] = adamw_state(state[number], group["betas"][1])
        optimizer.load_state_dict({"state": state, "param_groups": param_groups})
        if isinstance(optimizer, (OneBitOptimizer, MatrixOptimizer, Adafactor)):
            continue
        is_torchs = type(optimizer).step.__module__.startswith("torch.optim")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, values in state.items():
            held, grad_dtype = optimizer.state[parameters[number]], parameters[number].grad_dtype if is_torchs else None
            for key in values.keys() & held.keys() - {"step"}:
                is_number = is_torchs and key in ("mu_product", "eta", "mu")  # scalars of NAdam and ASGD, at least fp32
                rule = (None, None) if is_number else (dtypes.get(names[number]), grad_dtype)
                if tree_structure(held[key]) == tree_structure(values[key]):
                    held[key] = tree_map(partial(_uncast, *rule), held[key], values[key])


def _uncast(dtype: torch.dtype | None, only: torch.dtype | None, held: Any, saved: Any) -> Any:
    """Return ``held``, the cast copy of ``saved``; uncast if ``saved`` has dtype ``only``, or (None) not ``dtype``."""
    if not (isinstance(held, Tensor) and isinstance(saved, Tensor)) or saved.dtype == held.dtype:
        return held
    if saved.dtype != only if only else saved.dtype == dtype:
        return held
    return torch.empty_like(held, dtype=saved.dtype).copy_(saved)


def names_in_order(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[str]]:
    """Return the names of each optimizer's parameters, in the order in which its state dict counts them.

    Raise a ``ValueError`` if a parameter is none of the model's, or another optimizer's, too.
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


def check_plain(value: Any, name: str, *, in_pieces: bool = False, tensors: tuple[type, ...] | None = None) -> None:
    """Raise a ``TypeError`` that names the first thing inside ``value`` that is neither plain data nor a tensor.

    Args:
        name: name of ``value`` in the message.
        in_pieces: whether torch's checkpoints store dicts in ``value`` in pieces, and restore them as plain dicts.
        tensors: the exact types that tensors may have; None: any.
    """
    kind, keys = type(value), (str,) if in_pieces else (str, int, float, bool)
    if kind in _PLAIN or (isinstance(value, Tensor) and (tensors is None or kind in tensors)):
        return
    if kind in (dict, OrderedDict) or (kind is Counter and not in_pieces):
        for key, inner in value.items():
            if type(key) not in keys:
                wanted = " or ".join(each.__name__ for each in keys)
                raise TypeError(f"{name} has a key {key!r}, a {_full_name(type(key))}; a checkpoint keeps {wanted}")
            check_plain(inner, f"{name}[{key!r}]", in_pieces=in_pieces, tensors=tensors)
    elif kind in (list, tuple):
        for index, inner in enumerate(value):
            check_plain(inner, f"{name}[{index}]", in_pieces=in_pieces, tensors=tensors)
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
