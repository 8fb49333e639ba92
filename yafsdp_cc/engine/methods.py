"""What FSDP2 lets be said to a module: its methods, with its meaning, on modules of this engine.

Whatever changes how many slots there are takes effect with the next forward for which no gradient is held back. What
has no meaning here raises, and says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import UnshardHandle as _UnshardHandle

from yafsdp_cc.engine.assemble import assembled, current, unit_of
from yafsdp_cc.engine.draft import Draft, draft_of, drafts_below

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from yafsdp_cc.engine.unit import Unit


class UnshardHandle(_UnshardHandle):
    """What ``unshard(async_op=True)`` has begun."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Let the modules of the unit see whole weights, and the current stream use them."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.show_held()


class Methods(FSDPModule):
    """FSDP2's methods."""

    # Weights -----------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own weights, those of modules sharded within it aside, until ``reshard``.

        Attributes such as ``module.weight`` are whole then; ``parameters()`` goes on to give the sharded ones. The next
        forward uses what was gathered, and afterwards lets go of it if the module reshards after forward.

        Args:
            async_op: return at once, with a handle; a forward waits by itself.
        """
        unit = unit_of(_module(self))
        if unit is not None:
            unit.hold()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Let go of what ``unshard`` has gathered."""
        module = _module(self)
        unit = unit_of(module) if assembled(module) is not None else None
        if unit is not None:
            unit.let_hold_go()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether weights are dropped after forward and gathered again in backward, or keep a slot to themselves.

        The root's own weights have one anyway. A second shard, asked for by a number, is given up.
        """
        _check_bool("reshard_after_forward", reshard_after_forward)
        self._say(recurse, "keeps_after_forward", not reshard_after_forward)
        self._say(recurse, "near", 0)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether weights are dropped after backward, or kept for the next forward in a slot of their own.

        A unit that has got such a slot keeps it: True only allows to drop the weights. The next forward gathers them
        again if they have changed.
        """
        _check_bool("reshard_after_backward", reshard_after_backward)
        if not reshard_after_backward:
            self._say(recurse, "keeps_after_backward", True)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether the backward reads the weights. Embeddings are known not to."""
        _check_bool("unshard_in_backward", unshard_in_backward)
        self._say(False, "read_in_backward", unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these when this module is about to run, instead of what ran next the last time.

        There are as many weight slots as the longest such list and one more.
        """
        self._say(False, "forward_prefetch", _drafts_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these when the backward comes to this module, instead of what the forward's order tells."""
        self._say(False, "backward_prefetch", _drafts_of(modules))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward's gathers wait for ``event`` alone, not for all that the current stream has to do."""
        current(_module(self)).post_optim_event = event

    # Gradients ---------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether a backward reduces the gradients.

        False keeps whole gradients on this rank (a warning says how many bytes that costs) until the first backward
        after True, which reduces what has come together. All ranks must say the same. Left alone, every micro-batch
        is reduced into the sharded gradients and nothing whole is kept.
        """
        for draft in self._drafts(recurse):
            draft.settings.synchronises = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether a backward sums over the replicas of a 2-D mesh, or leaves that to a later one.

        It is for all that one forward runs. Gradients are final, and in ``.grad``, after a backward that does.

        Raises:
            ValueError: this is not the root, or ``recurse`` is False.
        """
        _check_bool("requires_all_reduce", requires_all_reduce)
        module = _module(self)
        root = current(module)
        if root.reductions.replicas is None:
            return
        if root.model is not module or not recurse:
            raise ValueError("set_requires_all_reduce is for the whole model: call it on the root, with recurse=True")
        root.reductions.replicas.sums = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward waits for all reductions. Before one that does, gradients are not final."""
        current(_module(self)).reductions.concludes = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's summed gradients by ``factor`` instead of the number of ranks."""
        if not factor:
            raise ValueError(f"set_gradient_divide_factor takes a number other than 0, got {factor!r}")
        for draft in self._drafts(False):
            draft.divide_by(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Gradients are summed on the wire and divided at the end, always: what True asks for, and False allows."""
        _check_bool("enable", enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """A rank may leave parameters of a unit unused, always: what True asks for, and False allows."""
        _check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many gradient slots blocks take turns in: two, unless this says otherwise."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._say(recurse, "gradient_slots", max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether gradients have a communicator of their own, so that gathers and reduces can overlap each other.

        It is for all that one forward runs: one module that asks for it is enough.
        """
        _check_bool("enable", enable)
        self._say(recurse, "separate_reduce_group", enable)

    # Passes ------------------------------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Drop what a forward or backward that raised has left behind, gradients not reduced yet with it.

        The next forward does it by itself.

        Raises:
            RuntimeError: this is not the root.
        """
        module = _module(self)
        root = current(module)
        if root.model is not module:
            raise RuntimeError("reset_iter_state is for the root module, the outermost that is sharded")
        root.recover()

    # What is not there -------------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Refused."""
        _refuse("set_custom_all_gather", "weights are gathered from buffer to buffer, without the copies it is handed")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Refused."""
        _refuse("set_custom_reduce_scatter", "the engine sums in place; what changes the bytes sent is a codec")

    def set_all_reduce_hook(self, hook: Callable[[Any], None], *, stream: Any = None) -> NoReturn:
        """Refused."""
        _refuse("set_all_reduce_hook", "pass a 2-D mesh (replicate, shard) for a sum over replicas")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> NoReturn:
        """Refused."""
        _refuse("set_allocate_memory_from_process_group_for_comm", "slots are allocated once, by torch")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Refused."""
        _refuse("set_symm_mem_for_comm", "slots are allocated once, by torch")

    def _set_unshard_async_op(self, async_op: bool) -> NoReturn:
        _refuse("_set_unshard_async_op", "gathers are issued ahead, into slots that exist already")

    def _get_fsdp_state(self) -> NoReturn:
        raise NotImplementedError(
            f"a {type(self).__name__} has no state of FSDP2's: it is sharded by yafsdp_cc, which has the methods of "
            "FSDP2's modules but not what lies behind them"
        )

    def _drafts(self, recurse: bool) -> Sequence[Draft]:
        own = draft_of(_module(self))
        return drafts_below(_module(self)) if recurse else [own] if own is not None else []

    def _say(self, recurse: bool, setting: str, value: object) -> None:
        for draft in self._drafts(recurse):
            if getattr(draft.settings, setting) == value:
                continue
            root = assembled(draft.modules[0])
            if root is not None:
                root.outdated = True
            setattr(draft.settings, setting, value)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let the roots among ``modules`` issue their communication on the same lanes, as stages of a pipeline do.

    Raises:
        ValueError: one of them is not sharded.
    """
    drafts = _drafts_of(modules)
    for draft in drafts[1:]:
        root = assembled(draft.modules[0])
        if root is not None:
            root.outdated = True
        draft.settings.lanes = drafts[0].settings.lanes


def _module(methods: Methods) -> nn.Module:
    assert isinstance(methods, nn.Module)
    return methods


def _drafts_of(modules: Sequence[Any]) -> tuple[Draft, ...]:
    drafts = []
    for module in modules:
        draft = draft_of(module) if isinstance(module, nn.Module) else None
        if draft is None:
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        drafts.append(draft)
    return tuple(dict.fromkeys(drafts))


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} should be a bool, got {type(value)}")


def _refuse(name: str, why: str) -> NoReturn:
    raise NotImplementedError(f"{name} has no meaning here: {why}")
