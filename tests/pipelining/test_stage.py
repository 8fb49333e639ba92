"""Compressed stages under torch's schedules, against torch's own stages."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

from tests.pipelining.worlds import ALL, LENGTH, SINGLE, V_SHAPED, WIDTH, Pipeline, batches, parts
from tests.ranks import ranks
from tests.versions import COMPRESSED_STAGES
from yafsdp_cc.compression.codec import codec_of
from yafsdp_cc.pipelining import CompressedStage, StageCompression, plan_boundary, prepare_schedule
from yafsdp_cc.pipelining.messages import Encoding, rotate
from yafsdp_cc.pipelining.schedule import hidden_gradients
from yafsdp_cc.pipelining.stage import check_torch


@COMPRESSED_STAGES
@ranks(2)
def test_exact_messages_give_the_bits_of_torchs_stage() -> None:
    data = batches(2)
    for kind in ALL:
        settings = {} if kind is ScheduleGPipe else {"forward": "fp32", "backward": "fp32"}
        torchs, ours = Pipeline(kind, None), Pipeline(kind, settings)
        for batch in data:
            assert torchs.run(batch) == ours.run(batch), kind
        if kind not in V_SHAPED:  # torch cannot evaluate under these
            assert torchs.run(data[0], trains=False) == ours.run(data[0], trains=False), kind
        for expected, found in zip(torchs.parameters, ours.parameters, strict=True):
            assert torch.equal(expected, found), kind


@COMPRESSED_STAGES
@pytest.mark.parametrize(("world", "kinds"), [(2, ALL), (4, (Schedule1F1B, ScheduleInterleavedZeroBubble))])
@ranks("world")
def test_caches_of_both_sides_are_equal(world: int, kinds: Any) -> None:
    data = batches(1, samples=22)[0]
    epochs = [torch.randperm(22, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(3)]
    rotated = {"forward": "int2", "hadamard": True} if world == 4 else {}
    for kind in kinds:
        ours = Pipeline(kind, DELTA | rotated)
        for epoch in epochs:
            for batch in (epoch[:8], epoch[8:16], [*epoch[16:], epoch[16]]):  # the last one uneven, one sample twice
                ours.run(data[batch], batch)
            if kind not in V_SHAPED:
                ours.run(data[:8], trains=False)
        check_caches(ours, samples=22)


@COMPRESSED_STAGES
@ranks(2)
def test_changes_of_activations_equal_one_process() -> None:
    data = batches(1, samples=12)[0]
    ours = Pipeline(Schedule1F1B, {"forward": "fp8", "forward_delta": True, **KEPT})
    first, second = parts(2)
    codec, kept = codec_of("fp8"), torch.zeros(12, LENGTH * WIDTH)
    for epoch in range(3):
        for ids in torch.randperm(12, generator=torch.Generator().manual_seed(epoch)).split(4):
            expected = []
            for sample in ids.tolist():  # micro-batches of one
                activation = first(data[sample : sample + 1])
                change = activation.detach().view(1, -1) - kept[sample]
                if epoch:
                    message = torch.empty(1, codec.message_bytes(change.numel()), dtype=torch.uint8)
                    codec.encode(change.clone(), None, message)
                    codec.decode(message, change)
                kept[sample] += change[0]
                known = kept[sample].view_as(activation).clone().requires_grad_()
                loss = F.mse_loss(second(known), data[sample : sample + 1].flip(-1))
                (loss / 4).backward()
                activation.backward(known.grad)
                expected.append(loss.item())
            for parameter in (*first.parameters(), *second.parameters()):
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
            losses = ours.run(data[ids], ids)
            assert not losses or losses == pytest.approx(expected, rel=1e-5)
    rank = torch.distributed.get_rank()
    for found, truth in zip(ours.parameters, (first, second)[rank].parameters(), strict=True):
        torch.testing.assert_close(found, truth)
    cache = ours.stages[0].state_dict()["caches"][("output", "input")[rank]]
    found = torch.empty(12, LENGTH * WIDTH)
    found[torch.tensor(cache["ids"])] = cache["values"][0]
    torch.testing.assert_close(found, kept, rtol=1e-3, atol=1e-4)


KEPT = {"cache_samples": 12, "cache_dtype": torch.float32}
DELTA = {"forward": "int4", "backward": "int8", "forward_delta": True, "cache_samples": 22}


def check_caches(pipeline: Pipeline, samples: int) -> None:
    """What stages on different ranks keep of each sample is the same to the bit, and of all samples."""
    own = {stage.stage_index: stage.state_dict()["caches"] for stage in pipeline.stages}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    everywhere = {index: caches for each in gathered for index, caches in each.items()}
    compared = 0
    for index, caches in everywhere.items():
        if index + 1 in everywhere and "input" in everywhere[index + 1]:
            sent, received = caches["output"], everywhere[index + 1]["input"]
            assert sent["ids"] == received["ids"]
            assert sorted(sent["ids"]) == list(range(samples))
            if sent["values"]:  # none between stages on one rank
                assert torch.equal(sent["values"][0], received["values"][0])
                assert sent["values"][0].abs().sum() > 0
                compared += 1
    assert compared


@COMPRESSED_STAGES
@ranks(2)
def test_an_uneven_batch_equals_one_process() -> None:
    data = batches(1, samples=13)[0]
    for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleavedZeroBubble):
        ours = Pipeline(kind, {"backward": "fp32"})
        whole = nn.Sequential(*parts(2 if kind in SINGLE else 4))
        for size in (8, 13, 6):  # micro-batches of 2, of 4 and 3, and of 2 and 1
            losses = ours.run(data[:size], range(size))
            expected = [F.mse_loss(whole(each), each.flip(-1)) for each in torch.tensor_split(data[:size], 4)]
            assert not losses or losses == pytest.approx([loss.item() for loss in expected])
            (sum(expected) / 4).backward()
            with torch.no_grad():
                for parameter in whole.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
        for stage in ours.stages:
            for found, truth in zip(stage.submod.parameters(), whole[stage.stage_index].parameters(), strict=True):
                torch.testing.assert_close(found, truth)


class Recorder(Encoding):
    """Adds up what another encoding encodes and decodes."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self.message_bytes = encoding.message_bytes  # type: ignore[method-assign]
        self.encoded = self.decoded = torch.zeros(2, LENGTH, WIDTH, dtype=torch.float64)

    def message_bytes(self, shape: Any, dtype: Any) -> int:
        raise AssertionError("replaced by the encoding's")

    def encode(self, values: torch.Tensor, message: torch.Tensor, state: Any, seed: int) -> None:
        self.encoded = self.encoded + values
        self.encoding.encode(values, message, state, seed)

    def decode(self, message: torch.Tensor, values: torch.Tensor) -> None:
        self.encoding.decode(message, values)
        self.decoded = self.decoded + values


@COMPRESSED_STAGES
@ranks(2)
def test_what_gradients_lose_is_in_the_residual() -> None:
    data = batches(3)
    for settings in ({"backward": "int4"}, {"backward": "onebit", "hadamard": True}, {"backward": "powersgd"}):
        for epilogue_only in (False, True):
            ours = Pipeline(
                Schedule1F1B, {**settings, "error_feedback": True, "epilogue_only": epilogue_only, "matrix_rank": 4}
            )
            stage = ours.stages[0]
            stage._gradients = recorder = Recorder(stage._gradients)
            for batch in data:
                ours.run(batch)
                sums: list[Any] = [None, None]
                residual = stage.state_dict()["senders"].get("backward.0", {}).get("residual")
                torch.distributed.all_gather_object(sums, (recorder.encoded, recorder.decoded, residual))
                (_, decoded, _), (encoded, _, residual) = sums
                if settings.get("hadamard"):
                    residual = rotate(residual, 256, back=True)
                left = encoded - decoded
                assert left.norm() > 1e-3 * encoded.norm()
                torch.testing.assert_close(left, residual.view(left.shape).double(), rtol=1e-4, atol=1e-7)


def test_the_epilogue_is_what_no_forward_hides() -> None:
    for kind, exposed in (
        (Schedule1F1B, {0: {4, 5}, 1: {5}}),
        (ScheduleGPipe, {0: {1, 2, 3, 4, 5}, 1: {1, 2, 3, 4, 5}}),
    ):
        plan = SimpleNamespace(_num_stages=3, _n_microbatches=6)
        hidden = hidden_gradients(kind._get_pipeline_order(plan))
        found = {to: {each for each in range(6) if (to + 1, each) not in hidden} for to in (0, 1)}
        assert found == exposed, kind


@COMPRESSED_STAGES
@ranks(2)
def test_a_resumed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    kept = {**DELTA, "error_feedback": True, "cache_samples": 18}  # of 22: some are forgotten
    data = batches(1, samples=22)[0]
    order = [torch.randperm(22, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]
    steps = [epoch[start : start + 11] for epoch in order for start in (0, 11)]
    for backward in ("int8", "powersgd"):
        settings = {**kept, "backward": backward}
        through = Pipeline(Schedule1F1B, settings)
        first = Pipeline(Schedule1F1B, {**settings, "cache_folder": tmp_path})
        expected = [through.run(data[ids], ids) for ids in steps]
        found = [first.run(data[ids], ids) for ids in steps[:5]]
        assert {each.name.partition("-boundary")[0] for each in tmp_path.glob("*.cache")} >= {f"rank-{rank}"}
        file = f"{tmp_path}/{backward}-{rank}.pt"
        torch.save(first.state(), file)
        resumed = Pipeline(Schedule1F1B, settings, torch.load(file))
        found += [resumed.run(data[ids], torch.tensor(ids)) for ids in steps[5:]]
        assert found == expected
        for one, other in zip(through.parameters, resumed.parameters, strict=True):
            assert torch.equal(one, other)
        without = {index: {**each, "stage": {**each["stage"], "caches": {}}} for index, each in first.state().items()}
        assert without[rank]["stage"] == {**first.stages[0].state_dict(cache=False), "senders": ANY}
        again, batch = Pipeline(Schedule1F1B, settings, without), data[steps[5]]
        again.run(batch, steps[5])
        if rank == 0:  # every sample is new
            assert again.stages[0].sent_bytes["forward"] == 4 * 8 + 2 * batch.numel()


@COMPRESSED_STAGES
@ranks(2)
def test_mistakes_are_named() -> None:
    data = batches(1)[0]
    rank = torch.distributed.get_rank()
    ours = Pipeline(Schedule1F1B, {**DELTA, "cache_samples": 8})
    for ids, message in (
        (None, r"forward_delta=True: give the ids.*sample_ids=ids"),
        (range(7), r"sample_ids: 7 ids for a batch of 8 samples"),
        (torch.arange(8.0), r"takes \[samples\] integers, not \[8\] of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.run(data, ids)
    ours.run(data, range(8))  # and nothing has been spoilt
    with pytest.raises(ValueError, match=r"cache_samples=1: a micro-batch has 2 different samples"):
        Pipeline(Schedule1F1B, {**DELTA, "cache_samples": 1}).run(data, range(8))
    with pytest.raises(ValueError, match=r"stages differ: backward is 'int8' on stage 0 and 'int4' on stage 1"):
        Pipeline(Schedule1F1B, {"backward": ("int8", "int4")[rank]})
    other = Pipeline(Schedule1F1B, DELTA)
    other.run(data, range(8))
    if rank:
        with pytest.raises(RuntimeError, match=r"stage 1: stage 0 has sent other samples.*the same ids"):
            other.run(data, [1, 0, *range(2, 8)])
        with pytest.raises(RuntimeError, match=r"the last step ended by an exception.*load_state_dict"):
            other.run(data, range(8))
        smaller = CompressedStage(parts(2)[1], 1, 2, torch.device("cpu"), **{**DELTA, "cache_samples": 4})
        with pytest.raises(ValueError, match="cache_samples=4: the state has a sample in slot 7"):
            smaller.load_state_dict(other.stages[0].state_dict())
    else:
        other.run(data, range(8))
    told = "stage 0 is a PipelineStage: build every stage of the pipeline as CompressedStage"
    kind, message = [(TypeError, told), (RuntimeError, f"on another rank of the pipeline: .*{told}")][rank]
    stage = (PipelineStage, CompressedStage)[rank](parts(2)[rank], rank, 2, torch.device("cpu"))
    with pytest.raises(kind, match=message):
        prepare_schedule(ScheduleGPipe(stage, 4, F.mse_loss))
    unprepared = CompressedStage(parts(2)[rank], rank, 2, torch.device("cpu"), forward="int8")
    with pytest.raises(RuntimeError, match=r"nobody has called\s+yafsdp_cc.pipelining.prepare_schedule"):
        Schedule1F1B(unprepared, 4, F.mse_loss).step(*([data] if rank == 0 else []), target=data if rank else None)


@COMPRESSED_STAGES
@ranks(2)
def test_the_plan_is_what_is_sent_and_kept() -> None:
    rank, data = torch.distributed.get_rank(), batches(1)[0]
    lazy = {"error_feedback": True, "matrix_rank": 4}
    for settings in (DELTA, {"backward": "powersgd", **lazy}, {"forward": "topk", "backward": "int4", **lazy}):
        for epilogue_only in (False, True):
            ours = Pipeline(Schedule1F1B, {**settings, "epilogue_only": epilogue_only})
            stage, shape = ours.stages[0], (2, LENGTH, WIDTH)
            planned = plan_boundary(stage.compression, shape, torch.float32, 4, len(stage.exact_gradients))
            sent = []
            for _ in range(2):
                before = sum(stage.sent_bytes.values())
                ours.run(data, range(8))
                sent.append(sum(stage.sent_bytes.values()) - before)
            forward = [planned.first_forward, planned.forward]
            assert sent == (forward if rank == 0 else [planned.backward] * 2)
            for cache in stage._caches.values():
                assert planned.cache == sum(values.nbytes for values in cache.values.values())
            kept = [each.residual.values.nbytes for each in stage._senders.values() if each.residual is not None]
            assert kept == ([planned.residual] if rank and planned.residual else [])
            assert planned.exact == 8 * 2 * LENGTH * WIDTH * 4
    with torch.profiler.profile() as profile:
        ours.run(data, range(8))
    counts = {each.key: each.count for each in profile.key_averages() if each.key.startswith("YaFSDP")}
    forward, backward = ("encode", "decode") if rank == 0 else ("decode", "encode")
    expected = {f"YaFSDP::{forward} (stage 0 forward)": 4, f"YaFSDP::{backward} (stage 1 backward)": 4}
    assert expected.items() <= counts.items()


def test_settings_that_cannot_work() -> None:
    for settings, message in (
        ({"forward": "powersgd"}, "forward='powersgd': activations.*'int8'"),
        ({"backward": "int5"}, "backward='int5': there is no codec 'int5'"),
        ({"forward": "int4", "forward_delta": True}, "cache_samples=None: forward_delta=True keeps"),
        ({**DELTA, "forward": "topk"}, "a message of 'topk' loses 0.9.* less than 0.71 is needed. Use 'int8'"),
        ({"hadamard": True, "backward": "powersgd"}, "forward=None and backward='powersgd' have no blocks"),
        ({"cache_samples": 3}, "are for forward_delta=True"),
        ({"epilogue_only": True}, "epilogue_only=True: backward=None"),
        ({**DELTA, "cache_folder": "/nowhere"}, "'/nowhere': there is no such folder"),
    ):
        with pytest.raises(ValueError, match=message):
            StageCompression(**settings)


def test_another_torch_is_refused() -> None:
    for version in ("2.12.1", "2.14.0+cpu"):
        with pytest.raises(RuntimeError, match=rf"tested with torch 2.13 alone, and this is {re.escape(version)}"):
            check_torch(version)
    check_torch("2.13.0+cpu")
