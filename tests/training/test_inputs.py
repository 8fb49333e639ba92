"""What a sharded model is called with: moved to the device of its mesh, as FSDP2's root does, and cast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from tests.internals import set_input_device
from tests.models import WIDTH
from tests.ranks import ranks

META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass
class Batch:
    rows: Tensor
    name: str


class Unit(nn.Module):
    """Keeps what it is called with, and computes something else: nothing can be computed on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = args, kwargs
        out: Tensor = self.layer(torch.ones(2, WIDTH, dtype=self.layer.weight.dtype))
        return out


class Model(Unit):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Unit()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) + self.inner(torch.ones(2))  # type: ignore[no-any-return]


def sharded(policy: MixedPrecisionPolicy) -> Any:
    model = Model()
    yafsdp_cc.fully_shard(model.inner, mp_policy=policy)
    yafsdp_cc.fully_shard(model, mp_policy=policy)
    model(torch.ones(2))
    return model


@ranks(1)
def test_inputs_are_moved_to_the_device_of_the_mesh() -> None:
    model = sharded(MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    set_input_device(model, META)
    there = torch.ones(2, device=META, dtype=torch.bfloat16)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    model(
        torch.ones(2), [Batch(torch.ones(3), "b"), 7], there, mask={"of": torch.ones(2, dtype=torch.bool)}, rnn=packed
    ).sum().backward()
    (x, (batch, number), same), kwargs = model.seen
    assert kwargs["rnn"].data.device == kwargs["rnn"].sorted_indices.device == META
    assert kwargs["rnn"].batch_sizes is packed.batch_sizes  # torch has it on the CPU
    assert [each.device for each in (x, batch.rows, kwargs["mask"]["of"])] == [META] * 3
    assert [each.dtype for each in (x, batch.rows, kwargs["mask"]["of"])] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.bool,
    ]
    assert (batch.name, number) == ("b", 7)
    assert same is there
    assert model.inner.seen[0][0].device == CPU  # within the model tensors are where it has put them


@ranks(1)
def test_a_unit_called_by_itself_moves_its_inputs() -> None:
    model = sharded(MixedPrecisionPolicy())
    set_input_device(model, META)
    with torch.no_grad():
        model.inner(torch.ones(2), rows=torch.ones(3))
    args, kwargs = model.inner.seen
    assert args[0].device == kwargs["rows"].device == META


@ranks(1)
def test_on_a_mesh_of_cpus_inputs_stay_the_objects_that_they_are() -> None:
    model = sharded(MixedPrecisionPolicy())
    given = [torch.ones(2)], torch.ones(2, device=META)
    model(*given).sum().backward()
    assert model.seen[0][0] is given[0]
    assert model.seen[0][1] is given[1]
