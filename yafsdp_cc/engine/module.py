"""What a module becomes when it is sharded: still itself, with hooks around its forward, and FSDP2's methods.

The methods have the names and the meaning of torch's ``FSDPModule``. Those that change how many buffers there are take
effect with the next forward for which no gradient is held back. What has no meaning here raises, and tells why.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import UnshardHandle as _UnshardHandle

from yafsdp_cc.engine.dtensor import FlatDTensor
from yafsdp_cc.engine.init import SPEC, current_state, group_of, materialize_shards, spec_of, specs_below, state_of
from yafsdp_cc.engine.param import Divisor
from yafsdp_cc.engine.state import GROUP, STATE, install_hooks, pre_forward_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.spec import ParamGroupSpec
    from yafsdp_cc.engine.state import FSDPState


_UNDO = "_yafsdp_cc_undo"


class UnshardHandle(_UnshardHandle):
    """What ``unshard(async_op=True)`` has begun."""

    def __init__(self, state: FSDPState, group: ParamGroup | None) -> None:
        self._state = state
        self._group = group

    def wait(self) -> None:
        """Let the group's modules see unsharded weights, and the current stream use them."""
        group, self._group = self._group, None
        if group is not None:
            self._state.register_held(group)


class ShardedModule(FSDPModule):
    """The class that sharded modules gain; their own class and all of its methods stay.

    A subclass of FSDP2's, because frameworks recognise sharded modules by that.
    """

    _orig_cls_mro_index = 3  # [Sharded<Own>, ShardedModule, FSDPModule, Own, ...]

    # Weights -----------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own weights, those of modules sharded within it aside, until ``reshard``.

        Attributes such as ``module.weight`` are unsharded then; ``parameters()`` goes on to give the sharded ones. The
        next forward uses what was gathered, and afterwards lets go of it if the module reshards after forward.

        Args:
            async_op: return at once, with a handle; a forward waits by itself.
        """
        module = _as_module(self)
        state, group = current_state(module), group_of(module)
        if group is not None:
            group.hold()
        handle = UnshardHandle(state, group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Let go of what ``unshard`` has gathered."""
        module = _as_module(self)
        group = group_of(module) if state_of(module) is not None else None
        if group is not None:
            group.release_held()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether weights are dropped after forward and gathered again in backward, or keep a buffer to themselves.

        The root's own weights have one anyway. A secondary shard, asked for by a number, is given up.
        """
        _check_bool("reshard_after_forward", reshard_after_forward)
        self._change_setting(recurse, "keeps_after_forward", not reshard_after_forward)
        self._change_setting(recurse, "secondary_ranks", 0)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether weights are dropped after backward, or kept for the next forward in a buffer of their own.

        A group that has got such a buffer keeps it: True only allows to drop the weights. The next forward gathers them
        again if they have changed.
        """
        _check_bool("reshard_after_backward", reshard_after_backward)
        if not reshard_after_backward:
            self._change_setting(recurse, "keeps_after_backward", True)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether the backward reads the weights. Embeddings are known not to."""
        _check_bool("unshard_in_backward", unshard_in_backward)
        self._change_setting(False, "unshards_in_backward", unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these when this module is about to run, instead of what ran next the last time.

        There are as many weight buffers as the longest such list and one more.
        """
        self._change_setting(False, "forward_prefetch", _specs_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these when the backward comes to this module, instead of what the forward's order tells."""
        self._change_setting(False, "backward_prefetch", _specs_of(modules))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward's all-gathers wait for ``event`` alone, not for all work of the current stream."""
        current_state(_as_module(self)).post_optim_event = event

    # Gradients ---------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether a backward reduces the gradients.

        False keeps unsharded gradients on this rank (a warning tells how many bytes that costs) until the first
        backward after True, which reduces what has come together. All ranks must set the same. Left alone, every
        micro-batch is reduced into the sharded gradients and nothing unsharded is kept.
        """
        for spec in self._specs(recurse):
            spec.settings.reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether a backward sums over the replicas of a 2-D mesh, or leaves that to a later one.

        It is for all that one forward runs. Gradients are final, and in ``.grad``, after a backward that does.

        Raises:
            ValueError: this is not the root, or ``recurse`` is False.
        """
        _check_bool("requires_all_reduce", requires_all_reduce)
        module = _as_module(self)
        state = current_state(module)
        if state.context.replicas is None:
            return
        if state.model is not module or not recurse:
            raise ValueError("set_requires_all_reduce is for the whole model: call it on the root, with recurse=True")
        state.context.replicas.sums = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward waits for all reduces. Before one that does, gradients are not final."""
        current_state(_as_module(self)).is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's summed gradients by ``factor`` instead of the number of ranks."""
        if not factor:
            raise ValueError(f"set_gradient_divide_factor takes a number other than 0, got {factor!r}")
        for spec in self._specs(False):
            divisor = Divisor(factor, spec.info.device)
            for part in spec.parts:
                part.divisor = divisor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept what is so anyway: gradients are summed on the network and divided at the end."""
        _check_bool("enable", enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accept what is so anyway: a rank may leave parameters of a group unused."""
        _check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many gradient buffers blocks take in turn: two, unless this tells otherwise."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._change_setting(recurse, "grad_buffers", max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether gradients have a communicator of their own, so that all-gathers and reduces can overlap.

        It is for all that one forward runs: one module that asks for it is enough.
        """
        _check_bool("enable", enable)
        self._change_setting(recurse, "separate_reduce_group", enable)

    def reset_iter_state(self) -> None:
        """Drop what a forward or backward that raised has left behind, gradients not reduced yet with it.

        The next forward does it by itself.

        Raises:
            RuntimeError: this is not the root.
        """
        module = _as_module(self)
        state = current_state(module)
        if state.model is not module:
            raise RuntimeError("reset_iter_state is for the root module, the outermost that is sharded")
        state.reset()

    # What has no meaning here --------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Refuse."""
        _refuse("set_custom_all_gather", "weights are gathered from buffer to buffer, without the copies it is handed")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Refuse."""
        _refuse("set_custom_reduce_scatter", "the engine sums in place; what changes the bytes sent is a codec")

    def set_all_reduce_hook(self, hook: Callable[[Any], None], *, stream: Any = None) -> NoReturn:
        """Refuse."""
        _refuse("set_all_reduce_hook", "pass a 2-D mesh (replicate, shard) for a sum over replicas")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> NoReturn:
        """Refuse."""
        _refuse("set_allocate_memory_from_process_group_for_comm", "buffers are allocated once, by torch")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Refuse."""
        _refuse("set_symm_mem_for_comm", "buffers are allocated once, by torch")

    def _set_unshard_async_op(self, async_op: bool) -> NoReturn:
        _refuse("_set_unshard_async_op", "all-gathers are issued ahead, into buffers that exist already")

    def _get_fsdp_state(self) -> NoReturn:
        raise NotImplementedError(
            f"a {type(self).__name__} has no state of FSDP2's: it is sharded by yafsdp_cc, which has the methods of "
            "FSDP2's modules but not what lies behind them"
        )

    # As a module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Let ``.to()`` and its like move buffers and ignored parameters, and ``to_empty`` make what was on meta.

        Sharded parameters stay where and what they are.
        """
        module = _as_module(self)
        for name, parameter in module.named_parameters(recurse=recurse):
            if not isinstance(parameter, FlatDTensor) or parameter.to_local().is_meta:
                continue
            if not _is_unchanged(parameter.to_local(), fn):
                raise RuntimeError(
                    f"'{name}' is sharded on {parameter.device} as {parameter.dtype} and cannot be converted or moved: "
                    "do that before shard(), or choose the dtype of the forward with mp_policy"
                )
        for inner in module.modules() if recurse else (module,):
            if (spec := spec_of(inner)) is not None:
                materialize_shards(spec, fn)
            for ignored in inner._parameters.values():
                if ignored is not None and not isinstance(ignored, FlatDTensor):
                    with torch.no_grad():
                        moved = fn(ignored)
                    if moved.is_meta is ignored.is_meta:
                        ignored.data = moved
                    else:
                        fresh = nn.Parameter(moved, ignored.requires_grad)
                        torch.utils.swap_tensors(ignored, fresh)  # remains the object that everybody knows
            for key, buffer in inner._buffers.items():
                if buffer is not None:
                    inner._buffers[key] = fn(buffer)
        return module

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

    def _specs(self, recurse: bool) -> Sequence[ParamGroupSpec]:
        own = spec_of(_as_module(self))
        return specs_below(_as_module(self)) if recurse else [own] if own is not None else []

    def _change_setting(self, recurse: bool, name: str, value: object) -> None:
        for spec in self._specs(recurse):
            if getattr(spec.settings, name) == value:
                continue
            state = state_of(spec.modules[0])
            if state is not None:
                state.outdated = True
            setattr(spec.settings, name, value)


def _as_module(sharded: ShardedModule) -> nn.Module:
    assert isinstance(sharded, nn.Module)
    return sharded


def _specs_of(modules: Sequence[Any]) -> tuple[ParamGroupSpec, ...]:
    specs = []
    for module in modules:
        spec = spec_of(module) if isinstance(module, nn.Module) else None
        if spec is None:
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        specs.append(spec)
    return tuple(dict.fromkeys(specs))


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} should be a bool, got {type(value)}")


def _refuse(name: str, why: str) -> NoReturn:
    raise NotImplementedError(f"{name} has no meaning here: {why}")


def _is_unchanged(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    after = fn(tensor)
    if after is tensor:
        return True
    # Frameworks pass "cpu:0", which copies what lies on "cpu".
    return after.dtype == tensor.dtype and after.device == tensor.device and torch.equal(after, tensor)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let the roots among ``modules`` issue their communication on the same streams, as stages of a pipeline do.

    Raises:
        ValueError: one of them is not sharded.
    """
    specs = _specs_of(modules)
    for spec in specs[1:]:
        state = state_of(spec.modules[0])
        if state is not None:
            state.outdated = True
        spec.settings.streams = specs[0].settings.streams


# Modules become sharded ones, and plain ones again -----------------------------------------------------------------

_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _sharded_class(own: type[nn.Module]) -> type[nn.Module]:
    if own not in _sharded_classes:
        sharded = type(f"Sharded{own.__name__}", (ShardedModule, own), {"__module__": own.__module__})
        _sharded_classes[own] = sharded
    return _sharded_classes[own]


def make_sharded(module: nn.Module) -> None:
    """Turn ``module`` into a ``ShardedModule`` with the engine's hooks around its forward."""
    module.__class__ = _sharded_class(type(module))
    hooks = [*install_hooks(module, current_state), module.register_load_state_dict_pre_hook(_refuse_assignment)]
    for hook in hooks:
        _undo_later(module, hook.remove)


def make_plain(module: nn.Module) -> None:
    """Take back what ``make_sharded`` and ``register_forward_method`` have done to ``module``."""
    for undo in module.__dict__.pop(_UNDO):
        undo()
    for attribute in (STATE, GROUP, SPEC):
        module.__dict__.pop(attribute, None)
    module.__class__ = type(module).__mro__[ShardedModule._orig_cls_mro_index]


def _undo_later(module: nn.Module, undo: Callable[[], Any]) -> None:
    module.__dict__.setdefault(_UNDO, []).append(undo)


def _refuse_assignment(module: nn.Module, _: object, __: str, metadata: dict[str, object], *___: object) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            f"load_state_dict(assign=True) on a sharded {type(module).__name__} would cut its parameters off from the "
            "engine: leave assign out, and the values are copied"
        )


def require_state(module: nn.Module) -> FSDPState:
    """Return the engine that a sharded module belongs to; it becomes the root if none is yet.

    Raises:
        ValueError: it is not sharded.
    """
    if spec_of(module) is None and state_of(module) is None:
        if isinstance(module, FSDPModule) and not isinstance(module, ShardedModule):
            raise ValueError(
                f"this {type(module).__name__} is sharded by torch's own FSDP2, of which this knows nothing: shard the "
                "model by yafsdp_cc.shard(model) or yafsdp_cc.fully_shard in its place"
            )
        raise ValueError(f"this {type(module).__name__} is not sharded: call yafsdp_cc.shard(model) first")
    return current_state(module)


def is_root(module: nn.Module) -> bool:
    """Return whether ``module`` is the root of its engine, not only a part of it."""
    return require_state(module).model is module


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make ``module.<name>(...)`` another way into a sharded module, besides its forward.

    Weights are unsharded while the method runs, and gradients flow through it as through a forward. Methods that only
    call the module itself, such as ``generate`` of Hugging Face models, need no registration.

    Raises:
        ValueError: the module is not a unit of a sharded model, nor the model itself.
        AttributeError: it has no such method.
    """
    if spec_of(module) is None and state_of(module) is None:
        raise ValueError(
            f"{type(module).__name__} is neither a sharded model nor one of its units: register the method on one"
        )
    method = getattr(module, name)

    @functools.wraps(method)
    def with_weights(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, finish = pre_forward_of(module, current_state, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = finish(output)
        return output

    module.__dict__[name] = with_weights
    _undo_later(module, functools.partial(module.__dict__.pop, name, None))
