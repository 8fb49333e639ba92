"""An engine and a plain model in lockstep: the same program, and every number compared.

The plain model runs on the same inputs in the same rank; its gradients are then summed over ranks in rank order.
"""

from __future__ import annotations

import faulthandler
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import yafsdp_cc
from tests import internals
from tests.maze import WIDTH, Boom, Maze, Program, calls, kinds, nests
from tests.reference import far_apart, mean_in_rank_order

TIMEOUT = 120.0
"""Seconds of a scenario."""


def play(plot: dict[str, Any], kind: Callable[..., Pair] | None = None) -> None:
    """Run a scenario in this rank, by a pair of this kind."""
    faulthandler.dump_traceback_later(TIMEOUT - 5)
    pair = (kind or Pair)(plot)
    for number, action in enumerate(plot["actions"]):
        try:
            pair.change_slots()
            getattr(pair, f"_{action[0]}")(*action[1:])
        except Exception as error:
            raise AssertionError(f"action {number}, {action}, on rank {dist.get_rank()}") from error
    faulthandler.cancel_dump_traceback_later()


class Pair:
    """The sharded model and the plain one, doing the same thing."""

    within = 0.0
    """How far outputs may be apart, and gradients wherever they need not be rough: of the truth's norm."""

    def __init__(self, plot: dict[str, Any]) -> None:
        self.spec = plot["spec"]
        torch.manual_seed(plot["seed"])
        self.plain = Maze(self.spec)
        torch.manual_seed(plot["seed"])
        model = Maze(self.spec)
        units = [unit for unit in model.units if any(True for _ in unit.parameters())]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        options = self.options(plot)
        self.changes = None
        if plot["seed"] % 2 and self.spec["tied_units"] is None:
            for unit in reversed(units):  # what is inside first
                yafsdp_cc.fully_shard(unit, **options)
            yafsdp_cc.fully_shard(model, **options)
            self.changes = random.Random(plot["seed"])
        else:
            yafsdp_cc.shard(model, units=units, **options)
        self.model: Any = model
        naps = self.naps(random.Random(1000 * plot["seed"] + self.rank), plot["naps"])
        naps.on_the_wire()
        self.model.nap = naps.here_and_in_backward
        kind = partial(torch.optim.SGD, lr=0.1) if plot["optimizer"] == "sgd" else partial(torch.optim.AdamW, lr=1e-2)
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters())
        self.twin = kind(self.plain.parameters())
        self.truth = Truth(self.plain, self.spec, self.within)
        self.graphs: dict[int, tuple[Program, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = {}
        self.count = 0

    def options(self, plot: dict[str, Any]) -> dict[str, Any]:
        """Return what ``shard``, or each ``fully_shard``, is given."""
        mesh = None
        if self.world == 2 and plot["seed"] % 5 == 0:  # of more ranks, replicas are summed in another order
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        return {"reshard_after_forward": plot["reshard_after_forward"], "mesh": mesh}

    def naps(self, rng: random.Random, chance: float) -> Naps:
        return Naps(rng, chance)

    def change_slots(self) -> None:
        """Now and then, of some units, so that the engine is assembled anew."""
        if self.changes is not None and self.changes.random() < 0.2:
            unit = self.changes.choice([self.model, *self.model.units])
            if isinstance(unit, FSDPModule):
                unit.set_reshard_after_forward(self.changes.random() < 0.5, recurse=False)

    def _input(self) -> Tensor:
        self.count += 1
        drawn = torch.Generator().manual_seed(100 * self.count + self.rank)
        return torch.randn(3, WIDTH, generator=drawn, device="cpu").to(torch.get_default_device())

    def _alike(self, found: Tensor, truth: Tensor) -> bool:
        return torch.equal(found, truth) if not self.within else far_apart(found, truth) <= self.within

    def _forward(self, graph: int, program: Program) -> None:
        x = self._input()
        inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
        outputs = self.model(inputs[0], program), self.plain(inputs[1], program)
        assert self._alike(*outputs), "the output is wrong"
        assert outputs[0].requires_grad == outputs[1].requires_grad
        self.graphs[graph] = program, inputs, outputs

    def _backward(self, graphs: tuple[int, ...], keep: bool) -> None:
        chosen = [self.graphs[graph] for graph in graphs if self.graphs[graph][2][1].requires_grad]
        if not chosen:
            return
        loss_of([outputs[0] for _, _, outputs in chosen]).backward(retain_graph=keep)
        if len(chosen) > 1 or any(nests(program, self.spec) for program, _, _ in chosen):
            self.truth.inexact()
        used = sum((calls(program, self.spec) for program, _, _ in chosen), Counter())
        self.truth.backward(loss_of([outputs[1] for _, _, outputs in chosen]), used, keep)
        for _, inputs, _ in chosen:
            self.same_gradient(inputs[0].grad, inputs[1].grad, max(1e-6, self.within))
        if not keep:
            for graph in graphs:
                del self.graphs[graph]

    def same_gradient(self, found: Tensor | None, truth: Tensor | None, within: float) -> None:
        """Compare gradients of inputs."""
        if found is None or truth is None:
            assert found is truth, "the gradient of the input is lost"
        else:
            off = far_apart(found, truth)
            assert off <= within, f"the gradient of the input is off by {off:.1e}"

    def _inputs(self, graph: int) -> None:
        _, inputs, outputs = self.graphs[graph]
        both = zip(outputs, inputs, strict=True)
        found = [torch.autograd.grad(loss_of([y]), x, retain_graph=True, allow_unused=True)[0] for y, x in both]
        self.same_gradient(*found, max(1e-6, self.within))

    def _evaluate(self, program: Program, how: str) -> None:
        x = self._input()
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            if how == "direct" and self.spec["tied_units"] is None:  # what two units share belongs to the whole
                assert self._alike(self.model.run(program, x), self.plain.run(program, x))
            else:
                assert self._alike(self.model(x, program), self.plain(x, program))

    def _broken(self, program: Program) -> None:
        assert _raises(self.model, self._input(), program) == _raises(self.plain, self._input(), program)
        self.graphs.clear()
        self.truth.forget()

    def _sync(self, on: bool) -> None:
        self.model.set_requires_gradient_sync(on)
        self.truth.sync = on

    def _freeze(self, name: str, frozen: bool) -> None:
        self.graphs.clear()
        # Not by get_parameter, which finds the whole weights where unshard() shows them.
        dict(internals.sharded_parameters(self.model))[name].requires_grad_(not frozen)
        self.plain.get_parameter(name).requires_grad_(not frozen)

    def _check(self) -> None:
        for name, parameter in internals.sharded_parameters(self.model):
            found = None if parameter.grad is None else parameter.grad.full_tensor()
            self.truth.compare(name, found)

    def _zero(self, to_none: bool) -> None:
        self.model.zero_grad(set_to_none=to_none)
        self.truth.zero(to_none)

    def _step(self, clip: bool) -> None:
        self.graphs.clear()
        self.truth.install()
        if clip:
            found = torch.nn.utils.clip_grad_norm_([p for _, p in internals.sharded_parameters(self.model)], 0.1)
            truth = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 0.1)
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(found, truth, rtol=max(1e-6, self.within), atol=0)
            self.truth.inexact()
        self.optimizer.step()
        self.twin.step()
        self.truth.uninstall()
        whole = {name: parameter.full_tensor() for name, parameter in internals.sharded_parameters(self.model)}
        for name, parameter in self.plain.named_parameters():
            torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-5, atol=1e-5, msg=f"weights of {name}")
            parameter.data.copy_(whole[name])


def _raises(model: Maze, x: Tensor, program: Program) -> bool:
    """Not always: an op that fails in backward may sit where no gradient comes, or there may be none at all."""
    try:
        loss = loss_of([model(x, program)])
        if loss.requires_grad:
            loss.backward()
    except Boom:
        return True
    return False


def loss_of(outputs: list[Tensor]) -> Tensor:
    return sum((output.sin().square().mean() for output in outputs), torch.zeros(()))


class Truth:
    """The gradients the shards should hold: means over ranks, each backward's added."""

    def __init__(self, model: Maze, spec: dict[str, Any], within: float) -> None:
        self.model, self.sync, self.within = model, True, within
        self.owners = _owners(model, spec)
        self.mean: dict[str, Tensor | None] = dict.fromkeys(self.owners)
        self.held: dict[str, Tensor | None] = dict.fromkeys(self.owners)
        self.scale: Counter[str] = Counter()
        self.rough: set[str] = set()

    def backward(self, loss: Tensor, used: Counter[int], keep: bool) -> None:
        loss.backward(retain_graph=keep)
        if not self.sync:
            self.rough |= self.owners.keys()
        for name, parameter in internals.sharded_parameters(self.model):
            self.held[name] = _add(self.held[name], parameter.grad)
            parameter.grad = None
            if sum(used[owner] for owner in self.owners[name]) > 1:
                self.rough.add(name)
        if not self.sync:
            return
        by_rank: list[dict[str, Tensor | None]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, self.held)
        for name in self.held:
            parts = [held[name] for held in by_rank]
            self.mean[name] = _add(self.mean[name], mean_in_rank_order(parts))
            self.scale[name] += sum(part.norm().item() for part in parts if part is not None)
            self.held[name] = None

    def compare(self, name: str, found: Tensor | None) -> None:
        truth = self.mean[name]
        if found is None or truth is None:
            assert found is truth, f"{name}: found {_kind(found)}, the truth is {_kind(truth)}"
        elif name in self.rough or self.within:
            off, norm = (found - truth).norm().item(), truth.norm().item()
            # Uses that cancel leave a single number with the rounding of what was larger.
            limit = max(1e-6 if truth.numel() > 1 else 1e-5, self.within) * (norm + self.scale[name])
            assert off <= limit, f"{name} is off by {off / norm:.1e}"
        else:
            assert torch.equal(found, truth), f"{name} is off by {((found - truth).norm() / truth.norm()):.1e}"

    def zero(self, to_none: bool) -> None:
        self.rough.clear()
        self.scale.clear()
        for name, mean in self.mean.items():
            self.mean[name] = None if to_none or mean is None else torch.zeros_like(mean)

    def forget(self) -> None:
        self.model.zero_grad()

    def inexact(self) -> None:
        self.rough |= self.owners.keys()

    def install(self) -> None:
        for name, parameter in internals.sharded_parameters(self.model):
            parameter.grad = self.mean[name]

    def uninstall(self) -> None:
        for name, parameter in internals.sharded_parameters(self.model):
            self.mean[name], parameter.grad = parameter.grad, None


def _owners(model: Maze, spec: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The units that use a parameter, the innermost of each; none for what the root itself holds."""
    owners: dict[str, tuple[int, ...]] = {}
    for name, parameter in internals.sharded_parameters(model):
        using = [index for index, unit in enumerate(model.units) if any(p is parameter for p in _own(unit))]
        owners[name] = tuple(using)
    assert len(model.units) == len(kinds(spec))
    return owners


def _own(unit: torch.nn.Module) -> list[torch.nn.Parameter]:
    inside = {id(p) for child in getattr(unit, "inside", ()) for p in child.parameters()}
    return [p for p in unit.parameters() if id(p) not in inside]


def _add(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return total if more is None else more.clone() if total is None else total + more


def _kind(gradient: Tensor | None) -> str:
    return "no gradient" if gradient is None else f"a gradient of norm {gradient.norm():.1e}"


ON_THE_WIRE = ("broadcast", "_allgather_base", "alltoall_base", "_reduce_scatter_base")


@contextmanager
def as_it_was() -> Iterator[None]:
    """Undo at the end what ``Naps.on_the_wire`` has patched."""
    calls = {name: vars(dist.ProcessGroup)[name] for name in ON_THE_WIRE}
    with mock.patch.multiple(dist.ProcessGroup, **calls), mock.patch.object(dist.Work, "wait", dist.Work.wait):
        yield


class Naps:
    """One rank's random delays: at ops of the program, in backward, around collectives and before every wait."""

    def __init__(self, rng: random.Random, chance: float) -> None:
        self.rng, self.chance = rng, chance

    def nap(self) -> None:
        if self.rng.random() < self.chance:
            time.sleep(self.rng.choice((1e-4, 1e-3, 5e-3)))

    def here_and_in_backward(self, x: Tensor) -> Tensor:
        self.nap()
        if x.requires_grad:
            x.register_hook(lambda _: self.nap())
        return x

    def on_the_wire(self) -> None:
        """Patch this process, which is a forked rank and ends with the test, or does so within ``as_it_was``."""
        for name in ON_THE_WIRE:
            setattr(dist.ProcessGroup, name, self._around(getattr(dist.ProcessGroup, name)))
        dist.Work.wait = self._around(dist.Work.wait)  # type: ignore[method-assign]  # delays what waits, and calls it

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            self.nap()
            result = call(*args, **kwargs)
            self.nap()
            return result

        return delayed
