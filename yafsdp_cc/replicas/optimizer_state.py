"""The mean over replicas of the state of their optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from yafsdp_cc.replicas.plain_values import decoded, encoded
from yafsdp_cc.replicas.sync import LocalBuffer, local_of, runs_of, sum_over

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from yafsdp_cc.engine.communicator import Communicator

_MOST_VALUES, _MOST_KEYS = 1 << 14, 32
"""Limits of a peer's message about one parameter's optimizer state: bytes (8 more for each element), with no tensors of
the parameter's shape, which are not in the message; and number of values."""
_NONE = (None,)
"""Message of a None in an optimizer's state; a value that another replica has under the same key replaces it."""

Parameters = Mapping[str, "nn.Parameter"]
"""The trained parameters of a model by full name."""
States = Mapping[Tensor, Mapping[str, Any]]
"""State of an optimizer by parameter."""


class StateValue(NamedTuple):
    """A value in the optimizer's state of a parameter."""

    name: str
    key: str
    value: Any
    is_like: bool = False
    """Whether the value has the shape of the parameter."""


def mean_state(parameters: Parameters, states: States, comm: Communicator, names: Sequence[str]) -> list[StateValue]:
    """Return the mean of the optimizers' states over the replicas that have them. A collective.

    Values of another shape than their parameter, such as the number of steps, are those of the first replica that has
    them.

    Args:
        states: this replica's state; empty for one that has none to contribute.
        comm: the ranks that hold this shard, one in each replica.
        names: names of these replicas, for errors.

    Raises:
        ValueError: a replica has sent what is no state of this optimizer.
    """
    # a value is sent in a tuple; an empty one stands for a tensor like its parameter
    known: dict[str, dict[str, tuple[Any, ...]]] = {}
    for name, parameter in parameters.items():
        state = states.get(parameter, {})
        known[name] = {key: () if _is_like(key, value, parameter) else (_plain(value),) for key, value in state.items()}
    everywhere: dict[tuple[str, str], tuple[Any, ...]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for sender, theirs in zip(names, _exchange(known, comm, parameters), strict=True):
        for name, key, value in _checked(theirs, parameters, states, sender):
            if everywhere.get((name, key), _NONE) == _NONE:
                everywhere[name, key] = value
            counts[name, key] += not value
    found = [StateValue(name, key, *value) for (name, key), value in everywhere.items() if value]
    alike = [place for place, value in everywhere.items() if not value]
    for run in (alike[part] for part in runs_of([parameters[name] for name, _ in alike])):
        mean = LocalBuffer([local_of(parameters[name]) for name, _ in run], device=comm.device)
        for (name, key), view in zip(run, mean.views, strict=True):
            if (own := states.get(parameters[name], {}).get(key)) is not None:
                view.copy_(local_of(own))
        sum_over(comm, mean.data)
        for place, view in zip(run, mean.views, strict=True):
            found.append(StateValue(*place, view.div_(counts[place]), is_like=True))
    return found


def write_state(parameters: Parameters, optimizer: Optimizer, values: Sequence[StateValue]) -> None:
    """Write the ``values`` that ``mean_state`` has returned into the optimizer's state."""
    for name, key, value, is_like in values:
        parameter = parameters[name]
        own = optimizer.state[parameter]
        if is_like and own.get(key) is None:
            own[key] = torch.zeros_like(parameter, requires_grad=False)
        if isinstance(own.get(key), Tensor):
            local_of(own[key]).copy_(value)
        else:  # take the device from other parameters' values: numbers of steps may be in host memory
            kept = (state[key] for state in optimizer.state.values() if isinstance(state.get(key), Tensor))
            device = next((each.device for each in kept), None)
            own[key] = value.to(device) if isinstance(value, Tensor) and device is not None else value


def _exchange(known: Any, comm: Communicator, parameters: Parameters) -> Iterator[Tensor]:
    """Yield every replica's message with the state of its optimizer. A collective."""
    try:
        message = encoded(known)
    except TypeError as error:
        raise ValueError(f"replicas exchange the optimizer's state as tensors and plain values: {error}") from None
    sizes = torch.zeros(comm.world, 1, dtype=torch.int64, device=comm.device)
    sizes[comm.rank] = len(message)
    for work in comm.all_gather(sizes.view(-1), sizes[comm.rank], async_op=True):
        work.wait()
    found = sizes.view(-1).tolist()
    most = sum(_MOST_VALUES + 8 * local_of(each).numel() for each in parameters.values())
    if not 0 <= min(found) <= max(found) <= most:
        raise ValueError(f"replicas announce {found} bytes of optimizer state: at most {most} go with this model")
    texts = torch.zeros(comm.world, max(found), dtype=torch.uint8, device=comm.device)
    texts[comm.rank, : len(message)] = message
    for work in comm.all_gather(texts.view(-1), texts[comm.rank], async_op=True):
        work.wait()
    return (text[:size].cpu() for text, size in zip(texts, found, strict=True))


def _checked(
    message: Tensor, parameters: Parameters, states: States, sender: str
) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield parameter name, key and value of optimizer state that a replica has sent, after checking them."""
    try:
        for name, state in decoded(message).items():
            parameter = parameters[name]
            own = states.get(parameter, {})
            if len(state) > _MOST_KEYS:
                raise ValueError(f"{len(state)} values for '{name}', more than an optimizer has")
            for key, value in state.items():
                if type(key) is not str or not _fits(key, value, own.get(key), parameter):
                    raise ValueError(f"{key!r} of '{name}' has another type or shape than this replica's")
                yield name, key, value
    except (AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"{sender} has sent what is no state of this optimizer: {error}") from None


def _is_like(key: str, value: Any, parameter: nn.Parameter) -> bool:
    is_like = isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
    return is_like and key != "step"  # "step" is a scalar, as some parameters are


def _fits(key: str, value: tuple[Any, ...], own: Any, parameter: nn.Parameter) -> bool:
    """Return whether another replica's value has the type and shape of ``own``; True where either is None."""
    if type(value) is not tuple or len(value) > 1:
        return False
    if own is None or value == _NONE:
        return True
    if not value or _is_like(key, own, parameter):
        return not value and _is_like(key, own, parameter)
    if isinstance(own, Tensor):
        return isinstance(value[0], Tensor) and value[0].shape == local_of(own).shape
    return type(value[0]) is type(own)


def _plain(value: Any) -> Any:
    return local_of(value).cpu() if isinstance(value, Tensor) else value
