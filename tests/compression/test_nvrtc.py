"""The CUDA kernels, compiled by the real NVRTC, which needs no GPU.

Its library comes with a torch that has CUDA, and as the package nvidia-cuda-nvrtc; elsewhere ``LD_LIBRARY_PATH`` tells
where it is.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.compression import simt
from tests.soak import also

FEW = [
    "encode_kernel<Float<true>, 4, false>",  # asks for every conversion of small floats
    "encode_kernel<Odd<3, true>, 1, false>",
    "decode_kernel<TernaryReader, 4, 5>",
    "decode_topk_kernel",
    "update_kernel",
    "lamb_kernel",
]
FILES = {
    path.relative_to(simt.KERNELS): path.read_bytes()
    for path in simt.KERNELS.rglob("*")
    if path.suffix in {".cu", ".cuh", ".h"}
}


@cache
def library() -> Path | None:
    """Return where libnvrtc is."""
    beside_torch = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*"), reverse=True)
    named = [Path(folder, f"libnvrtc.so.{version}") for folder in folders() for version in (13, 12)]
    return next((path for path in (*beside_torch, *named) if path.exists()), None)


def folders() -> list[str]:
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


pytestmark = [
    pytest.mark.skipif(library() is None, reason="no libnvrtc beside torch or in LD_LIBRARY_PATH"),
    pytest.mark.skipif(simt.compiler() is None, reason="no g++"),
    pytest.mark.timeout(1800),
]


@cache
def nvrtc() -> ctypes.CDLL:
    path = library()
    assert path is not None
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # which NVRTC looks for by its name alone
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(path))


def compiled(names: list[str], architecture: str) -> str:
    """Compile these kernels to machine code (``sm_``) or PTX (``compute_``); return what the compiler says."""
    compiler, program, count = nvrtc(), ctypes.c_void_p(), len(FILES)
    kernels = "encode.cuh", "decode.cuh", "codecs/topk.cuh", "update.cu", "lamb.cu"
    source = "".join(f'#include "{name}"\n' for name in kernels)
    texts, files = (
        (ctypes.c_char_p * count)(*each) for each in (FILES.values(), (str(name).encode() for name in FILES))
    )
    source += "using namespace yafsdp_cc;\n"
    assert not compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"all.cu", count, texts, files)
    try:
        for name in names:
            assert not compiler.nvrtcAddNameExpression(program, name.encode())
        flags = [b"--std=c++17", b"--fmad=false", b"-default-device", f"-arch={architecture}".encode()]
        if architecture.startswith("sm"):
            flags.append(b"--ptxas-options=-v")
        failed = compiler.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        size = ctypes.c_size_t()
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        assert not failed, log.value.decode()
        return log.value.decode()
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


@pytest.mark.parametrize("architecture", ["compute_80", "sm_90"])
def test_it_compiles_without_headers(architecture: str) -> None:
    compiled(FEW, architecture)


@pytest.mark.parametrize("number", [also(number) for number in (80, 86, 89, 90, 100, 120)])
def test_every_kernel_fits_into_registers(number: int) -> None:
    names = simt.emulated_ops().kernels()
    said = compiled(names, f"sm_{number}")
    found = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", said, re.S)
    assert len(found) == len(names)
    for name, spilt, registers in found:
        print(f"sm_{number} {name}: {registers} registers, {spilt} bytes spilt")
        # Known: that of topk with blocks above 256 spills 248 and 260 bytes on the architectures from 10.0 on.
        known = number >= 100 and "encode_topk_kernelILi4ELb1E" in name
        assert int(spilt) <= (260 if known else 64), name


def test_the_driver_finds_what_nvrtc_has_made(tmp_path: Path) -> None:
    """From the operators to the kernels' results, with machine code between: only the GPU is emulated."""
    path = library()
    assert path is not None
    both = tmp_path / "libcaffe2_nvrtc.so"
    link = [str(simt.compiler()), "-shared", "-o", str(both), "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]
    places = [f"-Wl,-rpath,{path.parent}", "-Wl,--disable-new-dtags"]  # as torch's: for what NVRTC opens, too
    built = subprocess.run(
        [*link, *places, str(path), str(simt.build(simt.KERNELS))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    chosen = "(test_decode or awkward) and (int8 or topk) and usual"
    # Operators are registered once for each process, and open NVRTC once.
    emulated = str(Path(__file__).with_name("test_cuda_emulated.py"))
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", chosen, emulated],
        env=os.environ | {"YAFSDP_SOAK": "", "YAFSDP_SIMT_CUDA": str(both)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout
