"""A sharded model's whole state dict, gathered unit by unit, so that no rank ever holds two copies of it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from torch import Tensor, nn

from yafsdp_cc.engine.dtensor import FlatDTensor
from yafsdp_cc.engine.full_params import check_at_rest, is_first_of_model, whole_params_by_group
from yafsdp_cc.engine.module import require_state

if TYPE_CHECKING:
    from collections.abc import Iterator


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model before ``shard``, in host memory, on the first rank; an empty dict on the others.

    A collective. The first rank holds what is gathered so far and one unit; the others nothing beside their shards.
    Tied parameters are one tensor under each of their names.

    Raises:
        ValueError: ``model`` is not sharded.
        RuntimeError: called inside a forward or a backward.
    """
    full: dict[str, Tensor] = {}
    for names, tensor in whole_tensors(model):
        whole = tensor.to("cpu", copy=True)
        full.update(dict.fromkeys(names, whole))
    return {name: full.get(name, value) for name, value in model.state_dict().items()} if full else {}


def whole_tensors(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """All names and the whole value of each parameter and persistent buffer, on the first rank; none on the others.

    In order: parameters unit by unit, small ones, what was ignored, and buffers. A value is gone, or changes, when the
    next is asked for. A collective: go through it to the end, on all ranks.

    Raises:
        As ``full_state_dict``, at the first step.
    """
    state = require_state(model)
    check_at_rest(state, "a full state dict")
    names: defaultdict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    is_first = is_first_of_model(state)
    for param, whole in whole_params_by_group(state, everywhere=False):
        if whole is None:
            continue
        if (parallel := param.spec.tensor_parallel) is not None:
            whole = parallel.wrap_unsharded(whole).full_tensor()
        if is_first:
            yield names[param.parameter], whole
    if is_first:
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor) and not isinstance(value, FlatDTensor):
                yield [name], value.detach()
