"""Test that an unreadable record stops neither the other assessments nor those of the next run."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import lease
from jobs.assessing.assess import assess
from jobs.models import Attempt, AttemptPace
from nodes.models import Assessment
from portal.models import Chunk
from tests.jobs.assessing.test_offenders import fail_on
from tests.jobs.assessing.test_step_times import report, train
from tests.jobs.reliability.lab import count, ran
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()


def test_an_attempt_whose_steps_cannot_be_read_is_left_out(lab: Lab, caplog: Any) -> None:
    broken = ran(2.0, nodes=["dgx-01"])
    report(broken, 1.0)
    Chunk.objects.update(data=b"\xff")
    train(1, {"dgx-01": 1.0})
    assess()
    paces = dict(AttemptPace.objects.values_list("attempt", "step_s"))
    assert paces.pop(broken.pk) is None
    assert list(paces.values()) == [1.0]
    assert f"the step times of attempt {broken} cannot be read" in caplog.text


def test_a_part_that_fails_stops_no_other(lab: Lab) -> None:
    for node in lab.names[:6]:
        fail_on(node, 1, "program.exception", fingerprint="0123456789abcdef")
    for gpus in (1, 2, 4):
        train(gpus, {"dgx-01": 1.2, "dgx-02": 1.0, "dgx-03": 1.0})
    count()
    odd = ran(2.0, nodes=["dgx-01"])
    Attempt.objects.filter(pk=odd.pk).update(nodes=[{"name": "dgx-01"}], is_counted=False)
    with pytest.raises(ExceptionGroup, match="Some assessments failed"):
        assess()
    assert set(Assessment.objects.values_list("signal", flat=True)) == {"program_failures", "step_time"}


def test_one_process_assesses_at_a_time(lab: Lab) -> None:
    train(1, {"dgx-01": 1.0})
    active = lease.take("assessing")
    assert active is not None
    assess()
    assert not AttemptPace.objects.exists()
    active.release()
    assess()
    assert AttemptPace.objects.exists()
