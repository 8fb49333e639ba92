"""Patches of weights for rollout engines: the low-precision weights that optimizer steps have changed.

With the small learning rates of reinforcement learning, about 99 % of bf16 weights have the same bits after a step, for
steps below 1/256 of a weight are rounded away (Miahi and Belilovsky, 2026, arXiv 2602.03839). A patch holds the weights
that have changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor, Replicate

from yafsdp_cc.checkpoint.state import plain_name, unwrapped
from yafsdp_cc.forms.subclasses import PLAIN, check_plain
from yafsdp_cc.fsdp2.module import built_state, check_at_rest, check_shows_shards, is_first_of_model
from yafsdp_cc.replicas.sync import synchronize_replicas

if TYPE_CHECKING:
    import os

    from torch import Tensor, nn

    from yafsdp_cc.engine.layout import ShardSpec
    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.spec import ParamGroupSpec

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes: weights are compared as integers, bit by bit, NaN and -0.0 included."""


class WeightPatch(NamedTuple):
    """The changed weights of this rank, in the sparse safetensors layout of TRL's delta weight sync.

    For each parameter ``name`` with changes, ``tensors`` has ``name.val`` [n], the new values, and ``name.idx`` [n],
    their places: ``idx[k]`` is the number of elements of the whole parameter, row-major, between change k - 1 (or the
    beginning) and change k, uint16 if all of them fit, else uint32 (``"gap_delta"``).
    """

    tensors: dict[str, Tensor]
    """The patch's tensors in host memory, by name."""
    metadata: dict[str, str]
    """Metadata of the file's header: counts of this rank's weights, and the number of earlier patches."""

    def __repr__(self) -> str:
        counts = "{total_changed_elements} of {total_elements} elements changed".format_map(self.metadata)
        return f"WeightPatch({counts}, in {len(self.tensors) // 2} parameters)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, and make its folder if need be; each rank writes its own.

        Raises:
            ImportError: safetensors is not installed.
        """
        from safetensors.torch import save_file

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, path, metadata=self.metadata)


class _Sent:
    """The weights that the receivers of a model's patches have now."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.patches = 0
        self.weights: dict[str, Tensor] = {}
        """This rank's range of each parameter, by name, cast to ``dtype`` and viewed as integers. (A reference to the
        ``ParamGroupSpec``, the key in ``_sent``, would keep the model alive.)"""

    def change(self, name: str, local: Tensor) -> Tensor | None:
        """Store a parameter's present weights; return where they differ from the last call's (first call: None)."""
        before = self.weights.get(name)
        now = local.detach().reshape(-1).to(self.dtype, copy=True).view(_BITS[self.dtype.itemsize])
        self.weights[name] = now
        return None if before is None else (now != before).nonzero().view(-1)


_sent: WeakKeyDictionary[ParamGroupSpec, _Sent] = WeakKeyDictionary()
"""Weights sent since ``shard``, by the root unit's spec, which ends with the sharding and outlives changed settings."""


@torch.no_grad()
def weight_patch(model: nn.Module, *, dtype: torch.dtype = torch.bfloat16) -> WeightPatch:
    """Return all changes of this rank's weights, cast to ``dtype``, since the last patch, bit for bit.

    The patches of all ranks together are the model's; weights that several ranks hold are in the patch of the first
    one, and so are ignored parameters. Ignored DTensors, such as experts, frozen tensor subclasses, and what is on the
    meta device are in no patch: send them whole. The first call after each ``shard`` stores the weights and returns an
    empty patch, of ``model_version`` 0: send whole weights to receivers then, as from ``save_safetensors``. A copy of
    this rank's shards in ``dtype`` is kept, and one parameter is cast at a time. Not a collective; with ``sync`` it
    calls ``synchronize_replicas``, and each replica has the patches of a whole model.

    Args:
        model: the model that was passed to ``shard``; its floating-point parameters are compared, its buffers are not.
        dtype: dtype of the receivers' weights, the same in all calls.

    Raises:
        ValueError: ``model`` is not sharded, or earlier patches had another dtype.
        TypeError: ``dtype`` is no floating-point dtype.
        RuntimeError: called inside a forward, a backward or ``whole_parameters``, or before the engine is assembled.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"weight_patch takes a floating-point dtype, such as torch.bfloat16; got {dtype!r}")
    model = unwrapped(model)
    state = built_state(model, "weight_patch")
    check_at_rest(state, "weight_patch")
    synchronize_replicas(model)
    check_shows_shards(model, "weight_patch")
    sent = _sent.setdefault(state.specs[-1], _Sent(dtype))
    if sent.dtype != dtype:
        raise ValueError(f"weight_patch(dtype={dtype}), but patches of this model were of {sent.dtype}: pass that")
    parts: list[tuple[str, Tensor, ShardSpec | None, bool]]
    parts = [(param.spec.name, param.local, param.spec, _sends(param)) for param in state.params]
    sharded, is_first = {id(param.parameter) for param in state.params}, is_first_of_model(state)
    for name, each in model.named_parameters():
        is_sent = type(each) in PLAIN or (each.requires_grad and not isinstance(each, DTensor))
        if is_sent and id(each) not in sharded and not each.is_meta:
            parts.append((name, each, None, is_first))
    for full_name, local, *_ in parts:
        check_plain(f"'{full_name}'", local, "weight_patch", "send what yafsdp_cc.full_state_dict gives")
    tensors: dict[str, Tensor] = {}
    changed = total = 0
    for full_name, local, spec, sends in parts:
        if not (sends and local.is_floating_point()):
            continue
        if (local if spec is None else spec.global_shape).numel() >= 2**32:
            raise ValueError(f"'{full_name}' has 2**32 elements or more, which a patch cannot address")
        total += local.numel()
        places = sent.change(full_name, local)
        if places is None or not places.numel():
            continue
        changed += places.numel()
        values = sent.weights[full_name].index_select(0, places).view(dtype)
        name = plain_name(full_name)
        tensors[f"{name}.val"] = values.cpu()
        tensors[f"{name}.idx"] = _gaps(places if spec is None else _in_whole(spec, places)).cpu()
    metadata: dict[str, Any] = {
        "format": "sparse_weight_patch",
        "version": 1,
        "sparse": True,
        "model_version": sent.patches,
        "num_changed_params": len(tensors) // 2,
        "total_changed_elements": changed,
        "total_elements": total,
        "sparsity": 1 - changed / max(total, 1),
        "encoding": "gap_delta",
    }
    sent.patches += 1
    return WeightPatch(tensors, {name: str(value) for name, value in metadata.items()})


def _sends(param: FSDPParam) -> bool:
    """Return whether this rank is the first of those that hold the same elements of ``param``."""
    parameter: Any = param.parameter
    at = parameter.device_mesh.get_coordinate()
    return all(place == 0 for place, kind in zip(at, parameter.placements, strict=True) if kind == Replicate())


def _in_whole(spec: ShardSpec, places: Tensor) -> Tensor:
    """Return the row-major places in the whole parameter of the elements at ``places`` in this rank's range."""
    places = places + spec.local_range()[0]
    parallel = spec.tensor_parallel
    if parallel is None:
        return places
    strides = [parallel.shape[dim + 1 :].numel() for dim in range(len(parallel.shape))]
    indices = torch.unravel_index(places, spec.shape)
    terms = [(index + first) * stride for index, first, stride in zip(indices, parallel.offsets, strides, strict=True)]
    return torch.stack(terms).sum(0)


def _gaps(places: Tensor) -> Tensor:
    """Return the number of elements between each of the ascending ``places`` and the one before, or the beginning."""
    gaps = torch.diff(places, prepend=places.new_full((1,), -1)) - 1
    return gaps.to(torch.uint16 if int(gaps.max()) < 2**16 else torch.uint32)
