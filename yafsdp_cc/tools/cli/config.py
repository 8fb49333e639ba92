"""``yafsdp-cc config``: ask for the settings of a run, show them, check them, or take them from Accelerate's file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ASKED = (
    ("launch.nproc_per_node", "Ranks on each machine"),
    ("launch.nnodes", "Machines"),
    ("launch.master_addr", "Machine 0"),
    ("launch.master_port", "Port on machine 0"),
    ("precision.param", "Precision of the computation"),
    ("shard.zero_stage", "ZeRO stage"),
    ("shard.replicate", "Replicas of the sharded model"),
    ("compression.gradients", "Compression of gradients; fp32 for none"),
    ("launch.log_dir", "Folder for logs"),
)
"""Settings that are asked for, in order; the schema has the description of each."""


def main(argv: list[str]) -> int:
    """Run one of the forms; return 0, or 1 with everything that is wrong on stderr."""
    parser = _parser()
    asked = parser.parse_args(argv)

    # only after the flags are checked: it takes seconds
    from yafsdp_cc.config import RunFileError, read, schema, to_environment, to_yaml

    try:
        if asked.form == "schema":
            print(json.dumps(schema(), indent=2))
        elif asked.form == "show":
            settings = _with_torchrun(read(asked.file, asked.set))
            print(to_environment(settings) if asked.json else _table(settings))
        elif asked.form == "import":
            _check_new(asked.out)
            _write(asked.out, to_yaml(_imported(asked.file)))
        elif asked.default:
            print(to_yaml({}), end="")
        else:
            _check_new(asked.out)
            _write(asked.out, to_yaml(_answers()))
    except BrokenPipeError:
        raise
    except (RunFileError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except EOFError:
        print("\nno more answers: nothing is written; --default prints a file without asking", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    about = "Asks for the settings that matter and writes them as YAML, for yafsdp-cc launch --config FILE script.py."
    parser = argparse.ArgumentParser(prog="yafsdp-cc config", description=about, allow_abbrev=False)
    parser.add_argument("--out", default="run.yaml", metavar="FILE", help="where to write (%(default)s)")
    parser.add_argument("--default", action="store_true", help="print all settings with their defaults instead")
    forms = parser.add_subparsers(dest="form", title="other forms", metavar="FORM")
    show = forms.add_parser("show", help="check a run file, and print its settings and where each is from")
    show.add_argument("file", nargs="?", help="a run file (the one that YAFSDP_CC_CONFIG names)")
    show.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="as of yafsdp-cc launch")
    value = "print what YAFSDP_CC_RUN takes instead, for ranks that another launcher starts"
    show.add_argument("--json", action="store_true", help=value)
    forms.add_parser("schema", help="print the JSON schema of run files, for editors")
    imported = forms.add_parser("import", help="make a run file from Accelerate's YAML")
    imported.add_argument("file", help="as `accelerate config` has written it")
    imported.add_argument("--out", default="run.yaml", metavar="FILE", help="where to write (%(default)s)")
    return parser


def _check_new(out: str) -> None:
    if Path(out).exists():
        raise FileExistsError(f"{out} is there already: name another, --out=FILE, or remove it")


def _write(out: str, text: str) -> None:
    with open(out, "x", encoding="utf-8") as file:
        file.write(text)
    print(f"{out} is written; yafsdp-cc launch --config {out} script.py takes it")


def _with_torchrun(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add settings that torchrun's own variables make, with a precedence just below ``--set``."""
    from yafsdp_cc.config import Setting, known

    variables = {name: f"PET_{name.partition('.')[2].upper()}" for name in known() if name.startswith("launch.")}
    from_torchrun = {
        name: Setting(os.environ[variable], variable)
        for name, variable in variables.items()
        if variable in os.environ and (name not in settings or settings[name].source != "--set")
    }
    return {**settings, **from_torchrun}


def _table(settings: Mapping[str, Any]) -> str:
    from yafsdp_cc.config import known

    rows = []
    for name, one in known().items():
        value, source = settings.get(name, (one.get("default", {}), "default"))
        rows.append((name, json.dumps(value), source))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows)


# Questions ------------------------------------------------------------------------------------------------------------


def _answers() -> dict[str, Any]:
    """Ask for settings until each answer is valid; return those that are not defaults."""
    import yaml

    from yafsdp_cc.config import allowed, known, mistake_in, summary

    defaults = {name: known()[name].get("default") for name, _ in ASKED}
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    proposed = {**defaults, "launch.nproc_per_node": gpus or 2}
    answers: dict[str, Any] = {}
    for name, question in ASKED:
        if name.startswith("launch.master") and "launch.nnodes" not in answers:
            continue
        one = known()[name]
        print(f"\n{question}: {allowed(one)}.\n  {summary(one)}")
        while True:
            text = input(f"{name} [{'null' if proposed[name] is None else proposed[name]}]: ").strip()
            try:
                value = yaml.safe_load(text) if text else proposed[name]
            except yaml.YAMLError:
                value = text
            wrong = mistake_in(name, value)
            if not wrong:
                break
            print(wrong)
        if value != defaults[name]:
            answers[name] = value
    return answers


# Accelerate -----------------------------------------------------------------------------------------------------------

_NOT_OURS = {
    "compute_environment": "",
    "dynamo_config": "torch.compile in the script",
    "debug": "the launcher tells of failures without it",
    "distributed_type": "",
    "downcast_bf16": "for TPUs",
    "enable_cpu_affinity": "--numa-binding of yafsdp-cc launch does it",
    "fsdp_activation_checkpointing": "torch.utils.checkpoint in the script, with use_reentrant=False",
    "fsdp_auto_wrap_policy": "",
    "fsdp_backward_prefetch": "weights are always prefetched",
    "fsdp_cpu_ram_efficient_loading": "shard() takes models on the meta device, with param_init_fn",
    "fsdp_forward_prefetch": "weights are always prefetched",
    "fsdp_min_num_params": "units are named by classes or patterns, not by size",
    "fsdp_state_dict_type": "yafsdp_cc.save and yafsdp_cc.save_safetensors, each for one of the two",
    "fsdp_use_orig_params": "parameters are always those of the model",
    "fsdp_version": "",
    "gradient_accumulation_steps": "several backwards before a step, in the script",
    "gradient_clipping": "torch.nn.utils.clip_grad_norm_ in the script",
    "gpu_ids": "set CUDA_VISIBLE_DEVICES",
    "main_training_function": "",
    "same_network": "",
    "use_cpu": 'CPUs are used where there is no GPU; CUDA_VISIBLE_DEVICES="" hides them',
}
"""Keys without a counterpart, and why; those without a reason are left out silently."""
_STAGES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
    "1": 3,
    "2": 2,
    "4": 3,
    "5": 2,
}
_KINDS = ("NO", "FSDP", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "DEEPSPEED")


def _imported(path: str) -> dict[str, Any]:
    """Convert the settings of Accelerate's file that have a counterpart; name those that have none."""
    import yaml

    from yafsdp_cc.config import RunFileError

    try:
        theirs = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunFileError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(theirs, dict) or "distributed_type" not in theirs:
        raise RunFileError(f"{path}: `accelerate config` has not written this; it has no distributed_type")
    if str(theirs["distributed_type"]) not in _KINDS:
        raise RunFileError(f"{path}: distributed_type {theirs['distributed_type']} has no counterpart here")
    try:
        return _Import(theirs).settings
    except (TypeError, ValueError, AttributeError) as error:
        raise RunFileError(f"{path}: a value is not of the kind that Accelerate writes: {error}") from None


class _Import:
    """Converts Accelerate's settings one by one."""

    def __init__(self, theirs: dict[str, Any]) -> None:
        self.settings: dict[str, Any] = {}
        nested = ("fsdp_config", "deepspeed_config", "parallelism_config")
        self._left = {name: value for name, value in theirs.items() if name not in nested}
        for section in nested:
            self._left.update(theirs.get(section) or {})
        self._ranks()
        self._sharding()
        for name, value in self._left.items():
            reason = _NOT_OURS.get(name, "has no counterpart here")
            if reason and value not in (None, False, "", "no", {}, [], "all"):
                print(f"left out: {name}: {value}  ({reason})", file=sys.stderr)

    def _take(self, name: str, default: Any = None) -> Any:
        value = self._left.pop(name, default)
        return default if value is None else value

    def _ranks(self) -> None:
        machines, ranks = int(self._take("num_machines", 1)), int(self._take("num_processes", 1))
        self._set("launch.nproc_per_node", ranks // machines if ranks > 0 else "auto", 1)
        self._set("launch.nnodes", machines, 1)
        if ranks % machines:
            raise ValueError(f"num_processes: {ranks} is no multiple of num_machines: {machines}")
        if self._take("machine_rank", 0):
            print("left out: machine_rank  (each machine has its own: --node-rank)", file=sys.stderr)
        address, port = self._take("main_process_ip", ""), self._take("main_process_port")
        if self._take("rdzv_backend", "static") == "c10d":
            self._set("launch.rdzv_backend", "c10d", "static")
            self._set("launch.rdzv_endpoint", f"{address}:{port or 29500}" if address else "", "")
        else:
            self._set("launch.master_addr", address, "")
            self._set("launch.master_port", port and int(port), None)

    def _sharding(self) -> None:
        precision = self._take("mixed_precision", "no")
        if precision in ("bf16", "fp16"):
            self.settings |= {"precision.param": precision, "precision.reduce": "fp32"}
        elif precision != "no":
            print(f"left out: mixed_precision: {precision}  (bf16 and fp16 are known here)", file=sys.stderr)
        strategy = str(self._take("fsdp_sharding_strategy", "FULL_SHARD"))
        reshard = str(self._take("fsdp_reshard_after_forward", True))
        if reshard.isupper():  # older name of a sharding strategy
            strategy = reshard
        stage = int(self._take("zero_stage", _STAGES.get(strategy, 3)))
        if strategy in ("NO_SHARD", "3") or stage == 0:
            print("left out: no sharding at all  (that is torch's DistributedDataParallel)", file=sys.stderr)
            stage = 1
        self._set("shard.zero_stage", stage, 3)
        if reshard in ("false", "False"):
            self._set("shard.reshard_after_forward", False, None)
        replicas = self._take("parallelism_config_dp_replicate_size", 1)
        hybrid = strategy.startswith("HYBRID") or strategy in ("4", "5")
        self._set("shard.replicate", self.settings.get("launch.nnodes", 1) if hybrid else int(replicas), 1)
        self._take("parallelism_config_dp_shard_size")
        units = [name.strip() for name in str(self._take("fsdp_transformer_layer_cls_to_wrap", "")).split(",")]
        self._set("shard.units", units, [""])
        offloads = [self._take("fsdp_offload_params", False), self._take("offload_param_device", "none") == "cpu"]
        offloads.append(self._take("offload_optimizer_device", "none") == "cpu")
        self._set("shard.cpu_offload", any(each in (True, "true", "True") for each in offloads), False)
        sync = self._take("fsdp_sync_module_states", False)
        self._set("shard.sync_module_states", sync in (True, "true", "True"), False)

    def _set(self, name: str, value: Any, default: Any) -> None:
        if value != default:
            self.settings[name] = value
