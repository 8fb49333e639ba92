"""One sum for the gradient of an embedding that the first and the last stage of a pipeline share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


class TiedEmbedding:
    """The weight that the first stage of a pipeline embeds with, and the last one multiplies by for logits.

    Each of these two stages has the whole weight on each of its D data-parallel ranks. ``sum_gradients`` adds the
    gradients of both stages and takes the mean over data-parallel ranks in one all-reduce over all 2·D ranks, after
    ``schedule.step``: 2·V − V/D bytes for each rank and a weight of V bytes, where two all-reduces and a sum of two
    ranks take 3·V − 2·V/D. No engine may reduce the weight besides: shard the module with ``ignored_params={weight}``.

        embedding = TiedEmbedding(part.tokens.weight if place in (0, stages - 1) else None, mesh, "pipeline", "data")
        schedule.step(batch)
        embedding.sum_gradients()  # once, right before optimizer.step()

    The constructor is a collective over ``mesh``, and sets the weight of all ranks that have one to the first rank's.

    Args:
        weight: the weight on ranks of the first and of the last stage; None on others.
        mesh: mesh with dimensions for the pipeline and for data parallelism. Along any other dimension (tensor
            parallelism, for example) each coordinate sums its gradients separately.

    Raises:
        ValueError: the mesh has no such dimensions, the pipeline has one stage alone, a rank of the first or last stage
            has no weight, or a rank of another stage has one.

    Source: Song et al., "Optimus-CC", 2023 (fused embedding synchronisation).
    """

    def __init__(self, weight: nn.Parameter | None, mesh: DeviceMesh, pipeline: str, data: str) -> None:
        names = mesh.mesh_dim_names or ()
        if not {pipeline, data} <= set(names):
            raise ValueError(f"TiedEmbedding: the mesh has the dimensions {names}, and not {pipeline!r} and {data!r}")
        others = [name for name in names if name not in (pipeline, data)]
        ranks = mesh.mesh.permute(*[names.index(name) for name in (*others, pipeline, data)])
        *_, stages, self._replicas = ranks.shape
        if stages < 2:
            raise ValueError(f"TiedEmbedding: dimension {pipeline!r} has 1 stage, which needs no sum over stages")
        self.weight = weight
        ends = ranks[..., [0, -1], :].reshape(-1, 2 * self._replicas).tolist()
        self.group: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(ends)[0]
        """Process group of the ranks of the first and of the last stage; None on other ranks."""
        if (self.group is None) != (weight is None):
            raise ValueError(
                "TiedEmbedding: ranks of the first and of the last stage have the weight, and no others: "
                f"weight is {'missing' if weight is None else 'given'} on rank {dist.get_rank()}"
            )
        if self.group is not None and weight is not None:
            dist.broadcast(weight.detach(), group=self.group, group_src=0)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Average the gradient over data-parallel ranks, and sum it over both stages, once, right before
        ``optimizer.step``. A collective of ``group``.

        A weight without a gradient counts as zeros. A second call before ``zero_grad`` sums again what was summed.
        """
        if self.group is None or self.weight is None:
            return
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        dist.all_reduce(self.weight.grad, group=self.group)
        self.weight.grad.div_(self._replicas)
