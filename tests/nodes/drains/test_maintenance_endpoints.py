"""Maintenance over REST, on its page and in the dry run: for sysadmins only, and safe against odd input."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nodes.models import MaintenanceWindow
from portal.models import User
from tests.lab import a_project, bearer, person, signed_in
from tests.nodes.drains.windows import HOUR, now, planned
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


def post(user: User, address: str = "", **body: Any) -> Any:
    client = bearer(user, "admin" if user.is_sysadmin else "submit")
    return client.post(f"/api/v1/maintenance{address}", body, content_type="application/json")


def wanted(**changes: Any) -> dict[str, Any]:
    times = {"starts_at": (now() + HOUR).isoformat(), "ends_at": (now() + 2 * HOUR).isoformat()}
    return {"nodes": "dgx-[01-02]", "reason": "new switch", **times, **changes}


def test_rest_plans_lists_and_cancels(lab: Lab, ops: User) -> None:
    answer = post(ops, **wanted(reserve=True))
    assert answer.status_code == 201
    window = answer.json()
    assert (window["nodes"], window["state"], window["planned_by"]) == (["dgx-01", "dgx-02"], "planned", "ops")
    ada = person("ada", a_project())
    assert [item["id"] for item in bearer(ada, "read").get("/api/v1/maintenance").json()["items"]] == [window["id"]]
    assert post(ada, **wanted()).status_code == 403
    assert post(ada, f"/{window['id']}/cancel").status_code == 403
    assert post(ops, f"/{window['id']}/cancel").json()["state"] == "cancelled"
    again = post(ops, f"/{window['id']}/cancel")
    assert (again.status_code, again.json()["detail"]) == (409, f"Maintenance window {window['id']} is over already.")
    assert post(ops, "/999/cancel").status_code == 404
    assert bearer(ada, "read").get("/api/v1/maintenance").json()["items"] == []
    assert len(bearer(ada, "read").get("/api/v1/maintenance", {"all": True}).json()["items"]) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ends_at": "2020-01-01T00:00:00Z"}, "ends_at"),
        ({"starts_at": "2999-01-01T00:00:00Z", "ends_at": "2999-01-02T00:00:00Z"}, "starts_at"),
        ({"ends_at": "2999-01-01T00:00:00Z"}, "ends_at"),
        ({"nodes": "dgx-99"}, "nodes"),
        ({"nodes": "n[1-999999999]"}, "nodes"),
        ({"reason": " "}, "reason"),
        ({"reason": "x" * 151}, "reason"),
    ],
)
def test_refuses_what_cannot_be_planned(lab: Lab, ops: User, changes: dict[str, Any], field: str) -> None:
    answer = post(ops, **wanted(**changes))
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
    assert not MaintenanceWindow.objects.exists()


def test_the_page_plans_and_cancels(lab: Lab, ops: User) -> None:
    client = signed_in(ops)
    starts, ends = ((now() + hours * HOUR).strftime("%Y-%m-%dT%H:%M") for hours in (24, 26))
    sent = {"nodes": "dgx-[01-02]", "reason": "<b>switch</b>", "starts_at": starts, "ends_at": ends}
    for field, value in (("ends_at", "soon"), ("nodes", "dgx-99"), ("reason", " ")):
        refused = client.post("/maintenance", {**sent, field: value})
        assert refused.status_code == 422
        (invalid,) = re.findall(r'<input id="(\w+)"[^>]* aria-invalid="true" aria-describedby="mistake"', refused.text)
        assert invalid == field
    assert client.post("/maintenance", sent).status_code == 302
    for page in ("/maintenance", "/drains", "/nodes/dgx-01"):
        assert "&lt;b&gt;switch&lt;/b&gt;" in client.get(page).text
    window = MaintenanceWindow.objects.get()
    ada = signed_in(person("ada", a_project()))
    assert "Plan maintenance" not in ada.get("/maintenance").text
    assert ada.post("/maintenance", sent).status_code == 403
    assert ada.post(f"/maintenance/{window.pk}/cancel").status_code == 403
    assert client.post(f"/maintenance/{window.pk}/cancel").status_code == 302
    assert "No maintenance is planned." in client.get("/maintenance").text


def test_the_dry_run_warns_of_a_window_that_the_job_reaches_into(lab: Lab, ops: User) -> None:
    mira = person("mira", a_project())
    spec = """
name = "wren"
kind = "distributed"
project = "default"
[resources]
time_limit = "04:00:00"
[run]
recipe = "language"
steps = 10
"""

    def warned() -> list[str]:
        answer = bearer(mira, "submit").post("/api/v1/jobs/check", spec, content_type="application/toml").json()
        return [finding["text"] for finding in answer["findings"] if finding["title"] == "Maintenance"]

    planned(ops, starts=300, ends=400)
    assert warned() == []
    planned(ops, "dgx-[01-12]", starts=60, ends=120, reason="new driver", wants_reservation=True)
    (text,) = warned()
    assert text.startswith("Maintenance begins on all 12 nodes that it could use (dgx-01 … dgx-12) at ")
    assert text.endswith("so it starts there only afterwards.")


@pytest.mark.parametrize("starts_at", ["0001-01-01T00:00", "1600-02-29T12:00", "9999-12-31T23:59"])
def test_times_that_no_calendar_needs_are_refused(lab: Lab, ops: User, settings: Any, starts_at: str) -> None:
    settings.TIME_ZONE = "America/New_York"
    form = {"nodes": "dgx-01", "reason": "fans", "starts_at": starts_at, "ends_at": "9999-12-31T23:59"}
    for ends_at in (form["ends_at"], f"{now() + HOUR:%Y-%m-%dT%H:%M}"):
        assert signed_in(ops).post("/maintenance", form | {"ends_at": ends_at}).status_code == 422
    body = {"nodes": "dgx-01", "reason": "fans", "starts_at": f"{starts_at}Z", "ends_at": (now() + HOUR).isoformat()}
    answer = bearer(ops, "admin").post("/api/v1/maintenance", body, content_type="application/json")
    assert answer.status_code == 422
    assert not MaintenanceWindow.objects.exists()
