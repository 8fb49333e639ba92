"""A kernel that copies on a GPU as fast as a link would, and no faster."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.compression.autotune import LinkCost

THREADS = 512
PART = 1 << 18
"""Bytes that a collective has the link for, before another one has it: 10 µs at 25 GB/s."""

# A block transfers part after part. For each it reserves the next time that the link is free: all blocks, and all
# kernels on the link, take turns there. It is done with a part when the link is. No block waits for another: a
# block that cannot start yet leaves its turns to others.
_BEGIN = r"""
typedef unsigned long long u64;
__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
__device__ void sleep_until(u64 when) { while (now() < when) asm volatile("nanosleep.u32 100;"); }
__device__ u64 turn(u64 *free, u64 takes) {
    u64 known = *(volatile u64 *)free;
    while (true) {
        u64 here = now(), begins = known > here ? known : here;
        u64 found = atomicCAS(free, known, begins + takes);
        if (found == known) return begins + takes;
        known = found;
    }
}
__device__ float wide(float x) { return x; }
__device__ float wide(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
__device__ void narrow(float x, float *to) { *to = x; }
__device__ void narrow(float x, unsigned short *to) {
    unsigned bits = __float_as_uint(x);
    *to = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
"""
_BODY = r"""
typedef long long i64;
// Numbers come as doubles: whole ones of up to 53 bits are exact, and the caller has nothing wider than that.
extern "C" __global__ void modelled_transfer(T *to, const T *from, u64 *free, double count, double period, double part,
                                 double terms, double which, double scale, double delay, double each) {
    __shared__ u64 until;
    const i64 all = (i64)count, size = (i64)part, wrap = (i64)period;
    if (threadIdx.x == 0) sleep_until(now() + (u64)delay);
    for (i64 first = blockIdx.x * size; first < all; first += gridDim.x * size) {
        const i64 last = first + size < all ? first + size : all;
        if (threadIdx.x == 0) until = turn(free, (u64)((last - first) * each));
        __syncthreads();
        i64 at = (first + threadIdx.x) % wrap;
        for (i64 i = first + threadIdx.x; i < last; i += blockDim.x) {
            MOVE
            at += blockDim.x;
            while (at >= wrap) at -= wrap;
        }
        if (threadIdx.x == 0) sleep_until(until);
        __syncthreads();
    }
}
"""
_COPY = "to[i] = from[at];"
_SUM = """
            float sum = 0;
            for (i64 k = 0; k < (i64)terms; k++) {
                sum += (k == (i64)which ? (float)scale : 0.0f) * wide(from[k * wrap + at]);
            }
            narrow(sum, to + i);
"""
_COPIED = {16: "uint4", 4: "unsigned", 1: "unsigned char"}
"""Types that are copied, by their bytes."""
SUMMED_DTYPES = {torch.float32: "float", torch.bfloat16: "unsigned short"}


def source_of(kind: str, move: str) -> str:
    """CUDA C++ of the kernel ``modelled_transfer`` for elements of this type."""
    return f"typedef {kind} T;" + _BEGIN + _BODY.replace("MOVE", move)


@cache
def _kernel(kind: str, move: str) -> Any:
    return torch.cuda._compile_kernel(source_of(kind, move), "modelled_transfer")


class Summands(NamedTuple):
    """A sum of which all summands are read, as by a sum over ranks, and all but one count nothing."""

    parts: int = 1
    which: int = 0
    scale: float = 1.0


class PacedLink:
    """Takes the time of a link, which all transfers share.

    Args:
        link: whose time it takes.
        device: whose multiprocessors copy.
        blocks: how many of them, as many as NCCL has channels.
    """

    def __init__(self, link: LinkCost, device: torch.device, blocks: int = 16) -> None:
        self._link, self._blocks = link, blocks
        self._free = torch.zeros(1, dtype=torch.int64, device=device)
        """The time in nanoseconds from which on the link is free."""

    def transfer(
        self, output: Tensor, source: Tensor, summands: Summands, sent: int, stream: torch.cuda.Stream
    ) -> None:
        """Write the sum of the parts of ``source``, repeated until ``output`` is full.

        Args:
            output, source: contiguous, on the device; the output may be a summand.
            sent: bytes that cross the link meanwhile.
            stream: on which that is enqueued.

        Raises:
            TypeError: elements that are to be summed or scaled are neither fp32 nor bf16.
        """
        if summands == Summands():
            width = next(each for each in _COPIED if all(_fits(tensor, each) for tensor in (output, source)))
            kernel, period = _kernel(_COPIED[width], _COPY), source.nbytes // width
        elif source.dtype in SUMMED_DTYPES:
            width = source.itemsize
            kernel, period = _kernel(SUMMED_DTYPES[source.dtype], _SUM), source.numel() // summands.parts
        else:
            raise TypeError(f"a modelled link sums float32 and bfloat16, not {source.dtype}")
        count = output.nbytes // width
        nanoseconds = 1e9 * self._link.per_byte * sent
        turns = max(-(-sent // PART), 1)
        part = -(-count // turns)
        kernel(
            grid=(min(turns, self._blocks), 1, 1),
            block=(THREADS, 1, 1),
            args=[
                output,
                source,
                self._free,
                *map(float, (count, period, part, *summands, 1e9 * self._link.latency, nanoseconds / max(count, 1))),
            ],
            stream=stream,
        )


def _fits(tensor: Tensor, width: int) -> bool:
    return tensor.nbytes % width == 0 and tensor.data_ptr() % width == 0
