"""Parameters that the modules of a sharded model hold: how ``parameters()`` shows them, and whether they were replaced.

``parameters()`` gives the sharded parameters, or within a forward the tensors that the module computes with. It gives
unsharded weights where modules show them outside of a forward (``tensor.unsharded``).
"""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterator, MutableMapping, ValuesView
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch

from yafsdp_cc.engine.param import owner_of
from yafsdp_cc.engine.state import engine_of
from yafsdp_cc.forms.extensions import forward_dtype
from yafsdp_cc.tensor.dtensor import FlatDTensor, engines
from yafsdp_cc.tensor.refusals import ADD_FIRST
from yafsdp_cc.tensor.shown import UNSHARDED_OF, CastWhenUsed
from yafsdp_cc.tensor.unwritten import check_written

if TYPE_CHECKING:
    from typing_extensions import Self

    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.state import FSDPState


class ModuleParameters(dict[str, "torch.nn.Parameter | None"]):
    """``module._parameters`` of a module that holds sharded parameters.

    ``d[name]`` is the sharded parameter, or what the program has put in its place, as ``torch.func.functional_call``
    does. ``items()`` and ``values()``, and so ``named_parameters()``, return what the module computes with now: the
    unsharded weight (``FSDPParam.shown``) if there is one, else ``d[name]``; hooks of a backward get the sharded one.
    Within a forward a parameter of another unit appears as ``CastWhenUsed``, so that ``next(self.parameters()).dtype``
    is the compute dtype.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module._parameters)
        self._attributes = module.__dict__
        held: dict[str, Any] = dict(super().items())
        self._params = {name: owner_of(each.shard_spec) for name, each in held.items() if isinstance(each, FlatDTensor)}

    def __setitem__(self, name: str, value: Any) -> None:
        """Let the module compute with ``value``, until the sharded parameter or its unsharded weight is set again."""
        if (param := self._params.get(name)) is not None:
            if isinstance(value, CastWhenUsed):
                value = value._parameter
            was_shown = self._attributes.pop(name, None) is not None
            if param.shown is not None and (value is param.parameter or (value is param.shown and not was_shown)):
                self._attributes[name], value = param.shown, param.parameter
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if (param := self._params.get(name)) is not None and param.shown is not None:
            raise RuntimeError(
                f"'{param.spec.name}' was deleted while it is gathered, as by register_parametrization in a forward "
                "(LoRA of PEFT with target_parameters): if it is frozen, pass it in ignored_params, to leave it whole"
            )
        super().__delitem__(name)

    # dict's own ``update``, ``setdefault`` and ``pop`` would bypass ``__setitem__`` and ``__delitem__``
    update, setdefault = MutableMapping.update, MutableMapping.setdefault

    def pop(self, name: str, *default: Any) -> Any:
        value = self[name] if name in self or not default else default[0]
        if name in self:
            del self[name]
        return value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc] # dict has overloads of it
        self.update(other)
        return self

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return dict(self.items()).values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        held: dict[str, Any] = dict(super().items())
        # Hooks of a backward run without grad mode; forwards that activation checkpointing runs again run with it.
        in_backward = torch._C._current_graph_task_id() != -1
        is_run_again = in_backward and torch.is_grad_enabled()
        shows_shards = not is_run_again and not any(engine.context.in_forward for engine in engines)
        if shows_shards and self._attributes.keys().isdisjoint(held):
            return held.items()
        for name, parameter in held.items():
            param = self._params.get(name)
            if param is None or param.parameter is not parameter or (engine := engine_of(param)) is None:
                continue
            engine.drop_interrupted()
            in_forward = engine.context.in_forward or is_run_again
            shown = self._attributes.get(name)
            # a forward that raised leaves gathered weights in modules: show them in no later call
            if shown is not None and (in_forward or (not in_backward and UNSHARDED_OF in shown.__dict__)):
                held[name] = shown
            elif in_forward and param.flat is not None and (dtype := forward_dtype(param.flat)) != parameter.dtype:
                held[name] = CastWhenUsed.of(parameter, dtype)
        return held.items()

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, (dict(super().items()),)  # ``self`` is bound to its module: copy it as a plain dict


def install_module_parameters(module: torch.nn.Module) -> None:
    """Let ``module.parameters()`` return the tensors that forwards compute with."""
    module.__dict__["_parameters"] = ModuleParameters(module)


def remove_module_parameters(module: torch.nn.Module) -> None:
    """Undo ``install_module_parameters``."""
    module.__dict__["_parameters"] = dict(dict.items(module._parameters))


def named_sharded_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield all names and parameters of ``model``, sharded ones even where ``parameters()`` shows other tensors."""
    for prefix, module in model.named_modules():
        for name, parameter in dict.items(module._parameters):
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter


# ``ModelContents`` checks the model at each forward ------------------------------------------------------------------


class ModelContents:
    """Checks the parameters and submodules that a model's modules hold: without a check, the engine would compute with
    the shard of a parameter that the program has replaced.

    Args:
        state: the engine of the model.
        is_written: whether all parameters and buffers were seen to have values by an earlier engine.
    """

    def __init__(self, state: FSDPState, is_written: bool) -> None:
        self._model = state.model
        self._params = state.params
        self._mesh = state.context.info.mesh
        self._ignored: Collection[torch.nn.Parameter] = {param for spec in state.specs for param in spec.ignored}
        self._registries: list[dict[str, Any]] = []
        """The modules' own dictionaries of submodules and parameters."""
        self._seen: list[object] = []
        """Modules and parameters that ``_registries`` held at the last check, in order."""
        self._frozen: list[torch.nn.Parameter] = []
        self.is_written = is_written

    def check(self) -> None:
        """Raise if a parameter was replaced or converted, or a trainable one was added, since the last check."""
        if not self.is_written:
            check_written(dict(named_sharded_parameters(self._model)), self._model, self._params, self._mesh)
            self.is_written = True
        contents = list(chain.from_iterable(map(dict.values, self._registries)))
        is_known = len(contents) == len(self._seen) and all(map(is_, contents, self._seen))
        is_frozen = not any(each.requires_grad for each in self._frozen)
        in_shard = all(cast("FlatDTensor", each.parameter)._local_tensor is each.local for each in self._params)
        if self._registries and is_known and is_frozen and in_shard:
            return
        for param in self._params:
            check_unchanged(param)
        self._frozen = _added_parameters(self._model, self._ignored)
        self._registries = [each for module in self._model.modules() for each in (module._modules, module._parameters)]
        self._seen = list(chain.from_iterable(map(dict.values, self._registries)))


def check_unchanged(param: FSDPParam) -> None:
    """Raise a ``RuntimeError`` if modules hold something else in place of ``param``, or it has left its shard."""
    if not param.is_held or cast("FlatDTensor", param.parameter)._local_tensor is not param.local:
        raise RuntimeError(
            f"'{param.spec.name}' was replaced or converted after shard(), or this call is inside whole_parameters: "
            "the engine would go on with old values. Tie, convert and assign parameters before shard(), change their "
            "values in place afterwards, call the model outside (torch.func.functional_call is not supported)"
        )


def _added_parameters(model: torch.nn.Module, ignored: Collection[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters that were added to ``model`` after it was sharded, those in ``ignored`` left out.

    Frozen parameters may be added. A trainable one is refused: every rank would train values of its own for it.
    """
    added = {
        name: parameter
        for name, parameter in named_sharded_parameters(model)
        if not isinstance(parameter, FlatDTensor) and parameter not in ignored
    }
    if trained := [name for name, parameter in added.items() if parameter.requires_grad]:
        others = f" (and {len(trained) - 1} more)" if len(trained) > 1 else ""
        raise ValueError(
            f"'{trained[0]}'{others} was added after sharding, so every rank would train values of its own: {ADD_FIRST}"
        )
    return list(added.values())
