"""Updates of lists of parameters: the native kernels are the definition to the bit, and the definition is the rule."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_cc
from tests.compression import simt
from tests.internals import has_native_kernels, simd_levels
from tests.optim.lossless import backward, sharded
from tests.optim.test_family import FAMILY
from tests.optim.update_checks import FLOATS, RULES, SIZES, Case, check
from tests.ranks import ranks
from yafsdp_cc.compression.error_feedback import ops_for
from yafsdp_cc.optim.lamb import LambRow, LambRule, lamb_settings, update_lamb
from yafsdp_cc.optim.one_bit import keep_dtypes
from yafsdp_cc.optim.update import Row, Rule, adam_settings, sgd_settings, update

native = pytest.mark.skipif(not has_native_kernels(), reason="the native extension is not built")
DTYPES = [pair for pair in product(FLOATS, FLOATS) if torch.float32 in pair or pair[0] == pair[1]]


# To the bit


@native
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("level", simd_levels())
def test_every_instruction_set_does_what_is_defined(
    rule: Rule | LambRule, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YAFSDP_CC_SIMD", level)
    for weights, gradients in DTYPES:
        check(Case(rule, weights, gradients, odd=weights == torch.bfloat16))
        check(Case(rule, weights, gradients, SIZES[5:], odd=weights != torch.bfloat16))


@native
@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_does_the_same(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rule in RULES:
            check(Case(rule, torch.float32, torch.float32, (0, 100_001, 0, 7, 120_000, 0)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(simt.compiler() is None, reason="no g++")
@pytest.mark.timeout(900)  # it compiles
@pytest.mark.parametrize("rule", RULES)
def test_the_cuda_kernel_emulated_does_what_is_defined(rule: Rule | LambRule, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, check_plainly = simt.emulated_ops(), check
    for module in ("update", "lamb"):
        monkeypatch.setattr(f"yafsdp_cc.optim.{module}.ops_for", lambda _: ops)
    for weights, gradients in DTYPES:
        for odd in (False, True):
            check_plainly(Case(rule, weights, gradients, (0, 1, 4, 1023, 2051, 8192), odd))
    check_plainly(Case(rule, torch.float32, torch.float32, [*range(30, 90), 0, 7000]))  # more than one launch


@native
def test_what_does_not_fit_is_an_error() -> None:
    one, settings = torch.zeros(8), torch.zeros(1, 8)
    right: list[Any] = [Rule.ADAM_GRADIENT, [one], [one.clone()], [one.clone()], [one.clone()], settings, 0]
    backends = [ops_for(torch.device("cpu"))]
    if simt.compiler() is not None:
        backends.append(simt.emulated_ops())
    for ops in backends:
        ops.update(*right)
        for at, wrong in (
            (0, 4),
            (0, Rule.ADAM_MOMENTUM),
            (0, Rule.SGD_GRADIENT),
            (1, [one.double()]),
            (1, [one[::2]]),
            (2, []),
            (2, [one[:7]]),
            (2, [one.int()]),
            (3, [one.bfloat16()]),
            (4, [one[:4]]),
            (5, settings[:, :3]),
            (5, settings.double()),
            (5, settings.expand(2, 8)),
        ):
            with pytest.raises(RuntimeError):
                ops.update(*right[:at], wrong, *right[at + 1 :])
        right_lamb = [
            LambRule.GRADIENT,
            *([one.clone()] for _ in range(5)),
            torch.zeros(1, 13),
            torch.zeros(3, 1, 1),
            0,
        ]
        ops.update_lamb(*right_lamb)
        for at, wrong in (
            (0, 3),
            (0, LambRule.EXACT),
            (1, [one.double()]),
            (1, [torch.zeros(8193)]),
            (2, [one[:7]]),
            (3, [one.bfloat16()]),
            (4, []),
            (5, [one[::2]]),
            (6, torch.zeros(1, 8)),
            (7, torch.zeros(3, 2, 1)),
            (7, torch.zeros(3, 1, 0)),
            (7, torch.zeros(3, 1, 1).double()),
        ):
            with pytest.raises(RuntimeError):
                ops.update_lamb(*right_lamb[:at], wrong, *right_lamb[at + 1 :])


# The rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", Rule)
def test_the_definition_is_the_rule(rule: Rule, dtype: torch.dtype) -> None:
    """In double precision, where no rounding is seen, and weights of fp64, which no native kernel takes."""
    torch.manual_seed(0)
    group = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.7, "betas": (0.8, 0.95), "eps": 1e-3}
    settings = adam_settings(group, 3, 2) if rule.is_adam else sgd_settings(group)
    w, g, m = (torch.randn(1000, dtype=dtype) for _ in range(3))
    v = torch.rand(1000, dtype=dtype)
    v[:100] *= 1e-6  # where the update is bounded
    expected = _by_hand(rule, *(each.double() for each in (w, g, m, v)))
    update(rule, [Row(w, g, None if rule is Rule.ADAM_MOMENTUM else m, v if rule.is_adam else None, settings)])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for ours, theirs in zip((w, m), expected, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def _by_hand(rule: Rule, w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if rule.is_adam:
        if rule is Rule.ADAM_GRADIENT:
            m = 0.8 * m + 0.2 * g
        moment = m if rule is Rule.ADAM_GRADIENT else g
        step = moment / (1 - 0.8**3) / ((v / (1 - 0.95**2)).sqrt() + 1e-3 * 1)
        return w - 0.1 * 0.3 * w - 0.1 * step.clamp(-1, 1), m
    due = g + 0.3 * w
    m = 0.7 * m + due if rule is Rule.SGD_GRADIENT else m + 0.3 * w
    return w - 0.1 * (m if rule is Rule.SGD_GRADIENT else due), m


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", LambRule)
def test_the_definition_is_lamb_s_rule(rule: LambRule, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    group = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-3}
    w, g, m = (torch.randn(20_001, dtype=dtype) for _ in range(3))
    v, fresh = (torch.rand(20_001, dtype=dtype) for _ in range(2))
    v[:100] *= 1e-6  # where the update is bounded
    expected = _lamb_by_hand(rule, *(each.double() for each in (w, g, m, v, fresh)))
    is_exact = rule is LambRule.EXACT
    row = LambRow(w, g, m, v, None if is_exact else fresh, lamb_settings(group, 1.5, 3, 3 if is_exact else 2))
    sums = update_lamb(rule, [row])
    tolerance = 2e-6 if dtype == torch.float32 else 1e-14
    for ours, theirs in zip((w, m, v, fresh, *sums[0]), expected, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def _lamb_by_hand(rule: LambRule, w: Tensor, g: Tensor, m: Tensor, v: Tensor, fresh: Tensor) -> list[Tensor]:
    """Weights, moments, and the three numbers."""
    if rule is LambRule.MOMENTUM:
        mean, g, m = g, (g - 0.8 * m) / 0.2, g
    else:
        mean = m = 0.8 * m + 0.2 * g
    if rule is LambRule.EXACT:
        v = 0.95 * v + 0.05 * g * g
        update = mean / (1 - 0.8**3) / ((v / (1 - 0.95**3)).sqrt() + 1e-3) + 0.3 * w
        return [w, m, v, fresh, w.square().sum(), update.square().sum(), torch.zeros(())]
    fresh = 0.95 * fresh + 0.05 * g * g
    root = (v / (1 - 0.95**2)).sqrt() + 1e-3
    bare = (mean / (1 - 0.8**3) / root).clamp(-1, 1)
    update = bare + 0.3 * w
    ratio = root / ((fresh / (1 - 0.95**3)).sqrt() + 1e-3)
    return [w - 0.1 * 1.5 * update, m, v, fresh, bare.square().sum(), update.square().sum(), ratio.max()]


def test_weights_of_16_bits_are_rounded_once() -> None:
    w = torch.full((64,), 1.0, dtype=torch.bfloat16)
    g = torch.full((64,), 0.5)
    update(Rule.ADAM_MOMENTUM, [Row(w, g, None, torch.ones(64), (0.9, 0.1, 1.0, 0.0, 1.0, 1.0, 1 - 2**-9, 2**-8))])
    # 1 - 2^-9 - 2^-9 is a bf16; 1 - 2^-9 alone lies halfway between two, and would have become 1.
    assert w.tolist() == [1 - 2**-8] * 64


# What is in host memory


@ranks(2)
def test_torch_s_default_device_is_not_where_numbers_go() -> None:
    """Whatever default the program has set: numbers that the host reads would be waited for there."""
    for name, make in FAMILY.items():
        model = sharded("onebit", residual="int8")
        with torch.device("meta"):
            optimizer = make(model.parameters())
        for step in range(4):
            backward(model, step)
            with torch.device("meta"):
                optimizer.step()
        places = {each.device.type for state in optimizer.state.values() for each in state.values()}
        assert places == {"cpu"}, name


def test_numbers_of_a_loaded_state_stay_in_host_memory() -> None:
    """torch moves what is loaded to where the parameters are, where every ``float(...)`` would wait for the device."""
    parameter = torch.nn.Parameter(torch.zeros(4, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    state = {"step": torch.tensor(3.0), "variance_step": torch.tensor(2.0), "exp_avg": torch.ones(4)}
    loaded = {"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict(loaded)
    keep_dtypes(optimizer, loaded)
    found = optimizer.state[parameter]
    assert math.isclose(float(found["variance_step"]), 2.0)
    assert [found[name].device.type for name in ("step", "variance_step", "exp_avg")] == ["cpu", "cpu", "meta"]


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self) -> Tensor:
        return self.scale.square()


@ranks(2)
def test_loaded_moments_of_a_parameter_without_dimensions_are_wide_as_well() -> None:
    model: Any = yafsdp_cc.fully_shard(Scaled().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    model().backward()
    optimizer.step()
    loaded = optimizer.state_dict()
    optimizer.load_state_dict(loaded)
    keep_dtypes(optimizer, loaded)
    found, moments = optimizer.state[model.scale], loaded["state"][0]
    assert moments["exp_avg"].dtype == torch.bfloat16
    assert found["exp_avg"].dtype == torch.float32
    assert found["exp_avg"].full_tensor().item() == moments["exp_avg"].full_tensor().item() > 0
