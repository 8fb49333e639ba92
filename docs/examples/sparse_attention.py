"""Attention to a local window and a few global tokens, by torch's flex_attention in sharded blocks.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/sparse_attention.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import yafsdp_cc

WIDTH, HEADS, LENGTH, WINDOW, GLOBAL = 64, 4, 256, 32, 4


def is_visible(batch, head, query, key):
    """Each token sees the ``WINDOW`` tokens up to itself, and the first ``GLOBAL`` ones (Beltagy et al., 2020)."""
    return (query >= key) & ((query - key < WINDOW) | (key < GLOBAL))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: BlockMask | torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, dim=-1))
        if isinstance(mask, BlockMask):
            y = attend(q, k, v, block_mask=mask)
        else:  # dense: every pair is computed, and the masked ones thrown away
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: torch.Tensor, mask: BlockMask | torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Compiled, it skips the blocks that the mask hides. It has a backward on GPUs alone: a CPU trains with the dense form.
attend = torch.compile(flex_attention) if device.type == "cuda" else flex_attention
index = torch.arange(LENGTH, device=device)
dense = is_visible(0, 0, index[:, None], index[None, :])
sparse = create_block_mask(is_visible, None, None, LENGTH, LENGTH, device=device, BLOCK_SIZE=32)

torch.manual_seed(0)  # the same model on every rank
model = yafsdp_cc.shard(Net().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(4):
    tokens = torch.randint(128, (2, LENGTH), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    tokens = tokens.to(device)
    logits = model(tokens, sparse if device.type == "cuda" else dense)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

with torch.no_grad():
    difference = (model(tokens, sparse) - model(tokens, dense)).abs().max().item()
if dist.get_rank() == 0:
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    print(f"largest difference of a logit, sparse and dense: {difference:.1e}")
    print(f"left out by the sparse form: {sparse.sparsity():.0f} % of all blocks")
