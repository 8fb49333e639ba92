"""From drafts to an engine: units, slots and lanes for all that was sharded below one module.

``shard`` assembles at once. After ``fully_shard``, which goes bottom-up, the first forward tells which module is the
root. What is said about a unit later takes effect when the engine is put together again, before the next forward.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from yafsdp_cc.engine.counters import Counters
from yafsdp_cc.engine.cutter import cut_of
from yafsdp_cc.engine.delayed import Apart
from yafsdp_cc.engine.draft import draft_of, drafts_below
from yafsdp_cc.engine.journal import Journal
from yafsdp_cc.engine.near import NearShard
from yafsdp_cc.engine.offload import FromHost
from yafsdp_cc.engine.ranks import patience
from yafsdp_cc.engine.root import Root
from yafsdp_cc.engine.second import SecondShard
from yafsdp_cc.engine.small import SmallGroup
from yafsdp_cc.engine.unit import Unit
from yafsdp_cc.plan.units import ROOT
from yafsdp_cc.wire.exchange import Gather, Reduce, backend_of, rehearse
from yafsdp_cc.wire.link import try_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from yafsdp_cc.engine.draft import Draft
    from yafsdp_cc.engine.ranks import Ranks
    from yafsdp_cc.plan import Role

_ROOT = "_yafsdp_cc_root"
_ENGINE = "_yafsdp_cc_engine"


@torch.inference_mode(False)  # slots made inside of it could not be trained with
def assemble(model: nn.Module) -> Root:
    """The engine of everything that is sharded in ``model``, which becomes the root. A collective on some backends.

    Raises:
        ValueError: parts of it are sharded across different meshes.
        RuntimeError: parameters are still on the meta device, or gradients of micro-batches are held back.
    """
    drafts = drafts_below(model)
    _name(model, drafts)
    _check(model, drafts)
    ranks = drafts[-1].ranks
    before = {id(old): old for draft in drafts for module in draft.modules if (old := assembled(module))}.values()
    for old in before:
        old.retire()
    settings = drafts[-1].settings
    # Over gloo a second communicator costs next to nothing, and two ranks need it (see wire.exchange).
    is_gloo = backend_of(ranks.group, ranks.device) == "gloo"
    swaps = is_gloo and ranks.group.size() == 2
    apart = swaps or any(draft.settings.separate_reduce_group for draft in drafts)
    reduce_group = second_group(ranks) if apart else ranks.group
    if is_gloo and ranks.device.type == "cpu":
        try_out(ranks.group, reduce_group)
    gather_lane = settings.lanes.gathers(ranks.device)
    delays = any(flat.is_delayed for draft in drafts for flat in draft.flats)
    root = Root(
        model,
        drafts,
        ranks.group,
        reduce_group,
        ranks.replicas,
        ranks.device,
        gather_lane,
        settings.lanes.reduces(ranks.device) if apart else gather_lane,
        next((old.counters for old in before if old.model is model), Counters()),
        Apart(_further_group(ranks, 1), settings.lanes.apart(ranks.device)) if delays else None,
    )
    rehearse(root.gather, root.reductions.exchange, ranks.device)
    if delays:
        group = _further_group(ranks, 1)
        rehearse(Gather(group, ranks.device), Reduce(group, ranks.device), ranks.device)
    own = drafts[-1] if drafts[-1].modules == (model,) else None
    if own is not None:
        policy = own.policy
        root.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        root.output_dtype = policy.output_dtype
    units = {
        draft: Unit(root, draft, _role(draft, drafts, own))
        for draft in drafts
        if draft.flats or (draft is not own and draft.blocks)
    }
    for draft, unit in units.items():
        if draft.settings.near and unit.flats:
            unit.second = _second_shard(root, draft)
    blocks = [block for draft in drafts for block in draft.blocks]
    words = sum(len(unit.pieces) for unit in units.values()) + sum(len(block.pieces) for block in blocks)
    reduce = root.reductions.exchange
    small = SmallGroup(
        blocks,
        words + Journal.width(),
        # Its exchange is on the lane of the gradients, and so in their communicator throughout.
        root.gather if reduce.group is root.gather.group else Gather(reduce.group, root.device),
        reduce,
        root.device,
        root.reductions.lane.ticket(),
    )
    root.adopt(units, small, units.get(own) if own is not None else None)
    for old in before:
        root.reductions.take_over(old.reductions)
    for draft in drafts:
        for module in draft.modules:
            module.__dict__[_ROOT] = root
            module.__dict__[_ENGINE] = root if module is model else units.get(draft)
    model.__dict__[_ROOT] = root
    return root


def assembled(module: nn.Module) -> Root | None:
    """The engine that ``module`` is a part of, as it is."""
    root: Root | None = module.__dict__.get(_ROOT)
    return root


def current(module: nn.Module) -> Root:
    """The engine that ``module`` is a part of: made now if there is none, made anew if something was said since."""
    root = assembled(module)
    if root is not None and not (root.outdated and root.may_retire):
        return root
    draft = draft_of(module if root is None else root.model)
    return assemble(module if draft is None else draft.outermost.modules[0])


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` is one of the modules of; None where all it has is in others, or small."""
    root = current(module)
    if module is root.model:
        return root.unit
    unit: Unit | None = module.__dict__.get(_ENGINE)
    return unit


def _check(model: nn.Module, drafts: Sequence[Draft]) -> None:
    for name, parameter in model.named_parameters():
        if (cut := cut_of(parameter)) is not None:
            raise ValueError(
                f"'{name}' was tied to '{cut.name}', which was sharded without it: gather both together, "
                "fully_shard([one, other])"
            )
    first = drafts[0]
    for draft in drafts:
        draft.check()
        if draft.ranks.mesh != first.ranks.mesh:
            raise ValueError(
                f"'{draft.name}' is sharded across {draft.ranks.mesh}, '{first.name}' across {first.ranks.mesh}: what "
                "is called in one forward takes one mesh"
            )
        for part in draft.parts:
            if part.master.is_meta:
                name = part.pieces[0].cut.name
                raise RuntimeError(
                    f"'{name}' is still on the meta device: call model.to_empty(device=...) and "
                    "initialise the weights, or load them, before the first forward"
                )


def _name(model: nn.Module, drafts: Sequence[Draft]) -> None:
    """Call units and parameters by what ``model`` calls them."""
    names = {module: name for name, module in model.named_modules()}
    for draft in drafts:
        draft.name = next(names[module] for module in draft.modules if module in names) or ROOT
        for piece in draft.pieces:
            site = next((site for site in piece.sites if site[0] in names), None)
            if site is not None:  # a module that was taken out of the model since keeps its name
                module, attribute = site
                piece.cut.rename(f"{names[module]}.{attribute}" if names[module] else attribute)


def _role(draft: Draft, drafts: Sequence[Draft], own: Draft | None) -> Role:
    """What the draft says; else blocks are what is made of other modules, so that no embedding sets their size."""
    if draft is own:
        return "root"
    if draft.role is not None:
        return draft.role
    nested = [any(module._modules for module in each.modules) for each in drafts if each is not own]
    return "edge" if any(nested) and not any(module._modules for module in draft.modules) else "block"


_Groups: TypeAlias = "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]"
_further: _Groups = weakref.WeakKeyDictionary()
_near: _Groups = weakref.WeakKeyDictionary()
_far: _Groups = weakref.WeakKeyDictionary()
"""What was made of a group, once: further communicators, those of so many ranks near each other, and those across."""


def second_group(ranks: Ranks) -> dist.ProcessGroup:
    """A second communicator of the same ranks; others take no part in making it."""
    return _further_group(ranks, 0)


def _further_group(ranks: Ranks, number: int) -> dist.ProcessGroup:
    """The second communicator, or one after it."""
    known = _further.setdefault(ranks.group, {})
    if number not in known:
        members = dist.get_process_group_ranks(ranks.group)
        partly = len(members) < dist.get_world_size()
        waits = patience(ranks.group, ranks.device)
        known[number] = dist.new_group(members, timeout=waits, use_local_synchronization=partly)
    return known[number]


def _second_shard(root: Root, draft: Draft) -> SecondShard:
    """That of a draft's unit, which follows by encoded changes if weights are encoded."""
    ranks, count = draft.ranks, draft.settings.near
    near = _near_group(ranks, count)
    if root.encoded_change is None:
        return SecondShard(near, ranks.device, draft.flats)
    far, host = _far_group(ranks, count), draft.host
    if ranks.device.type == "cpu" and backend_of(far, ranks.device) == "gloo":
        try_out(far)
    among = Gather(far, ranks.device) if host is None else FromHost(far, ranks.device, host.crossings.weights)
    return NearShard(near, root.encoded_change.among(among), ranks.device, draft.flats, root.gather_lane)


def _near_group(ranks: Ranks, count: int) -> dist.ProcessGroup:
    """This rank and its neighbours, ``count`` in all."""
    first = ranks.group.rank() // count * count
    return _group_of(ranks, _near.setdefault(ranks.group, {}), count, slice(first, first + count))


def _far_group(ranks: Ranks, count: int) -> dist.ProcessGroup:
    """This rank and those that have its place among their own ``count`` neighbours."""
    place = ranks.group.rank() % count
    return _group_of(ranks, _far.setdefault(ranks.group, {}), count, slice(place, None, count))


def _group_of(ranks: Ranks, known: dict[int, dist.ProcessGroup], count: int, which: slice) -> dist.ProcessGroup:
    """Some of the ranks; every rank makes its own group only."""
    if count not in known:
        members = dist.get_process_group_ranks(ranks.group)[which]
        waits = patience(ranks.group, ranks.device)
        known[count] = dist.new_group(members, timeout=waits, use_local_synchronization=True)
    return known[count]
