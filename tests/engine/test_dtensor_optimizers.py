"""Torch's optimizers and gradient scaling on sharded parameters: bit for bit as in one process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as clipping_types

from tests.engine.flats import mesh_of_all, one_sharded, part_of, specs_of, twins, uneven_specs_of
from tests.ranks import on_ranks
from tests.soak import also
from yafsdp_cc.tensor.dtensor import FlatDTensor

FORMS = [{"foreach": False}, {"foreach": True}]

OPTIMIZERS = [
    (name, kwargs | form)
    for form in FORMS
    for name, kwargs in [
        ("AdamW", {}),
        ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("RMSprop", {"centered": True, "momentum": 0.9}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adamax", {}),
        ("Adadelta", {}),
        ("ASGD", {}),
        ("Rprop", {}),
    ]
] + [
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("Adam", {"fused": True, "amsgrad": True}),
    ("SGD", {"fused": True, "momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"fused": True}),
]


def all_optimizers():
    mesh = mesh_of_all()
    for name, kwargs in OPTIMIZERS:
        # The fused CPU kernels round the last elements of a tensor, fewer than a vector, otherwise than the
        # rest: ranges agree with the whole where they begin at multiples of a vector, as a unit's layout has it.
        for specs in (specs_of,) if "fused" in kwargs else (specs_of, uneven_specs_of):
            ours, theirs = twins(mesh, specs)
            if name == "Rprop":  # For a scalar torch's Rprop goes through views of it.
                ours, theirs = ([p for p in ps if p.dim()] for ps in (ours, theirs))
            make = getattr(torch.optim, name)
            optimizers = [make(parameters, lr=0.1, **kwargs) for parameters in (ours, theirs)]
            for step in range(4):
                for optimizer in optimizers:
                    optimizer.step()
                for our, their in zip(ours, theirs, strict=True):
                    assert our.full_tensor().equal(their), (name, kwargs, step, our)
                    with torch.no_grad():
                        our.grad.mul_(-0.7)
                        their.grad.mul_(-0.7)
                if step == 1:  # Resume: a new optimizer from the old one's state.
                    state = optimizers[0].state_dict()
                    optimizers[0] = make(ours, lr=0.1, **kwargs)
                    optimizers[0].load_state_dict(state)
            for state in optimizers[0].state.values():
                for value in state.values():
                    assert not isinstance(value, torch.Tensor) or value.numel() == 1 or type(value) is FlatDTensor


@pytest.mark.parametrize("world", [2, also(4)])
def test_optimizers_equal_a_single_process_bit_for_bit(world):
    on_ranks(world, all_optimizers)


def chosen_forms():
    """torch lists the types for which it takes the foreach and fused forms by itself; nothing is added to its lists."""
    parameter = nn.Parameter(one_sharded()[0])
    for listed in (optimizer_types, clipping_types):
        assert type(parameter) in listed
        assert not any(each is FlatDTensor for each in listed)
    assert FlatDTensor != torch.Tensor
    assert len({FlatDTensor, DTensor}) == 2


def test_foreach_is_the_default_without_a_change_of_torch_s_lists():
    on_ranks(1, chosen_forms)


def scalar_rprop():
    flat, _ = one_sharded(shape=())
    parameter = nn.Parameter(flat)
    parameter.grad = part_of(torch.tensor(1.0), flat.shard_spec)
    with pytest.raises(NotImplementedError, match=r"aten.unsqueeze on 'layers.0.w' \(sharded \[\]"):
        torch.optim.Rprop([parameter]).step()


def test_an_optimizer_that_looks_beyond_elements_is_told_so():
    on_ranks(1, scalar_rprop)


def scaler():
    mesh = mesh_of_all()
    ours, _ = twins(mesh)
    before = [p.full_tensor() for p in ours]
    optimizer = torch.optim.SGD(ours, lr=1.0)
    amp = torch.amp.GradScaler("cpu", init_scale=4.0)
    amp.scale(torch.ones(()))
    grads = [p.grad.full_tensor() for p in ours]
    amp.step(optimizer)
    amp.update()
    for p, old, grad in zip(ours, before, grads, strict=True):
        assert p.full_tensor().equal(old - grad / 4)
    last = [p.full_tensor() for p in ours]
    if dist.get_rank() == 0:
        ours[0].grad.to_local()[0] = math.inf
    amp.unscale_(optimizer)
    amp.step(optimizer)
    amp.update()
    assert amp.get_scale() == 2.0
    assert all(p.full_tensor().equal(old) for p, old in zip(ours, last, strict=True))


def test_a_scaler_skips_the_step_on_all_ranks():
    on_ranks(2, scaler)
