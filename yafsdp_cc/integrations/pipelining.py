"""A stage of ``torch.distributed.pipelining`` whose module is sharded over the ranks that share the stage."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward

from yafsdp_cc.engine.module import require_state
from yafsdp_cc.engine.sharding import specs_below


class ShardedStage(PipelineStage):
    """A ``PipelineStage`` for a module that ``yafsdp_cc.shard`` has sharded, with the same arguments.

    Gradients of the micro-batches are kept unsharded and reduced once, in the last backward of a step; torch's own
    stage would look for FSDP2's parameter groups instead. For schedules that do not split the backward, such as
    ``ScheduleGPipe``, ``Schedule1F1B`` and ``ScheduleInterleaved1F1B``. Shard with ``reshard_after_forward=False`` to
    gather weights once per step, too, and not for each micro-batch.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], None]:
        """The backward of one micro-batch, which reduces what has come together if it is the last of the step.

        Raises:
            NotImplementedError: the schedule wants the gradients of inputs and of weights at different times.
            ValueError: the module is not sharded.
        """
        if backward_type != "full":
            raise NotImplementedError(
                "a sharded stage cannot be run backward in two parts, for inputs and for weights, as zero-bubble "
                "schedules do: its weights would have to be gathered twice. Use Schedule1F1B or ScheduleGPipe"
            )
        require_state(self.submod)
        for spec in specs_below(self.submod):
            spec.settings.reduces = last_backward
        return stage_backward(**bwd_kwargs), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After the last backward: gradients are reduced already, and become the mean over micro-batches."""
        self.scale_grads(grad_scale_factor)

    def _post_metadata_inference_cleanup(self) -> None:
        # Finding out shapes asked for gradients of inputs alone: weights are not unsharded by it, no .grad is left.
        self._fwd_outputs_for_bwd_meta = None
        self._fwd_inputs_for_bwd_meta = None
        self._fwd_kwargs_tensors_for_bwd_meta = None
