"""Traces made by hand: one step of two units on a GPU, in the format of Kineto and in that of Nsight Systems.

Microseconds. The sums that a report must find are ``TRUTH``, added up by hand from ``ON_GPU``.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
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


SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER, gridY INTEGER, gridZ INTEGER,
    blockX INTEGER, blockY INTEGER, blockZ INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER, uint64Value INTEGER);
"""
"""What is read of NVIDIA's SQLite Export Schema Reference, with the columns beside it."""
PROCESS, OTHER_PROCESS = 0x1000063000000, 0x1000064000000


def write_nsys(path: Path) -> Path:
    """Write it as ``nsys export --type sqlite`` does, with another process of the same correlations beside it."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(SCHEMA)
        strings: dict[str, int] = {}

        def string(text: str) -> int:
            return strings.setdefault(text, len(strings) + 1)

        for place, (name, thread, start, end) in enumerate(RANGES):
            # Registered strings have an identifier, others stand in the table.
            text, identifier = (name, None) if place % 2 else (None, string(name))
            row = (start * 1000, end * 1000, 60, place, None, None, text, PROCESS + thread, None, identifier, 1, 4096)
            database.execute(f"INSERT INTO NVTX_EVENTS VALUES ({','.join('?' * 12)})", row)
        never_ended = (1000, None, 60, 99, None, None, "YaFSDP::reduce (b)", PROCESS + THREAD, None, None, 1, 0)
        database.execute(f"INSERT INTO NVTX_EVENTS VALUES ({','.join('?' * 12)})", never_ended)
        for number, each in enumerate(ON_GPU):
            row: tuple[int, ...] = (each.start * 1000, each.end * 1000, 0, 1, each.stream, number, PROCESS)
            if each.name.startswith("Memcpy"):
                row += (4096, 8 if "DtoD" in each.name else 1)
                database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({','.join('?' * 9)})", row)
            else:
                row += (string(each.name), string(each.name), each.grid, 1, 1, 128, 1, 1)
                database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * 15)})", row)
            for process, when in ((PROCESS, each.launched), (OTHER_PROCESS, 7)):
                call = (when * 1000, when * 1000 + 2000, 0, process + each.thread, number, string("cudaLaunch"), 0)
                database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({','.join('?' * 7)})", call)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, text) for text, i in strings.items()])
        database.commit()
    return path
