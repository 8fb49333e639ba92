"""Random programs of all features under the model of CUDA's streams (``tests.streams``), which flags whatever only a
CPU puts in order. Where sums and weights are exact, numbers are held against the plain model besides.

    YAFSDP_SOAK=2000 pytest tests/test_device.py                        so many programs
    YAFSDP_SOAK=1000-1999 pytest tests/test_device.py                   these seeds
    python -c 'from tests.test_device import *; again(17)'              one again; prints it first

A program is one of ``maze`` and ``lockstep`` on 1, 2 or 4 ranks, with options of ``shard`` (``_sharding``), and with
the actions of ``Device`` between its own: checkpoints, ``unshard``, reading, and whatever else a loop may do anywhere.
"""

from __future__ import annotations

import copy
import gc
import pprint
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.utils._python_dispatch import _disable_current_modes

import yafsdp_cc
from tests import internals
from tests.lockstep import Naps, Pair, Truth, play
from tests.maze import WIDTH, Maze, Program, kinds, random_actions, random_program, random_spec
from tests.ranks import RankError, on_ranks
from tests.soak import SOAK
from tests.streams import streams
from yafsdp_cc.optim import OneBitAdam, OneBitLamb, OneBitSGD, ZeroOneAdam

BATCH = 18
"""Programs of one test."""
WORLDS = 10 * (1,) + 7 * (2,) + (4,)
"""Ranks of each."""
FAMILY: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "1-bit adam": (OneBitAdam, {"warmup_steps": 1, "refreshes": 1}),
    "1-bit adam, clipped": (OneBitAdam, {"warmup_steps": 1, "refreshes": 1, "max_grad_norm": 0.05}),
    "1-bit adam of gradients": (OneBitAdam, {"warmup_steps": 1, "refreshes": 1, "form": "gradient"}),
    "1-bit sgd": (OneBitSGD, {"lr": 0.05, "warmup_steps": 1}),
    "1-bit lamb": (OneBitLamb, {"warmup_steps": 1}),
    "0/1 adam": (ZeroOneAdam, {"refreshes": 1}),
}


# -- the generator ----------------------------------------------------------------------------------------------------


def scenario(seed: int) -> dict[str, Any]:
    """All of a program, from its seed."""
    rng = random.Random(seed)
    world = WORLDS[seed % BATCH]
    spec = random_spec(rng, tops=(2, 3))
    plot = {"seed": seed, "world": world, "spec": spec, "naps": 0.0, **_sharding(rng, seed, world, spec)}
    loop = plot["optimizer"] in FAMILY or rng.random() < 0.4
    actions = _loop(rng, spec, world) if loop else random_actions(rng, spec, world, rounds=(1, 1))
    return plot | {"actions": list(_between(rng, plot, actions))}


def _sharding(rng: random.Random, seed: int, world: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Draw what the model is sharded with, and its optimizer."""
    changes = seed % 2 == 1 and spec["tied_units"] is None  # of reshard_after_forward, by ``Pair``
    after_forward = rng.choice((None, True, False, 2) if world == 4 else (None, True, False))
    mesh = "replicas" if world > 1 and after_forward != 2 and rng.random() < 0.4 else "flat"
    compression: dict[str, Any] | None = None
    draw = rng.random()
    if draw < 0.75:
        codecs = ("int8", "int4", "onebit", "ternary", "topk", "powersgd", "powersgd", "auto", "fp32")
        compression = {"gradients": rng.choice(codecs), "block": 64, "matrix_rank": rng.choice((1, 2))}
        if mesh == "replicas" and rng.random() < 0.3:
            compression["scope"] = "shard"
        if compression["gradients"] == "auto" and mesh == "replicas":
            compression["scope"] = "shard"
        biased = compression["gradients"] in ("onebit", "topk", "powersgd")
        compression["feedback"] = biased or rng.random() < 0.8
        compression["residual"] = rng.choice(("fp32", "bf16", "int8"))
        compression["carry"] = rng.choice((1.0, 1.0, 1.0, 0.5))
        compression["warmup_steps"] = rng.choice((0, 0, 1))
        compression["fallback"] = rng.random() < 0.7
        if rng.random() < 0.4:
            deltas = after_forward is False and not changes
            compression["weights"] = rng.choice(("int8", "int4", "onebit") if deltas else ("int8", "fp8"))
    optimizer = rng.choice(("sgd", "adamw"))
    if compression is not None and compression["gradients"] not in ("auto", "fp32") and rng.random() < 0.4:
        compression |= {"feedback": True, "carry": 1.0, "warmup_steps": 0, "scope": "auto"}
        optimizer = rng.choice(tuple(FAMILY))
    offload = rng.random() < 0.15
    return {
        "reshard_after_forward": after_forward,
        "mesh": mesh,
        "compression": compression,
        "optimizer": "sgd" if offload else optimizer,  # others make state that the model of streams sees on the device
        "bf16": rng.random() < 0.2,
        "offload": offload,
        "separate": rng.random() < 0.4,
    }


def _loop(rng: random.Random, spec: dict[str, Any], world: int) -> list[Program]:
    """Draw a loop that accumulates gradients without communication, and steps."""
    actions: list[Program] = []
    usual = random_program(rng, spec, world)
    for _ in range(rng.randint(1, 3)):
        program = usual if rng.random() < 0.7 else random_program(rng, spec, world)
        for left in reversed(range(rng.randint(1, 3))):
            actions += [("sync", left == 0), ("forward", 0, program), ("backward", (0,), False)]
        actions += [("check",), ("step", rng.random() < 0.3), ("zero", True)]
    return actions


def _between(rng: random.Random, plot: dict[str, Any], actions: list[Program]) -> Iterator[Program]:
    """Draw what a loop may do between the actions of another program."""
    units = len(kinds(plot["spec"]))
    deltas = (plot["compression"] or {}).get("weights") is not None
    saved = False
    for action in actions:
        yield action
        draw = rng.random()
        if draw < 0.08:
            yield ("unshard", rng.randrange(units), rng.random() < 0.4, rng.random() < 0.7)
        elif draw < 0.16:
            whole = () if plot["offload"] else ("whole", "full")  # .to(device) has nothing to do on a CPU
            yield ("read", rng.choice(("weights", "gradients", "norms", "compression", *whole)))
        elif draw < 0.18:
            saved = True
            yield ("save", rng.random() < 0.3)
        elif draw < 0.24 and saved and not deltas and action[0] in ("zero", "step"):
            yield ("load",)
        elif draw < 0.26 and action[0] in ("zero", "step"):
            yield ("write",)
        elif draw < 0.29 and action[0] == "step":
            yield ("event",)
        elif draw < 0.32 and plot["compression"] is not None:
            codec = ("codec", rng.choice(("int8", "int4", "fp32")))
            yield rng.choice((("scale", rng.choice((0.5, 2.0))), ("loss",), codec))
        elif draw < 0.35 and plot["mesh"] == "replicas" and action[0] == "zero":
            program = random_program(rng, plot["spec"], plot["world"])
            both = ("forward", 0, program), ("backward", (0,), False)
            yield from (("sync", True), ("all_reduce", False), *both, ("all_reduce", True), *both)
            if plot["optimizer"] in FAMILY:
                yield ("zero", True)  # which refuses a second sum before it


# -- a sharded model whose operations are watched, and a plain one that nobody watches --------------------------------


@contextmanager
def unseen() -> Iterator[None]:
    """Let the model of streams see nothing of what is done within."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def unwatched(call: Callable[..., Any]) -> Callable[..., Any]:
    """Let the model of streams see nothing of a call."""

    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with unseen():
            return call(*args, **kwargs)

    return run


class Plain(Maze):
    forward = unwatched(Maze.forward)
    run = unwatched(Maze.run)


class Unwatched(Truth):
    """The truth of a ``Device``; where that encodes, it knows nothing of gradients but that they are finite."""

    known = True

    @unwatched
    def backward(self, loss: Tensor, used: Counter[int], keep: bool) -> None:
        if self.known:
            super().backward(loss, used, keep)
        else:
            loss.backward(retain_graph=keep)
            self.model.zero_grad()

    @unwatched
    def compare(self, name: str, found: Tensor | None) -> None:
        if self.known:
            super().compare(name, found)
        else:
            assert found is None or found.isfinite().all(), f"{name}: not finite"


class Silent(Naps):
    def on_the_wire(self) -> None:
        """Leave this process as it is: other programs follow."""


class Scaler:
    """What ``follow_scaler`` asks of a ``GradScaler``."""

    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


class Device(Pair):
    """A model on a device with streams, and the plain one."""

    def __init__(self, plot: dict[str, Any]) -> None:
        self.plot, self.watched = plot, plot["watched"]
        compression = plot["compression"] or {}
        self.rounds_weights = plot["bf16"] or compression.get("weights") is not None
        exact = not self.rounds_weights and compression.get("gradients", "fp32") == "fp32"
        self.within = 1e-5 if plot["world"] == 4 else 0.0  # taken for NCCL, gloo's own sum is in an order of its own
        super().__init__(plot)
        self.model.nap = lambda x: x
        self.truth = Unwatched(self.plain, self.spec, self.within)
        self.truth.known = exact
        self.plain.__class__ = Plain
        self.model.set_separate_reduce_scatter_group(plot["separate"])
        if compression.get("gradients") == "auto":
            internals.stop_autotuner(self.model)
        if compression.get("weights") in ("int4", "onebit"):
            self.changes = None  # deltas are for weights that are kept
        if plot["optimizer"] in FAMILY:
            kind, settings = FAMILY[plot["optimizer"]]
            with torch.no_grad():
                self.model(torch.zeros(1, WIDTH), ())
            self.optimizer = kind(self.model.parameters(), **settings)
        self.scaler: Any = Scaler()
        if compression:
            yafsdp_cc.follow_scaler(self.model, self.scaler)
        self.saved: dict[str, Any] = {}

    def options(self, plot: dict[str, Any]) -> dict[str, Any]:
        mesh = None
        if plot["mesh"] == "replicas":
            shape = (2, 1) if self.world == 2 else (2, 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        return {
            "reshard_after_forward": plot["reshard_after_forward"],
            "mesh": mesh,
            **({"mp_policy": half} if plot["bf16"] else {}),
            **({"offload_policy": CPUOffloadPolicy()} if plot["offload"] else {}),
            **({"compression": yafsdp_cc.Compression(**plot["compression"])} if plot["compression"] else {}),
        }

    def naps(self, rng: random.Random, chance: float) -> Naps:
        return Silent(rng, chance)

    _input = unwatched(Pair._input)

    @unwatched
    def _alike(self, found: Tensor, truth: Tensor) -> bool:
        return bool(found.isfinite().all()) if self.rounds_weights else super()._alike(found, truth)

    def same_gradient(self, found: Tensor | None, truth: Tensor | None, within: float) -> None:
        if not self.rounds_weights:
            super().same_gradient(found, truth, within)

    def _forget_lost_gathers(self) -> None:
        """Let weights change under all-gathers that nobody waits for: what those bring has an old version, and nobody
        will use it."""
        for flat in internals.flat_params(self.model):
            memory = self.watched.memories.get(flat.sharded.untyped_storage()._cdata)
            if memory is not None:
                writer = memory.home if memory.home is self.watched.host else self.watched.current
                memory.accesses = [each for each in memory.accesses if each.write or each.precedes(writer)]

    def _step(self, clip: bool) -> None:
        self.graphs.clear()
        self._check()
        self._forget_lost_gathers()
        if clip:
            torch.nn.utils.clip_grad_norm_([p for _, p in internals.sharded_parameters(self.model)], 0.1)
        named = dict(internals.sharded_parameters(self.model))
        grads = {name: None if each.grad is None else each.grad.full_tensor() for name, each in named.items()}
        self.optimizer.step()
        self._follow(self._weights(), grads)

    @unwatched
    def _weights(self) -> dict[str, Tensor]:
        """Return the whole weights; a read that is watched would order all streams after the optimizer."""
        return {name: each.full_tensor() for name, each in internals.sharded_parameters(self.model)}

    @unwatched
    def _follow(self, weights: dict[str, Tensor], grads: dict[str, Tensor | None]) -> None:
        """Make the plain model's step with the gradients of the sharded one, and take over its weights."""
        for name, parameter in self.plain.named_parameters():
            parameter.grad = grads[name]
        if self.truth.known:
            self.twin.step()
        for name, parameter in self.plain.named_parameters():
            assert weights[name].isfinite().all(), f"weights of {name} are not finite"
            if self.truth.known:
                torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)
            parameter.data.copy_(weights[name])
            self.truth.mean[name], parameter.grad = parameter.grad, None
        self.truth.inexact()

    # What a loop may do between steps and passes

    def _unshard(self, unit: int, waits: bool, reshards: bool) -> None:
        module = self.model.units[unit]
        if isinstance(module, FSDPModule):
            handle: Any = module.unshard(async_op=True)
            if waits:
                handle.wait()
            if reshards:
                module.reshard()

    def _read(self, what: str) -> None:
        parameters = [p for _, p in internals.sharded_parameters(self.model)]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if what in ("weights", "gradients"):
            for each in parameters if what == "weights" else gradients:
                each.full_tensor()
        elif what == "norms":
            assert all(torch.nn.utils.get_total_norm(each).isfinite() for each in (parameters, gradients))
        elif what == "whole":
            with yafsdp_cc.whole_parameters(self.model):
                assert all(each.isfinite().all() for each in [p for _, p in internals.sharded_parameters(self.model)])
        elif what == "full":
            yafsdp_cc.full_state_dict(self.model)
            self.model.state_dict()
        elif self.plot["compression"] is not None:
            internals.mean_residuals_of(self.model)
            internals.kept_weights_of(self.model)

    def _save(self, asynchronous: bool) -> None:
        yafsdp_cc.save(self.plot["folder"], self.model, self.optimizer, asynchronous=asynchronous).result()
        with unseen():
            self.saved = copy.deepcopy({"plain": self.plain.state_dict(), "twin": self.twin.state_dict()})

    def _load(self) -> None:
        if self.saved:
            self.graphs.clear()
            self._forget_lost_gathers()
            yafsdp_cc.load(self.plot["folder"], self.model, self.optimizer)
            with unseen():
                self.plain.load_state_dict(self.saved["plain"])
                self.twin.load_state_dict(copy.deepcopy(self.saved["twin"]))

    def _write(self) -> None:
        self.graphs.clear()
        self._forget_lost_gathers()
        with torch.no_grad():
            torch._foreach_mul_([p for _, p in internals.sharded_parameters(self.model)], 0.5)
            with unseen():
                torch._foreach_mul_(list(self.plain.parameters()), 0.5)

    def _event(self) -> None:
        self.model.set_post_optim_event(torch.cuda.current_stream().record_event())

    def _keep(self, unit: int) -> None:
        self.model.units[unit].set_reshard_after_forward(False)

    def _scale(self, factor: float) -> None:
        self.scaler.scale *= factor

    def _loss(self) -> None:
        config = yafsdp_cc.Compression(**self.plot["compression"])
        if config.fallback and not (config.gradients in ("auto", "fp32") and config.weights is None):
            yafsdp_cc.watch_loss(self.model, torch.ones(()))

    def _codec(self, codec: str) -> None:
        state = internals.state_of(self.model)
        if self.plot["compression"]["gradients"] == "auto" and state.may_retire():
            internals.set_tuned_codecs(self.model, [codec] * len(internals.groups_of(self.model)))

    def _all_reduce(self, on: bool) -> None:
        self.model.set_requires_all_reduce(on)


# -- running them -----------------------------------------------------------------------------------------------------


def watch(plots: list[dict[str, Any]], folder: Path) -> int:
    """Run programs in this rank; return how many accesses to memory were watched."""
    accesses = 0
    for plot in plots:
        try:
            with streams() as watched, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                play(plot | {"folder": folder / str(plot["seed"]), "watched": watched}, Device)
                gc.collect()
                torch.zeros(1)  # what is given back is looked at by the next operation
        except Exception as error:
            raise AssertionError(f"seed {plot['seed']}") from error
        accesses += watched.accesses
    return accesses


def again(seed: int) -> None:
    """Run one program."""
    plot = scenario(seed)
    pprint.pprint(plot, width=140)
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(plot["world"], watch, [plot], Path(folder))


def _batches() -> list[range]:
    first, _, last = SOAK.partition("-")
    seeds = range(int(first), int(last) + 1) if last else range(int(first or BATCH))
    return [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]


@pytest.mark.parametrize("seeds", _batches(), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_nothing_races(seeds: range, tmp_path: Path) -> None:
    plots = [scenario(seed) for seed in seeds]
    for world in sorted({plot["world"] for plot in plots}):
        alike = [plot for plot in plots if plot["world"] == world]
        try:
            assert on_ranks(world, watch, alike, tmp_path, timeout=600.0)[0] > 1000 * len(alike)
        except RankError as error:
            failed = next((plot for plot in alike if f"AssertionError: seed {plot['seed']}\n" in str(error)), None)
            pytest.fail(f"{error}\nThe program was\n{pprint.pformat(failed, width=140)}", pytrace=False)


BLOCK = ("block", 24)
NESTED: Program = (("nest", 0, (("nest", 1, (("nest", 2, (("call", 3),)),)),)),)
WITH_DELTAS = {"gradients": "int8", "weights": "int4"}
PASS: tuple[Program, ...] = (("forward", 0, NESTED), ("backward", (0,), False))
BROKEN: Program = (("fail_backward",), ("call", 0), ("call", 1), ("call", 2), ("call", 3))
FOUND: dict[str, tuple[dict[str, Any], list[Program]]] = {
    "an overflow buffer of gradients that a residual takes in": (
        {"compression": {"gradients": "onebit"}},
        [("sync", False), *PASS, ("sync", True), *PASS],
    ),
    "a checkpoint between micro-batches that a residual takes in": (
        {"compression": {"gradients": "int8"}},
        [("sync", False), *PASS, ("save", False), ("sync", True), *PASS],
    ),
    "unshard into an overflow buffer, and reshard at once": (
        {},
        [("forward", 0, NESTED), ("unshard", 2, False, True), ("backward", (0,), False)],
    ),
    **{
        f"gradients set to zero after a backward that raised: {name}": (
            sharding,
            [*PASS, ("broken", BROKEN), ("read", "gradients"), ("broken", BROKEN), ("zero", False), *PASS, ("check",)],
        )
        for name, sharding in (("a shard", {}), ("replicas", {"mesh": "replicas"}), ("offloaded", {"offload": True}))
    },
    "a parameter frozen where unshard() shows whole weights": (
        {},
        [*PASS, ("zero", True), ("unshard", 0, True, False), ("freeze", "tops.0.up.weight", True), *PASS, ("check",)],
    ),
    "weights written after the event that a step has recorded": (
        {},
        [*PASS, ("step", False), ("event",), ("write",), *PASS],
    ),
    "buffers made anew after the event that a step has recorded": (
        {"compression": {"gradients": "int8"}},
        [*PASS, ("step", False), ("keep", 0), ("event",), *PASS],
    ),
    "a checkpoint of residuals that a backward which raised still writes": (
        {"compression": {"gradients": "int8"}, "separate": True},
        [*PASS, ("broken", BROKEN), ("zero", True), ("save", False)],
    ),
    "a checkpoint of gradients that residuals have taken in, freed with the model": (
        {"compression": {"gradients": "int8"}},
        [("sync", False), *PASS, ("save", False)],
    ),
    "a whole state dict between forward and backward, which sends shards that are gathered again": (
        {},
        [("forward", 0, NESTED), ("read", "full"), ("backward", (0,), False)],
    ),
    "residuals carried over to exact sums": (
        {"compression": {"gradients": "auto"}},
        [("codec", "int8"), *PASS, ("zero", True), ("codec", "fp32"), *PASS],
    ),
    "norms to clip by, freed with the model": (
        {"compression": {"gradients": "onebit"}, "optimizer": "1-bit adam, clipped"},
        [*PASS, ("step", False)],
    ),
    "all-gathers that nobody waits for, freed with the model": (
        {"compression": {"gradients": "int8"}, "optimizer": "1-bit sgd"},
        [*PASS, ("step", False)],
    ),
    "an exact step of an optimizer of the 1-bit family": (
        {"compression": {"gradients": "int8"}, "optimizer": "1-bit sgd"},
        [("forward", 0, (("call", 1),)), ("backward", (0,), False), ("step", False), ("forward", 0, (("call", 1),))],
    ),
    "deltas that are measured in the all-gathers of an optimizer's step": (
        {"compression": WITH_DELTAS, "reshard_after_forward": False, "optimizer": "1-bit sgd"},
        4 * [*PASS, ("step", False), ("zero", True)],
    ),
}
"""Programs that were once flagged, as small as they could be made."""


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, tmp_path: Path) -> None:
    sharding, actions = FOUND[name]
    spec = {"units": (BLOCK,) * 4, "tied_ends": False, "tied_units": None, "frozen": ()}
    plot = {"seed": 0, "world": 2, "spec": spec, "naps": 0.0, "reshard_after_forward": None, "mesh": "flat"}
    plot |= {"compression": None, "optimizer": "sgd", "bf16": False, "offload": False, "separate": False}
    on_ranks(2, watch, [plot | sharding | {"actions": actions}], tmp_path)
