"""A slow network on this machine: your program on it, or what it can carry.

    python bench/netlab.py --ranks 2 --bandwidth 100mbit,1gbit -- python train.py --your-own flags
    python bench/netlab.py --ranks 2,4 --bandwidth 100mbit,500mbit,1gbit          # the lab itself, in a minute
    python bench/netlab.py --delay-ms 5 --loss 0.01                               # what it delays and loses

A program runs once for each bandwidth, as every rank, each in a network namespace of its own from which nothing leads
outside, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. Then a line per rank says, by the counters
of its interface, what it sent and received. See docs/netlab.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import links
from yafsdp_cc.netlab import Lab, LabError, Unavailable


def main() -> int:
    options = _options()
    try:
        for ranks in options.ranks:
            if options.command:
                for bandwidth in options.bandwidth:
                    run(options, ranks, bandwidth)
            else:
                with Lab(ranks, options.bandwidth[0], options.delay_ms, options.loss) as lab:
                    links.show(lab, ranks, options.bandwidth)
    except (LabError, Unavailable, ValueError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def run(options: argparse.Namespace, ranks: int, bandwidth: str) -> None:
    """The program on every rank; a line of what each of them sent and received."""
    with Lab(ranks, bandwidth, options.delay_ms, options.loss) as lab:
        start = time.perf_counter()
        lab.launch(options.command, timeout=options.timeout)
        wall = time.perf_counter() - start
        for rank, own in enumerate(lab.bytes()):
            sent, received = own.sent, own.received
            rates = f"sent_mbit_s={8e-6 * sent / wall:.1f} received_mbit_s={8e-6 * received / wall:.1f}"
            print(
                f"netlab bandwidth={bandwidth} {ranks=} {rank=} wall_s={wall:.2f} {sent=} {received=} {rates}",
                flush=True,
            )


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=numbers, default=[2], help="one number or several: 2,4")
    parser.add_argument("--bandwidth", type=names, default=["100mbit"], help="each way of each rank: 100mbit,1gbit")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way; an answer takes twice that")
    parser.add_argument("--loss", type=float, default=0.0, help="the fraction of packets that vanish: 0.01")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that the program may take")
    parser.add_argument("command", nargs="*", help="after --: what to run; without it, the lab measures itself")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
