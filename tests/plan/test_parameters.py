"""Parameters that cannot be sharded are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from yafsdp_cc.sharding.units import find_units


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


class Marked(nn.Parameter):
    """As ``bitsandbytes.nn.Params4bit``."""


def test_a_parameter_of_another_class() -> None:
    wrapped = TwoTensor(torch.ones(32, 32), torch.ones(32, 32))  # with __torch_dispatch__, as torchao's
    for parameter, kind in ((Marked(torch.empty(32, 32)), "Marked"), (nn.Parameter(wrapped), "TwoTensor")):
        model = model_with(parameter)
        if kind == "Marked":
            with pytest.raises(
                ValueError, match=r"'1.0.odd' is a [a-z._]+\.Marked of .* and requires a .* ignored_params"
            ):
                find_units(model, [model])
        else:  # sharded as one of its class
            assert find_units(model, [model]).units[0].parameters[-1].parameter is parameter
        assert find_units(model, [model], ignored={parameter}).units
        parameter.requires_grad_(False)
        found = find_units(model, [model]).units[0].parameters[-1]
        assert (found.held is parameter, type(found.parameter)) == (True, nn.Parameter)
        assert found.parameter.nbytes == (4 if kind == "Marked" else 8) * 32 * 32


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
        assert len(find_units(model, [model]).replicated) == 2
        model.c = nn.Parameter(flat[1000:1100])
    with pytest.raises(ValueError, match=r"'c' shares memory with 'a' without being the same nn.Parameter"):
        find_units(model, [model])
