"""Test lanes: positions on the axis, and that everything stays inside for any times."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from jobs.presenting.postmortems import lanes
from jobs.presenting.postmortems.lanes import LaneFacts, LaneSign, NodeFacts

BEGAN = datetime(2026, 11, 21, 0, 0, tzinfo=UTC)
BAD = BEGAN + timedelta(hours=3, minutes=1, seconds=9, milliseconds=412)
ENDED = BAD + timedelta(seconds=31)
ROOT = LaneSign(at=BAD, role="root", text="XID 79: GPU 5 has fallen off the bus")
ECHO = LaneSign(at=BAD + timedelta(seconds=22), role="echo", text="connection closed by peer", rank=3)
FACTS = LaneFacts(
    number=3, state="failed", started_at=BEGAN, ended_at=ENDED, trained_from=BEGAN + timedelta(minutes=1),
    trained_until=BAD, bad_at=BAD, last_step=41_312, rank=21,
    nodes=(
        NodeFacts(name="dgx-01", ranks=8, signs=(ECHO,)),
        NodeFacts(name="dgx-03", ranks=8, signs=(ROOT,), is_blamed=True),
    ),
    acts=(ENDED, ENDED + timedelta(seconds=1), ENDED + timedelta(minutes=2)),
    next_number=4, next_started_at=ENDED + timedelta(minutes=2),
    next_nodes=("dgx-01", "dgx-04"), resumed_at=ENDED + timedelta(minutes=4), resumed_step=41_001,
)  # fmt: skip


def test_the_blamed_node_has_its_rank_and_the_others_apart() -> None:
    drawn = lanes.draw(FACTS)
    assert [lane.name for lane in drawn.lanes] == [
        "Scheduler", "Vigil", "dgx-01", "dgx-03", "rank 21", "other 7\N{NO-BREAK SPACE}ranks", "dgx-04",
    ]  # fmt: skip
    assert [lane.name for lane in drawn.lanes if lane.is_hot] == ["dgx-03", "rank 21"]
    hot = drawn.lanes[3]
    assert [mark.kind for mark in hot.marks] == ["glyph"]
    assert hot.marks[0].x == drawn.first_x
    assert "XID 79" in hot.marks[0].label
    assert drawn.first_label.endswith("09.412")
    assert [mark.label for mark in drawn.lanes[1].marks] == ["1", "2", "3"]
    assert "03:01:09.412" in drawn.words


def test_a_midnight_is_labelled_with_its_day() -> None:
    drawn = lanes.draw(replace(FACTS, started_at=BEGAN - timedelta(hours=2)), "attempt")
    labels = [tick.text for tick in drawn.axis]
    assert "Sat 21 Nov" in labels, "as on the ribbon of the job's page"
    assert "23:00" in labels
    assert [tick.is_day for tick in drawn.axis].count(True) == 1


def test_many_nodes_are_few_lanes() -> None:
    quiet = tuple(NodeFacts(name=f"dgx-{n:03}", ranks=8) for n in range(100, 226))
    drawn = lanes.draw(replace(FACTS, nodes=(*quiet, *FACTS.nodes)))
    names = [lane.name for lane in drawn.lanes]
    assert len(names) < 16
    assert {"dgx-01", "dgx-03", "121 more nodes"} <= set(names)


@pytest.mark.parametrize(
    ("span", "changes"),
    list(
        product(
            lanes.SPANS,
            (
                {},
                {"bad_at": None, "trained_from": None, "trained_until": None},
                {
                    "next_number": None,
                    "next_started_at": None,
                    "resumed_at": None,
                    "resumed_step": None,
                    "next_nodes": (),
                },
                {"next_started_at": ENDED + timedelta(days=3), "resumed_at": None},
                {"next_started_at": BEGAN, "resumed_at": BEGAN, "next_ended_at": BEGAN},  # of clocks that differ
                {"started_at": ENDED, "trained_until": BEGAN},
                {"bad_at": ENDED + timedelta(hours=1)},
                {"nodes": ()},
                {"acts": tuple(ENDED + timedelta(milliseconds=n) for n in range(40))},
            ),
        )
    ),
)
def test_everything_stays_inside(span: str, changes: dict[str, object]) -> None:
    drawn = lanes.draw(replace(FACTS, **changes), span)  # type: ignore[arg-type]
    assert len(drawn.axis) <= 10
    for lane in drawn.lanes:
        assert all(lanes.LABEL_WIDTH <= bar.x1 < bar.x2 <= 100.2 for bar in lane.bars), lane
        assert all(0 <= mark.x <= 100 for mark in lane.marks), lane
    assert drawn.first_side in {"start", "mid", "end"}
