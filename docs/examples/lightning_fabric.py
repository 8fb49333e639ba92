"""A model sharded by yafsdp_cc in a training loop of Lightning Fabric.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/lightning_fabric.py
"""

import tempfile

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import yafsdp_cc


def make_model():
    torch.manual_seed(0)  # the same on every rank
    blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
    return nn.Sequential(nn.Linear(32, 32), *blocks, nn.Linear(32, 5))


def parallelize(model, mesh):
    return yafsdp_cc.shard(model, mesh=mesh["data_parallel"])


world = 2
fabric = Fabric(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=world,
    strategy=ModelParallelStrategy(parallelize, data_parallel_size=world, tensor_parallel_size=1),
)
fabric.launch()
model = fabric.setup_module(make_model())
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
data = TensorDataset(torch.randn(64, 32, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 5)
batches = fabric.setup_dataloaders(DataLoader(data, batch_size=8))

losses = []
for inputs, targets in batches:
    loss = F.cross_entropy(model(inputs), targets)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
fabric.print("losses", " ".join(f"{loss:.4f}" for loss in losses))

folder = fabric.broadcast(tempfile.mkdtemp())
state = {"model": model, "optimizer": optimizer, "step": len(losses)}
fabric.save(f"{folder}/checkpoint", state)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
fabric.load(f"{folder}/checkpoint", state)
