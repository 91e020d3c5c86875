"""Notify sysadmins of hardware that needs repair: critical Xids, fatal SXids, lost or broken GPUs, hung drivers.

Only the machine's own evidence counts: what its agent read in the kernel log and from NVML. An error is reported once a
day per node and code; a state is reported until it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Max, Q, QuerySet
from django.urls import reverse
from django.utils import timezone

from gpus import xids
from gpus.xids import Severity
from nodes.models import Gpu, NodeEvent
from nodes.presenting.events import meaning
from portal import notify
from portal.models import Notice
from vigil_core import formatting

ERROR, STATE = "hardware.error", "hardware.state"
RECENT = timedelta(hours=24)  # older errors, which an agent could only report late, are history
CRITICAL = xids.FATAL | xids.CRITICAL
MAX_NAMED_GPUS = 8
_RESET = "It needs a reset before the next job: drain the node, then reset the GPU."
_REPAIR = "It needs a reboot or a repair: drain the node."


@dataclass(frozen=True)
class HardwareAlert:
    """The content of a notice. A changed `edition` notifies again."""

    key: str
    kind: str
    node: str
    title: str
    detail: str
    edition: str


def notify_sysadmins(now: datetime | None = None) -> None:
    """Raise a notice per new alert, and withdraw those whose state has ended. Safe to run twice at once."""
    alerts = {alert.key: alert for alert in _alerts(now or timezone.now())}
    standing = Notice.objects.standing().filter(kind__in=(ERROR, STATE))
    editions = dict(standing.values_list("key", "edition"))
    for alert in alerts.values():
        if editions.get(alert.key) != alert.edition:
            notify.raise_notice(
                alert.key, kind=alert.kind, to=notify.SYSADMINS, title=alert.title, detail=alert.detail, tone="warn",
                link=reverse("node", args=[alert.node]), edition=alert.edition,
            )  # fmt: skip
    if editions.keys() - alerts.keys():
        notify.withdraw_missing(STATE, alerts)


def _alerts(now: datetime) -> Iterator[HardwareAlert]:
    yield from _driver_errors(now)
    yield from _gpus("lost", Gpu.objects.exclude(lost_at=None))
    yield from _gpus("broken", Gpu.objects.filter(lost_at=None).exclude(fault=""))
    yield from _hung_drivers(now)


def _driver_errors(now: datetime) -> Iterator[HardwareAlert]:
    recent = NodeEvent.objects.filter(agent__is_made_up=False, last_at__gte=now - RECENT, last_at__lte=now + RECENT)
    critical = Q(kind="xid", code__in=CRITICAL) | Q(kind="sxid", data__fatal=True)
    rows = recent.filter(critical).order_by().values_list("agent", "agent__node", "kind", "code", "gpu__index")
    gpus: dict[tuple[int, str, str, int | None], dict[int | None, datetime]] = defaultdict(dict)
    for agent, node, kind, code, gpu, last in rows.annotate(last=Max("last_at")):
        gpus[agent, node, kind, code][gpu] = last
    for (agent, node, kind, code), found in gpus.items():
        day = f"{max(found.values()):%Y-%m-%d}"
        indices = sorted(index for index in found if index is not None)
        yield HardwareAlert(
            key=f"{ERROR}:{agent}:{kind}:{code}", kind=ERROR, node=node, title=_error_title(kind, code, indices, node),
            detail=_RESET if kind == "xid" and xids.severity(code) is Severity.CRITICAL else _REPAIR,
            edition=f"{day} {_joined(indices)}",
        )  # fmt: skip


def _error_title(kind: str, code: int | None, gpus: list[int], node: str) -> str:
    if kind == "sxid":
        return f"Fatal NVSwitch error on {node} (SXid {code})."
    where = f"{_named(gpus)} of {node}" if gpus else node
    return f"Xid {code} on {where}: {meaning(code)}." if meaning(code) else f"Xid {code} on {where}."


def _gpus(state: str, found: QuerySet[Gpu]) -> Iterator[HardwareAlert]:
    """Yield one alert per node: when a node loses power, its eight GPUs are one event."""
    by_node: dict[tuple[int, str], list[Gpu]] = defaultdict(list)
    rows = found.filter(gone_at=None, agent__is_made_up=False)
    for gpu in rows.select_related("agent").only("index", "fault", "agent__node").order_by("index"):
        by_node[gpu.agent_id, gpu.agent.node].append(gpu)
    for (agent, node), gpus in by_node.items():
        indices = [gpu.index for gpu in gpus]
        verb = "is" if len(gpus) == 1 else "are"
        faults = "; ".join(f"GPU {gpu.index} {gpu.fault}" for gpu in gpus[:MAX_NAMED_GPUS] if gpu.fault)
        yield HardwareAlert(
            key=f"{STATE}:{agent}:{state}", kind=STATE, node=node, title=f"{_named(indices)} of {node} {verb} {state}.",
            detail=f"{faults}." if faults else _REPAIR, edition=_joined(indices),
        )  # fmt: skip


def _hung_drivers(now: datetime) -> Iterator[HardwareAlert]:
    hung = NodeEvent.objects.filter(kind="gpu.silent", is_open=True, agent__is_made_up=False).select_related("agent")
    for event in hung.order_by("at"):
        since = formatting.clock(event.at, now)
        yield HardwareAlert(
            key=f"{STATE}:{event.agent_id}:driver", kind=STATE, node=event.agent.node,
            title=f"NVIDIA’s driver on {event.agent.node} has not responded since {since}.",
            detail="What its GPUs do is unknown. Drain the node; if the driver stays silent, reboot it.",
            edition=f"{event.at:%Y-%m-%d %H:%M}",
        )  # fmt: skip


def _named(indices: list[int]) -> str:
    shown = [str(index) for index in indices[:MAX_NAMED_GPUS]]
    if len(indices) > MAX_NAMED_GPUS:
        return f"{len(indices)} GPUs"
    return f"{'GPU' if len(indices) == 1 else 'GPUs'} {formatting.listed(shown)}"


def _joined(indices: list[int]) -> str:
    return ",".join(map(str, indices))[: notify.MOST_EDITION - 12]
