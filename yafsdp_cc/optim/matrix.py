"""The base of optimizers that update matrices as a whole: each is updated by the rank that owns it.

``shard(model, ownership="matrix")`` puts every matrix, its gradient and its state on one rank each. On that rank a
subclass of ``MatrixOptimizer`` gets whole gradients and returns whole updates. That needs no communication, with two
exceptions: where tensor parallelism has divided a matrix, the ranks that own its parts gather it among themselves, and
each computes the whole update; and a unit with fewer matrices than ranks may be sharded evenly
(``sharding.ownership``): its matrices are assembled on their owners, and updates are sent back. AdamW
updates all other parameters (embeddings, heads, norms, vectors) shard by shard.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from yafsdp_cc.engine.layout import ShardSpec, TensorParallel
from yafsdp_cc.engine.param import owner_of
from yafsdp_cc.optim.adam import sharded_adamw_step
from yafsdp_cc.optim.one_bit import check_loaded, check_settings, grad_of, keep_dtypes, local_of, loss_of, width_of
from yafsdp_cc.ranks.mesh import to_mesh_device
from yafsdp_cc.tensor.dtensor import FlatDTensor, flat_dtensor, increment_version
from yafsdp_cc.tensor.rows import redivided

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

_ADAMW: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
"""Settings of ``torch.optim.AdamW`` with its defaults."""


class MatrixOptimizer(Optimizer):
    """An optimizer of whole matrices, each on the rank that owns it, and AdamW for all other parameters.

    A subclass defines ``state_shapes`` and ``updates``. The weights of a matrix then change as in AdamW,
    w ← (1 − lr·weight_decay)·w − rate·update, where the rate is ``learning_rate``. A stack of matrices [k, m, n], such
    as the weights of experts, counts as k of them.

    A parameter group of matrices and others is divided in two: one of matrices, with the settings given, and one of the
    others, with those of ``adamw``, ``betas`` among them. The first rank prints what updates each, on which ranks.

    State dicts hold state by parameter, sharded like the parameter or owned by the same rank. ``load_state_dict`` also
    takes whole tensors, as of a single process, and cuts them.

    Args:
        params: parameters of a model that was sharded with ``ownership="matrix"`` or patterns, or groups of them. With
            an entry ``"adamw"``, a dict, a group has settings of its own for its parameters that are no matrices.
        defaults: settings of the matrices; ``lr`` and ``weight_decay`` are among them.
        adamw: settings for parameters that are no matrices, where they differ from the defaults of
            ``torch.optim.AdamW``: ``lr``, ``betas``, ``eps`` and ``weight_decay``.

    Raises:
        ValueError: a parameter is not sharded, no matrix is owned whole, or a setting is out of range or of no use.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], adamw: Mapping[str, Any] | None = None) -> None:
        check_settings({name: value for name, value in defaults.items() if name != "betas"})
        self._adamw = _completed({} if adamw is None else adamw)
        super().__init__(params, defaults)
        name = type(self).__name__
        if not any(self._is_of_matrices(group) for group in self.param_groups):
            raise ValueError(
                f'{name} was given no matrix that one rank owns whole: pass ownership="matrix", or patterns of '
                "parameter names, to yafsdp_cc.shard()"
            )
        meshes = {parameter.shard_spec.global_mesh for group in self.param_groups for parameter in group["params"]}
        if not any(any(mesh.get_coordinate() or ()) for mesh in meshes):
            print(self.describe(), flush=True)

    # Methods that a subclass defines

    @abstractmethod
    def state_shapes(self, rows: int, columns: int) -> Mapping[str, Sequence[int]]:
        """Return the names and shapes of the state of a matrix [rows, columns]; zero at first, fp32 at least."""

    @abstractmethod
    def updates(
        self, gradients: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any]
    ) -> Sequence[Tensor]:
        """Return the update of each matrix, which is subtracted from it times ``learning_rate``.

        ``step`` calls ``updates`` on the rank that updates the matrices, for several of one shape and parameter group
        at once. The number of matrices may differ from step to step, as a parameter without a gradient is left out.

        Args:
            gradients: [m, n] each, means over all ranks, fp32 at least; may be changed.
            states: state of each matrix by the names of ``state_shapes``, to be updated in place.
            group: the settings of their parameter group.

        Returns:
            [m, n] each, of any floating-point dtype.
        """

    def update_dtype(self, device: torch.device) -> torch.dtype | None:
        """Return the dtype in which updates of assembled matrices are sent back to the shards; None: that of gradients.

        The dtype must be the same on all ranks.
        """
        return None

    def learning_rate(self, group: Mapping[str, Any], rows: int, columns: int) -> float:
        """Return the factor on the update of a matrix [rows, columns]."""
        return float(group["lr"])

    def parts(self, name: str, rows: int) -> Sequence[int]:
        """Return the number of rows of each matrix that the parameter ``name`` stacks, one below the other."""
        return (rows,)

    # Parameter groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; matrices and other parameters become a group each."""
        group = dict(param_group)
        adamw = _completed({**self._adamw, **group.pop("adamw", {})})
        given = group.pop("params")
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        kinds: dict[bool, list[Any]] = defaultdict(list)
        for each in given:
            kinds[bool(self._spec_of(each).owners)].append(each)
        taken = {"params", *(self.defaults if kinds[True] else ())}
        named = [name for name in (*self.defaults, *_ADAMW) if name in group.keys() - taken]
        lost = {name: group[name] for name in named if adamw.get(name) != group[name]}
        if given and lost:
            raise ValueError(
                f"the parameter group of '{self._spec_of(given[0]).name}' has {', '.join(lost)}, which no matrix in it "
                f'takes: for its other parameters, write "adamw": {lost} into the group'
            )
        if kinds[True]:
            super().add_param_group({**group, "params": kinds[True]})
        if kinds[False]:
            super().add_param_group({**adamw, "params": kinds[False]})
            for name in self.defaults.keys() - adamw.keys():  # torch adds defaults that only matrices have
                del self.param_groups[-1][name]

    def _spec_of(self, given: Any) -> ShardSpec:
        """Return the spec of a parameter, or of a (name, parameter) pair."""
        name, parameter = given if isinstance(given, tuple) else ("", given)
        kind = type(self).__name__
        if not isinstance(parameter, FlatDTensor):
            raise ValueError(
                f"{kind} was given {name!r} {list(parameter.shape)}, which is not sharded: make the {kind} from "
                'model.parameters() after yafsdp_cc.shard(model, ownership="matrix")'
            )
        return parameter.shard_spec

    @staticmethod
    def _is_of_matrices(group: Mapping[str, Any]) -> bool:
        return bool(group["params"][0].shard_spec.owners)

    def describe(self) -> str:
        """Describe each kind of parameters in a line: names, shape, number, what updates them, and on which ranks."""
        lines = [f"{type(self).__name__} updates"]
        for group in self.param_groups:
            alike: dict[tuple[str, tuple[int, ...]], list[ShardSpec]] = defaultdict(list)
            for parameter in group["params"]:
                spec = parameter.shard_spec
                alike[re.sub(r"(?<![^.])\d+(?![^.])", "*", spec.name), tuple(spec.global_shape)].append(spec)
            for (name, shape), specs in alike.items():
                line = f"  {name} {list(shape)}" + (f" x{len(specs)}" if len(specs) > 1 else "")
                if not self._is_of_matrices(group):
                    lines.append(f"{line}: by AdamW")
                    continue
                owners = sorted({rank for spec in specs if spec.bounds is not None for rank in spec.owners})
                where = f"rank {', '.join(map(str, owners))}" if owners else "every rank"
                how = "assembled" if any(spec.is_assembled for spec in specs) else "whole"
                lines.append(f"{line}: {how}, on {where}")
        return "\n".join(lines)

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step. ``closure`` is called as by torch's optimizers."""
        loss = loss_of(closure)
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in used:
                self._init_state(parameter, group)
            if self._is_of_matrices(group):
                self._update_matrices(group, used)
            else:
                sharded_adamw_step(group, used, self.state)
        return loss

    def _update_matrices(self, group: dict[str, Any], used: Sequence[Any]) -> None:
        increment_version([local_of(parameter) for parameter in used])
        here = [
            parameter for parameter in used if not parameter.shard_spec.is_assembled and local_of(parameter).numel()
        ]
        wholes = [_gathered(parameter, local_of(parameter)) for parameter in here]
        gradients = [_gathered(parameter, grad_of(parameter)) for parameter in here]
        for weight, update, rate in self._updated(group, here, gradients, wholes):
            _apply(group, weight, update, rate)
        for parameter, whole in zip(here, wholes, strict=True):
            if (parallel := parameter.shard_spec.tensor_parallel) is not None and parallel.divides_matrices:
                local = local_of(parameter)
                local.copy_(parallel.local_of(whole).reshape(local.shape))
        for bucket in buckets([parameter for parameter in used if parameter.shard_spec.is_assembled]):
            self._update_assembled(group, bucket)

    def _update_assembled(self, group: dict[str, Any], bucket: Sequence[Any]) -> None:
        """Update matrices that are sharded evenly. A collective."""
        specs = [parameter.shard_spec for parameter in bucket]
        held, updated, mesh = [spec.bounds for spec in specs], [spec.update_bounds for spec in specs], specs[0].mesh
        gradients = redivided([grad_of(parameter) for parameter in bucket], held, updated, mesh)
        dtype = self.update_dtype(gradients[0].device) or gradients[0].dtype
        updates = [torch.empty_like(gradient, dtype=dtype) for gradient in gradients]
        for place, update, _ in self._updated(group, bucket, gradients, updates):
            place.copy_(update)
        for parameter, update in zip(bucket, redivided(updates, updated, held, mesh), strict=True):
            local, (first, last) = local_of(parameter), parameter.shard_spec.local_range()
            for start, stop, rate in self._rates(group, parameter.shard_spec):
                if (part := slice(max(start - first, 0), min(stop, last) - first)).stop > part.start:
                    _apply(group, local[part], update[part], rate)

    def _rates(self, group: dict[str, Any], spec: ShardSpec) -> Iterator[tuple[int, int, float]]:
        """Yield ranges of the elements of a parameter, and the learning rate of each."""
        columns = spec.global_shape[-1]
        rates = [(count * columns, self.learning_rate(group, count, columns)) for count in self._parts_of(spec)]
        if len({rate for _, rate in rates}) == 1:
            rates = [(spec.numel, rates[0][1])]
        start = 0
        while start < spec.numel:
            for numel, rate in rates:
                yield start, start + numel, rate
                start += numel

    def _updated(
        self, group: dict[str, Any], parameters: Sequence[Any], gradients: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield for each matrix its view of ``targets``, its update and its learning rate.

        Args:
            gradients, targets: whole matrices of each parameter, one after the other: those that this rank updates.
        """
        alike: dict[Any, list[tuple[Tensor, Tensor, dict[str, Tensor]]]] = defaultdict(list)
        for parameter, gradient, target in zip(parameters, gradients, targets, strict=True):
            for own, place, state in self._matrices_of(parameter, gradient, target):
                alike[own.shape, own.dtype].append((own, place, state))
        for (shape, _), matrices in alike.items():
            of_all, places, states = zip(*matrices, strict=True)
            rate = self.learning_rate(group, *shape)
            for place, update in zip(places, self.updates(of_all, states, group), strict=True):
                yield place, update, rate

    def _matrices_of(
        self, parameter: Any, gradient: Tensor, target: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Yield views of ``gradient``, ``target`` and the state for each matrix of a parameter."""
        spec: ShardSpec = parameter.shard_spec
        rows, columns = spec.global_shape[-2:]
        parts = self._parts_of(spec)
        gradient, target = (each.view(-1, rows, columns) for each in (gradient, target))
        state = {name: local_of(each) for name, each in self.state[parameter].items()}
        for index in range(len(gradient)):
            for place, (start, count) in enumerate(zip(accumulate(parts, initial=0), parts, strict=False)):
                shapes = self.state_shapes(count, columns)
                own = {
                    name: each.view(-1, rows, columns)[index, start : start + count]
                    if tuple(shapes[name]) == (count, columns)
                    else each.view(-1, *shapes[name])[index * len(parts) + place]
                    for name, each in state.items()
                }
                yield gradient[index, start : start + count], target[index, start : start + count], own

    def _parts_of(self, spec: ShardSpec) -> Sequence[int]:
        rows = spec.global_shape[-2]
        parts = tuple(self.parts(spec.name, rows))
        if sum(parts) != rows or min(parts) < 1:
            raise ValueError(f"'{spec.name}' has {rows} rows, and splits={parts} must add up to that")
        return parts

    # State

    def _init_state(self, parameter: Any, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not self._is_of_matrices(group):
            state.setdefault("step", torch.tensor(0.0, device="cpu"))
        for name, spec in self._state_specs(parameter, group).items():
            if name not in state:
                device = local_of(parameter).device
                state[name] = flat_dtensor(
                    torch.zeros(spec.local_shape, dtype=width_of(parameter), device=device), spec
                )

    def _state_specs(self, parameter: Any, group: Mapping[str, Any]) -> dict[str, ShardSpec]:
        """Return the spec of each tensor in a parameter's state by name; counts of steps are left out."""
        spec: ShardSpec = parameter.shard_spec
        if not self._is_of_matrices(group):
            return dict.fromkeys(("exp_avg", "exp_avg_sq"), spec)
        *stack, _, columns = spec.updated_shape
        parts = self._parts_of(spec)
        lies_as_weight = spec.updated_shape == spec.shape and not spec.is_assembled
        specs: dict[str, ShardSpec] = {}
        for name, shape in self.state_shapes(parts[0], columns).items():
            # look at all parts: a state of [rows, rows] has the shape of a square part, but not of others
            if all(tuple(self.state_shapes(rows, columns)[name]) == (rows, columns) for rows in set(parts)):
                # a matrix that tensor parallelism divides, or that its owner assembles, has state of its whole shape
                specs[name] = spec if lies_as_weight else _owned_like(spec, name, spec.updated_shape)
                continue
            if len(set(parts)) > 1:
                raise ValueError(
                    f"'{spec.name}' is divided into matrices of {parts} rows, and the state {name!r} has a shape of "
                    "its own for each: divide it into equal ones, or not at all"
                )
            specs[name] = _owned_like(spec, name, (*stack, *((len(parts),) if len(parts) > 1 else ()), *shape))
        return specs

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of any number of ranks, or of whole tensors as from a single process.

        ``load_state_dict`` is a collective if tensor parallelism has divided matrices.
        """
        check_loaded(self, state_dict)
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                for name, spec in self._state_specs(parameter, group).items():
                    loaded = state.get(name)
                    if loaded is None or (isinstance(loaded, FlatDTensor) and loaded.shard_spec.matches(spec)):
                        continue
                    whole = loaded.full_tensor() if isinstance(loaded, DTensor) else loaded
                    local = spec.local_of_full(whole.view(spec.global_shape)).to(local_of(parameter).device)
                    state[name] = flat_dtensor(local.clone(), spec)


def _apply(group: Mapping[str, Any], weight: Tensor, update: Tensor, rate: float) -> None:
    """Decay ``weight``, and subtract ``update`` times ``rate`` from it, in place."""
    wide = weight.to(width_of(weight))
    wide.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)
    if wide is not weight:
        weight.copy_(wide)


def _gathered(parameter: Any, local: Tensor) -> Tensor:
    """Return the whole matrix that this rank owns; a collective if tensor parallelism has divided it.

    Args:
        local: this rank's elements; returned unchanged unless tensor parallelism has divided the matrix.
    """
    spec: ShardSpec = parameter.shard_spec
    if spec.tensor_parallel is None or not spec.tensor_parallel.divides_matrices:
        return local
    part = local.view(spec.shape)
    whole = spec.tensor_parallel.wrap_unsharded(to_mesh_device(part, spec.mesh)).full_tensor()
    return whole.to(local.device, copy=True)


def _completed(adamw: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of AdamW, with defaults for those not given."""
    if unknown := adamw.keys() - _ADAMW.keys():
        raise ValueError(f"adamw has {sorted(unknown)}: it takes {', '.join(_ADAMW)}")
    settings = {**_ADAMW, **adamw}
    check_settings(settings)
    return settings


def _owned_like(spec: ShardSpec, name: str, shape: Sequence[int]) -> ShardSpec:
    """Return the spec of a state tensor that lies on the ranks that update a matrix, or the matrices of a stack.

    Args:
        shape: shape of the tensor, with the same leading stack dimensions, if any, as ``spec.updated_shape``.
    """
    numel, bounds, parallel = math.prod(shape), spec.update_bounds, spec.tensor_parallel
    if bounds is not None:
        bounds = tuple(bound * numel // max(spec.numel, 1) for bound in bounds)
    if parallel is not None and parallel.divides_matrices:
        parallel = None
    elif parallel is not None:
        depth = len(parallel.shape) - 2
        whole = torch.Size((*parallel.shape[:depth], *shape[depth:]))
        parallel = TensorParallel(parallel.mesh, parallel.placements, whole)
    return ShardSpec(f"{spec.name}.{name}", torch.Size(shape), spec.mesh, bounds, parallel, owners=spec.owners)


# Assembly of matrices that are sharded evenly: one all-to-all to the ranks that update them, and one back -------------
#
#     shards of W      | rank 0 | rank 1 | rank 2 |        gradients, each rank's range to the owner
#                         └────────┼────────┘
#     owner of W              | whole W |                  its update, by ranges to those who hold them
#
# Matrices of several units share the two messages.

_BUCKET = 1 << 26
"""Most elements, of all ranks, that one exchange moves; more only so that no unit has an exchange to itself."""


def buckets(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the parameters of each exchange: of one mesh and dtype, and of at least two units if there are two.

    As units share the two messages of an exchange, assembly costs a unit one message on average, or less.
    """
    kinds: dict[Any, dict[Any, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for each in parameters:
        spec: ShardSpec = each.shard_spec
        owner = owner_of(spec)
        kinds[spec.mesh, each.dtype][None if owner is None else owner.flat].append(each)
    for kind in kinds.values():
        units = list(kind.values())
        while units:
            elements = accumulate(sum(each.shard_spec.numel for each in unit) for unit in units)
            count = max(bisect_right(list(elements), _BUCKET), 2)
            if len(units) == count + 1:
                count += 1
            yield [each for unit in units[:count] for each in unit]
            units = units[count:]
