"""Compressed communication of torch's own FSDP2 and DDP, through their hooks."""

from __future__ import annotations

import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import yafsdp_cc
from tests.models import VOCABULARY, Transformer
from tests.ranks import on_ranks, ranks
from tests.streams import Race, streams
from yafsdp_cc import Compression
from yafsdp_cc.compression.error_feedback import PART
from yafsdp_cc.compression.fsdp2 import exact_mean


def fsdp2(compression: Any = None, **more: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Transformer(2, 64)
    replicas = None
    if "mesh" in more:
        replicas, more["mesh"] = more["mesh"]["replicate"].get_group(), more["mesh"]["shard"]
    for block in model.blocks:
        fully_shard(block, **more)
    fully_shard(model, **more)
    return model, None if compression is None else yafsdp_cc.compress(model, compression, replicas=replicas)


def ddp(compression: Any = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Transformer(2, 64))
    state = None
    if compression is not None:
        state = yafsdp_cc.CompressionHookState(compression)
        model.register_comm_hook(state, yafsdp_cc.encoded_mean)
    return model, state


def losses(model: nn.Module, steps: int = 12) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    found = []
    for step in range(steps):
        draws = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = (torch.randint(VOCABULARY, (4, 1), generator=draws) + torch.arange(12) * 3) % VOCABULARY
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total: Tensor = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item() / dist.get_world_size())
    return found


def under_fsdp2() -> None:
    exact = losses(fsdp2()[0])
    identity, comm = fsdp2("fp32")
    assert losses(identity) == exact
    counted = {}
    for codec in ("int8", "int4", "onebit"):
        model, of_codec = fsdp2(codec)
        assert losses(model)[-1] == pytest.approx(exact[-1], rel=0.25 if codec == "onebit" else 0.01)
        counted[codec] = of_codec.sent_bytes
    # FSDP2's own over gloo is a clone and an all-reduce: twice an all-to-all of fp32.
    assert 2 * comm.sent_bytes / counted["onebit"] >= 25
    assert comm.sent_bytes / counted["int8"] > 3.8
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact = losses(fsdp2(mp_policy=bf16)[0])
    both, _ = fsdp2(Compression(gradients="int8", weights="int8"), mp_policy=bf16)
    assert losses(both)[-1] == pytest.approx(exact[-1], rel=0.02)


@pytest.mark.parametrize("made", [fsdp2, ddp])
@ranks(2)
def test_residuals_follow_the_scale_of_losses(made: Any) -> None:
    """Bit for bit, as the scale is a power of two; else what was left of larger gradients would outweigh the next."""
    plain, (model, hooks) = made("onebit")[0], made("onebit")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    hooks.follow_scaler(scaler)
    tokens = torch.arange(12).view(1, 12) + dist.get_rank()
    for _ in range(4):
        plain(tokens).square().mean().backward()
        scaler.scale(model(tokens).square().mean()).backward()
        scale = scaler.get_scale()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert (one.grad * scale == other.grad).all()
        scaler.update(scale / 4)
        plain.zero_grad()
        model.zero_grad()


def one_set_of_buffers() -> None:
    """Messages of all groups go through buffers that the largest one fits in."""
    model, of_int8 = fsdp2("int8")
    losses(model, 1)
    (context,) = of_int8._contexts.values()
    sums = of_int8._reduce_scatters.values()
    assert len(sums) == 3
    most = max(2 * each.sent_bytes for each in sums) + max(4 * min(PART, each.chunk) for each in sums)
    assert context.scratch.nbytes == most


def taken_away() -> None:
    exact, (model, comm) = losses(fsdp2()[0]), fsdp2(Compression(gradients="onebit", weights="int8"))
    comm.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert losses(model) == exact
    assert comm.sent_bytes == 0
    warm, _ = fsdp2(Compression(gradients="onebit", warmup_steps=3))
    assert losses(warm, 4) == exact[:4]
    warm, _ = fsdp2(Compression(gradients="onebit", weights="int8", warmup_steps=3))
    found = losses(warm, 4)
    assert found[:3] == exact[:3]
    assert found[3] != exact[3]  # behind the warm-up weights are encoded, too
    warm, of_warm = fsdp2(Compression(gradients="onebit", weights="int8", warmup_steps=1))
    losses(warm, 1)
    assert of_warm.sent_bytes == 0  # also in the backward, in which units gather again that have reduced nothing yet


class Growing(nn.Module):
    """Of its layers, those below a number are used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, used: int) -> Tensor:
        for layer in self.layers[:used]:
            x = layer(x)
        return x


def some_of_a_group() -> None:
    model, exact = Growing(), Growing()
    for each in (model, exact):
        fully_shard(each)
    yafsdp_cc.compress(model, Compression(gradients="int8", residual="fp32"))
    for used in (1, 3, 2, 3, 1):
        x = torch.randn(4, 32)
        for each in (model, exact):
            each.zero_grad()
            each(x, used).square().mean().backward()
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                there, due = ours.grad.to_local(), theirs.grad.to_local()
                assert torch.allclose(there, due, atol=0.02 * due.abs().max())


class Heads(nn.Module):
    """Has heads of one size, of which a forward uses one: the gradient of that one is the forward's input."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(32, 32)))

    def forward(self, x: Tensor, name: str) -> Tensor:
        return (self.get_parameter(name) * x).sum()


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])  # sums within a shard, and over replicas
@ranks(2)
def test_heads_in_turns_have_the_gradients_of_each_head_alone(shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    replicas = mesh["replicate"].get_group() if shape[0] == 2 else None
    models = {names: fully_shard(Heads(names), mesh=mesh["shard"]) for names in ("ab", "a", "b")}
    for each in models.values():
        yafsdp_cc.compress(each, "onebit", replicas=replicas)
    for step in range(6):
        head, x = "ab"[step % 2], torch.randn(32, 32)
        for names in ("ab", head):
            models[names].zero_grad()
            models[names](x, head).backward()
        ours, alone = (models[names].get_parameter(head).grad.to_local() for names in ("ab", head))
        assert torch.equal(ours, alone)


@ranks(2)
def test_a_group_that_sends_ever_other_sets_has_a_few_residuals_and_exact_sums() -> None:
    model, exact = (fully_shard(Heads("abcdefghi")) for _ in range(2))
    yafsdp_cc.compress(model, "onebit")
    for number, head in enumerate("abcdefghia"):
        x = torch.randn(32, 32)
        with pytest.warns(UserWarning, match="has sent 8 sets of parameters") if head == "i" else nullcontext():
            for each in (model, exact):
                each.zero_grad()
                each(x, head).backward()
        ours, theirs = (each.get_parameter(head).grad.to_local() for each in (model, exact))
        assert torch.equal(ours, theirs) == (head == "i"), number


def under_ddp() -> None:
    exact = losses(ddp()[0])
    identity, comm = ddp("fp32")
    assert losses(identity) == pytest.approx(exact, rel=1e-5)
    model, of_int8 = ddp("int8")
    assert losses(model)[-1] == pytest.approx(exact[-1], rel=0.01)
    assert comm.sent_bytes / of_int8.sent_bytes > 3.8
    warm, _ = ddp(Compression(gradients="onebit", warmup_steps=3))
    assert losses(warm, 4) == pytest.approx(exact[:4], rel=1e-5)


def under_ddp_by_factors() -> None:
    exact, (model, comm) = losses(ddp()[0]), ddp("powersgd")
    found = losses(model)
    assert exact[-1] < found[-1] < 0.8 * found[0]
    identity, of_wholes = ddp(Compression(gradients="powersgd", matrix_rank=64))  # factors would be no smaller
    assert losses(identity) == pytest.approx(exact, rel=1e-5)
    assert of_wholes.sent_bytes / comm.sent_bytes > 2


class Backwards(nn.Module):
    """Uses its layers in another order than it has them, which DDP learns in the first step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for place in (1, 2, 0):
            x = self.layers[place](x)
        return x


def buckets_anew() -> None:
    model, exact = (nn.parallel.DistributedDataParallel(Backwards()) for _ in range(2))
    comm = yafsdp_cc.CompressionHookState("powersgd")
    model.register_comm_hook(comm, yafsdp_cc.encoded_mean)
    for _ in range(4):
        x = torch.randn(4, 32)
        for each in (model, exact):
            each.zero_grad()
            each(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert ours.dim() == 2 or torch.allclose(ours.grad, theirs.grad, atol=1e-7)  # biases are in no matrix
    assert len(comm.sums) == 1  # the first step's is gone


class Waves(nn.Module):
    """A layer with complex weights, whose gradient of two losses is of low rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = (nn.Parameter(torch.randn(size, dtype=torch.complex64)) for size in ((64, 48), (48,)))

    def forward(self, rank: int) -> Tensor:
        x = torch.randn(1, 64, generator=torch.Generator().manual_seed(rank))
        loss: Tensor = (x.to(torch.complex64) @ self.weight + self.bias - 1j).abs().square().mean()
        return loss


@pytest.mark.parametrize("engine", ["shard", "replicas", "DDP"])
@ranks(2)
def test_gradients_of_complex_weights_have_both_parts(engine: str) -> None:
    model, plain = Waves(), Waves()
    if engine == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
        state = yafsdp_cc.CompressionHookState(Compression("powersgd", matrix_rank=4))
        model.register_comm_hook(state, yafsdp_cc.encoded_mean)
    else:
        names = ("replicate", "shard") if engine == "shard" else ("shard", "replicate")
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        fully_shard(model, mesh=mesh["shard"])
        yafsdp_cc.compress(model, "fp32", replicas=mesh["replicate"].get_group() if engine == "replicas" else None)
    for _ in range(6):  # until factors hold nearly all of the same gradient
        model.zero_grad()
        model(dist.get_rank()).backward()
    sum(plain(rank) / 2 for rank in range(2)).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        found = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        assert (found - theirs.grad).norm() < 0.1 * theirs.grad.norm()


def refused() -> None:
    with pytest.raises(ValueError, match=r"on a Transformer in which torch's fully_shard has sharded nothing"):
        yafsdp_cc.compress(Transformer(2, 64), "int8")
    with pytest.raises(ValueError, match=r"a model of this package: pass shard\(model, compression=...\)"):
        yafsdp_cc.compress(yafsdp_cc.shard(Transformer(2, 64)), "int8")
    with pytest.raises(TypeError, match=r"compress\(\) takes a Compression or the name of a codec"):
        yafsdp_cc.compress(Transformer(2, 64), None)
    with pytest.raises(TypeError, match="CompressionHookState takes a Compression or the name of a codec"):
        yafsdp_cc.CompressionHookState(None)
    with pytest.raises(TypeError, match="residuals of CompressionHookState are not saved: make a new one"):
        pickle.dumps(yafsdp_cc.CompressionHookState("int8"))
    with pytest.raises(ValueError, match="CompressionHookState with overrides: a bucket of DDP is encoded as a whole"):
        yafsdp_cc.CompressionHookState(Compression(overrides={"*": "int4"}))
    rows = nn.parallel.DistributedDataParallel(nn.Embedding(8, 4, sparse=True))
    rows.register_comm_hook(yafsdp_cc.CompressionHookState("int8"), yafsdp_cc.encoded_mean)
    with pytest.raises(ValueError, match=r"that of a parameter of shape \(8, 4\) is sparse: .* with sparse=False"):
        rows(torch.arange(4)).sum().backward()
    lines = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    lines.register_comm_hook("int8", yafsdp_cc.encoded_mean)
    with pytest.raises(TypeError, match=r"with a state of type str: give it CompressionHookState\('int8'\)"):
        lines(torch.ones(4)).sum().backward()
    with pytest.raises(ValueError, match="with gradients='powersgd': FSDP2's hooks see rows of all parameters mixed"):
        fsdp2("powersgd")
    with pytest.raises(ValueError, match=r"with weights='int4': FSDP2 gathers every time .* with zero_stage=2"):
        fsdp2(Compression(weights="int4"))
    with pytest.raises(ValueError, match="overrides: a group of FSDP2 is encoded as a whole"):
        fsdp2(Compression(overrides={"*": "int4"}))
    model, comm = fsdp2("int8")
    with pytest.raises(ValueError, match=r"compressed already: call .remove\(\)"):
        yafsdp_cc.compress(model, "int4")
    for wanted in (yafsdp_cc.plan_of, yafsdp_cc.counters_of):
        with pytest.raises(ValueError, match=r"is sharded by torch's own FSDP2, .* by yafsdp_cc.shard\(model\)"):
            wanted(model)
    comm.remove()
    yafsdp_cc.compress(model, "int4")


@ranks(2)
def test_torch_s_engines_with_compressed_communication() -> None:
    for body in (
        under_fsdp2,
        one_set_of_buffers,
        taken_away,
        some_of_a_group,
        under_ddp,
        under_ddp_by_factors,
        buckets_anew,
        refused,
    ):
        body()


def test_a_hook_that_is_made_before_there_are_ranks_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"make it after torch\.distributed\.init_process_group"):
        yafsdp_cc.CompressionHookState("int8")


class Bucket:
    """A bucket of DDP, of one parameter."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def buffer(self) -> Tensor:
        return self.total

    def parameters(self) -> list[Tensor]:
        return [self.total]

    def index(self) -> int:
        return 0


@pytest.mark.parametrize("warmup", [0, 3])
@ranks(2)
def test_buckets_of_ddp_are_averaged_while_the_backward_goes_on(warmup: int) -> None:
    with streams():
        state = yafsdp_cc.CompressionHookState(Compression("int8", warmup_steps=warmup))
        bucket: Any = Bucket(torch.empty(1024))
        for step in range(3):
            bucket.total.fill_(step + dist.get_rank())
            future = yafsdp_cc.encoded_mean(state, bucket)
            with pytest.raises(Race, match="on side stream 1 and read by aten::sum on compute"):
                bucket.total.sum()  # nobody has waited
            state.handle.wait()  # as DDP does for the future, by the event that this has recorded on CUDA
            assert future.value().mean().item() == pytest.approx(step + 0.5, abs=0.1)


@ranks(2)
def test_a_hook_of_ddp_tells_models_apart_that_have_the_same_addresses() -> None:
    state = yafsdp_cc.CompressionHookState("topk")
    for gradient in (1.0, 0.0) * 10:  # the next parameter mostly lies where the last one was
        bucket: Any = Bucket(torch.full((1024,), gradient))
        yafsdp_cc.encoded_mean(state, bucket)
        assert bucket.total.any().item() == (gradient == 1)
        del bucket


@ranks(4)
def test_exact_means_of_fp16_do_not_overflow() -> None:
    total = torch.full((8,), 30_000.0 + 32 * dist.get_rank(), dtype=torch.float16)
    exact_mean(total, dist.group.WORLD)
    assert total.tolist() == [30_048.0] * 8


@ranks(4)
def test_sums_over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    exact = losses(fsdp2()[0])
    for codec, tolerance in (("fp32", 1e-5), ("int8", 0.01)):
        model, comm = fsdp2(codec, mesh=mesh)
        assert losses(model) == pytest.approx(exact, rel=tolerance)
        assert comm.sent_bytes
    with pytest.raises(TypeError, match="replicas takes a process group, such as mesh"):
        yafsdp_cc.compress(fsdp2()[0], "int8", replicas=mesh["replicate"])
    whole = fully_shard(Transformer(2, 64), mesh=mesh)
    with pytest.warns(UserWarning, match="those over replicas stay exact"):
        yafsdp_cc.compress(whole, "int8")


@pytest.mark.parametrize("made", [fsdp2, ddp])
def test_a_load_drops_residuals_of_the_weights_before(made: Any, tmp_path: Path) -> None:
    """A spike is in residuals of one bit for many steps, and in no checkpoint."""

    def body() -> None:
        model, used = made("onebit")
        other, of_other = made("onebit")
        losses(other, 1)
        kept = dict((of_other._reduce_scatters or of_other._all_reduces).items())
        yafsdp_cc.save(tmp_path / "before", model)
        fresh, _ = made("onebit")
        for each, scale in ((model, 1e8), (fresh, 0.0)):  # DDP makes other buckets behind a first backward
            (scale * each(torch.zeros(1, 8, dtype=torch.long)).square().sum()).backward()
            each.zero_grad()
        yafsdp_cc.load(tmp_path / "before", model)
        assert losses(model, 3) == losses(fresh, 3)
        assert used.sent_bytes
        assert kept == dict((of_other._reduce_scatters or of_other._all_reduces).items())

    on_ranks(2, body)
