"""What people do to a model besides training it: it works as on the plain model, or is refused by name; never a wrong
number, a wait without end, or silence."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # by the optimizers, at a second for every rank if not before the fork
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import on_ranks
from tests.test_training import (
    added,
    inputs,
    means,
    mine,
    numbers,
    reload,
    same_gradients,
    seeded,
    sgd,
    short_timeout,
    square,
    step_both,
    trains_on,
    twins,
    whole,
)
from yafsdp_cc.engine.module import root_of


class Block(nn.Module):
    """A residual block around ``inner``."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def stack(blocks: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(blocks)))


def refusal(act: Callable[[], Any]) -> str:
    """The message of what ``act`` raises, '' if nothing."""
    try:
        act()
    except Exception as error:
        return str(error)
    return ""


def agrees(model: nn.Module, plain: nn.Module, x: Tensor, within: float = 1e-6) -> None:
    torch.testing.assert_close(model(x), plain(x), rtol=within, atol=within)


# -- parameters replaced behind the engine's back ----------------------------------------------------------------------


def _assign_parameter(model: Any) -> None:
    model.leave.weight = nn.Parameter(torch.zeros(5, WIDTH))


def _tie_afterwards(model: Any) -> None:
    model.blocks[0][0].weight = model.blocks[1][0].weight


def _convert_a_part(model: Any) -> None:
    model.leave.double().float()


REPLACEMENTS = [_assign_parameter, _tie_afterwards, _convert_a_part]


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_a_replaced_parameter_is_used_or_refused_by_name(replace: Callable[[Any], None]) -> None:
    on_ranks(2, _replaced, replace)


def _replaced(replace: Callable[[Any], None]) -> None:
    model, plain = twins(Mlp)
    x = mine(inputs())

    def run() -> None:
        replace(model)
        square(model, x).backward()
        sgd(model)[0].step()
        model.zero_grad()
        model(x)

    if refused := refusal(run):
        assert "weight" in refused, refused
        assert "grad_dtype" not in refused, refused
        return
    for name, parameter in model.named_parameters():
        value = whole(parameter.detach()) if hasattr(parameter, "full_tensor") else parameter.detach()
        plain.get_parameter(name).data.copy_(value)
    agrees(model, plain, x)


def test_functional_call_uses_the_given_parameters_or_is_refused() -> None:
    on_ranks(2, _functional_call)


def _functional_call() -> None:
    model, plain = twins(Mlp)
    x = mine(inputs())
    given = {name: torch.randn_like(parameter) for name, parameter in plain.named_parameters()}
    truth = torch.func.functional_call(plain, given, x)
    found: list[Tensor] = []
    refused = refusal(lambda: found.append(torch.func.functional_call(model, given, x)))
    assert "weight" in refused if refused else torch.equal(found[0], truth)
    assert "weight" not in model.leave.__dict__
    trains_on(model, plain, square, [inputs()])


# -- weights that leave a unit, or are written in it -------------------------------------------------------------------


class Prompt(nn.Module):
    """Hands out a part of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, rows: int) -> Tensor:
        return self.weight[:rows]


class Prompts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList(Prompt() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [prompt(8) for prompt in self.prompts]
        return torch.stack([torch.tanh(x @ part.t()) for part in parts])


@pytest.mark.parametrize("grad", [False, True])
def test_a_unit_may_return_its_own_weight(grad: bool) -> None:
    on_ranks(2, _own_weight, grad)


def _own_weight(grad: bool) -> None:
    model, plain = twins(Prompts, units=[Prompt])
    with torch.set_grad_enabled(grad):
        agrees(model, plain, mine(inputs()))
    if grad:
        trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


class Clamped(nn.Module):
    """Edits its weight in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.05, 0.05)
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("grad", [False, True])
def test_an_edit_of_a_weight_in_forward_is_kept_or_refused_by_name(grad: bool) -> None:
    on_ranks(2, _edit_in_forward, grad)


def _edit_in_forward(grad: bool) -> None:
    model, _ = twins(lambda: nn.Sequential(*(Clamped() for _ in range(3))), units=[Clamped])
    with torch.set_grad_enabled(grad):
        refused = refusal(lambda: model(mine(inputs())))
    kept = all(whole(parameter.detach()).abs().max() <= 0.05 for parameter in model.parameters())
    assert kept or "weight" in refused or "unit '0'" in refused, refused


class Counting(Block):
    """Counts its calls in a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        return super().forward(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_edit_of_a_small_parameter_in_forward_is_kept_or_refused_by_name(dtype: torch.dtype) -> None:
    on_ranks(2, _small_edit, dtype)


def _small_edit(dtype: torch.dtype) -> None:
    model, _ = twins(lambda: nn.Sequential(*(Counting() for _ in range(3))), mp_policy=MixedPrecisionPolicy(dtype))
    with torch.no_grad():
        said = refusal(lambda: model(mine(inputs())))
    if dtype == torch.bfloat16:
        assert "a forward has written in place to one of '0." in said, said
    else:
        assert not said
        assert [whole(block.calls.detach()).item() for block in model] == [1, 1, 1]
    assert "inplace" in refusal(lambda: model(mine(inputs()))) or dtype == torch.bfloat16  # autograd's own check


def test_max_norm_of_an_embedding_is_kept_or_refused_by_name() -> None:
    on_ranks(2, _max_norm)


def _max_norm() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(100, WIDTH, max_norm=0.5), *stack(3))

    def run(model: nn.Module) -> None:
        model(torch.arange(100)).square().mean().backward()

    refused = refusal(lambda: run(yafsdp_cc.shard(seeded(build), units=[Block])))
    if refused:
        assert "max_norm" in refused or "0.weight" in refused, refused
        return
    model, plain = twins(build, units=[Block])
    run(model), run(plain)
    torch.testing.assert_close(whole(model[0].weight.detach()), plain[0].weight.detach())  # type: ignore[index, union-attr]


def test_sparse_gradients_are_right_or_refused_by_name() -> None:
    on_ranks(2, _sparse)


def _sparse() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(100, WIDTH, sparse=True), *stack(3))

    def run(model: nn.Module) -> None:
        model(torch.arange(5) + dist.get_rank()).square().mean().backward()

    model: list[Any] = []
    if refused := refusal(lambda: model.append(yafsdp_cc.shard(seeded(build), units=[Block])) or run(model[0])):
        assert "sparse" in refused, refused
        assert "0.weight" in refused or "'0'" in refused, refused
        return
    plain = seeded(build)
    for rank in range(2):
        (plain(torch.arange(5) + rank).square().mean() / 2).backward()
    torch.testing.assert_close(whole(model[0][0].weight.grad), plain[0].weight.grad.to_dense())  # type: ignore[index, union-attr]


# -- inputs and outputs ------------------------------------------------------------------------------------------------


class Passing(nn.Module):
    """Hands on its input unchanged, None, and a view next to what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
        return x, None, (x.t(), self.inner(x))


class Passed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            same, _, (view, y) = block(x)
            x = same if index % 2 else view.t() + torch.sin(y.mul_(0.5))
        return x


def test_inputs_views_and_outputs_changed_in_place() -> None:
    on_ranks(2, _passing)


def _passing() -> None:
    model, plain = twins(Passed, units=[Passing])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


class Wrapped:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Unwraps(nn.Module):
    """Takes its input in an object that nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Wrapped) -> Tensor:
        return torch.tanh(self.inner(x.tensor))


class Unwrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unwraps() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(Wrapped(x))
        return x


@pytest.mark.parametrize("frozen", [False, True])
def test_inputs_in_an_unknown_object(frozen: bool) -> None:
    on_ranks(2, _unwrapping, frozen)


def _unwrapping(frozen: bool) -> None:
    model, plain = twins(Unwrapping, units=[Unwraps])
    for each in (model, plain):
        each.blocks[1:].requires_grad_(not frozen)
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


class Auxiliary(nn.Module):
    """Puts a loss aside, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.loss = torch.sigmoid(self.gate(x)).square().mean()
        return x + torch.tanh(self.inner(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_losses_put_aside_in_units(frozen: bool) -> None:
    on_ranks(2, _auxiliary, frozen)


def _auxiliary(frozen: bool) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        total: Tensor = model(x).square().mean() + sum(block.loss for block in model[1:])
        return total

    model, plain = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Auxiliary() for _ in range(4))))
    for each in (model, plain):
        each[1:].requires_grad_(not frozen)  # type: ignore[index, union-attr]
    trains_on(model, plain, loss, [inputs(step=step) for step in range(2)], within=1e-6)


# -- modules of torch that do more than hold parameters ---------------------------------------------------------------

NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": weight_norm,
    "weight_norm, parametrized": parametrizations.weight_norm,
    "spectral_norm": spectral_norm,
    "spectral_norm, parametrized": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("name", NORMS)
def test_reparametrized_weights(name: str) -> None:
    on_ranks(2, _reparametrized, name)


def _reparametrized(name: str) -> None:
    model, plain = twins(lambda: nn.Sequential(*(Block(NORMS[name](nn.Linear(WIDTH, WIDTH))) for _ in range(3))))
    for each in (model, plain):
        each.eval()  # spectral norms advance their buffers while training, and the truth runs more forwards
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-5)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.cells(x)[0]
        return out


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    on_ranks(2, _recurrent, kind)


def _recurrent(kind: type[nn.RNNBase]) -> None:
    options = {"bidirectional": True, "proj_size": WIDTH // 2, "num_layers": 2} if kind is nn.LSTM else {}
    model, plain = twins(lambda: nn.Sequential(*(Recurrent(kind, **options) for _ in range(3))))
    steps = [[numbers(2, 5, WIDTH, seed=10 * step + rank) for rank in range(2)] for step in range(2)]
    trains_on(model, plain, square, steps, within=1e-5)
    with torch.no_grad():
        agrees(model, plain, steps[0][0])


def test_the_fast_path_of_torch_s_transformer() -> None:
    on_ranks(2, _fast_path)


def _fast_path() -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    model, plain = twins(build)
    steps = [[numbers(2, 5, WIDTH, seed=10 * step + rank) for rank in range(2)] for step in range(3)]
    for _ in range(2):
        model.train(), plain.train()
        trains_on(model, plain, square, steps[:2], within=1e-5)
        model.eval(), plain.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                agrees(model, plain, mine(steps[2]), within=1e-5)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 6 for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH) / 6, "b": torch.ones(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.items:
            x = torch.tanh(x @ weight)
        return x @ self.named["a"] * self.named["b"] + x @ self.items[-1]


def test_lists_and_dicts_of_parameters() -> None:
    on_ranks(2, _lists)


def _lists() -> None:
    model, plain = twins(lambda: nn.Sequential(*(Lists() for _ in range(3))), units=[Lists])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_frozen_parameters_of_any_dtype(dtype: torch.dtype) -> None:
    on_ranks(2, _odd_dtype, dtype)


class Odd(nn.Module):
    """Reads a frozen matrix and a frozen vector of an unusual dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        values = torch.arange(WIDTH * WIDTH).remainder(7).view(WIDTH, WIDTH)
        self.matrix = nn.Parameter(values.to(dtype, copy=True), requires_grad=False)
        self.vector = nn.Parameter(values[0].to(dtype, copy=True), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.complex64 if self.matrix.is_complex() else torch.float32
        scale = torch.view_as_real((self.matrix.to(wide) + self.vector.to(wide)).to(torch.complex64)).sum() / 1e4
        return x + torch.tanh(self.inner(x)) * scale


def _odd_dtype(dtype: torch.dtype) -> None:
    for sync in (False, True):
        model, plain = twins(lambda: nn.Sequential(*(Odd(dtype) for _ in range(3))), sync_module_states=sync)
        trains_on(model, plain, square, [inputs()], within=1e-6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.complex64], ids=str)
def test_buffers_of_any_dtype_are_synchronised(dtype: torch.dtype) -> None:
    assert on_ranks(2, _odd_buffer, dtype) == [True] * 2


def _odd_buffer(dtype: torch.dtype) -> bool:
    model = stack()
    model.register_buffer("odd", torch.full((5,), dist.get_rank()).to(dtype))
    yafsdp_cc.shard(model, sync_module_states=True)
    return not bool(model.odd.any())  # type: ignore[operator, union-attr]


def test_weights_that_are_not_contiguous_are_synchronised() -> None:
    on_ranks(2, _not_contiguous)


def _not_contiguous() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))

    def build_last() -> nn.Module:
        return build().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    model = yafsdp_cc.shard(seeded(build_last, seed=dist.get_rank()), sync_module_states=True)
    batches = [numbers(1, 8, 4, 4, seed=rank) for rank in range(2)]
    trains_on(model, seeded(build), square, [batches], within=1e-6)


# -- hooks of users ----------------------------------------------------------------------------------------------------


def test_module_hooks_of_users() -> None:
    on_ranks(2, _module_hooks)


def _module_hooks() -> None:
    model, plain = twins(stack)
    for each in (model, plain):
        for block in each:  # type: ignore[union-attr]
            block.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
            block.register_forward_hook(lambda _, args, output: output * 0.5)
            block.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 3,))
            block.register_full_backward_hook(
                lambda _, inputs, outputs: tuple(g if g is None else g * 2 for g in inputs)
            )
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_tensor_hook_on_a_parameter_runs_or_is_refused_by_name(when: str) -> None:
    on_ranks(2, _tensor_hook, when)


def _tensor_hook(when: str) -> None:
    model: Any = seeded(Mlp)

    def register() -> None:
        model.leave.weight.register_hook(lambda gradient: gradient * 0)

    def run() -> None:
        if when == "before":
            register()
        yafsdp_cc.shard(model)
        if when == "after":
            register()
        square(model, mine(inputs())).backward()

    if refused := refusal(run):
        assert "leave.weight" in refused, refused
    else:
        assert whole(model.leave.weight.grad).abs().max() == 0


def test_a_post_accumulate_hook_from_before_runs_or_is_refused_by_name() -> None:
    on_ranks(2, _hook_from_before)


def _hook_from_before() -> None:
    model: Any = seeded(Mlp)
    called: list[nn.Parameter] = []
    model.leave.weight.register_post_accumulate_grad_hook(called.append)

    def run() -> None:
        yafsdp_cc.shard(model)
        square(model, mine(inputs())).backward()

    if refused := refusal(run):
        assert "leave.weight" in refused, refused
    else:
        assert len(called) == 1


def test_gradients_that_the_user_keeps_stay_what_they_were() -> None:
    on_ranks(2, _kept_gradients)


def _kept_gradients() -> None:
    model, plain = twins(Mlp)
    kept: list[dict[str, Any]] = []
    for step in range(2):
        square(model, mine(inputs(step=step))).backward()
        kept.append({name: parameter.grad for name, parameter in model.named_parameters()})
        model.zero_grad()
    for step in range(2):
        for name, truth in means(plain, square, inputs(step=step)).items():
            torch.testing.assert_close(whole(kept[step][name]), truth, msg=f"{name} of step {step}")


# -- more than one model, or a part of one -----------------------------------------------------------------------------


def test_a_generator_and_its_critic() -> None:
    on_ranks(2, _adversarial)


def _adversarial() -> None:
    maker, plain_maker = twins(stack)
    critic, plain_critic = twins(Mlp)
    sharded, plain = nn.ModuleList([maker, critic]), nn.ModuleList([plain_maker, plain_critic])

    def judge(both: Any, x: Tensor) -> Tensor:
        return (both[1](both[0](x).detach()) - 1).square().mean() + both[1](x).square().mean()

    def fool(both: Any, x: Tensor) -> Tensor:
        return both[1](both[0](x)).square().mean()

    for step in range(2):
        for loss, trainable in ((judge, True), (fool, False)):
            for each in (critic, plain_critic):
                each.requires_grad_(trainable)
            loss(sharded, mine(inputs(step=step))).backward()
            same_gradients(sharded, means(plain, loss, inputs(step=step)), within=1e-6)
            sharded.zero_grad()


def test_a_sharded_model_between_plain_layers() -> None:
    on_ranks(2, _between)


def _between() -> None:
    middle, plain_middle = twins(stack)
    model, plain = (nn.Sequential(seeded(Block), each, seeded(Block)) for each in (middle, plain_middle))
    square(model, mine(inputs())).backward()
    truth = means(plain, square, inputs())
    same_gradients(middle, {name: truth[f"1.{name}"] for name, _ in middle.named_parameters()}, within=1e-6)
    square(plain, mine(inputs())).backward()
    torch.testing.assert_close(model[0].inner.weight.grad, plain[0].inner.weight.grad)  # type: ignore[union-attr]
    assert "0.inner" in refusal(lambda: model.bfloat16())
    assert "copy the model before" in refusal(lambda: copy.deepcopy(model))


@pytest.mark.parametrize("separate", [False, True])
def test_two_groups_of_ranks_each_shard_a_model(separate: bool) -> None:
    on_ranks(4, _two_groups, separate)


def _two_groups(separate: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = twins(stack, mesh=mesh["shard"], separate_reduce_group=separate)
    square(model, mine(inputs())).backward()
    first = dist.get_rank() // 2 * 2
    same_gradients(model, means(plain, square, inputs()[first : first + 2]))


@pytest.mark.parametrize("world", [1, 3])
def test_worlds_of_one_and_of_three_with_a_second_communicator(world: int) -> None:
    on_ranks(world, _worlds)


def _worlds() -> None:
    model, plain = twins(Mlp, separate_reduce_group=True)
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)], within=1e-6)


def test_ignored_parameters_are_left_alone() -> None:
    on_ranks(2, _ignored)


def _ignored() -> None:
    model, plain = seeded(stack), seeded(stack)
    yafsdp_cc.shard(model, ignored_params=[model[0].inner.weight])  # type: ignore[index, union-attr, list-item]
    square(model, mine(inputs())).backward()
    truth = means(plain, square, inputs())
    square(plain, mine(inputs())).backward()
    for name, parameter in model.named_parameters():
        if name == "0.inner.weight":
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        else:
            torch.testing.assert_close(whole(parameter.grad), truth[name])


# -- modes of autograd -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["around", "recomputed"])
def test_autocast(where: str) -> None:
    on_ranks(2, _autocast, where)


class Recomputed(Mlp):
    """Runs one block twice within a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        def middle(x: Tensor) -> Tensor:
            for index in (0, 1, 2, 0):
                x = x + self.blocks[index](x)
            return x

        out: Tensor = self.leave(checkpoint(middle, self.enter(x), use_reentrant=False))
        return out


def _autocast(where: str) -> None:
    model, plain = twins(Mlp if where == "around" else Recomputed)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return out.float().square().mean()

    optimizers = sgd(model, plain)
    for step in range(3):
        loss(model, mine(inputs(step=step))).backward()
        truth = means(plain, loss, inputs(step=step))
        same_gradients(model, truth, within=1e-2)
        step_both(model, plain, truth, optimizers)
        for name, parameter in model.named_parameters():
            plain.get_parameter(name).data.copy_(whole(parameter.detach()))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for step in range(2):
            agrees(model, plain, mine(inputs(step=step)))


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("how", ["on_cpu", "as_is", "detached"])
def test_hooks_on_saved_tensors(how: str) -> None:
    on_ranks(2, _saved, how)


def _saved(how: str) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        hooks: Any = {
            "on_cpu": torch.autograd.graph.save_on_cpu,
            "as_is": lambda: torch.autograd.graph.saved_tensors_hooks(_identity, _identity),
            "detached": lambda: torch.autograd.graph.saved_tensors_hooks(torch.detach, _identity),
        }[how]
        with hooks():
            return (model(x) + model(2 * x)).square().mean()

    model, plain = twins(lambda: nn.Sequential(*(Block(Block()) for _ in range(4))), units=[Block])
    trains_on(model, plain, loss, [inputs(step=step) for step in range(2)], within=1e-6)


def test_anomaly_mode() -> None:
    on_ranks(2, _anomaly)


def _anomaly() -> None:
    model, plain = twins(Mlp)
    with torch.autograd.set_detect_anomaly(True):
        trains_on(model, plain, square, [inputs()])


def test_shard_without_grad_mode() -> None:
    on_ranks(2, _without_grad)


def _without_grad() -> None:
    with torch.no_grad():
        model, plain = twins(Mlp)
    trains_on(model, plain, square, [inputs()])


def test_shard_in_inference_mode_trains_or_says_what_to_do() -> None:
    on_ranks(2, _inference)


def _inference() -> None:
    model, plain = seeded(Mlp), seeded(Mlp)
    with torch.inference_mode():
        refused = refusal(lambda: yafsdp_cc.shard(model))
    if refused:
        assert "inference_mode" in refused, refused
    else:
        trains_on(model, plain, square, [inputs()])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_checkpoints_draw_the_same_dropout_again() -> None:
    on_ranks(2, _dropout)


def _dropout() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(int(1000 * x.abs().sum()))
        return square(model, x)

    model, plain = twins(Dropping, units=[Block])
    trains_on(model, plain, loss, [inputs(step=step) for step in range(2)], within=1e-6)


def test_a_model_compiled_as_a_whole() -> None:
    on_ranks(2, _compiled_whole)


def _compiled_whole() -> None:
    model, plain = twins(stack)
    compiled: Any = torch.compile(model, backend="eager")
    for step in range(2):
        square(compiled, mine(inputs(step=step))).backward()
        truth = means(plain, square, inputs(step=step))
        same_gradients(model, truth, within=1e-5)
        step_both(model, plain, truth, sgd(model, plain))
        reload(plain, model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            agrees(compiled, plain, mine(inputs()))


def test_torch_func_is_right_or_refused() -> None:
    on_ranks(2, _functorch)


def _functorch() -> None:
    model, plain = twins(stack)
    x = mine(inputs())

    def run(model: nn.Module) -> Tensor:
        return torch.func.grad(lambda x: model(x).square().sum())(x)

    found: list[Tensor] = []
    if not refusal(lambda: found.append(run(model))):
        torch.testing.assert_close(found[0], run(plain))
    trains_on(model, plain, square, [inputs()])


# -- precision ---------------------------------------------------------------------------------------------------------


def test_overflow_in_half_precision_skips_the_step_everywhere() -> None:
    skipped = on_ranks(2, _overflow)
    assert skipped[0] == skipped[1]
    assert skipped[0][0] is True
    assert skipped[0][-1] is False


def _overflow() -> list[bool]:
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model, _ = twins(Mlp, mp_policy=half)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = sgd(model)[0]
    skipped = []
    for step in range(6):
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        x = mine(inputs(step=step)) * (1e3 if step < 2 and dist.get_rank() == 1 else 1.0)
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(old, new.to_local()) for old, new in zip(before, model.parameters(), strict=True)]
        skipped.append(all(same))
        assert all(whole(parameter.detach()).isfinite().all() for parameter in model.parameters())
    return skipped


# -- at wrap time ------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "units": {"units": [nn.Linear]},
    "mp_policy": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "reshard_after_forward": {"reshard_after_forward": False},
    "separate_reduce_group": {"separate_reduce_group": True},
    "sync_module_states": {"sync_module_states": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_arguments_that_differ_between_ranks_are_named_on_every_rank(option: str) -> None:
    for message in on_ranks(2, _other_arguments, option, timeout=8):
        assert option in message, message


def _other_arguments(option: str) -> str:
    with short_timeout(3):
        given = OPTIONS[option] if dist.get_rank() == 1 else {}
        return refusal(lambda: yafsdp_cc.shard(stack(), **{"units": [Block], **given}))


def _optimizer_before(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _complex_parameter(model: Any) -> None:
    model[1].inner.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.complex64))


def _no_blocks(model: Any) -> None:
    for index in range(len(model)):
        model[index] = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(_optimizer_before, "SGD"), (_complex_parameter, "1.inner.bias"), (_no_blocks, "Block")],
)
def test_what_one_rank_refuses_every_rank_refuses(spoil: Callable[[Any], Any], says: str) -> None:
    for message in on_ranks(2, _one_refuses, spoil, timeout=20):
        assert says in message, message


def _one_refuses(spoil: Callable[[Any], Any]) -> str:
    model = seeded(stack)
    spoilt = spoil(model) if dist.get_rank() == 1 else None
    with short_timeout(2):
        message = refusal(lambda: yafsdp_cc.shard(model, units=[Block]))
        refusal(dist.barrier)  # so that the rank that refuses first does not end the other's wait by its own end
    del spoilt
    return message


def test_arguments_of_a_wrong_kind_are_refused_by_name() -> None:
    on_ranks(1, _wrong_kind)


def _wrong_kind() -> None:
    wrong: dict[str, Any] = {
        "units": 3,
        "mp_policy": torch.bfloat16,
        "ignored_params": ["0.inner.weight"],
        "mesh": dist.group.WORLD,
        "param_init_fn": 3,
    }
    for name, value in wrong.items():
        message = refusal(lambda: yafsdp_cc.shard(stack(), **{"units": [Block], name: value}))  # noqa: B023
        assert name in message, f"{name}: {message!r}"


def test_a_module_in_two_sharded_models_is_refused_by_name() -> None:
    on_ranks(2, _shared_module)


def _shared_module() -> None:
    one = stack()
    two = nn.Sequential(one[0].inner, nn.Linear(WIDTH, WIDTH))
    yafsdp_cc.shard(one)
    assert "0.weight" in refusal(lambda: yafsdp_cc.shard(two, units=[nn.Linear]))


# -- mishaps -----------------------------------------------------------------------------------------------------------


class Interrupted(Block):
    """As when Ctrl-C arrives."""

    arrives = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.arrives:
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("grad", [True, False])
def test_an_interrupt_in_a_forward_leaves_nothing_behind(grad: bool) -> None:
    on_ranks(2, _interrupted, grad)


def _interrupted(grad: bool) -> None:
    model, plain = twins(lambda: nn.Sequential(*(Interrupted() for _ in range(4))))
    Interrupted.arrives = False
    for step in range(3):
        trains_on(model, plain, square, [inputs(step=step)], within=1e-6)
        model[step].arrives = True
        with torch.set_grad_enabled(grad), pytest.raises(KeyboardInterrupt):
            model(mine(inputs(step=step)))
        model[step].arrives = False
    trains_on(model, plain, square, [inputs()], within=1e-6)
    counted = yafsdp_cc.counters_of(model)
    assert counted.spills == 0
    assert counted.owned_bytes == yafsdp_cc.plan_of(model).owned_bytes


def test_an_exception_between_held_micro_batches_keeps_what_is_held() -> None:
    on_ranks(2, _held)


def _held() -> None:
    model, plain = twins(Mlp)
    model.set_requires_gradient_sync(False)
    square(model, mine(inputs(step=0))).backward()
    blow = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        square(model, mine(inputs(step=1)))
    blow.remove()
    model.set_requires_gradient_sync(True)
    square(model, mine(inputs(step=2))).backward()
    same_gradients(model, added(*(means(plain, square, inputs(step=step)) for step in (0, 2))), within=1e-6)


def test_synchronisation_switched_between_forward_and_backward() -> None:
    on_ranks(2, _switched)


def _switched() -> None:
    model, plain = twins(Mlp)
    for step, synchronises in enumerate((False, True)):
        loss = square(model, mine(inputs(step=step)))
        model.set_requires_gradient_sync(synchronises)
        loss.backward()
    same_gradients(model, added(*(means(plain, square, inputs(step=step)) for step in range(2))), within=1e-6)


# -- memory ------------------------------------------------------------------------------------------------------------


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("backward", [True, False])
def test_no_tensor_is_left_over_by_a_step(backward: bool) -> None:
    on_ranks(2, _left_over, backward)


def _left_over(backward: bool) -> None:
    model, _ = twins(stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counts = []
    for step in range(60):
        loss = square(model, mine(inputs()))
        if backward:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
        if step in (9, 59):
            for ring in root_of(model).weight_rings.values():
                for slot in ring.slots:
                    slot.ready.settle()  # what is under way holds on to its buffers
            counts.append(_tensors())
    assert counts[0] == counts[1]


class Marked(torch.autograd.Function):
    """Saves an object that can be watched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Any) -> Tensor:
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@pytest.mark.parametrize("backward", [False, True])
def test_what_came_before_the_model_is_freed_with_its_output(backward: bool) -> None:
    on_ranks(1, _freed_at_once, backward)


def _freed_at_once(backward: bool) -> None:
    model, _ = twins(stack)
    gc.collect()
    gc.disable()
    mark = Block()
    freed = weakref.ref(mark)
    loss = square(model, Marked.apply(numbers(2, WIDTH, grad=True), mark))
    if backward:
        loss.backward()
    del loss, mark
    assert freed() is None


def test_a_deleted_model_leaves_nothing_behind_and_another_takes_its_place() -> None:
    on_ranks(2, _deleted)


def _deleted() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, _ = twins(stack)
    square(model, mine(inputs())).backward()
    engine, slot = weakref.ref(root_of(model)), weakref.ref(root_of(model).units[0].home.slot)
    del model
    gc.collect()
    assert engine() is None
    assert slot() is None
    path: list[Any] = [None]
    if rank == 0:
        path[0] = tempfile.mkstemp()[1]
    dist.broadcast_object_list(path)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(path[0], world), rank=rank, world_size=world)
    model, plain = twins(stack)
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


def test_an_untied_weight_read_elsewhere_is_right_or_refused_by_name() -> None:
    on_ranks(2, _used_elsewhere)


class Elsewhere(nn.Module):
    """Reads the weight of its embedding in a place of its own, without tying it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3000, WIDTH)
        self.blocks = stack(3)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.blocks(self.embed(tokens)), self.embed.weight)


def _used_elsewhere() -> None:
    tokens = [torch.arange(4) + rank for rank in range(2)]
    model, plain = twins(Elsewhere, units=[Block])
    if refused := refusal(lambda: trains_on(model, plain, square, [tokens], within=1e-6)):
        assert "embed.weight" in refused, refused
    model = seeded(Elsewhere)
    yafsdp_cc.shard(model, units=[Block, model])
    trains_on(model, plain, square, [tokens], within=1e-6)
