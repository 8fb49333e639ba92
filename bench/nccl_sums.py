"""Relative errors of mean gradients that NCCL would sum in bf16 and fp16: ours and FSDP2's, against float64.

    python bench/nccl_sums.py            # a table

NCCL's arithmetic is played on the CPU (`tests/nccl.py`): every hop rounds to the dtype that is sent. Gradients are
drawn from a normal distribution, of either sign, and the same without signs. No GPU takes part.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.engine.test_nccl import drawn, error_of, fsdp2_means, means

WORLDS = (8, 17, 64, 128, 256, 512)
CHUNK = 64
"""Elements of each rank's chunk."""


def main() -> None:
    torch.set_num_threads(1)
    print("| dtype | ranks | order | either sign: ours | FSDP2 | one sign: ours | FSDP2 |")
    print("|---|---|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float16):
        for order in ("ring", "tree"):
            for world in WORLDS:
                cells = []
                for make in (torch.clone, torch.abs):
                    grads = make(drawn(world, world, world * CHUNK)).to(dtype)
                    cells += [error_of(each(world, order, grads), grads) for each in (means, fsdp2_means)]
                name = str(dtype).removeprefix("torch.")
                print(
                    f"| {name} | {world} | {order} | {' | '.join(f'{100 * cell:.3f} %' for cell in cells)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
