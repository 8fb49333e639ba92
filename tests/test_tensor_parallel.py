"""Parameters that ``parallelize_module`` has divided, cut further across the other dimension of a mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from tests.checkpoint.jobs import contents, grouped, same, whole
from tests.ranks import on_ranks, ranks
from tests.soak import also
from yafsdp_cc.compression import autotune, fallback
from yafsdp_cc.compression.autotune import LinkCost
from yafsdp_cc.fsdp2.module import require_state
from yafsdp_cc.optim import OneBitAdam
from yafsdp_cc.rescue.memory import MEMORY

WIDTH, VOCABULARY, BATCH = 48, 66, 2
Figures = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def divided(model: Any, mesh: DeviceMesh, *, everything: bool) -> None:
    """Every module, activations by their sequence; or the MLPs alone, so that some parameters are in one mesh only."""
    for block in model.blocks:
        if everything:
            plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
            parallelize_module(block, mesh, plan | {"norm": SequenceParallel()})
        else:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if everything:
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan)


class Job:
    """A model on (dp, tp), or (replicate, dp, tp), or plain with the joined batch of all."""

    def __init__(self, api: Any, shape: tuple[int, ...] = (), *, seed: int = 0, everything: bool = True, **more: Any):
        torch.manual_seed(seed)
        self.model: Any = Net()
        self.batches = list(range(4))
        if shape:
            names = ("replicate", "dp", "tp")[-len(shape) :]
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            if shape[-1] > 1:
                divided(self.model, mesh["tp"], everything=everything)
            self.over = mesh[names[:-1]] if len(shape) > 2 else mesh["dp"]
            count = self.over.size()
            share = len(self.batches) // count
            place = dist.get_rank() // shape[-1]
            self.batches = self.batches[place * share : (place + 1) * share]
            for block in self.model.blocks:
                api.fully_shard(block, mesh=self.over, **more)
            api.fully_shard(self.model, mesh=self.over, **more)
        self.optimizer = grouped(self.model)
        self.figures: Figures = {}

    def train(self, steps: int, *, clip: bool = True) -> Figures:
        for step in range(steps):
            for batch in self.batches:
                draws = torch.Generator().manual_seed(100 * step + batch)
                tokens = torch.randint(VOCABULARY, (BATCH, 12), generator=draws)
                loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.flatten())
                (loss / len(self.batches)).backward()
            for name, parameter in self.model.named_parameters():
                self.figures[f"{step} gradient of {name}"] = whole(parameter.grad).clone()
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                assert isinstance(norm, DTensor) or not isinstance(self.model, FSDPModule)
                self.figures[f"{step} norm"] = whole(norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.figures


def close(ours: Figures, other: Figures, tolerance: float) -> None:
    assert ours.keys() == other.keys()
    for name, one in ours.items():
        assert (one - other[name]).norm() <= tolerance * other[name].norm(), name


@pytest.mark.parametrize("everything", [True, False])
@ranks(4)
def test_training_is_that_of_fsdp2_and_of_one_process(everything: bool) -> None:
    clip = everything  # FSDP2 has no norm over parameters of two meshes
    ours, theirs = (Job(api, (2, 2), everything=everything).train(3, clip=clip) for api in (yafsdp_cc, torch_fsdp))
    close(ours, theirs, 1e-6)
    job, plain = Job(yafsdp_cc, (2, 2), everything=everything), Job(None)
    close(job.train(1), plain.train(1), 1e-6)
    parameter = job.model.blocks[0].up.weight
    assert parameter.shape == (4 * WIDTH, WIDTH)
    assert parameter.device_mesh.mesh_dim_names == ("dp", "tp")
    assert parameter.placements == (Shard(0), Shard(0))
    held = torch.tensor(parameter.to_local().numel())
    dist.all_reduce(held)
    assert held == parameter.numel()


class Gated(nn.Module):
    """Two layers that tensor parallelism divides, perhaps unevenly, beside one that it leaves whole."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, hidden), nn.Linear(hidden, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.gate(x)).relu())
        return out


@pytest.mark.parametrize(
    ("compression", "hidden", "clip"), [("topk", 256, None), ("onebit", 256, 0.05), ("int8", 33, None)]
)
@ranks(4)
def test_copies_of_what_is_not_divided_stay_alike_under_compression(
    compression: str, hidden: int, clip: float | None
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Gated(hidden), Gated(hidden))
    for block in model:
        divided = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], divided)
    codec = yafsdp_cc.Compression(compression, fallback=False)
    yafsdp_cc.shard(model, mesh=mesh["dp"], units=[Gated], compression=codec)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if clip is not None:
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, warmup_steps=3, max_grad_norm=clip)
    for step in range(8):
        drawn = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
        model(torch.randn(8, 64, generator=drawn)).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    for block in model:
        own = block.gate.weight.detach().full_tensor().contiguous()
        everyones = [torch.empty_like(own) for _ in range(4)]
        dist.all_gather(everyones, own)
        assert all(each.equal(own) for each in everyones)


def _chosen_under_tensor_parallelism(codec: str, *, differing_losses: bool) -> dict[str, str]:
    """Codecs that sums have after some steps, which must be the same on all four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Gated(256), Gated(256))
    for block in model:
        divided = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], divided)
    yafsdp_cc.shard(model, mesh=mesh["dp"], units=[Gated], compression=codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        model(torch.ones(8, 64)).square().mean().backward()
        if differing_losses:
            yafsdp_cc.watch_loss(model, 1.0 + 9 * step * mesh["tp"].get_local_rank())
        optimizer.step()
        optimizer.zero_grad()
    found = list[Any]([None] * 4)
    dist.all_gather_object(found, dict(yafsdp_cc.counters_of(model).chosen))
    assert all(each == found[0] for each in found), found
    chosen: dict[str, str] = found[0]
    return chosen


@ranks(4)
def test_codecs_are_chosen_alike_where_links_or_losses_differ_between_tensor_parallel_ranks() -> None:
    autotune.PERIOD = 2
    autotune.measure_link = lambda *_: LinkCost(0.0, 1.0 if dist.get_rank() % 2 else 0.0)
    assert "int4" in _chosen_under_tensor_parallelism("auto", differing_losses=False).values()
    fallback.PERIOD = 1
    assert "bf16" in _chosen_under_tensor_parallelism("int4", differing_losses=True).values()


@ranks(4)
def test_in_half_precision_with_kept_weights_and_with_replicas() -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours, theirs = (
        Job(api, (2, 2), mp_policy=bf16, reshard_after_forward=False).train(2) for api in (yafsdp_cc, torch_fsdp)
    )
    close(ours, theirs, 1e-6)
    ours, theirs = (Job(api, (2, 1, 2)).train(2) for api in (yafsdp_cc, torch_fsdp))
    close(ours, theirs, 1e-6)


@ranks(2)
def test_small_parameters_are_recomputed_as_they_were_computed() -> None:
    """Activation checkpointing compares how many tensors both forwards save."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def gradients(api: Any) -> Figures:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2)))
        for part in model:
            parallelize_module(part, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            forward = part.forward
            part.forward = partial(checkpoint, forward, use_reentrant=False)
            api.fully_shard(part, mesh=mesh["dp"])
        api.fully_shard(model, mesh=mesh["dp"])
        model(torch.ones(3, 6)).square().sum().backward()
        return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}

    close(*(gradients(api) for api in (yafsdp_cc, torch_fsdp)), 1e-6)


class Returning(nn.Module):
    """A layer that returns its weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).tanh(), self.linear.weight


class Tying(nn.Module):
    """A model that uses the weight of its first unit once more, behind all units."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Returning() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = []
        for unit in self.units:
            x, weight = unit(x)
            weights.append(weight)
        first: Any = weights[0]
        out: Tensor = x @ (first.full_tensor() if isinstance(first, DTensor) else first)
        return out


@pytest.mark.parametrize("grad", [False, True])
@ranks(2)
def test_a_unit_may_return_its_own_divided_weight(grad: bool) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = Tying()
    torch.manual_seed(0)
    plain = Tying()
    for unit in model.units:
        parallelize_module(unit, mesh["tp"], {"linear": ColwiseParallel(output_layouts=Replicate())})
        yafsdp_cc.fully_shard(unit, mesh=mesh["dp"])
    yafsdp_cc.fully_shard(model, mesh=mesh["dp"])
    x = torch.ones(2, WIDTH)
    with torch.set_grad_enabled(grad):
        found, truth = model(x), plain(x)
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)
    if grad:
        found.square().mean().backward()
        truth.square().mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), plain.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_a_divided_embedding_needs_no_weights_in_the_backward() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def gradients(api: Any) -> Figures:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH))
        columns = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate()), "1": columns})
        for part in (*model, model):
            api.fully_shard(part, mesh=mesh["dp"])
        model[0].set_unshard_in_backward(False)
        model(torch.arange(8)).square().mean().backward()
        return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}

    close(*(gradients(api) for api in (yafsdp_cc, torch_fsdp)), 1e-6)


# State


def saved(folder: Any, shape: tuple[int, ...]) -> None:
    for name, api in (("ours", yafsdp_cc), ("fsdp2", torch_fsdp)):
        job = Job(api, shape)
        job.train(2)
        if name == "ours":
            yafsdp_cc.save(folder / name, job.model, job.optimizer)
        else:
            dcp.save(state_of(job), checkpoint_id=folder / name)
        found = contents(job.model, job.optimizer)
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{name}.pt")


def loaded(folder: Any, shape: tuple[int, ...]) -> None:
    for saver in ("ours", "fsdp2"):
        for api in (yafsdp_cc, torch_fsdp):
            job = Job(api, shape, seed=1)
            job.train(1)
            if api is yafsdp_cc:
                yafsdp_cc.load(folder / saver, job.model, job.optimizer)
            else:
                dcp.load(state := state_of(job), checkpoint_id=folder / saver)
                model, optimizer = state["model"], state["optimizer"]
                set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            same(contents(job.model, job.optimizer), torch.load(folder / f"{saver}.pt"))


def state_of(job: Job) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(job.model, job.optimizer), strict=True))


@pytest.mark.parametrize(("writers", "readers"), [((2, 2), (2, 1)), also((2, 1), (2, 2)), also((1, 2), (2, 1, 2))])
def test_checkpoints_are_exchanged_with_fsdp2(writers, readers, tmp_path):
    """(dp, tp), or (replicate, dp, tp); bit for bit, both ways."""
    on_ranks(torch.Size(writers).numel(), saved, tmp_path, writers)
    on_ranks(torch.Size(readers).numel(), loaded, tmp_path, readers)


def one_unit(vocabulary: int) -> Any:
    """An embedding, which is to be divided, and an untied head, which stays whole."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(vocabulary, 192), nn.Linear(192, vocabulary, bias=False))


@ranks(4)
def test_a_checkpoint_of_an_uneven_division_beside_what_is_whole(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(MEMORY, str(tmp_path / "memory"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    buffers = []
    for vocabulary in (32, 33):
        model = one_unit(vocabulary)
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate())})
        yafsdp_cc.fully_shard(model, mesh=mesh["dp"])
        buffers.append(len([*require_state(model).flats]))
    optimizer = torch.optim.AdamW(model.parameters())
    rescue = yafsdp_cc.Rescue(model, optimizer, every=1)
    rescue.restore()
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()
    yafsdp_cc.save(tmp_path / "saved", model, optimizer)
    rescue.step()
    rescue._wait()
    before = contents(model, optimizer)
    plain = one_unit(33)
    loaded = torch.optim.AdamW(plain.parameters())
    yafsdp_cc.load(tmp_path / "saved", plain, loaded)
    same(contents(plain, loaded), before)
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()
    assert rescue.restore() == 1
    same(contents(model, optimizer), before)
    rescue.close()
    assert buffers == [1, 2]  # the even division takes one all-gather


@ranks(4)
def test_whole_states_and_the_way_back(tmp_path: Any) -> None:
    job, plain = Job(yafsdp_cc, (2, 2)), Job(None)
    full = yafsdp_cc.full_state_dict(job.model)
    if dist.get_rank() == 0:
        same(full, plain.model.state_dict())
    else:
        assert full == {}

    yafsdp_cc.save_safetensors(tmp_path / "whole", job.model)
    other = Job(yafsdp_cc, (2, 2), seed=1)
    yafsdp_cc.load_safetensors(tmp_path / "whole", other.model)
    same({name: whole(value) for name, value in other.model.state_dict().items()}, plain.model.state_dict())

    with yafsdp_cc.whole_parameters(job.model, write=True):
        weight = job.model.blocks[1].down.weight
        assert weight.placements == (Shard(1),)
        with torch.no_grad():
            weight.mul_(2)
    assert whole(job.model.blocks[1].down.weight).equal(2 * plain.model.blocks[1].down.weight)

    weight = yafsdp_cc.unshard_model(job.model).blocks[1].down.weight
    assert type(weight) is nn.Parameter or weight.placements == (Shard(1),)
    assert whole(weight).equal(2 * plain.model.blocks[1].down.weight)
    job.model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    assert weight.grad.placements == (Shard(1),)


# Parameters as users see them


@ranks(4)
def test_parameters_as_users_see_them() -> None:
    model = Job(yafsdp_cc, (2, 2)).model
    weight, values = model.blocks[0].down.weight, torch.randn(WIDTH, 4 * WIDTH)
    with torch.no_grad():
        weight.copy_(values)
        assert whole(weight).equal(values)
        divided = distribute_tensor(values + 1, weight.device_mesh["tp"], [Shard(1)])
        weight.copy_(divided)
        assert whole(weight).equal(values + 1)
        torch.manual_seed(7)
        nn.init.normal_(weight)
        torch.manual_seed(7)
        assert whole(weight).equal(torch.empty_like(values).normal_())
        torch.manual_seed(dist.get_rank())  # also where seeds differ, what two ranks hold is the same on both
        bias = model.blocks[0].down.bias
        assert bias.placements[1] == Replicate()
        nn.init.uniform_(bias)
    pair = [torch.empty(WIDTH) for _ in range(dist.get_world_size())]
    dist.all_gather(pair, whole(bias))
    assert all(each.equal(pair[0]) for each in pair)

    for order in (1.0, 2.0, float("inf")):
        norm = torch.linalg.vector_norm(whole(weight), order)
        assert torch.allclose(whole(torch.linalg.vector_norm(weight, order)), norm)
    everything = [parameter.detach() for parameter in model.parameters()]
    total = torch.nn.utils.get_total_norm(everything)
    assert torch.allclose(whole(total), torch.nn.utils.get_total_norm([whole(each) for each in everything]))
    assert weight.max().full_tensor() == whole(weight).max()
    assert torch.equal(weight, weight.clone())

    weight.grad = torch.zeros_like(weight)
    if dist.get_rank() == 3:
        weight.grad.to_local()[:1] = float("inf")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    before = whole(weight)
    scaler.step(optimizer)  # found on one rank, skipped on all
    assert whole(weight).equal(before)
    assert "holds" in repr(weight)
    with pytest.raises(NotImplementedError, match=r"down.weight' \(sharded \[48, 192\]"):
        weight @ weight


# Other models


def on_meta() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model: Any = Net()
    divided(model, mesh["tp"], everything=True)
    for block in model.blocks:
        yafsdp_cc.fully_shard(block, mesh=mesh["dp"])
    yafsdp_cc.fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    twin = Job(yafsdp_cc, (2, 2)).model
    model.load_state_dict(twin.state_dict())
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert model(tokens).equal(twin(tokens))


def by_one_line() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = Net()
    divided(model, mesh["tp"], everything=True)
    yafsdp_cc.shard(model, mesh=mesh["dp"], sync_module_states=True)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert torch.allclose(model(tokens), Job(None).model(tokens), atol=1e-6)
    plan = yafsdp_cc.plan_of(model)
    elements, whole_elements = sum(unit.elements for unit in plan.units), sum(p.numel() for p in model.parameters())
    assert f"{whole_elements:,} parameters in " in str(plan)
    assert f"of which these ranks hold {plan.elements:,}" in str(plan)
    assert elements == sum(p.numel() // 2 for p in model.parameters() if Shard(0) == p.placements[0])


def uneven() -> None:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Linear(64, 90)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 90))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    yafsdp_cc.fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    for each in (model, plain):
        each(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert whole(ours).equal(theirs.detach())
        assert torch.allclose(whole(ours.grad), theirs.grad, atol=1e-5)
    assert [p.to_local().numel() for p in model.parameters()] == [[23 * 64, 23], [21 * 64, 21]][dist.get_rank() == 3]


def test_on_meta_by_one_line_and_uneven():
    on_ranks(4, each_of, (on_meta, by_one_line, uneven))


def each_of(bodies: Any) -> None:
    for body in bodies:
        body()


@ranks(4)
def test_what_cannot_be_cut_further() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    already = r"'0\.weight' is already a DTensor, across .* take both from one mesh"
    for over in (mesh, mesh["tp"]):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        for shard in (yafsdp_cc.fully_shard, partial(yafsdp_cc.shard, units=[model[0]])):
            with pytest.raises(ValueError, match=already):
                shard(model, mesh=over)
    for shard in (yafsdp_cc.fully_shard, yafsdp_cc.shard):
        with pytest.raises(ValueError, match=r"If it was sharded before, shard it once"):
            shard(torch_fsdp.fully_shard(Net()))
    apart = init_device_mesh("cpu", (4,))
    with pytest.raises(ValueError, match=r"'0\.weight' is already a DTensor, across .* is to be sharded across"):
        yafsdp_cc.fully_shard(model, mesh=apart)
    part = DTensor.from_local(torch.ones(64, 64), mesh["tp"], [Partial()], run_check=False)
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight = nn.Parameter(part)
    with pytest.raises(ValueError, match=r"'0\.weight' is a DTensor placed as P"):
        yafsdp_cc.fully_shard(model, mesh=mesh["dp"])
