"""Notify sysadmins of findings that need a repair or a decision: one notice per node and rule, until it is cleared."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.urls import reverse
from django.utils import timezone

from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import HealthEntry, NodeOrder
from nodes.monitoring.site_rules import rules_in_force
from portal import notify
from portal.models import Notice
from vigil_core import formatting

KIND, RETIRED_KIND = "hardware.state", "hardware.error"
"""`hardware.error` was raised for single errors before there were health entries."""
SEVERITIES = ("critical", "fatal")
RECENT = timedelta(hours=24)
"""Older evidence, which an agent could only report late, is history."""
MAX_NOTICES = 100
"""More findings at once are one event: a notice says how many more there are."""
MAX_ENTRIES = 5_000
"""Entries that are read for the notices, the first to open first: an outage opens many on each node."""
MAX_NAMED_GPUS = 8
_WAITS, _REFUSED, _UNDRAINED = "waits: ", "refused: ", "undrained: "
_DECISION_PREFIXES = ("", _WAITS, _REFUSED)
"""How the edition of a notice may begin: with the decision that is needed."""
Decision = HealthEntry.EntryDecision


@dataclass(frozen=True)
class HealthNotice:
    """The content of a notice. A changed `edition` notifies again.

    It lists the GPUs, mounts or ports, prefixed by the decision that is needed.
    """

    key: str
    title: str
    detail: str
    link: str
    edition: str


def notify_sysadmins(now: datetime | None = None) -> None:
    """Raise or update a notice per finding, withdraw those that are over; safe to run twice at once."""
    notices = {notice.key: notice for notice in _notices(now or timezone.now())}
    rows = Notice.objects.active().filter(kind__in=(KIND, RETIRED_KIND))
    reported_before = {notice.key: notice for notice in rows.only("key", "edition", "title", "detail")}
    for notice in notices.values():
        before, edition = reported_before.get(notice.key), notice.edition
        if before is not None and before.edition in {f"{prefix}{edition}" for prefix in _DECISION_PREFIXES}:
            edition = before.edition  # that nobody has to decide any more is no news
        shown = (edition, _line(notice.title), _line(notice.detail))
        if before is None or shown != (before.edition, before.title, before.detail):
            notify.raise_notice(
                notice.key, kind=KIND, to=notify.SYSADMINS, title=notice.title, detail=notice.detail, tone="warn",
                link=notice.link, edition=edition,
            )  # fmt: skip
    if reported_before.keys() - notices.keys():
        notify.withdraw_missing(KIND, notices)
        notify.withdraw_missing(RETIRED_KIND, ())


def _notices(now: datetime) -> Iterator[HealthNotice]:
    rules = rules_in_force()
    rows = HealthEntry.objects.of_real_nodes().open().filter(severity__in=SEVERITIES).exclude(action="ignore")
    rows = (
        rows.exclude(is_late=True, last_seen__lt=now - RECENT)
        .select_related("gpu", "order")
        .defer("progress", "evidence")
    )
    by_rule: defaultdict[tuple[str, str], list[HealthEntry]] = defaultdict(list)
    entries_read = list(rows.order_by("opened_at", "pk")[:MAX_ENTRIES])
    for entry in entries_read:
        by_rule[entry.node, entry.rule].append(entry)
    findings = len(by_rule)
    if len(entries_read) == MAX_ENTRIES:
        findings = rows.order_by().values("node", "rule").distinct().count()
    shown = list(by_rule.items())[:MAX_NOTICES]
    for (node, rule), entries in shown:
        advice = rules[rule].advice if rule in rules else ""
        yield HealthNotice(
            key=f"{KIND}:{_within(f'{node}:{rule}', notify.MAX_KEY - len(KIND) - 1)}",
            title=_title(entries),
            detail=f"{_follow_up(entries)} {advice}".strip(),
            link=_link(entries),
            edition=_decision_prefix(entries) + _within(_places(entries), notify.MAX_EDITION - len(_UNDRAINED)),
        )
    if findings > len(shown):
        yield HealthNotice(
            key=f"{KIND}:more", title=f"{formatting.plural(findings - len(shown), 'more finding')} on nodes.",
            detail="Something that all these nodes share may be the cause: a switch, a driver, a rule.",
            link=reverse("health"), edition="",
        )  # fmt: skip


def _title(entries: Sequence[HealthEntry]) -> str:
    first = entries[0]
    indices = sorted(entry.gpu.index for entry in entries if entry.gpu is not None)
    if not first.node:  # a program, a rack, the cluster
        return f"{first.item}: {first.title}." if first.item else f"{first.title}."
    where = f"{_named(indices)} of {first.node}" if indices else first.node
    items = sorted({entry.item for entry in entries if entry.item})
    shown = f" ({formatting.listed(items[:3])}{'' if len(items) <= 3 else ' …'})" if items else ""
    return f"{where}: {first.title}{shown}."


def _link(entries: Sequence[HealthEntry]) -> str:
    first = entries[0]
    if not first.node:
        return f"{reverse('health')}#entry-{first.pk}"
    page = reverse("node", args=[first.node])
    return f"{page}#entry-{first.pk}" if _waiting(entries) else page


def _follow_up(entries: Sequence[HealthEntry]) -> str:
    """Return what was done about it, or that somebody has to decide."""
    waiting = _waiting(entries)
    if any(entry.action in OUT_OF_SERVICE for entry in waiting):
        return "Vigil proposes to drain the node: choose Drain or Dismiss on its page."
    if waiting:
        return "Vigil proposes that new attempts avoid the node: choose Exclude or Dismiss on its page."
    if any(entry.decision == Decision.AUTOMATIC and not _is_approved(entry.order) for entry in entries):
        return "Vigil drains the node."
    return next((entry.held_back for entry in entries if entry.is_undrained), "")


def _is_approved(order: NodeOrder | None) -> bool:
    """Return whether a person ordered the drain, for another finding that this one joined."""
    return order is not None and order.asked_by_id is not None


def _waiting(entries: Sequence[HealthEntry]) -> list[HealthEntry]:
    return [entry for entry in entries if entry.decision == Decision.PROPOSED]


def _decision_prefix(entries: Sequence[HealthEntry]) -> str:
    """Return what somebody has to decide about, if anything.

    News are a drain that was refused, a node that somebody undrained, and that it is drained again.
    """
    waiting = _waiting(entries)
    is_refused = any(entry.order is not None and entry.order.state == NodeOrder.State.REFUSED for entry in waiting)
    if waiting:
        return _REFUSED if is_refused else _WAITS
    return _UNDRAINED if any(entry.is_undrained for entry in entries) else ""


def _places(entries: Sequence[HealthEntry]) -> str:
    """Return which GPUs, mounts or ports are concerned: another one is news."""
    return ",".join(sorted(str(entry.gpu.index) if entry.gpu is not None else entry.item for entry in entries))


def _named(indices: Sequence[int]) -> str:
    if len(indices) > MAX_NAMED_GPUS:
        return f"{len(indices)} GPUs"
    return f"{'GPU' if len(indices) == 1 else 'GPUs'} {formatting.listed([str(index) for index in indices])}"


def _line(text: str) -> str:
    return " ".join(text.split())


def _within(text: str, most: int) -> str:
    """Return the text, or if it is too long, its beginning with a digest of the whole."""
    if len(text) <= most:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[: most - 17]}-{digest}"
