"""A parameter server on real ranks against one process that makes the same updates, and what ends it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import yafsdp_cc
from tests.ranks import RankError, on_ranks, ranks
from tests.twins import refusal
from yafsdp_cc.server import ParameterServer, ServerShard

TURNS = (0, 1, 2, 3, 1, 1, 0, 3, 2, 0, 0, 0, 3, 1, 2, 2)
"""Who pushes, and pulls again, one after the other."""
RESUMED = 9
"""Turns before a checkpoint."""


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model of 617 elements, in shards that end within parameters, and in a frozen one that is not served."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 6), nn.Linear(6, 1)).to(dtype)
    model[3].requires_grad_(False)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def gradient(model: nn.Module, weights: Tensor, worker: int, step: int) -> Tensor:
    """The gradient of a worker's batch at these weights."""
    vector_to_parameters(weights, trained(model))
    backward(model, worker, step)
    flat = parameters_to_vector([param.grad for param in trained(model) if param.grad is not None]).clone()
    model.zero_grad()
    return flat


def backward(model: nn.Module, worker: int, step: int) -> None:
    draws = torch.Generator().manual_seed(100 * step + worker)
    x = torch.randn(16, 8, generator=draws).to(next(model.parameters()).dtype)
    (model(x) - x.sum(1, keepdim=True).sin()).square().mean().backward()


def weights_of(model: nn.Module) -> Tensor:
    return parameters_to_vector(trained(model)).detach().clone()


@pytest.mark.parametrize("world", [2, 4])
@ranks("world")
def test_without_staleness_it_is_synchronous_training(world: int) -> None:
    """A worker that has less to do leaves early, and the others go on."""
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    steps = [6 if worker else 3 for worker in range(world)]
    model, twin = net(), net()
    expected = [weights_of(twin)]
    param = nn.Parameter(expected[0].clone())
    optimizer = torch.optim.SGD([param], **settings)
    for step in range(max(steps)):
        gradients = [gradient(twin, expected[-1], worker, step) for worker in range(world) if step < steps[worker]]
        param.grad = sum(gradients[1:], start=gradients[0])
        optimizer.step()
        expected.append(param.detach().clone())
    rank = dist.get_rank()
    with torch.no_grad():
        model[0].weight.add_(rank)  # rank 0's are everybody's
    with ParameterServer(model, torch.optim.SGD, max_staleness=0, delay_compensation=9.0, **settings) as server:
        for step in range(steps[rank]):
            server.pull()
            assert torch.equal(weights_of(model), expected[step]), step
            backward(model, rank, step)
            server.push()
    assert torch.equal(weights_of(model), expected[-1])


RULES: dict[str, dict[str, Any]] = {
    "asgd": {"optimizer": torch.optim.SGD, "lr": 0.05},
    "dc-asgd": {"optimizer": torch.optim.SGD, "lr": 0.05, "momentum": 0.9, "delay_compensation": 0.7},
    "adaptive": {"optimizer": torch.optim.SGD, "lr": 0.05, "delay_compensation": 2.0, "adaptive": True}
    | {"mean_square_decay": 0.0},
    "adamw": {"optimizer": torch.optim.AdamW, "lr": 0.01, "delay_compensation": 2.0, "adaptive": True},
}


def simulated(
    optimizer: type[torch.optim.Optimizer],
    delay_compensation: float = 0.0,
    adaptive: bool = False,
    mean_square_decay: float = 0.95,
    **settings: Any,
) -> tuple[list[Tensor], Counter[int]]:
    """The weights after each turn, and how many updates each gradient came late, in one process."""
    twin = net()
    param = nn.Parameter(weights_of(twin))
    stepper = optimizer([param], **settings)
    seen = {worker: (param.detach().clone(), 0) for worker in range(4)}
    mean_square, found, delays = torch.zeros_like(param), [], Counter[int]()
    for turn, worker in enumerate(TURNS):
        if turn == RESUMED:
            seen = {worker: (param.detach().clone(), turn) for worker in range(4)}
        pulled, then = seen[worker]
        g = gradient(twin, pulled, worker, turn)
        mean_square = mean_square_decay * mean_square + (1 - mean_square_decay) * g * g
        strength = delay_compensation / (mean_square + 1e-7).sqrt() if adaptive else delay_compensation
        param.grad = (g + strength * g * g * (param - pulled)).detach()
        for group in stepper.param_groups:
            group["lr"] = settings["lr"] / (1 + turn)
        stepper.step()
        delays[turn - then] += 1
        seen[worker] = (param.detach().clone(), turn + 1)
        found.append(param.detach().clone())
    return found, delays


@pytest.mark.parametrize("rule", RULES)
@ranks(4)
def test_late_gradients_update_as_in_one_process_and_after_a_resume(rule: str, tmp_path: Path) -> None:
    expected, delays = simulated(**RULES[rule])
    rank = dist.get_rank()
    model, settings = net(), RULES[rule] | {"lr_lambda": lambda update: 1 / (1 + update), "max_staleness": None}
    server = ParameterServer(model, **settings)
    server.pull()
    dist.barrier()
    for turn, worker in enumerate(TURNS):
        if turn == RESUMED:
            torch.save(server.state_dict(), tmp_path / f"{rank}.pt")
            counted = server.shard.delays
            server.close()
            model = net()
            server = ParameterServer(model, **settings | {"lr": 0.5})  # the rate is that of the checkpoint
            server.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
            server.pull()
            dist.barrier()
        if worker == rank:
            backward(model, rank, turn)
            server.push()
            server.pull()
            torch.testing.assert_close(weights_of(model), expected[turn], rtol=1e-12, atol=1e-13)
        dist.barrier()
    server.close()
    torch.testing.assert_close(weights_of(model), expected[-1], rtol=1e-12, atol=1e-13)
    assert counted + server.shard.delays == delays
    with pytest.raises(ValueError, match=rf"rank {rank} of 4 cannot resume from the part of rank {(rank + 1) % 4}"):
        server.load_state_dict(torch.load(tmp_path / f"{(rank + 1) % 4}.pt"))


@pytest.mark.parametrize("codec", [None, "int4"])
def test_killed_and_resumed_synchronous_training_is_that_which_went_on(codec: str | None, tmp_path: Path) -> None:
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    undisturbed = on_ranks(2, _train_synchronously, tmp_path / "undisturbed", codec)[0]
    with pytest.raises(RankError):  # and the other rank is killed then
        on_ranks(2, _train_synchronously, tmp_path / "killed", codec, 5)
    assert torch.equal(on_ranks(2, _train_synchronously, tmp_path / "killed", codec, -1, 4)[0], undisturbed)


def _train_synchronously(folder: Path, codec: str | None, killed: int = -1, first: int = 0) -> Tensor:
    """Make seven steps, and save after every second one."""
    model, rank = net(torch.float32), dist.get_rank()
    part = folder / f"{rank}.pt"
    with ParameterServer(model, lr=0.05, momentum=0.9, max_staleness=0, codec=codec) as server:
        if first:
            server.load_state_dict(torch.load(part))
        for step in range(first, 7):
            server.pull()
            backward(model, rank, step)
            if step == killed and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            server.push()
            if step % 2:
                torch.save(server.state_dict(), part)
    return weights_of(model)


@pytest.mark.parametrize("staleness", [0, None])
@ranks(2)
def test_pushes_on_their_way_are_not_applied_to_what_is_loaded(staleness: int | None) -> None:
    model, rank = net(), dist.get_rank()
    with ParameterServer(model, lr=0.1, max_staleness=staleness, timeout=20) as server:
        server.pull()
        backward(model, rank, 0)
        server.push()
        saved = server.state_dict()
        server.pull()
        dist.barrier()  # no rank pushes before all have pulled
        expected = weights_of(model)
        backward(model, rank, 1)
        update = server._update

        def late(worker: int, message: Tensor) -> None:
            if worker != rank:
                time.sleep(0.1)  # the worker of this rank goes on meanwhile
            update(worker, message)

        vars(server)["_update"] = late  # a slow network
        server.push()
        server.load_state_dict(saved)
        server.pull()
        assert torch.equal(weights_of(model), expected)
        assert server.state_dict()["shard"]["clocks"] == [1, 1]


@pytest.mark.parametrize("codec", ["int4", "onebit"])
@ranks(2)
def test_what_a_message_leaves_out_is_sent_later(codec: str) -> None:
    """The updates and what is still to be sent add up to all gradients."""
    model, rank = net(torch.float32), dist.get_rank()
    start, total = weights_of(model), torch.zeros(1)
    with ParameterServer(model, lr=0.01, max_staleness=1, codec=codec) as server:
        for step in range(8):
            server.pull()
            backward(model, rank, step)
            total = total + parameters_to_vector([p.grad for p in trained(model) if p.grad is not None])
            server.push()
    assert server._residual is not None
    owed = server._residual.values.flatten()[: len(total)]
    assert owed.norm() > 1e-3 * total.norm()
    sent = total - owed
    dist.all_reduce(sent)
    torch.testing.assert_close(weights_of(model), start - 0.01 * sent, rtol=1e-4, atol=1e-6)


@ranks(2)
def test_a_worker_that_is_too_far_ahead_waits_and_not_for_ever() -> None:
    model, rank, store = net(), dist.get_rank(), dist.distributed_c10d._get_default_store()
    server = ParameterServer(model, lr=0.01, max_staleness=2, timeout=3)
    for count in itertools.count() if rank == 0 else range(1):
        if count == 3:
            store.set("three ahead", "")
        if count == 4:
            with pytest.raises(RuntimeError, match=r"rank 0 has waited 0:00:03 for ranks \[1\]"):
                server.pull()
            store.set("given up", "")
            break
        server.pull()
        assert server.shard.clocks[1] == (count == 3)  # the fourth pull waits for the other's push
        if rank == 1:
            store.wait(["three ahead"])
        backward(model, rank, count)
        server.push()
    if rank == 1:
        store.wait(["given up"])
        with pytest.raises(RuntimeError, match="rank 0 has waited"):
            server.pull()
        with pytest.raises(RuntimeError, match="without pull"):
            server.push()


@pytest.mark.parametrize("end", ["killed", "raises", "raises before a checkpoint"])
def test_the_others_end_with_an_error_that_names_the_rank(end: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_work_until_one_ends, args=(rank, end, tmp_path)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [1, -signal.SIGKILL if end == "killed" else 1, 1]
    for rank in (0, 2):
        said = (tmp_path / str(rank)).read_text()
        assert ("rank 1 has ended without close()" if end == "killed" else "rank 1 has failed: ValueError: a") in said


def _work_until_one_ends(rank: int, end: str, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    mock.patch("yafsdp_cc.ranks.checks._TIMEOUT", 0.2).start()
    model = net()
    try:
        with ParameterServer(model, lr=0.01, max_staleness=1) as server:
            for step in itertools.count():
                server.pull()
                backward(model, rank, step)
                if rank == 1 and step == 5:
                    if end == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError("a bad batch")
                if step == 5 and "checkpoint" in end:
                    server.state_dict()
                server.push()
    except (RuntimeError, ValueError) as error:
        (folder / str(rank)).write_text(str(error))
        raise SystemExit(1) from None


@ranks(2)
def test_what_a_server_cannot_do_is_told_to_every_rank() -> None:
    """Both ranks raise what a server thread raises: for an unknown request, and for a learning rate that fails."""

    def fails(update: int) -> float:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(f"no rate for update {update}")
        return 1.0

    for request, told in (
        (9, "rank 1 has sent 9, which is no request"),
        (-1, "sent -1"),
        (1 << 40, "sent 1.09951e"),
        (0, ""),
    ):
        model = net()
        server = ParameterServer(model, lr=0.1, lr_lambda=None if request else fails, max_staleness=None, timeout=30)
        server.pull()
        dist.barrier()  # a request that fails would end the other rank's first pull
        if dist.get_rank() == 1:
            backward(model, 1, 0)
            if request:
                server._send(request)
            else:
                server.push()
        found = refusal(lambda server=server: [server.pull() for _ in range(1000)])  # until this rank knows
        assert (told or "rank 0 has failed: ValueError: no rate for update 0") in found
        dist.barrier()


@ranks(2)
def test_sparse_gradients_are_pushed_whole() -> None:
    sparse, dense = (nn.Embedding(5, 2, sparse=each) for each in (True, False))
    for model in (sparse, dense):
        nn.init.ones_(model.weight)
        with ParameterServer(model, lr=0.1, max_staleness=0) as server:
            server.pull()
            model(torch.tensor([0, 1, 1])).sum().backward()
            server.push()
    assert sparse.weight.equal(dense.weight)
    assert not sparse.weight.eq(1).all()


@ranks(2)
def test_frozen_parameters_are_those_of_rank_0() -> None:
    model, rank = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).requires_grad_(False), dist.get_rank()
    model[1].requires_grad_(True)
    phase = torch.full((2,), 1.0 + rank, dtype=torch.complex64).conj()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(rank + 1)
    for name, values in (("wide", torch.tensor(1.0 + rank).expand(2)), ("phase", phase), ("turn", phase.mul(1j).imag)):
        model.register_parameter(name, nn.Parameter(values, requires_grad=False))
    with ParameterServer(model, lr=0.1) as server:
        server.pull()
        assert all(param.eq(1).all() for param in model.parameters())


@ranks(1)
def test_what_cannot_be_served_is_refused() -> None:
    mixed = net()
    mixed[2].half()
    scattered = net()
    scattered.register_parameter("few", nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False))
    for model, settings, said in (
        (net().requires_grad_(False), {}, "Sequential has no parameter that requires a gradient"),
        (scattered, {}, "ParameterServer takes dense tensors, and 'few' is sparse"),
        (mixed, {}, r"'2.weight' is torch.float16, where others are torch.float64: model.to\(torch.float64\)"),
        (net(), {"codec": "int8"}, r"'0.weight' is torch.float64, where a codec takes torch.float32"),
        (yafsdp_cc.shard(net().float()), {}, "'0.weight' is sharded; pass the plain model"),
        (net(), {"optimizer": torch.optim.LBFGS}, "optimizer=LBFGS: a parameter server needs an elementwise one"),
        (net(), {"mean_square_decay": 1.0}, "mean_square_decay=1.0: from 0 to less than 1"),
        (net(), {"max_staleness": -1}, "max_staleness=-1: neither can be negative"),
    ):
        with pytest.raises(ValueError, match=said):
            ParameterServer(model, **{"lr": 0.1, **settings})
    alone = net()
    with ParameterServer(alone, lr=0.1) as server:
        server.pull()
        backward(alone, 0, 0)
        server.push()
        parts = server.state_dict()
        server.close()  # the end of the block has nothing left to do
    torch.testing.assert_close(weights_of(alone), weights_of(net()) - 0.1 * gradient(net(), weights_of(net()), 0, 0))
    for call in (server.pull, server.state_dict, server.close):
        with pytest.raises(RuntimeError, match="this ParameterServer is closed"):
            call()
    for model, settings, said in (
        (net(), {"optimizer": torch.optim.AdamW}, "of another optimizer than AdamW"),
        (net(), {"adaptive": True}, "made with adaptive=False: pass that, in place of True"),
        (net().float(), {"codec": "int8"}, "change codec="),
    ):
        with ParameterServer(model, **{"lr": 0.1, **settings}) as server, pytest.raises(ValueError, match=said):
            server.load_state_dict(parts)
    with ParameterServer(net(), lr=0.1) as server:
        server.pull()
        server.load_state_dict(parts)
        with pytest.raises(RuntimeError, match=r"push\(\) without pull\(\)"):
            server.push()
    with pytest.raises(ZeroDivisionError), ParameterServer(net(), lr=0.1):
        raise ZeroDivisionError


def test_the_state_of_a_shard_is_a_copy_that_loads_again() -> None:
    shard = ServerShard(torch.ones(4), 1, torch.optim.SGD, lr=0.1, momentum=0.9, adaptive=True, delay_compensation=1.0)

    def pushed() -> Tensor:
        shard.pull(0)
        shard.push(0, shard.weights.detach().cos())
        return shard.weights.detach().clone()

    pushed()
    state = shard.state_dict()
    expected = [pushed(), pushed()]
    for _ in range(2):
        shard.load_state_dict(state)
        assert shard.clocks == [1]
        assert all(torch.equal(pushed(), each) for each in expected)


@ranks(2)
def test_ranks_that_differ_are_refused() -> None:
    rank = dist.get_rank()
    for model, settings in (
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(rank == 0)), {}),
        (nn.Linear(2, 2 + rank), {}),
        (nn.Linear(2, 2), {"lr": 0.1 + rank}),
        (nn.Linear(2, 2), {"codec": ("int8", "int4")[rank]}),
    ):
        with pytest.raises(ValueError, match=r"arguments or parameters differs between ranks; .* ParameterServer\(\)"):
            ParameterServer(model, **{"lr": 0.1, **settings})
