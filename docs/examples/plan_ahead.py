"""Print the plan of a model of seven billion parameters on eight ranks, in one process and without a network.

    python docs/examples/plan_ahead.py

The process group backend "fake" (torch's own, for tests) has any number of ranks, and sends nothing. This process
allocates what rank 0 would, so the model has only 2 of the 32 blocks. With zero_stage=2, 32 blocks send 16 times as
much, and take 16 times as much of all memory but the gradient buffers and the receive buffer. (With zero_stage=3 blocks
share weight buffers too: the difference between the plans of four blocks and of two is what two more blocks take.)
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
