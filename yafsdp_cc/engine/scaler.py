"""Residuals beside a ``GradScaler``: what is still to be said is in units of the scaled loss, and the scale changes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from yafsdp_cc.engine.assemble import current
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.engine.residuals import rescale

if TYPE_CHECKING:
    import torch
    from torch import nn


def follow_scaler(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """Let the residuals of a model change their unit with the scale of its losses, exactly.

    Call it once, before the first scaled backward; again after ``scaler.load_state_dict``. Without it, what is in the
    residuals counts by the new scale after each change. (On a GPU, ``scaler.update()`` then waits for the device.)

    Raises:
        ValueError: ``model`` is not sharded with a compression.
    """
    if root_of(model).compressed is None:
        raise ValueError(f"follow_scaler: this {type(model).__name__} is sharded without a compression")
    update = scaler.update
    root = current(model)
    rescale(root, scaler.get_scale())
    assert root.compressed is not None
    root.compressed.follows_scaler = True

    @functools.wraps(update)
    def update_both(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        root, scale = current(model), scaler.get_scale()
        if root.compressed is not None and scale != root.compressed.loss_scale:
            rescale(root, scale)

    scaler.update = update_both  # type: ignore[method-assign]
