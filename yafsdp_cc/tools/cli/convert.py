"""``yafsdp-cc convert``: a checkpoint's model as safetensors."""

from __future__ import annotations

import argparse
import pickle
import sys

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str]) -> int:
    """Convert the checkpoint; return 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(
        prog="yafsdp-cc convert",
        description="Writes the model of a checkpoint as safetensors, for from_pretrained. One process, no GPU; it "
        "holds 5 GB at most, unless one weight is larger.",
    )
    parser.add_argument("checkpoint", help="a folder that yafsdp_cc.save has written")
    parser.add_argument("out", help="a new folder")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    parser.add_argument("--config", metavar="FILE", help="the model's config.json, to put beside the weights")
    asked = parser.parse_args(argv)

    import torch  # torch is imported only after the flags are checked, as that takes seconds

    from yafsdp_cc.checkpoint.full import convert

    try:
        dtype = getattr(torch, asked.dtype) if asked.dtype else None
        convert(asked.checkpoint, asked.out, dtype=dtype, config=asked.config)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        print(f"yafsdp-cc convert: {error}", file=sys.stderr)
        return 1
    return 0
