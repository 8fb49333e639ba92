"""Refuses, or warns of, operations and optimizers that do not suit sharded tensors, and says what to type instead."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from yafsdp_cc.engine.autograd import GateGradFlow, Narrow
from yafsdp_cc.engine.param import owner_of
from yafsdp_cc.engine.spec import spec_of, specs_below
from yafsdp_cc.engine.state import IterationState, engine_of
from yafsdp_cc.tensor.shown import COPY_OF, LEFT_OVER, SHARDED_AS, UNSHARDED_OF

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from yafsdp_cc.engine.layout import ShardSpec
    from yafsdp_cc.engine.param import FSDPParam

CALL_FULL = "call .full_tensor() for the whole tensor, on every rank"
ADD_FIRST = "add adapters and layers first, then call shard() or fully_shard()"
STATE_OF_TORCH = (
    ". Optimizer state that was put in place by hand is sharded otherwise: pass it to optimizer.load_state_dict, whose "
    "next step converts it"
)


def _instead(spec: ShardSpec) -> str:
    """Return what to type instead of a refused operation, depending on what is under way when the parameter is read."""
    owner = owner_of(spec)
    engine = None if owner is None else engine_of(owner)
    if owner is None or engine is None:
        return CALL_FULL
    group = None if owner.flat is None or owner.flat.group.role == "root" else owner.flat.group
    if not engine.context.in_forward:
        unit = "model" if group is None else f"model.get_submodule('{group.name}')"
        if torch._C._current_graph_task_id() != -1:
            if not torch.is_grad_enabled():  # activation checkpointing runs a forward again in grad mode
                return f"a derivative of what a loss computes of it takes whole tensors: in the loss, {CALL_FULL}"
            return (
                f"a backward runs a part of {unit} again, as activation checkpointing does, and has not come to an "
                "output of it: a loss is made of an activation that its forward keeps aside. Return that activation "
                f"from the forward of {unit} along with its output, or keep it from a part that is not checkpointed"
            )
        if group is not None and (called := _called_alone(owner)):
            return (
                f"'{called}' was called outside of unit '{group.name}', in whose forward alone it has weights: call "
                f"{unit}, make '{called}' a unit of its own, or call {unit}.unshard() before"
            )
        return (
            "outside of a forward, only operations on each element and reductions take it. For a method that reads it, "
            f"call yafsdp_cc.register_forward_method({unit}, name); for edits, "
            "yafsdp_cc.whole_parameters(model, write=True); resize or tie it before shard; of optimizers, take one "
            "that works element by element, such as AdamW; pass state_dict=yafsdp_cc.full_state_dict(model) to "
            "save_pretrained, and a Trainer of Transformers to "
            f"yafsdp_cc.integrations.transformers.accept_sharded_model. Otherwise {CALL_FULL}"
        )
    if group is None or group.registered:
        return (
            "this forward has it from parameters() or from before. Read it as an attribute of its module, which is "
            f"whole there, or {CALL_FULL}"
        )
    around = "make the model itself a unit too: shard(model, units=[..., model])"
    if group.role != "edge":
        around = "name a unit that contains both: shard(model, units=...)"
    return f"it is whole in the forward of unit '{group.name}' and was read outside. Either {around}, or {CALL_FULL}"


def instead_while_whole(spec: ShardSpec) -> str:
    """Return where to take the sharded parameter from while its module shows the gathered weight; else ""."""
    owner = owner_of(spec)
    if owner is None or owner.sites[0][1] not in owner.sites[0][0].__dict__:
        return ""
    return (
        "parameters() and modules have the gathered weight, a plain tensor, from the forward to the backward and after "
        "unshard(): take list(model.parameters()) before the forward, or compute this before it. Otherwise "
    )


def instead_of_writing(spec: ShardSpec, target: torch.Tensor) -> str:
    """Return what to type instead of writing a tensor of ``spec`` into ``target``, which is not sharded by ``spec``."""
    owner = owner_of(spec)
    engine = None if owner is None else engine_of(owner)
    if engine is not None and engine.context.in_forward:
        return _instead(spec)
    own = None if owner is None else spec_of(owner.unit)
    if own is not None:
        model = own.outermost.modules[0]
        ignored = {parameter for each in specs_below(model) for parameter in each.ignored}
        for name, parameter in model.named_parameters():
            is_added = type(parameter) is torch.nn.Parameter and parameter not in ignored
            if is_added and parameter.data_ptr() == target.data_ptr() != 0:
                return (
                    f"that is '{name}', which was added after sharding: {ADD_FIRST}; if a trainer adds it, make the "
                    "trainer first, then shard trainer.model"
                )
    return (
        f"{instead_while_whole(spec)}if that is of another model, as of a reference or an average of weights, shard "
        f"that model, too; of a ZeroRedundancyOptimizer, take the optimizer it wraps; else {CALL_FULL}{STATE_OF_TORCH}"
    )


def _called_alone(owner: FSDPParam) -> str:
    """Return the name of the module that holds the parameter if a call of that module is on the stack; else ""."""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            module = frame.f_locals.get("self")
            if any(module is holder for holder, _ in owner.sites):
                return str(owner.spec.name.rpartition(".")[0])
    return ""


def refusal(func: Any, spec: ShardSpec, what: str = "", instead: str = "", also: str = "") -> NotImplementedError:
    """Return an error that names the operation ``func`` and the parameter, and what to type instead.

    Args:
        what: what the operation was given, for the message.
        instead: what to type; "": found from what is under way (``_instead``).
        also: a further sentence.
    """
    name = func._schema.name.replace("::", ".")
    if name.startswith(("c10d.", "_c10d_functional.")):
        instead = (
            "gradients are averaged over ranks when backward() returns, and each rank has its own part of the weights: "
            "leave the call out, or call it with .full_tensor() or .to_local()"
        )
    return NotImplementedError(f"{name}{what} on {spec}: {instead or _instead(spec)}{also}")


_READS_ROWS = (
    " takes means over rows and columns, and here is {}: yafsdp_cc.optim.Adafactor has the arguments of "
    "torch.optim.Adafactor, and the same steps"
)
_REFUSED_OPTIMIZERS = {
    "torch.Muon": "torch.optim.Muon multiplies whole matrices, and here is {}: pass ownership='matrix' to shard(), or "
    "to fully_shard() of each block, and take yafsdp_cc.optim.Muon, which has them whole",
    "torch.Adafactor": f"torch.optim.Adafactor{_READS_ROWS}",
    "transformers.Adafactor": f"transformers.Adafactor{_READS_ROWS}, with d for clip_threshold and beta2_decay for "
    "decay_rate",
    "torch.ZeroRedundancyOptimizer": "torch's ZeroRedundancyOptimizer divides among ranks what is sharded already, and "
    "here is {}: take the optimizer that it was given, such as torch.optim.AdamW(model.parameters())",
    "yafsdp_cc.Adafactor": "",
}
"""Messages that refuse optimizers which read more than a rank's elements, by package and class."""

_QUANTISES_STATE = (
    "{optimizer} quantises blocks of its state, which needs plain tensors, and here is {}: give it the shards "
    "themselves, nn.Parameter(p.to_local()), as in docs/quantised.md, 'Optimizers with quantised state'"
)
_QUANTISE_STATE = ("torchao", "bitsandbytes")
"""Packages whose optimizers read the memory of parameters, or compile their steps for plain tensors."""


LOSES_STEPS = {
    LEFT_OVER: "holds the shard of '{}', whose model is plain again, by unshard_model(): make the optimizer anew, from "
    "model.parameters()",
    SHARDED_AS: "was made before '{}' was sharded and holds the whole parameter, which is gone: make the optimizer "
    "after shard(), from model.parameters()",
    COPY_OF: "was made inside whole_parameters and holds a copy of '{}': make it outside, from model.parameters()",
    UNSHARDED_OF: "was made while parameters() showed '{}' unsharded, after unshard() or a forward: call "
    "model.reshard() before it is made, or make it before",
}
"""Messages, by mark of ``tensor.shown``, for optimizers of marked parameters: steps would not change the model."""


@functools.cache
def refusal_of(kind: type[Optimizer]) -> tuple[str, int]:
    """Return the message that refuses optimizers of ``kind``, or "", and the least ``dim()`` of refused parameters."""
    if kind.__module__.partition(".")[0] in _QUANTISE_STATE:
        return _QUANTISES_STATE.replace("{optimizer}", f"{kind.__module__}.{kind.__name__}"), 0
    names = (f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__)
    return next((_REFUSED_OPTIMIZERS[name] for name in names if name in _REFUSED_OPTIMIZERS), ""), 2


def warn_of_rounding(optimizer: Optimizer) -> None:
    """Warn if Adam updates parameters of a dtype that rounds most of its steps away."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)):
        return
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        spec: ShardSpec | None = getattr(parameter, "shard_spec", None)
        if spec is not None and parameter.dtype in (torch.bfloat16, torch.float16):
            if spec.mesh.get_rank() == 0:
                logging.getLogger("yafsdp_cc").warning(
                    "%s updates %s, which is %s: steps below about %s of a weight are lost. Shard the model in fp32, "
                    "and compute in %s by mp_policy=MixedPrecisionPolicy(param_dtype=...)",
                    type(optimizer).__name__,
                    spec,
                    parameter.dtype,
                    "1/256" if parameter.dtype == torch.bfloat16 else "1/2048",
                    parameter.dtype,
                )
            return


def _params_behind(node: Any) -> Sequence[FSDPParam]:
    """Return the parameters whose gradients a node of autograd's graph hands to the engine."""
    function = getattr(node, "_forward_cls", None)
    if function is Narrow:
        return (node.param,)
    if function is GateGradFlow and isinstance(node.gated, IterationState):
        return node.gated.trained
    return ()


def refuse_inputs(outputs: Iterable[torch.Tensor | GradientEdge], inputs: Iterable[Any]) -> None:
    """Refuse a backward for the gradients of ``inputs`` alone if a forward has gathered one of them for ``outputs``.

    The graph has the gathered weight in place of the sharded parameter: without this check the parameter's gradient
    would be None, or that of a penalty alone.
    """
    specs = [spec for each in inputs if (spec := getattr(each, "shard_spec", None)) is not None]
    if not specs:
        return
    nodes = {each.node if isinstance(each, GradientEdge) else each.grad_fn for each in outputs}
    waiting = list(nodes)
    while waiting:
        node: Any = waiting.pop()
        if node is None:
            continue
        gathered = next((param.spec for param in _params_behind(node) if param.spec in specs), None)
        if gathered is not None:
            raise RuntimeError(
                f"the gradient of {gathered} was asked for by autograd.grad or backward(inputs=...), and would "
                "be None: the graph leads to its gathered weight. Call backward() without inputs, and read .grad; "
                "call requires_grad_(False) before the forward on parameters that are to get none. For the gradient of "
                "one weight on this rank's batch, let the forward keep the weight, an attribute of its module there, "
                "and pass that to autograd.grad"
            )
        found = {following for following, _ in node.next_functions} - nodes
        nodes |= found
        waiting += found
