"""The CUDA kernels on a CPU: ``csrc/cuda``, compiled with an emulator in the place of CUDA (``simt.h``).

What runs is the very source that nvcc compiles, operators included, on CPU tensors. It is built once for each state of
the source, into ``build``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]
_KERNELS = _ROOT / "csrc" / "cuda"
_TORCH = Path(torch.__file__).parent

_FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",  # which takes a jump to another stack for an attack
    # A shift too far, an index out of an array, 16 bytes at an odd address: ends the process, without a library.
    "-fsanitize=shift,bounds,alignment,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    f'-DYAFSDP_CC_SIMT="{_HERE / "simt.h"}"',
    f"-I{_TORCH / 'include'}",
    f"-I{_TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
)


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++")


def emulated_ops() -> Any:
    """The operators of ``csrc/cuda``, emulated.

    Raises:
        RuntimeError: they do not compile.
    """
    library = _build()
    torch.ops.load_library(str(library))
    return torch.ops.yafsdp_cc_simt


def _build() -> Path:
    sources = [*sorted(_KERNELS.glob("*.cu")), _KERNELS / "ops.cpp", *sorted(_HERE.glob("*.cpp"))]
    headers = [*_KERNELS.rglob("*.cuh"), *_KERNELS.rglob("*.h"), *_HERE.glob("*.h")]
    state = hashlib.sha256(" ".join((torch.__version__, str(compiler()), *_FLAGS)).encode())
    for path in sorted([*sources, *headers]):
        state.update(path.read_bytes())
    folder = _ROOT / "build" / f"simt-{state.hexdigest()[:16]}"
    library = folder / "simt.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    objects = [folder / f"{path.stem}.{os.getpid()}.o" for path in sources]
    running = [
        subprocess.Popen(
            [str(compiler()), *_FLAGS, "-x", "c++", "-c", str(source), "-o", str(built)], stderr=subprocess.PIPE
        )
        for source, built in zip(sources, objects, strict=True)
    ]
    _ended(running)
    fresh = folder / f"simt.{os.getpid()}.so"
    libraries = _TORCH / "lib"
    link = [str(compiler()), "-shared", *map(str, objects), "-o", str(fresh), f"-L{libraries}", "-ltorch_cpu", "-lc10"]
    _ended([subprocess.Popen([*link, f"-Wl,-rpath,{libraries}"], stderr=subprocess.PIPE)])
    fresh.rename(library)
    for built in objects:
        built.unlink()
    return library


def _ended(running: list[subprocess.Popen[bytes]]) -> None:
    said = [one.communicate()[1].decode() for one in running]
    if any(one.returncode for one in running):
        raise RuntimeError("\n".join(text for one, text in zip(running, said, strict=True) if one.returncode))
