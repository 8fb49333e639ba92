"""What only ``make soak`` runs: long forms of what ``make test`` runs anyway (see ``tests/conftest.py``)."""

from __future__ import annotations

import os
from typing import Any

import pytest

SOAK = os.environ.get("YAFSDP_SOAK", "")
"""How long to soak: a number of random programs, or a range of their seeds; empty in ``make test``."""
LONG = pytest.mark.long


def also(*values: Any) -> Any:
    """A set of parameters that only ``make soak`` runs."""
    return pytest.param(*values, marks=LONG)
