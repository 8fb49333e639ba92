"""Stages of ``torch.distributed.pipelining`` that compress the messages between them.

torch's schedules ask a stage for sends and receives, and run its micro-batches, by methods that a subclass may replace.
``CompressedStage`` overrides some that are private to torch, so ``check_torch`` refuses other versions than the one
that this module was written for.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from yafsdp_cc.pipelining.messages import Encoding, Exact, SenderState
from yafsdp_cc.pipelining.sample_cache import Changes, SampleCache
from yafsdp_cc.pipelining.settings import StageCompression
from yafsdp_cc.pipelining.sharded import ShardedStage
from yafsdp_cc.profiling import span

_TORCH = "2.13"
"""Version of torch whose stages and schedules have the private methods and attributes that this module uses."""


def check_torch(version: str = torch.__version__) -> None:
    """Raise a ``RuntimeError`` if torch may have other private methods than ``CompressedStage`` overrides."""
    if not version.startswith(f"{_TORCH}."):
        raise RuntimeError(
            "CompressedStage replaces private methods of torch.distributed.pipelining, which differ between versions. "
            f"It is tested with torch {_TORCH} alone, and this is {version}: pip install 'torch=={_TORCH}.*'"
        )


class _Arriving(NamedTuple):
    """A message whose receive has been posted."""

    info: Any
    """torch's ``_RecvInfo``, whose buffer the stage computes with."""
    message: Tensor
    shape: tuple[int, ...]
    encoding: Encoding


class CompressedStage(PipelineStage):
    """A ``PipelineStage`` that compresses activations and their gradients on the way to its neighbours.

    Call ``prepare_schedule`` once on the stage's schedule. Only training is compressed: ``schedule.eval`` sends
    activations exactly. Tensors that are not floating-point are always sent exactly, and so are those to a stage on the
    same rank.

        stage = CompressedStage(part, place, stages, device, forward="int4", backward="int8")
        schedule = prepare_schedule(Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn))

    Args:
        stage_arguments: further arguments of ``PipelineStage`` by name, and the fields of ``StageCompression``.

    Raises:
        ValueError: a setting is not possible.
        RuntimeError: torch is of another version than 2.13.
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        **stage_arguments: Any,
    ) -> None:
        check_torch()
        names = {field.name for field in fields(StageCompression)} & stage_arguments.keys()
        self.compression = StageCompression(**{name: stage_arguments.pop(name) for name in names})
        super().__init__(submodule, stage_index, num_stages, device, **stage_arguments)
        self.is_prepared = False
        """Whether ``prepare_schedule`` was called; it also sets ``exact_gradients``."""
        self.exact_gradients: frozenset[tuple[int, int]] = frozenset()
        """Gradients that are sent exactly, as (sending stage, micro-batch)."""
        self.steps = 0
        self.sent_bytes = {"forward": 0, "backward": 0}
        """Bytes of all messages to other ranks so far."""
        self._trains = False
        self._is_stale = False
        self._rows: list[int] | None = None
        self._arriving: dict[tuple[str, int], list[_Arriving]] = {}
        self._senders: dict[tuple[str, int], SenderState] = {}
        self._exact, self._activations = Exact(), self.compression.of_activations()
        self._gradients = self.compression.of_gradients()
        self._caches = self._empty_caches()

    # Called by prepare_schedule

    def begin_step(self, micro_batches: list[list[int]] | None, *, trains: bool) -> None:
        """Set the sample ids of each micro-batch of a step; None without ids, for micro-batches of equal length.

        Raises:
            ValueError: training needs ids and has none, or they do not fit into the cache.
            RuntimeError: the stage is not prepared, or a step that failed has changed its caches.
        """
        self._check_prepared()
        if self._is_stale:
            raise RuntimeError(
                f"stage {self.stage_index}: the last step ended by an exception, and what the two sides of a boundary "
                "keep of their samples may differ. Call load_state_dict on all stages, or build them anew"
            )
        if trains and self.compression.forward_delta and micro_batches is None:
            raise ValueError(
                "forward_delta=True: give the ids of the batch to every rank's step, as "
                "schedule.step(batch, sample_ids=ids) with ids [samples] integers, the same on all stages"
            )
        self._trains, self._is_stale = trains, trains and bool(self._caches)
        self._rows = None if micro_batches is None else [len(ids) for ids in micro_batches]
        self._arriving.clear()
        if trains:
            for cache in self._caches.values():
                assert micro_batches is not None
                cache.begin_step(micro_batches, self.steps)

    def end_step(self) -> None:
        """Check the messages that have arrived, and count the step.

        Raises:
            RuntimeError: a message was about other samples than those that this rank was given.
        """
        if not self._trains:
            return
        self.steps += 1
        differ = [cache.end_step() for cache in self._caches.values()]
        self._is_stale = any(differ)
        if self._is_stale:
            raise RuntimeError(
                f"stage {self.stage_index}: stage {self.stage_index - 1} has sent other samples than those whose "
                "sample_ids this rank has: the order of ids differs between ranks, or only one of them has loaded a "
                "checkpoint. Caches now differ; give all stages the same ids, and load a checkpoint on every rank"
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings and state that must be equal on all ranks of the pipeline."""
        settings = {field.name: getattr(self.compression, field.name) for field in fields(StageCompression)}
        settings.pop("cache_folder")
        kept = {
            f"samples kept between stages {self._boundary(side)}": zlib.crc32(repr(list(each.slots)).encode())
            for side, each in self._caches.items()
        }
        return {**settings, "steps": self.steps, **kept}

    # State, beside that of the module

    def state_dict(self, *, cache: bool = True) -> dict[str, Any]:
        """Return the state that the stage keeps from step to step: residuals, factors, and the caches of its samples.

        Save this state on every rank, and load it on the same stage.

        Args:
            cache: whether to include the samples' activations. Without, all are sent exactly once more after loading.
        """
        senders = {f"{direction}.{place}": each.state_dict() for (direction, place), each in self._senders.items()}
        caches = {side: each.state_dict() for side, each in self._caches.items()} if cache else {}
        return {"steps": self.steps, "senders": senders, "caches": caches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned: on all stages of the pipeline, and before ``prepare_schedule``.

        Call ``prepare_schedule`` again if the schedule was prepared before: it compares the loaded states of the
        stages.
        """
        self.steps = state["steps"]
        self.is_prepared = self._is_stale = False
        self._senders.clear()
        for name, kept in state["senders"].items():
            direction, place = name.split(".")
            self._sender(direction, int(place)).load_state_dict(kept, self.compression.block, self.device)
        self._caches = self._empty_caches()
        for side in self._caches.keys() & state["caches"].keys():
            self._caches[side].load_state_dict(state["caches"][side])

    # Methods that torch's pipeline schedules call

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        self._check_prepared()
        return super()._prepare_forward_infra(*args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive("forward", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id), self.args_recv_info)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive("backward", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id), self.grad_recv_info)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        metas = self._stage_meta.outputs or ()
        return self._send("forward", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id), metas)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if not ops:
            return ops
        metas = [self._get_grad_send_meta(place) for place in range(len(self.args_recv_info[0]))]
        return self._send("backward", bwd_chunk_id, ops, [meta for meta in metas if meta is not None])

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._decode("forward", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._decode("backward", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    # Messages

    def _check_prepared(self) -> None:
        if not self.is_prepared:
            raise RuntimeError(
                f"stage {self.stage_index} is a {type(self).__name__}, and nobody has called "
                "yafsdp_cc.pipelining.prepare_schedule(schedule) on the schedule that runs it, or not after "
                "load_state_dict; do so on every rank"
            )

    def _receive(
        self, direction: str, chunk: int, ops: list[dist.P2POp], infos: Mapping[int, Sequence[Any]]
    ) -> list[dist.P2POp]:
        """Make torch's receive operations ``ops`` receive encoded messages, which ``_decode`` then decodes."""
        if not ops:
            return ops
        arriving = []
        sender = self._sender_of(direction)
        awaited = [info for info in infos[chunk] if not info.is_root_arg and info.buffer is not None]
        for place, (op, info) in enumerate(zip(ops, awaited, strict=True)):
            shape, dtype = self._shape(chunk, info.tensor_meta.shape), info.tensor_meta.dtype
            encoding = self._encoding(direction, sender, chunk, place, dtype)
            op.tensor = torch.empty(encoding.message_bytes(shape, dtype), dtype=torch.uint8, device=self.device)
            arriving.append(_Arriving(info, op.tensor, shape, encoding))
        self._arriving[direction, chunk] = arriving
        return ops

    @torch.no_grad()
    def _decode(self, direction: str, chunk: int) -> None:
        """Decode arrived messages into the buffers that torch's stage computes with."""
        sender = self._sender_of(direction)
        for info, message, shape, encoding in self._arriving.pop((direction, chunk), ()):
            if info.buffer.shape != shape or not info.buffer.is_contiguous():
                info.buffer = torch.empty(shape, dtype=info.tensor_meta.dtype, device=self.device)
            with span("decode", f"stage {sender} {direction}", message.numel()):
                encoding.decode(message, info.buffer.detach())

    @torch.no_grad()
    def _send(self, direction: str, chunk: int, ops: list[dist.P2POp], metas: Sequence[Any]) -> list[dist.P2POp]:
        """Make torch's send operations ``ops`` send encoded messages in place of tensors."""
        for place, (op, meta) in enumerate(zip(ops, metas, strict=True) if ops else ()):
            values, shape = op.tensor.detach(), self._shape(chunk, meta.shape)
            if values.shape != shape or values.dtype != meta.dtype:
                raise ValueError(
                    f"stage {self.stage_index}, micro-batch {chunk}: {values.dtype} {tuple(values.shape)} is to be "
                    f"sent {direction}, and the receiver expects {meta.dtype} {shape}. Where micro-batches have "
                    "different numbers of samples, in dimension 0, give sample_ids to every rank's schedule.step"
                )
            encoding = self._encoding(direction, self.stage_index, chunk, place, values.dtype)
            size = encoding.message_bytes(shape, values.dtype)
            # a schedule may send the message later, so each one has memory of its own
            message = torch.empty(size, dtype=torch.uint8, device=self.device)
            name = f"{direction} {self.stage_index} {place} {self.steps} {chunk}"
            with span("encode", f"stage {self.stage_index} {direction}", size):
                encoding.encode(values, message, self._sender(direction, place), zlib.crc32(name.encode()))
            op.tensor = message
            self.sent_bytes[direction] += size
        return ops

    def _sender_of(self, direction: str) -> int:
        """Return the index of the stage that sends this stage the messages of a ``direction``."""
        return self.stage_index + (1 if direction == "backward" else -1)

    def _encoding(self, direction: str, sender: int, chunk: int, place: int, dtype: torch.dtype) -> Encoding:
        if not self._trains or not dtype.is_floating_point:
            return self._exact
        if direction == "backward":
            return self._exact if (sender, chunk) in self.exact_gradients else self._gradients
        cache = self._caches.get("output" if sender == self.stage_index else "input")
        return self._activations if cache is None else Changes(cache, chunk, place)

    def _shape(self, chunk: int, planned: Sequence[int]) -> tuple[int, ...]:
        """Return a tensor's shape in micro-batch ``chunk``, from its shape in the first one, ``planned`` by torch."""
        if self._rows is None or not planned:
            return tuple(planned)
        return (self._rows[chunk], *planned[1:])

    def _sender(self, direction: str, place: int) -> SenderState:
        feedback = direction == "backward" and self.compression.error_feedback
        return self._senders.setdefault((direction, place), SenderState(feedback))

    def _empty_caches(self) -> dict[str, SampleCache]:
        """Return an empty cache for each side of the stage, "input" and "output", that has a boundary."""
        caches = {}
        for side, is_end in (("input", self.is_first), ("output", self.is_last)):
            if self.compression.forward_delta and not is_end:
                name = f"rank-{dist.get_rank()}-boundary-{self._boundary(side)}-{side}"  # ranks may share the folder
                caches[side] = SampleCache(self.compression, self.device, name)
        return caches

    def _boundary(self, side: str) -> str:
        first = self.stage_index - (1 if side == "input" else 0)
        return f"{first}-{first + 1}"


class CompressedShardedStage(CompressedStage, ShardedStage):
    """A ``CompressedStage`` for a module that ``yafsdp_cc.shard`` has sharded.

    Like ``ShardedStage``, this class reduces gradients once, in the last backward of a step.
    """
