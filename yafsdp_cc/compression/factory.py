"""The factory that gives the engine compressed collectives, with the schedule, fallback and autotuner of a model."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING

from yafsdp_cc.compression.all_gather import ENCODED_DTYPES, DeltaAllGather, RoundedAllGather
from yafsdp_cc.compression.all_reduce import CompressedAllReduce
from yafsdp_cc.compression.autotune import CodecAutotuner
from yafsdp_cc.compression.codec import AUTO, LOW_RANK
from yafsdp_cc.compression.config import EXACT, ROUNDING
from yafsdp_cc.compression.fallback import CodecFallback
from yafsdp_cc.compression.powersgd import matrices_of, message_numels
from yafsdp_cc.compression.reduce_scatter import CompressedReduceScatter
from yafsdp_cc.compression.schedule import CompressionSchedule
from yafsdp_cc.engine.param import FlatParam
from yafsdp_cc.engine.spec import Collectives, PlannedChoice
from yafsdp_cc.forms.extensions import holds_bytes
from yafsdp_cc.ranks.mesh import replicate_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.compression.config import Compression
    from yafsdp_cc.engine.protocols import AllGather, AllReduce, Observer, ReduceScatter

COMPARED = ("bf16", "int8", "int4", "ternary", "onebit", LOW_RANK)
"""Codecs of gradients whose cost a plan compares, besides those in use."""


class CompressedCollectives(Collectives):
    """Makes the collectives of a model that is sharded with a ``Compression``."""

    def __init__(self, config: Compression, mesh: DeviceMesh) -> None:
        replicas = replicate_group(mesh)
        if config.scope == "replicate" and replicas is None:
            raise ValueError(
                "compression has scope='replicate', and the mesh has no replicas: pass a mesh (replicate, shard), or "
                "scope='auto'"
            )
        over_replicas = replicas is not None and config.scope != "shard"
        if over_replicas and AUTO in config.named:
            raise ValueError(
                "compression='auto' on a mesh (replicate, shard): which sums over replicas are exposed is not known "
                "here. Name a codec for those, or pass scope='shard' to choose for the sums within each replica"
            )
        self.config = config
        self._ranks = mesh.size(0 if over_replicas else mesh.ndim - 1)
        """Number of ranks of each encoded sum."""
        self.alignment = max(Collectives.alignment, config.block)
        self.schedule = CompressionSchedule(config, over_replicas=over_replicas)
        self.fallback = CodecFallback(self.schedule) if config.fallback else None
        self.autotuner = CodecAutotuner(self.schedule) if AUTO in config.named else None

    def flat_key(self, name: str, is_divided: bool) -> Hashable:
        # A codec's error in an element depends on the flat buffer's other elements and on the bounds of its chunks.
        # Both differ between ranks of tensor parallelism where the buffer has divided parameters, and the errors would
        # let the ranks' copies of the other parameters drift apart.
        return self.config.codec_for(name), is_divided

    def check_group(self, name: str, keeps_unsharded: bool) -> None:
        codec = self.config.weights
        if codec is not None and codec not in ROUNDING and not keeps_unsharded:
            raise ValueError(
                f"compression has weights={codec!r}, which encodes how weights have changed that every rank keeps, but "
                f"those of unit '{name}' are resharded after each forward (zero_stage=3, reshard_after_forward=True or "
                "a number of ranks): pass zero_stage=2, reshard_after_forward=False or weights='int8', which rounds"
            )

    def check_overrides(self, names: Collection[str]) -> None:
        self.config.check_overrides(names)

    def join(self, other: Collectives) -> None:
        theirs = other.config if isinstance(other, CompressedCollectives) else None
        if not isinstance(other, CompressedCollectives) or theirs != self.config:
            raise ValueError(
                f"parts of one model are sharded with different compressions, {self.config} and {theirs}: pass the "
                "same one to each fully_shard, and name exceptions in its overrides, as in "
                'Compression(overrides={"head*": "fp32"})'
            )
        self.schedule.join(other.schedule)

    def all_gather(self, flat: FlatParam, keeps_unsharded: bool) -> AllGather:
        name = self.config.weights
        is_encoded = flat.compute_dtype in ENCODED_DTYPES and not holds_bytes(flat.params[0])
        if name is None or flat.layout.world == 1 or not is_encoded:
            return super().all_gather(flat, keeps_unsharded)
        known = getattr(flat, "all_gather", None)
        if keeps_unsharded and isinstance(known, DeltaAllGather):
            known.schedule = self.schedule
            return known  # a new ``DeltaAllGather`` would not know which steps made the weights, and gather exactly
        kind = DeltaAllGather if keeps_unsharded else RoundedAllGather
        return kind(flat, self.schedule, self.config.make(name))

    def reduce_scatter(self, flat: FlatParam, has_replicas: bool) -> ReduceScatter:
        codec = self._codec_of(flat)
        if codec == EXACT or self.schedule.over_replicas:
            return super().reduce_scatter(flat, has_replicas)
        return CompressedReduceScatter(flat, self.schedule, codec)

    def all_reduce(self, flat: FlatParam) -> AllReduce:
        codec = self._codec_of(flat)
        if codec == EXACT or not self.schedule.over_replicas:
            return super().all_reduce(flat)
        return CompressedAllReduce(flat, self.schedule, codec)

    def observers(self) -> Sequence[Observer]:
        timer = None if self.autotuner is None else self.autotuner.timer
        return [each for each in (self.schedule, self.fallback, self.autotuner, timer) if each is not None]

    def planned_choices(self, flats: Sequence[FlatParam]) -> Sequence[PlannedChoice]:
        encoded = [flat for flat in flats if self._codec_of(flat) != EXACT]
        names = dict.fromkeys((*COMPARED, *self.config.codecs))
        return [self._planned_choice(encoded, name) for name in names if name != EXACT]

    def describe_choice(self) -> str:
        return "" if self.autotuner is None else self.autotuner.summary

    def _planned_choice(self, flats: Sequence[FlatParam], codec: str) -> PlannedChoice:
        """Return the bytes that a rank sends, and its residuals' bytes, if ``codec`` encodes gradients of ``flats``."""
        kept = sent = 0
        for flat in flats:
            own, over_replicas = flat.layout.chunks[flat.rank], self.schedule.over_replicas
            kept += own if over_replicas else flat.layout.numel - own
            if codec == LOW_RANK:
                sent += self._low_rank_bytes(flat)
            else:
                sizes = list(map(self.config.make(codec).message_bytes, flat.layout.chunks))
                sent += sizes[flat.rank] * (self._ranks - 1) if over_replicas else sum(sizes) - sizes[flat.rank]
        return PlannedChoice(
            codec=codec,
            reduce=sent,
            residual={"fp32": 4 * kept, "bf16": 2 * kept, "int8": kept + 4 * kept // self.config.block},
        )

    def _low_rank_bytes(self, flat: FlatParam) -> int:
        """Return the bytes that a rank sends, on average, to all-reduce a factor of each matrix of ``flat``."""
        layout, matrix_rank = flat.layout, self.config.matrix_rank
        first, last = 0, layout.numel
        if self.schedule.over_replicas:
            first, last = layout.starts[flat.rank : flat.rank + 2]
        matrices = matrices_of(layout.places, matrix_rank, first, last)
        numels = message_numels(*matrices, matrix_rank)
        return sum(2 * 4 * numel // self._ranks * (self._ranks - 1) for numel in numels) // 2

    def _codec_of(self, flat: FlatParam) -> str:
        """Return the codec of the gradients of ``flat``.

        Raises:
            ValueError: ``overrides`` give the parameters of ``flat``, by their present names, different codecs.
        """
        codecs = {param.spec.name: self.config.codec_for(param.spec.name) for param in flat.params}
        (first, codec), *others = codecs.items()
        for name, other in others:
            if other != codec:
                raise ValueError(
                    f"the gradients of '{first}' and '{name}' share a buffer, and overrides="
                    f"{dict(self.config.overrides)} encode one by {codec!r} and the other by {other!r}: write patterns "
                    "that also fit the names within the module that fully_shard is called on, or call shard(model)"
                )
        return codec
