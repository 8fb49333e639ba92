"""Parts of a sharded model that are called from outside of its forward: an encoder, an embedding, a head."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from tests.models import CASES, VOCABULARY, WIDTH, Attention
from tests.ranks import ranks
from tests.twins import agrees, mine, same_gradients, seeded, trains_on, twins


class Encoder(nn.Module):
    """Blocks between an embedding and a norm."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed, self.norm = embed, nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Attention(WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor, failure: type[BaseException] | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if failure is not None:
            raise failure
        out: Tensor = self.norm(x)
        return out


class Model(nn.Module):
    """An encoder and a head that is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.head = Encoder(self.embed), nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(tokens))
        return out


def tokens(step: int) -> list[Tensor]:
    return [batch["tokens"] for batch in CASES["transformer"].batches(2, step)]


def by_parts(model: Any, x: Tensor) -> Tensor:
    """A loss of parts alone, of which one is called again."""
    hidden = model.encoder(x)
    loss: Tensor = (
        model.head(hidden).square().mean() + (model.embed(x) * hidden).mean() + model.encoder.norm(hidden).sum()
    )
    return loss


def by_all(model: Any, x: Tensor) -> Tensor:
    """A loss of the model and of its parts."""
    loss: Tensor = (model(x) * model.head(model.embed(x))).mean() + model(x).square().mean()
    return loss


def checkpointed(model: Any, x: Tensor) -> Tensor:
    """A loss of parts that the backward runs again."""
    hidden = checkpoint(model.encoder, x, use_reentrant=False)
    loss: Tensor = checkpoint(model.head, hidden, use_reentrant=False).square().mean()
    return loss


def sharded(**options: Any) -> Any:
    return yafsdp_cc.shard(seeded(Model), **options)


def by_fully_shard() -> Any:
    model = seeded(Model)
    for block in model.encoder.blocks:
        yafsdp_cc.fully_shard(block)
    return yafsdp_cc.fully_shard(model)


WAYS: dict[str, Callable[[], Any]] = {
    "shard": sharded,
    "one unit": lambda: sharded(units="encoder.blocks.*", zero_stage=2),
    "fully_shard": by_fully_shard,
}


@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_parts_train_like_plain_ones(way: str) -> None:
    for loss in (by_parts, by_all, checkpointed):
        model, plain = WAYS[way](), seeded(Model)
        trains_on(model, plain, loss, [tokens(step) for step in range(3)], within=1e-6)
        with torch.no_grad():
            agrees(model.head, plain.head, torch.ones(1, WIDTH))
            agrees(model, plain, mine(tokens(3)))


@ranks(2)
def test_a_part_is_cast_and_accumulated_like_the_model() -> None:
    """As a method that is registered: what could be used instead of a part so far."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    model, other = sharded(mp_policy=policy), sharded(mp_policy=policy)
    other.encode = other.encoder.forward
    yafsdp_cc.register_forward_method(other, "encode")
    for step in range(2):
        found, expected = model.encoder(mine(tokens(step))), other.encode(mine(tokens(step)))
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
        for sharded_one, hidden in ((model, found), (other, expected)):
            sharded_one.set_requires_gradient_sync(step == 1)
            hidden.square().mean().backward()
    same_gradients(
        model, {name: None if p.grad is None else p.grad.full_tensor() for name, p in other.named_parameters()}
    )


@ranks(2)
def test_a_part_that_raises_and_one_in_whole_parameters() -> None:
    model, plain = twins(Model)
    for failure in (ArithmeticError, KeyboardInterrupt):  # of the second, no hook is told
        with pytest.raises(failure):
            model.encoder(mine(tokens(0)), failure=failure)
        trains_on(model, plain, by_parts, [tokens(step) for step in range(2)], within=1e-6)
    with yafsdp_cc.whole_parameters(model):
        if dist.get_rank() == 0:  # nothing is gathered: everything is there
            agrees(model.head, plain.head, torch.ones(1, WIDTH))
            assert model.head(torch.ones(1, WIDTH)).requires_grad
    yafsdp_cc.unshard_model(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    agrees(model.head, plain.head, torch.ones(1, WIDTH))


def while_held(model: Any, x: Tensor) -> Tensor:
    """A loss of parts whose weights are unsharded by hand, some of them only then."""
    units = [model] if isinstance(model, FSDPModule) else []
    hidden = model.embed(x)
    for unit in units:
        unit.unshard()
    loss: Tensor = model.head(model.encoder.norm(hidden)).sin().mean() + model.encoder(x).square().mean()
    for unit in units:
        unit.reshard()
    return loss


@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_parts_train_while_weights_are_held(way: str) -> None:
    model, plain = WAYS[way](), seeded(Model)
    for loss in (while_held, by_parts, by_all):
        trains_on(model, plain, loss, [tokens(step) for step in range(2)], within=1e-6)


@ranks(2)
def test_calls_of_parts_do_not_cost_the_model_its_prefetches() -> None:
    model = sharded()
    model(mine(tokens(0)))
    alone = events(model)
    for _ in range(2):
        model.embed(mine(tokens(0)))
        assert events(model) == alone
    blocks = [f"encoder.blocks.{index}" for index in range(3)]
    for here, following in pairwise(blocks):
        assert alone.index(f"YaFSDP::gather ({following})") < alone.index(f"YaFSDP::forward ({here})")


def events(model: nn.Module) -> list[str]:
    """All-gathers and forwards of units, in the order in which they begin, of a forward after a step."""
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.0)
    with torch.profiler.profile() as profile:
        model(mine(tokens(0)))
    spans = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [span.name for span in spans if span.name.startswith(("YaFSDP::gather", "YaFSDP::forward"))]
