"""Lightning's Fabric and Trainer train, save and load a model that their own hooks shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import yafsdp_cc
from tests import reference
from tests.integrations.examples import as_launched, on_example, same, whole
from tests.ranks import ranks
from yafsdp_cc.tools.report.tables import read_run

pytest.importorskip("lightning", reason="lightning is not installed (extra 'lightning')")


def _loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def _truth(ran: dict[str, Any], shuffled: bool, epochs: int = 1) -> tuple[nn.Module, list[float]]:
    """Lightning deals samples out by torch's sampler; its Trainer has shuffled them before, in each epoch anew."""
    plain = ran["make_model"]()

    def dealt(rank: int, epoch: int) -> list[tuple[torch.Tensor, ...]]:
        sampler = DistributedSampler(ran["data"], num_replicas=2, rank=rank, shuffle=shuffled)
        sampler.set_epoch(epoch)
        order = list(sampler)
        return list(zip(*(tensor[order].split(8) for tensor in ran["data"].tensors), strict=True))

    batches = [both for epoch in range(epochs) for both in zip(dealt(0, epoch), dealt(1, epoch), strict=True)]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def gradients(step: int) -> tuple[float, reference.Gradients]:
        return reference.mean_gradients(plain, _loss, batches[step])

    return plain, reference.train(plain, optimizer, gradients, len(batches), clip=0.5)


def test_the_example_of_fabric_equals_one_process() -> None:
    on_example("lightning_fabric", _check_fabric)


def _check_fabric(ran: dict[str, Any]) -> None:
    plain, losses = _truth(ran, shuffled=False)
    assert ran["losses"] == pytest.approx(losses, rel=1e-5)
    same(whole(ran["model"].module), plain)  # after it was zeroed and loaded


def test_the_example_of_the_trainer_equals_one_process() -> None:
    on_example("lightning_trainer", _check_trainer)


def _check_trainer(ran: dict[str, Any]) -> None:
    plain, losses = _truth(ran, shuffled=True, epochs=2)
    assert ran["first"].losses + ran["model"].losses == pytest.approx(losses, rel=1e-5)
    same(whole(ran["model"].net), plain)
    with torch.no_grad():
        validated = _loss(plain, ran["data"].tensors).item()
    assert ran["validated"]["val_loss"] == pytest.approx(validated, rel=1e-5)
    if dist.get_rank() == 0:
        run = read_run(Path(ran["folder"]) / "metrics.jsonl")  # of two runs, the second of which resumed
        assert run.curve("loss")[-1] == (8, pytest.approx(losses[-1], rel=1e-5))
        assert {x for x, _ in run.curve("gathered_bytes_per_step")} == {1, 4, 5, 8}


@ranks(2)
def test_accumulation_with_fabric() -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    as_launched()

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        return yafsdp_cc.shard(model, units=[nn.Linear], mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 5))
    torch.manual_seed(0)
    model = fabric.setup_module(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 5)))
    inputs, targets = torch.randn(3, 2, 8, 32), torch.randint(5, (3, 2, 8))
    counters = yafsdp_cc.counters_of(model.module)
    reduced = []
    for micro in range(3):
        with fabric.no_backward_sync(model, enabled=micro < 2):
            fabric.backward(_loss(model, (inputs[micro, fabric.global_rank], targets[micro, fabric.global_rank])))
        reduced.append(counters.reduced_bytes)
    assert reduced[:2] == [0, 0]
    assert reduced[2] > 0
    parts = [
        reference.mean_gradients(plain, _loss, list(zip(inputs[micro], targets[micro], strict=True)))[1]
        for micro in range(3)
    ]
    found = {name: parameter.grad.full_tensor() for name, parameter in model.module.named_parameters()}
    same(found, {name: sum(part[name] for part in parts) for name in found})


class Streamed(IterableDataset[torch.Tensor]):
    """Six samples, of which nothing says how many there are."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(6, 4))


@ranks(1)
def test_metrics_of_steps_that_a_module_makes_itself(tmp_path: Path) -> None:
    import lightning

    from yafsdp_cc.integrations.lightning import metrics_callback

    class Manual(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = nn.Linear(4, 4), False

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    log = metrics_callback(tmp_path, every=1, show=False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[log], **quiet)
    trainer.fit(Manual(), DataLoader(Streamed(), batch_size=2))
    assert [x for x, _ in read_run(tmp_path / "metrics.jsonl").curve("s_per_step")] == [1, 2, 3]
    assert log.metrics._total is None  # data without a length do not say how many


@ranks(1)
def test_metrics_have_the_loss_of_a_micro_batch_undivided(tmp_path: Path) -> None:
    import lightning

    from yafsdp_cc.integrations.lightning import metrics_callback

    class Accumulated(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).sum() * 0 + 3 + index

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    log = metrics_callback(tmp_path, every=1, show=False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=4, callbacks=[log], **quiet
    )
    trainer.fit(Accumulated(), DataLoader(torch.ones(12, 4), batch_size=2))
    assert read_run(tmp_path / "metrics.jsonl").curve("loss") == [(1, 6), (2, 8)]  # of the last micro-batch


@ranks(1)
def test_metrics_of_validations_during_training_alone(tmp_path: Path) -> None:
    import lightning

    from yafsdp_cc.integrations.lightning import metrics_callback

    class Validated(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)
            self.seen: list[float] = []

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            loss = self.net(batch).square().mean()
            self.log("val_loss", loss)
            self.seen.append(loss.item())

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    log = metrics_callback(tmp_path, every=1, show=False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, val_check_interval=1, callbacks=[log], **quiet)
    model, data = Validated(), DataLoader(torch.ones(4, 4), batch_size=2)
    trainer.fit(model, data, DataLoader(torch.ones(2, 4), batch_size=2))
    trainer.validate(model, DataLoader(torch.ones(2, 4), batch_size=2), verbose=False)
    assert len(model.seen) == 4  # one before training, one after each step, one after training
    curve = read_run(tmp_path / "metrics.jsonl").curve("val_loss")
    assert curve == [(step, pytest.approx(model.seen[step])) for step in (1, 2)]
