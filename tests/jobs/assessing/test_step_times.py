"""Test that reported step times turn a slow node into a finding, and that jobs of Vigil then avoid the node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs.assessing.assess import assess
from jobs.models import Attempt, AttemptPace
from nodes.models import Assessment, HealthEntry
from nodes.monitoring.evaluate import evaluate
from nodes.remediation import inbox
from tests.jobs.reliability.lab import ran
from tests.lab import on_disk
from tests.nodes.remediation.cluster import Lab, evaluate_until
from tests.portal.series import write

pytestmark = pytest.mark.django_db
NODES = ("dgx-01", "dgx-02", "dgx-03", "dgx-04", "dgx-05", "dgx-06")


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab(names=NODES)


def train(gpus: int, seconds: Mapping[str, float], *, steps: int = 120, ago: float = 48.0, person: str = "") -> None:
    """Run a program, which is the one with so many GPUs, once on each node, with steps of so many seconds.

    Each program is another person's, unless one is named.
    """
    for node, step_s in seconds.items():
        attempt = ran(2.0, nodes=[node], gpus=gpus, ago=ago, project=person or f"p{gpus}")
        report(attempt, step_s, steps)


def report(attempt: Attempt, step_s: float, steps: int = 120) -> None:
    # The first steps compile.
    points = [(step, 20.0 if step <= 5 else step_s) for step in range(1, steps + 1)]
    write("step_seconds", (0, points), owner=("attempt", attempt.pk))


def findings() -> list[tuple[str, str]]:
    assess()
    evaluate()
    return [(entry.rule, entry.node) for entry in HealthEntry.objects.open()]


def test_a_node_a_fifth_slower_is_a_finding_and_excluded(lab: Lab) -> None:
    for gpus in (1, 2, 4):
        train(gpus, {"dgx-01": 1.2, "dgx-02": 1.0, "dgx-03": 1.0, "dgx-04": 1.01})
    assert findings() == [("slow-for-its-kind", "dgx-01")]
    entry = HealthEntry.objects.get()
    assert entry.action == "exclude"
    assert entry.evidence[-1][2] == {
        "ratio": 1.2, "programs": 3, "slow_programs": 3, "slow_share": 1.0, "owners": 3, "jobs": 3, "other_nodes": 3,
    }  # fmt: skip


def test_what_a_single_person_reports_excludes_no_node(lab: Lab) -> None:
    for gpus in (1, 2, 4):
        train(gpus, {"dgx-01": 1.2, "dgx-02": 1.0, "dgx-03": 1.0, "dgx-04": 1.0}, person="mallory")
    assert findings() == [("slow-for-one-person", "dgx-01")]
    assert not HealthEntry.objects.excluding().exists()
    train(1, {"dgx-01": 1.2, "dgx-02": 1.0, "dgx-03": 1.0, "dgx-04": 1.0}, person="ada")
    assert ("slow-for-its-kind", "dgx-01") in findings()
    assert HealthEntry.objects.excluding().exists()


def test_restarts_of_one_job_are_one_job(lab: Lab) -> None:
    for node in NODES[1:]:
        report(ran(2.0, nodes=[node]), 1.0)
    first = ran(2.0, nodes=["dgx-01"])
    for attempt in (first, *(ran(2.0, nodes=["dgx-01"], job=first.job) for _ in range(3))):
        report(attempt, 1.3)
    assert findings() == []
    assert Assessment.objects.get(signal="step_time").fields["jobs"] == 1


def test_other_peoples_numbers_are_no_measure_of_a_program(lab: Lab) -> None:
    """The same specification, which reads another data set."""
    train(1, dict.fromkeys(NODES[1:], 1.0), person="ada")
    train(1, {"dgx-01": 1.4}, person="ben")
    assert findings() == []


def test_other_code_is_another_program(lab: Lab) -> None:
    """Somebody doubles the batch size in the file, submits it again, and it runs on another node."""
    for node in NODES:
        attempt = ran(2.0, nodes=[node])
        attempt.job.kind, attempt.job.spec["script"] = "script", {"directory": "."}
        attempt.job.save()
        digest = ("b" if node == "dgx-01" else "a") * 64
        folder = on_disk(attempt.job) / "portal"
        folder.mkdir(exist_ok=True)
        (folder / "code.json").write_text(json.dumps({"digest": digest}))
        report(attempt, 1.4 if node == "dgx-01" else 1.0)
    assess()
    assert len(set(AttemptPace.objects.values_list("program", flat=True))) == 2
    assert not Assessment.objects.filter(signal="step_time").exists()


def test_a_single_slow_program_is_none(lab: Lab) -> None:
    for gpus in (1, 2):
        train(gpus, dict.fromkeys(NODES, 1.0))
    train(8, {"dgx-01": 1.5, "dgx-02": 1.0, "dgx-03": 1.0})
    assert findings() == []


def test_attempts_with_too_few_steps_do_not_count(lab: Lab) -> None:
    for gpus in (1, 2, 4):
        train(gpus, {"dgx-01": 1.2, "dgx-02": 1.0, "dgx-03": 1.0}, steps=20)
    assert findings() == []
    assert set(AttemptPace.objects.values_list("step_s", "is_final")) == {(None, True)}


def test_an_attempt_is_measured_once_after_its_end(lab: Lab) -> None:
    train(1, {"dgx-01": 1.0})
    assess()
    before = AttemptPace.objects.get()
    assess(timezone.now() + timedelta(hours=1))
    assert AttemptPace.objects.get().measured_at == before.measured_at


def test_steps_of_attempts_that_run_for_weeks_are_measured(lab: Lab) -> None:
    attempt = ran(2.0, nodes=["dgx-01"], ago=24 * 40)
    Attempt.objects.filter(pk=attempt.pk).update(ended_at=None, closed_at=None, state="running")
    report(attempt, 1.0)
    assess()
    pace = AttemptPace.objects.get()
    assert (pace.step_s, pace.is_final) == (1.0, False)
    later = timezone.now() + timedelta(days=1)
    assess(later)
    assert AttemptPace.objects.get().measured_at == later


def slow_node() -> None:
    for gpus in (1, 2, 4):
        train(gpus, {"dgx-01": 1.2, "dgx-02": 1.0, "dgx-03": 1.0})
    assert findings() == [("slow-for-its-kind", "dgx-01")]


def test_evidence_that_has_aged_ends_no_exclusion(lab: Lab) -> None:
    """Jobs avoid the node, so there are no new measurements of it."""
    slow_node()
    later = timezone.now() + timedelta(days=8)
    assess(later)
    evaluate_until(later + timedelta(minutes=62), later)
    assert set(Assessment.objects.get(signal="step_time").fields.values()) == {None}
    assert HealthEntry.objects.excluding().exists()


def test_steps_from_before_a_repair_do_not_count_against_the_node_again(lab: Lab) -> None:
    slow_node()
    inbox.clear(None, HealthEntry.objects.get().pk, "Burn-in 7 passed.")
    assert findings() == []
    Attempt.objects.update(ended_at=None)  # one that runs on for weeks
    HealthEntry.objects.update(cleared_at=timezone.now() - timedelta(days=20))
    Attempt.objects.update(started_at=timezone.now() - timedelta(days=30))
    assert findings() == []


def test_what_is_only_watched_ends_by_new_steps_at_the_usual_pace(lab: Lab) -> None:
    train(1, {"dgx-01": 1.2, "dgx-02": 1.0, "dgx-03": 1.0, "dgx-04": 1.0}, person="ada")
    for gpus in (2, 4):
        train(gpus, {"dgx-01": 1.2, "dgx-02": 1.0, "dgx-03": 1.0}, person="ada")
    assert findings() == [("slow-for-one-person", "dgx-01")]
    for gpus in (1, 2, 4):
        for _ in range(2):
            train(gpus, {"dgx-01": 1.0}, person="ada", ago=3)
    assess()
    assert Assessment.objects.get(signal="step_time").fields["ratio"] == 1.0
    now = timezone.now()
    evaluate_until(now + timedelta(minutes=62), now)
    assert not HealthEntry.objects.active().exists()
