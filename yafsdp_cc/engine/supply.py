"""A unit's weights over time: in its slot at home, in a buffer of their own, or held for somebody outside a forward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from yafsdp_cc.engine.following import Following
from yafsdp_cc.engine.journal import Note
from yafsdp_cc.engine.slots import Slot
from yafsdp_cc.engine.steps import UNKNOWN
from yafsdp_cc.engine.windows import Weights, weight_bytes
from yafsdp_cc.profiling.spans import Span
from yafsdp_cc.wire.encoded import EncodedGather

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.lanes import Start, Tail
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.engine.second import SecondShard
    from yafsdp_cc.wire.change import EncodedChange
    from yafsdp_cc.wire.exchange import Gather


_transforms = torch._C._functorch.peek_interpreter_stack


class Supply:
    """What owns slots of weights, and gathers into them. ``acquire`` and ``regain`` give weights, whole and ready."""

    def __init__(self, root: Root, name: str, flats: Sequence[Flat]) -> None:
        self.root = root
        self.name = name
        self.flats = tuple(flats)
        self.home: Weights
        """Where the weights are gathered unless that slot is in use."""
        self.gather: Gather = root.gather
        self.encoded: EncodedGather | EncodedChange | None = None
        """By which weights cross ranks encoded."""
        self.following: Following | None = None
        """How weights in the home slot follow their shards, if by encoded changes."""
        self.second: SecondShard | None = None
        """A shard of whole weights within fewer, nearer ranks."""
        self.held: Weights | None = None
        """Weights that ``unshard`` has asked for outside of a forward."""
        self._kept = 0
        """How often the home slot is kept for what a recomputation has saved."""
        self.gather_note, self.change_note = Note.of("gather", name), Note.of("change", name)
        self.gather_span = Span("gather", name)

    def encode(self, gather: EncodedGather | None, change: EncodedChange | None) -> None:
        """Let weights cross ranks by ``change`` where they stay whole, else by ``gather``."""
        self.encoded = change or gather
        self.following = Following(self, change) if change is not None and self.flats else None

    def stamp(self) -> tuple[int, ...]:
        """Changes whenever the shard does, flat by flat."""
        return tuple([flat.master._version for flat in self.flats])

    def holds(self, slot: Slot) -> bool:
        """Whether the slot has, or is being filled with, this unit's present weights."""
        return slot.owner is self and slot.stamp == self.stamp()

    def prefetch(self) -> None:
        """Gather into the home slot unless somebody uses it. A prefetch that is lost costs time, nothing else."""
        slot = self.home.slot
        if self.flats and slot.users == 0 and not self.holds(slot):
            self._gather(self.home)

    def acquire(self) -> Weights:
        """The weights, whole and ready, in a slot that stays as it is until ``release``."""
        if self.held is not None and not self.holds(self.held.slot):
            self.let_hold_go()  # the weights have changed since
        weights = self.held or self.home
        slot = weights.slot
        if not self.holds(slot):
            if slot.users:
                weights = self._spill()
                slot = weights.slot
            self._gather(weights)
        slot.users += 1
        self.root.journal.wait(slot.ready)
        return weights

    def hold(self) -> None:
        """Gather the weights, and keep them whole until ``let_hold_go``."""
        if self.held is not None and self.holds(self.held.slot):
            return
        self.let_hold_go()
        self.held, slot = self.home, self.home.slot
        if not self.holds(slot):
            lane = self.root.gather_lane
            lane.follow(lane.reached())  # where weights may just have been written: no pass has followed it so far
            if slot.users:
                self.held = self._spill()
            self._gather(self.held)
        self.held.slot.users += 1

    def let_hold_go(self) -> None:
        """Release what ``hold`` has taken."""
        held, self.held = self.held, None
        if held is not None:
            held.slot.release(self.root.gather_lane)

    def regain(self, weights: Weights, *, needed: bool) -> bool:
        """Put this unit's weights back where a forward has read them, and hold the slot; whether it could.

        Where they are not ``needed`` for sure, another unit that uses the slot is left alone.
        """
        slot = weights.slot
        if not weights.spilled and not self.holds(slot):
            if slot.users:
                if not needed:
                    return False
                raise RuntimeError(
                    f"the weights of unit '{self.name}' are needed where those of '{getattr(slot.owner, 'name', '?')}' "
                    "still lie: an earlier backward was interrupted. Run the forward again before the next backward"
                )
            self._gather(weights)
        slot.users += 1
        self.root.journal.wait(slot.ready)
        return True

    def let_go(self) -> None:
        """Nothing that a recomputation has saved will be read any more."""
        while self._kept:
            self._kept -= 1
            self.home.slot.release(self.root.gather_lane)

    def _gather(self, weights: Weights) -> None:
        if _transforms() is not None:
            raise NotImplementedError(
                f"a transform of torch.func around unit '{self.name}' of a sharded model: collectives do not go "
                "through those. Use torch.autograd, or an unsharded model"
            )
        root, slot = self.root, weights.slot
        slot.ready.settle()
        stamp = self.stamp()
        # Frozen weights that lie there still are not gathered again because others, an adapter's, have changed.
        before = slot.stamp if slot.owner is self else (UNKNOWN,) * len(stamp)
        stale = [place for place, version in enumerate(stamp) if before[place] != version]
        second = self.second
        if second is not None and second.stamp == stamp:
            sends = [_exact(second.gather, weights.wholes[place], second.parts[place]) for place in stale]
        else:
            sends = [self._from_shard(weights, place, before[place]) for place in stale]
        tails = [send.tail for send in sends if send.tail is not None]
        if second is not None and second.stamp != stamp:
            tails.append(partial(second.take, weights.wholes, stamp))

        def start(asynchronous: bool) -> list[dist.Work]:
            return [work for send in sends for work in send.start(asynchronous)]

        def tail() -> None:
            for each in tails:
                each()

        slot.owner = None  # unless this goes well: what is half changed is to be gathered anew
        slot.fills += 1
        with self.gather_span.of(sum(send.payload for send in sends)):
            root.gather_lane.issue(slot.ready, start, tail if tails else None, after=slot.free)
        root.counters.gathered_bytes += sum(send.sent_bytes for send in sends)
        slot.owner, slot.stamp = self, stamp
        root.journal.write(self.gather_note)

    def _from_shard(self, weights: Weights, place: int, before: int) -> Send:
        """Gather the ``place``-th flat, of version ``before`` where it lies, from the shards of all ranks."""
        flat, whole, gather = self.flats[place], weights.wholes[place], self.gather
        encoded, message = self.encoded, weights.messages[place] if weights.messages else None
        start: Start | None = None
        if message is not None and self.root.is_warm:
            if self.following is not None:
                start = self.following.start(flat, before, message, whole)
            elif isinstance(encoded, EncodedGather):
                start = partial(_rounded, encoded, gather, message, whole, flat.master)
        if start is None or encoded is None or message is None:
            return _exact(gather, whole, flat.master)
        if self.following is not None:
            self.root.journal.write(self.change_note)
        return Send(start, message.nbytes, encoded.sent_bytes(message), partial(encoded.finish, message, whole))

    def _spill(self) -> Weights:
        self.root.counters.spills += 1
        with torch.inference_mode(False):  # a later backward may read it
            # Changes are told to what every rank has at home; what lies elsewhere for a while is gathered exactly.
            encoded = None if self.following is not None else self.encoded
            slot = Slot(weight_bytes(self.flats, encoded), self.root.device, self.root.gather_lane)
            slot.passed(self.root.gather_lane)  # the lane may fill it when what lay there before is no longer read
            return Weights(slot, self.flats, encoded, spilled=True)


class Send(NamedTuple):
    """One flat's part of a gather."""

    start: Start
    payload: int
    """Bytes of all ranks' parts."""
    sent_bytes: int
    """Bytes that this rank sends."""
    tail: Tail | None = None
    """What is to be done with what has come."""


def _exact(gather: Gather, whole: Tensor, shard: Tensor) -> Send:
    """Gather ``whole`` in its own dtype."""
    return Send(partial(gather.send, whole, shard), whole.nbytes, gather.sent_bytes(whole))


def _rounded(
    encoded: EncodedGather, gather: Gather, message: Tensor, whole: Tensor, shard: Tensor, asynchronous: bool
) -> list[dist.Work]:
    return encoded.send(message, gather.brought(whole, shard), asynchronous)
