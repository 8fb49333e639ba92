"""Sums over replicas hidden behind the next step, against the same steps in one process."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import ranks
from tests.twins import numbers, seeded, square, whole
from yafsdp_cc import Compression
from yafsdp_cc.replicas import Gossip, Outer, Overlap

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
Grads = list[Tensor | None]


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(replicas: int, shards: int, sync: Any, build: Any = Mlp) -> Any:
    return yafsdp_cc.shard(seeded(build), mesh=mesh_of(replicas, shards), sync=sync)


def batch(step: int, rank: int) -> Tensor:
    return numbers(4, WIDTH, seed=100 * step + rank)


def train(model: Any, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        square(model, batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


class Branches(nn.Module):
    """One of its layers is used now and then, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, takes: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return x + self.sometimes(x) if takes else x


def mlp_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return square(model, batch(step, rank))


def branches_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    out: Tensor = model(batch(step, rank), (step + rank) % 3 == 0 or step == 4)  # on some, on all, and on none
    return out.square().mean()


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how."""

    build: Callable[[], nn.Module] = Mlp
    loss: Callable[[nn.Module, int, int], Tensor] = mlp_loss
    optimizer: Callable[..., Optimizer] = AdamW
    settings: dict[str, Any] = field(default_factory=lambda: dict(ADAMW))
    clip: float = 0.0
    backwards: int = 1
    decay: float = 0.1
    """Of the learning rate, per step."""

    def make(self, model: nn.Module) -> Optimizer:
        """Biases in a group of their own."""
        named = dict(model.named_parameters())
        kinds = ([named[name] for name in named if is_bias == (named[name].ndim == 1)] for is_bias in (False, True))
        weights, biases = kinds
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        return self.optimizer(groups, **copy.deepcopy(self.settings))

    def factor(self, step: int) -> float:
        return 1 - self.decay * step

    def backward(self, model: nn.Module, step: int, ranks: Sequence[int]) -> None:
        """Accumulate the mean gradient of so many ranks, and clip it."""
        for part in range(self.backwards):
            for rank in ranks:
                (self.loss(model, step + 50 * part, rank) / len(ranks)).backward()
        if self.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)


RECIPES = {
    "adamw": Recipe(clip=0.05, backwards=2),
    "tensor-lr": Recipe(settings={"lr": torch.tensor(1e-2), "weight_decay": 0.1, "amsgrad": True}),
    "sgd": Recipe(optimizer=SGD, settings={"lr": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "branches": Recipe(Branches, branches_loss),
}


class InOneProcess:
    """Replicas as the definitions have them: committed weights and their optimizer, and what each replica evaluates."""

    def __init__(self, recipe: Recipe, replicas: int, shards: int) -> None:
        self.recipe, self.replicas, self.shards = recipe, replicas, shards
        self.model = seeded(recipe.build)
        self.optimizer = recipe.make(self.model)

    def gradient(self, model: nn.Module, step: int, replica: int) -> Grads:
        """Return the mean gradient of a replica."""
        model.zero_grad()
        self.recipe.backward(model, step, range(self.shards * replica, self.shards * (replica + 1)))
        return [None if each.grad is None else each.grad.clone() for each in model.parameters()]

    def step(self, grads: Grads, of_step: int, twin: bool = False) -> nn.Module:
        """Step committed weights, or a copy of them with a copy of the optimizer's state; return them."""
        model = copy.deepcopy(self.model) if twin else self.model
        optimizer = self.optimizer
        if twin:
            optimizer = self.recipe.make(model)
            optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for group in optimizer.param_groups:
            group["lr"] = self.recipe.settings["lr"] * self.recipe.factor(of_step)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        return model

    def predict(self, steps: int) -> nn.Module:
        """Local prediction; returns the weights once the last gradient is committed."""
        shown: list[nn.Module] = [copy.deepcopy(self.model) for _ in range(self.replicas)]
        due: Grads | None = None
        for step in range(steps):
            found = [self.gradient(model, step, replica) for replica, model in enumerate(shown)]
            if due is not None:
                self.step(due, step - 1)
            shown = [self.step(grads, step, twin=True) for grads in found]
            due = mean(found)
        assert due is not None
        return self.step(due, steps - 1)

    def halves(self, calls: int) -> nn.Module:
        """Two half batches per step (ACCO)."""
        shown = copy.deepcopy(self.model)
        first, second = None, None
        for call in range(calls):
            found = mean([self.gradient(copy.deepcopy(shown), call, replica) for replica in range(self.replicas)])
            if call % 2 == 0:
                if second is not None:
                    assert first is not None
                    self.step(mean([first, second]), call - 1)
                first, shown = found, self.model
            else:
                assert first is not None
                second, shown = found, self.step(first, call, twin=True)
        assert first is not None
        assert second is not None
        return self.step(first if calls % 2 else mean([first, second]), calls - 1)


def mean(several: Sequence[Grads]) -> Grads:
    """Return the mean gradient: where some have none, it is zero there."""
    found: Grads = []
    for grads in zip(*several, strict=True):
        present = [each for each in grads if each is not None]
        found.append(torch.stack(present).sum(0) / len(several) if present else None)
    return found


@pytest.mark.parametrize(
    ("recipe", "wrap", "replicas", "shards", "half_batches", "steps"),
    [
        ("adamw", "shard", 1, 2, False, 6),
        ("adamw", "shard", 2, 2, False, 6),
        ("tensor-lr", "fsdp2", 2, 2, False, 6),
        ("sgd", "plain", 2, 1, False, 6),
        ("branches", "plain", 4, 1, False, 8),
        ("adamw", "shard", 1, 2, True, 6),
        ("adamw", "shard", 2, 2, True, 7),
        ("sgd", "plain", 4, 1, True, 6),
        ("branches", "plain", 2, 1, True, 9),
    ],
)
def test_is_what_its_definition_says(
    recipe: str, wrap: str, replicas: int, shards: int, half_batches: bool, steps: int
) -> None:
    _check_definition(
        world=replicas * shards,
        recipe=recipe,
        wrap=wrap,
        shape=(replicas, shards),
        half_batches=half_batches,
        steps=steps,
    )


@ranks("world")
def _check_definition(
    world: int, recipe: str, wrap: str, shape: tuple[int, int], half_batches: bool, steps: int
) -> None:
    chosen, sync = RECIPES[recipe], Overlap(half_batches=half_batches)
    mesh = mesh_of(*shape)
    model: Any = seeded(chosen.build)
    if wrap == "shard":
        yafsdp_cc.shard(model, mesh=mesh, sync=sync)
    else:
        if wrap == "fsdp2":
            fully_shard(model, mesh=mesh["shard"])
        yafsdp_cc.join_replicas(model, mesh["replicate"], sync)
    optimizer = chosen.make(model)
    rates = LambdaLR(optimizer, chosen.factor)
    for step in range(steps):
        chosen.backward(model, step, [dist.get_rank()])
        grads = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
        optimizer.step()
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            assert (parameter.grad is None) == (grad is None)
            assert grad is None or torch.equal(parameter.grad, grad)
        rates.step()
        optimizer.zero_grad()
    yafsdp_cc.synchronize_replicas(model)
    truth = InOneProcess(chosen, *shape)
    expected = dict((truth.halves(steps) if half_batches else truth.predict(steps)).named_parameters())
    for name, parameter in model.named_parameters():
        found = parameter.detach() if wrap == "plain" else whole(parameter.detach())
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=2e-5, msg=name)  # AdamW enlarges rounding


@ranks(2)
def test_encoded_sums_keep_replicas_equal_and_near_exact_ones() -> None:
    for codec, half_batches in (("int8", True), ("int4", False)):
        losses = []
        for its in (None, codec):
            model = sharded(2, 1, Overlap(its, half_batches))
            optimizer = AdamW(model.parameters(), **ADAMW)
            train(model, optimizer, range(12))
            yafsdp_cc.synchronize_replicas(model)
            found = torch.cat([whole(each.detach()).flatten() for each in model.parameters()])
            others = [torch.empty_like(found) for _ in range(2)]
            dist.all_gather(others, found)
            assert torch.equal(*others)
            with torch.no_grad():
                losses.append(square(model, batch(1, 0)).item())
        assert losses[0] != losses[1]
        assert losses[0] == pytest.approx(losses[1], rel=0.25)


@ranks(2)
def test_state_dicts_commit_what_is_on_its_way() -> None:
    model, recipe = sharded(2, 1, "overlap"), Recipe(decay=0.0)
    optimizer = recipe.make(model)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()["state"]
    assert {values["step"].item() for values in state.values()} == {3.0}
    truth = dict(InOneProcess(recipe, 2, 1).predict(3).named_parameters())
    for name, found in model.state_dict().items():
        torch.testing.assert_close(whole(found), truth[name], rtol=1e-5, atol=2e-6)


@ranks(4)
def test_the_plan_has_its_buffers_and_bytes() -> None:
    model = sharded(2, 2, "overlap")
    plan = yafsdp_cc.plan_of(model)
    elements = sum(local.numel() for local in local_shards(model))
    assert plan.replicas == 2
    assert plan.sync_bytes["own gradients"] == plan.sync_bytes["committed weights"] == 4 * elements
    assert plan.communication.replicas == 4 * elements + 8 * (2 + len(list(model.parameters())))
    assert plan.owned_bytes == sum(plan.memory.values())
    assert "own gradients" in str(plan)


def local_shards(model: Any) -> list[Tensor]:
    return [parameter.to_local() for parameter in model.parameters()]


@ranks(2)
def test_what_cannot_be_synchronized_is_refused() -> None:
    mesh = mesh_of(2, 1)
    with pytest.raises(TypeError, match=r"sync takes 'overlap', or an object .*got 'gossip'"):
        yafsdp_cc.shard(Mlp(), mesh=mesh, sync=cast(Any, "gossip"))
    with pytest.raises(ValueError, match=r"pass init_device_mesh\(..., \(replicas, ranks of each\)"):
        yafsdp_cc.shard(Mlp(), mesh=init_device_mesh("cpu", (2,)), sync="overlap")
    for sync in ("overlap", Gossip()):
        deltas = Compression("int8", weights="int4")
        with pytest.raises(ValueError, match=r"weights='int4' sends what optimizer steps change, .* sync=Outer\(...\)"):
            yafsdp_cc.shard(Mlp(), mesh=mesh, sync=cast(Any, sync), compression=deltas, zero_stage=2)
    with pytest.raises(ValueError, match="sync differs between ranks"):
        yafsdp_cc.shard(Mlp(), mesh=mesh, sync=None if dist.get_rank() else "overlap")
    model = seeded(Mlp)
    for each in (model.get_parameter("leave.weight"), model.get_parameter("leave.bias")):
        each.requires_grad_(False)
    yafsdp_cc.shard(model, mesh=mesh, sync="overlap")
    square(model, batch(0, 0)).backward()
    with pytest.raises(ValueError, match=r"treats each element by itself .*; LBFGS does not"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"SGD.step\(\) was given a closure"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    with pytest.raises(ValueError, match="two optimizers, a SGD and a AdamW, step this model"):
        AdamW(model.parameters()).step()
    frozen = model.get_parameter("leave.bias")
    frozen.grad = torch.ones_like(frozen)
    for each in (optimizer, SGD([frozen])):
        with pytest.raises(ValueError, match=r"'leave.bias' has a gradient, but was frozen"):
            each.step()
    frozen.grad = None
    other = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(other.parameters())})
    other(torch.ones(2)).sum().backward()
    with pytest.raises(ValueError, match=r"SGD steps a parameter of shape \[2, 2\] that is not of the model"):
        optimizer.step()
    other.zero_grad()
    optimizer.step()  # a group that was added later
    with pytest.raises(ValueError, match="synchronized already"):
        yafsdp_cc.join_replicas(model, mesh["replicate"], Overlap())
    rank = dist.get_rank()
    turning: Any = nn.Linear(2, 2)
    turning.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    for sync in (Overlap(), Gossip(), Outer()):
        with pytest.raises(ValueError, match=r"'phase' is torch.complex64 and requires a gradient, .*view_as_real"):
            yafsdp_cc.join_replicas(turning, mesh["replicate"], sync)
    turning.phase.requires_grad_(False)
    with pytest.raises(ValueError, match="codec='onebit' loses"):
        yafsdp_cc.join_replicas(turning, mesh["replicate"], Gossip(codec="onebit"))
    once_refused = Gossip(codec="int8")
    with pytest.raises(ValueError, match="mesh=None: Gossip needs the ranks"):
        yafsdp_cc.join_replicas(turning, None, once_refused)
    yafsdp_cc.join_replicas(turning, mesh["replicate"], once_refused)
    with pytest.raises(ValueError, match="this Gossip synchronizes a model already"):
        yafsdp_cc.join_replicas(nn.Linear(2, 2), mesh["replicate"], once_refused)
    for other, sync, differs in (
        (nn.Linear(2, 2), Overlap(["int8", "int4"][rank]), "sync differs"),
        (nn.Linear(2, 2, bias=rank > 0), Overlap(), "the number of tensors differs"),
        (nn.Linear(2, 2 + rank), Overlap(), r"(?s)tensor 0 differs .*rank 1: 'weight \[3, 2\]"),
    ):
        with pytest.raises(ValueError, match=differs):
            yafsdp_cc.join_replicas(other, mesh["replicate"], sync)
    plain = nn.Linear(2, 2)
    yafsdp_cc.join_replicas(plain, mesh["replicate"], Overlap())
    scaler, fused = torch.amp.GradScaler("cpu"), SGD(plain.parameters(), fused=True)
    scaler.scale(plain(torch.ones(2)).sum()).backward()
    with pytest.raises(ValueError, match="a GradScaler scales and skips steps"):
        scaler.step(fused)
    with pytest.raises(ValueError, match="a step of Counting writes 'steps' to its param_groups, and Overlap"):
        Counting(shard_and_train(mesh).parameters()).step()
    for sync in (Overlap(), Outer(every=4, sync_steps=1)):
        rows = nn.Embedding(4, 2, sparse=True)
        yafsdp_cc.join_replicas(rows, mesh["replicate"], sync)
        rows(torch.arange(2)).sum().backward()
        with pytest.raises(ValueError, match=r"a gradient of shape \[4, 2\] is sparse, .* sparse=False"):
            SGD(rows.parameters()).step()


class Counting(torch.optim.Optimizer):
    """An optimizer with state in its groups, as schedule-free ones have it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"steps": 0})

    def step(self) -> None:
        self.param_groups[0]["steps"] += 1


class Calling(AdamW):
    """An optimizer whose step has AdamW's in it, so that torch runs global hooks twice; the first call raises if
    ``fails``."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise FloatingPointError
        return super().step(closure)


@pytest.mark.parametrize(
    "make", [Overlap, lambda: Overlap(half_batches=True), Gossip, lambda: Outer(every=2), lambda: Outer(sync_steps=1)]
)
@ranks(2, fresh=True)
def test_a_step_that_calls_its_base_class_is_one_step(make: Any) -> None:
    found = []
    for kind in (AdamW, Calling):
        sync = make()
        model = sharded(2, 1, sync)
        optimizer = kind(model.parameters(), **ADAMW)
        if isinstance(optimizer, Calling) and not isinstance(sync, Overlap):
            square(model, batch(0, 0)).backward()
            optimizer.fails = True
            with pytest.raises(FloatingPointError):
                optimizer.step()
            optimizer.zero_grad()
        train(model, optimizer, range(5))
        yafsdp_cc.synchronize_replicas(model)
        found.append(torch.cat([each.to_local().detach().flatten() for each in model.parameters()]))
    assert torch.equal(*found)


def shard_and_train(mesh: Any) -> Any:
    model = yafsdp_cc.shard(seeded(Mlp), mesh=mesh, sync=Overlap())
    square(model, batch(0, 0)).backward()
    return model


@pytest.mark.parametrize("sync", [Overlap(), Outer(every=4)])
@ranks(2)
def test_an_optimizer_may_go_before_replicas_are_synchronized(sync: Any) -> None:
    model = sharded(2, 1, sync)
    train(model, AdamW(model.parameters(), **ADAMW), range(3))
    yafsdp_cc.synchronize_replicas(model)
    weights = [each.to_local().detach().clone() for each in model.parameters()]
    for each in weights:
        dist.broadcast(each, 0)
    found = [each.to_local() for each in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(weights, found, strict=True))
    train(model, SGD(model.parameters(), lr=0.1), range(1))  # another takes over


@pytest.mark.parametrize("is_sharded", [False, True])
@ranks(2)
def test_a_model_is_freed_with_what_is_under_way(is_sharded: bool) -> None:
    for make in (Overlap, Gossip, Outer):
        sync = make()
        if is_sharded:
            model = sharded(2, 1, sync)
        else:
            model = seeded(Mlp)
            yafsdp_cc.join_replicas(model, mesh_of(2, 1)["replicate"], sync)
        optimizer = AdamW(model.parameters())
        train(model, optimizer, range(2))
        if not is_sharded:
            copied = copy.deepcopy(next(model.parameters()))
            saved = io.BytesIO()
            torch.save(next(model.parameters()), saved)  # with its attributes
            saved.seek(0)
            assert torch.equal(torch.load(saved), copied)
        held = weakref.ref(sync), weakref.ref(model)
        del sync, model, optimizer
        gc.collect()
        dist.barrier()  # a message may be under way
        assert [each() for each in held] == [None, None], make


@ranks(2)
def test_replicas_are_synchronized_where_parameters_show_unsharded_weights() -> None:
    mesh, model = mesh_of(2, 1), seeded(Mlp)
    yafsdp_cc.fully_shard(model, mesh=mesh["shard"])
    square(model, batch(0, 0))
    yafsdp_cc.join_replicas(model, mesh["replicate"], Overlap())
    train(model, AdamW(model.parameters(), **ADAMW), range(3))
    model.unshard()
    yafsdp_cc.synchronize_replicas(model)
    model.reshard()
    found = [each.to_local().detach() for each in model.parameters()]
    for each in found:
        first = each.clone()
        dist.broadcast(first, 0)
        assert torch.equal(each, first)


@pytest.mark.parametrize("sync", [Overlap(), Gossip(), Outer(every=2)])
@ranks(2)
def test_ignored_parameters_are_each_ranks_own(sync: Any) -> None:
    """Their shapes may differ between ranks, as those of experts do."""
    model, twin, rank = nn.Linear(4, 4), nn.Linear(4, 4), dist.get_rank()
    for each in (model, twin):
        nn.init.constant_(each.bias, rank)
        each.register_parameter("own", nn.Parameter(torch.full((2 + rank,), float(rank)), requires_grad=False))
    yafsdp_cc.shard(model, mesh=mesh_of(2, 1), sync=sync, ignored_params={model.bias, model.own})
    for each in (model, twin):
        each(torch.ones(2, 4)).mul(1 + rank).sum().backward()
        if each is model and isinstance(sync, Overlap):  # which makes steps late
            with pytest.raises(ValueError, match=r"'bias' is an ignored parameter, .*: give ignored parameters an"):
                SGD(each.parameters(), lr=0.1).step()
        for own in ([each.weight], [each.bias]) if isinstance(sync, Overlap) else (each.parameters(),):
            SGD(own, lr=0.1).step()
    yafsdp_cc.synchronize_replicas(model)
    assert torch.equal(model.bias, twin.bias)
    assert torch.equal(model.own, twin.own)


@ranks(2)
def test_untrained_values_of_any_dtype_and_layout_are_those_of_the_first_replica() -> None:
    rank = dist.get_rank()
    for sync in (Overlap(), Gossip(), Outer()):
        model: Any = nn.Linear(2, 2)
        model.register_parameter("phase", nn.Parameter(torch.full((2,), rank + 1j), requires_grad=False))
        model.register_buffer("turn", torch.full((2,), rank - 1j).conj())
        model.register_buffer("wide", torch.full((1,), float(rank)).expand(2))
        yafsdp_cc.join_replicas(model, mesh_of(2, 1)["replicate"], sync)
        train_once = SGD(model.parameters(), lr=0.1)
        model(torch.ones(2)).sum().backward()
        train_once.step()
        assert model.phase.tolist() == model.turn.tolist() == [1j, 1j]
        assert model.wide.tolist() == [0, 0]


@ranks(2)
def test_replicas_may_be_synchronized_in_inference_mode() -> None:
    model, twin = sharded(2, 1, "overlap"), sharded(2, 1, "overlap")
    for each, infers in ((model, True), (twin, False)):
        optimizer = AdamW(each.parameters(), **ADAMW)
        train(each, optimizer, range(1))  # the optimizer's state is made where this step is committed
        with torch.inference_mode(infers):
            yafsdp_cc.synchronize_replicas(each)
        train(each, optimizer, range(1, 3))
    assert all(map(torch.equal, local_shards(model), local_shards(twin)))


@ranks(2)
def test_copies_of_a_plain_model_are_models_of_their_own() -> None:
    model, rank = seeded(Mlp), dist.get_rank()
    yafsdp_cc.join_replicas(model, mesh_of(2, 1)["replicate"], Overlap(half_batches=True))
    optimizer = AdamW(model.parameters(), **ADAMW)
    file = io.BytesIO()
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        if step == 2 and rank == 0:  # would commit half a step of the model on this replica alone
            copy.deepcopy(model).state_dict()
            torch.save(model, file)
    if rank == 0:
        file.seek(0)
        torch.load(file, weights_only=False).state_dict()
    yafsdp_cc.synchronize_replicas(model)


@pytest.mark.parametrize("sync", [Overlap(), Gossip(), Outer(every=4)])
@ranks(2)
def test_a_model_that_is_made_plain_has_what_was_under_way(sync: Any) -> None:
    twin, model = sharded(2, 1, copy.deepcopy(sync)), sharded(2, 1, sync)
    for each in (twin, model):
        train(each, AdamW(each.parameters(), **ADAMW), range(3))
    yafsdp_cc.synchronize_replicas(twin)
    for name, found in yafsdp_cc.unshard_model(model).state_dict().items():
        assert torch.equal(found, whole(twin.get_parameter(name)))
    assert not model._state_dict_pre_hooks
    yafsdp_cc.shard(model, mesh=mesh_of(2, 1), sync="overlap")
    train(model, AdamW(model.parameters(), **ADAMW), range(1))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("sync", [Overlap(), Outer(every=2)])
@ranks(2)
def test_weights_may_be_changed_once_replicas_are_synchronized(sync: Any, steps: int) -> None:
    model = sharded(2, 1, sync)
    optimizer = AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    train(model, optimizer, range(steps))
    yafsdp_cc.synchronize_replicas(model)
    with torch.no_grad():
        model.get_parameter("leave.weight").fill_(3.0)
    train(model, optimizer, range(2, 4))
    assert bool((whole(model.get_parameter("leave.weight").detach()) == 3).all())


@pytest.mark.parametrize("sync", [Overlap(), Outer(every=4, sync_steps=4)])
@ranks(2)
def test_gradients_of_another_dtype_than_their_parameters(sync: Any) -> None:
    """One replica uses a layer in bf16, whose gradients are fp32, and the other one does not."""
    model = seeded(Branches).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    yafsdp_cc.join_replicas(model, mesh_of(2, 1)["replicate"], sync)
    model(batch(0, dist.get_rank()).to(torch.bfloat16), dist.get_rank() == 0).float().square().mean().backward()
    sometimes = model.get_parameter("sometimes.weight")
    mean = torch.zeros_like(sometimes, dtype=torch.float32) if sometimes.grad is None else sometimes.grad.clone()
    dist.all_reduce(mean)
    before, optimizer = sometimes.detach().clone(), SGD(model.parameters(), lr=1.0)
    optimizer.step()
    yafsdp_cc.synchronize_replicas(model)
    torch.testing.assert_close(sometimes.detach(), (before - mean / 2).to(torch.bfloat16))


@ranks(2)
def test_what_would_be_lost_is_refused() -> None:
    model = sharded(2, 1, "overlap")
    optimizer = AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, range(1))
    for call in (yafsdp_cc.uneven, yafsdp_cc.skip_together):
        with pytest.raises(ValueError, match=f"{call.__name__} takes all ranks for one model, .* Overlap"), call(model):
            pass
    with torch.no_grad():
        model.get_parameter("leave.weight").zero_()
    told = r"'enter.bias', or .* changed between two steps .*synchronize_replicas"
    with pytest.raises(RuntimeError, match=told):
        train(model, optimizer, range(1, 2))
    with pytest.warns(UserWarning, match=told):
        yafsdp_cc.synchronize_replicas(model)


@pytest.mark.parametrize("sync", [Overlap(), Outer(every=4), Outer(every=4, delay=1, codec="int8")])
@ranks(2)
def test_different_numbers_of_steps_are_refused(sync: Any) -> None:
    model = sharded(2, 1, sync)
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    yafsdp_cc.synchronize_replicas(model)
    train(model, optimizer, range(2 + dist.get_rank()))
    with pytest.raises(RuntimeError, match="replicas have made different numbers of steps"):
        yafsdp_cc.synchronize_replicas(model)


@ranks(2)
def test_half_a_step_is_not_committed_on_one_replica_alone() -> None:
    model = sharded(2, 1, Overlap(half_batches=True))
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    if dist.get_rank() == 0:
        model.state_dict()  # of a whole step: as the other one will
    train(model, optimizer, range(2, 3))
    if dist.get_rank() == 0:
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"with half_batches=True state_dict\(\) between the same two steps"):
        train(model, optimizer, range(3, 5))
