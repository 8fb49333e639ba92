"""The native decoders read random and damaged messages without leaving their memory or undefined behaviour."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from tests.compression.simt import compiler
from tests.soak import SOAK, also

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("decode_fuzz.cpp")
KERNELS = ROOT / "csrc" / "cpu" / "level.cpp"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g1",  # lines, for what is reported
    "-ffp-contract=off",
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
    f"-I{ROOT / 'csrc'}",
    f"-isystem{Path(torch.__file__).parent / 'include'}",
]
LEVELS = {"scalar": [], "avx2": ["-mavx2", "-mbmi"], "avx512": [f"-mavx512{part}" for part in ("f", "dq", "bw", "vl")]}


def has(level: str) -> bool:
    """Whether this machine runs what is compiled for ``level``."""
    info = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else ""
    return all(flag[2:] in info for flag in LEVELS[level] if flag != "-mbmi")


def built(level: str, flags: list[str]) -> Path:
    """The driver with the kernels of one instruction set; compiled once for each state of the source."""
    command = [str(compiler()), *FLAGS, *flags, f"-DYAFSDP_CC_LEVEL={level}", str(DRIVER), str(KERNELS)]
    sources = sorted([DRIVER, *(ROOT / "csrc" / "cpu").rglob("*.*")])
    state = hashlib.sha256(b"".join([torch.__version__.encode(), repr(command).encode()]))
    for source in sources:
        state.update(source.read_bytes())
    program = ROOT / "build" / f"decode-fuzz-{state.hexdigest()[:16]}"
    if not program.exists():
        program.parent.mkdir(exist_ok=True)
        fresh = program.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(fresh)], check=True, capture_output=True)
        fresh.rename(program)
    return program


@pytest.mark.timeout(1800)  # it compiles
@pytest.mark.skipif(compiler() is None, reason="no g++")
@pytest.mark.parametrize("level", ["scalar", also("avx2"), also("avx512")])
def test_no_message_makes_a_decoder_leave_its_memory(level: str) -> None:
    if not has(level):  # its instructions would end the driver; "scalar" runs on every machine
        pytest.skip(f"no {level} on this machine")
    count = 10_000_000 if SOAK else 50_000
    ran = subprocess.run([built(level, LEVELS[level]), str(count), "1"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[:4000]
    assert ran.stdout == "decoded\n"
