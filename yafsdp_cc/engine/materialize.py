"""Models built on the meta device: given memory and values one unit at a time, so that no rank holds the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from yafsdp_cc.plan import OwnedParameter


@torch.no_grad()
def materialize(
    owned: Iterable[OwnedParameter],
    model: nn.Module,
    device: torch.device,
    initialize: Callable[[nn.Module], Any] | None,
) -> None:
    """Allocate and initialise every module that owns one of the parameters on the meta device.

    Without ``initialize``, a module's own ``reset_parameters()`` or, in Hugging Face models, the model's
    ``_init_weights(module)`` gives the values.

    Raises:
        ValueError: a module has neither, and no ``initialize`` was given.
    """
    owners = {module: each.name for each in owned if each.parameter.is_meta for module, _ in each.sites}
    of_model = getattr(model, "_init_weights", None)
    for module, name in owners.items():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                parameter.data = torch.empty_like(parameter, device=device)
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[attribute] = torch.empty_like(buffer, device=device)
        if initialize is not None:
            initialize(module)
        elif callable(of_model):
            of_model(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            raise ValueError(
                f"'{name}' is on the meta device, and its module {type(module).__name__} has no reset_parameters(): "
                "pass shard(model, param_init_fn=...), a function that initialises the parameters a module owns itself"
            )
