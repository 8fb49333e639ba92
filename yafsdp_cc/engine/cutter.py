"""From plain parameters to sharded ones: made equal on all ranks, cut, and let go."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from yafsdp_cc.compression import EXACT
from yafsdp_cc.engine.flat import Divisor, Flat, Piece
from yafsdp_cc.engine.layout import ALIGNMENT, VECTOR, Layout
from yafsdp_cc.engine.offload import HostBlock, HostFlat
from yafsdp_cc.engine.small import SmallBlock
from yafsdp_cc.engine.tensor import Cut, flat_dtensor
from yafsdp_cc.engine.tensor_parallel import TensorParallel, held

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.compression import Compression
    from yafsdp_cc.engine.host import Host
    from yafsdp_cc.engine.ranks import Ranks
    from yafsdp_cc.plan import OwnedParameter

    Prepare: TypeAlias = Callable[[Sequence[OwnedParameter]], None]


_GONE = "_yafsdp_cc_cut"


def cut_of(parameter: nn.Parameter) -> Cut | None:
    """Of a parameter that was whole once, what it was cut as; it has no elements any more."""
    cut: Cut | None = parameter.__dict__.get(_GONE)
    return cut


class _Kind(NamedTuple):
    """Parameters that can share a flat buffer."""

    dtype: torch.dtype
    trainable: bool
    is_meta: bool
    codec: str = EXACT
    """Of gradients."""


class Cutter:
    """Cuts parameters across ``ranks``; ``prepare`` first gives them their values, some at a time.

    Shards are in the memory of ``host``, or without one on the ranks' device.
    """

    def __init__(
        self,
        ranks: Ranks,
        policy: MixedPrecisionPolicy,
        prepare: Prepare,
        host: Host | None = None,
        compression: Compression | None = None,
    ) -> None:
        self._ranks = ranks
        self._compression = compression
        self._policy = policy
        self._prepare = prepare
        self._host = host
        self._world: int = ranks.group.size()
        self._rank: int = ranks.group.rank()
        self._divisor = Divisor(ranks.mesh.size(), ranks.device)

    def flats(self, owned: Sequence[OwnedParameter]) -> tuple[Flat, ...]:
        """The flats of one unit."""
        self._prepare(owned)
        kinds: dict[_Kind, list[OwnedParameter]] = defaultdict(list)
        for each in owned:
            parameter = each.parameter
            kind = _Kind(parameter.dtype, parameter.requires_grad, parameter.is_meta)
            if (config := self._compression) is not None:
                kind = kind._replace(codec=config.codec_for(each.name))
            kinds[kind].append(each)
        return tuple(self._flat(kind, members) for kind, members in kinds.items())

    def small_blocks(self, owned: Sequence[OwnedParameter]) -> tuple[SmallBlock, ...]:
        """The blocks of what is too small to be cut."""
        self._prepare(owned)
        kinds: dict[_Kind, list[OwnedParameter]] = defaultdict(list)
        for each in owned:
            kinds[_Kind(each.parameter.dtype, True, each.parameter.is_meta)].append(each)
        return tuple(self._small_block(kind, members) for kind, members in kinds.items())

    def _small_block(self, kind: _Kind, owned: Sequence[OwnedParameter]) -> SmallBlock:
        layout = Layout.of([held(each.parameter).shape for each in owned], 1, VECTOR)
        master = self._master(layout.numel, kind)
        pieces = []
        for each, extent in zip(owned, layout.extents, strict=True):
            piece = Piece(self._cut(each, None), each.sites, extent)
            piece.span = (extent.offset, extent.end)
            self._replace(piece, master, each.parameter)
            pieces.append(piece)
        rest = (pieces, master, self._compute(kind.dtype), self._divisor)
        return SmallBlock(*rest) if self._host is None else HostBlock(self._host, self._ranks.device, *rest)

    def _flat(self, kind: _Kind, owned: Sequence[OwnedParameter]) -> Flat:
        block = 0 if self._compression is None else self._compression.block
        layout = Layout.of([held(each.parameter).shape for each in owned], self._world, max(ALIGNMENT, block))
        master = self._master(layout.chunk, kind)
        pieces = []
        for each, extent in zip(owned, layout.extents, strict=True):
            piece = Piece(self._cut(each, layout.bounds(extent)), each.sites, extent)
            piece.span = layout.owned(extent, self._rank)
            self._replace(piece, master, each.parameter)
            pieces.append(piece)
        compute = self._compute(kind.dtype)
        rest = (pieces, layout, master, compute, self._policy.reduce_dtype or compute, self._divisor)
        flat = Flat(*rest) if self._host is None else HostFlat(self._host, *rest)
        flat.codec = kind.codec
        return flat

    def _cut(self, owned: OwnedParameter, bounds: tuple[int, ...] | None) -> Cut:
        parameter, mesh = owned.parameter, self._ranks.mesh
        parallel = TensorParallel.of(owned.name, parameter, mesh) if isinstance(parameter, DTensor) else None
        return Cut(owned.name, held(parameter).shape, mesh, bounds, parallel)

    def _master(self, numel: int, kind: _Kind) -> Tensor:
        if self._host is not None and not kind.is_meta:
            return self._host.zeros(numel, kind.dtype)
        return torch.zeros(numel, dtype=kind.dtype, device="meta" if kind.is_meta else self._ranks.device)

    def _compute(self, dtype: torch.dtype) -> torch.dtype:
        return self._policy.param_dtype or dtype if dtype.is_floating_point else dtype

    @torch.no_grad()
    def _replace(self, piece: Piece, master: Tensor, whole: nn.Parameter) -> None:
        """Put the sharded parameter where the whole one was, and free that."""
        local = piece.range_of(master)
        local.copy_(piece.cut.range_of(held(whole)))
        parameter = nn.Parameter(flat_dtensor(local, piece.cut), requires_grad=whole.requires_grad)
        parameter.__dict__.update(whole.__dict__)  # what users and frameworks have noted on it
        piece.parameter, piece.local = parameter, local
        piece.install(parameter)
        if isinstance(whole, DTensor):
            whole._local_tensor = whole._local_tensor.new_empty(0)
        else:
            whole.data = whole.new_empty(0)
        whole.__dict__[_GONE] = piece.cut
