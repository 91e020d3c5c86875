"""Xid 13 and 31 are a program's error, unless they follow one GPU through different people's programs."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from nodes.models import Gpu, HealthEntry, Holding
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


def crash(lab: Lab, user: str, program: str, *, minutes_ago: float, gpu: int = 0, code: int = 13) -> None:
    """Let a program of a user hold the GPU for two minutes, and fail on it."""
    machine = lab.machine()
    row = Gpu.objects.get(uuid=machine.gpus[gpu])
    at = timezone.now() - timedelta(minutes=minutes_ago)
    Holding.objects.create(
        gpu=row, agent=row.agent, scheduler_id=str(Holding.objects.count()), user=user, name=program,
        source="scheduler", since=at - timedelta(minutes=1), until=at + timedelta(minutes=1),
    )  # fmt: skip
    lab.xid(code, gpu=gpu, ago=60 * minutes_ago, text=f"Graphics exception of {program}")
    lab.step()


def open_rules() -> list[str]:
    return sorted(HealthEntry.objects.open().exclude(action="ignore").values_list("rule", flat=True))


def test_a_single_user_crashing_a_gpu_drains_nothing(lab: Lab) -> None:
    for number in range(6):
        crash(lab, "ada", f"train-{number}", minutes_ago=9 - number)
    assert open_rules() == []
    assert not lab.scheduler.drained


def test_three_users_crashing_on_the_same_gpu_drain_the_node(lab: Lab) -> None:
    for number, (user, code) in enumerate((("ada", 13), ("ben", 31), ("cleo", 13))):
        assert not lab.scheduler.drained
        crash(lab, user, f"program-{user}", minutes_ago=9 - number, code=code)
    assert open_rules() == ["errors-follow-gpu"]
    assert lab.scheduler.drained == {"dgx-01": "[node] Xid 13 on GPU 0 (vigil: errors-follow-gpu)"}


def test_three_users_crashing_on_different_gpus_drain_nothing(lab: Lab) -> None:
    for number, (user, gpu) in enumerate((("ada", 0), ("ben", 1), ("cleo", 0))):
        crash(lab, user, f"program-{user}", minutes_ago=9 - number, gpu=gpu)
    assert open_rules() == []
    assert not lab.scheduler.drained


def test_a_single_xid_31_drains_nothing(lab: Lab) -> None:
    crash(lab, "ada", "train", minutes_ago=1, code=31)
    assert open_rules() == []
    assert not lab.scheduler.drained
