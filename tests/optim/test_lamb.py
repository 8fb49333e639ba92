"""OneBitLamb against its formulas in fp64, on whole tensors: norms are those of whole parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.compression import deltas
from tests.compression.ledger import net
from tests.internals import record_norm_reduces
from tests.optim.lossless import assert_close, backward, backward_of_all, sharded, whole
from tests.ranks import ranks
from tests.soak import also
from yafsdp_cc.compression import Compression
from yafsdp_cc.optim import OneBitAdam, OneBitLamb, OneBitSGD

BETAS, EPS, DECAY, RATE, WARMUP = (0.8, 0.95), 1e-6, 0.05, 0.02, 4


class Rule:
    """The rule of one parameter: You et al., 2020, algorithm 2, then Li et al., 2021, algorithm 1."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.m, self.v, self.w = x.clone(), *(torch.zeros_like(x) for _ in range(3))
        self.average: Any = None
        self.factor, self.step, self.seen = 1.0, 0, 0
        self.trusts: list[float] = []

    def exact(self, g: Tensor) -> None:
        self.step += 1
        self.seen += 1
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g * g
        self.w = self.v.clone()
        u = (
            self.m / (1 - BETAS[0] ** self.step) / ((self.v / (1 - BETAS[1] ** self.step)).sqrt() + EPS)
            + DECAY * self.x
        )
        self.x = self.x - RATE * self.trust(u) * u

    def trust(self, u: Tensor) -> float:
        trust = 1.0
        if self.x.norm() > 0:
            trust = float((self.x.norm() / u.norm()).clamp(0.01, 10))
            self.average = trust if self.average is None else 0.9 * self.average + 0.1 * trust
        self.trusts.append(trust)
        return trust

    def refresh(self, g: Tensor) -> None:
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g * g
        self.seen += 1

    def encoded(self, m: Tensor) -> None:
        """With the momentum of this step."""
        self.step += 1
        g = (m - BETAS[0] * self.m) / (1 - BETAS[0])
        self.m = m
        self.w = BETAS[1] * self.w + (1 - BETAS[1]) * g * g
        root = (self.v / (1 - BETAS[1] ** max(self.seen, 1))).sqrt() + EPS
        bare = (m / (1 - BETAS[0] ** self.step) / root).clamp(-1, 1)
        u = bare + DECAY * self.x
        factor = (root / ((self.w / (1 - BETAS[1] ** self.step)).sqrt() + EPS)).max()
        share = min(1.0, float(bare.norm() / u.norm()))
        factor = min(max(float(factor) * share + 1 - share, 0.5), 4.0)
        if not self.seen:  # the next step brings an exact gradient
            return
        if self.step <= WARMUP or self.average is None:  # late: a warm-up of its own
            self.x = self.x - RATE * self.trust(u) * u
            return
        self.x = self.x - RATE * self.average * self.factor * u
        self.factor = min(max(factor, 0.9 * self.factor), 1.1 * self.factor)  # of the next step


FROZEN = {"0.weight": range(1, 8), "2.weight": (WARMUP,)}
"""Steps in which a parameter is: one is first trained between exact sums, one is not in the last of the warm-up."""


@pytest.mark.parametrize("form", ["momentum", "gradient"])
@pytest.mark.parametrize(("world", "replicas"), [(2, 1), also(4, 1), (4, 2)])
@ranks("world")
def test_steps_are_those_of_the_rule_on_whole_parameters(world, replicas, form):
    mesh = {}
    if replicas > 1:
        mesh["mesh"] = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    model, twin = sharded("onebit", **mesh), net().double()
    torch.nn.init.zeros_(twin[4].bias)  # a norm of zero
    with torch.no_grad():
        model[4].bias.zero_()
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    optimizer = OneBitLamb(parameters, RATE, BETAS, EPS, DECAY, warmup_steps=WARMUP, form=form, refreshes=2)
    encoded = {name for name, each in model.named_parameters() if "factor" in optimizer.state[each]}
    assert encoded == {"0.weight", "2.weight", "4.weight"}
    rules = {name: Rule(each) for name, each in zip(names, whole(parameters), strict=True)}
    factors = []
    for step in range(1, 15):
        for theirs, mine in zip(twin.parameters(), whole(parameters), strict=True):
            theirs.data.copy_(mine)
        for name, parameter in zip(names, parameters, strict=True):
            parameter.requires_grad_(step not in FROZEN.get(name, ()))
        backward_of_all(twin, step, world)
        backward(model, step)
        used = [name for name, each in zip(names, parameters, strict=True) if each.grad is not None]
        said = dict(zip(used, whole(each.grad for each in parameters if each.grad is not None), strict=True))
        optimizer.step()
        for name, theirs in zip(names, twin.parameters(), strict=True):
            rule = rules[name]
            if name not in used:
                continue
            if step <= WARMUP or name not in encoded:
                rule.exact(theirs.grad)
            else:
                if step - WARMUP in (1, 2, 4, 6, 10):
                    rule.refresh(theirs.grad)
                m = said[name] if form == "momentum" else BETAS[0] * rule.m + (1 - BETAS[0]) * said[name]
                rule.encoded(m)
                factors.append(rule.factor)
        for name, parameter, now in zip(names, parameters, whole(parameters), strict=True):
            assert (rules[name].x - now).norm() <= 1e-5 * now.norm(), (name, step)
            rules[name].x = now  # rounding does not add up
            if name in encoded and step > WARMUP:
                assert float(optimizer.state[parameter]["factor"]) == pytest.approx(rules[name].factor, rel=1e-3)
                assert float(optimizer.state[parameter]["trust"]) == pytest.approx(rules[name].average or 0, rel=1e-5)
    assert rules["4.bias"].trusts[0] == 1.0 < len(set(rules["2.weight"].trusts))
    assert len(set(factors)) > 3
    assert all(0.5 <= factor <= 4 for factor in factors)


@pytest.mark.parametrize("kind", [OneBitLamb, OneBitAdam, OneBitSGD])
@ranks(2)
def test_both_forms_are_one_where_nothing_is_lost(kind: Any) -> None:
    """Also where a scheduler changes the momentum, as OneCycleLR does by default."""
    models = [sharded(), sharded()]
    for model, form in zip(models, ("momentum", "gradient"), strict=True):
        optimizer = kind(model.parameters(), RATE, warmup_steps=3, form=form)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * RATE, total_steps=12, base_momentum=0.6)
        for step in range(10):
            backward(model, step)
            optimizer.step()
            scheduler.step()
    plain = net().double()
    for parameter, mine in zip(plain.parameters(), whole(models[1].parameters()), strict=True):
        parameter.data.copy_(mine)
    assert_close(models[0], plain, 1e-4)


@ranks(2)
def test_norms_of_all_parameters_are_one_all_reduce() -> None:
    calls: list[int] = []
    record_norm_reduces(calls)
    model = sharded("onebit")
    optimizer = OneBitLamb(model.parameters(), warmup_steps=2)
    for step in range(4):
        backward(model, step)
        optimizer.step()
    # Two sums for each of six parameters; then also the largest ratio of three, with their flags of NaN.
    assert calls == [12, 12, 12, 6, 12, 6]


@ranks(2)
def test_deltas_of_the_weights_of_all_units_are_encoded() -> None:
    for make in (OneBitAdam, OneBitLamb):
        model = deltas.sharded(Compression("onebit", weights="int4"), zero_stage=2)
        optimizer = make(model.parameters(), lr=1e-3, warmup_steps=2)
        sent = []
        for step in range(8):
            before = deltas.gathered(model)
            deltas.train(model, optimizer, step)
            sent.append(deltas.gathered(model) - before)
        planned = yafsdp_cc.plan_of(model).communication
        assert sent[-3:] == [planned.gather_forward + planned.gather_backward] * 3, (make, sent)
        assert sent[-1] < sent[0] / 4, (make, sent)


@ranks(2)
def test_a_state_without_trust_ratios_learns_them() -> None:
    """AdamW's, of more steps than the warm-up has: a step moves weights by the rate, relative to their norm."""
    model = sharded("onebit")
    adamw = torch.optim.AdamW(model.parameters(), RATE)
    for step in range(6):
        backward(model, step)
        adamw.step()
    optimizer = OneBitLamb(model.parameters(), RATE, weight_decay=0.0, warmup_steps=3)
    optimizer.load_state_dict(adamw.state_dict())
    before = whole(model.parameters())
    backward(model, 6)
    optimizer.step()
    for was, now in zip(before, whole(model.parameters()), strict=True):
        assert float((now - was).norm() / was.norm()) == pytest.approx(RATE, rel=1e-4)
    assert all(state.get("trust", 1) for state in optimizer.state.values())
