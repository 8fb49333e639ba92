"""Estimates memory, traffic and time of a training job before anything runs, in one process, on tensors without memory.

``plan_over`` lets ``shard`` itself plan the model on any number of ranks. ``probe`` runs one forward and backward of
the model, with a few of its repeated blocks, under torch's ``MemTracker`` and ``FlopCounterMode``.
"""

from __future__ import annotations

import json
import traceback
import warnings
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker, _ModState
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.hooks import RemovableHandle

from yafsdp_cc.api import plan_of, shard
from yafsdp_cc.plan import Plan
from yafsdp_cc.sharding.units import Units, find_units, walk
from yafsdp_cc.tools.fake_ranks import MetaDevice, fake_ranks
from yafsdp_cc.tools.step_time import Work

P = ParamSpec("P")
T = TypeVar("T")
CPU = torch.device("cpu")


def _count_causal(count: Callable[..., int], place: int) -> Callable[..., int]:
    """Return ``count``, halved for an operation whose argument number ``place``, ``is_causal``, is true."""
    return lambda *args, **named: count(*args, **named) // (1 + bool(len(args) > place and args[place]))


for _suffix, _place in (("", 4), ("_backward", 7)):  # torch counts flash attention only for CUDA
    _on_cuda = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{_suffix}")
    _on_cpu = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{_suffix}")
    flop_registry[_on_cpu] = _count_causal(flop_registry[_on_cuda], _place)


class Subject(NamedTuple):
    """A model to estimate."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor] | None
    """Function that runs a forward on one rank's batch; None: activations and time are left out."""


class Block(NamedTuple):
    """Bytes of activations of one of the model's repeated blocks."""

    kept: int
    """Bytes held from the block's forward to its backward, its output included."""
    recomputed: int
    """Bytes held from forward to backward if the block is checkpointed: its output, the input of the next block."""
    transient: int
    """Bytes held in addition to ``kept`` at the peak of the block's backward."""


class Activations(NamedTuple):
    """Bytes that a forward and backward hold besides weights, gradients and the engine's own memory."""

    blocks: tuple[Block, ...]
    """Bytes of each repeated block, in the order of the forward."""
    outside: int
    """Peak bytes outside the blocks (logits, loss), reached between the last block's forward and its backward."""
    lowest: int
    """Peak bytes while no block holds activations, in the backward of the embedding."""

    def peak(self, checkpointed: int = 0) -> int:
        """Return the bytes at the peak of a step where the first ``checkpointed`` blocks are recomputed.

        A block's backward comes when all later blocks have freed their activations, so the first blocks are the ones to
        checkpoint: their activations would be held at every later block's peak.
        """
        held, peaks = 0, [self.lowest]
        for index, block in enumerate(self.blocks):
            peaks.append(held + block.kept + block.transient)
            held += block.recomputed if index < checkpointed else block.kept
        return max(*peaks, held + self.outside)

    def fewest_checkpointed(self, room: int) -> int | None:
        """Return how many blocks must be checkpointed for ``room`` bytes to suffice; None if even all are too few."""
        return next((count for count in range(len(self.blocks) + 1) if self.peak(count) <= room), None)

    def scaled(self, doubled: Activations, times: float) -> Activations:
        """Return the activations of a batch ``times`` as large, from these and those of a ``doubled`` batch.

        Bytes are extrapolated along a line, as they are a constant plus a part for each sequence.
        """

        def of(once: int, twice: int) -> int:
            return round(once + (twice - once) * (times - 1))

        blocks = (Block(*map(of, *pair)) for pair in zip(self.blocks, doubled.blocks, strict=True))
        return Activations(tuple(blocks), of(self.outside, doubled.outside), of(self.lowest, doubled.lowest))

    def largest_batch(self, doubled: Activations, batch: int, room: int, checkpointed: int) -> int:
        """Return the most sequences whose activations fit in ``room`` bytes; ``self`` is of ``batch`` sequences."""
        batches = range(1, 1 << 20)
        return bisect_right(batches, room, key=lambda count: self.scaled(doubled, count / batch).peak(checkpointed))


CONTEXT, COMMUNICATOR, FRAGMENTED = 1 << 29, 7 << 28, 0.05
"""Headroom: bytes of a CUDA context, bytes of each NCCL communicator, share of what is held that the allocator loses.

Source: 426 MiB of context (unslothai/unsloth-zoo#1053); 1.6 GB with one communicator, 6 GB with three or more
(NVIDIA/nccl#864). The 5 % are a choice: GMLake (arXiv 2401.08156) removes 15 % on average of fragmentation in training
large models, and buffers that are allocated once do not fragment.
"""


def headroom_of(held: int, communicators: int) -> dict[str, int]:
    """Return the bytes to leave free beside ``held`` bytes, by name; 0 ``communicators`` of NCCL mean ranks on CPUs."""
    lost = {f"fragmentation, {FRAGMENTED:.0%}": round(held * FRAGMENTED)}
    return {"CUDA context": CONTEXT, "NCCL": COMMUNICATOR * communicators, **lost} if communicators else lost


def room_in(memory: int, communicators: int) -> int:
    """Return how many of ``memory`` bytes may be held so that the ``headroom_of`` these remains free."""
    return int((memory - (CONTEXT + COMMUNICATOR * communicators if communicators else 0)) / (1 + FRAGMENTED))


class Probe(NamedTuple):
    """Measurements of one forward and backward on one rank; they do not depend on the number of ranks."""

    activations: Activations
    blocks: tuple[str, ...]
    """Names of the repeated blocks in the order of the forward."""
    work: dict[str, Work]
    """Floating-point operations by the name of a unit, those outside of units in "", without recomputation."""
    repeated: tuple[dict[str, float], ...]
    """Operations that the recomputation of each block repeats, by the name of a unit."""

    def work_with(self, checkpointed: int) -> dict[str, Work]:
        """Return ``work`` with the first ``checkpointed`` blocks recomputed."""
        work = dict(self.work)
        for repeated in self.repeated[:checkpointed]:
            work |= {name: work[name].plus(Work(0.0, more)) for name, more in repeated.items()}
        return work


# Models -------------------------------------------------------------------------------------------------------------


def subject_of(name: str, batch: int, sequence: int) -> Subject:
    """Return the model of this name, with a batch of [batch, sequence] tokens on each rank.

    Args:
        name: ``"demo"``; ``"module:factory"``, a function that returns a model, or a model and a function of it that
            returns the loss of one batch; a folder or file with a Hugging Face config; or a Hugging Face model type.
    """
    if name == "demo":
        from yafsdp_cc.tools.demo.model import GPT, VOCABULARY
        from yafsdp_cc.tools.demo.train import loss_of

        return Subject(GPT, lambda model: loss_of(model, _tokens(VOCABULARY, batch, sequence + 1)))
    build, loss = _from_factory(name) if ":" in name else _from_config(name, batch, sequence)
    its_loss = f"the loss of {name!r}" if ":" in name else f"{name!r} on {batch} x {sequence} tokens"
    return Subject(_told(f"building {name!r}", build), None if loss is None else _told(its_loss, loss))


def _told(what: str, function: Callable[P, T], hint: str = "") -> Callable[P, T]:
    """Return ``function`` with any error turned into a ``ValueError`` that tells ``what`` raised it, and where."""

    def called(*args: P.args, **named: P.kwargs) -> T:
        try:
            return function(*args, **named)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            remedy = ". Factories run on the meta device: make the batch within the loss, or with device='cpu'"
            remedy = remedy if "devices" in text and "meta" in text else hint
            raise ValueError(f"{what} raised {text} ({where.filename}:{where.lineno}){remedy}") from error

    return called


def _from_factory(name: str) -> Subject:
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"{name!r}: {error}; name a module that Python finds from here, as package.module:factory"
        ) from None
    hint = ". Name a function without arguments that returns a model, such as def small(): return Net(width=8)"
    with torch.device("meta"):
        made = _told(f"{name!r}, called without arguments, on the meta device,", factory, hint)()
    is_pair = isinstance(made, tuple) and len(made) == 2
    model, loss = made if is_pair else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{name!r} returns a {type(model).__name__}: return a model, or (model, loss), where loss(model) is a loss"
        )
    return Subject((lambda: factory()[0]) if is_pair else factory, loss)


def _from_config(name: str, batch: int, sequence: int) -> Subject:
    try:
        import transformers
        from transformers import masking_utils
    except ImportError:
        raise ValueError(f"{name!r} would be a Hugging Face config: pip install transformers") from None
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as a Hugging Face config, which is JSON: {error}") from error
        if not isinstance(settings, dict) or "model_type" not in settings:
            raise ValueError(f"{file} has no 'model_type', which a Hugging Face config has")
        config = _told(f"reading {file}", transformers.AutoConfig.for_model)(**settings)
    elif name in transformers.CONFIG_MAPPING:
        config = transformers.AutoConfig.for_model(name)
    else:
        raise ValueError(
            f"{name!r} is no 'demo', no file or folder with a config.json, and no Hugging Face model type such as "
            "'llama'; a model of your own is package.module:factory"
        )
    named = (config.architectures or [None])[0]
    kind = getattr(transformers, named or "", None)
    if kind is None:
        auto = transformers.AutoModelForCausalLM
        if type(config) not in auto._model_mapping:
            raise ValueError(f"{name!r}: a {config.model_type} is no language model; write a factory for it")
        kind = auto._model_mapping[type(config)]
    if kind.main_input_name != "input_ids":
        raise ValueError(
            f"{name!r}: a {kind.__name__} reads {kind.main_input_name}, not tokens; write a factory for it"
        )
    vocabulary = config.get_text_config().vocab_size

    def loss(model: nn.Module) -> Tensor:
        tokens = _tokens(vocabulary, batch, sequence)
        # Transformers looks for packed sequences in the values of positions; tensors without values would make it add a
        # mask to causal attention
        with mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None):
            found: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return found

    return Subject(lambda: kind(config).train(), loss)


def _tokens(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (batch, length), device="cpu")


def _give_fake_memory(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Replace ``model``'s meta tensors by fake ones on the CPU; cast its parameters if there is a ``dtype``."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for owned in (module._parameters, module._buffers):
            for name, old in owned.items():
                if old is None:
                    continue
                if old not in made:
                    is_parameter = isinstance(old, nn.Parameter)
                    casts = dtype is not None and is_parameter and old.is_floating_point()
                    new = torch.empty(old.shape, dtype=dtype if casts else old.dtype, device="cpu")
                    made[old] = nn.Parameter(new, old.requires_grad) if is_parameter else new
                owned[name] = made[old]  # type: ignore[assignment]
    return model


# Ranks --------------------------------------------------------------------------------------------------------------


def plan_over(build: Callable[[], nn.Module], mesh: tuple[int, ...], device: str = "cuda", **settings: Any) -> Plan:
    """Return the plan of ``shard`` on one of many simulated ranks.

    Args:
        build: function that makes the model on the meta device.
        mesh: (ranks of a shard), or (replicas, ranks of a shard).
        device: device of every rank, "cuda" (with NCCL) or "cpu" (with gloo).
    """
    with torch.device("meta"):
        model = build()
    with warnings.catch_warnings(), fake_ranks(mesh, device, MetaDevice()) as ranks:
        warnings.simplefilter("ignore")  # settings may warn, but the caller asks what they cost
        return plan_of(shard(model, mesh=ranks, **settings))


# Activations and operations -------------------------------------------------------------------------------------------


def probe(subject: Subject, policy: MixedPrecisionPolicy, units: Units = "auto") -> Probe:
    """Measure a forward and backward of the model in one process, on tensors without memory.

    Of each run of equal blocks in one container, the first and the last are measured; blocks between count as the
    first. What a loop over blocks does between two of them is counted for measured blocks alone. Weights are those of
    the forward's dtype, and gradients of weights are freed when they are complete, as the engine has its own buffers
    for them. Blocks are those of ``units="auto"``, whatever ``units`` are; a model may have none.

    Args:
        units: the plan's units; those of one block share what it repeats in proportion to their forwards.
    """
    if subject.loss is None:
        raise ValueError("the factory returned no function of the model that gives the loss of a batch")
    with torch.device("meta"):
        model = subject.build()
    division = find_units(model, units).units
    unit_of = {module: unit.name for unit in division for module in unit.modules if module is not model}
    names = {module: name for name, module in model.named_modules()}
    outer_of: dict[nn.Module, str] = {}
    for _, path in walk(model):
        outer_of.setdefault(path[-1], next((unit_of[each] for each in reversed(path[:-1]) if each in unit_of), ""))
    inside = {module: set(module.modules()) - {module} for module in names}
    fake: Any = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), fake:
        warnings.simplefilter("ignore")
        blocks: list[nn.Module] = []
        with suppress(ValueError):  # no repeated blocks
            blocks = [unit.modules[0] for unit in find_units(model).units if unit.role == "block"]
        like = _truncate(model, blocks)
        probed = [block for block in blocks if block not in like]
        measured, work_in, repeated_in = _run(_give_fake_memory(model, policy.param_dtype), subject.loss, probed)

    def work_of(module: nn.Module) -> Work:
        total = work_in[like.get(module, module)]
        for each in inside[module] & like.keys() & set(blocks):  # blocks removed from ``module``
            total = total.plus(work_in[like[each]])
        return total

    def by_unit(module: nn.Module) -> dict[str, Work]:
        found = defaultdict(partial(Work, 0.0, 0.0), {unit_of.get(module, outer_of[module]): work_of(module)})
        for each in inside[module] & unit_of.keys():
            for name, times in ((unit_of[each], 1), (outer_of[each], -1)):
                found[name] = found[name].plus(work_of(each), times)
        return found

    def repeated_of(block: nn.Module) -> dict[str, float]:
        repeated, forward = repeated_in.get(like.get(block, block), 0.0), work_of(block).forward
        return {name: repeated * (part.forward / forward) for name, part in by_unit(block).items() if forward}

    of_blocks = dict(zip(probed, measured.blocks, strict=True))
    activations = measured._replace(blocks=tuple(of_blocks[like.get(block, block)] for block in blocks))
    work = {unit.name: Work(0.0, 0.0) for unit in division} | by_unit(model)
    return Probe(activations, tuple(names[block] for block in blocks), work, tuple(map(repeated_of, blocks)))


def _truncate(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Remove all but the first and last of equal neighbouring blocks from containers; blocks listed twice stay.

    Returns, for each module of a removed block, the corresponding module of a block that remains.
    """
    like: dict[nn.Module, nn.Module] = {}
    containers = [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    repeated = {each for container in containers for each, times in Counter(container).items() if times > 1}

    def kind_of(module: nn.Module) -> Any:
        modules = [(name, type(each)) for name, each in module.named_modules()]
        parameters = [(each.shape, each.requires_grad) for each in module.parameters()]
        return (modules, parameters) if module in blocks and module not in repeated else object()

    for module in containers:
        kept: list[tuple[str, nn.Module]] = []
        for _, run in groupby(zip(module._modules, module, strict=True), key=lambda item: kind_of(item[1])):
            first, *others = run
            for _, each in others[:-1]:
                like |= zip(each.modules(), first[1].modules(), strict=True)
            kept += [first, *others[-1:]]
        if len(kept) < len(module):  # a ModuleList looks up [-1] by its length
            is_list = isinstance(module, nn.ModuleList)
            module._modules = {str(i) if is_list else name: each for i, (name, each) in enumerate(kept)}
    return like


def _run(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], blocks: list[nn.Module]
) -> tuple[Activations, dict[nn.Module, Work], dict[nn.Module, float]]:
    """Return activations, the work of ``model`` and each module in it, and the operations that each block repeats."""
    tracker = MemTracker()
    tracker.track_external(model)
    for frozen in (each for each in model.parameters() if not each.requires_grad):
        # give frozen parameters handles: without them the tracker would register hooks, which torch refuses on these
        tracker._param_to_grad_hook_handles[frozen] = (RemovableHandle(OrderedDict()),) * 2
    before = _total(tracker.get_tracker_snapshot())
    flops = FlopCounterMode(display=False)
    outside: list[int] = []
    calls: list[tuple[nn.Module, int]] = []

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        trained = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
        for each in trained:
            each.register_hook(lambda gradient: outside.append(_total(tracker.get_tracker_snapshot("peak"))))
        if trained:
            of = tracker.memory_tracking[module].snapshots
            calls.append((module, _total(of[_ModState.POST_FW][-1]) - _total(of[_ModState.PRE_FW][-1])))

    with flops, tracker, ExitStack() as handles, _count_repeated(blocks, flops) as repeated:
        for block in blocks:
            handles.enter_context(block.register_forward_hook(watch))
        loss = loss_of(model)
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
            raise ValueError("the function of the model returns no loss: return one number that depends on its weights")
        forward, made = _by_name(flops, model), [*calls]  # copied, as the backward calls checkpointed blocks again
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
        for handle in (flops.mod_tracker._fw_pre_handle, flops.mod_tracker._fw_post_handle):
            handle.remove()  # the counter's hooks on tensors that checkpointing recomputes would keep them alive
        _told("the backward of the loss", loss.backward)()
        del loss
    peak = _total(tracker.get_tracker_snapshot("peak")) - before
    found, kept = [], 0
    for block in blocks:
        stats = tracker.memory_tracking.get(block, None)
        if stats is None or _ModState.PEAK_BW not in stats.snapshots:  # the block had no forward or no backward
            found.append(Block(0, 0, 0))
            continue
        sizes = [size for called, size in made if called is block]
        # the backward of a block's first call is its last: measure what is held at that call
        held = sum(size for _, size in made[: [called for called, _ in made].index(block) + 1])
        highest = _total(stats.snapshots[_ModState.PEAK_BW][-1]) - before
        kept += sum(sizes)
        found.append(Block(sum(sizes), stats.output_mem * len(sizes), highest - held))
    tail = (outside[0] if outside else peak + before) - before - kept
    known, total = Activations(tuple(found), tail, 0), _by_name(flops, model)
    work = {}
    for name, module in model.named_modules():
        first = forward.get(name, 0.0)
        work[module] = Work(first, total.get(name, 0.0) - first)
    return known._replace(lowest=peak if peak > known.peak() else 0), work, repeated


@contextmanager
def _count_repeated(blocks: list[nn.Module], flops: FlopCounterMode) -> Iterator[dict[nn.Module, float]]:
    """Count, in each block's forwards, the operations before the last tensor that is saved for its backward.

    ``torch.utils.checkpoint`` ends a repeated forward at the last saved tensor (``early_stop``).
    """
    repeated: dict[nn.Module, float] = {}

    def enter(block: nn.Module, _: Any) -> None:
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return  # the model checkpoints this block by saved-tensor hooks, which ours would hide
        before = flops.get_total_flops() - repeated.get(block, 0.0)

        def pack(tensor: Tensor) -> Tensor:
            repeated[block] = flops.get_total_flops() - before
            return tensor

        open_hooks.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))

    def leave(*_: Any) -> None:
        open_hooks.close()

    with ExitStack() as open_hooks, ExitStack() as handles:
        for block in blocks:
            handles.enter_context(block.register_forward_pre_hook(enter))
            handles.enter_context(block.register_forward_hook(leave))
        yield repeated


def _total(snapshot: dict[torch.device, dict[str, int]]) -> int:
    return snapshot.get(CPU, {}).get("Total", 0)


def _by_name(flops: FlopCounterMode, model: nn.Module) -> dict[str, float]:
    """Return the operations counted so far by the name of a module in ``model``; the total under ""."""
    prefix = f"{type(model).__name__}."
    counts = {name.removeprefix(prefix): float(sum(each.values())) for name, each in flops.get_flop_counts().items()}
    return {**counts, "": counts.get("Global", 0.0)}
