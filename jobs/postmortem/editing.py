"""What people add to a post-mortem: what happened in their words, what is to be done, and their word on the cause.

Members of the project read it; the job's owner, the project's leads and sysadmins write it (`portal.access.can`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from diagnosis.causes import CAUSES
from diagnosis.verdict import confirmed_cause_of
from jobs import live
from jobs.errors import Conflict, Problem, Refused, SpecError
from jobs.models import Diagnosis, FollowUp, Incident, PostMortem
from portal.access import can, note_if_sysadmin
from portal.audit import Change
from portal.models import User
from vigil_core.masking import masked

NARRATIVE, FACTOR, ACTION, WHY = 20_000, 500, 300, 2_000  # letters at most
FACTORS, ACTIONS = 50, 50


@dataclass(frozen=True, kw_only=True)
class Action:
    """One thing to be done, as somebody writes it. `id`: of the row that it changes; None makes one."""

    text: str
    id: int | None = None
    owner: str = ""  # a user name
    due: date | None = None
    is_done: bool = False


def write(
    user: User,
    incident: Incident,
    *,
    narrative: str | None = None,
    factors: Sequence[str] | None = None,
    actions: Sequence[Action] | None = None,
    revision: int | None = None,
) -> PostMortem:
    """Change what is given; None keeps. Conflict if somebody changed it after `revision`, where that is said."""
    _may_write(user, incident)
    _check(narrative, factors, actions)
    owners = _owners(incident, actions or ())
    with transaction.atomic():
        written, _ = PostMortem.objects.get_or_create(incident=incident)
        before = {"narrative": written.narrative, "factors": written.factors}
        same = PostMortem.objects.filter(pk=written.pk)
        if revision is not None:
            same = same.filter(revision=revision)
        changes: dict[str, object] = {"edited_at": timezone.now(), "edited_by": user, "revision": F("revision") + 1}
        if narrative is not None:
            changes["narrative"] = masked(narrative)
        if factors is not None:
            changes["factors"] = [masked(factor) for factor in factors]
        if same.update(**changes) != 1:
            raise Conflict(
                "Not saved. Somebody else has changed it since you opened it. Open it anew, and write again."
            )
        if actions is not None:
            _replace(written, actions, owners)
        after = {name: value for name, value in changes.items() if name in before}
        note_if_sysadmin(user, "postmortem.written", incident.attempt.job, change=Change(before=before, after=after))
    written.refresh_from_db()
    return written


def publish(user: User, incident: Incident, *, is_published: bool) -> None:
    """Say that it is done and may be read as such, or take it back to a draft."""
    _may_write(user, incident)
    rows = Incident.objects.filter(pk=incident.pk, published_at__isnull=is_published)
    when = {"published_at": timezone.now(), "published_by": user}
    with transaction.atomic():
        if rows.update(**when if is_published else dict.fromkeys(when)):
            what = "published" if is_published else "unpublished"
            change = Change(before={"is_published": not is_published}, after={"is_published": is_published})
            note_if_sysadmin(user, f"postmortem.{what}", incident.attempt.job, change=change)
    incident.refresh_from_db(fields=["published_at", "published_by"])


def overrule(user: User, incident: Incident, *, cause: str, why: str) -> None:
    """A person's word on the cause: it comes before the machine's, and is final. What that had said stays readable."""
    _may_write(user, incident)
    if cause not in CAUSES:
        raise SpecError.at("cause", f"{cause[:40]!r} is no cause. Take one of {', '.join(CAUSES)}.")
    if not why.strip():
        raise SpecError.at("why", "Say why, in a sentence: whoever reads it later was not there.")
    if problems := list(_too_long("why", why.strip(), WHY)):
        raise SpecError(problems)
    now = timezone.now()
    told: dict[str, Any] = {"overruled_cause": cause, "overruled_by": user, "overruled_at": now}
    told["overruled_why"] = masked(why.strip())
    if user.is_sysadmin and cause != incident.confirmed_cause:  # others' word silences no alarm
        told["confirmed_cause"] = ""
    with transaction.atomic():
        judged = Incident.objects.filter(pk=incident.pk, version__gt=0)  # else nobody would read its logs any more
        if not judged.update(**told, cause=cause, is_final=True, due_at=None, is_counted=False):
            raise Conflict("Not overruled. Its logs are being read. Overrule what comes of it, in some seconds.")
        change = Change(before={"cause": incident.cause}, after={"cause": cause, "why": why.strip()})
        note_if_sysadmin(user, "postmortem.overruled", incident.attempt.job, change=change)
        live.announce(incident.attempt_id)
    incident.refresh_from_db(fields=[*told, "cause", "is_final", "due_at"])


def withdraw(user: User, incident: Incident) -> None:
    """Take a person's word on the cause back: the machine's newest holds again, and what came meanwhile is read."""
    _may_write(user, incident)
    newest = Diagnosis.objects.filter(incident=incident).order_by("-version").first()
    told = {"overruled_cause": "", "overruled_by": None, "overruled_at": None, "overruled_why": ""}
    told |= {
        "cause": newest.cause if newest else "",
        "confirmed_cause": confirmed_cause_of(newest.verdict) if newest else "",
    }
    with transaction.atomic():
        if Incident.objects.filter(~Q(overruled_at=None), pk=incident.pk).update(
            **told, is_final=False, due_at=timezone.now(), is_counted=False
        ):
            change = Change(before={"cause": incident.cause}, after={"cause": newest or ""})
            note_if_sysadmin(user, "postmortem.overrule_withdrawn", incident.attempt.job, change=change)
            live.announce(incident.attempt_id)
    incident.refresh_from_db(fields=[*told, "is_final", "due_at"])


def _may_write(user: User, incident: Incident) -> None:
    job = incident.attempt.job
    if not can(user, "change", job):
        raise Refused(f"Not changed. #{job.pk} belongs to {job.owner}.", f"Ask them or a lead of {job.project}.")


def _check(narrative: str | None, factors: Sequence[str] | None, actions: Sequence[Action] | None) -> None:
    problems = [
        *_too_long("narrative", narrative or "", NARRATIVE),
        *_too_many("factors", factors or (), FACTORS),
        *_too_many("actions", actions or (), ACTIONS),
    ]
    for i, factor in enumerate(factors or ()):
        problems += _too_long(f"factors.{i}", factor, FACTOR)
    for i, action in enumerate(actions or ()):
        problems += _too_long(f"actions.{i}.text", action.text, ACTION)
    if problems:
        raise SpecError(problems)


def _too_long(field: str, text: str, most: int) -> Iterator[Problem]:
    if len(text) > most:
        yield Problem(field, f"{text[:20]}… has {len(text)} letters: {most} letters are the most. Shorten it.")


def _too_many(field: str, things: Sequence[object], most: int) -> Iterator[Problem]:
    if len(things) > most:
        yield Problem(field, f"{len(things)} {field}: {most} are the most. Leave some out.")


def _owners(incident: Incident, actions: Sequence[Action]) -> dict[str, User]:
    """Whom the actions name: people who can see the post-mortem."""
    names = {action.owner for action in actions if action.owner}
    if not names:
        return {}
    members = Q(memberships__project=incident.project_id) | Q(is_superuser=True)
    found = {one.username: one for one in User.objects.filter(members, is_active=True, username__in=names).distinct()}
    problems = [
        Problem(
            f"actions.{i}.owner",
            f"Nobody of this project is called {action.owner[:80]}. Leave it out, or name a member.",
        )
        for i, action in enumerate(actions)
        if action.owner and action.owner not in found
    ]
    if problems:
        raise SpecError(problems)
    return found


def _replace(written: PostMortem, actions: Sequence[Action], owners: dict[str, User]) -> None:
    """Those with a row's id change it, those without are new, and rows that are not named go."""
    there = {row.pk: row for row in written.follow_ups.all()}
    now = timezone.now()
    written.follow_ups.exclude(pk__in=[action.id for action in actions if action.id in there]).delete()
    for action in actions:
        row = there.get(action.id or 0)
        done: datetime | None = (row.done_at if row is not None and row.done_at else now) if action.is_done else None
        told = {"text": masked(action.text), "owner": owners.get(action.owner), "due": action.due, "done_at": done}
        if row is None:
            FollowUp.objects.create(postmortem=written, **told)
        else:
            FollowUp.objects.filter(pk=row.pk).update(**told)
