"""Finds parameters and buffers that were allocated and never written, before a forward computes with them.

Memory allocated for a tensor of the meta device is filled with a byte: 0xFF, which is NaN in every floating dtype, or
0xA5. A tensor that has this byte everywhere counts as never written: a write of values, in full or in part, by torch or
by a custom kernel, leaves other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yafsdp_cc.engine.layout import local_tensor
from yafsdp_cc.forms.subclasses import tensors_of
from yafsdp_cc.ranks.checks import refused_together
from yafsdp_cc.ranks.mesh import all_groups

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.engine.param import FSDPParam

_VERSION = "_yafsdp_cc_unwritten"
"""Attribute of tensors allocated without values: their version at that time; None where torch counts no versions."""
_NAMED = 8
"""Largest number of further tensors without values that an error names."""


def makes_empty(fn: Callable[[Tensor], Tensor]) -> bool:
    """Return whether ``fn``, the argument of ``nn.Module._apply``, comes from ``to_empty`` and returns no values."""
    return getattr(fn, "__qualname__", "").startswith("Module.to_empty.")


@torch.no_grad()
def mark_unwritten(tensor: Tensor, local: Tensor | None = None) -> None:
    """Mark ``tensor`` as allocated without values, and fill this rank's part with the byte of unwritten memory."""
    local = local_tensor(tensor) if local is None else local
    for values in _bytes_of(local):
        values.fill_(_filling(local))
    tensor.__dict__[_VERSION] = None if local.is_inference() else local._version


def check_written(
    named: Mapping[str, nn.Parameter], model: nn.Module, params: Sequence[FSDPParam], mesh: DeviceMesh
) -> None:
    """Find tensors that ``mark_unwritten`` marked and nothing has written to since. A collective.

    Args:
        named: all parameters of ``model`` by full name; ``params`` are those that are sharded or replicated.

    Raises:
        RuntimeError: ``model`` has an unwritten parameter or buffer, or a buffer on the meta device. A ValueError if
            only another rank has one.
    """
    with refused_together(*all_groups(mesh)):
        found = {param.spec.name: "parameter" for param in params if _is_unwritten(param.parameter, param.local)}
        sharded = {param.parameter for param in params}
        found |= {name: "parameter" for name, each in named.items() if each not in sharded and _is_unwritten(each)}
        found |= {name: "buffer" for name, each in model.named_buffers() if each.is_meta or _is_unwritten(each)}
        if not found:
            return
        (name, kind), *others = found.items()
        names = ", ".join(f"'{each}'" for each, _ in others[:_NAMED]) + (", ..." if len(others) > _NAMED else "")
        more = f" (and {len(others)} more: {names})" if others else ""
        raise RuntimeError(
            f"{kind} '{name}'{more} has no values: it is on the meta "
            "device, or left it for to_empty() or shard(), and nothing has written it since. Before the first forward, "
            f"load it, or call model.get_{kind}({name!r}).copy_(...), or .zero_() where the forward fills it. State "
            "dicts have persistent buffers alone; param_init_fn, reset_parameters() and _init_weights() are to write "
            "the others"
        )


def _is_unwritten(tensor: Tensor, local: Tensor | None = None) -> bool:
    if _VERSION not in tensor.__dict__:
        return False
    if local is None:
        local, version = local_tensor(tensor), tensor.__dict__[_VERSION]
        if version is not None and local._version != version:
            return False  # not for shards, which have the version of their whole flat buffer
    filling, parts = _filling(local), list(_bytes_of(local))
    # check the first byte first: it differs in nearly every written tensor
    return bool(parts) and all(
        int(values[0]) == filling and int(values.amin()) == filling == int(values.amax()) for values in parts
    )


def _filling(tensor: Tensor) -> int:
    return 0xFF if tensor.is_floating_point() or tensor.is_complex() else 0xA5


def _bytes_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of the dense plain tensors that ``tensor`` consists of; none for fake tensors."""
    for each in tensors_of(tensor.detach()):
        if type(each) is Tensor and each.numel() and not each.is_meta:
            yield each.as_strided((each.numel(),), (1,)).view(torch.uint8)
