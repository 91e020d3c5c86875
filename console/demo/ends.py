"""The bad ends of the demonstration lab: diagnosed as real ones are, as if it had been then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from console.demo.scenarios import Story, Written
from jobs.models import Attempt, Diagnosis, Event, Incident
from jobs.postmortem import editing, incidents
from jobs.postmortem.editing import Action
from jobs.restarts import ENDED

NOTICED, DIAGNOSED = timedelta(seconds=2), timedelta(seconds=8)  # after the end


def make(new: Sequence[Story], past: Iterable[Attempt]) -> None:
    """Incidents of the jobs that these stories made, with what people wrote of them."""
    written = {story.name: story.written for story in new}
    for attempt in past:
        if attempt.job.name not in written:
            continue
        with transaction.atomic():  # a worker that is asked to hurry finds nothing left to do
            opened = _opened(attempt)
            for incident in opened:
                incidents.diagnose(incident.pk)
        for incident in opened:
            Incident.objects.filter(pk=incident.pk).update(opened_at=incident.at + NOTICED)
            Diagnosis.objects.filter(incident=incident).update(made_at=incident.at + DIAGNOSED)
            told = written[attempt.job.name]
            if told is not None and incident.ended_its_attempt:
                _write(incident, told)


def _opened(attempt: Attempt) -> list[Incident]:
    """Of its end, and of each restart in place, which the intake has opened."""
    assert attempt.ended_at is not None
    end = incidents.open_end(attempt, attempt.ended_at)
    in_place = list(Incident.objects.filter(attempt=attempt).exclude(incarnation=None))
    for one in in_place:
        told = Event.objects.filter(attempt=attempt, kind=ENDED, data__incarnation=one.incarnation)
        one.at = told.values_list("time", flat=True).first() or one.at
        Incident.objects.filter(pk=one.pk).update(at=one.at)
    return [*in_place, *([end] if end is not None else [])]


def _write(incident: Incident, told: Written) -> None:
    today = timezone.localdate()
    actions = [
        Action(text=text, owner=owner, due=today + timedelta(days=days), is_done=is_done)
        for text, owner, days, is_done in told.actions
    ]
    owner = incident.attempt.job.owner
    editing.write(owner, incident, narrative=told.narrative, factors=told.factors, actions=actions)
