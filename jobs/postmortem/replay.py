"""Replay: which verdicts of the past one entry would change, shown before it is saved. Nothing is written to them.

ask    which incidents, fixed at once: those that people judged, then the newest
go_on  a piece of a second or so on the queue `diagnose`, then the next; whatever is due comes first
look   somebody looks; what nobody looks at any more ends, what a lost message left lying goes on
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

MOST = 500  # incidents
MOST_JUDGED = 200  # of them, by people
SLICE_S = 1.0
MOST_S = 180.0  # of reading
LONG_S = 4.0  # a diagnosis that took longer is not made anew: it is made twice, and real ones wait meanwhile
AGAIN_AFTER = timedelta(seconds=20)  # without a step
SEEN_AGAIN = timedelta(seconds=5)


def ask(user: User, raw: Mapping[str, Any], *, instead_of: str = "", most: int = MOST) -> Replay:
    """Begin one; SpecError where the entry would not be taken in. `instead_of`: whose place it takes."""
    trial = site_catalogue.check(raw, instead_of=instead_of or str(raw.get("name", "")))
    if not trial.is_fit:
        raise SpecError(Problem(finding.field, finding.text) for finding in trial.errors)
    Replay.objects.old().delete()
    known = Incident.objects.filter(version__gt=0)
    judged = list(known.judged().values_list("pk", flat=True)[: min(most, MOST_JUDGED)])
    newest = known.order_by("-at", "-id").values_list("pk", flat=True)[:most]
    numbers = list(dict.fromkeys([*judged, *newest]))[:most]
    replay = Replay.objects.create(
        entry=entry_as_json(parse_entry(raw)), instead_of=instead_of, asked_by=user, incidents=numbers
    )
    transaction.on_commit(lambda: hurry(replay.pk))
    return replay


def look(replay: Replay) -> Replay:
    """Somebody wants to know how far it is."""
    now = timezone.now()
    mine = Replay.objects.filter(pk=replay.pk, ended_at=None)
    mine.filter(seen_at__lt=now - SEEN_AGAIN).update(seen_at=now)
    if mine.filter(moved_at__lt=now - AGAIN_AFTER).update(moved_at=now):
        hurry(replay.pk)
    return replay


def stop(replay: Replay) -> None:
    """Let it be; what it has found stays."""
    Replay.objects.filter(pk=replay.pk, ended_at=None).update(ended_at=timezone.now(), outcome="It was stopped.")


def hurry(replay_id: int) -> None:
    queue("jobs.tasks.replay", replay_id)


def go_on(replay_id: int) -> None:
    """The next few incidents; asks for the next piece where there are more."""
    replay = Replay.objects.filter(pk=replay_id, ended_at=None).first()
    if replay is None:
        return
    if timezone.now() - replay.seen_at > Replay.LEFT_AFTER:
        _end(replay, "Nobody looked any more.")
        return
    entry = as_site_entry(parse_entry(replay.entry))
    others = site_catalogue.entries()
    kept = tuple(one for one in others if one.name not in {entry.name, replay.instead_of})
    pair = _Pair(entry.name, site_catalogue.beside(others), site_catalogue.beside((*kept, entry)))
    until = time.monotonic() + SLICE_S
    while replay.place < replay.of:
        if replay.seconds > MOST_S:
            _end(replay, f"It stopped after {MOST_S:.0f} s of reading.")
            return
        if is_held := Incident.objects.due().exists():
            incidents.hurry()
        elif not _step(replay, pair):
            return  # somebody else goes on with it
        if is_held or time.monotonic() >= until:
            hurry(replay.pk)
            return
    _end(replay, "")


def _at(replay: Replay) -> ReplayQuerySet:
    """Its row, if nobody else has come further."""
    return Replay.objects.filter(pk=replay.pk, place=replay.place, ended_at=None)


def _end(replay: Replay, outcome: str) -> None:
    _at(replay).update(ended_at=timezone.now(), outcome=outcome)


def _step(replay: Replay, pair: _Pair) -> bool:
    """One incident. It counts as done before it is read: what kills the process that reads it is met once."""
    number = replay.incidents[replay.place]
    if _at(replay).update(place=replay.place + 1, moved_at=timezone.now()) != 1:
        return False
    replay.place += 1
    began = time.monotonic()
    _add(replay, pair.look_at(number), time.monotonic() - began)
    return True


def _add(replay: Replay, found: _Found | None, seconds: float) -> None:
    """What one incident gave, beside what another worker has added meanwhile."""
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
class _Found:
    """What came of one incident that could be read. `change`: of its verdict, by the entry."""

    is_named: bool
    change: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Pair:
    """The catalogue as it is, and with the entry of that name."""

    name: str
    without: Catalogue
    known: Catalogue

    def look_at(self, incident_id: int) -> _Found | None:
        """None where there is no such incident, nothing of it is left to read, or too much."""
        incident = Incident.objects.select_related("attempt__job").filter(pk=incident_id).first()
        last = incident.diagnoses.first() if incident is not None else None
        if incident is None or last is None or last.seconds > LONG_S:
            return None
        verdict = self._judged(incident, last, self.known)
        if verdict is None:
            return None
        return _Found(verdict.entry == self.name, self._change(incident, last, verdict))

    def _judged(self, incident: Incident, last: Diagnosis, known: Catalogue) -> Verdict | None:
        """What it would be found to be; of what people judged, where the logs are gone, by what the verdict kept."""
        verdict, has_logs = incidents.judged(incident, known)
        if has_logs:
            return verdict
        logs = examples.kept_lines(incident, last) if incident.overruled_cause else {}
        return offline.diagnose_logs(offline.logs_from_texts(logs), known) if logs else None

    def _change(self, incident: Incident, last: Diagnosis, verdict: Verdict) -> dict[str, Any] | None:
        """What would become of the machine's word by this entry; None: nothing, or it would by itself."""
        if verdict.cause == last.cause:
            return None
        before = self._judged(incident, last, self.without)
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
