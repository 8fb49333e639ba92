"""Falls back to more bits where few do harm: in a parameter group whose messages keep too little of the gradients, or
grow as gradients do in a run that diverges; and everywhere if losses rise.

    forwards   ... 9 | 10 | 11 ... 19 | 20 | 21 ...
           measure __|    |__ judge     |    |__ judge: what fails twice in a row falls back

A message that is further from the gradients than an empty one makes residuals grow from step to step, so there once is
enough.

What is measured is summed over all ranks, so all judge alike and fall back together. Gradients go on in int4 if they
had fewer than 4 bits, and else in bf16; residuals do not depend on the codec and stay. Weights that were gathered by
deltas are gathered exactly from then on. All switch there and then: assembling the engine anew might wait for a graph
that one rank alone still holds.
"""

from __future__ import annotations

import logging
import weakref
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist

from yafsdp_cc.compression.compressed_sum import CompressedSum
from yafsdp_cc.compression.config import AUTO
from yafsdp_cc.compression.delta import DeltaAllGather
from yafsdp_cc.compression.encoder import SUMS
from yafsdp_cc.compression.state import compressed_sums, delta_all_gathers
from yafsdp_cc.engine.mesh import all_groups
from yafsdp_cc.engine.protocols import Observer
from yafsdp_cc.engine.streams import PinnedReadback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from yafsdp_cc.compression.encoder import CompressionError
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.param import FlatParam
    from yafsdp_cc.engine.state import FSDPState

FIRST, PERIOD = (2, 5), 10
"""Forwards after the warm-up at which messages are measured, and the distance of later ones."""
STRIKES = 2
"""Faults in a row before anything is done."""
RISE, GROWTH = 0.1, 10.0
"""How far losses have to be above their best, in proportion, and how many times messages above their smallest."""
FEW, MORE = "int4", "bf16"
"""Codecs to fall back to, one after the other."""

GRADIENTS, DELTAS = "gradients", "changes"
"""The kinds of messages; their names are in checkpoints."""

_log = logging.getLogger("yafsdp_cc")


class Measured(NamedTuple):
    """The messages of one flat parameter, while they are measured."""

    flat: FlatParam
    collective: CompressedSum | DeltaAllGather
    error: CompressionError

    @property
    def name(self) -> str:
        return name_of(self.flat, self.collective)


def name_of(flat: FlatParam, collective: CompressedSum | DeltaAllGather) -> str:
    """Return the name of a collective's messages, in warnings and in checkpoints."""
    return f"{DELTAS if isinstance(collective, DeltaAllGather) else GRADIENTS} of '{flat.name}'"


class CodecFallback(Observer):
    """The fallback of one model; it outlives the assemblies of its engine.

    Args:
        schedule: of the model.
    """

    def __init__(self, schedule: CompressionSchedule) -> None:
        self._schedule = schedule
        self._config = schedule.config
        self._state: weakref.ref[FSDPState]
        self._reduces = 0
        """Reduces that were issued, of any group."""
        self._counted = -1
        """``_reduces`` at the last forward that counted: of micro-batches that are summed together, the first."""
        self._forwards = 0
        self._measured: list[Measured] = []
        """What is measured, until it is judged."""
        self._scale = 1.0
        """The loss scale that it is measured with."""
        self._past: list[Measured] = []
        """What was measured before: a stream may still write to its sums."""
        self._names: list[str] = []
        self._readback: PinnedReadback
        """Of the sums of ``_names``."""
        self._codecs: dict[str, str] = {}
        """What messages have fallen back to."""
        self._strikes: dict[str, int] = {}
        self._smallest: dict[str, float] = {}
        """The smallest norms that were measured."""
        self._best, self._rises = float("inf"), 0
        self._loss: Tensor | float = 0.0
        self._losses = 0

    def add_loss(self, loss: Tensor | float) -> None:
        """Take in a loss of this rank; nothing waits for its value."""
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().to(torch.float64).reshape(())
        self._loss = self._loss + loss
        self._losses += 1

    # Observer

    def assembled(self, state: object) -> None:
        self._state = weakref.ref(cast("FSDPState", state))

    def after_reduce(self, group: str) -> None:
        self._reduces += 1

    def before_forward(self) -> None:
        """Judge what was measured, and measure anew when that is due. Ranks run one program, so all do at once."""
        if not torch.is_grad_enabled():
            return
        self.judge()
        if not self._schedule.phase.encodes or self._counted == self._reduces:
            return
        self._counted = self._reduces
        self._forwards += 1
        if self._forwards in FIRST or self._forwards % PERIOD == 0:
            state = self._current_state()
            found: list[tuple[FlatParam, CompressedSum | DeltaAllGather]] = []
            found += [(flat, each) for flat, each in compressed_sums(state) if self._can_fall_back(each)]
            found += [(flat, each) for flat, each in delta_all_gathers(state) if not each.always_exact]
            self._measured = [Measured(flat, each, each.watch()) for flat, each in found]
            self._scale = self._schedule.loss_scale

    def judge(self) -> None:
        """Judge what was measured, unless its messages are still in flight or to come. A collective."""
        state = self._current_state()
        if not self._measured or not state.is_idle:
            return
        awaited = [each for each in self._measured if isinstance(each.collective, CompressedSum)] or self._measured
        if not any(each.error.seen for each in awaited):
            return
        self._past, measured, self._measured = self._measured, self._measured, []
        _stop_measuring(state)
        # By the scale that they were measured with: on CUDA, what is read below is of an earlier measurement.
        sums = [each.error.sums / self._scale**2 for each in measured]
        loss = torch.as_tensor(self._loss, dtype=torch.float64, device=state.device).view(1)
        found = torch.cat([loss, loss.new_tensor([self._losses]), *sums])
        self._loss, self._losses = 0.0, 0
        state.record("fallback", "messages")
        for group in all_groups(state.info.mesh):
            dist.all_reduce(found, group=group)
        if self._names != [each.name for each in measured]:
            self._names = [each.name for each in measured]
            self._readback = PinnedReadback(len(found), torch.float64, state.device)
        numbers = self._readback.receive(found)  # on CUDA those of the call before, so as not to wait for these
        if numbers is not None:
            self._act(state, measured, numbers)

    def _current_state(self) -> FSDPState:
        state = self._state()
        assert state is not None, "the engine calls its observers"
        return state

    def _can_fall_back(self, compressed: CompressedSum) -> bool:
        """Return whether a sum has fewer bits than it could fall back to, and none that ``"auto"`` chooses."""
        return not compressed.is_tuned and self._config.bits(compressed.codec_name) < 16

    def _act(self, state: FSDPState, measured: Sequence[Measured], numbers: Sequence[float]) -> None:
        loss, count, *sums = numbers
        risen = self._risen(loss / count) if count else ""
        for index, each in enumerate(measured):
            lost, due, sent = sums[SUMS * index : SUMS * (index + 1)]
            fault = ""
            if due and isfinite(lost / due):  # nothing is due of exact sums; found_inf reports what is not finite
                kept = 1 - lost / due
                fault = self._fault(each, kept, sqrt(sent))
                self._strikes[each.name] = self._strikes.get(each.name, 0) + 1 if fault else 0
                if self._strikes[each.name] < STRIKES and kept >= 0:
                    fault = ""
            if fault or risen:
                self._fall_back(state, each, fault or risen)

    def _fault(self, measured: Measured, kept: float, norm: float) -> str:
        """Return what is wrong with messages that keep this share of what is due, and have this norm."""
        least = measured.error.least
        if kept < least or kept < 0:
            return f"keep {kept:.2%} of what they encode: residuals grow below {least:.2%}"
        if isinstance(measured.collective, CompressedSum) and (times := self._growth(measured.name, norm)):
            return f"are {times:.0f} times their smallest norm: gradients grow"
        return ""

    def _growth(self, name: str, norm: float) -> float:
        """Return the ratio of messages to their smallest ones, if that is too much; else 0."""
        # Residuals are empty at first, and so messages small; for longer where residuals are a momentum.
        if self._forwards * (1 - self._schedule.beta) < 1 or self._forwards < PERIOD:
            return 0.0
        smallest = self._smallest[name] = min(self._smallest.get(name, norm), norm)
        return norm / smallest if norm > GROWTH * smallest > 0 else 0.0

    def _risen(self, loss: float) -> str:
        """Return what is wrong if losses have been above their best for a while."""
        if loss <= self._best + RISE * abs(self._best):
            self._best, self._rises = min(self._best, loss), 0
            return ""
        self._rises += 1
        if self._rises < STRIKES:
            return ""
        best, self._best, self._rises = self._best, loss if isfinite(loss) else self._best, 0
        return f"come with losses that have risen from {best:.4g} to {loss:.4g}"

    def _fall_back(self, state: FSDPState, measured: Measured, why: str) -> None:
        name, collective, kind = measured.name, measured.collective, "gradients"
        if isinstance(collective, DeltaAllGather):
            before, codec, kind = str(self._config.weights), "exact", "weight deltas"
            collective.always_exact = True
        else:
            before = collective.codec_name
            codec = FEW if self._config.bits(before) < 4 else MORE
            _set_codec(state, measured.flat, collective, codec)
        self._codecs[name] = codec
        self._strikes.pop(name, None)
        self._smallest.pop(name, None)
        self._names = []
        state.counters.why = (
            f"messages of {kind} of '{measured.flat.name}' and what shares its buffer, in {before}, {why}: "
            f"{codec} from now on"
        )
        if dist.get_rank() == state.info.first_rank:
            _log.warning("%s", state.counters.why)

    # In checkpoints

    def state(self) -> dict[str, Any]:
        """Return what later judgements depend on, alike on all ranks but for losses."""
        return {
            "passes": self._forwards,
            "codecs": dict(self._codecs),
            "strikes": dict(self._strikes),
            "least": dict(self._smallest),
            "rises": (self._best, self._rises),
            "losses": (float(self._loss), self._losses),
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        state = self._current_state()
        self._forwards = saved["passes"]
        self._codecs, self._strikes, self._smallest = (dict(saved[name]) for name in ("codecs", "strikes", "least"))
        (self._best, self._rises), (self._loss, self._losses) = saved["rises"], saved["losses"]
        self._counted, self._measured, self._names = -1, [], []
        _stop_measuring(state)
        for flat, compressed in compressed_sums(state):
            name, codec = name_of(flat, compressed), self._config.codec_for(flat.name)
            fallen = self._codecs.get(name, codec)
            if AUTO in (codec, fallen) or self._config.bits(fallen) <= self._config.bits(codec):
                self._codecs.pop(name, None)  # this run was given as many bits, or goes by the network
                fallen = codec
            if fallen not in (AUTO, compressed.codec_name):
                _set_codec(state, flat, compressed, fallen)
            if fallen == codec != AUTO:
                state.counters.chosen.pop(_group_of(state, flat), None)
        for flat, all_gather in delta_all_gathers(state):
            all_gather.always_exact = name_of(flat, all_gather) in self._codecs


def fallback_of(state: FSDPState) -> CodecFallback | None:
    """Return the fallback of a model, if it has one."""
    return next((each for each in state.context.observers if isinstance(each, CodecFallback)), None)


@torch.inference_mode(False)  # buffers that are made here are trained with
def _set_codec(state: FSDPState, flat: FlatParam, compressed: CompressedSum, codec: str) -> None:
    """Encode the gradients of ``flat`` with this codec from now on; nothing is in flight."""
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)  # scratch buffers for messages may be replaced by larger ones
    compressed.set_codec(codec)
    state.counters.chosen[_group_of(state, flat)] = codec


def _group_of(state: FSDPState, flat: FlatParam) -> str:
    return next(group.name for group in state.groups if flat in group.flats)


def _stop_measuring(state: FSDPState) -> None:
    for _, compressed in compressed_sums(state):
        compressed.compression_error = None
    for _, all_gather in delta_all_gathers(state):
        all_gather.compression_error = None
