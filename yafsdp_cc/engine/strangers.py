"""Parameters that come into a model after it was sharded: every rank would train values of its own."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

from yafsdp_cc.engine.dtensor import FlatDTensor

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn


class Strangers:
    """What ``model`` holds that is neither sharded nor ``ignored``. As long as it is frozen it may stay."""

    def __init__(self, model: nn.Module, ignored: Collection[nn.Parameter]) -> None:
        self._model = model
        self._ignored = ignored
        self._registries: list[dict[str, Any]] = []
        """Where modules keep modules and parameters."""
        self._seen: list[object] = []
        """What was in the registries, in order."""
        self._frozen: list[nn.Parameter] = []

    def check(self) -> None:
        """Raise a ``ValueError`` that names the first parameter that is to be trained; quick where nothing is new."""
        if self._registries and self._is_as_seen() and not any(each.requires_grad for each in self._frozen):
            return
        strange = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if not isinstance(parameter, FlatDTensor) and parameter not in self._ignored
        }
        if trained := [name for name, parameter in strange.items() if parameter.requires_grad]:
            others = f" (and {len(trained) - 1} more)" if len(trained) > 1 else ""
            raise ValueError(
                f"'{trained[0]}'{others} was added after sharding, so every rank would train values of its own: add "
                "adapters and layers first, then call shard() or fully_shard()"
            )
        self._frozen = list(strange.values())
        self._registries = [each for module in self._model.modules() for each in (module._modules, module._parameters)]
        self._seen = list(self._held())

    def _is_as_seen(self) -> bool:
        return sum(map(len, self._registries)) == len(self._seen) and all(map(is_, self._held(), self._seen))

    def _held(self) -> chain[object]:
        return chain.from_iterable(map(dict.values, self._registries))
