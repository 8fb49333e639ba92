"""A default device of torch is the user's, and moves nothing that the engine, codecs, optimizers and checkpoints make.

With "meta" as the default, whatever a factory without a device makes has no values, and fails where it meets others. A
default dtype is the user's, too.
"""

from __future__ import annotations

import ast
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import on_ranks, ranks
from tests.soak import also
from tests.twins import inputs, mine, seeded, square, whole
from yafsdp_cc.optim import OneBitAdam, OneBitLamb, OneBitSGD, ZeroOneAdam

PACKAGE = Path(yafsdp_cc.__file__).parent
FACTORIES = {"zeros", "ones", "empty", "full", "arange", "tensor", "randn", "rand", "randint", "linspace", "eye"}


def test_every_factory_names_its_device() -> None:
    """Except ``frombuffer`` and ``from_numpy``, which take none."""
    without = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
                continue
            name = ast.unparse(node.func).removeprefix("torch.")
            named = any(keyword.arg == "device" for keyword in node.keywords)
            if (name in FACTORIES and not named) or (name == "Generator" and not (named or node.args)):
                without.append(f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not without, without


FLOATS = {"zeros", "ones", "empty", "full", "randn", "rand", "linspace", "eye"}
"""Factories whose results have the default dtype where none is named."""


def test_every_factory_of_floats_names_its_dtype() -> None:
    without = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {f"torch.{name}" for name in FLOATS}:
                continue
            if not any(keyword.arg == "dtype" for keyword in node.keywords):
                without.append(f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not without, without


@pytest.mark.parametrize("compression", [None, "int8", "topk2bit", "powersgd"])
@ranks(2)
def test_a_default_dtype_changes_nothing(compression: str | None) -> None:
    def weights(dtype: torch.dtype) -> list[torch.Tensor]:
        plain, batches = seeded(Mlp), [mine(inputs(step=step)) for step in range(3)]
        torch.set_default_dtype(dtype)
        try:
            model = yafsdp_cc.shard(plain, compression=compression)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in batches:
                square(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [whole(parameter.detach()) for parameter in model.parameters()]
        finally:
            torch.set_default_dtype(torch.float32)

    assert all(map(torch.equal, weights(torch.float32), weights(torch.float64)))


def trains(how: str, settings: dict[str, Any], make: Any, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("cpu"):
        torch.manual_seed(0)
        models: list[Any] = [Mlp(2), Mlp(2)]
        x = torch.randn(4, WIDTH)
    with ExitStack() as stack:
        if how == "context":
            stack.enter_context(torch.device("meta"))
        else:
            torch.set_default_device("meta")
            stack.callback(torch.set_default_device, None)
        model, again = (yafsdp_cc.shard(each, mesh=mesh, **settings) for each in models)
        optimizer, other = make(model), make(again)
        for _ in range(5):
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yafsdp_cc.save(folder, model, optimizer)
        yafsdp_cc.load(folder, again, other)
        expected = {name: value.full_tensor() for name, value in model.named_parameters()}
        assert all(value.full_tensor().equal(expected[name]) for name, value in again.named_parameters())
        for state in other.state.values():
            assert not any(value.is_meta for value in state.values() if isinstance(value, torch.Tensor))
        again(x).square().mean().backward()
        other.step()
        full = yafsdp_cc.full_state_dict(again)
    assert all(value.isfinite().all() for value in full.values())


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def adam(model: Any) -> Any:
    return OneBitAdam(model.parameters(), lr=1e-3, warmup_steps=2)


def lamb(model: Any) -> Any:
    return OneBitLamb(model.parameters(), lr=1e-3, warmup_steps=2)


def sgd(model: Any) -> Any:
    return OneBitSGD(model.parameters(), lr=1e-3, warmup_steps=2)


def zero_one(model: Any) -> Any:
    return ZeroOneAdam(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("native", ["auto", "0"])
@pytest.mark.parametrize(
    ("how", "settings", "make"),
    [
        ("context", {}, adamw),
        also("default", {"mp_policy": None}, adamw),
        ("default", {"compression": "int8"}, adamw),
        ("context", {"compression": "topk"}, adamw),
        ("context", {"compression": "onebit"}, adam),
        also("default", {"compression": "ternary"}, adamw),
        also("default", {"compression": "powersgd"}, adamw),
        ("default", {"compression": "onebit"}, lamb),
        also("default", {"compression": "onebit"}, sgd),
        also("context", {"compression": "onebit"}, zero_one),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_a_default_device_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, settings: dict[str, Any], make: Any, native: str
) -> None:
    if make is adamw and torch.__version__ < "2.12":
        pytest.skip("AdamW of torch before 2.12 makes numbers on the default device, and cannot use them")
    monkeypatch.setenv("YAFSDP_CC_NATIVE", native)
    on_ranks(2, trains, how, settings, make, tmp_path / "step")
