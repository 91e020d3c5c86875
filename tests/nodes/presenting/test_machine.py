"""Test the lead sentence of a node's page: the worst problem first, and what is well in numbers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from nodes.presenting.machine import DriverError as Xid
from nodes.presenting.machine import GpuState as Gpu
from nodes.presenting.machine import NodeHeadline, lead_text

NOW = datetime(2026, 11, 24, 12, 0, tzinfo=UTC)
WELL: dict[str, Any] = {"has_agent": True, "last_report_at": NOW, "state": "mixed", "free": "2 of 8 GPUs"}


def gpus(*percent: int | None, **more: Any) -> list[Gpu]:
    return [Gpu(index=i, percent=value, temperature_c=60 + i, **more) for i, value in enumerate(percent)]


def spoken(**facts: Any) -> tuple[str, str]:
    lead, rest = lead_text(NodeHeadline(now=NOW, **{**WELL, **facts}))
    return lead.replace("\N{NO-BREAK SPACE}", " "), rest.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("facts", "lead"),
    [
        ({"gpus": gpus(80, 84, 82, 82, 0, 0, 0, 0)}, "4 of 8 GPUs are busy, 41 % on average."),
        ({"gpus": gpus(80, 0)}, "1 of 2 GPUs is busy, 40 % on average."),
        ({"gpus": gpus(90)}, "The GPU is busy, 90 % on average."),
        ({"gpus": gpus(0, 0)}, "All 2 GPUs are idle."),
        ({"gpus": gpus(0)}, "The GPU is idle."),
        ({"cpu_percent": 12.4}, "Its CPUs are 12 % busy; it has no GPU."),
        ({"has_agent": False}, "Schedulable: 2 of 8 GPUs free."),
        ({"has_agent": False, "state": ""}, "No data yet."),
    ],
)
def test_what_is_well(facts: dict[str, Any], lead: str) -> None:
    assert spoken(**facts)[0] == lead


def test_what_is_well_goes_on_with_what_is_free() -> None:
    assert spoken(gpus=gpus(80, 84))[1] == "The hottest is at 61 °C. Schedulable: 2 of 8 GPUs free."


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"is_silent": True, "last_report_at": NOW - timedelta(minutes=14)},
        "No report for 14 min: the machine is down, its agent has stopped, or the network between is broken.",
    ),
    (
        {"gpus": [Gpu(index=5, lost_at=NOW - timedelta(hours=1)), Gpu(index=6, percent=3)]},
        "GPU 5 has been lost since",
    ),
    (
        {"gpus": [Gpu(index=3, percent=90, fault="needs a reset"), Gpu(index=4, fault="is broken")]},
        "GPU 3 needs a reset. 1 more GPU is broken.",
    ),
    (
        {"xids": [Xid(45, 2, NOW), Xid(79, 2, NOW - timedelta(minutes=12), 3)]},
        "Xid 79 on GPU 2, 12 min ago: GPU fell off the bus; 2 more in 6 h.",
    ),
    (
        {"xids": [Xid(13, 1, NOW, 40), Xid(63, 0, NOW), Xid(79, 2, NOW - timedelta(hours=5)), Xid(45, 2, NOW)]},
        "Xid 79 on GPU 2, 5 h ago: GPU fell off the bus; 41 more in 6 h.",
    ),
    (
        {"xids": [Xid(161, 0, NOW), Xid(119, 1, NOW - timedelta(hours=1))]},
        "Xid 119 on GPU 1, 1 h ago: GPU system processor (GSP) does not respond; 1 more in 6 h.",
    ),
    (
        {"xids": [Xid(119, 0, NOW), Xid(20034, None, NOW - timedelta(hours=1), kind="sxid", is_fatal=True)]},
        "SXid 20034, 1 h ago: a fatal NVSwitch error; 1 more in 6 h.",
    ),
    ({"hanging": [("/data", NOW), ("/home", NOW)]}, "/data and /home have been slow or hanging since"),
    (
        {
            "takes_jobs": False, "state": "drained", "reason": "XID 79", "reason_by": "ops",
            "reason_at": NOW - timedelta(hours=3),
        },
        "Not schedulable: drained by ops 3 h ago: XID 79.",
    ),
    (
        {"gpus": [Gpu(index=3, percent=90, temperature_c=86, slowdown_c=87), Gpu(index=4, percent=9, throttle=0x40)]},
        "GPU 3 is hot at 86 °C; it throttles at 87. So is 1 more.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "lead"), WRONG)
def test_what_is_wrong(facts: dict[str, Any], lead: str) -> None:
    assert spoken(**facts)[0].startswith(lead)


def test_the_worst_leads_and_no_more_than_two_follow() -> None:
    """Each of these outranks those after it."""
    merged: dict[str, Any] = {}
    for facts, lead in reversed(WRONG):
        merged = {**merged, **facts}
        if "gpus" in facts:
            merged["gpus"] = facts["gpus"]
        text, rest = spoken(**merged)
        assert text.startswith(lead)
        assert len(rest) < 400


def test_nothing_is_revealed_about_jobs_of_others() -> None:
    hidden = Gpu(index=1, percent=99, temperature_c=95, slowdown_c=87, is_hidden=True)
    lead, rest = spoken(gpus=[Gpu(index=0, percent=50, temperature_c=60), hidden])
    assert lead == "The GPU is busy, 50 % on average."
    assert rest.startswith("1 GPU is in use by others.")


def test_a_lone_xid_45_and_a_silent_driver_are_mentioned() -> None:
    assert spoken(xids=[Xid(45, None, NOW)])[0].startswith("Xid 45, now")
    assert "driver has not responded since" in spoken(driver_silent_at=NOW)[0]
    assert spoken(last_report_at=None, is_silent=True)[0] == "Its agent has not reported yet."
