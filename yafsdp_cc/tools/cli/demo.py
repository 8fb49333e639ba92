"""``yafsdp-cc demo``: the built-in training job, started as a user's script would be."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def main(argv: list[str]) -> int:
    """Check the flags here, once for all ranks, then launch the job; return its exit status."""
    asked = parser().parse_args(argv)

    import torch  # torch is imported only after the flags are checked, as that takes seconds

    from yafsdp_cc.tools.cli import launch

    if torch.cuda.device_count() < asked.ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # train on the CPU, as two ranks cannot share a GPU under NCCL
    flags = ["--standalone", f"--nproc-per-node={asked.ranks}", f"--name={asked.name}"]
    return launch.main([*flags, "-m", "yafsdp_cc.tools.demo.train", *argv])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the demo's flags, which both the command and every rank use."""
    about = "Trains a byte-level GPT of ten million parameters, sharded across ranks."
    flags = argparse.ArgumentParser(prog="yafsdp-cc demo", description=about, allow_abbrev=False)
    flags.add_argument("--ranks", type=positive, default=2, help="processes on this machine (%(default)s)")
    flags.add_argument("--text", type=_existing, help="file or folder to learn from (the Python standard library)")
    flags.add_argument("--steps", type=positive, default=500, help="optimizer steps (%(default)s)")
    flags.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="of weights and activations in the layers; bf16 is faster where the processor knows it (%(default)s)",
    )
    flags.add_argument("--name", default="demo", help="the run's folder under runs/, added to (%(default)s)")
    flags.add_argument("--seed", type=int, default=0, help="of the first weights and of the batches (%(default)s)")
    return flags


def positive(text: str) -> int:
    """Parse a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _existing(text: str) -> Path:
    path = Path(text).absolute()
    if not path.exists():
        raise argparse.ArgumentTypeError(f"no such file or folder: {text}")
    return path
