"""Parameters of a unit that share a flat buffer: this rank's shard of them, and where their gradients land."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from yafsdp_cc.compression import EXACT
from yafsdp_cc.engine.tensor import FlatDTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from yafsdp_cc.engine.layout import Extent, Layout
    from yafsdp_cc.engine.steps import Steps
    from yafsdp_cc.engine.tensor import Cut
    from yafsdp_cc.wire.feedback import Residual
    from yafsdp_cc.wire.lowrank import LowRank


_UNSHARED = 2
"""References to a gradient that only its piece holds, as ``sys.getrefcount`` counts them."""


class Piece:
    """One parameter inside a flat buffer.

    ``parameter`` is what the user sees: a tensor whose local part is this rank's range of the shard. ``gradient`` is
    what its ``.grad`` becomes: the same tensor in every step, unless somebody keeps it.
    """

    def __init__(self, cut: Cut, sites: Sequence[tuple[nn.Module, str]], extent: Extent) -> None:
        self.cut = cut
        self.sites = tuple(sites)
        # Instance attributes come before Module.__getattr__, so a view put there is what the module's forward sees,
        # while named_parameters() goes on to show the sharded parameter.
        self._places = tuple((module.__dict__, attribute) for module, attribute in sites)
        self._lists = tuple(
            (module._flat_weights, module._flat_weights_names.index(attribute))
            for module, attribute in sites
            if isinstance(module, nn.RNNBase)  # its forward reads a list that it keeps beside the attributes
        )
        self.extent = extent
        self.place = -1
        """Among all parameters of the model."""
        self.span = (0, 0)
        """This rank's range of the parameter, in elements of its shard."""
        self.parameter: nn.Parameter
        self.local: Tensor
        """This rank's range of the parameter."""
        self.gradient: FlatDTensor
        self.local_gradient: Tensor
        self.target: Tensor | None = None
        """Where the backward under way writes this parameter's gradient."""
        self.written = False
        self.copy: Tensor
        """Of a small parameter: its values in the dtype of the forward."""
        self.claim: Callable[[], None]
        """Assigns ``target``."""

    def check(self) -> None:
        """Raise if the owner modules no longer hold this parameter, or it no longer lies in the shard."""
        parameter = self.parameter
        held = all(module._parameters.get(attribute) is parameter for module, attribute in self.sites)
        if not held or parameter._local_tensor is not self.local:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"'{self.cut.name}' was replaced or converted after shard(), so the engine would go on with its old "
                "values: tie, convert and assign parameters before shard(), change their values in place afterwards "
                "(torch.func.functional_call is not supported)"
            )

    def deposit(self, gradient: Tensor) -> None:
        """Write one contribution: the first is copied, with the cast to the slot's dtype for free, others added."""
        target = self.target
        if target is None:
            self.claim()
            if (target := self.target) is None:  # torch.autograd.grad passes here on its way to an input
                return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.written:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self.written = True

    def range_of(self, buffer: Tensor) -> Tensor:
        """This rank's part of the parameter in a buffer that is as long as the shard."""
        start, end = self.span
        return buffer.narrow(0, start, end - start).view(self.cut.local_shape)

    def install(self, parameter: nn.Parameter) -> None:
        """Hang ``parameter`` where the user's model had this one."""
        for module, attribute in self.sites:
            module._parameters[attribute] = parameter
        for weights, index in self._lists:
            weights[index] = parameter

    def show(self, view: Tensor) -> None:
        """Let the owner modules see ``view`` as their parameter."""
        if self.cut.parallel is not None:
            view = self.cut.parallel.around(view)
        for place, attribute in self._places:
            place[attribute] = view
        for weights, index in self._lists:
            weights[index] = view

    def show_copy(self) -> None:
        """Let the owner modules see the copy of a small parameter that a forward sees."""
        self.show(self.copy)

    def hide(self) -> None:
        """Let the owner modules see the sharded parameter again."""
        for place, attribute in self._places:
            place.pop(attribute, None)
        for weights, index in self._lists:
            weights[index] = self.parameter


class Divisor:
    """What turns a sum over ranks into their mean."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor = factor
        self.tensor = torch.tensor(float(factor), device=device)
        """0-d, because a Python number would become a new tensor in every division."""
        self.inverse = 1 / factor if math.frexp(factor)[0] == 0.5 else None
        """Where multiplying by it is as exact as dividing."""


class Gradients:
    """The flat buffer that the ``.grad`` of some parameters are views of."""

    def __init__(self, buffer: Tensor, pieces: Sequence[Piece], wrap: Callable[[Tensor, Piece], FlatDTensor]) -> None:
        self.pieces = pieces
        self._wrap = wrap
        self._use(buffer)

    def _use(self, buffer: Tensor) -> None:
        self.buffer = buffer
        for piece in self.pieces:
            piece.local_gradient = piece.range_of(buffer)
            piece.gradient = self._wrap(piece.local_gradient, piece)

    def land(self, totals: Iterable[tuple[int, Tensor]], divisor: Divisor, used: Sequence[bool]) -> None:
        """Add a sum over ranks, divided, to the gradients, or start them with it where ``.grad`` is None.

        Of a parameter that is not ``used`` the gradient is kept aside: whether another rank used it is not known yet.

        Args:
            totals: the sum, in parts that together are as long as the buffer: where each begins, and it; overwritten.
            divisor: what turns the sum into the mean.
            used: for each piece, whether this rank wrote a gradient.
        """
        before = [piece.parameter.grad for piece in self.pieces]
        alike = all(gradient is None for gradient in before)
        if alike and any(sys.getrefcount(piece.gradient) > _UNSHARED for piece in self.pieces):
            self._use(self._fresh())  # somebody keeps the gradients of an earlier step
        ours = not alike and all(g is piece.gradient for g, piece in zip(before, self.pieces, strict=True))
        for start, total in totals:
            if alike or ours:
                part = self.buffer.narrow(0, start, total.numel())
                (self._add if ours else self._start)(part, total, divisor)
            else:
                self._land_apart(start, total, divisor, before)
        for piece, use in zip(self.pieces, used, strict=True):
            if use and piece.parameter.grad is None:
                piece.parameter.grad = piece.gradient

    def _land_apart(self, start: int, total: Tensor, divisor: Divisor, before: Sequence[Tensor | None]) -> None:
        for gradient, piece in zip(before, self.pieces, strict=True):
            first, last = max(piece.span[0], start), min(piece.span[1], start + total.numel())
            if first >= last:
                continue
            target = piece.local_gradient
            if gradient is not None:  # perhaps one that the user has put there
                if not isinstance(gradient, FlatDTensor):
                    raise TypeError(
                        f"{piece.cut} has a .grad that is a {type(gradient).__name__} of shape {list(gradient.shape)}: "
                        "change the gradient that it has in place, or set it to None"
                    )
                target = gradient.to_local()
            part = target.view(-1).narrow(0, first - piece.span[0], last - first)
            (self._start if gradient is None else self._add)(
                part, total.narrow(0, first - start, last - first), divisor
            )

    def _fresh(self) -> Tensor:
        return torch.zeros_like(self.buffer)

    def _start(self, gradient: Tensor, total: Tensor, divisor: Divisor) -> None:
        if gradient.dtype == total.dtype:
            torch.div(total, divisor.tensor, out=gradient)
        else:
            gradient.copy_(total.div_(divisor.tensor))

    def _add(self, gradient: Tensor, total: Tensor, divisor: Divisor) -> None:
        if gradient.dtype == total.dtype and divisor.inverse is not None:
            gradient.add_(total, alpha=divisor.inverse)
        else:
            gradient.add_(total.div_(divisor.tensor))


class Flat:
    """Pieces of one dtype, laid out in one buffer and cut into equal chunks, of which this rank keeps one.

    ``master`` (chunk elements, the parameters' own dtype) is what the optimizer updates; ``compute`` is the dtype of
    the gathered weights, ``wire`` that of the gradients on their way.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        layout: Layout,
        master: Tensor,
        compute: torch.dtype,
        wire: torch.dtype,
        divisor: Divisor,
    ) -> None:
        self.pieces = pieces
        self.layout = layout
        self.master = master
        self.compute = compute
        self.wire = wire
        self.divisor = divisor
        self.gradients: Gradients | None = None
        self.codec = EXACT
        """What its gradients are encoded by."""
        self.residual: Residual | None = None
        """What of its gradients is still to be said; kept when the engine is put together again."""
        self.lowrank: LowRank | None = None
        """The factors that its gradients are said by, if they are said so; kept, too."""
        self.momentum: Tensor | None = None
        """[chunk] fp32, the first moment of an optimizer that leads the wire (``engine.lead``), which owns it."""
        self.exact: Tensor | None = None
        """[chunk] fp32, the mean gradient as exact sums have it, where such an optimizer has asked for it."""
        self.steps: Steps | None = None
        """Which of its changes were optimizer steps, if somebody asks."""
        self.always_exact = False
        """Whether ranks that keep its whole weights are never told of changes, but gather them anew."""

    def use(self, master: Tensor) -> None:
        """Take ``master`` for this rank's chunk."""
        self.master = master

    @property
    def trainable(self) -> bool:
        return any(piece.parameter.requires_grad for piece in self.pieces)

    @property
    def owned_bytes(self) -> int:
        """Bytes on the engine's device."""
        return self.master.nbytes + (self.gradients.buffer.nbytes if self.gradients is not None else 0)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, beside the device."""
        return 0

    def reserve_exact(self) -> None:
        """Make ``exact``, in the caller's memory: the optimizer lets go of it."""
        if self.exact is None:
            self.exact = torch.zeros(self.layout.chunk, dtype=torch.float32, device=self.divisor.tensor.device)

    @property
    def holds_exact(self) -> bool:
        """Whether ``exact`` has what ``.grad`` has by now, so that another sum of the step is to be added to both."""
        return self.exact is not None and any(piece.parameter.grad is not None for piece in self.pieces)

    def keeping(self, totals: Iterable[tuple[int, Tensor]], adds: bool = False) -> Iterator[tuple[int, Tensor]]:
        """The parts of an exact sum as they come; their mean is kept in ``exact``, once there is room.

        ``adds`` if that is not the first sum of the step.
        """
        assert self.exact is not None
        for start, total in totals:
            kept = self.exact.narrow(0, start, total.numel())
            if adds:
                kept.add_(total / self.divisor.tensor)
            else:
                torch.div(total, self.divisor.tensor, out=kept)
            yield start, total

    def train(self, wrap: Callable[[Tensor, Piece], FlatDTensor]) -> Gradients:
        """The gradients of this flat, made when its first parameter is to be trained; ``wrap`` makes ``.grad``."""
        if self.gradients is None:
            self.gradients = Gradients(torch.zeros_like(self.master), self.pieces, wrap)
        return self.gradients
