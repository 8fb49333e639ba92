"""What a checkpoint may hold beside parameters: plain data and tensors, which loading needs to run no code for."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def check_plain(
    value: object, name: str, keys: tuple[type, ...] = (str, int, float, bool), tensors: tuple[type, ...] | None = None
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
        for key, inner in value.items():  # type: ignore[attr-defined]
            if type(key) not in keys:
                wanted = " or ".join(each.__name__ for each in keys)
                raise TypeError(f"{name} has a key {key!r}, a {_full_name(type(key))}; a checkpoint keeps {wanted}")
            check_plain(inner, f"{name}[{key!r}]", keys, tensors)
    elif kind in (list, tuple):
        for index, inner in enumerate(value):  # type: ignore[arg-type]
            check_plain(inner, f"{name}[{index}]", keys, tensors)
    else:
        raise TypeError(
            f"{name} is a {_full_name(kind)}, which could only be loaded by running code from the file: "
            + _advice(value)
        )


def check_extra(extra: dict[str, object]) -> None:
    """``check_plain`` for what users hand to ``save``."""
    check_plain(extra, "extra", tensors=(Tensor, nn.Parameter))


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
