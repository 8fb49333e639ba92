"""Does anything run on this GPU at all? Ends with 0 if all that the other parts of a flight need does.

    python bench/gpu/smoke.py

One line for each step, with the seconds since the start.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

NEEDED = ("pydantic", "yaml", "numpy", "pytest", "xdist", "pytest_timeout")
BLOCK = 256
RATES = (50, 350)
"""GB/s of modelled links: what a flight has between machines, and within one."""
START = time.monotonic()


def note(what: str) -> None:
    print(f"{time.monotonic() - START:6.1f} s  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--copied", type=int, default=1 << 30, help="bytes of a copy whose rate is measured")
    options = parser.parse_args()
    missing = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(str(error))
    if missing:
        sys.exit("; ".join(missing))
    import torch

    note(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    import yafsdp_cc.api
    from yafsdp_cc.profiling import NVTX_LISTENS

    note(f"yafsdp_cc {Path(yafsdp_cc.api.__file__).parent}; a tool listens to NVTX: {NVTX_LISTENS}")
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device")
    device = torch.device("cuda")
    torch.ones(1, device=device)
    properties = torch.cuda.get_device_properties(device)
    processors, memory = properties.multi_processor_count, properties.total_memory / 2**30
    note(f"{torch.cuda.get_device_name()}, {processors} multiprocessors, {memory:.1f} GiB")

    from yafsdp_cc.compression.codec import codec_of
    from yafsdp_cc.compression.error_feedback import Residual, encode, ops_for

    if ops_for(device) is None:
        sys.exit("the native kernels cannot be had")
    note("the first kernel was compiled by NVRTC")
    codec, gradients = codec_of("int8"), torch.randn(2, 256 * BLOCK, device=device)
    message = torch.empty(2, codec.message_bytes(gradients.shape[1]), dtype=torch.uint8, device=device)
    residual = Residual.zeros(*gradients.shape, torch.float32, BLOCK, device)
    encode(codec, gradients, message, residual=residual)
    torch.cuda.synchronize()
    note(f"int8 encodes; the residual's norm is {residual.load().norm().item():.4g}")

    from bench.paced import PacedLink, Summands
    from yafsdp_cc.compression.autotune import LinkCost

    count = options.copied
    source = torch.randint(256, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def rate(copy: Callable[[], object]) -> float:
        """Return the GB/s that are written."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        copy()
        begin.record()
        copy()
        end.record()
        end.synchronize()
        return count / begin.elapsed_time(end) / 1e6

    note(f"a copy reads and writes {2 * rate(lambda: target.copy_(source)):.0f} GB/s")
    for wanted in RATES:
        link = PacedLink(LinkCost(0.0, 1 / (1e9 * wanted)), device)
        reached = rate(lambda link=link: link.transfer(target, source, Summands(), count, torch.cuda.current_stream()))
        note(f"a modelled link of {wanted} GB/s carries {reached:.1f} GB/s")


if __name__ == "__main__":
    main()
