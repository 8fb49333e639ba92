"""What a replica that is not trusted may send: an error, and nothing of it runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import yafsdp_cc
from tests.replicas.test_membership import fleet
from tests.soak import SOAK
from tests.twins import refusal
from yafsdp_cc.replicas import Membership, optimizer_state
from yafsdp_cc.replicas.membership import Task
from yafsdp_cc.replicas.plain_values import decoded, encoded

MESSAGES = 10_000 if SOAK else 600


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


VALUES: list[Any] = [
    None,
    {"weight": {"step": 7, "exp_avg": None, "scale": torch.tensor(3.5), "betas": (0.9, [0.99, "x"]), "on": True}},
    {1: torch.arange(6).view(2, 3), "empty": torch.empty(0, 4), "half": torch.ones(3, dtype=torch.bfloat16)},
]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return type(found) is type(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and bool(found == expected)


@pytest.mark.parametrize("value", VALUES)
def test_tensors_and_plain_values_arrive(value: Any) -> None:
    assert same(decoded(encoded(value)), value)


def test_nothing_else_is_sent() -> None:
    for value in (Evil("x"), {"a": [Evil("x")]}, {1, 2}, torch.float32, nn.Linear):
        with pytest.raises(TypeError, match="neither a tensor nor a plain value"):
            encoded(value)


def message(head: Any, body: bytes = b"", length: int | None = None) -> Tensor:
    text = (head if isinstance(head, str) else json.dumps(head)).encode()
    size = (len(text) if length is None else length).to_bytes(8, "little")
    return torch.frombuffer(bytearray(size + text + body), dtype=torch.uint8)


CRAFTED = [
    message(["tensor", "float32", [1 << 40]]),
    message(["tensor", "float32", [1 << 62, 1 << 62]]),
    message(["tensor", "float32", [0, 1 << 62, 1 << 62]]),
    message(["tensor", "float32", [-1, -4]], b"1234" * 4),
    message(["tensor", "float32", [True]], b"1234"),
    message(["tensor", "float32", [2]], b"1234"),
    message(["tensor", "float32", [1]], b"12345"),
    message(["tensor", "float32", "11"], b"1234"),
    message(["tensor", "float32"]),
    message(["tensor", "qint8", [1]], b"1"),
    message(["tensor", ["float32"], [1]], b"1234"),
    message(["eval", "1"]),
    message(["__import__", "os"]),
    message(["dict", [["list"], 1]]),
    message(["dict", [1]]),
    message(["dict", 1]),
    message({"a": 1}),
    message([]),
    message("[" * 100_000),
    message("[" * 100 + "]" * 100),
    message('["list",' * 500 + "1" + "]" * 500),
    message("9" * 100_000),
    message("\udcff".encode("utf-8", "surrogatepass").decode("latin-1")),
    message("null", length=1 << 63),
    message("null", length=0),
    torch.empty(0, dtype=torch.uint8),
    torch.full((7,), 255, dtype=torch.uint8),
]


def test_messages_made_by_hand_are_errors() -> None:
    for each in CRAFTED:
        with pytest.raises(ValueError, match=r"\w"):
            decoded(each)


def test_random_messages_are_errors_or_values() -> None:
    chance = random.Random(0)
    whole = [bytes(encoded(value).tolist()) for value in VALUES]
    refused = 0
    for number in range(MESSAGES):
        text = bytearray(chance.choice(whole))
        if number % 3 == 0:
            text = bytearray(chance.randbytes(chance.randrange(200)))
        for _ in range(chance.randrange(1, 5)):
            if text:
                text[chance.randrange(len(text))] = chance.randrange(256)
        if number % 5 == 0:
            text = text[: chance.randrange(len(text) + 1)]
        try:
            decoded(torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8))
        except ValueError:
            refused += 1
    assert refused > MESSAGES // 2  # the others have other numbers in them, or other letters


# Records in the store -------------------------------------------------------------------------------------------------


def joined(store: Any, **settings: Any) -> Membership:
    membership = Membership(store, "berlin", **({"deadline": 0.1, "patience": 0.5} | settings))
    membership.join(["lr=1"])
    return membership


NEST = "[" * 100_000
RECORDS: dict[str, list[str]] = {
    "settings/0": ["{", NEST, "3", "[1]", '{"a": 1}', '[["a"]]', "[]", '["1 ranks", "lr=2"]'],
    "last": ["", "[1]", "[-1, 0]", '["0", "0"]', "[0, 0, 0]", "[1e99, 0]", "{}", NEST, f"[{'9' * 5000}, 0]"],
    "0/0/arrivals": ["x", "999999999", "9" * 30],
    "0/0/arrival/0": [
        "",
        "[]",
        '["a", 1, -1]',
        '["a", -1, -1, [[], false]]',
        "[{}, 1, -1, [[], false]]",
        NEST,
    ],
    "0/0/members": [
        "",
        "[]",
        '[["a"], [1], 0, [[], false], "g"]',
        '[["a"], [], 5, [[], false], "g"]',
        '[["a"], [-1], 0, [[], false], "g"]',
        '[[], [], 0, [[], false], "g"]',
        '[["a"], [], 0, [[-3], false], "g"]',
        '[["a"], [], 0, [["0"], false], "g"]',
        '[["a"], [], "first", [[], false], "g"]',
        '[["a"], [], 0, 5, "g"]',
        NEST,
    ],
}


@pytest.mark.parametrize("key", RECORDS)
def test_records_made_by_hand_are_errors(key: str) -> None:
    for text in RECORDS[key]:
        store = HashStore()
        if key.endswith("arrival/0"):
            store.add("0/0/arrivals", 1)
        store.set(key, text)
        began = time.monotonic()
        told = refusal(lambda store=store: joined(store).open(Task((), False)))
        assert told, (key, text[:80])
        assert time.monotonic() - began < 30


def test_random_records_are_errors_or_others() -> None:
    chance = random.Random(0)
    kinds = ["null", "true", "-1", "3", "1e9", '"a"', "[]", "{}", '["a"]', "[0]", "[[0], false]", "[[], true]"]
    for number in range(MESSAGES // 10):
        store = HashStore()
        key = chance.choice(list(RECORDS))
        text = f"[{', '.join(chance.choice(kinds) for _ in range(chance.choice([2, 4, 5])))}]"
        if number % 4 == 0:
            text = chance.randbytes(chance.randrange(60)).decode("latin-1")
        store.add("0/0/arrivals", 1)
        store.set(key, text)
        try:
            joined(store, deadline=0.01, patience=0.02, first=3).open(Task((), False))
        except (RuntimeError, ValueError):
            continue


# A whole replica -----------------------------------------------------------------------------------------------------


def ends_a_round(replica: Any) -> str:
    """What a replica raises where a round ends with the states of all optimizers."""
    replica.train()
    return refusal(lambda: yafsdp_cc.synchronize_replicas(replica.model))


def attacks(replica: Any) -> str:
    """End a round as the others do, but send something else than a state: what lies in the file "attack"."""
    data = Path(replica.file.parent, "attack").read_bytes()
    with mock.patch.object(
        optimizer_state, "encoded", return_value=torch.frombuffer(bytearray(data), dtype=torch.uint8)
    ):
        return ends_a_round(replica)


ATTACKS = {
    "a pickle": (lambda mark: pickle.dumps(Evil(mark)), "b-.* has sent what is no state of this optimizer"),
    "other shapes": (
        lambda _: bytes(encoded({"0.weight": {"momentum_buffer": (torch.ones(3),)}}).tolist()),
        "'momentum_buffer' of '0.weight' has another type or shape",
    ),
    "too much": (lambda _: bytes(1 << 20), "announce .*1048576.* bytes of optimizer state"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_replica_sends_runs_nothing(attack: str, tmp_path: Path) -> None:
    make, told = ATTACKS[attack]
    mark = tmp_path / "owned"
    (tmp_path / "attack").write_bytes(make(str(mark)))
    with fleet(tmp_path) as replicas:
        for name, body in (("a", ends_a_round), ("b", attacks)):
            replicas.start(body, name, first=2, codec="int8", deadline=20.0)  # with a momentum in the optimizer
        found = replicas.result("a")
    assert re.search(told, found), found
    assert not mark.exists()
