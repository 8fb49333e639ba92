"""When stages finish, which of them are worth compressing, and the sum of an embedding that two of them share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from tests.pipelining.worlds import CPU
from tests.ranks import ranks
from tests.versions import COMPRESSED_STAGES
from yafsdp_cc.compression.autotune import LinkCost
from yafsdp_cc.compression.codec import codec_of
from yafsdp_cc.pipelining import (
    CompressedStage,
    StageSeconds,
    TiedEmbedding,
    measure_reduces,
    prepare_schedule,
    stages_to_compress,
    timeline,
)
from yafsdp_cc.pipelining.timeline import compute_ends


def order_of(kind: Any, stages: int, micro_batches: int) -> dict[int, Any]:
    found: dict[int, Any] = kind._get_pipeline_order(SimpleNamespace(_num_stages=stages, _n_microbatches=micro_batches))
    return found


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleGPipe])
def test_a_step_lasts_as_the_textbook_says(kind: Any) -> None:
    stages, count, forward, backward = 4, 8, 1.0, 2.0
    ends = compute_ends(order_of(kind, stages, count), StageSeconds(forward, backward))
    # (micro-batches + stages - 1) · (forward + backward), and each stage a backward before the one before it
    assert ends[0] == (count + stages - 1) * (forward + backward)
    assert [ends[0] - ends[stage] for stage in range(stages)] == [0, 2, 4, 6]
    with_link = compute_ends(order_of(ScheduleGPipe, stages, count), StageSeconds(forward, backward, send=0.5))
    assert with_link[0] == ends[0] + 2 * 0.5 * (stages - 1)


def test_a_split_backward_and_what_never_ends() -> None:
    kinds = _ComputationType
    one = [_Action(0, kind, 0) for kind in (kinds.FORWARD, kinds.BACKWARD_INPUT, kinds.BACKWARD_WEIGHT)]
    assert compute_ends({0: one}, StageSeconds(1.0, 4.0)) == {0: 5.0}
    with pytest.raises(ValueError, match=r"actions wait for each other: \[0B0, 1F0\]"):
        compute_ends(
            {0: [_Action(0, kinds.FULL_BACKWARD, 0)], 1: [_Action(1, kinds.FORWARD, 0)]}, StageSeconds(1.0, 1.0)
        )


def test_the_stages_that_finish_last_are_compressed() -> None:
    order, seconds = order_of(Schedule1F1B, 4, 8), StageSeconds(1.0, 2.0)
    for exact, encoded, expected in (
        (5.0, 1.0, {0, 1}),  # 33 + 1 at best; exactly 38, 36, 34 and 32
        (1.0, 1.0, set()),
        (100.0, 1.0, {0, 1, 2, 3}),
    ):
        assert stages_to_compress(order, seconds, exact, encoded) == expected


@ranks(3)
def test_what_reduces_take_by_the_link() -> None:
    """A link whose speed is set: a reduce of n elements sends its two peers n / 3 each, in whole blocks."""
    mesh = init_device_mesh("cpu", (3,))
    numel, chunk = 900_000, 300_032
    seen = {}
    for per_byte in (1e-9, 1e-6):
        timeline.measure_link = lambda context, message_bytes, per_byte=per_byte: LinkCost(0.25, per_byte)
        seen[per_byte] = measure_reduces(mesh, numel, "int4")
        assert seen[per_byte].exact == 0.25 + per_byte * 2 * 4 * chunk
        sent = per_byte * 2 * codec_of("int4").message_bytes(chunk)
        assert 0.25 + sent < seen[per_byte].encoded < 0.25 + sent + 1.0
    assert seen[1e-6].encoded < seen[1e-6].exact
    same = [None] * 3
    dist.all_gather_object(same, seen)
    assert same == [seen] * 3


@ranks(2)
def test_what_reduces_take_as_measured() -> None:
    found = measure_reduces(init_device_mesh("cpu", (2,)), 100_000)
    assert 0 < found.exact < 60
    assert 0 < found.encoded < 60
    with pytest.raises(ValueError, match="no codec 'int5'"):
        measure_reduces(init_device_mesh("cpu", (2,)), 100_000, "int5")


class Ends(nn.Module):
    """Embeds on the first stage, and gives logits by the same weight on the last."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first, self.weight, self.inner = first, nn.Parameter(torch.randn(11, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.embedding(x, self.weight)) if self.first else self.inner(x) @ self.weight.t()


@COMPRESSED_STAGES
@ranks(4)
def test_a_tied_embedding_has_the_gradient_of_one_process() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    place, rank = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    torch.manual_seed(0)
    whole = [Ends(first=True), Ends(first=False)]
    whole[1].weight = whole[0].weight
    torch.manual_seed(0)
    part = [Ends(first=True), Ends(first=False)][place]
    embedding = TiedEmbedding(part.weight, mesh, "pipeline", "data")
    assert torch.equal(part.weight, whole[0].weight)
    tokens = torch.randint(11, (2, 8, 5), generator=torch.Generator().manual_seed(1))

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    stage = CompressedStage(part, place, 2, CPU, group=mesh["pipeline"].get_group())
    schedule = prepare_schedule(Schedule1F1B(stage, 4, loss_of))
    schedule.step(*([tokens[rank]] if place == 0 else []), target=tokens[rank].flip(-1) if place else None)
    embedding.sum_gradients()
    loss = torch.stack([loss_of(whole[1](whole[0](each)), each.flip(-1)) for each in tokens]).mean()
    loss.backward()
    assert part.weight.grad is not None
    torch.testing.assert_close(part.weight.grad, whole[0].weight.grad)
    gathered = [torch.empty(11, 8) for _ in range(4)]
    dist.all_gather(gathered, part.weight.grad)
    assert all(torch.equal(gathered[0], each) for each in gathered)
    with pytest.raises(ValueError, match=r"has the dimensions \('pipeline', 'data'\), and not 'pp' and 'data'"):
        TiedEmbedding(part.weight, mesh, "pp", "data")
