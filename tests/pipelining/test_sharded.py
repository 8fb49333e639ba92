"""Pipeline, sharded data parallel and both kinds of compression together."""

from __future__ import annotations

import runpy
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import yafsdp_cc
from tests import reference
from tests.integrations.examples import EXAMPLES, as_launched
from tests.optim.lossless import Lossless
from tests.pipelining.worlds import CPU, LENGTH, LOOPED, MICRO_BATCHES, V_SHAPED, WIDTH, parts
from tests.ranks import on_ranks, ranks
from tests.versions import COMPRESSED_STAGES
from yafsdp_cc import Compression
from yafsdp_cc.optim import OneBitAdam
from yafsdp_cc.pipelining import CompressedShardedStage, CompressedStage, prepare_schedule

pytestmark = COMPRESSED_STAGES


def test_the_example_resumes_with_the_same_bits() -> None:
    ran = on_ranks(4, _run)  # its ranks then end by SIGKILL
    folder = ran[0]["checkpoint"]
    resumed = on_ranks(4, _resume, folder)
    shutil.rmtree(folder)
    for rank, (before, after) in enumerate(zip(ran, resumed, strict=True)):
        if rank >= 2:
            assert after["losses"] == before["losses"][2:]
            assert before["losses"][-1] < before["losses"][0]
        # 24 samples of 16 x 64: at first in bf16; then 4 bits and a scale for each 256, rows filled up to 64 bytes
        payload = {0: (24 * 1024 * 2, 24 * 576), 1: (12 * 2112,) * 2}[rank // 2]
        digests = 8 * 12 if rank < 2 else 0  # one for each of 12 micro-batches
        assert before["sent"] == [payload[0] + digests, *[payload[1] + digests] * 3]


def _run() -> dict[str, Any]:
    as_launched()
    ran = runpy.run_path(str(EXAMPLES / "compressed_pipeline.py"))
    return {"losses": ran["losses"], "sent": ran["sent"], "checkpoint": ran["checkpoint"][0]}


def _resume(folder: str) -> dict[str, Any]:
    as_launched()
    text = (EXAMPLES / "compressed_pipeline.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text.replace("EPOCHS = 24, 8, 4", "EPOCHS = 24, 8, 0"), names)
    resumed = names["Training"](folder)
    return {"losses": [resumed.epoch(number) for number in (2, 3)]}


@ranks(4)
def test_ranks_of_a_tensor_parallel_stage_stay_alike() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    place = mesh["pipeline"].get_local_rank()
    part = parallelize_module(parts(2)[place], mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    changes = {"forward": "int4", "backward": "int4", "forward_delta": True, "cache_samples": 8}
    stage = CompressedStage(part, place, 2, CPU, group=mesh["pipeline"].get_group(), **changes)
    schedule = prepare_schedule(Schedule1F1B(stage, MICRO_BATCHES, F.mse_loss))
    data = torch.randn(8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    arguments = {"target": data.flip(-1)} if place else {}
    for _ in range(3):
        schedule.step(*([] if place else [data]), sample_ids=range(8), **arguments)
        cache = next(iter(stage.state_dict()["caches"].values()))["values"][0]
        both = [torch.empty_like(cache) for _ in range(2)]
        dist.all_gather(both, cache, group=mesh["tensor"].get_group())
        assert torch.equal(*both)
        gradient = part.down.bias.grad.full_tensor()
        both = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(both, gradient, group=mesh["tensor"].get_group())
        assert torch.equal(*both)


@ranks(4)
def test_several_sharded_stages_on_a_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    place, rank = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    data = torch.randn(2, 8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    truth = reference.mean_gradients(nn.Sequential(*parts(4)), _loss, list(data))[1]
    for kind in (*LOOPED, *V_SHAPED):
        modules = parts(4)
        stages = [
            CompressedShardedStage(
                yafsdp_cc.shard(modules[index], units=[nn.Linear], mesh=mesh["data"]),
                index,
                4,
                CPU,
                group=mesh["pipeline"].get_group(),
            )
            for index in (place, 3 - place if kind in V_SHAPED else place + 2)
        ]
        schedule = prepare_schedule(kind(stages, MICRO_BATCHES, F.mse_loss))
        schedule.step(*([data[rank]] if place == 0 else []), target=data[rank].flip(-1))
        for stage in stages:
            reduced = yafsdp_cc.plan_of(stage.submod).communication
            assert yafsdp_cc.counters_of(stage.submod).reduced_bytes == reduced.reduce + reduced.replicated
            for name, parameter in stage.submod.named_parameters():
                expected = truth[f"{stage.stage_index}.{name}"]
                torch.testing.assert_close(parameter.grad.full_tensor(), expected)
    plain = CompressedStage(modules[place], place, 2, CPU, group=mesh["pipeline"].get_group())
    with pytest.raises(TypeError, match=r"is sharded by yafsdp_cc: build it as CompressedShardedStage"):
        prepare_schedule(Schedule1F1B(plain, MICRO_BATCHES, F.mse_loss))


@ranks(2)
def test_a_limit_in_a_stage_is_of_the_mean_over_micro_batches() -> None:
    """The second moment of one encoded weight, beside parameters that are not encoded, against AdamW's."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "data"))
    data = torch.randn(2, 8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    compression = Compression(Lossless.name, residual="fp32", overrides={"down.*": "fp32"})
    part: Any = yafsdp_cc.shard(parts(1)[0], units=[nn.Linear], mesh=mesh["data"], compression=compression)
    stage = CompressedShardedStage(part, 0, 1, CPU, group=mesh["pipeline"].get_group())
    schedule = prepare_schedule(Schedule1F1B(stage, MICRO_BATCHES, F.mse_loss))
    optimizer = OneBitAdam(part.parameters(), warmup_steps=1, form="gradient", refreshes=9, max_grad_norm=0.01)
    whole: Any = parts(1)[0]
    adamw = torch.optim.AdamW(whole.parameters())
    for _ in range(4):
        schedule.step(data[dist.get_rank()], target=data[dist.get_rank()].flip(-1))
        for batch in data:
            (_loss(whole, batch) / 2).backward()
        for each, model in ((optimizer, part), (adamw, whole)):
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.02
            each.step()
            each.zero_grad()
    found, wanted = optimizer.state[part.up.weight]["exp_avg_sq"], adamw.state[whole.up.weight]["exp_avg_sq"]
    assert (found.full_tensor() - wanted).norm() < 1e-4 * wanted.norm()


def _loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), inputs.flip(-1))


@ranks(8)
def test_pipeline_shards_and_tensor_parallelism_together() -> None:
    """Both directions in int8, gradients of weights too: the losses are near those of one process, and fall."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipeline", "data", "tensor"))
    place, rank = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    data = torch.randn(2, 8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    part = parallelize_module(parts(2)[place], mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    yafsdp_cc.shard(part, units=[nn.Linear], mesh=mesh["data"], compression="int8")
    changes = {"forward": "int8", "backward": "int8", "forward_delta": True, "cache_samples": 8}
    stage = CompressedShardedStage(part, place, 2, CPU, group=mesh["pipeline"].get_group(), **changes)
    schedule = prepare_schedule(Schedule1F1B(stage, MICRO_BATCHES, F.mse_loss))
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    found = torch.zeros(4)
    for step in range(4):
        losses: list[torch.Tensor] = []
        arguments = {"target": data[rank].flip(-1), "losses": losses} if place else {}
        schedule.step(*([] if place else [data[rank]]), sample_ids=range(8), **arguments)
        optimizer.step()
        optimizer.zero_grad()
        found[step] = torch.stack(losses).mean() if place else 0.0
    dist.all_reduce(found)
    plain = nn.Sequential(*parts(2))
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses = reference.train(plain, adam, lambda _: reference.mean_gradients(plain, _loss, list(data)), 4, clip=1e9)
    torch.testing.assert_close(found / 4, torch.tensor(losses), rtol=2e-3, atol=0.0)
    assert losses[-1] < 0.95 * losses[0]
