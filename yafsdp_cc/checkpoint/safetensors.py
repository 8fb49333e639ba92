"""Whole weights as safetensors in Hugging Face's layout, written from a sharded model and read into one.

model.safetensors                                           or, when larger than one file shall be,
model-00001-of-00002.safetensors ... model.safetensors.index.json
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from yafsdp_cc.checkpoint import folder as folders
from yafsdp_cc.checkpoint.full import whole_tensors
from yafsdp_cc.checkpoint.match import aliases, check_shapes, check_tied
from yafsdp_cc.checkpoint.ranks import place_in, ranks_of, together
from yafsdp_cc.engine.dtensor import FlatDTensor
from yafsdp_cc.engine.full_params import check_shows_shards
from yafsdp_cc.engine.module import ShardedModule, require_state

_INDEX = "model.safetensors.index.json"
_FILE_BYTES = 5 * 10**9
"""Of a file, at most, unless one tensor is larger: so much one rank holds whole."""


def save_safetensors(path: str | os.PathLike[str], model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Write a sharded model's whole weights for ``transformers``' ``from_pretrained``, or anything that reads them.

    A collective. Weights come unit by unit to the first rank, which writes and holds one file (5 GB) at most. A tied
    weight is written once, under its first name. The model's ``config`` and ``generation_config`` go along.

    Args:
        path: a folder that is not there yet, or empty; complete or not there, like one of ``save``.
        model: what was given to ``shard``.
        dtype: of the floating-point weights in the files; None: their own.

    Raises:
        ValueError: ``model`` is not sharded, or there is something at ``path``.
        OSError: the first rank could not write. Raised by that rank, and as a ValueError by the others.
    """
    require_state(model)
    group = ranks_of(model).front
    target = folders.place(path)
    files: Files | None = None
    with together(group):
        if place_in(group)[0] == 0:
            files = Files(folders.begin(target))
    failure: Exception | None = None
    for names, tensor in whole_tensors(model):  # to the end also after a failure: the others are on their way
        assert files is not None
        try:
            if failure is None:
                files.add(names[0], tensor, dtype)
        except Exception as error:
            failure = error
    with together(group):
        if failure is not None:
            raise failure
        if files is not None:
            files.close()
            _write_configs(model, files)
            folders.commit(target)


def load_safetensors(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Fill a model's parameters and buffers from safetensors; each rank reads no more than its own parts.

    The names must be the model's own. Values are cast to the model's dtypes. Works on sharded and on plain models.

    Args:
        path: a ``.safetensors`` file, or a folder with one or several and their index.
        model: a model whose tied weights, if any, need be in the files under one name only.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: names or shapes differ, or the values of a tied weight under its names, by full names; on all ranks.
        RuntimeError: called inside ``whole_parameters``.
    """
    from safetensors import safe_open

    group = ranks_of(model).front
    with together(group):
        check_shows_shards(model, "load_safetensors")
        # What a module's get_extra_state gives may be anything, and these files hold tensors.
        state = {name: value for name, value in get_model_state_dict(model).items() if isinstance(value, Tensor)}
        files = _files_of(Path(path).absolute())
        opened: list[Any] = [safe_open(file, framework="pt") for file in files]
        places = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        shapes = {name: list(file.get_slice(name).get_shape()) for name, file in places.items()}
        check_shapes(shapes, _without_aliases(model, state, shapes), Path(path))
        tied = {name: first for name, first in aliases(model).items() if name in places and first in places}
        values = {name: torch.zeros_like(state[name]) for name in {*tied, *tied.values()}}
        for name, value in values.items():
            _fill(value, name, places[name])
        check_tied(values, tied, Path(path))
    with torch.no_grad():
        for name, file in places.items():
            _fill(state[name], name, file)


class Files:
    """safetensors files of bounded size in a folder, as they fill."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._bytes = 0
        self.dtype: torch.dtype | None = None
        """Of the first floating-point weight."""

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
        """Take a copy of ``tensor``, in ``dtype`` if that is given and the tensor of floating point."""
        if tensor.is_floating_point():
            dtype = dtype or tensor.dtype
            self.dtype = self.dtype or dtype
        else:
            dtype = tensor.dtype
        size = tensor.numel() * dtype.itemsize
        held = sum(each.nbytes for each in self._held.values())
        if self._held and held + size > _FILE_BYTES:
            self._flush()
        self._held[name] = tensor.to("cpu", dtype, copy=True).contiguous()
        self._bytes += size

    def close(self) -> None:
        """Write what is left, and give the files their names."""
        self._flush()
        count = len(self._written)
        if count == 1:
            os.rename(self._part(1), self._folder / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self._written, start=1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            os.rename(self._part(number), self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        self.write(_INDEX, json.dumps({"metadata": {"total_size": self._bytes}, "weight_map": weight_map}, indent=2))

    def write(self, name: str, text: str) -> None:
        """Another file of the folder."""
        (self._folder / name).write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self._written.append(list(self._held))
        part = self._part(len(self._written))
        save_file(self._held, part, metadata={"format": "pt"})
        with part.open("rb") as file:
            os.fsync(file.fileno())
        self._held = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def _write_configs(model: nn.Module, files: Files) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__mro__[ShardedModule._orig_cls_mro_index].__name__]
        config.dtype = files.dtype
        files.write("config.json", config.to_json_string())
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files.write("generation_config.json", generation.to_json_string())


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (index := path / _INDEX).is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if strange := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{index} refers to '{strange[0]}', which is not a file of this folder")
        return [path / name for name in sorted(names)]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there are no safetensors at {path}")
    return files


def _without_aliases(model: nn.Module, state: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """``state`` without further names of tied parameters, where one of their names is found."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    spare = {name for same in names.values() if any(each in found for each in same) for name in same} - found.keys()
    return {name: value for name, value in state.items() if name not in spare}


def _fill(target: Any, name: str, file: Any) -> None:
    if not isinstance(target, FlatDTensor) or not target.dim():
        target.copy_(file.get_tensor(name))
        return
    stored = file.get_slice(name)
    for chunk in target.__create_chunk_list__():
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        target.__get_tensor_shard__(MetadataIndex(name, chunk.offsets)).copy_(stored[box])
