"""bitsandbytes: adapters train on its frozen 4-bit weights, which are sharded and gathered once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.ranks import ranks
from tests.twins import numbers, refusal, square, whole

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra 'frameworks')")


class LowRank(nn.Module):
    """A frozen 4-bit layer with an adapter."""

    def __init__(self, width: int, storage: torch.dtype) -> None:
        super().__init__()
        values = torch.randn(width, width) / width**0.5
        self.base = bnb.nn.Linear4bit(
            width, width, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage
        )
        self.base.weight = bnb.nn.Params4bit(
            values, requires_grad=False, quant_type="nf4", quant_storage=storage, module=self.base
        )
        self.base.to("cpu")  # quantises
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def build(storage: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(LowRank(128, storage) for _ in range(3)))


@ranks(2)
def test_adapters_of_4_bit_weights_train_as_in_one_process(tmp_path: Path) -> None:
    """Also stored as bf16, FSDP's way of old: mixed precision does not cast what are no numbers."""
    for storage in (torch.uint8, torch.bfloat16):
        model, plain = yafsdp_cc.shard(build(storage), units=[LowRank], reshard_after_forward=False), build(storage)
        assert model[0].base.weight.to_local().nbytes * 2 == plain[0].base.weight.nbytes
        optimizers = [
            torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=1.0) for each in (model, plain)
        ]
        sent = [0]
        for step in range(3):
            batches = [numbers(8, 128, seed=10 * step + rank) for rank in range(2)]
            square(model, batches[dist.get_rank()]).backward()
            torch.stack([square(plain, each) for each in batches]).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            sent.append(yafsdp_cc.counters_of(model).gathered_bytes)
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(whole(model.get_parameter(name).detach()), parameter, rtol=1e-6, atol=1e-7)
        alone = build(storage)
        ignored = [layer.base.weight for layer in alone]
        yafsdp_cc.shard(alone, units=[LowRank], ignored_params=ignored, reshard_after_forward=False)
        square(alone, numbers(8, 128)).backward()
        adapters = yafsdp_cc.counters_of(alone).gathered_bytes
        assert sent[3] - sent[2] == sent[2] - sent[1] == adapters < sent[1]
        assert "0.base.weight.absmax" in model.state_dict()  # as bitsandbytes has it
        yafsdp_cc.save(tmp_path / str(storage), model)
        with torch.no_grad():
            model[1].base.weight.zero_()
        yafsdp_cc.load(tmp_path / str(storage), model)
        torch.testing.assert_close(model(numbers(2, 128)), plain(numbers(2, 128)))
        other = yafsdp_cc.shard(build(storage, seed=1), units=[LowRank])
        said = refusal(partial(yafsdp_cc.load, tmp_path / str(storage), other))
        assert "quant_state" in said or "quantised from other values" in said, said
        yafsdp_cc.unshard_model(model)
        assert type(model[0].base.weight) is bnb.nn.Params4bit
        torch.testing.assert_close(model(numbers(2, 128)), plain(numbers(2, 128)))


@ranks(2)
def test_8_bit_weights_are_refused_by_name() -> None:
    """They keep their elements a second time, and a forward moves them."""
    layer = bnb.nn.Linear8bitLt(128, 128, bias=False, has_fp16_weights=False).to("cpu")
    said = refusal(lambda: yafsdp_cc.shard(nn.Sequential(layer, nn.Linear(128, 128))))
    assert "'0.weight' is a bitsandbytes.nn.modules.Int8Params" in said, said
    assert "ignored_params" in said, said
