"""The way back: a sharded model becomes a plain one, in place."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from yafsdp_cc.engine.module import ShardedModule, disown, is_root, root_of
from yafsdp_cc.engine.whole import check_at_rest, whole_units

if TYPE_CHECKING:
    from yafsdp_cc.engine.root import Root

Model = TypeVar("Model", bound=nn.Module)

_OURS = ("shard_spec", "_is_param")
"""What the ``__dict__`` of a sharded parameter holds beside the notes of users and frameworks."""


def unshard_model(model: Model, *, rank0_only: bool = False, device: torch.device | str | None = None) -> Model:
    """Undo ``shard``: whole, plain parameters again, the model's own classes, none of the engine's hooks.

    A collective, one unit at a time: beside the plain model a rank holds its shards and one unit. Gradients are
    dropped. An optimizer goes on holding the sharded parameters, and their memory: make a new one.

    Args:
        model: what was given to ``shard``.
        rank0_only: whole parameters on the first rank of the mesh alone; elsewhere they are on the meta device.
        device: where parameters and buffers shall be; None: where they were. ``"cpu"`` is for models that are larger
            than one GPU.

    Returns:
        The same object.

    Raises:
        ValueError: ``model`` is not what was given to ``shard``.
        RuntimeError: called inside a forward or a backward.
    """
    root = root_of(model)
    check_at_rest(root, "unshard_model")
    if not is_root(model):
        raise ValueError(f"this {type(model).__name__} is a part of a sharded model: unshard the whole of it")
    _replace_parameters(root, rank0_only, device)
    for module in list(model.modules()):
        if isinstance(module, ShardedModule):
            disown(module)
        if device is not None:
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
    del root
    gc.collect()  # units and their buffers refer to each other
    return model


def _replace_parameters(root: Root, rank0_only: bool, device: torch.device | str | None) -> None:
    for piece, whole in whole_units(root, everywhere=not rank0_only):
        sharded = piece.parameter
        if whole is None:
            values = torch.empty(piece.cut.shape, dtype=sharded.dtype, device="meta")
        else:
            values = whole.to(device or sharded.device, copy=True)
        if piece.cut.tensor_parallel is not None:
            values = piece.cut.tensor_parallel.wrap_unsharded(values)
        plain = nn.Parameter(values, requires_grad=sharded.requires_grad)
        plain.__dict__.update({name: note for name, note in vars(sharded).items() if name not in _OURS})
        piece.install(plain)
