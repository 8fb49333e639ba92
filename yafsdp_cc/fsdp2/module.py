"""A sharded module keeps its class and state, and gains hooks around its forward and FSDP2's methods.

The methods have the names and meaning of torch's ``FSDPModule``. A setting that changes the number of buffers takes
effect in the next forward for which no gradients wait to be reduced. Methods that make no sense here raise an error
that says why. Other functions give access to unsharded parameters outside of a forward: to all of them for reading or
editing (``whole_parameters``), to one group after the other, or for good (``unshard_model``).
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import UnshardHandle as _UnshardHandle
from torch.nn.parallel import DistributedDataParallel

from yafsdp_cc.engine.param import Divisor
from yafsdp_cc.engine.spec import EXACT, SPEC, spec_of, specs_below
from yafsdp_cc.engine.state import GROUP, STATE
from yafsdp_cc.forms.extensions import ClassFlatParam, ExtensionFlatParam, in_class_of
from yafsdp_cc.forms.subclasses import SUBCLASS, subclass_of, with_grad_dtype
from yafsdp_cc.ranks.groups import backend_of
from yafsdp_cc.ranks.mesh import all_gather_single, all_groups
from yafsdp_cc.sharding.assembly import state_of
from yafsdp_cc.sharding.checks import TRAINED_IN
from yafsdp_cc.sharding.hooks import PARTS, current_state, hook_parts, install_hooks, pre_forward_of
from yafsdp_cc.sharding.materialize import move_buffers
from yafsdp_cc.tensor.dtensor import FlatDTensor
from yafsdp_cc.tensor.loading import apply_to_shards, follow_assignments
from yafsdp_cc.tensor.module_parameters import install_module_parameters, remove_module_parameters
from yafsdp_cc.tensor.shown import COPY_OF, LEFT_OVER, REPLICA_SYNC
from yafsdp_cc.tensor.unsharded import register_until_reshard, reshard, reshard_for_state_dicts, unshard_until_reshard
from yafsdp_cc.tensor.unwritten import makes_empty, mark_unwritten

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard import _fsdp_api as fsdp2
    from typing_extensions import Self

    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.spec import ParamGroupSpec
    from yafsdp_cc.engine.state import FSDPState


Model = TypeVar("Model", bound=nn.Module)

_UNDO = "_yafsdp_cc_undo"
"""Attribute of a sharded module that holds functions to undo what sharding has done to the module."""
MANAGED = "_is_fsdp_managed_module"
"""Attribute by which Transformers and ``torch.compile`` recognise a module that FSDP has sharded."""
_OURS = ("_local_tensor", "shard_spec", "_is_param", SUBCLASS, REPLICA_SYNC)
"""Entries that sharding makes in the ``__dict__`` of a sharded parameter; all others are users' and frameworks' own."""

BEFORE_UNSHARD: list[Callable[[nn.Module], None]] = []
"""Functions of a model that ``unshard_model`` calls first, on all ranks, such as ``synchronize_replicas``."""


class MisuseError(ValueError, AssertionError):
    """An unsupported call for which FSDP2 raises an ``AssertionError``."""


class UnshardHandle(_UnshardHandle):
    """Handle that ``unshard(async_op=True)`` returns; ``wait`` shows the unsharded weights to the modules."""

    def __init__(self, state: FSDPState, spec: ParamGroupSpec, group: ParamGroup | None) -> None:
        self._state = state
        self._spec = spec
        self._group = group

    def wait(self) -> None:
        """Show the unsharded weights to the group's modules, and make the current stream wait for the all-gather."""
        group, self._group = self._group, None
        if group is not None and group.held is not None:
            register_until_reshard(self._state, self._spec, group)


WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attributes by which ``torch.compile`` and checkpoint wrappers hold a module; DCP's state dicts omit both."""


class ShardedModule(FSDPModule, nn.Module):
    """Base class that a sharded module gets in addition to its own class, whose methods remain.

    ``ShardedModule`` derives from FSDP2's ``FSDPModule``, by which frameworks recognise sharded modules.
    """

    _orig_cls_mro_index = 3  # index of Own in [FSDP<Own>, ShardedModule, FSDPModule, Own, ...]

    def __init_subclass__(cls) -> None:
        """Keep ``__init_subclass__`` of the module's own class, a registry perhaps, from running for ``FSDP<Own>``."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Refuse ``DistributedDataParallel``, whose constructor reads this attribute and would raise no error."""
        if sys._getframe(1).f_code is not DistributedDataParallel.__init__.__code__:
            raise AttributeError("a sharded module has no _ddp_params_and_buffers_to_ignore")
        raise RuntimeError(
            f"DistributedDataParallel around a sharded {class_of(self).__name__}, whose gradients are reduced already: "
            "leave it out. With Accelerate, call yafsdp_cc.integrations.accelerate.accept_sharded(accelerator, model) "
            "before accelerator.prepare(); with Transformers and TRL, train with yafsdp_cc.integrations.transformers."
            "accept_sharded_model(trainer)"
        )

    # Weights -----------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own weights, not those of modules sharded within it, until ``reshard``. A collective.

        ``unshard`` makes ``parameters()`` and attributes such as ``module.weight`` unsharded. The next forward uses the
        gathered weights, and releases them afterwards if the module reshards after forward; so do the backward,
        ``state_dict()`` and ``load_state_dict()``. (Make optimizers before ``unshard`` or after ``reshard``: they take
        the sharded parameters.)

        Args:
            async_op: whether to return a handle at once; a forward waits for the weights by itself.
        """
        state, spec = current_state(self), _spec(self)
        group = state.root_group if self is state.model else self.__dict__.get(GROUP)
        if group is not None:
            unshard_until_reshard(group, elsewhere=state.awaits_backward)
        else:  # all parameters of the module are replicated
            register_until_reshard(state, spec, None)
        handle = UnshardHandle(state, spec, group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release the weights that ``unshard`` or a forward has gathered for this module: the next forward gathers
        anew.

        Call ``reshard`` on all ranks. It is required where weights are kept between forwards, after a write that
        torch's versions do not count (docs/using.md).
        """
        reshard(_spec(self), expires=True)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether weights are dropped after forward and gathered again in backward, or keep a buffer to themselves.

        The root's own weights always have a buffer. A secondary shard, requested by a number, is dropped.
        """
        _check_bool("reshard_after_forward", reshard_after_forward)
        self._change_setting(recurse, "keeps_after_forward", not reshard_after_forward)
        self._change_setting(recurse, "stays_unsharded", not reshard_after_forward)
        self._change_setting(recurse, "secondary_ranks", 0)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether weights are dropped after backward, or kept for the next forward in a buffer of their own.

        True does nothing, even after False: a group that has a buffer of its own keeps it. The next forward gathers the
        weights again if they have changed.
        """
        _check_bool("reshard_after_backward", reshard_after_backward)
        if not reshard_after_backward:
            self._change_setting(recurse, "keeps_after_backward", True)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether weights are gathered for the backward; those of embeddings without hooks never are."""
        _check_bool("unshard_in_backward", unshard_in_backward)
        self._change_setting(False, "unshards_in_backward", unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set which modules are gathered when this module is about to run, not those that ran next the last time.

        Blocks share as many weight buffers as the longest list of ``modules`` has entries, plus one; at least two.
        """
        self._change_setting(False, "forward_prefetch", _specs_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set which modules are gathered when the backward reaches this module, not those before it in the forward."""
        self._change_setting(False, "backward_prefetch", _specs_of(modules))

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let the next forward's all-gathers wait for ``event`` alone, not for all work of the current stream.

        If weights change after this call, all-gathers wait for all work as well. None, which ``record_event()`` of a
        CPU's stream returns, changes nothing; nor does a call before the first forward, which waits for all work.
        """
        if (state := state_of(self)) is not None:
            state.post_optim_event = None if event is None else (event, [group.versions() for group in state.groups])

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load like torch's method; names may lack the prefix of ``torch.compile``, as in a ``full_state_dict``."""
        if isinstance(state_dict, Mapping) and any(_name_here(self, name) != name for name in state_dict):
            versions = getattr(state_dict, "_metadata", None)
            state_dict = OrderedDict((_name_here(self, name), value) for name, value in state_dict.items())
            vars(state_dict)["_metadata"] = versions
        return super().load_state_dict(state_dict, *args, **kwargs)

    # Gradients ---------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether a backward reduces the gradients, for gradient accumulation as with DDP's ``no_sync``.

        False keeps unsharded gradients on this rank (a warning tells how many bytes that costs) until the first
        backward after True, which reduces their sum. All ranks must set the same. By default every micro-batch is
        reduced into the sharded gradients and no unsharded gradients are kept.
        """
        for spec in _specs(self, recurse):
            spec.settings.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether a backward sums gradients over the replicas of a 2-D mesh, or leaves partial sums to a later
        backward. A collective.

        ``requires_all_reduce`` is set for the whole root. ``.grad`` is final only after a backward over replicas.

        Raises:
            ValueError: this is not the root, or ``recurse`` is False.
        """
        _check_bool("requires_all_reduce", requires_all_reduce)
        state = current_state(self)
        if state.context.replicas is None:
            return
        if state.model is not self or not recurse:
            raise ValueError("set_requires_all_reduce is for the whole model: call it on the root, with recurse=True")
        state.context.replicas.sums = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: every backward waits for its own reduces; FSDP2 waits at the last of several backwards."""
        _check_bool("is_last_backward", is_last_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's summed gradients by ``factor`` instead of the number of ranks."""
        if not (isinstance(factor, Real) and 0 < abs(factor) < float("inf")):
            raise ValueError(f"set_gradient_divide_factor({factor!r}) takes a finite number other than 0, such as 8.0")
        for spec in _specs(self, False):
            divisor = Divisor(factor, spec.info.device)
            for part in spec.parts:
                part.divisor = divisor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: collectives always sum gradients, and the engine divides the sums afterwards."""
        _check_bool("enable", enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Do nothing: a rank may always leave parameters unused, and takes part in their reduce with zeros."""
        _check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set the number of gradient buffers that blocks take in turn; two by default."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._change_setting(recurse, "grad_buffers", max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether gradients have a communicator of their own, so that all-gathers and reduces can overlap.

        ``enable`` applies to the whole root if one module sets it.
        """
        _check_bool("enable", enable)
        self._change_setting(recurse, "separate_reduce_group", enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether buffers are allocated by the process group, which registers them with NCCL.

        ``enable`` applies to all units that share buffers with this module, from the next forward on. Overflow buffers
        and the shards, which all-gathers without a cast send from, are ordinary memory. ``tests/test_cuda.py`` enables
        this on two ranks of one GPU.
        """
        _check_bool("enable", enable)
        for spec in _specs(self, False):
            for comm in (spec.settings.custom_all_gather, spec.settings.custom_reduce_scatter):
                if comm is not None:
                    raise MisuseError(
                        f"set_allocate_memory_from_process_group_for_comm: '{spec.name}' communicates by a "
                        f"{type(comm).__name__}, which allocates by itself: leave one of the two out"
                    )
        self._change_setting(False, "allocates_from_group", enable)

    def set_custom_all_gather(self, comm: fsdp2.AllGather) -> None:
        """Gather this module's own weights with ``comm``, an object of FSDP2's ``AllGather``.

        ``comm`` gathers into memory of its own ``allocate``, from which weights are copied to their buffer.

        Raises:
            ValueError: a compression, ownership or tensor subclass decides what is sent.
        """
        self._set_custom("custom_all_gather", comm)

    def set_custom_reduce_scatter(self, comm: fsdp2.ReduceScatter) -> None:
        """Sum gradients of this module's own weights with ``comm``, an object of FSDP2's ``ReduceScatter``.

        ``comm`` gets memory of its own ``allocate`` and ``op=ReduceOp.SUM``; the engine divides afterwards. Replicated
        parameters are still summed by the engine.

        Raises:
            ValueError: a compression, ownership or tensor subclass decides what is sent.
        """
        self._set_custom("custom_reduce_scatter", comm)

    def _set_custom(self, name: str, comm: Any) -> None:
        if not (callable(comm) and hasattr(comm, "allocate")):
            raise TypeError(f"set_{name} takes an object with allocate() and __call__() as FSDP2's; got {comm!r}")
        for spec in _specs(self, False):
            why = ""
            if spec.collectives is not EXACT:
                why = "its compression decides what is sent"
            elif any(flat.layout.uneven_chunks for flat in spec.flats):
                why = "with ownership, ranks own parts of different lengths"
            elif any(isinstance(flat, ExtensionFlatParam) for flat in spec.flats):
                why = "an all-gather extension of its parameters decides what is sent"
            elif spec.settings.secondary_ranks:
                why = "with reshard_after_forward=<number>, weights are gathered among fewer ranks, too"
            if why:
                raise ValueError(f"set_{name} on '{spec.name}': {why}. Leave one of the two out")
        self._change_setting(False, name, comm)

    def reset_iter_state(self) -> None:
        """Drop the state of a forward or backward that raised, gradients that were not reduced included.

        The next forward drops the state of an interrupted forward or backward by itself.

        Raises:
            RuntimeError: this is not the root.
        """
        state = state_of(self)
        if _spec(self).outer is not None or (state is not None and state.model is not self):
            raise RuntimeError("reset_iter_state is for the root module, the outermost that is sharded")
        if state is not None:
            state.reset()

    def set_all_reduce_hook(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("set_all_reduce_hook", "pass a 2-D mesh (replicate, shard) for a sum over replicas")

    def set_symm_mem_for_comm(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("set_symm_mem_for_comm", "set_allocate_memory_from_process_group_for_comm registers buffers with NCCL")

    def _set_unshard_async_op(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("_set_unshard_async_op", "all-gathers are issued ahead, into buffers that exist already")

    def _get_fsdp_state(self) -> NoReturn:
        raise NotImplementedError(
            f"a {class_of(self).__name__} has no state of FSDP2's: it is sharded by yafsdp_cc, which has the methods "
            "of FSDP2's modules but not what lies behind them"
        )

    # As a module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Make ``.to()`` and the like move buffers and ignored parameters, and ``to_empty`` allocate those on the meta
        device.

        Sharded parameters keep their device, and from the first forward on their dtype.
        """
        held: dict[Any, str] = {}
        specs = _specs(self, recurse)
        for own in specs:
            reshard(own)
            # check the shards, too, in place of which a forward and ``whole_parameters`` show other tensors
            held |= {param.parameter: param.spec.name for param in own.params}
        held |= {each: name for name, each in self.named_parameters(recurse=recurse) if isinstance(each, FlatDTensor)}
        is_late = not recurse or any(state_of(module) is not None for own in specs for module in own.modules)
        for parameter, name in held.items():
            _check_apply(name, parameter, fn, is_late=is_late)
        for inner in self.modules() if recurse else (self,):
            if (spec := spec_of(inner)) is not None:
                apply_to_shards(spec, fn)
            for ignored in dict.values(inner._parameters):
                if ignored is not None and not isinstance(ignored, FlatDTensor):
                    with torch.no_grad():
                        moved = fn(ignored)
                    if moved.is_meta is ignored.is_meta:
                        ignored.data = moved
                        if ignored.grad is not None:
                            ignored.grad.data = fn(ignored.grad)
                    else:
                        fresh = with_grad_dtype(nn.Parameter(moved, ignored.requires_grad), ignored)
                        torch.utils.swap_tensors(ignored, fresh)  # ``ignored`` remains the same object
                    if makes_empty(fn):
                        mark_unwritten(ignored)
            for key, buffer in inner._buffers.items():
                if buffer is not None:
                    inner._buffers[key] = moved = fn(buffer)
                    if makes_empty(fn):
                        mark_unwritten(moved)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of sharded parameters, also where ``parameters()`` shows unsharded ones."""
        super().zero_grad(set_to_none)
        for param in (param for spec in _specs(self, True) for param in spec.params):
            if set_to_none:
                param.parameter.grad = None
            elif param.parameter.grad is not None:
                param.parameter.grad.zero_()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze the sharded parameters, also where ``parameters()`` shows unsharded ones."""
        for param in (param for spec in _specs(self, True) for param in spec.params):
            param.parameter.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise MisuseError(
            f"FSDP does not support deepcopy: a sharded {class_of(self).__name__} cannot be copied: copy the model "
            "before shard(), or keep an average of the weights with copies of model.parameters()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a sharded {class_of(self).__name__} cannot be pickled or copied: one rank's part is no use without "
            "the others. Save with yafsdp_cc.save(path, model), or model.state_dict() with torch.distributed.checkpoint"
        )

    def _change_setting(self, recurse: bool, name: str, value: object) -> None:
        for spec in _specs(self, recurse):
            if getattr(spec.settings, name) != value:
                setattr(spec.settings, name, value)
                outdate(spec)


# ``_spec`` and ``_specs`` are no methods: an attribute of the user's module might have the same name.
def _spec(module: nn.Module) -> ParamGroupSpec:
    spec: ParamGroupSpec = module.__dict__[SPEC]
    return spec


def _specs(module: nn.Module, recurse: bool) -> Sequence[ParamGroupSpec]:
    return specs_below(module) if recurse else [_spec(module)]


def _specs_of(modules: Sequence[Any]) -> tuple[ParamGroupSpec, ...]:
    specs = []
    for module in modules:
        spec = spec_of(module) if isinstance(module, nn.Module) else None
        if spec is None:
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        specs.append(spec)
    return tuple(dict.fromkeys(specs))


def outdate(spec: ParamGroupSpec) -> None:
    """Mark the engine of the parameter group ``spec``, if any, to be made anew before the next forward."""
    if (state := state_of(spec.modules[0])) is not None:
        state.outdated = True


def _refuse(name: str, why: str) -> NoReturn:
    raise NotImplementedError(f"{name} has no meaning here: {why}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} should be a bool, got {type(value)}")


def _check_apply(name: str, parameter: FlatDTensor, fn: Callable[[Tensor], Tensor], *, is_late: bool) -> None:
    """Raise a ``RuntimeError`` if ``fn`` would move the sharded parameter ``name``, or convert it where it may not."""
    local, after = parameter._local_tensor, fn(parameter._local_tensor)
    if after is local or (local.is_meta and after.dtype == local.dtype):
        return
    # frameworks pass "cpu:0", to which ``.to`` copies a tensor that is on "cpu"
    is_here = local.is_meta or after.device == local.device
    if is_here and after.dtype == local.dtype and torch.equal(after, local):
        return
    is_plain = local.dtype in TRAINED_IN and after.dtype in TRAINED_IN and subclass_of(parameter) is None
    if is_here and after.dtype != local.dtype and is_plain and not is_late and parameter.grad is None:
        return
    raise RuntimeError(
        f"'{name}' is sharded on {parameter.device} as {parameter.dtype} and cannot be converted or moved: do that "
        "before shard(), or choose the dtype of the forward with mp_policy; for an export, convert what "
        "full_state_dict(model) returns. (After fully_shard(), .to(dtype) works on a whole module of plain parameters "
        "without gradients, before the first forward.)"
    )


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let the roots among ``modules`` issue their communication on the same streams, as stages of a pipeline do.

    Raises:
        ValueError: one of ``modules`` is not sharded.
    """
    specs = _specs_of(modules)
    for spec in specs[1:]:
        spec.settings.streams = specs[0].settings.streams
        outdate(spec)


# Modules become sharded ones, and plain ones again -----------------------------------------------------------------

_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def make_sharded(module: nn.Module, spec: ParamGroupSpec) -> None:
    """Turn ``module``, a module of ``spec``, into a ``ShardedModule`` with the engine's hooks around its forward."""
    own = type(module)
    if own not in _sharded_classes:
        # transformers and others remove FSDP2's prefix to find the class that a model's config names
        sharded = type(f"FSDP{own.__name__}", (ShardedModule, own), {"__module__": own.__module__})
        _sharded_classes[own] = sharded
    module.__class__ = _sharded_classes[own]
    # torch's ``replicate`` and DDP leave out modules that have this mark of ``fully_shard``
    registry = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()
    undo_later(module, functools.partial(_unregister, module))
    hooks = install_hooks(module)
    if module is spec.modules[0]:
        hooks += [*follow_assignments(spec), *reshard_for_state_dicts(spec)]
        for holder in {holder for param in spec.params for holder, _ in param.sites}:
            install_module_parameters(holder)
            undo_later(module, functools.partial(remove_module_parameters, holder))
    for hook in hooks:
        undo_later(module, hook.remove)
    if len(specs_below(module)) > 1:
        hook_parts(module)


def make_plain(module: nn.Module) -> None:
    """Undo ``make_sharded`` and ``register_forward_method`` on ``module``."""
    for undo in reversed(module.__dict__.pop(_UNDO)):
        undo()
    for hook in chain.from_iterable(module.__dict__.pop(PARTS, {}).values()):
        hook.remove()
    for attribute in (STATE, GROUP, SPEC):
        module.__dict__.pop(attribute, None)
    module.__class__ = class_of(module)


def _unregister(module: nn.Module) -> None:
    registry = module.__dict__[REGISTRY_KEY]
    registry.pop("fully_shard", None)
    if not registry:
        del module.__dict__[REGISTRY_KEY]


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that ``module`` has, or had before it was sharded."""
    kind = type(module)
    return kind.__mro__[ShardedModule._orig_cls_mro_index] if isinstance(module, ShardedModule) else kind


def undo_later(module: nn.Module, undo: Callable[[], Any]) -> None:
    """Register ``undo`` for ``unshard_model`` to call when it makes ``module`` plain again."""
    module.__dict__.setdefault(_UNDO, []).append(undo)


def check_sharded(module: nn.Module) -> None:
    """Raise a ``ValueError`` where ``module`` is not sharded."""
    if not isinstance(module, ShardedModule):
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"this {type(module).__name__} is sharded by torch's own FSDP2, of which this knows nothing: shard the "
                "model by yafsdp_cc.shard(model) or yafsdp_cc.fully_shard in its place"
            )
        said = f"this {type(module).__name__} is not sharded"
        if name := next((prefix[:-1] for prefix, _ in sharded_parts(module)), ""):
            raise ValueError(
                f"{said} itself, as its '{name}' is: pass the module that was given to shard(), or call "
                "yafsdp_cc.fully_shard on the model, too, after its blocks"
            )
        if any(isinstance(each, FlatDTensor) for each in module.parameters()):
            raise ValueError(f"{said} itself, and part of a model that is: pass the model that was given to shard()")
        raise ValueError(f"{said}: call yafsdp_cc.shard(model) first")


def require_state(module: nn.Module) -> FSDPState:
    """Return the engine of a sharded module. A collective: the engine is assembled if it is outdated or does not exist.

    Raises:
        ValueError: the module is not sharded.
    """
    check_sharded(module)
    return current_state(module)


def sharded_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that this package has sharded, ``module`` or modules in it, each with the prefix
    of its parameters' names."""
    if isinstance(module, ShardedModule):
        yield prefix, module
    else:
        for name, child in module.named_children():
            yield from sharded_parts(child, f"{prefix}{name}.")


def torch_states(module: nn.Module) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the states of torch's own FSDP2 in ``module``, each with its parameter groups."""
    for each in module.modules():
        if isinstance(each, FSDPModule) and not isinstance(each, ShardedModule):
            state = each._get_fsdp_state()
            groups = vars(state).get("_fsdp_param_groups")  # torch 2.11 has one parameter group at most
            yield state, list(filter(None, [state._fsdp_param_group] if groups is None else groups))


def drop_unreduced(module: nn.Module) -> None:
    """Drop gradients that are not reduced yet, and the state of a backward that raised, under torch's FSDP2 as well."""
    for _, part in sharded_parts(module):
        require_state(part).reset()
    for state, groups in torch_states(module):
        if state._is_root and hasattr(state, "_reset_iter_state"):  # torch 2.11 has no ``_reset_iter_state``
            state._reset_iter_state()
        for group in groups:
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):  # FSDP2 makes it in the first forward
                    param._unsharded_param.grad = None


def built_state(module: nn.Module, what: str, *, is_current: bool = False) -> FSDPState:
    """Return the engine of a sharded module, never assembling it, for queries of one rank alone.

    Args:
        what: name of the query, for errors.
        is_current: whether to refuse an engine that a changed setting has outdated.

    Raises:
        ValueError: the module is not sharded.
        RuntimeError: there is no engine, or ``is_current`` refuses it.
    """
    check_sharded(module)
    state = state_of(module)
    if state is None or (is_current and state.outdated):
        why = "has no buffers yet" if state is None else "is to get other buffers, as a setting has changed"
        raise RuntimeError(
            f"{what}: this {class_of(module).__name__} {why}, which all ranks make together: run a forward on all "
            "ranks first"
        )
    return state


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make ``module.<name>(...)`` another way into a sharded module, besides its forward.

    Weights are unsharded while the method runs, and gradients flow through it as through a forward. Methods that only
    call the module itself, or modules of it outside of its units, such as ``generate`` of Hugging Face models, need no
    registration.

    Raises:
        ValueError: the module is not a unit of a sharded model, nor the model itself.
        AttributeError: the module has no method ``name``.
    """
    if not isinstance(module, ShardedModule):
        raise ValueError(
            f"{type(module).__name__} is neither a sharded model nor one of its units: register the method on one"
        )
    method = getattr(module, name)

    @functools.wraps(method)
    def with_weights(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, finish = pre_forward_of(module, module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = finish(output)
        return output

    own = vars(module)
    restore = (
        functools.partial(own.__setitem__, name, method) if name in own else functools.partial(own.pop, name, None)
    )
    own[name] = with_weights
    undo_later(module, restore)


# Unsharded parameters outside of a forward -------------------------------------------------------------------------


@contextmanager
def whole_parameters(model: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Show whole, plain parameters of a sharded ``model`` on every rank inside the block. A collective, at both ends.

    Whole parameters have their own dtypes. Tensor-parallel ones are the DTensors that ``parallelize_module`` made.
    ``named_parameters()``, attributes and ``state_dict()`` all show them; they are copies that take the memory of a
    whole model. What is frozen or unfrozen inside the block stays so. Make optimizers outside of the block.

    Args:
        model: the model that was passed to ``shard``.
        write: whether to write changes back. All ranks must make the same changes; each stores its own part.

    Raises:
        ValueError: ``model`` is not sharded.
        RuntimeError: entered inside a forward or a backward, or a second time; or ``write`` cannot keep what was put
            in a parameter's place.
    """
    state = require_state(model)
    check_at_rest(state, "whole_parameters")
    check_shows_shards(model, "whole_parameters")
    with torch.inference_mode(False):  # tensors made in inference mode have no version counters
        values = whole_params_by_group(state, everywhere=True)
        wholes = {param: _unsharded_parameter(param, value) for param, value in values}
    shown = {param: in_class_of(param, whole) for param, whole in wholes.items()}
    for param, each in shown.items():
        param.set_parameter(each)
    versions = {param: whole._version for param, whole in wholes.items()}
    lost: list[str] = []
    try:
        yield
    finally:
        for param, whole in wholes.items():
            held = {module._parameters.get(attribute) for module, attribute in param.sites}
            if held == {shown[param]}:
                continue
            assigned, versions[param] = held.pop(), -1  # no tensor has version -1: it counts as changed
            is_alike = type(assigned) is type(whole) and assigned.shape == whole.shape and not assigned.is_meta
            if assigned is None or held or not is_alike:
                lost.append(param.spec.name)
            elif write:
                whole.requires_grad_(assigned.requires_grad).data.copy_(assigned)
        changed = [param.spec.name for param, whole in wholes.items() if whole._version != versions[param]]
        if changed and not write and state.context.gather.comm.rank == 0:
            told = f"whole_parameters: '{changed[0]}' was written to ({len(changed)} in all), and the change is dropped"
            logging.getLogger("yafsdp_cc").warning("%s: pass write=True to keep it", told)
        for param, whole in wholes.items():
            if write:
                with torch.no_grad():
                    param.parameter.copy_(whole)
            if param.parameter.requires_grad is not whole.requires_grad:
                param.parameter.requires_grad_(whole.requires_grad)
            vars(whole)[COPY_OF] = param.spec
            param.set_parameter(param.parameter)
    if lost and write:
        raise RuntimeError(
            f"'{lost[0]}' ({len(lost)} in all) was replaced inside whole_parameters, not by one plain parameter of "
            "its shape in all modules that hold it, and the change is dropped: write to it in place, as with copy_()"
        )


def _name_here(module: nn.Module, name: str) -> str:
    """Return the ``name`` of a state dict's entry with ``torch.compile``'s prefixes; hooks add checkpoint wrappers'."""
    found: list[str] = []
    inner: nn.Module | None = module
    for part in name.split("."):
        while inner is not None and part not in inner._modules and inner._modules.keys() & WRAPPERS:
            [(wrapper, inner)] = inner._modules.items()
            found += [wrapper] if wrapper == WRAPPERS[0] else []
        found.append(part)
        inner = None if inner is None else inner._modules.get(part)
    return ".".join(found)


@torch.no_grad()
def whole_params_by_group(state: FSDPState, *, everywhere: bool) -> Iterator[tuple[FSDPParam, Tensor | None]]:
    """Yield every parameter with its whole value, group by group in module order, and the replicated ones last.

    For a tensor-parallel parameter the value is this rank's local tensor before sharding. Values are plain, in the
    parameter's own dtype and shape, on the engine's device (in host memory if gloo sends them to one rank). The next
    value overwrites them: copy what you keep. A rank holds one group's buffer at a time, or none if it receives
    nothing. A collective: iterate to the end, on all ranks.

    Args:
        everywhere: whether every rank gets the values; else only the first rank of the mesh, and others get None.
    """
    info = state.context.info
    is_first_replica = info.replicate_group is None or info.replicate_group.rank() == 0
    for spec, flat in ((group.spec, flat) for group in state.groups for flat in group.flats):
        group = spec.info.shard_group
        takes_part = everywhere or is_first_replica
        if isinstance(flat, ClassFlatParam):
            whole = cast("FlatDTensor", flat.params[0].parameter).full_tensor() if takes_part else None
            yield flat.params[0], whole if everywhere or group.rank() == 0 else None
            del whole
            continue
        shard = flat.sharded.to(state.context.device)
        buffer = _gathered(shard, flat.layout.chunks, group, everywhere) if takes_part else None
        for param in flat.params:
            extent = param.extent
            yield param, None if buffer is None else buffer[extent.offset : extent.end].view(extent.shape)
        del buffer  # free this group's buffer before that of the next is made
    for param in state.replicated.params:
        is_first = all(group.rank() == 0 for group in all_groups(param.spec.mesh))
        yield param, param.local.detach() if everywhere or is_first else None


def _unsharded_parameter(
    param: FSDPParam, whole: Tensor | None, device: torch.device | str | None = None
) -> nn.Parameter:
    """Return ``param`` as it was before sharding, with a copy of the values ``whole`` (None: on the meta device)."""
    sharded, parallel = param.parameter, param.spec.tensor_parallel
    if whole is None:
        values = param.local.new_zeros(param.spec.shape, device="meta")
    else:
        values = whole.to(device or sharded.device, copy=True)
    if parallel is not None:
        values = parallel.wrap_unsharded(values)
    return with_grad_dtype(nn.Parameter(values, sharded.requires_grad), sharded)


def is_first_of_model(state: FSDPState) -> bool:
    """Return whether this rank is the lowest of all that hold a part of the model. Process groups number their ranks
    in ascending order; a mesh may list its ranks in any order."""
    return dist.get_rank() == ranks_of_model(state)[0]


def ranks_of_model(state: FSDPState) -> list[int]:
    """Return the global ranks that hold a part of the model, in ascending order."""
    meshes = [param.spec.global_mesh for param in state.params]
    largest = max(meshes, key=lambda mesh: mesh.size(), default=state.context.info.mesh)
    return sorted(largest.mesh.flatten().tolist())


def _gathered(shard: Tensor, chunks: Sequence[int], group: dist.ProcessGroup, everywhere: bool) -> Tensor | None:
    if not everywhere and backend_of(group, shard.device) != "nccl":
        shard = shard.cpu()  # gloo sends messages only from host memory
    part = shard.view(torch.uint8)  # send bytes, as backends do not support every dtype
    if not everywhere and group.rank() > 0:
        _wait_for([dist.P2POp(dist.isend, part, group=group, group_peer=0)])
        return None
    buffer = shard.new_empty(sum(chunks))
    if everywhere and len(set(chunks)) == 1:
        all_gather_single(buffer.view(torch.uint8), part, group=group)
        return buffer
    parts = buffer.view(torch.uint8).split([shard.itemsize * chunk for chunk in chunks])
    parts[group.rank()].copy_(part)
    if everywhere:
        for root, theirs in enumerate(parts):
            if theirs.numel():
                dist.broadcast(theirs, group=group, group_src=root)
        return buffer
    # Receive one message from each rank into its place in ``buffer``: a gather would need a second buffer.
    _wait_for(
        [dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer) for peer, theirs in enumerate(parts) if peer]
    )
    return buffer


def _wait_for(messages: Sequence[dist.P2POp]) -> None:
    """Send and receive those of ``messages`` that have bytes, and wait for them."""
    if filled := [each for each in messages if each.tensor.numel()]:
        for work in dist.batch_isend_irecv(filled):
            work.wait()


def check_shows_shards(model: nn.Module, what: str) -> None:
    """Reshard ``model``; raise a ``RuntimeError`` inside ``whole_parameters``, where ``what`` would write to copies."""
    for spec in specs_below(model):
        reshard(spec)
    for param in (param for spec in specs_below(model) for param in spec.params):
        if not param.is_held:
            raise RuntimeError(
                f"{what} inside whole_parameters, or after '{param.spec.name}' was replaced, would write to what is "
                "not the sharded parameter: do it outside"
            )


def check_at_rest(state: FSDPState, what: str) -> None:
    """Reshard the model; raise a ``RuntimeError``, which refuses ``what``, inside a forward or backward."""
    if state.iteration is not None or torch._C._current_graph_task_id() != -1:
        raise RuntimeError(f"{what} inside a forward or backward: weights are whole there already")
    for spec in state.specs:
        reshard(spec)


@torch.inference_mode(False)  # tensors made in inference mode cannot be trained
def unshard_model(model: Model, *, rank0_only: bool = False, device: torch.device | str | None = None) -> Model:
    """Undo ``shard``: whole, plain parameters again, the model's own classes, no hooks of the engine. A collective.

    Groups are gathered one by one: beside the plain model a rank holds its shards and one group. Gradients are dropped.
    With ``sync`` all replicas have the same weights, as after ``synchronize_replicas``, and train apart from then on.
    An optimizer still refers to the sharded parameters and their memory: make a new one.

    Args:
        model: the model that was passed to ``shard``.
        rank0_only: whether only the first rank of the mesh gets whole parameters; on others they are on the meta
            device.
        device: device of parameters and buffers; None: unchanged. ``"cpu"`` is for models that are larger than one GPU.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: ``model`` is only a part of what was passed to ``shard``.
        RuntimeError: called inside a forward or a backward, or inside ``whole_parameters``.
    """
    state = require_state(model)
    check_at_rest(state, "unshard_model")
    check_shows_shards(model, "unshard_model")
    if state.model is not model:
        raise ValueError(f"this {class_of(model).__name__} is a part of a sharded model: unshard the whole of it")
    for finish in BEFORE_UNSHARD:
        finish(model)
    for param, whole in whole_params_by_group(state, everywhere=not rank0_only):
        plain = _unsharded_parameter(param, whole, device)
        plain.__dict__.update({name: note for name, note in vars(param.parameter).items() if name not in _OURS})
        vars(param.parameter)[LEFT_OVER] = param.spec
        param.set_parameter(in_class_of(param, plain))
    for module in list(model.modules()):
        module.__dict__.pop(MANAGED, None)
        if isinstance(module, ShardedModule):
            make_plain(module)
    if device is not None:
        move_buffers(model, device)
    state.retire()
    del state
    gc.collect()  # frees parameter groups and their buffers, which are reference cycles
    return model
