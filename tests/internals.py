"""Everything that tests know about the inside of the package: look at an engine's state, or break it on purpose.

Tests hold what users see. Where one has to look further (that a buffer is freed, that the model of CUDA streams notices
a missing wait), it does so through a function here, so that a change inside the package is followed in this file alone.
Only the unit tests of one file of the package import that file themselves.

Functions whose name begins with ``break_`` or ``set_`` patch this process for good: call them on forked ranks only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from yafsdp_cc.checkpoint import files
from yafsdp_cc.compression import ddp, error_feedback
from yafsdp_cc.compression.all_gather import DeltaAllGather
from yafsdp_cc.compression.autotune import CodecAutotuner
from yafsdp_cc.compression.codec import Codec, Noise, codec_of
from yafsdp_cc.compression.error_feedback import decode, ops_for
from yafsdp_cc.compression.schedule import LocalClip
from yafsdp_cc.compression.state import compressed_sum_of, compressed_sums, kept_weights, mean_residuals
from yafsdp_cc.engine import agreement, communicator
from yafsdp_cc.engine.buffers import Buffer
from yafsdp_cc.engine.communicator import Communicator
from yafsdp_cc.engine.cuda_streams import CudaCommHandle, CudaCommStream
from yafsdp_cc.engine.hsdp import ReplicaSums
from yafsdp_cc.engine.param import UnshardedGrads, unsharded_grad_bytes
from yafsdp_cc.engine.param_group import GroupContext, ParamGroup
from yafsdp_cc.engine.state import FSDPState, IterationState
from yafsdp_cc.engine.streams import PinnedCopy
from yafsdp_cc.forms import offload
from yafsdp_cc.forms.offload import HostTransfer, HostTransfers
from yafsdp_cc.fsdp2 import module
from yafsdp_cc.fsdp2.module import ShardedModule, require_state
from yafsdp_cc.ranks import checks, groups, mesh
from yafsdp_cc.sharding import assembly
from yafsdp_cc.tensor import dtensor, reductions, rows
from yafsdp_cc.tensor.dtensor import FlatDTensor
from yafsdp_cc.tensor.module_parameters import named_sharded_parameters
from yafsdp_cc.tensor.reductions import LazyReduction

__all__ = ["Codec", "FlatDTensor", "LocalClip", "Noise", "codec_of"]

# -- the state of a sharded model -------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> Any:
    """Return the engine's state of a sharded root module."""
    return require_state(model)


def groups_of(model: nn.Module) -> tuple[Any, ...]:
    """Return the parameter groups, in module order."""
    return require_state(model).groups


def flat_params(model: nn.Module) -> list[Any]:
    """Return the flat parameters of all groups, in module order."""
    return [flat for group in groups_of(model) for flat in group.flats]


def flat_param(model: nn.Module, index: int) -> Any:
    """Return the only flat parameter of a group."""
    (flat,) = groups_of(model)[index].flats
    return flat


def shard_numel(flat: Any) -> int:
    """Return how many elements of a flat parameter a rank owns, padding counted."""
    numel: int = flat.sharded.numel()
    return numel


def extents_of(flat: Any) -> list[tuple[int, int]]:
    """Return the range of elements that each parameter has in its flat parameter."""
    return [(each.offset, each.end) for each in flat.layout.extents]


def gradient_codecs(model: nn.Module) -> list[str]:
    """Return the names of the codecs that the gradients of each flat parameter are encoded by."""
    found = [compressed_sum_of(flat) for flat in flat_params(model)]
    return ["fp32" if each is None else "auto" if each.is_tuned else each.codec_name for each in found]


def least_kept(model: nn.Module) -> list[float]:
    """Return the least share that messages of each compressed sum must keep, by this rank."""
    return [each.watch().least for _, each in compressed_sums(require_state(model))]


def owned_range(parameter: Any) -> tuple[int, int]:
    """Return the range of a sharded parameter's elements that this rank owns."""
    start, stop = parameter.shard_spec.local_range()
    return start, stop


# -- buffers ----------------------------------------------------------------------------------------------------------


def _weight_buffers(model: nn.Module) -> list[Buffer]:
    return [buffer for pool in require_state(model).context.weight_pools.values() for buffer in pool.buffers]


def _grad_buffers(model: nn.Module) -> list[Buffer]:
    return [buffer for pool in require_state(model).context.grad_pools.values() for buffer in pool.buffers]


def buffers_of(model: nn.Module) -> list[Tensor]:
    """Return all preallocated buffers, of unsharded weights and of unsharded gradients."""
    return [buffer.data for buffer in (*_weight_buffers(model), *_grad_buffers(model))]


def first_weight_buffer(model: nn.Module) -> Any:
    """Return the object that stands for the buffer that the first group's weights are gathered into."""
    return groups_of(model)[0].unsharded.buffer


def chunk_numels(model: nn.Module) -> list[int]:
    """Return the elements of this rank's chunk of each flat parameter."""
    return [flat.sharded.numel() for flat in flat_params(model)]


def set_input_device(model: nn.Module, device: torch.device) -> None:
    """Have what ``model`` is called with moved to ``device``, as on a mesh of GPUs."""
    require_state(model)._input_device = device


def finish_all_gathers(model: nn.Module) -> None:
    """Wait for the all-gathers under way, which hold on to their buffers."""
    for buffer in _weight_buffers(model):
        buffer.handle.wait()


def unsharded_weights(group: Any) -> tuple[Tensor, ...]:
    """Return the buffers that a group's weights are gathered into, one per flat parameter."""
    return tuple(group.unsharded.flat)


def unsharded_params(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole weights that the last forward has seen, by full names; replicated ones aside."""
    return {
        param.spec.name: view.clone()
        for group in groups_of(model)
        for param, view in zip(group.params, group.unsharded.views, strict=True)
    }


def exact_gather_bytes(model: nn.Module) -> int:
    """Return how many bytes this rank sends when the weights of all groups are gathered without a codec."""
    comm = require_state(model).context.gather.comm
    return sum(comm.peer_bytes(whole.nbytes) for group in groups_of(model) for whole in group.unsharded.flat)


# -- compression ------------------------------------------------------------------------------------------------------


def residuals_of(model: nn.Module) -> list[Tensor]:
    """Return this rank's residuals as they are stored, one per flat parameter."""
    return [compressed_sum_of(flat).residual.values for flat in flat_params(model)]  # type: ignore[union-attr]


def mean_residuals_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the sum of all ranks' residuals in the unit of ``.grad``, by full names of parameters. A collective."""
    return {name: each.full_tensor() for name, each in mean_residuals(require_state(model)).items()}


def has_exact_sum(flat: Any) -> bool:
    """Tell whether an exact sum of a flat parameter's gradients is held besides the encoded one."""
    compressed = compressed_sum_of(flat)
    return compressed is not None and compressed.exact_mean is not None


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
    waits: bool = optimizer._phase_now.value == "learning"
    return waits


def kept_weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that deltas of the next forward build on, by full names. A collective."""
    return {name: each.full_tensor() for name, each in kept_weights(require_state(model))[0].items()}


def autotuner_of(model: nn.Module) -> CodecAutotuner:
    """Return what chooses the codecs of a model with ``compression="auto"``."""
    found = CodecAutotuner.of(require_state(model))
    assert found is not None
    return found


def set_patience(seconds: float) -> None:
    """Set how long a rank whose collective fails waits for what the others tell."""
    checks._TIMEOUT = seconds


def set_tuned_codecs(model: nn.Module, codecs: Sequence[str]) -> None:
    """Have the gradients of each group of a model with ``compression="auto"`` encoded so from now on. A collective."""
    autotuner_of(model).set_codecs(dict(zip(groups_of(model), codecs, strict=True)))


def stop_autotuner(model: nn.Module) -> None:
    """Let the codecs of a model with ``compression="auto"`` change only by ``set_tuned_codecs``."""
    autotuner_of(model).next_tuning = 1 << 30


def measured_backward(model: nn.Module) -> list[float]:
    """Return the seconds that the codec autotuner has measured of each group's backward, in module order."""
    last = autotuner_of(model).last
    assert last is not None
    return [costs.compute for costs in last.costs[::-1]]


def has_native_kernels() -> bool:
    """Tell whether the native kernels are built."""
    return ops_for(torch.device("cpu")) is not None


def simd_levels() -> list[str]:
    """Return the instruction sets of this machine that the native kernels know, by their names in YAFSDP_CC_SIMD."""
    found = []
    for name in ("scalar", "sse2", "avx2", "avx512", "neon") if has_native_kernels() else ():
        with mock.patch.dict(os.environ, YAFSDP_CC_SIMD=name):
            try:
                decode(codec_of("fp32"), torch.zeros(1, 1024, dtype=torch.uint8), torch.zeros(1, 256))
            except RuntimeError:
                continue
            found.append(name)
    return found


def set_delta_part(monkeypatch: Any, numel: int) -> None:
    """Have weight deltas encoded in parts of so many elements."""
    make = DeltaAllGather.__init__

    def make_with_part(self: Any, *args: Any) -> None:
        make(self, *args)
        self._part = numel

    monkeypatch.setattr(DeltaAllGather, "__init__", make_with_part)


def record_norm_reduces(numels: list[int]) -> None:
    """Append to ``numels`` how many elements each all-reduce of norms has."""
    reduce = reductions.all_reduce_over

    def recorded(groups: Any, values: Tensor, *rest: Any) -> Any:
        numels.append(values.numel())
        return reduce(groups, values, *rest)

    reductions.all_reduce_over = recorded


# -- the public class of sharded modules ------------------------------------------------------------------------------


def module_methods() -> Iterable[str]:
    """Return the names that the class of sharded modules defines itself, rather than inherits from FSDP2's."""
    return vars(ShardedModule)


# -- streams and host memory ------------------------------------------------------------------------------------------


SHARDED_TENSORS = (FlatDTensor, LazyReduction)
"""Subclasses of tensors that run operations of their own where one is called on them."""


def local_tensor(value: Any) -> Tensor | None:
    """Return the memory behind a sharded tensor or an unfinished norm; None for anything else."""
    if isinstance(value, FlatDTensor):
        return value._local_tensor
    return value._partials.local if isinstance(value, LazyReduction) else None


class _Future(torch.futures.Future):  # type: ignore[type-arg]
    """A future that knows no devices, for there are none. (Generic to type checkers alone: hence the ignored check.)"""

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


def modelled_device(device: torch.device, on_mesh: Callable[..., Tensor]) -> list[tuple[Any, str, Any]]:
    """Return what to replace, as (owner, name, value), for the engine to run on the CPU what it runs on CUDA.

    Args:
        device: is taken for CUDA by the engine, and for a CPU by torch; its communication backend is NCCL.
        on_mesh: brings a tensor to where collectives want it.
    """
    find, backend_of = error_feedback._ops_for, groups.backend_of

    def backend(group: dist.ProcessGroup, asked: torch.device) -> str:
        return "nccl" if asked is device else backend_of(group, asked)

    return [
        (mesh.MeshInfo, "of", lambda of: mesh.MeshInfo(of, device)),
        *((owner, "backend_of", backend) for owner in (groups, module, assembly, communicator, agreement)),
        (error_feedback, "_ops_for", lambda _, mode: find(torch.device("cpu"), mode)),
        (ddp, "comm_stream", CudaCommStream),
        (torch.futures, "Future", _Future),
        (mesh, "to_mesh_device", on_mesh),
        (dtensor, "to_mesh_device", on_mesh),
        (rows, "to_mesh_device", on_mesh),
    ]


def set_reduces_in_place() -> None:
    """Let communicators sum as over NCCL: by the backend's reduce-scatter and all-reduce, in place."""
    make = Communicator.__init__

    def make_in_place(self: Communicator, *args: Any) -> None:
        make(self, *args)
        self.reduces_in_place = True

    # gloo's ranks do not sum in place: the choice is a communicator's, by its backend, when it is made.
    Communicator.__init__ = make_in_place  # type: ignore[method-assign]


def set_staging_bytes(count: int) -> None:
    """Give copies between host and device staging buffers of so many bytes."""
    offload.STAGING_BYTES = count


def _skip_in(owner: Any, name: str, *callers: str) -> None:
    """Have a method do nothing where a function of one of these names calls it."""
    method = getattr(owner, name)

    def skip(self: Any, *args: Any) -> Any:
        return None if sys._getframe(1).f_code.co_name in callers else method(self, *args)

    setattr(owner, name, skip)


def break_exchange_of_folders() -> None:
    """Let two folders not change places in one step, as on file systems that know no such thing (NFS)."""
    files._exchange = lambda one, other: False


def break_buffer_release() -> None:
    """Let buffers be refilled before their last use is over."""

    def release(self: ParamGroup, unsharded: Any) -> None:
        unsharded.buffer.users -= 1

    ParamGroup.release = release  # type: ignore[method-assign]


def break_waits_in(*callers: str) -> None:
    """Let these methods of a group, call or context go on without the collectives that they wait for."""
    _skip_in(GroupContext, "wait", *callers)


def break_wait_for_reduces_in(caller: str) -> None:
    """Let this method of an ``FSDPState`` go on without the reduces and deferrals under way."""
    _skip_in(GroupContext, "wait_for_reduces", caller)


def break_wait_for_replicas() -> None:
    """Let a backward end before replicas have summed."""
    # Tests that look for races have to notice this break. mypy forbids to replace a method.
    ReplicaSums.wait = lambda self: None  # type: ignore[method-assign]


def break_handle_wait_in(caller: str) -> None:
    """Let this method go on without the operation whose handle it waits for."""
    _skip_in(CudaCommHandle, "wait", caller)


def break_stream_order_in(caller: str) -> None:
    """Let what this method issues begin before the caller's stream has made what it reads."""
    _skip_in(CudaCommStream, "wait_for_caller", caller)


def break_event_wait_in(caller: str) -> None:
    """Let what this method issues begin before the event that it waits for."""
    _skip_in(CudaCommStream, "wait_event", caller)


def break_order_of_users() -> None:
    """Let a buffer be refilled after its use on one stream, whatever another one does with it."""

    def record(self: Any, event: Any = None) -> Any:
        event = event or torch.Event("cuda")
        event.record(self.caller())
        return event

    CudaCommStream.record = record  # type: ignore[method-assign]


def break_preparation(name: str) -> None:
    """Let shards be cast without this method of the stream, or of a handle, that orders it."""
    _skip_in(CudaCommHandle if name == "wait" else CudaCommStream, name, "_all_gather")


def break_overflow_record() -> None:
    """Let an overflow buffer be filled before the caller's stream is through with what lay in its memory."""
    _skip_in(CudaCommStream, "record", "overflow")


def break_grad_buffer_reference() -> None:
    """Let gradient buffers be freed while the stream of the reduces reads them."""
    issue = GroupContext.issue_reduce

    def forget(self: GroupContext, *args: Any) -> None:
        issue(self, *args)
        self.in_flight.clear()

    GroupContext.issue_reduce = forget  # type: ignore[method-assign]
    del Buffer.__del__


def break_overflow_reference() -> None:
    """Let overflow buffers be freed while the stream of the all-gathers writes to them."""
    break_handle_wait_in("release_held")
    del Buffer.__del__


def break_order_of_freed_memory() -> None:
    """Let overflow buffers be freed while another stream than they were allocated on still uses them."""
    wait = Buffer.__del__

    def forget(self: Buffer) -> None:
        self.last_use = None
        wait(self)

    Buffer.__del__ = forget  # type: ignore[method-assign]


def break_backward_stream() -> None:
    """Let the gates of groups be on whatever streams their forwards are."""
    IterationState.stream = property(lambda self: None, lambda self, value: None)


def break_leaf_stream() -> None:
    """Let the stream around ``backward()`` not wait for the one that the gradients were written on."""
    make = FSDPState.__post_init__

    def forget(self: FSDPState) -> None:
        make(self)
        self._leaf_stream = None

    FSDPState.__post_init__ = forget  # type: ignore[method-assign]


def break_zeroing() -> None:
    """Let gradients that nobody has written be reduced as they are."""

    def written(self: UnshardedGrads) -> list[list[bool]]:
        return [[param.written for param in flat.params] for flat in self.flats]

    UnshardedGrads.zero_unwritten = written  # type: ignore[method-assign]


def break_readback_waits(method: str) -> None:
    """Let the host touch pinned memory in ``send`` or ``receive`` before the copy from or to there is over."""
    run = getattr(PinnedCopy, method)

    class Passed:
        def __init__(self, event: Any) -> None:
            self.record = event.record

        def synchronize(self) -> None:
            pass

    def hasty(self: Any, *args: Any) -> Any:
        event, self._passed = self._passed, Passed(self._passed)
        try:
            return run(self, *args)
        finally:
            self._passed = event

    setattr(PinnedCopy, method, hasty)


def break_wait_of_autograd() -> None:
    """Let autograd add to gradients while reduces add to them."""
    dtensor._take_grad = lambda spec, grad: grad


def break_host_wait() -> None:
    """Let the host run on before the device has copied from its memory."""
    # A mutation, as all of these: the test that uses it expects the model of streams to report a race.
    HostTransfer.wait = lambda self: None  # type: ignore[method-assign]


def break_copy_events() -> None:
    """Let nothing record when a copy between host and device is over."""
    HostTransfer.record = lambda self: None  # type: ignore[method-assign]


def break_wait_for_copies() -> None:
    """Let a forward end before the weights that it reads have been copied from the host."""
    FSDPState.wait_for_transfers = lambda self: None  # type: ignore[method-assign]


def break_staging_buffers() -> None:
    """Let replicated weights be staged in the buffer of the others."""
    make = HostTransfers.__init__

    def share(self: Any, weights: Any, grads: Any, replicated: Any) -> None:
        make(self, weights, grads, weights)

    HostTransfers.__init__ = share  # type: ignore[method-assign]


def watch_communicator(watch: Callable[[str, Callable[[], None]], None]) -> None:
    """Have ``watch`` called with the kind of each collective of a ``Communicator``, and with what issues it."""

    def watched(kind: str, issue: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Communicator, *args: Any, **kwargs: Any) -> Any:
            works: list[Any] = []
            watch(kind, lambda: works.extend(issue(self, *args, **kwargs)))
            return works

        return call

    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        setattr(Communicator, kind, watched(kind, getattr(Communicator, kind)))


def watch_collectives(bring: Callable[..., Tensor], watched: Callable[[Any, int], Any]) -> None:
    """Replace what brings tensors to the device, and the collectives outside of the engine's own streams.

    Args:
        bring: takes a tensor and a mesh.
        watched: takes a collective and the place of its input among the arguments, and returns what to call instead.
    """
    mesh.to_mesh_device = dtensor.to_mesh_device = rows.to_mesh_device = bring
    dist.all_reduce, dist.broadcast = watched(dist.all_reduce, 0), watched(dist.broadcast, 0)
    rows.all_gather_single = module.all_gather_single = watched(rows.all_gather_single, 1)


@contextmanager
def poisoned_buffers(model: nn.Module, nap: Callable[[], None]) -> Iterator[None]:
    """On CUDA, fill buffers whose content nobody may read with NaN, and call ``nap`` around every collective.

    A weight buffer is NaN from the start of its all-gather until that has arrived, a gradient buffer from the end of
    its reduce until it is written again.
    """
    state, issue = require_state(model), CudaCommStream.issue
    # A gather leaves out frozen parameters that are still there.
    partly = {id(group.unsharded.buffer) for group in state.groups if not all(flat.trainable for flat in group.flats)}
    weights = {id(buffer.handle): buffer for buffer in _weight_buffers(model) if id(buffer) not in partly}
    grads = {id(buffer.handle): buffer for buffer in _grad_buffers(model)}
    owners = {}
    for group in state.groups:
        if flats := [flat for flat in group.flats if flat.trainable]:
            buffer = group.grad_buffer(unsharded_grad_bytes(flats), keeps=False)
            owners[id(buffer.handle)] = group

    def issue_late(self: CudaCommStream, handle: Any, start: Any, finish: Any = None, after: Any = None) -> None:
        def begin(async_op: bool) -> Any:
            if id(handle) in weights:
                weights[id(handle)].data.fill_(255)  # NaN in every dtype
            nap()
            return start(async_op)

        def end() -> None:
            if finish is not None:
                finish()
            if id(handle) in grads and len(owners[id(handle)].flats) == 1:
                grads[id(handle)].data.fill_(255)
            nap()

        issue(self, handle, begin, end, after)

    CudaCommStream.issue = issue_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaCommStream.issue = issue  # type: ignore[method-assign]


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """As ``named_parameters()``, the sharded ones also where modules see unsharded weights outside of forwards."""
    seen: set[nn.Parameter] = set()
    for name, parameter in named_sharded_parameters(model):
        if parameter not in seen:
            seen.add(parameter)
            yield name, parameter


# -- collectives ------------------------------------------------------------------------------------------------------


def set_nccl_sums(add: Callable[[Tensor], Tensor]) -> None:
    """Let gloo's ranks take the way of NCCL: in place, each sum in the dtype that is sent and as ``add`` has it.

    Args:
        add: from what each rank contributes to each chunk, [world, world, n], to the sums of the chunks, [world, n].
    """
    make = Communicator.__init__

    def make_as_nccl(self: Communicator, group: dist.ProcessGroup, device: torch.device) -> None:
        make(self, group, device)
        self.is_gloo, self.reduces_in_place = False, True

    def reduce_scatter(
        self: Communicator, buffer: Tensor, async_op: bool, chunks: Sequence[int] = ()
    ) -> list[dist.Work]:
        assert not chunks
        if self.world > 1:
            contributions = [torch.empty_like(buffer) for _ in range(self.world)]
            dist.all_gather(contributions, buffer, group=self.group)
            sums = add(torch.stack(contributions).view(self.world, self.world, -1))
            self.own_chunk(buffer).copy_(sums[self.rank])
        return []

    Communicator.__init__ = make_as_nccl  # type: ignore[method-assign]
    Communicator.reduce_scatter = reduce_scatter  # type: ignore[method-assign]
