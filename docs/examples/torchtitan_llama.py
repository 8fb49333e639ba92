"""The debug model of torchtitan's Llama 3, sharded by yafsdp_cc as torchtitan's Trainer would have it done.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/torchtitan_llama.py

In a model registry of your own, which `--module` names, it is one line:

    return dataclasses.replace(llama3.model_registry(flavor), parallelize_fn=yafsdp_cc.integrations.titan.parallelize)
"""

import dataclasses

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention

import yafsdp_cc
from yafsdp_cc.integrations.titan import parallelize


def make_model():
    with torch.device("meta"):
        return spec.model.build()


if not torch.cuda.is_available():
    parallel_dims.device_type = "cpu"  # torchtitan itself takes "cuda" where there is nothing else
spec = dataclasses.replace(llama3.model_registry("debugmodel"), parallelize_fn=parallelize)
for layer in spec.model.layers:  # FlexAttention has no backward on CPUs
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
if not dist.is_initialized():
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
world = dist.get_world_size()

settings = {
    "parallel_dims": ParallelDims(dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=1, world_size=world),
    "training": TrainingConfig(mixed_precision_param="float32"),
    "parallelism": ParallelismConfig(),
    "compile_config": CompileConfig(),
    "ac_config": None,
    "dump_folder": "",
}
torch.manual_seed(0)  # the same on every rank, as the Trainer has it
model = spec.parallelize_fn(make_model(), **settings)
model.to_empty(device="cpu")  # the Trainer calls both, which then do nothing
model.init_weights(buffer_device=None)
whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # the test compares with these
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

tokens = torch.randint(2048, (4, 2, 16), generator=torch.Generator().manual_seed(1))
losses = []
for step in range(2):
    batch = tokens[2 * step + dist.get_rank()]
    loss = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(yafsdp_cc.plan_of(model))
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
