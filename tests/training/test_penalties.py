"""Losses that read parameters outside of the modules that own them: penalties and read-outs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate
from torch.nn.utils import parameters_to_vector

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import ranks
from tests.soak import also
from tests.twins import Means, inputs, means, mine, numbers, same_gradients, seeded, square, twins, whole

Params = dict[str, Any]
Term = Callable[[Params, Params, Tensor], Tensor]


def _full(p: Any, **options: Any) -> Tensor:
    return p.full_tensor(**options) if hasattr(p, "full_tensor") else p


def _own(p: Any) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


def _spread(p: Any) -> Tensor:
    if not hasattr(p, "redistribute"):
        return p
    replicated: Tensor = p.redistribute(placements=[Replicate()] * p.device_mesh.ndim).to_local()
    return replicated


W, V, BIAS, NORM = "blocks.0.0.weight", "leave.weight", "leave.bias", "enter.bias"
FUNCTIONS = (F.softplus, F.elu, F.hardtanh, F.leaky_relu, F.mish, F.gelu, F.softshrink, F.hardsigmoid, F.relu)
# Of the parameters now, the same ones some steps ago, and what this rank's batch brings.
TERMS: dict[str, Term] = {
    "full": lambda p, o, h: _full(p[W]).pow(2).sum(),
    "full of an expression": lambda p, o, h: _full(p[W] * p[W]).sum(),
    "local": lambda p, o, h: _own(p[W]).pow(2).sum(),
    "local, replicated": lambda p, o, h: _own(p[NORM]).pow(2).mean(),
    "redistributed": lambda p, o, h: _spread(p[V]).abs().sum(),
    "vector": lambda p, o, h: parameters_to_vector(p.values()).norm(),
    "reshaped": lambda p, o, h: (p[W].view(-1) * p[W].view(-1)).sum() + p[V].flatten().norm(),
    "read-out": lambda p, o, h: (h @ _full(p[V]).T).pow(2).mean(),
    "read-out and bias": lambda p, o, h: (h @ _full(p[V]).T + _full(p[BIAS])).exp().mean(),
    "sum": lambda p, o, h: p[W].sum() + p[NORM].sum(),
    "absolute": lambda p, o, h: p[W].abs().sum() + p[W].sum(dim=(0, 1)).sin(),
    "from the start": lambda p, o, h: (p[W] - o[W]).pow(2).sum(),
    "a sum, read": lambda p, o, h: _full(p[W].pow(2).sum() + p[NORM].pow(2).sum()),
    "mean": lambda p, o, h: p[W].mean() + p[NORM].pow(2).mean(),
    "by functions": lambda p, o, h: sum(f(p[W]).mean() + f(p[NORM]).mean() for f in FUNCTIONS),
    "l1": lambda p, o, h: F.l1_loss(p[W], o[W]),
    "number of elements": lambda p, o, h: torch.linalg.vector_norm(p[W], 0) + torch.linalg.vector_norm(p[NORM], 0),
    "norm": lambda p, o, h: p[W].norm() + p[NORM].norm(),
    "extremes": lambda p, o, h: p[W].max() - p[V].min(),
    "all": lambda p, o, h: 0.1 * sum(each.pow(2).sum() for each in p.values()) / 3,
    "by the batch": lambda p, o, h: h.mean() * p[W].sum() + h.pow(2).mean() * (p[V].norm() + p[NORM].pow(3).mean()),
    "distance by the batch": lambda p, o, h: h.pow(2).mean() * (p[W] - o[W]).pow(2).mean() * p[NORM].max(),
}


def _parameters(model: nn.Module) -> tuple[Params, Params]:
    params = dict(model.named_parameters())
    return params, {name: p.detach() * 0.9 + 0.01 for name, p in params.items()}


def _features(step: int) -> list[Tensor]:
    return [numbers(3, WIDTH, seed=5000 + 100 * step + rank) for rank in range(dist.get_world_size())]


def _penalties(plain: nn.Module, terms: list[str], step: int) -> Means:
    """The mean over ranks of the penalties' gradients in one process, in double precision."""
    double = seeded(Mlp).double()
    double.load_state_dict(plain.state_dict())
    params, start = _parameters(double)
    every = _features(step)
    losses = [sum(TERMS[term](params, start, h.double()) for term in terms) for h in every]
    grads = torch.autograd.grad(sum(losses) / len(every), list(params.values()), allow_unused=True)
    return {name: None if grad is None else grad.float() for name, grad in zip(params, grads, strict=True)}


def _sum(*terms: Means) -> Means:
    def add(grads: list[Tensor | None]) -> Tensor | None:
        known = [grad.double() for grad in grads if grad is not None]
        return torch.stack(known).sum(0).float() if known else None

    return {name: add([term[name] for term in terms]) for name in terms[0]}


def _mesh(world: int) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))} if world == 4 else {}


@pytest.mark.parametrize("world", [also(2), 4])  # 4: two replicas of two shards
@ranks("world")
def test_penalties_and_read_outs_have_the_gradients_of_the_whole_tensors(world: int) -> None:
    model, plain = twins(Mlp, **_mesh(world))
    params, start = _parameters(model)
    batches, features = inputs(), mine(_features(0))
    forward = means(plain, square, batches)
    for name, term in TERMS.items():
        truth = _penalties(plain, [name], 0)
        for place in ("alone", "before the forward", "behind it"):
            if place == "alone":
                term(params, start, features).backward()
            elif place == "behind it":
                (square(model, mine(batches)) + term(params, start, features)).backward()
            else:
                penalty = term(params, start, features)
                (penalty + square(model, mine(batches))).backward()
            try:
                same_gradients(model, truth if place == "alone" else _sum(truth, forward), within=1e-6)
            except AssertionError as error:
                raise AssertionError(f"{name}, {place}: {error}") from None
            model.zero_grad()


def _runs(model: Any, terms: list[str], micro: int, dice: random.Random) -> None:
    """Some micro-batches of one program, with penalties at places that the dice tell."""
    params, start = _parameters(model)
    for step in range(micro):
        syncs, early, features = dice.random() < 0.5 or step == micro - 1, dice.random() < 0.5, mine(_features(step))
        model.set_requires_gradient_sync(syncs)
        loss = torch.zeros(())
        if early:
            loss = loss + sum(TERMS[term](params, start, features) for term in terms)
        loss = loss + square(model, mine(inputs(step=step))).float()
        if not early:
            loss = loss + sum(TERMS[term](params, start, features) for term in terms)
        loss.backward()


@pytest.mark.parametrize("seeds", [range(6), also(range(6, 100))])
@ranks(4)
def test_random_penalties(seeds: range) -> None:
    for seed in seeds:
        dice = random.Random(seed)
        options: dict[str, Any] = dict(_mesh(4)) if dice.random() < 0.5 else {}
        if dice.random() < 0.5:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        if dice.random() < 0.5:
            options["compression"] = dice.choice(["int8", "onebit"])
        terms, micro, program = dice.sample(sorted(TERMS), dice.randint(1, 4)), dice.randint(1, 3), dice.random()
        with_, plain = twins(Mlp, **options)
        without = yafsdp_cc.shard(seeded(Mlp), **options)
        _runs(with_, terms, micro, random.Random(program))
        _runs(without, [], micro, random.Random(program))
        truth = _sum(*(_penalties(plain, terms, step) for step in range(micro)))
        for name, parameter in with_.named_parameters():
            found, base = whole(parameter.grad).double(), whole(without.get_parameter(name).grad).double()
            added = torch.zeros(()) if truth[name] is None else truth[name].double()
            scale = found.norm() + base.norm() + added.norm()
            assert (found - base - added).norm() <= 1e-6 * scale, (seed, terms, options, name)


@ranks(2)
def test_penalties_are_those_of_fsdp2() -> None:
    ours, theirs = yafsdp_cc.shard(seeded(Mlp)), seeded(Mlp)
    fully_shard(theirs)
    for term in ("full", "local", "redistributed"):  # what all ranks compute alike
        for model in (ours, theirs):
            params, start = _parameters(model)
            for step in range(2):
                loss = square(model, mine(inputs(step=step)))
                (loss + _full(TERMS[term](params, start, torch.zeros(())))).backward()
        same_gradients(ours, {n: whole(p.grad) for n, p in theirs.named_parameters()}, within=1e-6)
        ours.zero_grad()
        theirs.zero_grad()


@ranks(2)
def test_a_parameter_that_one_rank_uses_and_all_penalise() -> None:
    class Sometimes(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + self.extra(x).mean() if x.sum() > 0 else y

        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(WIDTH, WIDTH, bias=False)

    model, plain = twins(Sometimes)
    batches = [numbers(3, WIDTH).abs(), -numbers(3, WIDTH).abs()]
    for _ in range(2):
        penalty = model.extra.weight.pow(2).sum()
        (square(model, mine(batches)) + penalty).backward()
        truth = means(plain, lambda m, x: square(m, x) + m.extra.weight.pow(2).sum(), batches)
        same_gradients(model, truth, within=1e-6)
        model.zero_grad()
    (square(model, mine(batches)) + model.extra.weight.full_tensor().pow(2).sum()).backward()
    same_gradients(model, truth, within=1e-6)


@ranks(2)
def test_what_autograd_brings_by_itself() -> None:
    model, plain = twins(Mlp)
    weight = model.leave.weight
    (grad,) = torch.autograd.grad(weight.full_tensor().pow(2).sum() + weight.sum(), weight)
    assert torch.equal(whole(grad), 2 * plain.leave.weight + 1)
    assert weight.grad is None
    (once,) = torch.autograd.grad(weight.full_tensor().pow(3).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.pow(2).sum().backward()
    weight.requires_grad_(False)
    assert not weight.full_tensor().requires_grad
    weight.requires_grad_(True)
    rank = dist.get_rank()
    for placement, truth in ((Partial(), 3.0), (Replicate(), 1.0 + rank), (Partial("avg"), 1.5)):
        whole_weight = weight.full_tensor(grad_placements=[placement])
        ((1.0 + rank) * whole_weight.sum()).backward()
        assert (weight.grad.to_local() == truth).all()
        model.zero_grad()
    with pytest.raises(NotImplementedError, match=r"grad_placements=.* of 'leave.weight'"):
        weight.full_tensor(grad_placements=[Partial("max")])
    frozen, plain = yafsdp_cc.shard(seeded(Mlp).requires_grad_(False)), seeded(Mlp)
    frozen.leave.weight.requires_grad_(True)
    frozen.leave.weight.sum().backward()
    assert torch.equal(whole(frozen.leave.weight.grad), torch.ones_like(plain.leave.weight))


@pytest.mark.parametrize("moves", ["", "to_empty", "double", "assign"])
@ranks(2)
def test_a_penalty_alone_is_averaged_also_where_parameters_have_got_other_memory(moves: str) -> None:
    with torch.device("meta" if moves == "to_empty" else "cpu"):
        model = yafsdp_cc.fully_shard(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))))
    if moves == "assign":
        model.load_state_dict({name: torch.rand(64, 64) for name, _ in model.named_parameters()}, assign=True)
    elif moves:
        model.to_empty(device="cpu") if moves == "to_empty" else model.double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        (parameter.sum() * (1.0 + dist.get_rank())).backward()  # each rank owns one of the two
        assert whole(parameter.grad).equal(torch.full_like(whole(parameter.detach()), 1.5))


@ranks(2)
def test_a_number_of_the_model_s_weighs_a_loss() -> None:
    class Weighed(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.uncertainty = nn.Parameter(torch.tensor(0.3))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        lost, number = F.cross_entropy(model(x), torch.arange(len(x)) % 5), model.get_parameter("uncertainty")
        return lost * torch.exp(-number) + number

    def product(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        targets = torch.arange(len(x)) % 5
        return model.get_parameter("uncertainty") * F.cross_entropy(out, targets) * F.cross_entropy(-out, targets)

    def extremes(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return model.get_parameter("uncertainty") * (out.max() + out.norm() + out.exp().mean() * out.std().exp())

    def penalties(model: nn.Module, x: Tensor) -> Tensor:
        params: Params = dict(model.named_parameters())
        number, weight, bias = params["uncertainty"], params[W], params[BIAS]
        lengths = (weight * bias.sum()).sum() + (weight * number).norm() + F.softplus(number)
        return square(model, x) * number + number * sum(each.square().sum() for each in params.values()) + lengths

    model, plain = twins(Weighed)
    for step, each in enumerate((loss, product, extremes, penalties)):
        each(model, mine(inputs(step=step))).backward()
        assert type(model.uncertainty.grad) is type(model.uncertainty.data)
        same_gradients(model, means(plain, each, inputs(step=step)), within=1e-6)
        model.zero_grad()


@ranks(2)
def test_a_penalty_on_all_parameters_takes_one_all_reduce_each_way() -> None:
    model = yafsdp_cc.shard(seeded(Mlp))
    start = {name: p.detach() + 1 for name, p in model.named_parameters()}
    all_reduce, calls = dist.all_reduce, []
    dist.all_reduce = lambda *args, **options: (calls.append(args), all_reduce(*args, **options))[1]
    try:
        near = sum((p - start[name]).pow(2).sum() for name, p in model.named_parameters())
        loss = torch.ones(()) + 0.5 * near / 2
        assert len(calls) == 1
        loss.backward()
        assert len(calls) == 2
        numel = sum(p.numel() for p in model.parameters())
        if dist.get_rank() == 0:  # what is known by now is no collective any more
            assert near.item() == numel
            assert loss.item() == 1 + numel / 4
        assert len(calls) == 2
    finally:
        dist.all_reduce = all_reduce
    for p in model.parameters():
        assert torch.allclose(p.grad.to_local(), torch.full_like(p.grad.to_local(), -0.5), atol=1e-6)
