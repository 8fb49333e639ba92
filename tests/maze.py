"""A model whose forward is read from a program, and the generator of random programs: what order fuzzing runs.

A program is a tuple of ops, each a tuple of a name and its operands; a body is a program again. It is plain data, the
same on every rank, and prints as the Python that builds it, so a failing one can be pasted back.

    ("call", u)           run unit u
    ("nest", u, body)     run a body inside unit u
    ("aside", u)          run unit u, drop its output
    ("some", u, ranks)    run unit u; only these ranks use its optional parameter
    ("no_grad", body)     add what a body gives without gradients
    ("detach", body)      add what a body gives from an input without gradients
    ("cut",)              nothing before this gets a gradient
    ("checkpoint", body)  non-reentrant activation checkpoint
    ("inner", body)       add the gradient of a loss of what a body gives, taken within the forward
    ("late", how, body)   a loss of what a body gives, whose backward runs within the backward: through all that is
                          before it ("through"), from an input without gradients ("apart"), for its input alone ("grad")
    ("fail",)             raise in forward, on all ranks
    ("fail_backward",)    raise in backward, on all ranks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    import random

Program = tuple[Any, ...]
Inner = Callable[[Tensor], Tensor]
WIDTH = 16


class Boom(Exception):
    """Raised by a program, on every rank."""


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise Boom


class Late(torch.autograd.Function):
    """Has a backward within its own: of ``loss``, or for the gradient of that with respect to ``leaf``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, aside: list[Any]) -> Tensor:
        ctx.aside = aside
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        loss, leaf = ctx.aside
        if leaf is not None:
            (more,) = torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
            return gradients[0] if more is None else gradients[0] + more, None
        loss.backward(retain_graph=True)
        return gradients[0], None


class Block(nn.Module):
    """Two linear layers and a norm; a body may run between the two."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor, *, inner: Inner | None = None, extra: dict[str, Any] | None = None) -> Tensor:
        y = torch.tanh(self.up(self.norm(x)))
        if inner is not None:
            x = inner(x)
        return x + 0.5 * self.down(y)


class Split(nn.Module):
    """Two outputs in a dict, one of them often unused; inputs nested in a keyword argument; an optional parameter."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, WIDTH, bias=False)
        self.back = nn.Linear(hidden, WIDTH)
        self.optional = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, *, inner: Inner | None = None, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        given = x if extra is None else x + 0.25 * extra["deep"][0]
        if extra is not None and extra["use"]:
            given = given + 0.1 * (given @ self.optional)
        if inner is not None:
            x = inner(x)
        return {"main": x + self.scalar * self.back(torch.tanh(self.left(given))), "others": [self.right(given)]}


class Tied(nn.Module):
    """One matrix used twice under two names."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor, *, inner: Inner | None = None, extra: dict[str, Any] | None = None) -> Tensor:
        y = torch.tanh(self.into(x))
        if inner is not None:
            x = inner(x)
        return x + 0.25 * self.out(y)


class Parent(nn.Module):
    """A unit that holds units: its own weights are used before and after them."""

    def __init__(self, hidden: int, inside: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.inside = nn.ModuleList(inside)

    def forward(self, x: Tensor, *, inner: Inner | None = None, extra: dict[str, Any] | None = None) -> Tensor:
        y = torch.tanh(self.first(x))
        for unit in self.inside:
            x = _main(unit(x))
        if inner is not None:
            x = inner(x)
        return x + 0.5 * self.last(y)


def _main(out: Any) -> Tensor:
    found: Tensor = out["main"] if isinstance(out, dict) else out
    return found


class Maze(nn.Module):
    """``spec`` says which units there are; ``forward`` runs a program over them. ``nap`` is called at every op."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if spec["tied_ends"]:
            self.leave.weight = self.enter.weight
        self.tops = nn.ModuleList(_unit(shape) for shape in spec["units"])
        self.units: list[nn.Module] = []
        for top in self.tops:
            self.units += [top, *top.inside] if isinstance(top, Parent) else [top]
        if spec["tied_units"] is not None:
            one, other = (self.units[index] for index in spec["tied_units"])
            other.up.weight = one.up.weight
        for name in spec["frozen"]:
            self.get_parameter(name).requires_grad_(False)
        self.nap: Callable[[Tensor], Tensor] = lambda x: x
        self.rank: int | None = None
        """That this model stands for, where it is not the process's own."""

    def forward(self, x: Tensor, program: Program) -> Tensor:
        out: Tensor = self.leave(self.run(program, self.enter(x)))
        return out

    def run(self, program: Program, x: Tensor) -> Tensor:
        for op, *operands in program:
            x = getattr(self, f"_{op}")(self.nap(x), *operands)
        return x

    def _call(self, x: Tensor, unit: int) -> Tensor:
        return _main(self.units[unit](x))

    def _nest(self, x: Tensor, unit: int, body: Program) -> Tensor:
        return _main(self.units[unit](x, inner=lambda x: self.run(body, x)))

    def _aside(self, x: Tensor, unit: int) -> Tensor:
        self.units[unit](x)
        return x

    def _some(self, x: Tensor, unit: int, ranks: tuple[int, ...]) -> Tensor:
        extra = {"deep": (x.sin(),), "use": (dist.get_rank() if self.rank is None else self.rank) in ranks}
        out = self.units[unit](x.cos(), extra=extra)
        return x + out["main"] + 0.1 * out["others"][0] if 0 in ranks else x + out["others"][0]

    def _no_grad(self, x: Tensor, body: Program) -> Tensor:
        with torch.no_grad():
            y = self.run(body, x)
        return x + 0.5 * y

    def _detach(self, x: Tensor, body: Program) -> Tensor:
        return 0.5 * x + 0.5 * self.run(body, x.detach())

    def _cut(self, x: Tensor) -> Tensor:
        return x.detach()

    def _checkpoint(self, x: Tensor, body: Program) -> Tensor:
        out: Tensor = checkpoint(self.run, body, x, use_reentrant=False)
        return out

    def _inner(self, x: Tensor, body: Program) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            loss = _loss(self.run(body, leaf))
            found = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
        return x if found is None else x + 0.1 * found

    def _late(self, x: Tensor, how: str, body: Program) -> Tensor:
        start = x if how == "through" else x.detach()
        leaf = start.requires_grad_() if how == "grad" else None
        loss = _loss(self.run(body, start))
        return Late.apply(x, [loss, leaf]) if loss.requires_grad else x  # type: ignore[no-any-return]

    def _fail(self, x: Tensor) -> Tensor:
        raise Boom

    def _fail_backward(self, x: Tensor) -> Tensor:
        return FailsBackward.apply(x)  # type: ignore[no-any-return]


def _loss(x: Tensor) -> Tensor:
    return x.sin().square().mean()


def _unit(shape: tuple[Any, ...]) -> nn.Module:
    kind, hidden, *inside = shape
    if kind == "parent":
        return Parent(hidden, [_unit(each) for each in inside])
    return {"block": Block, "split": Split, "tied": Tied}[kind](hidden)


def kinds(spec: dict[str, Any]) -> list[str]:
    """The kind of every unit, in the order programs number them."""
    return [shape[0] for top in spec["units"] for shape in (top, *top[2:])]


def callers(spec: dict[str, Any]) -> dict[int, int]:
    """Which unit calls a unit, for those inside another."""
    found, index = {}, 0
    for top in spec["units"]:
        found |= {index + 1 + child: index for child in range(len(top[2:]))}
        index += 1 + len(top[2:])
    return found


def calls(program: Program, spec: dict[str, Any]) -> Counter[int]:
    """How often each unit's output can reach a loss through the graph, at most."""
    count: Counter[int] = Counter()
    inside = callers(spec)
    for op, *operands in program:
        if op in ("call", "nest", "some", "aside"):
            count[operands[0]] += 1
            count.update(child for child, parent in inside.items() if parent == operands[0])
        if op in ("nest", "detach", "checkpoint"):
            count += calls(operands[-1], spec)
    return count


def nests(program: Program, spec: dict[str, Any]) -> bool:
    """Whether a unit runs inside another: a gate then sums what reaches it before the rest, so last bits may differ."""
    outer = set(callers(spec).values())
    for op, *operands in program:
        if op == "nest" or (op in ("call", "some", "aside") and operands[0] in outer):
            return True
        if op in ("detach", "checkpoint") and nests(operands[-1], spec):
            return True
    return False


# -- the generator ----------------------------------------------------------------------------------------------------


def random_spec(rng: random.Random, tops: tuple[int, int] = (3, 6)) -> dict[str, Any]:
    """So many units, some with others inside: equal and unequal, some tied, some with frozen pieces."""
    common = rng.choice((16, 24))

    def leaf() -> tuple[Any, ...]:
        return rng.choice(("block", "block", "block", "split", "tied")), rng.choice((common, common, 20, 40))

    def top() -> tuple[Any, ...]:
        if rng.random() < 0.2:
            return ("parent", common, *(leaf() for _ in range(rng.randint(1, 2))))
        return leaf()

    units = tuple(top() for _ in range(rng.randint(*tops)))
    spec: dict[str, Any] = {"units": units, "tied_ends": rng.random() < 0.4, "tied_units": None, "frozen": ()}
    same = [(i, j) for i, a in enumerate(flat(units)) for j, b in enumerate(flat(units)) if i < j and a == b]
    tops = set(range(len(flat(units)))) - callers(spec).keys()  # what siblings share belongs to their parent
    same = [(i, j) for i, j in same if flat(units)[i][0] == "block" and {i, j} <= tops]
    if same and rng.random() < 0.25:
        spec["tied_units"] = rng.choice(same)
    names = [name for name, _ in Maze(spec).named_parameters()]
    if rng.random() < 0.5:
        spec["frozen"] = tuple(sorted(rng.sample(names, k=rng.randint(1, len(names) // 3))))
    if rng.random() < 0.2:
        chosen = f"tops.{rng.randrange(len(units))}."
        spec["frozen"] = tuple(sorted({*spec["frozen"], *(name for name in names if name.startswith(chosen))}))
    return spec


def flat(units: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [shape for top in units for shape in (top, *top[2:])]


def random_program(rng: random.Random, spec: dict[str, Any], world: int, late: float = 0.0) -> Program:
    """In order, or shuffled, skipped, repeated and nested in any way.

    Args:
        late: the share of ops that are late or inner gradients.
    """
    order = list(range(len(kinds(spec))))
    inside = callers(spec)
    style = 1.0 if late else rng.random()
    if style < 0.25:
        return tuple(("call", unit) for unit in order if unit not in inside)
    if style < 0.35:
        return tuple(("call", unit) for unit in reversed(order))
    if style < 0.45:
        rng.shuffle(order)
        return (("checkpoint", tuple(("call", unit) for unit in order)),)
    return tuple(_ops(rng, spec, world, length=rng.randint(2, 7), depth=0, busy=frozenset(), late=late))


def _ops(
    rng: random.Random, spec: dict[str, Any], world: int, length: int, depth: int, busy: frozenset[int], late: float
) -> Iterator[Program]:
    inside = callers(spec)
    free = [unit for unit in range(len(kinds(spec))) if unit not in busy]
    free = [unit for unit in free if not any(inside.get(each) == unit for each in busy)]

    def body(*more: int, late: float = late) -> Program:
        return tuple(_ops(rng, spec, world, rng.randint(1, 3), depth + 1, busy | set(more), late))

    for _ in range(length):
        if late and depth < 3 and rng.random() < late:
            how = rng.choice(("inner", "through", "apart", "grad"))
            # No late one within it: the engine loses gradients of a backward in a forward that a checkpoint runs again.
            yield ("inner", body(late=0.0)) if how == "inner" else ("late", how, body())
            continue
        draw = rng.random()
        unit = rng.choice(free) if free else None
        if unit is None or draw < 0.04:
            yield ("cut",) if rng.random() < 0.3 else ("no_grad", ())
        elif draw < 0.5 or depth > 2:
            yield ("call", unit)
        elif draw < 0.68:
            yield ("nest", unit, body(unit))
        elif draw < 0.73:
            yield ("aside", unit)
        elif draw < 0.83:
            yield _some(rng, spec, world, free) or ("call", unit)
        elif draw < 0.87:
            yield ("no_grad", body())
        elif draw < 0.91:
            yield ("detach", body())
        else:
            yield ("checkpoint", body())


def _some(rng: random.Random, spec: dict[str, Any], world: int, free: list[int]) -> Program | None:
    able = [unit for unit in free if kinds(spec)[unit] == "split"]
    ranks = tuple(rank for rank in range(world) if rng.random() < 0.5)
    return ("some", rng.choice(able), ranks) if able else None


def random_actions(
    rng: random.Random, spec: dict[str, Any], world: int, rounds: tuple[int, int] = (3, 5)
) -> list[Program]:
    """What a training loop does, in a random but legal order. See ``test_order`` for what each action means."""
    names = [name for name, _ in Maze(spec).named_parameters()]
    actions: list[Program] = []
    usual = random_program(rng, spec, world)

    def program() -> Program:
        return usual if rng.random() < 0.5 else random_program(rng, spec, world)

    for _ in range(rng.randint(*rounds)):
        live: list[int] = []
        held = False
        for forwards in range(rng.randint(1, 3)):
            actions.append(("forward", forwards, program()))
            live.append(forwards)
            while live and rng.random() < 0.6:
                held = _backward(rng, actions, live, held)
            if rng.random() < 0.2:
                actions.append(("evaluate", program(), rng.choice(("no_grad", "inference", "direct"))))
            if live and rng.random() < 0.15:
                actions.append(("inputs", rng.choice(live)))
        if live and rng.random() < 0.8:
            actions.append(("backward", tuple(live), False))
        if held:
            actions += [("sync", True), ("forward", 9, program()), ("backward", (9,), False)]
        actions.append(("check",))
        if rng.random() < 0.15:
            body = (*program(), ("fail",) if rng.random() < 0.5 else ("fail_backward",), *program())
            if rng.random() < 0.5:
                body = (("checkpoint", body),)
            actions += [("broken", body), ("zero", True), ("forward", 0, program())]
            actions += [("backward", (0,), False), ("check",)]
        if rng.random() < 0.7:
            actions.append(("step", rng.random() < 0.3))
        if rng.random() < 0.8:
            actions.append(("zero", rng.random() < 0.6))
        if rng.random() < 0.3:
            actions.append(("freeze", rng.choice(names), rng.random() < 0.6))
    return actions


def _backward(rng: random.Random, actions: list[Program], live: list[int], held: bool) -> bool:
    """One backward, of one or more live graphs; whether gradients are held back after it."""
    if rng.random() < 0.25:
        held = not held
        actions.append(("sync", not held))
    chosen = tuple(rng.sample(live, k=rng.randint(1, len(live))))
    keep = rng.random() < 0.25
    actions.append(("backward", chosen, keep))
    if not keep:
        for graph in chosen:
            live.remove(graph)
    return held
