"""Parameters of other units, as the root's forward sees them: in the dtype that their unit computes in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import yafsdp_cc
from tests.fully_shard.programs import BF16, AsksInTheModel
from tests.models import VOCABULARY, WIDTH, Mlp
from tests.ranks import ranks
from tests.subclasses import Float8Weight
from tests.twins import numbers, seeded, square, whole


class LooksAtItsEmbedding(AsksInTheModel):
    def forward(self, tokens: Tensor) -> Any:  # a weight comes out beside the logits
        weight = dict(self.named_parameters())["embed.weight"]
        assert isinstance(weight, nn.Parameter)
        assert isinstance(weight, DTensor)
        assert (weight.dtype, weight.shape, weight.grad) == (torch.bfloat16, (VOCABULARY, 16), None)
        assert weight.is_floating_point()
        assert weight.requires_grad
        self.seen = weight.full_tensor().detach()
        return super().forward(tokens), weight.float().square().sum()


@ranks(2)
def test_a_forward_finds_its_dtype_in_a_parameter_of_another_unit() -> None:
    plain = seeded(LooksAtItsEmbedding).embed.weight.detach().bfloat16()
    model = yafsdp_cc.shard(seeded(LooksAtItsEmbedding), mp_policy=BF16, units=["Asks", "embed"])
    output, penalty = model(torch.arange(14).view(2, 7))
    assert torch.equal(model.seen, plain)
    assert model.dtype == torch.float32  # outside of the forward, the sharded one's
    (penalty + 0 * output.float().sum()).backward()
    gradient = whole(model.embed.weight.grad)
    assert torch.allclose(gradient, 2 * plain.float(), rtol=1e-2)


class LooksAtItsBlocks(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: parameter.dtype for name, parameter in self.named_parameters()}
        return super().forward(x)


@ranks(2)
def test_a_forward_finds_its_dtype_in_parameters_that_are_gathered_in_another() -> None:
    for policy, dtype in ((MixedPrecisionPolicy(), torch.float32), (BF16, torch.bfloat16)):
        model = seeded(LooksAtItsBlocks)
        for block in model.blocks:
            block[0].weight = nn.Parameter(Float8Weight(block[0].weight.detach()))
        yafsdp_cc.shard(model, units=["blocks.*"], mp_policy=policy)
        square(model, numbers(2, WIDTH)).backward()
        assert set(model.seen.values()) == {dtype}, model.seen
