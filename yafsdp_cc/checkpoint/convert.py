"""A checkpoint folder turned into safetensors by one process, which holds one file of it at a time."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from yafsdp_cc.checkpoint import folder as folders
from yafsdp_cc.checkpoint.match import model_part
from yafsdp_cc.checkpoint.ranks import by_torch
from yafsdp_cc.checkpoint.reader import CheckpointReader, SafePlanner
from yafsdp_cc.checkpoint.safetensors import Files
from yafsdp_cc.checkpoint.state import MODEL

_AT_ONCE = 1 << 28
"""Bytes read at a time, unless one tensor is larger."""


def convert(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    config: str | os.PathLike[str] | None = None,
) -> None:
    """Write the model of a checkpoint as safetensors, without building the model. Needs no process group.

    A tied weight, which a checkpoint holds under each of its names, is written under each of them.

    Args:
        checkpoint: a folder of ``save``, or of ``torch.distributed.checkpoint`` with the same parts.
        out: a folder that is not there yet, or empty.
        dtype: of the floating-point weights in the files; None: their own.
        config: a file to put beside them as ``config.json``, for ``from_pretrained``.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is none, or an unfinished or damaged one; or there is something at ``out``.
        pickle.UnpicklingError: its table of contents wants code to be run.
    """
    source, target = folders.complete(folders.place(checkpoint)), folders.place(out)
    reader = CheckpointReader(source)
    part = model_part(reader.contents, source)
    folder = folders.begin(target)
    files = Files(folder)
    batch: dict[str, torch.Tensor] = {}
    for name, stored in part.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue  # what a module's get_extra_state gave
        if sum(each.nbytes for each in batch.values()) > _AT_ONCE:
            _move(batch, reader, files, dtype)
        batch[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    _move(batch, reader, files, dtype)
    files.close()
    if config is not None:
        shutil.copyfile(config, folder / "config.json")
    folders.commit(target)


def _move(batch: dict[str, torch.Tensor], reader: CheckpointReader, files: Files, dtype: torch.dtype | None) -> None:
    state: dict[str, Any] = {MODEL: batch}
    with by_torch(f"reading {reader.path}"):
        state_dict_loader.load(state, storage_reader=reader, planner=SafePlanner(), no_dist=True)
    for name, tensor in batch.items():
        files.add(name, tensor, dtype)
    batch.clear()
