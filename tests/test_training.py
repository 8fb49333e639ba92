"""What real training does, a test per habit: against the plain model in the same rank, bit for bit where it can be."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # by the optimizers, at a second for every rank if not before the fork
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from tests import reference
from tests.models import CASES, LENGTH, WIDTH, Attention, Mlp, Transformer, import_models, llama, next_token
from tests.ranks import on_ranks

Loss = Callable[[nn.Module, Any], Tensor]
Means = dict[str, Tensor | None]


@pytest.fixture(scope="module", autouse=True)
def _import_before_forking() -> None:
    import_models()


# -- helpers ----------------------------------------------------------------------------------------------------------


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def twins(build: Callable[[], nn.Module], **options: Any) -> tuple[Any, nn.Module]:
    """The same model sharded and plain."""
    return yafsdp_cc.shard(seeded(build), **options), seeded(build)


def mine(batches: list[Any]) -> Any:
    return batches[dist.get_rank()]


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor()
    return found


def means(plain: nn.Module, loss: Loss, batches: list[Any]) -> Means:
    return reference.mean_gradients(plain, loss, batches)[1]


def added(*terms: Means) -> Means:
    def add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return other if one is None else one if other is None else one + other

    return functools.reduce(lambda a, b: {name: add(a[name], b[name]) for name in a}, terms)


def same_gradients(model: nn.Module, truth: Means, within: float = 0.0) -> None:
    """Every gradient, ``within`` a norm-relative distance or bit for bit."""
    wrong = {}
    for name, parameter in model.named_parameters():
        found, expected = (None if parameter.grad is None else whole(parameter.grad)), truth[name]
        if found is None or expected is None:
            if found is not expected:
                wrong[name] = f"found {found}, not {expected}"
        elif found.dtype != expected.dtype or found.shape != expected.shape:
            wrong[name] = f"found {found.dtype} {found.shape}, not {expected.dtype} {expected.shape}"
        elif not torch.equal(found, expected) and not 0 <= reference.far_apart(found, expected) <= within:
            wrong[name] = f"off by {reference.far_apart(found, expected):.1e}"
    assert not wrong, wrong


def same_weights(model: nn.Module, plain: nn.Module, within: float = 0.0) -> None:
    for name, parameter in model.named_parameters():
        found, truth = whole(parameter.detach()), plain.get_parameter(name).detach()
        if found.is_floating_point() and found.itemsize == 1:  # torch compares those bit by bit alone
            found, truth = found.float(), truth.float()
        torch.testing.assert_close(found, truth, rtol=within, atol=within, msg=name)


def step_both(model: nn.Module, plain: nn.Module, truth: Means, optimizers: list[torch.optim.Optimizer]) -> None:
    """Step the two optimizers and empty the gradients."""
    for name, parameter in plain.named_parameters():
        parameter.grad = truth[name]
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    plain.zero_grad()


def sgd(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def numbers(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def inputs(rows: int = 3, step: int = 0) -> list[Tensor]:
    """One input per rank."""
    return [numbers(rows, WIDTH, seed=100 * step + rank) for rank in range(dist.get_world_size())]


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trains_on(model: nn.Module, plain: nn.Module, loss: Loss, steps: list[list[Any]], within: float = 0.0) -> None:
    """A step of SGD per list of batches, gradients checked in each."""
    optimizers = sgd(model, plain)
    for batches in steps:
        loss(model, mine(batches)).backward()
        truth = means(plain, loss, batches)
        same_gradients(model, truth, within)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)


def reload(plain: nn.Module, model: nn.Module) -> None:
    """The sharded weights into the plain model, so that a last bit of rounding does not pile up."""
    same_weights(model, plain, within=1e-5)
    for name, parameter in model.named_parameters():
        plain.get_parameter(name).data.copy_(whole(parameter.detach()))


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world", [2, 4])
def test_bf16_compute_sums_in_fp32_on_the_owner(world: int, reduce: torch.dtype | None) -> None:
    on_ranks(world, _bf16, reduce)


def _bf16(reduce: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce, output_dtype=torch.float32)
    model, plain = twins(Transformer, mp_policy=policy)
    optimizers = sgd(model, plain)
    case = CASES["transformer"]
    for step in range(3):
        batches = case.batches(dist.get_world_size(), step)
        low = copy.deepcopy(plain).bfloat16()
        loss = next_token(model, mine(batches))
        value, by_rank = zip(*(_low_gradients(low, batch) for batch in batches), strict=True)
        assert loss.dtype == torch.float32
        assert loss.item() == mine(list(value))
        loss.backward()
        truth = {
            name: reference.mean_in_rank_order([None if g[name] is None else g[name].float() for g in by_rank])
            for name in by_rank[0]
        }
        same_gradients(model, truth)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)


def _low_gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, Means]:
    return reference.gradients(model, lambda: _fp32_loss(model, batch))


def _fp32_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).float().flatten(0, 1), batch["next"].flatten())


class Dtypes(nn.Module):
    """fp32, bf16 and fp64 weights side by side, and a table of integers that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.table = nn.Parameter(torch.arange(WIDTH) % 5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.high(x)) + self.low(x.bfloat16()) * self.scale
        return y[:, self.table] + y


def test_several_dtypes_in_one_model() -> None:
    on_ranks(2, _several_dtypes)


def _several_dtypes() -> None:
    model, plain = twins(lambda: nn.Sequential(Dtypes(), Dtypes(), nn.Linear(WIDTH, 3)), units=[Dtypes])
    for name, parameter in model.named_parameters():
        assert parameter.dtype == plain.get_parameter(name).dtype, name
    assert torch.equal(whole(model[0].table), plain[0].table)  # type: ignore[index, union-attr]
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)])


def test_double_precision_is_not_lost_on_the_way() -> None:
    on_ranks(2, _double)


def _double() -> None:
    model, plain = twins(lambda: Mlp().double(), units=[nn.Sequential])
    batches = [x.double() for x in inputs()]
    square(model, mine(batches)).backward()
    by_rank = [reference.gradients(plain, lambda x=x: square(plain, x))[1] for x in batches]
    same_gradients(model, {name: (by_rank[0][name] + by_rank[1][name]) / 2 for name in by_rank[0]}, within=1e-14)  # type: ignore[operator]


@pytest.mark.parametrize("world", [2, 4])
def test_scalars_empty_shards_and_parameters_of_no_elements(world: int) -> None:
    on_ranks(world, _tiny)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.one = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(1))
        self.pair, self.none = nn.Parameter(torch.randn(1, 2)), nn.Parameter(torch.empty(0, 3))
        self.odd = nn.Parameter(torch.randn(3, 7))

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, :3] @ self.odd
        return torch.tanh(x * self.scalar + self.one * self.pair.sum() + y.sum() + self.none.sum())


def _tiny() -> None:
    model, plain = twins(lambda: nn.Sequential(Tiny(), Tiny(), nn.Linear(WIDTH, 1)), units=[Tiny])
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        square(model, mine(inputs(step=step))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


# -- accumulation -----------------------------------------------------------------------------------------------------


def test_each_micro_batch_is_reduced_into_the_shard() -> None:
    on_ranks(2, _accumulate)


def _accumulate() -> None:
    model, plain = twins(Mlp)
    batches = [inputs(step=step) for step in range(3)]
    for micro in batches:
        square(model, mine(micro)).backward()
    same_gradients(model, added(*(means(plain, square, micro) for micro in batches)))


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_can_be_kept_whole_until_the_last_micro_batch(world: int) -> None:
    on_ranks(world, _no_sync)


def _no_sync() -> None:
    model, plain = twins(Mlp)
    optimizers = sgd(model, plain)
    for round_ in range(2):
        batches = [inputs(step=3 * round_ + micro) for micro in range(3)]
        before = yafsdp_cc.counters_of(model).reduced_bytes
        for micro in batches[:-1]:
            model.set_requires_gradient_sync(False)
            square(model, mine(micro)).backward()
        assert yafsdp_cc.counters_of(model).reduced_bytes == before
        for module in model.modules():  # as frameworks do
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(True, recurse=False)
        square(model, mine(batches[-1])).backward()
        truth = added(*(means(plain, square, micro) for micro in batches))
        same_gradients(model, truth, within=1e-6)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)


def test_evaluation_between_held_micro_batches() -> None:
    on_ranks(2, _evaluate_while_holding)


def _evaluate_while_holding() -> None:
    model, plain = twins(Mlp)
    first, second = inputs(step=0), inputs(step=1)
    model.set_requires_gradient_sync(False)
    square(model, mine(first)).backward()
    with torch.no_grad():
        assert torch.equal(model(mine(second)), plain(mine(second)))
    model.set_requires_gradient_sync(True)
    square(model, mine(second)).backward()
    same_gradients(model, added(means(plain, square, first), means(plain, square, second)), within=1e-6)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none: bool) -> None:
    on_ranks(2, _zero_grad, to_none)


def _zero_grad(to_none: bool) -> None:
    model, plain = twins(Mlp)
    for step in range(3):
        batches = inputs(step=step)
        square(model, mine(batches)).backward()
        same_gradients(model, means(plain, square, batches))
        model.zero_grad(set_to_none=to_none)
        for parameter in model.parameters():
            assert (parameter.grad is None) == to_none
            assert to_none or not whole(parameter.grad).any()


# -- which parameters -------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A frozen matrix with a trained low-rank addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def test_frozen_parameters_get_no_gradient_bytes() -> None:
    on_ranks(2, _lora)


def _lora() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(Lora(WIDTH) for _ in range(4)))

    model, plain = twins(build, units=[Lora])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])
    reduced = _reduced_bytes(model)
    for module in model:
        module.base.requires_grad_(True)
        assert module.base.weight.grad is None
    for module in plain:  # type: ignore[attr-defined]
        module.base.requires_grad_(True)
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])
    frozen_bytes = 4 * sum(layer.base.weight.numel() for layer in plain)  # type: ignore[attr-defined]
    trained_bytes = 4 * sum(p.numel() for p in plain.parameters()) - frozen_bytes
    assert reduced <= trained_bytes + 4 * 4 * 2 * 2 * 32 * 4  # four units, padding of two pieces on each of two ranks
    assert _reduced_bytes(model) > reduced
    assert reduced < frozen_bytes


def _reduced_bytes(model: nn.Module) -> int:
    """Of one step."""
    before = yafsdp_cc.counters_of(model).reduced_bytes
    square(model, mine(inputs())).backward()
    model.zero_grad()
    found: int = yafsdp_cc.counters_of(model).reduced_bytes - before
    return found


@pytest.mark.parametrize("reshard", [None, False])
def test_frozen_weights_in_slots_of_their_own_are_gathered_once(reshard: bool | None) -> None:
    on_ranks(2, _gathered_once, reshard)


def _gathered_once(reshard: bool | None) -> None:
    def build() -> nn.Module:
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)))
        for block in blocks:
            block[0].requires_grad_(False)  # type: ignore[index]
        return blocks

    model, plain = twins(build, units=["*"], reshard_after_forward=reshard)
    one = WIDTH * WIDTH * 4 // 2  # what a rank sends for one matrix
    counters = yafsdp_cc.counters_of(model)
    sent = []
    for step in range(3):
        before = counters.gathered_bytes
        trains_on(model, plain, square, [inputs(step=step)])
        sent.append(counters.gathered_bytes - before)
    if reshard is False:
        assert sent == [8 * one, 4 * one, 4 * one]
        assert yafsdp_cc.plan_of(model).wire.gather_forward == 4 * one
    else:  # four blocks, and two of them again; the frozen halves of those two are still there in the next step
        assert sent == [12 * one, 10 * one, 10 * one]


def test_a_frozen_model_passes_gradients_to_its_input() -> None:
    on_ranks(2, _all_frozen)


def _all_frozen() -> None:
    model, plain = twins(lambda: Mlp().requires_grad_(False))
    x = mine(inputs()).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    square(model, x).backward()
    square(plain, twin).backward()
    assert torch.equal(x.grad, twin.grad)
    assert all(parameter.grad is None for parameter in model.parameters())
    flags = 8 * (len(list(model.parameters())) + 16)  # who used what, and whether ranks agree, to and fro
    assert yafsdp_cc.counters_of(model).reduced_bytes <= flags


def test_training_norms_and_biases_alone() -> None:
    on_ranks(2, _biases_alone)


def _biases_alone() -> None:
    """Nothing reaches the first unit's gate: its matrices are frozen and its input needs no gradient."""

    def build() -> nn.Module:
        model = nn.Sequential(*(Part(False, False) for _ in range(4)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or "bias" in name)
        return model

    model, plain = twins(build, units=[Part])
    trains_on(model, plain, square, [inputs(step=step) for step in range(4)])
    assert yafsdp_cc.counters_of(model).spills == 0


def test_freezing_and_unfreezing_between_steps() -> None:
    on_ranks(2, _freeze)


def _freeze() -> None:
    model, plain = twins(Mlp)
    for frozen in (
        {"blocks.0.0.weight"},
        {"blocks.0.0.weight", "leave.bias", "enter.weight"},
        set(),
        {"blocks.1.2.bias"},
    ):
        for each in (model, plain):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(name not in frozen)
        trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


@pytest.mark.parametrize("world", [2, 4])
def test_tied_weights(world: int) -> None:
    on_ranks(world, _tied)


def _tied() -> None:
    model, plain = twins(lambda: Transformer(tied=True))
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    case = CASES["transformer"]
    trains_on(model, plain, next_token, [case.batches(dist.get_world_size(), step) for step in range(3)])
    assert model.head.weight is model.embed.weight


def test_weights_tied_across_units() -> None:
    on_ranks(2, _tied_across)


def _tied_across() -> None:
    def build() -> nn.Module:
        model = Mlp()
        model.blocks[2][0].weight = model.blocks[0][0].weight  # type: ignore[index]
        return model

    model, plain = twins(build, units=[nn.Sequential])
    assert model.blocks[2][0].weight is model.blocks[0][0].weight
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)], within=1e-6)


class Optional(nn.Module):
    """Uses one of its two matrices, or both, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use: str) -> Tensor:
        y = self.always(x)
        if "1" in use:
            y = y + self.one(x)
        if "2" in use:
            y = y + self.other(x)
        return torch.tanh(y)


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Optional() for _ in range(3))

    def forward(self, x: Tensor, uses: list[str]) -> Tensor:
        for block, use in zip(self.blocks, uses, strict=True):
            x = block(x, use)
        return x


def used(model: nn.Module, batch: tuple[Tensor, list[str]]) -> Tensor:
    return model(*batch).square().mean()


@pytest.mark.parametrize("world", [2, 4])
def test_parameters_unused_on_all_or_some_ranks(world: int) -> None:
    on_ranks(world, _unused)


def _unused() -> None:
    model, plain = twins(Options, units=[Optional])
    world = dist.get_world_size()
    everywhere = [["12", "12", "12"]] * world
    nowhere = [["", "1", "2"]] * world
    first_only = [["1", "2", "12"]] + [["2", "", ""]] * (world - 1)
    last_only = [["", "", ""]] * (world - 1) + [["12", "1", "2"]]
    steps = [everywhere, nowhere, first_only, last_only, nowhere, everywhere]
    trains_on(model, plain, used, [list(zip(inputs(step=s), uses, strict=True)) for s, uses in enumerate(steps)])


class Choice(nn.Module):
    """All that is trained may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.extra = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, use: str) -> Tensor:
        y = self.base(x)
        return torch.tanh(y + self.extra(x) if use else y)


class Choices(nn.Module):
    """An entry that is frozen, units of choice, and an end that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Choice() for _ in range(3))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, uses: list[str]) -> Tensor:
        x = self.enter(x)
        for block, use in zip(self.blocks, uses, strict=True):
            x = block(x, use)
        out: Tensor = self.leave(x)
        return out


@pytest.mark.parametrize("first", [["", "x", "x"], ["", "", "x"], ["x", "", ""], ["", "x", ""], ["", "", ""]])
def test_ranks_that_use_nothing_of_a_unit_that_others_train(first: list[str]) -> None:
    on_ranks(2, _choices, first, timeout=30)


def _choices(first: list[str]) -> None:
    """No gradient reaches a unit on the first rank, and so none of its gates runs there."""
    model, plain = twins(Choices, units=[Choice])
    uses = [first, ["x", "x", "x"]]
    trains_on(model, plain, used, [list(zip(inputs(step=step), uses, strict=True)) for step in range(2)])


def test_an_unused_parameter_keeps_an_accumulated_gradient() -> None:
    on_ranks(2, _unused_accumulated)


def _unused_accumulated() -> None:
    model, plain = twins(Options, units=[Optional])
    steps = [[["1", "12", ""]] * 2, [["2", "", ""], ["", "", "1"]]]
    batches = [list(zip(inputs(step=s), uses, strict=True)) for s, uses in enumerate(steps)]
    for batch in batches:
        used(model, mine(batch)).backward()
    same_gradients(model, added(*(means(plain, used, batch) for batch in batches)))


# -- without gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_sees_the_new_weights(mode: Any, reshard: bool | None) -> None:
    on_ranks(2, _evaluate, mode, reshard)


def _evaluate(mode: Any, reshard: bool | None) -> None:
    model, plain = twins(Mlp, reshard_after_forward=reshard)
    optimizers = sgd(model, plain)

    def same_output() -> None:
        model.eval()
        with mode():
            assert torch.equal(model(mine(inputs())), plain(mine(inputs())))
        model.train()

    same_output()
    for step in range(3):
        batches = inputs(step=step)
        loss = square(model, mine(batches))
        same_output()  # between forward and backward
        loss.backward()
        same_output()
        truth = means(plain, square, batches)
        same_gradients(model, truth)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)
        same_output()
        same_output()


@pytest.mark.parametrize("reshard", [None, True, False])
def test_editing_a_shard_is_seen_by_the_next_forward(reshard: bool | None) -> None:
    on_ranks(2, _edit_shards, reshard)


def _edit_shards(reshard: bool | None) -> None:
    model, plain = twins(Mlp, reshard_after_forward=reshard)
    x = mine(inputs())
    with torch.no_grad():
        for edit in ("parameter", "local", "data"):
            model(x)
            for name, parameter in model.named_parameters():
                plain.get_parameter(name).mul_(0.5)
                target = {"parameter": parameter, "local": parameter.to_local(), "data": parameter.data}[edit]
                target.mul_(0.5)
            assert torch.equal(model(x), plain(x)), edit


def test_generate() -> None:
    on_ranks(2, _generate)


def _generate() -> None:
    model, plain = twins(llama)
    case = CASES["llama"]
    optimizers = sgd(model, plain)
    for step in range(2):
        batches = case.batches(2, step)
        case.loss(model, mine(batches)).backward()
        truth = means(plain, case.loss, batches)
        same_gradients(model, truth)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)
        prompt = mine(batches)["input_ids"][:, :4]
        told = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
        model.eval()
        plain.eval()
        assert torch.equal(model.generate(prompt, **told), plain.generate(prompt, **told))  # type: ignore[operator]
        model.train()
        plain.train()


# -- unusual graphs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [None, True, False])
def test_two_forwards_before_one_backward(reshard: bool | None) -> None:
    on_ranks(2, _two_forwards, reshard)


def _two_forwards(reshard: bool | None) -> None:
    model, plain = twins(Mlp, reshard_after_forward=reshard)

    def both(each: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (each(x) for x in batch)
        return (one * other).mean()

    steps = [list(zip(inputs(step=step), inputs(step=step + 50), strict=True)) for step in range(3)]
    trains_on(model, plain, both, steps, within=1e-6)


def test_retain_graph_adds_the_gradient_again() -> None:
    on_ranks(2, _retain)


def _retain() -> None:
    model, plain = twins(Mlp)
    for step in range(2):
        batches = inputs(step=step)
        loss = square(model, mine(batches))
        loss.backward(retain_graph=True)
        truth = means(plain, square, batches)
        same_gradients(model, truth)
        with torch.no_grad():
            model(mine(batches))  # the slots are refilled in between
        loss.backward()
        same_gradients(model, added(truth, truth))
        model.zero_grad()


def test_two_losses_of_one_forward() -> None:
    on_ranks(2, _two_losses)


def _two_losses() -> None:
    model, plain = twins(Mlp)
    batches = inputs()
    out = model(mine(batches))
    out.sum().backward(retain_graph=True)
    out.square().mean().backward()
    one, other = means(plain, lambda m, x: m(x).sum(), batches), means(plain, square, batches)
    same_gradients(model, added(one, other))


def test_gradients_of_inputs_alone_leave_parameters_untouched() -> None:
    on_ranks(2, _input_gradients)


def _input_gradients() -> None:
    model, plain = twins(Mlp)
    x = mine(inputs()).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    expected = torch.autograd.grad(square(plain, twin), twin)[0]
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(square(model, x), x)[0], expected)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = square(model, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    truth = means(plain, square, inputs())
    same_gradients(model, truth)
    torch.autograd.grad(square(model, x), x)
    same_gradients(model, truth)


def test_gradients_of_inputs_leave_no_trace_while_gradients_are_held() -> None:
    on_ranks(2, _input_gradients_held)


def _input_gradients_held() -> None:
    model, plain = twins(Mlp)
    first, second, third = (inputs(step=step) for step in range(3))
    model.set_requires_gradient_sync(False)
    square(model, mine(first)).backward()
    x = mine(third).requires_grad_()
    torch.autograd.grad(square(model, x), x)
    model.set_requires_gradient_sync(True)
    torch.autograd.grad(square(model, x), x)
    square(model, mine(second)).backward()
    same_gradients(model, added(means(plain, square, first), means(plain, square, second)), within=1e-6)


def test_parameters_are_parameters_whatever_has_run() -> None:
    on_ranks(2, _attributes)


def _attributes() -> None:
    model, _ = twins(Transformer)
    table, tokens = numbers(1, LENGTH, WIDTH, grad=True), mine(CASES["transformer"].batches(2))["tokens"]
    before = dict(model.named_parameters())

    def unchanged(after: str) -> None:
        for name, parameter in before.items():
            assert model.get_parameter(name) is parameter, (after, name)

    with torch.no_grad():
        model(tokens)
    unchanged("evaluation")
    square(model, tokens).backward()
    unchanged("a backward")
    square(model, tokens)
    unchanged("a forward alone")
    torch.autograd.grad(square(model.blocks[0], table), table)
    unchanged("a unit by itself")
    model.embed.register_forward_hook(lambda _, __, out: out + table)
    torch.autograd.grad(square(model, tokens), table)
    unchanged("gradients of an input")


def test_create_graph_is_refused_by_name() -> None:
    on_ranks(2, _create_graph)


def _create_graph() -> None:
    model, plain = twins(Mlp)
    with pytest.raises(RuntimeError, match="create_graph"):
        square(model, mine(inputs())).backward(create_graph=True)
    model.zero_grad()
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


def test_a_gradient_penalty_is_refused_by_name() -> None:
    on_ranks(2, _penalty)


def _penalty() -> None:
    model, _ = twins(Mlp)
    x = mine(inputs()).requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(square(model, x), x, create_graph=True)[0].square().sum().backward()


def test_hooks_that_run_when_a_gradient_is_final() -> None:
    on_ranks(2, _post_accumulate)


def _post_accumulate() -> None:
    """The optimizer step in backward, as memory-saving loops do it."""
    model, plain = twins(Transformer)
    seen: list[str] = []

    def step(name: str, parameter: Any) -> None:
        seen.append(name)
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(step, name))
    for number in range(2):
        batches = CASES["transformer"].batches(2, number)
        next_token(model, mine(batches)).backward()
        truth = means(plain, next_token, batches)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.add_(truth[name], alpha=-0.1)  # type: ignore[arg-type]
        assert sorted(seen) == sorted(name for name, _ in plain.named_parameters())
        assert all(parameter.grad is None for parameter in model.parameters())
        seen.clear()
        reload(plain, model)


class State(NamedTuple):
    hidden: Tensor
    masks: dict[str, Any]


class Stateful(nn.Module):
    """Takes tensors in containers, by keyword; returns the same."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.carry = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, state: State, more: list[Any], scale: float = 1.0) -> tuple[State, list[Any]]:
        hidden = torch.tanh(self.mix(state.hidden)) * scale + more[0]["x"]
        carry = self.carry(more[0]["x"]) * state.masks["keep"]
        return State(hidden, state.masks), [{"x": carry}, None]


class Machine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stateful() for _ in range(3))

    def forward(self, *, state: State, more: list[Any]) -> dict[str, Any]:
        for block in self.blocks:
            state, more = block(state=state, more=more, scale=0.5)
        return {"out": [state.hidden], "more": more}


def machine(model: nn.Module, leaves: tuple[Tensor, Tensor]) -> Tensor:
    keep = torch.ones(WIDTH, dtype=torch.bool)
    out = model(state=State(leaves[0], {"keep": keep}), more=[{"x": leaves[1]}, None])
    return out["out"][0].square().mean() + out["more"][0]["x"].mean()


def test_containers_and_keywords_pass_gradients() -> None:
    on_ranks(2, _containers)


def _containers() -> None:
    model, plain = twins(Machine, units=[Stateful])
    for step in range(3):
        batches = [
            (
                numbers(3, WIDTH, seed=10 * step + rank, grad=True),
                numbers(3, WIDTH, seed=5 + 10 * step + rank, grad=True),
            )
            for rank in range(2)
        ]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in mine(batches)]
        machine(model, tuple(leaves)).backward()  # type: ignore[arg-type]
        truth = means(plain, machine, batches)
        same_gradients(model, truth)
        for found, expected in zip(leaves, mine(batches), strict=True):
            assert torch.equal(found.grad, expected.grad)
        model.zero_grad()


def test_a_unit_called_by_itself_trains_or_is_refused_by_name() -> None:
    on_ranks(2, _alone)


def _alone() -> None:
    model, plain = twins(Mlp, units=[nn.Sequential])
    batches = inputs()

    def alone(each: Any, x: Tensor) -> Tensor:
        return each.blocks[1](x).square().mean()

    try:
        loss = alone(model, mine(batches))
    except RuntimeError as refusal:
        said = str(refusal)
    else:
        said = ""
        loss.backward()
        same_gradients(model, means(plain, alone, batches))
    assert not said or "blocks.1" in said


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = torch.tanh(self.into(x))
        if depth:
            y = self(y, depth - 1)
        return x + self.out(y)


def test_a_unit_that_calls_itself() -> None:
    on_ranks(2, _recursive)


def _recursive() -> None:
    model, plain = twins(lambda: nn.Sequential(Recursive(), Recursive()), units=[Recursive])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


def test_two_sharded_models_in_one_graph() -> None:
    on_ranks(2, _two_models)


def _two_models() -> None:
    one, plain_one = twins(lambda: nn.Sequential(*(Recursive() for _ in range(3))), units=[Recursive])
    two, plain_two = twins(Mlp, units=[nn.Sequential])
    plain = nn.Sequential(plain_one, plain_two)
    for step in range(3):
        batches = inputs(step=step)
        two(one(mine(batches))).square().mean().backward()
        truth = means(plain, square, batches)
        for index, model in enumerate((one, two)):
            prefix = f"{index}."
            of = {name.removeprefix(prefix): g for name, g in truth.items() if name.startswith(prefix)}
            same_gradients(model, of, within=1e-6)
            model.zero_grad()


# -- at wrap time -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 2, 3])
def test_weights_that_differ_between_ranks_are_named_on_every_rank(odd: int) -> None:
    assert on_ranks(4, _differ, odd) == [True] * 4


def _differ(odd: int) -> bool:
    model = seeded(Mlp)
    if dist.get_rank() == odd:
        with torch.no_grad():
            model.blocks[1][2].weight.view(-1)[77] += 1e-3  # type: ignore[index, union-attr, operator]
    with pytest.raises((RuntimeError, ValueError), match=r"blocks\.1\.2\.weight"):
        yafsdp_cc.shard(model)
    return True


def test_the_same_numbers_in_another_order_differ_too() -> None:
    assert on_ranks(2, _permuted) == [True] * 2


def _permuted() -> bool:
    model = seeded(Mlp)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.leave.weight.copy_(model.leave.weight.flip(0).clone())  # type: ignore[union-attr, operator]
    with pytest.raises((RuntimeError, ValueError), match=r"leave\.weight"):
        yafsdp_cc.shard(model)
    return True


@pytest.mark.parametrize("what", ["shape", "dtype", "frozen", "missing"])
def test_models_that_differ_between_ranks_are_refused(what: str) -> None:
    assert on_ranks(2, _other_model, what) == [True] * 2


def _other_model(what: str) -> bool:
    model: Any = seeded(Mlp)
    if dist.get_rank() == 1:
        if what == "shape":
            model.leave = nn.Linear(WIDTH, 6)
        elif what == "dtype":
            model.leave.bfloat16()
        elif what == "frozen":
            model.leave.weight.requires_grad_(False)
        else:
            model.leave.bias = None
    with pytest.raises((RuntimeError, ValueError), match="leave"):
        yafsdp_cc.shard(model)
    return True


def test_sync_module_states_sends_the_first_rank_weights_and_buffers() -> None:
    on_ranks(4, _sync_states)


def _sync_states() -> None:
    model, plain = seeded(Normed, seed=dist.get_rank()), seeded(Normed)
    model.norm.running_mean.fill_(dist.get_rank())  # type: ignore[union-attr, operator]
    model = yafsdp_cc.shard(model, sync_module_states=True)
    same_weights(model, plain)
    assert not model.norm.running_mean.any()  # type: ignore[union-attr, operator]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = x + block(x)
        return x


def test_batch_norm_keeps_its_buffers() -> None:
    on_ranks(2, _batch_norm)


def _batch_norm() -> None:
    model, plain = twins(Normed, units=[nn.Sequential])
    by_rank = [seeded(Normed) for _ in range(2)]  # statistics are each rank's own
    own = mine(by_rank)
    optimizers = sgd(model, plain)
    for step in range(3):
        batches = inputs(rows=6, step=step)
        square(model, mine(batches)).backward()
        gradients = [
            reference.gradients(each, lambda e=each, x=x: square(e, x))[1]
            for each, x in zip(by_rank, batches, strict=True)
        ]
        truth = {name: reference.mean_in_rank_order([found[name] for found in gradients]) for name in gradients[0]}
        same_gradients(model, truth)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)
        for each in by_rank:
            each.load_state_dict(dict(plain.named_parameters()), strict=False)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, own.get_buffer(name)), name
    model.eval()
    own.eval()
    with torch.no_grad():
        assert torch.equal(model(mine(inputs())), own(mine(inputs())))


def test_meta_device_construction() -> None:
    on_ranks(2, _meta)


def _meta() -> None:
    with torch.device("meta"):
        model = Transformer()
    model = yafsdp_cc.shard(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert 0.5 < whole(model.embed.weight).std() < 1.5  # as nn.Embedding initialises itself
    assert torch.equal(model.norm.weight.to_local(), torch.ones(WIDTH))
    plain = seeded(Transformer)
    with yafsdp_cc.whole_parameters(model, write=True), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(plain.get_parameter(name))
    same_weights(model, plain)
    trains_on(model, plain, next_token, [CASES["transformer"].batches(2, step) for step in range(2)])


def test_meta_device_construction_with_a_function() -> None:
    on_ranks(2, _meta_function)


def _meta_function() -> None:
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.25)

    with torch.device("meta"):
        model = nn.Sequential(*(Tiny() for _ in range(2)))
    with pytest.raises(
        ValueError, match=r"'0\.\w+' is on the meta device.*Tiny has no reset_parameters.*param_init_fn"
    ):
        yafsdp_cc.shard(model, units=[Tiny])
    with torch.device("meta"):
        model = nn.Sequential(*(Tiny() for _ in range(2)))
    yafsdp_cc.shard(model, units=[Tiny], param_init_fn=fill)
    assert all((whole(parameter) == 0.25).all() for parameter in model.parameters())


# -- whole parameters and state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [False, True])
def test_whole_parameters(write: bool) -> None:
    on_ranks(2, _whole, write)


def _whole(write: bool) -> None:
    model, plain = twins(lambda: Transformer(tied=True))
    original = seeded(lambda: Transformer(tied=True))
    batches = CASES["transformer"].batches(2)
    trains_on(model, plain, next_token, [batches])
    original.load_state_dict(plain.state_dict())
    with yafsdp_cc.whole_parameters(model, write=write), torch.no_grad():
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name, _ in plain.named_parameters()]
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name)), name
            parameter.mul_(0.5)
            plain.get_parameter(name).mul_(0.5)
    same_weights(model, plain if write else original)
    trains_on(model, plain if write else original, next_token, [batches])
    with pytest.raises(ZeroDivisionError), yafsdp_cc.whole_parameters(model, write=write):
        _ = 1 / 0
    trains_on(model, plain if write else original, next_token, [batches])


def test_state_dict_round_trip() -> None:
    on_ranks(2, _state_dict)


def _state_dict() -> None:
    model, plain = twins(lambda: Transformer(tied=True))
    trains_on(model, plain, next_token, [CASES["transformer"].batches(2)])
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in state.items():
        assert torch.equal(whole(value), plain.state_dict()[name]), name
    other = yafsdp_cc.shard(seeded(lambda: Transformer(tied=True), seed=1))
    with torch.no_grad():
        other(mine(CASES["transformer"].batches(2))["tokens"])
    other.load_state_dict({name: value.clone() for name, value in state.items()})
    same_weights(other, plain)
    assert other.head.weight is other.embed.weight
    trains_on(other, plain, next_token, [CASES["transformer"].batches(2, 1)])


def test_full_state_dict_through_torch() -> None:
    on_ranks(2, _full_state_dict)


def _full_state_dict() -> None:
    model, plain = twins(Transformer)
    options = StateDictOptions(full_state_dict=True)
    found = get_model_state_dict(model, options=options)
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name  # type: ignore[arg-type]
    other = seeded(Transformer, seed=1)
    set_model_state_dict(model, other.state_dict(), options=options)
    same_weights(model, other)


# -- optimizers -------------------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_optimizers_with_groups_by_name(kind: str, form: str) -> None:
    on_ranks(2, _optimizer, kind, FORMS[form])


@pytest.mark.parametrize(
    "kind", ["Adam", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"]
)
def test_pointwise_optimizers(kind: str) -> None:
    on_ranks(2, _optimizer, kind, {})


def _optimizer(kind: str, form: dict[str, Any]) -> None:
    model, plain = twins(Transformer)
    more = {"momentum": 0.9, "nesterov": True} if kind == "SGD" else {}
    optimizers = [
        getattr(torch.optim, kind)(_groups(each, decays=kind != "Rprop"), lr=1e-3, **form, **more)
        for each in (model, plain)
    ]
    for step in range(4):
        batches = CASES["transformer"].batches(2, step)
        next_token(model, mine(batches)).backward()
        truth = means(plain, next_token, batches)
        same_gradients(model, truth, within=1e-3)  # weights drift apart by rounding
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for name, parameter in plain.named_parameters():
            parameter.grad = truth[name]
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(
            whole(found) if hasattr(found, "full_tensor") else found, expected, rtol=1e-4, atol=0
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        same_weights(model, plain, within=2e-5)


def _groups(model: nn.Module, decays: bool) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    plain = [p for name, p in named.items() if name.endswith("bias") or "norm" in name]
    rest = [p for name, p in named.items() if not (name.endswith("bias") or "norm" in name)]
    decay = {"weight_decay": 0.1} if decays else {}
    return [{"params": rest, **decay}, {"params": plain, "lr": 3e-3}]


def test_grad_scaler_skips_the_step_on_every_rank() -> None:
    on_ranks(2, _scaler)


def _scaler() -> None:
    model, plain = twins(Mlp)
    optimizer = sgd(model)[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    batches = inputs()
    scaler.scale(square(model, mine(batches))).backward()
    scaler.unscale_(optimizer)
    same_gradients(model, means(plain, square, batches), within=1e-6)
    before = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2048.0
    assert not torch.equal(whole(model.leave.weight.detach()), before["leave.weight"])
    for bad in ("blocks.1.0.weight", "leave.bias", "enter.weight"):
        optimizer.zero_grad()
        before = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
        scaler.scale(square(model, mine(batches))).backward()
        local = model.get_parameter(bad).grad.to_local()  # type: ignore[union-attr]
        if dist.get_rank() == 1 and local.numel():
            local.view(-1)[-1] = float("inf")  # one element, on one rank
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        scales = [0.0] * 2
        dist.all_gather_object(scales, scaler.get_scale())
        assert scales[0] == scales[1], bad
        if scales[0] < scale:
            for name, parameter in model.named_parameters():
                assert torch.equal(whole(parameter.detach()), before[name]), name


# -- checkpointing and compiling --------------------------------------------------------------------------------------


class Spans(nn.Module):
    """Recomputes spans of units, or parts of them."""

    def __init__(self, how: str, reentrant: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Part(how == "inside", reentrant) for _ in range(5))
        self.how, self.reentrant = how, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.how == "spans":
            for first in (0, 2, 4):
                span = nn.Sequential(*self.blocks[first : first + 2])
                x = checkpoint(span, x, use_reentrant=self.reentrant)
        elif self.how == "all":
            x = checkpoint(nn.Sequential(*self.blocks), x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant) if self.how == "each" else block(x)
        return x


class Part(nn.Module):
    def __init__(self, recompute: bool, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recompute, self.reentrant = recompute, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            y: Tensor = checkpoint(self.mlp, x, use_reentrant=self.reentrant)
            return x + y
        return x + self.mlp(x)

    def mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", ["each", "spans", "all", "inside"])
def test_non_reentrant_checkpointing_is_exact(how: str, reshard: bool) -> None:
    on_ranks(2, _checkpointed, how, reshard)


def _checkpointed(how: str, reshard: bool) -> None:
    model, plain = twins(lambda: Spans(how), units=[Part], reshard_after_forward=reshard)
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)])


def test_a_unit_run_twice_in_one_checkpoint() -> None:
    on_ranks(2, _twice_in_a_checkpoint)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part(False, False) for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        span = nn.Sequential(*(self.blocks[index] for index in order))
        out: Tensor = checkpoint(span, x, use_reentrant=False)
        return out


def _twice_in_a_checkpoint() -> None:
    model, plain = twins(Twice, units=[Part])
    for order in ((0, 1, 0), (0, 0), (0, 2, 2), (0, 1, 2, 0, 3), (2, 0, 1, 0, 2), (0, 2, 0, 1, 3, 2)):
        batches = inputs()
        _ordered(model, mine(batches), order).backward()
        same_gradients(model, means(plain, lambda m, x, o=order: _ordered(m, x, o), batches), within=1e-6)
        model.zero_grad()


def _ordered(model: nn.Module, x: Tensor, order: tuple[int, ...]) -> Tensor:
    return model(x, order).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["each", "spans", "all", "inside"])
def test_reentrant_checkpointing_is_right_or_refused_by_name(how: str) -> None:
    on_ranks(2, _reentrant, how)


def _reentrant(how: str) -> None:
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


def test_checkpointing_of_hugging_face_models() -> None:
    on_ranks(2, _hugging_face_checkpoint)


def _hugging_face_checkpoint() -> None:
    def build() -> nn.Module:
        model: Any = llama()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()  # type: ignore[no-any-return]

    model, plain = twins(build)
    case = CASES["llama"]
    trains_on(model, plain, case.loss, [case.batches(2, step) for step in range(2)])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_forward_has_no_graph_break(backend: str, when: str) -> None:
    on_ranks(2, _compiled, backend, when)


def _compiled(backend: str, when: str) -> None:
    def compiled(model: Any) -> nn.Module:
        first, *others = model.blocks
        first.forward = torch.compile(first.forward, backend=backend, fullgraph=True)
        for block in others:
            block.compile(backend=backend, fullgraph=True)  # with its hooks
        return model  # type: ignore[no-any-return]

    model, plain = seeded(Transformer), seeded(Transformer)
    if when == "before":
        model = yafsdp_cc.shard(compiled(model), units=[Attention])
    else:
        model = compiled(yafsdp_cc.shard(model, units=[Attention]))
    trains_on(model, plain, next_token, [CASES["transformer"].batches(2, step) for step in range(3)], within=1e-6)


# -- mishaps ----------------------------------------------------------------------------------------------------------


class Fuse(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.blows = inner, ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.blows == "forward":
            raise ArithmeticError
        if self.blows == "backward":
            x.register_hook(_blow)
        return torch.tanh(x)


def _blow(gradient: Tensor) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("units", ["inside", "outside"])
def test_training_goes_on_after_an_exception(where: str, units: str) -> None:
    on_ranks(2, _exception, where, units)


def _exception(where: str, units: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(Fuse(nn.Linear(WIDTH, WIDTH)) for _ in range(5)))

    model, plain = twins(build, units=[Fuse if units == "outside" else nn.Linear])
    trains_on(model, plain, square, [inputs()])
    for fuse in (2, 0, 4):
        model[fuse].blows = where
        with pytest.raises(ArithmeticError):
            square(model, mine(inputs(step=9))).backward()
        model[fuse].blows = ""
        model.zero_grad()
        trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


def test_running_units_in_another_order_on_one_rank_is_an_error_in_time() -> None:
    errors = on_ranks(2, _other_order)
    for error in errors:
        assert "rank 0: " in error, errors
        assert "rank 1: " in error, errors
        assert "blocks.2" in error, errors


@contextmanager
def short_timeout(seconds: float) -> Iterator[None]:
    """A process group that gives up after ``seconds``."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
    yield


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x


def _other_order() -> str:
    model, _ = twins(Turns, units=[nn.Linear])
    orders = [[0, 1, 2, 3], [0, 2, 1, 3]]
    with short_timeout(5):
        try:
            for _ in range(3):
                x = mine(inputs())
                out = model(x, mine(orders))
                out.square().mean().backward()
                model.zero_grad()
        except RuntimeError as error:
            return str(error)
    return ""
