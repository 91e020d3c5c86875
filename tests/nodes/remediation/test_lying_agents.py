"""An agent that lies harms only its node: nothing about another changes, and the limits hold."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from nodes.models import Agent, Gpu, HealthEntry, NodeOrder
from nodes.monitoring.evaluate import MAX_ITEMS, evaluate
from nodes.remediation.decide import decide
from nodes.remediation.limits_used import automatic_drains
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import Lab, gpus_of
from tests.nodes.telemetry.reporting import Machine

pytestmark = pytest.mark.django_db
LIAR, HONEST = "dgx-01", "dgx-02"


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()


def about_others() -> list[tuple[str, str]]:
    return list(HealthEntry.objects.exclude(node=LIAR).values_list("node", "rule"))


def silence(node: str) -> None:
    Agent.objects.filter(node=node).update(heard_at=timezone.now() - timedelta(minutes=2))


def owners() -> set[str]:
    return set(Gpu.objects.filter(uuid__in=gpus_of(HONEST), gone_at=None).values_list("agent__node", flat=True))


def test_it_cannot_report_for_another_node(lab: Lab) -> None:
    liar, honest = lab.machine(LIAR), lab.machine(HONEST)
    before = honest.agent.heard_at
    event = liar.event("xid", time.time(), xid=79, seq=1, gpu=honest.gpus[0], text="lost")
    body = {
        "version": 1,
        "stream": liar.stream,
        "first": 0,
        "boot_id": "b1",
        "sent_at": time.time(),
        "batches": [event],
    }
    answer = Client().post(
        f"/api/v1/nodes/{HONEST}/telemetry", body, content_type="application/json",
        headers={"Authorization": f"Bearer {liar.token}"},
    )  # fmt: skip
    assert answer.status_code == 401
    assert honest.agent.heard_at == before
    assert liar.post(event).status_code == 200  # in its own name it is about its own node, not that GPU
    lab.step()
    assert about_others() == []
    assert not NodeOrder.objects.exclude(node=LIAR).exists()


def test_gpus_that_it_takes_during_a_silence_are_given_back(lab: Lab) -> None:
    """It lists the GPUs of a node that boots. That node has them again as soon as it reports, and is not drained."""
    honest = lab.machine(HONEST)
    lab.step()
    silence(HONEST)
    liar = Machine(node=LIAR, gpus=gpus_of(LIAR) + gpus_of(HONEST))
    assert liar.post(liar.facts(time.time())).status_code == 200
    assert owners() == {LIAR}
    assert honest.post(honest.facts(time.time())).status_code == 200
    assert owners() == {HONEST}
    assert liar.post(liar.facts(1.0), liar.batch(int(time.time()) - 10, watts=90)).status_code == 200
    assert owners() == {HONEST}
    lab.step()
    assert about_others() == []
    assert not lab.scheduler.drained


def test_a_gpu_that_was_moved_stays_where_it_is(lab: Lab) -> None:
    lab.machine(HONEST)
    silence(HONEST)
    taker = Machine(node=LIAR, gpus=gpus_of(LIAR) + gpus_of(HONEST)[:1])
    taker.post(taker.facts(time.time()))
    back = Machine(node=HONEST, gpus=gpus_of(HONEST)[1:], token=lab.machines[HONEST].token, next=1)
    assert back.post(back.facts(time.time())).status_code == 200
    assert Gpu.objects.get(uuid=gpus_of(HONEST)[0]).agent.node == LIAR


def test_absurd_evidence_is_about_its_sender_alone_and_within_the_limits(lab: Lab) -> None:
    for node in lab.names[:6]:
        lab.machine(node)
    liar = lab.machine(LIAR)
    now, far = time.time(), 32_000_000_000.0
    absurd: list[dict[str, Any]] = [
        {"kind": "xid", "at": far, "xid": 79, "seq": 2**52, "gpu": liar.gpus[0], "count": 10**9, "text": "a"},
        {"kind": "xid", "at": 0.0, "xid": 2**31 - 1, "seq": 1, "gpu": "GPU-index-1000000", "count": -1},
        {"kind": "sxid", "at": now, "sxid": -5, "count": 1e300, "fatal": True, "text": "x" * 30_000},
        {"kind": "link.down", "at": now, "port": "p" * 500},
        {"kind": "gpu.lost", "at": far, "gpu": liar.gpus[1]},
        {"kind": "boot", "at": far},
        {"kind": "mount.slow", "at": now, "mount": "/" + "m" * 900, "since": -1},
        {"kind": "facts", "at": now, "driver": "9" * 5_000, "gpus": [{"uuid": g, "index": 10**6} for g in liar.gpus]},
    ]
    host = {"clock": 1e308, "disk_total_mib:/": 1, "disk_used_mib:/": 1e308, "ib_up:mlx5_0": 1e308, "inlet_c": -1e308}
    batch = {"at": int(now), "n": 0, "events": absurd, "host": host}
    assert liar.post(batch, sent_at=far).status_code == 200
    for _ in range(3):
        lab.step()
    assert about_others() == []
    assert set(lab.scheduler.drained) <= {LIAR}
    assert NodeOrder.objects.filter(action="drain").count() <= 1
    sysadmin("ops")
    assert HealthEntry.objects.exists()
    assert all(entry.count < 2**53 for entry in HealthEntry.objects.all())


def test_a_mount_named_like_a_planted_fault_counts_towards_the_hour(lab: Lab) -> None:
    now = timezone.now()
    for node, item in ((LIAR, "/data (injected by a game day"), (HONEST, "")):
        HealthEntry.objects.create(
            node=node, item=item, rule="mount-hung", title="Mount hangs", state="open", action="drain",
            severity="critical", first_seen=now, last_seen=now, opened_at=now,
        )  # fmt: skip
        decide()
    assert HealthEntry.objects.get(node=HONEST).held_back.startswith("Vigil has drained 1 of at most 1 nodes")


def test_faults_that_no_game_day_could_plant_count_towards_the_hour(lab: Lab) -> None:
    planted = [NodeOrder(node=node, action="drain", rule="off-bus", is_planted=True) for node in lab.names[:5]]
    NodeOrder.objects.bulk_create(planted[:4])
    assert automatic_drains(timezone.now()) == []
    NodeOrder.objects.bulk_create(planted[4:])
    assert len(automatic_drains(timezone.now())) == 5


def test_an_agent_that_makes_up_ports_gets_a_bounded_number_of_findings(lab: Lab) -> None:
    liar = lab.machine(LIAR)
    events = [
        {"kind": "link.down", "at": time.time(), "port": f"port {number}", "count": 3}
        for number in range(2 * MAX_ITEMS)
    ]
    assert liar.post({"at": int(time.time()), "n": 0, "events": events}).status_code == 200
    lab.step()
    assert HealthEntry.objects.filter(node=LIAR, rule="port-flapping").count() == MAX_ITEMS
    assert liar.post(liar.event("link.down", time.time(), port="port 0", count=3)).status_code == 200
    lab.step()
    assert HealthEntry.objects.filter(node=LIAR, rule="port-flapping").count() == MAX_ITEMS


def test_a_storm_of_different_events_is_judged_a_part_at_a_time(lab: Lab, django_assert_max_num_queries: Any) -> None:
    """Whatever one agent posts, an evaluation holds the lock for a bounded number of rows and statements."""
    liar = lab.machine(LIAR)
    events = [
        {
            "kind": "xid",
            "at": time.time(),
            "xid": 31,
            "seq": number,
            "gpu": liar.gpus[0],
            "text": f"{'ab'[number % 2] * (1 + number // 2)}",
        }
        for number in range(1_000)
    ]
    for start in range(0, len(events), 200):
        assert liar.post({"at": int(time.time()), "n": 0, "events": events[start : start + 200]}).status_code == 200
    before = time.process_time()
    with django_assert_max_num_queries(400):
        evaluate()
    assert time.process_time() - before < 10
    assert about_others() == []
