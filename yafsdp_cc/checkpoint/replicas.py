"""The state of a ``ReplicaSync`` in a checkpoint, beside the model and its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from yafsdp_cc.checkpoint.state import paths_in, plain_name
from yafsdp_cc.replicas.sync import local_of, sync_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

REPLICAS = "replicas"
"""Key of a ``ReplicaSync``'s state in checkpoints; checkpoints of earlier versions need the key unchanged."""


@torch.no_grad()
def sharded_state(model: nn.Module) -> dict[str, Any]:
    """Return the state of the model's ``ReplicaSync``, sharded like the parameters. A collective."""
    sync = sync_of(model)
    if sync is None:
        return {}
    found: dict[str, Any] = {}
    for kind, tensors in sync.state().items():
        found[kind] = {}
        for (name, parameter), local in zip(sync.parameters.items(), tensors, strict=True):
            whole = torch.empty_like(parameter, dtype=local.dtype, requires_grad=False)
            local_of(whole).copy_(local)
            found[kind][plain_name(name)] = whole
    return {REPLICAS: found} if found else {}


def empty_state(model: nn.Module, contents: Metadata) -> dict[str, Any]:
    """Return tensors to load a ``ReplicaSync``'s state into, for each kind that was saved for all parameters."""
    sync = sync_of(model)
    if sync is None:
        return {}
    saved = set(paths_in(contents, REPLICAS).values())
    named = {plain_name(name): each for name, each in sync.parameters.items()}
    found = {
        kind: {name: torch.zeros_like(each, dtype=torch.float32, requires_grad=False) for name, each in named.items()}
        for kind in {kind for kind, _ in saved}
        if all((kind, name) in saved for name in named)
    }
    return {REPLICAS: found} if found else {}


@torch.no_grad()
def load_state(model: nn.Module, loaded: dict[str, Any]) -> None:
    """Resume the model's ``ReplicaSync`` after the weights were loaded; ``loaded`` is the filled ``empty_state``."""
    if (sync := sync_of(model)) is not None:
        saved = loaded.get(REPLICAS, {})
        sync.resume({kind: [local_of(each) for each in tensors.values()] for kind, tensors in saved.items()})
