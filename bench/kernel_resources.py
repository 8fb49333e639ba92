"""What the CUDA kernels take of a multiprocessor, told by the compiler. No GPU is needed.

    python bench/kernel_resources.py                       # half a minute of one core
    python bench/kernel_resources.py --sources OTHER/csrc/cuda --architecture sm_80

NVRTC comes with a torch that has CUDA, and as the package nvidia-cuda-nvrtc (elsewhere ``LD_LIBRARY_PATH`` tells
where it is); nvdisasm, which shows the machine code, comes with Triton. Each kernel is compiled for blocks of 256
elements and the dtypes of its row, as ``csrc/cuda/launch.cpp`` has it compiled where tensors are aligned.

*kB under way* are the bytes that all resident threads of a multiprocessor have loaded before they use the first.
*Instructions* are those of the loop's body for each element of a thread; of topk, of the loop for candidates, raised
bounds included, and of the one for what is left. *Of a copy* is reckoned, for an H100 on 99 and on all 132
multiprocessors: what a copy of as many bytes takes (``COPY``), over the longest of that, of the loads (half of the
threads wait for them at a time, ``LATENCY`` long) and of the instructions (``ISSUED`` of the peak). It is a bound to
think with, not a measurement.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import cell
from yafsdp_cc.table import table

SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
COPY, LATENCY, CLOCK, ISSUED = 3.0e12, 700e-9, 1.755e9, 0.8
"""Bytes a second that a copy on an H100 reads and writes; seconds until a load is there; Hz; share of the peak."""
REGISTERS, WARPS, BLOCKS, SHARED = 65536, 64, 32, 228 << 10
"""Of a multiprocessor of compute capability 9.0."""
L2 = 50 << 20
TILE = 65536
DTYPES = {"none": 0, "fp32": 1, "bf16": 2, "fp16": 3, "int8": 4}
BYTES = {"none": 0.0, "fp32": 4.0, "bf16": 2.0, "int8": 1.0}
FILES = {
    "encode_kernel": "encode.cuh",
    "encode_topk_kernel": "codecs/topk.cuh",
    "decode_kernel": "decode.cuh",
    "decode_topk_kernel": "codecs/topk_decode.cuh",
    "update_kernel": "update.cu",
    "lamb_kernel": "lamb.cu",
}
"""Which file a kernel is in."""


@cache
def library() -> Path | None:
    """Return where libnvrtc is."""
    beside_torch = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*"), reverse=True)
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    named = [Path(folder, f"libnvrtc.so.{version}") for folder in folders for version in (13, 12)]
    return next((path for path in (*beside_torch, *named) if path.exists()), None)


@cache
def nvrtc() -> ctypes.CDLL:
    path = library()
    if path is None:
        raise SystemExit("there is no libnvrtc beside torch or in LD_LIBRARY_PATH: pip install nvidia-cuda-nvrtc")
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # which NVRTC looks for by its name alone
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(path))


def compiled(
    names: Sequence[str], architecture: str, known: str = "", sources: Path = SOURCES, *, code: bool = False
) -> tuple[str, bytes]:
    """Compile kernels of one kind of job to machine code (``sm_``) or PTX (``compute_``).

    Args:
        names: As ``csrc/cuda/launch.cpp`` spells them.
        architecture: ``sm_90`` or ``compute_90``, say.
        known: Assignments to the job (``csrc/cuda/rows.cuh``).
        sources: The folder with the kernels.
        code: Whether to return machine code.

    Returns:
        What the compiler says, and the machine code.

    Raises:
        RuntimeError: They do not compile; with what the compiler says.
    """
    paths = [path for path in sources.rglob("*") if path.suffix in {".cu", ".cuh", ".h"}]
    array = ctypes.c_char_p * len(paths)
    texts = array(*(path.read_bytes() for path in paths))
    files = array(*(str(path.relative_to(sources)).encode() for path in paths))
    included = dict.fromkeys(FILES[name.partition("<")[0]] for name in names)
    source = f"#define YAFSDP_CC_KNOWN {known}\n" + "".join(f'#include "{name}"\n' for name in included)
    source += "using namespace yafsdp_cc;\n"
    compiler, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    failed = compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"all.cu", len(paths), texts, files)
    assert not failed
    try:
        for name in names:
            assert not compiler.nvrtcAddNameExpression(program, name.encode())
        flags = [b"--std=c++17", b"--fmad=false", b"-default-device", f"-arch={architecture}".encode()]
        if architecture.startswith("sm"):
            flags.append(b"--ptxas-options=-v")
        failed = compiler.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        if failed:
            raise RuntimeError(log.value.decode())
        if not code:
            return log.value.decode(), b""
        compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetCUBIN(program, image)
        return log.value.decode(), image.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


class Used(NamedTuple):
    """What a kernel takes, by the compiler."""

    registers: int
    spilt: int
    shared: int


def used_of(said: str) -> dict[str, Used]:
    """Return what each kernel takes, by its symbol, of what ``compiled`` says."""
    found = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers([^\n]*)", said, re.S)
    return {
        name: Used(int(registers), int(spilt), int((re.findall(r"(\d+) bytes smem", rest) or [0])[0]))
        for name, spilt, registers, rest in found
    }


def warps_of(used: Used, threads: int) -> int:
    """Return how many warps are resident on a multiprocessor, of thread blocks of ``threads``."""
    of_warp = -(-used.registers * 32 // 256) * 256  # they are given out by 256, and to four schedulers
    of_block = threads // 32
    fit = min(REGISTERS // of_warp // 4 * 4, WARPS) // of_block
    return min(fit, BLOCKS, SHARED // (used.shared + 1024)) * of_block


def loops_of(image: bytes) -> list[int] | None:
    """Return the instructions of each loop of a kernel, in the order of their ends; None without nvdisasm."""
    triton = find_spec("triton")
    places = (triton.submodule_search_locations if triton else None) or ()
    beside = [Path(place, "backends/nvidia/bin/nvdisasm") for place in places]
    program = shutil.which("nvdisasm") or next((str(path) for path in beside if path.exists()), None)
    if program is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        listing = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout
    count, labels, loops = 0, dict[str, int](), list[int]()
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s*\$__internal", line):  # the slow way of a division
            break
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            count += 1
            back = re.search(r"BRA .*`\((\.L_x_\d+)\)", instruction[1])
            if back and back[1] in labels:
                loops.append(count - labels[back[1]])
    return loops


class Row(NamedTuple):
    """A kernel, and what it is compiled for."""

    name: str
    what: str
    known: str
    threads: int
    read: float
    """Bytes of each element that a thread loads before it uses the first."""
    moved: float
    """Bytes of each element, read once and written once."""

    @property
    def is_topk(self) -> bool:
        return self.name.startswith("encode_topk")


def encode_row(name: str, gradients: str, residual: str, message: float) -> Row:
    known = (
        f"job.gradients.dtype = Dtype({DTYPES[gradients]}), job.residual.dtype = Dtype({DTYPES[residual]}), "
        "job.gradients.wide = true, job.residual.wide = true, job.counts = nullptr, job.block = 256"
    )
    read = BYTES[gradients] + BYTES[residual]
    threads = 512 if "topk" in name else 128
    return Row(name, f"{gradients}, {residual}", known, threads, read, read + BYTES[residual] + message)


def decode_row(name: str, out: str, messages: int, message: float, ahead: int = 1) -> Row:
    known = (
        f"job.out.dtype = Dtype({DTYPES[out]}), job.own.dtype = Dtype(0), job.out.wide = true, job.own.wide = true, "
        f"job.sum = {'true' if messages > 1 else 'false'}, job.block = 256"
    )
    what = f"sum of {messages}" if messages > 1 else f"to {out}"
    return Row(name, what, known, 512 if "topk" in name else 128, ahead * message, messages * message + BYTES[out])


def rows() -> list[Row]:
    codecs = {"OneBit": 1 / 8, "Whole<8, false>": 1.0, "Whole<4, false>": 0.5, "Odd<2, false>": 0.25}
    codecs |= {"Ternary<false>": 0.2, "FP8": 1.0, "Float<true>": 2.0, "Nothing": 0.0}
    kinds = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "int8"), ("bf16", "none")]
    found = [
        encode_row(f"encode_kernel<{codec}, 4, false>", *kind, size)
        for codec, size in codecs.items()
        for kind in kinds
        if codec != "Nothing" or kind[1] != "none"
    ]
    found += [encode_row("encode_topk_kernel<4, false>", *kind, 0.04) for kind in kinds]
    readers = [("WholeReader<8>, 4, 1", 1.0, 8), ("WholeReader<4>, 4, 1", 0.5, 8), ("OneBitReader, 4, 1", 1 / 8, 8)]
    readers += [("TernaryReader, 4, 5", 0.2, 8)]
    readers += [("FloatReader<true>, 4, 1", 2.0, 4), ("FloatReader<false>, 4, 1", 4.0, 2)]
    for reader, size, ahead in readers:
        found += [decode_row(f"decode_kernel<{reader}, 1>", *kind, size) for kind in (("fp32", 4), ("bf16", 1))]
        found.append(decode_row(f"decode_kernel<{reader}, {ahead}>", "fp32", 256, size, ahead))
    found += [decode_row("decode_topk_kernel", *kind, 0.04) for kind in (("fp32", 4), ("bf16", 1))]
    found.append(Row("update_kernel", "fp32, Adam's gradient rule", "", 256, 16, 24))
    return [*found, Row("lamb_kernel", "fp32, exact", "", 256, 16, 24)]


def of_a_copy(row: Row, under_way: float, instructions: float, warps: int, processors: int) -> float:
    moved = row.moved
    if row.is_topk:  # the second time from memory, too, except what the L2 holds of the tiles that are in work
        in_work = processors * warps / (row.threads // 32) * TILE * row.read
        moved += row.read * max(0.0, 1 - L2 / in_work)
    seconds = (
        moved / COPY,
        row.read * LATENCY / (processors * under_way / 2),
        instructions / (processors * 128 * CLOCK * ISSUED),
    )
    return row.moved / COPY / max(seconds)


def figures_of(row: Row, architecture: str, sources: Path) -> list[str]:
    said, image = compiled([row.name], architecture, row.known, sources, code=True)
    (used,) = used_of(said).values()
    warps, loops = warps_of(used, row.threads), loops_of(image)
    elements = 8 if "decode_topk" in row.name else 4 if row.known == "" else 16  # of a thread, at a time
    under_way = warps * 32 * elements * row.read
    instructions = None
    if loops and (row.name.startswith("encode_") or row.what.startswith("to ")) and "decode_topk" not in row.name:
        _, *within = sorted(loops, reverse=True)
        # Of topk: over a tile for its candidates, and for what is left of it. The loop between goes over it again where
        # there are too many candidates.
        body = within[0] + (0 if row.what.endswith("none") else within[2]) if row.is_topk else max(loops)
        instructions = body / elements
    shares = [None if instructions is None else of_a_copy(row, under_way, instructions, warps, n) for n in (99, 132)]
    name = re.sub(r", 4, (false|\d, \d)", "", row.name.replace("_kernel", ""))
    return [
        f"{name} {row.what}",
        *(str(each) for each in (used.registers, used.spilt, used.shared, warps)),
        f"{under_way / 1000:.0f}",
        cell(instructions, ".1f"),
        *(cell(share, ".2f") for share in shares),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, default=SOURCES, help="the kernels' folder")
    parser.add_argument("--architecture", default="sm_90")
    parser.add_argument("--only", default="", help="what the names of kernels begin with")
    arguments = parser.parse_args()
    chosen = [row for row in rows() if row.name.startswith(arguments.only)]
    head = ["kernel", "registers", "spilt", "shared", "warps", "kB under way", "instructions", "99", "132"]
    print(table(head, *(figures_of(row, arguments.architecture, arguments.sources) for row in chosen)))


if __name__ == "__main__":
    main()
