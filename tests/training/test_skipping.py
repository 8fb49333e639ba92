"""Batches that one rank or several fail in: training goes on as if they had not been there, bit for bit.

Two equal models are trained side by side. One is given batches in which ranks raise, within ``skip_together``; the
other one is not given them. After each batch, weights, gradients, residuals, buffers and random numbers are equal.

    make soak                                                     200 cases
    YAFSDP_SOAK=0-199 pytest tests/training/test_skipping.py      these
    YAFSDP_SOAK=17-17 pytest tests/training/test_skipping.py      this one again
"""

from __future__ import annotations

import contextlib
import logging
import pprint
import random
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from tests import test_order
from tests.lockstep import TIMEOUT, Pair, loss_of, play
from tests.maze import Boom, Program, random_program
from tests.models import Mlp, Skipping
from tests.ranks import RankError, on_ranks, ranks
from tests.soak import SOAK
from tests.twins import inputs, mine, numbers, refusal, seeded, square, trains_on, twins, whole
from yafsdp_cc.batches.skipped import OutsideOnlyError
from yafsdp_cc.compression.state import local_residuals
from yafsdp_cc.engine import step_state
from yafsdp_cc.engine.step_state import StepState, history, transient, unreduced
from yafsdp_cc.fsdp2.module import require_state

WIDTH, BLOCKS = 32, 4
ERRORS = (torch.OutOfMemoryError, ValueError, AssertionError, KeyError, RuntimeError)


class Fuse:
    """Raises where it is told to."""

    place: tuple[str, int] = ("", 0)

    @classmethod
    def reach(cls, *place: Any) -> None:
        if cls.place == place:
            raise random.Random(dist.get_rank()).choice(ERRORS)(f"at {place}")


class Block(nn.Module):
    def __init__(self, number: int, dropout: float) -> None:
        super().__init__()
        self.number = number
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x)).relu()
        Fuse.reach("inside", self.number)
        y = x + self.dropout(self.down(y))
        if y.requires_grad:
            y.register_hook(lambda _: Fuse.reach("backward", self.number))
        return y


class Net(nn.Module):
    """Blocks, of which some are left out at random, the same on all ranks; running means; perhaps a tied head."""

    def __init__(self, *, dropout: float, drops: float, checkpoints: bool, is_tied: bool, has_means: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.means = nn.BatchNorm1d(WIDTH) if has_means else None
        self.blocks = nn.ModuleList(Block(number, dropout) for number in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.drops, self.checkpoints = drops, checkpoints
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.means is not None:
            x = self.means(x.transpose(1, 2)).transpose(1, 2)
        for number, block in enumerate(self.blocks):
            Fuse.reach("before", number)
            if random.random() < self.drops:
                continue
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        out: Tensor = self.head(x)
        return out


PLACES = [
    ("data", 0),
    *((where, number) for where in ("before", "inside", "backward") for number in range(BLOCKS)),
    ("loss", 0),
    ("end", 0),
]

SETTINGS: list[dict[str, Any]] = [
    {},
    {"zero_stage": 2},
    {"zero_stage": 1},
    {"reshard_after_forward": False},
    {"reshard_after_forward": 2},
    {"replicas": True},
    {"replicas": True, "compression": "int8"},
    {"compression": "int8"},
    {"compression": {"gradients": "int4", "weights": "int8"}},
    {"compression": {"gradients": "onebit"}},
    {"compression": {"gradients": "powersgd", "matrix_rank": 2}},
    {"compression": {"gradients": "int8", "weights": "int8"}, "zero_stage": 2},
    {"compression": {"gradients": "int4", "residual": "int8", "warmup_steps": 1}},
    {"compression": {"gradients": "int8"}, "zero_stage": 1},
    {"offload_policy": CPUOffloadPolicy()},
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    {"separate_reduce_group": True},
    {"one_bit": True, "compression": {"gradients": "onebit"}},
    {"replicas": True, "compression": {"gradients": "int4", "residual": "int8"}},
    {"compression": "auto"},  # what it chooses goes by the clock
]


def scenario(seed: int) -> dict[str, Any]:
    """All of a case, from its seed; each of the settings once in as many seeds, by turns with 2 and 4 ranks."""
    rng = random.Random(seed)
    number, turn = seed % len(SETTINGS), seed // len(SETTINGS)
    settings = SETTINGS[number]
    world = 4 if "replicas" in settings or (number + turn) % 2 else 2
    batches = []
    for _ in range(rng.randint(6, 9)):
        fails = {}
        if rng.random() < 0.55:
            failing = [rank for rank in range(world) if rng.random() < 0.4] or [rng.randrange(world)]
            if rng.random() < 0.15:
                failing = list(range(world))
            together = rng.choice(PLACES)
            fails = {rank: together if rng.random() < 0.3 else rng.choice(PLACES) for rank in failing}
        batches.append(fails)
    return {
        "seed": seed,
        "world": world,
        "settings": settings,
        "net": {
            "dropout": rng.choice((0.0, 0.2)),
            "drops": rng.choice((0.0, 0.0, 0.3)),
            "checkpoints": rng.random() < 0.3,
            "is_tied": rng.random() < 0.3,
            "has_means": rng.random() < 0.5 and "mp_policy" not in settings,  # running means are not for bf16
        },
        "accumulates": rng.choice((1, 1, 2, 3)),
        "syncs": "last" if "one_bit" in settings else rng.choice(("always", "last", "last of replicas")),
        "counts_skipped": rng.random() < 0.5,
        "forwards": 1 if "one_bit" in settings else rng.choice((1, 1, 2)),
        "optimizer": rng.choice(("sgd", "adamw")),
        "naps": rng.choice((0.0, 0.005)),
        "batches": batches,
    }


class Twin:
    """One of the two models, with random states of its own."""

    def __init__(self, plot: dict[str, Any]) -> None:
        random.seed(0)
        self.plot = plot
        options = dict(plot["settings"])
        one_bit = options.pop("one_bit", False)
        if options.pop("replicas", False):
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if isinstance(options.get("compression"), dict):
            options["compression"] = yafsdp_cc.Compression(**options["compression"])
        self.model: Any = yafsdp_cc.shard(seeded(lambda: Net(**plot["net"])), units=[Block], **options)
        parameters = self.model.parameters()
        if one_bit:
            self.optimizer: Any = yafsdp_cc.optim.OneBitAdam(parameters, lr=1e-2, warmup_steps=2)
        elif plot["optimizer"] == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        torch.manual_seed(dist.get_rank())
        random.seed(7)
        np.random.seed(7)
        self.random = self._random()
        self.micros = 0

    @staticmethod
    def _random() -> tuple[Any, ...]:
        return torch.get_rng_state(), random.getstate(), np.random.get_state()

    @contextlib.contextmanager
    def own_random_states(self) -> Any:
        torch.set_rng_state(self.random[0])
        random.setstate(self.random[1])
        np.random.set_state(self.random[2])
        yield
        self.random = self._random()

    def run(self, number: int, fails: tuple[str, int], naps: random.Random | None = None) -> None:
        """The forward and backward of one batch."""
        plot = self.plot
        Fuse.place = fails
        Fuse.reach("data", 0)
        losses = []
        for turn in range(plot["forwards"]):
            seed = 1000 * number + 10 * turn + dist.get_rank()
            tokens = torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(seed))
            np.random.random()
            if naps is not None:
                time.sleep(naps.random() * plot["naps"])
            losses.append(nn.functional.cross_entropy(self.model(tokens).float().flatten(0, 1), tokens.flatten()))
        Fuse.reach("loss", 0)
        is_last = (self.micros + 1) % plot["accumulates"] == 0
        if plot["syncs"] == "last":
            self.model.set_requires_gradient_sync(is_last)
        elif plot["syncs"] == "last of replicas":
            self.model.set_requires_all_reduce(is_last)
        sum(losses).backward()  # type: ignore[union-attr]
        Fuse.reach("end", 0)

    def step(self) -> None:
        """Count a batch, and step if that was the last one of several."""
        self.micros += 1
        if self.micros % self.plot["accumulates"] == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def condition(self) -> dict[str, Any]:
        """All that must be equal."""
        state = require_state(self.model)
        found: dict[str, Any] = {"steps": [], "kept": []}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().to_local().clone()
            found[f"grad of {name}"] = None if parameter.grad is None else parameter.grad.to_local().clone()
        for name, buffer in self.model.named_buffers():
            found[name] = buffer.clone()
        for group in state.groups:
            if group.grads is not None:  # as set_requires_gradient_sync(False) leaves them
                written = [view for param, view in zip(group.params, group.grads.views, strict=True) if param.written]
                found["kept"].append([view.clone() for view in written])
        if state.context.replicas is not None:
            outputs = state.context.replicas.outputs
            found["partial sums"] = [None if each.used is None else each.total.clone() for each in outputs]
        if "compression" in self.plot["settings"]:
            found["residuals"] = local_residuals(state)
            found["steps"] = [vars(each).get("steps") for each in state.context.observers]
            found["moments"] = [
                (None if flat.reduce_scatter.momentum is None else flat.reduce_scatter.momentum.clone())
                for flat in state.flats
                if hasattr(flat.reduce_scatter, "momentum")
            ]
        found["random"] = self.random[0]
        found["python"] = self.random[1]
        return found


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Paths at which two conditions differ in a bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        return [] if same else [f"{where}: {one.flatten()[:4].tolist()} {other.flatten()[:4].tolist()}"]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [each for key in one for each in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for place, pair in pairs for each in differences(*pair, f"{where}/{place}")]
    return [] if one == other else [f"{where}: {str(one)[:80]} {str(other)[:80]}"]


def plays(plot: dict[str, Any]) -> int:
    logging.getLogger("yafsdp_cc").setLevel(logging.ERROR)
    rank = dist.get_rank()
    failing, spared = Twin(plot), Twin(plot)
    naps = random.Random(1000 * plot["seed"] + rank)
    skips = 0
    for number, fails in enumerate(plot["batches"]):
        with failing.own_random_states(), yafsdp_cc.skip_together(failing.model, limit=100) as attempt:
            failing.run(number, fails.get(rank, ("", 0)), naps)
        # A place behind a unit that is left out may not be reached: then nobody has failed.
        assert bool(attempt.errors) == attempt.skipped
        assert attempt.errors.keys() <= fails.keys(), attempt.errors
        skips += attempt.skipped
        if not attempt.skipped:
            with spared.own_random_states():
                spared.run(number, ("", 0))
        if plot["settings"].get("compression") != "auto":
            found = differences(failing.condition(), spared.condition())
            assert not found, f"rank {rank}, batch {number} {fails}: {found[:5]}"
        if not attempt.skipped or plot["counts_skipped"]:  # as one of the micro-batches of a step
            with failing.own_random_states():
                failing.step()
            with spared.own_random_states():
                spared.step()
    assert yafsdp_cc.counters_of(failing.model).skipped_batches == skips
    assert yafsdp_cc.counters_of(spared.model).skipped_batches == 0
    return skips


def plays_all(plots: list[dict[str, Any]]) -> int:
    done = 0
    for plot in plots:
        try:
            done += plays(plot)
        except Exception as error:
            raise AssertionError(f"the case was\n{pprint.pformat(plot, width=140)}") from error
    return done


def _seeds() -> list[int]:
    first, _, last = SOAK.partition("-")
    return list(range(int(first), int(last) + 1)) if last else list(range(200 if SOAK else 8))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.timeout(3600)
def test_training_goes_on_as_without_the_batches_that_failed(world: int) -> None:
    plots = [plot for plot in map(scenario, _seeds()) if plot["world"] == world]
    skips = on_ranks(world, plays_all, plots, timeout=60 + 10 * len(plots))
    assert len(set(skips)) == 1
    assert skips[0] > 2 * len(plots)


# Programs of ``tests/test_order.py``, with ranks that raise in between: nested units, checkpoints, several graphs


class Skips(Pair):
    """``broken`` is a batch that a part of the ranks fails in, and all skip."""

    def _broken(self, program: Program) -> None:
        rng = random.Random(self.count)  # alike on all ranks
        failing = [rank for rank in range(self.world) if rng.random() < 0.5] or [rng.randrange(self.world)]
        x = self._input()
        with yafsdp_cc.skip_together(self.model, limit=100) as attempt:
            loss = loss_of([self.model(x, program if self.rank in failing else _without_failures(program))])
            if loss.requires_grad:
                loss.backward()
            if self.rank in failing:  # what fails in a backward may sit where no gradient comes
                raise Boom
        assert attempt.skipped
        assert attempt.errors.keys() <= set(failing)  # some may have noticed another's failure before their own


def _without_failures(program: Program) -> Program:
    kept = [op for op in program if op not in (("fail",), ("fail_backward",))]
    has_body = [op[0] in ("nest", "no_grad", "detach", "checkpoint") for op in kept]
    return tuple((*op[:-1], _without_failures(op[-1])) if has else op for op, has in zip(kept, has_body, strict=True))


def skipping_plot(seed: int) -> dict[str, Any]:
    """A scenario of ``test_order`` with batches that fail at any point of it."""
    plot, rng = test_order.scenario(seed), random.Random(seed)
    actions: list[Program] = []
    for action in plot["actions"]:
        if rng.random() < 0.3:
            body = (*random_program(rng, plot["spec"], plot["world"]), rng.choice((("fail",), ("fail_backward",))))
            body += random_program(rng, plot["spec"], plot["world"])
            actions.append(("broken", (("checkpoint", body),) if rng.random() < 0.3 else body))
        actions.append(action)
    return {**plot, "actions": actions}


@pytest.mark.parametrize("seed", _seeds() if SOAK else range(3))
def test_programs(seed: int) -> None:
    plot = skipping_plot(seed)
    try:
        on_ranks(plot["world"], play, plot, Skips, timeout=TIMEOUT)
    except RankError as error:
        pytest.fail(f"{error}\nThe program was\n{pprint.pformat(plot, width=140)}", pytrace=False)


# What a case does not come to ----------------------------------------------------------------------------------------


class Frail(Mlp):
    """Raises in its forward when it is told to."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.error is not None:
            raise self.error
        return x


def frail(**options: Any) -> Any:
    return yafsdp_cc.shard(seeded(Frail), units=["blocks.*"], **options)


@ranks(2)
def test_it_is_counted_and_logged_with_every_rank_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    model, rank = frail(), dist.get_rank()
    for failing in ([1], [0, 1]):
        with yafsdp_cc.skip_together(model) as attempt:
            if rank in failing:
                raise MemoryError(f"of rank {rank}")
            square(model, mine(inputs())).backward()
        assert attempt.skipped
        assert list(attempt.errors) == failing
        assert all(f"MemoryError: of rank {each} (" in text for each, text in attempt.errors.items())
    assert yafsdp_cc.counters_of(model).skipped_batches == 2
    assert len(caplog.messages) == (2 if rank == 0 else 0)
    if rank == 0:
        assert caplog.messages[1].startswith(
            "all ranks skip a batch, number 2 of those skipped: rank 0: MemoryError: of"
        )
        assert "; rank 1: MemoryError: of rank 1 (" in caplog.messages[1]


@ranks(4)
def test_units_of_several_meshes() -> None:
    """Also with gradients kept of an earlier micro-batch, those of replicated parameters of each mesh among them."""
    every, few = (init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)]) for shape in ((4,), (2, 2)))
    models = [seeded(Frail), seeded(Frail)]
    for model in models:
        yafsdp_cc.fully_shard(model.blocks[1], mesh=few["b"])
        yafsdp_cc.fully_shard(model, mesh=every)
    for number, fails in enumerate((False, True, False, True, False)):
        models[0].set_requires_gradient_sync(number == 4)
        models[1].set_requires_gradient_sync(number == 4)
        with yafsdp_cc.skip_together(models[0]) as attempt:
            square(models[0], mine(inputs(step=number))).backward()
            if fails and dist.get_rank() == number:
                raise ValueError
        assert attempt.skipped == fails
        if not fails:
            square(models[1], mine(inputs(step=number))).backward()
    found, truth = ([each.grad.to_local() for each in model.parameters()] for model in models)
    assert all(map(torch.equal, found, truth))


@ranks(2)
def test_too_many_in_a_row_raise_everywhere() -> None:
    model = frail()
    for limit in (0, 2):
        for turn in range(limit + 1):
            model.error = KeyError("bad") if dist.get_rank() == 1 else None

            def attempt(limit: int = limit) -> None:
                with yafsdp_cc.skip_together(model, limit=limit):
                    model(mine(inputs()))

            raised = refusal(attempt)
            text = f"{limit + 1} batches in a row were skipped, the last one: rank 1: KeyError: 'bad'"
            assert raised.startswith(text) if turn == limit else not raised
        model.error = None
        attempt()  # ends the row


@ranks(2)
def test_failures_that_follow_at_once() -> None:
    """A rank may fail in the next batch before the others are through with the last one."""
    model, rng = frail(zero_stage=2), random.Random(dist.get_rank())
    logging.getLogger("yafsdp_cc").setLevel(logging.ERROR)
    for _ in range(60):
        with yafsdp_cc.skip_together(model, limit=100):
            if rng.random() < 0.5:
                raise ValueError
            loss = square(model, mine(inputs()))
            if rng.random() < 0.3:
                raise ValueError
            loss.backward()
    assert 40 <= yafsdp_cc.counters_of(model).skipped_batches <= 60


@ranks(2)
def test_ranks_prefetch_alike_afterwards() -> None:
    """Those that came further in the batch than others do not gather a unit that the next forward leaves out."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, skips=leaves_out[0]).square().mean()

    leaves_out, rank = [False], dist.get_rank()
    model, plain = twins(Skipping, units=[nn.Linear])
    batches = [torch.randn(2, 64, generator=torch.Generator().manual_seed(each)) for each in range(2)]
    trains_on(model, plain, loss, [batches], within=1e-6)
    for failing in range(2):
        with yafsdp_cc.skip_together(model) as attempt:
            if rank == failing:
                model(batches[rank], skips=True)
                raise ValueError
            loss(model, batches[rank]).backward()
        assert attempt.skipped
        with torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(0.5)  # to be gathered again
        leaves_out[0] = True
        trains_on(model, plain, loss, [batches], within=1e-6)
        leaves_out[0] = False
        trains_on(model, plain, loss, [batches, batches], within=1e-6)


@ranks(2)
def test_what_is_raised_within_is_let_go() -> None:
    """Activations of a batch that ran out of memory are freed before anything is put back."""
    model, held = frail(), []

    def hold(*_: Any) -> None:
        activation = torch.zeros(10)
        held.append(weakref.ref(activation))
        raise torch.OutOfMemoryError

    model.blocks[2].register_forward_pre_hook(hold)
    with yafsdp_cc.skip_together(model) as attempt:
        square(model, mine(inputs())).backward()
    assert attempt.skipped
    assert held[0]() is None


@ranks(2)
def test_without_a_graph() -> None:
    model, rank = frail(zero_stage=2), dist.get_rank()
    truth = model(mine(inputs())).detach()
    for failing in (0, 1):
        model.error = ValueError() if rank == failing else None
        with torch.no_grad(), yafsdp_cc.skip_together(model) as attempt:
            model(mine(inputs()))
        assert attempt.skipped
    model.error = None
    with torch.inference_mode(), yafsdp_cc.skip_together(model) as attempt:
        assert torch.equal(model(mine(inputs())), truth)
    assert not attempt.skipped


@ranks(2)
def test_training_follows_an_evaluation_in_inference_mode() -> None:
    model = yafsdp_cc.shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    with torch.inference_mode(), yafsdp_cc.skip_together(model):
        model(mine(inputs()))
    with yafsdp_cc.skip_together(model) as attempt:
        model(mine(inputs())).square().sum().backward()
    assert not attempt.skipped
    assert model[1].num_batches_tracked == 2


@ranks(2)
def test_a_member_of_a_step_is_declared_in_one_place() -> None:
    for name, member in {"kept": unreduced(list), "learnt": history(list), "passing": transient(list)}.items():
        setattr(StepState, name, member)
    step_state._known.clear()
    model = yafsdp_cc.shard(Mlp(), units=[nn.Linear])
    model(mine(inputs())).sum().backward()
    state = require_state(model)
    owners: list[Any] = list(state.step_states())
    assert {type(each).__name__ for each in owners} >= {"FSDPState", "GroupContext", "ParamGroup", "FSDPParam"}
    assert state.is_idle
    for each in owners:
        each.kept, each.learnt = [1], [1]
    assert not state.is_idle
    with yafsdp_cc.skip_together(model) as attempt:
        for each in owners:
            for values in (each.kept, each.learnt, each.passing):
                values.append(2)
        raise ValueError
    assert attempt.skipped
    assert [(each.kept, each.learnt, each.passing) for each in owners] == [([1], [1], [])] * len(owners)
    state.reset()
    assert [(each.kept, each.learnt, each.passing) for each in owners] == [([], [1], [])] * len(owners)
    assert state.is_idle


@ranks(2)
def test_several_models() -> None:
    """A teacher and a student: whichever fails."""
    student, plain = twins(Frail, units=["blocks.*"])
    teacher = frail(compression="int8")
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step, failing in enumerate((student, teacher)):
        failing.error = ValueError() if dist.get_rank() == step else None
        with yafsdp_cc.skip_together(student, teacher) as attempt:
            with torch.no_grad():
                target = teacher(mine(inputs(step=step)))
            (student(mine(inputs(step=step))) - target).square().mean().backward()
        assert attempt.skipped
        failing.error = None
        optimizer.step()
    trains_on(student, plain, square, [inputs(step=step) for step in range(2)])


@ranks(2)
def test_swallowing_the_error_of_a_peer_changes_nothing() -> None:
    model, plain = twins(Frail, units=["blocks.*"])
    model.error = ValueError() if dist.get_rank() == 0 else None
    with yafsdp_cc.skip_together(model) as attempt:
        if dist.get_rank() == 0:
            raise ValueError
        for _ in range(3):
            with contextlib.suppress(yafsdp_cc.PeerFailedError):
                square(model, mine(inputs())).backward()
    assert attempt.skipped
    model.error = None
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


@ranks(2)
def test_the_end_of_data_is_no_failure() -> None:
    model = frail()
    batches = iter(inputs()[:1])

    def take() -> None:
        with yafsdp_cc.skip_together(model):
            model(next(batches))

    take()
    with pytest.raises(StopIteration):  # on all ranks
        take()
    if dist.get_rank() == 0:
        batches = iter(inputs()[:1])
        assert "a batch is given up on all ranks: rank 1: StopIteration" in refusal(take)
    else:
        with pytest.raises(StopIteration):
            take()


@ranks(2)
def test_gradients_of_earlier_micro_batches_stay_as_a_user_has_them() -> None:
    """Also those that the user has made, and that are not of the engine's buffer."""
    model, rank = frail(), dist.get_rank()
    square(model, mine(inputs())).backward()
    model.blocks[1][0].weight.grad = model.blocks[1][0].weight.grad.clone()
    model.blocks[2][0].weight.grad = None
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: None if grad is None else grad.to_local().clone() for name, grad in before.items()}
    with yafsdp_cc.skip_together(model) as attempt:
        square(model, mine(inputs(step=1))).backward()
        if rank == 1:
            raise ValueError
    assert attempt.skipped
    assert attempt.saved_bytes >= sum(each.nbytes for each in values.values() if each is not None)
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        assert parameter.grad is None or torch.equal(parameter.grad.to_local(), values[name])


@ranks(2)
def test_a_sparse_buffer_is_as_before() -> None:
    model, graph = frail(), torch.eye(3).to_sparse()
    model.blocks[1].register_buffer("graph", graph.clone())
    model.blocks[0].register_buffer("graph", model.blocks[1].graph)
    with yafsdp_cc.skip_together(model) as attempt:
        square(model, mine(inputs())).backward()
        model.blocks[1].graph.mul_(2)
        if dist.get_rank() == 1:
            raise ValueError
    assert attempt.skipped
    assert torch.equal(model.blocks[1].graph.to_dense(), graph.to_dense())
    assert model.blocks[0].graph is model.blocks[1].graph


@ranks(2)
def test_replicas_hand_out_gradients_that_another_rank_has_used_before_it() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = yafsdp_cc.fully_shard(Skipping(), mesh=mesh)
    plain, rank, x = Skipping(), dist.get_rank(), [numbers(3, 64, seed=seed) for seed in range(2)]
    model.set_requires_all_reduce(False)
    model(x[rank], rank == 0).square().mean().backward()  # the second layer is used here alone, and by one rank
    with yafsdp_cc.skip_together(model) as attempt:
        model(x[rank], True).square().mean().backward()
        if rank == 1:
            raise ValueError
    assert attempt.skipped
    model.set_requires_all_reduce(True)
    model(x[rank], True).square().mean().backward()
    for each, skips in ((x[0], True), (x[1], False), (x[0], True), (x[1], True)):
        (plain(each, skips).square().mean() / 2).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole(model.get_parameter(name).grad), parameter.grad)


@ranks(2)
def test_with_uneven_batches_around_it() -> None:
    model, plain = twins(Frail, units=["blocks.*"])
    rank, seen = dist.get_rank(), 0
    with yafsdp_cc.uneven(model) as batches:
        for step, batch in enumerate(batches(inputs()[: 3 - rank] + inputs()[: 1 + rank])):  # four and four
            model.error = ValueError() if (step, rank) == (1, 0) else None
            with yafsdp_cc.skip_together(model) as attempt:
                square(model, batch).backward()
            seen += attempt.skipped
        loop = batches(inputs())
        inside = yafsdp_cc.skip_together(model)
        with pytest.raises(OutsideOnlyError, match="the loop over uneven batches within skip_together"), inside:
            next(loop)
    assert seen == 1
    model.error = None
    model.zero_grad()
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


@ranks(2)
def test_an_interrupt_is_not_swallowed() -> None:
    """A rank that waits for the interrupted one in no collective raises at the next one that it would issue."""
    model, rank = frail(), dist.get_rank()

    def interrupt(*_: Any) -> None:
        if rank == 1:
            raise KeyboardInterrupt
        time.sleep(1.0)

    model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught, yafsdp_cc.skip_together(model):
        square(model, mine(inputs())).backward()
    if rank == 1:
        assert caught.type is KeyboardInterrupt
    else:
        assert "a rank takes part no longer: KeyboardInterrupt" in str(caught.value)


@ranks(2)
def test_refused() -> None:
    model = frail()

    def enter(*models: nn.Module) -> str:
        def act() -> None:
            with yafsdp_cc.skip_together(*models):
                pass

        return refusal(act)

    assert "Mlp is not sharded" in enter(Mlp())
    assert "is a part of one" in enter(model.blocks[0])
    within: list[str] = []
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: within.append(enter(model)))
    model(mine(inputs()))
    handle.remove()
    assert "enter it before the forward" in within[0]
    with yafsdp_cc.skip_together(model):
        assert "pass all models to one" in enter(frail())

    def steps() -> None:
        with yafsdp_cc.skip_together(model):
            square(model, mine(inputs())).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert "optimizer.step() belongs behind the block" in refusal(steps)

    for act in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: model.leave.weight.sum().item(),
        lambda: model.enter.weight.full_tensor(),
    ):

        def acts(act: Any = act) -> None:
            with yafsdp_cc.skip_together(model):
                square(model, mine(inputs())).backward()
                act()

        assert "within skip_together" in refusal(acts)

    def changes() -> None:
        with yafsdp_cc.skip_together(model):
            model.set_reshard_after_forward(False)
            square(model, mine(inputs())).backward()

    assert "how a model is sharded was changed inside" in refusal(changes)
    model.zero_grad()
    for fails in (False, True):
        model.error = ValueError() if fails and dist.get_rank() == 1 else None
        with yafsdp_cc.skip_together(model) as attempt:
            square(model, mine(inputs())).backward()
        assert attempt.skipped is fails
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    divided = seeded(Mlp)
    parallelize_module(divided.blocks[0], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert "'blocks.0.0.weight' is tensor-parallel" in enter(yafsdp_cc.shard(divided, mesh=mesh["dp"]))
    synchronised = nn.Sequential(nn.Linear(8, 64), nn.SyncBatchNorm(64))
    assert "'1' is a SyncBatchNorm" in enter(yafsdp_cc.shard(synchronised, units=[nn.Linear]))
