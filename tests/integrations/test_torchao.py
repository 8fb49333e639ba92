"""torchao: float8 weights are gathered in float8, NF4 weights once; and its own 8-bit optimizers on a rank's shards."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

import yafsdp_cc
from tests.integrations.adapters import WIDTH, LowRank, train_as_in_one_process
from tests.ranks import ranks
from tests.reference import mean_gradients
from tests.twins import numbers, refusal, square, trains_on, whole

pytest.importorskip("torchao", reason="torchao is not installed (extra 'torchao')")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.prototype.moe_training.config import KernelPreference, MXFP8TrainingOpConfig
from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight
from torchao.quantization import NF4Tensor

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def linears(width: int, count: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


def float8(width: int, *, gathers: bool = True) -> nn.Module:
    """Linear layers that compute in float8, whose weights are gathered in float8 as well."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
    return convert_to_float8_training(linears(width), config=config)


def mxfp8(width: int) -> nn.Module:
    """Linear layers that compute in MXFP8; torchao gathers their weights in the dtype of the forward."""
    config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
    model = linears(width)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(MXFP8TrainingWeightWrapperTensor(module.weight.detach(), config))
            module.bias = None  # which torchao 0.18 leaves out of an MXFP8 product
    return model


def trained(apply: Any, model: Any, policy: MixedPrecisionPolicy, width: int) -> list[Tensor]:
    """The weights after three steps of AdamW, sharded bottom-up by ``apply``."""
    for block in model:
        apply(block, mp_policy=policy)
    apply(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        square(model, numbers(32, width, seed=10 * step + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    wholes = [parameter.full_tensor().detach() for parameter in model.parameters()]
    return [getattr(each, "_tensor", getattr(each, "_data", each)) for each in wholes]


@ranks(2)
def test_float8_and_mxfp8_train_as_with_fsdp2() -> None:
    for build, policies in ((float8, (BF16, MixedPrecisionPolicy())), (mxfp8, (BF16,))):
        for policy in policies:
            ours = trained(yafsdp_cc.fully_shard, build(64), policy, 64)
            theirs = trained(fsdp2, build(64), policy, 64)
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), (build, policy)


def int8(*, trains: bool) -> Any:
    """Linear layers whose weights are int8 and a scale for each row, which steps round at random."""
    model: Any = linears(64)
    for block in model:
        weight = Int8QuantizedTrainingLinearWeight.from_float(block[0].weight.detach())
        block[0].weight = nn.Parameter(weight, requires_grad=trains)
    return model


@ranks(2)
def test_int8_weights_train_as_with_fsdp2() -> None:
    """Also under ``param_dtype``, which the class's extension applies to frozen ones, too."""
    for trains, policy in product((True, False), (BF16, MixedPrecisionPolicy())):
        losses = []
        for apply in (yafsdp_cc.fully_shard, fsdp2):
            model = int8(trains=trains)
            for block in model:
                apply(block, mp_policy=policy)
            apply(model, mp_policy=policy)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1.0, foreach=False)
            for step in range(3):
                losses.append(square(model, numbers(32, 64, seed=10 * step + dist.get_rank())))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        assert losses[:3] == losses[3:], (trains, policy)
        assert losses[0] != losses[2]


@ranks(2)
def test_float8_rows_that_the_ranks_do_not_divide() -> None:
    """Where FSDP2 aborts: to the bit what one process computes."""
    model, plain = yafsdp_cc.shard(float8(49), units=[nn.Sequential]), float8(49, gathers=False)
    trains_on(model, plain, square, [[numbers(16, 49, seed=2 * step + rank) for rank in range(2)] for step in range(3)])


@ranks(2)
def test_float8_gathers_half_of_the_bytes_of_bf16() -> None:
    sent = {}
    for build in (float8, linears):
        model = yafsdp_cc.shard(build(256), units=[nn.Sequential], mp_policy=BF16)
        square(model, numbers(16, 256)).backward()
        sent[build] = yafsdp_cc.counters_of(model).gathered_bytes
    assert sent[float8] <= 0.51 * sent[linears], sent


@ranks(2)
def test_8_bit_optimizers_step_the_shards() -> None:
    """As in one process, on the same ranges of elements: torchao quantises the state of a range in blocks."""
    torch.compiler.set_stance("force_eager")  # what torchao compiles, minutes on a CPU
    model, plain = yafsdp_cc.shard(linears(128), units=[nn.Sequential]), linears(128)
    refused = AdamW8bit(list(model.parameters()), lr=1e-2)
    square(model, numbers(16, 128)).backward()
    assert "give it the shards themselves" in refusal(refused.step)
    model.zero_grad()
    shards = {parameter: nn.Parameter(parameter.detach().to_local()) for parameter in model.parameters()}
    ranges = {name: parameter.shard_spec.local_range() for name, parameter in model.named_parameters()}
    own = {name: nn.Parameter(plain.get_parameter(name).detach().view(-1)[slice(*ranges[name])]) for name in ranges}
    optimizers = [AdamW8bit(list(each.values()), lr=1e-2) for each in (shards, own)]
    for step in range(3):
        batches = [numbers(16, 128, seed=2 * step + rank) for rank in range(2)]
        square(model, batches[dist.get_rank()]).backward()
        _, means = mean_gradients(plain, square, batches)
        for parameter, shard in shards.items():
            shard.grad = parameter.grad.to_local()
        for name, slice_ in own.items():
            slice_.grad = means[name].view(-1)[slice(*ranges[name])]
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        for name, parameter in plain.named_parameters():
            assert torch.equal(model.get_parameter(name).detach().to_local().view(-1), own[name]), name
            parameter.data.copy_(whole(model.get_parameter(name).detach()))  # of all ranges
    assert any(isinstance(each["exp_avg"], OptimState8bit) for each in optimizers[0].state.values())


def nf4_layer() -> nn.Module:
    base = nn.Linear(WIDTH, WIDTH, bias=False)
    base.weight = nn.Parameter(NF4Tensor.from_tensor(base.weight.detach(), 64, 256), requires_grad=False)
    return LowRank(base)


@ranks(2)
def test_adapters_of_nf4_weights_train_as_in_one_process() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nf4_layer() for _ in range(3)))

    model, plain = train_as_in_one_process(build)
    sharded: Any = model
    one: Any = plain
    with yafsdp_cc.whole_parameters(model):
        assert torch.equal(sharded[0].base.weight.get_original_weight(), one[0].base.weight.get_original_weight())
