"""Test that nodes and programs that fail repeatedly become findings, with their evidence, until they are repaired."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from jobs.assessing.assess import assess as assess_at
from jobs.assessing.offenders import failing_nodes, failing_programs
from jobs.models import Failure, Job
from jobs.tasks import assess
from nodes.models import Assessment, HealthEntry
from nodes.monitoring.evaluate import evaluate
from nodes.remediation import inbox
from nodes.tasks import health
from tests.jobs.reliability.lab import NOW, count, ran
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


def fail_on(node: str, times: int, cause: str = "gpu.off_bus", *, people: int = 1, **incident: Any) -> None:
    """Let jobs fail on the node; their owners take turns, one for each project."""
    for number in range(times):
        project = ("default", "vision", "speech")[number % people]
        ran(2.0, ago=40 + number, nodes=[node], cause=cause, project=project, **incident)


def test_a_node_on_which_different_programs_fail_is_drained_with_the_evidence(lab: Lab) -> None:
    fail_on("dgx-03", 5, people=2)
    judge()
    assert findings() == [("repeat-offender", "dgx-03")]
    lab.step()
    reason = "[node] Different programs keep failing on this node (vigil: repeat-offender)"
    assert lab.scheduler.drained == {"dgx-03": reason}
    ((_, signal, fields, _),) = lab.entry("repeat-offender", "dgx-03").evidence
    assert signal == "repeat_failures"
    assert (fields["failures"], fields["programs"], fields["owners"]) == (5, 5, 2)
    assert fields["expected"] < 1
    assert fields["programs_chance"] < 0.001


def test_a_program_whose_failures_are_deleted_meanwhile_is_left_out(lab: Lab) -> None:
    for name in lab.names[:6]:
        fail_on(name, 1, "program.exception", fingerprint="a" * 16)
    count()

    def delete_before(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "jobs_incident" in sql and sql.startswith("SELECT") and Failure.objects.exists():
            Failure.objects.all().delete()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(delete_before):
        assert failing_programs(NOW) == {}
    assert not Failure.objects.exists()


@pytest.mark.parametrize(
    ("cause", "more"),
    [
        ("program.exception", {"fingerprint": "a" * 16}),  # one program that fails on every node
        ("unknown", {"fingerprint": "a" * 16}),  # the same, before the cause is found
        ("unknown", {}),  # one person's script that ends without a message
        ("unknown", {"people": 2}),
        ("", {"people": 2}),
        ("program.exception", {}),  # people who try things out
        ("program.exception", {"people": 3}),
        ("gpu.off_bus", {"confirmed_cause": ""}),  # what the log of one person's jobs claims
    ],
)
def test_failures_that_do_not_implicate_the_node_drain_nothing(lab: Lab, cause: str, more: dict[str, Any]) -> None:
    fail_on("dgx-03", 8, cause, **more)
    judge()
    lab.step()
    assert not lab.scheduler.drained
    assert findings() == []


def test_failures_that_nothing_explains_count_once_a_person(lab: Lab) -> None:
    for number in range(9):  # with another last line each time
        fail_on("dgx-03", 1, "unknown", people=1, fingerprint=f"{number:016}")
    fail_on("dgx-03", 3, "unknown", people=3)
    judge()
    fields = Assessment.objects.get(signal="repeat_failures", node="dgx-03").fields
    assert (fields["failures"], fields["programs"], fields["owners"]) == (3, 3, 3)


def test_what_a_single_persons_jobs_show_is_watched_and_drains_nothing(lab: Lab) -> None:
    fail_on("dgx-03", 8)
    judge()
    lab.step()
    assert findings() == [("failing-for-one-person", "dgx-03")]
    assert not lab.scheduler.drained
    fail_on("dgx-03", 2, people=2)
    judge()
    lab.step()
    assert findings() == [("repeat-offender", "dgx-03")]
    assert list(lab.scheduler.drained) == ["dgx-03"]


def test_failures_of_jobs_that_were_deleted_still_speak_for_different_people(lab: Lab) -> None:
    fail_on("dgx-03", 5, people=2)
    count()
    Job.objects.filter(attempts__incidents__isnull=False).delete()
    judge()
    assert findings() == [("repeat-offender", "dgx-03")]


def test_a_program_that_fails_everywhere_is_its_owners_and_no_nodes(lab: Lab) -> None:
    for node in lab.names[:6]:
        fail_on(node, 1, "program.exception", fingerprint="0123456789abcdef")
    judge()
    lab.step()
    assert not lab.scheduler.drained
    assert findings() == [("failing-program", "")]
    entry = HealthEntry.objects.get()
    assert entry.item.startswith("program ")
    fields = entry.evidence[-1][2]
    assert (fields["failures"], fields["nodes"], fields["user"]) == (6, 6, "of-default")


def test_only_sysadmins_see_the_owner_of_a_program(lab: Lab) -> None:
    for node in lab.names[:6]:
        fail_on(node, 1, "program.exception", fingerprint="0123456789abcdef")
    judge()
    mira = person("mira")
    page = signed_in(mira).get("/health").content.decode()
    assert HealthEntry.objects.get().item in page
    assert "of-default" not in page
    (item,) = bearer(mira, "read").get("/api/v1/health").json()["items"]
    assert not {"user", "program"} & item["evidence"][0]["fields"].keys()
    (item,) = bearer(sysadmin("ops"), "read").get("/api/v1/health").json()["items"]
    assert item["evidence"][0]["fields"]["user"] == "of-default"


def test_a_program_that_fails_mostly_on_a_single_node_is_no_finding(lab: Lab) -> None:
    fail_on("dgx-01", 5, "program.exception", fingerprint="a" * 16)
    fail_on("dgx-02", 1, "program.exception", fingerprint="a" * 16)
    fail_on("dgx-03", 1, "program.exception", fingerprint="a" * 16)
    judge()
    assert findings() == []


def test_what_different_people_have_in_common_is_no_failing_program(lab: Lab) -> None:
    for number, node in enumerate(lab.names[:9]):
        ran(2.0, nodes=[node], cause="memory.gpu_oom", fingerprint="a" * 16, project=f"p{number % 3}")
    judge()
    assert findings() == []


def test_time_limits_are_no_failing_program(lab: Lab) -> None:
    for node in lab.names[:6]:
        fail_on(node, 1, "scheduler.time_limit", fingerprint="a" * 16)
    judge()
    assert findings() == []


def test_failures_before_a_repair_do_not_count_against_the_node_again(lab: Lab) -> None:
    fail_on("dgx-03", 5, people=2)
    judge()
    inbox.clear(sysadmin("ops"), lab.entry("repeat-offender", "dgx-03").pk, "board replaced, burn-in passed")
    judge()
    assert findings() == []


def test_after_a_repair_failures_and_node_days_count_from_the_same_day(lab: Lab) -> None:
    fail_on("dgx-03", 5, people=2)
    judge()
    inbox.clear(sysadmin("ops"), lab.entry("repeat-offender", "dgx-03").pk, "board replaced")
    repaired = timezone.now().replace(hour=1, minute=0) - timedelta(days=1)
    HealthEntry.objects.update(cleared_at=repaired)
    for hours in range(1, 7):  # on the day of the repair
        ended = repaired + timedelta(hours=hours)
        ran(0.1, ago=(NOW - ended).total_seconds() / 3600, nodes=["dgx-03"], cause="gpu.off_bus", project=f"p{hours}")
    ran(0.1, ago=0.2, nodes=["dgx-03"])  # and the next
    count()
    assert failing_nodes(timezone.now()) == {}


def test_a_corrected_program_is_no_finding_any_more(lab: Lab) -> None:
    for node in lab.names[:6]:
        fail_on(node, 1, "program.exception", fingerprint="0123456789abcdef")
    judge()
    assert findings()
    later = timezone.now() + timedelta(days=15)
    assess_at(later)
    evaluate(later)
    assert findings() == []


def test_assessments_that_stopped_show_nothing(lab: Lab) -> None:
    fail_on("dgx-03", 5, people=2)
    count()
    assess()
    Assessment.objects.update(assessed_at=timezone.now() - timedelta(minutes=20))
    health()
    assert findings() == []
