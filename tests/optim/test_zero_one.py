"""ZeroOneAdam: when sums are exact, what steps are then and in between, and that nothing is lost."""

from __future__ import annotations

import math

import pytest
import torch

import yafsdp_cc
from tests.compression.ledger import net, unsent
from tests.internals import phase_at
from tests.optim.lossless import backward, backward_of_all, sharded, whole
from tests.ranks import ranks
from tests.soak import also
from yafsdp_cc.optim import ZeroOneAdam

RATE, BETAS, EPS, DECAY, KAPPA = 0.01, (0.8, 0.95), 1e-8, 0.1, 3
EXACT = (1, 2, 3, 5, 7, 9, 13, 17, 21, 29)
"""By hand, of the formula with κ = 3: distances 1 1 2 2 2 4 4 4 8."""


@pytest.mark.parametrize("world", [2, also(4)])
@pytest.mark.parametrize("codec", ["lossless", "onebit"])
@ranks("world")
def test_steps_are_those_of_the_rule(world, codec):
    model, twin = sharded(codec), net().double()
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    optimizer = ZeroOneAdam(parameters, RATE, BETAS, EPS, DECAY, refreshes=KAPPA)
    x = dict(zip(names, whole(parameters), strict=True))
    m, v, said, due = ({name: torch.zeros_like(each) for name, each in x.items()} for _ in range(4))
    encoded = {f"{layer}.weight" for layer in (0, 2, 4)}
    sent = []
    for step in range(1, 31):
        for theirs, mine in zip(twin.parameters(), whole(parameters), strict=True):
            theirs.data.copy_(mine)
        backward_of_all(twin, step, world)
        before = yafsdp_cc.counters_of(model).reduced_bytes
        backward(model, step)
        sent.append(yafsdp_cc.counters_of(model).reduced_bytes - before)
        told = dict(zip(names, whole(each.grad for each in parameters), strict=True))
        optimizer.step()
        now = dict(zip(names, whole(parameters), strict=True))
        for name, theirs in zip(names, twin.parameters(), strict=True):
            is_exact = step in EXACT or name not in encoded
            if is_exact:
                assert (told[name] - theirs.grad).norm() <= 1e-5 * theirs.grad.norm(), (name, step)
            said[name] += told[name]
            due[name] += theirs.grad
            m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * told[name]
            if is_exact:
                v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * theirs.grad.square()
            seen = sum(each <= step for each in EXACT) if name in encoded else step
            update = m[name] / (1 - BETAS[0] ** step) / ((v[name] / (1 - BETAS[1] ** seen)).sqrt() + EPS)
            if name in encoded and step > KAPPA:
                update.clamp_(-1, 1)
            theirs_now = x[name] * (1 - RATE * DECAY) - RATE * update
            assert (now[name] - theirs_now).norm() <= 1e-5 * now[name].norm(), (name, step)
        x = now
    if codec == "onebit":
        left, plan = unsent(model), yafsdp_cc.plan_of(model).communication
        assert left.keys() == encoded
        for name in encoded:
            assert left[name].norm() > 0
            assert (said[name] + left[name] - due[name]).norm() <= 1e-5 * due[name].norm()
        assert {step for step, size in enumerate(sent, 1) if size > 2 * (plan.reduce + plan.replicated)} == set(EXACT)
        assert all(size == plan.reduce + plan.replicated for step, size in enumerate(sent, 1) if step not in EXACT)


@ranks(2)
def test_the_first_steps_are_those_of_torch_bit_for_bit() -> None:
    model, twin = sharded("onebit"), yafsdp_cc.shard(net(), units=[torch.nn.Linear])
    ours = ZeroOneAdam(model.parameters(), RATE, BETAS, refreshes=5)
    theirs = torch.optim.AdamW(twin.parameters(), RATE, BETAS, fused=True)
    for step in range(5):
        for each, optimizer in ((model, ours), (twin, theirs)):
            backward(each, step)
            optimizer.step()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.to_local().equal(other.to_local())
    exact = 5 * (1 + math.log2(200 / 5 + 1))
    assert sum(phase_at(ours, step) == "exact" for step in range(1, 201)) < exact
    with pytest.raises(ValueError, match="refreshes=0: at least 1"):
        ZeroOneAdam(model.parameters(), refreshes=0)
