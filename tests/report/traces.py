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


ACTIVITY = "start end deviceId contextId greenContextId streamId correlationId globalPid"
COLUMNS = {
    "StringIds": "id value",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{ACTIVITY} demangledName shortName mangledName launchType cacheConfig "
    "registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory "
    "localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted graphNodeId sharedMemoryLimitConfig",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{ACTIVITY} bytes copyKind deprecatedSrcId srcKind dstKind srcDeviceId srcContextId "
    "dstDeviceId dstContextId migrationCause graphNodeId virtualAddress",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{ACTIVITY} value bytes graphNodeId memKind",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
    "NVTX_EVENTS": "start end eventType rangeId category color text globalTid endGlobalTid textId domainId uint64Value "
    "int64Value doubleValue uint32Value int32Value floatValue jsonTextId jsonText",
}
"""Columns of the tables that are read, as in exports of Nsight Systems 2024.5 (schema 3.13) of programs with MPI."""
PROCESS, OTHER_PROCESS = 302119223558144, 302119240335360
"""Global ids of two processes: a thread's is that of its process and the thread's own below 1 << 24."""
PUSHED, MARK, DOMAIN = 59, 34, 75
"""Types of NVTX events: a range that was pushed and popped, a point in time, and the name of a domain."""


def write_nsys(path: Path) -> Path:
    """Write it as ``nsys export --type sqlite`` does, with another process of the same correlations beside it."""
    path.unlink(missing_ok=True)
    strings: dict[str, int] = {}

    def string(text: str) -> int:
        return strings.setdefault(text, len(strings) + 1)

    with closing(sqlite3.connect(path)) as database:
        for table, columns in COLUMNS.items():
            database.execute(f"CREATE TABLE {table} ({', '.join(columns.split())})")

        def insert(table: str, **row: object) -> None:
            places = ", ".join("?" * len(row))
            database.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", list(row.values()))

        insert("NVTX_EVENTS", start=0, eventType=DOMAIN, text="NCCL", globalTid=PROCESS + THREAD, domainId=1)
        insert("NVTX_EVENTS", start=7000, eventType=MARK, text="YaFSDP::reduce (b)", globalTid=PROCESS + THREAD)
        for place, (name, thread, start, end) in enumerate(RANGES):
            # Registered strings have an identifier, others stand in the table.
            told = {"text": name} if place % 2 else {"textId": string(name)}
            times = {"start": start * 1000, "end": end * 1000}
            insert("NVTX_EVENTS", **times, **told, eventType=PUSHED, globalTid=PROCESS + thread, domainId=place % 2)
        for number, each in enumerate(ON_GPU):
            row = {"start": each.start * 1000, "end": each.end * 1000, "deviceId": 0, "contextId": 1}
            row |= {"streamId": each.stream, "correlationId": number, "globalPid": PROCESS}
            if each.name.startswith("Memcpy"):
                insert("CUPTI_ACTIVITY_KIND_MEMCPY", **row, bytes=4096, copyKind=8 if "DtoD" in each.name else 1)
            else:
                name = string(each.name)
                sizes = {"gridX": each.grid, "gridY": 1, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1}
                insert("CUPTI_ACTIVITY_KIND_KERNEL", **row, demangledName=name, shortName=name, **sizes)
            for process, when in ((PROCESS, each.launched), (OTHER_PROCESS, 7)):
                call = {"start": when * 1000, "end": when * 1000 + 2000, "globalTid": process + each.thread}
                name = string("cudaLaunchKernel_v7000")
                insert("CUPTI_ACTIVITY_KIND_RUNTIME", **call, eventClass=0, correlationId=number, nameId=name)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, text) for text, i in strings.items()])
        database.commit()
    return path
