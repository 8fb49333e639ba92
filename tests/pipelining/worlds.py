"""Pipelines for tests: a small model in stages, with and without compression, under every schedule of torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from yafsdp_cc.pipelining import CompressedStage, prepare_schedule

SINGLE = (ScheduleGPipe, Schedule1F1B)
LOOPED = (ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
ALL = (*SINGLE, *LOOPED, *V_SHAPED)
MICRO_BATCHES = 4
WIDTH, LENGTH = 32, 16
CPU = torch.device("cpu")


class Part(nn.Module):
    """A part of a model: [samples, LENGTH, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(F.gelu(self.up(inputs)))


def parts(count: int) -> list[Part]:
    """The same parts on every rank."""
    torch.manual_seed(0)
    return [Part() for _ in range(count)]


class Pipeline:
    """This rank's share of a pipeline over all ranks, and its optimizer.

    With ``compression`` None its stages are torch's own.
    """

    def __init__(self, kind: Any, compression: dict[str, Any] | None, state: dict[int, Any] | None = None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        if kind in SINGLE:
            count, mine = world, [rank]
        else:
            count = 2 * world
            mine = [rank, count - 1 - rank] if kind in V_SHAPED else [rank, rank + world]
        modules = parts(count)
        if compression is None:
            self.stages: list[Any] = [PipelineStage(modules[place], place, count, CPU) for place in mine]
        else:
            self.stages = [CompressedStage(modules[place], place, count, CPU, **compression) for place in mine]
        of = self.stages if issubclass(kind, PipelineScheduleMulti) else self.stages[0]
        self.schedule = kind(of, n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss)
        for stage in self.stages if state is not None else ():
            stage.submod.load_state_dict(state[stage.stage_index]["module"])
            stage.load_state_dict(state[stage.stage_index]["stage"])
        if compression is not None:
            prepare_schedule(self.schedule)
        self.parameters = [parameter for stage in self.stages for parameter in stage.submod.parameters()]

    def run(self, batch: Tensor, ids: Any = None, *, trains: bool = True) -> list[float]:
        """One step of plain SGD, or an evaluation; the losses of the micro-batches on the rank of the last stage."""
        losses: list[Tensor] = []
        arguments = {} if ids is None else {"sample_ids": ids}
        inputs = (batch,) if any(stage.is_first for stage in self.stages) else ()
        if any(stage.is_last for stage in self.stages):
            arguments.update(target=batch.flip(-1), losses=losses)
        (self.schedule.step if trains else self.schedule.eval)(*inputs, **arguments)
        with torch.no_grad():
            for parameter in self.parameters if trains else ():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        return [loss.item() for loss in losses]

    def state(self) -> dict[int, Any]:
        return {
            stage.stage_index: {
                "module": {name: value.clone() for name, value in stage.submod.state_dict().items()},
                "stage": stage.state_dict(),
            }
            for stage in self.stages
        }


def batches(count: int, samples: int = 8) -> Tensor:
    """[count, samples, LENGTH, WIDTH]: the same on every rank."""
    return torch.randn(count, samples, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
