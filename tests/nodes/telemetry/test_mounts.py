"""Test that a file system which was slow on several machines is one event: its machines and duration."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.models import Agent
from nodes.telemetry import mounts
from nodes.telemetry.mounts import SlowMount, together
from tests.nodes.telemetry.reporting import Machine

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)
NFS = "nfs01:/export/home"


def slow(node: str, minute: float, until: float | None, *, mount: str = "/home", source: str = NFS) -> SlowMount:
    end = None if until is None else NOON + timedelta(minutes=until)
    return SlowMount(node, mount, source, NOON + timedelta(minutes=minute), end)


def test_within_two_minutes_it_is_a_single_event() -> None:
    (event,) = together([slow("b", 1, 8), slow("a", 0, 11), slow("c", 2.5, 9)])
    assert event.nodes == ["a", "b", "c"]
    assert (
        event.text(NOON + timedelta(hours=2))
        == "nfs01 was slow for 11\N{NO-BREAK SPACE}min on 3\N{NO-BREAK SPACE}nodes"
    )
    assert (event.at, event.until) == (NOON, NOON + timedelta(minutes=11))


def test_a_single_machine_makes_no_event() -> None:
    assert together([slow("a", 0, 1), slow("a", 1, 2)]) == [], "twice on one machine"
    assert together([slow("a", 0, 5), slow("b", 3, 6)]) == [], "three minutes apart"
    assert together([slow("a", 0, 5), slow("b", 1, 6, source="nfs02:/x")]) == [], "two servers at one path"


def test_who_notices_later_belongs_to_what_lasts() -> None:
    (event,) = together([slow("a", 0, 30), slow("b", 1, 31), slow("late", 20, 32), slow("after", 40, 41)])
    assert event.nodes == ["a", "b", "late"]
    first, second = together([slow("a", 0, 5), slow("b", 1, 5), slow("a", 60, 65), slow("b", 61, 66)])
    assert (first.until, second.at) == (NOON + timedelta(minutes=5), NOON + timedelta(minutes=60))


def test_it_lasts_while_any_machine_suffers() -> None:
    (event,) = together([slow("a", 0, 5), slow("b", 1, None)])
    assert event.is_open
    assert event.text(NOON + timedelta(minutes=90)).startswith("nfs01 has been slow for 1\N{NO-BREAK SPACE}h on")


def test_a_machine_that_reports_no_source_counts_by_the_path() -> None:
    (event,) = together([slow("a", 0, 5), slow("b", 1, 5), slow("c", 1, 5, source="")])
    assert (event.key, event.nodes) == (NFS, ["a", "b", "c"])
    (event,) = together([slow("a", 0, 5, source=""), slow("b", 1, 5, source="")])
    assert event.name == "/home"
    (event,) = together([slow("a", 0, 5), slow("b", 1, 5, mount="/data/home")])
    assert event.mounts == ["/home", "/data/home"], "one source at two paths"


rows = st.lists(
    st.builds(
        slow,
        st.sampled_from("abc"),
        st.floats(0, 60),
        st.none() | st.floats(60, 90),
        mount=st.sampled_from(["/home", "/data"]),
        source=st.sampled_from(["", NFS, "lustre"]),
    ),
    max_size=12,
)


@given(rows)
def test_whatever_machines_report(reports: list[SlowMount]) -> None:
    events = together(reports)
    assert events == together(reversed(reports)) or len({row.at for row in reports}) < len(reports)
    for event in events:
        assert len(event.nodes) == len(set(event.nodes)) >= mounts.MIN_NODES
        assert set(event.nodes) <= {row.node for row in reports}
        assert event.until is None or event.until >= event.at
        assert event.text(NOON + timedelta(hours=3))


@pytest.mark.django_db
def test_reports_of_agents_are_found_in_a_single_query(django_assert_num_queries: object) -> None:
    now = time.time()
    facts = {"mounts": [{"mount": "/home", "type": "nfs4", "source": "nfs01:/home"}]}
    for i, node in enumerate(("dgx-01", "dgx-02", "dgx-03")):
        machine = Machine(node, gpus=(f"GPU-{i:08x}",), stream=f"{i:016x}")
        machine.post(machine.facts(now - 900, **facts))
        machine.post(machine.event("mount.slow", now - 800 + i, mount="/home", since=now - 802 + i))
        if node != "dgx-03":
            machine.post(machine.event("mount.well", now - 140, mount="/home", seconds=660))
    then = datetime.fromtimestamp(now, UTC)
    with django_assert_num_queries(1):  # type: ignore[operator]
        (event,) = mounts.between(then - timedelta(hours=1), then)
    assert (event.name, event.nodes, event.is_open) == ("nfs01", ["dgx-01", "dgx-02", "dgx-03"], True)
    assert mounts.between(then - timedelta(hours=1), then, node="dgx-03")
    assert mounts.between(then - timedelta(hours=1), then, node="dgx-09") == []
    assert mounts.between(then - timedelta(hours=3), then - timedelta(hours=2)) == []
    # Whether it is still slow on a machine that fell silent is unknown.
    Agent.objects.filter(node="dgx-03").update(heard_at=then - timedelta(seconds=100))
    (event,) = mounts.between(then - timedelta(hours=1), then)
    assert event.until == then - timedelta(seconds=100)
