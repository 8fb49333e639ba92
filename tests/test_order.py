"""Order fuzzing: random programs under random delays per rank. Never a wrong number, an assert or a hang.

Every program is run twice in lockstep: by the engine, and by the plain model on the same inputs in the same rank,
whose gradients are then summed over ranks in rank order. Outputs must be equal bit for bit; so must gradients wherever
one backward adds one contribution to a parameter, else they agree to fp32 rounding.

    make soak                                          hundreds of programs
    YAFSDP_SOAK=1000-1999 pytest tests/test_order.py   these seeds
    pytest tests/test_order.py -k 'program[17]'        this one again

Actions, beside the ops of ``maze``: ``forward`` keeps graph k; ``backward`` runs graphs together, and keeps them when
told; ``inputs`` asks for the gradient of a graph's input alone; ``evaluate`` runs without a graph; ``sync`` is
``set_requires_gradient_sync``; ``broken`` raises somewhere; ``check``, ``step``, ``zero`` and ``freeze`` are what they
say.
"""

from __future__ import annotations

import pprint
import random
import re
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests import internals
from tests.lockstep import ON_THE_WIRE, TIMEOUT, Naps, Pair, as_it_was, loss_of, play
from tests.maze import WIDTH, Maze, Program, random_actions, random_program, random_spec
from tests.ranks import RankError, on_ranks, ranks
from tests.soak import SOAK


def _seeds() -> range:
    first, _, last = SOAK.partition("-")
    return range(int(first), int(last) + 1) if last else range(int(first or 8))


def scenario(seed: int, world: int = 0) -> dict[str, Any]:
    """All of a program, from its seed; for so many ranks, or 2 or 4."""
    rng = random.Random(seed)
    world = world or (4 if seed % 4 == 3 else 2)
    spec = random_spec(rng)
    options = {
        "reshard_after_forward": rng.choice((None, True, False)),
        "optimizer": rng.choice(("sgd", "adamw")),
        "naps": rng.choice((0.0, 0.02, 0.2)),
    }
    return {"seed": seed, "world": world, "spec": spec, **options, "actions": random_actions(rng, spec, world)}


@pytest.mark.parametrize("seed", _seeds())
def test_program(seed: int) -> None:
    plot = scenario(seed)
    try:
        on_ranks(plot["world"], play, plot, timeout=TIMEOUT)
    except RankError as error:
        pytest.fail(f"{error}\nThe program was\n{pprint.pformat(plot, width=140)}", pytrace=False)


BLOCK = ("block", 24)
FOUND: dict[str, tuple[tuple[Any, ...], list[Program]]] = {
    "a unit twice in a checkpoint, after one that has its slot": (
        (BLOCK,) * 4,
        [
            ("forward", 0, (("checkpoint", (("call", 0), ("call", 2), ("call", 2), ("call", 1))),)),
            ("backward", (0,), False),
        ],
    ),
    "a checkpoint over a parent and then its child": (
        (("parent", 24, BLOCK, BLOCK), BLOCK),
        [("forward", 0, (("checkpoint", (("call", 0), ("call", 2))),)), ("backward", (0,), False)],
    ),
    "no_grad in a checkpoint": (
        (BLOCK,) * 4,
        [
            ("forward", 0, (("call", 2), ("checkpoint", (("no_grad", (("call", 0),)), ("call", 1))))),
            ("backward", (0,), False),
        ],
    ),
    "gradients of inputs through a checkpoint inside a unit": (
        (BLOCK,) * 3,
        [("forward", 0, (("nest", 0, (("checkpoint", (("call", 2),)),)),)), ("inputs", 0)],
    ),
    "gradients of inputs while gradients are held": (
        (BLOCK,) * 3,
        [("forward", 0, ()), ("sync", False), ("inputs", 0), ("sync", True), ("backward", (0,), False)],
    ),
    "gradients of inputs, and then parameters": (
        (BLOCK,) * 3,
        [("forward", 0, (("call", 0),)), ("inputs", 0), ("freeze", "tops.1.norm.bias", True)],
    ),
}
"""Programs that once failed, as small as they could be made."""


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    units, actions = FOUND[name]
    spec = {"units": units, "tied_ends": False, "tied_units": None, "frozen": ()}
    options = {"reshard_after_forward": None, "optimizer": "sgd", "naps": 0.0}
    on_ranks(2, play, {"seed": 0, "spec": spec, **options, "actions": [*actions, ("check",)]}, timeout=TIMEOUT)


@pytest.mark.parametrize("kept", [("call", 1), ("checkpoint", (("call", 1),))], ids=["kept", "computed again"])
def test_a_unit_that_is_shown_and_that_the_next_forward_leaves_out(kept: Any) -> None:
    """Units are sharded from the bottom up, as the seed is odd: between passes they show gathered weights."""
    spec = {"units": (BLOCK,) * 2, "tied_ends": False, "tied_units": None, "frozen": ()}
    actions = [("forward", 0, (kept,)), ("forward", 1, ()), ("backward", (0,), False), ("check",)]
    options = {"reshard_after_forward": False, "optimizer": "sgd", "naps": 0.0}
    on_ranks(2, play, {"seed": 1, "spec": spec, **options, "actions": actions}, timeout=TIMEOUT)


@pytest.mark.parametrize(("depth", "overflows"), [(0, False), (1, False), (2, True), (3, True)])
@ranks(2)
def test_nesting_deeper_than_the_buffers_is_counted(depth: int, overflows: bool) -> None:
    torch.manual_seed(0)
    model = Maze({"units": (BLOCK,) * 4, "tied_ends": False, "tied_units": None, "frozen": ()})
    model = yafsdp_cc.shard(model, units=list(model.tops))
    program: Program = (("call", depth),)
    for unit in reversed(range(depth)):
        program = (("nest", unit, program),)
    with torch.no_grad():
        model(torch.ones(1, WIDTH), program)
    assert (yafsdp_cc.counters_of(model).overflow_buffers > 0) == overflows
    before = yafsdp_cc.counters_of(model).overflow_buffers
    for _ in range(2):
        loss_of([model(torch.ones(1, WIDTH), tuple(("call", unit) for unit in range(4)))]).backward()
    assert yafsdp_cc.counters_of(model).overflow_buffers == before


# Backwards within backwards

STAGES: dict[str, dict[str, Any]] = {
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "not resharded": {"reshard_after_forward": False},
    "replicas": {"mesh": ((2, 1), (2, 2))},
}
CODECS = (None, "int8", "onebit")
REFUSED = "reached the inside|to the weights of|needed where others are in use|was unfrozen while"
PATIENCE = 8.0
"""Seconds that ranks which differ wait for each other."""
DIFFERENCES = ("frozen", "skipped", "unsynced", "summed apart", "routed", "nested", "checkpointed")
"""What one rank does in one step and the others do not."""
TOGETHER = 20
"""Programs that one group of ranks runs, one after another."""


def tale(seed: int) -> dict[str, Any]:
    """All of a program with backwards within backwards, from its seed: steps of a program each."""
    rng = random.Random(seed)
    world = 4 if seed % 10 == 9 else 2
    spec = random_spec(rng, (2, 4)) | {"tied_units": None}
    names = [name for name, _ in Maze(spec).named_parameters()]
    usual = random_program(rng, spec, world, late=0.3)
    steps: list[dict[str, Any]] = []
    for number in range(3):
        program = usual if rng.random() < 0.5 else random_program(rng, spec, world, late=0.3)
        steps.append({"program": program, "sync": number == 2 or rng.random() < 0.8, "freeze": None})
        if rng.random() < 0.3:
            steps[-1]["freeze"] = (rng.choice(names), rng.random() < 0.6)
    stage, codec = rng.choice(list(STAGES)), rng.choice(CODECS)
    return {"seed": seed, "world": world, "spec": spec, "stage": stage, "codec": codec, "steps": steps}


def tale_of_ranks_that_differ(seed: int) -> dict[str, Any]:
    """A tale in which one rank does something of its own in a step that others follow.

    Behind the last step a rank of a shard group of one would read its gradients without asking anybody.
    """
    plot, rng = tale(seed), random.Random(f"differ {seed}")
    spec, difference, number = plot["spec"], DIFFERENCES[seed % len(DIFFERENCES)], rng.randrange(len(plot["steps"]) - 1)
    step = plot["steps"][number]
    names = [name for name, _ in Maze(spec).named_parameters() if name not in spec["frozen"]]
    changes: dict[str, dict[str, Any]] = {
        "frozen": {"freeze": (rng.choice(names), True)},
        "skipped": {"backward": False},
        "unsynced": {"sync": not step["sync"]},
        "summed apart": {"apart": True},
        "routed": {"program": (*step["program"], ("call", rng.randrange(len(spec["units"]))))},
        "nested": {"program": (*step["program"], ("late", "apart", (("call", 0),)))},
        "checkpointed": {"program": (("checkpoint", step["program"]),)},
    }
    return plot | {"odd": (rng.randrange(plot["world"]), number, changes[difference])}


def tell(plot: dict[str, Any]) -> str:
    """Run a tale in this rank; return "right", or the error that has ended it."""
    if "odd" in plot:  # process groups of a mesh do not take over the time-out of the default group
        dist.distributed_c10d.default_pg_timeout = timedelta(seconds=PATIENCE)
    try:
        _tell(plot)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "right"


def tell_all(plots: list[dict[str, Any]]) -> list[str]:
    return [tell(plot) for plot in plots]


def _tell(plot: dict[str, Any]) -> None:
    rank, world = dist.get_rank(), plot["world"]
    plains, model = [], _maze(plot)
    for each in range(world):
        plains.append(_maze(plot))
        plains[-1].rank = each
    options = dict(STAGES[plot["stage"]])
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cpu", options["mesh"][world // 4], mesh_dim_names=("replicate", "shard"))
    codec = plot["codec"] and yafsdp_cc.Compression(plot["codec"], residual="fp32")
    units = [unit for unit in model.units if any(True for _ in unit.parameters())]
    sharded: Any = yafsdp_cc.shard(model, units=units, compression=codec, **options)
    for number in range(len(plot["steps"])):
        for each, plain in enumerate(plains):
            _step(plain, _step_of(plot, number, each), _drawn(number, each))
        step = _step_of(plot, number, rank)
        sharded.set_requires_gradient_sync(step["sync"])
        if plot["stage"] == "replicas":
            sharded.set_requires_all_reduce("apart" not in step)
        _step(sharded, step, _drawn(number, rank))
    residuals = internals.mean_residuals_of(sharded) if plot["codec"] else {}
    for name, parameter in internals.sharded_parameters(sharded):
        found = None if parameter.grad is None else parameter.grad.full_tensor()
        if name in residuals and found is not None:
            found = found + residuals[name]  # what was sent, and what is still to come
        _compare(name, found, [plain.get_parameter(name).grad for plain in plains])


def _step_of(plot: dict[str, Any], number: int, rank: int) -> dict[str, Any]:
    """What a rank does in a step."""
    step: dict[str, Any] = plot["steps"][number]
    odd, at, changed = plot.get("odd", (None, None, {}))
    return step | changed if (odd, at) == (rank, number) else step


def _compare(name: str, found: Tensor | None, of_ranks: list[Tensor | None]) -> None:
    parts = [part for part in of_ranks if part is not None]
    if found is None or not parts:
        rest = [*parts, *([] if found is None else [found])]
        assert not any(each.any() for each in rest), f"{name}: one of the gradients is None"
        return
    truth = torch.stack(parts).sum(0) / len(of_ranks)
    off, norm = (found - truth).norm().item(), truth.norm().item()
    assert off <= 1e-6 * max(norm, 1.0), f"{name} is off by {off:.1e} of {norm:.1e}"


def _maze(plot: dict[str, Any]) -> Maze:
    torch.manual_seed(plot["seed"])
    return Maze(plot["spec"])


def _drawn(number: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def _step(model: Any, step: dict[str, Any], x: Tensor) -> None:
    if step["freeze"] is not None:
        name, frozen = step["freeze"]
        dict(internals.sharded_parameters(model))[name].requires_grad_(not frozen)
    loss = loss_of([model(x, step["program"])])
    if loss.requires_grad and step.get("backward", True):
        loss.backward()


@pytest.mark.parametrize("first", _seeds()[::TOGETHER])
def test_backwards_within_backwards(first: int) -> None:
    plots = [tale(seed) for seed in _seeds() if first <= seed < first + TOGETHER]
    for world in (2, 4):
        told = [plot for plot in plots if plot["world"] == world]
        for plot, *found in zip(told, *on_ranks(world, tell_all, told, timeout=TIMEOUT), strict=True):
            if not (set(found) == {"right"} or all(re.search(REFUSED, each) for each in found)):
                text = f"{pprint.pformat(found)}\nThe program was\n{pprint.pformat(plot, width=140)}"
                pytest.fail(text, pytrace=False)


@pytest.mark.parametrize("seed", _seeds() if SOAK else range(len(DIFFERENCES)))
def test_ranks_that_differ_are_right_or_told(seed: int) -> None:
    """A difference that changes no collective is right; any other one is one named error on every rank."""
    plot = tale_of_ranks_that_differ(seed)
    found = on_ranks(plot["world"], tell, plot, timeout=TIMEOUT, patience=PATIENCE)
    if not (set(found) == {"right"} or all(re.search(f"an operation failed: |{REFUSED}", each) for each in found)):
        pytest.fail(f"{pprint.pformat(found)}\nThe program was\n{pprint.pformat(plot, width=140)}", pytrace=False)


AGAIN = ("inner", (("late", "through", (("call", 0),)),))
"""A gradient within the forward whose backward has another one within: each run of the forward adds gradients."""
FOUND_LATE: dict[str, list[dict[str, Any]]] = {
    "run again with weights in an overflow buffer": [
        {"program": (("checkpoint", (("inner", (("call", 2), ("late", "through", (("call", 0),)))), ("call", 1))),)}
    ],
    "run again by an inner gradient, which wants none": [
        {"program": (("checkpoint", (("call", 2), AGAIN, AGAIN, ("call", 1))),)}
    ],
    "run again when the calls of its unit have ended": [
        {"program": (("checkpoint", (("call", 2), ("call", 1), AGAIN, ("inner", ()))),)}
    ],
    "kept for a later step by a unit that is frozen now": [
        {"program": (("call", 0),), "sync": False},
        {"program": (("call", 0),), "sync": False, "freeze": ("enter.weight", True)},
        {"program": (("call", 0),)},
    ],
}
"""Steps of programs that once gave wrong gradients, or none."""


@pytest.mark.parametrize("name", FOUND_LATE)
@ranks(2)
def test_found_late(name: str) -> None:
    spec = {"units": (BLOCK,) * 3, "tied_ends": False, "tied_units": None, "frozen": ("leave.weight",)}
    steps = [{"sync": True, "freeze": None} | step for step in FOUND_LATE[name]]
    for stage, codec in (("zero 3", None), ("replicas", "onebit")):
        plot = {"seed": 0, "world": 2, "spec": spec, "stage": stage, "codec": codec, "steps": steps}
        assert tell(plot) == "right"


# On a GPU, where kernels of other shapes may round otherwise


class Asleep(Naps):
    """Streams that are late: the compute stream at ops of the program and in backward, a lane around collectives."""

    def nap(self) -> None:
        if self.rng.random() < self.chance:
            torch.cuda._sleep(self.rng.choice((20_000, 200_000, 2_000_000)))


class OnGpu(Pair):
    within = 1e-5

    def naps(self, rng: random.Random, chance: float) -> Naps:
        return Asleep(rng, max(chance, 0.1))


def play_on_gpu(seed: int) -> None:
    with torch.device("cuda"), as_it_was():
        play(scenario(seed, world=1) | {"optimizer": "sgd"}, OnGpu)


@ranks(2)
def test_ctrl_c_ends_the_wait_for_ranks_that_do_not_come() -> None:
    loss = yafsdp_cc.shard(torch.nn.Linear(4, 4))(torch.ones(1, 4)).sum()
    if dist.get_rank() == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        signal.setitimer(signal.ITIMER_REAL, 0)
    dist.barrier()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("seed", _seeds()[:12])
def test_programs_on_a_gpu(seed: int) -> None:
    on_ranks(1, play_on_gpu, seed, timeout=TIMEOUT, backend="cpu:gloo,cuda:nccl")


def naps_end() -> None:
    calls = [vars(dist.ProcessGroup)[name] for name in ON_THE_WIRE]
    with as_it_was():
        Naps(random.Random(0), 0.0).on_the_wire()
        assert vars(dist.ProcessGroup)["broadcast"] is not calls[0]
    assert [vars(dist.ProcessGroup)[name] for name in ON_THE_WIRE] == calls
    assert "delayed" not in dist.Work.wait.__name__


def test_naps_end_with_their_program() -> None:
    """Of a rank that stays for other tests, as those on a GPU do."""
    on_ranks(1, naps_end)
