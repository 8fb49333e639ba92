"""LoRA adapters of PEFT on a frozen model sharded by yafsdp_cc; the frozen weights are gathered once and kept.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/peft_lora.py
"""

import tempfile
from itertools import pairwise

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import yafsdp_cc


def make_model():
    torch.manual_seed(0)  # the same on every rank
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


# With reshard_after_forward=False every rank keeps the unsharded model, and frozen weights are gathered once.
model = yafsdp_cc.shard(make_model(), reshard_after_forward=False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
tokens = torch.randint(128, (8, 2, 16), generator=torch.Generator().manual_seed(1))

losses, gathered = [], [0]
for step in range(4):
    batch = tokens[2 * step + dist.get_rank()]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    gathered.append(yafsdp_cc.counters_of(model).gathered_bytes)

adapters = {name: part.full_tensor() for name, part in get_peft_model_state_dict(model).items()}
folder = tempfile.mkdtemp()
if dist.get_rank() == 0:
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    print("bytes gathered in each step", [now - before for before, now in pairwise(gathered)])
    model.save_pretrained(folder, state_dict=adapters)
    print("adapters of", sum(tensor.numel() for tensor in adapters.values()), "elements saved")
