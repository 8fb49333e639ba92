"""Replaces parts of torch, on import, that would take sharded tensors for ordinary ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._library import simple_registry
from torch.distributed.tensor import DTensor

from yafsdp_cc.engine.autograd import GateGradFlow, Narrow
from yafsdp_cc.engine.state import IterationState
from yafsdp_cc.tensor.dtensor import FlatDTensor, FlatShard, flat_dtensor
from yafsdp_cc.tensor.reductions import LazyReduction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from yafsdp_cc.engine.param import FSDPParam


def _call_dispatch_of_subclasses() -> None:
    """Make torch before 2.12 call ``__torch_dispatch__`` of FlatDTensor and LazyReduction, which it never does.

    It treats both as DTensor itself, whose operations are in C++ (pytorch/pytorch#177716), but first looks for a rule
    that the operator registered for the tensor's class.
    """
    holder: Any = simple_registry.GenericTorchDispatchRuleHolder
    known = holder.find

    def find(self: Any, kind: Any) -> Any:
        is_ours = kind is FlatDTensor or kind is LazyReduction
        return kind.__torch_dispatch__.__func__ if is_ours else known(self, kind)

    holder.find = find


if torch.__version__ < "2.12":
    _call_dispatch_of_subclasses()


def _from_local(
    torch_s: Callable[..., DTensor],
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **options: Any,
) -> DTensor:
    """Do as torch's ``DTensor.from_local``, but make a ``FlatDTensor`` of a flat range with its parameter's placements.

    Averages of weights keep local tensors and make DTensors of them this way; torch would read the range as rows.

    Raises:
        ValueError: a flat range has the placements of rows.
    """
    spec: Any = next((each.spec for each in placements or () if isinstance(each, FlatShard)), None)
    shape = options.get("shape")
    is_range = spec is not None and not isinstance(spec, str) and local_tensor.shape == spec.local_shape
    if is_range and shape in (None, spec.global_shape):
        return flat_dtensor(local_tensor, spec)
    if shape is not None and len(shape) != local_tensor.ndim and not local_tensor.is_meta:
        raise ValueError(
            f"DTensor.from_local was given {list(local_tensor.shape)} as a part of {list(shape)}: no slice along a "
            "dimension, perhaps a flat range, to_local() of a sharded parameter p or as long as that. Pass "
            "p.placements, which know the range, or copy p itself, p.detach().clone()"
        )
    return torch_s(local_tensor, device_mesh, placements, **options)


DTensor.from_local = staticmethod(functools.partial(_from_local, DTensor.from_local))  # type: ignore[method-assign]


def _params_behind(node: Any) -> Sequence[FSDPParam]:
    """Return the parameters whose gradients a node of autograd's graph hands to the engine."""
    function = getattr(node, "_forward_cls", None)
    if function is Narrow:
        return (node.param,)
    if function is GateGradFlow and isinstance(node.gated, IterationState):
        return node.gated.trained
    return ()


def _refuse_inputs(outputs: Iterable[torch.Tensor], inputs: Iterable[Any]) -> None:
    """Refuse a backward for the gradients of ``inputs`` alone if a forward has gathered one of them for ``outputs``.

    The graph has the gathered weight in place of the sharded parameter: without this check the parameter's gradient
    would be None, or that of a penalty alone.

    Raises:
        RuntimeError: as said.
    """
    specs = [spec for each in inputs if (spec := getattr(each, "shard_spec", None)) is not None]
    if not specs:
        return
    nodes = {output.grad_fn for output in outputs}
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


def _run_backward(torch_s: Callable[..., Any], outputs: Sequence[torch.Tensor], *args: Any, **options: Any) -> Any:
    """Do as torch's function behind ``backward`` and ``grad``; its fourth argument after ``outputs`` is ``inputs``."""
    _refuse_inputs(outputs, args[3])
    return torch_s(outputs, *args, **options)


_autograd: Any = torch.autograd
_autograd._engine_run_backward = _autograd.graph._engine_run_backward = functools.partial(
    _run_backward, _autograd.graph._engine_run_backward
)
