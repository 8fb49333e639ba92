"""What of a model crosses ranks encoded, while it is trained: who encodes what, and since when."""

from __future__ import annotations

import warnings
import weakref
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.compression import AUTO, EXACT, LOW_RANK
from yafsdp_cc.engine.clip import Clip
from yafsdp_cc.engine.flat import Divisor
from yafsdp_cc.engine.guard import Guard
from yafsdp_cc.wire.chosen import ChosenReduce
from yafsdp_cc.wire.chunks import ChunkSum
from yafsdp_cc.wire.encoded import EncodedReduce, EncodedSum, counts_of
from yafsdp_cc.wire.factored import FactoredReduce, FactoredSum
from yafsdp_cc.wire.feedback import Recursion, Residual
from yafsdp_cc.wire.late import Late
from yafsdp_cc.wire.lowrank import LowRank, matrices_of
from yafsdp_cc.wire.momentum import Momentum

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import TypeVar

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.compression import Compression
    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.lanes import Start
    from yafsdp_cc.engine.lead import Lead
    from yafsdp_cc.engine.ranks import Ranks
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.engine.unit import Unit
    from yafsdp_cc.wire.codec import Codec
    from yafsdp_cc.wire.exchange import Reduce
    from yafsdp_cc.wire.post import Post
    from yafsdp_cc.wire.shared import SharedSum

    _Exchange = TypeVar("_Exchange", ChunkSum, SharedSum)


class Phase(Enum):
    """How gradients that can be encoded cross ranks, as an optimizer says."""

    EXACT = "exact"
    KEPT = "kept"
    """Exactly, and into ``Flat.exact`` as they are before anybody clips them."""
    ENCODED = "encoded"
    BOTH = "both"
    """Encoded, and exactly besides: into ``Flat.exact``."""
    LOCAL = "local"
    """Over the ranks of a shard alone: every replica has a mean of its own, and updates are encoded when all meet."""

    @property
    def encodes(self) -> bool:
        return self in (Phase.ENCODED, Phase.BOTH, Phase.LOCAL)


class Compressed:
    """One model's compression; it outlives the exchanges of an assembly.

    Raises:
        ValueError: the scope is replicas, and there are none.
    """

    def __init__(self, config: Compression, ranks: Ranks) -> None:
        self.config = config
        self.steps = 0
        """Optimizer steps since compression was asked for."""
        self._told = False
        self._seen: tuple[tuple[int, ...], ...] = ()
        self.loss_scale = 1.0
        """What losses are multiplied by, and so gradients and residuals."""
        self.are_apart = False
        """Whether replicas have made steps by themselves since they met (``engine.meeting``)."""
        self.steps_said = 1
        """How many of its steps a replica has said when they met last."""
        if config.scope == "replicate" and ranks.replicas is None:
            raise ValueError(
                "compression has scope='replicate', and the mesh has no replicas: pass a mesh (replicate, shard), or "
                "scope='auto'"
            )
        self.over_replicas = ranks.replicas is not None and config.scope != "shard"
        """Whether sums over replicas are encoded, and those over the ranks of a shard exact."""
        if config.delayed and ranks.replicas is not None:
            raise ValueError(
                f"compression has delayed={config.delayed!r}, and the mesh has replicas: sums over these come after "
                "those over a shard's ranks, and would be waited for: leave delayed out, or pass a flat mesh"
            )
        self.phase: Phase | None = None
        """What an optimizer says about the next backward; None where none leads the wire (``engine.lead``)."""
        self.leader: weakref.ref[Lead] | None = None
        """Who says so."""
        self.beta = 0.0
        """The decay of the momentum that residuals are, beside what is still to be said; 0 if they are not."""
        self.follows_scaler = False
        """Whether ``loss_scale`` is told when a ``GradScaler`` changes it."""
        self.share = 1.0
        """How much of a gradient that momentum takes in: 1 − beta of an average, 1 of a sum."""
        self.clip: Clip | None = None
        """What gradients are clipped by before they are sent, where momentum is."""
        self._divisors: weakref.WeakKeyDictionary[Divisor, Divisor] = weakref.WeakKeyDictionary()
        self.guard = Guard(config) if config.guard else None
        self.chosen: dict[Flat, str] = {}
        """The present codecs of buffers whose codec is tuned; the others are exact."""
        if self.over_replicas and AUTO in config.named:
            raise ValueError(
                "compression='auto' on a mesh (replicate, shard): what shows of sums over replicas is not known here. "
                "Name a codec for those, or say scope='shard' to choose for the sums within each replica"
            )

    @property
    def is_warm(self) -> bool:
        """Whether gradients are encoded now."""
        if self.phase is not None:
            return self.phase.encodes
        return self.steps >= self.config.warmup_steps

    @property
    def may_be_exact(self) -> bool:
        """Whether a later backward sums exactly what can be encoded."""
        return self.phase is not None or not self.is_warm

    def follow(self, lead: Lead, beta: float, share: float, max_grad_norm: float | None) -> None:
        """Be led by an optimizer from now on, whose momentum is what ``beta`` and ``share`` say."""
        self.leader, self.phase, self.beta, self.share = weakref.ref(lead), Phase.EXACT, beta, share
        self.steps_said = 1
        self.clip = Clip(max_grad_norm) if beta and max_grad_norm is not None else None
        self._divisors.clear()

    def is_momentum(self, flat: Flat) -> bool:
        """Whether sums of this flat's gradients are an optimizer's momentum now."""
        return flat.momentum is not None and self.beta > 0 and self.is_warm and self.encodes(flat)

    def keeps(self, flat: Flat) -> bool:
        """Whether exact sums of this flat's gradients are kept besides."""
        return self.phase is Phase.KEPT and self.encodes(flat)

    def prepare(self, flat: Flat, gradients: Tensor) -> None:
        """Clip, in place, what this rank is to say of a flat's gradients, and remember how much that is."""
        if self.clip is not None and (self.keeps(flat) or (self.is_warm and self.encodes(flat))):
            self.clip.clip(flat.pieces[0].cut.name, gradients, self.loss_scale)

    def prepared(self, flat: Flat, whole: Tensor, start: Start) -> Start:
        """The start of a sum of ``whole`` over the ranks of a shard, with what is done to it before."""
        if self.encodes(flat) and self.phase in (Phase.KEPT, Phase.BOTH):
            flat.reserve_exact()
        if self.clip is None or self.over_replicas:
            return start

        def prepared(asynchronous: bool) -> Sequence[dist.Work]:
            self.prepare(flat, whole)
            return start(asynchronous)

        return prepared

    def check_once(self, flat: Flat) -> None:
        """Refuse a second sum in a step where sums are momentum: it would decay twice."""
        if not self.is_momentum(flat):
            return
        for piece in flat.pieces:
            if piece.parameter.requires_grad and piece.parameter.grad is not None:
                raise RuntimeError(
                    f"'{piece.cut.name}' has a .grad already, and with the momentum form of a 1-bit optimizer a sum "
                    "over ranks is a step of the momentum: call optimizer.zero_grad(), which sets .grad to None, "
                    "before each step, and model.set_requires_gradient_sync(False) for all of its micro-batches but "
                    "the last"
                )

    def divisor_of(self, flat: Flat) -> Divisor:
        """What turns a sum over ranks into what ``.grad`` is to be: the mean, or the momentum."""
        mean = flat.divisor
        if not self.is_momentum(flat):
            return mean
        if mean not in self._divisors:
            self._divisors[mean] = Divisor(mean.factor / self.share, mean.tensor.device)
        return self._divisors[mean]

    def _units_of(self, flat: Flat) -> float:
        """What a sum over ranks is in multiples of: of one rank's gradient of an unscaled loss."""
        return flat.divisor.factor * self.loss_scale

    def _begin(self) -> None:
        """Say so at the first forward with a graph if its optimizer is to learn from few bits.

        From fewer than those that an optimizer outside of the 1-bit family is known to do well with.
        """
        config = self.config
        if self._told or self.phase is not None:
            return
        self._told = True
        few = [codec for codec in config.codecs if config.bits(codec) < 4]
        if few:
            warnings.warn(
                f"gradients={few[0]!r} and no optimizer of the 1-bit family: with fewer than 4 bits Adam's loss falls "
                "more slowly. A million parameters ended 0.02 nats per byte above exact sums with 'ternary', 0.04 with "
                "'onebit', 0.006 with 'int4' (docs/measurements.md). yafsdp_cc.optim.OneBitAdam is made for few bits",
                stacklevel=2,
            )

    def open(self, root: Root) -> None:
        """A pass begins."""
        self.look(root.units)
        if self.guard is not None and torch.is_grad_enabled():
            self.guard.look(root)

    def look(self, units: Iterable[Unit]) -> None:
        """Before a forward: count a step of the warm-up where the weights have changed since this was asked last."""
        if torch.is_grad_enabled():
            self._begin()
        if self.phase is not None or self.is_warm:
            return
        stamps = tuple(unit.stamp() for unit in units)
        if self._seen and stamps != self._seen:
            self.steps += 1
        self._seen = stamps

    def resume(self, steps: int) -> None:
        """Go on after so many steps, with weights that were loaded and so are no step's."""
        self.steps, self._seen = steps, ()

    def resume_clip(self, state: Mapping[str, float] | None, device: torch.device) -> None:
        """Go on with a state of ``clip``, or learn anew what is to be clipped."""
        lead = None if self.leader is None else self.leader()
        if self.clip is not None and lead is not None:
            self.clip.resume(state, device)
            lead.say_again()

    @property
    def weights(self) -> Codec | None:
        """The codec of gathered weights."""
        name = self.config.weights
        return None if name is None else self.config.make(name)

    def encodes(self, flat: Flat) -> bool:
        """Whether the gradients of ``flat`` are ever encoded."""
        return flat.codec != EXACT

    def reduce_for(self, flat: Flat, post: Post, name: str) -> ChunkSum:
        """The exchange of a flat's gradients among the ranks of a shard, by a ``post`` of its own if it is delayed."""
        numel = flat.layout.numel
        residual = self._residual(flat, post.world - 1, post.device)
        if flat.codec == LOW_RANK:
            assert residual is not None
            lowrank = self._low_rank(flat, 0, numel, name, post.device)
            return self._led(flat, FactoredReduce(post, lowrank, numel, residual, self._recursion))
        counts = self._counts(flat, post.device)
        counts = None if counts is None else counts.view(post.world, -1)
        codec = self.config.make(flat.codec)
        return self._led(flat, EncodedReduce(post, codec, numel, counts, residual, name, self._recursion))

    def chosen_for(self, flat: Flat, post: Post, exact: Reduce, name: str) -> ChosenReduce:
        """The same where the codec is tuned; ``exact`` has room for the flat."""
        numel = flat.layout.numel
        counts = self._counts(flat, post.device)
        counts = None if counts is None else counts.view(post.world, -1)
        codecs = [self.config.make(codec) for codec in self.config.candidates]
        chosen = ChosenReduce(post, exact, codecs, numel, flat.wire, counts, name, self._recursion)
        if (codec := self.chosen.get(flat, EXACT)) != EXACT:
            self._encode_by(codec, flat, chosen)
        return chosen

    def set_codec(self, flat: Flat, reduce: ChosenReduce, codec: str) -> None:
        """Reduce the gradients of ``flat`` with this codec from now on. A collective, with nothing in flight."""
        if codec == self.chosen.get(flat, EXACT):
            return
        self.chosen[flat] = codec
        if codec == EXACT:
            reduce.be_exact()
            flat.residual = None
        else:
            self._encode_by(codec, flat, reduce)

    def _encode_by(self, codec: str, flat: Flat, reduce: ChosenReduce) -> None:
        reduce.encode_by(self.config.make(codec), self._residual(flat, reduce.peers, reduce.device))

    def sum_for(self, flat: Flat, group: dist.ProcessGroup, rank: int, device: torch.device, name: str) -> SharedSum:
        """The sum of a flat's partial sums over replicas, where this is ``rank`` of the shard."""
        chunk = flat.layout.chunk
        residual = self._residual(flat, 1, device)
        if flat.codec == LOW_RANK:
            assert residual is not None
            lowrank = self._low_rank(flat, rank * chunk, (rank + 1) * chunk, f"{name}/{rank}", device)
            return self._led(flat, FactoredSum(group, device, lowrank, chunk, residual, self._recursion))
        counts = self._counts(flat, device)
        counts = None if counts is None else counts.view(flat.layout.world, -1)[rank : rank + 1]
        codec = self.config.make(flat.codec)
        return self._led(flat, EncodedSum(group, device, codec, chunk, counts, residual, name, self._recursion))

    @property
    def _recursion(self) -> Recursion:
        return Recursion(self.config.carry, taken=1 - self.beta)

    def _led(self, flat: Flat, exchange: _Exchange) -> _Exchange:
        """The exchange, with what outlives it: the momentum of the flat, and what is under way where sums land late."""
        if flat.momentum is not None and self.beta > 0:
            units, block = partial(self._units_of, flat), self.config.block
            exchange.momentum = Momentum(flat.momentum, self.beta, self.share, block, units)
        if flat.is_delayed and isinstance(exchange, ChunkSum):
            if flat.late is None:
                flat.late = Late(flat.layout.chunk, flat.divisor.tensor.device)
            exchange.late = flat.late
        return exchange

    def _residual(self, flat: Flat, messages: int, device: torch.device) -> Residual | None:
        """That of the flat, made now if there is none yet."""
        dtype = self.config.residual_dtype
        if flat.residual is None and dtype is not None:
            flat.residual = Residual(messages, flat.layout.chunk, dtype, self.config.block, device)
        return flat.residual

    def _low_rank(self, flat: Flat, first: int, last: int, name: str, device: torch.device) -> LowRank:
        """The factors of a range of the flat, made now if there are none yet."""
        if flat.lowrank is None:
            rank = self.config.matrix_rank
            flat.lowrank = LowRank(*matrices_of(flat.layout.places, rank, first, last), rank, name, device)
        return flat.lowrank

    def _counts(self, flat: Flat, device: torch.device) -> Tensor | None:
        extents = [(extent.offset, extent.end) for extent in flat.layout.extents]
        return counts_of(extents, flat.layout.numel, self.config.block, device)
