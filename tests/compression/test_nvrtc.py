"""The CUDA kernels, compiled by the real NVRTC, which needs no GPU.

Its library comes with a torch that has CUDA, and as the package nvidia-cuda-nvrtc; elsewhere ``LD_LIBRARY_PATH`` tells
where it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kernel_resources import compiled, library, rows, used_of
from tests.compression import simt
from tests.soak import SOAK, also

FEW = [
    "encode_kernel<Float<true>, 4, false>",  # asks for every conversion of small floats
    "encode_kernel<Odd<3, true>, 1, false>",
    "decode_kernel<TernaryReader, 4, 5, 8>",
    "decode_topk_kernel",
    "update_kernel",
    "lamb_kernel",
]
pytestmark = [
    pytest.mark.skipif(library() is None, reason="no libnvrtc beside torch or in LD_LIBRARY_PATH"),
    pytest.mark.skipif(simt.compiler() is None, reason="no g++"),
    pytest.mark.timeout(1800),
]


def kinds_of(names: list[str]) -> list[list[str]]:
    """Part kernels by the kind of job that they take."""
    return [[name for name in names if name.startswith(kind)] for kind in ("encode", "decode", "update", "lamb")]


@pytest.mark.parametrize("architecture", ["compute_80", "sm_90"])
def test_it_compiles_without_headers(architecture: str) -> None:
    for names in kinds_of(FEW):
        compiled(names, architecture)


def check_registers(names: list[str], number: int, known: str = "") -> None:
    said, _ = compiled(names, f"sm_{number}", known)
    found = used_of(said)
    assert len(found) == len(names)
    for name, used in found.items():
        print(f"sm_{number} {name}: {used.registers} registers, {used.spilt} bytes spilt; {known}")
        assert used.spilt <= 64, f"{name}; {known}"


@pytest.mark.parametrize("number", [also(number) for number in (80, 86, 89, 90, 100, 120)])
def test_every_kernel_fits_into_registers(number: int) -> None:
    encode, *others = kinds_of(simt.emulated_ops().kernels())
    # That of topk is always compiled for dtypes.
    for names in ([name for name in encode if "topk" not in name], *others):
        check_registers(names, number)


@pytest.mark.parametrize("number", [90, also(80), also(120)])
def test_kernels_of_aligned_tensors_fit_into_registers(number: int) -> None:
    few = {"OneBit", "Whole<8, false>", "WholeReader<8>", "topk"}
    chosen = rows() if SOAK else [row for row in rows() if any(name in row.name for name in few)]
    for row in chosen:
        check_registers([row.name], number, row.known)


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
