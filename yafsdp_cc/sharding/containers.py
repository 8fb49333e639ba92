"""Lists, dicts and dataclasses in a module's arguments, into which its forward may put outputs.

A forward gets copies of containers that hold tensors to gate or cast. A tensor put into a copy (``skips.append(x)``,
``batch["x"] = x``) is an output, and goes to the caller's own container. One put into a container that was not
copied, such as an empty list, has no hook: some output of the module has to lead to the loss, or the backward raises.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

NO_CONTAINERS = (Tensor, type(None), bool, int, float, str)
"""Classes of most arguments of forwards, which are known to be no containers."""


def returning_containers(given: Sequence[Any], passed: Sequence[Any], finish: Callable[[Any], Any]) -> Any:
    """Return a function that applies ``finish`` to a forward's output and to what the forward put into arguments.

    Args:
        given: arguments that the caller has passed.
        passed: the arguments that the forward gets, with copies of containers.
    """
    copied = list(_copied(given, passed))
    return partial(_finish, copied, finish) if copied else finish


def _finish(copied: Sequence[_Copied], finish: Callable[[Any], Any], output: Any) -> Any:
    output, written = finish((output, [each.written() for each in copied]))
    for container, values in zip(copied, written, strict=True):
        container.write_back(values)
    return output


def _contents(container: Any) -> dict[Any, Any]:
    """Return what a list, dict or dataclass holds: by index, by key, or by the name of a field or other attribute."""
    if isinstance(container, (list, deque)):
        return dict(enumerate(container))
    if isinstance(container, dict):
        return dict(container)
    names = [field.name for field in dataclasses.fields(container)]
    names += [name for name in getattr(container, "__dict__", ()) if name not in names]
    return {name: getattr(container, name) for name in names if hasattr(container, name)}


class _Copied:
    """A list, dict or dataclass in a module's arguments, and the copy with other tensors that its forward gets.

    Args:
        given: the container that the caller has passed.
        passed: the copy that ``map_tensors`` has made.
    """

    def __init__(self, given: Any, passed: Any) -> None:
        self.given, self.passed = given, passed
        self._before = _contents(passed)

    def written(self) -> dict[Any, Any]:
        """Return what the forward has put into the copy, by index, key or field."""
        kept = {id(each) for each in self._before.values()}
        return {key: each for key, each in _contents(self.passed).items() if id(each) not in kept}

    def write_back(self, written: dict[Any, Any]) -> None:
        """Change the caller's container as the forward has changed the copy: ``skips.append(x)``, ``batch["x"] = x``.

        Items that the forward has left in the copy stay what they were in the caller's container.

        Args:
            written: values of ``written()``, perhaps cast or hooked, which go into the caller's container.
        """
        before, after, own = self._before, _contents(self.passed), _contents(self.given)
        if after.keys() == before.keys() and all(after[key] is each for key, each in before.items()):
            return
        originals = {id(each): own.get(key, each) for key, each in before.items()}
        values = {key: written[key] if key in written else originals[id(each)] for key, each in after.items()}
        if isinstance(self.given, (list, deque)):
            self.given.clear()
            self.given.extend(values.values())
        elif isinstance(self.given, dict):  # no ``clear``: output classes of Transformers refuse it
            for key in own.keys() - values.keys():
                del self.given[key]
            for key, value in values.items():
                self.given[key] = value
        else:
            for name, value in values.items():
                object.__setattr__(self.given, name, value)


def _copied(given: Any, passed: Any) -> list[_Copied]:
    """Return the lists, dicts and dataclasses within ``given`` that ``map_tensors`` has copied to make ``passed``."""
    if given is passed or isinstance(given, Tensor):
        return []
    if isinstance(given, tuple):
        found, own, copies = [], dict(enumerate(given)), dict(enumerate(passed))
    elif isinstance(given, (list, deque, dict)) or dataclasses.is_dataclass(given):
        found, own, copies = [_Copied(given, passed)], _contents(given), _contents(passed)
    else:
        return []
    for key in (key for key in own if key in copies):  # ``__copy__`` of a dataclass may leave attributes out
        found += _copied(own[key], copies[key])
    return found
