"""The base of the 1-bit family: a warm-up with exact sums, and then encoded ones that the optimizer schedules.

    steps 1 ... warmup_steps    exact sums, the exact optimizer
    after those                 encoded sums; now and then exact ones besides, further and further apart

Exact sums after the warm-up are for the second moment: its preconditioner may change as long as its changes add up to
something finite (Lu et al., "0/1 Adam", 2022, section 4.1).
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from yafsdp_cc.compression.config import AUTO
from yafsdp_cc.compression.delta import DeltaAllGather
from yafsdp_cc.compression.schedule import Phase, schedule_of
from yafsdp_cc.compression.state import compressed_sum_of
from yafsdp_cc.engine.dtensor import FlatDTensor, flat_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from yafsdp_cc.compression.compressed_sum import CompressedSum
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.state import FSDPState

Form: TypeAlias = Literal["momentum", "gradient"]

STEPS = "steps"
"""Of a parameter group, beside its settings: steps that the optimizer has made."""
_CLIPPED = 0.99
"""A gradient with less than this share of its norm was clipped, and not just rounded."""


def local_of(tensor: Any) -> Tensor:
    """Return this rank's elements, the very tensor that holds them."""
    local: Tensor = tensor.to_local()
    return local


def width_of(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's state and update: fp32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)


def check_settings(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise a ``ValueError`` where one of Adam's settings is out of range."""
    if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
        raise ValueError(f"betas={betas}: two numbers from 0 to 1, less than 1")
    if min(lr, eps, weight_decay) < 0:
        raise ValueError(f"lr={lr}, eps={eps}, weight_decay={weight_decay}: 0 or more")


# Between an optimizer and the compression of its models ------------------------------------------------------------


class OptimizerPhases:
    """Sets the phases of the schedules of an optimizer's parameters, and hands it what exact sums have kept.

    Args:
        parameters: the optimizer's, of one sharded model or several.
        beta: decay of its first moment in the momentum form; 0 in the gradient form.
        share: of a gradient that the moment takes in: 1 - beta where it is an average, 1 where it is a sum.
        max_grad_norm: limit that gradients are clipped to before they are encoded in the momentum form.
        optimizer: its name, for errors.

    Raises:
        ValueError: a parameter is not sharded with a compression, the compression does not fit, or one of the
            parameters whose gradients are encoded is not among them.
    """

    def __init__(
        self, parameters: Sequence[Tensor], beta: float, share: float, max_grad_norm: float | None, optimizer: str
    ) -> None:
        self._optimizer = optimizer
        self._beta = beta
        self._planned = Phase.EXACT
        self._parameters = list(parameters)
        self.encoded: dict[int, CompressedSum] = {}
        """By id, the parameters whose gradients are encoded after the warm-up, and what sums them."""
        states: dict[CompressionSchedule, FSDPState] = {}
        for parameter in parameters:
            param = _fsdp_param(parameter)
            if param is not None and param.state is None:
                raise ValueError(
                    f"{optimizer} was given '{param.spec.name}' of a model that fully_shard has sharded and that has "
                    "not run yet: run a forward first, or take yafsdp_cc.shard(model, compression=...)"
                )
            schedule = None if param is None or param.state is None else schedule_of(param.state)
            if param is None or schedule is None:
                raise ValueError(
                    f"{optimizer} takes parameters of a model that is sharded with a compression, and one of shape "
                    f"{list(parameter.shape)} is not: yafsdp_cc.shard(model, compression="
                    'yafsdp_cc.Compression(gradients="onebit", residual="int8")) first'
                )
            states[schedule] = param.state
            if param.flat is not None and (compressed := compressed_sum_of(param.flat)) is not None:
                self.encoded[id(parameter)] = compressed
        known = set(map(id, parameters))
        for schedule, state in states.items():
            self._check(schedule, state, known)
        for schedule, state in states.items():
            schedule.set_controller(self, beta, share, max_grad_norm)
            state.outdated = True
        for compressed in self._sums:  # nothing of an optimizer that was made before
            compressed.momentum = compressed.exact_mean = None
            if compressed.residual is not None:
                compressed.residual.clear()
        self._schedules = tuple(states)

    def _check(self, schedule: CompressionSchedule, state: FSDPState, known: set[int]) -> None:
        config, name = schedule.config, self._optimizer
        if AUTO in config.named:
            raise ValueError(
                f"{name} sets when sums are encoded, and with compression='auto' the speed of the network does: name a "
                "codec, as in compression='onebit', or take torch.optim.AdamW"
            )
        if config.warmup_steps:
            raise ValueError(
                f"{name} has a warm-up of its own, and Compression(warmup_steps={config.warmup_steps}) another: leave "
                "the latter out"
            )
        if self._beta and not config.feedback:
            raise ValueError(f"{name} keeps its momentum in residuals: Compression(feedback=False) has none")
        if self._beta and config.carry != 1:
            raise ValueError(f"{name} carries all of its momentum: leave carry={config.carry} out of the Compression")
        if self._beta and state.info.replicate_group is not None and not schedule.over_replicas:
            raise ValueError(
                f"{name}: with scope='shard' on a mesh (replicate, shard), every replica would have a momentum of its "
                "own: leave the scope out, or take form='gradient'"
            )
        for flat in state.flats:
            for param in flat.params if compressed_sum_of(flat) is not None else ():
                if param.parameter.requires_grad and id(param.parameter) not in known:
                    raise ValueError(
                        f"{name} was not given '{param.spec.name}', whose gradient is sent together with those that it "
                        'was given: give it all parameters, or leave this one exact (overrides={"'
                        f'{param.spec.name}": "fp32"}})'
                    )

    @property
    def _sums(self) -> Sequence[CompressedSum]:
        return list(dict.fromkeys(self.encoded.values()))

    def set_phase(self, phase: Phase) -> None:
        """Set how gradients are summed from the next backward on, once what is sent can be clipped."""
        self.check()
        self._planned = phase
        self.update_phase()

    def update_phase(self) -> None:
        """Set it again, as what clips gradients has changed."""
        for schedule in self._schedules:
            schedule.phase = self.phase

    @property
    def phase(self) -> Phase:
        """How gradients are summed now: exactly where they would have to be clipped, and no limit is known yet."""
        return Phase.KEPT if self.is_blind and self._planned.encodes else self._planned

    def check(self) -> None:
        """Raise a ``RuntimeError`` where another optimizer was made for one of the models."""
        if any(each.controller is None or each.controller() is not self for each in self._schedules):
            raise RuntimeError(
                f"this {self._optimizer} no longer sets when sums are encoded: another optimizer was made for the same "
                "model since"
            )

    def by_group(self) -> Iterator[list[Tensor]]:
        """Yield all parameters, those of one group after the other as a forward uses them.

        As soon as those of a group are updated, when the next ones are asked for, its weights are all-gathered wherever
        their buffer is no earlier group's: the next forward finds them on their way.
        """
        params = [_fsdp_param(parameter) for parameter in self._parameters]
        states = dict.fromkeys(param.state for param in params if param is not None)
        groups = {param: group for state in states for group in state.groups for param in group.params}
        members: dict[ParamGroup | None, list[Tensor]] = {}
        for parameter, param in zip(self._parameters, params, strict=True):
            members.setdefault(None if param is None else groups.get(param), []).append(parameter)
        taken: set[int] = set()
        for state in states:
            # A forward enters the root's own group first, which is the last in module order.
            for group in sorted(state.groups, key=lambda group: group is not state.root_group):
                before = group.versions()
                yield members.pop(group, [])
                for flat, version in zip(group.flats, before, strict=True):
                    if isinstance(flat.all_gather, DeltaAllGather) and flat.version != version:
                        flat.all_gather.steps.add(version, flat.version)
                buffer = id(group.unsharded.buffer)
                if group.flats and buffer not in taken and not state.context.in_forward and not state.outdated:
                    taken.add(buffer)
                    state.context.gather_stream.wait_for_caller()
                    group.prefetch()
        yield from members.values()

    @property
    def loss_scale(self) -> float:
        """Factor of the losses, as far as the residuals know it.

        Raises:
            RuntimeError: models have different ones.
        """
        scales = {schedule.loss_scale for schedule in self._schedules}
        if len(scales) > 1:
            raise RuntimeError(f"{self._optimizer} has parameters of losses with different scales, {sorted(scales)}")
        return scales.pop()

    def check_scaler(self) -> None:
        """Raise a ``RuntimeError`` where a ``GradScaler`` is in use that residuals do not follow."""
        if not all(schedule.follows_scaler for schedule in self._schedules):
            raise RuntimeError(
                f"a GradScaler steps this {self._optimizer}, and its scale is unknown to the residuals: call "
                "yafsdp_cc.follow_scaler(model, scaler) before the first backward"
            )

    def first_moment(self, parameter: Tensor) -> FlatDTensor:
        """Return the first moment of an encoded parameter, zero at first: its compressed sum uses it, too."""
        param, compressed = _fsdp_param(parameter), self.encoded[id(parameter)]
        assert param is not None
        assert param.flat is not None
        if compressed.momentum is None:
            compressed.momentum = torch.zeros(param.flat.layout.chunk, dtype=torch.float32, device=param.local.device)
        return flat_dtensor(param.local_range(compressed.momentum), param.spec)

    def exact_mean(self, parameter: Tensor) -> Tensor | None:
        """Return this rank's range of an encoded parameter's exact mean gradient, if the last backward had any."""
        param, mean = _fsdp_param(parameter), self.encoded[id(parameter)].exact_mean
        return None if param is None or mean is None else param.local_range(mean)

    def drop_exact_means(self) -> None:
        """Free the exact gradients; the optimizer has used them."""
        for compressed in self._sums:
            compressed.exact_mean = None

    @property
    def is_blind(self) -> bool:
        """Whether gradients are to be clipped before they are sent, and by how much is not known."""
        return any(schedule.clip is not None and schedule.clip.is_blind for schedule in self._schedules)

    def learn_norm(self, total: float) -> None:
        """Take in the norm that the mean gradient of the encoded parameters had in the last backward, unscaled."""
        for schedule in self._schedules:
            if schedule.clip is not None:
                schedule.clip.learn(total)


def _fsdp_param(parameter: Tensor) -> FSDPParam | None:
    """Return what owns a parameter in the engine; None where it is not sharded."""
    if not isinstance(parameter, FlatDTensor) or parameter.shard_spec.owner is None:
        return None
    param: FSDPParam | None = parameter.shard_spec.owner()
    return param


# The optimizers ----------------------------------------------------------------------------------------------------


class GroupUpdate(NamedTuple):
    """A parameter group's part of a step."""

    group: dict[str, Any]
    exact: list[Tensor]
    """Parameters whose ``.grad`` is the mean gradient."""
    encoded: list[Tensor]
    """Those whose ``.grad`` is what was decoded."""


class OneBitOptimizer(Optimizer):
    """An optimizer that sets when gradients are summed exactly, and when encoded.

    Args:
        params: of a model that was sharded with a compression, all that are trained.
        defaults: of parameter groups.
        beta: the decay of the first moment.
        share: how much of a gradient that takes in: 1 - beta where it is an average, 1 where it is a sum.
        warmup_steps: with exact sums.
        form: what is encoded: the momentum of each rank, which is its residual at the same time, or its gradient.
        refreshes: exact sums for the second moment before the distance between them doubles; 0 for none.
        max_grad_norm: what the loop clips gradients to; those that it does not see are clipped alike, the exact ones
            and, where the momentum is sent, those that it is of.
    """

    shortest_warmup: ClassVar[int] = 1
    """Steps with exact sums that there have to be."""
    takes_limit: ClassVar[bool] = True
    """Whether it has an argument for what the loop clips gradients to."""

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
        self._step_supports_amp_scaling = True  # so that a GradScaler sets found_inf and grad_scale
        super().__init__(params, defaults)
        self._set_steps(0)
        sent = beta if form == "momentum" else 0.0
        self.phases = OptimizerPhases(self._parameters, sent, share, max_grad_norm, type(self).__name__)
        for parameter in self._parameters:
            self._init_state(parameter)
        self.phases.set_phase(self.phase)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, and set how the next gradients are summed. ``closure`` as torch's optimizers have it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.phases.check()
        if not self._unscale():
            self.phases.drop_exact_means()  # the next backward may not come to all of them
            return loss
        phase = self.phases.phase
        if phase.keeps_exact:
            gradients = self._exact_gradients()
            if phase is Phase.BOTH:
                self._update_variance(gradients)
            elif self.takes_limit and self.max_grad_norm is None and self.form == "momentum":
                self._warn_of_clipping(gradients)
            self.phases.drop_exact_means()
        self._set_steps(self.steps + 1)
        self.phases.set_phase(self.phase)  # before all-gathers begin below, exact or of deltas as in the next step
        self._update_all(phase)
        return loss

    def _set_steps(self, steps: int) -> None:
        """So many steps were made, and a state dict has it: no parameter need have been in all of them."""
        self.steps = steps
        for group in self.param_groups:
            group[STEPS] = steps

    @property
    def _parameters(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _update_all(self, phase: Phase) -> None:
        """Update the parameters, whose gradients were summed as in ``phase``, group by group of the model."""
        for members in self.phases.by_group():
            for update in self._group_updates(members, phase):
                self._update_group(update)

    def _update_group(self, update: GroupUpdate) -> None:
        self._update_exactly(update.group, update.exact)
        self._update(update.group, update.encoded)

    def _group_updates(self, members: Sequence[Tensor], phase: Phase) -> Iterator[GroupUpdate]:
        """Yield of each parameter group what it has of ``members`` with a gradient."""
        wanted = {id(each) for each in members if each.grad is not None}
        for group in self.param_groups:
            used = [each for each in group["params"] if id(each) in wanted]
            encoded = [each for each in used if phase.encodes and self._is_encoded(each)]
            exact = [each for each in used if not (phase.encodes and self._is_encoded(each))]
            yield GroupUpdate(group, exact, encoded)

    @abstractmethod
    def _init_state(self, parameter: Tensor) -> None:
        """Make the state of a parameter."""

    def _share_moment(self, parameter: Tensor, name: str) -> None:
        """Let the compressed sum use the first moment of a parameter, which the state has under this name."""
        if self._is_encoded(parameter) and self.form == "momentum":
            state, shared = self.state[parameter], self.phases.first_moment(parameter)
            if state[name].to_local().data_ptr() != shared.to_local().data_ptr():
                state[name] = shared.copy_(state[name])

    def _local(self, parameter: Tensor, name: str) -> Tensor:
        return local_of(self.state[parameter][name])

    def _update_variance(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """Take in exact gradients, pairs of a parameter and this rank's range of its gradient."""

    @abstractmethod
    def _update_exactly(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters whose ``.grad`` is the mean gradient."""

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters whose ``.grad`` is what was decoded: a mean gradient or the momentum, by ``form``."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: the phases have begun with the parameters that it was given."""
        if hasattr(self, "phases"):
            raise ValueError(f"give {type(self).__name__} all parameter groups when it is made, frozen ones too")
        super().add_param_group(param_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        name = type(self).__name__
        raise RuntimeError(
            f"a model has one {name}, and a copy would be a second: make another, and load its state_dict()"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state of any number of ranks; the warm-up, too."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(saved, self._parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if torch.is_tensor(value) and value.dtype != self.state[parameter][name].dtype:
                    self.state[parameter][name] = value.detach().clone()  # torch has cast it to the parameter's
        recorded = [int(group.get(STEPS, 0)) for group in self.param_groups]
        seen = [int(state["step"]) for state in self.state.values() if "step" in state]  # AdamW makes these alone grow
        self._set_steps(max(*recorded, *seen, 0))
        for parameter in self._parameters:
            self._init_state(parameter)
        self.phases.set_phase(self.phase)

    def _is_encoded(self, parameter: Tensor) -> bool:
        return id(parameter) in self.phases.encoded

    def _refresh_steps(self, until: int) -> Iterator[int]:
        """Yield steps after the warm-up, from 1 on, with exact sums: by fours 1, 2, 3, 4, 6, 8, 10, 12, 16, ..."""
        step, distance = 1, 1
        while self.refreshes and step <= until:
            for _ in range(self.refreshes):
                yield step
                step += distance
            step += distance
            distance *= 2

    def _phase_of(self, step: int) -> Phase:
        """Return how gradients of a step, from 1 on, are summed."""
        after = step - self.warmup_steps
        if after <= 0:
            return Phase.EXACT if after else Phase.KEPT
        return Phase.BOTH if after in self._refresh_steps(after) else Phase.ENCODED

    @property
    def phase(self) -> Phase:
        """How the gradients of the next step are summed."""
        return self._phase_of(self.steps + 1)

    def _exact_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return the exact gradients of the last backward, unscaled and clipped."""
        found: list[tuple[Any, Tensor]] = []
        scale = self.phases.loss_scale
        for parameter in self._parameters:
            if self._is_encoded(parameter) and (exact := self.phases.exact_mean(parameter)) is not None:
                found.append((parameter, exact if scale == 1 else exact.div_(scale)))
        if self.max_grad_norm is not None and found:
            norm = get_total_norm([flat_dtensor(exact, parameter.shard_spec) for parameter, exact in found])
            total = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            self.phases.learn_norm(total)
            share = min(1.0, self.max_grad_norm / (total + 1e-6))
            for _, exact in found:
                exact.mul_(share)
        return found

    def _warn_of_clipping(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """Warn where the loop has clipped ``gradients``, which were kept as they came, and there is no limit."""
        pairs = [(local_of(parameter.grad), exact) for parameter, exact in gradients if parameter.grad is not None]
        after, before = (float(get_total_norm(each)) for each in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        if after < _CLIPPED * before:
            name = type(self).__name__
            warnings.warn(
                f"the loop clips gradients (by now to {after / before:.2g} of their norm), and {name} does not know "
                "the limit: after the warm-up they are sent as they are, and those of many times it do lasting harm. "
                f"Pass max_grad_norm=..., as clip_grad_norm_ has it, to {name} too",
                stacklevel=3,
            )

    def _unscale(self) -> bool:
        """Divide gradients by a ``GradScaler``'s scale, if one has called; return whether there is to be a step."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return True
        self.phases.check_scaler()
        scale = getattr(self, "grad_scale", None)  # None where gradients are unscaled already
        if scale is not None:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
        return not float(found_inf)
