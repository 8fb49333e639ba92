"""Decides which replicas take part in a round: those of a mesh, or those that arrive by a deadline.

Rounds are numbered in a store that all replicas reach (``torch.distributed.TCPStore``). Each round has four phases:

    arrive    every rank of a replica adds itself to the round; a replica has arrived when all its ranks have
    fix       once all members of the last round have arrived, or ``deadline`` seconds after the first of them: the
              rank that sees this first writes the new members to the store, by compare-and-set
    exchange  over a gloo group of the members, a new group where the members have changed. A member that was not in
              the last round (a newcomer, or a replica that came too late) takes weights and outer momentum from one
              that was, and adds no outer gradient
    vote      every rank whose exchange worked adds a vote; the last one writes "commit". A rank whose exchange failed,
              or that has waited ``deadline`` seconds for the other votes, writes "void". Both by compare-and-set, so
              that all ranks see the same outcome. Nothing is changed before the vote. A void round is repeated from the
              arrival on, without newcomers: members still have their outer gradients, and dead ones do not arrive

A replica that is killed costs the others one ``deadline``, once. A replica that stalls costs at most three: the others
wait for its arrival, for its part of the exchange, and for its arrival in the repeated round. If the store's host
dies, no replica can continue: no replica should host the store.

torchft (0.2 was tried) is no substitute: its ranks vote within a replica only, so that a survivor may have to discard
its weights where a peer dies in the middle of a sum, and its rounds wait for members of the last one with no deadline.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field, TypeAdapter
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from yafsdp_cc.engine.communicator import Communicator

T = TypeVar("T")
Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]

_GLANCE = 0.02
"""Seconds between two reads of the store."""
_VOID, _COMMIT = "void", "commit"


class Task(NamedTuple):
    """Fragments and state that replicas exchange at the end of a round of local steps."""

    fragments: tuple[Count, ...]
    """Indices of the fragments whose outer gradients are exchanged."""
    ends: bool
    """Whether the optimizers' states are exchanged, too, and a new round of steps begins."""


@dataclass
class Round:
    """A round whose members are fixed."""

    comm: Communicator
    """Communicator of the members' ranks that hold this shard."""
    task: Task
    names: Sequence[str]
    contributors: Sequence[int]
    """Indices of the members whose outer gradients are in the mean; the others take weights of ``source``."""
    source: int = 0
    """Index of the member that others take weights from."""

    @property
    def contributes(self) -> bool:
        """Whether this replica's outer gradient is in the mean."""
        return self.comm.rank in self.contributors


class AllReplicas:
    """The replicas of a mesh, the same ones in every round; methods are as those of ``Membership``."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def open(self, task: Task) -> Round:
        members = range(self._comm.world)
        return Round(self._comm, task, [f"replica {place}" for place in members], members)

    def close(self, error: RuntimeError | None) -> bool:
        if error is not None:
            raise error
        return True


class _Arrival(NamedTuple):
    """Record in the store of a rank that waits for a round."""

    replica: str
    shards: Count
    """Number of ranks of the replica."""
    version: Annotated[int, Field(strict=True, ge=-1)]
    """Number of the last round that the replica was in; -1: none."""
    task: Task


class _Members(NamedTuple):
    """The members of one exchange between replicas, as written to the store."""

    replicas: list[str]
    contributors: list[Count]
    source: Count
    task: Task
    group: str
    """Key of the store under which the round's process group was made."""


_ARRIVAL, _MEMBERS = TypeAdapter(_Arrival), TypeAdapter(_Members)
_SETTINGS, _PLACE = TypeAdapter(list[str]), TypeAdapter(tuple[Count, Count])
"""Types of records in the store, which are JSON and checked, as whoever reaches the store can write there."""
_MOST_ARRIVALS = 1 << 14
"""Largest number of ranks that may wait for one round."""


class Membership:
    """Replicas that come, go and lag, for ``Outer``: a round has those members that arrive by a deadline.

    Each replica is a job of its own: its process group is of its own ranks alone, or it has none, for a model on a
    single rank. It joins with ``join_replicas(model, None, Outer(..., membership=...))``, which returns once it has the
    weights of the others, and may be killed at any time. Replicas that save or call ``synchronize_replicas`` do so at
    the same steps. Exchanges go through host memory, over gloo.

    Args:
        store: a store that all ranks of all replicas reach, such as ``TCPStore(host, port, is_master=False)`` of a
            server that outlives them; wrap it in a ``PrefixStore`` with a name for each run.
        replica: name of this replica, for errors; two may have the same.
        deadline: seconds that a round waits for a replica: until it comes, and until it has sent. It must exceed the
            time of an exchange, and of sending the outer weights and momentum to a newcomer.
        first: number of replicas that the first round waits for, without a deadline.
        patience: seconds that a replica waits for a round of the others to end.
    """

    def __init__(
        self, store: Store, replica: str, *, deadline: float = 60.0, first: int = 1, patience: float = 3600.0
    ) -> None:
        if not (deadline > 0 and patience > 0 and first >= 1):
            raise ValueError(f"deadline={deadline}, patience={patience}, first={first}: all are to be positive")
        self._store, self._deadline, self._first, self._patience = store, deadline, first, patience
        self._replica = replica
        self._shard, self._shards = 0, 1
        self.version = -1
        """Number of the last round that this replica was in; -1: none."""
        self._place = (0, 0)
        """Number of the present round, and how often it was void."""
        self._last: _Members | None = None
        """Members of the last round whose outcome was "commit"."""
        self._members: _Members
        """Members of the present round."""
        self._group = ""
        self._comm: Communicator | None = None

    @property
    def replicas(self) -> list[str]:
        """The members of the last committed round: each replica's name, followed by a unique suffix."""
        return [] if self._last is None else self._last.replicas

    @property
    def contributors(self) -> list[str]:
        """The members of the last committed round whose outer gradients were in the mean of that round."""
        return [] if self._last is None else [self._last.replicas[place] for place in self._last.contributors]

    def join(self, settings: Sequence[str]) -> None:
        """Find this rank's place in its replica, and the number of the present round. ``Outer`` calls it.

        Args:
            settings: texts that must be equal on all replicas.

        Raises:
            ValueError: the replicas that meet in the store have other settings.
        """
        names = [f"{self._replica}-{uuid.uuid4().hex[:12]}"]
        if dist.is_initialized():
            self._shard, self._shards = dist.get_rank(), dist.get_world_size()
            dist.broadcast_object_list(names, src=0)
        self._replica = names[0]
        own, key = [f"{self._shards} ranks", *settings], f"settings/{self._shard}"
        self._ask(lambda store: store.compare_set(key, "", json.dumps(own)))
        known = self._record(_SETTINGS, key)
        for mine, theirs in zip_longest(own, known):
            if mine != theirs:
                raise ValueError(
                    f"{self._replica} has {mine or 'nothing'} where the replicas that meet in this store have "
                    f"{theirs or 'nothing'}: give all the same model, number of ranks and Outer(...), or the store a "
                    "new prefix"
                )
        if self._has("last"):
            self._place = self._record(_PLACE, "last")

    def leave(self) -> None:
        """Tell other replicas not to wait for this one any more. Call it between rounds, on one of its ranks or all."""
        self._ask(lambda store: store.set(f"left/{self._replica}", ""))

    def open(self, task: Task) -> Round:
        """Return the next round with this replica in it."""
        while True:
            self._find_round()
            members = self._members = self._arrive(task)
            if self._replica not in members.replicas:  # the round's members were fixed without this replica
                self._await_outcome(self._patience)
                continue
            try:
                comm = self._connect(members)
            except RuntimeError as error:
                self.close(error)
                continue
            return Round(comm, members.task, members.replicas, members.contributors, members.source)

    def close(self, error: RuntimeError | None) -> bool:
        """Vote on the round after this rank's exchange worked, or failed by ``error``; return whether all commit it."""
        members = self._members
        voters = members.contributors or range(len(members.replicas))
        votes = members.replicas.index(self._replica) in voters
        if error is not None:
            self._settle(_VOID)
        elif votes and self._ask(lambda store: store.add(f"{self._key}/votes", 1)) == self._shards * len(voters):
            self._settle(_COMMIT)
        counts = self._await_outcome(self._deadline if votes else self._patience) == _COMMIT
        if counts:
            self.version = self._place[0]
            self._ask(lambda store: store.set("last", json.dumps(self._place)))
            self._last, self._place = members, (self.version + 1, 0)
        elif self._comm is not None:
            self._comm.group.abort()
            self._comm = None
        return counts

    # Steps of a round ----------------------------------------------------------------------------------------------

    @property
    def _key(self) -> str:
        """Prefix of the present round's keys in the store."""
        number, attempt = self._place
        return f"{number}/{attempt}"

    def _find_round(self) -> None:
        """Set the present round to the first one without an outcome."""
        while outcome := self._outcome():
            number, attempt = self._place
            if outcome == _COMMIT:
                self._last = self._read_members()
                self._place = (number + 1, 0)
            else:
                self._place = (number, attempt + 1)

    def _arrive(self, task: Task) -> _Members:
        """Wait for the round's members to be fixed, and return them."""
        slot = self._ask(lambda store: store.add(f"{self._key}/arrivals", 1)) - 1
        own = _Arrival(self._replica, self._shards, self.version, task)
        self._ask(lambda store: store.set(f"{self._key}/arrival/{slot}", json.dumps(own)))
        known: dict[int, _Arrival] = {}
        newest = self._place[0] - 1
        arrived, began = time.monotonic(), 0.0
        while not self._has(f"{self._key}/members"):
            now = time.monotonic()
            self._read_arrivals(known)
            there = _complete([known[slot] for slot in sorted(known)])
            if not began and any(each.version == newest for each in known.values()):
                began = now
            # the first round has no deadline
            is_late = bool(began) and self._place != (0, 0) and now > began + self._deadline
            if self._are_all(there) or (is_late and any(each.version == newest for each in there)):
                self._fix(there)
            elif there and now > arrived + self._patience:
                if newest >= 0 and all(each.version < 0 for each in there):
                    raise RuntimeError(
                        f"{self._replica} has waited {self._patience:g} s for the replicas of round {newest} "
                        f"({', '.join(self.replicas)}), to take weights from one: none has come. If all have ended, "
                        "start the run anew from its checkpoint, with a store of a new prefix"
                    )
                self._fix(there)
            else:
                time.sleep(_GLANCE)
        return self._read_members()

    def _read_arrivals(self, known: dict[int, _Arrival]) -> None:
        count = self._ask(lambda store: store.add(f"{self._key}/arrivals", 0))
        if count > _MOST_ARRIVALS:
            raise self._foreign(f"{self._key}/arrivals", f"{count} ranks")
        for slot in range(count):
            entry = f"{self._key}/arrival/{slot}"
            if slot not in known and self._has(entry):
                known[slot] = self._record(_ARRIVAL, entry)

    def _are_all(self, there: Sequence[_Arrival]) -> bool:
        """Return whether all members of the last round have arrived or left; before one, whether enough have come."""
        if self._last is None:
            return len(there) >= self._first
        here = {each.replica for each in there}
        missing = [each for each in self._last.replicas if each not in here]
        return bool(here) and all(self._has(f"left/{each}") for each in missing)

    def _fix(self, there: Sequence[_Arrival]) -> None:
        newest, is_repeated = max(each.version for each in there), self._place[1] > 0
        # repeat a void round without newcomers: one that cannot get the weights by the deadline must not stop all
        if newest >= 0 and is_repeated:
            there = [each for each in there if each.version == newest]
        first = next(each for each in there if each.version == newest)
        members = sorted(there, key=lambda each: each.replica)
        replicas = [each.replica for each in members]
        contributors = [
            place for place, each in enumerate(members) if each.version == newest >= 0 and each.task == first.task
        ]
        group = self._key
        if self._last is not None and not is_repeated and self._last.replicas == replicas:
            group = self._last.group
        found = _Members(replicas, contributors, replicas.index(first.replica), first.task, group)
        self._ask(lambda store: store.compare_set(f"{self._key}/members", "", json.dumps(found)))

    def _read_members(self) -> _Members:
        found = self._record(_MEMBERS, f"{self._key}/members")
        if max((found.source, *found.contributors)) >= len(found.replicas):
            raise self._foreign(f"{self._key}/members", str(found))
        return found

    def _connect(self, members: _Members) -> Communicator:
        """Return the communicator of the ranks that hold this rank's shard, one in each replica of ``members``."""
        if self._comm is not None and members.group == self._group:
            return self._comm
        rank, world = members.replicas.index(self._replica), len(members.replicas)
        store = PrefixStore(f"{members.group}/gloo/{self._shard}", self._store)
        group = dist.ProcessGroup(store, rank, world)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=self._deadline))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        self._comm = Communicator(group, torch.device("cpu"))
        self._group = members.group
        return self._comm

    def _settle(self, outcome: str) -> None:
        self._ask(lambda store: store.compare_set(f"{self._key}/outcome", "", outcome))

    def _outcome(self) -> str:
        """Return "commit" or "void"; "" while the round has no outcome."""
        if not self._has(f"{self._key}/outcome"):
            return ""
        return _COMMIT if self._read(f"{self._key}/outcome") == _COMMIT.encode() else _VOID

    def _await_outcome(self, patience: float) -> str:
        """Return the outcome of the round; set it to "void" if there is none after ``patience`` seconds."""
        until = time.monotonic() + patience
        while not (outcome := self._outcome()):
            if time.monotonic() > until:
                self._settle(_VOID)
            time.sleep(_GLANCE)
        return outcome

    def _has(self, key: str) -> bool:
        return self._ask(lambda store: bool(store.check([key])))

    def _read(self, key: str) -> bytes:
        return self._ask(lambda store: bytes(store.get(key)))

    def _record(self, kind: TypeAdapter[T], key: str) -> T:
        """Return a record of the store after checking the types of its fields."""
        try:
            return kind.validate_json(self._read(key))
        except ValueError as error:
            raise self._foreign(key, str(error)) from None

    def _foreign(self, key: str, found: str) -> RuntimeError:
        return RuntimeError(
            f"'{key}' in {_place_of(self._store)} is not what replicas write there: give the run a prefix, or a store, "
            f"of its own, which nobody else reaches ({found[:200]})"
        )

    def _ask(self, act: Callable[[Any], T]) -> T:
        try:
            return act(self._store)
        except RuntimeError as error:
            raise RuntimeError(
                f"the store that keeps the rounds of replicas, {_place_of(self._store)}, does not answer: "
                "without it no round can be made. Start it on a host that outlives the replicas, and go on from a "
                "checkpoint"
            ) from error


def _complete(arrivals: Sequence[_Arrival]) -> list[_Arrival]:
    """Return the first arrival of each replica all of whose ranks have arrived, in the order of these arrivals."""
    found: dict[str, list[_Arrival]] = {}
    for each in arrivals:
        found.setdefault(each.replica, []).append(each)
    return [each[0] for each in found.values() if len(each) == each[0].shards]


def _place_of(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else type(store).__name__
