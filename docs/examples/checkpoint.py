"""Training that may be killed at any time and resumes bit for bit. Run it, kill it, run it again:

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/checkpoint.py --folder runs/example
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import yafsdp_cc

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("runs/example"))
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--save-every", type=int, default=4)
asked = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.down(self.up(self.norm(x)).relu())
        return nn.functional.dropout(x, 0.1, self.training)  # draws from this rank's random state


class Batches:
    """Shuffled windows of a token sequence, different on each rank; its position is in its state dict."""

    def __init__(self, tokens, batch, length):
        self.tokens, self.batch, self.length = tokens, batch, length
        self.epoch, self.position = 0, 0

    def __next__(self):
        windows = len(self.tokens) // self.length
        order = torch.randperm(windows, generator=torch.Generator().manual_seed(self.epoch))
        mine = order[dist.get_rank() :: dist.get_world_size()]
        chosen = mine[self.position : self.position + self.batch]
        self.position += self.batch
        if self.position + self.batch > len(mine):
            self.epoch, self.position = self.epoch + 1, 0
        return self.tokens.view(windows, self.length)[chosen]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


torch.manual_seed(0)  # the same model on every rank
model = nn.Sequential(nn.Embedding(64, 64), *[Block(64) for _ in range(3)], nn.Linear(64, 64))
yafsdp_cc.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = (torch.arange(4096) * 7 % 64).to(next(model.parameters()).device)
batches = Batches(tokens, batch=2, length=16)
torch.manual_seed(1 + dist.get_rank())  # dropout differs between ranks
step = 0

checkpoint = asked.folder / "checkpoint"
try:  # not exists(): after a save that was killed between its two renames, only load finds the checkpoint
    extra = yafsdp_cc.load(checkpoint, model, optimizer)
except FileNotFoundError:
    pass  # the first run
else:
    step = extra["step"]
    batches.load_state_dict(extra["batches"])
    torch.set_rng_state(extra["random"])
    if dist.get_rank() == 0:
        print(f"goes on after step {step}", flush=True)

while step < asked.steps:
    inputs = next(batches)
    loss = nn.functional.cross_entropy(model(inputs[:, :-1]).flatten(0, 1), inputs[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    dist.all_reduce(loss.detach_())
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item() / dist.get_world_size():.9g}", flush=True)
    if step % asked.save_every == 0:
        random = torch.get_rng_state()
        yafsdp_cc.save(checkpoint, model, optimizer, step=step, batches=batches.state_dict(), random=random)
