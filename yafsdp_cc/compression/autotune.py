"""Choose the gradient codecs of ``compression="auto"``: only reduces that are exposed are worth compressing.

A backward computes the gradients of one parameter group after another, and issues the reduce-scatter of each:

    compute   | group 0 | group 1 | group 2 |   |
    network             | reduce 0  | reduce 1  | reduce 2 |
                                    ^ if group 2 is to write into the gradient buffer of group 0, it starts here

A reduce is exposed where it lasts longer than what is computed meanwhile; the last one always is. Optimizer steps 3,
12, 48, 98, ... are each followed by a tuning, before the next forward. Ranks have timed their backwards; they time the
network and the codecs, and agree on the slowest of each in one all-reduce. Then every rank solves the same problem: the
least compression error with which a backward is at most 1% of a step longer than it has to be.

Source: that only exposed communication is worth compressing is from Song et al., "Optimus-CC" (2023), who select
pipeline stages by hand.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist

from yafsdp_cc.compression import kernels
from yafsdp_cc.compression.config import EXACT
from yafsdp_cc.compression.encoder import RECEIVED, SENT
from yafsdp_cc.compression.error_feedback import Residual, lost_share
from yafsdp_cc.compression.reduce_scatter import CompressedReduceScatter
from yafsdp_cc.engine.mesh import all_groups
from yafsdp_cc.engine.protocols import Observer
from yafsdp_cc.profiling.spans import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.communicator import CommContext
    from yafsdp_cc.engine.param import FlatParam
    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.state import FSDPState

    _Spans: TypeAlias = list[tuple[Any, Any]]
    """Starts and ends of computation, as of ``BackwardTimer._now``."""

FIRST, PERIOD = 3, 50
"""Optimizer steps before the first tuning, and between later ones: fewer while there are few measurements."""
SAMPLES = 8
"""Backwards and steps before a tuning that are timed."""
TOLERANCE = 0.01
"""Share of a step that may stay exposed if that lowers the error; timings are no more exact."""
SLACK = 0.1
"""A codec stays if it is the right one for a network that is faster or slower by this share."""

_log = logging.getLogger("yafsdp_cc")


# The queue model: pure functions, no clock and no communication ----------------------------------------------------


class CodecCost(NamedTuple):
    """What it costs to reduce the gradients of one group with one codec."""

    codec: str
    network: float
    """Seconds on the network, together with the weights that are all-gathered meanwhile."""
    host: float = 0.0
    """Seconds of the thread that computes, to encode, decode and sum. On CUDA those are part of ``network``."""
    error: float = 0.0
    """Relative squared error of a message, times the group's share of all elements."""


class GroupCosts(NamedTuple):
    """One parameter group, in the order in which a backward issues the reduces."""

    compute: float
    """Seconds of computation before its reduce is issued and after that of the group before."""
    codecs: tuple[CodecCost, ...]
    """The first is exact; each later one has a larger error and takes less of the network."""
    waits_for: int = -1
    """Index of the group whose reduce must have finished before this computation starts; -1: none."""


class _Event(NamedTuple):
    """A time in a simulated backward, with the reduces on its critical path as a linked list, the latest first."""

    time: float
    reduce: int = -1
    previous: _Event | None = None

    def plus(self, seconds: float) -> _Event:
        return _Event(self.time + seconds, self.reduce, self.previous)

    def critical(self) -> Iterator[int]:
        event: _Event | None = self
        while event is not None and event.reduce >= 0:
            yield event.reduce
            event = event.previous


def backward_seconds(groups: Sequence[GroupCosts], picks: Sequence[int]) -> float:
    """Return how long a backward takes, the end of its last reduce included.

    The network carries one reduce at a time. A thread that encodes (``host``) waits for the reduce before first.

    Args:
        groups: in the order of the backward.
        picks: of each group, the index of its codec in ``codecs``.
    """
    return _simulate(groups, picks).time


def exposed_seconds(groups: Sequence[GroupCosts], picks: Sequence[int]) -> float:
    """Return how much longer a backward takes than its computation. Args as of ``backward_seconds``."""
    return backward_seconds(groups, picks) - sum(group.compute for group in groups)


def total_error(groups: Sequence[GroupCosts], picks: Sequence[int]) -> float:
    """Return the relative squared error on average over elements. Args as of ``backward_seconds``."""
    return sum(group.codecs[pick].error for group, pick in zip(groups, picks, strict=True))


def choose_codecs(
    groups: Sequence[GroupCosts], tolerance: float = 0.0, error_budget: float = float("inf")
) -> list[int]:
    """Return the picks of least error with which a backward is at most ``tolerance`` seconds above the shortest.

    Greedy. While the backward is longer, one of the reduces on its critical path takes the codec that adds the least
    error per second saved; of equals the last one in the backward, which delays no other. Afterwards groups return to
    codecs of less error where that keeps the backward within the limit, the largest error first.

    Args:
        groups: in the order of the backward.
        tolerance: seconds.
        error_budget: bound of ``total_error``.
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
    """Return the same, but keep picks of ``current`` that are right for a network faster or slower by ``SLACK``."""
    fast, slow = (choose_codecs(_scaled(groups, 1 + sign * SLACK), tolerance, error_budget) for sign in (-1, 1))
    kept = [min(max(pick, min(ends)), max(ends)) for pick, *ends in zip(current, fast, slow, strict=True)]
    return kept if total_error(groups, kept) <= error_budget else choose_codecs(groups, tolerance, error_budget)


def _simulate(groups: Sequence[GroupCosts], picks: Sequence[int]) -> _Event:
    """Return the end of a backward."""
    computed = reduced = _Event(0.0)
    ends: list[_Event] = []
    for index, (group, pick) in enumerate(zip(groups, picks, strict=True)):
        cost = group.codecs[pick]
        started = _later(computed, ends[group.waits_for]) if group.waits_for >= 0 else computed
        computed = started.plus(group.compute)
        issued = _later(computed, reduced)
        if cost.host:
            computed = issued = issued.plus(cost.host)
        reduced = _Event(issued.time + cost.network, index, issued)
        ends.append(reduced)
    return _later(computed, reduced)


def _later(computed: _Event, reduced: _Event) -> _Event:
    return reduced if reduced.time >= computed.time else computed


def _tightened(groups: Sequence[GroupCosts], error_budget: float) -> Iterator[tuple[float, list[int]]]:
    """Yield seconds and picks, from all exact on, one group changed at a time, while that can shorten a backward."""
    picks, error = [0] * len(groups), 0.0
    while True:
        end = _simulate(groups, picks)
        yield end.time, picks
        moves = [
            (_rounded((cost.error - now.error) / (now.network - cost.network)), -index, number)
            for index in end.critical()
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
    """Return the same groups on a network that is slower by ``factor``."""
    return [
        group._replace(codecs=tuple(cost._replace(network=factor * cost.network) for cost in group.codecs))
        for group in groups
    ]


_ROUNDING = 1e-9
"""Times that differ by less, in proportion, are equal."""


def _rounded(value: float) -> float:
    """Drop the digits in which the same sum differs when its terms are added in another order."""
    return float(f"{value:.9g}")


# Measurements --------------------------------------------------------------------------------------------------------


class LinkCost(NamedTuple):
    """Time to send from every rank at once."""

    latency: float
    """Seconds of an exchange of empty messages."""
    per_byte: float
    """Seconds for each byte that a rank sends."""

    def seconds(self, sent: int) -> float:
        return self.latency + self.per_byte * sent


_TRIAL = 1 << 20
"""Bytes that a rank sends in a trial, at most: a tenth of a second at 100 Mbit/s."""
_SMALL = 64
_MOST = 8
"""Exchanges in a row, where messages are small: the burst that a switch lets through must not look like its rate."""


def measure_link(context: CommContext, message_bytes: int) -> LinkCost:
    """Time all-to-alls of messages up to ``message_bytes``. A collective; nothing else may be in flight.

    Returns:
        The same on all ranks, by the slowest of them.
    """
    comm, scratch = context.comm, context.scratch
    peers = comm.world - 1
    size = max(min(message_bytes, _TRIAL // peers) // _SMALL * _SMALL, _SMALL)
    repeats = min(max(_TRIAL // (peers * size), 1), _MOST)

    def exchange(size: int, repeats: int) -> float:
        received, sent = (scratch.take(name, peers * size, torch.uint8).view(peers, size) for name in (RECEIVED, SENT))

        def run() -> None:
            for _ in range(repeats):
                for work in comm.exchange(received, sent, async_op=True):
                    work.wait()

        seconds = torch.tensor([_seconds(run, comm.device)], dtype=torch.float64, device=comm.device)
        # Also a barrier: a rank that starts late would add its delay to what the others measure next.
        comm.group.allreduce([seconds], dist.ReduceOp.MAX).wait()
        return float(seconds)

    def best(size: int, repeats: int) -> float:
        """Of several, since other work of the machine can only slow one down; of two where one takes long."""
        first = exchange(size, repeats)
        return min([first, *(exchange(size, repeats) for _ in range(3 if first < 0.02 else 1))])

    exchange(_SMALL, 1)
    latency, longest = best(_SMALL, 1), best(size, repeats)
    return LinkCost(latency, max(longest / repeats - latency, 0.0) / (peers * size))


@torch.no_grad()
def measure_codec(codec: Codec | None, gradients: Tensor, residual_dtype: torch.dtype | None) -> float:
    """Return the seconds per element that a rank needs to encode, decode and sum one reduce-scatter.

    Args:
        codec: None for an exact sum, which is the sum alone.
        gradients: [ranks - 1, elements], those of other ranks' shards, or as many for the own shard.
        residual_dtype: None without error feedback.
    """
    peers, chunk = gradients.shape
    device = gradients.device
    total = torch.zeros(chunk, device=device)
    if codec is None:
        cast = torch.zeros_like(total)

        def run() -> None:
            for each in gradients:
                total.add_(each if each.dtype == torch.float32 else cast.copy_(each))
    else:
        messages = torch.zeros(peers, codec.message_bytes(chunk), dtype=torch.uint8, device=device)
        residual = None if residual_dtype is None else Residual(peers, chunk, residual_dtype, codec.block, device)

        def run() -> None:
            kernels.encode(codec, gradients, messages, residual=residual)
            kernels.decode_sum(codec, messages, chunk, gradients[0], 0, total)

    return min(_seconds(run, device) for _ in range(3)) / ((peers + 1) * chunk)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time ``run``, with what it enqueues on the device."""
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class BackwardTimer:
    """Measure how long backwards compute before each reduce: by the clock on a CPU, by events on CUDA.

    Recording a CUDA event synchronizes nothing; ``medians`` alone wants the device synchronized.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = False
        """Whether backwards that start from now on are timed."""
        self._device = device
        self._finished: deque[list[tuple[str, _Spans]]] = deque(maxlen=SAMPLES)
        self._current: list[tuple[str, _Spans]] | None = None
        self._spans: _Spans = []
        self._start: Any = None
        self._waits = False

    def before_backward(self) -> None:
        """Start to time a backward. One that ``after_backward`` has not ended, for an exception perhaps, is dropped."""
        self._current, self._spans = [] if self.enabled else None, []
        self.after_reduce()

    def before_reduce(self, group: str) -> None:
        """The reduce of the group of this name is about to be issued."""
        if self._current is not None:
            self._stop()
            self._current.append((group, self._spans))
            self._spans = []

    def after_reduce(self) -> None:
        """It has been issued. What that took, to encode for instance, is no computation of a backward."""
        if self._current is not None:
            self._start, self._waits = self._now(), False

    def before_wait(self) -> None:
        """The host is about to wait for communication."""
        if self._current is not None and self._start is not None:
            self._stop()
            self._waits = True

    def after_wait(self) -> None:
        """The host has waited."""
        if self._waits:
            self.after_reduce()

    def after_backward(self) -> None:
        """Keep what was measured."""
        if self._current:
            self._finished.append(self._current)
        self._current, self._waits = None, False

    def clear(self) -> None:
        """Forget all measurements."""
        self._finished.clear()

    def medians(self) -> list[tuple[str, float]]:
        """Return groups and seconds of computation before each, in the order of the last backward.

        Those are medians over the backwards that had the same order.
        """
        order = [group for group, _ in self._finished[-1]] if self._finished else []
        same = [each for each in self._finished if [group for group, _ in each] == order]
        same = same[1:] if len(same) > 2 else same  # caches were cold in the first
        return [
            (group, median(sum(self._seconds(*span) for span in each[index][1]) for each in same))
            for index, group in enumerate(order)
        ]

    def _stop(self) -> None:
        if self._start is not None:
            self._spans.append((self._start, self._now()))
        self._start = None

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3 if self._device.type == "cuda" else end - start)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class Measurement(NamedTuple):
    """What codecs are chosen by, the same on all ranks."""

    groups: tuple[ParamGroup, ...]
    costs: tuple[GroupCosts, ...]
    """Of each group, in the order of the backward."""
    step: float
    """Seconds from one optimizer step to the next."""
    link: LinkCost

    @property
    def tolerance(self) -> float:
        """Seconds that may stay exposed."""
        return TOLERANCE * self.step


# The observer --------------------------------------------------------------------------------------------------------


class CodecAutotuner(Observer):
    """Time a model's backwards, and change the codecs of its parameter groups between optimizer steps.

    Only ``before_forward`` communicates, and only while no reduce is in flight. Every assembly of the engine starts the
    measurements anew.

    Args:
        schedule: of the model.
    """

    def __init__(self, schedule: CompressionSchedule) -> None:
        self.config = schedule.config
        self.timer: BackwardTimer
        self.steps = 0
        """Optimizer steps since the engine was assembled."""
        self.next_tuning = FIRST
        """The optimizer step after which codecs are chosen next."""
        self.last: Measurement | None = None
        """What codecs were chosen by last."""
        self.summary = ""
        """The present codecs, for the plan and the log."""
        self._schedule = schedule
        self._state: weakref.ref[FSDPState]
        self._candidates = [self.config.make(name) for name in self.config.candidates]
        self._errors = {codec.name: lost_share(codec) for codec in self._candidates}
        self._work: dict[str, float] = {}
        self._versions: tuple[tuple[int, ...], ...] = ()
        self._stepped = 0.0
        self._step_seconds: deque[float] = deque(maxlen=SAMPLES)
        self._span = Span("choice")

    # Events

    def assembled(self, state: object) -> None:
        current = cast("FSDPState", state)
        self._state = weakref.ref(current)
        self.timer = BackwardTimer(current.device)
        self.steps, self.last, self.summary = 0, None, ""
        self.next_tuning = FIRST + max(self.config.warmup_steps - self._schedule.steps, 0)
        self._versions = ()
        self._step_seconds.clear()

    def before_forward(self) -> None:
        """Count an optimizer step if parameters have changed, and tune when that is due. A collective then."""
        state = self._state()
        if state is None or state.world == 1:
            return
        versions = tuple([group.versions() for group in state.groups])
        if versions == self._versions:
            return
        now = time.perf_counter()
        if self._versions:
            self.steps += 1
            self._step_seconds.append(now - self._stepped)
        self._versions, self._stepped = versions, now
        self.timer.enabled = self.steps >= self.next_tuning - SAMPLES
        # Residuals of micro-batches that are not reduced yet hold gradients. All ranks see the same.
        if self.steps >= self.next_tuning and state.is_idle:
            with self._span:
                self.tune(state)
            self._stepped = time.perf_counter()

    def before_backward(self) -> None:
        self.timer.before_backward()

    def before_reduce(self, group: str) -> None:
        self.timer.before_reduce(group)

    def after_reduce(self, group: str) -> None:
        self.timer.after_reduce()

    def before_wait(self) -> None:
        self.timer.before_wait()

    def after_wait(self) -> None:
        self.timer.after_wait()

    def after_backward(self) -> None:
        self.timer.after_backward()

    # Tuning

    def tune(self, state: FSDPState) -> None:
        """Measure, choose codecs and switch to them. A collective, with nothing in flight."""
        found = self.measure(state)
        if found is None:
            return  # no backward was timed yet: after the next step
        self.timer.clear()
        self.timer.enabled = False
        self.next_tuning = self.steps + min(PERIOD, 3 * self.steps)
        limits = found.tolerance, self.config.error_budget or float("inf")
        current = [
            next((number for number, cost in enumerate(costs.codecs) if cost.codec == _codec_of(group)), 0)
            for group, costs in zip(found.groups, found.costs, strict=True)
        ]
        is_first, self.last = self.last is None, found
        picks = choose_codecs(found.costs, *limits) if is_first else adjust_codecs(found.costs, current, *limits)
        chosen = zip(found.groups, found.costs, picks, strict=True)
        self.set_codecs(state, {group: costs.codecs[pick].codec for group, costs, pick in chosen})
        state.counters.why = _explain(found, current, picks)
        if dist.get_rank() == state.info.first_rank:
            _log.info("compression='auto' after %d steps: %s; %s", self.steps, state.counters.why, self.summary)

    def set_codecs(self, state: FSDPState, codecs: Mapping[ParamGroup, str]) -> None:
        """Reduce the gradients of each of these groups with its codec from now on. A collective, nothing in flight."""
        for group, codec in codecs.items():
            for reduce_scatter in _tuned(group).values():
                reduce_scatter.set_codec(codec)
        _synchronize(state.device)
        chosen = {group.name: _codec_of(group) for group in state.groups if _tuned(group)}
        state.counters.chosen = state.counters.chosen | chosen  # other entries are the fallback's
        self.summary = _summary(chosen)

    @torch.no_grad()
    def measure(self, state: FSDPState) -> Measurement | None:
        """Return what all ranks have measured, by the slowest; None before the first step. A collective."""
        _synchronize(state.device)
        times = self.timer.medians()
        tuned = {flat: each for group in state.groups for flat, each in _tuned(group).items()}
        if not (times and tuned and self._step_seconds):
            return None
        state.record("autotune", "codecs")
        link = measure_link(state.context.reduce, max(each.message_room for each in tuned.values()))
        self._work = self._work or self._measure_work(state, list(tuned))
        found = _slowest(
            state,
            [
                *link,
                median(self._step_seconds),
                *self._work.values(),
                *self._errors.values(),  # of random numbers: other processors may compute another last bit
                *(seconds for _, seconds in times),
            ],
        )
        link, step = LinkCost(next(found), next(found)), next(found)
        work = {name: next(found) for name in self._work}
        errors = {name: next(found) for name in self._errors}
        named = {group.name: group for group in state.groups}
        groups = tuple(named[name] for name, _ in times)
        elements = max(sum(flat.layout.numel for group in groups for flat in _tuned(group)), 1)
        errors = {name: error / elements for name, error in errors.items()}
        costs = [
            GroupCosts(next(found), self._costs(state, group, link, work, errors), waits_for)
            for group, waits_for in zip(groups, _buffer_waits(state, groups), strict=True)
        ]
        return Measurement(groups, tuple(costs), step, link)

    def _measure_work(self, state: FSDPState, flats: Sequence[FlatParam]) -> dict[str, float]:
        """Return seconds per element of exact sums and of each candidate."""
        peers, block = state.world - 1, self.config.block
        chunk = min(max(flat.layout.chunk for flat in flats), _TRIAL // peers) // block * block
        gradients = torch.zeros(peers, chunk, dtype=flats[0].reduce_dtype, device=state.device)
        found = {each.name: measure_codec(each, gradients, self.config.residual_dtype) for each in self._candidates}
        return {EXACT: measure_codec(None, gradients, None), **found}

    def _costs(
        self,
        state: FSDPState,
        group: ParamGroup,
        link: LinkCost,
        work: Mapping[str, float],
        errors: Mapping[str, float],
    ) -> tuple[CodecCost, ...]:
        """Return the cost of exact sums, and of each codec that sends fewer bytes than those of less error.

        Args:
            work: seconds per element, by codec.
            errors: the same of errors.
        """
        tuned = _tuned(group)
        others = [flat for flat in group.flats if flat.trainable and flat not in tuned]
        fixed = _regathered_bytes(state, group) + sum(flat.reduce_scatter.planned_bytes() for flat in others)
        elements = sum(flat.layout.numel for flat in tuned)
        costs: list[CodecCost] = []
        fewest = float("inf")
        for name in (EXACT, *sorted(errors, key=lambda name: errors[name])):
            sent = sum(reduce_scatter.bytes_with(name) for reduce_scatter in tuned.values())
            if costs and sent >= fewest:
                continue
            fewest = sent
            # A codec that needs less of the processor than an exact sum is not chosen for that.
            host, network = elements * max(work[name], work[EXACT]), link.seconds(fixed + sent)
            if state.device.type == "cuda":  # the stream of reduces encodes, too
                host, network = 0.0, network + host
            costs.append(CodecCost(name, network, host, elements * errors.get(name, 0.0)))
        return tuple(costs)


def autotuner_of(state: FSDPState) -> CodecAutotuner | None:
    """Return the autotuner of a model, if it has one."""
    return next((each for each in state.context.observers if isinstance(each, CodecAutotuner)), None)


def _tuned(group: ParamGroup) -> dict[FlatParam, CompressedReduceScatter]:
    """Return the flat parameters of ``group`` whose codec is tuned, and their reduce-scatters."""
    found = {flat: flat.reduce_scatter for flat in group.flats if flat.sharded_grad is not None}
    return {flat: each for flat, each in found.items() if isinstance(each, CompressedReduceScatter) and each.is_tuned}


def _codec_of(group: ParamGroup) -> str:
    return next((reduce_scatter.codec_name for reduce_scatter in _tuned(group).values()), EXACT)


def _regathered_bytes(state: FSDPState, group: ParamGroup) -> int:
    """Return the bytes to all-gather the weights of ``group`` for its backward; 0 if they are still in their buffer."""
    buffer = group.unsharded.buffer
    last = [each for each in state.groups if each.unsharded.buffer is buffer][-1]
    gathers = group.unshards_in_backward and last is not group
    return sum(flat.all_gather.planned_bytes() for flat in group.flats) if gathers else 0


def _slowest(state: FSDPState, numbers: Sequence[float]) -> Iterator[float]:
    """Return the maxima over all ranks. A collective."""
    agreed = torch.tensor(numbers, dtype=torch.float64, device=state.device)
    for process_group in all_groups(state.info.mesh):
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=process_group)
    return iter(agreed.tolist())


def _buffer_waits(state: FSDPState, groups: Sequence[ParamGroup]) -> list[int]:
    """Return of each group the index of the last one before it with the same gradient buffer; -1: there is none."""
    if not state.context.reduce_stream.is_ordered:  # on a CPU a reduce is finished before the next one is issued
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
    compute = 1e3 * sum(group.compute for group in costs)
    exact, was, now = (1e3 * exposed_seconds(costs, picks) for picks in ([0] * len(costs), before, after))
    return (
        f"links carry {rate} each way, a backward computes {compute:.0f} ms of a step's {1e3 * found.step:.0f}; "
        f"reduces are exposed for {exact:.1f} ms if exact, {was:.1f} with the codecs so far, {now:.1f} with these, of "
        f"relative error {total_error(costs, after):.2g}"
    )


def _summary(chosen: Mapping[str, str]) -> str:
    """Return for instance ``int4 for blocks.0, tokens; exact sums for the other 5``."""
    names: dict[str, list[str]] = {}
    for name, codec in chosen.items():
        names.setdefault(codec, []).append(name or "the root")
    exact = len(names.pop(EXACT, []))
    parts = [f"{codec} for {', '.join(names[codec])}" for codec in sorted(names)]
    if exact:
        parts.append(f"exact sums for {f'the other {exact}' if parts else f'all {exact} units'}")
    return "; ".join(parts)
