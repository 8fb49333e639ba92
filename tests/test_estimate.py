"""``estimate``: plans of ranks that are not there, and probes, against models that run."""

from __future__ import annotations

import functools
import gc
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import yafsdp_cc
from tests.cli.command import yafsdp_cc as yafsdp_cc_command
from tests.ranks import on_ranks, ranks
from tests.soak import also
from yafsdp_cc.compression import Compression
from yafsdp_cc.config import SET
from yafsdp_cc.plan import Plan
from yafsdp_cc.tools.cli.estimate import gpus, main, parser
from yafsdp_cc.tools.demo.model import GPT
from yafsdp_cc.tools.demo.train import loss_of
from yafsdp_cc.tools.estimate import COMMUNICATOR, Subject, headroom_of, plan_over, probe, room_in, subject_of
from yafsdp_cc.tools.step_time import Work

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def small() -> GPT:
    return GPT(width=96, depth=5, heads=3, context=16)


def square() -> nn.Module:
    return nn.Linear(64, 64)


def real_plan(settings: dict[str, Any]) -> Plan:
    """Plan on real ranks, and hold the plan's bytes against what a step sends."""
    model = yafsdp_cc.shard(small(), mp_policy=BF16, **settings)
    counters, plan = yafsdp_cc.counters_of(model), yafsdp_cc.plan_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sent = []
    for _ in range(4):
        loss_of(model, torch.zeros(2, 17, dtype=torch.int64)).backward()
        optimizer.step()
        sent.append(counters.gathered_bytes + counters.reduced_bytes)
    assert sent[3] - sent[1] == 2 * plan.communication.total  # PowerSGD's factors take turns
    return plan


SETTINGS: list[dict[str, Any]] = [
    {},
    {"compression": "int8"},
    {"compression": Compression("onebit", weights="int8")},
    {"compression": "powersgd"},
    {"zero_stage": 2},
    {"compression": Compression("int4", weights="int4"), "zero_stage": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("world", [2, also(1), also(4)])
def test_a_plan_of_ranks_that_are_not_there_is_that_of_real_ones(world: int, settings: dict[str, Any]) -> None:
    real = on_ranks(world, real_plan, settings)[min(1, world - 1)]
    assert on_ranks(1, _planned, world, settings)[0] == real


def _planned(world: int, settings: dict[str, Any]) -> Plan:
    with no_group():
        return plan_over(small, (world,), "cpu", mp_policy=BF16, **settings)


@contextmanager
def no_group() -> Iterator[None]:
    dist.destroy_process_group()
    try:
        yield
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def loss_of_small(model: nn.Module) -> Tensor:
    return loss_of(model, torch.zeros(4, 65, dtype=torch.int64))


class Looped(GPT):
    """A GPT that calls all blocks three times, one after the other or each three times over."""

    def __init__(self, repeats_each: bool) -> None:
        super().__init__(width=96, depth=4, heads=3)
        self.repeats_each = repeats_each

    def forward(self, tokens: Tensor) -> Tensor:
        x, blocks = self.tokens(tokens), list(self.blocks)
        for block in [block for block in blocks for _ in range(3)] if self.repeats_each else blocks * 3:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def tracked_peak(checkpointed: int, build: Callable[[], Any] = lambda: GPT(width=96, depth=4, heads=3)) -> int:
    """Return the bytes at the peak of a step whose first blocks are checkpointed by torch."""
    with FakeTensorMode():
        model, tracker = build(), MemTracker()
        for block in model.blocks[:checkpointed]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        tracker.track_external(model)
        before = tracker.get_tracker_snapshot()[torch.device("cpu")]["Total"]
        with tracker:
            loss = loss_of_small(model)
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
            loss.backward()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]) - before


@ranks(1)
def test_activations_are_what_torch_tracks_in_all_of_a_checkpointed_model() -> None:
    found = probe(Subject(lambda: GPT(width=96, depth=4, heads=3), loss_of_small), MixedPrecisionPolicy())
    assert len(found.blocks) == 4
    for checkpointed in (0, 1, 3, 4):
        tracked = tracked_peak(checkpointed)
        assert abs(found.activations.peak(checkpointed) / tracked - 1) < 0.01, (
            checkpointed,
            tracked,
            found.activations,
        )


@pytest.mark.parametrize("repeats_each", [False, True])
@ranks(1)
def test_blocks_that_are_called_several_times_hold_what_all_calls_do(repeats_each: bool) -> None:
    build = partial(Looped, repeats_each)
    found = probe(Subject(build, loss_of_small), MixedPrecisionPolicy())
    for checkpointed in (0, 1, 2):
        assert 1 <= found.activations.peak(checkpointed) / tracked_peak(checkpointed, build) < 1.05
    more = _counted(2, build) - _counted(0, build)
    assert more == _total(found.work_with(2)) - _total(found.work)


class Checkpointing(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


@ranks(1)
def test_blocks_that_a_model_checkpoints_itself_hold_their_outputs() -> None:
    build = partial(Checkpointing, width=96, depth=4, heads=3)
    found = probe(Subject(build, loss_of_small), MixedPrecisionPolicy())
    assert found.activations.peak() == tracked_peak(0, build)
    assert _total(found.work) == _counted(0, build)


class _Part(nn.Module):
    """A block that returns its output within ``form``."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.form = nn.Linear(64, 256), nn.Linear(256, 64), form

    def forward(self, x: Tensor) -> Any:
        return self.form(x + self.down(self.up(x).relu()))


def _peak_of(
    called: int, frozen: int = 0, more: int = 0, form: Callable[[Tensor], Any] = lambda x: x
) -> tuple[int, list[float]]:
    """Return peak bytes of activations, and each block's operations in the backward.

    Args:
        called: number of blocks that the loss calls, of which the first ``frozen`` are not trained.
        more: number of blocks that the loss does not call.
    """

    def build() -> nn.Module:
        model = nn.Module()
        model.blocks = nn.ModuleList(_Part(form) for _ in range(called + more))
        model.blocks[:frozen].requires_grad_(False)
        return model

    def loss(model: Any) -> Tensor:
        x = torch.zeros(128, 64)
        for block in list(model.blocks)[: -more or None]:
            (x,) = (each for each in tree_leaves(block(x)) if each is not None)
        return x.square().mean()

    found = probe(Subject(build, loss), MixedPrecisionPolicy())
    assert len(found.blocks) == called + more
    return found.activations.peak(), [work.backward for name, work in found.work.items() if name]


@ranks(1)
def test_blocks_that_no_gradient_reaches_hold_nothing_and_outputs_have_any_form() -> None:
    of_two, of_four = _peak_of(2), _peak_of(4)
    frozen = _peak_of(4, frozen=2)
    assert frozen[0] == pytest.approx(of_two[0], rel=0.05)  # the input is an output that is kept, too
    assert (frozen[1][:2], frozen[1][2:]) == ([0, 0], of_two[1])
    assert _peak_of(4, more=1)[0] == pytest.approx(of_four[0], rel=0.05)
    for form in (lambda x: {"hidden": x}, lambda x: (None, x)):
        assert _peak_of(4, form=form) == of_four


@ranks(1)
def test_modules_keep_their_names_in_a_container() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            twice = nn.ReLU()
            kinds = {"first": nn.Linear(64, 64), "act": twice, "last": nn.Linear(64, 64), "end": twice}
            self.features = nn.Sequential(OrderedDict(kinds))
            self.blocks = nn.Sequential(OrderedDict((f"block{i}", _Part(lambda x: x)) for i in range(5)))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks(self.features.end(self.features.last(self.features(x))))
            return x + self.blocks.block4.down.bias

    found = probe(Subject(Named, lambda model: model(torch.zeros(4, 64)).square().mean()), MixedPrecisionPolicy())
    assert found.blocks == tuple(f"blocks.block{i}" for i in range(5))


@ranks(1)
def test_operations_of_a_step_are_six_per_parameter_and_token_and_those_of_attention() -> None:
    model, tokens, length = GPT(width=96, depth=6, heads=3), 4 * 64, 64
    found = probe(Subject(lambda: GPT(width=96, depth=6, heads=3), loss_of_small), BF16)
    matrices = sum(each.numel() for name, each in model.named_parameters() if each.ndim == 2 and "tokens" not in name)
    attention = 6 * 2 * 96 * length * tokens  # scores and values, forward, the causal half
    assert sum(each.forward for each in found.work.values()) == 2 * matrices * tokens + attention
    # torch counts the backward of attention with the scores computed again.
    assert sum(each.backward for each in found.work.values()) == 4 * matrices * tokens + 2.5 * attention
    assert found.work["blocks.0"] == found.work["blocks.5"]
    more = [_counted(checkpointed) - _counted(0) for checkpointed in (2, 6)]
    assert more == [_total(found.work_with(checkpointed)) - _total(found.work) for checkpointed in (2, 6)]
    assert 0 < more[1] < sum(each.forward for each in found.work.values())


def _total(work: dict[str, Work]) -> float:
    return sum(each.forward + each.backward for each in work.values())


def _counted(checkpointed: int, build: Callable[[], Any] = lambda: GPT(width=96, depth=6, heads=3)) -> float:
    """Return the operations of a step whose first blocks are checkpointed by torch."""
    with FakeTensorMode(), FlopCounterMode(display=False) as flops:
        model = build()
        for block in model.blocks[:checkpointed]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        loss_of_small(model).backward()
    return float(flops.get_total_flops())


def test_attention_of_a_config_is_causal(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    on_ranks(1, _attention_is_causal, tmp_path)


def _attention_is_causal(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 96, **sizes}))
    subject = subject_of(str(tmp_path), 2, 32)
    matrices = sum(p.numel() for name, p in subject.build().named_parameters() if p.ndim == 2 and "embed" not in name)
    forward = sum(each.forward for each in probe(subject, BF16).work.values())
    assert forward == 2 * 32 * (2 * matrices + 2 * 2 * 64 * 32)  # per token; half of the scores and values


def test_a_config_is_a_model_type_a_file_or_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "intermediate_size": 96, **sizes}))
    with torch.device("meta"):
        built = [subject_of(str(path), 1, 8).build() for path in (file, tmp_path)]
    assert [type(model).__name__ for model in built] == ["LlamaForCausalLM"] * 2
    assert built[0].get_input_embeddings().weight.shape == (50, 64)
    file.write_text("{}")
    with pytest.raises(ValueError, match="has no 'model_type'"):
        subject_of(str(tmp_path), 1, 8)
    with pytest.raises(ValueError, match="'lama' is no 'demo', no file"):
        subject_of("lama", 1, 8)
    with pytest.raises(ValueError, match="write a factory for it"):
        subject_of("vit", 1, 8)


def test_what_fails_in_a_config_s_or_a_factory_s_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    file, sizes = tmp_path / "config.json", {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    small_bert = {"model_type": "bert", "max_position_embeddings": 8, "vocab_size": 50, **sizes}
    for text, told in (
        (b"{", "config.json cannot be read as a Hugging Face config, which is JSON"),
        (b"\xff", "config.json cannot be read as a Hugging Face config, which is JSON"),
        (b"7", "config.json has no 'model_type'"),
        (json.dumps({**small_bert, "hidden_size": "big"}).encode(), "reading .*config.json raised .*'big'"),
        (json.dumps(small_bert | {"architectures": ["BertLMHeadModel"]}).encode(), r"on 1 x 9 tokens raised Runtime.*"),
        (
            json.dumps(small_bert | {"architectures": ["BertModel"]}).encode(),
            "8 tokens raised Attr.* no attribute 'loss'",
        ),
    ):
        file.write_bytes(text)
        with pytest.raises(ValueError, match=told):
            probe(subject_of(str(file), 1, 9 if "9" in told else 8), BF16)
    with pytest.raises(ValueError, match="returns no loss: return one number that depends on its weights"):
        probe(Subject(small, lambda model: torch.ones(1)), BF16)


def test_a_model_without_units_takes_time(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(
        "import torch\ndef job(): return torch.nn.Linear(4, 4), lambda model: model(torch.ones(2, 4)).sum()\n"
    )
    ran = yafsdp_cc_command("estimate", "tiny:job", *TIMES, folder=tmp_path)
    assert "seconds of a step" in ran.stdout, ran.stderr


def factory() -> Any:
    return small(), lambda model: loss_of(model, torch.zeros(2, 17, dtype=torch.int64))


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "estimate.json"
    ran = yafsdp_cc_command(
        "estimate",
        "tests.test_estimate:factory",
        "--ranks",
        "8,1024",
        "--json",
        str(out),
        *TIMES,
        "--checkpoint",
        "3",
        folder=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    few, many = json.loads(out.read_text())
    assert (few["ranks"], many["ranks"]) == (8, 1024)
    assert few["peak_bytes"] == sum(few["memory"].values())
    assert few["checkpointed_blocks"] == 3
    assert few["memory"]["optimizer state"] == few["plan"]["adamw_bytes"]
    assert few["seconds"]["total"] == pytest.approx(sum(list(few["seconds"].values())[:-1]))
    assert few["plan"]["communication"]["reduce"] < many["plan"]["communication"]["reduce"]
    assert few["assumed"]["recomputed"] == "3 of 5 blocks"
    assert few["assumed"]["precisions"].startswith("parameters float32, forward bfloat16")
    assert few["peak_bytes_with_headroom"] == few["peak_bytes"] + sum(few["headroom"].values())
    lines = ran.stdout.splitlines()
    assert lines[2:5] == [
        "assumed",
        "  batch       the factory's own",
        "  optimizer   AdamW, two numbers for each parameter",
    ]


def test_the_command_takes_a_run_file_which_flags_overrule(tmp_path: Path) -> None:
    file, out = tmp_path / "run.yaml", tmp_path / "estimate.json"
    file.write_text(
        "launch: {nproc_per_node: 8, nnodes: 2}\nshard: {zero_stage: 2, replicate: 2}\nprecision: {param: bf16}\n"
        "compression: int8\n"
    )
    gpu = ["--gpu", "h100", "--link", "400gbit", "--tokens", "3B"]
    command = ["estimate", "demo", "--batch", "2", "--sequence", "64", "-c", str(file), *gpu]
    ran = yafsdp_cc_command(*command, "--compression", "int4", "--json", str(out), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(out.read_text())
    assert (row["ranks"], row["plan"]["world"], row["plan"]["replicas"]) == (16, 8, 2)
    assert row["headroom"]["NCCL"] == 2 * COMMUNICATOR  # one communicator for the shard, one for replicas
    assert {"compression.gradients": "int4", "shard.zero_stage": "2"}.items() <= {
        each["name"]: each["value"] for each in row["plan"]["arguments"]
    }.items()
    answers, step = row["answers"], row["seconds"]["total"]
    assert answers["tokens / s of the job"] == pytest.approx(2 * 64 * 16 / step)
    assert answers["days for 3 billion tokens"] == pytest.approx(3e9 * step / (2 * 64 * 16) / 86400)
    assert 0 < answers["MFU, %"] < 40
    assert row["seconds"]["optimizer"] > 0
    wrong = yafsdp_cc_command("estimate", "demo", "--compression", "int9", folder=tmp_path)
    assert wrong.returncode == 2
    assert 'compression.gradients: "int9" cannot be' in wrong.stderr


@ranks(1)
def test_the_largest_batch_fits_and_the_next_one_does_not() -> None:
    @functools.cache
    def activations(batch: int) -> Any:
        return probe(subject_of("demo", batch, 64), BF16).activations

    once, twice = activations(2), activations(4)
    for checkpointed in (0, 6):
        for batch in (1, 7, 32):
            assert once.scaled(twice, batch / 2).peak(checkpointed) == activations(batch).peak(checkpointed)
        for room in (activations(7).peak(checkpointed), activations(8).peak(checkpointed) - 1):
            assert once.largest_batch(twice, 2, room, checkpointed) == 7
    assert once.largest_batch(twice, 2, 0, 0) == 0


@pytest.mark.parametrize("communicators", [0, 1, 2])
def test_headroom_is_left_in_what_fits(communicators: int) -> None:
    room = room_in(80 << 30, communicators)
    used = room + sum(headroom_of(room, communicators).values())
    assert (80 << 30) - 4 <= used <= 80 << 30


def test_each_gpu_has_sources() -> None:
    assert {"a100", "h100", "h200", "b200", "l40s"} <= gpus().keys()
    for row in gpus().values():
        name, *figures, of_memory, of_speed = row.values()
        assert name
        assert all(float(figure) > 0 for figure in figures)
        assert of_memory.startswith("https://")
        assert of_speed.startswith("https://")


def test_files_that_are_no_python_are_in_the_wheel() -> None:
    root = Path(__file__).parent.parent
    listed = (
        (root / "pyproject.toml").read_text().partition("[tool.setuptools.package-data]")[2].partition("[tool.ruff")[0]
    )
    data = {path.name for suffix in ("csv", "css", "c", "typed") for path in (root / "yafsdp_cc").rglob(f"*.{suffix}")}
    assert "gpus.csv" in data
    assert all(f'"{name}"' in listed for name in data)


TIMES = ("--rate", "1tflops", "--link", "1gbit")


def test_what_the_command_refuses_is_said_before_torch_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, message in (
        (["demo", "--ranks", "6", "--replicas", "4"], "--ranks 6 is not a multiple of --replicas 4"),
        (["demo", "--checkpoint", "fit"], "--checkpoint fit needs --memory, such as 80GiB, or --gpu"),
        (["demo", "--rate", "5tflops"], "a step's time takes both --rate and --link, or --gpu"),
        (["demo", "--tokens", "300B"], "--tokens needs a step's time: name --gpu, or --rate and --link"),
        (["demo", "--ranks", "16", "--gpu", "h100"], "--ranks 16 fill several nodes of 8: name --link to other nodes"),
        (["demo", "--set=launch.nnodes=9", "--gpu", "h100"], "--ranks 9 fill several nodes of 8"),
        (
            ["demo", "--set=launch.nnodes='2:2'", "--set=launch.nproc_per_node=8", "--gpu=h100"],
            "--ranks 16 fill several nodes of 8",
        ),
        (["demo", "--set=launch.nnodes=2:4"], "launch.nnodes: 2:4 leaves the number of ranks open: name --ranks"),
        (["demo", "--set=launch.nproc_per_node=gpu"], "launch.nproc_per_node: gpu leaves the number of ranks open"),
        (["demo", "--link", "5"], "'5': write a number and a unit of kbit, mbit, gbit, tbit"),
        (["demo", "--json", "/nowhere/x"], "--json /nowhere/x: name a file in a folder that is there"),
    ):
        monkeypatch.setitem(sys.modules, "yafsdp_cc.tools.estimate", None)
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


FACTORIES = """
from torch import nn
def wants(width): return nn.Linear(width, width)
def raises(): raise KeyError("x")
def endless(): return endless()
def number(): return 5
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wants", r"without arguments, .* raised TypeError: wants\(\) missing 1 required .*def small\(\)"),
        ("raises", r"raised KeyError: 'x' \(.*factories.py:4\)"),
        ("endless", "raised RecursionError"),
        ("number", "returns a int: return a model"),
        ("__class__", "raised TypeError"),
        ("missing", "name a module that Python finds from here"),
    ],
)
def test_a_factory_that_makes_no_model(name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=told):
        subject_of(f"factories:{name}", 1, 8)
    with pytest.raises(ValueError, match="name a module"):
        subject_of("../../etc:passwd", 1, 8)


@pytest.mark.parametrize(
    ("flags", "variable", "forward", "reduced"),
    [
        ((), "", "bfloat16", "bfloat16"),
        (("--precision=fp32",), "", "float32", "float32"),
        (("--set=precision.param=fp32",), "", "float32", "float32"),
        (("--set=precision.param=null",), "", "float32", "float32"),
        (("--set=precision.reduce=fp32",), "", "bfloat16", "float32"),
        ((), "precision.param=fp32", "float32", "float32"),
    ],
)
def test_reduces_have_the_dtype_of_weights_unless_told_otherwise(
    flags: tuple[str, ...],
    variable: str,
    forward: str,
    reduced: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(SET, variable)
    monkeypatch.setattr(gc, "disable", lambda: None)
    main(["tests.test_estimate:square", "--ranks=2", "--device=cpu", *flags])
    assert f"forward {forward}, gathered {forward}, reduced {reduced}\n" in capsys.readouterr().out


def estimated(*arguments: str) -> tuple[Any, str]:
    """Run the command in this process; return the only row of its JSON, and what it prints."""
    with no_group(), TemporaryDirectory() as folder, redirect_stdout(StringIO()) as shown:
        assert main([*arguments, "--json", f"{folder}/estimate.json"]) == 0
        (row,) = json.loads(Path(folder, "estimate.json").read_text())
    return row, shown.getvalue()


def parts() -> Any:
    """Five blocks, each of two products of 128 x 64 x 256 numbers."""
    features = nn.Sequential(*[_Part(lambda x: x) for _ in range(5)])
    model = nn.Sequential(OrderedDict(features=features))
    return model, lambda model: model(torch.zeros(128, 64, device="cpu", requires_grad=True)).square().mean()


@ranks(1)
def test_the_operations_of_a_step_do_not_depend_on_its_units() -> None:
    product = 2 * 128 * 64 * 256
    command = ["tests.test_estimate:parts", *TIMES, "--ranks=1"]
    again = estimated(*command, "--checkpoint=3")[0]["seconds"]["backward"]
    for units in ("auto", "_Part", "features.*.up", "features", "[features.*, features.*.up]"):
        step = estimated(*command, "--set", f"shard.units={units}")[0]["seconds"]
        assert step["forward"] == pytest.approx(10 * product / 1e12)
        assert step["backward"] == pytest.approx(20 * product / 1e12)
        step = estimated(*command, "--set", f"shard.units={units}", "--checkpoint=3")[0]["seconds"]
        assert step["backward"] == pytest.approx(again)
        assert 20 * product / 1e12 < again <= (20 + 6) * product / 1e12


@ranks(1)
def test_operations_are_those_within_a_unit_and_in_no_unit_inside() -> None:
    subject = Subject(lambda: parts()[0], parts()[1])
    found = probe(subject, MixedPrecisionPolicy(), ["features", "features.*.up"]).work
    product = 2 * 128 * 64 * 256
    assert found.pop("features") == (5 * product, 10 * product)
    assert found.pop("") == (0, 0)
    assert found == {f"features.{index}.up": (product, 2 * product) for index in range(5)}


@ranks(1)
def test_a_block_that_is_listed_several_times_is_counted_as_often() -> None:
    def build() -> nn.Module:
        one, other, shared = _Part(lambda x: x), _Part(lambda x: x), nn.Linear(64, 64)
        return nn.Sequential(nn.Sequential(one, one, one, other, other, other), nn.Sequential(*[shared] * 5))

    found = probe(Subject(build, parts()[1]), MixedPrecisionPolicy()).work.values()
    forward = 2 * 128 * 64 * (6 * 2 * 256 + 5 * 64)
    assert sum(each.forward for each in found) == forward
    assert sum(each.backward for each in found) == 2 * forward


@ranks(1)
def test_shards_of_one_rank_are_summed_over_replicas() -> None:
    row, _ = estimated("tests.test_estimate:parts", *TIMES, "--ranks=8", "--replicas=8")
    sent = row["plan"]["communication"]["replicas"]
    assert sum(each["replicas"] for each in row["plan"]["traffic"]) == sent > 0
    assert row["seconds"]["total"] >= sent * 8e-9


@ranks(1)
def test_the_state_of_an_offloaded_optimizer_is_in_host_memory() -> None:
    command = ["tests.test_estimate:parts", *TIMES, "--set=shard.cpu_offload=true"]
    for optimizer, share in (("adamw", 1), ("sgd", 0)):
        row, shown = estimated(*command, "--optimizer", optimizer)
        assert row["memory"]["optimizer state"] == 0
        assert row["host_memory"]["optimizer state"] == share * row["plan"]["adamw_bytes"]
        assert "left out    seconds of copies from and to host memory, and of the optimizer there\n" in shown
        assert "\nin host memory" in shown


def batch_of_tokens() -> Any:
    batch = torch.zeros(2, 17, dtype=torch.int64)
    return nn.Embedding(300, 64), lambda model: model(batch).square().mean()


def batch_of_numbers() -> Any:
    batch = torch.zeros(2, 64)
    return square(), lambda model: model(batch).sum()


@ranks(1)
def test_a_batch_that_the_factory_makes_is_refused() -> None:
    for name, where in (("batch_of_tokens", "(backward of the )?loss"), ("batch_of_numbers", "loss of")):
        with pytest.raises(ValueError, match=f"^the {where} .*make the batch within the loss, or with device='cpu'"):
            probe(subject_of(f"tests.test_estimate:{name}", 1, 8), BF16)


PAGE = (Path(__file__).parent.parent / "docs" / "estimate.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_are_understood() -> None:
    commands = [line.split()[2:] for line in PAGE.splitlines() if line.startswith("yafsdp-cc estimate ")]
    assert len(commands) > 3
    for command in commands:
        parser().parse_args(command)
    assert parser().parse_args(["demo", "--latency=0us"]).latency == 0


@ranks(1)
def test_the_examples_of_the_page_run() -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    with no_group():
        for number, example in enumerate(examples, start=1):
            exec(compile(example, f"<docs/estimate.md, example {number}>", "exec"), {"__name__": f"example{number}"})
