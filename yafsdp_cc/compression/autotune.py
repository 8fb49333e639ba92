"""Chooses the gradient codecs of ``compression="auto"``: only exposed reduces are worth compressing.

Optimizer steps 3, 12, 48, 98, ... are each followed by a tuning, before the next forward. Ranks have timed their
backwards before; a tuning times the network and the codecs, and one all-reduce finds the slowest rank's time of each.
Then every rank solves the same problem (``choose_codecs``): the codecs of least compression error with which a backward
is at most 1% of a step longer than the shortest possible.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.config import EXACT
from yafsdp_cc.compression.error_feedback import RECEIVED, SENT, Residual, lost_share
from yafsdp_cc.compression.reduce_scatter import CompressedReduceScatter
from yafsdp_cc.compression.schedule import CompressionObserver
from yafsdp_cc.compression.state import set_codecs
from yafsdp_cc.plan.memory import regathered
from yafsdp_cc.profiling import span

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.communicator import CommContext
    from yafsdp_cc.engine.param import FlatParam
    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.state import FSDPState

FIRST, PERIOD = 3, 50
"""Optimizer steps before the first tuning, and the most between two tunings; early ones follow each other sooner."""
SAMPLES = 8
"""Number of backwards and steps before a tuning that are timed."""
TOLERANCE = 0.01
"""Share of a step's time that a backward may lose for codecs of less error; timings are no more exact than this."""

_log = logging.getLogger("yafsdp_cc")


class LinkCost(NamedTuple):
    """Time of an all-to-all, in which every rank sends to all others."""

    latency: float
    """Seconds of an all-to-all of messages of next to no bytes."""
    per_byte: float
    """Seconds for each byte that a rank sends."""


_TRIAL = 1 << 20
"""Bytes that a rank sends in one trial exchange, at most: a tenth of a second at 100 Mbit/s."""
_SMALL = 64
_MOST = 8
"""Largest number of small exchanges timed in a row: one alone may be a burst that a switch lets through too fast."""


def measure_link(context: CommContext, message_bytes: int) -> LinkCost:
    """Time all-to-alls of messages up to ``message_bytes``; return the slowest rank's times.

    ``measure_link`` is a collective; nothing else may be in flight.
    """
    comm, peers = context.comm, context.comm.world - 1
    size = max(min(message_bytes, _TRIAL // peers) // _SMALL * _SMALL, _SMALL)
    repeats = min(max(_TRIAL // (peers * size), 1), _MOST)

    def exchange(size: int, repeats: int) -> float:
        """Return the seconds of ``repeats`` exchanges, the best of three trials: other work only slows trials down."""
        for name in (RECEIVED, SENT):
            context.scratch.reserve(name, peers * size)
        received, sent = (
            context.scratch.take(name, peers * size, torch.uint8).view(peers, size) for name in (RECEIVED, SENT)
        )

        def run() -> None:
            for work in comm.exchange(received, sent, async_op=True):
                work.wait()

        found = []
        for _ in range(3):
            seconds = torch.tensor([_seconds(comm.device, *[run] * repeats)], dtype=torch.float64, device=comm.device)
            # The all-reduce is also a barrier: a rank that starts late would add its delay to the others' next times.
            comm.group.allreduce([seconds], dist.ReduceOp.MAX).wait()
            found.append(float(seconds))
        return min(found)

    latency, longest = exchange(_SMALL, 1), exchange(size, repeats)
    return LinkCost(latency, max(longest / repeats - latency, 0.0) / (peers * size))


def seconds_per_element(codec: Codec, gradients: Tensor, residual_dtype: torch.dtype | None) -> float:
    """Return the seconds that a rank needs to encode, decode and sum an element of a reduce-scatter.

    Args:
        gradients: [other ranks, chunk], values to try ``codec`` with.
    """
    (peers, chunk), device = gradients.shape, gradients.device
    messages = torch.zeros(peers, codec.message_bytes(chunk), dtype=torch.uint8, device=device)
    residual = None
    if residual_dtype is not None:
        residual = Residual.zeros(peers, chunk, residual_dtype, codec.block, device)
    total = torch.zeros(chunk, dtype=torch.float32, device=device)
    encode = partial(error_feedback.encode, codec, gradients, messages, residual=residual)
    decode_sum = partial(error_feedback.decode_sum, codec, messages, chunk, gradients[0], 0, total)
    return min(_seconds(device, encode, decode_sum) for _ in range(3)) / (peers + 1) / chunk


def _seconds(device: torch.device, *runs: Callable[[], object]) -> float:
    """Time ``runs`` in seconds, the work that they enqueue on the device included."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize(device)
    start = time.perf_counter()
    for run in runs:
        run()
    synchronize(device)
    return time.perf_counter() - start


class BackwardTimer(CompressionObserver):
    """Measures how long backwards compute before each reduce: by the clock on a CPU, by events on CUDA.

    Recording a CUDA event does not synchronize; only ``medians`` needs the device synchronized.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enabled = False
        self._finished: deque[list[tuple[str, list[tuple[Any, Any]]]]] = deque(maxlen=SAMPLES)
        """Finished backwards: for each its groups, with the (start, end) of the computations before their reduces."""
        self._current: list[tuple[str, list[tuple[Any, Any]]]] | None = None
        """Groups of the backward under way, as in ``_finished``; None while no backward is timed."""
        self._spans: list[tuple[Any, Any]] = []
        self._start: Any = None
        """Start of the computation under way, by ``_now``; None while the backward issues a reduce or waits."""
        self._waits = False

    def assembled(self, state: object) -> None:
        super().assembled(state)
        self.clear()
        self._current = None

    def before_backward(self) -> None:
        """Start to time a backward, and drop one that an exception ended before ``after_backward``."""
        self._current, self._spans = [] if self.enabled else None, []
        self._go_on()

    def before_reduce(self, group: str) -> None:
        if self._current is not None:
            self._stop()
            self._current.append((group, self._spans))
            self._spans = []

    def after_reduce(self, group: str) -> None:
        self._go_on()  # the time to encode gradients and issue a reduce is no computation of the backward

    def before_wait(self) -> None:
        self._waits |= self._stop()

    def after_wait(self) -> None:
        if self._waits:
            self._go_on()

    def after_backward(self) -> None:
        if self._current:
            self._finished.append(self._current)
        self._current = None

    def clear(self) -> None:
        """Forget all measurements."""
        self._finished.clear()

    def medians(self) -> list[tuple[str, float]]:
        """Return each group and the seconds of computation before its reduce, in the order of the last backward.

        The seconds are medians over the backwards that had the same order.
        """
        order = [group for group, _ in self._finished[-1]] if self._finished else []
        same = [each for each in self._finished if [group for group, _ in each] == order]
        same = same[1:] if len(same) > 2 else same  # in the first backward caches were cold
        return [
            (group, median(sum(_between(*span) for span in each[index][1]) for each in same))
            for index, group in enumerate(order)
        ]

    def _go_on(self) -> None:
        if self._current is not None:
            self._start, self._waits = self._now(), False

    def _stop(self) -> bool:
        """Record the end of the timed computation under way; return whether there was one."""
        if self._current is None or self._start is None:
            return False
        self._spans.append((self._start, self._now()))
        self._start = None
        return True

    def _now(self) -> Any:
        device = self.state.context.device
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event


def _between(start: Any, end: Any) -> float:
    """Return the seconds between two results of ``BackwardTimer._now``."""
    return float(start.elapsed_time(end) / 1e3 if isinstance(start, torch.cuda.Event) else end - start)


class Measurement(NamedTuple):
    """Times and errors that the choice of codecs is based on, the same on all ranks."""

    groups: tuple[ParamGroup, ...]
    costs: tuple[GroupCosts, ...]
    """Costs of each group, in the order of the backward."""
    step: float
    """Seconds from one optimizer step to the next."""
    link: LinkCost


# How long a backward takes with given codecs, and which codecs hide its reduces: pure functions --------------------
#
# A backward computes the gradients of one parameter group after another, and issues the reduce-scatter of each:
#
#     compute   | group 0 | group 1 | group 2 |   |
#     network             | reduce 0  | reduce 1  | reduce 2 |
#                                     ^ if group 2 is to write into the gradient buffer of group 0, it starts here
#
# A reduce is exposed where it lasts longer than what is computed meanwhile; the last one always is.
#
# Source: that only exposed communication is worth compressing is from Song et al., "Optimus-CC" (2023), who select
# pipeline stages by hand.

SLACK = 0.1
"""Share by which ``adjust_codecs`` varies the network's speed: a codec in use stays if between the two choices."""
_ROUNDING = 1e-9
"""Relative difference below which two times count as equal."""


class CodecCost(NamedTuple):
    """Seconds and error of reducing the gradients of one group with one codec."""

    codec: str
    network: float
    """Seconds on the network, all-gathers of weights between this reduce and the next included."""
    host: float = 0.0
    """Seconds in which the computing thread encodes, decodes and sums. On CUDA they are part of ``network``."""
    error: float = 0.0
    """Relative squared error of a message, times the group's share of all elements."""


class GroupCosts(NamedTuple):
    """Costs of reducing one parameter group; lists of ``GroupCosts`` are in the order in which a backward reduces."""

    compute: float
    """Seconds of computation from the moment the group before issues its reduce until this group issues its own."""
    codecs: tuple[CodecCost, ...]
    """Costs of each codec: the first is exact, each later one has a larger error and takes less of the network."""
    waits_for: int = -1
    """Index of the group whose reduce must have finished before this group's computation starts; -1: none."""


def backward_seconds(groups: Sequence[GroupCosts], picks: Sequence[int]) -> float:
    """Return how long a backward takes, the end of its last reduce included.

    The network carries one reduce at a time. A thread that encodes (``host``) first waits for the previous reduce.

    Args:
        picks: for each group, the index of its codec in ``codecs``.
    """
    return _simulate(groups, picks).seconds


def total_error(groups: Sequence[GroupCosts], picks: Sequence[int]) -> float:
    """Return the relative squared error of messages, averaged over elements. Args as of ``backward_seconds``."""
    return sum(group.codecs[pick].error for group, pick in zip(groups, picks, strict=True))


def choose_codecs(
    groups: Sequence[GroupCosts], tolerance: float = 0.0, error_budget: float = float("inf")
) -> list[int]:
    """Return each group's index into its ``codecs``: least error within ``tolerance`` seconds of the shortest backward.

    Greedy: while the backward exceeds the limit, a reduce on its critical path takes the codec that adds the least
    error per second saved; among equals the last one in the backward, which delays no other reduce. Afterwards groups
    return to codecs of less error where the backward stays within the limit, the largest error first.
    """
    tried = list(_tightened(groups, error_budget))
    limit = (min(seconds for seconds, _ in tried) + tolerance) * (1 + _ROUNDING)
    picks = next(picks for seconds, picks in tried if seconds <= limit)
    returns = sorted(
        (_rounded(cost.error - group.codecs[pick].error), index, number)
        for index, (group, pick) in enumerate(zip(groups, picks, strict=True))
        for number, cost in enumerate(group.codecs[:pick])
    )
    for _, index, number in returns:
        changed = [*picks[:index], number, *picks[index + 1 :]]
        if number < picks[index] and backward_seconds(groups, changed) <= limit:
            picks = changed
    return picks


def adjust_codecs(
    groups: Sequence[GroupCosts], current: Sequence[int], tolerance: float = 0.0, error_budget: float = float("inf")
) -> list[int]:
    """Return ``current`` clamped between the picks of ``choose_codecs`` for networks ``SLACK`` faster and slower."""
    fast, slow = (choose_codecs(_scaled(groups, 1 + sign * SLACK), tolerance, error_budget) for sign in (-1, 1))
    kept = [min(max(pick, min(ends)), max(ends)) for pick, *ends in zip(current, fast, slow, strict=True)]
    return kept if total_error(groups, kept) <= error_budget else choose_codecs(groups, tolerance, error_budget)


class _Moment(NamedTuple):
    seconds: float
    path: tuple[int, ...] = ()
    """Indices of the reduces on the critical path to this time."""

    def plus(self, seconds: float) -> _Moment:
        return _Moment(self.seconds + seconds, self.path)


def _simulate(groups: Sequence[GroupCosts], picks: Sequence[int]) -> _Moment:
    """Return the time at which a backward ends."""
    computed = reduced = _Moment(0.0)
    ends: list[_Moment] = []
    for index, (group, pick) in enumerate(zip(groups, picks, strict=True)):
        cost = group.codecs[pick]
        started = _later(ends[group.waits_for], computed) if group.waits_for >= 0 else computed
        computed = started.plus(group.compute)
        issued = _later(reduced, computed)
        if cost.host:
            computed = issued = issued.plus(cost.host)
        reduced = _Moment(issued.seconds + cost.network, (*issued.path, index))
        ends.append(reduced)
    return _later(reduced, computed)


def _later(reduced: _Moment, computed: _Moment) -> _Moment:
    return reduced if reduced.seconds >= computed.seconds else computed


def _tightened(groups: Sequence[GroupCosts], error_budget: float) -> Iterator[tuple[float, list[int]]]:
    """Yield seconds of a backward, and each group's index of its codec: first all groups exact, then with the codec of
    one more group changed, the one whose error grows least for the time that it saves."""
    picks, error = [0] * len(groups), 0.0
    while True:
        end = _simulate(groups, picks)
        yield end.seconds, picks
        moves = [
            (_rounded((cost.error - now.error) / (now.network - cost.network)), -index, number)
            for index in end.path
            for now in (groups[index].codecs[picks[index]],)
            for number, cost in enumerate(groups[index].codecs)
            if cost.network < now.network and error - now.error + cost.error <= error_budget
        ]
        if not moves:
            return
        _, negative, number = min(moves)
        picks = [*picks[:-negative], number, *picks[1 - negative :]]
        error = total_error(groups, picks)


def _scaled(groups: Sequence[GroupCosts], factor: float) -> list[GroupCosts]:
    """Return the groups' costs on a network that is slower by ``factor``."""
    return [
        group._replace(codecs=tuple(cost._replace(network=factor * cost.network) for cost in group.codecs))
        for group in groups
    ]


def _rounded(value: float) -> float:
    """Round to 9 digits: a sum differs in later digits when its terms are added in another order."""
    return float(f"{value:.9g}")


# The observer --------------------------------------------------------------------------------------------------------


class CodecAutotuner(CompressionObserver):
    """Changes the codecs of a model's parameter groups between optimizer steps, by the times of its backwards.

    Only ``before_forward`` communicates, and only while no reduce is in flight. The measurements start anew whenever
    the engine is assembled.
    """

    def __init__(self, schedule: CompressionSchedule) -> None:
        super().__init__()
        self.timer = BackwardTimer()
        self.steps = 0
        self.next_tuning = FIRST
        """Number of the optimizer step after which codecs are chosen next."""
        self.last: Measurement | None = None
        """The measurement that the present codecs were chosen by."""
        self.summary = ""
        self._schedule = schedule
        self._config = schedule.config
        self._candidates = [self._config.make(name) for name in self._config.candidates]
        self._errors = {EXACT: 0.0, **{codec.name: lost_share(codec.name, codec.block) for codec in self._candidates}}
        self._work: dict[str, float] = {}
        """Seconds per element to encode, decode and sum, by codec, once measured; 0 for exact sums."""
        self._stepped = 0.0
        self._step_seconds: deque[float] = deque(maxlen=SAMPLES)

    def assembled(self, state: object) -> None:
        super().assembled(state)
        self.steps, self.last, self.summary = 0, None, ""
        self._versions, self._stepped = (), 0.0
        self.next_tuning = FIRST + max(self._config.warmup_steps - self._schedule.steps, 0)
        self._step_seconds.clear()

    def before_forward(self) -> None:
        """Count an optimizer step if parameters have changed, and tune when that is due, which is a collective."""
        if self.state.context.gather.comm.world == 1:
            return
        is_step, now = self.weights_have_changed(), time.perf_counter()
        if self._stepped and not is_step:
            return
        if is_step:
            self.steps += 1
            self._step_seconds.append(now - self._stepped)
        self._stepped = now
        # No codec may change while residuals hold deferred gradients. ``is_idle`` is the same on all ranks.
        if self.steps >= self.next_tuning and self.state.is_idle:
            with span("choice"):
                self.tune()
            self._stepped = time.perf_counter()
        self.timer.enabled = self.steps >= self.next_tuning - SAMPLES

    def tune(self) -> None:
        """Measure, choose codecs and switch to them. A collective; no reduce may be in flight."""
        found = self.measure()
        if found is None:
            return  # no backward was timed yet: tune after the next step
        self.timer.clear()
        self.next_tuning = self.steps + min(PERIOD, 3 * self.steps)
        limits = TOLERANCE * found.step, self._config.error_budget or float("inf")
        current = [
            next((number for number, cost in enumerate(costs.codecs) if cost.codec == _codec_of(group)), 0)
            for group, costs in zip(found.groups, found.costs, strict=True)
        ]
        is_first, self.last = self.last is None, found
        picks = choose_codecs(found.costs, *limits) if is_first else adjust_codecs(found.costs, current, *limits)
        chosen = zip(found.groups, found.costs, picks, strict=True)
        self.set_codecs({group: costs.codecs[pick].codec for group, costs, pick in chosen})
        why = self.state.context.counters.why = _explain(found, current, picks)
        if dist.get_rank() == self.state.context.info.first_rank:
            _log.info("compression='auto' after %d steps: %s; %s", self.steps, why, self.summary)

    def set_codecs(self, codecs: Mapping[ParamGroup, str]) -> None:
        """Have gradients reduced with ``codecs``, one for each group. A collective; no reduce may be in flight."""
        chosen = {group: codecs.get(group, _codec_of(group)) for group in self.state.groups if _tuned(group)}
        set_codecs(self.state, {flat: codec for group, codec in chosen.items() for flat in _tuned(group)})
        self.summary = _summary({group.name: codec for group, codec in chosen.items()})

    @torch.no_grad()
    def measure(self) -> Measurement | None:
        """Return the slowest rank's measurements; None before the first step. A collective."""
        state = self.state
        torch.get_device_module(state.context.device).synchronize(state.context.device)
        times = self.timer.medians()
        tuned = {flat: each for group in state.groups for flat, each in _tuned(group).items()}
        if not (times and tuned and self._step_seconds):
            return None
        state.context.fingerprint.agree("autotune", "codecs")
        longest = max(max(flat.layout.chunks) for flat in tuned)
        link = measure_link(state.context.reduce, max(codec.message_bytes(longest) for codec in self._candidates))
        self._work = self._work or self._measure_work(list(tuned))
        computes = [seconds for _, seconds in times]
        # All-reduce errors, too: they may differ in the last bit between processors, and so might the ranks' choices.
        numbers = (link, [median(self._step_seconds)], self._work.values(), self._errors.values(), computes)
        slowest = torch.tensor(
            [each for some in numbers for each in some], dtype=torch.float64, device=state.context.device
        )
        self.reduce_measurements(slowest, dist.ReduceOp.MAX)
        found = [part.tolist() for part in slowest.split([len(some) for some in numbers])]
        link, (step,), work, errors, computes = LinkCost(*found[0]), *found[1:]
        elements = sum(flat.layout.numel for flat in tuned)
        codecs = sorted(zip(self._errors, work, (each / elements for each in errors), strict=True), key=itemgetter(2))
        named = {group.name: group for group in state.groups}
        groups = tuple(named[name] for name, _ in times)
        costs = [
            GroupCosts(seconds, self._costs(group, link, codecs), waits_for)
            for group, seconds, waits_for in zip(groups, computes, _buffer_waits(state, groups), strict=True)
        ]
        return Measurement(groups, tuple(costs), step, link)

    def _measure_work(self, flats: Sequence[FlatParam]) -> dict[str, float]:
        config, peers = self._config, self.state.context.gather.comm.world - 1
        most = max(_TRIAL // peers // config.block, 1) * config.block  # a trial encodes a block or more for each rank
        chunk = min(max(max(flat.layout.chunks) for flat in flats), most)
        # a rank encodes the chunks of all other ranks
        gradients = torch.zeros(peers, chunk, dtype=flats[0].reduce_dtype, device=self.state.context.device)
        work = {codec.name: seconds_per_element(codec, gradients, config.residual_dtype) for codec in self._candidates}
        return {EXACT: 0.0, **work}

    def _costs(
        self, group: ParamGroup, link: LinkCost, codecs: Sequence[tuple[str, float, float]]
    ) -> tuple[CodecCost, ...]:
        """Return the cost of exact sums, and of each codec that sends fewer bytes than all codecs of less error.

        ``codecs`` holds names, seconds of work per element, and errors, sorted by error: exact sums first.
        """
        tuned = _tuned(group)
        others = [flat for flat in group.flats if flat.trainable and flat not in tuned]
        fixed = sum(flat.reduce_scatter.planned_bytes() for flat in others)
        if group in regathered(self.state):  # the backward gathers the group's weights again, on the same network
            fixed += sum(flat.all_gather.planned_bytes() for flat in group.flats)
        elements = sum(flat.layout.numel for flat in tuned)
        costs: list[CodecCost] = []
        fewest = float("inf")
        for name, work, error in codecs:
            sent = sum(reduce_scatter.bytes_with(name) for reduce_scatter in tuned.values())
            if costs and sent >= fewest:
                continue
            fewest = sent
            host, network = elements * work, link.latency + link.per_byte * (fixed + sent)
            if self.state.context.device.type == "cuda":  # the stream of the reduces encodes, not the host
                host, network = 0.0, network + host
            costs.append(CodecCost(name, network, host, elements * error))
        return tuple(costs)


def _tuned(group: ParamGroup) -> dict[FlatParam, CompressedReduceScatter]:
    """Return the flat parameters of ``group`` whose codec is tuned, and their reduce-scatters."""
    found = {flat: flat.reduce_scatter for flat in group.flats if flat.sharded_grad is not None}
    return {flat: each for flat, each in found.items() if isinstance(each, CompressedReduceScatter) and each.is_tuned}


def _codec_of(group: ParamGroup) -> str:
    return next((reduce_scatter.codec_name for reduce_scatter in _tuned(group).values()), EXACT)


def _buffer_waits(state: FSDPState, groups: Sequence[ParamGroup]) -> list[int]:
    """Return, for each group, the index of the last group whose reduce must end before it computes, or -1."""
    if not state.context.reduce_stream.is_ordered:  # on a CPU a reduce ends before the next is issued
        return [max(index - 2, -1) for index in range(len(groups))]
    last: dict[int, int] = {}
    waits = []
    for index, group in enumerate(groups):
        pool = state.context.grad_pools.get(group.role)
        buffer = id(group if pool is None else pool.assigned(group.index))
        waits.append(last.get(buffer, -1))
        last[buffer] = index
    return waits


def _explain(found: Measurement, before: Sequence[int], after: Sequence[int]) -> str:
    costs, link = found.costs, found.link
    rate = f"{8e-6 / link.per_byte:,.0f} Mbit/s" if link.per_byte else "more than can be measured"
    compute = sum(group.compute for group in costs)
    exact, was, now = (1e3 * (backward_seconds(costs, picks) - compute) for picks in ([0] * len(costs), before, after))
    return (
        f"links carry {rate} each way, a backward computes {1e3 * compute:.0f} ms of a step's {1e3 * found.step:.0f}; "
        f"reduces are exposed for {exact:.1f} ms if exact, {was:.1f} with the codecs so far, {now:.1f} with these, of "
        f"relative error {total_error(costs, after):.2g}"
    )


def _summary(chosen: Mapping[str, str]) -> str:
    """Describe the codecs in words, as in ``int4 for blocks.0, tokens; exact sums for the other 5``."""
    names: dict[str, list[str]] = {}
    for name, codec in chosen.items():
        names.setdefault(codec, []).append(name or "the root")
    exact = len(names.pop(EXACT, []))
    parts = [f"{codec} for {', '.join(names[codec])}" for codec in sorted(names)]
    if exact:
        parts.append(f"exact sums for {f'the other {exact}' if parts else f'all {exact} units'}")
    return "; ".join(parts)
