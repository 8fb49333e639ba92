"""``yafsdp-cc env``: versions, hardware, kernels and variables, for a report of a problem."""

from __future__ import annotations

import argparse
import os
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("yafsdp_cc", "pydantic", "nvtx", "safetensors", "transformers", "accelerate", "peft", "trl", "deepspeed")
PREFIXES = ("YAFSDP_", "NCCL_", "TORCH", "PYTORCH_", "GLOO_", "OMP_", "MKL_", "KMP_", "CUDA_", "PET_", "SLURM_STEP_")


def main(argv: list[str]) -> int:
    """Print a report of this machine and installation; return 0."""
    about = "Describes this machine and installation for a report of a problem: torch.utils.collect_env, and more."
    argparse.ArgumentParser(prog="yafsdp-cc env", description=about, allow_abbrev=False).parse_args(argv)

    import torch  # torch is imported only after the flags are checked, as that takes seconds
    from torch.utils.collect_env import get_pretty_env_info, run

    from yafsdp_cc.compression.error_feedback import ops_for

    found = {"package": str(Path(__file__).parents[2])}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    for device in ("cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))):
        try:
            found[f"kernels on {device}"] = "plain torch" if ops_for(torch.device(device)) is None else "native"
        except (RuntimeError, ValueError) as error:
            found[f"kernels on {device}"] = str(error)
    found["cores"] = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    limit = Path("/sys/fs/cgroup/memory.max")
    found["memory limit"] = limit.read_text().strip() if limit.exists() else "none"
    if Path("/dev/shm").is_dir():
        found["shared memory"] = f"{shutil.disk_usage('/dev/shm').total / 2**30:.1f} GiB in /dev/shm"
    found |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    print(*(f"{name}: {value}" for name, value in found.items()), "", get_pretty_env_info(), sep="\n")
    if torch.cuda.is_available():
        print(run("nvidia-smi topo -m")[1])
    return 0
