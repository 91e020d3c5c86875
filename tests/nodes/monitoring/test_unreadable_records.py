"""One record that cannot be read stops neither the evaluation of the others, nor a page, nor a decision."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.utils import timezone

from nodes.models import Agent, Assessment, Gpu, HealthEntry, SiteRule
from tests.lab import a_project, bearer, person, signed_in, sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
OLD_PROGRESS: list[Any] = [
    [], "open", {"state": "half open"}, {"state": "open", "openings": 3}, {"state": "open", "first_seen": "yesterday"},
    {"state": "open", "occurrences": [[0, 1]]}, {"state": "open", "occurrences": [["0", 1.0, 1, {}]]},
    {"state": "open", "holding": 5}, {"state": "open", "holding": [["0", None]]}, {"state": "open", "count": None},
]  # fmt: skip
ODD_EVIDENCE: list[Any] = [
    {}, "none", [1], [["yesterday", "xid", {}, 1]], [[1e300, "xid", {}, 1]], [[1.0, "xid", None, 1]],
    [[1.0, "xid", {"code": {"a": 1}}, 1]], [[1.0, "xid", {}, "many"]], [[1.0, 7, {}, 1]], [[1.0, "xid"]],
]  # fmt: skip
SINGLE_TRIGGER = """
[[rule]]
name = "hot"
title = "Hot"
source = "a test"
severity = "warning"
action = "watch"
signal = "gpu_samples"
where = { margin_c = "<= 1" }
for = "5m"
clears = "recovered"
clears_after = "10m"
"""

BY_USERS = """
[[rule]]
name = "follows"
title = "Follows"
source = "a test"
severity = "critical"
action = "drain"
signal = "xid"
where = { code = 13 }
count = 2
within = "24h"
distinct = { user = 2 }
clears = "quiet"
clears_after = "1h"
"""


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "propose"
    return Lab()


@pytest.mark.parametrize("progress", OLD_PROGRESS)
def test_progress_of_an_old_format(lab: Lab, progress: Any) -> None:
    lab.xid(79, "dgx-01")
    lab.step()
    HealthEntry.objects.update(progress=progress)
    lab.happens("boot", "dgx-01")
    lab.xid(79, "dgx-02")
    lab.step()
    assert lab.entry(node="dgx-02").state == "open"
    assert lab.entry(node="dgx-01").state == "open"
    answer = bearer(sysadmin("ops"), "admin").post(
        f"/api/v1/health/{lab.entry().pk}/clear", {"reason": "repaired"}, content_type="application/json"
    )
    assert (answer.status_code, answer.json()["state"]) == (200, "cleared")
    lab.xid(79, "dgx-01")
    lab.step()
    assert HealthEntry.objects.filter(node="dgx-01", state="open").count() == 1


@pytest.mark.parametrize("evidence", ODD_EVIDENCE)
def test_evidence_of_an_old_format(lab: Lab, evidence: Any) -> None:
    lab.xid(79)
    lab.step()
    HealthEntry.objects.update(evidence=evidence)
    ops = sysadmin("ops")
    for address in ("/health", "/health/entries", "/nodes/dgx-01"):
        assert signed_in(ops).get(address).status_code == 200
    (item,) = bearer(ops, "read").get("/api/v1/health").json()["items"]
    assert item["evidence"] == []
    lab.xid(79)
    lab.step()
    assert [observation.signal for observation in lab.entry().observations()] == ["xid"]


@pytest.mark.parametrize(
    "fields", [[], "slow", 3, {"ratio": [1]}, {"ratio": {"a": 1}}, {"ratio": "1.5"}, {"slow_programs": 10**400}]
)
def test_an_odd_assessment(lab: Lab, fields: Any) -> None:
    lab.step()
    now = timezone.now()
    Assessment.objects.create(signal="step_time", node="dgx-03", fields=fields, assessed_at=now, noticed_at=now)
    lab.xid(79)
    lab.step()
    assert lab.entry().state == "open"


def test_a_rule_that_cannot_be_read_is_logged_once(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    new = "# a text that no other test has logged"
    SiteRule.objects.create(name="hot", toml=f"[[rule] {new}")
    SiteRule.objects.create(name="cold", toml=f"{SINGLE_TRIGGER}{new}")
    lab.xid(79)
    lab.step()
    lab.step()
    assert lab.entry().state == "open"
    logged = [message for message in caplog.messages if "cannot be read" in message]
    assert sorted(message.split()[3] for message in logged) == ["cold", "hot"]


def test_a_rule_that_lost_a_trigger_meanwhile(lab: Lab) -> None:
    SiteRule.objects.create(name="hot", toml=SINGLE_TRIGGER)
    lab.xid(79)
    lab.step()
    HealthEntry.objects.create(
        node="dgx-02", rule="hot", title="Hot", severity="warning", action="watch", state="watching",
        first_seen=lab.entry().first_seen, last_seen=lab.entry().last_seen, due_at=lab.entry().last_seen,
        progress={"state": "watching", "first_seen": 1.0, "last_seen": 2.0, "count": 1, "holding": [[1, 1.0]]},
    )  # fmt: skip
    lab.xid(79, "dgx-03")
    lab.step()
    assert lab.entry(node="dgx-03").state == "open"
    assert not HealthEntry.objects.filter(rule="hot").exists(), "nothing is left of what it watched"


@pytest.mark.parametrize("counted", [{"holding": [[0, 1.0]]}, {"occurrences": [[0, 1.0, 1, {}], [0, 2.0, 1, {}]]}])
def test_a_rule_that_waits_for_something_else_by_now(lab: Lab, counted: dict[str, Any]) -> None:
    """What the finding has counted was neither by users nor an event: it opens nothing and stops no other rule."""
    lab.xid(79, "dgx-03")
    lab.step()
    SiteRule.objects.create(name="follows", toml=BY_USERS)
    gpu = Gpu.objects.get(uuid=lab.machine().gpus[0])
    now = time.time()
    for item in counted.get("occurrences", []):
        item[1] = now - 60
    entry = HealthEntry.objects.create(
        node="dgx-01", gpu=gpu, rule="follows", title="Follows", severity="critical", action="drain",
        state="watching", first_seen=timezone.now(), last_seen=timezone.now(), due_at=timezone.now(),
        progress={"state": "watching", "first_seen": now - 60, "last_seen": now, "count": 2, **counted},
    )  # fmt: skip
    lab.xid(13, text="Graphics exception")
    lab.xid(79, "dgx-02")
    lab.step()
    assert lab.entry(node="dgx-02").state == "open"
    assert not HealthEntry.objects.filter(pk=entry.pk, state="open").exists()


def test_the_page_never_names_people(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    entry = lab.entry()
    entry.rule = "one-that-was-removed"
    entry.evidence = [[entry.last_seen.timestamp(), "leftover", {"processes": 2, "user": "ada", "program": "#7 p"}, 1]]
    entry.save()
    page = signed_in(person("mira", a_project())).get("/health").content.decode()
    assert "2\N{NO-BREAK SPACE}processes" in page
    assert "ada" not in page
    assert "#7 p" not in page


@pytest.mark.parametrize("odd", [None, 7, "none", [], [1], {"gpus": [1], "host": "none"}, {"gpus": {"a": 1}}])
def test_an_agent_row_of_an_odd_format(lab: Lab, odd: Any) -> None:
    for node in ("dgx-01", "dgx-02"):
        lab.machine(node)
    fields = {"newest": odd, "facts": odd, "processes": odd} if odd is not None else {"newest": 0, "facts": 0}
    Agent.objects.filter(node="dgx-01").update(**fields)
    Gpu.objects.filter(agent__node="dgx-01").update(counters=odd if odd is not None else 0)
    lab.happens("gpu.silent", "dgx-02", ago=120, since=time.time() - 120)
    lab.step()
    assert lab.entry("nvml-hung", "dgx-02").state == "open"
