"""Replicas that are killed, join and stall, against the rounds that they say to have made, in one process."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

import yafsdp_cc
from tests.ranks import on_ranks
from tests.soak import LONG
from tests.twins import numbers, refusal, seeded
from yafsdp_cc.replicas import Membership, Outer
from yafsdp_cc.replicas.sync import join_replicas

EVERY, LR, DEADLINE = 3, 0.05, 1.0
_FORK: Any = multiprocessing.get_context("fork")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 5))


def batch(version: int, step: int, name: str, shard: int) -> Tensor:
    """What a replica trains on in the round after ``version``: known from that alone."""
    return numbers(6, 8, seed=10_000 * ord(name) + 100 * version + 10 * step + shard)


class Made(NamedTuple):
    """A round that a replica was in."""

    version: int
    contributors: list[str]
    weights: list[float]
    seconds: float
    """Since the one before."""


class Replica:
    """What runs on a rank of a replica."""

    def __init__(self, port: int, name: str, shard: int, shards: int, folder: str, **options: Any) -> None:
        self.name, self.shard = name, shard
        self.signals = TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=60))
        store = PrefixStore("run", TCPStore("localhost", port, is_master=False))
        self.model: Any = seeded(net, seed=ord(name))
        if shards > 1:
            file = FileStore(f"{folder}/store of {name}", shards)
            dist.init_process_group("gloo", store=file, rank=shard, world_size=shards)
            self.model = yafsdp_cc.shard(self.model)
        settings: dict[str, Any] = {"deadline": DEADLINE, "patience": 60.0}
        inner = 0.9 if "codec" in options else 0.0
        members = {each: options.pop(each) for each in ("first", "deadline", "patience") if each in options}
        self.membership = Membership(store, name, **(settings | members))
        self.sync = Outer(EVERY, membership=self.membership, **options)
        join_replicas(self.model, None, self.sync)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=inner)
        self.made: list[Made] = []
        self.began = time.monotonic()
        self.file = Path(folder, f"{name}-{os.getpid()}.jsonl")
        self.note()

    def train(self) -> None:
        """One round."""
        version = self.membership.version
        for step in range(EVERY):
            self.step(version, step)
        self.note()

    def step(self, version: int, step: int) -> None:
        loss_of(self.model, batch(version, step, self.name, self.shard)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def note(self) -> None:
        now = time.monotonic()
        self.made.append(Made(self.membership.version, self.contributors, flat(self.model), now - self.began))
        self.began = now
        if self.shard == 0:
            with self.file.open("a") as file:
                file.write(json.dumps(self.made[-1]) + "\n")

    @property
    def contributors(self) -> list[str]:
        return [each.partition("-")[0] for each in self.membership.contributors]

    def has(self, key: str) -> bool:
        found: bool = self.signals.check([key])
        return found

    def is_over(self) -> bool:
        return self.has("stop") and self.membership.version >= int(self.signals.get("stop"))

    def until_stopped(self) -> None:
        while not self.is_over():
            self.train()
            time.sleep(0.02)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - (2 * x[:, :5]).sin()).square().mean()
    return loss


def flat(model: Any) -> list[float]:
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().view(-1) for each in whole]).tolist()


def replayed(rounds: list[tuple[int, list[str]]], shards: int, start: list[float]) -> list[list[float]]:
    """The outer weights after each round of these contributors, by DiLoCo's definition."""
    like = list(net().parameters())
    outer = [
        each.view_as(own) for own, each in zip(like, torch.tensor(start).split([e.numel() for e in like]), strict=True)
    ]
    buffers = [torch.zeros_like(each) for each in outer]
    found = []
    for version, contributors in rounds:
        ends = [_trained(outer, version - 1, name, shards) for name in contributors]
        for place, (weights, buffer) in enumerate(zip(outer, buffers, strict=True)):
            if not ends:
                continue
            delta = torch.stack([weights - each[place] for each in ends]).mean(0)
            buffer.mul_(0.9).add_(delta)
            weights.sub_(0.7 * (delta + 0.9 * buffer))
        found.append(torch.cat([each.view(-1) for each in outer]).tolist())
    return found


def _trained(outer: list[Tensor], version: int, name: str, shards: int) -> list[Tensor]:
    model = net()
    with torch.no_grad():
        for own, weights in zip(model.parameters(), outer, strict=True):
            own.copy_(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(EVERY):
        for shard in range(shards):
            (loss_of(model, batch(version, step, name, shard)) / shards).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Processes ---------------------------------------------------------------------------------------------------------


class Fleet:
    """A store's server and replicas, each rank a process; all end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.processes: dict[tuple[str, int], tuple[Any, Any]] = {}
        pipe, self.server = self._start(_serve)
        self.port: int = pipe.recv()

    def start(self, body: Any, name: str, shards: int = 1, **options: Any) -> None:
        for shard in range(shards):
            args = (body, self.port, name, shard, shards, self.folder, options)
            self.processes[name, shard] = self._start(_run, *args)

    def result(self, name: str, shard: int = 0, timeout: float = 100.0) -> Any:
        pipe, _ = self.processes[name, shard]
        assert pipe.poll(timeout), f"replica {name} does not end"
        failed, value = pipe.recv()
        assert not failed, f"replica {name}:\n{value}"
        return value

    def send(self, name: str, number: signal.Signals) -> None:
        _, process = self.processes[name, 0]
        os.kill(process.pid, number)

    @staticmethod
    def _start(target: Any, *args: Any) -> tuple[Any, Any]:
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def end(self) -> None:
        for _, process in self.processes.values():
            process.kill()
            process.join()
        self.server.kill()
        self.server.join()


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    made = Fleet(folder)
    try:
        yield made
    finally:
        made.end()


def _serve(pipe: Any) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(3600)


def _run(
    pipe: Any, body: Any, port: int, name: str, shard: int, shards: int, folder: str, options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((False, body(Replica(port, name, shard, shards, folder, **options))))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
    sys.stdout.flush()
    time.sleep(3600)  # its end would break others' connections


# Tests -------------------------------------------------------------------------------------------------------------


def steady(replica: Replica) -> None:
    """Let the others come one after another, and then stop all."""
    while not replica.has("is back"):
        replica.train()
        if replica.membership.version == 2:
            replica.signals.set("may join", "")
        time.sleep(0.02)
    replica.signals.set("stop", str(replica.membership.version + 2))
    replica.until_stopped()


def is_killed(replica: Replica) -> None:
    replica.train()
    replica.step(replica.membership.version, 0)
    die()


def joins(replica: Replica) -> None:
    while "d" not in replica.contributors:
        replica.train()
    replica.signals.set("has joined", "")
    replica.until_stopped()


def stalls(replica: Replica) -> None:
    while not replica.has("has joined"):
        replica.train()
    late = replica.membership.version
    time.sleep(2 * DEADLINE)
    replica.train()
    assert replica.membership.version > late + 1 or replica.contributors == ["b"]
    while "b" not in replica.contributors:
        replica.train()
    replica.signals.set("is back", "")
    replica.until_stopped()


def test_rounds_go_on_without_the_dead_and_with_the_new_and_the_late(tmp_path: Path) -> None:
    with fleet(tmp_path) as replicas:
        for name, body in (("a", steady), ("b", stalls), ("c", is_killed)):
            replicas.start(body, name, first=3)
        signals = on_ranks(1, _wait_for, replicas.port, "may join")
        assert signals == [True]
        replicas.start(joins, "d")
        for name in "abd":
            replicas.result(name)
    contributors = [set(each) for each in _check_rounds(tmp_path).values()]
    assert {"a", "b", "c"} in contributors
    assert any("d" in each for each in contributors)
    assert any("b" not in each for each in contributors)
    assert {"a", "b", "d"} in contributors


def _wait_for(port: int, key: str) -> bool:
    TCPStore("localhost", port, is_master=False).wait([key], timedelta(seconds=60))
    return True


def _check_rounds(folder: Path, shards: int = 1, until: int = 1_000_000) -> dict[int, list[str]]:
    """All replicas have noted the same of each round, and it is what DiLoCo gives. Returns who contributed to each."""
    notes = [each for each in _notes(folder) if each.version <= until]
    made = {each.version: each for each in notes}
    assert sorted(made) == list(range(len(made)))
    for each in notes:
        assert each.weights == made[each.version].weights, each.version
    contributors = {version: made[version].contributors for version in range(1, len(made))}
    expected = on_ranks(1, replayed, list(contributors.items()), shards, made[0].weights)[0]
    for version, weights in enumerate(expected, 1):
        found = made[version].weights
        assert max(abs(x - y) for x, y in zip(weights, found, strict=True)) < 1e-6 * (10 + version), (
            version
        )  # of rounding, round by round
    return contributors


def _notes(folder: Path) -> list[Made]:
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines(keepends=True)]
    return [Made(*json.loads(line)) for line in lines if line.endswith("\n")]  # killed in the middle of one


def dies_in_an_exchange(replica: Replica) -> None:
    replica.train()
    setattr(replica.sync, "_send", lambda *_: die())  # noqa: B010
    replica.train()


def four_rounds(replica: Replica) -> list[float]:
    for _ in range(4):
        replica.train()
    yafsdp_cc.synchronize_replicas(replica.model)  # alone: ends a round without steps
    replica.membership.leave()
    return flat(replica.model)


def test_a_void_exchange_is_repeated_without_the_dead(tmp_path: Path) -> None:
    with fleet(tmp_path) as replicas:
        replicas.start(four_rounds, "a", shards=2, first=2)
        replicas.start(dies_in_an_exchange, "b", shards=2, first=2)
        assert replicas.result("a") == replicas.result("a", 1)
    assert _check_rounds(tmp_path, shards=2) == {1: ["a", "b"], 2: ["a"], 3: ["a"], 4: ["a"]}


STREAMING: dict[str, Any] = {"codec": "topk2bit", "lr": 1.0, "momentum": 0.5, "fragments": 2, "delay": 1}


def _others_are_refused(port: int) -> None:
    store = PrefixStore("run", TCPStore("localhost", port, is_master=False))
    for model, settings, said in (
        (net(), {"lr": 0.5}, "has lr=0.5 where the replicas that meet in this store have lr=1.0"),
        (net()[:3], {}, r"has 2.running_mean \[8\] .* where .* have 3.weight \[5, 8\] torch.float32"),
    ):
        sync = Outer(EVERY, membership=Membership(store, "c"), **(STREAMING | settings))
        with pytest.raises(ValueError, match=said):
            join_replicas(model, None, sync)


def streams(replica: Replica) -> tuple[list[float], list[float]]:
    """Until another one has come; then an end of the round, of all that is on its way, and some more."""
    while len(replica.contributors) < 2:
        replica.step(replica.membership.version, 0)
        time.sleep(0.02)
    for _ in range(2):
        for step in range(EVERY + 1):
            replica.step(0, step)
        yafsdp_cc.synchronize_replicas(replica.model)
    state = [each["momentum_buffer"] for each in replica.optimizer.state.values()]
    return flat(replica.model), torch.cat([each.view(-1) for each in state]).tolist()


def test_a_new_one_takes_its_place_among_fragments_under_way(tmp_path: Path) -> None:
    with fleet(tmp_path) as replicas:
        replicas.start(streams, "a", deadline=20.0, **STREAMING)
        on_ranks(1, _wait_for, replicas.port, "run/1/0/members")
        on_ranks(1, _others_are_refused, replicas.port)
        replicas.start(streams, "b", deadline=20.0, **STREAMING)
        assert replicas.result("a") == replicas.result("b")


def assigns_a_buffer(replica: Replica) -> None:
    """Assign a buffer anew in each round, as DINO's centre is in each forward; make one and let one grow, as caches."""
    norm = replica.model[2]
    norm.register_buffer("made", torch.ones(3))
    norm.num_batches_tracked = torch.zeros(2, dtype=torch.int64)
    while not replica.has("has come"):
        norm.running_var = norm.running_var + 1
        replica.train()
        time.sleep(0.02)
    replica.membership.leave()


def comes(replica: Replica) -> list[float]:
    replica.membership.leave()
    replica.signals.set("has come", "")
    return list(replica.model[2].running_var.tolist())


def test_a_new_one_takes_buffers_that_were_assigned_anew(tmp_path: Path) -> None:
    with fleet(tmp_path) as replicas:
        replicas.start(assigns_a_buffer, "a", deadline=20.0)
        on_ranks(1, _wait_for, replicas.port, "run/3/0/members")
        replicas.start(comes, "b", deadline=20.0)
        assert min(replicas.result("b")) > 2


def loses_its_store(replica: Replica) -> str:
    replica.train()
    replica.signals.set("trained", "")
    while True:
        try:
            replica.has("trained")
        except RuntimeError:
            return refusal(replica.train)
        time.sleep(0.02)


def test_an_error_names_the_store_that_is_gone(tmp_path: Path) -> None:
    with fleet(tmp_path) as replicas:
        replicas.start(loses_its_store, "a")
        on_ranks(1, _wait_for, replicas.port, "trained")
        replicas.server.kill()
        assert f"localhost:{replicas.port}" in replicas.result("a")


EVENTS = 100


def goes_on(replica: Replica) -> None:
    leaves: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: leaves.append(1))
    while not leaves and not replica.is_over():
        replica.train()
        time.sleep(0.05)
    replica.membership.leave()


@LONG
@pytest.mark.parametrize("seed", range(2))
def test_soak(tmp_path: Path, seed: int) -> None:
    """Random joins, leaves, kills and stalls: no hang, the same weights everywhere, and those that DiLoCo gives."""
    chance, counts = random.Random(seed), Counter[str]()
    stalled: dict[str, float] = {}
    with fleet(tmp_path) as replicas:
        alive = set("abcd")
        for name in alive:
            replicas.start(goes_on, name, first=4, patience=30.0)
        on_ranks(1, _wait_for, replicas.port, "run/2/0/members")
        while counts.total() < EVENTS:
            time.sleep(chance.uniform(0.1, 1.0))
            for name in [each for each, until in stalled.items() if time.monotonic() > until]:
                replicas.send(name, signal.SIGCONT)
                del stalled[name]
            well = sorted(_up_to_date(tmp_path) & alive - set(stalled))  # someone has to know the weights
            events = ["join"] if len(alive) < 4 else []
            events += ["kill", "stall", "leave"] if len(well) > 2 else []
            if not events:
                continue
            event = chance.choice(events)
            counts[event] += 1
            if event == "join":
                name = min(set("abcd") - alive)
                for file in tmp_path.glob(f"{name}-*.jsonl"):  # of the one before
                    file.rename(
                        file.with_name(f"old{counts.total()}-{file.name}")
                    )  # one that leaves goes on with another
                replicas.start(goes_on, name, patience=30.0)
                alive.add(name)
            else:
                name = chance.choice(well)
                if event == "stall":
                    replicas.send(name, signal.SIGSTOP)
                    stalled[name] = time.monotonic() + chance.uniform(0.2, 3 * DEADLINE)
                else:
                    replicas.send(name, signal.SIGKILL if event == "kill" else signal.SIGUSR1)
                    alive.remove(name)
        for name in stalled:
            replicas.send(name, signal.SIGCONT)
        time.sleep(5 * DEADLINE)
        (stop,) = on_ranks(1, _stop, replicas.port)
        for name in alive:
            replicas.result(name)
        contributors = _check_rounds(tmp_path, until=stop)
    fixed = [
        [(version, list(names)) for version in contributors] for names in ("abcd", "efgh", "ijkl", "mn", "op", "qr")
    ]
    found, *undisturbed = on_ranks(1, _final_losses, list(contributors.items()), *fixed, tmp_path)[0]
    waits = sorted(each.seconds for each in _notes(tmp_path) if each.contributors and each.version > 1)
    sizes = Counter(map(len, contributors.values()))
    print(f"{dict(counts)}; {stop} rounds, by contributors {dict(sizes)}; loss {found:.4f}")
    print(f"undisturbed, four and two replicas, other batches: {[round(each, 4) for each in undisturbed]}")
    longest = [round(each, 1) for each in waits[-10:]]
    print(f"seconds of a round: median {waits[len(waits) // 2]:.2f}, the longest ten {longest}")
    assert min(counts[event] for event in ("join", "kill", "leave", "stall")) > 0
    noise = max(undisturbed) - min(undisturbed)
    assert min(undisturbed) - noise < found < max(undisturbed) + noise


def _up_to_date(folder: Path) -> set[str]:
    """The names of replicas that were in one of the last two rounds; some may be dead."""
    last = {file.name.partition("-")[0]: 0 for file in folder.glob("*.jsonl")}
    for file in folder.glob("*.jsonl"):
        lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        name = file.name.partition("-")[0]
        last[name] = max(last[name], *(json.loads(line)[0] for line in lines[-1:]), 0)
    return {name for name, version in last.items() if version >= max(last.values()) - 1}


def _stop(port: int) -> int:
    store = TCPStore("localhost", port, is_master=False)
    stop: int = json.loads(store.get("run/last"))[0] + 5
    store.set("stop", str(stop))
    return stop


def _final_losses(*runs: Any) -> list[float]:
    *histories, folder = runs
    start = next(each.weights for each in _notes(folder) if each.version == 0)
    x = numbers(500, 8)
    losses = []
    for rounds in histories:
        model = net()
        torch.nn.utils.vector_to_parameters(torch.tensor(replayed(rounds, 1, start)[-1]), model.parameters())
        losses.append(loss_of(model, x).item())
    return losses
