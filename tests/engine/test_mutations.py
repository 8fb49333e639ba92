"""Every wait, event and reference that orders streams, each taken away: the model of streams must see that it is gone.

A row names the rule, takes away what keeps it, and runs a program that needs it. Unbroken, all programs pass.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import yafsdp_cc
from tests import internals
from tests.engine.test_streams import BF16, penalised, steps
from tests.models import WIDTH, Mlp
from tests.ranks import RankError, on_ranks
from tests.streams import streams
from yafsdp_cc.engine.streams import PinnedCopy

ORDER, FREED, NUMBERS = "are not in order", "freed before", "is not finite"
EITHER = f"{ORDER}|{FREED}"


def trained(program: Callable[[Any, torch.optim.Optimizer, Tensor], None], **options: Any) -> None:
    """Run a program on a model of four blocks, sharded with these options."""
    model: Any = yafsdp_cc.shard(Mlp(4), **options)
    program(model, torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(4, WIDTH))
    for name, parameter in internals.sharded_parameters(model):
        assert parameter.full_tensor().isfinite().all(), f"{name} {NUMBERS}"


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


plain = partial(trained, steps)
apart = partial(plain, separate_reduce_group=True)


def unshards(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Reads gathered weights outside of a forward."""
    for _ in range(2):
        model.blocks[0][0].unshard()
        assert model.blocks[0][0].weight.sum().isfinite()
        loss_of(model, x).backward()
        optimizer.step()


def gives_up(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Lets an overflow buffer go before its all-gather is waited for."""
    y = loss_of(model, x)
    model.blocks[0][0].unshard(async_op=True)
    model.blocks[0][0].reshard()
    torch.zeros(8)
    y.backward()
    optimizer.step()


def unshards_aside(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Lets an overflow buffer go that was allocated on another stream than it was used on."""
    y, beside = loss_of(model, x), torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        model.blocks[0][0].unshard()
    with torch.no_grad():
        loss_of(model, x)
    model.blocks[0][0].reshard()
    torch.zeros(8)
    y.backward()


def changes_settings(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Has the engine make new buffers, in memory freed by others, after the event that the next forward waits for."""
    loss_of(model, x).backward()
    optimizer.step()
    stepped = torch.cuda.current_stream().record_event()
    model.set_reshard_after_forward(False)
    model.set_requires_all_reduce(True)  # a collective, for which the engine is made anew
    model.set_post_optim_event(stepped)
    loss_of(model, x)


def tells_of_steps(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Has forwards wait for the event of the optimizer's step alone."""
    for _ in range(3):
        loss_of(model, x).backward()
        optimizer.step()
        model.set_post_optim_event(torch.cuda.current_stream().record_event())


def reads_residuals(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Looks at residuals after a backward that raised."""
    model.enter.register_forward_hook(lambda module, args, output: output.register_hook(fails) and None)
    y = loss_of(model, x)
    with pytest.raises(ZeroDivisionError):
        y.backward()
    internals.mean_residuals_of(model)


class Scaler:
    """What ``follow_scaler`` asks of a ``GradScaler``."""

    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def defers(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Rescales residuals that a backward which reduces nothing has written to."""
    scaler: Any = Scaler()
    yafsdp_cc.follow_scaler(model, scaler)
    for sums in (True, False, True):
        model.set_requires_gradient_sync(sums)
        loss_of(model, x).backward()
        scaler.scale *= 2.0
    optimizer.step()


def reads_back(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Reads numbers back twice in a row, as the fallback of codecs does between other waits of the host."""
    readback = PinnedCopy(1, x.dtype, internals.state_of(model).context.device)
    for _ in range(2):
        readback.receive(x.new_zeros(1))


def fails(gradient: Tensor) -> None:
    raise ZeroDivisionError


class Nested(nn.Module):
    """A unit with weights of its own around two others of the same role."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.inner(self.before(x)))
        return out


def nests(sends: tuple[bool, ...] = (True,), **options: Any) -> None:
    """Needs overflow buffers for gradients, for the enclosing unit has taken one of the role's."""
    model: Any = nn.Sequential(Nested(), Nested(), Nested())
    for outer in model:
        for inner in outer.inner:
            yafsdp_cc.fully_shard(inner, **options)
        yafsdp_cc.fully_shard(outer, **options)
    yafsdp_cc.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(4):
        model.set_requires_gradient_sync(sends[step % len(sends)])
        loss_of(model, torch.randn(4, WIDTH)).backward()
        torch.zeros(8)
        optimizer.step()
    assert yafsdp_cc.counters_of(model).overflow_buffers > 0


class Branches(nn.Module):
    """Runs one layer or another; both are in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.layers[which](x)
        return out


def branches() -> None:
    """Ranks use different parameters, and hand out the gradients of both."""
    model: Any = yafsdp_cc.fully_shard(Branches())
    model(torch.randn(4, WIDTH), dist.get_rank()).square().mean().backward()
    for name, parameter in internals.sharded_parameters(model):
        assert parameter.grad.full_tensor().isfinite().all(), f"the gradient of {name} {NUMBERS}"


class Chosen(nn.Module):
    """Blocks of which each forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(6))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        for index in used:
            x = self.blocks[index](x)
        return x


def leaves_out() -> None:
    """Gathers blocks ahead that are then not used."""
    model = Chosen()
    yafsdp_cc.shard(model, units=list(model.blocks), mp_policy=BF16)
    for used in ((0, 1, 2, 3, 4, 5), (0, 3, 4), (0, 1, 2, 3, 4, 5)):
        model(torch.randn(4, WIDTH), used).square().mean().backward()


def replicates(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for sums in (True, False, True):
        model.set_requires_all_reduce(sums)
        loss_of(model, x).backward()
    optimizer.step()


def with_replicas() -> None:
    trained(replicates, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def on_both(x: Tensor, here: nn.Module, there: nn.Module) -> Any:
    """Return what one module makes of ``x`` on this stream, and another one on a stream beside it."""
    this = torch.cuda.current_stream()
    x.record_stream(Forking.beside)
    Forking.beside.wait_stream(this)
    first = here(x)
    with torch.cuda.stream(Forking.beside):
        second = there(x)
    this.wait_stream(Forking.beside)
    second.record_stream(this)
    return first, second


class Forked(nn.Module):
    """A unit with a layer, and so an output, on each of two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return on_both(x, self.one, self.two)


class Forking(nn.Module):
    """Units that use two streams, and units that run on both, in turn or these first."""

    beside: torch.cuda.Stream

    def __init__(self, alternates: bool) -> None:
        super().__init__()
        self.alternates = alternates
        Forking.beside = torch.cuda.Stream()
        self.inside = nn.ModuleList(Forked() for _ in range(4))
        self.around = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        blocks = [*self.around, *self.inside]
        if self.alternates:
            blocks = [block for pair in zip(self.inside, self.around, strict=True) for block in pair]
        for block in blocks:
            x = x + sum(block(x) if isinstance(block, Forked) else on_both(x, block, block))
        return x


def aside(alternates: bool = True) -> None:
    model: Any = Forking(alternates)
    for block in (*model.inside, *model.around):
        yafsdp_cc.fully_shard(block)
    yafsdp_cc.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        loss_of(model, torch.randn(4, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Beside(nn.Module):
    """Blocks of which the first runs beside all others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.stream = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        this, first = torch.cuda.current_stream(), self.blocks[0]
        self.stream.wait_stream(this)
        x.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            y: Tensor = first(x)
        for block in self.blocks[1:]:
            x = block(x)
        this.wait_stream(self.stream)
        y.record_stream(this)
        return x + y


def first_beside() -> None:
    model = Beside()
    yafsdp_cc.shard(model, units=list(model.blocks), mp_policy=BF16)
    for _ in range(3):
        loss_of(model, torch.randn(4, WIDTH)).backward()


def forward_aside(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Has a whole forward on another stream than the backward is called on."""
    side = torch.cuda.Stream()
    for step in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if step == 1 else torch.cuda.current_stream()):
            y = loss_of(model, x)
        torch.cuda.current_stream().wait_stream(side)
        y.backward()
        optimizer.step()
        optimizer.zero_grad()


class Row(NamedTuple):
    rule: str
    break_it: Callable[[], None]
    program: Callable[[], None]
    world: int = 1
    seen: str = ORDER


OFFLOADED = CPUOffloadPolicy()
first_on_both = partial(aside, alternates=False)
casts = partial(plain, mp_policy=BF16)

ROWS = [
    Row("a forward waits for its weights", partial(internals.break_waits_in, "unshard"), plain),
    Row(
        "a backward waits for its weights",
        partial(internals.break_waits_in, "unshard_for_backward", "pre_backward"),
        apart,
    ),
    Row(
        "weights that unshard() shows are there",
        partial(internals.break_waits_in, "register_until_reshard"),
        partial(trained, unshards),
    ),
    Row("a weight buffer is refilled after its last use", internals.break_buffer_release, plain),
    Row("... on all streams", internals.break_order_of_users, first_on_both),
    Row(
        "an overflow buffer is filled after what lay there", internals.break_overflow_record, partial(trained, gives_up)
    ),
    Row(
        "... and freed after its all-gather",
        internals.break_overflow_reference,
        partial(trained, gives_up),
        1,
        FREED,
    ),
    Row(
        "... and after users on other streams",
        internals.break_order_of_freed_memory,
        partial(trained, unshards_aside),
        1,
        FREED,
    ),
    Row("an all-gather comes after the cast of its shard", partial(internals.break_preparation, "record"), casts, 2),
    Row("... which comes after users on all streams", partial(internals.break_preparation, "join"), first_beside, 2),
    Row("... and after what was gathered in vain", partial(internals.break_preparation, "wait"), leaves_out, 2),
    Row("an all-gather comes after the optimizer", partial(internals.break_stream_order_in, "begin_iteration"), plain),
    Row(
        "... and that of unshard()",
        partial(internals.break_stream_order_in, "unshard_until_reshard"),
        partial(trained, unshards),
    ),
    Row(
        "... where the forward waits for the optimizer's event alone",
        partial(internals.break_stream_order_in, "assemble"),
        partial(trained, changes_settings),
    ),
    Row(
        "... and after that event",
        partial(internals.break_event_wait_in, "begin_iteration"),
        partial(trained, tells_of_steps),
    ),
    Row("a reduce comes after the gradients", partial(internals.break_stream_order_in, "issue_reduce"), plain),
    Row(
        "a gradient buffer is refilled after its reduce",
        partial(internals.break_waits_in, "take_grads", "pre_backward"),
        apart,  # on one stream the next all-gather, which is waited for, comes after the reduce
    ),
    Row("... and freed after it", internals.break_grad_buffer_reference, nests, 1, FREED),
    Row(
        "... where residuals take gradients in",
        internals.break_grad_buffer_reference,
        partial(nests, (False, True), compression="int8"),
        2,
        FREED,
    ),
    Row("a backward ends after its reduces", partial(internals.break_waits_in, "wait_for_reduces"), plain),
    Row(
        "... and after deferrals, where it reduces nothing",
        partial(internals.break_wait_for_reduces_in, "finish_backward"),
        partial(trained, defers, compression="int8"),
        2,
    ),
    Row(
        "residuals are read after reduces, even of a backward that raised",
        partial(internals.break_wait_for_reduces_in, "compressed_sums"),
        partial(trained, reads_residuals, compression="int8"),
        2,
    ),
    Row(
        "replicated gradients are summed after they are written",
        partial(internals.break_stream_order_in, "all_reduce"),
        plain,
        2,
    ),
    Row("... and used after that", partial(internals.break_handle_wait_in, "all_reduce"), plain, 2),
    Row(
        "replicas sum after the shard's ranks",
        partial(internals.break_stream_order_in, "issue_all_reduce"),
        with_replicas,
        2,
    ),
    Row("... and a backward ends after that", internals.break_wait_for_replicas, with_replicas, 2),
    Row("autograd adds to .grad after reduces", internals.break_wait_of_autograd, partial(trained, penalised)),
    Row("what nobody has written is zero", internals.break_zeroing, branches, 2, NUMBERS),
    Row("the engine's nodes run on one stream", internals.break_backward_stream, first_on_both),
    Row("an output on another stream waits for the weights", partial(internals.break_waits_in, "pre_backward"), aside),
    Row(
        "gradients are joined with the stream around backward()",
        internals.break_leaf_stream,
        partial(trained, forward_aside),
        1,
        EITHER,
    ),
    Row("the host writes after a copy has read", partial(internals.break_readback_waits, "send"), plain),
    Row(
        "the host reads after a copy has written",
        partial(internals.break_readback_waits, "receive"),
        partial(trained, reads_back),
    ),
    Row(
        "the host writes offloaded weights after copies",
        internals.break_host_wait,
        partial(plain, offload_policy=OFFLOADED),
    ),
    Row("... of which an event tells", internals.break_copy_events, partial(plain, offload_policy=OFFLOADED)),
]


def ran(program: Callable[[], None], break_it: Callable[[], None] | None = None) -> None:
    if break_it is not None:
        break_it()
    torch.manual_seed(0)
    with streams():
        program()
        gc.collect()
        torch.zeros(1)  # what is given back is looked at by the next operation


PROGRAMS = {str(row.program): (row.program, row.world) for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_is_missed(row: Row) -> None:
    with pytest.raises(RankError, match=row.seen):
        on_ranks(row.world, ran, row.program, row.break_it)


@pytest.mark.parametrize(("program", "world"), PROGRAMS.values(), ids=range(len(PROGRAMS)))
def test_passes_unbroken(program: Callable[[], None], world: int) -> None:
    on_ranks(world, ran, program)
