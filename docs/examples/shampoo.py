"""A matrix optimizer of your own: Shampoo, on the ranks that own the matrices.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/shampoo.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import yafsdp_cc
from yafsdp_cc.optim import MatrixOptimizer


class Shampoo(MatrixOptimizer):
    """Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization", 2018, algorithm 1.

        L ← L + G·Gᵀ;   R ← R + Gᵀ·G;   update = L^(−1/4) · G · R^(−1/4)

    Args:
        params: of a model that was sharded with ``ownership="matrix"``.
        lr: the learning rate of matrices.
        weight_decay: of matrices, decoupled.
        eps: added to the eigenvalues of L and R.
        adamw: settings of all other parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        weight_decay: float = 0.0,
        eps: float = 1e-4,
        *,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": eps}, adamw)

    def state_shapes(self, rows: int, columns: int) -> Mapping[str, Sequence[int]]:
        return {"left": (rows, rows), "right": (columns, columns)}

    def updates(
        self, gradients: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any]
    ) -> Sequence[Tensor]:
        found = []
        for gradient, state in zip(gradients, states, strict=True):
            left = state["left"].addmm_(gradient, gradient.T)
            right = state["right"].addmm_(gradient.T, gradient)
            found.append(inverse_root(left, group["eps"]) @ gradient @ inverse_root(right, group["eps"]))
        return found


def inverse_root(matrix: Tensor, eps: float) -> Tensor:
    """Return the inverse fourth root of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * (values.clamp(min=0) + eps) ** -0.25) @ vectors.T


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)])
    yafsdp_cc.shard(model, ownership="matrix")
    optimizer = Shampoo(model.parameters())
    x = torch.randn(32, 64).to(next(model.parameters()).device)
    for step in range(20):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
