"""``load``: a checkpoint of any number of ranks, from this package or from FSDP2, into a model and its optimizer.

A checkpoint that does not fit or is damaged is refused before anything is changed: its files are read twice, the first
time only to verify checksums, so that no second copy of the model is held.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from yafsdp_cc.checkpoint import compression, files, replicas
from yafsdp_cc.checkpoint.ranks import Ticks, by_torch, check_arguments, meet, place_in, together
from yafsdp_cc.checkpoint.reader import CheckpointReader, DryPlanner, SafePlanner
from yafsdp_cc.checkpoint.save import wait_for_saves
from yafsdp_cc.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    as_sequence,
    empty_extra_states,
    empty_optimizer_state,
    is_extra_state,
    load_model_state,
    model_state,
    names_in_order,
    paths_in,
    plain_name,
    restore_optimizers,
    unpacked,
    unwrapped,
)
from yafsdp_cc.forms.subclasses import PLAIN
from yafsdp_cc.fsdp2.module import check_shows_shards
from yafsdp_cc.ranks.checks import all_gather_objects, table_of_ranks
from yafsdp_cc.ranks.mesh import writable
from yafsdp_cc.replicas.sync import local_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.optim import Optimizer

    from yafsdp_cc.checkpoint.ranks import Group, Ranks
    from yafsdp_cc.checkpoint.state import Optimizers

_SHOWN = 8
"""Number of differences that a message lists."""
_TRIES = 100
"""Largest number of checkpoints at one path that a load begins to read while saves replace them."""


class _ReplacedError(RuntimeError):
    """Raised if a save replaced the checkpoint during a load, so that the model may hold parts of both."""


@torch.inference_mode(False)  # tensors made in inference mode cannot be trained on
def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """Load a checkpoint of ``save``, or torch's one of ``{"model": ..., "optimizer": ...}``. A collective.

    Each rank reads its own parts, straight into the parameters. No code from the files is ever run. A
    checkpoint that does not fit, or is damaged, is refused by all ranks alike before anything is changed.

    Args:
        path: a checkpoint's folder.
        model: sharded over any number of ranks, by this package or FSDP2, or plain.
        optimizer: the optimizer of this model's parameters, in the groups that the saved one had; or several; None
            loads no optimizer state.

    Returns:
        The ``extra`` that this rank has saved. With another number of ranks, the values that all ranks saved alike; a
            warning names those left out.

    Raises:
        FileNotFoundError: there is nothing at ``path``, for any rank.
        ValueError: ``path`` holds no checkpoint, or one that is unfinished, damaged (the message names the file), not
            the same for all ranks, or does not fit (the message gives full names).
        pickle.UnpicklingError: a file wants code to be run.
        RuntimeError: called inside ``whole_parameters``; or a rank did not come before the timeout of the process
            group.
    """
    check_arguments("load", path, model)
    wait_for_saves()
    model, optimizers = unwrapped(model), as_sequence(optimizer)
    ranks = meet("load()", model, {"optimizers": len(optimizers)})
    target = files.place(path)
    for left in reversed(range(_TRIES)):
        before = files.version(target)
        try:
            with together(ranks.front), closing(Ticks(ranks.back)) as ticks, ticks.beside():
                reader = CheckpointReader(files.complete(target))
            return load_from(reader, model, optimizers, ranks)
        except (ValueError, FileNotFoundError, _ReplacedError):
            if not any(all_gather_objects(files.version(target) != before, ranks.front)) or not left:
                raise
    raise AssertionError


def load_from(
    reader: CheckpointReader, model: nn.Module, optimizers: Sequence[Optimizer], ranks: Ranks
) -> dict[str, Any]:
    """Load the checkpoint of ``reader``; after an error, callers check if a save has replaced it. A collective."""
    group, folder = ranks.front, Path(reader.path)

    @contextmanager
    def present(names: Collection[str]) -> Iterator[None]:
        with reader.present(names), together(group), closing(Ticks(ranks.back)) as ticks, ticks.beside():
            yield

    of_ranks = files.extra_readers(folder, reader.extra_sums, present)
    own_copy = f"{files.METADATA} with SHA-256 {reader.digest[:8]}, {len(of_ranks)} extra files"
    copies = all_gather_objects((reader.digest, own_copy, str(folder)), group)
    if len({copy[:2] for copy in copies}) > 1:
        raise ValueError(
            "ranks load different checkpoints, or one of them a damaged copy; give every rank the same one:\n"
            + table_of_ranks(f"{where}, {copy}" for _, copy, where in copies)
        )
    with together(group):
        own = state_to_fill(model, "load")
        saved = model_part(reader.contents, folder).items()
        shapes = {name: list(each.size) if isinstance(each, TensorStorageMetadata) else None for name, each in saved}
        check_shapes(shapes, own, folder)
        dtypes = {name: each.properties.dtype for name, each in saved if isinstance(each, TensorStorageMetadata)}
        tied = aliases(own)
        state: dict[str, Any] = {MODEL: {name: writable(x) for name, x in own.items() if isinstance(x, Tensor)}}
        state[MODEL] |= empty_extra_states(reader.contents)
        if optimizers:
            paths = paths_in(reader.contents, OPTIMIZER).values()
            named = _named_as_saved(model, own, [path[1] for path in paths if path[0] == "state" and path[1:]])
            _check_optimizer(reader.contents, named, folder)
            state[OPTIMIZER] = empty_optimizer_state(named, reader.contents)
    # Not in the block above: ranks read extra files together, and a rank that failed a check above would be missing.
    with together(group):
        extra = files.read_extra(of_ranks, *place_in(group), folder)
        state |= compression.empty_state(model, reader.contents, extra, of_ranks, bool(optimizers))
    state |= replicas.empty_state(model, reader.contents)
    read_into(state, reader, ranks.back, dry=True)
    quantised = metadata_names(model, state[MODEL])
    # compare the entries of tied names before one overwrites the other
    values = {name: torch.zeros_like(state[MODEL][name]) for name in {*tied, *tied.values(), *quantised}}
    if values:
        read_into({MODEL: values}, reader, ranks.back)
        with together(group):
            check_tied(values, tied, folder)
            for name in quantised:
                _check_metadata(name, values[name], state[MODEL].pop(name), folder)
        del values
    if optimizers:
        with together(group):
            groups = state[OPTIMIZER]["param_groups"]
            named = _named_as_saved(model, own, [name for group in groups for name in group["params"]])
            _check_groups(groups, named, optimizers, folder)
    weights = {MODEL: state.pop(MODEL)}
    if state:
        read_into(state, reader, ranks.back)
    if optimizers:
        with together(group):
            restore_optimizers(named, optimizers, state[OPTIMIZER], dtypes)
    try:
        read_into(weights, reader, ranks.back)  # weights are read in place: an error leaves some of the old weights
    except Exception as error:
        raise _ReplacedError(
            f"{folder} was whole and changed while it was read ({error}): the model holds some of each, load again"
        ) from error
    extras = {name: unpacked(value) for name, value in weights[MODEL].items() if is_extra_state(name)}
    with together(group):
        load_model_state(model, weights[MODEL] | extras)
    compression.load_state(model, state, extra, of_ranks, group)
    replicas.load_state(model, state)
    return extra


def _named_as_saved(model: nn.Module, own: Mapping[str, Any], stored: Collection[Any]) -> nn.Module:
    """Return ``model``; if only the ``stored`` names begin with ``module.``, in a module that adds this to its names.

    Earlier versions have saved an optimizer, but not its model, under the names of the DDP around the model.
    """
    is_of_ddp = stored and all(str(name).startswith("module.") and name not in own for name in stored)
    return nn.ModuleDict({"module": model}) if is_of_ddp else model


def read_into(state: dict[str, Any], reader: CheckpointReader, group: Group, dry: bool = False) -> None:
    """Fill the tensors of ``state``, and replace its Nones, from a checkpoint. A collective of ``group``.

    Each rank reads its own parts. With ``dry`` everything is read, and damage raises, but no tensor is filled.
    """
    stored, parts = reader.stored_names, dict(state)
    if MODEL in state:
        parts[MODEL] = {stored.get(name, name): value for name, value in state[MODEL].items()}
    with closing(Ticks(group)) as ticks, by_torch(f"loading {reader.path}", group) as which:
        reader.beside = ticks.beside
        state_dict_loader.load(parts, storage_reader=reader, planner=DryPlanner() if dry else SafePlanner(), **which)
    if MODEL in state:
        state[MODEL] = {name: parts[MODEL][stored.get(name, name)] for name in state[MODEL]}


# Checks whether a checkpoint fits: each raises a ``ValueError`` that names what does not


def model_part(contents: Metadata, folder: Path) -> dict[str, Any]:
    """Return the stored entries of a model's state by name; raise if there is no model in the checkpoint.

    The value of an extra state, which may have several entries, is None.
    """
    saved = {
        plain_name(name): None if is_extra_state(name) else contents.state_dict_metadata[key]
        for key, (name, *_) in paths_in(contents, MODEL).items()
    }
    if not saved:
        tops = sorted({str(path[0]) for path in (contents.planner_data or {}).values()} or contents.state_dict_metadata)
        raise ValueError(
            f"{folder} is a checkpoint of another form: it holds {_listed(map(repr, tops), ', ')}, and no 'model'. "
            "yafsdp_cc.load reads what yafsdp_cc.save wrote, or torch.distributed.checkpoint.save of "
            "{'model': ..., 'optimizer': ...} as get_state_dict returns them"
        )
    return saved


def state_to_fill(model: nn.Module, what: str) -> dict[str, Any]:
    """Return the state of a model that the call ``what`` fills; refuse tensors on the meta device, where copies are
    dropped without a word."""
    check_shows_shards(model, what)
    state = model_state(model)
    if name := next((name for name, each in state.items() if isinstance(each, Tensor) and each.is_meta), None):
        raise ValueError(
            f"{what}: '{name}' is on the meta device, where nothing can be loaded to: call shard(model), or "
            "model.to_empty(device=...), before"
        )
    return state


def check_shapes(saved: Mapping[str, list[int] | None], state: Mapping[str, Any], folder: Path) -> None:
    """Compare ``saved`` names and shapes (None: an extra state, or not a tensor) with those of a model's ``state``."""
    wanted = {
        name: list(value.shape) if isinstance(value, Tensor) and not is_extra_state(name) else None
        for name, value in state.items()
    }
    lines = [
        f"checkpoint has '{name}' {saved[name]}, model has {wanted[name]}"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    lines += [f"checkpoint lacks '{name}' {wanted[name]}" for name in wanted if name not in saved]
    lines += [f"checkpoint has '{name}' {saved[name]}, model has no such name" for name in saved if name not in wanted]
    if lines:
        remedy = "Build the model as it was when it was saved"
        for name, each in state.items():
            is_of_parts = isinstance(each, Tensor) and type(each) not in PLAIN and not isinstance(each, DTensor)
            if is_of_parts and saved.get(name) != wanted[name]:
                remedy = f"Shard the model first: '{name}' is a {type(each).__name__} here, and was saved as bytes"
        raise ValueError(f"{folder} does not fit the model:\n  {_listed(lines)}\n{remedy}")


def aliases(state: Mapping[str, Any]) -> dict[str, str]:
    """Return, for each name of a tied parameter in a model's ``state`` but its first one, that first name."""
    first: dict[Tensor, str] = {}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: first[value] for name, value in tensors.items() if first.setdefault(value, name) != name}


def check_tied(values: Mapping[str, Tensor], names: Mapping[str, str], folder: Path) -> None:
    """Raise a ``ValueError`` if stored values of tied names differ on this rank: one of the values would be lost."""
    for name, first in names.items():
        if not files.same(local_of(values[first]), local_of(values[name])):
            raise ValueError(
                f"{folder} holds different values for '{first}' and '{name}', which are one parameter in this model: "
                "untie them as they were when it was saved"
            )


def metadata_names(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return the entries of ``state`` that are metadata of quantised parameters, as bitsandbytes adds to its weights.

    An entry's name begins with that of its parameter. Modules load no such metadata: it follows from the quantisation.
    """
    held = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    above = {name: accumulate(name.split("."), lambda one, other: f"{one}.{other}") for name in state}
    return [name for name, value in state.items() if isinstance(value, Tensor) and (held - {name}) & set(above[name])]


def _check_metadata(name: str, value: Tensor, known: Tensor, folder: Path) -> None:
    """Raise a ``ValueError`` if a quantised parameter has other metadata in the checkpoint than in the model."""
    if not files.same(local_of(value), local_of(known)):
        raise ValueError(
            f"'{name}' in {folder} is not that of the model: its weight was quantised from other values. Quantise "
            "the model from the same weights as the one that was saved"
        )


def _check_optimizer(contents: Metadata, model: nn.Module, folder: Path) -> None:
    """Check that the checkpoint has an optimizer's state, in a form that can be read, for this model's parameters."""
    stored = (contents.planner_data or {}).values()
    paths = [path for path in stored if path[0] == OPTIMIZER]
    if not paths:
        if other := sorted({str(path[0]) for path in stored if path[1:2] in (("state",), ("param_groups",))}):
            raise ValueError(
                f"{folder} has no 'optimizer': it holds {_listed(map(repr, other), ', ')}, which load does not read. "
                "Read it as it was saved, by torch.distributed.checkpoint.load and set_optimizer_state_dict, or "
                "load(path, model) without an optimizer"
            )
        raise ValueError(f"{folder} was saved without an optimizer: load(path, model) reads the model alone")
    if any(path[1:2] not in (("state",), ("param_groups",)) for path in paths):
        raise ValueError(
            f"{folder} holds its optimizer flattened, as '{'.'.join(map(str, paths[0]))}': save it without "
            "flatten_optimizer_state_dict, or read it with torch's set_optimizer_state_dict"
        )
    shapes = {plain_name(name): each.shape for name, each in model.named_parameters()}
    strange = dict.fromkeys(str(path[2]) for path in paths if path[1] == "state" and len(path) > 2)
    if lines := [f"checkpoint's optimizer has '{name}', model lacks it" for name in strange if name not in shapes]:
        raise ValueError(f"{folder} does not fit:\n  {_listed(lines)}")
    _check_moments(contents, shapes, folder)


def _check_moments(contents: Metadata, shapes: Mapping[str, torch.Size], folder: Path) -> None:
    """Compare the shapes of optimizer tensors with those of their parameters.

    A name such as ``exp_avg`` is compared where any tensor of this name has the shape of its parameter. Factors that
    broadcast along a dimension fit, and so do flattened tensors, and lists.
    """
    alike, odd = set(), {}
    for key, path in paths_in(contents, OPTIMIZER).items():
        stored = contents.state_dict_metadata[key]
        if path[0] != "state" or len(path) != 3 or not isinstance(stored, TensorStorageMetadata):
            continue
        _, name, kind = path
        shape = shapes[name]
        if stored.size == shape and len(shape):
            alike.add(kind)
        elif stored.size.numel() != shape.numel() and not _repeats(stored.size, shape):
            odd[kind, name] = list(stored.size)
    lines = [
        f"checkpoint's optimizer has {size} as '{kind}' of '{name}', which is {list(shapes[name])}"
        for (kind, name), size in odd.items()
        if kind in alike
    ]
    if lines:
        raise ValueError(f"{folder} does not fit:\n  {_listed(lines)}")


def _repeats(size: torch.Size, shape: torch.Size) -> bool:
    """Return whether a tensor of ``size`` can be broadcast to ``shape``."""
    return len(size) <= len(shape) and all(
        one in (1, other) for one, other in zip(reversed(size), reversed(shape), strict=False)
    )


def _check_groups(
    saved: Sequence[Mapping[str, Any]], model: nn.Module, optimizers: Sequence[Optimizer], folder: Path
) -> None:
    """Raise a ``ValueError`` if ``saved`` parameter groups are of other optimizers or divide parameters differently."""
    then = {name: index for index, group in enumerate(saved) for name in group["params"]}
    groups = [(type(each).__name__, group) for each in optimizers for group in each.param_groups]
    names = (name for each in names_in_order(model, optimizers) for name in each)
    now = {next(names): index for index, (_, group) in enumerate(groups) for _ in group["params"]}
    kinds = " and ".join(dict.fromkeys(kind for kind, _ in groups))
    lines = [f"checkpoint's optimizer lacks '{name}'" for name in now if name not in then]
    lines += [f"checkpoint's optimizer has '{name}', this one lacks it" for name in then if name not in now]
    places: dict[int, int] = {}
    lines += [
        f"checkpoint's optimizer has '{name}' in group {then[name]}, this one in group {now[name]}"
        for name in now
        if name in then and places.setdefault(now[name], then[name]) != then[name]
    ]
    if not lines and len(set(places.values())) < len(places):
        lines = [f"checkpoint's optimizer has {len(saved)} groups of parameters, this one {len(groups)}"]
    if lines:
        raise ValueError(
            f"{folder} does not fit this {kinds}:\n  {_listed(lines)}\n"
            "Give the optimizer the groups of parameters that it had, or all optimizers that were saved: load(path, "
            "model, [first, second])"
        )
    for index, (kind, group) in enumerate(groups):
        if index not in places:  # a parameter group without parameters on this rank
            continue
        # a group's "steps", a number of steps, is no setting, and not all optimizers have it
        old, new = (set(each) - {"params", "steps"} for each in (saved[places[index]], group))
        gone, fresh = (_listed(sorted(some), ", ") for some in (old - new, new - old))
        if gone and fresh:  # versions of torch add settings: saved or present ones alone may have more
            raise ValueError(
                f"{folder} holds the state of another optimizer than {kind}: it has {gone}, and lacks {fresh}. Make "
                "the optimizer that was saved, or load(path, model) without one"
            )


def _listed(lines: Iterable[str], between: str = "\n  ") -> str:
    lines = list(lines)
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return between.join([*lines[:_SHOWN], *more])
