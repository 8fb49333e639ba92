"""Runs that diverge with few bits go back to more by themselves, and others are left alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.internals import gradient_codecs, least_kept
from tests.ranks import on_ranks, ranks
from tests.soak import SOAK, also
from yafsdp_cc import Compression
from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import Noise, codec_of
from yafsdp_cc.compression.codecs import OneBit
from yafsdp_cc.compression.error_feedback import (
    CLASSIC,
    EF21,
    SAMPLES,
    SUMS,
    CompressionError,
    Recursion,
    Residual,
    lost_share,
)
from yafsdp_cc.optim import OneBitAdam

WIDTH = 256


class Loud(OneBit):
    """A codec whose messages are three times too large in value: its residual grows from message to message."""

    name = "loud"

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        super().encode(values, counts, message, noise)
        self.parts(message, values.shape[1])[0].mul_(3)


class Regression:
    """A linear layer that is to become another one, by gradients of some examples on each rank."""

    def __init__(self, compression: Compression | None, examples: int = 256, **shard: Any) -> None:
        torch.manual_seed(0)
        self.examples = examples
        torch.set_num_threads(1)
        self.model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        yafsdp_cc.shard(self.model, units=[nn.Linear], compression=compression, **shard)
        self.target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) / WIDTH**0.5
        self.step = 0

    def train(self, optimizer: torch.optim.Optimizer, steps: int, told: bool = False) -> list[float]:
        """The losses."""
        losses = []
        for self.step in range(self.step + 1, self.step + steps + 1):  # noqa: B020
            draws = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
            x = torch.randn(self.examples, WIDTH, generator=draws)
            loss = (self.model(x) - x @ self.target.T).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if told:
                yafsdp_cc.watch_loss(self.model, loss)
            losses.append(loss.item())
        return losses

    @property
    def chosen(self) -> dict[str, str]:
        return yafsdp_cc.counters_of(self.model).chosen

    @property
    def why(self) -> str:
        return yafsdp_cc.counters_of(self.model).why


# A plain momentum over topk, whose messages are some hundred steps late, is stable with exact sums alone.


def with_momentum(compression: Compression | None, told: bool = False, steps: int = 120) -> tuple[list[float], str]:
    run = Regression(compression, examples=1024)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.3, momentum=0.9)
    return run.train(optimizer, steps, told), run.why


@pytest.mark.filterwarnings("ignore:gradients=")
def test_a_run_that_diverges_comes_back_by_itself():
    if SOAK:
        exact, _ = on_ranks(2, with_momentum, None)[0]
        assert exact[-1] < 0.01 * exact[0]
    lost, why = on_ranks(2, with_momentum, Compression("topk", fallback=False))[0]
    assert lost[-1] > 1e4 * lost[0]
    assert not why
    guarded, why = on_ranks(2, with_momentum, Compression("topk"))[0]
    assert guarded[-1] < 0.1 * max(guarded)
    assert max(guarded) < 1e-2 * max(lost)
    assert "messages of gradients of '0.weight' and what shares its buffer, in topk, are " in why
    assert why.endswith("times their smallest norm: gradients grow: int4 from now on")


@pytest.mark.filterwarnings("ignore:gradients=")
def test_it_comes_back_sooner_where_losses_are_told():
    told, why = on_ranks(2, with_momentum, Compression("topk"), True)[0]
    assert max(told) < 10 * told[0]
    assert told[-1] < 0.1 * told[0]
    assert "int4, come with losses that have risen from " in why  # and before that topk
    assert why.endswith(": bf16 from now on")


# A codec that cannot be right


def loud(kind: str) -> tuple[float, dict[str, str], str]:
    mesh = {}
    if kind == "replicas":
        mesh = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    run = Regression(Compression("loud", residual="fp32"), **mesh)
    if kind == "momentum":
        optimizer: Any = OneBitAdam(run.model.parameters(), lr=0.01, warmup_steps=10)
    else:
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    losses = run.train(optimizer, 60)
    return losses[-1] / losses[0], run.chosen, run.why


@pytest.mark.filterwarnings("ignore:gradients=")
@pytest.mark.parametrize(("kind", "ranks"), [("shard", 2), ("momentum", 2), ("replicas", 4)])
def test_a_codec_that_says_less_than_nothing_is_given_up_at_once(kind, ranks):
    for end, chosen, why in on_ranks(ranks, loud, kind):
        assert end < 0.2
        assert chosen == {"0": "int4"}
        assert "loud, keep -" in why
        assert "% of what they encode: residuals grow below 0.00%" in why


# What does well


def untouched(gradients: str, weights: str, guard: bool) -> tuple[list[float], int, int, str]:
    run = Regression(Compression(gradients, weights=weights, fallback=guard), zero_stage=2)
    optimizer = OneBitAdam(run.model.parameters(), lr=0.002, warmup_steps=8)
    losses = run.train(optimizer, 45, told=guard)
    counters = yafsdp_cc.counters_of(run.model)
    return losses, counters.reduced_bytes, counters.gathered_bytes, counters.why


@pytest.mark.parametrize(
    ("gradients", "weights"),
    [("onebit", "ternary"), also("ternary", "int4"), also("int4", "int8"), ("powersgd", "onebit")],
)
def test_what_does_well_is_left_as_it_is(gradients, weights):
    guarded, unguarded = (on_ranks(2, untouched, gradients, weights, guard)[0] for guard in (True, False))
    assert guarded == unguarded
    assert guarded[-1] == ""


@ranks(4)
def test_ranks_that_own_nothing_of_a_unit_judge_factors_as_the_others() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = Regression(Compression("powersgd"), zero_stage=2, ownership="matrix", mesh=mesh)
    run.train(torch.optim.SGD(run.model.parameters(), lr=0.1), 8)
    assert not run.chosen
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, least_kept(run.model))
    assert found == found[:1] * 4
    assert all(0 < least < 0.01 for least in found[0])


# Saved and loaded


def saved(folder: Any) -> list[float]:
    run = Regression(Compression("loud"))
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.train(optimizer, 20)
    assert run.chosen == {"0": "int4"}
    yafsdp_cc.save(folder / "step", run.model, optimizer)
    return run.train(optimizer, 12)


def resumed(folder: Any, gradients: str = "loud", then: str = "int4") -> list[float]:
    run = Regression(Compression(gradients))
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    yafsdp_cc.load(folder / "step", run.model, optimizer)
    assert gradient_codecs(run.model)[0] == then
    assert run.chosen == ({} if then == gradients else {"0": then})
    run.step = 20
    return run.train(optimizer, 12)


@pytest.mark.filterwarnings("ignore:gradients=")
def test_a_resumed_run_has_gone_back_too(tmp_path):
    truth = on_ranks(2, saved, tmp_path)
    assert on_ranks(2, resumed, tmp_path) == truth
    for losses in on_ranks(4, resumed, tmp_path):
        assert losses[-1] < 2 * truth[0][-1]
    for gradients in ("int8", "auto"):
        on_ranks(2, resumed, tmp_path, gradients, gradients)


# ``CompressionError`` measures the share of gradients that messages lose.


@pytest.mark.parametrize("recursion", [CLASSIC, Recursion(taken=0.1), Recursion(carry=0.5), EF21], ids=str)
@pytest.mark.parametrize("name", ["onebit", "ternary", "int4", "int8", "topk", "loud"])
def test_what_is_left_unsaid_is_measured_from_message_and_residual(name, recursion):
    torch.manual_seed(0)
    codec, n = codec_of(name, 256), error_feedback.PART + 1024
    gradients, message = torch.randn(2, n), torch.zeros(2, codec_of(name, 256).message_bytes(n), dtype=torch.uint8)
    residual = Residual.zeros(2, n, torch.float32, 256, gradients.device)
    residual.values.normal_()
    due = recursion.carry * residual.values.double() + gradients.double()
    error_feedback.encode(codec, gradients, message, residual=residual, recursion=recursion)
    said = torch.empty_like(gradients)
    error_feedback.decode(codec, message, said)
    error = CompressionError(gradients.device, 1 - lost_share(name, 256), recursion)
    error.observe(codec, message, residual, gradients)
    truth = torch.stack([(due - said).square().sum(), due.square().sum(), said.double().square().sum()])
    torch.testing.assert_close(error.sums, truth, rtol=1e-3 if name == "int8" else 1e-4, atol=0.0)
    assert (1 - truth[0] / truth[1]).item() == pytest.approx(1 - lost_share(name, 256), abs=0.02)


@pytest.mark.parametrize("stored", [torch.float32, torch.int8])
def test_of_many_messages_a_sample_is_measured(monkeypatch: pytest.MonkeyPatch, stored: torch.dtype) -> None:
    """As many kernels for 256 ranks as for 17; over ranks, the shares are those of all messages."""
    torch.manual_seed(0)
    codec, block, n, messages = codec_of("int4", 256), 256, 2048, 255
    gradients = torch.randn(messages, n) * torch.linspace(0.1, 3, messages).unsqueeze(1)  # some ranks' are larger
    message = torch.zeros(messages, codec.message_bytes(n), dtype=torch.uint8)
    residual = Residual.zeros(messages, n, stored, block, gradients.device)
    error_feedback.encode(codec, gradients, message, residual=residual)
    decoded, decode_sum = torch.empty_like(gradients), error_feedback.decode_sum
    error_feedback.decode(codec, message, decoded)
    truth = torch.stack([(gradients - decoded).square().sum(), gradients.square().sum(), decoded.square().sum()])
    calls = []
    monkeypatch.setattr(error_feedback, "decode_sum", lambda *args: calls.append(args) or decode_sum(*args))
    total = torch.zeros(SUMS, dtype=torch.float64)
    for rank in range(8):
        error = CompressionError(gradients.device, 1.0, rank=rank)
        error.observe(codec, message, residual, gradients)
        torch.testing.assert_close(error.sums, truth.double(), rtol=0.15, atol=0.0)
        total += error.sums
    torch.testing.assert_close(total / 8, truth.double(), rtol=0.03, atol=0.0)
    assert len(calls) == 8 * SAMPLES


# What is said of it


@ranks(2)
def test_losses_that_nobody_would_look_at_are_refused() -> None:
    word: Any = "3"
    number: Any = 1.0
    for compression, why in ((None, "without a compression"), (Compression("int8", fallback=False), "fallback=False")):
        run = Regression(compression)
        with pytest.raises(ValueError, match=f"watch_loss: this .*Sequential is sharded .*{why}"):
            yafsdp_cc.watch_loss(run.model, 1.0)
    with pytest.raises(ValueError, match=r"'auto', which the fallback does not watch, .*: leave the call out, or name"):
        yafsdp_cc.watch_loss(Regression(Compression("auto")).model, 1.0)
    model = Regression(Compression("int8")).model
    with pytest.raises(ValueError, match=r"one number, and this loss has shape \[2\]: pass loss.mean\(\)"):
        yafsdp_cc.watch_loss(model, torch.ones(2))
    with pytest.raises(TypeError, match="a tensor of one element, or a float; got '3'"):
        yafsdp_cc.watch_loss(model, word)
    with pytest.raises(TypeError, match="the model first and then its loss; got 1"):
        yafsdp_cc.watch_loss(number, model)


# Weights that are told of changes


def of_weights() -> tuple[float, str]:
    run = Regression(Compression("fp32", weights="loud"), zero_stage=2)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    losses = run.train(optimizer, 40)
    sent = yafsdp_cc.counters_of(run.model).gathered_bytes
    run.train(optimizer, 1)
    exact = 4 * WIDTH * WIDTH // 2
    assert yafsdp_cc.counters_of(run.model).gathered_bytes - sent == exact
    assert yafsdp_cc.plan_of(run.model).communication.gather_forward == exact
    run.model[0].unshard()
    seen = run.model[0].weight.detach().clone()
    first = seen.clone()
    dist.broadcast(first, 0)
    assert seen.equal(first)
    return losses[-1] / losses[0], run.why


@pytest.mark.filterwarnings("ignore:gradients=")
def test_weights_whose_changes_say_less_than_nothing_are_gathered():
    for end, why in on_ranks(2, of_weights):
        assert end < 1e-3
        assert why.startswith("messages of weight deltas of '0.weight' and what shares its buffer, in loud, keep -")
        assert why.endswith(": exact from now on")


# What ranks have to agree on


@pytest.mark.parametrize("more", [{"overrides": {"0.weight": "int4"}}, {"weights": "int4"}])
@ranks(2)
def test_ranks_judge_together_though_one_sends_no_message(more: dict[str, Any]) -> None:
    """One rank owns all that is encoded: it has no message of gradients, and it alone has one of weights."""
    run = Regression(Compression("fp32", **more), ownership=["0.weight"], zero_stage=2)
    losses = run.train(torch.optim.SGD(run.model.parameters(), lr=0.1), 7)
    assert losses[-1] < losses[0]
    assert not run.chosen


def graph_held_by_one() -> dict[str, str]:
    run = Regression(Compression("loud"))
    held = run.model(torch.randn(4, WIDTH))  # for which no backward ever comes
    if dist.get_rank():
        del held
    run.train(torch.optim.SGD(run.model.parameters(), lr=0.1), 6)
    return run.chosen


@pytest.mark.filterwarnings("ignore:gradients=")
def test_ranks_go_back_together_though_one_holds_a_graph():
    assert on_ranks(2, graph_held_by_one, timeout=30) == [{"0": "int4"}] * 2


def save_that_fails_on_one(folder: Any) -> dict[str, str]:
    run = Regression(Compression("loud"))
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.train(optimizer, 2)  # the second is looked at, and not judged yet
    with pytest.raises((TypeError, ValueError), match=r"extra\['thing'\] is a object"):
        yafsdp_cc.save(folder / "step", run.model, optimizer, thing=object() if dist.get_rank() else 1)
    run.train(optimizer, 2)
    return run.chosen


@pytest.mark.filterwarnings("ignore:gradients=")
def test_a_save_that_one_rank_fails_is_refused_by_all_before_a_judgement(tmp_path):
    assert on_ranks(2, save_that_fails_on_one, tmp_path, timeout=30) == [{"0": "int4"}] * 2


# Gradients that do not grow, though messages do


def always_alike(beta: float, micros: int, steps: int) -> dict[str, str]:
    run = Regression(Compression("onebit"))
    optimizer = OneBitAdam(run.model.parameters(), lr=0.0, betas=(beta, 0.999), warmup_steps=1)
    gradient = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5))
    for _ in range(steps):
        for micro in range(micros):
            run.model.set_requires_gradient_sync(micro == micros - 1)
            (run.model(torch.eye(WIDTH)) * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return run.chosen


@pytest.mark.parametrize(("beta", "micros", "steps"), [(0.95, 8, 42), (0.99, 1, 220)])
def test_a_momentum_that_fills_is_no_gradient_that_grows(beta, micros, steps):
    assert on_ranks(2, always_alike, beta, micros, steps)[0] == {}


def another_form(folder: Any, form: str) -> list[dict[str, str]]:
    """The codecs of a run that goes on with a momentum, of its own gradients and of a checkpoint's."""

    def train(run: Regression, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            (run.model(torch.eye(WIDTH)) * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    settings: dict[str, Any] = {"lr": 0.0, "betas": (0.99, 0.999)}
    kind = partial(OneBitAdam, warmup_steps=1, form=form) if form else torch.optim.AdamW
    gradient = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5))
    run, loaded = Regression(Compression("onebit")), Regression(Compression("onebit"))
    optimizer = kind(run.model.parameters(), **settings)
    train(run, optimizer, 22)
    yafsdp_cc.save(folder / form, run.model, optimizer)
    del optimizer
    for each in (run, loaded):
        momentum = OneBitAdam(each.model.parameters(), warmup_steps=1, **settings)
        if each is loaded:
            yafsdp_cc.load(folder / form, each.model, momentum)
        train(each, momentum, 112)
    return [run.chosen, loaded.chosen]


@pytest.mark.filterwarnings("ignore:gradients=")
@pytest.mark.parametrize("form", ["", "gradient"])
def test_a_momentum_after_gradients_is_no_gradient_that_grows(form, tmp_path):
    assert on_ranks(2, another_form, tmp_path, form)[0] == [{}, {}]


def three_forwards() -> dict[str, str]:
    run = Regression(Compression("loud"))
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for _ in range(4):
        sum(run.model(torch.randn(4, WIDTH)).square().mean() for _ in range(3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run.chosen


@pytest.mark.filterwarnings("ignore:gradients=")
def test_a_look_waits_for_the_backward_of_several_forwards():
    assert on_ranks(2, three_forwards)[0] == {"0": "int4"}


def scale_that_grows() -> dict[str, str]:
    run = Regression(Compression("int8"))
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_factor=16.0, growth_interval=15)
    yafsdp_cc.follow_scaler(run.model, scaler)
    for _ in range(52):  # the look at the 30th is judged when the scale has grown
        scaler.scale(run.model(torch.eye(WIDTH)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return run.chosen


def test_a_loss_scale_that_grows_is_no_gradient_that_grows():
    assert on_ranks(2, scale_that_grows)[0] == {}


def counters_that_users_reset() -> dict[str, str]:
    run = Regression(Compression("loud"))
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for _ in range(6):
        run.train(optimizer, 1)
        yafsdp_cc.counters_of(run.model).reduced_bytes = 0
    return run.chosen


@pytest.mark.filterwarnings("ignore:gradients=")
def test_counters_steer_nothing():
    assert on_ranks(2, counters_that_users_reset)[0] == {"0": "int4"}
