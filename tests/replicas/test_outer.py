"""Replicas that meet rarely, against the same steps of plain models in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import ranks
from tests.twins import numbers, refusal, seeded, square, whole
from yafsdp_cc.compression.codec import codec_of
from yafsdp_cc.replicas import Outer
from yafsdp_cc.replicas.sync import sync_of

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
STEPS = 14


def sharded(replicas: int, shards: int, sync: Any) -> Any:
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    return yafsdp_cc.shard(seeded(Mlp), mesh=mesh, sync=sync)


def batch(step: int, rank: int) -> Tensor:
    return numbers(4, WIDTH, seed=100 * step + rank)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        square(model, batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


class Simulation:
    """The algorithms as the papers have them, of whole replicas in one process, parameter by parameter."""

    def __init__(self, replicas: int, shards: int, **settings: Any) -> None:
        self.shards = shards
        self.every, self.lr, self.momentum = settings["every"], settings.get("lr", 0.7), settings.get("momentum", 0.9)
        self.left = settings.get("sync_steps", 0)
        self.delay, self.mix = settings.get("delay", 0), settings.get("mix", 0.5)
        self.models: list[nn.Module] = [seeded(Mlp) for _ in range(replicas)]
        self.optimizers = [torch.optim.AdamW(each.parameters(), **ADAMW) for each in self.models]
        self.parameters = [list(each.parameters()) for each in self.models]
        self.outer = [each.detach().clone() for each in self.parameters[0]]
        self.buffers = [torch.zeros_like(each) for each in self.outer]
        total, before = sum(each.numel() for each in self.outer), 0
        self.fragments: list[list[int]] = [[] for _ in range(settings.get("fragments", 1))]
        for place, each in enumerate(self.outer):
            self.fragments[int(len(self.fragments) * (before + each.numel() / 2) / total)].append(place)
            before += each.numel()
        self.step = 0
        self.sent = [0] * len(self.fragments)
        self.due: dict[int, list[int]] = {}
        self.found: dict[int, Tensor] = {}

    def train(self, steps: range) -> None:
        for step in steps:
            for replica, model in enumerate(self.models):
                model.zero_grad()
                for rank in range(self.shards * replica, self.shards * (replica + 1)):
                    (square(model, batch(step, rank)) / self.shards).backward()
            if self.left:
                for each in zip(*self.parameters, strict=True):
                    mean = torch.stack([one.grad for one in each]).mean(0)
                    for one in each:
                        one.grad = mean.clone()
            for optimizer in self.optimizers:
                optimizer.step()
            self.after()

    @torch.no_grad()
    def after(self) -> None:
        if self.left:
            self.left -= 1
            self.outer = [each.detach().clone() for each in self.parameters[0]]
            return
        self.step += 1
        if self.step in self.due:
            self.apply(self.due.pop(self.step), self.mix if self.delay else 0.0)
        for number, members in enumerate(self.fragments):
            if self.step % self.every == (number + 1) * self.every // len(self.fragments) % self.every:
                self.found |= self.gradient(members)
                self.sent[number] = self.step
                if self.delay:
                    self.due[self.step + self.delay] = members
                else:
                    self.apply(members, 0.0)

    def gradient(self, members: list[int]) -> dict[int, Tensor]:
        return {n: torch.stack([self.outer[n] - each[n] for each in self.parameters]).mean(0) for n in members}

    def apply(self, members: list[int], mix: float) -> None:
        for n in members:
            self.buffers[n] = self.momentum * self.buffers[n] + self.found[n]
            self.outer[n] = self.outer[n] - self.lr * (self.found[n] + self.momentum * self.buffers[n])
            for each in self.parameters:
                each[n].copy_(mix * each[n] + (1 - mix) * self.outer[n])

    @torch.no_grad()
    def finish(self) -> None:
        """An outer step at once, and the mean of inner states."""
        moved = [members for members, sent in zip(self.fragments, self.sent, strict=True) if sent < self.step]
        for members in self.due.values():
            self.apply(members, self.mix)
        for members in moved:
            self.found |= self.gradient(members)
            self.apply(members, 0.0)
        for own in self.parameters:
            torch._foreach_copy_(list[Tensor](own), self.outer)
        for each in zip(*self.parameters, strict=True):
            states = [optimizer.state[one] for optimizer, one in zip(self.optimizers, each, strict=True)]
            for key in ("exp_avg", "exp_avg_sq"):
                mean = torch.stack([state[key] for state in states]).mean(0)
                for state in states:
                    state[key].copy_(mean)
        self.step, self.due, self.sent = 0, {}, [0] * len(self.sent)


STREAMING = {"every": 4, "fragments": 2, "delay": 2, "mix": 0.25}


@pytest.mark.parametrize(
    ("replicas", "shards", "settings"),
    [(2, 1, {"every": 3, "sync_steps": 2}), (2, 2, {"every": 5, "momentum": 0.0, "lr": 1.0}), (2, 2, STREAMING)],
)
def test_is_the_papers_algorithm(replicas: int, shards: int, settings: dict[str, Any]) -> None:
    _check_algorithm(world=replicas * shards, replicas=replicas, shards=shards, settings=settings)


@ranks("world")
def _check_algorithm(world: int, replicas: int, shards: int, settings: dict[str, Any]) -> None:
    model = sharded(replicas, shards, Outer(**settings))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    truth = Simulation(replicas, shards, **settings)
    mine = truth.models[dist.get_rank() // shards]
    for steps in (range(STEPS), range(STEPS, STEPS + 4)):  # the second from means of states, in a new round
        train(model, optimizer, steps)
        truth.train(steps)
        _same(model, mine)  # each replica has weights of its own
        yafsdp_cc.synchronize_replicas(model)
        yafsdp_cc.synchronize_replicas(model)  # nothing more to do
        truth.finish()
        _same(model, mine)
        for name, parameter in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                expected = truth.optimizers[0].state[truth.models[0].get_parameter(name)][key]
                torch.testing.assert_close(whole(optimizer.state[parameter][key]), expected, rtol=1e-5, atol=1e-6)
    assert _are_equal([each.detach() for each in model.parameters()])


def _same(model: nn.Module, plain: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).detach()
        torch.testing.assert_close(whole(parameter.detach()), expected, rtol=1e-5, atol=1e-6)


def _are_equal(tensors: list[Any]) -> bool:
    """Whether all ranks have the same, bit for bit."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [whole(each).tolist() for each in tensors])
    return all(each == found[0] for each in found)


@pytest.mark.parametrize(("codec", "block"), [("topk2bit", 4096), ("onebit", 256)])
@ranks(4)
def test_what_messages_lose_is_sent_later(codec: str, block: int) -> None:
    """SparseLoCo: after each round β e + Δ = sent + e', and weights move by the mean of what was sent.

    In one bit, too, where what fills the last block of a tensor is decoded as something else than zero.
    """
    sync = Outer(every=2, codec=codec, lr=1.0, momentum=0.0, decay=0.5)
    model = sharded(2, 2, sync)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    outer = _flat(model)
    lost = torch.zeros_like(outer)
    for start in range(0, 6, 2):
        train(model, optimizer, range(start, start + 1))
        square(model, batch(start + 1, dist.get_rank())).backward()
        trained = _step_without_exchange(model, optimizer)
        delta = outer - trained
        optimizer.step()
        optimizer.zero_grad()
        sizes = [each.to_local().numel() for each in model.parameters()]
        sent = torch.cat([_coded(each, codec, block) for each in (0.5 * lost + delta).split(sizes)])
        lost = 0.5 * lost + delta - sent
        mean = sent.clone()
        dist.all_reduce(mean, group=sync.comm.group)
        outer = outer - mean / 2
        torch.testing.assert_close(_flat(model), outer, rtol=1e-5, atol=1e-6)
    if codec == "topk2bit":
        blocks = sum(-(-size // block) for size in sizes)
        assert 0 < sent.count_nonzero() <= 64 * blocks
        assert sync.planned_bytes() == 148 * blocks / 2
    norms = [each.to_local() for each in model.parameters() if each.to_local().numel() == each.numel()]
    alike = torch.cat([each.detach().view(-1) for each in norms])  # what all ranks of a replica hold
    others = [torch.empty_like(alike) for _ in range(dist.get_world_size())]
    dist.all_gather(others, alike)
    assert all(torch.equal(each, alike) for each in others)
    yafsdp_cc.synchronize_replicas(model)
    state = sync.state()["outer_residual"]
    dist.all_reduce(lost, group=sync.comm.group)
    torch.testing.assert_close(torch.cat([each.view(-1) for each in state]), lost / 2, rtol=1e-4, atol=1e-6)


def _flat(model: Any) -> Tensor:
    return torch.cat([each.to_local().detach().view(-1) for each in model.parameters()])


def _step_without_exchange(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """The weights that a local step gives; nothing is changed."""
    twin = [nn.Parameter(each.to_local().detach().clone()) for each in model.parameters()]
    its = torch.optim.AdamW(twin, **ADAMW)
    for own, parameter in zip(twin, model.parameters(), strict=True):
        own.grad = parameter.grad.to_local().clone()
        state = {
            key: value.to_local() if hasattr(value, "to_local") else value
            for key, value in optimizer.state[parameter].items()
        }
        its.state[own] = copy.deepcopy(state)
    its.step()
    return torch.cat([each.detach().view(-1) for each in twin])


def _coded(values: Tensor, name: str, block: int) -> Tensor:
    codec = codec_of(name, block)
    padded = torch.nn.functional.pad(values, (0, -len(values) % block)).unsqueeze(0)
    message = torch.zeros(1, codec.message_bytes(padded.shape[1]), dtype=torch.uint8)
    decoded = torch.empty_like(padded)
    counts = [min(block, len(values) - start) for start in range(0, len(values), block)]
    codec.encode(padded, torch.tensor([counts], dtype=torch.int32), message)
    codec.decode(message, decoded)
    return decoded[0, : len(values)]


@pytest.mark.parametrize("steps", [1, 5])
def test_goes_on_from_saved_state_bit_for_bit(steps: int) -> None:
    """From within the synchronous start, and from the middle of a round."""
    _check_resumed(steps=steps)


@ranks(4)
def _check_resumed(steps: int) -> None:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = sharded(2, 2, Outer(every=3, sync_steps=3, fragments=2, delay=1, codec="int4"))
        return model, torch.optim.AdamW(model.parameters(), **ADAMW)

    model, optimizer = make()
    train(model, optimizer, range(steps))
    yafsdp_cc.synchronize_replicas(model)
    sync = sync_of(model)
    assert sync is not None
    weights = {n: p.to_local().detach() for n, p in model.named_parameters()}
    saved = copy.deepcopy((weights, optimizer.state_dict(), sync.state()))
    train(model, optimizer, range(steps, 12))

    resumed, its = make()
    train(resumed, its, range(5))  # what is on its way then is dropped
    for name, parameter in resumed.named_parameters():
        parameter.to_local().detach().copy_(saved[0][name])
    its.load_state_dict(saved[1])
    other = sync_of(resumed)
    assert other is not None
    other.load_state(saved[2])
    train(resumed, its, range(steps, 12))
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(resumed.get_parameter(name).detach()), whole(parameter.detach())), name


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@ranks(2)
def test_the_synchronous_start_is_left_out_only_behind_a_checkpoint_that_ends_it(
    momentum: float, tmp_path: Path
) -> None:
    """Weights of another kind of training, which are loaded first, begin with a start."""
    yafsdp_cc.save(tmp_path / "pretrained", yafsdp_cc.shard(seeded(Mlp, seed=3)))
    model = sharded(2, 1, Outer(every=4, momentum=momentum, sync_steps=3))
    yafsdp_cc.load(tmp_path / "pretrained", model)
    for steps, is_over in ((range(3), False), (range(3, 5), True)):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps)
        parameters = [each.detach() for each in model.parameters()]
        assert _are_equal(parameters) is not is_over
        yafsdp_cc.save(tmp_path / f"{steps}", model)
        model = sharded(2, 1, Outer(every=4, momentum=momentum, sync_steps=3))
        yafsdp_cc.load(tmp_path / f"{steps}", model)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.0), (0.7, 0.9)])
@ranks(2)
def test_what_rounding_takes_from_outer_weights_is_no_movement(lr: float, momentum: float) -> None:
    """One of two replicas moves its bf16 weights by an ulp per round, where a mean moves by half of one."""
    model, ulp, start = nn.Module(), 2.0**-8, 0.9765625
    model.register_parameter("weight", nn.Parameter(torch.full((4,), start, dtype=torch.bfloat16)))
    sync = Outer(every=1, lr=lr, momentum=momentum)
    yafsdp_cc.join_replicas(model, init_device_mesh("cpu", (2,)), sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected, buffer = start, 0.0
    for _ in range(16):
        model.weight.grad = torch.full((4,), 0.0 if dist.get_rank() else ulp, dtype=torch.bfloat16)
        optimizer.step()
        buffer = momentum * buffer + ulp / 2
        expected -= lr * (ulp / 2 + momentum * buffer)
    assert abs(model.weight[0].item() - expected) <= ulp / 2


class Gained(nn.Module):
    """A gain without dimensions, which some forwards use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, takes: bool) -> Tensor:
        out: Tensor = self.linear(x)
        return out * self.gain if takes else out


@ranks(2)
def test_steps_of_a_parameter_without_dimensions_are_those_of_the_first_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = yafsdp_cc.shard(seeded(Gained), mesh=mesh, sync=Outer(every=8))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(2):
        model(batch(step, dist.get_rank()), step >= dist.get_rank()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state, found = optimizer.state[model.gain], torch.empty(2, 2)
    dist.all_gather_into_tensor(found, torch.stack((state["step"], whole(state["exp_avg"]))).view(1, 2))
    yafsdp_cc.synchronize_replicas(model)
    assert found[:, 0].tolist() == [2.0, 1.0]
    assert state["step"] == 2.0
    assert whole(state["exp_avg"]) == found[:, 1].mean()


@ranks(2)
def test_a_step_skipped_in_the_synchronous_start_is_refused() -> None:
    model = sharded(2, 1, Outer(every=3, sync_steps=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = 3 - dist.get_rank()
    with pytest.raises(RuntimeError, match=rf"replicas have made different numbers of steps \(this one {made}\)"):
        _train_and_meet(model, optimizer, made)


def _train_and_meet(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    train(model, optimizer, range(steps))
    yafsdp_cc.synchronize_replicas(model)


@ranks(2)
def test_weights_written_amid_a_round_are_told() -> None:
    """A save() behind weights of an EMA has the outer weights, which an outer step has made of them."""
    model = sharded(2, 1, Outer(every=3))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, range(2))
    weight = model.get_parameter("leave.weight")
    written = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(written)
    with pytest.warns(UserWarning, match=r"was changed after a step amid a round.*synchronize_replicas\(model\)"):
        yafsdp_cc.synchronize_replicas(model)
    with torch.no_grad():
        weight.fill_(3.0)
    yafsdp_cc.synchronize_replicas(model)
    assert bool((whole(weight.detach()) == 3).all())


@ranks(2)
def test_memory_has_a_replicas_own_message_and_those_of_all() -> None:
    sync, codec = Outer(codec="int8"), codec_of("int8", 256)
    model = sharded(2, 1, sync)
    padded = sum(-(-each.to_local().numel() // 256) * 256 for each in model.parameters())
    assert sync.memory()["messages"] == 3 * codec.message_bytes(padded)


def test_refuses_settings_that_cannot_be() -> None:
    assert "delay=3" in refusal(lambda: Outer(every=4, fragments=2, delay=3))
    assert "fragments=5" in refusal(lambda: Outer(every=4, fragments=5))
    assert "momentum=1" in refusal(lambda: Outer(momentum=1.0))
    assert "'nothing'" in refusal(lambda: Outer(codec="nothing"))
