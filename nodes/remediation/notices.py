"""Notify sysadmins of findings that need a repair or a decision: one notice per node and rule, until it is cleared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.urls import reverse
from django.utils import timezone

from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import HealthEntry
from nodes.monitoring.site_rules import rules_in_force
from portal import notify
from portal.models import Notice
from vigil_core import formatting

KIND, RETIRED_KIND = "hardware.state", "hardware.error"
"""`hardware.error` was raised for single errors before there were health entries."""
SEVERITIES = ("critical", "fatal")
RECENT = timedelta(hours=24)
"""Older evidence, which an agent could only report late, is history."""
MOST_NOTICES = 100
"""More findings at once are one event: a notice says how many more there are."""
MOST_NAMED_GPUS = 8
Decision = HealthEntry.EntryDecision


@dataclass(frozen=True)
class HealthNotice:
    """The content of a notice. A changed `edition` notifies again."""

    key: str
    title: str
    detail: str
    link: str
    edition: str


def notify_sysadmins(now: datetime | None = None) -> None:
    """Raise a notice per new finding, and withdraw those that are over. Safe to run twice at once."""
    notices = {notice.key: notice for notice in _notices(now or timezone.now())}
    standing = dict(Notice.objects.standing().filter(kind__in=(KIND, RETIRED_KIND)).values_list("key", "edition"))
    for notice in notices.values():
        if standing.get(notice.key) != notice.edition:
            notify.raise_notice(
                notice.key, kind=KIND, to=notify.SYSADMINS, title=notice.title, detail=notice.detail, tone="warn",
                link=notice.link, edition=notice.edition,
            )  # fmt: skip
    if standing.keys() - notices.keys():
        notify.withdraw_missing(KIND, notices)
        notify.withdraw_missing(RETIRED_KIND, ())


def _notices(now: datetime) -> Iterator[HealthNotice]:
    rules = rules_in_force()
    rows = HealthEntry.objects.of_real_nodes().open().filter(severity__in=SEVERITIES).exclude(action="ignore")
    rows = rows.exclude(is_late=True, last_seen__lt=now - RECENT).select_related("gpu").defer("progress", "evidence")
    by_rule: defaultdict[tuple[str, str], list[HealthEntry]] = defaultdict(list)
    for entry in rows.order_by("opened_at"):
        by_rule[entry.node, entry.rule].append(entry)
    for (node, rule), entries in list(by_rule.items())[:MOST_NOTICES]:
        advice = rules[rule].advice if rule in rules else ""
        yield HealthNotice(
            key=f"{KIND}:{node}:{rule}", title=_title(entries), detail=f"{_follow_up(entries)} {advice}".strip(),
            link=_link(entries),
            edition=_places(entries)[: notify.MOST_EDITION],
        )  # fmt: skip
    if len(by_rule) > MOST_NOTICES:
        yield HealthNotice(
            key=f"{KIND}:more", title=f"{len(by_rule) - MOST_NOTICES} more findings on nodes.",
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
    if _waits(entries) or not first.node:
        return f"{reverse('health')}#entry-{first.pk}"
    return reverse("node", args=[first.node])


def _follow_up(entries: Sequence[HealthEntry]) -> str:
    """Return what was done about it, or that somebody has to decide."""
    waiting = [entry for entry in entries if entry.decision == Decision.PROPOSED]
    if any(entry.action in OUT_OF_SERVICE for entry in waiting):
        return "Vigil proposes to drain the node: choose Drain or Dismiss on the health page."
    if waiting:
        return "Vigil proposes that new attempts avoid the node: choose Exclude or Dismiss on the health page."
    if any(entry.decision == Decision.AUTOMATIC for entry in entries):
        return "Vigil drains the node."
    return ""


def _waits(entries: Sequence[HealthEntry]) -> bool:
    return any(entry.decision == Decision.PROPOSED for entry in entries)


def _places(entries: Sequence[HealthEntry]) -> str:
    """Return which GPUs, mounts or ports are concerned: another one is news."""
    return ",".join(sorted(str(entry.gpu.index) if entry.gpu is not None else entry.item for entry in entries))


def _named(indices: Sequence[int]) -> str:
    if len(indices) > MOST_NAMED_GPUS:
        return f"{len(indices)} GPUs"
    return f"{'GPU' if len(indices) == 1 else 'GPUs'} {formatting.listed([str(index) for index in indices])}"
