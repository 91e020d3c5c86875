"""Diagnose the failures of the demo lab like real ones, with times in the past."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from console.demo.scenarios import DemoJob, PostmortemNotes
from jobs.models import Attempt, Diagnosis, Event, Incident
from jobs.postmortem import editing, incidents
from jobs.postmortem.editing import Action
from jobs.restart_incidents import ENDED

NOTICED, DIAGNOSED = timedelta(seconds=2), timedelta(seconds=8)  # after the end


def make(new: Sequence[DemoJob], past: Iterable[Attempt]) -> None:
    """Open and diagnose incidents of the jobs of these stories, with their people's notes."""
    written = {story.name: story.postmortem_notes for story in new}
    for attempt in past:
        if attempt.job.name not in written:
            continue
        with transaction.atomic():  # a worker that runs at the same time finds nothing left to do
            opened = _open_incidents(attempt)
            for incident in opened:
                incidents.diagnose(incident.pk)
        for incident in opened:
            Incident.objects.filter(pk=incident.pk).update(opened_at=incident.at + NOTICED)
            Diagnosis.objects.filter(incident=incident).update(made_at=incident.at + DIAGNOSED)
            notes = written[attempt.job.name]
            if notes is not None and incident.ended_its_attempt:
                _write(incident, notes)


def _open_incidents(attempt: Attempt) -> list[Incident]:
    """Return the incidents of the attempt's end and of each restart in place; the intake has opened the latter."""
    assert attempt.ended_at is not None
    end = incidents.open_end(attempt, attempt.ended_at)
    in_place = list(Incident.objects.filter(attempt=attempt).exclude(incarnation=None))
    for incident in in_place:
        events = Event.objects.filter(attempt=attempt, kind=ENDED, data__incarnation=incident.incarnation)
        incident.at = events.values_list("time", flat=True).first() or incident.at
        Incident.objects.filter(pk=incident.pk).update(at=incident.at)
    return [*in_place, *([end] if end is not None else [])]


def _write(incident: Incident, notes: PostmortemNotes) -> None:
    today = timezone.localdate()
    actions = [
        Action(text=text, owner=owner, due=today + timedelta(days=days), is_done=is_done)
        for text, owner, days, is_done in notes.actions
    ]
    owner = incident.attempt.job.owner
    editing.write(owner, incident, narrative=notes.narrative, factors=notes.factors, actions=actions)
