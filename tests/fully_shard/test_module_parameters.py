"""What ``parameters()`` give in a forward, of other units in their dtype; and outside, sharded ones to what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import yafsdp_cc
from tests.fully_shard.programs import BF16, AsksInTheModel
from tests.models import VOCABULARY, WIDTH, Mlp, Transformer
from tests.ranks import ranks
from tests.subclasses import Float8Weight
from tests.twins import numbers, same_gradients, seeded, square, whole


class LooksAtItsEmbedding(AsksInTheModel):
    def forward(self, tokens: Tensor) -> Any:  # a weight comes out beside the logits
        weight = dict(self.named_parameters())["embed.weight"]
        assert isinstance(weight, nn.Parameter)
        assert isinstance(weight, DTensor)
        assert (weight.dtype, weight.shape, weight.grad) == (torch.bfloat16, (VOCABULARY, 16), None)
        assert weight.is_floating_point()
        assert weight.requires_grad
        self.seen = weight.full_tensor().detach()
        return super().forward(tokens), weight.float().square().sum()


@ranks(2)
def test_a_forward_finds_its_dtype_in_a_parameter_of_another_unit() -> None:
    plain = seeded(LooksAtItsEmbedding).embed.weight.detach().bfloat16()
    model = yafsdp_cc.shard(seeded(LooksAtItsEmbedding), mp_policy=BF16, units=["Asks", "embed"])
    output, penalty = model(torch.arange(14).view(2, 7))
    assert torch.equal(model.seen, plain)
    assert model.dtype == torch.float32  # outside of the forward, the sharded one's
    (penalty + 0 * output.float().sum()).backward()
    gradient = whole(model.embed.weight.grad)
    assert torch.allclose(gradient, 2 * plain.float(), rtol=1e-2)


class TrainsInItsForward(Mlp):
    """Model that runs the backward of its loss itself, part by part, so that one part's logits are alive at a time."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden)
        read = hidden.detach().requires_grad_()
        loss = torch.zeros(())
        for part in read.chunk(2):
            value = self.leave(part).square().mean() / 2
            value.backward()
            loss += value.detach()
        hidden.backward(read.grad)
        return loss


@pytest.mark.parametrize("stays", [None, False])
@ranks(2)
def test_a_backward_within_the_forward_leaves_sharded_parameters(stays: bool | None) -> None:
    model, twin = seeded(TrainsInItsForward), seeded(TrainsInItsForward)
    for block in model.blocks:
        yafsdp_cc.fully_shard(block, reshard_after_forward=stays)
    yafsdp_cc.fully_shard(model, reshard_after_forward=stays)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, twin)]
    for _ in range(3):
        assert torch.allclose(model(torch.ones(4, WIDTH)), twin(torch.ones(4, WIDTH)))
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, twin)]
        assert torch.allclose(whole(norms[0]), norms[1])
        for each in optimizers:
            each.step()
            each.zero_grad()
    for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(whole(mine), right, atol=1e-6)


class TrainsAProbe(Mlp):
    """Model that trains its last layer on hidden states in its forward, and returns those."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden)
        self.leave(hidden.detach()).square().mean().backward()
        return hidden


@ranks(2)
def test_a_loss_may_use_a_root_s_weight_after_a_backward_within_the_forward() -> None:
    model, twin = seeded(TrainsAProbe), seeded(TrainsAProbe)
    for block in model.blocks:
        yafsdp_cc.fully_shard(block)
    yafsdp_cc.fully_shard(model)
    for _ in range(2):
        for each in (model, twin):
            each.zero_grad()
            torch.nn.functional.linear(each(torch.ones(4, WIDTH)), each.leave.weight).square().mean().backward()
    for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), right.grad)


class SwitchesItsBlocks(Mlp):
    """Model that freezes weights of its blocks for a pass without gradients, as PEFT's ``disable_adapter()`` does."""

    def forward(self, x: Tensor) -> Tensor:
        kept = super().forward(x)
        self.switch(on=False)
        with torch.no_grad():
            reference = super().forward(x)
        self.switch(on=True)
        return kept - 0.5 * reference

    def switch(self, *, on: bool) -> None:
        for block in self.blocks:
            dict(block.named_parameters())["0.weight"].requires_grad_(on)


@ranks(2)
def test_a_forward_freezes_parameters_of_another_unit_for_a_while() -> None:
    gradients = []
    for kind in (SwitchesItsBlocks, Mlp):
        model = yafsdp_cc.shard(seeded(kind), mp_policy=BF16, units=["blocks.*"])
        model(numbers(2, WIDTH)).float().sum().backward()
        assert all(parameter.requires_grad for parameter in model.parameters())
        gradients.append([whole(parameter.grad) for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


class LooksAtItsBlocks(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: parameter.dtype for name, parameter in self.named_parameters()}
        return super().forward(x)


@ranks(2)
def test_a_forward_finds_its_dtype_in_parameters_that_are_gathered_in_another() -> None:
    for policy, dtype in ((MixedPrecisionPolicy(), torch.float32), (BF16, torch.bfloat16)):
        model = seeded(LooksAtItsBlocks)
        for block in model.blocks:
            block[0].weight = nn.Parameter(Float8Weight(block[0].weight.detach()))
        yafsdp_cc.shard(model, units=["blocks.*"], mp_policy=policy)
        square(model, numbers(2, WIDTH)).backward()
        assert set(model.seen.values()) == {dtype}, model.seen


TOKENS = torch.arange(14).view(2, 7)


def _fully_shard() -> Any:
    model: Any = seeded(Transformer)
    for block in model.blocks:
        yafsdp_cc.fully_shard(block)
    return yafsdp_cc.fully_shard(model)


def _is_sharded(model: nn.Module) -> bool:
    return all(isinstance(each, DTensor) for each in model.parameters())


@ranks(2)
def test_between_a_forward_and_its_backward_what_changes_parameters_changes_the_sharded_ones() -> None:
    model = _fully_shard()
    square(model, TOKENS).backward()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    loss = square(model, TOKENS)
    assert not _is_sharded(model)
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(whole(p.grad), gradients[name]) for name, p in model.named_parameters())
    square(model, TOKENS)
    other = seeded(Transformer, 1).state_dict()
    model.load_state_dict(other)
    assert all(torch.equal(whole(value), other[name]) for name, value in model.state_dict().items())
    square(model, TOKENS)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    square(model, TOKENS)
    model.requires_grad_(False)
    model.reshard()
    assert _is_sharded(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@ranks(2)
def test_whole_weights_are_complete_where_parameters_were_unsharded(tmp_path: Path) -> None:
    model, plain = _fully_shard(), seeded(Transformer).state_dict()
    for shows in (lambda: square(model, TOKENS), model.unshard):
        shows()
        full = yafsdp_cc.full_state_dict(model)
        assert dist.get_rank() or full.keys() == plain.keys()
        shows()
        yafsdp_cc.save_safetensors(tmp_path / shows.__name__, model)
        shows()
        with yafsdp_cc.whole_parameters(model, write=True):
            assert torch.equal(model.head.weight, plain["head.weight"])
            with torch.no_grad():
                model.head.weight.add_(1)
        plain["head.weight"] = plain["head.weight"] + 1
        assert torch.equal(whole(model.head.weight.detach()), plain["head.weight"])


@pytest.mark.parametrize("seen", [True, False], ids=["counted", "to its data"])
@ranks(2)
def test_a_write_to_an_unsharded_weight_is_lost_with_an_error(seen: bool) -> None:
    model, plain = _fully_shard(), seeded(Transformer)
    for resharded in (False, True):  # in buffers of their own, and in those that blocks share
        for each in model.modules():
            if isinstance(each, FSDPModule):
                each.set_reshard_after_forward(resharded, recurse=False)
        for unit, weight in ((model, "head.weight"), (model.blocks[1], "blocks.1.qkv.weight")):
            unit.unshard()
            with torch.no_grad():
                shown = dict(model.named_parameters())[weight]
                (shown if seen else shown.data).add_(1)
                torch.testing.assert_close(shown.data, plain.get_parameter(weight) + 1)  # reads stay as they are
            unit.reshard()
            with pytest.raises(
                RuntimeError, match=r"or what came after its unshard\(\), has written to a weight in place"
            ):
                model(TOKENS)
            torch.testing.assert_close(model(TOKENS), plain(TOKENS))


@ranks(2)
def test_data_of_an_unsharded_weight_is_not_assigned() -> None:
    model = _fully_shard()
    model.unshard()
    with pytest.raises(RuntimeError, match=r"'head\.weight' shows its gathered weights .* Call reshard\(\)"):
        model.head.weight.data = model.head.weight.data * 2


@ranks(2)
def test_an_optimizer_of_unsharded_weights_is_refused() -> None:
    model = _fully_shard()
    with torch.no_grad():
        model(TOKENS)
    assert _is_sharded(model)
    for shows, name in ((lambda: square(model, TOKENS), "embed.weight"), (model.unshard, "embed.weight")):
        shows()
        with pytest.raises(RuntimeError, match=rf"parameters\(\) showed '{name}' unsharded"):
            torch.optim.SGD(model.parameters()).step()
        model.reshard()
        torch.optim.SGD(model.parameters()).step()


@ranks(2)
def test_a_frozen_teacher_stays_sharded_behind_a_forward_so_that_it_can_follow_the_student() -> None:
    teacher, student = _fully_shard().requires_grad_(False), _fully_shard()
    target = teacher(TOKENS)  # with gradients enabled: no backward comes to it
    assert _is_sharded(teacher)
    (student(TOKENS) - target - 1).square().mean().backward()
    torch.optim.SGD(student.parameters(), lr=0.1).step()
    with torch.no_grad():
        for followed, parameter in zip(teacher.parameters(), student.parameters(), strict=True):
            followed.lerp_(parameter, 0.5)
    plain = seeded(Transformer)
    (plain(TOKENS) - target - 1).square().mean().backward()
    for (name, before), followed in zip(plain.named_parameters(), teacher.parameters(), strict=True):
        torch.testing.assert_close(whole(followed), before.detach() - 0.05 * before.grad, msg=name)


def _penalty(model: nn.Module, name: str) -> Tensor:
    return (dict(model.named_parameters())[name] - 1).square().sum()


@pytest.mark.parametrize("name", ["norm.bias", "head.weight"])
@ranks(2)
def test_a_penalty_with_a_backward_of_its_own_comes_before_the_loss_s(name: str) -> None:
    model, plain = _fully_shard(), seeded(Transformer)
    (square(plain, TOKENS) + _penalty(plain, name)).backward()
    for _ in range(2):
        loss, own = square(model, TOKENS), _penalty(model, name)
        own.backward()
        loss.backward()
        torch.testing.assert_close(whole(model.get_parameter(name).grad), plain.get_parameter(name).grad)
        model.zero_grad()
        loss, own = square(model, TOKENS), _penalty(model, name)
        loss.backward()
        with pytest.raises(RuntimeError, match=rf"gradient of the unsharded '{name}' came too late"):
            own.backward()
        model.zero_grad()
    model.set_requires_gradient_sync(False)
    loss, own = square(model, TOKENS), _penalty(model, name)
    loss.backward()
    own.backward()  # is reduced together with the next micro-batch
    model.set_requires_gradient_sync(True)
    square(model, TOKENS).backward()
    square(plain, TOKENS).backward()
    torch.testing.assert_close(whole(model.get_parameter(name).grad), plain.get_parameter(name).grad)


@ranks(2)
def test_a_distance_from_a_copy_is_that_of_sharded_parameters_or_refused() -> None:
    """Elastic weight consolidation and its like: ``parameters()`` and the copies are not of a kind after a forward."""
    model, plain = _fully_shard(), seeded(Transformer)
    taken, trained = list(model.parameters()), list(plain.parameters())
    copies, starts = ([0.5 * p.detach() for p in parameters] for parameters in (taken, trained))

    def far(parameters: Any, copies: list[Tensor]) -> Any:
        return sum((p - copy).square().sum() for p, copy in zip(parameters, copies, strict=True))

    (square(plain, TOKENS) + far(trained, starts)).backward()
    truth = {name: p.grad for name, p in plain.named_parameters()}
    for shows in (lambda: square(model, TOKENS), model.unshard):
        shows()
        says = r"'embed.weight'.*have the gathered weight, .*: take list\(model.parameters\(\)\) before the forward"
        with pytest.raises(NotImplementedError, match=says):
            far(model.parameters(), copies)
        with pytest.raises(NotImplementedError, match=says), torch.no_grad():
            copies[0].lerp_(next(model.parameters()), 0.5)
        with pytest.raises(NotImplementedError, match=says), torch.no_grad():
            next(model.parameters()).copy_(copies[0])
        model.reshard()
    penalty = far(model.parameters(), copies)
    (square(model, TOKENS) + penalty).backward()
    same_gradients(model, truth, within=1e-6)
    model.zero_grad()
    (square(model, TOKENS) + far(taken, copies)).backward()
    same_gradients(model, truth, within=1e-6)


@pytest.mark.parametrize("name", ["norm.bias", "head.weight", "blocks.0.up.weight"])
@ranks(2)
def test_a_penalty_of_an_unsharded_weight_is_in_the_gradient_of_its_step_or_refused(name: str) -> None:
    model, plain = _fully_shard(), seeded(Transformer)
    (square(plain, TOKENS) + _penalty(plain, name)).backward()
    for _ in range(2):
        loss = square(model, TOKENS)
        assert not _is_sharded(model)
        (loss + _penalty(model, name)).backward()
        torch.testing.assert_close(whole(model.get_parameter(name).grad), plain.get_parameter(name).grad)
        model.zero_grad()
    loss = square(model, TOKENS)
    model.blocks[0].unshard()  # its weights are in an overflow buffer: another block's are in the assigned one
    (loss + _penalty(model, name)).backward()
    torch.testing.assert_close(whole(model.get_parameter(name).grad), plain.get_parameter(name).grad)
    model.zero_grad()
    for module in (model, model.blocks[0]):
        module.unshard()
    early = _penalty(model, name)
    with pytest.raises(RuntimeError, match="came too late to be reduced"):
        (square(model, TOKENS) + early).backward()
    model.zero_grad()
    (square(model, TOKENS) + _penalty(model, name)).backward()
    torch.testing.assert_close(whole(model.get_parameter(name).grad), plain.get_parameter(name).grad)
