"""Hooks around forwards of sharded modules, which call the engine, and the check of inputs before a backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import forward_ad

from yafsdp_cc.engine.param_group import OF_ENGINE
from yafsdp_cc.engine.spec import spec_of
from yafsdp_cc.engine.state import GROUP, STATE
from yafsdp_cc.sharding.assembly import assemble, state_of
from yafsdp_cc.sharding.containers import NO_CONTAINERS, returning_containers
from yafsdp_cc.sharding.units import is_called
from yafsdp_cc.tensor.refusals import refuse_inputs

if TYPE_CHECKING:
    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.state import FSDPState

PARTS = "_yafsdp_cc_parts"
"""Name of an attribute of sharded modules: handles of hooks on their submodules that may be called alone."""
_tracing_state = torch._C._get_tracing_state
"""Function that returns the state of ``torch.jit.trace`` under way, or None."""
_functorch_stack = torch._C._functorch.peek_interpreter_stack
"""Function that returns the innermost transform of ``torch.func`` under way, or None."""


def current_state(module: nn.Module) -> FSDPState:
    """Return the engine of ``module``; assemble it (a collective) if there is none or a setting has outdated it.

    A module without an engine becomes the root, unless it was sharded as a part of another module.
    """
    state = state_of(module)
    if state is None or (state.outdated and state.may_retire()):
        spec = spec_of(module if state is None else state.model)
        state = assemble(module if spec is None else spec.outermost.modules[0])
        hook_parts(state.model)
    return state


def pre_forward_of(
    module: nn.Module, called: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Prepare a forward of a sharded module; return its arguments, and the function to run on its output.

    Args:
        called: the module itself, or the part of it that was called alone.
    """
    if _functorch_stack() is not None:
        raise NotImplementedError(
            f"a transform of torch.func (grad, jvp, vmap, ...) around a sharded {type(called).__name__}: neither "
            "collectives nor buffers go through those. Use torch.autograd, or an unsharded model"
        )
    if forward_ad._current_level >= 0 and torch.is_grad_enabled():
        raise NotImplementedError(
            f"forward-mode differentiation of a sharded {type(called).__name__} whose graph is recorded: tangents do "
            "not go through it. Compute them under torch.no_grad(), or on an unsharded model"
        )
    if _tracing_state() is not None or torch.compiler.is_exporting():
        raise NotImplementedError(
            f"torch.jit.trace, torch.export or torch.onnx.export of a sharded {type(called).__name__}: the graph would "
            "hold the weights that are gathered now as constants. Call yafsdp_cc.unshard_model(model) first, on every "
            "rank"
        )
    state: FSDPState | None = module.__dict__.get(STATE)
    if state is None or state.outdated:
        state = current_state(module)
    group: ParamGroup | None = module.__dict__.get(GROUP)
    given = (*args, *kwargs.values())
    finish: Callable[[Any], Any]
    try:
        if group is None:
            args, kwargs, end = state.pre_root_forward(called, args, kwargs)
            finish = partial(_end_root_forward, state, end)
        else:
            args, kwargs, finish = state.pre_forward(group, args, kwargs)
    except Exception:
        state.interrupted = True
        raise
    if all(isinstance(each, NO_CONTAINERS) for each in given):
        return args, kwargs, finish
    return args, kwargs, returning_containers(given, (*args, *kwargs.values()), finish)


def install_hooks(module: nn.Module, part: nn.Module | None = None) -> list[Any]:
    """Run ``pre_forward_of`` around every forward of ``module``, or around those of a ``part`` of it that is called
    from outside of a forward of ``module``; return the handles of the hooks."""
    hooked = module if part is None else part

    def pre_forward(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        finish = None
        if part is None or not _shows_weights(module):
            args, kwargs, finish = pre_forward_of(module, hooked, args, kwargs)
        module.__dict__[STATE].entered.setdefault(hooked, []).append(finish)
        return args, kwargs

    def post_forward(_: nn.Module, __: Any, output: Any) -> Any:
        state: FSDPState | None = module.__dict__.get(STATE)
        if (error := sys.exc_info()[1]) is not None and state is not None:
            _explain_gated_write(error)
            state.drop_interrupted()  # an interrupt may have ended an earlier forward
        if state is None or not state.entered.get(hooked):
            return output  # a hook, perhaps ``pre_forward``, has raised before this forward was entered
        finish = state.entered[hooked].pop()
        try:
            return output if finish is None else finish(output)
        except RuntimeError as error:  # a forward may have written to a small parameter, which a gate returned
            _explain_gated_write(error)
            raise

    # ``prepend``: other hooks see unsharded weights. ``always_call``: the forward is ended after an exception, too.
    return [
        hooked.register_forward_pre_hook(_uncompiled(pre_forward, part is not None), prepend=True, with_kwargs=True),
        hooked.register_forward_hook(_uncompiled(post_forward, part is not None), always_call=True),
    ]


def _end_root_forward(state: FSDPState, end: Callable[[Any], Any], output: Any) -> Any:
    """End a forward of the root by ``end(output)``, and return what that returns.

    Raises:
        RuntimeError: the forward has unfrozen a parameter, whose gradient has no gate to pass in this forward's graph.
    """
    unfrozen = ""
    if state.iteration is not None and state.iteration.has_gate:
        group = state.root_group
        for param in (*state.replicated.params, *(() if group is None else group.params)):
            module, attribute = param.sites[0]
            shown: Tensor | None = module.__dict__.get(attribute)  # a trained weight is no leaf: it has passed a gate
            if shown is not None and shown.is_leaf and (shown.requires_grad or param.parameter.requires_grad):
                shown.requires_grad_(False)
                unfrozen = param.spec.name
    output = end(output)
    if unfrozen:
        raise RuntimeError(
            f"'{unfrozen}' was unfrozen within the forward of the model, which goes on without its gradient: call "
            "requires_grad_(), or set_adapter() of PEFT, before the forward"
        )
    return output


def hook_parts(module: nn.Module) -> None:
    """Let the parts of ``module`` that are not sharded modules be called outside of its forward.

    The call of a part is then a forward of ``module``: methods of Hugging Face models call their encoder, embedding or
    vision tower. Only the root and modules with units inside get such hooks: one on each layer of every block is slow.
    """
    hooked: dict[nn.Module, list[Any]] = module.__dict__.setdefault(PARTS, {})
    for part in _parts(module):
        if part not in hooked and is_called(part) and any(True for _ in part.parameters()):
            hooked[part] = install_hooks(module, part)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if spec_of(child) is None:
            yield child
            yield from _parts(child)


def _shows_weights(module: nn.Module) -> bool:
    """Return whether ``module`` has whole weights: a forward of it is under way, or ``whole_parameters``."""
    state: FSDPState | None = module.__dict__.get(STATE)
    if state is None:
        return False
    state.drop_interrupted()
    group: ParamGroup | None = module.__dict__.get(GROUP)
    # weights that unshard() put in place do not count: a forward still needs its gates in the graph
    is_inside = state.iteration is not None if group is None else len(group.registered) > group.registers_held
    return is_inside or not state.params[0].is_held


def _explain_gated_write(error: BaseException) -> None:
    """Reword ``error``, which ended a forward, if autograd has refused a write to a tensor that came through a gate."""
    if isinstance(error, RuntimeError) and str(error).startswith("Output ") and "GateGradFlow" in str(error):
        error.args = (
            "the forward of a sharded module has written in place to one of its inputs, or to a small parameter (a "
            "norm's, a bias): write x = x + y in place of x += y, and change parameters outside of the forward. "
            f"Autograd says: {error}",
        )


def _uncompiled(hook: Callable[..., Any], traced: bool) -> Callable[..., Any]:
    """Return ``hook`` kept out of compiled graphs, which leave it out if ``traced``, and else break at it.

    The wrapper that ``torch.compiler.disable`` makes is called only under ``torch.compile``, as it costs as much as a
    hook.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(hook)

    def call(*args: Any) -> Any:
        if traced and torch.compiler.is_compiling():
            return None
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return disabled(*args)
        return hook(*args)

    setattr(call, OF_ENGINE, True)
    # ``module.compile()`` compiles each hook alone; ``skip`` excludes ``call``, but not what ``call`` calls
    return call if traced else torch._dynamo.decorators.skip(call)


def _run_backward(torch_s: Callable[..., Any], outputs: Sequence[torch.Tensor], *args: Any, **options: Any) -> Any:
    """Check ``inputs`` (``args[3]``), then call ``torch_s``, the torch function behind ``backward`` and ``grad``."""
    if args[3]:
        refuse_inputs(outputs, args[3])
    return torch_s(outputs, *args, **options)


_autograd: Any = torch.autograd
_autograd._engine_run_backward = _autograd.graph._engine_run_backward = partial(
    _run_backward, _autograd.graph._engine_run_backward
)
