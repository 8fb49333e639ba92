"""A model sharded by yafsdp_cc, trained by the Trainer of Lightning.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/lightning_trainer.py
"""

import tempfile

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import yafsdp_cc
from yafsdp_cc.integrations.lightning import metrics_callback


def make_model():
    torch.manual_seed(0)  # the same on every rank
    blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
    return nn.Sequential(nn.Linear(32, 32), *blocks, nn.Linear(32, 5))


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = None
        self.losses = []

    def configure_model(self):
        if self.net is None:  # Lightning calls this for each of fit, validate, test
            self.net = yafsdp_cc.shard(make_model(), mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = F.cross_entropy(self.net(inputs), targets)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def validation_step(self, batch, index):
        inputs, targets = batch
        self.log("val_loss", F.cross_entropy(self.net(inputs), targets), sync_dist=True)


def make_trainer(epochs):
    return lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=world,
        strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
        max_epochs=epochs,
        gradient_clip_val=0.5,
        callbacks=[metrics_callback(folder)],  # yafsdp-cc report shows what it writes
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )


world = 2
folder = tempfile.mkdtemp()
data = TensorDataset(torch.randn(64, 32, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 5)
batches = DataLoader(data, batch_size=8)
first, model = Classifier(), Classifier()
trainer = make_trainer(epochs=1)
trainer.fit(first, batches)
saved = trainer.checkpoint_callback.best_model_path
trainer = make_trainer(epochs=2)
trainer.fit(model, batches, ckpt_path=saved)  # a second epoch, from saved shards
(validated,) = trainer.validate(model, batches)
trainer.print("losses", " ".join(f"{loss:.4f}" for loss in first.losses + model.losses))
