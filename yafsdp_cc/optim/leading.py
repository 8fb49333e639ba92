"""What the optimizers of the 1-bit family share: a warm-up with exact sums, and then a wire that they lead.

    steps 1 … warmup_steps     exact sums, the exact optimizer
    after those                encoded sums; now and then exact ones besides, further and further apart

Exact sums after the warm-up are for the second moment: its preconditioner may change as long as its changes add up to
something finite (Lu et al., "0/1 Adam", 2022, section 4.1).
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, TypeAlias

import torch
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from yafsdp_cc.engine.compressed import Phase
from yafsdp_cc.engine.lead import Lead
from yafsdp_cc.engine.tensor import FlatDTensor, flat_dtensor
from yafsdp_cc.optim.local import local_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.optim.optimizer import ParamsT

Form: TypeAlias = Literal["momentum", "gradient"]

STEPS = "steps"
"""Of a parameter group, beside its settings: steps that the optimizer has made."""
_CLIPPED = 0.99
"""Of its norm: a gradient of which less is left was not just rounded."""


class Share(NamedTuple):
    """A parameter group's part of a step."""

    group: dict[str, Any]
    exact: list[Tensor]
    """Parameters whose ``.grad`` is the mean gradient."""
    encoded: list[Tensor]
    """Those whose ``.grad`` is what was decoded."""


class Leading(Optimizer):
    """An optimizer that says how gradients cross the network.

    Args:
        params: of a model that was sharded with a compression, all that are trained.
        defaults: of parameter groups.
        beta: the decay of the first moment.
        share: how much of a gradient that takes in: 1 − beta where it is an average, 1 where it is a sum.
        warmup_steps: with exact sums.
        form: what is encoded: the momentum of each rank, which is its residual at the same time, or its gradient.
        refreshes: exact sums for the second moment before the distance between them doubles; 0 for none.
        max_grad_norm: what the loop clips gradients to; those that it does not see are clipped alike, the exact ones
            and, where the momentum is sent, those that it is of.
    """

    shortest_warmup: ClassVar[int] = 1
    """Steps with exact sums that there have to be."""
    takes_limit: ClassVar[bool] = True
    """Whether it can be told what the loop clips gradients to."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        beta: float,
        share: float,
        warmup_steps: int,
        form: Form,
        refreshes: int,
        max_grad_norm: float | None,
    ) -> None:
        if form not in ("momentum", "gradient"):
            raise ValueError(f"form={form!r}: 'momentum' or 'gradient'")
        if warmup_steps < self.shortest_warmup:
            raise ValueError(
                f"warmup_steps={warmup_steps}: at least 1, and about a twentieth of all steps: the second moment is "
                "learned from exact sums"
                if self.shortest_warmup
                else f"warmup_steps={warmup_steps}: a number of steps, 0 or more"
            )
        if refreshes < 0:
            raise ValueError(f"refreshes={refreshes}: a number of exact sums, 0 or more")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={max_grad_norm}: the limit of clip_grad_norm_, more than 0; None for none")
        self.warmup_steps = warmup_steps
        self.form = form
        self.refreshes = refreshes
        self.max_grad_norm = max_grad_norm
        self.steps: int
        """Steps that were made."""
        self._step_supports_amp_scaling = True  # so that a GradScaler makes itself known
        super().__init__(params, defaults)
        self._made(0)
        parameters = [each for group in self.param_groups for each in group["params"]]
        sent = beta if form == "momentum" else 0.0
        self.lead = Lead(parameters, sent, share, max_grad_norm, type(self).__name__)
        for parameter in parameters:
            self._begin(parameter)
        self._announce()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, and say how the next gradients are summed. ``closure`` as torch's optimizers have it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.lead.check()
        if not self._unscale():
            self.lead.drop_exact()  # the next backward may not come to all of them
            return loss
        phase = self.lead.phase
        if phase is Phase.KEPT or phase is Phase.BOTH:
            gradients = self._exact_gradients()
            if phase is Phase.BOTH:
                self._refresh(gradients)
            elif self.takes_limit and self.max_grad_norm is None and self.form == "momentum":
                self._warn_of_clipping(gradients)
            self.lead.drop_exact()
        self._made(self.steps + 1)
        self._announce()  # gathers begin below, exact or of changes as in the next step
        self._advance(phase)
        return loss

    def _made(self, steps: int) -> None:
        """So many steps have been made, and a state dict says so: no parameter need have been in all of them."""
        self.steps = steps
        for group in self.param_groups:
            group[STEPS] = steps

    @property
    def _parameters(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _advance(self, phase: Phase) -> None:
        """Update the parameters, whose gradients were summed as in ``phase``, unit by unit."""
        for members in self.lead.by_unit():
            for share in self._shares(members, phase):
                self._update_share(share)

    def _update_share(self, share: Share) -> None:
        self._update_exactly(share.group, share.exact)
        self._update(share.group, share.encoded)

    def _shares(self, members: Sequence[Tensor], phase: Phase) -> Iterator[Share]:
        """Of each group, what it has of ``members`` with a gradient."""
        wanted = {id(each) for each in members if each.grad is not None}
        for group in self.param_groups:
            used = [each for each in group["params"] if id(each) in wanted]
            encoded = [each for each in used if phase.encodes and self._is_encoded(each)]
            exact = [each for each in used if not (phase.encodes and self._is_encoded(each))]
            yield Share(group, exact, encoded)

    @abstractmethod
    def _begin(self, parameter: Tensor) -> None:
        """Make the state of a parameter."""

    def _share_moment(self, parameter: Tensor, name: str) -> None:
        """Let the wire use the first moment of a parameter, which the state has under this name."""
        if self._is_encoded(parameter) and self.form == "momentum":
            state, shared = self.state[parameter], self.lead.first_moment(parameter)
            if state[name].to_local().data_ptr() != shared.to_local().data_ptr():
                state[name] = shared.copy_(state[name])

    def _local(self, parameter: Tensor, name: str) -> Tensor:
        return local_of(self.state[parameter][name])

    def _refresh(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """Take in exact gradients, pairs of a parameter and this rank's range of its gradient."""

    @abstractmethod
    def _update_exactly(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters whose ``.grad`` is the mean gradient."""

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters whose ``.grad`` is what was decoded: a mean gradient or the momentum, by ``form``."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: its wire has begun with the parameters that it was given."""
        if hasattr(self, "lead"):
            raise ValueError(f"give {type(self).__name__} all parameter groups when it is made, frozen ones too")
        super().add_param_group(param_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        name = type(self).__name__
        raise RuntimeError(f"a copy of {name} would have no wire to lead: make another one, and load its state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state of any number of ranks; the warm-up, too."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(saved, self._parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if torch.is_tensor(value) and value.dtype != self.state[parameter][name].dtype:
                    self.state[parameter][name] = value.detach().clone()  # torch has cast it to the parameter's
        said = [int(group.get(STEPS, 0)) for group in self.param_groups]
        seen = [int(state["step"]) for state in self.state.values() if "step" in state]  # AdamW makes these alone grow
        self._made(max(*said, *seen, 0))
        for parameter in self._parameters:
            self._begin(parameter)
        self._announce()

    def _is_encoded(self, parameter: Tensor) -> bool:
        return id(parameter) in self.lead.encoded

    def _refresh_steps(self, until: int) -> Iterator[int]:
        """Steps after the warm-up, from 1 on, with exact sums besides: 1, 2, 3, 4, 6, 8, 10, 12, 16, ... by fours."""
        step, distance = 1, 1
        while self.refreshes and step <= until:
            for _ in range(self.refreshes):
                yield step
                step += distance
            step += distance
            distance *= 2

    def _phase_of(self, step: int) -> Phase:
        """How gradients of a step, from 1 on, are summed."""
        after = step - self.warmup_steps
        if after <= 0:
            return Phase.EXACT if after else Phase.KEPT
        return Phase.BOTH if after in self._refresh_steps(after) else Phase.ENCODED

    @property
    def phase(self) -> Phase:
        """How the gradients of the next step are summed."""
        return self._phase_of(self.steps + 1)

    def _announce(self) -> None:
        self.lead.say(self.phase)

    def _exact_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Of the backward before, unscaled and clipped."""
        found: list[tuple[Any, Tensor]] = []
        scale = self.lead.loss_scale
        for parameter in self._parameters:
            if self._is_encoded(parameter) and (exact := self.lead.exact(parameter)) is not None:
                found.append((parameter, exact if scale == 1 else exact.div_(scale)))
        if self.max_grad_norm is not None and found:
            norm = get_total_norm([flat_dtensor(exact, parameter._cut) for parameter, exact in found])
            total = float(norm.full_tensor() if isinstance(norm, FlatDTensor) else norm)
            self.lead.learn_norm(total)
            share = min(1.0, self.max_grad_norm / (total + 1e-6))
            for _, exact in found:
                exact.mul_(share)
        return found

    def _warn_of_clipping(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """Say so where the loop has clipped ``gradients``, which were kept as they came, and there is no limit."""
        pairs = [(local_of(parameter.grad), exact) for parameter, exact in gradients if parameter.grad is not None]
        after, before = (float(get_total_norm(each)) for each in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        if after < _CLIPPED * before:
            name = type(self).__name__
            warnings.warn(
                f"the loop clips gradients (by now to {after / before:.2g} of their norm), and {name} was not told how "
                "far: after the warm-up they are sent as they are, and those of many times the limit do lasting harm. "
                f"Pass max_grad_norm=..., as clip_grad_norm_ has it, to {name} too",
                stacklevel=3,
            )

    def _unscale(self) -> bool:
        """Divide gradients by a ``GradScaler``'s scale, if one has called; whether there is to be a step."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return True
        self.lead.check_scaler()
        scale = getattr(self, "grad_scale", None)  # None where gradients are unscaled already
        if scale is not None:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
        return not float(found_inf)
