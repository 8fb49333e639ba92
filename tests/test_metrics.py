"""``Metrics`` writes what happened, from any loop, and the same for TensorBoard and W&B.

Callbacks of frameworks are in ``docs/examples``, which ``tests/integrations`` runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import yafsdp_cc
from tests import simulated_cuda
from tests.ranks import on_ranks, ranks
from tests.soak import LONG
from yafsdp_cc.tools import metrics
from yafsdp_cc.tools.metrics import Metrics
from yafsdp_cc.tools.report.tables import read_run


def written(folder: Path, event: str = "") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if event in ("", line["event"])]


class Clock:
    """A clock that only the test moves."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    time = perf_counter


class Slow(nn.Linear):
    """A layer whose forward takes two seconds and whose backward takes three."""

    clock: Clock

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.clock.now += 2
        output = super().forward(inputs)
        if output.requires_grad:
            output.register_hook(self.after)
        return output

    def after(self, gradient: torch.Tensor) -> None:
        self.clock.now += 3


@ranks(1)
def test_where_the_time_of_a_step_goes(tmp_path: Path) -> None:
    clock = metrics.time = Clock()  # type: ignore[assignment]
    model = Slow(4, 4)
    model.clock = clock
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: setattr(clock, "now", clock.now + 1))
    log = Metrics(model, tmp_path, total_steps=5, every=2, show=False, settings={"lr": 0.1, "ranks": "not these"})
    for step in range(1, 6):
        clock.now += 4  # reading data
        for _ in range(2):  # micro-batches
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        log.step(float(step), tokens=30)
        if step == 3:
            with torch.no_grad():
                model(torch.ones(1, 4))
            clock.now += 50
            log.record(val_loss=7.0)
    log.close(note="done")
    start, *steps, end = (line for line in written(tmp_path) if line["event"] != "eval")
    assert (start["lr"], start["ranks"], start["first_step"]) == (0.1, 1, 0)
    assert [line["step"] for line in steps] == [1, 2, 4, 5], "the first, every second one and the last"
    assert [line["loss"] for line in steps] == [1, 2, 4, 5]
    for line in steps:
        assert (line["forward_s"], line["backward_s"], line["s_per_step"]) == (4, 6, 15), "4 data, 10, 1 optimizer"
        assert line["optimizer_s"] == 1
        assert line["tokens_per_s"] == 2
    assert [line["seconds"] for line in steps] == [15, 30, 112, 127], "wall-clock has the validation in it"
    assert written(tmp_path, "eval") == [{"event": "eval", "seconds": 97, "step": 3, "val_loss": 7}]
    assert (end["note"], end["step"]) == ("done", 5)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@ranks(2)
def test_a_sharded_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    yafsdp_cc.shard(model, units=list(model), sync_module_states=True, compression="int8")
    optimizer = torch.optim.AdamW(model.parameters())
    counters = yafsdp_cc.counters_of(model)
    with Metrics(nn.ModuleDict({"inner": model}), tmp_path, every=0, show=False) as log:
        for number in range(4):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            if number == 1:
                log.step(torch.tensor(float(dist.get_rank())), lr=0.5)
                before = counters.gathered_bytes, counters.reduced_bytes
            else:
                log.step(torch.tensor(9.0))
        log.report(loss=torch.tensor(float("nan")) if dist.get_rank() else torch.tensor(1.0))
    sent = counters.gathered_bytes - before[0], counters.reduced_bytes - before[1]
    dist.barrier()
    start, first, last, end = written(tmp_path)
    assert (start["planned_bytes"], start["ranks"]) == (yafsdp_cc.plan_of(model).owned_bytes, 2)
    assert start["plan"] == str(yafsdp_cc.plan_of(model))
    assert end["owned_bytes"] == start["planned_bytes"]
    assert (first["step"], first["loss"], first["lr"]) == (2, 0.5, 0.5), "the mean over ranks"
    assert (last["step"], last["loss"]) == (4, None), "not a number on one rank"
    assert (last["gathered_bytes_per_step"], last["reduced_bytes_per_step"]) == tuple(each // 2 for each in sent)
    assert min(sent) > 0


def train_on_a_simulated_gpu(folder: Path) -> None:
    simulated_cuda.install()
    model = nn.Linear(4, 4).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Metrics(model, folder, every=4, total_steps=5, show=False) as log:
        for number in range(1, 6):
            torch.cuda.set_sync_debug_mode("error" if number in (2, 3) else "default")  # raises if the host has to wait
            loss = model(torch.ones(2, 4, device="cuda")).sum()
            loss.backward()
            optimizer.step()
            log.step(loss)


def test_nothing_waits_for_a_gpu_between_reports(tmp_path: Path) -> None:
    on_ranks(1, train_on_a_simulated_gpu, tmp_path)
    steps = written(tmp_path, "step")
    assert [line["step"] for line in steps] == [1, 4, 5]
    for line in steps:
        parts = [line[f"{part}_s"] for part in ("forward", "backward", "optimizer")]
        assert min(parts) > 0
        assert sum(parts) <= line["s_per_step"]


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    for first in (0, 2):
        with Metrics(nn.Linear(2, 2), tmp_path, first_step=first, every=1, show=False) as log:
            for number in range(first, first + 4):
                log.step(float(number))
    run = read_run(tmp_path / "metrics.jsonl")
    assert run.start.first_step == 2
    assert [y for _, y in run.curve("loss")] == [0, 1, 2, 3, 4, 5]
    assert [x for x, _ in run.curve("loss")] == [1, 2, 3, 4, 5, 6]
    seconds = [each.seconds for each in run.records if each.loss is not None]
    assert seconds == sorted(seconds)
    assert run.records[-1].event == "end"


def test_counts_that_are_no_plain_numbers(tmp_path: Path) -> None:
    first: Any = np.int64(3)
    tokens: Any = torch.ones(16, dtype=torch.bool).sum()
    with Metrics(nn.Linear(2, 2), tmp_path, first_step=first, every=1, show=False) as log:
        log.step(1.0, tokens=tokens)
    run = read_run(tmp_path / "metrics.jsonl")
    assert (run.start.first_step, run.curve("loss")) == (3, [(4, 1.0)])
    assert run.usual("tokens_per_s")


@ranks(2)
def test_a_file_that_cannot_be_written_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/run/metrics.jsonl cannot be written"):
        Metrics(nn.Linear(2, 2), tmp_path / "file" / "run")


def test_an_exception_is_the_end(tmp_path: Path) -> None:
    log = Metrics(nn.Linear(2, 2), tmp_path, show=False)
    with pytest.raises(KeyError), log:
        raise KeyError("batch")
    assert written(tmp_path)[-1]["error"] == "KeyError: 'batch'"
    log.close()
    assert len(written(tmp_path, "end")) == 1


def test_half_a_line_of_a_killed_run_stays_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for first in range(2):
        with Metrics(nn.Linear(2, 2), tmp_path, first_step=first, every=1, show=False) as log:
            log.step(float(first))
        if not first:
            file.write_text(file.read_text() + '{"event": "step", "st')
    run = read_run(file)
    assert (run.curve("loss"), run.cut_off) == ([(1, 0.0), (2, 1.0)], [4])


def test_names_of_its_own_are_not_overwritten(tmp_path: Path) -> None:
    theirs = {"event": "x", "seconds": "x", "plan": 5, "planned_bytes": "x", "ranks": "x", "device": 5}
    with Metrics(nn.Linear(2, 2), tmp_path, every=1, show=False, settings=theirs) as log:
        log.step(torch.ones(1), event=3.0, seconds=-1.0)
        log.record(step=7.0, event=3.0)
    log.step(2.0)
    assert [line["event"] for line in written(tmp_path)] == ["start", "step", "eval", "end"]
    assert [each.step for each in read_run(tmp_path / "metrics.jsonl").records] == [1, 1, 1]


def test_what_cannot_be_written_is_told_by_name(tmp_path: Path) -> None:
    text: dict[str, Any] = {"name": "x"}
    with pytest.raises(ValueError, match=r"metrics.jsonl cannot be written: keys must be"):
        Metrics(nn.Linear(2, 2), tmp_path, settings={("a", 1): 2})  # type: ignore[dict-item]
    with (
        pytest.raises(ValueError, match=r"Metrics: loss has shape \(2,\): pass one number"),
        Metrics(nn.Linear(2, 2), tmp_path, every=1, show=False) as log,
    ):
        log.step(torch.ones(2))
    with (
        pytest.raises(ValueError, match=r"Metrics: name is 'x': pass a number"),
        Metrics(nn.Linear(2, 2), tmp_path, every=1, show=False) as log,
    ):
        log.step(1.0, **text)


@pytest.mark.filterwarnings("error")
def test_a_loss_with_a_graph_is_taken_without_a_warning(tmp_path: Path) -> None:
    with Metrics(nn.Linear(2, 2), tmp_path, every=1, show=False) as log:
        log.step(torch.ones((), requires_grad=True))
    assert written(tmp_path, "step")[0]["loss"] == 1


@ranks(2)
def test_tensors_are_means_of_what_all_ranks_call_alike(tmp_path: Path) -> None:
    with Metrics(nn.Linear(2, 2), tmp_path, show=False) as log:
        log.record(seen=torch.tensor(2**24 + 1), lr=torch.tensor(0.25, dtype=torch.float64), epoch=dist.get_rank())
        with pytest.raises(ValueError, match=r"Metrics: ranks gave tensors of different names, \['val_\w'\] and"):
            log.record(**{f"val_{'ab'[dist.get_rank()]}": torch.tensor(1.0)})
    dist.barrier()
    (line,) = written(tmp_path, "eval")
    assert (line["seen"], line["lr"], line["epoch"]) == (2**24 + 1, 0.25, 0)


def test_training_goes_on_where_the_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.warns(UserWarning, match=r"metrics.jsonl ends here: No space left on device"):
        log = Metrics(nn.Linear(2, 2), tmp_path, every=1, show=False)
    log.step(1.0)
    log.close()


@ranks(2)
def test_parts_that_are_sharded_each_for_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    parts = [yafsdp_cc.fully_shard(model[0]), yafsdp_cc.fully_shard(model[2])]
    with Metrics(model, tmp_path, every=1, show=False) as log:
        model(torch.ones(2, 64)).sum().backward()
        log.step(1.0)
    dist.barrier()
    start, step, end = written(tmp_path)
    counters = [yafsdp_cc.counters_of(part) for part in parts]
    assert step["reduced_bytes_per_step"] == sum(each.reduced_bytes for each in counters) > 0
    assert start["planned_bytes"] == end["owned_bytes"] == sum(yafsdp_cc.plan_of(part).owned_bytes for part in parts)


def test_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Metrics(nn.Linear(2, 2), tmp_path, every=1, total_steps=2) as log:
        for loss in (0.25, float("nan")):
            log.step(loss, tokens=8)
        log.record(val_loss=0.5)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("step    1/2   loss 0.250  ")
    assert "tokens/s" in first
    assert second.startswith("step    2/2   loss not finite  ")
    assert third == "step    2/2   val loss 0.500"


def track(folder: Path) -> None:
    with Metrics(nn.Linear(2, 2), folder, every=1, show=False, tensorboard=True) as log:
        for number in range(3):
            log.step(number / 2)


def test_tensorboard_has_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra 'track')")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on_ranks(1, track, tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0), (2, 0.5), (3, 1)]


def test_wandb_has_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (extra 'track')")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Metrics(
        nn.Linear(2, 2), tmp_path, every=1, show=False, wandb=True, settings={"codec": "int8 of a test"}
    ) as log:
        log.step(0.515625)
    wandb.teardown()  # a run tells its service that it has ended; only then does that write the rest of the file
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"0.515625" in file.read_bytes()
    assert b"int8 of a test" in file.read_bytes()


def test_a_second_report_of_a_step_has_no_times(tmp_path: Path) -> None:
    with Metrics(nn.Linear(2, 2), tmp_path, every=1, show=False) as log:
        log.step(1.0, tokens=8)
        log.report(norm=2.0)
        log.step(1.0, tokens=8)
    first, second, third = written(tmp_path, "step")
    assert second["norm"] == 2.0
    assert not {"s_per_step", "tokens_per_s"} & second.keys()
    assert {"s_per_step", "tokens_per_s"} <= first.keys() & third.keys()


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        Metrics(nn.Linear(2, 2), tmp_path, wandb=True)


@LONG
def test_a_graph_that_is_compiled_whole(tmp_path: Path) -> None:
    def body(folder: Path) -> None:
        model = nn.Linear(2, 2)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with Metrics(model, folder, show=False) as log:
            compiled(torch.ones(1, 2)).sum().backward()
            log.step(1.0)

    on_ranks(1, body, tmp_path)
    assert SimpleNamespace(**written(tmp_path, "step")[0]).loss == 1
