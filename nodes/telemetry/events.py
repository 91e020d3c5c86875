"""Events of machines as rows: what is equal and near becomes one row with a count, what lasts one that is open."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any

from django.db.models import F
from django.utils import timezone

from nodes.models import Agent, Gpu, NodeEvent
from nodes.telemetry.machines import cleaned
from nodes.telemetry.wire import Happening
from portal import untrusted

MOST_A_DAY = 5_000  # rows of one machine
NEAR = timedelta(minutes=10)  # equal events further apart are two
OPENS = {"gpu.lost": "gpu.back", "gpu.silent": "gpu.answers", "mount.slow": "mount.well"}
CLOSES = {closing: opening for opening, closing in OPENS.items()}
FROM_KERNEL = frozenset({"xid", "sxid"})
logger = logging.getLogger(__name__)

_DIGITS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def store(agent: Agent, event: Happening, boot_id: str) -> bool:
    """Write it down; answers whether the agent's place in the kernel log has moved.

    A record that counted before, told by an agent that has lost its own memory of it, does not count again.
    """
    last = untrusted.count(event.more.get("last_seq", event.more.get("seq")))
    of_kernel = event.kind in FROM_KERNEL and last is not None
    if of_kernel and boot_id == agent.boot_id and last is not None and last <= agent.kernel_seq:
        return False
    if event.kind in CLOSES:
        _close(agent, event)
    else:
        _open_or_add(agent, event, boot_id)
    if of_kernel and last is not None and boot_id == agent.boot_id:
        agent.kernel_seq = last
        return True
    return False


def _open_or_add(agent: Agent, event: Happening, boot_id: str) -> None:
    gpu = Gpu.objects.filter(uuid=event.gpu, agent=agent).first() if event.gpu else None
    code = untrusted.count(event.more.get("xid", event.more.get("sxid")), 2**31)
    text = untrusted.line(event.more.get("text"), 1_000)
    lasts = event.kind in OPENS
    at = _moment(untrusted.number(event.more.get("since")) if lasts and "since" in event.more else event.at)
    last_at = max(at, _moment(untrusted.number(event.more.get("last_at")) or event.at))
    count = untrusted.count(event.more.get("count")) or 1
    confirmed = event.more.get("confirmed") is True
    mark = fingerprint(event.kind, event.gpu or "", code, _about(event) or text)
    alike = NodeEvent.objects.filter(agent=agent, fingerprint=mark, last_at__gte=at - NEAR, boot_id=boot_id)
    if lasts:
        alike = alike.filter(is_open=True)
    before = alike.order_by("-last_at").first()
    if before is None and _has_room(agent):
        NodeEvent.objects.create(
            agent=agent, gpu=gpu, kind=event.kind, code=code, text=text, at=at, last_at=last_at, is_open=lasts,
            count=count, is_confirmed=confirmed, boot_id=boot_id, fingerprint=mark, data=cleaned(event.more),
        )  # fmt: skip
    elif before is not None and not lasts:
        told: dict[str, Any] = {"count": F("count") + count, "last_at": max(before.last_at, last_at)}
        NodeEvent.objects.filter(pk=before.pk).update(**told, is_confirmed=before.is_confirmed or confirmed)
    if gpu is not None and event.kind == "gpu.lost":
        Gpu.objects.filter(pk=gpu.pk).update(lost_at=at)


def _has_room(agent: Agent) -> bool:
    """A machine that tells of ever other things is broken, or lies: it must not fill the database."""
    if NodeEvent.objects.filter(agent=agent, at__gt=timezone.now() - timedelta(days=1)).count() < MOST_A_DAY:
        return True
    logger.warning("%s: more than %d different events within a day are left out", agent, MOST_A_DAY)
    return False


def _close(agent: Agent, event: Happening) -> None:
    opening = CLOSES[event.kind]
    mark = fingerprint(opening, event.gpu or "", None, _about(event))
    at = _moment(event.at)
    for row in NodeEvent.objects.filter(agent=agent, fingerprint=mark, is_open=True):
        NodeEvent.objects.filter(pk=row.pk).update(is_open=False, last_at=max(at, row.at))
    if event.kind == "gpu.back":
        Gpu.objects.filter(agent=agent, uuid=event.gpu or "").update(lost_at=None)


def _about(event: Happening) -> str:
    """Which mount a mount's event is of: two that are slow are two events."""
    return untrusted.line(event.more.get("mount"), 300)


def fingerprint(kind: str, gpu: str, code: int | None, text: str) -> str:
    """The same for events that differ in nothing but numbers of their text."""
    told = "\n".join((kind, gpu, str(code), _DIGITS.sub("#", text)))
    return blake2b(told.encode(errors="replace"), digest_size=12).hexdigest()


def _moment(at: float | None) -> datetime:
    return datetime.fromtimestamp(at or 0.0, UTC)
