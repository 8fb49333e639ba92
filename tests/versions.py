"""What a test needs of torch that the oldest supported version has not."""

from __future__ import annotations

import pytest
import torch


def needs_torch(version: str, why: str) -> pytest.MarkDecorator:
    """Skip a test under torch before ``version``, and say what that has not."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"needs torch {version}: {torch.__version__} {why}")


COMPRESSED_STAGES = needs_torch("2.13", "has other pipeline stages, and CompressedStage refuses it by name")
