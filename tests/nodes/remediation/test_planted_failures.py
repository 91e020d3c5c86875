"""Failures that agents report end in the right finding, action and audit entry; harmless histories end in no drain.

Each is posted as an agent would post it, with VIGIL_HEALTH=act, and followed through rules, decision and scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from jobs.assessing.assess import assess
from nodes.cluster import sync
from nodes.drains import maintenance
from nodes.models import Agent, Gpu, HealthEntry, Holding, NodeOrder, Reading
from portal.models import AuditEntry
from tests.jobs.reliability.lab import ran
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import NAMES, Lab
from tests.portal.series import write

pytestmark = pytest.mark.django_db
NODE = "dgx-01"
Plant = Callable[[Lab], None]


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()


def xid(code: int, text: str = "", *, times: int = 1) -> Plant:
    def plant(lab: Lab) -> None:
        for number in range(times):
            lab.xid(code, text=f"{text or code} {'abcdefgh'[number]}")
        lab.step()

    return plant


def lost(lab: Lab) -> None:
    lab.happens("gpu.lost", gpu=lab.machine().gpus[0])
    lab.step()
    lab.later(0.5)


def vanished(lab: Lab) -> None:
    lab.machine()
    list_gpus(lab, 1)
    lab.step()
    lab.later(0.5)


def list_gpus(lab: Lab, *places: int) -> None:
    """Report that NVML lists only these GPUs."""
    machine = lab.machine()
    facts = machine.facts(time.time())
    gpus = facts["events"][0]["gpus"]
    facts["events"][0]["gpus"] = [gpus[place] for place in places]
    assert machine.post(facts).status_code == 200


def counters(minutes: float = 0, **values: Any) -> Plant:
    """Report counters of the first GPU, which stay so for a time."""

    def plant(lab: Lab) -> None:
        lab.happens("gpu.counters", gpu=lab.machine().gpus[0], **values)
        lab.step()
        lab.later(minutes)

    return plant


def temperature(celsius: int, *minutes: float) -> Plant:
    """Report a temperature of the first GPU, which slows down at 87 °C."""

    def plant(lab: Lab) -> None:
        machine = lab.machine()
        facts = machine.facts(time.time())
        for gpu in facts["events"][0]["gpus"]:
            gpu["slowdown_c"] = 87
        samples = machine.batch(int(time.time()), n=1, temperature_c=[[celsius], [60]])
        assert machine.post(facts, samples).status_code == 200
        lab.step()
        for later in minutes:
            lab.later(later)

    return plant


def silent(lab: Lab) -> None:
    for name in NAMES:
        lab.machine(name)
    Agent.objects.filter(node=NODE).update(heard_at=datetime.now(UTC) - timedelta(minutes=1))
    lab.step()
    lab.later(6, silent=(NODE,))


def crashed(lab: Lab) -> None:
    set_state(lab, "down")
    silent(lab)


def set_state(lab: Lab, state: str) -> None:
    lab.scheduler.machines = [
        replace(status, state=state) if status.name == NODE else status for status in lab.scheduler.machines
    ]
    sync.read(lab.scheduler, Reading.Part.NODES)


def mount(*minutes: float, nodes: int = 1) -> Plant:
    """Let /data, which all nodes mount from one server, stop answering on some of them."""

    def plant(lab: Lab) -> None:
        for name in NAMES:
            machine = lab.machine(name)
            facts = machine.facts(time.time(), mounts=[{"mount": "/data", "source": "filer:/data"}])
            assert machine.post(facts).status_code == 200
        for name in NAMES[:nodes]:
            lab.happens("mount.slow", name, mount="/data", since=time.time())
        lab.step()
        for later in minutes:
            lab.later(later)

    return plant


def nvml_hung(minutes: float) -> Plant:
    def plant(lab: Lab) -> None:
        lab.happens("gpu.silent", since=time.time())
        lab.step()
        lab.later(minutes)

    return plant


def crashes(*users: str, code: int = 13) -> Plant:
    """Let a program of each of these users crash on the first GPU, one after another."""

    def plant(lab: Lab) -> None:
        machine = lab.machine()
        gpu = Gpu.objects.get(uuid=machine.gpus[0])
        for number, user in enumerate(users):
            at = datetime.now(UTC) - timedelta(minutes=9 - number)
            Holding.objects.create(
                gpu=gpu, agent=gpu.agent, scheduler_id=str(number), user=user, name=f"train-{number}",
                source="scheduler", since=at - timedelta(seconds=20), until=at + timedelta(seconds=20),
            )  # fmt: skip
            lab.xid(code, ago=60 * (9 - number), text=f"Graphics exception {'abcdefgh'[number]}")
            lab.step()

    return plant


def steps(ratio: float) -> Plant:
    """Run three programs on four nodes, of which one takes longer for a step by this factor."""

    def plant(lab: Lab) -> None:
        for gpus in (1, 2, 4):
            for node in NAMES[:4]:
                attempt = ran(2.0, nodes=[node], gpus=gpus, ago=48.0)
                seconds = ratio if node == NODE else 1.0
                write("step_seconds", (0, [(step, seconds) for step in range(120)]), owner=("attempt", attempt.pk))
        assess()
        lab.step()

    return plant


@dataclass(frozen=True)
class Planted:
    """A failure, the one finding that it must end in, and the reason of the drain; "": nothing is drained."""

    plant: Plant
    rule: str
    severity: str
    action: str
    reason: str = ""
    gpu: int | None = 0


FAILURES = {
    "off the bus with an Xid": Planted(
        xid(79), "off-bus", "fatal", "drain", "[node] Xid 79 on GPU 0 (vigil: off-bus)"),
    "off the bus without an Xid": Planted(
        lost, "off-bus", "fatal", "drain", "[node] GPU fell off the bus on GPU 0 (vigil: off-bus)"),
    "vanished from NVML": Planted(
        vanished, "off-bus", "fatal", "drain", "[node] GPU fell off the bus on GPU 0 (vigil: off-bus)"),
    "uncorrectable memory error with an Xid": Planted(
        xid(95), "uncorrectable-memory-error", "fatal", "reset",
        "[node] Xid 95 on GPU 0 (vigil: uncorrectable-memory-error)"),
    "uncorrectable memory error in a counter": Planted(
        counters(ecc_uncorrected=1), "uncorrectable-memory-error", "fatal", "reset",
        "[node] Uncorrectable GPU memory error on GPU 0 (vigil: uncorrectable-memory-error)"),
    "failed remap with an Xid": Planted(
        xid(64), "row-remap-failed", "fatal", "replace", "[node] Xid 64 on GPU 0 (vigil: row-remap-failed)"),
    "failed remap in a counter": Planted(
        counters(remapped_failed=1), "row-remap-failed", "fatal", "replace",
        "[node] A faulty memory row could not be remapped on GPU 0 (vigil: row-remap-failed)"),
    "fatal NVLink error": Planted(
        xid(74, "NVLink: fatal error detected on link 14"), "nvlink-fatal", "fatal", "reset",
        "[node] Xid 74 on GPU 0 (vigil: nvlink-fatal)"),
    "NVLinks down": Planted(
        counters(0.6, nvlinks=[1, 1, 0, 0]), "nvlink-down", "critical", "reset",
        "[node] NVLinks are not active on GPU 0 (vigil: nvlink-down)"),
    "thermal runaway": Planted(
        temperature(89, 2.1), "thermal-runaway", "critical", "drain",
        "[node] GPU stays above its slowdown temperature on GPU 0 (vigil: thermal-runaway)"),
    "silent agent": Planted(silent, "agent-silent", "warning", "watch", gpu=None),
    "slow mount": Planted(mount(1.1), "mount-slow", "warning", "watch", gpu=None),
    "hung NVML": Planted(
        nvml_hung(1.1), "nvml-hung", "critical", "drain",
        "[node] NVIDIA's driver does not respond (vigil: nvml-hung)", gpu=None),
    "Xid 13 under three users": Planted(
        crashes("ada", "ben", "cleo"), "errors-follow-gpu", "critical", "drain",
        "[node] Xid 13 on GPU 0 (vigil: errors-follow-gpu)"),
    "a node a fifth slower than its peers": Planted(
        steps(1.2), "slow-for-its-kind", "warning", "exclude", gpu=None),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_failure_ends_in_one_finding_and_the_right_action(lab: Lab, failure: Planted) -> None:
    failure.plant(lab)
    entry = HealthEntry.objects.open().exclude(action="ignore").select_related("gpu", "order").get()
    assert (entry.node, entry.rule, entry.severity, entry.action) == (
        NODE, failure.rule, failure.severity, failure.action,
    )  # fmt: skip
    assert (entry.gpu.index if entry.gpu else None) == failure.gpu
    if not failure.reason:
        assert (entry.decision, entry.order, lab.scheduler.drained) == ("", None, {})
        assert not AuditEntry.objects.exists()
        return
    assert lab.scheduler.drained == {NODE: failure.reason}
    assert entry.decision == "automatic"
    assert entry.order is not None
    assert (entry.order.state, entry.order.rule, entry.order.asked_by) == ("done", failure.rule, None)
    audit = AuditEntry.objects.get()
    assert (audit.user, audit.action, audit.thing) == (None, "drain", NODE)
    assert audit.detail in failure.reason
    lab.step()
    assert NodeOrder.objects.count() == AuditEntry.objects.count() == 1, "nothing is done twice"


def test_a_mount_that_hangs_drains_once(lab: Lab) -> None:
    mount(1.1, 5.1)(lab)
    rules = HealthEntry.objects.open().order_by("rule").values_list("rule", "action", "item")
    assert list(rules) == [("mount-hung", "drain", "/data"), ("mount-slow", "watch", "/data")]
    assert lab.scheduler.drained == {NODE: "[node] A shared file system hangs on this node (/data) (vigil: mount-hung)"}
    assert AuditEntry.objects.get().action == "drain"


def test_a_node_that_crashed_is_excluded(lab: Lab) -> None:
    """Draining what is down already changes nothing; jobs avoid it also when it comes up before it is well."""
    crashed(lab)
    assert set(HealthEntry.objects.open().values_list("rule", "action")) == {
        ("agent-silent", "watch"), ("node-unreachable", "exclude"),
    }  # fmt: skip
    assert list(HealthEntry.objects.excluding().values_list("node", flat=True)) == [NODE]
    assert not lab.scheduler.drained


def echoes(lab: Lab) -> None:
    """A program's own error, after which the driver cleans up its channels."""
    for number in range(4):
        lab.xid(13, text=f"Graphics exception {'abcd'[number]}")
        lab.xid(45, text=f"Channel {'abcd'[number]}")
    lab.step()


def portal_outage(lab: Lab) -> None:
    """No agent reports for ten minutes, and the worker evaluates rules as soon as the portal is back."""
    for name in NAMES:
        lab.machine(name)
    Agent.objects.update(heard_at=datetime.now(UTC) - timedelta(minutes=10))
    lab.step()
    lab.later(1)
    lab.later(6)


def late_events(lab: Lab) -> None:
    """An agent buffered events while the portal was away; they arrive late, so a person decides about them."""
    lab.xid(79, ago=1200)
    lab.step()


def reboot(lab: Lab) -> None:
    """A node that restarts for four minutes, and forgets its counters."""
    for name in NAMES:
        lab.machine(name)
    set_state(lab, "idle+reboot_issued")
    lab.later(4, silent=(NODE,))
    lab.machine().boot_id = "b2"
    lab.happens("boot", booted_at=time.time())
    assert lab.machine().post(lab.machine().facts(time.time())).status_code == 200
    set_state(lab, "idle")
    lab.later(5)
    lab.later(7)


def planned_maintenance(lab: Lab) -> None:
    """A person swaps a board in its window: the driver logs the loss, and nothing is decided about it."""
    now = datetime.now(UTC)
    window = maintenance.plan(
        sysadmin("ops"), NODE, "new board", now - timedelta(seconds=1), now + timedelta(hours=1), wants_reservation=True
    )
    lab.xid(79)
    lab.step()
    lab.step()
    assert "In maintenance until" in lab.entry().held_back
    assert window.state == "planned"


def gpu_back_at_once(lab: Lab) -> None:
    lab.happens("gpu.lost", gpu=lab.machine().gpus[0])
    lab.step()
    lab.happens("gpu.back", gpu=lab.machine().gpus[0])
    lab.step()
    lab.later(1)


def mount_back(lab: Lab) -> None:
    mount(1.1)(lab)
    lab.happens("mount.well", mount="/data", seconds=70)
    lab.later(6)
    lab.later(12)


def nvml_back(lab: Lab) -> None:
    nvml_hung(0.4)(lab)
    lab.happens("gpu.answers", since=time.time() - 24, seconds=24)
    lab.later(1)
    lab.later(3)


HARMLESS: dict[str, Plant] = {
    "45 after another": echoes,
    "a remapped row (63)": xid(63),
    "a contained memory error (94)": xid(94),
    "one 31": xid(31),
    "Xid 13 of one user, again and again": crashes("ada", "ada", "ada", "ada", "ada"),
    "Xid 31 of two users": crashes("ada", "ben", code=31),
    "a nonfatal NVLink error": xid(145, "RLW_RXPIPE Nonfatal XC0 i0 Link 13"),
    "corrected memory errors": counters(ecc_uncorrected=0, ecc_corrected=3, remapped_failed=0),
    "links that come up late": counters(0.3, nvlinks=[1, 1, 1, 0]),
    "close to the slowdown temperature": temperature(85, 2.1, 5.1),
    "a GPU that comes back at once": gpu_back_at_once,
    "NVML that answers after 24 s": nvml_back,
    "a mount that answers after a minute": mount_back,
    "a file server that is slow for everybody": mount(1.1, 5.1, nodes=12),
    "a portal outage": portal_outage,
    "events from an outage": late_events,
    "a reboot": reboot,
    "planned maintenance": planned_maintenance,
    "a node three per cent slower": steps(1.03),
}


@pytest.mark.parametrize("history", HARMLESS.values(), ids=HARMLESS)
def test_a_harmless_history_drains_nothing(lab: Lab, history: Plant) -> None:
    history(lab)
    lab.step()
    assert not lab.scheduler.drained
    assert not NodeOrder.objects.exists()
    assert not AuditEntry.objects.filter(action="drain").exists()
    assert not HealthEntry.objects.excluding().exists()
