"""Edit post-mortems: a narrative, contributing factors, follow-up actions, and an overruled cause.

Members of the project may read it; the job's owner, the project's leads and sysadmins may edit it
(`portal.access.can`).
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

MAX_NARRATIVE, MAX_FACTOR, MAX_ACTION, MAX_WHY = 20_000, 500, 300, 2_000  # letters at most
MAX_FACTORS, MAX_ACTIONS = 50, 50


@dataclass(frozen=True, kw_only=True)
class Action:
    """A follow-up action as submitted. `id` is the row to change; None creates one."""

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
    """Change the fields that are given; None leaves a field as it is.

    Raises Conflict if somebody edited it after `revision`, Refused without the right to, SpecError for invalid fields.
    """
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
                "Not saved. Somebody else changed it since you opened it. Reload the page and edit it again."
            )
        if actions is not None:
            _replace_actions(written, actions, owners)
        after = {name: value for name, value in changes.items() if name in before}
        note_if_sysadmin(user, "postmortem.written", incident.attempt.job, change=Change(before=before, after=after))
    written.refresh_from_db()
    return written


def publish(user: User, incident: Incident, *, is_published: bool) -> None:
    """Mark the post-mortem as published, or turn it back into a draft."""
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
    """Replace the diagnosed cause by a person's. It is final; the diagnosis stays readable.

    Raises SpecError for an unknown cause or a missing reason, and Conflict before the first diagnosis.
    """
    _may_write(user, incident)
    if cause not in CAUSES:
        raise SpecError.at("cause", f"{cause[:40]!r} is not a cause. Choose one of {', '.join(CAUSES)}.")
    if not why.strip():
        raise SpecError.at("why", "Give a reason, in a sentence.")
    if problems := list(_too_long("why", why.strip(), MAX_WHY)):
        raise SpecError(problems)
    now = timezone.now()
    changes: dict[str, Any] = {"overruled_cause": cause, "overruled_by": user, "overruled_at": now}
    changes["overruled_why"] = masked(why.strip())
    if user.is_sysadmin and cause != incident.confirmed_cause:  # a researcher's overrule must not silence an alarm
        changes["confirmed_cause"] = ""
    with transaction.atomic():
        judged = Incident.objects.filter(pk=incident.pk, version__gt=0)  # else its logs would never be read
        if not judged.update(**changes, cause=cause, is_final=True, due_at=None, is_counted=False):
            raise Conflict("Not overruled. Its logs are still being read. Try again in a few seconds.")
        change = Change(before={"cause": incident.cause}, after={"cause": cause, "why": why.strip()})
        note_if_sysadmin(user, "postmortem.overruled", incident.attempt.job, change=change)
        live.announce(incident.attempt_id)
    incident.refresh_from_db(fields=[*changes, "cause", "is_final", "due_at"])


def withdraw(user: User, incident: Incident) -> None:
    """Withdraw a corrected cause: the newest diagnosis applies again, revised with evidence received since then."""
    _may_write(user, incident)
    newest = Diagnosis.objects.filter(incident=incident).order_by("-version").first()
    changes = {"overruled_cause": "", "overruled_by": None, "overruled_at": None, "overruled_why": ""}
    changes |= {
        "cause": newest.cause if newest else "",
        "confirmed_cause": confirmed_cause_of(newest.verdict) if newest else "",
    }
    with transaction.atomic():
        if Incident.objects.filter(~Q(overruled_at=None), pk=incident.pk).update(
            **changes, is_final=False, due_at=timezone.now(), is_counted=False
        ):
            change = Change(before={"cause": incident.cause}, after={"cause": newest or ""})
            note_if_sysadmin(user, "postmortem.overrule_withdrawn", incident.attempt.job, change=change)
            live.announce(incident.attempt_id)
    incident.refresh_from_db(fields=[*changes, "is_final", "due_at"])


def _may_write(user: User, incident: Incident) -> None:
    job = incident.attempt.job
    if not can(user, "change", job):
        raise Refused(f"Not changed. #{job.pk} belongs to {job.owner}.", f"Ask them or a lead of {job.project}.")


def _check(narrative: str | None, factors: Sequence[str] | None, actions: Sequence[Action] | None) -> None:
    problems = [
        *_too_long("narrative", narrative or "", MAX_NARRATIVE),
        *_too_many("factors", factors or (), MAX_FACTORS),
        *_too_many("actions", actions or (), MAX_ACTIONS),
    ]
    for i, factor in enumerate(factors or ()):
        problems += _too_long(f"factors.{i}", factor, MAX_FACTOR)
    for i, action in enumerate(actions or ()):
        problems += _too_long(f"actions.{i}.text", action.text, MAX_ACTION)
    if problems:
        raise SpecError(problems)


def _too_long(field: str, text: str, most: int) -> Iterator[Problem]:
    if len(text) > most:
        yield Problem(field, f"{text[:20]}… has {len(text)} characters. At most {most} are allowed. Shorten it.")


def _too_many(field: str, things: Sequence[object], most: int) -> Iterator[Problem]:
    if len(things) > most:
        yield Problem(field, f"{len(things)} {field}: at most {most} are allowed. Remove some.")


def _owners(incident: Incident, actions: Sequence[Action]) -> dict[str, User]:
    """Return the owners that actions name: people who can see the post-mortem."""
    names = {action.owner for action in actions if action.owner}
    if not names:
        return {}
    members = Q(memberships__project=incident.project_id) | Q(is_superuser=True)
    owners = {
        user.username: user for user in User.objects.filter(members, is_active=True, username__in=names).distinct()
    }
    problems = [
        Problem(
            f"actions.{i}.owner",
            f"No member of this project is called {action.owner[:80]}. Leave it empty, or name a member.",
        )
        for i, action in enumerate(actions)
        if action.owner and action.owner not in owners
    ]
    if problems:
        raise SpecError(problems)
    return owners


def _replace_actions(written: PostMortem, actions: Sequence[Action], owners: dict[str, User]) -> None:
    """Update actions with a row's id, create those without, and delete rows that are not listed."""
    there = {row.pk: row for row in written.follow_ups.all()}
    now = timezone.now()
    written.follow_ups.exclude(pk__in=[action.id for action in actions if action.id in there]).delete()
    for action in actions:
        row = there.get(action.id or 0)
        done: datetime | None = (row.done_at if row is not None and row.done_at else now) if action.is_done else None
        fields = {"text": masked(action.text), "owner": owners.get(action.owner), "due": action.due, "done_at": done}
        if row is None:
            FollowUp.objects.create(postmortem=written, **fields)
        else:
            FollowUp.objects.filter(pk=row.pk).update(**fields)
