"""The demo's flags. Read by the command before anything starts, and by every rank; imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def parser(**about: Any) -> argparse.ArgumentParser:
    """The flags of the training job itself."""
    flags = argparse.ArgumentParser(allow_abbrev=False, **about)
    flags.add_argument("--text", type=_existing, help="file or folder to learn from (the Python standard library)")
    flags.add_argument("--steps", type=positive, default=500, help="optimizer steps (%(default)s)")
    flags.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="of weights and activations in the layers; bf16 is faster where the processor knows it (%(default)s)",
    )
    flags.add_argument("--name", default="demo", help="the run's folder under runs/, overwritten (%(default)s)")
    flags.add_argument("--seed", type=int, default=0, help="of the first weights and of the batches (%(default)s)")
    return flags


def _existing(text: str) -> Path:
    path = Path(text).absolute()
    if not path.exists():
        raise argparse.ArgumentTypeError(f"no such file or folder: {text}")
    return path


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
