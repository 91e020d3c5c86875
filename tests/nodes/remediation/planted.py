"""Failures and harmless histories, planted as an agent reports them, and what each must end in.

A plant takes nodes with agents under any scheduler, and does something to the first of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from jobs.assessing.assess import assess
from nodes.drains import maintenance, reservations
from nodes.models import Agent, Gpu, HealthEntry, Holding, Node, NodeOrder
from portal.models import AuditEntry
from tests.jobs.reliability.lab import ran
from tests.lab import sysadmin
from tests.nodes.remediation.cluster import AgentFleet
from tests.portal.series import write

Plant = Callable[[AgentFleet], None]


def xid(code: int, text: str = "", *, times: int = 1) -> Plant:
    def plant(fleet: AgentFleet) -> None:
        for number in range(times):
            fleet.xid(code, text=f"{text or code} {'abcdefgh'[number]}")
        fleet.step()

    return plant


def lost(fleet: AgentFleet) -> None:
    fleet.happens("gpu.lost", gpu=fleet.machine().gpus[0])
    fleet.step()
    fleet.later(0.5)


def vanished(fleet: AgentFleet) -> None:
    fleet.machine()
    list_gpus(fleet, 1)
    fleet.step()
    fleet.later(0.5)


def list_gpus(fleet: AgentFleet, *places: int) -> None:
    """Report that NVML lists only these GPUs."""
    machine = fleet.machine()
    facts = machine.facts(time.time())
    gpus = facts["events"][0]["gpus"]
    facts["events"][0]["gpus"] = [gpus[place] for place in places]
    assert machine.post(facts).status_code == 200


def counters(minutes: float = 0, **values: Any) -> Plant:
    """Report counters of the first GPU, which stay so for a time."""

    def plant(fleet: AgentFleet) -> None:
        fleet.happens("gpu.counters", gpu=fleet.machine().gpus[0], **values)
        fleet.step()
        fleet.later(minutes)

    return plant


def temperature(celsius: int, *minutes: float) -> Plant:
    """Report a temperature of the first GPU, which slows down at 87 °C."""

    def plant(fleet: AgentFleet) -> None:
        machine = fleet.machine()
        facts = machine.facts(time.time())
        for gpu in facts["events"][0]["gpus"]:
            gpu["slowdown_c"] = 87
        samples = machine.batch(int(time.time()), n=1, temperature_c=[[celsius], [60]])
        assert machine.post(facts, samples).status_code == 200
        fleet.step()
        for later in minutes:
            fleet.later(later)

    return plant


def silent(fleet: AgentFleet) -> None:
    for name in fleet.names:
        fleet.machine(name)
    Agent.objects.filter(node=fleet.node).update(heard_at=datetime.now(UTC) - timedelta(minutes=1))
    fleet.step()
    fleet.later(6, silent=(fleet.node,))


def crashed(fleet: AgentFleet) -> None:
    fleet.set_state("down")
    silent(fleet)


def mount(*minutes: float, nodes: int = 1) -> Plant:
    """Let /data, which all nodes mount from one server, stop answering on some of them."""

    def plant(fleet: AgentFleet) -> None:
        for name in fleet.names:
            machine = fleet.machine(name)
            facts = machine.facts(time.time(), mounts=[{"mount": "/data", "source": "filer:/data"}])
            assert machine.post(facts).status_code == 200
        for name in fleet.names[:nodes]:
            fleet.happens("mount.slow", name, mount="/data", since=time.time())
        fleet.step()
        for later in minutes:
            fleet.later(later)

    return plant


def nvml_hung(minutes: float) -> Plant:
    def plant(fleet: AgentFleet) -> None:
        fleet.happens("gpu.silent", since=time.time())
        fleet.step()
        fleet.later(minutes)

    return plant


def crashes(*users: str, code: int = 13) -> Plant:
    """Let a program of each of these users crash on the first GPU, one after another."""

    def plant(fleet: AgentFleet) -> None:
        machine = fleet.machine()
        gpu = Gpu.objects.get(uuid=machine.gpus[0])
        for number, user in enumerate(users):
            at = datetime.now(UTC) - timedelta(minutes=9 - number)
            Holding.objects.create(
                gpu=gpu, agent=gpu.agent, scheduler_id=str(number), user=user, name=f"train-{number}",
                source="scheduler", since=at - timedelta(seconds=20), until=at + timedelta(seconds=20),
            )  # fmt: skip
            fleet.xid(code, ago=60 * (9 - number), text=f"Graphics exception {'abcdefgh'[number]}")
            fleet.step()

    return plant


def steps(ratio: float) -> Plant:
    """Run programs of three people on four nodes, of which one takes longer for a step by this factor."""

    def plant(fleet: AgentFleet) -> None:
        for gpus in (1, 2, 4):
            for node in fleet.names[:4]:
                attempt = ran(2.0, nodes=[node], gpus=gpus, ago=48.0, project=f"team-{gpus}")
                seconds = ratio if node == fleet.node else 1.0
                write("step_seconds", (0, [(step, seconds) for step in range(120)]), owner=("attempt", attempt.pk))
        assess()
        fleet.step()

    return plant


@dataclass(frozen=True)
class PlantedFailure:
    """A failure, the one finding that it must end in, and the reason of the drain; "": nothing is drained."""

    plant: Plant
    rule: str
    severity: str
    action: str
    reason: str = ""
    gpu: int | None = 0


FAILURES = {
    "off the bus with an Xid": PlantedFailure(
        xid(79), "off-bus", "fatal", "drain", "[node] Xid 79 on GPU 0 (vigil: off-bus)"),
    "off the bus without an Xid": PlantedFailure(
        lost, "off-bus", "fatal", "drain", "[node] GPU fell off the bus on GPU 0 (vigil: off-bus)"),
    "vanished from NVML": PlantedFailure(
        vanished, "off-bus", "fatal", "drain", "[node] GPU fell off the bus on GPU 0 (vigil: off-bus)"),
    "uncorrectable memory error with an Xid": PlantedFailure(
        xid(95), "uncorrectable-memory-error", "fatal", "reset",
        "[node] Xid 95 on GPU 0 (vigil: uncorrectable-memory-error)"),
    "uncorrectable memory error in a counter": PlantedFailure(
        counters(ecc_uncorrected=1), "uncorrectable-memory-error", "fatal", "reset",
        "[node] Uncorrectable GPU memory error on GPU 0 (vigil: uncorrectable-memory-error)"),
    "failed remap with an Xid": PlantedFailure(
        xid(64), "row-remap-failed", "fatal", "replace", "[node] Xid 64 on GPU 0 (vigil: row-remap-failed)"),
    "failed remap in a counter": PlantedFailure(
        counters(remapped_failed=1), "row-remap-failed", "fatal", "replace",
        "[node] A faulty memory row could not be remapped on GPU 0 (vigil: row-remap-failed)"),
    "fatal NVLink error": PlantedFailure(
        xid(74, "NVLink: fatal error detected on link 14"), "nvlink-fatal", "fatal", "reset",
        "[node] Xid 74 on GPU 0 (vigil: nvlink-fatal)"),
    "NVLinks down": PlantedFailure(
        counters(0.6, nvlinks=[1, 1, 0, 0]), "nvlink-down", "critical", "reset",
        "[node] NVLinks are not active on GPU 0 (vigil: nvlink-down)"),
    "thermal runaway": PlantedFailure(
        temperature(89, 2.1), "thermal-runaway", "critical", "drain",
        "[node] GPU stays above its slowdown temperature on GPU 0 (vigil: thermal-runaway)"),
    "silent agent": PlantedFailure(silent, "agent-silent", "warning", "watch", gpu=None),
    "slow mount": PlantedFailure(mount(1.1), "mount-slow", "warning", "watch", gpu=None),
    "hung NVML": PlantedFailure(
        nvml_hung(1.1), "nvml-hung", "critical", "drain",
        "[node] NVIDIA's driver does not respond (vigil: nvml-hung)", gpu=None),
    "Xid 13 under three users": PlantedFailure(
        crashes("ada", "ben", "cleo"), "errors-follow-gpu", "critical", "drain",
        "[node] Xid 13 on GPU 0 (vigil: errors-follow-gpu)"),
    "a node a fifth slower than its peers": PlantedFailure(
        steps(1.2), "slow-for-its-kind", "warning", "exclude", gpu=None),
}  # fmt: skip


def echoes(fleet: AgentFleet) -> None:
    """A program fails by its own error, after which the driver cleans up its channels."""
    for number in range(4):
        fleet.xid(13, text=f"Graphics exception {'abcd'[number]}")
        fleet.xid(45, text=f"Channel {'abcd'[number]}")
    fleet.step()


def portal_outage(fleet: AgentFleet) -> None:
    """No agent reports for ten minutes, and the worker evaluates rules as soon as the portal is back."""
    for name in fleet.names:
        fleet.machine(name)
    Agent.objects.update(heard_at=datetime.now(UTC) - timedelta(minutes=10))
    fleet.step()
    fleet.later(1)
    fleet.later(6)


def portal_stopped(fleet: AgentFleet) -> None:
    """A GPU was missing for a moment before the portal was stopped for two hours."""
    fleet.machine()
    list_gpus(fleet)
    fleet.step()
    assert HealthEntry.objects.get(rule="gpus-missing").state == "watching"
    list_gpus(fleet, 0, 1)
    fleet.later(120, is_watched=False)


def silent_after_a_single_reading(fleet: AgentFleet) -> None:
    """A state was read once before the agent fell silent: nobody knows how long it lasted."""
    machine = fleet.machine()
    batch = machine.batch(int(time.time()), n=1, temperature_c=[[60], [60]]) | {"host": {"blocked_processes": 40}}
    assert machine.post(batch).status_code == 200
    fleet.step()
    assert HealthEntry.objects.get(rule="blocked-processes").state == "watching"
    fleet.later(6, silent=(fleet.node,))


def late_events(fleet: AgentFleet) -> None:
    """An agent buffered events while the portal was away; they arrive late, so a person decides about them."""
    fleet.xid(79, ago=1200)
    fleet.step()


def reboot(fleet: AgentFleet) -> None:
    """A node that the scheduler reboots, which takes nine minutes, and that forgets its counters."""
    for name in fleet.names:
        fleet.machine(name)
    fleet.set_state("down+reboot_issued")
    fleet.later(9, silent=(fleet.node,))
    fleet.machine().boot_id = "b2"
    fleet.happens("boot", booted_at=time.time())
    assert fleet.machine().post(fleet.machine().facts(time.time())).status_code == 200
    fleet.set_state("idle")
    fleet.later(10)
    fleet.later(12)


def planned_maintenance(fleet: AgentFleet) -> None:
    """A person swaps a board in its window: the driver logs the loss, and nothing is decided about it."""
    now = datetime.now(UTC)
    window = maintenance.plan(
        sysadmin("ops"), fleet.node, "new board", now - timedelta(seconds=1), now + timedelta(hours=1),
        wants_reservation=True,
    )  # fmt: skip
    reservations.carry_out(fleet.scheduler)
    fleet.xid(79)
    fleet.step()
    fleet.step()
    assert "In maintenance until" in fleet.entry().held_back
    window.refresh_from_db()
    assert (window.state, window.problem) == ("active", "")
    assert window.reservation in {reservation.name for reservation in fleet.scheduler.reservations()}


def gpu_back_at_once(fleet: AgentFleet) -> None:
    fleet.happens("gpu.lost", gpu=fleet.machine().gpus[0])
    fleet.step()
    fleet.happens("gpu.back", gpu=fleet.machine().gpus[0])
    fleet.step()
    fleet.later(1)


def mount_back(fleet: AgentFleet) -> None:
    mount(1.1)(fleet)
    fleet.happens("mount.well", mount="/data", seconds=70)
    fleet.later(6)
    fleet.later(12)


def server_back(fleet: AgentFleet) -> None:
    """A file server was away for ten minutes; the first node notices last that it is back."""
    mount(1.1, 10, nodes=12)(fleet)
    for name in fleet.names[1:]:
        fleet.happens("mount.well", name, mount="/data", seconds=600)
    fleet.later(10.1)
    fleet.happens("mount.well", mount="/data", seconds=610)
    fleet.later(12)


def nvml_back(fleet: AgentFleet) -> None:
    nvml_hung(0.4)(fleet)
    fleet.happens("gpu.answers", since=time.time() - 24, seconds=24)
    fleet.later(1)
    fleet.later(3)


MOUNT_HUNG = "[node] A shared file system hangs on this node (/data) (vigil: mount-hung)"

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
    "a file server that is slow for everybody": mount(1.1, 6.5, nodes=12),
    "a file server that comes back, one node later than the others": server_back,
    "a portal outage": portal_outage,
    "a stopped portal": portal_stopped,
    "an agent that fell silent after one bad reading": silent_after_a_single_reading,
    "events from an outage": late_events,
    "a reboot": reboot,
    "planned maintenance": planned_maintenance,
    "a node three per cent slower": steps(1.03),
}


def check_finding(fleet: AgentFleet, failure: PlantedFailure) -> HealthEntry:
    """Check that the failure ended in the one right finding, and return it."""
    entry = HealthEntry.objects.open().exclude(action="ignore").select_related("gpu", "order").get()
    assert (entry.node, entry.rule, entry.severity, entry.action) == (
        fleet.node, failure.rule, failure.severity, failure.action,
    )  # fmt: skip
    assert (entry.gpu.index if entry.gpu else None) == failure.gpu
    return entry


def check_decision(fleet: AgentFleet, failure: PlantedFailure, entry: HealthEntry) -> None:
    """Check that Vigil drained the node once and by itself, or did nothing where the rule wants no drain."""
    if not failure.reason:
        assert (entry.decision, entry.order, fleet.drained_nodes()) == ("", None, {})
        assert not AuditEntry.objects.exists()
        return
    assert fleet.drained_nodes() == {fleet.node: failure.reason}
    assert (entry.decision, entry.held_back) == ("automatic", "")
    assert entry.order is not None
    assert (entry.order.state, entry.order.rule, entry.order.asked_by) == ("done", failure.rule, None)
    audit = AuditEntry.objects.get()
    assert (audit.user, audit.action, audit.thing) == (None, "drain", fleet.node)
    assert audit.detail in failure.reason
    fleet.step()
    assert NodeOrder.objects.count() == AuditEntry.objects.count() == 1, "nothing is done twice"


def check_no_drain(fleet: AgentFleet) -> None:
    """Check that the history ended in no drain and no excluded node."""
    fleet.step()
    assert not fleet.drained_nodes()
    assert not NodeOrder.objects.exists()
    assert not AuditEntry.objects.filter(action="drain").exists()
    assert not HealthEntry.objects.excluding().exists()


def check_mount_that_hangs(fleet: AgentFleet) -> None:
    """Let a mount hang on the first node: the second rule about it drains, once."""
    mount(1.1, 6.5)(fleet)
    rules = HealthEntry.objects.open().order_by("rule").values_list("rule", "action", "item")
    assert list(rules) == [("mount-hung", "drain", "/data"), ("mount-slow", "watch", "/data")]


def check_crashed_node(fleet: AgentFleet) -> None:
    """Let the first node crash. Draining what is down already changes nothing; jobs avoid it also when it comes up."""
    crashed(fleet)
    found = set(HealthEntry.objects.open().values_list("rule", "action"))
    state = Node.objects.get(name=fleet.node).state
    assert found == {("agent-silent", "watch"), ("node-unreachable", "exclude")}, state
    assert list(HealthEntry.objects.excluding().values_list("node", flat=True)) == [fleet.node]
    assert not NodeOrder.objects.exists()
