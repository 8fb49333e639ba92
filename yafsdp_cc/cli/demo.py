"""``yafsdp-cc demo``: the built-in training job, started as a user's script would be."""

from __future__ import annotations

import argparse
import os

from yafsdp_cc.demo import options


def main(argv: list[str]) -> int:
    """Check the flags once, then launch; the exit status of the job."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--ranks", type=options.positive, default=2, help="processes on this machine (%(default)s)")
    options.parser(
        prog="yafsdp-cc demo",
        description="Trains a byte-level GPT of ten million parameters, sharded across ranks.",
        parents=[own],
    ).parse_args(argv)
    asked, rest = own.parse_known_args(argv)

    import torch  # not before the flags are known to be good: it takes seconds

    from yafsdp_cc.cli import launch

    if torch.cuda.device_count() < asked.ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # two ranks cannot share a GPU under NCCL: train on the CPU
    return launch.main(["--standalone", f"--nproc-per-node={asked.ranks}", "-m", "yafsdp_cc.demo.train", *rest])
