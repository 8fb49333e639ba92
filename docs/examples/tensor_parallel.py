"""Tensor parallelism across two ranks, and sharding of its local tensors across two others.

yafsdp-cc launch --standalone --nproc-per-node=4 docs/examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import yafsdp_cc


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def make_model():
    torch.manual_seed(0)  # the same on every rank
    return nn.Sequential(nn.Linear(16, 64), *[Block(64) for _ in range(4)], nn.Linear(64, 16))


model = make_model()
mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (2, 2), mesh_dim_names=("dp", "tp"))
for block in model[1:-1]:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
yafsdp_cc.shard(model, mesh=mesh["dp"], units=[Block])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

draws = torch.Generator().manual_seed(1 + mesh["dp"].get_local_rank())  # ranks of one tp group get the same batches
losses = []
for _ in range(4):
    inputs = torch.randn(8, 16, generator=draws).to(mesh.device_type)
    loss = nn.functional.mse_loss(model(inputs), inputs.flip(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
weight = model[1].up.weight
if dist.get_rank() == 0:
    held = weight.to_local().numel()
    print(f"losses {losses}; of {weight.numel()} elements of a matrix this rank holds {held}, as {weight.placements}")
