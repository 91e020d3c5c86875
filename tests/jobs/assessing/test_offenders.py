"""Nodes and programs that keep failing become findings, with what they are based on, and end when they are repaired."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs.assessing.assess import assess as assess_at
from jobs.tasks import assess
from nodes.models import Assessment, HealthEntry
from nodes.monitoring.evaluate import evaluate
from nodes.remediation import inbox
from nodes.tasks import health
from tests.jobs.reliability.lab import count, ran
from tests.lab import bearer, person, signed_in, sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    lab = Lab()
    for name in lab.names:
        ran(72.0, ago=300, nodes=[name])
    return lab


def judge() -> None:
    count()
    assess()
    health()


def findings() -> list[tuple[str, str]]:
    return [(entry.rule, entry.node) for entry in HealthEntry.objects.open().order_by("id")]


def fail_on(node: str, times: int, cause: str = "gpu.off_bus", **incident: Any) -> None:
    for number in range(times):
        ran(2.0, ago=40 + number, nodes=[node], cause=cause, **incident)


def test_a_node_on_which_different_programs_fail_is_drained_with_the_evidence(lab: Lab) -> None:
    fail_on("dgx-03", 5)
    judge()
    assert findings() == [("repeat-offender", "dgx-03")]
    lab.step()
    reason = "[node] Different programs keep failing on this node (vigil: repeat-offender)"
    assert lab.scheduler.drained == {"dgx-03": reason}
    ((_, signal, fields, _),) = lab.entry("repeat-offender", "dgx-03").evidence
    assert signal == "repeat_failures"
    assert (fields["failures"], fields["programs"]) == (5, 5)
    assert fields["expected"] < 1
    assert fields["programs_chance"] < 0.001


@pytest.mark.parametrize(
    ("cause", "more"),
    [
        ("program.exception", {"fingerprint": "a" * 16}),  # one program that fails wherever it is sent
        ("unknown", {"fingerprint": "a" * 16}),  # the same, before anybody knows why
        ("program.exception", {}),  # people who try things out
        ("gpu.off_bus", {"confirmed_cause": ""}),  # what the log of one person's jobs claims
    ],
)
def test_what_says_nothing_about_the_node_drains_nothing(lab: Lab, cause: str, more: dict[str, Any]) -> None:
    fail_on("dgx-03", 8, cause, **more)
    judge()
    lab.step()
    assert not lab.scheduler.drained
    assert ("repeat-offender", "dgx-03") not in findings()


def test_a_program_that_fails_everywhere_is_its_owners_and_no_nodes(lab: Lab) -> None:
    for node in lab.names[:6]:
        fail_on(node, 1, "program.exception", fingerprint="0123456789abcdef")
    judge()
    lab.step()
    assert not lab.scheduler.drained
    assert findings() == [("failing-program", "")]
    entry = HealthEntry.objects.get()
    assert entry.item == "program 0123456789abcdef"
    fields = entry.evidence[-1][2]
    assert (fields["failures"], fields["nodes"], fields["user"]) == (6, 6, "of-default")


def test_whose_program_it_is_only_sysadmins_see(lab: Lab) -> None:
    for node in lab.names[:6]:
        fail_on(node, 1, "program.exception", fingerprint="0123456789abcdef")
    judge()
    mira = person("mira")
    page = signed_in(mira).get("/health").content.decode()
    assert "program 0123456789abcdef" in page
    assert "of-default" not in page
    (item,) = bearer(mira, "read").get("/api/v1/health").json()["items"]
    assert not {"user", "program"} & item["evidence"][0]["fields"].keys()
    (item,) = bearer(sysadmin("ops"), "read").get("/api/v1/health").json()["items"]
    assert item["evidence"][0]["fields"]["user"] == "of-default"


def test_a_program_that_fails_on_one_node_mostly_is_no_finding(lab: Lab) -> None:
    fail_on("dgx-01", 5, "program.exception", fingerprint="a" * 16)
    fail_on("dgx-02", 1, "program.exception", fingerprint="a" * 16)
    fail_on("dgx-03", 1, "program.exception", fingerprint="a" * 16)
    judge()
    assert findings() == []


def test_what_happened_before_a_repair_is_not_held_against_the_node_again(lab: Lab) -> None:
    fail_on("dgx-03", 5)
    judge()
    inbox.clear(sysadmin("ops"), lab.entry("repeat-offender", "dgx-03").pk, "board replaced, burn-in passed")
    judge()
    assert findings() == []


def test_a_corrected_program_is_no_finding_any_more(lab: Lab) -> None:
    for node in lab.names[:6]:
        fail_on(node, 1, "program.exception", fingerprint="0123456789abcdef")
    judge()
    assert findings()
    later = timezone.now() + timedelta(days=15)
    assess_at(later)
    evaluate(later)
    assert findings() == []


def test_assessments_that_stopped_say_nothing(lab: Lab) -> None:
    fail_on("dgx-03", 5)
    count()
    assess()
    Assessment.objects.update(assessed_at=timezone.now() - timedelta(hours=3))
    health()
    assert findings() == []
