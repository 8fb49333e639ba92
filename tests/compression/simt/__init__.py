"""The CUDA kernels on a CPU: ``csrc/cuda``, compiled with an emulator in the place of CUDA (``simt.h``).

What runs is the very source that NVRTC compiles, and operators and launches included, on CPU tensors: NVRTC and the
driver are emulated as well (``cuda.cpp``). It is built once for each state of the source, into ``build``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]
KERNELS = _ROOT / "csrc" / "cuda"
_TORCH = Path(torch.__file__).parent

_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",  # which takes a jump to another stack for an attack
    # A shift too far, an index out of an array, 16 bytes at an odd address: check.cpp has what is called then.
    "-fsanitize=shift,bounds,alignment,signed-integer-overflow",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    f'-DYAFSDP_CC_SIMT="{_HERE / "simt.h"}"',
    f"-I{_TORCH / 'include'}",
    f"-I{_TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
)
_FAST = ("check.cpp", "simt.cpp")
"""What runs at each access and each turn of a thread; the rest takes longer to optimize than it runs."""
_KERNEL_FLAGS = (
    "-O1",
    "-fsanitize=thread",  # calls check.cpp at every load and store
    "-ftrivial-auto-var-init=pattern",
)


class _Extent(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_size_t), ("end", ctypes.c_size_t), ("writable", ctypes.c_bool))


class Emulated:
    """The emulated operators, each allowed the elements of its tensors and no byte more."""

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self.library = ctypes.CDLL(str(library))
        self.library.simt_launched.restype = self.library.yafsdp_cc_cuda_lacks.restype = ctypes.c_char_p
        lacks = self.library.yafsdp_cc_cuda_lacks(os.environ.get("YAFSDP_SIMT_CUDA", str(library)).encode(), -1)
        assert lacks is None, lacks

    def seed(self, seed: int) -> None:
        """Draw the order of threads and thread blocks, and the number of thread blocks, anew."""
        self.library.simt_seed(seed)

    def launched(self) -> list[str]:
        """Return of the last launch: kernel, thread blocks, threads, stream, contexts left over, compiler's option."""
        return str(self.library.simt_launched().decode()).split("|")

    def kernels(self) -> list[str]:
        """Return the names of all kernels there are."""
        name = self.library.simt_kernel_name
        name.restype = ctypes.c_char_p
        found = []
        while (each := name(len(found))) is not None:
            found.append(str(each.decode()))
        return found

    def __getattr__(self, name: str) -> Callable[..., None]:
        operator = getattr(torch.ops.yafsdp_cc_simt, name).default

        def call(*values: Any) -> None:
            arguments = zip(operator._schema.arguments, values, strict=True)
            self._allow((value, a.alias_info is not None and a.alias_info.is_write) for a, value in arguments)
            operator(*values)

        return call

    def defect(self, number: int, numbers: torch.Tensor, out: torch.Tensor) -> str | None:
        """Run a kernel of ``defects.cu``; return what the emulator finds."""
        self._allow(((numbers, False), (out, True)))
        run = self.library.simt_defect
        run.restype, run.argtypes = ctypes.c_char_p, (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
        found = run(number, numbers.data_ptr(), out.data_ptr(), len(numbers))
        return None if found is None else str(found.decode())

    def _allow(self, values: Iterable[tuple[Any, bool]]) -> None:
        extents = []
        for value, writable in values:
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    extents += [_Extent(*row, writable) for row in _rows(tensor)]
        self.library.simt_allow((_Extent * len(extents))(*extents), len(extents))


def _rows(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the first address of each row of a matrix, and the one behind its last; others are contiguous."""
    rows = tensor if tensor.dim() == 2 else tensor.view(1, -1)
    size = tensor.element_size()
    begins = [tensor.data_ptr() + row * rows.stride(0) * size for row in range(rows.shape[0])]
    return [(begin, begin + rows.shape[1] * size) for begin in begins]


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++")


@cache
def emulated_ops(kernels: Path = KERNELS) -> Emulated:
    """The operators of ``csrc/cuda``, or of a changed copy, emulated. A process can load them once.

    Raises:
        RuntimeError: they do not compile.
    """
    return Emulated(build(kernels))


def sources_of(kernels: Path) -> str:
    """Return the kernels' source as ``setup.py`` puts it into the extension."""
    with mock.patch("setuptools.setup"):
        return str(runpy.run_path(str(_ROOT / "setup.py"))["cuda_sources"](kernels))


def build(kernels: Path) -> Path:
    """Return the library of ``emulated_ops``, which is NVRTC and the driver as well: those for its own kernels."""
    sources = [*sorted(kernels.glob("*.cpp")), *sorted(_HERE.glob("*.c*"))]
    headers = [*kernels.rglob("*.cu*"), *kernels.rglob("*.h"), *_HERE.glob("*.h")]
    state = hashlib.sha256(" ".join((torch.__version__, str(compiler()), *_FLAGS, *_KERNEL_FLAGS)).encode())
    for path in sorted([*sources, *headers]):
        state.update(path.read_bytes())
    folder = _ROOT / "build" / f"simt-{state.hexdigest()[:16]}"
    library = folder / "simt.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    sources_inc = folder / f"{os.getpid()}.inc"
    sources_inc.write_text(sources_of(kernels))
    sources_inc.rename(folder / "sources.inc")
    objects = [folder / f"{path.stem}.{os.getpid()}.o" for path in sources]
    running = [
        subprocess.Popen(
            [
                *(str(compiler()), *_FLAGS, *_flags_of(source)),
                *(f"-I{kernels}", f"-I{folder}", "-x", "c++", "-c", str(source), "-o", str(built)),
            ],
            stderr=subprocess.PIPE,
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


def _flags_of(source: Path) -> tuple[str, ...]:
    return _KERNEL_FLAGS if source.suffix == ".cu" else ("-O2" if source.name in _FAST else "-O0",)


def _ended(running: list[subprocess.Popen[bytes]]) -> None:
    said = [one.communicate()[1].decode() for one in running]
    if any(one.returncode for one in running):
        raise RuntimeError("\n".join(text for one, text in zip(running, said, strict=True) if one.returncode))
