"""What a module becomes when it is sharded: still itself, with hooks around its forward and a few methods more."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.fsdp import FSDPModule

from yafsdp_cc.engine.tensor import FlatDTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from yafsdp_cc.engine.root import Root

_ROOT = "_yafsdp_cc_root"
_ENGINE = "_yafsdp_cc_engine"
_UNDO = "_yafsdp_cc_undo"


class Engine(Protocol):
    """What stands around a module's forward: a unit, or the root."""

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Before the forward: the arguments it shall get, and what ``leave`` needs to know."""

    def leave(self, entry: Any, output: Any) -> Any:
        """After the forward, also after one that raised (with None): the output that callers shall get."""


class ShardedModule(FSDPModule):
    """The class that sharded modules gain; their own class and all of its methods stay.

    A subclass of FSDP2's, because frameworks recognise sharded modules by that. Those of FSDP2's methods that have no
    meaning here yet raise ``NotImplementedError``.
    """

    _orig_cls_mro_index = 3  # [Sharded<Own>, ShardedModule, FSDPModule, Own, ...]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether a backward reduces its gradients.

        False keeps whole gradients on this rank (a warning says how many bytes that costs) until the first backward
        after True, which reduces what has come together. All ranks must say the same. Left alone, every micro-batch
        is reduced into the sharded gradients and nothing whole is kept.

        Raises:
            ValueError: called on a module inside the sharded model, or with ``recurse=False``: the engine
                synchronises all units together.
        """
        assert isinstance(self, nn.Module)
        root = root_of(self)
        if not recurse or getattr(self, _ENGINE, None) is not root:
            raise ValueError(
                "set_requires_gradient_sync is for the whole sharded model: call it on the module that was given to "
                "shard(), without recurse=False"
            )
        root.reductions.synchronises = requires_gradient_sync

    def _get_fsdp_state(self) -> NoReturn:
        raise NotImplementedError(
            "this FSDP2 method has no counterpart in yafsdp_cc.shard(); what there is: set_requires_gradient_sync, "
            "yafsdp_cc.whole_parameters, yafsdp_cc.register_forward_method"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Let ``.to()`` and its like move buffers; parameters stay where and what they are."""
        assert isinstance(self, nn.Module)
        for name, parameter in self.named_parameters(recurse=recurse):
            if isinstance(parameter, FlatDTensor) and fn(parameter.to_local()) is not parameter.to_local():
                raise RuntimeError(
                    f"'{name}' is sharded on {parameter.device} as {parameter.dtype} and cannot be converted or moved: "
                    "do that before shard(), or choose the dtype of the forward with mp_policy"
                )
        for module in self.modules() if recurse else (self,):
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = fn(buffer)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            f"a sharded {type(self).__name__} cannot be copied: copy the model before shard(), or keep an average of "
            "the weights with copies of model.parameters()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a sharded {type(self).__name__} cannot be pickled: one rank's part is no use without the others. Save "
            "model.state_dict() with torch.distributed.checkpoint"
        )


def root_of(module: nn.Module) -> Root:
    """The engine that a sharded module belongs to.

    Raises:
        ValueError: it is not sharded.
    """
    root: Root | None = module.__dict__.get(_ROOT)
    if root is None:
        raise ValueError(f"this {type(module).__name__} is not sharded: call yafsdp_cc.shard(model) first")
    return root


def is_root(module: nn.Module) -> bool:
    """Whether the engine of a whole sharded model stands around ``module``, not only a unit of it."""
    return module.__dict__.get(_ENGINE) is root_of(module)


def adopt(module: nn.Module, root: Root, engine: Engine) -> None:
    """Turn ``module`` into a sharded one whose forward runs between ``engine.enter`` and ``engine.leave``."""
    module.__class__ = _sharded_class(type(module))
    module.__dict__[_ROOT] = root
    module.__dict__[_ENGINE] = engine
    entries: list[Any] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entries.append(None)
        args, kwargs, entries[-1] = engine.enter(args, kwargs)
        return args, kwargs

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        entry = entries.pop()
        if entry is None:
            root.interrupted = True
            return output
        return engine.leave(entry, output)

    # First before the forward, so that other hooks see whole weights; and after it also when it raised.
    before = module.register_forward_pre_hook(_not_compiled(enter), prepend=True, with_kwargs=True)
    after = module.register_forward_hook(_not_compiled(leave), always_call=True)
    undo_later(module, before.remove)
    undo_later(module, after.remove)


def undo_later(module: nn.Module, undo: Callable[[], Any]) -> None:
    """What ``disown`` shall call."""
    module.__dict__.setdefault(_UNDO, []).append(undo)


def disown(module: nn.Module) -> None:
    """Take back what sharding and ``register_forward_method`` have done to ``module``."""
    for undo in module.__dict__.pop(_UNDO):
        undo()
    del module.__dict__[_ROOT], module.__dict__[_ENGINE]
    module.__class__ = type(module).__mro__[ShardedModule._orig_cls_mro_index]


def _not_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, kept out of graphs where something is compiled around it; ``disable`` alone costs as much as a hook."""
    hidden: Callable[..., Any] = torch.compiler.disable(hook)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return hidden(*args)
        return hook(*args)

    return call


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make ``module.<name>(...)`` another way into a sharded module, besides its forward.

    Weights are whole while the method runs, and gradients flow through it as through a forward. Methods that only
    call the module itself, such as ``generate`` of Hugging Face models, need no registration.

    Raises:
        ValueError: the module is not a unit of a sharded model, nor the model itself.
        AttributeError: it has no such method.
    """
    engine: Engine | None = module.__dict__.get(_ENGINE)
    if engine is None:
        raise ValueError(
            f"{type(module).__name__} is neither a sharded model nor one of its units: register the method on one"
        )
    method = getattr(module, name)

    @functools.wraps(method)
    def between(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, entry = engine.enter(args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = engine.leave(entry, output)
        return output

    module.__dict__[name] = between
    undo_later(module, functools.partial(module.__dict__.pop, name, None))


_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _sharded_class(own: type[nn.Module]) -> type[nn.Module]:
    if own not in _sharded_classes:
        sharded = type(f"Sharded{own.__name__}", (ShardedModule, own), {"__module__": own.__module__})
        _sharded_classes[own] = sharded
    return _sharded_classes[own]
