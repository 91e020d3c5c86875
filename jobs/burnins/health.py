"""Find what health rules have against a node whose tests have ended.

    opened since the tests began        the node fails
    open before, and observed again     the node fails: its fault still shows
    open before, for a person to end    no verdict: tests that pass do not show that the node is repaired

What was found before and was not observed again is no obstacle: a passed burn-in clears it. Nor are rules about history
alone, which observe the failures of last week's jobs for as long as those count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta

from django.utils import timezone

from nodes.burnin.evidence import EVENT, GAP, BurnInFinding
from nodes.health.rules.rule import OUT_OF_SERVICE, Rule
from nodes.models import HealthEntry
from nodes.models.health import HealthEntryQuerySet
from nodes.monitoring.evaluate import REFRESH_S
from nodes.monitoring.rule_progress import progress_of

MAX_ENTRIES = 20  # of each kind about one node
_DELAY = timedelta(seconds=REFRESH_S)
"""How old the stored `last_seen` of a state may be that still lasts."""


def findings_of(node: str, since: datetime, rules: Mapping[str, Rule]) -> list[BurnInFinding]:
    """Return what speaks against a node whose tests began at `since`."""
    opened = HealthEntry.objects.out_of_service_between(since, timezone.now()).filter(node=node)
    failures = {f"{entry.title} during the burn-in (health rule {entry.rule})." for entry in opened[:MAX_ENTRIES]}
    standing = set()
    for entry in _found_before(since, [node]).open().order_by("-last_seen")[:MAX_ENTRIES]:
        if is_observed_since(entry, since, rules):
            failures.add(f"{entry.title} again during the burn-in (health rule {entry.rule}).")
        elif not is_ended_by_burn_in(entry, rules) and not _is_about_history(entry, rules):
            standing.add(f"{entry.title} (health rule {entry.rule}) is still open. Clear it once it is repaired.")
    return [
        *(BurnInFinding(text, kind=EVENT) for text in sorted(failures)),
        *(BurnInFinding(text, kind=GAP) for text in sorted(standing)),
    ]


def observed_again(
    nodes: Collection[str], since: datetime, rules: Mapping[str, Rule], limit: int
) -> Iterator[HealthEntry]:
    """Yield what was found before and observed again, also if it is over by now. What was dismissed does not count."""
    entries = _found_before(since, nodes).filter(last_seen__gte=since - _DELAY)
    for entry in entries.exclude(state=HealthEntry.EntryState.DISMISSED).order_by("pk")[:limit]:
        if is_observed_since(entry, since, rules):
            yield entry


def is_observed_since(entry: HealthEntry, since: datetime, rules: Mapping[str, Rule]) -> bool:
    """Return whether there is evidence of the finding since then; what is about history alone has none."""
    if _is_about_history(entry, rules):
        return False
    lasts = entry.last_seen >= since - _DELAY and bool(progress_of(entry, rules.get(entry.rule)).holding)
    return lasts or entry.last_seen >= since


def is_ended_by_burn_in(entry: HealthEntry, rules: Mapping[str, Rule]) -> bool:
    """Return whether a passed burn-in ends the finding, if its fault no longer shows.

    That is what waits for a burn-in, and all that keeps the node out of service but is not left to a person: nobody
    drains the node for a finding that is open already. The finding of a rule that is gone is a person's to end.
    """
    rule = rules.get(entry.rule)
    if rule is None:
        return False
    if rule.needs_burn_in or rule.clearing.ending == "burn-in":
        return True
    is_open = entry.state == HealthEntry.EntryState.OPEN
    return is_open and entry.action in OUT_OF_SERVICE and rule.clearing.ending != "person"


def _found_before(since: datetime, nodes: Collection[str]) -> HealthEntryQuerySet:
    return HealthEntry.objects.filter(node__in=nodes, opened_at__lt=since, action__in=OUT_OF_SERVICE, is_planted=False)


def _is_about_history(entry: HealthEntry, rules: Mapping[str, Rule]) -> bool:
    rule = rules.get(entry.rule)
    return rule is not None and all(trigger.signal.is_history for trigger in rule.triggers)
