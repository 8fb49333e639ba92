"""Allocates and initialises models on the meta device, one unit at a time, so that no rank holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yafsdp_cc.forms.subclasses import empty_like, leave_meta
from yafsdp_cc.tensor.unwritten import mark_unwritten

if TYPE_CHECKING:
    from yafsdp_cc.sharding.units import OwnedParameter


@torch.no_grad()
def materialize(
    owned: Sequence[OwnedParameter],
    model: nn.Module,
    device: torch.device,
    initialize: Callable[[nn.Module], Any] | None,
) -> bool:
    """Allocate and initialise modules that own parameters of ``owned`` on the meta device; return whether any does.

    Such a module's other parameters keep their values, loaded ones for example, unless ``initialize`` is given.

    Without ``initialize``, ``_init_weights(module)`` of the innermost Hugging Face model around a module or its own
    ``reset_parameters()`` initialises the module.

    Raises:
        ValueError: a module has neither ``_init_weights`` nor ``reset_parameters()``, and there is no ``initialize``.
    """
    owners = {module: each.name for each in owned if each.parameter.is_meta for module, _ in each.sites}
    paths = {module: path for path, module in model.named_modules()} if owners else {}
    empty = {each for module in owners for each in module._parameters.values() if each is not None and each.is_meta}
    for module, name in owners.items():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                fresh = empty_like(parameter, device)
                torch.utils.swap_tensors(parameter, fresh)  # ``parameter`` remains the same object
                mark_unwritten(parameter)
        _fill(module, name, paths[module], model, device, initialize, empty)
    for each in owned:
        if each.parameter.is_meta:
            leave_meta(each.parameter, each.held)
    return bool(owners)


@torch.no_grad()
def place_buffers(
    model: nn.Module, device: torch.device, initialize: Callable[[nn.Module], Any] | None, *, of_loaded: bool = False
) -> list[Tensor]:
    """Move the buffers of ``model`` to ``device``, initialise those on the meta device, and return all buffers.

    Args:
        of_loaded: whether to initialise only buffers of modules that own parameters, all with values already.
            ``reset_parameters()`` writes parameters, too, and functions such as ``orthogonal_`` cannot write shards.

    Raises:
        ValueError: a module with a buffer on the meta device has no method to initialise the buffer.
    """
    move_buffers(model, device)  # before initialisation, which may read another module's buffers
    for path, module in model.named_modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        on_meta = {each.is_meta for each in module._parameters.values() if each is not None}
        if names and (on_meta == {False} or not of_loaded):
            _fill(module, f"{path}.{names[0]}" if path else names[0], path, model, device, initialize)
    move_buffers(model, device)  # move buffers that an initialisation has made, too
    return list(model.buffers())


def move_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Move the buffers of ``model`` to ``device``, except those on the meta device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _fill(
    module: nn.Module,
    name: str,
    path: str,
    model: nn.Module,
    device: torch.device,
    initialize: Callable[[nn.Module], Any] | None,
    empty: Collection[nn.Parameter] = (),
) -> None:
    """Initialise what ``module`` owns on the meta device, ``empty`` parameters included; other parameters keep their
    values, unless ``initialize`` is given, which may load others.

    ``reset_parameters()`` writes all parameters that the module owns, so loaded ones are copied before and restored
    after. It may also compute buffers.
    """
    parameters = () if initialize is not None else module._parameters.values()
    kept = [
        (parameter, parameter.detach().clone())
        for parameter in parameters
        if parameter is not None and not parameter.is_meta and parameter not in empty
    ]
    for attribute, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[attribute] = fresh = torch.empty_like(buffer, device=device)
            mark_unwritten(fresh)
    parts, reset = path.split("."), getattr(module, "reset_parameters", None)
    around = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1)]
    found = (getattr(each, "_init_weights", None) for each in around)
    # models of other authors may have an ``_init_weights()`` that takes no module and initialises its own
    of_model = next((each for each in found if callable(each) and signature(each).parameters), None)
    if initialize is not None:
        initialize(module)
    elif of_model is not None:
        of_model(module)
    elif callable(reset):
        reset()
    else:
        raise ValueError(
            f"'{name}' is on the meta device, and its module {type(module).__name__} has no reset_parameters(): "
            "pass shard(model, param_init_fn=...), a function that initialises what a module owns itself"
        )
    for parameter, values in kept:
        parameter.copy_(values)
