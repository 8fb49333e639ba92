"""What ``make soak`` alone runs: the long forms of what ``make test`` runs anyway."""

from __future__ import annotations

import os
from typing import Any

import pytest

LONG = pytest.mark.skipif("YAFSDP_SOAK" not in os.environ, reason="another form of what is run: in make soak")


def also(*values: Any) -> Any:
    """A set of parameters that only ``make soak`` runs."""
    return pytest.param(*values, marks=LONG)
