"""Weights that ranks near each other keep between them, and are told how they change: alike, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import yafsdp_cc
from tests.ranks import on_ranks
from tests.soak import also
from tests.streams import streams
from tests.wire.changes import BF16, gathered, is_exact, masters, told, train
from tests.wire.ledger import loss_of
from tests.wire.near import look, near, net, same, seen, whole
from yafsdp_cc import Compression
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.engine.near import NearShard
from yafsdp_cc.optim import OneBitAdam
from yafsdp_cc.wire.codec import codec_of


def shards(model: nn.Module) -> list[NearShard]:
    units = root_of(model).units
    found = [unit.second for unit in units if isinstance(unit.second, NearShard)]
    assert len(found) == len(units)
    return found


# The same as with whole weights on every rank


def as_with_whole_weights(codec: str, count: int, mesh_of: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_of) if mesh_of else None
    world = (mesh_of or (dist.get_world_size(),))[-1]
    for policy in (None, BF16):
        model, twin = (make(codec, mesh=mesh, mp_policy=policy) for make in (lambda c, **m: near(c, count, **m), whole))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
        for step in range(5):
            losses = [train(each, optimizer, step) for each, optimizer in zip((model, twin), optimizers, strict=True)]
            assert losses[0] == losses[1]
            assert same(seen(model), seen(twin))
            if step == 3:
                with torch.inference_mode():
                    assert same(look(model), look(twin))
                assert not is_exact(model, seen(model))
        assert same(masters(model), masters(twin))
        look(model), look(twin)
        place = root_of(model).gather.rank % count
        for mine, unit in zip(shards(model), root_of(twin).units, strict=True):
            for part, kept in zip(mine.parts, unit.home.wholes, strict=True):
                assert part.numel() == kept.numel() // count
                assert part.view(world // count, -1).equal(kept.view(world // count, count, -1)[:, place])


@pytest.mark.parametrize(
    ("world", "count", "mesh", "codec"),
    [
        (4, 2, (), "int4"),
        (4, 2, (), "ternary"),
        also(6, 2, (), "onebit"),
        also(6, 3, (), "int8"),
        also(8, 2, (2, 4), "fp8"),
    ],
)
def test_forwards_and_backwards_see_what_they_see_where_every_rank_keeps_all(world, count, mesh, codec):
    """All near groups so keep the same bits: each is compared with what its own ranks keep whole, which is alike."""
    on_ranks(world, as_with_whole_weights, codec, count, mesh)


def alike_everywhere() -> None:
    model = near("ternary", mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        train(model, optimizer, step)
    look(model)
    for second in shards(model):
        for part in second.parts:
            everywhere = [torch.empty_like(part) for _ in range(4)]
            dist.all_gather(everywhere, part)
            assert everywhere[0].equal(everywhere[2])
            assert everywhere[1].equal(everywhere[3])
            assert not everywhere[0].equal(everywhere[1])


def test_near_groups_keep_the_same_bits():
    on_ranks(4, alike_everywhere)


def run_again() -> None:
    model, twin = near(model=net(rerun=True)), whole(model=net(rerun=True))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for step in range(4):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            each.set_requires_gradient_sync(False)
            loss_of(each, 10 + step).backward()
            each.set_requires_gradient_sync(True)
            train(each, optimizer, step)
        assert same(seen(model), seen(twin))
    assert same(masters(model), masters(twin))


def test_with_checkpointed_activations_and_micro_batches():
    on_ranks(4, run_again)


class TwoKinds(nn.Module):
    """A unit of two buffers, one of which may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(40, 64), nn.Linear(40, 64).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.one.weight.detach().clone(), self.other.weight.detach().clone()]
        out: Tensor = (self.one(x) + self.other(x.bfloat16()))[:, :40]
        return out


def two_kinds(**more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(TwoKinds() for _ in range(3)))
    for block in model:
        block.other.requires_grad_(False)
    return near(model=model, units=[TwoKinds], **more)


def of_two_buffers() -> None:
    model, twin = two_kinds(), two_kinds(reshard_after_forward=None, zero_stage=2)
    optimizers = [torch.optim.SGD((p for p in each.parameters() if p.requires_grad), lr=0.1) for each in (model, twin)]
    for step in range(6):
        if step == 3:
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                for block in each:
                    block.other.requires_grad_(True)
                optimizer.add_param_group({"params": [block.other.weight for block in each]})
        before = gathered(model)
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            train(each, optimizer, step)
        for one, other in zip(model, twin, strict=True):
            assert all(mine.equal(theirs) for mine, theirs in zip(one.seen, other.seen, strict=True))
        if step == 2:  # near ranks alone give what is frozen
            wire, message, frozen = root_of(model).plan.wire, codec_of("int4").message_bytes(768), 2 * 768 * 2
            assert wire.gather_forward == 3 * (message + 2 * 768 * 4) + 2 * frozen  # nobody shares the second's slot
            assert wire.gather_forward + wire.gather_backward - wire.second == 3 * message
            there = frozen  # of the first, since the backward of the last step
            assert gathered(model) - before == wire.gather_forward + wire.gather_backward - there
    assert all(not block.seen[1].equal(block.other.weight.full_tensor()) for block in model)
    assert same(masters(model), masters(twin))


def test_units_of_several_buffers_some_frozen():
    on_ranks(4, of_two_buffers)


def offloaded() -> None:
    for policy in (None, BF16):
        model, twin = (make("int4", offload_policy=CPUOffloadPolicy(), mp_policy=policy) for make in (near, whole))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
        for step in range(3):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                train(each, optimizer, step)
            assert same(look(model), look(twin))
        assert not is_exact(model, seen(model))


def test_shards_may_be_in_host_memory():
    on_ranks(4, offloaded)


# What it costs


def counted() -> None:
    for policy, size in ((None, 4), (BF16, 2)):
        model = near(mp_policy=policy)
        chunks = [flat.layout.chunk for unit in root_of(model).units for flat in unit.flats]
        messages = [codec_of("int4").message_bytes(chunk) for chunk in chunks]
        # Two far ranks keep a chunk, so each is told by one message; near ranks give each other two chunks.
        far, near_by = sum(messages), 2 * size * sum(chunks)
        # In the backward all but the two units that are there, of five that take turns in two slots.
        again = near_by - 2 * size * sum(chunks[-2:])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = 0

        def sent(model: nn.Module = model) -> int:
            nonlocal before
            now = gathered(model)
            before, total = now, now - before
            return total

        plan = yafsdp_cc.plan_of(model)
        assert (plan.wire.gather_forward, plan.wire.gather_backward) == (far + near_by, again)
        assert plan.wire.second == near_by + again
        assert f"({near_by + again:,} bytes) stays among ranks near each other" in str(plan)
        assert far < size * sum(chunks) / (3.3 if size == 2 else 6.6)  # small messages are padded
        train(model, optimizer, 0)
        assert sent() == size * sum(chunks) + near_by + again  # exactly, which takes as much as among all ranks
        for step in (1, 2):
            train(model, optimizer, step)
            assert sent() == far + near_by + again
        look(model)
        assert sent() == far + near_by
        optimizer.step()  # gradients are None: nothing has changed
        look(model)
        assert sent() == near_by
        loss_of(model, 3).backward()
        optimizer.step()
        sent()
        model[1].unshard()
        assert sent() == messages[1] + 2 * size * chunks[1]
        held = model[1].weight.clone()
        assert held.equal(look(model)["1.weight"])
        assert sent() == sum(messages) - messages[1] + near_by - 2 * size * chunks[1]
        assert plan.owned_bytes == yafsdp_cc.counters_of(model).owned_bytes
        assert plan.memory["second shards"] == sum(2 * size * chunk for chunk in chunks) + 2 * sum(messages)
        assert "weights kept whole" not in plan.memory


def test_a_change_goes_to_one_rank_of_each_near_group():
    on_ranks(4, counted)


def led() -> None:
    compression = Compression("onebit", weights="int4", guard=False)
    model, twin = near(compression=compression), whole(compression=compression)
    optimizers = [OneBitAdam(each.parameters(), lr=1e-2, warmup_steps=2) for each in (model, twin)]
    early = 0
    for step in range(6):
        for each, optimizer in zip((twin, model), reversed(optimizers), strict=True):
            loss_of(each, step).backward()
            early = -gathered(each)
            optimizer.step()
            early += gathered(each)
            optimizer.zero_grad()
        assert same(look(model), look(twin))
    chunks = [unit.flats[0].layout.chunk for unit in root_of(model).units]
    assert early == sum(codec_of("int4").message_bytes(chunk) for chunk in chunks[:2])
    assert same(masters(model), masters(twin))


def test_an_optimizer_that_goes_unit_by_unit_has_the_first_told_while_it_updates_others():
    on_ranks(4, led)


def told_twice() -> None:
    model = near()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 0)
    expected = look(model)
    loss_of(model, 1).backward()
    for _ in range(2):
        optimizer.step()
        for unit in root_of(model).units:
            unit.tell()
        now = masters(model)
        expected = {name: told("int4", now[name], weight) for name, weight in expected.items()}
    before = gathered(model)
    assert same(look(model), expected)
    assert gathered(model) - before == sum(2 * 4 * unit.flats[0].layout.chunk for unit in root_of(model).units)


def test_told_twice_before_anything_is_gathered():
    on_ranks(4, told_twice)


def races(rerun: bool) -> None:
    with streams() as watched:
        model = near(model=net(rerun))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        for step in range(3):
            train(model, optimizer, step)
            look(model)
            list(model.modules())[-1].unshard()
        for codec in ("int4", None):
            led = near(model=net(rerun), compression=Compression("int8", weights=codec, guard=False))
            family = OneBitAdam(led.parameters(), lr=1e-2, warmup_steps=1)
            for step in range(4):
                train(led, family, step)
            list(led.modules())[-1].set_reshard_after_forward(False)  # while the first are told, or gathered
            look(led)
    assert watched.accesses > 1000


@pytest.mark.parametrize("rerun", [False, also(True)])
def test_nothing_races_on_streams(rerun):
    on_ranks(4, races, rerun)


def ahead() -> None:
    model = near()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 0)
    last = []
    for layer in model:
        layer.register_forward_hook(lambda *_: last.append(root_of(model).journal._last[-1]))
    look(model)
    assert last == ["change 2", "change 3", "change 4", "gather 4", "gather 4"]


def test_what_comes_from_afar_is_under_way_one_forward_before_what_near_ranks_give():
    on_ranks(4, ahead)
