"""1-bit Adam as in the paper: every rank holds the whole model, its momentum and its residuals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from yafsdp_cc.compression.all_reduce import CompressedMean
from yafsdp_cc.compression.codec import BLOCK, codec_of
from yafsdp_cc.engine.checks import all_gather_objects, checksum
from yafsdp_cc.engine.layout import Layout
from yafsdp_cc.optim.one_bit import check_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from yafsdp_cc.engine.layout import Extent

_TRAINED = (torch.float32, torch.bfloat16, torch.float16)
_RESIDUAL = "unsaid"
"""The name of residuals in state dicts."""


class ReplicatedOneBitAdam(Optimizer):
    """1-bit Adam for a plain module that every rank of a group holds whole; no DDP around it.

    Tang et al., "1-bit Adam", 2021, algorithm 1: AdamW with exact means for ``warmup_steps``, and then

        m_w = β₁·m + (1 − β₁)·g_w            of every rank w, from the momentum m that all have
        m   = the mean of m_w, encoded by every rank and by the owner of each chunk, with both their errors added first
        x   = x − lr · m̂ / (√v̂ + ε)          with the second moment v of the end of the warm-up

    (``compression.all_reduce.CompressedMean``). ``OneBitAdam`` is what makes it fit a sharded model; this one is what
    that is held against, and for models that need no sharding. Other than in the paper, each block has a scale of its
    own, and both moments are corrected for their start at zero, as those of ``torch.optim.AdamW`` are, whose steps the
    warm-up makes. No element moves further in a step than exact Adam's can (Kingma & Ba, "Adam", 2015, section 2.1):
    after the warm-up rows of an embedding that were never seen have no second moment, and share blocks with others that
    were.

    Gradients stay those of the rank, and ``step`` is a collective: every rank calls it, with the weights of all alike.
    Where a parameter's ``.grad`` is None it counts as zeros. What is clipped is each rank's own gradient. Under a
    ``GradScaler`` all ranks skip a step where one of them has a gradient that is not finite, and nothing is lost.

    A state dict is that of ``torch.optim.AdamW``, with the residuals as ``"unsaid"`` of each parameter;
    call ``settle()`` on all ranks before ``state_dict()``. Any number of ranks can load it, AdamW too.

    Memory of each rank: m, v, its errors, the buffer of means, in fp32: 16 bytes for each element, and 4 for each of
    the chunk that it owns.

    Args:
        params: of a module, all that are trained, in the same order on all ranks; or groups of them. With names, such
            as ``module.named_parameters()``, errors have these.
        lr: the learning rate; the loop or a scheduler changes it in the groups.
        betas: decay of the moments, the same in all groups.
        eps: added to the root of the second moment.
        weight_decay: decoupled (Loshchilov & Hutter, 2019).
        warmup_steps: with exact means: 15 to 25 % of all in the paper, as nothing refreshes v later.
        codec: of messages.
        block: elements that share a scale.
        group: the ranks; None: all.

    Raises:
        ValueError: something of that does not fit, or ranks start with different weights.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: int,
        codec: str = "onebit",
        block: int = BLOCK,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_settings(lr, betas, eps, weight_decay)
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps={warmup_steps}: at least 1: the second moment is learned from exact means")
        self.warmup_steps = warmup_steps
        self.steps = 0
        """Steps that were made."""
        self._layout: Layout | None = None
        self._step_supports_amp_scaling = True
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        if (ranks := group if group is not None else dist.group.WORLD) is None:
            raise ValueError("ReplicatedOneBitAdam wants a process group: torch.distributed.init_process_group() first")
        self._group = ranks
        kind = codec_of(codec, block)
        self._check()
        shapes = [list(parameter.shape) for parameter in self._parameters]
        self._layout = layout = Layout.of(shapes, ranks.size(), block)
        device = self._parameters[0].device
        places = [(extent.offset, extent.end) for extent in layout.extents]
        self.mean = CompressedMean(ranks, device, kind, layout.numel, places)
        self._flats = {
            name: torch.zeros(layout.numel, dtype=torch.float32, device=device) for name in ("exp_avg", "exp_avg_sq")
        }
        self._whole = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self._is_settled = True
        self._begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made.

        Raises:
            RuntimeError: it is made.
        """
        if self._layout is not None:
            raise RuntimeError("ReplicatedOneBitAdam has laid its buffers out: make a new one for other parameters")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, a collective. ``closure`` as torch's optimizers have it.

        Raises:
            RuntimeError: a gradient is not finite, on this rank or another, and no ``GradScaler`` is there to know.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        whole = self._take_gradients()
        if not self._are_finite(whole):
            return loss
        self.steps += 1
        if self.steps <= self.warmup_steps:
            dist.all_reduce(whole, group=self._group)
            whole.div_(self.mean.world)
            self._update_exactly()
        else:
            self._is_settled = False
            beta1 = self.param_groups[0]["betas"][0]
            moment = self._flats["exp_avg"]
            self.mean.average(whole.mul_(1 - beta1).add_(moment, alpha=beta1))
            moment.copy_(whole)
            self._update()
        return loss

    def settle(self) -> None:
        """Even out the residuals: every rank has the mean of them afterwards. A collective."""
        unsent = self.mean.unsent()
        self.mean.carry_over(unsent)
        for parameter, extent in self._places():
            self.state[parameter][_RESIDUAL] = _part(unsent, extent).clone()
        self._is_settled = True

    def state_dict(self) -> dict[str, Any]:
        """As of ``torch.optim.AdamW``, the same on all ranks.

        Raises:
            RuntimeError: residuals have changed since the last ``settle``.
        """
        if not self._is_settled:
            raise RuntimeError(
                "residuals differ between ranks: call optimizer.settle() on all of them before optimizer.state_dict()"
            )
        state: dict[str, Any] = super().state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state of any number of ranks; the warm-up, too."""
        super().load_state_dict(state_dict)
        steps = [int(state["step"]) for state in self.state.values() if "step" in state]
        self.steps = max(steps, default=0)
        unsent = torch.zeros_like(self._whole)
        for parameter, extent in self._places():
            if _RESIDUAL in self.state[parameter]:
                _part(unsent, extent).copy_(self.state[parameter][_RESIDUAL])
        self.mean.carry_over(unsent)
        self._is_settled = True
        self._begin()

    @property
    def _parameters(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _places(self) -> Iterator[tuple[Tensor, Extent]]:
        assert self._layout is not None
        return zip(self._parameters, self._layout.extents, strict=True)

    def _begin(self) -> None:
        """Let the state of parameters be views of the flat buffers."""
        for parameter, extent in self._places():
            state = self.state[parameter]
            state.setdefault("step", torch.tensor(0.0))
            for name, flat in self._flats.items():
                part = _part(flat, extent)
                if name in state:
                    part.copy_(state[name])
                state[name] = part

    def _check(self) -> None:
        """Raise where the parameters are not what this can train, on all ranks where they differ."""
        names = _names_of(self.param_groups)
        if any(tuple(group["betas"]) != tuple(self.param_groups[0]["betas"]) for group in self.param_groups):
            raise ValueError("ReplicatedOneBitAdam takes the same betas in all groups: all ranks share one momentum")
        for name, parameter in zip(names, self._parameters, strict=True):
            if isinstance(parameter, DTensor):
                raise ValueError(f"{name} is sharded: take yafsdp_cc.optim.OneBitAdam for it")
            if parameter.dtype not in _TRAINED or parameter.device != self._parameters[0].device:
                raise ValueError(
                    f"{name} is {parameter.dtype} on {parameter.device}: all parameters have to be fp32, bf16 or fp16, "
                    f"on one device, such as {self._parameters[0].device}"
                )
        mine = [(tuple(each.shape), str(each.dtype), checksum(each.detach())) for each in self._parameters]
        everybody = all_gather_objects(mine, [self._group])
        for index, name in enumerate(names):
            if len({theirs[index] if index < len(theirs) else None for theirs in everybody}) > 1:
                raise ValueError(
                    f"{name} differs between ranks: build the module from the same seed on all of them, or broadcast "
                    "the weights of one"
                )
        if len({len(theirs) for theirs in everybody}) > 1:
            raise ValueError(f"ranks have given {sorted({len(theirs) for theirs in everybody})} parameters: all alike")

    def _take_gradients(self) -> Tensor:
        """This rank's gradients, unscaled, in one buffer, fp32."""
        scale = getattr(self, "grad_scale", None)
        for parameter, extent in self._places():
            part = _part(self._whole, extent)
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
        assert self._layout is not None
        for start, end in self._layout.gaps:
            self._whole[start:end].zero_()
        return self._whole if scale is None else self._whole.div_(scale)

    def _are_finite(self, whole: Tensor) -> bool:
        """Whether gradients are finite on all ranks."""
        bad = whole.isfinite().all().logical_not().to(torch.float32)
        here = bool(bad)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._group)
        if not bad:
            return True
        if getattr(self, "found_inf", None) is not None:
            return False
        where = "on another rank"
        if here:
            named = zip(_names_of(self.param_groups), self._places(), strict=True)
            where = next(name for name, (_, extent) in named if not _part(whole, extent).isfinite().all())
        raise RuntimeError(f"a gradient is not finite: {where}. No rank has made the step; drop the batch, or the run")

    def _update_exactly(self) -> None:
        """Make AdamW's step."""
        extents = dict(self._places())
        for group in self.param_groups:
            parameters = group["params"]
            wide = [each.to(torch.float32) for each in parameters]
            adamw(
                wide,
                [_part(self._whole, extents[each]) for each in parameters],
                [self.state[each]["exp_avg"] for each in parameters],
                [self.state[each]["exp_avg_sq"] for each in parameters],
                [],
                [self.state[each]["step"] for each in parameters],
                foreach=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for parameter, updated in zip(parameters, wide, strict=True):
                if updated.dtype != parameter.dtype:
                    parameter.copy_(updated)

    def _update(self) -> None:
        """Make the step along the momentum."""
        beta1, beta2 = self.param_groups[0]["betas"]
        furthest = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
        corrections = 1 - beta1**self.steps, 1 - beta2**self.warmup_steps
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] += 1
                root = (state["exp_avg_sq"] / corrections[1]).sqrt_().add_(group["eps"])
                update = (state["exp_avg"] / root.mul_(corrections[0])).clamp_(-furthest, furthest)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.mul_(group["lr"]))


def _part(flat: Tensor, extent: Extent) -> Tensor:
    return flat.narrow(0, extent.offset, extent.numel).view(extent.shape)


def _names_of(groups: list[dict[str, Any]]) -> list[str]:
    """Of parameters, as they were given, or by number and shape."""
    names = []
    for number, group in enumerate(groups):
        for index, parameter in enumerate(group["params"]):
            given = group.get("param_names")
            by_number = f"parameter {index} of group {number}, of shape {list(parameter.shape)},"
            names.append(by_number if given is None else f"'{given[index]}'")
    return names
