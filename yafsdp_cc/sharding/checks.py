"""Checks before a model is sharded: its parameters can be sharded, and are equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from yafsdp_cc.engine.layout import joint_mesh, local_tensor
from yafsdp_cc.forms.extensions import NO_EXTENSION
from yafsdp_cc.forms.subclasses import subclass_of, tensors_of
from yafsdp_cc.ranks.checks import all_gather_objects, checksum, table_of_ranks

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.ranks.mesh import MeshInfo
    from yafsdp_cc.sharding.units import OwnedParameter


TRAINED_IN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes in which forwards may use weights, and in which gradients may be summed."""


def check_types(*, ignored_params: Collection[nn.Parameter] = (), **arguments: tuple[object, Any, str]) -> None:
    """Raise a ``TypeError`` that names the first argument of a wrong type: name=(value, types, types in words)."""
    ignored = {
        f"ignored_params[{index}]": (each, nn.Parameter, "parameters themselves, not their names")
        for index, each in enumerate(ignored_params)
    }
    for name, (value, kinds, wanted) in (arguments | ignored).items():
        if not isinstance(value, kinds):
            raise TypeError(f"{name} takes {wanted}; got {value!r}")


def check_policy(policy: MixedPrecisionPolicy) -> None:
    """Raise an error for a dtype of the mixed-precision ``policy`` that training cannot use.

    Integers have no gradients; float8 would need scales, and few kernels and backends take it. A module's output is
    only cast, so ``output_dtype`` may be any dtype that can have gradients.
    """
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is None or dtype in TRAINED_IN:
            continue
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"mp_policy.{name} takes a torch.dtype, such as torch.bfloat16; got {dtype!r}")
        if name != "output_dtype" or not (dtype.is_floating_point or dtype.is_complex):
            allowed = ", ".join(map(str, TRAINED_IN))
            raise ValueError(f"mp_policy.{name}={dtype} cannot be trained in: pass one of {allowed}, or leave it out")


def check_no_hooks(owned: Sequence[OwnedParameter]) -> None:
    """Raise a ``ValueError`` that names the first parameter with hooks, which sharding would lose."""
    for each in owned:
        if each.parameter._backward_hooks or each.parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"'{each.name}' has hooks, which would be lost with the whole parameter: after sharding, call "
                "register_post_accumulate_grad_hook on the sharded one"
            )


def check_modules(model: nn.Module, call: str) -> None:
    """Raise a ``ValueError`` if ``call``, which shards ``model``, would make something that cannot be trained."""
    if torch.is_inference_mode_enabled():
        raise ValueError(f"{call} under torch.inference_mode() would make weights that cannot be trained")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"'{name}' is a ScriptModule, which takes neither hooks nor gathered weights: leave it a module of "
                "Python, and compile it by torch.compile, if at all"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"'{name}' has max_norm={module.max_norm}: its forward writes to its weight, which would be lost with "
                "the gathered copy. Renormalise under yafsdp_cc.whole_parameters(model, write=True) instead"
            )


class _Line(NamedTuple):
    """A parameter's name, description and checksum of values, which must be equal on all ranks."""

    name: str
    description: str
    checksum: int

    def __str__(self) -> str:
        return f"{self.description}, checksum {self.checksum & 0xFFFFFFFF:08x}"


def _checksum(parameter: nn.Parameter) -> int:
    return sum(checksum(tensor) * (1 + 2 * place) for place, tensor in enumerate(values_of(parameter))) & (2**64 - 1)


def values_of(parameter: nn.Parameter) -> list[Tensor]:
    """Return the tensors of a parameter that must be equal on all ranks: its local ones, and a subclass's metadata."""
    subclass = subclass_of(parameter)
    return [*tensors_of(local_tensor(parameter)), *(() if subclass is None else subclass.metadata())]


@torch.no_grad()
def check_equal(owned: Sequence[OwnedParameter], across: Sequence[dist.ProcessGroup], *, values: bool) -> None:
    """Compare parameters across ranks: names, shapes, dtypes, ``requires_grad`` and, with ``values``, the elements.

    Raises:
        ValueError: on every rank, naming the first parameter that differs between ranks.
    """
    lines = []
    for each in owned:
        parameter, kind = each.parameter, "trainable" if each.parameter.requires_grad else "frozen"
        text = f"'{each.name}' {list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}, {kind}"
        if (subclass := subclass_of(parameter)) is not None:
            text += f", a {subclass.name}"
        elements = _checksum(parameter) if values and not parameter.is_meta else 0
        lines.append(_Line(each.name, text, elements))
    digest = hashlib.sha256("\n".join(map(repr, lines)).encode()).digest()
    if len(set(all_gather_objects(digest, across))) == 1:
        return
    everybody = all_gather_objects(lines, across)
    found = next(found for found in zip_longest(*everybody) if len(set(found)) > 1)
    name = next(line for line in found if line).name
    table = table_of_ranks(line or "has no more parameters" for line in found)
    if len({tuple(line.description for line in theirs) for theirs in everybody}) == 1:
        remedy = (
            "Build the model from the same seed on every rank, or pass sync_module_states=True to shard() to take "
            "rank 0's weights"
        )
    else:
        remedy = "Build the same model on every rank: names, shapes, dtypes and requires_grad have to agree"
    counts = [len(theirs) for theirs in everybody]
    first = f"first in parameter '{name}':\n{table}\n{remedy}"
    if other := next((rank for rank, count in enumerate(counts) if count != counts[0]), None):
        first = f"rank 0 has {counts[0]} parameters, rank {other} has {counts[other]}; {first}"
    raise ValueError(f"the ranks' models differ, {first}")


def check_tensor_parallel(owned: Iterable[OwnedParameter], mesh: DeviceMesh) -> None:
    """Check that each parameter that is a DTensor already can be sharded across ``mesh``.

    Raises:
        ValueError: ``mesh`` and the parameter's mesh overlap or are not slices of one mesh, or a placement is neither
            ``Shard(dim)`` nor ``Replicate()``.
    """
    for name, tensor in ((each.name, each.parameter) for each in owned):
        if not isinstance(tensor, DTensor):
            continue
        try:
            joint_mesh(mesh, tensor.device_mesh)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ValueError(
                f"'{name}' is already a DTensor, across {tensor.device_mesh}, and is to be sharded across {mesh}. If "
                "it is tensor parallel, take both from one mesh with names: mesh = init_device_mesh(..., "
                "mesh_dim_names=('dp', 'tp')), parallelize_module(..., mesh['tp']), then shard across mesh['dp']. If "
                "it was sharded before, shard it once (torch's fully_shard counts), or pass it in ignored_params"
            ) from error
        for placement in tensor.placements:
            if type(placement) is not Shard and type(placement) is not Replicate:
                raise ValueError(
                    f"'{name}' is a DTensor placed as {placement}: parameters that are Shard(dim) or Replicate() "
                    "across the tensor-parallel ranks can be sharded further, no others"
                )


def check_subclasses(
    owned: Sequence[OwnedParameter],
    info: MeshInfo,
    *,
    compresses: bool,
    offloads: bool,
    is_complete: bool,
    whole: Collection[OwnedParameter],
) -> None:
    """Check that parameters of tensor subclasses can be sharded as asked.

    Args:
        compresses: whether weights or gradients will be encoded.
        offloads: whether shards will be in host memory.
        is_complete: whether it is too late to assign an all-gather extension to a local tensor.
        whole: parameters that must lie whole on one rank.

    Raises:
        ValueError: a parameter of a tensor subclass cannot be sharded as asked.
    """
    for each in owned:
        subclass = subclass_of(each.parameter)
        if subclass is None:
            continue
        described = f"'{each.name}' is a {subclass.name}"
        if each in whole:
            raise ValueError(f"{described}, and ownership would have it whole on one rank: name other parameters there")
        if not each.parameter.is_meta and each.parameter.device.type != info.device.type:
            raise ValueError(
                f"{described} on {each.parameter.device}, to be sharded across {info.mesh}: move the model first, "
                f"model.to('{info.device.type}')"
            )
        if not subclass.extends_all_gather:
            continue
        if is_complete and subclass.keeps_class and not hasattr(each.parameter, "fsdp_pre_all_gather"):
            raise ValueError(f"{described} {NO_EXTENSION}")
        if compresses:
            raise ValueError(
                f"{described}, whose all-gather extension decides what is sent of it: leave out compression, which "
                f"would encode that once more, or pass it in ignored_params"
            )
        if offloads:
            raise ValueError(
                f"{described}, whose all-gather extension reads its shard on {info.device}: leave out offload_policy"
            )
        if info.mesh.ndim > 1 and info.mesh.mesh_dim_names is None:
            raise ValueError(
                f"{described}, whose all-gather extension takes the mesh of its shard: give the dimensions of the mesh "
                'names, init_device_mesh(..., mesh_dim_names=("replicate", "shard"))'
            )
