"""Activations computed again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import yafsdp_cc
from tests.models import CASES, WIDTH, Block, Mlp, Part, import_models, llama
from tests.ranks import ranks
from tests.twins import inputs, means, mine, same_gradients, seeded, square, trains_on, twins, whole


@pytest.fixture(scope="module", autouse=True)
def _import_before_forking() -> None:
    import_models()


class Spans(nn.Module):
    """Recomputes spans of units, or parts of them, or ("both") parts by reentrant checkpoints within spans."""

    def __init__(self, how: str, reentrant: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        within = how in ("inside", "both")
        self.blocks = nn.ModuleList(Part(within, reentrant or how == "both") for _ in range(5))
        self.how, self.reentrant = how, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.how == "spans":
            for first in (0, 2, 4):
                span = nn.Sequential(*self.blocks[first : first + 2])
                x = checkpoint(span, x, use_reentrant=self.reentrant)
        elif self.how in ("all", "both"):
            x = checkpoint(nn.Sequential(*self.blocks), x, use_reentrant=self.reentrant)
            for number in (0, 2, 0) if self.how == "both" else ():  # in one buffer
                x = checkpoint(self.blocks[number], x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant) if self.how == "each" else block(x)
        return x


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", ["each", "spans", "all", "inside", "both"])
@ranks(2)
def test_non_reentrant_checkpointing_is_exact(how: str, reshard: bool) -> None:
    model, plain = twins(lambda: Spans(how), units=[Part], reshard_after_forward=reshard)
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)])


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("how", ["each", "all", "whole"])
@ranks(2)
def test_what_is_run_again_is_cast_as_in_fsdp2(how: str, early_stop: bool) -> None:
    """Inputs in fp32 meet weights in bf16, and outputs are cast back, for what follows in the same checkpoint."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    found = []
    for fully_shard in (torch_fully_shard, yafsdp_cc.fully_shard):
        # FSDP2 of torch 2.11 fails at what is run again within the model, which it does not cast: it keeps all there.
        keeps = fully_shard is torch_fully_shard and torch.__version__ < "2.13" and how != "whole"
        model: Any = seeded(partial(Spans, "none" if keeps else how))
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        if how == "whole":
            fully_shard(model, mp_policy=policy)
        else:
            fully_shard(model)  # in fp32, as its first layer

        def run(x: Tensor, model: Any = model) -> Tensor:
            return torch.tanh(model(x))  # which saves the model's output

        with set_checkpoint_early_stop(early_stop):
            x = mine(inputs())
            out = checkpoint(run, x, use_reentrant=False) if how == "whole" else run(x)
        out.square().mean().backward()
        found.append({name: whole(each.grad) for name, each in model.named_parameters()})
    truth, ours = found
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)


@ranks(2)
def test_whole_models_in_two_checkpoints_of_one_backward() -> None:
    model, plain = twins(lambda: Spans("whole"), units=[Part])

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        halves = [checkpoint(lambda half: model(half).tanh(), half, use_reentrant=False) for half in x.chunk(2)]
        return torch.cat(halves).square().mean()

    batches = inputs()
    loss(model, mine(batches)).backward()
    same_gradients(model, means(plain, loss, batches), within=1e-6)


@ranks(2)
def test_a_unit_run_twice_in_one_checkpoint() -> None:
    model, plain = twins(Twice, units=[Part])
    for order in ((0, 1, 0), (0, 0), (0, 2, 2), (0, 1, 2, 0, 3), (2, 0, 1, 0, 2), (0, 2, 0, 1, 3, 2)):
        batches = inputs()
        _ordered(model, mine(batches), order).backward()
        same_gradients(model, means(plain, lambda m, x, o=order: _ordered(m, x, o), batches), within=1e-6)
        model.zero_grad()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part(False, False) for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        span = nn.Sequential(*(self.blocks[index] for index in order))
        out: Tensor = checkpoint(span, x, use_reentrant=False)
        return out


def _ordered(model: nn.Module, x: Tensor, order: tuple[int, ...]) -> Tensor:
    return model(x, order).square().mean()


class Hooked(nn.Module):
    """A model whose hooks save tensors as they are, within a checkpoint or around one."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Part(False, False) for _ in range(4))
        self.within = within

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        if self.within:
            out = checkpoint(self._hooked_within, self.enter(x), use_reentrant=False)
        else:
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                out = checkpoint(self._branches, self.blocks[2](self.enter(x)), use_reentrant=False)
        return out

    def _hooked_within(self, x: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        x = second(first(x))
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            x = third(x)
        out: Tensor = last(x)
        return out

    def _branches(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = self.blocks[0](x)  # in the buffer of block 2
        out: Tensor = self.blocks[1](x) + constant
        return out


@pytest.mark.parametrize("within", [True, False])
@ranks(2)
def test_hooks_for_saved_tensors_beside_checkpoints(within: bool) -> None:
    model, plain = twins(lambda: Hooked(within), units=[Part])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


class Leaves(nn.Module):
    """A residual block, which may leave its weights unused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        out: Tensor = x + self.linear(x).tanh() if is_used else x
        return out


class CallsOneTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Leaves() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        is_used = dist.get_rank() == 1
        x = self.enter(x)
        for number, used in ((2, True), (0, True), (2, is_used)):  # blocks 0 and 2 have one weight buffer
            x = checkpoint(self.blocks[number], x, used, use_reentrant=False)
        return x


@ranks(2)
def test_a_rank_may_leave_unused_what_another_computes_again() -> None:
    """Ranks gather in one order whether or not they have computed anything again."""
    model, plain = twins(CallsOneTwice, units=[Leaves])
    square(model, inputs()[0]).backward()
    square(plain, inputs()[0]).backward()  # on each rank in its own way
    for name, parameter in model.named_parameters():
        if (truth := plain.get_parameter(name).grad) is not None:
            dist.all_reduce(truth)
            torch.testing.assert_close(whole(parameter.grad), truth / 2)


@pytest.mark.parametrize("how", ["each", "spans", "all", "inside"])
@ranks(2)
def test_reentrant_checkpointing_is_right_or_refused_by_name(how: str) -> None:
    model, plain = twins(lambda: Spans(how, reentrant=True), units=[Part])
    batches = inputs()
    try:
        square(model, mine(batches)).backward()
    except RuntimeError as refusal:
        said = str(refusal)
    else:
        said = ""
        same_gradients(model, means(plain, square, batches))
    assert not said or "use_reentrant" in said


@pytest.mark.parametrize("keeps", [False, True])
@ranks(2)
def test_reentrant_checkpointing_of_the_model_is_refused(keeps: bool) -> None:
    """Also where the graph of another forward is still there."""
    model, _ = twins(Mlp)
    x = mine(inputs()).requires_grad_()
    kept = model(x) if keeps else None
    out = checkpoint(model, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"the model is run again by reentrant .* use_reentrant=False"):
        out.sum().backward()
    del kept


@pytest.mark.parametrize("reentrant", [True, False])
@ranks(2)
def test_gradients_of_a_backward_that_raised_are_dropped(reentrant: bool) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError

    model, plain = twins(lambda: Spans("inside", reentrant), units=[Part])
    square(model, mine(inputs())).backward()
    same_gradients(model, means(plain, square, inputs()))
    model.zero_grad()
    handle = model.blocks[1].register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    with pytest.raises(ArithmeticError):
        square(model, mine(inputs(step=1))).backward()
    handle.remove()
    model.zero_grad()
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


@ranks(2)
def test_checkpointing_of_hugging_face_models() -> None:
    def build() -> nn.Module:
        model: Any = llama()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    model, plain = twins(build)
    case = CASES["llama"]
    trains_on(model, plain, case.loss, [case.batches(2, step) for step in range(2)])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@ranks(2)
def test_checkpoints_draw_the_same_dropout_again() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(int(1000 * x.abs().sum()))
        return square(model, x)

    model, plain = twins(Dropping, units=[Block])
    trains_on(model, plain, loss, [inputs(step=step) for step in range(2)], within=1e-6)
