"""The user's settings of compression: one frozen value, or just the name of a codec."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, TypeVar

import torch
from pydantic import ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass

from yafsdp_cc.compression.codec import AUTO, LOW_RANK, Codec, Scaled, codec_of, kind_of
from yafsdp_cc.config import CompressionFields, Settings, run_settings

EF21 = "ef21"
"""A form of error feedback (EF21): a message holds the difference to what messages held before (``error_feedback``)."""

EXACT = "fp32"
"""The name for no codec: gradients are summed exactly, by the engine's own collectives."""

ROUNDING = ("int8", "fp8")
"""Codecs precise enough for weights themselves; other codecs encode only how weights have changed."""

_T = TypeVar("_T")


def _in_plain_words(kind: type[_T]) -> type[_T]:
    """Make a pydantic dataclass raise a ``ValueError`` of one line, without pydantic's own words."""
    init = kind.__init__

    @wraps(init)
    def plain_init(self: _T, *arguments: Any, **named: Any) -> None:
        try:
            init(self, *arguments, **named)
        except ValidationError as error:
            raise ValueError("; ".join(_line_of(kind, each) for each in error.errors())) from None

    setattr(kind, "__init__", plain_init)  # noqa: B010  (mypy forbids the assignment)
    return kind


def _line_of(kind: type, error: Any) -> str:
    names = [each.name for each in fields(kind)]  # pydantic names a positional argument by its index
    where = [names[each] if index == 0 and isinstance(each, int) else each for index, each in enumerate(error["loc"])]
    name = ".".join(map(str, where))
    if error["type"] == "unexpected_keyword_argument":
        return f"{kind.__name__} has no {name!r}, only {', '.join(names)}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "string_type":
        none = "; 'fp32' for none" if name == "gradients" else ""
        return f"{name}={error['input']!r}: takes the name of a codec, such as 'int8'{none}"
    if error["type"] == "tuple_type":
        return f"{name}={error['input']!r}: write several in parentheses, and one as ('int8',)"
    return f"{name}={error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


@_in_plain_words
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Compression(CompressionFields):
    """How gradients and weights are encoded for the network.

    Raises:
        ValueError: a name is that of no codec, or settings do not fit together; the message names them.
    """

    @field_validator("gradients", "overrides")
    @classmethod
    def _are_codecs(cls, value: str | Mapping[str, str], info: ValidationInfo) -> str | Mapping[str, str]:
        if isinstance(value, str):
            check_name(value, f"{info.field_name}={value!r}")
        else:
            for pattern, name in value.items():
                check_name(name, f"{info.field_name}={{{pattern!r}: {name!r}}}")
        return value

    @field_validator("candidates")
    @classmethod
    def _may_be_chosen(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("candidates=(): name the codecs that 'auto' may choose, such as int8 and int4")
        for name in value:
            if name == EXACT:
                raise ValueError(f"candidates={value!r}: exact sums are always among them, leave {EXACT!r} out")
            if name == LOW_RANK:
                raise ValueError(
                    f"candidates={value!r}: 'powersgd' sums factors that all ranks share, and keeps them from step to "
                    "step; it cannot take turns with codecs. Name it in overrides, for the parameters it is to have"
                )
            check_name(name, f"candidates={value!r}")
        return value

    @field_validator("weights")
    @classmethod
    def _fits_weights(cls, value: str | None) -> str | None:
        if value is None:
            return value
        if value == AUTO:
            raise ValueError(f"weights={value!r}: codecs are chosen for gradients alone: {_FIT}")
        try:
            check_name(value, f"weights={value!r}")
        except ValueError as error:
            raise ValueError(f"{error}; {_FIT}") from None
        if value == LOW_RANK or not issubclass(kind_of(value), Scaled):
            raise ValueError(f"weights={value!r}: {_UNFIT.get(value, _NO_SCALES)}: {_FIT}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Compression:
        if AUTO not in self.named and (
            self.error_budget is not None or self.candidates != CompressionFields.candidates
        ):
            idle = "error_budget" if self.error_budget is not None else "candidates"
            raise ValueError(
                f"{idle}={getattr(self, idle)!r} limits what 'auto' chooses, and gradients="
                f"{self.gradients!r} lets it choose nothing: take gradients='auto', or leave {idle} out"
            )
        biased = [name for name in self.codecs if name == LOW_RANK or kind_of(name).needs_feedback]
        if biased and not self.feedback:
            raise ValueError(
                f"gradients={biased[0]!r} with feedback=False: what it leaves out would be lost in every step, always "
                "the same way. Leave feedback on, or take int8, int4 or ternary, which round at random without it"
            )
        if not self.sends_differences:
            return self
        if self.residual != "fp32":
            raise ValueError(
                f"feedback='ef21' with residual={self.residual!r}: residuals are what was sent so far, and what "
                "rounding takes from them would stay in all later sums: pass residual='fp32'"
            )
        if self.carry != 1:
            raise ValueError(f"feedback='ef21' with carry={self.carry}: EF21 carries all residuals on: leave carry out")
        if LOW_RANK in self.codecs:
            raise ValueError(
                "feedback='ef21' with 'powersgd': messages of factors do not add up to an estimate; take a codec"
            )
        return self

    @property
    def sends_differences(self) -> bool:
        """Whether messages hold differences of gradients to what was sent before (EF21)."""
        return self.feedback == EF21

    @property
    def residual_dtype(self) -> torch.dtype | None:
        """The dtype of residuals; None without error feedback."""
        return _DTYPES[self.residual] if self.feedback else None

    @property
    def named(self) -> frozenset[str]:
        """The codecs of gradients as the user named them, ``"auto"`` included."""
        return frozenset((self.gradients, *self.overrides.values()))

    @property
    def codecs(self) -> tuple[str, ...]:
        """All codecs that gradients may be encoded with: the candidates in place of ``"auto"``."""
        names = (self.gradients, *self.overrides.values())
        return tuple(dict.fromkeys(each for name in names for each in (self.candidates if name == AUTO else (name,))))

    def codec_for(self, name: str) -> str:
        """Return the codec of the gradient of the parameter with this full name."""
        return next((codec for pattern, codec in self.overrides.items() if fnmatchcase(name, pattern)), self.gradients)

    def check_overrides(self, names: Collection[str]) -> None:
        """Raise a ``ValueError`` if a pattern of ``overrides`` decides about none of the parameters of these names."""
        undecided = set(names)
        for pattern in self.overrides:
            fitting = {name for name in names if fnmatchcase(name, pattern)}
            if fitting and undecided.isdisjoint(fitting):
                raise ValueError(
                    f"overrides={{{pattern!r}: ...}} comes too late: patterns before it hold wherever it fits"
                )
            if not fitting:
                some = ", ".join(map(repr, list(names)[:3]))
                raise ValueError(
                    f"overrides={{{pattern!r}: ...}} fits no parameter of this model: patterns are of full names "
                    f"(* stands for anything), such as {some}"
                )
            undecided -= fitting

    def bits(self, codec: str) -> float:
        """Return the bits per element of a large gradient; 0 for ``"powersgd"``, whose size depends on the shape."""
        return 0.0 if codec == LOW_RANK else 8 * self.make(codec).message_bytes(1 << 20) / (1 << 20)

    def make(self, codec: str) -> Codec:
        """Make the codec of a name other than ``"powersgd"`` and ``"auto"``, with blocks of ``block`` elements."""
        return codec_of(codec, self.block)


_FIT = "take int8, fp8, int4, ternary or onebit, or None for the weights' own dtype"
_NO_SCALES = "deltas of weights are encoded by codecs with a scale for each block, subclasses of Scaled"
_UNFIT = {
    "fp32": "None sends weights as they are",
    "bf16": "MixedPrecisionPolicy(param_dtype=torch.bfloat16) sends weights so, and computes with them",
    "topk": "99 of 100 weights would stay as they were for some hundred steps",
    LOW_RANK: "factors are of whole matrices, and no rank holds the change of one",
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def check_name(name: str, argument: str) -> None:
    """Raise a ``ValueError`` that begins with ``argument`` if no codec has this name."""
    if name not in (LOW_RANK, AUTO):
        try:
            kind_of(name)
        except ValueError as error:
            raise ValueError(f"{argument}: {error}") from None


def compression_of_run(settings: Settings | None = None) -> Compression | None:
    """Return the compression that ``settings`` name, those of the run if None; None if they name no compression."""
    settings = run_settings() if settings is None else settings
    mine = {name: one for name, one in settings.items() if name.startswith("compression.")}
    try:
        return Compression(**{name.partition(".")[2]: one.value for name, one in mine.items()}) if mine else None
    except ValueError as error:
        sources = ", ".join(dict.fromkeys(one.source for one in mine.values()))
        raise ValueError(f"compression ({sources}): {error}") from None


def compression_of(value: Compression | str | None) -> Compression | None:
    """Return the ``Compression`` that the argument ``compression`` stands for; None for None.

    Raises:
        ValueError: ``value`` names no codec.
    """
    if isinstance(value, str):
        check_name(value, f"compression={value!r}")
        value = Compression(gradients=value)
    if value is not None and not isinstance(value, Compression):
        raise TypeError(f"compression takes a Compression, the name of a codec such as 'int8', or None; got {value!r}")
    return value
