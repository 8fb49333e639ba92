"""The parameters and submodules that the modules of a sharded model hold, compared at each forward."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

from yafsdp_cc.tensor.dtensor import FlatDTensor
from yafsdp_cc.tensor.module_parameters import named_sharded_parameters
from yafsdp_cc.tensor.unwritten import check_written

if TYPE_CHECKING:
    from torch import nn

    from yafsdp_cc.engine.state import FSDPState


class ModelContents:
    """The parameters and submodules that a model's modules hold: without a check, the engine would compute with the
    shard of a parameter that the program has replaced.

    Args:
        state: the engine of the model.
        is_written: whether all parameters and buffers were seen to have values by an earlier engine.
    """

    def __init__(self, state: FSDPState, is_written: bool) -> None:
        self._model = state.model
        self._params = state.params
        self._mesh = state.context.info.mesh
        self._ignored: Collection[nn.Parameter] = {param for spec in state.specs for param in spec.ignored}
        self._registries: list[dict[str, Any]] = []
        """The modules' own dictionaries of submodules and parameters."""
        self._seen: list[object] = []
        """Values of ``_registries`` at the last check, in order."""
        self._frozen: list[nn.Parameter] = []
        self.is_written = is_written

    def check(self) -> None:
        """Raise if a parameter was replaced or converted, or a trainable one was added, since the last check."""
        if not self.is_written:
            check_written(self._model, self._params, self._mesh)
            self.is_written = True
        contents = self._contents()
        is_known = len(contents) == len(self._seen) and all(map(is_, contents, self._seen))
        is_frozen = not any(each.requires_grad for each in self._frozen)
        if self._registries and is_known and is_frozen and all(param.lies_in_shard for param in self._params):
            return
        for param in self._params:
            param.check_unchanged()
        self._frozen = _added_parameters(self._model, self._ignored)
        self._registries = [each for module in self._model.modules() for each in (module._modules, module._parameters)]
        self._seen = self._contents()

    def _contents(self) -> list[object]:
        return list(chain.from_iterable(map(dict.values, self._registries)))


def _added_parameters(model: nn.Module, ignored: Collection[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that were added to ``model`` after it was sharded, those in ``ignored`` left out.

    Frozen ones may stay. A trainable one is refused, because every rank would train values of its own for it.
    """
    added = {
        name: parameter
        for name, parameter in named_sharded_parameters(model)
        if not isinstance(parameter, FlatDTensor) and parameter not in ignored
    }
    if trained := [name for name, parameter in added.items() if parameter.requires_grad]:
        others = f" (and {len(trained) - 1} more)" if len(trained) > 1 else ""
        raise ValueError(
            f"'{trained[0]}'{others} was added after sharding, so every rank would train values of its own: add "
            "adapters and layers first, then call shard() or fully_shard()"
        )
    return list(added.values())
