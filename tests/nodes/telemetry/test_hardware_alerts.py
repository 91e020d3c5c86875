"""Sysadmins are notified of every critical hardware error that a machine's own evidence shows, and of nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from nodes.models import Agent
from nodes.tasks import alert
from portal.models import Notice
from tests.lab import a_project, bearer, person, sysadmin
from tests.nodes.telemetry.reporting import UUIDS, Machine

pytestmark = pytest.mark.django_db


@pytest.fixture
def machine() -> Machine:
    made = Machine(gpus=UUIDS[:4])
    made.post(made.facts(time.time()))
    return made


@pytest.fixture
def seq() -> Iterator[int]:
    return iter(range(1, 100))


def titles() -> list[str]:
    return sorted(Notice.objects.standing().values_list("title", flat=True))


def xid(machine: Machine, seq: Iterator[int], code: int, gpu: int, *, ago: float = 0) -> None:
    machine.post(machine.event("xid", time.time() - ago, gpu=UUIDS[gpu], xid=code, seq=next(seq), text=f"code {code}"))


def test_a_critical_xid_is_news_once(machine: Machine, seq: Iterator[int]) -> None:
    for code in (13, 31, 43, 45, 63, 94, 999):  # a program's own, and what ends by itself
        xid(machine, seq, code, 0)
    alert()
    assert titles() == []
    xid(machine, seq, 79, 2)
    alert()
    alert()
    assert titles() == ["Xid 79 on GPU 2 of dgx-01: GPU fell off the bus."]
    assert Notice.objects.count() == 1
    xid(machine, seq, 79, 3)
    alert()
    assert titles() == ["Xid 79 on GPUs 2 and 3 of dgx-01: GPU fell off the bus."], "another GPU is news"


def test_only_sysadmins_see_it(machine: Machine, seq: Iterator[int]) -> None:
    xid(machine, seq, 119, 1)
    alert()
    (notice,) = bearer(sysadmin(), "read").get("/api/v1/notices").json()["items"]
    assert notice["link"] == "/nodes/dgx-01"
    assert "reset" in notice["detail"]
    assert bearer(person("mira", a_project()), "read").get("/api/v1/notices").json()["items"] == []


def test_an_old_error_that_an_agent_reports_late_is_history(machine: Machine, seq: Iterator[int]) -> None:
    xid(machine, seq, 79, 0, ago=2 * 86_400)
    alert()
    assert titles() == []


def test_an_sxid_counts_where_it_calls_itself_fatal(machine: Machine, seq: Iterator[int]) -> None:
    for code, fatal in ((20034, True), (11004, False), (12028, None)):
        machine.post(machine.event("sxid", time.time(), sxid=code, seq=next(seq), text=f"{code}", fatal=fatal))
    alert()
    assert titles() == ["Fatal NVSwitch error on dgx-01 (SXid 20034)."]


def test_states_stand_until_they_are_over(machine: Machine) -> None:
    now = time.time()
    for gpu in (0, 1):
        machine.post(machine.event("gpu.lost", now, gpu=UUIDS[gpu]))
    machine.post(machine.event("gpu.counters", now, gpu=UUIDS[3], remapped_failed=1, ecc_uncorrected=4))
    machine.post(machine.event("gpu.silent", now, since=now - 60))
    alert()
    lost, broken, driver = titles()
    assert lost == "GPU 3 of dgx-01 is broken."
    assert broken == "GPUs 0 and 1 of dgx-01 are lost."
    assert driver.startswith("NVIDIA’s driver on dgx-01 has not responded since ")
    detail = Notice.objects.get(title=lost).detail
    assert detail == "GPU 3 failed to remap a memory row and must be replaced."
    for gpu in (0, 1):
        machine.post(machine.event("gpu.back", now + 1, gpu=UUIDS[gpu]))
    machine.post(machine.event("gpu.counters", now + 1, gpu=UUIDS[3], remapped_failed=0))
    machine.post(machine.event("gpu.answers", now + 1, seconds=61))
    alert()
    assert titles() == []


def test_the_demonstration_alarms_nobody(machine: Machine, seq: Iterator[int]) -> None:
    xid(machine, seq, 79, 0)
    Agent.objects.update(is_made_up=True)  # a post of a real agent would end the demonstration's node
    alert()
    assert titles() == []
