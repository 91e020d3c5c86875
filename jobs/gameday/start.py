"""Start and cancel game days. No job is submitted here: the task that advances them does that (advance.py)."""

from __future__ import annotations

from collections.abc import Collection

from django.db import IntegrityError, transaction
from django.utils import timezone

from jobs.errors import Conflict, JobError
from jobs.gameday.faults import BASELINE, FAULTS
from jobs.models import Drill, GameDay
from nodes.models import Partition
from portal.access import can, note
from portal.audit import Change
from portal.models import Project, User
from vigil_core import formatting
from vigil_core.installation import version


class InvalidGameDay(JobError):
    """Raised for a project, a partition or a fault that the person cannot use; the message says what to do."""


def start(user: User, project: str, partition: str, faults: Collection[str] = ()) -> GameDay:
    """Store a game day with its drills. Raises InvalidGameDay, or Conflict if one runs on this partition.

    `faults` names the faults to plant; empty means all. An undisturbed run comes first if one of them is a rank's.
    """
    chosen = _project(user, project)
    if unknown := sorted(set(faults) - set(FAULTS)):
        raise InvalidGameDay(f"There is no fault {unknown[0]}. There are: {formatting.listed(list(FAULTS))}.")
    reported = Partition.objects.reported()
    # By its name: game days on the default partition, named or not, exclude and are compared to each other.
    partition = partition or reported.filter(is_default=True).values_list("name", flat=True).first() or ""
    if partition and not reported.filter(name=partition).exists():
        known = list(reported.order_by("name").values_list("name", flat=True)[:10])
        raise InvalidGameDay(f"There is no partition {partition}. There are: {formatting.listed(known)}.")
    needs_job = any(not FAULTS[name].is_node_fault for name in faults)
    try:
        with transaction.atomic():
            game_day = GameDay.objects.create(project=chosen, partition=partition, version=version(), started_by=user)
            Drill.objects.bulk_create(
                Drill(game_day=game_day, position=position, fault=name)
                for position, name in enumerate(FAULTS)
                if not faults or name in faults or (name == BASELINE and needs_job)
            )
            about = {"partition": partition, "project": chosen.slug}
            note(user, "gameday.started", game_day, change=Change(after=about))
    except IntegrityError:
        raise Conflict(f"Not started: a game day runs on {partition or 'the default partition'} already.") from None
    return game_day


def cancel(user: User, game_day: GameDay) -> None:
    """Request the end; the job that runs is cancelled. Raises Conflict if it is over."""
    rows = GameDay.objects.active().filter(pk=game_day.pk)
    if rows.filter(cancel_requested_at=None).update(cancel_requested_at=timezone.now()):
        note(user, "gameday.cancelled", game_day)
    elif not rows.exists():
        raise Conflict(f"Not cancelled. Game day {game_day.pk} has ended.")


def _project(user: User, slug: str) -> Project:
    """Return the project of this name; without a name the only one in which the person may submit."""
    projects = Project.objects.visible_to(user)
    usable = [project for project in (projects.named(slug) if slug else projects)[:200] if can(user, "submit", project)]
    if len(usable) == 1:
        return usable[0]
    names = formatting.listed([project.slug for project in usable[:10]])
    if slug or not usable:
        raise InvalidGameDay(f"You may not submit jobs to {slug or 'any project'}. Ask one of its leads to add you.")
    raise InvalidGameDay(f"Name the project to which its jobs belong: {names}.")
