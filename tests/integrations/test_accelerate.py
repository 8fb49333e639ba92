"""Accelerate trains, saves and loads a model that is sharded already, and neither wraps nor reshards it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import yafsdp_cc
from tests import reference
from tests.integrations.examples import as_launched, on_example, same, whole
from tests.ranks import ranks

pytest.importorskip("accelerate", reason="accelerate is not installed (extra 'accelerate')")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed (extra 'frameworks')")


def test_the_example_equals_one_process() -> None:
    on_example("accelerate_loop", _check)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def _check(ran: dict[str, Any]) -> None:
    model, optimizer = ran["model"], ran["optimizer"]
    plain, data = ran["make_model"](), ran["data"].tensors
    batches = list(zip(*(tensor.split(8) for tensor in data), strict=True))
    truth = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    rate = torch.optim.lr_scheduler.ExponentialLR(truth, 0.95**2)  # Accelerate's is stepped once for each rank
    truth.register_step_post_hook(lambda *_: rate.step())
    losses = reference.train(
        plain,
        truth,
        lambda step: reference.mean_gradients(plain, _loss, batches[2 * step % 8 : 2 * step % 8 + 2]),
        steps=8,
        clip=0.5,
    )
    assert ran["losses"] == pytest.approx(losses, rel=1e-5)
    assert ran["repeated"] == ran["losses"][4:]
    same(whole(model), plain)
    assert torch.equal(torch.cat(ran["right"]), plain(data[0]).argmax(1) == data[1])
    if ran["accelerator"].is_main_process:
        same(ran["whole"], plain)
        same(safetensors.load_file(f"{ran['folder'][0]}/model.safetensors"), plain)
    assert not hasattr(model, "module")  # nothing around it
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(a is b for a, b in zip(owned, model.parameters(), strict=True))
    moments = truth.state_dict()["state"]
    for index, parameter in enumerate(model.parameters()):  # and the optimizer's state was loaded, too
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"].full_tensor(), moments[index]["exp_avg"])


@ranks(2, fresh=True)  # Accelerator remembers how it was made first
def test_a_model_that_is_not_sharded_is_refused_by_name() -> None:
    from accelerate import Accelerator

    from yafsdp_cc.integrations.accelerate import accept_sharded

    as_launched()
    accelerator = Accelerator(cpu=True)
    plain = nn.Linear(32, 32)
    with pytest.raises(ValueError, match="this Linear is not sharded"):
        accept_sharded(accelerator, plain)
    model = yafsdp_cc.shard(nn.Linear(32, 32), units=[nn.Linear])
    twice = r"DistributedDataParallel around a sharded Linear.*accept_sharded\(accelerator, model\)"
    with pytest.raises(RuntimeError, match=twice):  # before accept_sharded
        accelerator.prepare(model)
    with pytest.raises(RuntimeError, match=twice):
        nn.parallel.DistributedDataParallel(model)
    inspect.getmembers(model)  # which reads every attribute
    accept_sharded(accelerator, model)
    with pytest.raises(ValueError, match="this Linear is not sharded"):
        accelerator.prepare(plain, torch.optim.SGD(plain.parameters()))


@ranks(2)
def test_accumulation_reduces_each_micro_batch_or_the_last() -> None:
    from accelerate.state import AcceleratorState

    as_launched()
    each = _accumulate(True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert each == 4 * _accumulate(False)  # four micro-batches


def _accumulate(each: bool) -> int:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    from yafsdp_cc.integrations.accelerate import accept_sharded

    plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch=each)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 5))
    torch.manual_seed(0)
    model = yafsdp_cc.shard(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 5)), units=[nn.Linear])
    accept_sharded(accelerator, model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = torch.randn(4, 2, 8, 32), torch.randint(5, (4, 2, 8))
    parts = []
    for micro in range(4):
        with accelerator.accumulate(model):
            mine = (inputs[micro, accelerator.process_index], targets[micro, accelerator.process_index])
            accelerator.backward(_loss(model, mine))
            optimizer.step()
        batches = list(zip(inputs[micro], targets[micro], strict=True))
        parts.append(reference.mean_gradients(plain, _loss, batches)[1])
    for name, parameter in plain.named_parameters():
        parameter.grad = torch.stack([part[name] for part in parts]).mean(0)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    same(whole(model), plain)
    return yafsdp_cc.counters_of(model).reduced_bytes
