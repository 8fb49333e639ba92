"""A trace made by hand: one step of two units on a GPU, in the format of Kineto.

Microseconds. The sums that a report must find are ``TRUTH``, added up by hand from ``ON_GPU``.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

THREAD, AUTOGRAD = 4242, 4243


class Kernel(NamedTuple):
    stream: int
    name: str
    start: int
    end: int
    thread: int
    launched: int
    grid: int = 1


RANGES = [
    ("YaFSDP::iteration (7)", THREAD, 0, 1000),
    ("YaFSDP::gather (a)", THREAD, 5, 15),
    ("YaFSDP::forward (a)", THREAD, 16, 60),
    ("YaFSDP::gather (b)", THREAD, 20, 30),  # a prefetch, in the forward of the other
    ("YaFSDP::backward (a)", AUTOGRAD, 400, 600),
    ("YaFSDP::reduce (a)", AUTOGRAD, 500, 520),
    ("YaFSDP::step", THREAD, 800, 830),
    ("NCCL:ncclAllGather", THREAD, 8, 12),
]
GEMM = "void cutlass::gemm<float, (int)4>(Params)"
ON_GPU = [
    Kernel(20, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 10, 110, THREAD, 10),
    Kernel(20, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 110, 260, THREAD, 25),
    Kernel(7, GEMM, 110, 210, THREAD, 40),  # wholly beside the gather of b
    Kernel(7, GEMM, 260, 340, THREAD, 45),  # alone
    Kernel(7, GEMM, 340, 345, THREAD, 46, grid=2),  # other work of the same name
    Kernel(20, "void yafsdp_cc::encode_kernel<yafsdp_cc::Int8>(EncodeJob)", 400, 440, AUTOGRAD, 505),
    Kernel(20, "ncclDevKernel_SendRecv(ncclDevKernelArgs)", 440, 640, AUTOGRAD, 510),
    Kernel(7, "backward_kernel", 450, 550, AUTOGRAD, 420),
    Kernel(20, "void yafsdp_cc::decode_kernel<yafsdp_cc::Int8>(DecodeJob)", 640, 660, AUTOGRAD, 515),
    Kernel(7, "adam_kernel", 800, 900, THREAD, 810),
    Kernel(13, "Memcpy HtoD (Pageable -> Device)", 20, 60, THREAD, 3),  # beside a gather, which it does not hide
    Kernel(20, "Memcpy DtoD (Device -> Device)", 700, 710, AUTOGRAD, 516),
]
TRUTH = {
    "window": 1000,
    "all-gather": (250, 150),  # 100 of 110..210 is beside the matrix product
    "reduce": (200, 100),
    "communication": (450, 250),
    "a": {"all-gather": (100, 100), "reduce": (200, 100)},
    "b": {"all-gather": (150, 50)},
    "parts": {"compute": 285, "optimizer": 100, "codec": 60, "exposed communication": 250, "copy": 10, "idle": 295},
    "slowdown": 100 / 80,
    "copy": (50, 10),
    "on communication lanes": 70,
}


def write_kineto(path: Path) -> Path:
    """Write it as ``torch.profiler`` exports it."""
    events: list[dict[str, object]] = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": thread, "ts": start, "dur": end - start}
        for name, thread, start, end in RANGES
    ]
    # What Kineto shows of the ranges on the GPU is none of its work.
    events.append({"ph": "X", "cat": "gpu_user_annotation", "name": RANGES[2][0], "tid": 7, "ts": 0, "dur": 999})
    events.append({"ph": "i", "name": "Iteration Start: PyTorch Profiler", "ts": 0})
    for number, each in enumerate(ON_GPU):
        call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": each.thread, "ts": each.launched, "dur": 2}
        kernel = {
            "cat": "kernel",
            "name": each.name,
            "tid": each.stream,
            "ts": each.start,
            "dur": each.end - each.start,
        }
        place = {"device": 0, "stream": each.stream, "grid": [each.grid, 1, 1], "block": [128, 1, 1]}
        events.append({"ph": "X", "pid": 1, "args": {"correlation": number}} | call)
        events.append({"ph": "X", "pid": 0, "args": {"correlation": number} | place} | kernel)
    data = json.dumps({"schemaVersion": 1, "traceEvents": events})
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    return path
