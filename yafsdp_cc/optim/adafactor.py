"""Adafactor for sharded models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist

from yafsdp_cc.optim.one_bit import grad_of, keep_dtypes, local_of, loss_of, width_of
from yafsdp_cc.ranks.mesh import all_reduce_over
from yafsdp_cc.tensor.dtensor import FlatDTensor, summand_of

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.engine.layout import ShardSpec


class Adafactor(torch.optim.Adafactor):
    """``torch.optim.Adafactor`` of sharded parameters: the same arguments, steps and state.

    Adafactor (Shazeer and Stern, 2018, algorithms 4 and 5) stores the second moment of a matrix as its means over rows
    and over columns. Each rank sums the squares of its flat range by row and by column, and the ranks add these sums:
    one all-reduce per step for all parameters of a mesh, of as many numbers as their matrices have rows and columns,
    and a second one of a number for each parameter, since updates are clipped by their norms.

    The state is that of ``torch.optim.Adafactor`` in a single process: ``row_var`` [..., m, 1] and ``col_var`` [..., 1,
    n] of a matrix [..., m, n] are plain tensors, the same on every rank, and ``variance`` of a vector is sharded like
    it. State and updates are in fp32 at least, also of parameters in half precision. A step needs memory for this
    rank's elements of one parameter's update at a time.

    Arguments are those of ``torch.optim.Adafactor``; ``params`` are parameters of a sharded model, or groups of them,
    and ``foreach`` has no effect. Parameters that tensor parallelism has divided are refused.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters as ``torch.optim.Optimizer`` does; all of them must be sharded."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not isinstance(parameter, FlatDTensor):
                raise ValueError(
                    f"yafsdp_cc.optim.Adafactor was given a parameter {list(parameter.shape)} that is not sharded: "
                    "make the optimizer from model.parameters() after shard(), and a torch.optim.Adafactor for others"
                )
            if parameter.shard_spec.tensor_parallel is not None:
                raise ValueError(
                    f"yafsdp_cc.optim.Adafactor was given '{parameter.shard_spec.name}', which tensor parallelism has "
                    "divided, so that no rank has whole rows and columns: take torch.optim.AdamW for it"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step. A collective. ``closure`` is called as by torch's optimizers."""
        loss = loss_of(closure)
        members = [
            _Member(parameter, group, self._state_of(parameter))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        found = [member.squares() for member in members]
        _sum_over_ranks(members, found)
        for member, squares in zip(members, found, strict=True):
            member.track(squares)
        norms = _numbers([squares[:1] for squares in found])
        of_updates = [_square_sum(member.update()) for member in members]
        _sum_over_ranks(members, of_updates)
        updates = _numbers(of_updates)
        for member, norm, update in zip(members, norms, updates, strict=True):
            member.apply(norm, update)
        return loss

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter, and make it if there is none."""
        state = self.state[parameter]
        if not state:
            width, shape = width_of(parameter), parameter.shape
            state["step"] = torch.tensor(0.0, device="cpu")
            if len(shape) > 1:
                device = local_of(parameter).device
                state["row_var"] = torch.zeros((*shape[:-1], 1), dtype=width, device=device)
                state["col_var"] = torch.zeros((*shape[:-2], 1, shape[-1]), dtype=width, device=device)
            else:
                state["variance"] = torch.zeros_like(parameter, dtype=width)
        return cast("dict[str, Any]", state)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of any number of ranks, or of ``torch.optim.Adafactor`` in one process. A collective."""
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)
        for parameter, state in self.state.items():
            for name in ("row_var", "col_var"):
                # ``row_var`` of a matrix [m, 1] and ``col_var`` of one [1, n] have its shape, so a load shards them
                if isinstance(state.get(name), FlatDTensor):
                    state[name] = state[name].full_tensor()
            variance = state.get("variance")
            if variance is not None and not isinstance(variance, FlatDTensor):
                state["variance"] = torch.zeros_like(parameter, dtype=width_of(parameter))
                local_of(state["variance"]).copy_(cast("FlatDTensor", parameter).shard_spec.local_of_full(variance))


class _Member:
    """One parameter with its settings and state, within one step of the optimizer."""

    def __init__(self, parameter: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.spec: ShardSpec = parameter.shard_spec
        self.summand = summand_of(parameter, parameter.dtype)
        self.parameter, self.group, self.state = parameter, group, state
        self.gradient = grad_of(parameter)
        if group["maximize"]:
            self.gradient = -self.gradient
        self.block = _Block.of(self.spec) if len(self.spec.shape) > 1 else None
        eps = group["eps"][0]
        self.eps = torch.finfo(parameter.dtype).eps if eps is None else eps

    def squares(self) -> Tensor:
        """Return sums of squares over this rank's elements: of weights, and of gradients by row and by column."""
        parts = [_square_sum(local_of(self.parameter)).to(self.gradient.dtype)]
        if self.block is not None:
            shape = self.spec.shape
            rows, columns = self.gradient.new_zeros(shape[:-1]), self.gradient.new_zeros((*shape[:-2], shape[-1]))
            block, touched = self.block.padded(self.gradient), self.block.touched
            of_rows, of_columns = (torch.linalg.vector_norm(block, dim=dim).square_() for dim in (-1, -2))
            if self.block.is_of_rows:
                rows.view(-1)[touched] = of_rows
                columns.view(-1)[:] = of_columns
            else:
                rows.view(-1, shape[-2])[touched] = of_rows
                columns.view(-1, shape[-1])[touched] = of_columns
            parts += [rows, columns]
        return torch.cat([part.reshape(-1) for part in parts])

    def track(self, squares: Tensor) -> None:
        """Update the second moment by ``squares``, summed over all ranks."""
        self.state["step"] += 1
        taken = float(self.state["step"]) ** self.group["beta2_decay"]
        if self.block is not None:
            row_var, col_var = self.state["row_var"], self.state["col_var"]
            rows, columns = squares[1:].split([row_var.numel(), col_var.numel()])
            row_var.lerp_(rows.view_as(row_var) / self.spec.shape[-1], taken)
            col_var.lerp_(columns.view_as(col_var) / self.spec.shape[-2], taken)
        else:
            local_of(self.state["variance"]).lerp_(self.gradient.square(), taken)

    def update(self) -> Tensor:
        """Return this rank's elements of the update, without learning rate; made twice in a step to save memory."""
        if self.block is not None:
            row, column = self.state["row_var"], self.state["col_var"]
            mean = row.mean(dim=-2, keepdim=True).clamp_(min=self.eps)
            variance = self.block.of_factors(row, column, mean).view(self.gradient.shape)
        else:
            variance = local_of(self.state["variance"]).clone()
        return variance.clamp_(min=self.eps**2).rsqrt_().mul_(self.gradient)

    def apply(self, norm: float, update: float) -> None:
        """Update the weights.

        Args:
            norm: the sum of the squares of the whole parameter's elements.
            update: the sum of the squares of the elements of the whole parameter's ``update``.
        """
        lr, numel, step = float(self.group["lr"]), self.parameter.numel(), float(self.state["step"])
        relative = max(self.group["eps"][1], math.sqrt(norm / numel)) * min(lr, step**-0.5)
        rate = relative / max(1.0, math.sqrt(update / numel) / self.group["d"])
        local = local_of(self.parameter)
        wide = local.to(self.gradient.dtype)
        if self.group["weight_decay"]:
            wide.mul_(1 - lr * self.group["weight_decay"])
        wide.add_(self.update(), alpha=-rate)
        if wide is not local:
            local.copy_(wide)


class _Block(NamedTuple):
    """The rows [n, columns] of a matrix, or matrices [n, rows, columns] of a stack, that a flat range touches."""

    shape: tuple[int, ...]
    """Shape of the whole parameter: [rows, columns], or [matrices, rows, columns]."""
    touched: slice
    before: int
    """Number of elements of the touched rows or matrices that precede the flat range."""
    numel: int

    @classmethod
    def of(cls, spec: ShardSpec) -> _Block:
        """Return the block that this rank's range of a tensor with at least two dimensions touches."""
        *stack, rows, columns = spec.shape
        count = math.prod(stack)
        shape = (rows, columns) if count == 1 else (count, rows, columns)
        size, (start, stop) = max(math.prod(shape[1:]), 1), spec.local_range()
        first, last = start // size, -(-stop // size)
        return cls(shape, slice(first, last if stop > start else first), start - first * size, stop - start)

    @property
    def is_of_rows(self) -> bool:
        return len(self.shape) == 2

    def padded(self, local: Tensor) -> Tensor:
        """Return the whole block, with zeros around this rank's elements."""
        shape = (self.touched.stop - self.touched.start, *self.shape[1:])
        if not self.numel:
            return local.new_zeros(shape)
        after = math.prod(shape) - self.before - self.numel
        return torch.nn.functional.pad(local.reshape(-1), (self.before, after)).view(shape)

    def of_factors(self, row: Tensor, column: Tensor, mean: Tensor) -> Tensor:
        """Return the second moment, row · column / mean, of the flat range's elements, as a new 1-D tensor."""
        count, (rows, columns) = math.prod(self.shape[:-2]), self.shape[-2:]
        row, column, mean = row.reshape(count, rows, 1), column.reshape(count, 1, columns), mean.reshape(count, 1, 1)
        if self.is_of_rows:
            product = (row[0, self.touched] * column[0]).div_(mean[0])
        else:
            product = (row[self.touched] * column[self.touched]).div_(mean[self.touched])
        return product.view(-1)[self.before : self.before + self.numel]


def _square_sum(local: Tensor) -> Tensor:
    """Return the sum of the squares of ``local``, [1], fp64."""
    norm = torch.linalg.vector_norm(local, dtype=torch.promote_types(local.dtype, torch.float32))
    squares: Tensor = norm.double().square_().view(1)
    return squares


def _sum_over_ranks(members: Sequence[_Member], found: Sequence[Tensor]) -> None:
    """Sum ``found``, a tensor for each member, over ranks in place: with one all-reduce for each mesh."""
    alike: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for member, values in zip(members, found, strict=True):
        if not member.summand.counts:  # another rank has the same elements, and adds its ``values``
            values.zero_()
        alike[member.summand.across, values.device, values.dtype].append(values)
    for ((mesh, groups), *_), parts in alike.items():
        total = torch.cat(parts)
        all_reduce_over(groups, total, dist.ReduceOp.SUM, mesh)
        for part, summed in zip(parts, total.split([len(part) for part in parts]), strict=True):
            part.copy_(summed)


def _numbers(values: Sequence[Tensor]) -> list[float]:
    """Return the number in each tensor, by one copy from the device."""
    return cast("list[float]", torch.cat(list(values)).tolist()) if values else []
