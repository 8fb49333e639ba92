"""Several ranks on each machine of a lab: what they say to each other crosses no link."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.netlab.labs import MEGABYTE, lab_of
from yafsdp_cc.tools.netlab import Lab, Traffic


def _sent_to(lab: Lab, receiver: int) -> list[Traffic]:
    """What crosses each machine's link while rank 0 sends a megabyte."""
    message = torch.zeros(MEGABYTE, dtype=torch.uint8)
    dist.barrier()
    before = lab.traffic()
    dist.barrier()
    if dist.get_rank() == 0:
        dist.send(message, receiver)
    elif dist.get_rank() == receiver:
        dist.recv(message, 0)
    dist.barrier()
    return [now.since(then) for now, then in zip(lab.traffic(), before, strict=True)]


def test_ranks_of_a_machine_share_its_link_and_need_none() -> None:
    with lab_of(ranks=4, bandwidth="100mbit", ranks_per_machine=2) as lab:
        for near, far in zip(lab.run(_sent_to, lab, 1), lab.run(_sent_to, lab, 3), strict=True):
            assert len(near) == len(far) == 2
            assert near[0].sent < MEGABYTE // 10
            assert MEGABYTE < far[0].sent < 1.1 * MEGABYTE
            assert MEGABYTE < far[1].received < 1.1 * MEGABYTE
        assert [each.sent > MEGABYTE for each in lab.bytes()] == [True, False]


def _place() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def test_the_environment_says_who_is_where() -> None:
    with lab_of(ranks=4, ranks_per_machine=2) as lab:
        assert lab.run(_place) == [
            ("0", "0", "0", "2"),
            ("1", "0", "1", "2"),
            ("2", "1", "0", "2"),
            ("3", "1", "1", "2"),
        ]


@pytest.mark.parametrize("each", [0, 3, 5])
def test_machines_have_as_many_ranks_each(each: int) -> None:
    with pytest.raises(ValueError, match=f"ranks_per_machine={each}: the 4 ranks cannot be divided so"):
        Lab(ranks=4, ranks_per_machine=each)
