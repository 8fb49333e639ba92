"""A pipeline of two stages, each sharded by yafsdp_cc over two ranks.

yafsdp-cc launch --standalone --nproc-per-node=4 docs/examples/pipeline.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

import yafsdp_cc
from yafsdp_cc.integrations.pipelining import ShardedStage


def make_stages():
    torch.manual_seed(0)  # the same on every rank
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(8)]
    return nn.Sequential(*blocks[:4]), nn.Sequential(*blocks[4:])


kind = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("pipeline", "data"))
place, rank = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

# Many forwards and backwards in each step: weights that stay unsharded are gathered only once, from the second one on.
module = yafsdp_cc.shard(make_stages()[place], mesh=mesh["data"], reshard_after_forward=False)
stage = ShardedStage(module, place, 2, device, group=mesh["pipeline"].get_group())
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

inputs = torch.randn(3, 2, 16, 64, generator=torch.Generator().manual_seed(1)).to(device)
losses, reduced, gathered = [], [], []
for step in range(3):
    batch = inputs[step, rank]
    if place == 0:
        schedule.step(batch)
    else:
        of_micro_batches = []
        schedule.step(target=batch.flip(-1), losses=of_micro_batches)
        losses.append(torch.stack(of_micro_batches).mean().item())
    optimizer.step()
    optimizer.zero_grad()
    counters = yafsdp_cc.counters_of(module)
    reduced.append(counters.reduced_bytes)
    gathered.append(counters.gathered_bytes)
if dist.get_rank() == 3:
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    print("bytes reduced", reduced, "and gathered", gathered, "by the end of each step")
