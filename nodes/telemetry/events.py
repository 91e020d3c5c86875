"""Events of machines as rows: what is equal and near becomes one row with a count, what lasts one that is open."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Self

from django.db.models import F
from django.utils import timezone

from nodes.models import Agent, Gpu, NodeEvent
from nodes.telemetry.machines import cleaned
from nodes.telemetry.wire import Happening
from portal import untrusted

MOST_A_DAY = 5_000  # rows of one machine
MOST_OLD = 20 * MOST_A_DAY  # of them by what is told of days gone by
MOST_COUNT = 10**6  # by one telling: sums of them fit a column
NEAR = timedelta(minutes=10)  # equal events further apart are two
OPENS = {"gpu.lost": "gpu.back", "gpu.silent": "gpu.answers", "mount.slow": "mount.well"}
CLOSES = {closing: opening for opening, closing in OPENS.items()}
FROM_KERNEL = frozenset({"xid", "sxid"})
logger = logging.getLogger(__name__)

_DIGITS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def store(agent: Agent, event: Happening, boot_id: str) -> bool:
    """Write it down; answers whether the agent's place in the kernel log has moved."""
    told = _Told.of(event, boot_id)
    if event.kind in CLOSES:
        _close(agent, event)
    elif told.last_seq is None or not _is_known(agent, told):
        _open_or_add(agent, event, told)
    if told.last_seq is None or told.boot_id != agent.boot_id or told.last_seq <= agent.kernel_seq:
        return False
    agent.kernel_seq = told.last_seq
    return True


@dataclass(frozen=True)
class _Told:
    """What an event says, in the types of its row."""

    gpu: str
    kind: str
    code: int | None
    text: str
    first_seq: int | None  # of the kernel log; None: it is not from there
    last_seq: int | None
    boot_id: str
    is_again: bool  # its first telling was given up
    is_confirmed: bool
    fingerprint: str

    @classmethod
    def of(cls, event: Happening, boot_id: str) -> Self:
        more, of_kernel = event.more, event.kind in FROM_KERNEL
        code = untrusted.count(more.get("xid", more.get("sxid")), 2**31)
        text = untrusted.line(more.get("text"), 1_000)
        first = untrusted.count(more.get("seq")) if of_kernel else None
        last = untrusted.count(more.get("last_seq", more.get("seq"))) if of_kernel else None
        is_again = more.get("again") is True
        return cls(
            gpu=event.gpu or "", kind=event.kind, code=code, text=text, first_seq=first if last is not None else None,
            last_seq=last if first is not None else None, is_again=is_again,
            boot_id=untrusted.name(more.get("boot_id"), 64) or boot_id if is_again else boot_id,
            is_confirmed=more.get("confirmed") is True,
            fingerprint=fingerprint(event.kind, event.gpu or "", code, _about(event) or text),
        )  # fmt: skip


def _is_known(agent: Agent, told: _Told) -> bool:
    """Whether these records of the kernel log count already: then nothing is new but that NVML told them, too.

    An agent that has lost its own memory reads the log anew. What it gave up itself, and tells again, may have been
    taken or not: its row says so.
    """
    is_old = told.boot_id == agent.boot_id and told.last_seq is not None and told.last_seq <= agent.kernel_seq
    if not (is_old or told.is_again):
        return False
    counted = NodeEvent.objects.filter(
        agent=agent, fingerprint=told.fingerprint, boot_id=told.boot_id, first_seq__lte=told.first_seq,
        last_seq__gte=told.last_seq,
    )  # fmt: skip
    is_counted = bool(counted.update(is_confirmed=True)) if told.is_confirmed else counted.exists()
    return is_counted or not told.is_again


def _open_or_add(agent: Agent, event: Happening, told: _Told) -> None:
    gpu = Gpu.objects.filter(uuid=told.gpu, agent=agent).first() if told.gpu else None
    lasts = event.kind in OPENS
    since, last = (untrusted.number(event.more.get(name), untrusted.END_OF_TIME) for name in ("since", "last_at"))
    at = _moment(since if lasts and since else event.at)
    last_at = max(at, _moment(last or event.at))
    count = min(untrusted.count(event.more.get("count")) or 1, MOST_COUNT)
    before = _alike(agent, told, at, lasts=lasts)
    if before is None and _has_room(agent, at):
        NodeEvent.objects.create(
            agent=agent, gpu=gpu, kind=event.kind, code=told.code, text=told.text, at=at, last_at=last_at,
            is_open=lasts, count=count, is_confirmed=told.is_confirmed, boot_id=told.boot_id,
            first_seq=told.first_seq, last_seq=told.last_seq, fingerprint=told.fingerprint,
            data=cleaned(event.more) | _mounted(agent, event),
        )  # fmt: skip
    elif before is not None and not lasts:
        NodeEvent.objects.filter(pk=before.pk).update(
            count=F("count") + count,
            at=min(before.at, at),
            last_at=max(before.last_at, last_at),
            is_confirmed=before.is_confirmed or told.is_confirmed,
            first_seq=_extreme(min, before.first_seq, told.first_seq),
            last_seq=_extreme(max, before.last_seq, told.last_seq),
        )
    if gpu is not None and event.kind == "gpu.lost":
        Gpu.objects.filter(pk=gpu.pk).update(lost_at=at)


def _mounted(agent: Agent, event: Happening) -> dict[str, str]:
    """Of a mount's event: what is mounted there, by which file systems of several machines are known to be one."""
    path = untrusted.line(event.more.get("mount"), 300)
    mounts = agent.facts.get("mounts") if path else None
    for one in mounts if isinstance(mounts, list) else ():
        if isinstance(one, dict) and one.get("mount") == path:
            return {"source": untrusted.line(one.get("source"), 300)}
    return {}


def _alike(agent: Agent, told: _Told, at: datetime, *, lasts: bool) -> NodeEvent | None:
    """The row of equal ones near this."""
    rows = NodeEvent.objects.filter(agent=agent, fingerprint=told.fingerprint, boot_id=told.boot_id)
    near = rows.filter(last_at__gte=at - NEAR, at__lte=at + NEAR)
    return (near.filter(is_open=True) if lasts else near).order_by("-last_at").first()


def _extreme(pick: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else pick(one, other)


def _has_room(agent: Agent, at: datetime) -> bool:
    """A machine that tells of ever other things is broken, or lies: it must not fill the database."""
    day, rows = timezone.now() - timedelta(days=1), NodeEvent.objects.filter(agent=agent)
    if rows.filter(at__gt=day).count() < MOST_A_DAY if at > day else rows.filter(at__lte=day).count() < MOST_OLD:
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
