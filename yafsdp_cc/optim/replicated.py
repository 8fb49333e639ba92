"""1-bit Adam as in the paper: every rank holds the whole model, its momentum and its residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from yafsdp_cc.compression.all_reduce import CompressedMean
from yafsdp_cc.compression.codec import BLOCK, codec_of
from yafsdp_cc.engine.layout import Layout
from yafsdp_cc.optim.adam import adamw_step
from yafsdp_cc.optim.one_bit import check_alike, check_loaded, check_settings, keep_dtypes, loss_of
from yafsdp_cc.optim.update import Row, Rule, adam_settings, update
from yafsdp_cc.ranks.checks import all_gather_objects, checksum

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

_TRAINED = (torch.float32, torch.bfloat16, torch.float16)
_RESIDUAL = "unsaid"
"""Key of residuals in state dicts."""


class ReplicatedOneBitAdam(Optimizer):
    """1-bit Adam for a plain module that every rank of a group holds whole; no DDP around it.

    Tang et al., "1-bit Adam", 2021, algorithm 1: AdamW with exact means for ``warmup_steps``, and then

        m_w = β₁·m + (1 − β₁)·g_w            of every rank w, from the common momentum m
        m   = the mean of m_w, encoded by every rank and by the owner of each chunk, with both their errors added first
        x   = x − lr · m̂ / (√v̂ + ε)          with the second moment v of the end of the warm-up

    (``compression.all_reduce.CompressedMean``). ``OneBitAdam`` adapts the algorithm to sharded models and is tested
    against this optimizer, which also serves models that need no sharding. Other than in the paper, each block has a
    scale of its own, and both moments are corrected for their start at zero, as in ``torch.optim.AdamW``, whose steps
    the warm-up makes. No element moves further in a step than exact Adam's can (Kingma & Ba, "Adam", 2015, section
    2.1): after the warm-up, rows of an embedding that were never used have no second moment, and share blocks with used
    rows.

    ``.grad`` is the rank's own gradient, and ``step`` is a collective that every rank calls with equal weights. A
    ``.grad`` of None counts as zeros. Clipping applies to each rank's own gradient. Under a ``GradScaler`` all ranks
    skip a step if one of them has a non-finite gradient; residuals and moments are unchanged.

    A state dict is that of ``torch.optim.AdamW``, with the residuals as ``"unsaid"`` of each parameter;
    call ``settle()`` on all ranks before ``state_dict()``. Any number of ranks can load it, AdamW too.

    Memory of each rank: m, v, its errors, the buffer of means, in fp32: 16 bytes for each element, and 4 for each of
    the chunk that it owns.

    Arguments that are not listed are those of ``OneBitAdam``.

    Args:
        params: all trained parameters of a module, in the same order on all ranks; or groups of them. With names, as
            from ``module.named_parameters()``, errors name them.
        warmup_steps: number of steps with exact means: 15 to 25 % of all in the paper, as nothing refreshes v later.
        codec: name of the messages' codec.
        block: elements that share a scale.
        group: the ranks; None: all.

    Raises:
        ValueError: an argument does not fit, or ranks start with different weights.
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
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        check_settings(defaults)
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps={warmup_steps}: at least 1: the second moment is learned from exact means")
        self.warmup_steps = warmup_steps
        self.steps = 0
        self._step_supports_amp_scaling = True
        super().__init__(params, defaults)
        if (ranks := group if group is not None else dist.group.WORLD) is None:
            raise ValueError("ReplicatedOneBitAdam wants a process group: torch.distributed.init_process_group() first")
        self._group = ranks
        kind = codec_of(codec, block)
        self._check_parameters()
        shapes = [list(parameter.shape) for parameter in self._parameters]
        self._layout = layout = Layout.of(shapes, ranks.size(), block)
        device = self._parameters[0].device
        self.mean = CompressedMean(ranks, device, kind, layout)
        self._whole, self._moment, self._square = (
            torch.zeros(layout.numel, dtype=torch.float32, device=device) for _ in range(3)
        )
        """Flat buffers of all parameters: gradients, overwritten by their mean, and both moments."""
        self._is_settled = True
        self._share_moments()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups after the constructor, which lays out the buffers."""
        if hasattr(self, "_layout"):
            raise RuntimeError("ReplicatedOneBitAdam has laid its buffers out: make a new one for other parameters")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, a collective. ``closure`` is called as by torch's optimizers.

        Raises:
            RuntimeError: a gradient is not finite, on this rank or another, and no ``GradScaler`` is in use.
        """
        loss = loss_of(closure)
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
            self.mean.average(whole.mul_(1 - beta1).add_(self._moment, alpha=beta1))
            self._moment.copy_(whole)
            self._update()
        return loss

    def settle(self) -> None:
        """Replace every rank's residuals by their mean over ranks. A collective."""
        unsent = self.mean.unsent()
        self.mean.carry_over(unsent)
        for parameter, part in self._parts(unsent).items():
            self.state[parameter][_RESIDUAL] = part.clone()
        self._is_settled = True

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict as ``torch.optim.AdamW`` does, the same on all ranks.

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
        """Load the state of any number of ranks, the position in the warm-up included."""
        check_loaded(self, state_dict)
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)
        steps = [int(state["step"]) for state in self.state.values() if "step" in state]
        self.steps = max(steps, default=0)
        unsent = torch.zeros_like(self._whole)
        for parameter, part in self._parts(unsent).items():
            if _RESIDUAL in self.state[parameter]:
                part.copy_(self.state[parameter][_RESIDUAL])
        self.mean.carry_over(unsent)
        self._is_settled = True
        self._share_moments()

    @property
    def _parameters(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _parts(self, whole: Tensor) -> dict[Tensor, Tensor]:
        """Return each parameter's part of a flat buffer of all parameters."""
        extents = zip(self._parameters, self._layout.extents, strict=True)
        return {each: whole[extent.offset : extent.end].view(extent.shape) for each, extent in extents}

    def _share_moments(self) -> None:
        """Make the moments in the parameters' states views of the flat buffers."""
        for name, moments in (("exp_avg", self._moment), ("exp_avg_sq", self._square)):
            for parameter, part in self._parts(moments).items():
                state = self.state[parameter]
                state.setdefault("step", torch.tensor(0.0, device="cpu"))
                if name in state:
                    part.copy_(state[name])
                state[name] = part

    def _names(self) -> list[str]:
        """Return names of the parameters for errors: as given, or by number and shape."""
        return [
            f"'{group['param_names'][index]}'"
            if "param_names" in group
            else f"parameter {index} of group {number}, of shape {list(parameter.shape)},"
            for number, group in enumerate(self.param_groups)
            for index, parameter in enumerate(group["params"])
        ]

    def _check_parameters(self) -> None:
        """Raise if a parameter cannot be trained here; if parameters differ between ranks, on all ranks."""
        check_alike(self, "betas")
        names, parameters = self._names(), self._parameters
        for name, parameter in zip(names, parameters, strict=True):
            if isinstance(parameter, DTensor):
                raise ValueError(f"{name} is sharded: take yafsdp_cc.optim.OneBitAdam for it")
            if parameter.dtype not in _TRAINED or parameter.device != parameters[0].device:
                raise ValueError(
                    f"{name} is {parameter.dtype} on {parameter.device}: all parameters have to be fp32, bf16 or fp16, "
                    f"on one device, such as {parameters[0].device}"
                )
        mine = [(tuple(each.shape), str(each.dtype), checksum(each.detach())) for each in parameters]
        everybody = all_gather_objects(mine, [self._group])
        if len(counts := {len(theirs) for theirs in everybody}) > 1:
            raise ValueError(f"ranks have given {sorted(counts)} parameters: all alike")
        for name, *found in zip(names, *everybody, strict=True):
            if len(set(found)) > 1:
                raise ValueError(
                    f"{name} differs between ranks: build the module from the same seed on all of them, or broadcast "
                    "the weights of one"
                )

    def _take_gradients(self) -> Tensor:
        """Return this rank's gradients, unscaled, in one buffer, fp32."""
        for parameter, part in self._parts(self._whole).items():
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.to_dense())
        if (scale := getattr(self, "grad_scale", None)) is not None:
            self._whole.div_(scale)
        return self._whole

    def _are_finite(self, whole: Tensor) -> bool:
        """Return whether gradients are finite on all ranks; if not, raise unless a ``GradScaler`` is in use."""
        bad = whole.isfinite().all().logical_not().to(torch.float32)
        here = bool(bad)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._group)
        if not bad:
            return True
        if getattr(self, "found_inf", None) is not None:
            return False
        where = "on another rank"
        if here:
            named = zip(self._names(), self._parts(whole).values(), strict=True)
            where = next(name for name, part in named if not part.isfinite().all())
        raise RuntimeError(f"a gradient is not finite: {where}. No rank has made the step; drop the batch, or the run")

    def _update_exactly(self) -> None:
        grads = self._parts(self._whole)
        for group in self.param_groups:
            rows = [
                (each, grads[each], *(self.state[each][name] for name in ("exp_avg", "exp_avg_sq", "step")))
                for each in group["params"]
            ]
            adamw_step(group, rows, fused=False)

    def _update(self) -> None:
        """Make Adam's step along the averaged momentum, with the second moment of the warm-up."""
        for group in self.param_groups:
            settings, rows = adam_settings(group, self.steps, self.warmup_steps), []
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] += 1
                rows.append(Row(parameter, state["exp_avg"], None, state["exp_avg_sq"], settings))
            update(Rule.ADAM_MOMENTUM, rows)
