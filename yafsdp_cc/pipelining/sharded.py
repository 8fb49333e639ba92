"""A stage of ``torch.distributed.pipelining`` whose module is sharded over the ranks that share the stage."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from yafsdp_cc.compression.schedule import CompressionSchedule
from yafsdp_cc.compression.state import compressed_sums
from yafsdp_cc.engine.spec import specs_below
from yafsdp_cc.fsdp2.module import built_state

if TYPE_CHECKING:
    from torch import Tensor


class ShardedStage(PipelineStage):
    """A ``PipelineStage`` for a module that ``yafsdp_cc.shard`` has sharded, with the same arguments.

    Gradients of the micro-batches are kept unsharded and reduced once, in the last backward of a step; torch's own
    stage would look for FSDP2's parameter groups instead. Shard with ``reshard_after_forward=False`` to gather weights
    once per step, too, and not for each micro-batch.

    Zero-bubble schedules run, and are no faster than others: a split backward would gather weights for each of its
    parts, so gradients of weights are computed with those of inputs, and ``dw_builder`` has no effect.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dw_builder = lambda: lambda: None  # torch's function would compute gradients of weights once more
        self._backwards = 0
        self._takes_mean = False

    def clear_runtime_states(self) -> None:
        """Reset torch's and the stage's own state at the beginning of a step."""
        super().clear_runtime_states()
        self._backwards, self._takes_mean = 0, _takes_mean()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], None]:
        """Run the whole backward of one micro-batch, and reduce the sum of gradients if it is the last of the step."""
        schedule = CompressionSchedule.of(built_state(self.submod, "ShardedStage"))
        # count backwards: ``last_backward`` marks the last gradients of weights, which a schedule may compute later
        self._backwards += 1
        for spec in specs_below(self.submod):
            spec.settings.requires_gradient_sync = self._backwards == self.chunks
        if schedule is None or not self._takes_mean:
            return stage_backward(**bwd_kwargs), None
        # a message, its residual and the momentum of a 1-bit optimizer are made before ``scale_grads``, so divide first
        schedule.micro_batches = self.chunks or 1
        try:
            return stage_backward(**bwd_kwargs), None
        finally:
            schedule.micro_batches = 1

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Scale the reduced gradients, after the last backward, to the mean over micro-batches."""
        self.scale_grads(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide gradients by the number of micro-batches, but for those that were divided before they were summed."""
        sums = compressed_sums(built_state(self.submod, "ShardedStage")) if self._takes_mean else ()
        divided = {id(param.parameter) for flat, _ in sums for param in flat.params}
        for parameter in self.submod.parameters() if grad_scale_factor != 1 else ():
            if parameter.grad is not None and id(parameter) not in divided:
                parameter.grad.div_(grad_scale_factor)

    def _post_metadata_inference_cleanup(self) -> None:
        # nothing else to clean up: the shape inference unshards no weights and leaves no .grad
        self._fwd_outputs_for_bwd_meta = None
        self._fwd_inputs_for_bwd_meta = None
        self._fwd_kwargs_tensors_for_bwd_meta = None


def _takes_mean() -> bool:
    """Return whether the schedule whose step is running wants gradients' mean over micro-batches: schedules tell stages
    so only after the gradients are summed."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame, schedule = caller, caller.f_locals.get("self")
        if isinstance(schedule, PipelineScheduleSingle | PipelineScheduleMulti):
            return schedule.scale_grads
    return False
