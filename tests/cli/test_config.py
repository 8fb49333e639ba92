"""The run file: all mistakes at once, precedence, defaults that are the functions' own; and ``yafsdp-cc config``."""

from __future__ import annotations

import inspect
import json
import random
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import yafsdp_cc
import yafsdp_cc.tools.cli as cli
from tests.cli.command import ROOT
from tests.ranks import ranks
from tests.soak import SOAK
from yafsdp_cc import config
from yafsdp_cc.compression import Compression
from yafsdp_cc.compression.codec import BLOCKS, Scaled, kind_of
from yafsdp_cc.compression.error_feedback import ops_for

WRONG = """\
launch:
  nproc_per_node: many
  nnodes: 0
  max_restart: 3
shard:
  zero_stage: true
  zero_stage: 2
  gradients: int8
precision:
  param: bf15
compression:
  candidates: [int8, int5]
  feedback: maybe
  overrides: {"embed*": inT8}
precsion: 3
"""
TOLD = """\
run.yaml:2: launch.nproc_per_node: "many" cannot be; it takes a whole number of at least 1, or auto, gpu, cpu or xpu
run.yaml:3: launch.nnodes: 0 cannot be; it takes a whole number of at least 1, or text such as 2:4
run.yaml:4: there is no setting launch.max_restart; did you mean launch.max_restarts?
run.yaml:6: shard.zero_stage: true cannot be; it takes a whole number from 1 to 3
run.yaml:7: zero_stage is there already, in line 6
run.yaml:8: there is no setting shard.gradients; did you mean compression.gradients?
run.yaml:10: precision.param: "bf15" cannot be; it takes fp32, bf16, fp16 or fp64, or null (did you mean bf16?)
run.yaml:12: compression.candidates: ["int8", "int5"] cannot be; it takes a list, each bf16, fp8, int2, int3, int4, \
int6, int8, onebit, ternary, topk or topk2bit (did you mean int8?)
run.yaml:13: compression.feedback: "maybe" cannot be; it takes true or false, or ef21
run.yaml:14: compression.overrides: {"embed*": "inT8"} cannot be; it takes a mapping from text to auto, fp32, \
powersgd, bf16, fp8, int2, int3, int4, int6, int8, onebit, ternary, topk or topk2bit (did you mean int8?)
run.yaml:15: there is no setting precsion; did you mean precision?
YAFSDP_CC_SET: there is no setting shard.zero_stagge; did you mean shard.zero_stage?
--set: 'zero_stage' sets nothing: write NAME=VALUE, such as shard.zero_stage=2"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{number}: &a{number} [{','.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "more than 10,000 values"),
        (BOMB + "launch:\n  nproc_per_node: *a9\n", "more than 10,000 values"),
        (BOMB + "launch:\n  ? *a9\n  : 3\n", "more than 10,000 values"),
        ("launch: &a\n  nproc_per_node: *a\n", "recursive"),
        ("launch: " + "[" * 3000 + "]" * 3000, "recursion"),
        ("#" * (1 << 18), "is longer than the 131,072 bytes"),
        ("launch: !!python/object/apply:os.system ['touch owned']\n", "could not determine a constructor"),
    ],
    ids=["top", "value", "key", "cycle", "deep", "long", "tag"],
)
def test_a_hostile_run_file_is_one_mistake(folder: Path, text: str, told: str) -> None:
    Path("run.yaml").write_text(text)
    with pytest.raises(config.RunFileError, match=told):
        config.read("run.yaml")
    assert [each.name for each in folder.iterdir()] == ["run.yaml"]


def test_a_run_file_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(config.RunFileError, match="is longer than"):
        config.read("/dev/zero")


@pytest.mark.parametrize("count", [200, *([3000] if SOAK else [])])
def test_random_run_files_are_settings_or_mistakes(folder: Path, count: int) -> None:
    chance = random.Random(0)
    pieces = [
        "launch:",
        "shard: ",
        "&a ",
        "*a",
        "[",
        "]",
        "{",
        "}",
        "\n",
        "  ",
        "- ",
        ": ",
        "!!int ",
        "? ",
        "units",
        "3",
        "<<",
    ]
    for _ in range(count):
        Path("run.yaml").write_text("".join(chance.choice(pieces) for _ in range(chance.randrange(60))))
        with suppress(config.RunFileError):
            config.read("run.yaml")


def test_all_mistakes_are_told_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.yaml").write_text(WRONG)
    monkeypatch.setenv(config.SET, "shard.zero_stagge=2")
    with pytest.raises(config.RunFileError) as refused:
        config.read("run.yaml", ["zero_stage"])
    assert str(refused.value) == TOLD


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("shard:\n  zero_stage: [2\n", "run.yaml:3: cannot be read as YAML: expected ',' or ']', but got"),
        ("- shard\n", "run.yaml:1: holds no settings; it has sections: launch, shard, precision, compression"),
        ("shard: 2\n", "run.yaml:1: shard: 2 is no setting; it has zero_stage, replicate,"),
        ("shard: !!python/name:os.system\n", "run.yaml:1: cannot be read as YAML: could not determine a constructor"),
        (b"\xff\xfe", "run.yaml: is not UTF-8 text"),
        (None, "run.yaml: No such file or directory; yafsdp-cc config writes a run file"),
    ],
)
def test_what_is_no_run_file(folder: Path, text: str | bytes | None, told: str) -> None:
    if text is not None:
        Path("run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(config.RunFileError, match=re.escape(told)):
        config.read("run.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("launch:\n  log_dir: !!binary aGVsbG8=\n", "run.yaml:2"),
        ("shard:\n  zero_stage: !!timestamp abc\n", "run.yaml:2"),
        ("compression:\n  overrides:\n    a: int8\n    a: fp32\n", "run.yaml:3: cannot be read as YAML: a key"),
        (f"compression:\n  warmup_steps: {'9' * 5000}\n", "run.yaml: cannot be read"),
        (f"shard:\n  units: {'[' * 3000 + ']' * 3000}\n", "run.yaml: cannot be read"),
    ],
)
def test_values_that_are_none(folder: Path, text: str, told: str) -> None:
    Path("run.yaml").write_text(text)
    with pytest.raises(config.RunFileError, match=re.escape(told)):
        config.read("run.yaml")


@pytest.mark.parametrize(
    ("setting", "takes"),
    [
        ("launch.nnodes=4:2", "a whole number of at least 1, or text such as 2:4"),
        ("launch.master_addr=''", "text"),
        ("launch.rdzv_id=''", "text"),
        ("launch.rdzv_conf=timeout", "text such as join_timeout=600"),
        ("launch.log_dir=''", "text, or null"),
        ("shard.units=''", "text, or a list, each text"),
        ("shard.units=[]", "text, or a list, each text"),
        ("shard.units=['']", "text, or a list, each text"),
        ("compression.carry=.nan", "a number of more than 0, up to 1"),
        ("compression.carry=0", "a number of more than 0, up to 1"),
        ("compression.warmup_steps=-1", "a whole number of at least 0"),
        ("compression.block=100", "64, 128, 256, 512, 1024, 2048 or 4096"),
        ("compression.matrix_rank=0", "a whole number of at least 1"),
        (
            "compression.candidates=[]",
            "a list, each bf16, fp8, int2, int3, int4, int6, int8, onebit, ternary, topk or topk2bit",
        ),
        ("compression.error_budget=.inf", "a number of more than 0, up to 1, or null"),
    ],
)
def test_values_that_mean_nothing(setting: str, takes: str) -> None:
    with pytest.raises(config.RunFileError) as refused:
        config.read(None, [setting])
    assert re.fullmatch(rf"--set: {setting.split('=')[0]}: .* cannot be; it takes {takes}", str(refused.value))


def test_settings_that_contradict_each_other(folder: Path) -> None:
    Path("run.yaml").write_text("shard:\n  zero_stage: 2\n  reshard_after_forward: 4\n")
    told = r"^run.yaml:2, run.yaml:3: shard: zero_stage 2 keeps weights whole, and reshard_after_forward does not"
    with pytest.raises(config.RunFileError, match=told):
        config.read("run.yaml")
    assert config.read("run.yaml", ["shard.zero_stage=3"])["shard.reshard_after_forward"].value == 4


def test_values_are_what_is_written(folder: Path) -> None:
    """YAML 1.1 reads 1:4 as 64, 010 as 8 and a date as no text at all."""
    Path("run.yaml").write_text(
        "launch: {name: 2026-01-01, master_addr: 010}\ncompression: {gradients: int8, carry: 5e-1, error_budget: .5}\n"
    )
    found = config.read("run.yaml", ["launch.nnodes=1:4"])
    assert [one.value for one in found.values()] == ["2026-01-01", "010", "int8", 0.5, 0.5, "1:4"]


def test_a_section_of_compression_names_the_codec() -> None:
    with pytest.raises(
        config.RunFileError, match=r"^--set: compression\.gradients names no codec: add one, such as int8"
    ):
        config.read(None, ["compression.warmup_steps=3"])


def test_quotes_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.SET, "shard.units='a b")
    with pytest.raises(config.RunFileError, match=r"^YAFSDP_CC_SET: No closing quotation$"):
        config.read(None)


def test_an_empty_variable_is_unset_and_an_empty_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, ""):
        if value is not None:
            monkeypatch.setenv(config.CONFIG, value)
        assert config.read(None) == {}
        with pytest.raises(config.RunFileError, match=r"^'': No such file or directory; yafsdp-cc config writes"):
            config.read("")


def test_the_nearer_place_wins_setting_by_setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.yaml").write_text("shard: {zero_stage: 1, replicate: 2}\ncompression:\n  gradients: int4\n  block: 64\n")
    monkeypatch.setenv(config.CONFIG, "run.yaml")
    monkeypatch.setenv(config.SET, "shard.zero_stage=2 compression=int8")
    found = config.read(None, ["compression.overrides={'embed.*': fp32}"])
    assert {name: tuple(one) for name, one in found.items()} == {
        "shard.zero_stage": (2, "YAFSDP_CC_SET"),
        "shard.replicate": (2, "run.yaml:1"),
        "compression.gradients": ("int8", "YAFSDP_CC_SET"),
        "compression.block": (64, "run.yaml:4"),
        "compression.overrides": ({"embed.*": "fp32"}, "--set"),
    }
    assert not any(name.startswith("compression") for name in config.read(None, ["compression=null"]))


def test_defaults_are_those_of_what_settings_stand_for() -> None:
    from torch.distributed.run import get_args_parser

    torchrun = vars(get_args_parser().parse_args(["script"])) | {"master_port": None}  # torch 2.11 has 29500
    for name, one in config.LaunchSection():
        assert name == "name" or str(one) == str(torchrun[name]).replace("1:1", "1"), name
    arguments = inspect.signature(yafsdp_cc.shard).parameters
    for name, one in config.ShardSection():
        assert name in ("replicate", "cpu_offload") or one == arguments[name].default, name
    policy, section = MixedPrecisionPolicy(), dict(config.PrecisionSection())
    assert policy.cast_forward_inputs == section.pop("cast_forward_inputs")
    assert all(getattr(policy, f"{name}_dtype") is one for name, one in section.items())
    whole, theirs = config.CompressionSection(), Compression(gradients="fp32")  # a section that nobody has written
    assert all(getattr(whole, each.name) == getattr(theirs, each.name) for each in fields(Compression))
    for name in get_args(config.Codec):
        Compression(gradients=name)
    assert all(issubclass(kind_of(name), Scaled) for name in get_args(config.WeightCodec))
    assert get_args(config.Block) == BLOCKS


def test_every_comment_of_a_written_file_is_a_setting() -> None:
    text = config.to_yaml({})
    assert yaml.safe_load(text) is None
    whole = yaml.safe_load(re.sub(r"^(  )?# (?=\w+:( \S+$| \[|$))", r"\1", text, flags=re.MULTILINE))
    found = {f"{section}.{name}": value for section, inner in whole.items() for name, value in inner.items()}
    assert found.keys() == config.known().keys()
    assert not any(config.mistake_in(name, value) for name, value in found.items())


def test_the_documented_file_and_its_plan(folder: Path) -> None:
    page = (ROOT / "docs/launch.md").read_text()
    (written,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    Path("run.yaml").write_text(written)
    found = config.read("run.yaml", ["compression.gradients=int4"])
    lines = [f"  {name} = {one.value}  ({one.source})" for name, one in found.items() if "launch" not in name]
    assert "\n".join(["arguments that are no defaults", *lines, "```"]) in page


def yafsdp_cc_without_torch(*argv: str) -> subprocess.CompletedProcess[str]:
    program = """
import sys, yafsdp_cc.tools.cli as cli
try:
    sys.exit(cli.main(sys.argv[1:]))
finally:
    assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", program, *argv]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)


def test_a_new_run_file_is_read_back(folder: Path) -> None:
    written = yafsdp_cc_without_torch("config")
    assert written.returncode == 0, written.stderr
    assert list(config.read("run.yaml")) == ["launch.nproc_per_node"]
    assert Path("run.yaml").read_text().count("\n  # ") > len(config.known())  # all others are there as comments
    again = yafsdp_cc_without_torch("config")
    assert (again.returncode, again.stderr) == (
        1,
        "run.yaml is there already: name another, --out=FILE, or remove it\n",
    )


def test_forms_print_what_they_name(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.yaml").write_text("shard: {zero_stage: 2}\n")
    shown = yafsdp_cc_without_torch("config", "show", "run.yaml", "--set=compression=int8")
    assert re.search(r"^shard.zero_stage +2 +run.yaml:1$", shown.stdout, re.MULTILINE), shown.stderr
    assert re.search(r'^compression.gradients +"int8" +--set$', shown.stdout, re.MULTILINE)
    assert re.search(r"^launch.nnodes +1 +default$", shown.stdout, re.MULTILINE)
    assert cli.main(["config", "show", "--set=compression={gradients: onebit, feedback: false}"]) == 1
    assert "compression (--set): gradients='onebit' with feedback=False" in capsys.readouterr().err
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert cli.main(["config", "show", "--set=launch.nnodes=2"]) == 0
    assert re.search(r'^launch.node_rank +"1" +PET_NODE_RANK$', capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["config", "show", "run.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shard.zero_stage": [2, "run.yaml:1"]}
    assert cli.main(["config", "--default"]) == 0
    assert capsys.readouterr().out == config.to_yaml({})
    assert cli.main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"]["compression"]["anyOf"][0]["enum"] == list(get_args(config.Codec))
    assert all(one["description"] for kind in schema["$defs"].values() for one in kind["properties"].values())


@pytest.mark.parametrize("command", ["config", "launch", "env"])
def test_help_does_without_torch(command: str) -> None:
    shown = yafsdp_cc_without_torch(command, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"usage: yafsdp-cc {command}" in shown.stdout


def test_env_tells_of_torch_kernels_and_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert cli.main(["env"]) == 0
    told = capsys.readouterr().out.splitlines()
    kernels = "plain torch" if ops_for(torch.device("cpu")) is None else "native"
    assert {f"kernels on cpu: {kernels}", "GLOO_SOCKET_IFNAME: eth7"} <= set(told)
    assert f"PyTorch version: {torch.__version__}" in told


# In the ranks ---------------------------------------------------------------------------------------------------------


def left(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Leave settings as a launcher does; the source of each is its number."""
    named = {
        name.replace("__", "."): (value, f"run.yaml:{line}") for line, (name, value) in enumerate(settings.items())
    }
    monkeypatch.setenv(config.RUN, json.dumps(named))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80)) for _ in range(3)))


@ranks(2)
def test_arguments_that_the_script_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    told = {"zero_stage": 2, "mp_policy": policy, "compression": Compression("int4", residual="int8")}
    explicit = yafsdp_cc.plan_of(yafsdp_cc.shard(blocks(), **told))
    kinds = {"precision__param": "bf16", "precision__reduce": "fp32"}
    left(monkeypatch, shard__zero_stage=2, **kinds, compression__gradients="int4", compression__residual="int8")
    plan = yafsdp_cc.plan_of(yafsdp_cc.shard(blocks()))
    assert (plan.units, plan.buffers, plan.communication, plan.memory) == (
        explicit.units,
        explicit.buffers,
        explicit.communication,
        explicit.memory,
    )
    assert "  shard.zero_stage = 2  (run.yaml:0)\n  precision.param = bf16  (run.yaml:1)" in str(plan)
    assert "arguments" not in str(explicit)

    plan = yafsdp_cc.plan_of(yafsdp_cc.shard(blocks(), zero_stage=3, compression=None))
    assert plan.buffers[0].weight_buffers == 2
    assert plan.residual_bytes == 0
    assert "  zero_stage = 3  (the script)" in str(plan)
    assert "  compression.gradients = int4  (run.yaml:3, but the script passes compression)" in str(plan)


@ranks(2)
def test_replicas_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.barrier()
    left(monkeypatch, shard__replicate=2, shard__cpu_offload=True)
    model = blocks()
    for block in model:
        yafsdp_cc.fully_shard(block)
    yafsdp_cc.fully_shard(model)
    model(torch.ones(1, 80)).sum().backward()
    plan = yafsdp_cc.plan_of(model)
    assert (plan.world, plan.replicas) == (1, 2)
    assert plan.host_bytes > 0
    left(monkeypatch, shard__replicate=2, shard__sync="overlap")
    assert yafsdp_cc.plan_of(yafsdp_cc.shard(blocks())).sync_bytes
    left(monkeypatch, shard__sync="overlap")
    with pytest.raises(ValueError, match=r"or in a run file shard.replicate"):
        yafsdp_cc.shard(blocks())
    left(monkeypatch, shard__replicate=3)
    with pytest.raises(ValueError, match=r"shard.replicate=3 \(run.yaml:0\) does not divide the 2 ranks of this run"):
        yafsdp_cc.shard(blocks())


@ranks(2)
def test_settings_that_would_do_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = torch_fully_shard(blocks())
    left(monkeypatch, compression__gradients="int8")
    assert yafsdp_cc.compress(theirs).config == Compression("int8")
    left(monkeypatch, precision__param="bf16", compression__gradients="int8")
    with pytest.raises(ValueError, match=r"precision.param \(run.yaml:0\) does not reach a model of torch's"):
        yafsdp_cc.compress(torch_fully_shard(blocks()))
    left(monkeypatch, shard__zero_stage=2)
    with pytest.raises(ValueError, match=r"shard.zero_stage \(run.yaml:0\) is no argument of fully_shard\(\)"):
        yafsdp_cc.fully_shard(blocks())
    left(monkeypatch, shard__ownership="matrix")
    with pytest.raises(ValueError, match=r"shard.ownership \(run.yaml:0\) is for shard\(model\), .* on blocks"):
        yafsdp_cc.fully_shard(blocks())
    left(monkeypatch, precision__output="bf16")
    with pytest.raises(ValueError, match=r"precision.output \(run.yaml:0\) is for shard\(model\), .* on the model, or"):
        yafsdp_cc.fully_shard(blocks()[0])
    yafsdp_cc.fully_shard(blocks()[0], mp_policy=MixedPrecisionPolicy())
    assert yafsdp_cc.shard(blocks())(torch.ones(1, 80)).dtype is torch.bfloat16
    left(monkeypatch, precision__output=None)
    yafsdp_cc.fully_shard(blocks())
    left(monkeypatch, shard__ownership="matrix")
    assert yafsdp_cc.plan_of(yafsdp_cc.shard(blocks())).owners
    left(monkeypatch, shard__ownership=["*.weight"])
    assert yafsdp_cc.plan_of(yafsdp_cc.shard(blocks())).owners
    left(monkeypatch, compression__gradients="onebit", compression__feedback=False)
    with pytest.raises(ValueError, match=r"compression \(run.yaml:0, run.yaml:1\): gradients='onebit' with feedback"):
        yafsdp_cc.shard(blocks())
    monkeypatch.setenv(config.RUN, "[]")
    with pytest.raises(config.RunFileError, match="YAFSDP_CC_RUN is not what `yafsdp-cc config show --json` prints"):
        yafsdp_cc.shard(blocks())
