"""Whole parameters outside of a forward, to be read or edited."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from yafsdp_cc.engine.module import root_of
from yafsdp_cc.engine.tensor import flat_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def whole_parameters(model: nn.Module, *, write: bool = False) -> Iterator[None]:
    """While it is open, the parameters of a sharded ``model`` are whole and plain, in their own dtype, on every rank.

    ``named_parameters()``, attributes and ``state_dict()`` all show them; they are copies of the whole model, so mind
    the memory. A collective: enter on all ranks.

    Args:
        model: what was given to ``shard``.
        write: keep what was changed; every rank must make the same changes, and each keeps those to its own part.

    Raises:
        ValueError: ``model`` is not sharded.
        RuntimeError: entered inside a forward or a backward.
    """
    root = root_of(model)
    if root.passage is not None or torch._C._current_graph_task_id() != -1:
        raise RuntimeError("whole_parameters inside a forward or backward: weights are whole there already")
    pieces = [*(piece for unit in root.units for piece in unit.pieces), *root.small.pieces]
    wholes = [flat_dtensor(piece.local, piece.cut).full_tensor() for piece in pieces]
    for piece, whole in zip(pieces, wholes, strict=True):
        piece.install(nn.Parameter(whole, requires_grad=piece.parameter.requires_grad))
    try:
        yield
    finally:
        for piece, whole in zip(pieces, wholes, strict=True):
            if write:
                with torch.no_grad():
                    piece.parameter.copy_(whole)
            piece.install(piece.parameter)
