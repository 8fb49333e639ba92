"""Every kernel once, on small tensors: what compute-sanitizer runs.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python bench/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python bench/gpu/sanitize.py --only topk,lamb

Without torch's cache each tensor is an allocation of its own. With it, the tool sees segments of 2 MB and takes an
access beyond a tensor for a legal one. Racecheck sees shared memory alone, which no other kernels have. Sizes leave
tails: no number of elements is a multiple of what a thread block takes at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.common import names
from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import Noise, codec_of
from yafsdp_cc.compression.error_feedback import Residual
from yafsdp_cc.optim.lamb import LambRow, LambRule, lamb_settings, update_lamb
from yafsdp_cc.optim.update import Row, Rule, adam_settings, sgd_settings, update

if TYPE_CHECKING:
    from torch import Tensor

CODECS = ("fp32", "bf16", "fp8", "int8", "int6", "int4", "int3", "int2", "ternary", "onebit", "topk")
OPTIMIZERS = ("update", "lamb")
BLOCKS = (64, 256, 1024)
MESSAGES, TILE = 2, 65_536
"""Messages of a call, and elements that topk chooses from at once."""
SHAPES = (1, 3, 511, 8193, 20_001)
GROUP = {"lr": 1e-3, "weight_decay": 0.01, "momentum": 0.9, "betas": (0.9, 0.999), "eps": 1e-8}


def encode_and_decode(name: str, block: int, device: torch.device) -> None:
    codec = codec_of(name, block)
    n = 9 * block + (TILE if name == "topk" else 0)
    gradients = torch.randn(MESSAGES, n, device=device).bfloat16()
    message = torch.empty(MESSAGES, codec.message_bytes(n), dtype=torch.uint8, device=device)
    counts = torch.full((MESSAGES, n // block), block - 3, dtype=torch.int32, device=device)
    error_feedback.encode(codec, gradients, message)
    for kept in (torch.float32, torch.bfloat16, torch.int8):
        residual = Residual.zeros(MESSAGES, n, kept, block, device)
        error_feedback.encode(codec, gradients, message, residual=residual, counts=counts)
        error_feedback.encode(codec, gradients.float(), message, residual=residual)
        error_feedback.accumulate(gradients, residual)
    if codec.rounds_randomly:
        error_feedback.encode(codec, gradients, message, noise=Noise(1))
    error_feedback.decode_sum(codec, message, n, gradients[0], 1, torch.empty(n, device=device))
    error_feedback.decode(codec, message, torch.empty(MESSAGES, n, dtype=torch.bfloat16, device=device))


def update_all(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    def tensors(of: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.rand(shape, device=device).to(of) for shape in SHAPES]

    nothing: list[Tensor | None] = [None] * len(SHAPES)
    if kind == "update":
        for rule in Rule:
            settings = adam_settings(GROUP, 9, 9) if rule.is_adam else sgd_settings(GROUP)
            moments = nothing if rule is Rule.ADAM_MOMENTUM else tensors()
            columns = (tensors(dtype), tensors(dtype), moments, tensors())
            update(rule, [Row(*each, settings) for each in zip(*columns, strict=True)])
    else:
        for of_lamb in LambRule:
            fresh = nothing if of_lamb is LambRule.EXACT else tensors()
            columns = (tensors(dtype), tensors(dtype), tensors(), tensors(), fresh)
            rows = [LambRow(*each, lamb_settings(GROUP, 1.0, 9, 9)) for each in zip(*columns, strict=True)]
            update_lamb(of_lamb, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=names, default=[*CODECS, *OPTIMIZERS], help="codecs, update, lamb")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    if error_feedback.ops_for(device) is None:
        parser.error(f"the native kernels for {device} cannot be had")
    if device.type == "cuda" and not os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        print("with torch's cache of memory nobody sees an access beyond a tensor", file=sys.stderr)
    torch.manual_seed(0)
    for name in options.only:
        if name in CODECS:
            for block in BLOCKS:
                encode_and_decode(name, block, device)
        else:
            for dtype in (torch.float32, torch.bfloat16):
                update_all(name, dtype, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(name, flush=True)


if __name__ == "__main__":
    main()
