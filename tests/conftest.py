"""What holds for all tests: one thread in the process that ranks are forked from; no long forms in ``make test``."""

from __future__ import annotations

import pytest
import torch

from tests.soak import SOAK

torch.set_num_threads(1)  # threads that an operation has started here would not be there in a forked rank


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is marked long, unless in ``make soak``: skipped is only what lacks hardware or a framework."""
    if not SOAK:
        long = {item for item in items if item.get_closest_marker("long")}
        config.hook.pytest_deselected(items=list(long))
        items[:] = [item for item in items if item not in long]
