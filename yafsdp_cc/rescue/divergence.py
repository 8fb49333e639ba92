"""``DivergenceWatch``: notices when values that must be equal on ranks differ, after a flipped bit, for instance."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from yafsdp_cc.checkpoint.ranks import meet, part_of
from yafsdp_cc.checkpoint.state import as_sequence, plain_name, unwrapped
from yafsdp_cc.fsdp2.module import torch_states
from yafsdp_cc.ranks.checks import all_gather_objects, checksum, named_ranks
from yafsdp_cc.replicas.sync import local_of, refuse_sync

if TYPE_CHECKING:
    from yafsdp_cc.checkpoint.state import Optimizers


class DivergenceError(RuntimeError):
    """Raised if ranks have different values of a parameter or step count that must be equal on them."""


class DivergenceWatch:
    """Compares checksums between ranks: all replicated parameters, step counts, and the shards of one unit in turn.

        watch = yafsdp_cc.DivergenceWatch(model, optimizer, every=100)
        ...
        watch.step()  # behind optimizer.step()

    A shard is compared with the same shard on other replicas; a model without replicas has none to compare. The
    checksums notice every change of one bit.

    Args:
        model: sharded by this package or by FSDP2.
        optimizer: the optimizer, or several, whose counts of steps are compared.
        every: number of steps from one comparison to the next.

    Raises:
        ValueError: ``every`` is no number of steps, or replicas differ by design, between exchanges (``sync``).
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers = None, *, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be a number of steps, 1 or more")
        self._model, self._optimizers, self._every = unwrapped(model), as_sequence(optimizer), every
        refuse_sync("DivergenceWatch", self._model)
        self._steps = self._compared = 0

    def step(self) -> None:
        """Count a step, and compare in every ``every``-th one, which is a collective.

        Raises:
            DivergenceError: on every rank, with the first parameter and the ranks that differ.
        """
        self._steps += 1
        if self._steps % self._every == 0:
            self._compare()

    def _compare(self) -> None:
        group = meet("DivergenceWatch.step()", self._model, {"steps": self._steps}).front
        if not (units := self._units()):
            return
        if not self._compared:  # a run that restarts often would never come to the last units from the first one
            self._compared = all_gather_objects(secrets.randbits(32), group)[0]
        unit = list(units)[self._compared % len(units)]
        self._compared += 1
        known = set().union(*units.values())
        names: dict[Tensor, str] = {each: plain_name(name) for name, each in self._model.named_parameters()}
        chosen = {each: name for each, name in names.items() if each in units[unit] or _is_replicated(each)}
        own: dict[str, tuple[Hashable, Hashable]] = {}
        own |= {name: (part_of(each) or (), checksum(local_of(each))) for each, name in chosen.items()}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                if "step" in state and (parameter in known or parameter not in names):
                    own[f"optimizer's step of {names.get(parameter, 'a parameter')}"] = ((), str(float(state["step"])))
        values: defaultdict[tuple[str, Hashable], dict[int, Hashable]] = defaultdict(dict)
        ranks = dist.get_process_group_ranks(group[0]) if group else [0]
        for rank, each in zip(ranks, all_gather_objects(own, group), strict=True):
            for name, (part, value) in each.items():
                values[name, part][rank] = value
        for (name, _), by_rank in values.items():
            if len(set(by_rank.values())) > 1:
                age = min(self._steps, self._every * len(units))
                raise DivergenceError(_told(name, unit, by_rank, self._steps, age))

    def _units(self) -> dict[str, set[Tensor]]:
        """Return the parameters of each unit, by the unit's name, without those that sharding ignores."""
        units: defaultdict[str, set[Tensor]] = defaultdict(set)
        wrapped = [name for name, module in self._model.named_modules() if isinstance(module, FSDPModule)]
        managed = [each for _, groups in torch_states(self._model) for group in groups for each in group.fsdp_params]
        unsharded = {vars(each).get("_unsharded_param") for each in managed}
        for name, parameter in self._model.named_parameters():
            if wrapped and type(parameter) is nn.Parameter and parameter not in unsharded:
                continue  # an ignored parameter: ranks may have values of their own
            around = [each for each in wrapped if name.startswith(f"{each}.")]
            units[max(around, key=len, default="")].add(parameter)
        return units


def _is_replicated(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and all(each.is_replicate() for each in parameter.placements)


def _told(name: str, unit: str, values: dict[int, Hashable], steps: int, age: int) -> str:
    (usual, count), *_ = Counter(values.values()).most_common()
    alike = [rank for rank, value in values.items() if value == usual]
    others = [rank for rank in values if rank not in alike]
    among = "" if 2 * count > len(values) else ", and which of them is right cannot be told"
    return (
        f"after {steps} steps {named_ranks(others)} had another '{name}' than {named_ranks(alike)}{among} (compared: "
        f"unit '{unit or '(root)'}' and all replicated parameters). A bit has flipped, or code has changed it on some "
        f"ranks alone, in the last {age} steps{' or before this run' if age == steps else ''}. Later snapshots and "
        "checkpoints may have it: go on from an earlier one, and test that machine if it happens again. (If ranks have "
        "other values of one name by design, as stages of a pipeline do, shard and watch each stage as a whole)"
    )
