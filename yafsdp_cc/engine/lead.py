"""How an optimizer leads the wire: when gradients are summed exactly, and whether encoded sums are its momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from yafsdp_cc.compression import AUTO
from yafsdp_cc.engine.compressed import Phase
from yafsdp_cc.engine.tensor import FlatDTensor, flat_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from yafsdp_cc.engine.compressed import Compressed
    from yafsdp_cc.engine.flat import Flat, Piece
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.engine.slots import Slot
    from yafsdp_cc.engine.unit import Unit

_HOME = "_yafsdp_cc_home"


class Home(NamedTuple):
    """Where a parameter lives, in the present assembly."""

    root: Root
    unit: Unit | None
    flat: Flat | None
    """None, and no unit: in the small group."""
    piece: Piece


def settle(root: Root) -> None:
    """Let the parameters of a root know where they live."""
    for unit in root.units:
        for flat in unit.flats:
            for piece in flat.pieces:
                piece.parameter.__dict__[_HOME] = Home(root, unit, flat, piece)
    for piece in root.small.pieces:
        piece.parameter.__dict__[_HOME] = Home(root, None, None, piece)


def _home_of(parameter: Tensor) -> Home | None:
    home: Home | None = parameter.__dict__.get(_HOME)
    return home


class Lead:
    """The wires of an optimizer's parameters, led by it.

    Args:
        parameters: the optimizer's, of one sharded model or several.
        beta: the decay of its first moment where that is what residuals are to be too; 0 where they are not.
        share: how much of a gradient that takes in: 1 − beta where it is an average, 1 where it is a sum.
        max_grad_norm: what gradients are clipped to; those that residuals take in, before they are sent.
        what: the optimizer's name, for errors.

    Raises:
        ValueError: a parameter is not sharded with a compression, the compression does not fit, or one of the
            parameters whose gradients are encoded is not among them.
    """

    def __init__(
        self, parameters: Sequence[Tensor], beta: float, share: float, max_grad_norm: float | None, what: str
    ) -> None:
        self._what = what
        self._beta = beta
        self._said = Phase.EXACT
        self._parameters = list(parameters)
        self.encoded: dict[int, Home] = {}
        """By id, the parameters whose gradients are encoded after the warm-up."""
        wires: dict[Compressed, Root] = {}
        for parameter in parameters:
            home = _home_of(parameter)
            if home is None or home.root.compressed is None:
                raise ValueError(
                    f"{what} takes parameters of a model that is sharded with a compression, and one of shape "
                    f"{list(parameter.shape)} is not: yafsdp_cc.shard(model, compression="
                    'yafsdp_cc.Compression(gradients="onebit", residual="int8")) first'
                )
            wires[home.root.compressed] = home.root
            if home.flat is not None and home.root.compressed.encodes(home.flat):
                self.encoded[id(parameter)] = home
        known = set(map(id, parameters))
        for compressed, root in wires.items():
            self._check(compressed, root, known)
        for compressed, root in wires.items():
            compressed.follow(self, beta, share, max_grad_norm)
            root.outdated = True
        for flat in self._flats:  # nothing of an optimizer that has led before
            flat.momentum = flat.exact = None
            if flat.residual is not None:
                flat.residual.clear()
        self._wires = tuple(wires)

    def _check(self, compressed: Compressed, root: Root, known: set[int]) -> None:
        config, what = compressed.config, self._what
        if AUTO in config.named:
            raise ValueError(
                f"{what} leads the wire, and compression='auto' has it led by what the network carries: name a codec, "
                "as in compression='onebit', or take torch.optim.AdamW"
            )
        if config.warmup_steps:
            raise ValueError(
                f"{what} has a warm-up of its own, and Compression(warmup_steps={config.warmup_steps}) another: leave "
                "the latter out"
            )
        if self._beta and not config.feedback:
            raise ValueError(f"{what} keeps its momentum in residuals: Compression(feedback=False) has none")
        if self._beta and config.carry != 1:
            raise ValueError(f"{what} carries all of its momentum: leave carry={config.carry} out of the Compression")
        if self._beta and root.reductions.replicas is not None and not compressed.over_replicas:
            raise ValueError(
                f"{what}: with scope='shard' on a mesh (replicate, shard), every replica would have a momentum of its "
                "own: leave the scope out, or take form='gradient'"
            )
        for flat in (flat for unit in root.units for flat in unit.flats if compressed.encodes(flat)):
            for piece in flat.pieces:
                if piece.parameter.requires_grad and id(piece.parameter) not in known:
                    raise ValueError(
                        f"{what} was not given '{piece.cut.name}', whose gradient is sent together with those that it "
                        'was given: give it all parameters, or leave this one exact (overrides={"'
                        f'{piece.cut.name}": "fp32"}})'
                    )

    @property
    def _flats(self) -> Iterable[Flat]:
        return dict.fromkeys(home.flat for home in self.encoded.values() if home.flat is not None)

    def say(self, phase: Phase) -> None:
        """How gradients are to be summed from the next backward on, once what is sent can be clipped."""
        self.check()
        self._said = phase
        self.say_again()

    def say_again(self) -> None:
        """After what clips gradients has changed."""
        for compressed in self._wires:
            compressed.phase = self.phase

    @property
    def phase(self) -> Phase:
        """How gradients are summed now: exactly where they would have to be clipped, and nobody knows how far."""
        return Phase.KEPT if self.is_blind and self._said.encodes else self._said

    def check(self) -> None:
        """Raise a ``RuntimeError`` where another optimizer has been made for the same wires."""
        if any(compressed.leader is None or compressed.leader() is not self for compressed in self._wires):
            raise RuntimeError(
                f"this {self._what} leads the wire no longer: another optimizer was made for the same model since"
            )

    def by_unit(self) -> Iterator[list[Tensor]]:
        """All parameters, those of one unit after the other as a forward uses them.

        As soon as those of a unit are updated, when the next ones are asked for, its weights are gathered wherever they
        have a place that no unit before it wants: the first forward finds them on their way.
        """
        units: dict[Unit | None, list[Tensor]] = {}
        for parameter in self._parameters:
            home = _home_of(parameter)
            units.setdefault(None if home is None else home.unit, []).append(parameter)
        roots = dict.fromkeys(unit.root for unit in units if unit is not None)
        # A forward enters the root's own unit first, which is the last in module order.
        order = [each for root in roots for each in sorted(root.units, key=lambda unit: unit is not unit.root.unit)]
        taken: set[Slot] = set()
        for unit in order:
            before = [flat.master._version for flat in unit.flats]
            yield units.pop(unit, [])
            for flat, version in zip(unit.flats, before, strict=True):
                if flat.steps is not None and flat.master._version != version:
                    flat.steps.add(version, flat.master._version)
            if unit.flats and unit.home.slot not in taken and unit.root.passage is None and not unit.root.outdated:
                taken.add(unit.home.slot)
                unit.root.gather_lane.follow(unit.root.gather_lane.reached())
                unit.prefetch()
        yield from units.values()

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by, as far as the residuals know.

        Raises:
            RuntimeError: they are not told, or not all of the same.
        """
        scales = {compressed.loss_scale for compressed in self._wires}
        if len(scales) > 1:
            raise RuntimeError(f"{self._what} has parameters of losses with different scales, {sorted(scales)}")
        return scales.pop()

    def check_scaler(self) -> None:
        """Raise a ``RuntimeError`` where a ``GradScaler`` is in use that residuals do not follow."""
        if not all(compressed.follows_scaler for compressed in self._wires):
            raise RuntimeError(
                f"a GradScaler steps this {self._what}, and residuals are not told when its scale changes: call "
                "yafsdp_cc.follow_scaler(model, scaler) before the first backward"
            )

    def first_moment(self, parameter: Tensor) -> FlatDTensor:
        """Where the first moment of an encoded parameter is, cut like it, zero at first: the wire uses it too."""
        _, _, flat, piece = self.encoded[id(parameter)]
        assert flat is not None
        if flat.momentum is None:
            flat.momentum = torch.zeros(flat.layout.chunk, dtype=torch.float32, device=piece.local.device)
        return flat_dtensor(piece.range_of(flat.momentum), piece.cut)

    def exact(self, parameter: Tensor) -> Tensor | None:
        """This rank's range of the exact mean gradient of an encoded parameter, if the last backward had any."""
        _, _, flat, piece = self.encoded[id(parameter)]
        assert flat is not None
        return None if flat.exact is None else piece.range_of(flat.exact)

    @property
    def is_blind(self) -> bool:
        """Whether gradients are to be clipped before they are sent, and how far is not known."""
        return any(compressed.clip is not None and compressed.clip.is_blind for compressed in self._wires)

    def learn_norm(self, total: float) -> None:
        """The mean gradient of the encoded parameters, of an unscaled loss, had this norm in the last backward."""
        for compressed in self._wires:
            if compressed.clip is not None:
                compressed.clip.learn(total)

    def drop_exact(self) -> None:
        """The optimizer has used the exact gradients."""
        for flat in self._flats:
            flat.exact = None
