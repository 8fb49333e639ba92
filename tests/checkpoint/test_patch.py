"""Patches of weights, decoded as TRL's receivers do: they give the model's weights bit for bit."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import yafsdp_cc
from tests.models import Transformer
from tests.ranks import on_ranks, ranks
from tests.soak import also
from tests.test_tensor_parallel import Net, divided
from tests.twins import seeded, whole


def replicated():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return yafsdp_cc.shard(seeded(Transformer), mesh=mesh)


def tensor_parallel():
    model = seeded(Net)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    divided(model, mesh["tp"], everything=True)
    return yafsdp_cc.shard(model, mesh=mesh["dp"])


def sharded():
    return yafsdp_cc.shard(seeded(Transformer))


FP8, BITS = torch.float8_e4m3fn, {1: torch.uint8, 2: torch.int16}
FORMS = {
    "sharded": (sharded, 2),
    "on four ranks": (sharded, 4),
    "replicated": (replicated, 4),
    "tensor parallel": (tensor_parallel, 4),
}


def received(weights, path):
    """Apply a file to whole weights, as a receiver does; how many were written, and the bytes that say so."""
    count = size = 0
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["encoding"] == "gap_delta"
        assert file.metadata()["format"] == "sparse_weight_patch"
        for name in sorted(key.removesuffix(".val") for key in file.keys() if key.endswith(".val")):  # noqa: SIM118
            gaps, values = file.get_tensor(f"{name}.idx"), file.get_tensor(f"{name}.val")
            places = torch.cumsum(gaps.long() + 1, dim=0) - 1
            # As bits: torch writes to indices of float8 on GPUs only.
            weights[name].view(-1).view(BITS[values.itemsize]).index_copy_(
                0, places, values.view(BITS[values.itemsize])
            )
            count += len(values)
            size += gaps.nbytes + values.nbytes
        assert count == int(file.metadata()["total_changed_elements"])
        assert 0 <= float(file.metadata()["sparsity"]) <= 1
    return count, size


def bits_of(model, dtype):
    return {name: whole(p.detach()).to(dtype).view(torch.uint8) for name, p in model.named_parameters()}


def reconstructed(form, dtype, steps, folder):
    model = FORMS[form][0]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    weights = {name: bits.view(dtype).clone() for name, bits in bits_of(model, dtype).items()}
    assert yafsdp_cc.weight_patch(model, dtype=dtype).tensors == {}
    changed = size = 0
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        if step != 3:  # one without a change
            optimizer.step()
        for rank in range(dist.get_world_size()):  # one after the other: no rank waits for another
            if rank == dist.get_rank():
                patch = yafsdp_cc.weight_patch(model, dtype=dtype)
                assert patch.metadata["model_version"] == str(step + 1)
                patch.save(f"{folder}/patches/{rank}")
            dist.barrier()
        written = 0
        for rank in range(dist.get_world_size()):
            count, nbytes = received(weights, f"{folder}/patches/{rank}")
            written, size = written + count, size + nbytes
        dist.barrier()
        truth = bits_of(model, dtype)
        for name, value in weights.items():
            assert value.view(torch.uint8).equal(truth[name]), (step, name)
        assert step != 3 or not written
        changed += written
    total = sum(value.numel() for value in weights.values())
    assert 0 < changed < 0.2 * steps * total
    return changed / steps / total, size / changed


@pytest.mark.parametrize(
    ("form", "dtype", "steps"),
    [
        *((form, torch.bfloat16, 10) for form in ("sharded", "replicated", "tensor parallel")),
        *(also(form, dtype, 100) for form in ("sharded", "on four ranks") for dtype in (torch.bfloat16, FP8)),
    ],
)
def test_patches_reconstruct_the_weights(form, dtype, steps, tmp_path):
    share, size = on_ranks(FORMS[form][1], reconstructed, form, dtype, steps, str(tmp_path), timeout=600.0)[0]
    print(f"\n{form}, {dtype}, {steps} steps: {share:.2%} of the weights change in one, {size:.2f} bytes each")
    assert size <= 4 + dtype.itemsize


@ranks(2)
def test_the_first_rank_sends_what_is_not_sharded(tmp_path):
    model = seeded(Transformer)
    yafsdp_cc.shard(model, ignored_params=[model.head.weight])
    weights = {name: value.bfloat16() for name, value in yafsdp_cc.full_state_dict(model).items()}
    assert yafsdp_cc.weight_patch(model).tensors == {}
    with torch.no_grad():
        model.head.weight.mul_(2.0 + dist.get_rank())
    patch = yafsdp_cc.weight_patch(model)
    if dist.get_rank() != 0:
        assert patch.tensors == {}
        return
    patch.save(tmp_path / "patch")
    received(weights, tmp_path / "patch")
    assert weights["head.weight"].equal(model.head.weight.bfloat16())


@ranks(2)
def test_ignored_experts_and_what_is_on_the_meta_device_are_in_no_patch():
    model = seeded(Transformer)
    mesh = init_device_mesh("cpu", (2,))
    model.experts = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    model.absent = torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    yafsdp_cc.shard(model, ignored_params=[model.experts, model.absent])
    yafsdp_cc.weight_patch(model)
    with torch.no_grad():
        model.experts.mul_(2.0)
    assert yafsdp_cc.weight_patch(model).tensors == {}


@ranks(1)
def test_what_was_sent_is_forgotten_with_the_sharding():
    model = sharded()
    for made in range(2):
        patches = [yafsdp_cc.weight_patch(model, dtype=(torch.bfloat16, FP8)[made]) for _ in range(2)]
        assert [each.metadata["model_version"] for each in patches] == ["0", "1"]
        yafsdp_cc.shard(yafsdp_cc.unshard_model(model))
    yafsdp_cc.weight_patch(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@ranks(1)
def test_refused():
    model = sharded()
    with pytest.raises(TypeError, match=r"floating-point dtype, such as .*; got torch.int8"):
        yafsdp_cc.weight_patch(model, dtype=torch.int8)
    with pytest.raises(ValueError, match="Transformer is not sharded"):
        yafsdp_cc.weight_patch(Transformer())
    assert str(yafsdp_cc.weight_patch(model)).startswith("WeightPatch(0 of ")
    with pytest.raises(ValueError, match=r"float16\), but patches of this model were of torch.bfloat16"):
        yafsdp_cc.weight_patch(model, dtype=torch.float16)
    with yafsdp_cc.whole_parameters(model), pytest.raises(RuntimeError, match="weight_patch inside whole_parameters"):
        yafsdp_cc.weight_patch(model)
