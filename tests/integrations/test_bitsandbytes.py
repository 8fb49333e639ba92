"""bitsandbytes: adapters train on its frozen 4-bit weights, which are sharded and gathered once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import yafsdp_cc
from tests.integrations.adapters import WIDTH, LowRank, train_as_in_one_process
from tests.ranks import ranks
from tests.twins import numbers, refusal

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra 'bitsandbytes')")


def quantised_layer(storage: torch.dtype) -> nn.Module:
    base = bnb.nn.Linear4bit(
        WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage
    )
    base.weight = bnb.nn.Params4bit(
        torch.randn(WIDTH, WIDTH) / WIDTH**0.5,
        requires_grad=False,
        quant_type="nf4",
        quant_storage=storage,
        module=base,
    )
    return LowRank(base.to("cpu"))  # which quantises


def build(storage: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(quantised_layer(storage) for _ in range(3)))


@ranks(2)
def test_adapters_of_4_bit_weights_train_as_in_one_process(tmp_path: Path) -> None:
    """Also stored as bf16, FSDP's way of old: mixed precision does not cast what are no numbers."""
    for storage in (torch.uint8, torch.bfloat16):
        model, plain = train_as_in_one_process(partial(build, storage))
        sharded: Any = model
        one: Any = plain
        assert sharded[0].base.weight.to_local().nbytes * 2 == one[0].base.weight.nbytes
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
