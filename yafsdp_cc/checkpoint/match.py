"""Whether a checkpoint fits a model and its optimizer, before anything is read into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from yafsdp_cc.checkpoint.state import MODEL, OPTIMIZER, names_in_order, plain_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.optim import Optimizer

_SHOWN = 8
"""Differences that a message lists."""


def model_part(contents: Metadata, folder: Path) -> dict[str, Any]:
    """What is stored of a model's state, by name.

    Raises:
        ValueError: the checkpoint has no part for a model.
    """
    paths = _paths(contents)
    saved = {path[1]: contents.state_dict_metadata[key] for key, path in paths.items() if path[0] == MODEL}
    if not saved:
        tops = sorted({str(path[0]) for path in paths.values()} or contents.state_dict_metadata)
        raise ValueError(
            f"{folder} is a checkpoint of another form: it holds {_listed(map(repr, tops), ', ')}, and no 'model'. "
            "yafsdp_cc.load reads what yafsdp_cc.save wrote, or torch.distributed.checkpoint.save of "
            "{'model': ..., 'optimizer': ...} as get_state_dict returns them"
        )
    return saved


def check_model(contents: Metadata, state: Mapping[str, Any], folder: Path) -> None:
    """Compare names and shapes with a model's ``state``.

    Raises:
        ValueError: they differ, or the checkpoint has no part for a model.
    """
    saved = model_part(contents, folder)
    check_shapes(
        {name: list(each.size) if isinstance(each, TensorStorageMetadata) else None for name, each in saved.items()},
        state,
        folder,
    )


def check_shapes(saved: Mapping[str, list[int] | None], state: Mapping[str, Any], folder: Path) -> None:
    """Compare names and shapes (None: not a tensor).

    Raises:
        ValueError: they differ; it names each.
    """
    wanted = {name: list(value.shape) if isinstance(value, Tensor) else None for name, value in state.items()}
    lines = [
        f"checkpoint has '{name}' {saved[name]}, model has {wanted[name]}"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    lines += [f"checkpoint lacks '{name}' {wanted[name]}" for name in wanted if name not in saved]
    lines += [f"checkpoint has '{name}' {saved[name]}, model has no such name" for name in saved if name not in wanted]
    if lines:
        raise ValueError(
            f"{folder} does not fit the model:\n  {_listed(lines)}\nBuild the model as it was when it was saved"
        )


def aliases(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, each with the first one."""
    first: dict[Tensor, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        if first.setdefault(parameter, plain) != plain:
            found[plain] = first[parameter]
    return found


def check_tied(values: Mapping[str, Tensor], names: Mapping[str, str], folder: Path) -> None:
    """Compare what is stored under the names of tied parameters, this rank's parts of it.

    Raises:
        ValueError: it differs, so that one of the two would be lost.
    """
    for name, first in names.items():
        one, other = (getattr(values[each], "_local_tensor", values[each]) for each in (first, name))
        if not one.equal(other):
            raise ValueError(
                f"{folder} holds different values for '{first}' and '{name}', which are one parameter in this model: "
                "untie them as they were when it was saved"
            )


def check_optimizer(contents: Metadata, model: nn.Module, folder: Path) -> None:
    """See that there is state for an optimizer, of this model's parameters.

    Raises:
        ValueError: there is none, or none that can be given to this model.
    """
    stored = _paths(contents).values()
    paths = [path for path in stored if path[0] == OPTIMIZER]
    if not paths:
        if other := sorted({str(path[0]) for path in stored if path[1:2] in (("state",), ("param_groups",))}):
            raise ValueError(
                f"{folder} has no 'optimizer': it holds {_listed(map(repr, other), ', ')}, which load does not read. "
                "Read it as it was saved, by torch.distributed.checkpoint.load and set_optimizer_state_dict, or "
                "load(path, model) without an optimizer"
            )
        raise ValueError(f"{folder} was saved without an optimizer: load(path, model) reads the model alone")
    if any(path[1] not in ("state", "param_groups") for path in paths):
        raise ValueError(
            f"{folder} holds its optimizer flattened, as '{'.'.join(map(str, paths[0]))}': save it without "
            "flatten_optimizer_state_dict, or read it with torch's set_optimizer_state_dict"
        )
    known = {plain_name(name) for name, _ in model.named_parameters()}
    strange = dict.fromkeys(str(path[2]) for path in paths if path[1] == "state" and len(path) > 2)
    if lines := [f"checkpoint's optimizer has '{name}', model lacks it" for name in strange if name not in known]:
        raise ValueError(f"{folder} does not fit:\n  {_listed(lines)}")


def check_groups(saved: Sequence[Mapping[str, Any]], model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Compare the optimizer's groups of parameters, and what kind of optimizer it is.

    Raises:
        ValueError: they differ.
    """
    then = {name: index for index, group in enumerate(saved) for name in group["params"]}
    names = iter(names_in_order(model, optimizer))
    now = {next(names): index for index, group in enumerate(optimizer.param_groups) for _ in group["params"]}
    lines = [f"checkpoint's optimizer lacks '{name}'" for name in now if name not in then]
    lines += [f"checkpoint's optimizer has '{name}', this one lacks it" for name in then if name not in now]
    together: dict[int, int] = {}
    lines += [
        f"checkpoint's optimizer has '{name}' in group {then[name]}, this one in group {now[name]}"
        for name in now
        if name in then and together.setdefault(now[name], then[name]) != then[name]
    ]
    if not lines and len(set(together.values())) < len(together):
        lines = [
            f"checkpoint's optimizer has {len(saved)} groups of parameters, this one {len(optimizer.param_groups)}"
        ]
    if lines:
        raise ValueError(
            f"{folder} does not fit this {type(optimizer).__name__}:\n  {_listed(lines)}\n"
            "Give the optimizer the groups of parameters that it had"
        )
    # Steps that were made are no setting, and not all optimizers tell them.
    old, new = (set(group) - {"params", "steps"} for group in (saved[0], optimizer.param_groups[0]))
    gone, fresh = (_listed(sorted(some), ", ") for some in (old - new, new - old))
    if gone and fresh:  # versions of torch add some, so one may have more than the other
        raise ValueError(
            f"{folder} holds the state of another optimizer than {type(optimizer).__name__}: it has {gone}, and lacks "
            f"{fresh}. Make the optimizer that was saved, or load(path, model) without one"
        )


def _paths(contents: Metadata) -> dict[str, tuple[Any, ...]]:
    return contents.planner_data or {}


def _listed(lines: Iterable[str], between: str = "\n  ") -> str:
    lines = list(lines)
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return between.join([*lines[:_SHOWN], *more])
