"""Goes back to more bits by itself where few do harm: in a unit whose messages say too little, or grow as gradients do
in a run that diverges; and everywhere if losses rise.

    passes    … 9 │ 10 │ 11 … 19 │ 20 │ 21 …
              look ┘    └ judge   look ┘  └ judge: what has failed twice in a row goes back

A message that says less than nothing makes residuals grow from step to step, so there once is enough.

What a look finds is summed over all ranks, so all judge alike and go back together. Gradients go on in int4 if they had
fewer than 4 bits, and else in bf16; residuals know of no codec and stay. Weights that were told of changes are gathered
exactly from then on. All switch there and then: putting the engine together anew might wait for a graph that one rank
alone still holds.
"""

from __future__ import annotations

import logging
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from yafsdp_cc.compression import AUTO
from yafsdp_cc.engine.following import all_following
from yafsdp_cc.engine.journal import Note
from yafsdp_cc.engine.mailbox import Mailbox
from yafsdp_cc.engine.ranks import groups
from yafsdp_cc.engine.residuals import encoded_of
from yafsdp_cc.wire.shortfall import SUMS, Shortfall

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from yafsdp_cc.compression import Compression
    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.following import Following
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.wire.chunks import ChunkSum
    from yafsdp_cc.wire.shared import SharedSum

FIRST, PERIOD = (2, 5), 10
"""Passes after the warm-up at which there is a look, and from one to the next later on."""
STRIKES = 2
"""Looks in a row that find fault before anything is done."""
RISE, GROWTH = 0.1, 10.0
"""How far losses have to be above their best, in proportion, and how many times messages above their smallest."""
FEW, MORE = "int4", "bf16"
"""What is gone back to, one after the other."""

GRADIENTS, CHANGES = "gradients", "changes"

_NOTE = Note.of("look", "at messages")
_log = logging.getLogger("yafsdp_cc")


class Look(NamedTuple):
    """At one buffer's messages."""

    flat: Flat
    what: str
    """That they are of."""
    shortfall: Shortfall

    @property
    def name(self) -> str:
        return self.name_of(self.what, self.flat)

    @staticmethod
    def name_of(what: str, flat: Flat) -> str:
        return f"{what} of '{flat.pieces[0].cut.name}'"


class Guard:
    """That of one model; it outlives the exchanges of an assembly."""

    def __init__(self, config: Compression) -> None:
        self._config = config
        self._passes = 0
        """Those after the warm-up that come after a sum: of micro-batches that are summed together, the first."""
        self._reduced = -1
        """Bytes that had been sent for gradients at the last of these."""
        self._scale = 1.0
        """What losses were multiplied by at the last look."""
        self._looks: list[Look] = []
        """The last ones, until they are judged."""
        self._past: list[Look] = []
        """Those before, whose sums a lane may still write to."""
        self._asked: list[str] = []
        self._box: Mailbox
        """Of what a look finds of these."""
        self._codecs: dict[str, str] = {}
        """What buffers have gone back to, by the names of looks."""
        self._strikes: dict[str, int] = {}
        self._least: dict[str, float] = {}
        """The norms of their smallest messages that were looked at."""
        self._best, self._rises = float("inf"), 0
        self._loss: Tensor | float = 0.0
        self._losses = 0

    def tell(self, loss: Tensor | float) -> None:
        """Take in a loss of this rank; nobody waits for its value."""
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().to(torch.float64).reshape(())
        self._loss = self._loss + loss
        self._losses += 1

    def look(self, root: Root) -> None:
        """A pass with a graph begins. Ranks run the same program, so all look at the same passes."""
        self.judge(root)
        if root.compressed is None or not root.compressed.is_warm:
            return
        if self._reduced == root.counters.reduced_bytes:
            return
        self._reduced = root.counters.reduced_bytes
        self._passes += 1
        if self._passes in FIRST or self._passes % PERIOD == 0:
            self._scale = root.compressed.loss_scale
            self._looks = [Look(flat, GRADIENTS, exchange.watch()) for flat, exchange in _watched(root)]
            self._looks += [Look(flat, CHANGES, each.watch(flat)) for each, flat in _told(root)]

    def judge(self, root: Root) -> None:
        """Judge by the last look, unless what it is about is still under way or to come. A collective."""
        if not self._looks:
            return
        idle = root.reductions.is_idle and all(unit.gradient_space is None for unit in root.units)
        awaited = [look for look in self._looks if look.what is GRADIENTS] or self._looks
        if not idle or not any(look.shortfall.seen for look in awaited):
            return
        self._past, looks, self._looks = self._looks, self._looks, []
        _leave(root)
        told = torch.as_tensor(self._loss, dtype=torch.float64, device=root.device).view(1)
        found = torch.cat([told, told.new_tensor([self._losses]), *(look.shortfall.sums for look in looks)])
        self._loss, self._losses = 0.0, 0
        root.journal.write(_NOTE)
        for group in groups(root.drafts[0].ranks.mesh):
            dist.all_reduce(found, group=group)
        if self._asked != [look.name for look in looks]:
            self._asked, self._box = [look.name for look in looks], Mailbox(len(found), torch.float64, root.device)
        numbers = self._box.receive(found)  # on CUDA those of the look before, so as not to wait for these
        if numbers is not None:
            self._act(root, looks, numbers)

    def _act(self, root: Root, looks: Sequence[Look], numbers: Sequence[float]) -> None:
        loss, count, *sums = numbers
        risen = self._risen(loss / count) if count else ""
        for place, look in enumerate(looks):
            left, due, said = sums[SUMS * place : SUMS * (place + 1)]
            fault = ""
            if due and isfinite(left / due):  # nothing is due of exact sums; of what is not finite optimizers are told
                fault, share = self._fault(root, look, 1 - left / due, sqrt(said)), 1 - left / due
                self._strikes[look.name] = self._strikes.get(look.name, 0) + 1 if fault else 0
                if self._strikes[look.name] < STRIKES and share >= 0:
                    fault = ""
            if fault or risen:
                self._go_back(root, look, fault or risen)

    def _fault(self, root: Root, look: Look, share: float, norm: float) -> str:
        """What is wrong with messages that say this share of what is due, and have this norm."""
        least = look.shortfall.least
        if share < least or share < 0:
            return f"say {share:.2%} of what they should: what is left grows where that is below {least:.2%}"
        if look.what is GRADIENTS and (times := self._grown(root, look.name, norm)):
            return f"are {times:.0f} times what they were once: gradients grow"
        return ""

    def _grown(self, root: Root, name: str, norm: float) -> float:
        """How many times the smallest messages of a buffer those of now are, if that is too much; else 0."""
        assert root.compressed is not None
        # Residuals are empty at first, and so messages small; longer where they are a momentum.
        if self._passes * (1 - root.compressed.beta) < 1 or self._passes < PERIOD:
            return 0.0
        norm /= self._scale * root.compressed.steps_said
        least = self._least[name] = min(self._least.get(name, norm), norm)
        return norm / least if norm > GROWTH * least > 0 else 0.0

    def _risen(self, loss: float) -> str:
        """Why, if losses have been above their best for a while."""
        if loss <= self._best + RISE * abs(self._best):
            self._best, self._rises = min(self._best, loss), 0
            return ""
        self._rises += 1
        if self._rises < STRIKES:
            return ""
        best, self._best, self._rises = self._best, loss if isfinite(loss) else self._best, 0
        return f"belong to losses that have risen from {best:.4g} to {loss:.4g}"

    def _go_back(self, root: Root, look: Look, why: str) -> None:
        assert root.compressed is not None
        flat, name, counters = look.flat, look.name, root.counters
        if look.what is GRADIENTS:
            before = flat.codec
            codec = FEW if self._config.bits(before) < 4 else MORE
            _encode_by(root, flat, codec)
        else:
            before, codec = str(self._config.weights), "exact"
            flat.always_exact = True
        self._codecs[name] = codec
        self._strikes.pop(name, None)
        self._least.pop(name, None)
        self._asked = []
        counters.why = f"messages of {name} and what goes with it, {before}, {why}: {codec} from now on"
        if dist.get_rank() == int(root.drafts[0].ranks.mesh.mesh.min()):
            _log.warning("%s", counters.why)

    # In checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What judgements to come depend on, alike on all ranks but for losses."""
        return {
            "passes": self._passes,
            "codecs": dict(self._codecs),
            "strikes": dict(self._strikes),
            "least": dict(self._least),
            "rises": (self._best, self._rises),
            "losses": (float(self._loss), self._losses),
        }

    def resume(self, root: Root, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` once returned."""
        self._passes = state["passes"]
        self._codecs, self._strikes, self._least = (dict(state[name]) for name in ("codecs", "strikes", "least"))
        (self._best, self._rises), (self._loss, self._losses) = state["rises"], state["losses"]
        self._reduced, self._looks, self._asked = -1, [], []
        _leave(root)
        for flat, _ in list(encoded_of(root)):
            name, codec = Look.name_of(GRADIENTS, flat), self._config.codec_for(flat.pieces[0].cut.name)
            back = self._codecs.get(name, codec)
            if AUTO in (codec, back) or self._config.bits(back) <= self._config.bits(codec):
                self._codecs.pop(name, None)  # this run was given as many bits by itself, or goes by the network
                back = codec
            if back != flat.codec:
                _encode_by(root, flat, back)
            if back == codec != AUTO:
                root.counters.chosen.pop(_unit_of(root, flat), None)
        for _, flat in all_following(root):
            flat.always_exact = Look.name_of(CHANGES, flat) in self._codecs


@torch.inference_mode(False)  # what is made here is trained with
def _encode_by(root: Root, flat: Flat, codec: str) -> None:
    """Have its gradients encoded by this codec from now on; nothing is under way."""
    flat.codec, flat.lowrank = codec, None
    if root.device.type == "cuda":
        torch.cuda.synchronize(root.device)  # messages may get a larger buffer
    root.reductions.encode_anew(flat)
    root.counters.chosen[_unit_of(root, flat)] = codec


def _unit_of(root: Root, flat: Flat) -> str:
    return next(unit.name for unit in root.units if flat in unit.flats)


def _watched(root: Root) -> Iterator[tuple[Flat, ChunkSum | SharedSum]]:
    """Buffers that have something to go back to; those that ``"auto"`` chooses for have not."""
    assert root.compressed is not None
    for flat, exchange in encoded_of(root):
        if flat.codec != AUTO and root.compressed.config.bits(flat.codec) < 16:
            yield flat, exchange


def _told(root: Root) -> Iterator[tuple[Following, Flat]]:
    """Buffers whose weights are told of changes; that of a shard of one is none."""
    for following, flat in all_following(root):
        if not flat.always_exact:
            yield following, flat


def _leave(root: Root) -> None:
    """Look at messages no more."""
    for _, exchange in encoded_of(root):
        exchange.shortfall = None
    for following, _ in all_following(root):
        following.shortfalls.clear()
