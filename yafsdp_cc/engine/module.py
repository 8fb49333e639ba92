"""What a module becomes when it is sharded: still itself, with hooks around its forward and a few methods more."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.fsdp import FSDPModule

from yafsdp_cc.engine.assemble import _ENGINE, _ROOT, assembled, current
from yafsdp_cc.engine.draft import _DRAFT, draft_of, materialize
from yafsdp_cc.engine.methods import Methods
from yafsdp_cc.engine.tensor import FlatDTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from yafsdp_cc.engine.root import Root


_UNDO = "_yafsdp_cc_undo"


class Engine(Protocol):
    """What stands around a module's forward: a unit, or the root."""

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Before the forward: the arguments it shall get, and what ``leave`` needs to know."""

    def leave(self, entry: Any, output: Any) -> Any:
        """After the forward, also after one that raised (with None): the output that callers shall get."""


class ShardedModule(Methods):
    """The class that sharded modules gain; their own class and all of its methods stay.

    A subclass of FSDP2's, because frameworks recognise sharded modules by that.
    """

    _orig_cls_mro_index = 4  # [Sharded<Own>, ShardedModule, Methods, FSDPModule, Own, ...]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Let ``.to()`` and its like move buffers and ignored parameters, and ``to_empty`` make what was on meta.

        Sharded parameters stay where and what they are.
        """
        assert isinstance(self, nn.Module)
        for name, parameter in self.named_parameters(recurse=recurse):
            if not isinstance(parameter, FlatDTensor) or parameter.to_local().is_meta:
                continue
            if not _is_unchanged(parameter.to_local(), fn):
                raise RuntimeError(
                    f"'{name}' is sharded on {parameter.device} as {parameter.dtype} and cannot be converted or moved: "
                    "do that before shard(), or choose the dtype of the forward with mp_policy"
                )
        for module in self.modules() if recurse else (self,):
            if (draft := draft_of(module)) is not None:
                materialize(draft, fn)
            for ignored in module._parameters.values():
                if ignored is not None and not isinstance(ignored, FlatDTensor):
                    with torch.no_grad():
                        moved = fn(ignored)
                    if moved.is_meta is ignored.is_meta:
                        ignored.data = moved
                    else:
                        fresh = nn.Parameter(moved, ignored.requires_grad)
                        torch.utils.swap_tensors(ignored, fresh)  # remains the object that everybody knows
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
            "with yafsdp_cc.save(path, model), or model.state_dict() with torch.distributed.checkpoint"
        )


def _is_unchanged(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    after = fn(tensor)
    if after is tensor:
        return True
    # Frameworks say "cpu:0", which copies what lies on "cpu".
    return after.dtype == tensor.dtype and after.device == tensor.device and torch.equal(after, tensor)


def root_of(module: nn.Module) -> Root:
    """The engine that a sharded module belongs to; after ``fully_shard`` this module becomes the root if none is yet.

    Raises:
        ValueError: it is not sharded.
    """
    if draft_of(module) is None and assembled(module) is None:
        if isinstance(module, FSDPModule) and not isinstance(module, Methods):
            raise ValueError(
                f"this {type(module).__name__} is sharded by torch's own FSDP2, of which this knows nothing: shard the "
                "model by yafsdp_cc.shard(model) or yafsdp_cc.fully_shard in its place"
            )
        raise ValueError(f"this {type(module).__name__} is not sharded: call yafsdp_cc.shard(model) first")
    return current(module)


def engine_of(module: nn.Module) -> Engine:
    """What stands around the forward of a sharded module now."""
    root = current(module)
    engine: Engine | None = module.__dict__.get(_ENGINE)
    return root if engine is None else engine


def is_root(module: nn.Module) -> bool:
    """Whether the engine of a whole sharded model stands around ``module``, not only a unit of it."""
    return root_of(module).model is module


def adopt(module: nn.Module) -> None:
    """Turn ``module`` into a sharded one whose forward runs between its engine's ``enter`` and ``leave``."""
    module.__class__ = _sharded_class(type(module))
    entries: list[tuple[Engine, Any] | None] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entries.append(None)
        engine = engine_of(module)
        args, kwargs, entry = engine.enter(args, kwargs)
        entries[-1] = engine, entry
        return args, kwargs

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        entered = entries.pop()
        _explain(sys.exc_info()[1])
        if entered is None:
            if (root := assembled(module)) is not None:
                root.interrupted = True
            return output
        engine, entry = entered
        return engine.leave(entry, output)

    # First before the forward, so that other hooks see whole weights; and after it also when it raised.
    before = module.register_forward_pre_hook(_not_compiled(enter), prepend=True, with_kwargs=True)
    after = module.register_forward_hook(_not_compiled(leave), always_call=True)
    refusal = module.register_load_state_dict_pre_hook(_refuse_assignment)
    for hook in (before, after, refusal):
        undo_later(module, hook.remove)


def _explain(error: BaseException | None) -> None:
    """Say what autograd means where it refuses a write to what came through a gate; ``error`` ends a forward."""
    if isinstance(error, RuntimeError) and str(error).startswith("Output ") and "GateGradFlow" in str(error):
        error.args = (
            "the forward of a sharded module has written in place to one of its inputs, or to a small parameter (a "
            "norm's, a bias): write x = x + y in place of x += y, and change parameters outside of the forward. "
            f"Autograd says: {error}",
        )


def _refuse_assignment(module: nn.Module, _: object, __: str, metadata: dict[str, object], *___: object) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            f"load_state_dict(assign=True) on a sharded {type(module).__name__} would cut its parameters off from the "
            "engine: leave assign out, and the values are copied"
        )


def undo_later(module: nn.Module, undo: Callable[[], Any]) -> None:
    """What ``disown`` shall call."""
    module.__dict__.setdefault(_UNDO, []).append(undo)


def disown(module: nn.Module) -> None:
    """Take back what sharding and ``register_forward_method`` have done to ``module``."""
    for undo in module.__dict__.pop(_UNDO):
        undo()
    for note in (_ROOT, _ENGINE, _DRAFT):
        module.__dict__.pop(note, None)
    module.__class__ = type(module).__mro__[ShardedModule._orig_cls_mro_index]


def _not_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, kept out of graphs where something is compiled around it; ``disable`` alone costs as much as a hook."""
    hidden: Callable[..., Any] = torch.compiler.disable(hook)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return hidden(*args)
        return hook(*args)

    # module.compile() has hooks compiled by themselves: not this one, only what it may call.
    return torch._dynamo.decorators.skip(call)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make ``module.<name>(...)`` another way into a sharded module, besides its forward.

    Weights are whole while the method runs, and gradients flow through it as through a forward. Methods that only
    call the module itself, such as ``generate`` of Hugging Face models, need no registration.

    Raises:
        ValueError: the module is not a unit of a sharded model, nor the model itself.
        AttributeError: it has no such method.
    """
    if draft_of(module) is None and assembled(module) is None:
        raise ValueError(
            f"{type(module).__name__} is neither a sharded model nor one of its units: register the method on one"
        )
    method = getattr(module, name)

    @functools.wraps(method)
    def between(*args: Any, **kwargs: Any) -> Any:
        engine = engine_of(module)
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
