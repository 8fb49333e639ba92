"""Errors of a type that programs written for FSDP2 expect."""

from __future__ import annotations


class MisuseError(ValueError, AssertionError):
    """A call that cannot be; FSDP2 raises an ``AssertionError`` for it."""
