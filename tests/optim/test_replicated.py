"""ReplicatedOneBitAdam against the paper's algorithm in fp64, and OneBitAdam against it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import yafsdp_cc
from tests.compression.ledger import unsent
from tests.internals import replicated_residual
from tests.optim.lossless import whole
from tests.optim.paper import Paper
from tests.ranks import ranks
from tests.soak import also
from yafsdp_cc import Compression
from yafsdp_cc.optim import OneBitAdam, ReplicatedOneBitAdam
from yafsdp_cc.tools.demo.model import GPT, VOCABULARY


class Term(nn.Module):
    """One matrix, and a loss that is linear in it, or quadratic."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))

    def forward(self, c: Tensor, curved: bool) -> Tensor:
        loss: Tensor = ((self.weight - c) ** 2).sum() / 2 if curved else (self.weight * c).sum()
        return loss


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ModuleList([Term(40, 60), Term(50, 41), Term(64, 64)])

    def forward(self, slopes: list[Tensor], curved: bool) -> Tensor:
        return torch.stack([term(c, curved) for term, c in zip(self.terms, slopes, strict=True)]).sum()


def terms() -> Sum:
    torch.manual_seed(0)
    return Sum()


def slopes(model: nn.Module, step: int, rank: int) -> list[Tensor]:
    """What the losses of a rank have for c: something that all ranks and steps share, and noise."""
    shared, draws = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1000 * step + rank + 2)
    return [
        torch.randn(each.shape, generator=shared) / 2 + torch.randn(each.shape, generator=draws)
        for each in model.parameters()
    ]


def backward(model: Any, step: int, curved: bool) -> None:
    model.zero_grad()
    model(slopes(model, step, dist.get_rank()), curved).backward()


# The paper's algorithm


@pytest.mark.parametrize("world", [2, also(4)])
@pytest.mark.parametrize(("codec", "curved"), [("onebit", False), ("onebit", True), ("int4", True), ("ternary", False)])
@ranks("world")
def test_steps_are_those_of_the_paper_on_a_convex_loss(world, codec, curved):
    rules = {"rate": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "decay": 0.1, "warmup": 6}
    model = terms()
    optimizer = ReplicatedOneBitAdam(
        model.named_parameters(), 0.01, (0.9, 0.99), 1e-8, 0.1, warmup_steps=6, codec=codec
    )
    paper = Paper(list(model.parameters()), world, codec, **rules)
    for step in range(30):
        backward(model, step, curved)
        optimizer.step()
        gradients = [paper.flat(slopes(model, step, rank)) for rank in range(world)]
        paper.step([(paper.x - each) * paper.used if curved else each for each in gradients])
        for mine, theirs in zip(model.parameters(), paper.parts(paper.x), strict=True):
            assert (mine.double() - theirs).norm() <= 1e-5 * theirs.norm(), step
        left = paper.worker.mean(0) + paper.server
        assert (optimizer.mean.unsent().double() - left).norm() <= 1e-4 * (1 + left.norm())
    assert left.norm() > 0


def text_of(step: int) -> Tensor:
    draws = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    with open(os.__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - 17, (4,), generator=draws).tolist()
    return torch.stack([text[start : start + 17] for start in starts])


@pytest.mark.parametrize("world", [also(2), 4])
@ranks("world")
def test_steps_are_those_of_the_paper_on_a_transformer(world):
    """Each step by itself, from the state that ranks are in: of sign bits, a few near zero fall to the other side."""
    torch.manual_seed(0)
    model = GPT(width=32, depth=2, heads=2, context=16)
    parameters = list(model.parameters())
    optimizer = ReplicatedOneBitAdam(model.named_parameters(), 0.01, (0.9, 0.99), warmup_steps=4)
    rules = {"rate": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "decay": 1e-2, "warmup": 4}
    paper = Paper(parameters, world, "onebit", **rules)
    losses = []
    for step in range(16):
        tokens = text_of(step)
        loss = F.cross_entropy(model(tokens[:, :-1]).reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(float(mean))
        mine = paper.flat([each.grad for each in parameters])
        everybody = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everybody, mine)
        paper.x = paper.flat(parameters)
        optimizer.step()
        paper.step(everybody)
        off = (paper.flat(parameters) - paper.x).abs() > 1e-6
        assert int(off.sum()) <= 3, (step, int(off.sum()))
        states = [optimizer.state[each] for each in parameters]
        paper.m, paper.v = (paper.flat([state[name] for state in states]) for name in ("exp_avg", "exp_avg_sq"))
        errors = [torch.empty_like(optimizer.mean.worker.values) for _ in range(world)]
        dist.all_gather(errors, optimizer.mean.worker.values)
        paper.worker = torch.stack([each.view(-1).double() for each in errors])
        servers = [torch.empty_like(optimizer.mean.server.values) for _ in range(world)]
        dist.all_gather(servers, optimizer.mean.server.values)
        paper.server = torch.cat([each.view(-1).double() for each in servers])
    assert losses[-1] < losses[0] - 1


# What the others are held against

RATE, BETAS, WARMUP, STEPS = 0.01, (0.5, 0.999), 25, 45
"""β₁ to the power of the warm-up is less than the rounding of fp32, so the step is constant after it."""


@pytest.mark.parametrize("world", [2, also(4)])
@ranks("world")
def test_all_forms_are_as_far_from_exact_steps_as_what_they_have_left_unsaid(world):
    """On a linear loss gradients are the same wherever weights are, so all forms have one exact run x̃ to compare with.

    With D = √v̂ + ε, which is constant after the warm-up, and e what messages have left unsent, a mean over ranks:

    - the paper's: m = β·m + (1 − β)·ḡ + e₋₁ − e, so sums of m are short of exact ones by f = Σ βᵏ e, and
      x − x̃ = γ D⁻¹ f, at most γ ‖D⁻¹‖ max ‖e‖ / (1 − β) (Tang et al., 2021, where the theorem is proved);
    - gradient form: ḡ + e₋₁ − e takes the place of ḡ, so x − x̃ = γ D⁻¹ (1 − β) Σ βᵏ e, at most γ ‖D⁻¹‖ max ‖e‖, where
      e is that of gradients, which are larger than momenta;
    - momentum form: updates sum up to Σ ḡ − A, where A = e + β / (1 − β) · (the owner's part) is all that is to come;
      exact ones to Σ ḡ − Ã, where Ã = β / (1 − β) · m̃. So x − x̃ = γ D⁻¹ (A − Ã).
    """
    beta, models, optimizers = BETAS[0], {}, {}
    for form in ("momentum", "gradient"):
        compression = Compression("onebit", residual="fp32")
        models[form] = yafsdp_cc.shard(terms(), units=[Term], compression=compression)
        optimizers[form] = OneBitAdam(
            models[form].parameters(), RATE, BETAS, weight_decay=0.0, warmup_steps=WARMUP, form=form, refreshes=0
        )
    models["paper"] = terms()
    optimizers["paper"] = ReplicatedOneBitAdam(
        models["paper"].parameters(), RATE, BETAS, weight_decay=0.0, warmup_steps=WARMUP
    )
    exact = terms().double()
    x = list(exact.parameters())
    adam = torch.optim.AdamW(exact.parameters(), RATE, BETAS, weight_decay=0.0)
    faded = {name: [torch.zeros_like(each) for each in x] for name in models}
    largest = dict.fromkeys(models, 0.0)
    for step in range(STEPS):
        for name, model in models.items():
            backward(model, step, curved=False)
            optimizers[name].step()
        everybody = [slopes(exact, step, rank) for rank in range(dist.get_world_size())]
        for parameter, *cs in zip(x, *everybody, strict=True):
            parameter.grad = sum(c.double() for c in cs) / len(cs)
        if step < WARMUP:
            adam.step()
            moments = [adam.state[each]["exp_avg"] for each in x]
            roots = [(adam.state[each]["exp_avg_sq"] / (1 - BETAS[1] ** (step + 1))).sqrt() + 1e-8 for each in x]
            continue
        with torch.no_grad():
            for parameter, moment, root in zip(x, moments, roots, strict=True):
                moment.mul_(beta).add_(parameter.grad, alpha=1 - beta)
                parameter.sub_(moment / root, alpha=RATE)
        stretch = RATE * max(float((1 / root).max()) for root in roots)
        found = {}
        for name, model in models.items():
            if name == "paper":
                now = [each.detach().double() for each in model.parameters()]
                e = replicated_residual(optimizers[name])
            else:
                now, said = whole(model.parameters()), unsent(model)
                e = [said[each] for each, _ in model.named_parameters()]
            faded[name] = [beta * f + each for f, each in zip(faded[name], e, strict=True)]
            due = faded[name]
            if name == "gradient":
                due = [(1 - beta) * f for f in due]
            elif name == "momentum":
                own = whole(optimizers[name].state[each]["exp_avg"] for each in model.parameters())
                e = due = [each + beta / (1 - beta) * (o - m) for each, o, m in zip(e, own, moments, strict=True)]
            off = [mine - theirs.detach() for mine, theirs in zip(now, x, strict=True)]
            for each, f, root in zip(off, due, roots, strict=True):
                assert (each - RATE * f / root).norm() <= 1e-4 * RATE * f.norm(), (name, step)
            norm = sum(each.square().sum() for each in e).sqrt()
            largest[name] = max(largest[name], float(norm))
            bound = stretch * largest[name] / (1 - beta if name == "paper" else 1)
            found[name] = (now, bound)
            assert 0 < sum(each.square().sum() for each in off).sqrt() <= bound, (name, step)
        for form in ("momentum", "gradient"):
            pairs = zip(found[form][0], found["paper"][0], strict=True)
            apart = sum((mine - theirs).square().sum() for mine, theirs in pairs).sqrt()
            assert apart <= found[form][1] + found["paper"][1]
            assert apart <= 0.1 * sum(each.square().sum() for each in found["paper"][0]).sqrt()
