"""Units of several data-parallel meshes in one forward: experts sharded across fewer ranks than the rest of a model.

    ranks          0   1   2   3
    mesh of root   a   a   a   a      all parameters but the experts' are sharded across four ranks
    experts        a   b   a   b      expert parallelism has divided these in two, and each half is sharded across two

Each mesh has communicators of its own; streams, buffers, the order of operations and what ranks exchange at the end of
a backward are those of the root, whose mesh has all ranks of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from yafsdp_cc.engine.replicated import ReplicatedParams
from yafsdp_cc.engine.spec import EXACT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from yafsdp_cc.engine.spec import ParamGroupSpec
    from yafsdp_cc.ranks.mesh import MeshInfo


NO_FLAGS = (0.0,)
"""Flags that an all-reduce on a mesh other than the root's carries: one number that nobody reads."""


def check_mesh(spec: ParamGroupSpec, root: ParamGroupSpec) -> None:
    """Raise a ``ValueError`` if the mesh of a unit does not let it run in the forwards of ``root``."""
    mesh, outer = spec.info.mesh, root.info.mesh
    if mesh == outer:
        return
    what = ""
    if mesh.device_type != outer.device_type:
        what = "both take devices of one kind"
    elif not set(mesh.mesh.flatten().tolist()) <= set(outer.mesh.flatten().tolist()):
        what = (
            "the mesh of the root has to have all ranks of the other, for these compare at its end what they have run"
        )
    elif _replicas(spec.info) != _replicas(root.info):
        what = "both take the same replicas: meshes whose first dimension has the same ranks, or two without replicas"
    elif spec.collectives is not EXACT or root.collectives is not EXACT:
        what = "a compression takes one mesh for all: leave compression out"
    if what:
        raise ValueError(f"'{spec.name}' is sharded across {mesh}, '{root.name}' around it across {outer}: {what}")


def _replicas(info: MeshInfo) -> list[int]:
    group = info.replicate_group
    return [] if group is None else dist.get_process_group_ranks(group)


class ReplicatedParamsOfMeshes(ReplicatedParams):
    """The replicated parameters of a root whose units have several meshes, each reduced over its own.

    Args:
        own: parameters on the root's mesh, whose all-reduce also carries the flags that ranks exchange.
        others: parameters on other meshes.
    """

    def __init__(self, own: ReplicatedParams, others: Sequence[ReplicatedParams]) -> None:
        self._own, self._others = own, others
        self._all = (own, *others)
        self.flats = tuple(flat for each in self._all for flat in each.flats)
        self.params = tuple(param for each in self._all for param in each.params)
        self._leaves = tuple(leaf for each in self._all for leaf in each._leaves)

    @property
    def dtype(self) -> torch.dtype:
        return self._own.dtype

    def sent_bytes(self) -> int:
        return sum(each.sent_bytes() for each in self._all)

    @property
    def device_bytes(self) -> int:
        return sum(each.device_bytes for each in self._all)

    def all_reduce(self, flags: Sequence[float]) -> Tensor:
        totals = self._own.all_reduce(flags)
        for other in self._others:
            other.all_reduce(NO_FLAGS)
        return totals

    def add_to_grads(self) -> None:
        for each in self._all:
            each.add_to_grads()
