"""What callers give, checked before anything is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from yafsdp_cc.plan import OwnedParameter


def check_types(
    *, ignored_params: Collection[nn.Parameter] | None = None, **arguments: tuple[object, Any, str]
) -> None:
    """Raise a ``TypeError`` that names the first of ``arguments`` (value, types, what it takes) of a wrong type."""
    ignored = {
        f"ignored_params[{index}]": (each, nn.Parameter, "parameters themselves, not their names")
        for index, each in enumerate(ignored_params or ())
    }
    for name, (value, kinds, wanted) in (arguments | ignored).items():
        if not isinstance(value, kinds):
            raise TypeError(f"{name} takes {wanted}; got {value!r}")


def dtypes_of(mp_policy: object) -> dict[str, tuple[object, Any, str]]:
    """For ``check_types``, after the policy itself."""
    kinds, wanted = (torch.dtype, type(None)), "a torch.dtype, such as torch.bfloat16"
    return {
        f"mp_policy.{name}": (getattr(mp_policy, name, None), kinds, wanted)
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
    }


def check_hooks(owned: Sequence[OwnedParameter]) -> None:
    """Raise a ``ValueError`` that names the first parameter with hooks."""
    for each in owned:
        if each.parameter._backward_hooks or each.parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"'{each.name}' has hooks, which would be lost with the whole parameter: after sharding, call "
                "register_post_accumulate_grad_hook on the sharded one"
            )


def check_modules(model: nn.Module, call: str) -> None:
    """Raise a ``ValueError`` where ``call`` would make something of ``model`` that cannot be trained."""
    if torch.is_inference_mode_enabled():
        raise ValueError(f"{call} under torch.inference_mode() would make weights that cannot be trained")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"'{name}' has max_norm={module.max_norm}: its forward writes to its weight, which would be lost with "
                "the gathered copy. Renormalise under yafsdp_cc.whole_parameters(model, write=True) instead"
            )
