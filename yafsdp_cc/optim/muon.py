"""Muon for sharded models."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from yafsdp_cc.optim.matrix import MatrixOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_BATCH = 1 << 26
"""Elements of matrices that one batch of iterations works on, at most: 128 MiB in bf16, with four such tensors at a
time."""


class Muon(MatrixOptimizer):
    """Muon on the matrices that ranks own whole, AdamW on all other parameters.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. The momentum of each matrix is
    orthogonalised by Newton-Schulz iterations, once, by the rank that owns the matrix, in batches with others of its
    shape there:

        M ← μ·M + (1 − μ)·G
        O = NewtonSchulz(M), or with Nesterov momentum of (1 − μ)·G + μ·M
        W ← (1 − lr·weight_decay)·W − lr·adjustment·O

    Gradients reach the owners of matrices by the usual reduce-scatter, and updated weights reach the other ranks by the
    usual all-gather: a step sends as many bytes as with AdamW, encoded where the model has a ``Compression``.

    Steps are those of ``torch.optim.Muon``, bit for bit if gradients are equal and iterations in bf16. State dicts use
    the names of ``torch.optim.Muon`` (``momentum_buffer``), and of ``torch.optim.AdamW`` for other parameters.

    Args:
        params: all trained parameters of a model that was sharded with ``yafsdp_cc.shard(model, ownership="matrix")``
            or patterns, or groups of them (``MatrixOptimizer``).
        lr: the learning rate of matrices.
        weight_decay: weight decay of matrices, decoupled.
        momentum: μ, 0 to 1.
        nesterov: whether to orthogonalise the momentum of the next step, as far as the present gradient tells it.
        ns_coefficients: a, b and c of the iteration X ← a·X + (b·X·Xᵀ + c·(X·Xᵀ)²)·X.
        eps: the least norm that a momentum is divided by before the iteration.
        ns_steps: number of iterations, fewer than 100.
        adjust_lr_fn: factor on the learning rate: "original", or None: √max(1, m/n) of a matrix [m, n];
            "match_rms_adamw": 0.2·√max(m, n), with which learning rate and weight decay may be AdamW's (Liu et al.,
            "Muon is Scalable for LLM Training", 2025, equation 4).
        adamw: settings of all other parameters (``MatrixOptimizer``).
        splits: number, or rows, of the matrices that a parameter stacks one below the other and that are orthogonalised
            separately, by ``*`` patterns of parameter names. ``{"*.qkv.weight": 3}`` for fused queries, keys and
            values.
        ns_dtype: dtype of the iteration. None: bf16 as in ``torch.optim.Muon``, but fp32 on processors without bf16
            instructions, where fp32 takes a quarter of the time.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        splits: Mapping[str, int | Sequence[int]] | None = None,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: from 0 to 1, less than 1")
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients={ns_coefficients}: three numbers")
        if not 0 <= ns_steps < 100:
            raise ValueError(f"ns_steps={ns_steps}: from 0 to 99")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}: 'original' or 'match_rms_adamw'")
        if ns_dtype not in (None, *_DTYPES):
            raise ValueError(f"ns_dtype={ns_dtype}: one of {', '.join(map(str, _DTYPES))}, or None")
        self.ns_dtype = ns_dtype
        self._splits = {} if splits is None else dict(splits)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults, adamw)
        specs = [parameter.shard_spec for group in self.param_groups for parameter in group["params"]]
        for pattern in self._splits:
            if not any(spec.owners and fnmatchcase(spec.name, pattern) for spec in specs):
                raise ValueError(f"splits names {pattern!r}, which fits no matrix of this optimizer")
        for spec in specs:
            if spec.owners:
                self._parts_of(spec)

    def parts(self, name: str, rows: int) -> Sequence[int]:
        """Return the number of rows of each matrix that ``splits`` divides the parameter ``name`` into."""
        found = next((parts for pattern, parts in self._splits.items() if fnmatchcase(name, pattern)), 1)
        return found if isinstance(found, Sequence) else (rows // max(found, 1),) * found

    def state_shapes(self, rows: int, columns: int) -> Mapping[str, Sequence[int]]:
        """Return the shape of the momentum."""
        return {"momentum_buffer": (rows, columns)}

    def update_dtype(self, device: torch.device) -> torch.dtype | None:
        """Return the dtype of the iteration if it is the same on all ranks, else None."""
        return self.ns_dtype if self.ns_dtype is not None or device.type == "cpu" else torch.bfloat16

    def learning_rate(self, group: Mapping[str, Any], rows: int, columns: int) -> float:
        """Return the learning rate of a matrix [rows, columns], adjusted to its shape."""
        if group["adjust_lr_fn"] == "match_rms_adamw":
            return float(group["lr"] * 0.2 * math.sqrt(max(rows, columns)))
        return float(group["lr"] * math.sqrt(max(1, rows / columns)))

    def updates(
        self, gradients: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any]
    ) -> Sequence[Tensor]:
        """Return the orthogonalised momentum of each matrix; arguments as of ``MatrixOptimizer``."""
        momentum, grads = group["momentum"], list(gradients)
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        ahead = list(torch._foreach_lerp(grads, buffers, momentum)) if group["nesterov"] else buffers
        dtype = self.ns_dtype or (torch.float32 if _lacks_bf16(ahead[0].device) else torch.bfloat16)
        count = max(_BATCH // ahead[0].numel(), 1)
        found: list[Tensor] = []
        for start in range(0, len(ahead), count):
            batch = torch.stack([each.to(dtype) for each in ahead[start : start + count]])
            found += newton_schulz(batch, group["ns_coefficients"], group["ns_steps"], group["eps"])
        return found


@cache
def _lacks_bf16(device: torch.device) -> bool:
    """Return whether the device is an x86-64 processor without bf16 instructions, which multiplies bf16 slowly."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    has = torch.cpu.get_capabilities()
    return not (has.get("avx512_bf16") or has.get("amx_bf16") or has.get("avx_ne_convert"))


def newton_schulz(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the matrices with their singular values brought near 1, in their own dtype.

    The operations are those of ``torch.optim.Muon``, in the same order (Jordan et al., 2024).

    Args:
        matrices: [k, m, n], overwritten.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    # one norm per matrix: a batched norm may round to another bf16 number than torch.optim.Muon's
    norms = torch.stack([each.norm() for each in x])
    x.div_(norms.clamp(min=eps).view(-1, 1, 1))
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
