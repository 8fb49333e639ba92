"""Everything that tests know about the inside of the package: look at an engine's state, or break it on purpose.

Tests hold what users see. Where one has to look further (that a buffer is freed, that the model of CUDA streams notices
a missing wait), it does so through a function here, so that a change inside the package is followed in this file alone.
Only the unit tests of one file of the package import that file themselves.

Functions whose name begins with ``break_`` or ``set_`` patch this process for good: call them on forked ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc.engine.dispatch  # noqa: F401 - imported lazily by the first operation on a sharded parameter
from yafsdp_cc.engine import host, lanes, norms, ranks, tensor
from yafsdp_cc.engine.clip import Clip
from yafsdp_cc.engine.host import Host
from yafsdp_cc.engine.lanes import CudaLane, CudaTicket
from yafsdp_cc.engine.methods import Methods
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.engine.norms import LazyNorm
from yafsdp_cc.engine.residuals import mean_residuals
from yafsdp_cc.engine.root import Root
from yafsdp_cc.engine.slots import Slot
from yafsdp_cc.engine.tensor import FlatDTensor
from yafsdp_cc.wire import change
from yafsdp_cc.wire.codec import Codec, Noise, codec_of
from yafsdp_cc.wire.native import ops_for
from yafsdp_cc.wire.pace import Pace

__all__ = ["Clip", "Codec", "FlatDTensor", "Noise", "Pace", "codec_of"]

# -- the state of a sharded model -------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> Any:
    """Return the engine's state of a sharded root module."""
    return root_of(model)


def groups_of(model: nn.Module) -> tuple[Any, ...]:
    """Return the parameter groups, in module order."""
    return root_of(model).units


def flat_params(model: nn.Module) -> list[Any]:
    """Return the flat parameters of all groups, in module order."""
    return [flat for group in groups_of(model) for flat in group.flats]


def flat_param(model: nn.Module, index: int) -> Any:
    """Return the only flat parameter of a group."""
    (flat,) = groups_of(model)[index].flats
    return flat


def shard_numel(flat: Any) -> int:
    """Return how many elements of a flat parameter a rank owns, padding counted."""
    numel: int = flat.layout.chunk
    return numel


def extents_of(flat: Any) -> list[tuple[int, int]]:
    """Return the range of elements that each parameter has in its flat parameter."""
    return [(each.offset, each.end) for each in flat.layout.extents]


def gradient_codecs(model: nn.Module) -> list[str]:
    """Return the names of the codecs that the gradients of each flat parameter are encoded by."""
    return [flat.codec for flat in flat_params(model)]


def owned_range(parameter: Any) -> tuple[int, int]:
    """Return the range of a sharded parameter's elements that this rank owns."""
    start, stop = parameter._cut.owned
    return start, stop


# -- buffers ----------------------------------------------------------------------------------------------------------


def _weight_slots(model: nn.Module) -> list[Slot]:
    return [slot for ring in root_of(model).weight_rings.values() for slot in (*ring.slots, *ring.kept)]


def _gradient_slots(model: nn.Module) -> list[Slot]:
    return [slot for ring in root_of(model).reductions.rings.values() for slot in (*ring.slots, *ring.kept)]


def buffers_of(model: nn.Module) -> list[Tensor]:
    """Return all preallocated buffers, of unsharded weights and of unsharded gradients."""
    return [slot.buffer for slot in (*_weight_slots(model), *_gradient_slots(model))]


def first_weight_buffer(model: nn.Module) -> Any:
    """Return the object that stands for the buffer that the first group's weights are gathered into."""
    return groups_of(model)[0].home.slot


def finish_all_gathers(model: nn.Module) -> None:
    """Wait for the all-gathers under way, which hold on to their buffers."""
    for slot in _weight_slots(model):
        slot.ready.settle()


def unsharded_weights(group: Any) -> tuple[Tensor, ...]:
    """Return the buffers that a group's weights are gathered into, one per flat parameter."""
    return tuple(group.home.wholes)


def unsharded_params(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole weights that the last forward has seen, by full names; replicated ones aside."""
    return {
        param.cut.name: view.clone()
        for group in groups_of(model)
        for param, view in zip(group.pieces, group.home.views, strict=True)
    }


def exact_gather_bytes(model: nn.Module) -> int:
    """Return how many bytes this rank sends when the weights of all groups are gathered without a codec."""
    gather = root_of(model).gather
    return sum(gather.sent_bytes(whole) for group in groups_of(model) for whole in group.home.wholes)


# -- compression ------------------------------------------------------------------------------------------------------


def residuals_of(model: nn.Module) -> list[Tensor]:
    """Return this rank's residuals as they are stored, one per flat parameter."""
    return [flat.residual.values for flat in flat_params(model)]


def mean_residuals_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the residuals of all ranks, divided by their number, by full names of parameters. A collective."""
    return {name: each.full_tensor() for name, each in mean_residuals(root_of(model)).items()}


def has_exact_sum(flat: Any) -> bool:
    """Tell whether room for an exact sum of a flat parameter's gradients is held besides the encoded one."""
    return flat.exact is not None


def phase_of(optimizer: Any) -> str:
    """Return how an optimizer of the 1-bit family has gradients sent now, such as "exact" or "encoded"."""
    name: str = optimizer.phase.value
    return name


def phase_at(optimizer: Any, step: int) -> str:
    """Return how ``ZeroOneAdam`` has gradients sent at a step."""
    name: str = optimizer._phase_of(step).value
    return name


def awaits_exact_step(optimizer: Any) -> bool:
    """Tell whether an optimizer of the 1-bit family makes an exact step next, to learn what to clip by."""
    waits: bool = optimizer.lead.is_blind
    return waits


def replicated_residual(optimizer: Any) -> list[Tensor]:
    """Return what ``ReplicatedOneBitAdam`` has still to send of each parameter, fp64."""
    pending = optimizer.mean.unsaid().double()
    return [pending[each.offset : each.end].view(each.shape) for each in optimizer._layout.extents]


def measured_backward(model: nn.Module) -> list[float]:
    """Return the seconds that the codec autotuner has measured of each group's backward, in module order."""
    chooser = root_of(model).chooser
    assert chooser is not None
    assert chooser.problem is not None
    return [leg.compute for leg in chooser.problem.legs[::-1]]


def has_native_kernels() -> bool:
    """Tell whether the native kernels are built."""
    return ops_for(torch.device("cpu")) is not None


def set_delta_part(monkeypatch: Any, numel: int) -> None:
    """Have weight deltas encoded in parts of so many elements."""
    monkeypatch.setattr(change, "part_of", lambda device: numel)


def record_norm_reduces(numels: list[int]) -> None:
    """Append to ``numels`` how many elements each all-reduce of norms has."""
    reduce = norms.reduce_over

    def recorded(groups: Any, values: Tensor, *rest: Any) -> Any:
        numels.append(values.numel())
        return reduce(groups, values, *rest)

    norms.reduce_over = recorded


# -- the public class of sharded modules ------------------------------------------------------------------------------


def module_methods() -> Iterable[str]:
    """Return the names that the class of sharded modules defines itself, rather than inherits from FSDP2's."""
    return vars(Methods)


# -- streams and host memory ------------------------------------------------------------------------------------------


def local_tensor(value: Any) -> Tensor | None:
    """Return the memory behind a sharded tensor or an unfinished norm; None for anything else."""
    if isinstance(value, FlatDTensor):
        return value._local_tensor
    return value._shares.local if isinstance(value, LazyNorm) else None


def modelled_device(own: Callable[[Tensor], Tensor], on_mesh: Callable[..., Tensor]) -> list[tuple[Any, str, Any]]:
    """Return what to replace, as (owner, name, value), for the schedule of CUDA to run on the CPU.

    Args:
        own: takes memory that the engine allocates on the host.
        on_mesh: brings a tensor to where collectives want it.
    """
    zeros = Host.zeros
    return [
        (lanes, "lane_for", CudaLane),
        (Host, "zeros", lambda self, numel, dtype: own(zeros(self, numel, dtype))),
        (ranks, "on_mesh", on_mesh),
        (tensor, "on_mesh", on_mesh),
    ]


def set_staging_bytes(count: int) -> None:
    """Give copies between host and device staging buffers of so many bytes."""
    host.ROOM = count


def break_buffer_release() -> None:
    """Let buffers be refilled before their last use is over."""
    Slot.passed = lambda self, lane: None  # type: ignore[method-assign]


def break_wait() -> None:
    """Let nobody wait for a collective."""
    CudaTicket.wait = lambda self: None  # type: ignore[method-assign]


def break_stream_order() -> None:
    """Let communication begin before the caller's stream has made what it sends."""
    CudaLane.follow = lambda self, marker: None  # type: ignore[method-assign]


def break_host_wait() -> None:
    """Let the host run on before the device has copied from its memory."""
    CudaLane.hold_host = lambda self, marker: None  # type: ignore[method-assign]


def break_copy_events() -> None:
    """Let nothing record when a copy between host and device is over."""
    host.Crossing.mark = lambda self: None  # type: ignore[method-assign]


def break_wait_for_copies() -> None:
    """Let a forward end before the weights that it reads have been copied from the host."""
    Root.wait_for_copies = lambda self: None  # type: ignore[method-assign]


def break_staging_buffers() -> None:
    """Let small weights be staged in the buffer of the others."""
    make = host.Crossings.__init__

    def share(self: Any, weights: Any, gradients: Any, small: Any) -> None:
        make(self, weights, gradients, weights)

    host.Crossings.__init__ = share  # type: ignore[method-assign]


def watch_collectives(bring: Callable[..., Tensor], watched: Callable[[Any, int], Any]) -> None:
    """Replace what brings tensors to the device, and the collectives outside of the engine's own streams.

    Args:
        bring: takes a tensor and a mesh.
        watched: takes a collective and the place of its input among the arguments, and returns what to call instead.
    """
    ranks.on_mesh = tensor.on_mesh = bring
    dist.all_reduce, dist.broadcast = watched(dist.all_reduce, 0), watched(dist.broadcast, 0)
    tensor._all_gather = watched(tensor._all_gather, 1)


@contextmanager
def poisoned_buffers(model: nn.Module, nap: Callable[[], None]) -> Iterator[None]:
    """On CUDA, fill buffers whose content nobody may read with NaN, and call ``nap`` around every collective.

    A weight buffer is NaN from the start of its all-gather until that has arrived, a gradient buffer from the end of
    its reduce until it is written again.
    """
    state, issue = root_of(model), CudaLane.issue
    weights = {id(slot.ready): slot for slot in _weight_slots(model)}
    gradients = {id(slot.ready): slot for slot in _gradient_slots(model)}
    for group in state.units:
        group.training = tuple(flat for flat in group.flats if flat.trainable)
    owners = {id(group._gradient_home().slot.ready): group for group in state.units if group.training}

    def issue_late(self: CudaLane, ticket: Any, start: Any, tail: Any = None, after: Any = None) -> None:
        def begin(asynchronous: bool) -> Any:
            if id(ticket) in weights and all(flat.trainable for flat in weights[id(ticket)].owner.flats):  # type: ignore[union-attr,attr-defined]
                weights[id(ticket)].buffer.fill_(255)  # NaN in every dtype
            nap()
            return start(asynchronous)

        def end() -> None:
            if tail is not None:
                tail()
            if id(ticket) in gradients and len(owners[id(ticket)].flats) == 1:
                gradients[id(ticket)].buffer.fill_(255)
            nap()

        issue(self, ticket, begin, end, after)

    CudaLane.issue = issue_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaLane.issue = issue  # type: ignore[method-assign]
