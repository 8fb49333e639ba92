"""Exceptions and interrupts, after which training goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.internals import mean_residuals_of
from tests.models import WIDTH, Block
from tests.ranks import ranks
from tests.twins import inputs, means, mine, same_gradients, square, trains_on, twins, whole


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
@ranks(2)
def test_training_goes_on_after_an_exception(where: str, units: str) -> None:
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


@ranks(2)
def test_sums_over_replicas_that_a_backward_has_left_are_dropped() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def build() -> nn.Module:
        return nn.Sequential(*(Fuse(nn.Linear(WIDTH, WIDTH)) for _ in range(5)))

    model, plain = twins(build, units=[Fuse], mesh=mesh)
    for fuse in (0, 2):
        model[fuse].blows = "backward"
        with pytest.raises(ArithmeticError):
            square(model, mine(inputs(step=9))).backward()
        model[fuse].blows = ""
        model.zero_grad()
        trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


class Interrupted(Block):
    """As when Ctrl-C arrives."""

    arrives = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.arrives:
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("grad", [True, False])
@ranks(2)
def test_an_interrupt_in_a_forward_leaves_nothing_behind(grad: bool) -> None:
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
    assert counted.overflow_buffers == 0
    assert counted.owned_bytes == yafsdp_cc.plan_of(model).owned_bytes


def _sums_lose_nothing(model: nn.Module, plain: nn.Module, steps: range) -> None:
    """Σ decoded + residual behind the steps = Σ means + residual before them."""
    due, total = mean_residuals_of(model), {name: torch.zeros_like(each) for name, each in plain.named_parameters()}
    for step in steps:
        square(model, mine(inputs(step=step))).backward()
        truth = means(plain, square, inputs(step=step))
        for name, parameter in model.named_parameters():
            total[name] += whole(parameter.grad) - truth[name]
        model.zero_grad()
    for name, left in mean_residuals_of(model).items():
        torch.testing.assert_close(total[name] + left, due[name], rtol=0, atol=1e-6, msg=name)


@ranks(2)
def test_factors_of_powersgd_stay_alike() -> None:
    """One rank alone drops what an evaluation has left. A backward raises behind some messages, and one rank resets
    once more."""
    options = yafsdp_cc.Compression("powersgd", matrix_rank=1, residual="fp32")
    model, plain = twins(lambda: nn.Sequential(*(Fuse(nn.Linear(WIDTH, WIDTH)) for _ in range(3))), compression=options)
    _sums_lose_nothing(model, plain, range(1))
    if dist.get_rank() == 1:
        model.reset_iter_state()
    _sums_lose_nothing(model, plain, range(1, 4))
    model[0].blows = "backward"
    with pytest.raises(ArithmeticError):
        square(model, mine(inputs())).backward()
    model[0].blows = ""
    for _ in range(1 + dist.get_rank()):
        model.reset_iter_state()
    model.zero_grad()
    _sums_lose_nothing(model, plain, range(4, 6))


@ranks(2)
def test_after_an_interrupt_a_unit_trains_by_itself() -> None:
    model, plain = twins(lambda: nn.Sequential(*(Interrupted() for _ in range(4))))
    Interrupted.arrives = False
    model[2].arrives = True
    with pytest.raises(KeyboardInterrupt):
        model(mine(inputs()))
    trains_on(model, plain, lambda whole, x: square(whole[1], x), [inputs(step=1)])
    trains_on(model, plain, lambda whole, x: square(whole[0], x), [inputs(step=2)])
    model[2].arrives = False
    trains_on(model, plain, square, [inputs(step=3)])


@ranks(2)
def test_after_an_interrupt_an_earlier_forward_has_its_backward() -> None:
    model, plain = twins(lambda: nn.Sequential(*(Interrupted() for _ in range(4))))
    Interrupted.arrives = False
    loss = square(model, mine(inputs()))
    model[2].arrives = True
    with pytest.raises(KeyboardInterrupt):
        model(mine(inputs(step=1)))
    loss.backward()
    same_gradients(model, means(plain, square, inputs()))


@ranks(2)
def test_units_of_one_forward_may_run_in_other_threads() -> None:
    class Threaded(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for module in self:
                with ThreadPoolExecutor(1) as pool:
                    x = pool.submit(module, x).result()
            return x

    model, plain = twins(lambda: Threaded(*(Block() for _ in range(3))), units=[Block])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


@pytest.mark.filterwarnings("error")
@ranks(2)
def test_a_hook_that_raises_before_the_engine_s_leaves_nothing_behind() -> None:
    model, plain = twins(lambda: nn.Sequential(*(Interrupted() for _ in range(3))))
    Interrupted.arrives = False
    model[1].arrives = True
    with pytest.raises(KeyboardInterrupt):  # which leaves a forward that is never ended
        model(mine(inputs()))
    model[1].arrives = False
    for module in (model, model[1]):
        handle = module.register_forward_pre_hook(lambda *_: _blow(torch.zeros(())), prepend=True)
        with pytest.raises(ArithmeticError):
            model(mine(inputs()))
        handle.remove()
        trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


@ranks(2)
def test_a_backward_that_raised_can_be_run_again() -> None:
    fails = [True]

    class Delicate(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if x.requires_grad:
                x.register_hook(lambda _: _blow(x) if fails[0] else None)
            return x

    model, plain = twins(lambda: nn.Sequential(Block(), Block(), Delicate(), Block(), Block()), units=[Block])
    loss = square(model, mine(inputs()))
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    fails[0] = False
    model.zero_grad()
    loss.backward()
    same_gradients(model, means(plain, square, inputs()), 1e-6)
    model.zero_grad()
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)
