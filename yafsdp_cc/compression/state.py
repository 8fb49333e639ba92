"""Residuals and the weights that deltas build on as checkpoint state: sharded like the parameters.

A residual is what this rank has not sent yet to one other rank. Only its sum over ranks matters, so a checkpoint holds,
at each element's owner, that sum in the unit of ``.grad``, divided by the number of ranks unless users have set another
divisor: a tensor sharded like the parameter. After loading, residuals are zero and the saved value, times the present
divisor, is added to the next sum: no gradient is lost. On the same ranks each rank's residuals are saved and loaded as
they are, too.

With differences (EF21) a residual is the estimate of what was sent, and nothing is unsent. The checkpoint holds the
mean of the ranks' estimates, from which all ranks resume: the sum of estimates at each owner is the same as before.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from yafsdp_cc.compression.all_gather import DeltaAllGather
from yafsdp_cc.compression.error_feedback import Residual, other_chunks
from yafsdp_cc.compression.reduce_scatter import CompressedReduceScatter, CompressedSum
from yafsdp_cc.ranks.mesh import all_groups
from yafsdp_cc.tensor.dtensor import flat_dtensor

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.engine.param import FlatParam, FSDPParam
    from yafsdp_cc.engine.state import FSDPState
    from yafsdp_cc.tensor.dtensor import FlatDTensor


def compressed_sum_of(flat: FlatParam) -> CompressedSum | None:
    """Return the collective that sums ``flat``'s gradients encoded, reduce-scatter or all-reduce; None if exact."""
    collectives: tuple[object, ...] = (flat.reduce_scatter, flat.all_reduce)
    return next((each for each in collectives if isinstance(each, CompressedSum)), None)


def compressed_sums(state: FSDPState) -> Iterator[tuple[FlatParam, CompressedSum]]:
    """Yield the trained flat parameters whose gradients have a codec, in module order, with their sums."""
    # wait, as reduces in flight write to residuals: a backward waits only for reduces of the gradients that it makes
    state.context.wait_for_reduces()
    for flat in state.flats:
        compressed = compressed_sum_of(flat)
        if compressed is not None and flat.sharded_grad is not None:
            yield flat, compressed


def delta_all_gathers(state: FSDPState) -> Iterator[tuple[FlatParam, DeltaAllGather]]:
    """Yield the flat parameters that are all-gathered by deltas, in module order."""
    for flat in state.flats:
        if isinstance(flat.all_gather, DeltaAllGather):
            yield flat, flat.all_gather


@torch.inference_mode(False)  # buffers made here are written in training: they must not be inference tensors
def set_codecs(state: FSDPState, codecs: Mapping[FlatParam, str]) -> None:
    """Encode flat parameters' gradients by these ``codecs``, alike on all ranks; no reduce may be in flight."""
    if state.context.device.type == "cuda":
        torch.cuda.synchronize(state.context.device)  # a kernel may still read scratch buffers that larger ones replace
    for flat, codec in codecs.items():
        if (compressed := compressed_sum_of(flat)) is not None:
            compressed.set_codec(codec)
            state.context.counters.chosen[flat.group.name] = codec


# Residuals ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def mean_residuals(state: FSDPState) -> dict[str, FlatDTensor]:
    """Return by full name what the sum of all ranks' unsent gradients adds to ``.grad``, fp32. A collective.

    The results have the unit of gradients of an unscaled loss.
    """
    found: dict[str, FlatDTensor] = {}
    state.context.fingerprint.agree("read", "residuals")
    for flat, compressed in compressed_sums(state):
        if compressed.carried_over is not None or (compressed.residual is not None and compressed.estimate is None):
            total = _sum_of_unsent(state, compressed)
            found |= _by_name(flat, total.div_(compressed.units))
    return found


def empty_residuals(state: FSDPState) -> dict[str, FlatDTensor]:
    """Return zeros for all parameters that may have residuals, named as in the result of ``mean_residuals``."""
    return {
        param.spec.name: flat_dtensor(torch.zeros_like(param.local, dtype=torch.float32), param.spec)
        for flat, _ in compressed_sums(state)
        for param in flat.params
    }


@torch.no_grad()
def carry_over_residuals(state: FSDPState, residuals: Mapping[str, FlatDTensor]) -> None:
    """Empty all residuals, and add what ``mean_residuals`` returned to the next sums."""
    for flat, compressed in compressed_sums(state):
        compressed.reset()
        total, schedule = _chunk_of(flat, residuals, torch.float32), compressed.schedule
        if compressed.momentum is not None and schedule.beta > 0:  # the next sum multiplies by beta: divide now
            compressed.momentum.add_(total, alpha=schedule.share / schedule.beta)
        else:
            # A reduce-scatter adds carried-over values in each replica, before sums over replicas; an all-reduce over
            # replicas adds them once.
            over_shard = isinstance(compressed, CompressedReduceScatter)
            replicas = state.context.info.mesh.size() / state.context.gather.comm.world if over_shard else 1
            compressed.carried_over = total.mul_(compressed.units / replicas)
        compressed.clear()


@torch.no_grad()
def mean_estimates(state: FSDPState) -> dict[str, FlatDTensor]:
    """Return by full name the mean over ranks of all that messages have held of a rank's gradients, fp32 (EF21).

    The results have the unit of gradients of an unscaled loss. A collective.
    """
    found: dict[str, FlatDTensor] = {}
    for flat, compressed in compressed_sums(state):
        if compressed.estimate is not None:
            total = compressed.estimate / _estimate_units(state, compressed)
            if isinstance(compressed, CompressedReduceScatter):
                for group in all_groups(state.context.info.mesh)[1:]:  # each replica has its own estimates of gradients
                    dist.all_reduce(total.div_(group.size()), group=group)
            found |= _by_name(flat, total)
    return found


@torch.no_grad()
def load_estimates(state: FSDPState, estimates: Mapping[str, FlatDTensor]) -> None:
    """Load the result of ``mean_estimates`` into each flat parameter of which it has every parameter. A collective.

    The residuals that ``load_estimates`` overwrites must be empty.
    """
    shard = all_groups(state.context.info.mesh)[0]
    for flat, compressed in compressed_sums(state):
        if compressed.estimate is None or any(param.spec.name not in estimates for param in flat.params):
            continue
        assert compressed.residual is not None
        mean = _chunk_of(flat, estimates, torch.float32)
        torch.mul(mean, _estimate_units(state, compressed), out=compressed.estimate)
        mean.mul_(-_estimate_units(state, compressed) / compressed.senders)
        if isinstance(compressed, CompressedReduceScatter):
            layout, world = flat.layout, flat.layout.world
            whole = mean.new_empty(layout.numel)
            own = [layout.chunks[flat.rank]] * world
            dist.all_to_all_single(whole, mean.repeat(world), list(layout.chunks), own, group=shard)
            for chunks in other_chunks(whole, layout, flat.rank):
                compressed.residual.of(chunks).store(chunks.values)
        else:
            compressed.residual.store(mean.unsqueeze(0))


def _estimate_units(state: FSDPState, compressed: CompressedSum) -> float:
    """Return what an estimate of a sum is divided by, to get the mean gradient of a rank's unscaled loss."""
    shard = all_groups(state.context.info.mesh)[0]
    of_each = 1 if isinstance(compressed, CompressedReduceScatter) else shard.size()
    return compressed.senders * of_each * compressed.schedule.loss_scale


def local_residuals(state: FSDPState, *, tuned: bool = False) -> dict[str, Any]:
    """Return this rank's residuals unchanged as plain data, with the values that tell whether they fit on loading.

    ``tuned`` is whether to return residuals of sums with tuned codecs, too, which only ``means_of_ranks`` can use.
    """
    nothing = torch.zeros(0, dtype=torch.float32, device="cpu")
    return {
        flat.name: {
            "fits": _form(state, flat, compressed),
            **_places(flat, compressed),
            "values": compressed.residual.values.cpu(),
            "scales": compressed.residual.scales.cpu(),
            "owed": nothing if (waiting := compressed.not_in_residual) is None else waiting.cpu(),
            "loss_scale": compressed.schedule.loss_scale,
            **({} if compressed.estimate is None else {"estimate": compressed.estimate.cpu()}),
            **({} if (low := compressed.factors) is None else {"lowrank": (low.factors.cpu(), low.sends_right)}),
        }
        for flat, compressed in compressed_sums(state)
        if compressed.residual is not None and (tuned or not compressed.is_tuned)
    }


@torch.no_grad()
def load_local_residuals(state: FSDPState, saved: Mapping[str, Any]) -> bool:
    """Load what ``local_residuals`` returned on the same ranks. Return False, with nothing changed, if it does not fit.

    With tuned codecs, ``saved`` never fits, as codecs may have changed since: then ``mean_residuals`` are used instead.
    """
    if any(compressed.is_tuned for _, compressed in compressed_sums(state)):
        return False
    ours = {flat.name: (flat, each) for flat, each in compressed_sums(state) if each.residual is not None}
    if ours.keys() != saved.keys() or any(saved[name]["fits"] != _form(state, *pair) for name, pair in ours.items()):
        return False
    if any(("lowrank" in saved[name]) != (each.factors is not None) for name, (_, each) in ours.items()):
        return False  # small matrices have no factors: ``_form`` then gives 0 elements as if no low rank was used
    for name, (_, compressed) in ours.items():
        values, residual = saved[name], compressed.residual
        assert residual is not None
        compressed.reset()
        if compressed.factors is not None:
            factors, compressed.factors.sends_right = values["lowrank"]
            compressed.factors.factors.copy_(factors)
        residual.values.copy_(values["values"])
        residual.scales.copy_(values["scales"])
        if compressed.estimate is not None:
            compressed.estimate.copy_(values["estimate"])
        waiting = values["owed"]
        compressed.carried_over = waiting.to(state.context.device) if waiting.numel() else None
        compressed.rescale(compressed.schedule.loss_scale / values["loss_scale"])
    return True


@torch.no_grad()
def means_of_ranks(
    state: FSDPState, ranks: Iterable[Mapping[str, Any]]
) -> tuple[dict[str, FlatDTensor], dict[str, FlatDTensor]]:
    """Return ``mean_residuals`` and ``mean_estimates`` of the ranks that saved, from the ``local_residuals`` of each.

    A warning names parameters of which no rank had the part that this one has by tensor parallelism.
    """
    params = {param.spec.name: param for flat, _ in compressed_sums(state) for param in flat.params}
    sums: dict[str, Tensor] = {}
    found, others = Counter[str](), set[str]()
    for saved in (saved for each in ranks for saved in each.values() if "places" in saved):  # version 0.1 saved none
        whole = _unsent_of(saved)
        for name, (offset, *part) in saved["places"].items():
            if (param := params.get(name)) is None or part != _part_of(param):
                others.add(name)
                continue
            own = [param.spec.local_of(row[offset : offset + param.extent.numel]) for row in whole]
            sums[name] = torch.stack(own).add_(sums.get(name, 0))
            found[name] += 1
    if lost := sorted((others & params.keys()) - found.keys()):
        warnings.warn(
            f"residuals, gradients that were still to be sent, of {', '.join(lost[:3])}"
            f"{', ...' if len(lost) > 3 else ''} are left out, as tensor parallelism divides them otherwise now",
            stacklevel=2,
        )
    means = [(name, params[name].spec, total / found[name]) for name, total in sums.items()]
    residuals = {name: flat_dtensor(mean[0], spec) for name, spec, mean in means}
    return residuals, {name: flat_dtensor(mean[1], spec) for name, spec, mean in means if len(mean) > 1}


def _places(flat: FlatParam, compressed: CompressedSum) -> dict[str, Any]:
    """Return which parts of the buffer of ``flat`` residual and parameters take up, and the divisor of its sums."""
    others = [rank for rank in range(flat.layout.world) if rank != flat.rank]
    return {
        "chunks": list(flat.layout.chunks),
        "rank": flat.rank,
        "divisor": flat.divisor.factor,
        "holds": others if isinstance(compressed, CompressedReduceScatter) else [flat.rank],
        "places": {param.spec.name: [param.extent.offset, *_part_of(param)] for param in flat.params},
    }


def _part_of(param: FSDPParam) -> list[list[int]]:
    """Return the shape of the part of ``param`` that tensor parallelism gives this rank, and where it begins."""
    parallel = param.spec.tensor_parallel
    return [list(param.spec.shape), [] if parallel is None else list(parallel.offsets)]


def _unsent_of(saved: Mapping[str, Any]) -> Tensor:
    """Return what a rank had not sent, laid out like the gradients of an unscaled loss, [1, n] on the host; with EF21
    [2, n], and in the second row the estimate of its own chunk.

    The means of the rows over ranks are those of ``mean_residuals`` and of ``mean_estimates``.
    """
    chunks, rank, holds, (shard, *replicas) = saved["chunks"], saved["rank"], saved["holds"], saved["fits"][0]
    whole = torch.zeros(1 + ("estimate" in saved), sum(chunks), dtype=torch.float32, device="cpu")
    unsent, *estimates = (row.split(chunks) for row in whole)
    over_replicas = holds == [rank]
    if saved["owed"].numel():
        unsent[rank].add_(saved["owed"], alpha=1 / replicas[0] if over_replicas else 1)
    for estimate in estimates:
        estimate[rank].add_(saved["estimate"], alpha=1 / replicas[0] if over_replicas else shard / (shard - 1))
    if not estimates:
        residual = Residual(saved["values"], saved["scales"], saved["fits"][4]).load().view(-1)
        for peer, values in zip(holds, residual.split([chunks[peer] for peer in holds]), strict=True):
            unsent[peer].add_(values)
    whole[0].mul_(math.prod(saved["fits"][0]) / saved["divisor"])
    return whole.div_(saved["loss_scale"])


def _form(state: FSDPState, flat: FlatParam, compressed: CompressedSum) -> list[Any]:
    """Return the facts that must be equal in checkpoint and model for a rank's residual to be loaded unchanged."""
    ranks = [group.size() for group in all_groups(state.context.info.mesh)]
    residual, factors = compressed.residual, compressed.factors
    assert residual is not None
    form = [list(residual.values.shape), str(residual.values.dtype), residual.block]
    if compressed.estimate is not None:
        form.append("estimate")
    return [ranks, [param.spec.name for param in flat.params], *form, 0 if factors is None else factors.factors.numel()]


def _sum_of_unsent(state: FSDPState, compressed: CompressedSum) -> Tensor:
    """Return the sum over all ranks of their unsent gradients for this rank's chunk."""
    shard, *replicas = all_groups(state.context.info.mesh)
    total = compressed.unsent()
    if isinstance(compressed, CompressedReduceScatter):
        chunks = list(compressed.flat.layout.chunks)
        parts = total.new_empty(len(chunks), compressed.chunk)
        dist.all_to_all_single(parts.view(-1), total, [compressed.chunk] * len(chunks), chunks, group=shard)
        total = parts.sum(0)
    for group in replicas:
        dist.all_reduce(total, group=group)
    return total


# Kept weights ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def kept_weights(state: FSDPState) -> tuple[dict[str, FlatDTensor], list[str]]:
    """Return by full name the weights that all ranks keep and that deltas build on, sharded like the parameters.

    The second result, alike on all ranks, names parameters whose kept weights lack steps that are still to be sent.
    """
    found: dict[str, FlatDTensor] = {}
    behind: list[str] = []
    for flat, all_gather in delta_all_gathers(state):
        if (kept := all_gather.kept_state()) is not None:
            own, is_behind = kept
            found |= _by_name(flat, own)
            behind += [param.spec.name for param in flat.params if is_behind]
    return found, behind


def empty_kept_weights(state: FSDPState) -> dict[str, FlatDTensor]:
    """Return zeros for all parameters that are gathered by deltas, named as in the result of ``kept_weights``."""
    return {
        param.spec.name: flat_dtensor(
            torch.zeros_like(param.local, dtype=flat.compute_dtype, device=state.context.device), param.spec
        )
        for flat, _ in delta_all_gathers(state)
        for param in flat.params
    }


@torch.no_grad()
def load_kept_weights(state: FSDPState, kept: Mapping[str, FlatDTensor], behind: Collection[str]) -> None:
    """Load the result of ``kept_weights`` into each flat parameter of which it has every parameter."""
    for flat, all_gather in delta_all_gathers(state):
        names = [param.spec.name for param in flat.params]
        if all(name in kept for name in names):
            all_gather.resume(_chunk_of(flat, kept, flat.compute_dtype), not set(names).isdisjoint(behind))


def _by_name(flat: FlatParam, chunk: Tensor) -> dict[str, FlatDTensor]:
    """Return this rank's ranges of the parameters in ``chunk``, by full names."""
    return {param.spec.name: flat_dtensor(param.local_range(chunk).contiguous(), param.spec) for param in flat.params}


def _chunk_of(flat: FlatParam, tensors: Mapping[str, FlatDTensor], dtype: torch.dtype) -> Tensor:
    """Return the chunk of ``flat`` that ``_by_name`` cut into these tensors, with zeros in its padding."""
    chunk = torch.zeros(flat.layout.chunks[flat.rank], dtype=dtype, device=flat.device)
    for param in flat.params:
        param.local_range(chunk).copy_(tensors[param.spec.name].to_local())
    return chunk
