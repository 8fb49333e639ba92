"""A pipeline of two stages over a slow link, each sharded over two ranks, with everything that crosses compressed.

Between the stages: 4 bits per number of the change of each sample's activation (AQ-SGD), 8 bits per number of its
gradient. Within a stage: 1 bit per number of the parameters' gradients, by OneBitAdam.

yafsdp-cc launch --standalone --nproc-per-node=4 docs/examples/compressed_pipeline.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

import yafsdp_cc
from yafsdp_cc.optim import OneBitAdam
from yafsdp_cc.pipelining import CompressedShardedStage, prepare_schedule

SAMPLES, BATCH, EPOCHS = 24, 8, 4

kind = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("pipeline", "data"))
place, rank = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, inputs):
        return inputs + self.down(F.gelu(self.up(self.norm(inputs))))


class Training:
    """One rank's part of it: ``stage`` and ``schedule``, ``module`` and ``optimizer``."""

    def __init__(self, folder=None):
        torch.manual_seed(0)  # the same on every rank
        blocks = [Block() for _ in range(4)]
        part = nn.Sequential(*blocks[2 * place : 2 * place + 2])
        self.module = yafsdp_cc.shard(part, mesh=mesh["data"], reshard_after_forward=False, compression="onebit")
        self.optimizer = OneBitAdam(self.module.parameters(), lr=1e-3, warmup_steps=4)
        self.stage = CompressedShardedStage(
            self.module,
            place,
            2,
            device,
            group=mesh["pipeline"].get_group(),
            forward="int4",
            backward="int8",
            forward_delta=True,
            cache_samples=SAMPLES,
        )
        if folder is not None:
            extra = yafsdp_cc.load(f"{folder}/{place}", self.module, self.optimizer)
            self.stage.load_state_dict(extra["stage"])
        self.schedule = prepare_schedule(Schedule1F1B(self.stage, n_microbatches=4, loss_fn=F.mse_loss))

    def save(self, folder):
        yafsdp_cc.save(f"{folder}/{place}", self.module, self.optimizer, stage=self.stage.state_dict())

    def epoch(self, number):
        """Return the mean loss on ranks of the last stage, nan elsewhere."""
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(number))  # the same on every rank
        losses = []
        for ids in order.split(BATCH):
            batch = samples[ids]
            if place == 0:
                self.schedule.step(batch, sample_ids=ids)
            else:
                of_micro_batches = []
                self.schedule.step(target=batch.flip(-1), losses=of_micro_batches, sample_ids=ids)
                losses += of_micro_batches
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else float("nan")


# Each of the two shards trains on samples of its own, with ids of its own.
samples = torch.randn(2, SAMPLES, 16, 64, generator=torch.Generator().manual_seed(1))[rank].to(device)
checkpoint = tempfile.mkdtemp() if dist.get_rank() == 0 else None
checkpoint = [checkpoint]
dist.broadcast_object_list(checkpoint)

training = Training()
losses, sent = [], []
for number in range(EPOCHS):
    before = sum(training.stage.sent_bytes.values())
    losses.append(training.epoch(number))
    sent.append(sum(training.stage.sent_bytes.values()) - before)
    if number == 1:
        training.save(checkpoint[0])
if dist.get_rank() in (0, 3):
    direction, exact = ("forward", "backward")[place], 4 * samples.numel()
    print(f"bytes {direction}, by epoch: {sent}; exactly: {exact}")
    if place:
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))
