"""``compression="auto"``: every so many steps, what each unit's gradients are encoded by is chosen anew.

    steps     0 ─ 3 ────────── 12 ──────── 20 ─────────────────── 48 ─ … ─ 98 ─ …
              watch, choose    │            │                      │        │
                         watch ┘ compare, choose             watch ┘  watch ┘

Every rank measures how long its backward computes before each reduce (``engine.meter``), and all together try out links
and codecs (``wire.pace``). The slowest of each is what all go by, so that all solve the same problem (``wire.choice``)
and choose alike. That is between two passes, when nothing is under way.

What bytes take from the computation beside them no trial tells: processors that both need, caches. So from the second
choice on, where something shows, some steps are run with as few bytes as there can be, or, if that is what was chosen,
with those that the model asks for. What that gains beyond what the model says is put down to bytes, as their contention
with what is computed (``wire.choice``).

Where something is encoded, and there are more than two ranks, each pair is tried out too: near ranks say more to each
other in the same time (``wire.pairs``).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from functools import cached_property
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from yafsdp_cc.compression import AUTO, EXACT
from yafsdp_cc.engine.comparison import Comparison
from yafsdp_cc.engine.journal import Note
from yafsdp_cc.engine.meter import SAMPLES, Meter
from yafsdp_cc.engine.problem import Problem
from yafsdp_cc.engine.ranks import groups
from yafsdp_cc.engine.survey import plan_for, reduced_bytes
from yafsdp_cc.profiling.spans import Span
from yafsdp_cc.wire import pace
from yafsdp_cc.wire.choice import Leg, Option, contended, exposed, picked
from yafsdp_cc.wire.chosen import ChosenReduce
from yafsdp_cc.wire.pairs import richer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yafsdp_cc.compression import Compression
    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.engine.unit import Unit
    from yafsdp_cc.wire.codec import Codec
    from yafsdp_cc.wire.pairs import Pair

FIRST, PERIOD = 3, 50
"""Optimizer steps before the first choice, and from one to the next: fewer while there is little to go by."""
FULL = (EXACT, "bf16")
"""What near ranks may say besides the candidates, where their links are fast enough."""

_SHOWN = 8
"""Pairs that are named, of near ranks."""
_NOTE = Note.of("choice", "of codecs")
_log = logging.getLogger("yafsdp_cc")


class Chooser:
    """Measures, chooses and switches, for one assembly of a model."""

    def __init__(self, root: Root) -> None:
        assert root.compressed is not None
        self.root = root
        self.meter = root.journal.meter = Meter(root.device)
        self.steps = 0
        """Optimizer steps of this assembly."""
        self.due = FIRST + max(root.compressed.config.warmup_steps - root.compressed.steps, 0)
        """At which the next choice is made."""
        self.problem: Problem | None = None
        """What was chosen for last."""
        self.said = ""
        """What was chosen last, in words."""
        self.tries_pairs = root.world in pace.PAIRED
        """Whether near ranks may say more to each other."""
        self._paces: dict[Pair, float] = {}
        self._near: Mapping[str, Mapping[Pair, str]] = {}
        self._comparison: Comparison | None = None
        self._contention = 0.0
        """Seconds that a byte takes from the computation beside it."""
        self._span = Span("choice")
        self._stamps: tuple[tuple[int, ...], ...] = ()
        self._when = 0.0
        self._lasted: deque[float] = deque(maxlen=SAMPLES)

    @classmethod
    def of(cls, root: Root) -> Chooser | None:
        """That of an engine, where there is something to choose."""
        flats = [flat for draft in root.drafts for flat in draft.flats]
        return cls(root) if root.world > 1 and any(flat.codec == AUTO for flat in flats) else None

    def look(self) -> None:
        """A pass begins: count steps, and choose when that is due."""
        stamps = tuple([unit.stamp() for unit in self.root.units])
        if stamps == self._stamps:
            return
        now = time.perf_counter()
        if self._stamps:
            self.steps += 1
            self._lasted.append(now - self._when)
            if self.root.plan.residual_bytes != self.root.reductions.residual_bytes:  # what was owed has been said
                self.root.plan = plan_for(self.root)
        self._stamps, self._when = stamps, now
        self.meter.watches = self.steps >= self.due - SAMPLES
        if self.steps >= self.due and self._is_idle:
            with self._span:
                self._choose()
            self._when = time.perf_counter()

    @property
    def _is_idle(self) -> bool:
        """Whether all that was to be reduced has been. Ranks run the same program, so they agree on it."""
        return self.root.reductions.is_idle and all(unit.gradient_space is None for unit in self.root.units)

    def _choose(self) -> None:
        if self._comparison is not None:
            comparison, self._comparison = self._comparison, None
            mesh = self.root.drafts[0].ranks.mesh
            self._contention = comparison.contention(median(self._lasted), mesh, self.root.device)
            self._settle(comparison.problem, comparison.before)
            return
        problem = self.measure()
        if problem is None:
            return  # no backward yet: after the next step
        self.meter.watches = False
        self.meter.forget()
        before = self.picks(problem)
        if self.problem is not None:
            self._comparison = Comparison.of(problem, before, median(self._lasted))
        if self._comparison is None:
            self._settle(problem, before)
        else:
            self.due = self.steps + SAMPLES
            self.apply(problem, self._comparison.other)

    def _settle(self, problem: Problem, before: list[int]) -> None:
        """Choose, where the problem was measured under the choice ``before``, and switch."""
        self.due = self.steps + min(PERIOD, 3 * self.steps)
        if self._contention and any(problem.choose()):
            problem = problem._replace(legs=tuple(contended(problem.legs, before, self._contention)))
        after = problem.choose() if self.problem is None else problem.choose_from(before)
        self.apply(problem, after, self._richer(problem, after))
        counters = self.root.counters
        counters.why = self._why(problem, before, after)
        replicas = self.root.reductions.replicas
        if self.root.reductions.exchange.rank == 0 and (replicas is None or replicas.group.rank() == 0):
            _log.info("compression='auto' after %d steps: %s; %s", self.steps, counters.why, self.said)

    # What is measured ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self) -> Problem | None:
        """What all ranks have found. A collective, with nothing under way."""
        root = self.root
        if root.device.type == "cuda":
            torch.cuda.synchronize(root.device)
        measured = self.meter.measured()
        if not (measured and self._lasted and self._reduces):
            return None
        owners = {flat: unit for unit in root.units for flat in unit.flats}
        units = tuple(owners[each.flat] for each in measured)
        root.journal.write(_NOTE)
        link = pace.pace_of(root.reductions.post, self._room)
        numbers = [
            *(each.seconds for each in measured),
            *(each.gathered for each in measured),
            *self._work.values(),
            *self._errors.values(),
            median(self._lasted),
            *link,
        ]
        agreed = torch.tensor(numbers, dtype=torch.float64, device=root.device)
        for group in groups(root.drafts[0].ranks.mesh):
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        found = iter(agreed.tolist())
        computes, gathered = ([next(found) for _ in units] for _ in range(2))
        work, errors = ({name: next(found) for name in names} for names in (self._work, self._errors))
        step, link = next(found), pace.Pace(next(found), next(found))
        legs = tuple(
            Leg(
                compute,
                tuple(self._options(unit, link, extra, work, errors)),
                self._awaited(units, place),
            )
            for place, (unit, compute, extra) in enumerate(zip(units, computes, gathered, strict=True))
        )
        elements = sum(flat.layout.numel for unit in units for flat in self._autos(unit))
        share = self._config.error_budget
        return Problem(units, legs, step, link, float("inf") if share is None else share * elements, errors)

    def _options(
        self, unit: Unit, link: pace.Pace, gathered: float, work: dict[str, float], errors: dict[str, float]
    ) -> list[Option]:
        """Exact sums of a unit, and each codec that says less in fewer bytes than those before."""
        autos = self._autos(unit)
        reduces = [self._reduces[flat] for flat in autos]
        others = [flat for flat in unit.flats if flat.trainable and flat not in autos]
        fixed = gathered + sum(reduced_bytes(self.root, flat) for flat in others)
        options: list[Option] = []
        sent = float("inf")
        for codec in (None, *sorted(self._codecs, key=lambda each: errors[each.name])):
            name = EXACT if codec is None else codec.name
            size = sum(reduce.said_by(codec) for reduce in reduces)
            if size >= sent or (codec is not None and not autos):
                continue
            sent = size
            elements = sum(flat.layout.numel for flat in autos)
            # Where a codec takes less of the processor than an exact sum does, that is no reason to lose bits.
            took, wire = elements * max(work[name], work[EXACT]), link.seconds(int(fixed + size))
            if self.root.device.type == "cuda":  # the lane does both, one after the other
                took, wire = 0.0, wire + took
            options.append(Option(name, wire, took, elements * errors.get(name, 0.0), size))
        return options

    def _awaited(self, units: Sequence[Unit], place: int) -> int:
        """Whose reduce has to be over before a unit's backward begins."""
        if self.root.reductions.lane.stream() is None:
            return max(place - 2, -1)  # the one before is sent when that is over
        spaces = [unit.gradient_home for unit in units]
        mine = spaces[place]
        same = [at for at, space in enumerate(spaces[:place]) if space and mine and space.slot is mine.slot]
        return same[-1] if same else -1

    @cached_property
    def _work(self) -> dict[str, float]:
        """Seconds of a rank's own for each element, by codec."""
        root, flats = self.root, list(self._reduces)
        block = self._config.block
        chunk = min(max(flat.layout.chunk for flat in flats), pace.TRIAL // (root.world - 1)) // block * block
        kept, wire = self._config.residual_dtype, flats[0].wire
        return {
            EXACT if codec is None else codec.name: pace.work_of(codec, root.world, chunk, wire, kept, root.device)
            for codec in (None, *self._codecs)
        }

    @cached_property
    def _errors(self) -> dict[str, float]:
        """What is left out for each element, by codec."""
        return {name: pace.left_out(self._config.make(name)) for name in (*FULL, *self._config.candidates)}

    @property
    def _room(self) -> int:
        """Bytes of each message that there is room for."""
        return max(reduce.room for reduce in self._reduces.values())

    @property
    def _config(self) -> Compression:
        assert self.root.compressed is not None
        return self.root.compressed.config

    @cached_property
    def _codecs(self) -> list[Codec]:
        return [self._config.make(name) for name in self._config.candidates]

    @property
    def _reduces(self) -> dict[Flat, ChosenReduce]:
        """Of all flats that are chosen for."""
        found = {flat: self.root.reductions.encoded_of(flat) for unit in self.root.units for flat in unit.flats}
        return {flat: each for flat, each in found.items() if isinstance(each, ChosenReduce)}

    def _autos(self, unit: Unit) -> list[Flat]:
        return [flat for flat in unit.flats if isinstance(self.root.reductions.encoded_of(flat), ChosenReduce)]

    # What is chosen ------------------------------------------------------------------------------------------------

    def picks(self, problem: Problem) -> list[int]:
        """The present choice."""
        chosen = [self._chosen(unit) for unit in problem.units]
        return [
            next((number for number, option in enumerate(leg.options) if option.codec == name), 0)
            for leg, name in zip(problem.legs, chosen, strict=True)
        ]

    def _chosen(self, unit: Unit) -> str:
        assert self.root.compressed is not None
        return next((self.root.compressed.chosen.get(flat, EXACT) for flat in self._autos(unit)), EXACT)

    def _richer(self, problem: Problem, picks: Sequence[int]) -> dict[str, dict[Pair, str]]:
        """Of each codec that is chosen, what near ranks say more by. A collective where something is encoded."""
        codecs = {option.codec for option in picked(problem.legs, picks)} - {EXACT}
        if not (codecs and self.tries_pairs):
            return {}
        self._paces = pace.paces_between(self.root.reductions.post, self._room)
        bits = {name: self._config.bits(name) for name in sorted(problem.errors, key=lambda name: problem.errors[name])}
        return {codec: richer(self._paces, codec, bits) for codec in codecs}

    def apply(
        self, problem: Problem, picks: Sequence[int], near: Mapping[str, Mapping[Pair, str]] = MappingProxyType({})
    ) -> None:
        """Switch to this choice, and near ranks to what ``near`` has for their pairs instead of each codec of it.

        A collective, with nothing under way.
        """
        self.problem, self._near = problem, near
        rank = self.root.reductions.exchange.rank
        mine = {
            codec: {sum(pair) - rank: name for pair, name in pairs.items() if rank in pair}
            for codec, pairs in near.items()
        }
        root, compressed = self.root, self.root.compressed
        assert compressed is not None
        with torch.inference_mode(False):  # what is made here is trained with
            for unit, leg, pick in zip(problem.units, problem.legs, picks, strict=True):
                for flat in self._autos(unit):
                    codec = leg.options[pick].codec
                    compressed.choose(flat, self._reduces[flat], codec, mine.get(codec, {}))
        if root.device.type == "cuda":
            torch.cuda.synchronize(root.device)
        chosen = {unit.name: self._told(self._chosen(unit)) for unit in root.units if self._autos(unit)}
        root.counters.chosen = root.counters.chosen | chosen  # the guard's stay
        self.said = _words(chosen)
        root.plan = plan_for(root)

    def _why(self, problem: Problem, before: Sequence[int], after: Sequence[int]) -> str:
        legs, link = problem.legs, problem.link
        rate = f"{8e-6 / link.per_byte:,.0f} Mbit/s" if link.per_byte else "faster than can be told"
        took = 1e3 * sum(leg.compute for leg in legs)
        exact, was, shows = (1e3 * exposed(legs, picks) for picks in ([0] * len(legs), before, after))
        left = self._left_out(problem, after)
        near = sorted({pair for pairs in self._near.values() for pair in pairs})
        times = max(self._paces.values()) / max(self._paces[pair] for pair in near) if near else 1.0
        pairs = ", ".join([f"{one}-{other}" for one, other in near[:_SHOWN]] + ["…"] * (len(near) > _SHOWN))
        return (
            f"links carry {rate} each way, a backward computes {took:.0f} ms of a step's {1e3 * problem.step:.0f}; the "
            f"wire adds {exact:.1f} ms if all is exact, {was:.1f} as it was, {shows:.1f} as chosen, which leaves "
            f"{left:.2g} of squares for later"
            + (
                f"; a megabyte takes {1e9 * self._contention:.1f} ms from the computation beside it"
                if self._contention
                else ""
            )
            + (f"; links between ranks {pairs} are {times:.2g} times as fast as the slowest" if near else "")
        )

    def _left_out(self, problem: Problem, picks: Sequence[int]) -> float:
        """The share of squares that all messages of all ranks leave out."""
        pairs, total, elements = math.comb(self.root.world, 2), 0.0, 0
        for unit, option in zip(problem.units, picked(problem.legs, picks), strict=True):
            numel = sum(flat.layout.numel for flat in self._autos(unit))
            near = self._near.get(option.codec, {})
            shares = [problem.errors[name] for name in near.values()]
            total += numel * (sum(shares) + (pairs - len(near)) * problem.errors[option.codec]) / pairs
            elements += numel
        return total / max(elements, 1)

    def _told(self, codec: str) -> str:
        """A codec in words, and that of near ranks."""
        near = sorted(set(self._near.get(codec, {}).values()))
        return f"{codec} ({' or '.join(near)} between near ranks)" if near else codec


def _words(chosen: dict[str, str]) -> str:
    """``int4 for blocks.0, tokens; exact sums for the other 5``."""
    by_codec: dict[str, list[str]] = {}
    for name, codec in chosen.items():
        by_codec.setdefault(codec, []).append(name or "the root")
    exact = len(by_codec.pop(EXACT, []))
    parts = [f"{codec} for {', '.join(names)}" for codec, names in sorted(by_codec.items())]
    if exact:
        parts.append(f"exact sums for {f'the other {exact}' if parts else f'all {exact} units'}")
    return "; ".join(parts)
