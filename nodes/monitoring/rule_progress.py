"""Read the engine's state that an entry stores, whatever wrote it: one that cannot be read must not stop the others."""

from __future__ import annotations

import logging
from datetime import datetime

from nodes.health.progress import RuleProgress, UnreadableProgress
from nodes.health.rules.rule import Rule
from nodes.models import HealthEntry

logger = logging.getLogger(__name__)

State = HealthEntry.EntryState


def progress_of(row: HealthEntry, rule: Rule | None = None) -> RuleProgress:
    """Return the state of the entry's rule; from the entry's columns if what is stored cannot be read.

    What counted towards a trigger that `rule` no longer has is left out: its author has changed it since.
    """
    try:
        progress = RuleProgress.from_payload(row.progress)
    except UnreadableProgress as error:
        logger.error("the progress of health entry %s cannot be read, its columns are used: %s", row.pk, error)
        progress = _from_columns(row)
    if rule is not None:
        events = {place for place, trigger in enumerate(rule.triggers) if trigger.signal.is_event}
        states = set(range(len(rule.triggers))) - events
        progress.holding = {place: since for place, since in progress.holding.items() if place in states}
        progress.occurrences = {place: some for place, some in progress.occurrences.items() if place in events}
    return progress


def _from_columns(row: HealthEntry) -> RuleProgress:
    is_open = row.state in (State.OPEN, State.DISMISSED)
    opened_at = _seconds(row.opened_at)
    return RuleProgress(
        state="open" if is_open else "watching" if row.state == State.WATCHING else "cleared",
        first_seen=_seconds(row.first_seen),
        last_seen=_seconds(row.last_seen),
        count=row.count,
        opened_at=opened_at,
        cleared_at=_seconds(row.cleared_at),
        openings=[] if opened_at is None else [opened_at],
    )


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
