"""SGD with momentum for sharded models whose gradients are encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim.sgd import sgd

from yafsdp_cc.optim.one_bit import Form, OneBitOptimizer, grad_of, local_of, width_of
from yafsdp_cc.optim.update import Row, Rule, sgd_settings, update
from yafsdp_cc.tensor.dtensor import increment_version

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class OneBitSGD(OneBitOptimizer):
    """SGD with momentum whose gradients are encoded for the network, by ``Compression(gradients=...)``.

    The update of SGD is linear in the gradients, which avoids the difficulties of 1-bit Adam: error feedback alone
    keeps SGD's rate (Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, theorem II), and there is no second
    moment that needs exact sums. The warm-up is for models whose first steps are large. The forms are those of
    ``OneBitAdam``; with ``form="momentum"`` ``.grad`` is the momentum Σ βᵏ g, in the units of torch's buffer.

    Exact sums, of the warm-up and of parameters that are never encoded, give the steps of ``torch.optim.SGD``. There is
    no ``nesterov``: Nesterov momentum adds a gradient that no rank has where momentum is encoded. Without a momentum
    the gradient form would be ``torch.optim.SGD`` itself.

    A state dict is that of ``torch.optim.SGD`` with the number of steps: either optimizer can load the other's, at any
    number of ranks. Residuals are saved beside the state dict by ``yafsdp_cc.save``.

    Arguments that are not listed are those of ``OneBitAdam``.

    Args:
        momentum: decay of the momentum in a step, the same in all groups.
        weight_decay: added to the gradient, times the parameter (not decoupled), as ``torch.optim.SGD`` has it.
    """

    moments = ("momentum_buffer",)
    shortest_warmup: ClassVar[int] = 0
    takes_limit: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int = 0,
        form: Form = "momentum",
    ) -> None:
        if not 0 < momentum < 1:
            raise ValueError(
                f"momentum={momentum} must be more than 0 and less than 1; without momentum OneBitSGD "
                "would do what torch.optim.SGD does: take that, and the model's compression remains"
            )
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            warmup_steps=warmup_steps,
            form=form,
            refreshes=0,
            max_grad_norm=None,
        )

    def _update_exactly(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            self.state[parameter]["step"] += 1
        wide = [local_of(each).to(width_of(each)) for each in parameters]
        sgd(
            wide,
            [grad_of(each) for each in parameters],
            [self._local(each, "momentum_buffer") for each in parameters],
            foreach=True,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        # not every foreach kernel raises the versions of tensors
        increment_version([local_of(parameter) for parameter in parameters])
        for parameter, updated in zip(parameters, wide, strict=True):
            if updated.dtype != parameter.dtype:
                local_of(parameter).copy_(updated)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        settings, rows = sgd_settings(group), []
        for parameter in parameters:
            self.state[parameter]["step"] += 1
            moment = self._local(parameter, "momentum_buffer")
            rows.append(Row(local_of(parameter), local_of(parameter.grad), moment, None, settings))
        update(Rule.SGD_GRADIENT if self.form == "gradient" else Rule.SGD_MOMENTUM, rows)
