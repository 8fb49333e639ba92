"""Makes Accelerate leave a sharded model unwrapped, and save its shards.

By itself an ``Accelerator`` on CPUs would wrap the model in ``DistributedDataParallel``. One on GPUs, set up for FSDP2,
tells parameters apart by their addresses, but all parameters of which a rank owns no element have the same address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from yafsdp_cc.fsdp2.module import check_sharded

if TYPE_CHECKING:
    from accelerate import Accelerator


def accept_sharded(accelerator: Accelerator, model: nn.Module) -> Accelerator:
    """Let ``accelerator`` treat ``model``, which ``yafsdp_cc.shard`` has sharded, as FSDP2's; return ``accelerator``.

    ``prepare(model, optimizer, ...)`` then wraps nothing, ``save_state`` and ``load_state`` go through
    ``torch.distributed.checkpoint``, and ``get_state_dict`` returns unsharded weights. An ``fsdp_plugin`` that the
    accelerator was made with stays in place; only its settings of saving have an effect.

    Raises:
        ValueError: ``model`` is not sharded, or ``fsdp_plugin`` is for the first FSDP (``fsdp_version=1``).
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    check_sharded(model)
    state: Any = accelerator.state
    if getattr(state, "fsdp_plugin", None) is None:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="no_wrap",
            cpu_ram_efficient_loading=False,
            state_dict_type="SHARDED_STATE_DICT",
        )
    if state.fsdp_plugin.fsdp_version != 2:
        raise ValueError("this Accelerator has a plugin for the first FSDP: leave fsdp_plugin out, or fsdp_version=2")
    # set the type in PartialState too: a data loader makes a new AcceleratorState, which copies it from PartialState
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP

    def prepare(*objects: Any) -> tuple[Any, ...]:
        prepared = [_prepare(accelerator, each) for each in objects]
        # prepare schedulers in a second pass: they look for their optimizer among objects that the first has prepared
        return tuple(each if isinstance(each, nn.Module) else accelerator._prepare_one(each) for each in prepared)

    accelerator._prepare_fsdp2 = prepare
    return accelerator


def _prepare(accelerator: Accelerator, each: Any) -> Any:
    if not isinstance(each, nn.Module):
        return accelerator._prepare_one(each, first_pass=True)
    check_sharded(each)  # refuse a model that is not sharded: no later code would shard it
    if each in accelerator._models:
        return each
    return accelerator.prepare_model(each, evaluation_mode=True)
