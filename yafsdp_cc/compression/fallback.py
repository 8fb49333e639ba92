"""Switches a parameter group to a codec of more bits where its messages keep too little of the gradients or grow as in
a diverging run, and all groups where losses rise.

    forwards   ... 9 | 10 | 11 ... 19 | 20 | 21 ...
           measure __|    |__ judge     |    |__ judge: a group that fails twice in a row falls back

A message that is further from the gradients than an empty one makes residuals grow from step to step: then a group
falls back after one failure.

Measurements are summed over all ranks, so all ranks judge alike and fall back together. Gradients of fewer than 4 bits
change to int4, others to bf16; residuals do not depend on the codec and remain. Weights that were gathered by deltas
are gathered exactly. The switch does not assemble the engine anew, which might wait for a graph that one rank alone
still holds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from yafsdp_cc.compression.all_gather import DeltaAllGather
from yafsdp_cc.compression.codec import AUTO
from yafsdp_cc.compression.error_feedback import SUMS
from yafsdp_cc.compression.reduce_scatter import CompressedSum
from yafsdp_cc.compression.schedule import CompressionObserver
from yafsdp_cc.compression.state import compressed_sums, delta_all_gathers, set_codecs
from yafsdp_cc.engine.streams import PinnedCopy

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.compression.error_feedback import CompressionError
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.param import FlatParam

FIRST, PERIOD = (2, 5), 10
"""Forwards after the warm-up in which messages are measured, and the interval of later measurements."""
STRIKES = 2
"""Faults in a row before a group falls back."""
RISE, GROWTH = 0.1, 10.0
"""Relative rise of losses above their best, and growth of messages' norms above their smallest, that are faults."""
FEW, MORE = "int4", "bf16"
"""Codecs that gradients fall back to, one after the other."""

_log = logging.getLogger("yafsdp_cc")


class Measured(NamedTuple):
    """A collective of one flat parameter, and the error of its codec, which is being measured."""

    flat: FlatParam
    collective: CompressedSum | DeltaAllGather
    error: CompressionError

    @property
    def name(self) -> str:
        return name_of(self.flat, self.collective)


def name_of(flat: FlatParam, collective: CompressedSum | DeltaAllGather) -> str:
    """Return the name of a collective's messages in checkpoints: "changes of ..." for deltas, "gradients of ..."."""
    return f"{'changes' if isinstance(collective, DeltaAllGather) else 'gradients'} of '{flat.name}'"


class CodecFallback(CompressionObserver):
    """Measures, judges and replaces the codecs of one model."""

    def __init__(self, schedule: CompressionSchedule) -> None:
        super().__init__()
        self._schedule = schedule
        self._config = schedule.config
        self._forwards = 0
        """Number of forwards so far that began a step; further micro-batches of a step do not count."""
        self._has_reduced = True
        self._measured: list[Measured] = []
        """Collectives whose messages are being measured, until the messages are judged."""
        self._scale = 1.0
        """Loss scale of the gradients under measurement."""
        self._past: list[Measured] = []
        """Collectives of the measurement judged last, referenced because a stream may still write to their sums."""
        self._names: list[str] = []
        self._readback: PinnedCopy
        """Copies measured sums from the device to the host, those of the messages named in ``_names``."""
        self._codecs: dict[str, str] = {}
        """Codec that each collective's messages have fallen back to, by ``name_of``."""
        self._form: tuple[object, bool] = (None, False)
        """Optimizer that set phases, and whether messages held a momentum, when ``_forwards`` was zeroed or loaded."""
        self._strikes: dict[str, int] = {}
        self._smallest: dict[str, float] = {}
        self._best, self._rises = float("inf"), 0
        self._loss: Tensor | float = 0.0
        self._losses = 0

    def add_loss(self, loss: Tensor | float) -> None:
        """Add a loss of this rank to the running sum, without waiting for its value."""
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().to(torch.float64).reshape(())
        self._loss = self._loss + loss
        self._losses += 1

    # Methods that the engine calls

    def after_reduce(self, group: str) -> None:
        self._has_reduced = True

    def before_forward(self) -> None:
        """Judge the messages measured last, and begin a measurement when due. All ranks do so in the same forward."""
        if not torch.is_grad_enabled():
            return
        self.judge()
        if self._form != (form := (self._schedule.controller, self._schedule.beta > 0)):
            # norms of the other form tell nothing: a momentum is many times larger than gradients, and begins at zero
            self._form, self._forwards, self._strikes, self._smallest = form, 0, {}, {}
        if not self._schedule.phase.encodes or not self._has_reduced:
            return
        self._has_reduced = False
        self._forwards += 1
        if self._forwards in FIRST or self._forwards % PERIOD == 0:
            sums, gathers = compressed_sums(self.state), delta_all_gathers(self.state)
            self._measured = [Measured(flat, each, each.watch()) for flat, each in sums if self._can_fall_back(each)]
            self._measured += [Measured(flat, each, each.watch()) for flat, each in gathers if not each.always_exact]
            self._scale = self._schedule.loss_scale

    def judge(self) -> None:
        """Judge the measured messages; do nothing while they are in flight, or not made yet. A collective."""
        state = self.state
        if not self._measured or not state.is_idle:
            return
        awaited = [each for each in self._measured if isinstance(each.collective, CompressedSum)] or self._measured
        if not any(each.error.seen for each in awaited):
            return
        self._past = measured = self._stop_measuring()
        for each in measured:
            if isinstance(each.collective, DeltaAllGather):  # wait for a prefetched all-gather still in flight
                each.flat.group.gathered(each.flat)
        # Divide by this measurement's loss scale now: on CUDA, the numbers read below are of an earlier measurement.
        sums = [each.error.sums / self._scale**2 for each in measured]
        # adding a float passes it to the kernel as an argument; copying it to a GPU would synchronize
        loss = sums[0].new_zeros(1) + self._loss
        found = torch.cat([loss, loss.new_full((1,), self._losses), *sums])
        self._loss, self._losses = 0.0, 0
        state.context.fingerprint.agree("fallback", "messages")
        self.reduce_measurements(found, dist.ReduceOp.SUM)
        if self._names != [each.name for each in measured]:
            self._names = [each.name for each in measured]
            self._readback = PinnedCopy(len(found), torch.float64, state.context.device)
        # on CUDA ``numbers`` are of the measurement before: the host would have to wait for those of ``found``
        numbers = self._readback.receive(found)
        if numbers is not None:
            self._act(measured, numbers)

    def _stop_measuring(self) -> list[Measured]:
        for each in self._measured:
            each.collective.compression_error = None
        measured, self._measured = self._measured, []
        return measured

    def _can_fall_back(self, compressed: CompressedSum) -> bool:
        """Return whether a sum has a codec of fewer than 16 bits that ``CodecAutotuner`` did not choose."""
        return not compressed.is_tuned and self._config.bits(compressed.codec_name) < 16

    def _act(self, measured: Sequence[Measured], numbers: Sequence[float]) -> None:
        loss, count, *sums = numbers
        risen = self._risen(loss / count) if count else ""
        for index, each in enumerate(measured):
            lost, due, sent = sums[SUMS * index : SUMS * (index + 1)]
            fault = ""
            # Skip exact sums (nothing was encoded) and gradients that were not finite (``found_inf`` reports those).
            if due and isfinite(lost / due):
                kept = 1 - lost / due
                fault = self._fault(each, kept, sqrt(sent))
                self._strikes[each.name] = self._strikes.get(each.name, 0) + 1 if fault else 0
                if self._strikes[each.name] < STRIKES and kept >= 0:
                    fault = ""
            if fault or risen:
                self._fall_back(each, fault or risen)

    def _fault(self, measured: Measured, kept: float, norm: float) -> str:
        """Return the fault of messages that keep the share ``kept`` and have the norm ``norm``; "" if none."""
        least = measured.error.least
        if kept < least:
            return f"keep {kept:.2%} of what they encode: residuals grow below {least:.2%}"
        # Norms of messages grow from residuals of zero in the first forwards, 1 / (1 - beta) in the momentum form.
        is_early = self._forwards * (1 - self._schedule.beta) < 1 or self._forwards < PERIOD
        if is_early or isinstance(measured.collective, DeltaAllGather):
            return ""
        smallest = self._smallest[measured.name] = min(self._smallest.get(measured.name, norm), norm)
        if norm > GROWTH * smallest > 0:
            return f"are {norm / smallest:.0f} times their smallest norm: gradients grow"
        return ""

    def _risen(self, loss: float) -> str:
        """Return the fault if losses have been above their best for ``STRIKES`` judgements, else ""."""
        if loss <= self._best + RISE * abs(self._best):
            self._best, self._rises = min(self._best, loss), 0
            return ""
        self._rises += 1
        if self._rises < STRIKES:
            return ""
        best, self._best, self._rises = self._best, loss if isfinite(loss) else self._best, 0
        return f"come with losses that have risen from {best:.4g} to {loss:.4g}"

    def _fall_back(self, measured: Measured, why: str) -> None:
        name, collective, kind = measured.name, measured.collective, "gradients"
        if isinstance(collective, DeltaAllGather):
            before, codec, kind = str(self._config.weights), "exact", "weight deltas"
            collective.always_exact = True
        else:
            before = collective.codec_name
            codec = FEW if self._config.bits(before) < 4 else MORE
            set_codecs(self.state, {measured.flat: codec})
        self._codecs[name] = codec
        self._strikes.pop(name, None)
        self._smallest.pop(name, None)
        self._names = []
        self.state.context.counters.why = (
            f"messages of {kind} of '{measured.flat.name}' and what shares its buffer, in {before}, {why}: "
            f"{codec} from now on"
        )
        if dist.get_rank() == self.state.context.info.first_rank:
            _log.warning("%s", self.state.context.counters.why)

    # In checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later judgements depend on; it is alike on all ranks except for losses."""
        return {
            "passes": self._forwards,
            "codecs": dict(self._codecs),
            "strikes": dict(self._strikes),
            "least": dict(self._smallest),
            "rises": (self._best, self._rises),
            "losses": (float(self._loss), self._losses),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        state = self.state
        # ``resume_decay`` has loaded ``beta`` of the checkpoint: the next forward sees whether the form is another now
        self._form, self._forwards = (self._schedule.controller, self._schedule.beta > 0), saved["passes"]
        self._codecs, self._strikes, self._smallest = (dict(saved[name]) for name in ("codecs", "strikes", "least"))
        (self._best, self._rises), (self._loss, self._losses) = saved["rises"], saved["losses"]
        self._has_reduced, self._names = True, []
        self._stop_measuring()
        for flat, compressed in compressed_sums(state):
            name, codec = name_of(flat, compressed), self._config.codec_for(flat.name)
            fallen = self._codecs.get(name, codec)
            if AUTO in (codec, fallen) or self._config.bits(fallen) <= self._config.bits(codec):
                self._codecs.pop(name, None)  # no fallback: the user's codec has as many bits, or is tuned
                fallen = codec
            if fallen not in (AUTO, compressed.codec_name):
                set_codecs(state, {flat: fallen})
            if fallen == codec != AUTO:
                state.context.counters.chosen.pop(flat.group.name, None)
        for flat, all_gather in delta_all_gathers(state):
            all_gather.always_exact = name_of(flat, all_gather) in self._codecs
