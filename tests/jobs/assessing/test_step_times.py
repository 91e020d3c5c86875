"""Step times that jobs report make a slow node a finding, which jobs of Vigil then avoid."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs.assessing.assess import assess
from jobs.models import AttemptPace
from nodes.models import Assessment, HealthEntry
from nodes.monitoring.evaluate import evaluate
from tests.jobs.reliability.lab import ran
from tests.nodes.remediation.cluster import Lab, evaluate_until
from tests.portal.series import write

pytestmark = pytest.mark.django_db
NODES = ("dgx-01", "dgx-02", "dgx-03", "dgx-04")


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab(names=NODES)


def train(gpus: int, seconds: Mapping[str, float], *, steps: int = 120, ago: float = 48.0) -> None:
    """Run a program, which is the one with so many GPUs, once on each node, with steps of so many seconds."""
    for node, step_s in seconds.items():
        attempt = ran(2.0, nodes=[node], gpus=gpus, ago=ago)
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
        "ratio": 1.2, "programs": 3, "slow_programs": 3, "slow_share": 1.0, "attempts": 3, "other_nodes": 3,
    }  # fmt: skip


def test_one_slow_program_is_none(lab: Lab) -> None:
    for gpus in (1, 2):
        train(gpus, dict.fromkeys(NODES, 1.0))
    train(8, {"dgx-01": 1.5, "dgx-02": 1.0, "dgx-03": 1.0})
    assert findings() == []


def test_attempts_with_too_few_steps_say_nothing(lab: Lab) -> None:
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


def test_a_node_that_is_fast_again_is_no_finding_any_more(lab: Lab) -> None:
    for gpus in (1, 2, 4):
        train(gpus, {"dgx-01": 1.2, "dgx-02": 1.0, "dgx-03": 1.0})
    assert findings()
    later = timezone.now() + timedelta(days=8)
    assess(later)
    evaluate_until(later + timedelta(minutes=62), later)
    assert Assessment.objects.get(signal="step_time").fields["ratio"] == 1.0
    assert not HealthEntry.objects.active().exists()
