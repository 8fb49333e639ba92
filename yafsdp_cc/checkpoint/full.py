"""Whole weights: a full state dict in host memory, or safetensors in Hugging Face's layout, written and read.

    model.safetensors or, if larger than the limit of a file,
    model-00001-of-00002.safetensors ... model.safetensors.index.json

Weights are gathered unit by unit, so that no rank ever holds two copies of the model.
"""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_only

from yafsdp_cc.checkpoint import files
from yafsdp_cc.checkpoint.files import Replacement
from yafsdp_cc.checkpoint.load import (
    aliases,
    check_shapes,
    check_tied,
    metadata_names,
    model_part,
    read_into,
    state_to_fill,
)
from yafsdp_cc.checkpoint.ranks import Ticks, check_arguments, check_is_one_model, meet, place_in, ranks_of
from yafsdp_cc.checkpoint.reader import CheckpointReader
from yafsdp_cc.checkpoint.save import wait_for_saves
from yafsdp_cc.checkpoint.state import (
    MODEL,
    empty_extra_states,
    host_copy,
    is_extra_state,
    load_model_state,
    model_state,
    plain_name,
    unpacked,
    unwrapped,
)
from yafsdp_cc.checkpoint.state import check_plain as plain_data
from yafsdp_cc.forms.extensions import holds_bytes
from yafsdp_cc.forms.subclasses import check_plain
from yafsdp_cc.fsdp2.module import (
    ShardedModule,
    check_at_rest,
    is_first_of_model,
    require_state,
    whole_params_by_group,
)
from yafsdp_cc.ranks.checks import check_dense, refused_together
from yafsdp_cc.ranks.mesh import writable
from yafsdp_cc.replicas.sync import synchronize_replicas

_INDEX = "model.safetensors.index.json"
_PACKED = ".packed"
"""Suffix of extra states' names in safetensors; earlier versions wrote tensor extra states under their own names."""
_FILE_BYTES = 5 * 10**9
"""Largest size of a safetensors file in bytes, unless one tensor is larger; the writing rank holds a file in memory."""


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the plain model's state dict, in host memory, on the first rank; elsewhere an empty one. A collective.

    The first rank holds the tensors gathered so far and one unit; other ranks only their shards. Tied parameters are
    one tensor under each of their names. Names are without prefixes of wrappers such as ``torch.compile``. Hooks of the
    state dict and ``get_extra_state`` apply.

    Raises:
        ValueError: ``model`` is not sharded.
        RuntimeError: called inside a forward or a backward, or not on every rank.
    """
    model = unwrapped(model)
    group = meet("full_state_dict()", model, {}).front
    check_is_one_model("full_state_dict()", model)
    synchronize_replicas(model)
    with refused_together(*group):
        own = _state_at_rest(model)
    full: dict[str, Any] = {}
    for names, tensor in _whole_tensors(model, own):
        full.update(dict.fromkeys(names, tensor.to("cpu", copy=True)))
    full |= _others(own)
    return {name: full[name] for name in own} if is_first_of_model(require_state(model)) else {}


def save_safetensors(path: str | os.PathLike[str], model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Write a sharded model's whole weights, as ``transformers``' ``from_pretrained`` reads them. A collective.

    Weights come unit by unit to the first rank, which writes and holds one file (5 GB) at most. A tied
    weight is written once, under its first name. The model's ``config`` and ``generation_config`` go along, unless it
    has adapters of PEFT, under whose names ``from_pretrained`` finds no weights.

    Args:
        path: a new or empty folder; it appears only when complete, like one of ``save``.
        model: the model that was passed to ``shard``.
        dtype: dtype of the floating-point weights in the files; None: their own.

    Raises:
        ValueError: ``model`` is not sharded, there is something at ``path``, or ``dtype`` would change the bytes of a
            quantised weight.
        OSError: the first rank could not write. Raised by that rank, and as a ValueError by the others.
    """
    check_arguments("save_safetensors", path, model)
    model = unwrapped(model)
    check_is_one_model("save_safetensors()", model)
    for param in require_state(model).params:
        check_plain(f"'{param.spec.name}'", param.local, "a safetensors file", "save it with yafsdp_cc.save")
        if holds_bytes(param) and param.parameter.is_floating_point() and dtype not in (None, param.parameter.dtype):
            raise ValueError(
                f"save_safetensors(dtype={dtype}) would cast '{param.spec.name}', whose {param.parameter.dtype} are "
                "bytes of a quantised weight: leave dtype out"
            )
    synchronize_replicas(model)
    group = ranks_of(model).front
    is_first = place_in(group)[0] == 0
    with ExitStack() as stack:
        with refused_together(*group):
            replacement = stack.enter_context(closing(Replacement(files.place(path)))) if is_first else None
            own = _state_at_rest(model)
            packed = _packed(others := _others(own))
            check_dense(((name, each) for name, each in own.items() if name not in others), "save_safetensors")
        tensors = chain(((names[0], tensor) for names, tensor in _whole_tensors(model, own)), packed.items())
        with refused_together(*group):
            try:
                if replacement is not None:
                    saved_as = _write_files(replacement.new, tensors, dtype)
                    _write_configs(replacement.new, model, saved_as)
                    replacement.commit()
            finally:  # gathering ``tensors`` is a collective: a rank that failed gathers the rest, too
                for _ in tensors:
                    pass


@torch.inference_mode(False)  # tensors made in inference mode cannot be trained on
def load_safetensors(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Fill a model's parameters and buffers from safetensors. A collective.

    Each rank reads only its own parts. The names must be the model's own. Values are cast to the model's dtypes. The
    model may be plain, or sharded by this package or FSDP2.

    Args:
        path: a ``.safetensors`` file, or a folder with one or several and their index.
        model: the model to fill. Tied weights need be in the files under one name only.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: on all ranks, with full names: a file is damaged, names or shapes differ, or a tied weight has
            different values under its names.
        RuntimeError: called inside ``whole_parameters``.
    """
    from safetensors import safe_open

    check_arguments("load_safetensors", path, model)
    wait_for_saves()
    synchronize_replicas(model)  # replicas' exchanges must end before the weights are replaced
    model = unwrapped(model)
    ranks = ranks_of(model)
    with refused_together(*ranks.front), closing(Ticks(ranks.back)) as ticks, ticks.beside():
        own = state_to_fill(model, "load_safetensors")
        opened: list[Any] = []
        for file in _files_of(Path(path).absolute()):
            with files.reading(file):
                opened.append(safe_open(file, framework="pt"))
        places = {plain_name(name): _Stored(file, name) for file in opened for name in file.keys()}  # noqa: SIM118
        bare = {name: name.removesuffix(_PACKED) for name in places}
        extras = {plain: places.pop(name) for name, plain in bare.items() if is_extra_state(plain)}
        shapes = {name: each.shape for name, each in places.items()} | dict.fromkeys(extras)
        tied = aliases(own)
        # names that files may lack: all but one of a tied weight's, and extra states, which other programs do not write
        found = {tied.get(name, name) for name in places}
        spare = {name for name in {*tied, *tied.values()} if tied.get(name, name) in found} - places.keys()
        spare |= {name for name in own if is_extra_state(name)} - extras.keys()
        check_shapes(shapes, {name: value for name, value in own.items() if name not in spare}, Path(path))
        state: dict[str, Any] = {name: writable(own[name]) for name in own if not is_extra_state(name)}
        tied = {name: first for name, first in tied.items() if name in places and first in places}
        values = {name: torch.zeros_like(state[name]) for name in {*tied, *tied.values()}}
        for name, value in values.items():
            _fill(value, places[name])
        check_tied(values, tied, Path(path))
        for name, each in extras.items():
            with files.reading(Path(path), f", '{name}',"):
                state[name] = each.extra_state()
    with refused_together(*ranks.front), closing(Ticks(ranks.back)) as ticks, ticks.beside():
        with torch.no_grad():
            for name, each in places.items():
                _fill(state[name], each)
        for name in metadata_names(model, state):
            del state[name]
        load_model_state(model, state)  # loads buffers and extra states: parameters are filled already


def convert(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    config: str | os.PathLike[str] | None = None,
) -> None:
    """Write the model of a checkpoint as safetensors, without building the model. Needs no process group.

    One process holds one file at a time. A tied weight, which a checkpoint holds under each of its names, is written
    under each of them.

    Args:
        checkpoint: a folder from ``save``, or from ``torch.distributed.checkpoint`` with the same parts.
        out: a new or empty folder.
        dtype: dtype of the floating-point weights in the files; None: their own.
        config: a file to copy beside the weights as ``config.json``, for ``from_pretrained``.

    Raises:
        FileNotFoundError: there is nothing at ``checkpoint``.
        ValueError: ``checkpoint`` is no checkpoint, an unfinished or a damaged one; or ``out`` is not empty; or there
            is a ``config``, and the weights have PEFT's names.
        pickle.UnpicklingError: the checkpoint's table of contents wants code to be run.
    """
    source = files.complete(files.place(checkpoint))
    reader = CheckpointReader(source)
    part = model_part(reader.contents, source)
    if config is not None and (adapted := next((name for name in part if name.startswith("base_model.model.")), "")):
        raise ValueError(
            f"{source} has the model with adapters, whose '{adapted}' from_pretrained() does not know: it would draw "
            "weights at random. Leave the config out; or merge in training: yafsdp_cc.unshard_model(model, "
            "rank0_only=True) on every rank, then merge_and_unload().save_pretrained(folder) of its result on the first"
        )
    with closing(Replacement(files.place(out))) as replacement:
        if config is not None:
            shutil.copyfile(config, replacement.new / "config.json")
        _write_files(replacement.new, _stored_tensors(reader, part), dtype)
        replacement.commit()


def _state_at_rest(model: nn.Module) -> dict[str, Any]:
    check_at_rest(require_state(model), "a full state dict")
    return model_state(model)


def _whole_tensors(model: nn.Module, own: Mapping[str, Any]) -> Iterator[tuple[list[str], Tensor]]:
    """Yield the names and whole value of each tensor in a model's ``own`` state on the first rank, nothing elsewhere.

    The order is: parameters unit by unit, replicated parameters, and then ignored parameters, buffers, and entries made
    by hooks. Each value may overwrite the one before. A collective: iterate to the end, on all ranks.
    """
    state = require_state(model)
    names: defaultdict[Tensor, list[str]] = defaultdict(list)
    for name, value in own.items():
        if isinstance(value, Tensor) and not is_extra_state(name):
            names[value].append(name)
    is_first = is_first_of_model(state)
    for param, whole in whole_params_by_group(state, everywhere=False):
        found = names.pop(param.parameter, [])
        if whole is None:
            continue
        if (parallel := param.spec.tensor_parallel) is not None:
            whole = parallel.wrap_unsharded(whole).full_tensor()
        if is_first and found:
            yield found, whole
    for value, found in names.items():
        whole = _whole(value)
        if is_first:
            yield found, whole


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _others(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra states and non-tensors in ``own``, with tensors whole and in host memory. A collective."""
    others = {name: value for name, value in own.items() if is_extra_state(name) or not isinstance(value, Tensor)}
    return dict(tree_map(host_copy, tree_map_only(Tensor, _whole, others)))


def _packed(others: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return extra states, which may be any objects, as byte tensors of their ``torch.save`` form."""
    for name, value in others.items():
        plain_data(value, f"'{name}'")
    contents = {name: bytearray(files.pack_extra(value)) for name, value in others.items()}
    return {name + _PACKED: torch.frombuffer(content, dtype=torch.uint8) for name, content in contents.items()}


def _stored_tensors(reader: CheckpointReader, part: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint's model one after the other."""
    for name, stored in part.items():
        if isinstance(stored, TensorStorageMetadata):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
            read_into({MODEL: {name: tensor}}, reader, ())
            yield name, tensor
    state = {MODEL: empty_extra_states(reader.contents)}
    if state[MODEL]:
        read_into(state, reader, ())
        yield from _packed({name: unpacked(value) for name, value in state[MODEL].items()}).items()


# Files of safetensors


def _write_files(folder: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> torch.dtype | None:
    """Write tensors to files of bounded size, floating-point ones cast to ``dtype`` if it is given; return the dtype
    of the first floating-point tensor in the files."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    written: list[list[str]] = []
    total, saved_as = 0, None

    def flush() -> None:
        nonlocal held
        part = folder / f"part-{len(written)}"
        try:
            save_file(held, part, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk raises a ``SafetensorError``
            raise OSError(f"{folder.parent.parent} could not be written to: {error}") from error
        with part.open("rb") as file:
            os.fsync(file.fileno())
        written.append(list(held))
        held = {}

    for name, tensor in tensors:
        kind = dtype or tensor.dtype if tensor.is_floating_point() else tensor.dtype
        if kind is torch.complex128:
            raise ValueError(f"'{name}' is {kind}, which safetensors cannot hold: save it with yafsdp_cc.save")
        if tensor.is_floating_point():
            saved_as = saved_as or kind
        size = tensor.numel() * kind.itemsize
        if held and sum(each.nbytes for each in held.values()) + size > _FILE_BYTES:
            flush()
        held[name] = tensor.to("cpu", kind, copy=True).contiguous()
        total += size
    flush()
    if len(written) == 1:
        os.rename(folder / "part-0", folder / "model.safetensors")
        return saved_as
    weight_map = {}
    for number, names in enumerate(written):
        file = f"model-{number + 1:05}-of-{len(written):05}.safetensors"
        os.rename(folder / f"part-{number}", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return saved_as


def _write_configs(folder: Path, model: nn.Module, dtype: torch.dtype | None) -> None:
    config: Any = getattr(model, "config", None)
    if getattr(model, "peft_config", None):  # with a config, from_pretrained would draw weights at random, and warn
        warnings.warn(
            "save_safetensors writes no config.json for a model with adapters: from_pretrained does not know the names "
            "that PEFT gives to weights. For the merged model call plain = yafsdp_cc.unshard_model(model, "
            "rank0_only=True) on every rank, and on the first plain.merge_and_unload().save_pretrained(folder)",
            stacklevel=3,
        )
        return
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__mro__[ShardedModule._orig_cls_mro_index].__name__]
        config.dtype = dtype
    configs: dict[str, Any] = {"config": config, "generation_config": getattr(model, "generation_config", None)}
    for name, each in configs.items():
        if hasattr(each, "to_json_string"):
            (folder / f"{name}.json").write_text(each.to_json_string(), encoding="utf-8")


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (index := path / _INDEX).is_file():
        with files.reading(index):
            names = set(map(os.fspath, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if strange := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{index} refers to '{strange[0]}', which is not a file of this folder")
        return [path / name for name in sorted(names)]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"there are no safetensors at {path}")
    return found


class _Stored(NamedTuple):
    """A stored tensor: the open safetensors file that has it, and its name there."""

    file: Any
    name: str

    @property
    def shape(self) -> list[int]:
        return list(self.file.get_slice(self.name).get_shape())

    def extra_state(self) -> Any:
        value = self.file.get_tensor(self.name)
        return files.load_plain(io.BytesIO(value.numpy().tobytes())) if self.name.endswith(_PACKED) else value


def _fill(target: Any, stored: _Stored) -> None:
    """Read this rank's parts of the ``stored`` tensor into ``target``."""
    if not isinstance(target, DTensor) or not target.dim():
        target.copy_(stored.file.get_tensor(stored.name))
        return
    whole = stored.file.get_slice(stored.name)
    for chunk in target.__create_chunk_list__():
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        target.__get_tensor_shard__(MetadataIndex(stored.name, chunk.offsets)).copy_(whole[box])
