"""Stochastic Gradient Push, against the same steps in one process, and against the sum that nothing may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import ranks
from tests.replicas.test_overlap import Branches, batch, branches_loss, mesh_of, sharded, train
from tests.soak import also
from tests.twins import numbers, seeded, square, whole
from yafsdp_cc.replicas import Gossip

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}


class InOneProcess:
    """n replicas in float64 as the paper has them: each with x, w, weights z = x / w and an AdamW of its own.

    Returns from ``step`` what each replica shows; ``mixing[k][j, i]`` is the share that i gives to j in step k.
    """

    def __init__(self, replicas: int, shards: int, distances: list[int], overlap: int) -> None:
        self.shards, self.distances, self.overlap = shards, distances, overlap
        self.models = [seeded(Mlp).double() for _ in range(replicas)]
        self.optimizers = [AdamW(each.parameters(), **ADAMW) for each in self.models]
        self.x = torch.stack([flat(each) for each in self.models])
        self.w = torch.ones(replicas, dtype=torch.float64)
        self.in_flight = torch.zeros_like(self.x), torch.zeros_like(self.w)

    def step(self, step: int) -> Tensor:
        n, before = len(self.models), torch.stack([flat(each) for each in self.models])
        for replica, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            model.zero_grad()
            for rank in range(self.shards * replica, self.shards * (replica + 1)):
                (square(model, batch(step, rank).double()) / self.shards).backward()
            optimizer.step()
        half = self.x + torch.stack([flat(each) for each in self.models]) - before
        given = torch.roll(torch.eye(n, dtype=torch.float64), self.distances[step % len(self.distances)], 0) / 2
        sent = given @ half, given @ self.w
        arrived = self.in_flight if self.overlap else sent
        self.in_flight = sent
        self.x, self.w = half / 2 + arrived[0], self.w / 2 + arrived[1]
        shown = self.x / self.w[:, None]
        for model, values in zip(self.models, shown, strict=True):
            fill(model, values)
        return shown

    def consensus(self) -> Tensor:
        x, w = (self.x, self.w) if not self.overlap else (self.x + self.in_flight[0], self.w + self.in_flight[1])
        assert w.sum().item() == pytest.approx(len(self.models))
        return x.sum(0) / w.sum()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def fill(model: nn.Module, values: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, values.split([each.numel() for each in parameters]), strict=True):
        parameter.data.copy_(part.view(parameter.shape))


def shown_by(model: nn.Module) -> Tensor:
    """A replica's weights; every rank of a replica has them."""
    return torch.cat([whole(each.detach()).flatten() for each in model.parameters()])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("replicas", "shards", "graph", "distances", "overlap"),
    [
        (2, 2, "exponential", [1], 1),
        (4, 1, "exponential", [1, 2], 0),
        (4, 1, "exponential", [1, 2], 1),
        (3, 1, "ring", [1], 1),
    ],
)
def test_is_stochastic_gradient_push(
    replicas: int, shards: int, graph: Any, distances: list[int], overlap: int
) -> None:
    _check_push(world=replicas * shards, shape=(replicas, shards), graph=graph, distances=distances, overlap=overlap)


@ranks("world")
def _check_push(world: int, shape: tuple[int, int], graph: Any, distances: list[int], overlap: int) -> None:
    model = sharded(*shape, Gossip(graph, overlap))
    optimizer = AdamW(model.parameters(), **ADAMW)
    truth = InOneProcess(*shape, distances, overlap)
    replica = dist.get_rank() // shape[1]
    for step in range(5):
        train(model, optimizer, range(step, step + 1))
        close(shown_by(model), truth.step(step)[replica])
    yafsdp_cc.synchronize_replicas(model)
    close(shown_by(model), truth.consensus())
    for name in ("exp_avg", "exp_avg_sq"):
        states = [torch.cat([each[name].flatten() for each in its.state.values()]) for its in truth.optimizers]
        own = torch.cat([whole(optimizer.state[each][name]).flatten() for each in model.parameters()])
        close(own, torch.stack(states).mean(0))


def push_gradient(model: nn.Module, step: int) -> None:
    """A gradient that weights have no part in."""
    for place, parameter in enumerate(model.parameters()):
        parameter.grad = numbers(*parameter.shape, seed=1000 * step + 100 * dist.get_rank() + place)


@pytest.mark.parametrize("world", [also(2), 4])
def test_what_codecs_lose_stays_with_the_sender(world: int) -> None:
    _check_sum(world=world)


@ranks("world")
def _check_sum(world: int) -> None:
    """With gradients that do not depend on weights, the mean over replicas is known, whoever sends what to whom."""
    mesh, steps, rate = mesh_of(world, 1), 6, 0.01
    for codec, overlap, away in ((None, 1, 0.05), ("int8", 0, 0.05), ("int4", 1, 0.1)):
        model, expected = seeded(Mlp), seeded(Mlp)
        gossip = Gossip(overlap=overlap, codec=codec)
        yafsdp_cc.join_replicas(model, mesh["replicate"], gossip)
        optimizer = SGD(model.parameters(), lr=rate)
        moved = torch.zeros_like(flat(model))
        for step in range(steps):
            push_gradient(model, step)
            moved -= rate * torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
            optimizer.step()
        far = flat(model) - flat(expected)
        dist.all_reduce(moved)
        truth = flat(expected) + moved / world
        assert (flat(model) - truth).abs().max() < away  # replicas are near each other before they meet
        assert (far - moved / world).abs().max() > 1e-5 or world == 2
        yafsdp_cc.synchronize_replicas(model)
        torch.testing.assert_close(flat(model), truth, rtol=0, atol=3e-7)
        assert gossip._push_weight.item() == 1.0


@ranks(2)
def test_weights_may_be_changed_between_steps() -> None:
    model = sharded(2, 1, Gossip())
    optimizer = AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    train(model, optimizer, range(2))
    weight, rank = model.get_parameter("leave.weight"), dist.get_rank()
    with torch.no_grad():
        weight.fill_(3.0 + rank)
    train(model, optimizer, range(2, 3))
    close(whole(weight.detach()), torch.full_like(weight.to_local(), 3.5).view(weight.shape))
    with torch.no_grad():
        weight.fill_(5.0 + rank)
    yafsdp_cc.synchronize_replicas(model)  # the mean of what was written, without a step in between
    close(whole(weight.detach()), torch.full_like(weight.to_local(), 5.5).view(weight.shape))


@ranks(2)
def test_a_change_of_weights_while_older_ones_are_on_their_way_is_told() -> None:
    """A program goes back to weights from before a step with NaN, and the message brings NaN back."""
    model = sharded(2, 1, Gossip(overlap=1))
    good = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = SGD(model.parameters(), lr=float("nan"))
    train(model, optimizer, range(1))
    model.load_state_dict(good)
    with pytest.warns(UserWarning, match=r"'enter.weight'.* message with older weights .*synchronize_replicas"):
        yafsdp_cc.synchronize_replicas(model)


@ranks(4)
def test_state_that_some_replicas_lack_is_shared() -> None:
    model = seeded(Branches)
    yafsdp_cc.join_replicas(model, mesh_of(4, 1)["replicate"], Gossip())
    optimizer = AdamW(model.parameters(), **ADAMW)
    branches_loss(model, 0, dist.get_rank()).backward()  # ranks 0 and 3 use a layer that the others do not
    optimizer.step()
    sometimes, never = model.get_parameter("sometimes.weight"), model.get_parameter("never.weight")
    used = sometimes.grad is not None
    assert used == (dist.get_rank() in (0, 3))
    own = optimizer.state[sometimes]["exp_avg"] if used else torch.zeros(WIDTH, WIDTH)
    dist.all_reduce(own := own.clone())
    yafsdp_cc.synchronize_replicas(model)
    state = optimizer.state[sometimes]
    torch.testing.assert_close(state["exp_avg"], own / 2)
    assert state["step"].item() == 1.0
    assert never not in optimizer.state
    optimizer.step()


@ranks(2)
def test_none_in_the_state_of_an_optimizer_remains() -> None:
    model = nn.Linear(4, 4)
    yafsdp_cc.join_replicas(model, mesh_of(2, 1)["replicate"], Gossip())
    optimizer, rank = SGD(model.parameters(), lr=0.1), dist.get_rank()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    some = torch.full((4, 4), 3.0) if rank else None  # made when it is needed, on one replica so far
    optimizer.state[model.weight] = {"none": None, "some": some, "count": 2 + rank, "text": "x" if rank else None}
    yafsdp_cc.synchronize_replicas(model)
    state = optimizer.state[model.weight]
    assert (state["none"], state["count"], state["text"]) == (None, 2, "x")
    assert torch.equal(state["some"], torch.full((4, 4), 3.0))


@pytest.mark.parametrize("overlap", [0, 1])
def test_different_numbers_of_steps_are_refused(overlap: int) -> None:
    _check_numbers(overlap=overlap)


@ranks(2)
def _check_numbers(overlap: int) -> None:
    model = sharded(2, 1, Gossip(overlap=overlap))
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    yafsdp_cc.synchronize_replicas(model)
    train(model, optimizer, range(1))
    with pytest.raises(RuntimeError, match="replicas have made different numbers of steps"):
        _step_or_meet(model, optimizer)


def _step_or_meet(model: Any, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, range(dist.get_rank()))
    yafsdp_cc.synchronize_replicas(model)


@ranks(4)
def test_plan_and_refusals() -> None:
    model = sharded(2, 2, Gossip(codec="int8"))
    plan = yafsdp_cc.plan_of(model)
    padded = sum(-(-each.to_local().numel() // 256) * 256 for each in model.parameters())
    assert plan.communication.replicas == pytest.approx(padded * (1 + 4 / 256), abs=128)
    assert plan.sync_bytes["biased weights"] == 4 * padded + 4
    assert plan.sync_bytes["estimates of peers"] >= 3 * 4 * padded
    for wrong, message in (
        ({"graph": "star"}, "there is no graph 'star', only exponential, ring"),
        ({"overlap": 2}, "overlap=2: 0 waits for messages in their step"),
        ({"codec": "int9"}, "there is no codec 'int9'"),
    ):
        with pytest.raises(ValueError, match=message):
            Gossip(**wrong)
    square(model, batch(0, 0)).backward()
    with pytest.raises(ValueError, match=r"Gossip needs an optimizer .*; LBFGS does not"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
    with pytest.raises(ValueError, match=r"codec='int3' loses 3.8% .* more than 3.1% grow among 2 replicas"):
        sharded(2, 2, Gossip(codec="int3"))
