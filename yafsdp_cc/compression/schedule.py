"""When gradients are summed exactly and when encoded: warm-up, or the phases that an optimizer sets.

A ``CompressionSchedule`` belongs to a model and stays when its engine is assembled anew. It also has what all
compressed sums of the model share: the momentum form of an optimizer, clipping before encoding, and the loss scale.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import torch

from yafsdp_cc.compression.error_feedback import Recursion
from yafsdp_cc.engine.protocols import Observer
from yafsdp_cc.fsdp2.module import require_state
from yafsdp_cc.ranks.mesh import all_groups, all_reduce_over

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn
    from typing_extensions import Self

    from yafsdp_cc.compression.config import Compression
    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.state import FSDPState

EXACT_GRADIENTS = "gradients without a codec"
"""Name by which ``LocalClip`` knows the gradients that are never encoded; others it knows by flat parameters' names."""
_FEW_BITS = 4
"""Bits per element below which optimizers outside of the 1-bit family learn less well."""


class Phase(Enum):
    """Kind of the sums of gradients that have a codec."""

    EXACT = "exact"
    """Gradients are sent as they are, and their exact sum is used."""
    KEPT = "kept"
    """Sums are exact, and their mean is stored in ``exact_mean`` before anybody clips it."""
    LEARNING = "learning"
    """Sums as in KEPT, though ENCODED or BOTH is due: ``LocalClip`` has no shares yet. All-gathers are encoded."""
    ENCODED = "encoded"
    """Encoded messages are sent, and their decoded sum is used."""
    BOTH = "both"
    """Sums are encoded, and exact sums are made, too, whose mean is stored in ``exact_mean``."""

    @property
    def encodes(self) -> bool:
        return self in (Phase.ENCODED, Phase.BOTH)

    @property
    def encodes_weights(self) -> bool:
        """Whether all-gathers that have a codec are encoded: in LEARNING, too, lest weights jump for one exact step."""
        return self.encodes or self is Phase.LEARNING

    @property
    def keeps_exact(self) -> bool:
        """Whether sums leave the exact mean gradient in ``exact_mean``."""
        return self in (Phase.KEPT, Phase.LEARNING, Phase.BOTH)


class PhaseController(Protocol):
    """Sets the phase of every backward for an optimizer (``optim.one_bit``)."""

    @property
    def decay(self) -> tuple[float, float]:
        """Decay of the momentum, and share of a gradient that enters it: ``beta`` and ``share`` of the schedule."""

    def update_phase(self) -> None:
        """Set the phase again after the shares by which ``LocalClip`` clips have changed."""


class ScheduledSum(Protocol):
    """The methods and attributes of a compressed sum that ``CompressionSchedule`` uses."""

    schedule: CompressionSchedule

    @property
    def sends_late(self) -> bool:
        """Whether a part of a gradient comes with the messages of later gradients."""

    def before_sum(self) -> None:
        """Check and prepare the sum, before it is issued."""

    def rescale(self, factor: float) -> None:
        """Multiply all gradients that this sum holds back for later messages by ``factor``."""


class CompressionObserver(Observer):
    """An ``Observer`` that refers to the engine calling it, and stays when that engine is assembled anew."""

    def __init__(self) -> None:
        self._state: weakref.ref[FSDPState] | None = None
        self._versions: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, state: FSDPState) -> Self | None:
        """Return the observer of this class that a model has; None where there is none."""
        return next((each for each in state.context.observers if isinstance(each, cls)), None)

    def assembled(self, state: object) -> None:
        self._state = weakref.ref(cast("FSDPState", state))

    @property
    def state(self) -> FSDPState:
        """The engine (``FSDPState``) that was assembled last."""
        state = None if self._state is None else self._state()
        assert state is not None, "the engine calls its observers"
        return state

    def reduce_measurements(self, numbers: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce ``numbers`` in place over all ranks that must choose the same codecs: those of tensor parallelism are
        among them, so that their copies of a parameter remain alike."""
        mesh = self.state.context.info.mesh
        divided = (group for param in self.state.params for group in param.spec.groups[1:])
        all_reduce_over(dict.fromkeys([*all_groups(mesh), *divided]), numbers, op, mesh)

    def weights_have_changed(self) -> bool:
        """Return whether the weights' versions have changed since the last call, most likely by an optimizer step."""
        before, self._versions = self._versions, tuple([group.versions() for group in self.state.groups])
        return before not in ((), self._versions)


class CompressionSchedule(CompressionObserver):
    """The phase of one model's compressed sums, and settings that they share.

    Unless an optimizer sets the phase, sums are exact for ``config.warmup_steps`` optimizer steps and encoded
    afterwards. A step is counted in the first forward that finds changed weights.
    """

    def __init__(self, config: Compression, *, over_replicas: bool = False) -> None:
        super().__init__()
        self.config = config
        self.over_replicas = over_replicas
        """Whether sums over replicas are encoded, and those over the ranks of a shard exact."""
        self.phase = Phase.EXACT if config.warmup_steps else Phase.ENCODED
        """Phase of the next backward; each sum latches it in ``start``."""
        self.steps = 0
        """Number of warm-up optimizer steps so far; the count stops when the warm-up is over."""
        self.backward = object()
        """Object that stands for the backward under way or, between two, the next one; new after each final reduce."""
        self._has_grads = False
        """Whether a backward has made gradients final since the last counted step."""
        self._have_changed = False
        """Whether weights have changed since the last forward."""
        self.controller: weakref.ref[PhaseController] | None = None
        """Weak reference to the optimizer that sets ``phase``; None if no optimizer ever did."""
        self.beta = 0.0
        """Decay of the momentum that residuals serve as; 0 in the gradient form, where they do not."""
        self.share = 1.0
        """Share of a gradient that enters the momentum: 1 - beta for an average, 1 for a sum."""
        self.clip: LocalClip | None = None
        """Clips gradients before they are encoded, in the momentum form only."""
        self.has_limit = False
        """Whether the optimizer has a limit of the mean gradient's norm."""
        self.exact_norms: list[tuple[FSDPParam, Tensor]] = []
        """Parameters without a codec, each with the norm of its mean gradient, scaled and unclipped, if ``has_limit``
        and the phase keeps exact sums; the optimizer clears the list."""
        self.loss_scale = 1.0
        """Factor of the losses, and so of gradients and residuals."""
        self.micro_batches = 1
        """Divisor of gradients before they are summed; not 1 where a pipeline's stage averages over micro-batches."""
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self._has_warned = False
        self._is_resumed = False
        """Whether a checkpoint was loaded since the last forward in training."""
        self._sums: weakref.WeakValueDictionary[int, ScheduledSum] = weakref.WeakValueDictionary()
        """The compressed sums of the model by their ``id``."""

    @property
    def is_controlled(self) -> bool:
        """Whether an optimizer sets ``phase``, as 1-bit optimizers do."""
        return self.controller is not None

    @property
    def may_be_exact(self) -> bool:
        """Whether a later backward may sum gradients exactly that have a codec."""
        return self.is_controlled or not self.phase.encodes

    @property
    def recursion(self) -> Recursion:
        """Coefficients of the error feedback."""
        return Recursion(self.config.carry, taken=1 - self.beta, added=0.0 if self.config.sends_differences else 1.0)

    @property
    def follows_scaler(self) -> bool:
        """Whether ``loss_scale`` is read from a ``GradScaler``."""
        return self._scaler is not None

    def adopt(self, compressed: ScheduledSum) -> None:
        """Let this schedule say when ``compressed`` encodes its sums."""
        compressed.schedule = self
        self._sums[id(compressed)] = compressed

    def join(self, other: CompressionSchedule) -> None:
        """Adopt the compressed sums of ``other``, the schedule of a part of the model that ran by itself before."""
        for compressed in other._sums.values():
            compressed.rescale(self.loss_scale / other.loss_scale)
            self.adopt(compressed)
        other._sums.clear()

    def set_controller(self, controller: PhaseController, max_grad_norm: float | None) -> None:
        """Let an optimizer set the phase. The engine must be assembled anew, as exact sums need scratch buffers.

        Args:
            max_grad_norm: limit of the mean gradient's norm; None: gradients are not clipped before they are sent.
        """
        self.controller, self.phase = weakref.ref(controller), Phase.EXACT
        self.beta, self.share = controller.decay
        self.has_limit = max_grad_norm is not None
        self.clip = LocalClip(max_grad_norm) if self.beta and max_grad_norm is not None else None

    @torch.no_grad()
    def follow_decay(self) -> None:
        """Make residuals follow the optimizer's present momentum decay. No reduce may be in flight.

        After a message a residual is beta / share times this rank's momentum, so it is rescaled to the new ratio.
        """
        controller = None if self.controller is None else self.controller()
        if controller is None or (decay := controller.decay) == (self.beta, self.share):
            return
        before, (self.beta, self.share) = self.beta / self.share, decay
        if before and self.beta:
            for each in self._sums.values():
                each.rescale(self.beta / self.share / before)

    def resume_decay(self, decay: Sequence[float] | None) -> None:
        """Treat residuals loaded next as made with ``decay`` (beta, share); None: the optimizer's present one."""
        if decay is not None and self.is_controlled:
            self.beta, self.share = decay

    def prepare(self, name: str, grads: Tensor, *, clips: bool = True) -> None:
        """Divide gradients of the flat parameter ``name`` by ``micro_batches``, and clip them, both in place."""
        if self.micro_batches != 1:
            grads.div_(self.micro_batches)
        if clips and self.clip is not None:
            self.clip.clip(name, grads, self.loss_scale)

    # Methods that the engine calls

    def before_forward(self) -> None:
        self.count_step()
        if torch.is_grad_enabled():
            self.follow_scale()
            self.follow_decay()
            self._warn_of_few_bits()
            self._warn_of_cleared_gradients()
        self._have_changed = False

    def before_reduce(self, group: str) -> None:
        if not (self.beta or self.phase.keeps_exact):
            return
        for flat in (flat for each in self.state.groups if each.name == group for flat in each.flats if flat.trainable):
            for collective in (flat.reduce_scatter, flat.all_reduce):
                if (compressed := self._sums.get(id(collective))) is not None:
                    compressed.before_sum()

    def after_backward(self) -> None:
        self._has_grads = True

    @torch.no_grad()
    def after_final_reduce(self) -> None:
        """Store norms of gradients without a codec, which the loop clips before the optimizer sees them. Ranks reduce
        the norms in the optimizer's step: ``after_final_reduce`` must call no collective."""
        self.backward = object()
        grads = [
            (param, param.parameter.grad)
            for param in (self.state.params if self.has_limit and self.phase.keeps_exact else ())
            if param.parameter.grad is not None
            and not any(id(each) in self._sums for each in (param.flat.sum_collectives if param.flat else ()))
        ]
        if self.micro_batches != 1:  # a stage of a pipeline divides these gradients when the last one is reduced
            grads = [(param, grad / self.micro_batches) for param, grad in grads]
        norm, device = partial(torch.linalg.vector_norm, dtype=torch.float32), self.state.context.device
        self.exact_norms = [(param, norm(grad).to(device)) for param, grad in grads]

    def count_step(self) -> None:
        """Count a warm-up step if weights have changed since the last forward and a backward was made: weights that
        only an evaluation has replaced by their average are no step."""
        self._have_changed |= self.weights_have_changed()
        if self.is_controlled or self.phase.encodes:
            return
        if self._have_changed and self._has_grads:
            self._has_grads = False
            self._set_steps(self.steps + 1)

    def resume(self, steps: int) -> None:
        """Resume after ``steps`` optimizer steps; loading the weights does not count as a step."""
        self._versions, self._has_grads, self._is_resumed = (), False, True
        self._set_steps(steps)

    def _set_steps(self, steps: int) -> None:
        self.steps = steps
        if not self.is_controlled:
            self.phase = Phase.ENCODED if steps >= self.config.warmup_steps else Phase.EXACT

    def resume_clip(self, state: Mapping[str, float] | None, device: torch.device) -> None:
        """Load the shares of ``clip``, a ``LocalClip``; if ``state`` is None, exact steps measure them again."""
        controller = None if self.controller is None else self.controller()
        if self.clip is not None and controller is not None:
            self.clip.load_state(state, device)
            controller.update_phase()

    # The loss scale

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        """Read the loss scale from ``scaler`` now and before each forward. The scaler is referenced weakly."""
        self._scaler = weakref.ref(scaler)
        self.follow_scale()

    @torch.no_grad()
    def follow_scale(self) -> None:
        """Rescale residuals if the loss scale has changed; exact for powers of two. No reduce may be in flight."""
        scaler = None if self._scaler is None else self._scaler()
        if scaler is not None and (scale := scaler.get_scale()) != self.loss_scale:
            factor, self.loss_scale = scale / self.loss_scale, scale
            for each in self._sums.values():
                each.rescale(factor)

    def _warn_of_cleared_gradients(self) -> None:
        """Warn if gradients were cleared that no optimizer has taken, and residuals keep a part of them.

        Cases without a warning: a closure sees weights change within a step; a ``GradScaler`` that the schedule follows
        may have skipped the step; a loop that never steps an optimizer of torch's may write to weights without torch
        counting it; in the momentum form, sums warn themselves (``CompressedSum.before_sum``).
        """
        state, is_resumed, self._is_resumed = self.state, self._is_resumed, False
        if is_resumed or self._have_changed or self.beta or self.follows_scaler or not 0 < state.steps == state.seen[0]:
            return
        if self.phase.encodes and state.is_cleared and any(each.sends_late for each in self._sums.values()):
            warnings.warn(
                "the gradients of the last backward were cleared, and no optimizer has taken them; but what messages "
                "have not sent of them yet will come with the next gradients. While another model is trained through "
                "this one, call requires_grad_(False) on this one; leave batches out by skip_together",
                stacklevel=2,
            )

    def _warn_of_few_bits(self) -> None:
        """Warn once, in a forward with autograd on, if codecs of few bits are used without a 1-bit optimizer."""
        if self._has_warned or self.is_controlled:
            return
        self._has_warned = True
        few = [codec for codec in self.config.codecs if self.config.bits(codec) < _FEW_BITS]
        if few and self.config.sends_differences:
            warnings.warn(
                f"gradients={few[0]!r} with feedback='ef21': with fewer than 4 bits a loss falls more slowly. "
                "After 300 steps of Muon a million parameters were 0.19 nats per byte above exact sums with 'onebit', "
                "no lower than with AdamW, and 0.06 with 'int4' (docs/measurements.md)",
                stacklevel=2,
            )
        elif few:
            warnings.warn(
                f"gradients={few[0]!r} and no optimizer of the 1-bit family: with fewer than 4 bits Adam's loss falls "
                "more slowly. A million parameters ended 0.02 nats per byte above exact sums with 'ternary', 0.04 with "
                "'onebit', 0.006 with 'int4' (docs/measurements.md). yafsdp_cc.optim.OneBitAdam is made for few bits",
                stacklevel=2,
            )


def follow_scaler(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """Rescale the residuals of ``model`` whenever the scale of its losses changes. A collective.

    Call ``follow_scaler`` once, before the first scaled backward. Without that call, residuals keep the old scale
    beside gradients of the new one. Each forward in training reads ``scaler.get_scale()``, which synchronizes a GPU.

    Args:
        model: sharded with a compression.
        scaler: the scaler of its losses; it is not changed, and referenced weakly.

    Raises:
        ValueError: ``model`` is sharded without a compression.
    """
    schedule = CompressionSchedule.of(require_state(model))
    if schedule is None:
        raise ValueError(f"follow_scaler: this {type(model).__name__} is sharded without a compression")
    schedule.follow(scaler)


# Clipping ----------------------------------------------------------------------------------------------------------

_LEARNING_RATE = 0.3
"""Weight of the newest exact step in the running average of a clipping share (kappa of ``LocalClip``)."""


class LocalClip:
    """Clips gradients on each rank before they are encoded, in the momentum form.

    In the momentum form no training loop can clip gradients, because ``.grad`` is the momentum. So every rank clips its
    own gradient g_w of each flat parameter to its usual share of the limit c, by the norm of the whole model's mean
    gradient:

        kappa = E |g_w| / |g|
        g_w  <- g_w * min(1, c * kappa / |g_w|)

    A step whose gradients are k times the limit everywhere is divided by k, as clipping the mean by its norm would do;
    a single flat parameter or rank with far too large gradients is clipped alone. kappa is measured in exact steps.

    Args:
        limit: c, limit of the norm of the mean gradient of an unscaled loss.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._norms: dict[str, Tensor] = {}
        """Norm of the gradients that this rank has sent since the last ``learn``, fp32, by flat parameter; 0 if it sent
        none. The communication stream writes to these tensors, so they are never replaced."""
        self._shares: dict[str, Tensor] = {}
        """Share (kappa) of the limit that this rank clips each flat parameter to, by its name; set by ``learn``."""
        self.is_blind = True
        """Whether no clipping share (kappa) was measured yet, so that nothing is clipped; the same on all ranks."""

    @torch.inference_mode(False)
    def reserve(self, name: str, device: torch.device) -> None:
        """Allocate the norm of the flat parameter ``name`` unless it exists.

        On CUDA the norm's memory must belong to the caller's stream: there ``learn`` writes it and the host frees it.
        """
        if name not in self._norms:
            self._norms[name] = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def clip(self, name: str, grads: Tensor, loss_scale: float) -> None:
        """Clip the gradients of the flat parameter ``name`` in place."""
        self.reserve(name, grads.device)
        wide = torch.promote_types(grads.dtype, torch.float32)
        norm = torch.linalg.vector_norm(grads, dtype=wide).to(torch.float32)
        if (share := self._shares.get(name)) is not None:
            factor = (self._limit * loss_scale * share / norm).clamp_(max=1.0)
            # A norm of NaN clips nothing: ``encode`` handles non-finite blocks one by one. An infinite norm, which
            # finite gradients have too where their squares overflow, makes finite gradients 0, as ``clip_grad_norm_``
            # does, and infinite ones NaN.
            factor.masked_fill_(factor.isnan(), 1.0)
            if grads.device.type != "cpu" or float(factor) < 1:  # reading the factor would synchronize a GPU
                grads.mul_(factor)
                norm *= factor
        torch.div(norm, loss_scale, out=self._norms[name])

    def learn(self, total: float) -> None:
        """Update kappa, each flat parameter's share of the clipping limit, from its gradients in the last step.

        Args:
            total: the norm of the whole model's mean gradient in that step.
        """
        if not 0 < total < torch.inf:
            return
        self.is_blind = False
        for name, norm in self._norms.items():
            share, known = norm / total, self._shares.get(name)
            fits = norm.isfinite() & (norm > 0)  # a norm of 0: the flat parameter was not used in this step
            if known is not None:
                self._shares[name] = torch.where(fits, known.lerp(share, _LEARNING_RATE), known)
            elif fits:
                self._shares[name] = share
            norm.zero_()

    def state(self) -> dict[str, float] | None:
        """Return the clipping shares (kappa) by flat parameter, for this rank's checkpoint; None if none is known."""
        return None if self.is_blind else {name: float(share) for name, share in self._shares.items()}

    def load_state(self, state: Mapping[str, float] | None, device: torch.device) -> None:
        """Load what ``state`` returned."""
        self.is_blind = state is None
        self._shares = {
            name: torch.full((), share, dtype=torch.float32, device=device) for name, share in (state or {}).items()
        }
        for norm in self._norms.values():
            norm.zero_()
