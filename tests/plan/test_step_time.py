"""Step times and activations against figures computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from yafsdp_cc.plan.report import (
    Plan,
    PlannedBuffers,
    PlannedCommunication,
    PlannedReplicated,
    PlannedTraffic,
    PlannedUnit,
)
from yafsdp_cc.tools.estimate import Activations, Block
from yafsdp_cc.tools.step_time import Event, Link, Work, events_of, step_time


def plan(gather: int, reduce: int, blocks: int = 4, replicated: int = 0) -> Plan:
    """Blocks that take turns in two buffers; the last two stay there until their backward."""
    units = [PlannedUnit(f"{index}", "block", 1, 1, 1, 1, ("bfloat16",), index % 2) for index in range(blocks)]
    traffic = [PlannedTraffic(gather, gather if index < blocks - 2 else 0, reduce) for index in range(blocks)]
    sent = PlannedCommunication(gather * blocks, gather * (blocks - 2), reduce * blocks, replicated)
    buffers = (PlannedBuffers("block", 2, 1, 2, 1),)
    return Plan(4, tuple(units), buffers, PlannedReplicated(0, 0, 0), sent, 0, 0, 0, 0, tuple(traffic))


def seconds(planned: Plan, work: Work, link: Link) -> tuple[float, ...]:
    named = {unit.name: work for unit in planned.units}
    return tuple(step_time(events_of(planned, named), 1.0, link))[:4]  # no time of the optimizer


def test_a_quick_link_exposes_the_first_gather_and_the_last_reduce() -> None:
    found = seconds(plan(gather=1, reduce=1), Work(10.0, 20.0), Link(1.0))
    assert found == pytest.approx((40, 80, 1, 1))


def test_a_slow_link_is_busy_from_the_first_gather_on() -> None:
    # Forward: gathers of 10, of which the third waits for the first block (11), the fourth for the second (21).
    # Backward, from 41: of block 3 to 43, its reduce to 53, gather 1 to 63, and so on, one behind the other: reduce 2,
    # gather 0, reduces 1 and 0.
    forward, backward, gathers, rest = seconds(plan(gather=10, reduce=10), Work(1.0, 2.0), Link(1.0))
    assert (forward, backward) == (4, 8)
    assert gathers == 4 * 10 + 1 - 4
    assert rest == 2 + 6 * 10 - 8


def test_latency_is_of_each_collective_and_grows_with_ranks() -> None:
    # 4 gathers, 2 again, 4 reduces and the replicated parameters' sum, of which nothing is overlapped without work.
    found = seconds(plan(gather=1, reduce=1, replicated=5), Work(0.0, 0.0), Link(0.0, latency=1.0, hop=0.5))
    assert found == (0, 0, 0, (1 + 3 * 0.5) * 11)


def test_a_backward_waits_for_the_reduce_that_reads_its_gradient_buffer() -> None:
    # Two buffers: the backward of the third block from the end starts when the first reduce is over.
    forward, backward, _, rest = seconds(plan(gather=0, reduce=10, blocks=3), Work(1.0, 2.0), Link(1.0))
    assert (forward, backward) == (3, 6)
    assert rest == 2 + 3 * 10 - 6


def test_replicas_sum_behind_each_reduce() -> None:
    planned = plan(gather=0, reduce=3, blocks=2)
    traffic = tuple(replace(each, replicas=5) for each in planned.traffic)
    work = {unit.name: Work(0.0, 0.0) for unit in planned.units}
    assert events_of(replace(planned, traffic=traffic, replicas=2), work) == [
        Event("reduce", "1", 3, (), 4),
        Event("all_reduce", "1", 5, (0,), 2, stride=4),
        Event("reduce", "0", 3, (), 4),
        Event("all_reduce", "0", 5, (2,), 2, stride=4),
    ]


def test_activations_by_hand() -> None:
    # Three blocks of 10, of which 2 are the output; 3 more at the peak of a backward, 4 at that of the loss.
    activations = Activations(tuple([Block(10, 2, 3)] * 3), outside=4, lowest=7)
    assert activations.peak(0) == 30 + 4
    assert activations.peak(1) == 22 + 4
    assert activations.peak(2) == 2 + 2 + 10 + 4
    assert activations.peak(3) == 2 + 2 + 10 + 3
    assert activations.fewest_checkpointed(34) == 0
    assert activations.fewest_checkpointed(25) == 2
    assert activations.fewest_checkpointed(17) == 3
    assert activations.fewest_checkpointed(16) is None


def test_links_within_and_between_nodes() -> None:
    """Eight ranks in nodes of four: a ring crosses over all links of a node, a direct reduce over its sender's."""
    link = Link(8.0, within=1.0, node=4)
    direct = link._replace(direct=True)
    gather, reduce = (Event(kind, "", 70.0, (), 8) for kind in ("all_gather", "reduce"))
    assert link.seconds(gather) == link.seconds(reduce) == direct.seconds(gather) == 70 * 8 / 4
    assert direct.seconds(reduce) == pytest.approx(70 * 8 * 4 / 7)
    assert link.seconds(gather._replace(ranks=4)) == direct.seconds(reduce._replace(ranks=4)) == 70 * 1.0
    assert Link(8.0).seconds(gather) == Link(8.0, direct=True).seconds(reduce) == 70 * 8


@pytest.mark.parametrize("direct", [False, True])
def test_a_sum_over_replicas_crosses_where_neighbours_are_in_other_nodes(direct: bool) -> None:
    """Replicas of a node or more meet between nodes only; of two replicas in a node one sends over each link."""
    link = Link(8.0, hop=100.0, within=1.0, node=4, direct=direct)
    total = Event("all_reduce", "", 70.0, (), 8, stride=4)
    assert link.seconds(total) == link.seconds(total._replace(stride=8)) == 70 * 8 + 7 * 100
    assert link.seconds(total._replace(stride=2)) == pytest.approx(70 * 8 * (6 / 7 if direct else 1 / 2) + 7 * 100)
    assert link.seconds(total._replace(stride=2, ranks=2)) == 70 * 1.0 + 100


def test_secondary_gathers_are_over_the_ranks_that_share_a_shard() -> None:
    planned = replace(plan(gather=7, reduce=0), secondary_ranks=2)
    work = {unit.name: Work(1.0, 1.0) for unit in planned.units}
    events = events_of(planned, work)
    assert [event.ranks for event in events if event.kind == "all_gather"] == [4] * 4 + [2] * 2
    assert sum(Link(1.0, node=2).seconds(event) for event in events if event.kind == "all_gather") == 4 * 7 / 2


def test_what_a_replica_sync_sends_has_the_whole_step() -> None:
    planned = plan(gather=1, reduce=1)
    for sent in (50, 122, 222):
        communication = replace(planned.communication, replicas=sent)
        late = replace(planned, communication=communication, replicas=2, sync_bytes={"sum over replicas": 1})
        assert sum(seconds(late, Work(10.0, 20.0), Link(1.0))) == max(122, sent)


def test_a_unit_whose_work_is_unknown_is_named() -> None:
    with pytest.raises(ValueError, match="work has no operations of unit '3': give probe the plan's units"):
        events_of(plan(gather=1, reduce=1), {str(index): Work(1.0, 2.0) for index in range(3)})


def test_a_step_without_operations_and_ranks_to_send_to_takes_no_time() -> None:
    found = step_time([], 1.0, Link(1.0))
    assert (found.total, found.exposed) == (0, 0)
