"""Muon on whole matrices against one process that has ``torch.optim.Muon`` and ``torch.optim.AdamW``."""

from __future__ import annotations

import gc
import importlib.util
import platform
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim._muon import _zeropower_via_newtonschulz

import yafsdp_cc
from tests.internals import exact_gather_bytes, groups_of, mean_residuals_of
from tests.models import VOCABULARY, WIDTH, Attention, Mlp
from tests.ranks import on_ranks, ranks
from tests.reference import far_apart, mean_gradients, mean_in_rank_order
from tests.soak import also
from yafsdp_cc import Compression
from yafsdp_cc.compression.state import mean_estimates
from yafsdp_cc.engine.param import FSDPParam
from yafsdp_cc.fsdp2.module import require_state
from yafsdp_cc.optim import matrix, muon
from yafsdp_cc.optim.muon import newton_schulz
from yafsdp_cc.sharding.ownership import newton_schulz_flops

STEPS = 20
CLIP = 0.5
ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.05}


class Block(nn.Module):
    """With a matrix that is never used, and one that only the first rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(WIDTH)
        self.never, self.sometimes = nn.Linear(24, 16), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        x = self.inner(x)
        return x + self.sometimes(x) if is_first else x


class Model(nn.Module):
    """A language model with a tied head and a frozen matrix."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].inner.up.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, is_first: bool) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, is_first)
        out: Tensor = self.head(x)
        return out


def batch(step: int, micro: int, rank: int) -> Tensor:
    draws = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(VOCABULARY, (2, 9), generator=draws)


def loss_of(model: Any, step: int, micro: int, rank: int) -> Tensor:
    tokens = batch(step, micro, rank)
    logits = model(tokens[:, :-1], rank == 0)
    loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return loss


def is_matrix(name: str, parameter: Tensor) -> bool:
    return name.startswith("blocks.") and parameter.ndim == 2


def torchs(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers of one process, AdamW in the form whose bits the engine's has."""
    named = dict(model.named_parameters())
    matrices = [each for name, each in named.items() if is_matrix(name, each)]
    others = [each for name, each in named.items() if not is_matrix(name, each)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, fused=True, **ADAMW)]


class Pair:
    """The sharded model, and what one process makes of the batches of all ranks: the first one, or each for itself.

    Newton-Schulz iterations in bf16 turn the last bit of a gradient into differences of 1e-4, so gradients have to be
    equal to the bit. Clipping multiplies both by the same number, which is compared itself.
    """

    def __init__(
        self, *, everywhere: bool = False, replicas: int = 1, bottom_up: bool = False, **sharding: Any
    ) -> None:
        self.compares = everywhere or dist.get_rank() == 0
        self.shard = dist.get_world_size() // replicas
        """Ranks of a replica: they are summed first."""
        if replicas > 1:
            names = ("replicate", "shard")
            sharding["mesh"] = init_device_mesh("cpu", (replicas, self.shard), mesh_dim_names=names)
        self.plain, self.model = Model(), Model()
        if bottom_up:
            for block in self.model.blocks:
                yafsdp_cc.fully_shard(block, ownership="matrix", **sharding)
            yafsdp_cc.fully_shard(self.model, **sharding)
        else:
            yafsdp_cc.shard(self.model, ownership="matrix", **sharding)
        self.optimizers = torchs(self.plain)
        self.optimizer = yafsdp_cc.optim.Muon(self.model.parameters(), lr=0.02, adamw=ADAMW, ns_dtype=torch.bfloat16)

    def train(self, steps: range, micros: int = 1, clips: bool = False) -> None:
        for step in steps:
            for micro in range(micros):
                self.model.set_requires_gradient_sync(micro == micros - 1)
                loss_of(self.model, step, micro, dist.get_rank()).backward()
            if self.compares:
                self._set_mean_gradients(step, micros)
            if clips:
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP).full_tensor()
            if clips and self.compares:
                truth = nn.utils.get_total_norm([p.grad for p in self.plain.parameters() if p.grad is not None])
                assert far_apart(norm, truth) < 1e-6
                assert norm > CLIP
                nn.utils.clip_grads_with_norm_(self.plain.parameters(), CLIP, norm)
            for optimizer in (*(self.optimizers if self.compares else ()), self.optimizer):
                optimizer.step()
            self.model.zero_grad()

    def _set_mean_gradients(self, step: int, micros: int) -> None:
        by_rank = []
        for rank in range(dist.get_world_size()):
            self.plain.zero_grad()
            for micro in range(micros):
                loss_of(self.plain, step, micro, rank).backward()
            by_rank.append({name: each.grad for name, each in self.plain.named_parameters()})
        for name, parameter in self.plain.named_parameters():
            means = [
                mean_in_rank_order([found[name] for found in by_rank[first : first + self.shard]])
                for first in range(0, len(by_rank), self.shard)
            ]
            parameter.grad = mean_in_rank_order(means)

    def check(self, within: float = 1e-6) -> None:
        """Compare all weights."""
        with yafsdp_cc.whole_parameters(self.model):
            found = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        for name, each in self.plain.named_parameters() if self.compares else ():
            assert far_apart(found[name], each.detach()) <= within, name


def parity() -> None:
    for zero_stage, micros, clips in ((3, 1, False), (2, 1, True), (1, 2, False)):
        pair = Pair(zero_stage=zero_stage)
        pair.train(range(STEPS), micros, clips)
        pair.check()


@pytest.mark.parametrize("world", [also(2), 4])
def test_weights_are_those_of_one_process(world: int) -> None:
    """Tied, frozen, unused, used by one rank; accumulated, clipped; at every stage."""
    on_ranks(world, parity)


def settings() -> None:
    """Replicas, secondary shards, host memory, two communicators, and ``fully_shard``."""
    for sharding in (
        {"replicas": 2},
        {"reshard_after_forward": 2},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False), "zero_stage": 2},
        {"separate_reduce_group": True},
        {"bottom_up": True, "reshard_after_forward": False},
        {"bottom_up": True},
    ):
        pair = Pair(**sharding)
        pair.train(range(3), clips=True)
        pair.check()
        work = [each.newton_schulz_flops for each in yafsdp_cc.plan_of(pair.model).owners]
        assert max(work) <= 1.5 * sum(work) / len(work)


def test_with_other_settings_of_shard() -> None:
    on_ranks(4, settings)


# Checkpoints


def saved(folder: Path, steps: int) -> None:
    pair = Pair(everywhere=True)
    pair.train(range(steps))
    yafsdp_cc.save(folder, pair.model, pair.optimizer)
    yafsdp_cc.save(folder.with_suffix(".plain"), pair.plain, pair.optimizers)


def resumed(folder: Path, steps: int) -> None:
    """Each of the pair goes on with what both have left."""
    for path in (folder, folder.with_suffix(".plain")):
        pair = Pair(zero_stage=2)
        yafsdp_cc.load(path, pair.model, pair.optimizer)
        yafsdp_cc.load(path, pair.plain, pair.optimizers)
        pair.check()
        pair.train(range(steps, 2 * steps))
        pair.check()


@pytest.mark.parametrize(("writers", "readers"), [also(2, 4), (4, 2)])
def test_resumes_at_another_number_of_ranks(writers: int, readers: int, tmp_path: Path) -> None:
    """Also from and to the states of ``torch.optim.Muon`` and ``torch.optim.AdamW``."""
    on_ranks(writers, saved, tmp_path / "checkpoint", 5)
    on_ranks(readers, resumed, tmp_path / "checkpoint", 5)


INT4 = Compression("int4", weights="int4", feedback="ef21", residual="fp32")
"""EF21-Muon, both ways."""


def encoded(replicas: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, world // replicas)) if replicas > 1 else None
    model = yafsdp_cc.shard(Mlp(2), mesh=mesh, zero_stage=2, ownership="matrix", compression=INT4)
    return model, yafsdp_cc.optim.Muon(model.parameters(), lr=0.02)


def train_encoded(model: nn.Module, muon: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    """Return the weights that it ends with."""
    for step in steps:
        encoded_loss(model, step).backward()
        muon.step()
        muon.zero_grad()
    return {name: each.full_tensor() for name, each in model.named_parameters()}


def encoded_loss(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss: Tensor = (model(x) - 1).square().mean()
    return loss


def saved_encoded(folder: Path) -> None:
    model, muon = encoded()
    train_encoded(model, muon, range(3))
    yafsdp_cc.save(folder, model, muon)
    found = {name: each.full_tensor() for name, each in mean_estimates(require_state(model)).items()}
    assert all(each.norm() > 0 for each in found.values())
    assert not mean_residuals_of(model)  # nothing is owed
    weights = train_encoded(model, muon, range(3, 6))
    if dist.get_rank() == 0:
        torch.save((found, weights), folder / "found.pt")


def loaded_encoded(folder: Path, replicas: int = 1) -> None:
    model, muon = encoded(replicas)
    yafsdp_cc.load(folder, model, muon)
    estimates, weights = torch.load(folder / "found.pt")
    found = {name: each.full_tensor() for name, each in mean_estimates(require_state(model)).items()}
    assert found.keys() == estimates.keys()
    assert all(far_apart(found[name], each) <= 1e-6 for name, each in estimates.items())
    start = yafsdp_cc.counters_of(model).gathered_bytes
    ours = train_encoded(model, muon, range(3, 6))
    if dist.get_world_size() == 4 and replicas == 1:
        assert all(ours[name].equal(each) for name, each in weights.items())
    sent = torch.tensor(yafsdp_cc.counters_of(model).gathered_bytes - start)
    exact = torch.tensor(exact_gather_bytes(model))
    for each in (sent, exact):
        dist.all_reduce(each)
    assert sent < 1.5 * exact  # the kept weights once, as they are, and then deltas
    kept = [group.unsharded.flat for group in groups_of(model)]
    for each in (tensor for flats in kept for tensor in flats):
        others = [torch.empty_like(each) for _ in range(dist.get_world_size())]
        dist.all_gather(others, each)
        assert all(other.equal(each) for other in others)  # deltas: all ranks have added the same


def test_encoded_gradients_and_weights_go_on_at_any_number_of_ranks(tmp_path: Path) -> None:
    """As if nothing had happened, at the same one."""
    on_ranks(4, saved_encoded, tmp_path / "checkpoint")
    on_ranks(4, loaded_encoded, tmp_path / "checkpoint")
    on_ranks(3, loaded_encoded, tmp_path / "checkpoint")
    on_ranks(4, loaded_encoded, tmp_path / "checkpoint", 2)


def accumulated() -> None:
    """Gradients that stay as they are become exact, message by message; micro-batches are one of them."""
    model, _ = encoded()
    torch.manual_seed(4)
    plain = Mlp(2)
    means: dict[str, Tensor] = {}
    for micro in range(2):
        _, found = mean_gradients(plain, lambda net, x: (net(x) - 1).square().mean(), inputs_of(micro))
        means = {name: means.get(name, 0) + each for name, each in found.items() if each is not None}
    distances = []
    for _ in range(6):
        model.zero_grad()
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            encoded_loss(model, micro).backward()
        found = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
        distances.append(max(far_apart(found[name], each) for name, each in means.items()))
    assert distances[0] > 1e-3
    assert distances[-1] < 1e-5


def inputs_of(micro: int) -> list[Tensor]:
    seeds = (10 * micro + rank for rank in range(dist.get_world_size()))
    return [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def test_messages_of_differences_approach_gradients() -> None:
    on_ranks(2, accumulated)


@ranks(4)
def test_nothing_is_recommended_that_messages_of_differences_cannot_be() -> None:
    for compression, is_named in ((INT4, False), (Compression("int4", residual="fp32"), True)):
        with pytest.warns(UserWarning, match=r"residuals take .* AdamW: .*a mesh") as caught:
            yafsdp_cc.shard(Mlp(2).bfloat16(), zero_stage=2, compression=compression)
        assert any("residual='int8' takes" in str(each.message) for each in caught) is is_named


@ranks(1)
def test_what_messages_of_differences_cannot_be() -> None:
    for settings, message in (
        ({"residual": "bf16"}, "what rounding takes from them would stay in all later sums: pass residual='fp32'"),
        ({"residual": "fp32", "carry": 0.5}, "carry=0.5"),
        ({"residual": "fp32", "overrides": {"a": "powersgd"}}, "with 'powersgd'"),
    ):
        with pytest.raises(ValueError, match=message):
            Compression("int4", feedback="ef21", **settings)
    one_bit = Compression("onebit", feedback="ef21", residual="fp32")
    with pytest.raises(ValueError, match="OneBitAdam keeps its momentum in residuals, where feedback='ef21' keeps"):
        yafsdp_cc.optim.OneBitAdam(yafsdp_cc.shard(Mlp(), compression=one_bit).parameters(), warmup_steps=1)
    model = yafsdp_cc.shard(Mlp(), ownership="matrix", compression=one_bit)
    with pytest.warns(UserWarning, match="with feedback='ef21': with fewer than 4 bits a loss .* 0.19 nats"):
        encoded_loss(model, 0).backward()


# The iteration, and what it is made for


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64), (1, 300)])
def test_a_batch_is_iterated_as_each_matrix_by_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    matrices, coefficients = torch.randn(3, *shape), (3.4445, -4.7750, 2.0315)
    matrices[2] = 0
    found = newton_schulz(matrices.bfloat16(), coefficients, 5, 1e-7)
    for one, each in zip(found, matrices, strict=True):
        assert one.equal(_zeropower_via_newtonschulz(each, coefficients, 5, 1e-7))


def test_without_a_dtype_the_iteration_is_in_bf16_where_that_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast in (False, True):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda fast=fast: {"avx512_bf16": fast})
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        muon._lacks_bf16.cache_clear()
        assert muon._lacks_bf16(torch.device("cpu")) != fast
        assert not muon._lacks_bf16(torch.device("cuda"))
    muon._lacks_bf16.cache_clear()


@pytest.mark.parametrize("zero_stage", [2, 3])
@ranks(2)
def test_matrices_of_16_bits_are_updated_in_fp32_and_rounded_once(zero_stage: int) -> None:
    """The truth is torch's optimizer in fp32 on the same gradients, whose weights are rounded behind each step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))).bfloat16()
    yafsdp_cc.shard(model, units=[nn.Linear], ownership="matrix", zero_stage=zero_stage)
    parameters: list[Any] = list(model.parameters())
    twin = [nn.Parameter(each.full_tensor().detach().float()) for each in parameters]
    ours = yafsdp_cc.optim.Muon(parameters, lr=0.02, ns_dtype=torch.bfloat16)
    theirs = torch.optim.Muon(twin, lr=0.02)
    for step in range(3):
        draws = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, WIDTH, generator=draws).bfloat16()).float().square().mean().backward()
        for mine, other in zip(parameters, twin, strict=True):
            other.grad = mine.grad.full_tensor().float()
        ours.step()
        theirs.step()
        for mine, other in zip(parameters, twin, strict=True):
            other.data.copy_(other.bfloat16())
            assert mine.full_tensor().equal(other.bfloat16())
        ours.zero_grad()


class Stacked(nn.Module):
    """A block with a stack of matrices, and queries, keys and values in one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], dim=-1)
        out: Tensor = x + q * torch.cat([k, v], dim=-1) + torch.einsum("bi,eij->bj", x, self.experts)
        return out


def stacks(folder: Path, work: int) -> None:
    """Each of three models goes on from the one before, whose matrices lay elsewhere."""
    torch.manual_seed(5)
    plain = nn.Sequential(Stacked(), Stacked())
    rows = (WIDTH, WIDTH // 2, WIDTH // 2)
    pieces = [part for block in plain for whole in (block.qkv.weight.split(rows), block.experts) for part in whole]
    apart = [nn.Parameter(each.detach().clone()) for each in pieces]
    truth = torch.optim.Muon(apart, lr=0.02, adjust_lr_fn="match_rms_adamw", nesterov=False)
    batches = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k)) for k in range(dist.get_world_size())]
    for turn, zero_stage in enumerate((2, 3, 2)):
        model = nn.Sequential(Stacked(), Stacked())
        model.load_state_dict(plain.state_dict())
        yafsdp_cc.shard(model, ownership=["*.qkv.weight", "*.experts"], zero_stage=zero_stage)
        optimizer = yafsdp_cc.optim.Muon(
            model.parameters(),
            lr=0.02,
            adjust_lr_fn="match_rms_adamw",
            splits={"*qkv*": rows},
            nesterov=False,
            ns_dtype=torch.bfloat16,
        )
        if turn:
            yafsdp_cc.load(folder / str(turn - 1), model, optimizer)
        for _ in range(2):
            _, found = mean_gradients(plain, lambda net, x: net(x).square().mean(), batches)
            exact: dict[str, Any] = dict(found)
            grads = [
                part
                for index in range(2)
                for whole in (exact[f"{index}.qkv.weight"].split(rows), exact[f"{index}.experts"])
                for part in whole
            ]
            for each, grad in zip(apart, grads, strict=True):
                each.grad = grad
            truth.step()
            with torch.no_grad():
                for piece, each in zip(pieces, apart, strict=True):
                    piece.copy_(each)
            model(batches[dist.get_rank()]).square().mean().backward()
            with (
                mock.patch.object(matrix, "_BUCKET", 1),
                mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanges,
            ):
                optimizer.step()
            is_assembled = zero_stage == 3 and dist.get_world_size() > 4
            assert exchanges.call_count == (2 if is_assembled else 0)  # of two units: one more each than AdamW
            optimizer.zero_grad()
        for (name, each), sharded in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert far_apart(sharded.full_tensor(), each.detach()) <= 1e-6, name
        most = max(each.newton_schulz_flops for each in yafsdp_cc.plan_of(model).owners)
        assert most <= work
        yafsdp_cc.save(folder / str(turn), model, optimizer)


@pytest.mark.parametrize(("world", "matrices"), [(2, 5), (5, 2)])
def test_stacks_and_split_matrices_are_several_each(world: int, matrices: int, tmp_path: Path) -> None:
    """Stacks are divided between ranks, or, in ZeRO-3 over more ranks than a unit has matrices, assembled on them."""
    on_ranks(world, stacks, tmp_path, matrices * newton_schulz_flops((WIDTH, WIDTH)))


def test_messages_are_shared_by_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_BUCKET", 10)
    flats = [mock.Mock() for _ in range(7)]
    numels = [6, 6, 2, 3, 20, 1, 2]
    owners = [mock.Mock(spec=FSDPParam, flat=flat) for flat in flats]
    given = [
        mock.Mock(shard_spec=mock.Mock(numel=numel, owner=lambda owner=owner: owner, mesh=0), dtype=torch.float32)
        for numel, owner in zip(numels, owners, strict=True)
        for _ in range(2)
    ]
    sizes = [len({each.shard_spec.owner().flat for each in bucket}) for bucket in matrix.buckets(given)]
    assert sizes == [2, 2, 3]


# What it costs


@pytest.mark.parametrize("world", [also(2), 4])
def test_no_more_bytes_than_adamw_and_an_equal_share_of_the_work(world: int) -> None:
    on_ranks(world, costs)


def costs() -> None:
    world = dist.get_world_size()
    flat, whole = (
        yafsdp_cc.shard(Mlp(8, width=128), zero_stage=2, ownership=ownership) for ownership in ("flat", "matrix")
    )
    sent = []
    for model in (flat, whole):
        for _ in range(2):  # the first step gathers frozen weights, too
            before = yafsdp_cc.counters_of(model)
            start = before.gathered_bytes + before.reduced_bytes
            model(torch.randn(2, 128)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        after = yafsdp_cc.counters_of(model)
        plan = yafsdp_cc.plan_of(model).communication
        assert after.gathered_bytes + after.reduced_bytes - start == plan.total
        sent.append(torch.tensor([plan.total]))
        dist.all_reduce(sent[-1])
    assert sent[1] <= 1.02 * sent[0]
    work = torch.tensor([each.newton_schulz_flops for each in yafsdp_cc.plan_of(whole).owners])
    assert len(work) == world
    assert work.max() <= 1.2 / world * work.sum()


# Refusals


@ranks(2)
def test_owners_are_equal_on_all_ranks_whatever_one_of_them_keeps_or_refuses() -> None:
    """``fully_shard`` goes on from the work of earlier calls, also where one rank has dropped their model."""

    def block() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))

    def owners(model: Any) -> list[Any]:
        every: list[Any] = [None, None]
        dist.all_gather_object(every, [each.shard_spec.owners for each in model.parameters()])
        assert every[0] == every[1]
        return [rank for [rank] in every[0]]

    first: Any = yafsdp_cc.fully_shard(block(), ownership="matrix")
    assert owners(first) == [0, 1, 0]
    if dist.get_rank() == 1:
        del first
        gc.collect()
    assert owners(yafsdp_cc.fully_shard(block(), ownership="matrix")) == [1, 0, 1]
    hooked = block()
    if dist.get_rank() == 1:
        hooked[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match="has hooks"):
        yafsdp_cc.fully_shard(hooked, ownership="matrix")
    assert owners(yafsdp_cc.fully_shard(block(), ownership="matrix")) == [0, 1, 0]


@ranks(1)
def test_what_is_refused() -> None:
    make = yafsdp_cc.optim.Muon
    with pytest.raises(ValueError, match="which is not sharded: make the Muon from"):
        make(Mlp().parameters())
    with pytest.raises(ValueError, match=r'no matrix that one rank owns whole: pass ownership="matrix"'):
        make(yafsdp_cc.shard(Mlp(), units=["Sequential"]).parameters())
    model = yafsdp_cc.shard(Mlp(), ownership="matrix")
    for settings, message in (
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn='rms'"),
        ({"ns_steps": 100}, "ns_steps=100"),
        ({"ns_dtype": torch.int8}, "ns_dtype=torch.int8"),
        ({"adamw": {"rate": 1}}, "adamw has \\['rate'\\]"),
        ({"splits": {"*.qkv": 3}}, "splits names '\\*.qkv', which fits no matrix"),
        (
            {"splits": {"blocks.0.0.weight": (10, 20)}},
            "'blocks.0.0.weight' has 64 rows, and splits=\\(10, 20\\) must add",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make(model.parameters(), **settings)
    groups = [{"params": list(model.blocks.parameters())}, {"params": list(model.leave.parameters())}]
    for group, more, message in (
        (1, {"lr": 7e-5, "eps": 0.0}, "'leave.weight' has lr, eps, .*\"adamw\": {'lr': 7e-05, 'eps': 0.0}"),
        (0, {"lr": 0.1, "betas": (0.9, 0.95)}, "group of 'blocks.0.0.weight' has betas, which no matrix in it takes"),
    ):
        with pytest.raises(ValueError, match=message):
            make([{**each, **more} if place == group else each for place, each in enumerate(groups)])
    optimizer = make(model.parameters())
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)  # nesterov=True is a setting of both
    for setting in ("maximize", "amsgrad"):
        of_adamw = {**state["param_groups"][1], setting: True}
        with pytest.raises(ValueError, match=f"with {setting}=True, which Muon does not have"):
            optimizer.load_state_dict({**state, "param_groups": [state["param_groups"][0], of_adamw]})


@ranks(2)
def test_settings_of_groups_and_a_scaler_that_skips_on_all_ranks() -> None:
    model = yafsdp_cc.shard(Mlp(2), ownership="matrix")
    halves = [{"params": list(model.blocks[0].parameters()), "lr": 0.5, "adamw": {"lr": 0.25}}]
    halves.append({"params": [*model.enter.parameters(), *model.blocks[1].parameters(), *model.leave.parameters()]})
    optimizer = yafsdp_cc.optim.Muon(halves, lr=0.1, adamw={"eps": 1e-6})
    assert [(group["lr"], group["eps"]) for group in optimizer.param_groups] == [
        (0.5, 1e-7),
        (0.25, 1e-6),
        (0.1, 1e-7),
        (1e-3, 1e-6),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [each.full_tensor().clone() for each in model.parameters()]
    scaler.scale(model(torch.ones(2, WIDTH)).sum()).backward()
    weight = model.blocks[0][0].weight
    if weight.to_local().numel():
        weight.grad.to_local()[0] = torch.inf  # at its owner alone
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(each.full_tensor().equal(old) for each, old in zip(model.parameters(), before, strict=True))


# Other matrix optimizers


def shampoo() -> None:
    path = Path(__file__).parents[2] / "docs/examples/shampoo.py"
    source = importlib.util.spec_from_file_location("shampoo", path)
    assert source is not None
    assert source.loader is not None
    source.loader.exec_module(example := importlib.util.module_from_spec(source))
    example.main()
    torch.manual_seed(7)
    plain, model = Mlp(2), Mlp(2)
    model.load_state_dict(plain.state_dict())
    yafsdp_cc.shard(model, ownership="matrix")
    optimizer = example.Shampoo(model.parameters(), lr=0.05)
    blocks = [plain.get_parameter(name) for name in dict(plain.named_parameters()) if name.startswith("blocks")]
    matrices = [each for each in blocks if each.ndim == 2]
    others = [each for each in plain.parameters() if all(each is not one for one in matrices)]
    adamw = torch.optim.AdamW(others, fused=True)
    lefts, rights = ([torch.zeros(each.shape[dim], each.shape[dim]) for each in matrices] for dim in (0, 1))
    batches = [torch.randn(4, WIDTH) for _ in range(dist.get_world_size())]
    for _ in range(5):
        _, found = mean_gradients(plain, lambda net, x: net(x).square().mean(), batches)
        for name, each in plain.named_parameters():
            each.grad = found[name]
        adamw.step()
        with torch.no_grad():
            for each, left, right in zip(matrices, lefts, rights, strict=True):
                gradient = each.grad
                left += gradient @ gradient.T
                right += gradient.T @ gradient
                factors = [torch.linalg.matrix_exp(-0.25 * log_of(side)) for side in (left, right)]
                each.sub_(0.05 * factors[0].float() @ gradient @ factors[1].float())
        model(batches[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, each), sharded in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert far_apart(sharded.full_tensor(), each.detach()) <= 1e-4, name


def log_of(side: Tensor) -> Tensor:
    """The logarithm of a symmetric matrix with 1e-4 added to its eigenvalues, in double precision."""
    values, vectors = torch.linalg.eigh(side.double())
    return (vectors * (values.clamp(min=0) + 1e-4).log()) @ vectors.T


def test_shampoo_of_the_docs_is_shampoo() -> None:
    on_ranks(2, shampoo)


class Left(yafsdp_cc.optim.MatrixOptimizer):
    """A state of rows × rows for each part, the first of which is square."""

    def state_shapes(self, rows: int, columns: int) -> dict[str, tuple[int, int]]:
        return {"left": (rows, rows)}

    def parts(self, name: str, rows: int) -> tuple[int, ...]:
        return (64, 16, 16)

    def updates(self, gradients: Any, states: Any, group: Any) -> Any:
        return gradients


@ranks(1)
def test_unequal_parts_have_no_states_of_their_own_shapes() -> None:
    model = yafsdp_cc.shard(nn.Sequential(nn.Linear(64, 96, bias=False)), units=[nn.Linear], ownership=["0.*"])
    optimizer = Left(model.parameters(), {"lr": 0.1, "weight_decay": 0.0})
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(ValueError, match=r"'0.weight' is divided into matrices of \(64, 16, 16\) rows, and the state"):
        optimizer.step()


# Tensor and expert parallelism


@torch.no_grad()
def in_double_precision(weight: Tensor, gradient: Tensor, momentum: Tensor) -> None:
    """Make a step of Muon, which torch's makes in bf16."""
    momentum.lerp_(gradient, 0.05)
    x = gradient.lerp(momentum, 0.95)
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    weight.mul_(1 - 0.02 * 0.1).sub_(0.02 * max(1, weight.shape[0] / weight.shape[1]) ** 0.5 * x)


def tensor_parallel(folder: Path) -> None:
    """On (dp, tp) = (2, 2), in double precision, as sums over tensor-parallel ranks are rounded on their way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, models, muons = Mlp(2).double(), [], []
    for _ in range(2):
        model = Mlp(2).double()
        model.load_state_dict(plain.state_dict())
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        models.append(yafsdp_cc.shard(model, mesh=mesh["dp"], ownership="matrix"))
        muons.append(yafsdp_cc.optim.Muon(model.parameters(), lr=0.02, ns_dtype=torch.float64))
    batches = [torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    momenta: dict[str, Tensor] = {}
    others = [each for name, each in plain.named_parameters() if not is_matrix(name, each)]
    adamw = torch.optim.AdamW(others)
    for step in range(4):
        model, muon = models[step // 2], muons[step // 2]
        if step == 2:  # the other one goes on
            yafsdp_cc.save(folder, models[0], muons[0])
            yafsdp_cc.load(folder, models[1], muons[1])
        _, found = mean_gradients(plain, lambda net, x: net(x).square().mean(), batches)
        for name, each in plain.named_parameters():
            each.grad = found[name]
        adamw.step()
        for name, each in plain.named_parameters():
            if is_matrix(name, each):
                momentum = momenta.setdefault(name, torch.zeros_like(each))
                assert each.grad is not None
                in_double_precision(each, each.grad, momentum)
        model(batches[dist.get_rank() // 2]).square().mean().backward()
        muon.step()
        muon.zero_grad()
    for (name, each), sharded in zip(plain.named_parameters(), models[1].named_parameters(), strict=True):
        assert far_apart(sharded[1].full_tensor(), each.detach()) <= 1e-6, name


def test_whole_matrices_where_tensor_parallelism_has_divided_them(tmp_path: Path) -> None:
    on_ranks(4, tensor_parallel, tmp_path / "checkpoint")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) / WIDTH)
        self.here = slice(None)
        """Those that run on a rank."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.up, self.down)
        up, down = (each.to_local() if isinstance(each, DTensor) else each[self.here] for each in weights)
        return ((x @ up).relu() @ down).sum(0)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.experts(self.router(self.norm(x)))
        return out


class WithNorms(yafsdp_cc.optim.Muon):
    """Also sums up norms of gradients: a state with a shape of its own for each matrix."""

    def state_shapes(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in super().state_shapes(rows, columns).items()} | {"norms": (2,)}

    def updates(self, gradients: Any, states: Any, group: Any) -> Any:
        for gradient, state in zip(gradients, states, strict=True):
            state["norms"][1] += gradient.norm()
        return super().updates(gradients, states, group)


def expert_parallel(folder: Path) -> None:
    """Two groups of two experts each, sharded across two ranks; then all of them across the four ranks."""
    dense = init_device_mesh("cpu", (4,))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(7)
    plain = nn.Sequential(Mixture(), Mixture()).double()
    truth = {name: torch.zeros_like(each) for name, each in plain.named_parameters() if each.ndim > 1}
    norms: dict[str, Tensor] = {name: torch.zeros(4) for name in truth}
    adamw = torch.optim.AdamW([each for each in plain.parameters() if each.ndim == 1])
    inputs = torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    muon: Any = None
    for turn, is_divided in enumerate((True, False)):
        model = nn.Sequential(Mixture(), Mixture()).double()
        model.load_state_dict(plain.state_dict())
        for block in model:
            experts: Any = block.experts
            if is_divided:
                for name, each in list(experts.named_parameters()):
                    divided = distribute_tensor(each.detach(), sparse["ep"], [Shard(0)])
                    experts.register_parameter(name, nn.Parameter(divided))
            mesh = sparse["efsdp"] if is_divided else dense
            yafsdp_cc.fully_shard(experts, mesh=mesh, ownership="matrix").set_gradient_divide_factor(4)
            yafsdp_cc.fully_shard(block, mesh=dense, ownership="matrix")
        yafsdp_cc.fully_shard(model, mesh=dense)
        muon = WithNorms(model.parameters(), lr=0.02, ns_dtype=torch.float64)
        if turn:
            yafsdp_cc.load(folder, model, muon)

        def loss(net: Any, rank: int, divides: bool = is_divided) -> Tensor:
            for block in net:
                block.experts.here = slice(2 * (rank % 2), 2 * (rank % 2) + 2) if divides else slice(None)
            output: Tensor = net(inputs[rank])
            return output.square().mean()

        for _ in range(2):
            _, found = mean_gradients(plain, loss, list(range(4)))
            exact: dict[str, Any] = dict(found)
            for name, each in plain.named_parameters():
                each.grad = exact[name]
                for k in range(len(each) if each.ndim == 3 else each.ndim - 1):
                    weight, gradient, momentum = (
                        one[k] if one.ndim == 3 else one for one in (each.detach(), exact[name], truth[name])
                    )
                    norms[name][k] += gradient.norm()
                    in_double_precision(weight, gradient, momentum)
            adamw.step()
            loss(model, dist.get_rank()).backward()
            with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("a matrix was gathered")):
                muon.step()
            muon.zero_grad()
        work = torch.tensor([each.newton_schulz_flops for each in yafsdp_cc.plan_of(model).owners])
        assert len(work) == 4
        assert work.max() <= 1.2 / 4 * work.sum()
        for (name, each), sharded in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert far_apart(sharded.full_tensor(), each.detach()) <= 1e-6, name
            if name in truth:
                state = {key: value.full_tensor() for key, value in muon.state[sharded].items()}
                assert far_apart(state["momentum_buffer"], truth[name]) <= 1e-6, name
                seen = state["norms"].view(-1, 2)[:, 1]
                assert far_apart(seen, norms[name][: len(seen)].to(seen)) <= 1e-6, name
        yafsdp_cc.save(folder, model, muon)


def test_experts_are_updated_where_expert_parallelism_has_them(tmp_path: Path) -> None:
    on_ranks(4, expert_parallel, tmp_path / "checkpoint")
