"""Test what sysadmins order from the command line: returns, spares, maintenance, announcements."""

# ruff: noqa: F811 (fixtures that are imported)
from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest

from tests.vigil_cli.commands import nowhere, portal, problem, vigil  # noqa: F401
from vigil_cli import main, times

DRAIN = {
    "node": "dgx-01", "state": "drained", "reason": "broken fan", "holder": "person", "holder_name": "ann",
    "standing": "stands", "has_jobs": False,
}  # fmt: skip
BY_ANN = "dgx-01 is drained by ann: broken fan"
LEFT = {"order": None, "is_drained_by_another": False}
WINDOW = {
    "id": 3, "state": "planned", "starts_at": "2026-12-01T21:00:00Z", "ends_at": "2026-12-02T01:00:00Z",
    "expression": "dgx[01-02]", "reason": "new fans", "planned_by": "ops", "wants_reservation": True,
    "reservation": "", "problem": "",
}  # fmt: skip


def body(portal, number: int = -1):
    return json.loads(portal.asked[number].content)


@pytest.mark.parametrize(
    "command",
    [("drains", "return", "dgx[01-02]", "dgx-9"), ("undrain", "dgx[01-02],dgx-9"), ("undrain", "dgx[01-02]", "dgx-9")],
)
def test_returns_several_nodes_after_a_preview(portal, command):
    portal.answers["POST", "drains/return/preview"] = {
        "yours": [{**DRAIN, "node": "dgx-02"}], "by_others": [DRAIN], "reasons": {"dgx-01": "broken fan"},
        "in_service": ["dgx-9"],
    }  # fmt: skip
    portal.answers["POST", "drains/return"] = {
        "items": [
            {"node": "dgx-01", "order": None, "problem": f"{BY_ANN}.", "is_drained_by_another": True},
            {**LEFT, "node": "dgx-02", "order": {"id": 1}, "problem": ""},
            {**LEFT, "node": "dgx-9", "problem": "dgx-9 is in service."},
            {**LEFT, "node": "dgx-8", "problem": "The scheduler does not list dgx-8 any more."},
        ],
    }  # fmt: skip
    refused = vigil(*command, "--reason", "done", status=1)
    assert "Add --yes to return 1 node to service." in refused.stderr
    assert len(portal.asked) == 1, "a script orders nothing without --yes"
    result = vigil(*command, "--reason", "done", "--yes", status=1)
    assert body(portal) == {"nodes": "dgx[01-02],dgx-9", "reason": "done", "replaces": {}}
    lines = result.stderr.splitlines()
    assert "Drained by others: these stay without --replace:" in lines
    assert "  dgx-01: broken fan, by ann (problem persists)" in lines
    assert lines[-3:] == [
        "dgx-01 is drained by ann: broken fan. Add --replace to end that.",
        "The scheduler does not list dgx-8 any more.",
        "Requested the return of 1 node. `vigil drains` shows what is still out of service.",
    ]  # fmt: skip


def test_drains_and_returns_replace_what_the_preview_showed(portal):
    preview = {
        "nodes": ["dgx-01"], "out_already": ["dgx-01"], "reasons": {"dgx-01": "broken fan"}, "jobs": 0, "users": [],
        "gpus": 0, "cluster_gpus": 8, "partitions": [], "yours": [], "by_others": [DRAIN], "in_service": [],
    }  # fmt: skip
    left = {**LEFT, "node": "dgx-01", "problem": "dgx-01 is drained: water leak.", "is_drained_by_another": True}
    for command, address in ((("drain",), "drains"), (("drains", "return"), "drains/return")):
        portal.answers["POST", f"{address}/preview"] = preview
        portal.answers["POST", address] = {"items": [left]}
        result = vigil(*command, "dgx-[01]", "--reason", "switch", "--replace", "--yes", status=1)
        assert body(portal) == {"nodes": "dgx-[01]", "reason": "switch", "replaces": {"dgx-01": "broken fan"}}
        assert "dgx-01 is drained: water leak. That is new since the preview." in result.stderr.splitlines()


def test_drains_several_names(portal):
    preview = {
        "nodes": ["dgx-01", "dgx-02"], "out_already": [], "reasons": {}, "jobs": 0, "users": [], "gpus": 0,
        "cluster_gpus": 8, "partitions": [],
    }  # fmt: skip
    portal.answers["POST", "drains/preview"] = preview
    portal.answers["POST", "drains"] = {"items": [{**LEFT, "node": name, "order": {}} for name in preview["nodes"]]}
    result = vigil("drain", "dgx-01", "dgx-02", "--reason", "switch", "--yes")
    assert body(portal)["nodes"] == "dgx-01,dgx-02"
    assert "Requested the drain of 2 nodes." in result.stderr


def test_lists_whether_problems_persist(portal):
    row = {
        **DRAIN, "since": "2026-12-01T12:00:00Z", "idle_gpus": 8, "cost_per_hour": None, "currency": "€",
        "facts": ["Fan 3 turns again."],
    }  # fmt: skip
    reading = {"read_at": "2026-01-31T12:00:00Z", "error": "", "failing_since": None}
    portal.answers["GET", "drains"] = {"items": [row, {**row, "standing": "over"}], "reading": reading, "next": None}
    head, over, stands, *_ = vigil("drains", "list").stdout.splitlines()
    assert head.split("  ")[-1] == "NOTES"
    assert "  gone  " in over
    assert "  persists  " in stands
    assert vigil("drains").stdout == vigil("drains", "list").stdout


def test_several_nodes_are_not_undrained_without_a_reason(portal):
    assert "Give a --reason" in vigil("undrain", "dgx[01-02]", status=2).stderr
    assert not portal.asked


def test_spares(portal):
    spare = {
        "node": "dgx-07", "partition": "gpu", "state": "serving", "replaces": "dgx-01",
        "since": "2026-12-01T12:00:00Z", "added_by": "ops",
    }  # fmt: skip
    portal.answers["GET", "spares"] = {"items": [spare], "next": None}
    assert "in place of dgx-01" in vigil("spares").stdout
    assert json.loads(vigil("spares", "list", "--json").stdout) == {"items": [spare]}
    portal.answers["POST", "spares"] = spare
    assert "dgx-07 is a spare of gpu." in vigil("spares", "add", "dgx-07", "--partition", "gpu").stdout
    assert body(portal) == {"node": "dgx-07", "partition": "gpu"}
    portal.answers["POST", "spares"] = problem(422, "", ("node", "dgx-07 is a spare already."))
    assert "dgx-07 is a spare already." in vigil("spares", "add", "dgx-07", "--partition", "gpu", status=1).stderr
    portal.answers["POST", "spares/a/b/remove"] = {}
    vigil("spares", "remove", "a/b")
    assert portal.asked[-1].url.raw_path == b"/api/v1/spares/a%2Fb/remove"
    portal.answers["GET", "spares"] = {"items": [], "next": None}
    assert "vigil spares add" in vigil("spares").stdout


def test_maintenance(portal):
    portal.answers["GET", "maintenance"] = {"items": [WINDOW], "next": None}
    assert "new fans" in vigil("maintenance").stdout
    vigil("maintenance", "--all")
    assert dict(portal.asked[-1].url.params) == {"all": "true", "limit": "200"}
    portal.answers["POST", "maintenance"] = WINDOW
    times = ("--from", "2026-12-01T21:00:00+00:00", "--for", "4h")
    vigil("maintenance", "plan", "dgx01", "dgx[02-03]", *times, "--reason", "new fans", "--reserve")
    assert body(portal) == {
        "nodes": "dgx01,dgx[02-03]", "reason": "new fans", "reserve": True,
        "starts_at": "2026-12-01T21:00:00+00:00", "ends_at": "2026-12-02T01:00:00+00:00",
    }  # fmt: skip
    for wrong in ((), ("--for", "4h", "--until", "22:00"), ("--until", "soon"), ("--for", "4")):
        vigil("maintenance", "plan", "dgx01", "--reason", "x", *wrong, status=2)
    late = ("--from", "9999-12-31T00:00Z", "--for", "2d")
    found = vigil("maintenance", "plan", "dgx01", "--reason", "x", *late, status=2)
    assert "Invalid value for '--for': The end is after the year 9999." in found.stderr
    portal.answers["POST", "maintenance/3/cancel"] = {**WINDOW, "state": "cancelled"}
    assert json.loads(vigil("maintenance", "cancel", "3", "--json").stdout)["state"] == "cancelled"


def test_announcements(portal):
    row = {
        "id": 2, "text": "Maintenance on Saturday", "level": "warning", "starts_at": "2026-12-01T21:00:00Z",
        "ends_at": None, "written_by": "ops", "withdrawn_at": None, "is_shown": True,
    }  # fmt: skip
    portal.answers["GET", "announcements"] = {"items": [row], "next": None}
    assert "Maintenance on Saturday" in vigil("announcements", "list").stdout
    portal.answers["POST", "announcements"] = row
    vigil("announcements", "add", "Maintenance on Saturday", "--level", "warning")
    assert body(portal) == {
        "text": "Maintenance on Saturday", "level": "warning", "starts_at": None, "ends_at": None,
    }  # fmt: skip
    portal.answers["POST", "announcements/2/withdraw"] = {**row, "withdrawn_at": "2026-12-01T22:00:00Z"}
    assert "withdrawn " in vigil("announcements", "withdraw", "2").stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+90m", datetime(2026, 12, 1, 21, 30, tzinfo=UTC)),
        ("now", datetime(2026, 12, 1, 20, tzinfo=UTC)),
        ("2026-12-02T03:00+02:00", datetime(2026, 12, 2, 3, tzinfo=timezone(timedelta(hours=2)))),
    ],
)
def test_times_as_people_type_them(text: str, expected: datetime) -> None:
    assert times.parse_moment(text, datetime(2026, 12, 1, 20, tzinfo=UTC)) == expected


def test_a_time_of_day_is_in_the_future() -> None:
    now = datetime(2026, 12, 1, 20, tzinfo=UTC)
    local = now.astimezone()
    later, earlier = local + timedelta(minutes=30), local - timedelta(minutes=30)
    assert times.parse_moment(f"{later:%H:%M}", now) == later
    assert times.parse_moment(f"{earlier:%H:%M}", now) == earlier + timedelta(days=1)


def test_the_end_of_a_window_is_the_next_such_time_after_its_beginning(portal):
    portal.answers["POST", "maintenance"] = WINDOW
    now = datetime.now().astimezone()
    starts = (now + timedelta(hours=9)).replace(second=0, microsecond=0)
    for hours in (1, 8, 15):
        ends = starts + timedelta(hours=hours)
        times = ("--until", f"{ends:%H:%M}", "--from", f"{starts:%H:%M}")
        vigil("maintenance", "plan", "dgx01", *times, "--reason", "new fans")
        assert datetime.fromisoformat(body(portal)["starts_at"]) == starts
        assert datetime.fromisoformat(body(portal)["ends_at"]) == ends


@pytest.mark.parametrize("text", ["", "+", "+4", "+4y", "25:00", "9999999", "+9999999d", "tomorrow", "+²h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        times.parse_moment(text, datetime(2026, 12, 1, 20, tzinfo=UTC))


def test_help_of_the_new_commands_fits_a_terminal():
    for command in ("drains return", "spares add", "spares remove", "maintenance plan", "announcements add", "undrain"):
        lines = vigil(*command.split(), "--help").stdout.splitlines()
        assert max(map(len, lines)) <= 80, command
    assert {"spares", "maintenance", "announcements"} <= set(main.main.commands)
