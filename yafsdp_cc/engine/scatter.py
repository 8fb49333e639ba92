"""Whole tensors of a full state dict into flat ranges, where ``torch.distributed.checkpoint.state_dict`` does it.

``set_model_state_dict`` and ``set_optimizer_state_dict`` take from each whole tensor the slice along a dimension that a
DTensor's placement names. A flat range is no such slice: it would not fit, or become a DTensor cut otherwise. Such
tensors are filled here, by ``copy_``, which knows their ranges; all others go the way they always went.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed._state_dict_utils
import torch.distributed.checkpoint.state_dict

_utils: Any = torch.distributed._state_dict_utils
_state_dict: Any = torch.distributed.checkpoint.state_dict


def teach_state_dicts(kind: type[torch.Tensor]) -> None:
    """Let torch fill tensors of exactly this ``kind`` from whole ones by ``copy_``."""
    scatter = _utils._distribute_tensors
    broadcast, distribute = _state_dict._broadcast_state_dict, _state_dict._distribute_state_dict

    @functools.wraps(scatter)
    def one_broadcast(local: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            pair = local.get(key)
            if isinstance(pair, tuple) and type(pair[0]) is kind:
                local[key] = pair[0].copy_(pair[1])
        scatter(local, keys, *args, **kwargs)

    @functools.wraps(broadcast)
    def from_rank_0(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        scalars = {key: value for key, value in local.items() if type(value) is kind and value.dim() == 0}
        broadcast(full, local, *args, **kwargs)
        for key, target in scalars.items():
            if isinstance(local.get(key), torch.Tensor):  # replaced by a plain one
                local[key] = target.copy_(local[key])

    @functools.wraps(distribute)
    def from_every_rank(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        ours = {key for key in full if type(local.get(key)) is kind and isinstance(full[key], torch.Tensor)}
        for key in ours:
            local[key].copy_(full[key])
        others = {key: value for key, value in full.items() if key not in ours}  # in order: it may communicate
        distribute(others, local, *args, **kwargs)

    _utils._distribute_tensors = one_broadcast
    _state_dict._broadcast_state_dict = from_rank_0
    _state_dict._distribute_state_dict = from_every_rank
