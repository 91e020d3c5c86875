"""Create the demo lab's health: findings in each state, drains, burn-ins, maintenance, an announcement.

Nobody is notified of these findings, and nothing is drained: they are about machines that do not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from django.db import transaction
from django.utils import timezone

from console.demo import telemetry
from console.demo.scenarios import NODES
from nodes.burnin.judge import FAILED, PASSED
from nodes.health.progress import RuleProgress
from nodes.models import (
    Agent,
    BurnIn,
    BurnInNode,
    BurnInTest,
    Gpu,
    HealthEntry,
    MaintenanceWindow,
    Node,
    NodeOrder,
)
from nodes.monitoring.site_rules import rules_in_force
from portal.models import Announcement, User

Decision = HealthEntry.EntryDecision


@dataclass(frozen=True)
class DemoEntry:
    """A made-up health entry; times in hours ago."""

    rule: str
    node: str
    state: Literal["watching", "open", "cleared"]
    signal: str
    fields: dict[str, Any]
    since: float
    gpu: int | None = None
    item: str = ""
    decision: str = ""
    reason: str = ""
    held_back: str = ""
    cleared: float | None = None
    count: int = field(default=1)


ENTRIES = (
    DemoEntry(
        "uncorrectable-memory-error", "dgx-08", "open", "xid",
        {"code": 48, "text": "DBE (double bit error) ECC Error"}, 0.6, gpu=2, decision=Decision.PROPOSED,
        held_back="Vigil only proposes (VIGIL_HEALTH=propose).",
    ),
    DemoEntry(
        "off-bus", "dgx-03", "open", "xid", {"code": 79, "text": "GPU has fallen off the bus."},
        telemetry.LOST_HOURS, gpu=5, decision=Decision.AUTOMATIC,
    ),
    DemoEntry(
        "hot", "dgx-07", "open", "gpu_samples", {"temperature_c": 85, "margin_c": 2}, 3.2, gpu=7,
    ),
    DemoEntry(
        "below-minimum", "dgx-05", "open", "software",
        {"below_minimum": 1, "outdated": "NVIDIA driver 570.172.08, at least 570.195.03"}, 40, count=1,
    ),
    DemoEntry(
        "driver-differs", "dgx-05", "watching", "software", {"driver_differs": True}, 0.4,
    ),
    DemoEntry(
        "row-remap-pending", "dgx-01", "watching", "gpu_counters", {"remapped_pending": 1}, 0.2, gpu=6,
    ),
    DemoEntry(
        "mount-slow", "dgx-02", "cleared", "mount", {"is_slow": True, "slow_s": 340}, 30, item="/data", cleared=29,
    ),
    DemoEntry(
        "port-flapping", "dgx-04", "cleared", "link_down", {}, 75, item="mlx5_3/1", decision=Decision.APPROVED,
        reason="Cable replaced, burn-in passed", cleared=70, count=6,
    ),
)  # fmt: skip
MACHINE = {
    "gpu_model": telemetry.MODEL, "gpus": 8, "driver": telemetry.DRIVER, "torch": "2.13.0", "cuda": "12.8",
    "cpu": "Intel Xeon Platinum 8480C",
}  # fmt: skip
COPY = "copy"
ANNOUNCEMENT = "dgx-06 gets a new fan on Friday; jobs on it should end by then."


def make(sysadmin: User | None) -> None:
    """Create all of it once, for the machines of the demonstration that have no agents of their own."""
    names = [name for name, *_ in NODES]
    made_up = Agent.objects.filter(is_made_up=True, node__in=names)
    if made_up.count() < len(names) or HealthEntry.objects.filter(node__in=names).exists():
        return
    now = timezone.now()
    with transaction.atomic():
        order = _order(now)
        for entry in ENTRIES:
            _create_entry(entry, now, sysadmin, order if entry.decision == Decision.AUTOMATIC else None)
        _burn_in(now - timedelta(hours=70), sysadmin, "dgx-04", PASSED, [], 55.1)
        slow = "GPU 5: copy from the host reaches 11.9 GB/s, its peers 55."
        _burn_in(now - timedelta(hours=8), sysadmin, "dgx-03", FAILED, [{"text": slow, "is_warning": False}], 11.9)
        friday = now.replace(hour=9, minute=0, second=0, microsecond=0) + timedelta(days=(4 - now.weekday()) % 7 or 7)
        MaintenanceWindow.objects.create(
            expression="dgx-06", nodes=["dgx-06"], reason="Replace fan 3", starts_at=friday,
            ends_at=friday + timedelta(hours=2), planned_by=sysadmin,
        )  # fmt: skip
        Announcement.objects.create(text=ANNOUNCEMENT, ends_at=friday + timedelta(hours=2), written_by=sysadmin)


def _create_entry(demo: DemoEntry, now: datetime, sysadmin: User | None, order: NodeOrder | None) -> None:
    rule = rules_in_force()[demo.rule]
    first = now - timedelta(hours=demo.since)
    cleared = None if demo.cleared is None else now - timedelta(hours=demo.cleared)
    last = cleared or now - timedelta(minutes=3)
    is_open = demo.state != "watching"
    progress = RuleProgress(
        state=demo.state, first_seen=first.timestamp(), last_seen=last.timestamp(), count=demo.count,
        opened_at=first.timestamp() if is_open else None, cleared_at=cleared.timestamp() if cleared else None,
    )  # fmt: skip
    decided_by = sysadmin if demo.decision == Decision.APPROVED else None
    gpu = None if demo.gpu is None else Gpu.objects.filter(agent__node=demo.node, index=demo.gpu).first()
    HealthEntry.objects.create(
        node=demo.node, gpu=gpu, item=demo.item,
        rule=rule.name, title=rule.title, state=demo.state, severity=rule.severity,
        action=rule.action, count=demo.count, first_seen=first, last_seen=last, opened_at=first if is_open else None,
        cleared_at=cleared, evidence=[[last.timestamp(), demo.signal, demo.fields, demo.count]],
        progress=progress.as_payload(), decision=demo.decision, decided_by=decided_by,
        decided_at=first if demo.decision in (Decision.AUTOMATIC, Decision.APPROVED) else None,
        decision_reason=demo.reason, held_back=demo.held_back, order=order,
    )  # fmt: skip


def _order(now: datetime) -> NodeOrder | None:
    """Return the order with which a rule drained a node, so that it is why the node is drained."""
    node = Node.objects.filter(name=telemetry.LOST[0], is_made_up=True).first()
    if node is None:
        return None
    at = now - timedelta(hours=telemetry.LOST_HOURS)
    order = NodeOrder.objects.create(
        node=node.name, action=NodeOrder.Action.DRAIN, reason=node.reason, rule=node.reason_by,
        state=NodeOrder.State.DONE, ended_at=at,
    )  # fmt: skip
    NodeOrder.objects.filter(pk=order.pk).update(asked_at=at)
    return order


def _burn_in(
    at: datetime, sysadmin: User | None, node: str, verdict: str, findings: list[dict[str, Any]], copy_gb_s: float
) -> None:
    """Create a burn-in of ten minutes that ended; the copy to GPU 5 had this bandwidth, those to others 55 GB/s."""
    ended = at + timedelta(minutes=10)
    outcome = "in service again" if verdict == PASSED else "stays drained"
    burn_in = BurnIn.objects.create(
        key=f"demo-{node}", state=BurnIn.BurnInState.ENDED, seconds=600, started_by=sysadmin, reserved_at=at,
        started_at=at, job_ended_at=ended, ended_at=ended,
    )  # fmt: skip
    BurnIn.objects.filter(pk=burn_in.pk).update(requested_at=at)
    row = BurnInNode.objects.create(
        burn_in=burn_in, node=node, is_active=False, gpus=8, was_drained=True,
        earlier_reason="[node] Xid 79 on GPU 5" if verdict == FAILED else "[node] InfiniBand link goes down again",
        is_returned=True, outcome=f"{outcome}.", verdict=verdict, findings=findings, machine=MACHINE, has_ended=True,
        last_result_at=ended,
    )  # fmt: skip
    BurnInTest.objects.bulk_create(
        BurnInTest(
            burn_in_node=row, test=test, item=item.format(index), unit=unit, count=12,
            values=[copy_gb_s if test == COPY and index == 5 else value],
        )
        for index in range(8)
        for test, item, unit, value in (
            ("memory", "GPU {}", "GB/s", 2_890.0), ("matrix", "GPU {}", "TFLOP/s", 671.0),
            (COPY, "host to GPU {}", "GB/s", 55.1),
        )
    )  # fmt: skip
