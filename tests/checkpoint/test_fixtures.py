"""Checkpoints that an earlier version has written load, and training goes on from them as it did there.

Where processor and torch are those that have written the fixtures, losses are the same to the last bit, and so are the
parameters after three steps. Elsewhere matrix products may differ in their last bits, and of that a codec of one bit
makes another sign here and there: losses of later steps agree to `LOOSE` only.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import yafsdp_cc
from tests.checkpoint.fixtures.write import (
    CASES,
    CHECKPOINT,
    EXPECTED,
    PACKED,
    digest,
    moments_of,
    parameters_of,
    quiet,
    resumed,
)
from tests.ranks import on_ranks
from tests.soak import also

FOLDER = Path(__file__).parent / "fixtures" / "f58114e"
CLOSE, LOOSE = 1e-5, 5e-3
"""Relative: of the first loss, which is one forward of the loaded weights, and of those after it."""
HALF = 2e-2
"""Relative, of all losses where forwards are in bf16."""
BETA = 0.9
"""The decay of the first moment of the optimizers that send it."""


@pytest.fixture
def unpacked(request, tmp_path):
    """A case's name, its checkpoint, and what the version that wrote it made of that."""
    name = request.param
    with tarfile.open(FOLDER / name / PACKED) as packed:
        packed.extractall(tmp_path, filter="data")
    return name, tmp_path / CHECKPOINT, json.loads((FOLDER / name / EXPECTED).read_text())


EVERY_CASE = pytest.mark.parametrize("unpacked", CASES, indirect=True)


OTHER_BITS = ("onebit_adam", "onebit_sgd", "zero_one_adam", "onebit_lamb", "powersgd")
"""Cases with other last bits after a step: optimizers that make one rounding for each operation now, norms that torch
sums by instructions which the processor's name does not tell, and factors that are orthonormalized in fp64 now."""


@EVERY_CASE
def test_as_many_ranks_go_on_as_the_version_that_wrote_it_did(unpacked):
    name, path, expected = unpacked
    for found in on_ranks(2, resumed, name, path):
        exact = ["parameters", "moments", "chosen", "chosen_after"]
        if found["machine"] == expected["machine"] and name not in OTHER_BITS:
            exact += ["losses", "parameters_after"]
        assert {each: found[each] for each in exact} == {each: expected[each] for each in exact}
        first, later = (HALF, HALF) if name.startswith("bf16") else (CLOSE, LOOSE)
        for mine, theirs in zip(found["losses"], expected["losses"], strict=True):
            assert mine[0] == pytest.approx(theirs[0], rel=first)
            assert mine[1:] == pytest.approx(theirs[1:], rel=later)


@quiet()
def elsewhere(name: str, path: Path, again: Path) -> dict[str, Any]:
    """On any number of ranks: what is loaded, before a step and after one."""
    case = CASES[name]
    model, optimizer = case.build()
    extra = yafsdp_cc.load(path, model, optimizer)
    found = {
        "extra": extra,
        "parameters": digest(parameters_of(model)),
        "moments": digest(moments_of(model, optimizer)),
    }
    found["chosen"] = dict(yafsdp_cc.counters_of(model).chosen)
    yafsdp_cc.save(again, model, optimizer, **extra)
    with torch.no_grad():
        found["losses"] = [case.loss(model, case.steps, rank).item() for rank in range(2)]
    found["trained"] = case.train(model, optimizer, case.steps, 2)
    return found


def stored(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, as torch reads them."""
    contents = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in contents.items()
        if isinstance(each, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


ON_FOUR = ("auto", "bf16_tied", "int8", "kept_weights", "onebit_lamb", "powersgd", "replicas")
"""Cases that differ in what is cut for more ranks: each kind of state once."""
ELSEWHERE = [(1, name) for name in CASES] + [(4, name) if name in ON_FOUR else also(4, name) for name in CASES]


@pytest.mark.parametrize(("world", "unpacked"), ELSEWHERE, indirect=["unpacked"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_another_number_of_ranks_loses_nothing(world, unpacked, tmp_path):
    """Saved again at once, residuals and the weights that ranks keep are the same; or the first moment has them."""
    name, path, expected = unpacked
    case = CASES[name]
    results = on_ranks(world, elsewhere, name, path, tmp_path / "again")
    for found in results:
        assert found["extra"] == {"step": case.steps}
        assert found["parameters"] == expected["parameters"]
        if not case.sends_moments:
            assert found["moments"] == expected["moments"]
        if world > 1:
            assert found["chosen"] == expected["chosen"]
        assert torch.tensor(found["trained"]).isfinite().all()
        first = HALF if name.startswith("bf16") else LOOSE if name == "kept_weights" else CLOSE
        assert found["losses"] == pytest.approx([losses[0] for losses in expected["losses"]], rel=first)
    before, after = stored(path), stored(tmp_path / "again")
    for residual in [each for each in before if each.startswith("residuals.")] if case.sends_moments else ():
        moment = f"optimizer.state.{residual.removeprefix('residuals.')}.exp_avg"
        before[moment] += before[residual] * (1 - BETA) / BETA
        before[residual].zero_()
    if world == 1:  # nothing is gathered, so there are no weights beside the masters
        before = {key: value for key, value in before.items() if not key.startswith("kept_weights.")}
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")
