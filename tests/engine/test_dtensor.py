"""Sharded parameters: what they are, how they change, and what they refuse."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.engine.flats import mesh_of_all, one_sharded, part_of, specs_of, uneven_specs_of, wholes
from tests.ranks import on_ranks
from yafsdp_cc.engine.layout import ShardSpec
from yafsdp_cc.tensor.dtensor import FlatDTensor, flat_dtensor


def what_it_is():
    flat, buffer = one_sharded()
    parameter = nn.Parameter(flat)
    assert type(parameter) is FlatDTensor
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, DTensor)
    assert parameter.requires_grad
    assert parameter.shape == (4, 4)
    assert parameter.stride() == (4, 1)
    assert parameter.placements == (Shard(0),)
    assert parameter.device_mesh.size() == dist.get_world_size()
    assert parameter._local_tensor is flat._local_tensor
    with torch.no_grad():
        assert parameter.to_local() is parameter._local_tensor
    parameter.grad = part_of(torch.ones(4, 4), flat.shard_spec)
    assert type(parameter.grad) is FlatDTensor
    with torch.no_grad():
        parameter.add_(parameter.grad)
    assert buffer[:16].tolist() == ([float(i + 1) for i in range(16)] if dist.get_rank() == 0 else list(range(16)))
    module = nn.Module()
    module.w = parameter
    assert type(module.state_dict()["w"]) is FlatDTensor
    module.zero_grad(set_to_none=False)
    assert not parameter.grad.to_local().any()
    module.zero_grad()
    assert parameter.grad is None
    return repr(parameter)


def test_it_is_a_parameter_and_a_dtensor():
    first, second = on_ranks(2, what_it_is)
    assert first == "FlatDTensor('layers.0.w', [4, 4], torch.float32, cpu, holds 0:16 of 16)"
    assert second == "FlatDTensor('layers.0.w', [4, 4], torch.float32, cpu, holds 16:16 of 16)"


def odd_shapes():
    mesh = mesh_of_all()
    for spec, whole in itertools.chain(
        *(zip(make(mesh), wholes(), strict=True) for make in (specs_of, uneven_specs_of))
    ):
        flat = nn.Parameter(part_of(whole, spec))
        assert flat.shape == whole.shape
        assert flat.stride() == whole.stride()
        full = flat.full_tensor()
        assert type(full) is torch.Tensor
        assert full.requires_grad
        assert full.equal(whole)
        assert not flat.detach().full_tensor().requires_grad
        spread = flat.redistribute(placements=[Replicate()])
        assert type(spread) is DTensor
        assert spread.to_local().equal(whole)
        for dtype in (torch.bfloat16, torch.bool, torch.float8_e4m3fn):
            assert flat.detach().to(dtype).full_tensor().float().equal(whole.to(dtype).float())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_whole_tensor_comes_back(world):
    on_ranks(world, odd_shapes)


def in_the_middle_of_a_buffer():
    buffer = torch.arange(64.0)
    spec = ShardSpec("w", torch.Size([3, 4]), mesh_of_all(), (0, 12))
    flat = nn.Parameter(flat_dtensor(buffer[32:44], spec))
    assert flat.data_ptr() == 0  # As other DTensors: a number that is no address would be taken for one.
    assert flat.storage_offset() == 0
    with torch.no_grad():
        flat.mul_(2.0)
    assert buffer[32:44].equal(2 * torch.arange(32.0, 44.0))
    assert copy.deepcopy(flat).full_tensor().equal(buffer[32:44].view(3, 4))


def test_a_view_into_a_buffer():
    on_ranks(1, in_the_middle_of_a_buffer)


def bad_bounds():
    mesh = mesh_of_all()
    for bounds in [(0, 3), (0, 4, 4, 4), (1, 2, 4), (0, 5, 4)]:
        with pytest.raises(ValueError, match=r"'w': bounds .* do not divide 4 elements into 2 ranges"):
            ShardSpec("w", torch.Size([4]), mesh, bounds)
    spec = ShardSpec("w", torch.Size([2, 2]), mesh, (0, 2, 4))
    with pytest.raises(ValueError, match=r"'w' .* wants a contiguous \[2\], got \[3\]"):
        flat_dtensor(torch.zeros(3), spec)
    with pytest.raises(ValueError, match="outside of autograd"):
        flat_dtensor(torch.zeros(2, requires_grad=True), spec)


def test_what_does_not_fit_is_refused_by_name():
    on_ranks(2, bad_bounds)


def versions():
    flat, buffer = one_sharded()
    parameter = nn.Parameter(flat)
    parameter.grad = part_of(torch.ones(4, 4), flat.shard_spec)
    other = part_of(torch.ones(4, 4), flat.shard_spec)
    optimizers = [
        torch.optim.AdamW([parameter], **form) for form in ({"foreach": False}, {"foreach": True}, {"fused": True})
    ]

    def inference():
        with torch.inference_mode():
            parameter.mul_(2.0)

    changes = {
        "add_": lambda: parameter.add_(other),
        "mul_": lambda: parameter.mul_(2.0),
        "copy_": lambda: parameter.copy_(other),
        "copy_ whole": lambda: parameter.copy_(torch.ones(4, 4)),
        "data.copy_": lambda: parameter.data.copy_(other),
        "zero_": lambda: parameter.zero_(),
        "fill_": lambda: parameter.fill_(1.0),
        "mask": lambda: parameter.__setitem__(other > 0, 2.0),
        "masked_fill_": lambda: parameter.masked_fill_(other > 0, 2.0),
        "_foreach_add_": lambda: torch._foreach_add_([parameter], [other]),
        "_foreach_mul_": lambda: torch._foreach_mul_([parameter], torch.tensor(2.0)),
        "_foreach_copy_": lambda: torch._foreach_copy_([parameter], [torch.ones(4, 4)]),
        "_foreach_zero_": lambda: torch._foreach_zero_([parameter]),
        "_foreach_mul.out": lambda: torch.ops.aten._foreach_mul.Scalar_out([other], 2.0, out=[parameter]),
        "out": lambda: torch.maximum(other, other, out=parameter.data),
        "to_local": lambda: parameter.to_local().add_(1.0),
        "inference_mode": inference,
        **{f"optimizer {i}": optimizer.step for i, optimizer in enumerate(optimizers)},
    }
    for name, change in changes.items():
        before = buffer._version
        with torch.no_grad():
            change()
        assert buffer._version > before, name
        before = buffer._version
        parameter.detach().mul(2.0).add_(1.0)
        parameter.full_tensor().add_(1.0)
        assert buffer._version == before
    assert buffer[16:].equal(torch.arange(16.0, 64.0))


def test_the_buffer_s_version_grows_with_every_change():
    on_ranks(2, versions)


def copies():
    mesh = mesh_of_all()
    for spec, whole in zip(specs_of(mesh), wholes(), strict=True):
        flat = part_of(torch.zeros_like(whole), spec)
        flat.copy_(whole.mT.contiguous().mT if whole.dim() > 1 else whole)
        assert flat.full_tensor().equal(whole)
        flat.copy_(distribute_tensor(whole + 1, mesh, [Shard(0)] if whole.dim() else [Replicate()]))
        assert flat.full_tensor().equal(whole + 1)
        flat.copy_(3.0 * torch.ones(()))
        assert (flat.full_tensor() == 3).all()
        with pytest.raises(NotImplementedError, match="full_tensor"):
            whole.copy_(flat)
    model = nn.Module()
    model.w = nn.Parameter(part_of(wholes()[0], spec=specs_of(mesh)[0]))
    model.load_state_dict({"w": torch.full((12, 9), 2.0)})
    assert (model.w.full_tensor() == 2).all()
    twin = copy.deepcopy(model)
    assert type(twin.w) is FlatDTensor
    assert isinstance(twin.w, nn.Parameter)
    with torch.no_grad():
        twin.w.add_(1.0)
    assert (model.w.full_tensor() == 2).all()
    assert (twin.w.full_tensor() == 3).all()
    with pytest.raises(TypeError, match=r"pickling 'layers.0.w'"):
        pickle.dumps(model.w)
    with pytest.raises(NotImplementedError, match=r"assigning .data of 'layers.0.w'"):
        model.w.data = model.w.data.clone()


def test_copies():
    on_ranks(2, copies)


def drawn_as_whole():
    for draw in (torch.randn_like, torch.rand_like, lambda x: torch.randint_like(x, 9), lambda x: x.clone().normal_()):
        for spec, whole in zip(uneven_specs_of(mesh_of_all()), wholes(), strict=True):
            torch.manual_seed(7)
            mine = draw(part_of(whole, spec))
            torch.manual_seed(7)
            assert mine.full_tensor().equal(draw(whole))


def test_random_numbers_of_one_seed_are_those_of_the_whole_tensor():
    on_ranks(2, drawn_as_whole)


def drawn():
    mesh = mesh_of_all()
    torch.manual_seed(dist.get_rank())
    spec = ShardSpec("norm.weight", torch.Size([6]), mesh, None)
    assert len({torch.randn_like(part_of(torch.zeros(6), spec)).to_local().sum().item()}) == 1
    return torch.randn_like(part_of(torch.zeros(6), spec)).to_local().tolist()


def test_random_numbers_for_a_replicated_tensor_are_the_same_on_all_ranks():
    first, second = on_ranks(2, drawn)
    assert first == second


def other_bounds():
    mesh = mesh_of_all()
    ours, theirs = (
        [part_of(whole, spec) for whole, spec in zip(wholes(seed), specs(mesh), strict=True)]
        for seed, specs in ((0, specs_of), (1, uneven_specs_of))
    )
    for w, v, whole, other in zip(ours, theirs, wholes(0), wholes(1), strict=True):
        for one, two, first, second in ((w, v, whole, other), (v, w, other, whole)):
            assert (one * two).full_tensor().equal(first * second)
            assert torch.equal(one, one.clone().zero_().add_(one))
            assert one.clone().copy_(two).full_tensor().equal(second)
            assert one.clone().lerp_(two, 0.25).full_tensor().equal(first.clone().lerp_(second, 0.25))
            assert torch.where(one > 0, two, one).full_tensor().equal(torch.where(first > 0, second, first))
            assert torch.equal(one.clone().copy_(two), two)
    torch._foreach_copy_(ours, theirs)
    torch._foreach_sub_(theirs, ours, alpha=2)
    for w, v, other in zip(ours, theirs, wholes(1), strict=True):
        assert w.full_tensor().equal(other)
        assert v.full_tensor().equal(-other)
    w, v = (
        nn.Parameter(part_of(torch.ones(8, 4), ShardSpec(name, torch.Size([8, 4]), mesh, bounds)))
        for name, bounds in (("w", (0, 20, 32)), ("v", (0, 16, 32)))
    )
    w.grad = part_of(torch.ones(8, 4), w.shard_spec)
    optimizer = torch.optim.AdamW([w], fused=True)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):  # a kernel would write to copies of them
        optimizer.state[w][name] = v.detach().clone()
    with pytest.raises(NotImplementedError, match=r"_fused_adamw_.* with 'v' .* on 'w'"):
        optimizer.step()


def test_tensors_of_other_bounds_are_moved():
    on_ranks(2, other_bounds)


def refusals():
    mesh = mesh_of_all()
    w = nn.Parameter(part_of(torch.ones(8, 4), ShardSpec("layers.0.w", torch.Size([8, 4]), mesh, (0, 20, 32))))
    v = part_of(torch.ones(8, 4), ShardSpec("layers.1.w", torch.Size([8, 4]), mesh, (0, 16, 32)))
    norm = part_of(torch.ones(4), ShardSpec("norm", torch.Size([4]), mesh, None))
    here = {0: 20, 1: 12}[dist.get_rank()]
    with torch.no_grad():
        with pytest.raises(NotImplementedError) as caught:
            w @ torch.ones(4, 4)
        message = f"aten.mm on 'layers.0.w' (sharded [8, 4], this rank holds {here} of 32 elements): "
        assert str(caught.value).startswith(message + "call .full_tensor() for the whole tensor")
        # fmt: off
        for refused in (
            lambda: w.sum(0), lambda: w.norm(dim=1), lambda: w.max(0), lambda: w.T, lambda: w.t(), lambda: w[0],
            lambda: w.softmax(-1), lambda: torch.cat([w, w]), lambda: w.cumsum(0), lambda: w.sort(),
            lambda: torch._foreach_mul_([torch.ones(8, 4)], [w]), lambda: torch.ones(8, 4).add_(w),
            lambda: torch.add(w, 1, out=torch.ones(1)), lambda: w.new_zeros(3), lambda: w.triu_(), lambda: w.median(),
            lambda: w.detach().numpy(), w.tolist, lambda: np.asarray(norm), lambda: np.from_dlpack(w.detach()),
            # Wrong without a word, were they let through: other tensors do not lie in ranges as this one does.
            lambda: w + torch.ones(8, 4), lambda: w + torch.ones(4), lambda: w.mul_(norm),
            lambda: w + torch.ones(here), lambda: torch.ones(8, 4) - w, lambda: w + torch.ones(1, 1, 1),
            lambda: w.copy_(torch.ones(4)), lambda: torch._foreach_add([w], [torch.ones(8, 4)]),
            lambda: torch._foreach_mul_([w], torch.ones(4)), lambda: torch.where(w > 0, w, torch.ones(8, 4)),
            lambda: torch.frexp(w, out=(w, v.int())), lambda: w.view(torch.int32), lambda: norm.view(torch.bfloat16),
            lambda: torch.sum(w, (0, 1), out=torch.ones(())), lambda: torch.linalg.vector_norm(w, out=torch.ones(())),
            lambda: w.index_put_((w > 0,), torch.ones(()), accumulate=True),
            lambda: torch.sum(torch.ones(4), 0, out=norm),
            lambda: w.__setitem__(w > 0, torch.ones(here)), lambda: norm * w, lambda: w.lerp_(w, torch.ones(8, 4)),
        ):
            with pytest.raises(NotImplementedError, match=r"'(layers.\d.w|norm)' \((sharded|replicated).*full_tensor"):
                refused()
        out = torch.ones(1)
        with pytest.raises(NotImplementedError, match=r"into a plain tensor of shape \[1\] on 'layers.0.w'"):
            torch.add(w, 1, out=out)
        assert out.tolist() == [1.0]
        scalar = part_of(torch.ones(()), ShardSpec("layers.0.w", torch.Size([]), mesh, (0, 1, 1)))
        with pytest.raises(NotImplementedError, match=r"aten._local_scalar_dense on 'layers.0.w'.*full_tensor"):
            scalar.item()
        for drawn in (lambda: w.geometric_(0.5), lambda: w.bernoulli_(w), lambda: torch.ones(8, 4).bernoulli_(w)):
            with pytest.raises(NotImplementedError, match=r"'layers.0.w'.*initialise before sharding"):
                drawn()
        # fmt: on
        assert (w * torch.tensor(2.0) + torch.ones(1)).full_tensor().equal(torch.full((8, 4), 3.0))
        one = part_of(torch.ones(1), ShardSpec("scale", torch.Size([1]), mesh, None))
        assert (one * w).shape == (8, 4)
        assert (one * w).full_tensor().equal(torch.ones(8, 4))
        assert (w.norm() * w).shard_spec is w.shard_spec


def test_what_ranges_cannot_do_is_refused_by_name():
    on_ranks(2, refusals)
