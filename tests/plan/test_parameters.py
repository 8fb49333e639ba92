"""Parameters that cannot be sharded are refused by name."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from yafsdp_cc.plan import find_units


def model_with(parameter: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    model[1][0].register_parameter("odd", parameter)
    return model


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match=r"this model \(Sequential\) has no parameters"):
        find_units(nn.Sequential(nn.ReLU()))


def test_complex_parameters_may_only_be_frozen() -> None:
    parameter = nn.Parameter(torch.empty(32, 32, dtype=torch.complex64))
    model = model_with(parameter)
    with pytest.raises(ValueError, match=r"'1.0.odd' is torch.complex64 and requires a gradient"):
        find_units(model, [model])
    assert find_units(model, [model], ignored={parameter}).units
    parameter.requires_grad_(False)
    assert find_units(model, [model]).units[0].parameters[-1].name == "1.0.odd"


def test_a_lazy_parameter() -> None:
    model = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet \(a lazy module\): run one forward"):
        find_units(model, [model])


def test_a_sparse_parameter() -> None:
    model = model_with(nn.Parameter(torch.empty(32, 32).to_sparse()))
    with pytest.raises(ValueError, match=r"'1.0.odd' is torch.sparse_coo, not dense"):
        find_units(model, [model])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_overlapping_parameters(device: str) -> None:
    with torch.device(device):
        flat = torch.empty(2048)
        model = nn.Module()
        model.a = nn.Parameter(flat[:1024])
        model.b = nn.Parameter(flat[1024:])
        assert len(find_units(model, [model]).small) == 2
        model.c = nn.Parameter(flat[1000:1100])
    with pytest.raises(ValueError, match=r"'c' shares memory with 'a' without being the same nn.Parameter"):
        find_units(model, [model])


def test_an_optimizer_made_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    check_no_optimizer(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="AdamW") as caught:
        check_no_optimizer(model)
    message = "AdamW holds 4 of this model's parameters, and was made before shard() or fully_shard(): make it after"
    assert str(caught.value) == message
    check_no_optimizer(nn.Linear(4, 4))
    check_no_optimizer(model, ignored=list(model.parameters()))
    del optimizer, caught
    check_no_optimizer(model)


def test_an_optimizer_that_is_garbage_in_a_cycle() -> None:
    model = nn.Linear(4, 4)
    gc.disable()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.itself = optimizer
        gone = weakref.ref(optimizer)
        del optimizer
        check_no_optimizer(model)
        assert gone() is None
    finally:
        gc.enable()


class Proxy:
    """As awkward as the lazy objects of other libraries: asking what it is raises."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("not now")


def test_proxies_are_left_alone() -> None:
    awkward = [Proxy()]
    check_no_optimizer(nn.Linear(4, 4))
    assert awkward
