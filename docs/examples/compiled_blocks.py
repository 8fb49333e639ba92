"""Every block compiled for itself, then sharded: the engine's work stays outside of the compiled graphs.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/compiled_blocks.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import yafsdp_cc


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))
        self.head = nn.Linear(64, 128)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model():
    torch.manual_seed(0)  # the same on every rank
    return Model()


model = make_model()
for block in model.blocks:
    # The default backend, inductor, needs a C++ compiler. fullgraph=True raises where a graph would break.
    block.compile(backend="aot_eager", fullgraph=True)
yafsdp_cc.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

tokens = torch.randint(128, (8, 2, 16), generator=torch.Generator().manual_seed(1))
tokens = tokens.to(next(model.parameters()).device)
losses = []
for step in range(4):
    batch = tokens[2 * step + dist.get_rank()]
    loss = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
