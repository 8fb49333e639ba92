"""The plan of an engine as built: every figure read off its layouts and buffers, before the first step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from yafsdp_cc.compression import EXACT, LOW_RANK
from yafsdp_cc.engine.following import Following
from yafsdp_cc.engine.near import NearFollowing
from yafsdp_cc.engine.offload import HostBlock, HostFlat
from yafsdp_cc.plan import (
    Plan,
    PlannedChoice,
    PlannedHost,
    PlannedRing,
    PlannedSmall,
    PlannedUnit,
    PlannedWire,
)
from yafsdp_cc.wire.codec import codec_of
from yafsdp_cc.wire.factored import sent_bytes
from yafsdp_cc.wire.lowrank import matrices_of, numel_of

CHOICES = ("bf16", "int8", "int4", "ternary", "onebit", LOW_RANK)
"""Codecs of gradients whose cost a plan compares, besides the one in use."""

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.engine.unit import Unit
    from yafsdp_cc.plan import Role


def plan_for(root: Root) -> Plan:
    """What the engine holds, and what a training step will send."""
    units = [unit for unit in root.units if unit.flats]
    flats = [flat for unit in units for flat in unit.flats]
    trainable = [flat for flat in flats if flat.trainable]
    on_device = [flat for flat in flats if not isinstance(flat, HostFlat)]
    pieces = [piece for unit in units for piece in unit.pieces]
    small, replicas = root.small, root.reductions.replicas
    return Plan(
        world=root.world,
        replicas=1 if replicas is None else replicas.world,
        units=tuple(_unit(root, unit) for unit in units),
        rings=tuple(_ring(root, role) for role in root.weight_rings),
        small=PlannedSmall(
            parameters=len(small.pieces),
            elements=sum(piece.extent.numel for piece in small.pieces),
            bytes=small.owned_bytes,
        ),
        wire=PlannedWire(
            gather_forward=sum(_sent(root, unit, place) for unit in units for place in _gathered(root, unit)),
            gather_backward=sum(_gathered_again(root, unit) for unit in _regathered(root)),
            reduce=sum(reduced_bytes(root, flat) for flat in trainable),
            small=small.wire_bytes(replicas),
            replicas=_shared(root),
            second=_from_second(root, units),
        ),
        parameter_shard_bytes=sum(flat.master.nbytes for flat in on_device),
        gradient_shard_bytes=sum(flat.gradients.buffer.nbytes for flat in on_device if flat.gradients is not None),
        replica_bytes=0 if replicas is None else replicas.owned_bytes,
        second_shard_bytes=sum(unit.second.owned_bytes for unit in units if unit.second is not None),
        receive_bytes=root.reductions.receive_bytes,
        residual_bytes=root.reductions.residual_bytes,
        late_bytes=root.reductions.late_bytes,
        choices=_choices(root, trainable),
        adamw_bytes=2 * sum(piece.local.nbytes for piece in (*pieces, *small.pieces) if piece.parameter.requires_grad),
        change_bytes=0 if root.encoded_change is None else root.encoded_change.room.owned_bytes,
        crossing_bytes=0 if root.crossings is None else root.crossings.owned_bytes,
        host=_host(root, flats),
        chosen="" if root.autotuner is None else root.autotuner.summary,
    )


def _host(root: Root, flats: Sequence[Flat]) -> PlannedHost | None:
    """What was offloaded, if something was."""
    if root.crossings is None:
        return None
    offloaded = [flat for flat in flats if isinstance(flat, HostFlat)]
    blocks = [block for block in root.small.blocks if isinstance(block, HostBlock)]
    parts: list[HostFlat | HostBlock] = [*offloaded, *blocks]
    pieces = [piece for part in parts for piece in part.pieces]
    return PlannedHost(
        parameters=sum(flat.master.nbytes for flat in offloaded),
        gradients=sum(flat.gradients.buffer.nbytes for flat in offloaded if flat.gradients is not None),
        small=root.small.host_bytes,
        adamw=2 * sum(piece.local.nbytes for piece in pieces if piece.parameter.requires_grad),
    )


def _shared(root: Root) -> int:
    """Bytes to sum over replicas what the shard's ranks have summed."""
    replicas = root.reductions.replicas
    return 0 if replicas is None else replicas.wire_bytes()


def _choices(root: Root, flats: Sequence[Flat]) -> tuple[PlannedChoice, ...]:
    """What codecs of gradients would cost: those that are compared always, and the one in use."""
    if root.compressed is None:
        return ()
    names = dict.fromkeys((*CHOICES, *root.compressed.config.codecs))
    return tuple(_choice(root, flats, name) for name in names if name != EXACT)


def _choice(root: Root, flats: Sequence[Flat], name: str) -> PlannedChoice:
    """What it would cost to encode all gradients by the codec of a ``name``."""
    assert root.compressed is not None
    config, replicas = root.compressed.config, root.reductions.replicas
    encoded = [flat for flat in flats if root.compressed.encodes(flat)]
    if root.compressed.over_replicas and replicas is not None:
        ranks, kept, parts = replicas.world, 1, [_own_range(root, flat) for flat in encoded]
    else:
        ranks, kept, parts = root.world, root.world - 1, [(0, flat.layout.numel) for flat in encoded]
    kept *= sum(flat.layout.chunk for flat in encoded)
    if name == LOW_RANK:
        reduce = sum(map(partial(_factored, ranks, config.matrix_rank), encoded, parts))
    else:
        codec = codec_of(name, config.block)
        reduce = (ranks - 1) * sum(codec.message_bytes(flat.layout.chunk) for flat in encoded)
    return PlannedChoice(
        codec=name,
        reduce=reduce,
        residual={"fp32": 4 * kept, "bf16": 2 * kept, "int8": kept + 4 * kept // config.block},
    )


def _own_range(root: Root, flat: Flat) -> tuple[int, int]:
    first = root.reductions.exchange.rank * flat.layout.chunk
    return first, first + flat.layout.chunk


def _factored(ranks: int, rank: int, flat: Flat, part: tuple[int, int]) -> int:
    """Bytes that one of ``ranks`` sends, on average, to sum factors of ``rank`` of a range of a flat."""
    matrices = matrices_of(flat.layout.places, rank, *part)
    return sum(sent_bytes(numel_of(*matrices, rank, is_right), ranks) for is_right in (False, True)) // 2


def reduced_bytes(root: Root, flat: Flat) -> int:
    """Bytes to sum gradients over the ranks of a shard, when nothing is in its warm-up any more."""
    encoded = root.reductions.encoded_of(flat)
    if encoded is not None:
        return encoded.planned_bytes()
    return flat.layout.numel * flat.wire.itemsize // root.world * (root.world - 1)


def regathered_bytes(root: Root, unit: Unit) -> int:
    """Bytes to all-gather the weights of ``unit`` for its backward, 0 if they are still there."""
    return _gathered_again(root, unit) if unit in _regathered(root) else 0


def _gathered(root: Root, unit: Unit) -> list[int]:
    """Which of a unit's flats a forward gathers: not those of frozen weights that stay where the first step has
    gathered them, in a slot that nobody else uses."""
    shared = any(other.home.slot is unit.home.slot for other in root.units if other is not unit)
    return [place for place, flat in enumerate(unit.flats) if shared or flat.trainable]


def _gathered_again(root: Root, unit: Unit) -> int:
    places = range(len(unit.flats))
    if unit.second is None:
        return sum(_sent(root, unit, place) for place in places)
    return sum(_from_near(unit, place) for place in places)


def _from_near(unit: Unit, place: int) -> int:
    """Bytes to gather a flat from a second shard."""
    return 0 if unit.second is None else unit.second.gather.sent_bytes(unit.home.wholes[place])


def _from_second(root: Root, units: Sequence[Unit]) -> int:
    """Of the gathers, what second shards give."""
    told = [unit for unit in units if isinstance(unit.following, NearFollowing)]
    forward = sum(_from_near(unit, place) for unit in told for place in _gathered(root, unit))
    return forward + sum(_gathered_again(root, unit) for unit in _regathered(root) if unit.second is not None)


def _sent(root: Root, unit: Unit, place: int) -> int:
    """Bytes to gather a flat from its shards, when nothing is in its warm-up any more."""
    if isinstance(unit.following, NearFollowing):
        return unit.following.told_bytes(place) + _from_near(unit, place)
    message = unit.home.messages[place] if unit.home.messages else None
    if unit.encoded is None or message is None or unit.flats[place].always_exact:
        return root.gather.sent_bytes(unit.home.wholes[place])
    return unit.encoded.sent_bytes(message)


def _regathered(root: Root) -> list[Unit]:
    """Units whose slot holds another one when the backward comes to them, if the forward ran them in module order."""
    last = {id(unit.home.slot): unit for unit in root.units}
    return [
        unit for unit in root.units if unit.flats and unit.read_in_backward and last[id(unit.home.slot)] is not unit
    ]


def _unit(root: Root, unit: Unit) -> PlannedUnit:
    trainable = [piece for piece in unit.pieces if piece.parameter.requires_grad]
    ring = root.weight_rings[unit.role]
    return PlannedUnit(
        name=unit.name,
        role=unit.role,
        parameters=len(unit.pieces),
        trainable=len(trainable),
        elements=sum(piece.extent.numel for piece in unit.pieces),
        padded=sum(flat.layout.numel for flat in unit.flats),
        dtypes=tuple(dict.fromkeys(str(flat.compute).removeprefix("torch.") for flat in unit.flats)),
        slot=[*ring.slots, *ring.kept].index(unit.home.slot),
    )


def _ring(root: Root, role: Role) -> PlannedRing:
    weights, gradients = root.weight_rings[role], root.reductions.rings.get(role)
    return PlannedRing(
        role=weights.role,
        weight_slots=len(weights.slots) + len(weights.kept),
        following=len(
            {id(unit.home.slot) for unit in root.units if unit.role == role and type(unit.following) is Following}
        ),
        weight_slot_bytes=weights.size,
        gradient_slots=len(gradients.slots) if gradients is not None else 0,
        gradient_slot_bytes=gradients.slots[0].buffer.nbytes if gradients is not None else 0,
    )
