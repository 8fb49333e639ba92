"""What some benches measure is there, in small. No figure that a machine could change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bench import lazy_error, loading, patches, pipeline
from tests.ranks import on_ranks, ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they read the kernel's counts and malloc's")


def test_patches() -> None:
    for found in on_ranks(2, patches.measured, torch.bfloat16, 1, True):
        assert 0 <= found["changed"] < 1
        assert found["bytes"] == 0 or 4 <= found["bytes"] <= 6
        assert found["kept"] < 8
        assert min(found["step"], found["patch"]) > 0


@pytest.mark.parametrize("way", loading.WAYS)
def test_loading(way: str, tmp_path: Path) -> None:
    # Matrices of more than malloc keeps in its heap, which is resident already.
    for peak, new in on_ranks(2, loading.measured, way, 2, 1024, str(tmp_path / "weights")):
        assert peak >= 0.9 * new * 2 * 2 * 1024**2  # this rank's shards; processors count some pages late


@ranks(1)
def test_lazy_error() -> None:
    model = pipeline._model(32, 2, seed=0)
    halves = [pipeline.Part(model, stage, 2) for stage in range(2)]
    exact = lazy_error.gradients(halves, 2, None, lazy=False)
    for lazy in (False, True):
        rough, fine = (
            lazy_error.error(lazy_error.gradients(halves, 2, lazy_error.ENCODINGS[name](), lazy), exact, 2)
            for name in ("int2", "int4")
        )
        assert 0 < fine < rough < 1
    assert lazy_error.error(exact, exact, 2) == 0
