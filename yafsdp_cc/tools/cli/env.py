"""``yafsdp-cc env``: versions, kernels, hardware and variables, in one block for a report of a problem."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("yafsdp_cc", "torch", "pydantic", "nvtx", "numpy", "triton", "accelerate", "transformers", "lightning")
PREFIXES = ("YAFSDP_", "NCCL_", "TORCH", "PYTORCH_", "GLOO_", "OMP_", "MKL_", "KMP_", "CUDA_", "PET_", "SLURM_STEP_")
INSTRUCTIONS = ("avx2", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "sve")


def main(argv: list[str]) -> int:
    """Print the block; return 0."""
    about = "Describes this machine and installation for a report of a problem. Without --full, torch is not loaded."
    parser = argparse.ArgumentParser(prog="yafsdp-cc env", description=about, allow_abbrev=False)
    full = "load torch too: what it was built with, its backends and GPUs, the kernels that run here; takes seconds"
    parser.add_argument("--full", action="store_true", help=full)
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(argv)
    found = {name: value for name, value in (*_installed(), *_machine()) if value}
    if asked.full:
        found |= _loaded()
    found |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        width = max(map(len, found))
        for name, value in found.items():
            print(f"{name:<{width}}  {value}".replace("\n", "\n" + " " * (width + 2)))
    return 0


def _installed() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed" if package in ("yafsdp_cc", "torch") else ""
    yield "python", f"{platform.python_version()} {sys.executable}"
    yield "package", str(Path(__file__).parents[2])
    try:
        text = Path(str(distribution("torch").locate_file("torch/version.py"))).read_text()
        for name, what in (("cuda", "torch's CUDA"), ("hip", "torch's ROCm"), ("git_version", "torch's commit")):
            built = re.search(rf"^{name}\b.*= '(.+)'", text, re.MULTILINE)
            yield what, built[1] if built else ("none" if name == "cuda" else "")
    except (PackageNotFoundError, OSError):
        pass
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            yield "NCCL", f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    yield "native kernels", _native()
    yield "c++", _output("c++", "--version").partition("\n")[0]
    yield "nvcc", _output("nvcc", "--version").rpartition("\n")[2]


def _native() -> str:
    library = Path(__file__).parents[2] / "compression" / "_native.so"
    if not library.is_file():
        return "not built: gradients are encoded by plain torch; pip install --no-build-isolation -e . builds them"
    data = library.read_bytes()
    levels = [name for name in ("avx512", "avx2", "sse2", "neon", "scalar") if name.encode() in data]
    gpus = sorted({int(number) for number in re.findall(rb"sm_(\d+)", data)})
    built = time.strftime("%Y-%m-%d %H:%M", time.localtime(library.stat().st_mtime))
    on_gpus = ", ".join(f"sm_{number}" for number in gpus) or ("CUDA" if b".nv_fatbin" in data else "no CUDA")
    return f"{', '.join(levels)}; {on_gpus}; {len(data):,} bytes of {built}"


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", f"{platform.platform()}"
    cpu = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", cpu, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", cpu, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    yield "processor", f"{model[1] if model else platform.machine()} ({', '.join(sorted(known & set(INSTRUCTIONS)))})"
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    memory = dict(re.findall(r"^(MemTotal|MemAvailable): +(\d+) kB", _read("/proc/meminfo"), re.MULTILINE))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    bound = f", limited to {int(limit) / 2**30:.1f}" if limit.isdigit() else ""
    if memory:
        total, free = (int(memory[name]) / 2**20 for name in ("MemTotal", "MemAvailable"))
        yield "memory", f"{total:.1f} GiB, {free:.1f} available{bound}"
    if Path("/dev/shm").is_dir():
        yield "shared memory", f"{shutil.disk_usage('/dev/shm').total / 2**30:.1f} GiB in /dev/shm"
    driver = re.search(r"Kernel Module .*?(\d+\.[\d.]+)", _read("/proc/driver/nvidia/version"))
    yield "NVIDIA driver", driver[1] if driver else ""
    cards = [_read(path) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    yield "GPUs", ", ".join(re.findall(r"Model:\s*(.*)", "\n".join(cards))) or "none"
    links = []
    for link in sorted(Path("/sys/class/net").glob("*")):
        if link.name != "lo" and _read(link / "operstate").strip() != "down":
            speed = _read(link / "speed").strip()
            links.append(f"{link.name} {speed} Mbit/s" if speed.isdigit() else link.name)
    yield "interfaces", ", ".join(links)
    yield "InfiniBand", ", ".join(sorted(path.name for path in Path("/sys/class/infiniband").glob("*")))


def _loaded() -> dict[str, str]:
    """Return versions that torch reports after loading libraries."""
    import torch
    import torch.distributed as dist

    from yafsdp_cc.compression.error_feedback import ops_for

    found = {"threads": f"{torch.get_num_threads()} and {torch.get_num_interop_threads()} between operators"}
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "ucc": dist.is_ucc_available}
    found["backends"] = ", ".join(name for name, available in backends.items() if available())
    devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    for device in devices:
        try:
            runs = ops_for(torch.device(device)) is not None
            found[f"kernels on {device}"] = "native" if runs else "plain torch"
        except (RuntimeError, ValueError) as error:
            found[f"kernels on {device}"] = str(error)
    for device in devices[1:]:
        one = torch.cuda.get_device_properties(device)
        found[device] = f"{one.name}, {one.total_memory / 2**30:.1f} GiB, capability {one.major}.{one.minor}"
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["NCCL in use"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["GPU links"] = _output("nvidia-smi", "topo", "-m")
    found["torch's build"] = torch.__config__.show().strip()
    return found


def _output(*command: str) -> str:
    """Return the output of a program; "" if it does not exist or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
