"""Replay past diagnoses with one more entry, to show which verdicts it would change before it is saved.

start      fixes which incidents are replayed: those that people judged, then the newest
run_slice  replays for a second or so on the queue `diagnose` and queues the next slice; due diagnoses come first
refresh    records that somebody is watching; an unwatched replay stops, a stalled one is queued again
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from diagnosis import offline
from diagnosis.signatures.catalogue import Catalogue, as_site_entry
from diagnosis.signatures.entry import parse_entry
from diagnosis.trial.subprocess_trial import entry_as_json
from diagnosis.verdict import Verdict
from jobs.errors import Problem, SpecError
from jobs.models import Diagnosis, Incident, Replay
from jobs.models.site_entry import ReplayQuerySet
from jobs.postmortem import examples, incidents, site_catalogue
from jobs.queueing import queue
from portal.models import User
from vigil_core.masking import masked

MAX_INCIDENTS = 500
MAX_JUDGED = 200  # by people
SLICE_S = 1.0
MAX_READING_S = 180.0
MAX_DIAGNOSIS_S = 4.0  # longer diagnoses are left out: each is made twice, and real ones wait meanwhile
STALLED_AFTER = timedelta(seconds=20)  # without a step
VIEW_INTERVAL = timedelta(seconds=5)


def start(user: User, raw: Mapping[str, Any], *, instead_of: str = "", most: int = MAX_INCIDENTS) -> Replay:
    """Start a replay. Raises SpecError if the entry would be rejected. `instead_of`: the entry that it replaces."""
    trial = site_catalogue.check(raw, instead_of=instead_of or str(raw.get("name", "")))
    if not trial.is_fit:
        raise SpecError(Problem(finding.field, finding.text) for finding in trial.errors)
    Replay.objects.old().delete()
    incidents_with_verdict = Incident.objects.filter(version__gt=0)
    judged = list(incidents_with_verdict.judged().values_list("pk", flat=True)[: min(most, MAX_JUDGED)])
    newest = incidents_with_verdict.order_by("-at", "-id").values_list("pk", flat=True)[:most]
    numbers = list(dict.fromkeys([*judged, *newest]))[:most]
    replay = Replay.objects.create(
        entry=entry_as_json(parse_entry(raw)), instead_of=instead_of, asked_by=user, incidents=numbers
    )
    transaction.on_commit(lambda: enqueue(replay.pk))
    return replay


def refresh(replay: Replay) -> Replay:
    """Record that somebody is watching, and queue a stalled replay again."""
    now = timezone.now()
    running = Replay.objects.filter(pk=replay.pk, ended_at=None)
    running.filter(seen_at__lt=now - VIEW_INTERVAL).update(seen_at=now)
    if running.filter(moved_at__lt=now - STALLED_AFTER).update(moved_at=now):
        enqueue(replay.pk)
    return replay


def stop(replay: Replay) -> None:
    """Stop a replay; its results so far stay."""
    Replay.objects.filter(pk=replay.pk, ended_at=None).update(ended_at=timezone.now(), outcome="Stopped.")


def enqueue(replay_id: int) -> None:
    queue("jobs.tasks.replay", replay_id)


def run_slice(replay_id: int) -> None:
    """Replay the next few incidents, and queue the next slice if there are more."""
    replay = Replay.objects.filter(pk=replay_id, ended_at=None).first()
    if replay is None:
        return
    if timezone.now() - replay.seen_at > Replay.ABANDONED_AFTER:
        _end(replay, "Stopped: nobody was watching.")
        return
    entry = as_site_entry(parse_entry(replay.entry))
    others = site_catalogue.enabled_entries()
    other_entries = tuple(
        entry_of_site for entry_of_site in others if entry_of_site.name not in {entry.name, replay.instead_of}
    )
    pair = _CataloguePair(entry.name, site_catalogue.combined(others), site_catalogue.combined((*other_entries, entry)))
    until = time.monotonic() + SLICE_S
    while replay.place < replay.of:
        if replay.seconds > MAX_READING_S:
            _end(replay, f"Stopped after {MAX_READING_S:.0f} s of reading.")
            return
        if has_due := Incident.objects.due().exists():
            incidents.enqueue()
        elif not _replay_next(replay, pair):
            return  # another worker continues
        if has_due or time.monotonic() >= until:
            enqueue(replay.pk)
            return
    _end(replay, "")


def _unclaimed(replay: Replay) -> ReplayQuerySet:
    """Return the replay's row, unless another worker has got further."""
    return Replay.objects.filter(pk=replay.pk, place=replay.place, ended_at=None)


def _end(replay: Replay, outcome: str) -> None:
    _unclaimed(replay).update(ended_at=timezone.now(), outcome=outcome)


def _replay_next(replay: Replay, pair: _CataloguePair) -> bool:
    """Replay one incident. It counts as done before it is read: a process that reading kills is killed once."""
    number = replay.incidents[replay.place]
    if _unclaimed(replay).update(place=replay.place + 1, moved_at=timezone.now()) != 1:
        return False
    replay.place += 1
    began = time.monotonic()
    _add_result(replay, pair.replay(number), time.monotonic() - began)
    return True


def _add_result(replay: Replay, found: _ReplayedIncident | None, seconds: float) -> None:
    """Add the result of one incident to what other workers have added meanwhile."""
    with transaction.atomic():
        row = Replay.objects.select_for_update().filter(pk=replay.pk).first()
        if row is None:
            return
        row.seconds += seconds
        if found is not None:
            row.read += 1
            row.named += found.is_named
            row.changes += [found.change] if found.change else []
        row.save(update_fields=["seconds", "read", "named", "changes"])
    replay.seconds = row.seconds


@dataclass(frozen=True, slots=True)
class _ReplayedIncident:
    """The result for one incident. `change`: how the entry changes its verdict, if it does."""

    is_named: bool
    change: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _CataloguePair:
    """The catalogue with and without the entry of that name."""

    name: str
    without: Catalogue
    extended: Catalogue

    def replay(self, incident_id: int) -> _ReplayedIncident | None:
        """Return the result for an incident; None if it is gone, has nothing left to read, or takes too long."""
        incident = Incident.objects.select_related("attempt__job").filter(pk=incident_id).first()
        last = incident.diagnoses.first() if incident is not None else None
        if incident is None or last is None or last.seconds > MAX_DIAGNOSIS_S:
            return None
        verdict = self._diagnosed(incident, last, self.extended)
        if verdict is None:
            return None
        return _ReplayedIncident(verdict.entry == self.name, self._change(incident, last, verdict))

    def _diagnosed(self, incident: Incident, last: Diagnosis, catalogue: Catalogue) -> Verdict | None:
        """Return the verdict by a catalogue.

        If the logs of a judged incident are gone, by the evidence stored with its verdict.
        """
        verdict, has_logs = incidents.diagnose_with(incident, catalogue)
        if has_logs:
            return verdict
        logs = examples.evidence_lines(incident, last) if incident.overruled_cause else {}
        return offline.diagnose_logs(offline.logs_from_texts(logs), catalogue) if logs else None

    def _change(self, incident: Incident, last: Diagnosis, verdict: Verdict) -> dict[str, Any] | None:
        """Return how the entry changes the diagnosed cause.

        None if it does not, or if it also changes without the entry.
        """
        if verdict.cause == last.cause:
            return None
        before = self._diagnosed(incident, last, self.without)
        if before is None or before.cause == verdict.cause:
            return None
        return {
            "incident": incident.pk,
            "job": incident.attempt.job_id,
            "name": incident.attempt.job.name,
            "attempt": incident.attempt.number,
            "incarnation": incident.incarnation,
            "before": last.cause,
            "after": verdict.cause,
            "confidence": round(verdict.confidence, 2),
            "says": masked(verdict.summary)[:300],
            "by_person": incident.overruled_cause,
        }
