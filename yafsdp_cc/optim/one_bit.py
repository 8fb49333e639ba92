"""The base of the 1-bit family: a warm-up with exact sums, and then encoded ones that the optimizer schedules.

    steps 1 ... warmup_steps    exact sums, the exact optimizer
    after those                 encoded sums; now and then exact ones besides, further and further apart

Exact sums after the warm-up are for the second moment: its preconditioner may change as long as its changes add up to
something finite (Lu et al., "0/1 Adam", 2022, section 4.1).
"""

from __future__ import annotations

import gc
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from yafsdp_cc.compression.codec import AUTO
from yafsdp_cc.compression.schedule import EXACT_GRADIENTS, CompressionSchedule, Phase
from yafsdp_cc.compression.state import compressed_sum_of
from yafsdp_cc.engine.param import owner_of
from yafsdp_cc.engine.state import engine_of
from yafsdp_cc.ranks.mesh import all_groups, all_reduce_over
from yafsdp_cc.sharding.hooks import current_state
from yafsdp_cc.tensor.dtensor import FlatDTensor, flat_dtensor

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from yafsdp_cc.compression.reduce_scatter import CompressedSum
    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.state import FSDPState

Form: TypeAlias = Literal["momentum", "gradient"]

STEPS = "steps"
"""Key, among a parameter group's settings, of the number of steps that the optimizer has made."""
_CLIPPED = 0.99
"""Share of its norm below which a gradient counts as clipped, not just rounded."""


def local_of(tensor: Any) -> Tensor:
    """Return the local tensor of a ``DTensor`` itself, without a copy."""
    local: Tensor = tensor.to_local()
    return local


def width_of(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's state and update: fp32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)


def grad_of(parameter: Tensor) -> Tensor:
    """Return this rank's elements of ``.grad`` in the dtype of the update."""
    return local_of(parameter.grad).to(width_of(parameter))


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what the ``closure`` of a step returns, called as by torch's optimizers; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_settings(defaults: dict[str, Any]) -> None:
    """Raise a ``ValueError`` if a setting that torch's optimizers have, too, is out of range."""
    if not all(0 <= beta < 1 for beta in defaults.get("betas", ())):
        raise ValueError(f"betas={defaults['betas']}: two numbers from 0 to 1, less than 1")
    found = {name: defaults[name] for name in ("lr", "eps", "weight_decay") if name in defaults}
    if min(found.values()) < 0:
        raise ValueError(", ".join(f"{name}={value}" for name, value in found.items()) + ": 0 or more")


def check_alike(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Raise a ``ValueError`` if ``groups``, present or to be loaded, differ in the decay of moments."""
    setting = "betas" if "betas" in optimizer.defaults else "momentum"
    found = [torch.tensor(each[setting], dtype=torch.float64, device="cpu") for each in groups if setting in each]
    if not all(each.equal(found[0]) for each in found):
        raise ValueError(
            f"{type(optimizer).__name__} takes the same {setting} in all groups: ranks share one momentum. Groups, "
            f"schedulers and loaded states have to give all the same, not {[each.tolist() for each in found]}"
        )


def check_loaded(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise a ``ValueError`` if a state saved by torch's optimizer has settings that this optimizer lacks."""
    for setting in ("maximize", "amsgrad", "nesterov", "dampening"):
        found = next((group[setting] for group in state_dict["param_groups"] if group.get(setting)), None)
        if found and setting not in optimizer.defaults:
            name = type(optimizer).__name__
            raise ValueError(
                f"the state is of an optimizer with {setting}={found}, which {name} does not have: it would go on in "
                "another way. Go on with the optimizer that was saved, or leave its state out"
            )


def keep_dtypes(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """Give loaded moments the dtype that kernels read, that of updates: torch casts moments to the parameters' dtype.

    Counts of steps return to host memory, where they are read: torch moves them to the parameters' device.
    """
    indices = (index for group in loaded["param_groups"] for index in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for index, parameter in zip(indices, parameters, strict=True):
        for name, value in loaded["state"].get(index, {}).items():
            found = optimizer.state[parameter][name]
            if not torch.is_tensor(value):
                continue
            is_moment = value.ndim > 0 or isinstance(found, DTensor)
            dtype = width_of(parameter) if is_moment and value.is_floating_point() else value.dtype
            device = found.device if is_moment else torch.device("cpu")
            if (dtype, device) != (found.dtype, found.device):
                made = torch.empty_like(found, dtype=dtype, device=device)
                optimizer.state[parameter][name] = made.copy_(value)


class OneBitOptimizer(Optimizer):
    """An optimizer that decides when gradients are summed exactly, and when encoded.

    Args:
        warmup_steps, form, refreshes: as of ``OneBitAdam``.
        max_grad_norm: limit that the loop clips ``.grad`` to. Gradients that the loop does not see are clipped to it,
            too: exact ones, and in the momentum form those that are sent.
    """

    moments: ClassVar[tuple[str, ...]]
    """Names of the tensors in a parameter's state that start at zero; the first one is the momentum."""
    shortest_warmup: ClassVar[int] = 1
    takes_limit: ClassVar[bool] = True
    """Whether the optimizer has an argument for the loop's clipping limit."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        warmup_steps: int,
        form: Form,
        refreshes: int,
        max_grad_norm: float | None,
    ) -> None:
        check_settings(defaults)
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
        self._step_supports_amp_scaling = True  # makes a GradScaler set found_inf and grad_scale
        super().__init__(params, defaults)
        check_alike(self, self.param_groups)
        self._set_steps(0)
        self._encoded: dict[int, CompressedSum] = {}
        """Compressed sum of each parameter whose gradient is encoded after the warm-up, by the parameter's id."""
        states = self._control_models()
        for parameter in self._parameters:
            self._init_state(parameter)
        self._plan_phase()
        for state in states:
            current_state(state.model)  # makes the warm-up's buffers now: ``plan_of`` lists them before a forward

    # Methods that each optimizer of the 1-bit family defines

    @abstractmethod
    def _update_exactly(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters whose ``.grad`` is the mean gradient."""

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters whose ``.grad`` was decoded: a mean gradient or the momentum, depending on ``form``."""

    def _update_variance(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """Update second moments from exact gradients, pairs of a parameter and this rank's gradient."""

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, and set the phase of the next backward. ``closure`` is called as by torch's optimizers."""
        loss = loss_of(closure)
        self._check_control()
        check_alike(self, self.param_groups)
        for compressed in self._encoded.values():
            compressed.is_unused = False
        phase = self._phase_now
        if not self._unscale():
            self._drop_exact_means()  # the next backward may overwrite only some of these mean gradients
            return loss
        if phase.keeps_exact:
            gradients = self._exact_gradients()
            if phase is Phase.BOTH:
                self._update_variance(gradients)
            elif self.takes_limit and self.max_grad_norm is None and self.form == "momentum":
                self._warn_of_clipping(gradients)
            self._drop_exact_means()
        self._set_steps(self.steps + 1)
        self._plan_phase()  # all-gathers that ``_update_all`` issues belong to the next step's phase
        self._update_all(phase)
        self._plan_phase()  # now it is known whether a second moment has seen no gradient yet
        return loss

    def _set_steps(self, steps: int) -> None:
        """Set the number of steps in ``self.steps`` and, for state dicts, in all groups: a parameter may have fewer."""
        self.steps = steps
        for group in self.param_groups:
            group[STEPS] = steps

    def _unscale(self) -> bool:
        """Divide gradients by the scale if a ``GradScaler`` calls; return whether the step is to be made."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return True
        if not all(schedule.follows_scaler for schedule in self._schedules):
            raise RuntimeError(
                f"a GradScaler steps this {type(self).__name__}, and its scale is unknown to the residuals: call "
                "yafsdp_cc.follow_scaler(model, scaler) before the first backward"
            )
        scale = getattr(self, "grad_scale", None)  # ``grad_scale`` is None if gradients are unscaled already
        if scale is not None:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
        return not float(found_inf)

    @property
    def _parameters(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _update_all(self, phase: Phase) -> None:
        """Update the parameters, whose gradients were summed in ``phase``, group by group of the model."""
        for members in self._by_param_group():
            for group, exact, encoded in self._split(members, phase):
                self._update_group(group, exact, encoded)

    def _update_group(self, group: dict[str, Any], exact: list[Tensor], encoded: list[Tensor]) -> None:
        self._update_exactly(group, exact)
        self._update(group, encoded)

    def _split(
        self, members: Sequence[Tensor], phase: Phase
    ) -> Iterator[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
        """Yield each of ``param_groups`` and its parameters among ``members`` with exact, and with decoded
        gradients."""
        wanted = {id(each) for each in members if each.grad is not None}
        for group in self.param_groups:
            used = [each for each in group["params"] if id(each) in wanted]
            encoded = [each for each in used if phase.encodes and self._is_encoded(each)]
            exact = [each for each in used if not (phase.encodes and self._is_encoded(each))]
            yield group, exact, encoded

    def _by_param_group(self) -> Iterator[list[Tensor]]:
        """Yield the parameters of each parameter group of the engine, in the order in which a forward uses groups.

        When the caller asks for the next group, the group just updated is all-gathered, unless an earlier group uses
        the same buffer: the next forward finds the weights on their way.
        """
        left = {id(parameter): parameter for parameter in self._parameters}
        taken: set[int] = set()
        engines = (engine_of(param) for param in map(_fsdp_param, self._parameters) if param is not None)
        states = dict.fromkeys(state for state in engines if state is not None)
        # read versions before the first group's step, in which a subclass may change the weights of all groups
        before = {flat: flat.version for state in states for flat in state.flats}
        for state in states:
            # a forward enters the root's own group first, which is the last in module order
            for group in sorted(state.groups, key=lambda group: group is not state.root_group):
                own = [id(param.parameter) for param in group.params]
                yield [left.pop(each) for each in own if each in left]
                for flat in group.flats:
                    if flat.version != before[flat]:
                        flat.all_gather.stepped(before[flat], flat.version)
                buffer = id(group.unsharded.buffer)
                if group.flats and buffer not in taken and not state.context.in_forward and not state.outdated:
                    taken.add(buffer)
                    state.context.gather_stream.wait_for_caller()
                    group.prefetch()
        yield list(left.values())  # parameters of no group are replicated

    # State

    def _init_state(self, parameter: Tensor) -> None:
        """Make the missing state of a parameter, sharded like it. In the momentum form the momentum is that of the
        parameter's ``CompressedSum``."""
        state = self.state[parameter]
        state.setdefault("step", torch.tensor(0.0, device="cpu"))
        for name in self.moments:
            if state.get(name) is None:
                state[name] = torch.zeros_like(parameter, dtype=width_of(parameter), requires_grad=False)
        if self._is_encoded(parameter) and self.form == "momentum":
            param, compressed = _fsdp_param(parameter), self._encoded[id(parameter)]
            assert param is not None
            assert param.flat is not None
            if compressed.momentum is None:
                chunk, device = param.flat.sharded.numel(), param.local.device
                compressed.momentum = torch.zeros(chunk, dtype=torch.float32, device=device)
            shared = flat_dtensor(param.local_range(compressed.momentum), param.spec)
            if self._local(parameter, self.moments[0]).data_ptr() != shared.to_local().data_ptr():
                state[self.moments[0]] = shared.copy_(state[self.moments[0]])

    def _local(self, parameter: Tensor, name: str) -> Tensor:
        return local_of(self.state[parameter][name])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of any number of ranks, the position in the warm-up included."""
        check_loaded(self, state_dict)
        check_alike(self, state_dict["param_groups"])
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)
        recorded = [int(group.get(STEPS, 0)) for group in self.param_groups]
        # a state of torch's AdamW has step counts per parameter only
        seen = [int(state["step"]) for state in self.state.values() if "step" in state]
        self._set_steps(max(*recorded, *seen, 0))
        for compressed in self._encoded.values():
            compressed.is_unused = False
        for schedule in self._schedules:  # residuals, which are loaded later, have the decay of the loaded state
            schedule.follow_decay()
        for parameter in self._parameters:
            self._init_state(parameter)
        self._plan_phase()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse later parameter groups: warm-up and compression count steps of the constructor's parameters."""
        if hasattr(self, "_schedules"):
            raise ValueError(f"give {type(self).__name__} all parameter groups when it is made, frozen ones too")
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse ``copy`` and ``pickle``, which would make a second optimizer of the same model."""
        name = type(self).__name__
        raise RuntimeError(
            f"a model has one {name}, and a copy would be a second: make another, and load its state_dict()"
        )

    @property
    def decay(self) -> tuple[float, float]:
        """The schedule's ``beta`` and ``share``; (0, 1) in the gradient form, in which residuals are no momentum.

        The schedule reads ``decay`` before each forward, as a scheduler or a loaded state may change it.
        """
        if self.form == "gradient":
            return 0.0, 1.0
        group = self.param_groups[0]
        return (group["betas"][0], 1 - group["betas"][0]) if "betas" in group else (group["momentum"], 1.0)

    # Phases

    def _control_models(self) -> Iterable[FSDPState]:
        """Become the controller of the phases of the parameters' models, and return their engines, now outdated."""
        name = type(self).__name__
        states: dict[CompressionSchedule, FSDPState] = {}
        for parameter in self._parameters:
            param = _fsdp_param(parameter)
            state = None
            if param is not None:
                # after ``fully_shard`` no engine exists before the first forward: ``current_state`` makes it
                state = engine_of(param) or current_state(param.unit)
            schedule = None if state is None else CompressionSchedule.of(state)
            if param is None or state is None or schedule is None:
                raise ValueError(
                    f"{name} takes parameters of a model that is sharded with a compression, and one of shape "
                    f"{list(parameter.shape)} is not: yafsdp_cc.shard(model, compression="
                    'yafsdp_cc.Compression(gradients="onebit", residual="int8")) first'
                )
            states[schedule] = state
            if param.flat is not None and (compressed := compressed_sum_of(param.flat)) is not None:
                self._encoded[id(parameter)] = compressed
        for schedule, state in states.items():
            self._check_compression(schedule, state, self.decay[0])
        for schedule, state in states.items():
            schedule.set_controller(self, self.max_grad_norm)
            state.outdated = True
        for compressed in self._encoded.values():  # drop what an earlier optimizer of the model left
            compressed.momentum = compressed.exact_mean = compressed.carried_over = None
            compressed.clear()
            if hasattr(compressed, "context"):
                compressed.bind(compressed.context)  # a backward that comes before the next forward sums exactly
        self._schedules = tuple(states)
        return states.values()

    def _check_compression(self, schedule: CompressionSchedule, state: FSDPState, beta: float) -> None:
        config, name = schedule.config, type(self).__name__
        if schedule.controller is not None:
            gc.collect()  # frees a deleted optimizer, which forms a reference cycle with its scheduler
            if (other := schedule.controller()) is not None:
                raise ValueError(
                    f"the model has a {type(other).__name__} already, which sets when its gradients are encoded, and a "
                    f"second optimizer would take that from it: give one all parameters. To replace it by this {name}, "
                    "delete it first, and what refers to it (del optimizer, scheduler)"
                )
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
        if beta and not config.feedback:
            raise ValueError(f"{name} keeps its momentum in residuals: Compression(feedback=False) has none")
        if beta and config.sends_differences:
            raise ValueError(
                f"{name} keeps its momentum in residuals, where feedback='ef21' keeps what was sent: leave feedback "
                "out of the Compression, or take form='gradient'"
            )
        if beta and config.carry != 1:
            raise ValueError(f"{name} carries all of its momentum: leave carry={config.carry} out of the Compression")
        if beta and state.context.info.replicate_group is not None and not schedule.over_replicas:
            raise ValueError(
                f"{name}: with scope='shard' on a mesh (replicate, shard), every replica would have a momentum of its "
                "own: leave the scope out, or take form='gradient'"
            )
        given = set(map(id, self._parameters))
        for flat in state.flats:
            for param in flat.params if compressed_sum_of(flat) is not None else ():
                if param.parameter.requires_grad and id(param.parameter) not in given:
                    raise ValueError(
                        f"{name} was not given '{param.spec.name}', whose gradient is sent together with those that it "
                        'was given: give it all parameters, or leave this one exact (overrides={"'
                        f'{param.spec.name}": "fp32"}})'
                    )

    def _check_control(self) -> None:
        """Raise a ``RuntimeError`` if this optimizer no longer decides when the models' gradients are encoded."""
        if any(compressed.schedule not in self._schedules for compressed in self._encoded.values()):
            name = type(self).__name__
            raise RuntimeError(
                f"this {name} no longer sets when sums are encoded: its model was made a part of a larger one "
                f"(fully_shard around it) since. Make the {name} when the whole model is sharded"
            )

    def _is_encoded(self, parameter: Tensor) -> bool:
        return id(parameter) in self._encoded

    def _refresh_steps(self, until: int) -> Iterator[int]:
        """Yield steps after the warm-up, from 1 on, with exact sums; with refreshes=4: 1, 2, 3, 4, 6, 8, 10, 12, ..."""
        step, distance = 1, 1
        while self.refreshes and step <= until:
            for _ in range(self.refreshes):
                yield step
                step += distance
            step += distance
            distance *= 2

    def _phase_of(self, step: int) -> Phase:
        """Return the phase of a step, counted from 1."""
        after = step - self.warmup_steps
        if after <= 0:
            return Phase.EXACT if after else Phase.KEPT
        return Phase.BOTH if after in self._refresh_steps(after) else Phase.ENCODED

    @property
    def phase(self) -> Phase:
        """The phase due in the next step, by its number; ``_phase_now`` differs while clipping has no limits yet."""
        return self._phase_of(self.steps + 1)

    def _plan_phase(self) -> None:
        """Set the phase of the compression schedules to that of the next step."""
        self._check_control()
        self._planned = self.phase
        self.update_phase()

    def update_phase(self) -> None:
        """Set the phase of the compression schedules after limits for clipping have changed."""
        for schedule in self._schedules:
            schedule.phase = self._phase_now

    @property
    def _phase_now(self) -> Phase:
        """The phase of the next step: ``LEARNING``, of exact sums, where clipping before encoding has no limit yet."""
        is_blind = any(schedule.clip is not None and schedule.clip.is_blind for schedule in self._schedules)
        return Phase.LEARNING if is_blind and self._planned.encodes else self._planned

    # Exact sums

    def _exact_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return the exact gradients of the last backward, unscaled and clipped."""
        scales = {schedule.loss_scale for schedule in self._schedules}
        if len(scales) > 1:
            name = type(self).__name__
            raise RuntimeError(f"{name} has parameters of losses with different scales, {sorted(scales)}")
        scale = scales.pop()
        for each in dict.fromkeys(self._encoded.values()):
            each.drop_cleared_means()
            if each.exact_mean is not None and not each.schedule.over_replicas:  # so far summed within the replica
                mesh = each.schedule.state.context.info.mesh
                all_reduce_over(all_groups(mesh)[1:], each.exact_mean, dist.ReduceOp.SUM, mesh)
        found: list[tuple[Any, Tensor]] = []
        for parameter in self._parameters:
            param, compressed = _fsdp_param(parameter), self._encoded.get(id(parameter))
            if parameter.grad is None:
                continue  # the sum of a flat buffer has zeros for a parameter without a gradient, which are no gradient
            if param is not None and compressed is not None and compressed.exact_mean is not None:
                found.append((parameter, param.local_range(compressed.exact_mean).div_(scale)))
        if self.max_grad_norm is not None and found:
            means = [flat_dtensor(exact, parameter.shard_spec) for parameter, exact in found]
            norms = [float(_value_of(get_total_norm(means)))]
            for schedule in self._schedules:
                left = [(each.parameter.grad, norm) for each, norm in schedule.exact_norms]
                left = [(grad.any().to(norm.device), norm) for grad, norm in left if grad is not None]
                if left:  # leave out norms of gradients that were cleared since the backward, to None or in place
                    used, exact = (_value_of(torch.stack(each)) for each in zip(*left, strict=True))
                    norm = torch.linalg.vector_norm(exact[used])
                    if schedule.clip is not None:  # clip them as ranks clip gradients to encode
                        schedule.clip.clip(EXACT_GRADIENTS, norm, scale)
                    norms.append(float(norm) / scale)
            total = math.hypot(*norms)
            for schedule in self._schedules:
                if schedule.clip is not None:
                    schedule.clip.learn(total)
            share = min(1.0, self.max_grad_norm / (total + 1e-6))
            for _, exact in found:
                exact.mul_(share)
        return found

    def _drop_exact_means(self) -> None:
        for schedule in self._schedules:
            schedule.exact_norms.clear()
        for compressed in self._encoded.values():
            compressed.exact_mean = None

    def _warn_of_clipping(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """Warn if the loop has clipped gradients (``.grad`` is smaller than the stored ones) and no limit was given."""
        pairs = [(local_of(parameter.grad), exact) for parameter, exact in gradients if parameter.grad is not None]
        after, before = (float(get_total_norm(each)) for each in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        if after < _CLIPPED * before:
            name = type(self).__name__
            warnings.warn(
                f"the loop clips gradients (by now to {after / before:.2g} of their norm), and {name} does not know "
                "the limit: after the warm-up gradients are sent unclipped, and very large ones do lasting harm. "
                f"Pass max_grad_norm=..., as clip_grad_norm_ has it, to {name} too. A loop that divides .grad, by the "
                "number of tokens for example, has to divide the loss in its place",
                stacklevel=3,
            )


def _value_of(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _fsdp_param(parameter: Tensor) -> FSDPParam | None:
    """Return the ``FSDPParam`` of a parameter; None if it is not sharded."""
    return owner_of(parameter.shard_spec) if isinstance(parameter, FlatDTensor) else None
