"""A ``parallelize_fn`` for a torchtitan ``ModelSpec`` that shards the model by ``yafsdp_cc``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from yafsdp_cc.api import shard


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Apply torchtitan's activation checkpointing and compilation to a decoder, and shard it over ``dp_shard``.

    The arguments are those that torchtitan calls a ``parallelize_fn`` with. Gradients are summed over ranks, not
    averaged: torchtitan's losses are divided by the tokens of all ranks. ``parallelize`` gives a model on the meta
    device its values, unit by unit: the Trainer's later ``init_weights`` would see only shards.

    Raises:
        NotImplementedError: the configuration asks for another parallelism than ``data_parallel_shard_degree``, for
            activations that are DTensors, for CUDA graphs on GPUs, or for symmetric-memory collectives.
    """
    for name in ("tp", "cp", "pp", "ep"):
        if (degree := getattr(parallel_dims, name)) > 1:
            raise NotImplementedError(
                f"yafsdp_cc shards over dp_shard and replicates over dp_replicate alone, and {name}={degree}"
            )
    if parallelism.spmd_backend == "full_dtensor":
        raise NotImplementedError(
            'modules get plain tensors here, no DTensors: set spmd_backend to "spmd_types" or "partial_dtensor"'
        )
    axis = "dp_shard" if parallelism.spmd_backend == "spmd_types" else "fsdp"
    mesh = parallel_dims.get_mesh(["dp_replicate", axis] if parallel_dims.dp_replicate > 1 else axis)
    if mesh.device_type == "cuda" and not training.disable_cuda_graphs:
        raise NotImplementedError(
            "torchtitan would capture forward and backward in a CUDA graph, and in each backward of yafsdp_cc the host "
            "waits for an event: pass --training.disable_cuda_graphs"
        )
    if parallelism.enable_fsdp_symm_mem:
        raise NotImplementedError(
            "yafsdp_cc has no symmetric-memory collectives: leave out --parallelism.enable_fsdp_symm_mem"
        )
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        from torchtitan.distributed.compile import apply_compile

        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    # make embeddings and head units of their own: a Trainer that computes the loss in chunks calls the head alone
    ends = {"tok_embeddings", "lm_head"} & {name for name, _ in model.named_children()}
    shard(
        model,
        mesh=mesh,
        units=["layers.*", *sorted(ends)],
        reshard_after_forward=False if parallelism.fsdp_reshard_after_forward == "never" else None,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            cast_forward_inputs=False,
        ),
        offload_policy=CPUOffloadPolicy() if training.enable_cpu_offload else None,
        param_init_fn=_initialize,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    # disable to_empty and init_weights: the Trainer calls them next, as if the model were still on the meta device
    model.__dict__.update(to_empty=lambda **_: model, init_weights=lambda **_: None)
    return model


def _initialize(module: Any) -> None:
    if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
        module._init_self_parameters()
    module._init_self_buffers()
