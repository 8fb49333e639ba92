"""What a model of seven billion parameters would send and hold on eight ranks, from one process without a network.

    python plan_ahead.py

A process group of the backend "fake" (torch's own, for tests) has as many ranks as it is told, and sends nothing. Two
of the 32 blocks are enough: with zero_stage=2, a step sends 16 times as much, and a rank holds 16 times as much of all
but gradient slots and the receive buffer. (With zero_stage=3 blocks share weight slots too, and two blocks stay in the
two slots between forward and backward: take four blocks and count the difference to two.) This process takes the memory
that rank 0 would for two.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from yafsdp_cc import Compression

WIDTH, BLOCKS = 4096, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x  # never called


if __name__ == "__main__":
    dist.init_process_group("fake", rank=0, world_size=8)
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    yafsdp_cc.shard(
        model,
        units="Block",
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        compression=Compression("int4", weights="int8"),
        zero_stage=2,
        param_init_fn=lambda module: None,  # nothing is trained, so nothing is initialised
    )
    print(yafsdp_cc.plan_of(model))
    dist.destroy_process_group()
