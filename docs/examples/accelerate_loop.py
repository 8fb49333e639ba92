"""A model sharded by yafsdp_cc in a training loop of Accelerate.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/accelerate_loop.py
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import yafsdp_cc
from yafsdp_cc.integrations.accelerate import accept_sharded


def make_model():
    torch.manual_seed(0)  # the same on every rank
    blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
    return nn.Sequential(nn.Linear(32, 32), *blocks, nn.Linear(32, 5))


accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = yafsdp_cc.shard(make_model())
data = TensorDataset(torch.randn(64, 32, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 5)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after shard, as ever
rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
accept_sharded(accelerator, model)
model, optimizer, batches, rate = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8), rate)


def train_epoch():
    losses = []
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
losses = train_epoch()
accelerator.save_state(folder[0])  # shards, by torch.distributed.checkpoint
losses += train_epoch()
accelerator.load_state(folder[0])
repeated = train_epoch()  # the second epoch once more: weights, optimizer and learning rate are those of the first
accelerator.print("losses", " ".join(f"{loss:.4f}" for loss in losses))

with torch.no_grad():
    right = [accelerator.gather_for_metrics(model(inputs).argmax(1) == targets) for inputs, targets in batches]
accelerator.print("accuracy", torch.cat(right).float().mean().item())
accelerator.save_model(model, folder[0])  # full weights, in safetensors
whole = accelerator.get_state_dict(model)  # on rank 0; a collective, {} on the others
if accelerator.is_main_process:
    accelerator.print("full weights", {name: tuple(tensor.shape) for name, tensor in whole.items()})
