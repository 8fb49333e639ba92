"""``load``: a checkpoint of any number of ranks, from this package or from FSDP2, into a model and its optimizer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from yafsdp_cc.checkpoint import compression
from yafsdp_cc.checkpoint import extra as extras
from yafsdp_cc.checkpoint import folder as folders
from yafsdp_cc.checkpoint.match import aliases, check_groups, check_model, check_optimizer, check_tied
from yafsdp_cc.checkpoint.ranks import by_torch, everybody, place_in, ranks_of, together
from yafsdp_cc.checkpoint.reader import CheckpointReader, SafePlanner
from yafsdp_cc.checkpoint.save import wait_for_saves
from yafsdp_cc.checkpoint.state import MODEL, OPTIMIZER, restore_optimizer, room_for_optimizer
from yafsdp_cc.engine.full_params import check_shows_shards

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.optim import Optimizer


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Read what ``save`` wrote, or ``torch.distributed.checkpoint.save`` of ``{"model": ..., "optimizer": ...}``.

    A collective; each rank reads its own parts, straight into the parameters. No code from the files is ever run. A
    checkpoint that does not fit is refused before anything is changed, by all ranks; after a damaged file has ended a
    load, the model holds some of each.

    Args:
        path: a checkpoint's folder.
        model: sharded over any number of ranks, by this package or FSDP2, or plain.
        optimizer: of this model's parameters, in the groups that it had; None leaves its state in the folder.

    Returns:
        The ``extra`` that this rank has saved. With another number of ranks than then, what all had saved alike; a
        warning names what is left out.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: it is no checkpoint, an unfinished or damaged one, or does not fit, by full names.
        pickle.UnpicklingError: a file wants code to be run.
        RuntimeError: a rank could not read its part; or called inside ``whole_parameters``.
    """
    wait_for_saves()
    group = ranks_of(model).front
    rank, world = place_in(group)
    with together(group):
        folder = folders.complete(folders.place(path))
        reader = CheckpointReader(folder)
        check_shows_shards(model, "load")
        state: dict[str, Any] = {MODEL: get_model_state_dict(model)}
        check_model(reader.contents, state[MODEL], folder)
        if optimizer is not None:
            check_optimizer(reader.contents, model, folder)
            state[OPTIMIZER] = room_for_optimizer(model, reader.contents)
        extra = extras.read(folder, rank, world)
    if tied := aliases(model):  # what is stored under each of their names, before one overwrites the other
        values = {name: torch.zeros_like(state[MODEL][name]) for name in {*tied, *tied.values()}}
        _read({MODEL: values}, reader, group)
        with together(group):
            check_tied(values, tied, folder)
    if optimizer is not None:  # the groups by themselves first: they may not fit
        groups = {OPTIMIZER: {"param_groups": state[OPTIMIZER]["param_groups"]}}
        _read(groups, reader, group)
        with together(group):
            check_groups(groups[OPTIMIZER]["param_groups"], model, optimizer, folder)
    state |= compression.empty_state(model, reader.contents, optimizer is not None)
    _read(state, reader, group)
    set_model_state_dict(model, state[MODEL])
    if optimizer is not None:
        restore_optimizer(model, optimizer, state[OPTIMIZER])
    with together(group):
        fits = compression.load_local_state(model, extra)
    if not all(everybody(fits, group)):
        compression.carry_over(model, state)
    compression.load_kept(model, state, extra)
    return extra


def _read(state: dict[str, Any], reader: CheckpointReader, group: dist.ProcessGroup | None) -> None:
    with by_torch(f"loading {reader.path}"):
        state_dict_loader.load(
            state, storage_reader=reader, planner=SafePlanner(), process_group=group, no_dist=group is None
        )
