"""Advance game days: begin the next drill, judge it when it is over, go on with the next.

Everything is in the database, and each step may be repeated or done by two workers at once: a job is submitted under
the drill's own key, and results are written where the drill still runs.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from django.db.models import Q, QuerySet
from django.utils import timezone

from jobs.errors import JobError
from jobs.gameday import node_drills
from jobs.gameday.faults import FAULTS
from jobs.gameday.judge import judge
from jobs.gameday.leftovers import clear_leftovers
from jobs.gameday.results import store
from jobs.gameday.submission import submit_drill
from jobs.models import Drill, GameDay, Job
from portal import database
from vigil_core import formatting

logger = logging.getLogger(__name__)

MAX_JOB_DRILL_DURATION = timedelta(minutes=30)
"""Limit of a drill that runs a job, time in the queue included. Drills on nodes have their own (node_drills)."""
State = Drill.DrillState


def advance() -> None:
    """Advance every game day that is not over by one step, and clear what earlier ones left."""
    for game_day in GameDay.objects.active().select_related("started_by", "project").order_by("pk")[:20]:
        try:
            _advance(game_day)
        except Exception:
            logger.exception("%s failed in this tick", game_day)
    clear_leftovers()


def _advance(game_day: GameDay) -> None:
    running = game_day.drills.filter(state=State.RUNNING).select_related("job__latest").first()
    if running is not None and FAULTS[running.fault].is_node_fault:
        node_drills.follow(game_day, running)
    elif running is not None:
        _follow(game_day, running)
    elif game_day.cancel_requested_at is not None:
        _end(game_day, "Cancelled.")
    elif (drill := game_day.drills.filter(state=State.WAITING).first()) is None:
        _end(game_day, "")
    elif FAULTS[drill.fault].is_node_fault:
        node_drills.begin(game_day, drill)
    else:
        _submit(game_day, drill)


def _submit(game_day: GameDay, drill: Drill) -> None:
    if game_day.started_by is None:
        _end(game_day, "The account of the person who started it was deleted.")
        return
    try:
        job = submit_drill(game_day.started_by, drill)
    except JobError as error:
        _end(game_day, f"Its job was refused: {error}")
        return
    waiting = Drill.objects.filter(pk=drill.pk, state=State.WAITING)
    waiting.update(state=State.RUNNING, job=job, submitted_at=timezone.now())


def _follow(game_day: GameDay, drill: Drill) -> None:
    job = drill.job
    if job is None:
        store(drill, State.FAILED, "Its job was deleted.")
    elif _has_ended(job):
        drill.game_day = game_day
        _judge(drill)
    elif game_day.cancel_requested_at is not None:
        _give_up(game_day, drill, job, State.NOT_TRIED, "Cancelled.")
    elif drill.submitted_at is not None and timezone.now() - drill.submitted_at > MAX_JOB_DRILL_DURATION:
        limit = formatting.duration(MAX_JOB_DRILL_DURATION.total_seconds())
        _give_up(game_day, drill, job, State.FAILED, f"It had not ended after {limit}.")


def _judge(drill: Drill) -> None:
    try:
        judge(drill)
    except database.ERRORS:
        raise
    except Exception:  # it would fail in every tick, and the game day would never end
        logger.exception("%s cannot be judged", drill)
        store(drill, State.FAILED, "Its results cannot be read: see the worker's log.")
    else:
        store(drill, State(drill.state), drill.detail)


def _has_ended(job: Job) -> bool:
    """Return whether no attempt follows and all reports are in."""
    latest = job.latest
    return latest is not None and latest.decided_at is not None and latest.closed_at is not None


def _give_up(game_day: GameDay, drill: Drill, job: Job, state: Drill.DrillState, why: str) -> None:
    """Cancel the drill's job, then end the drill. The job is the portal's, so its owner needs no permission for that.

    An attempt that the follower creates at the same moment is cancelled in the next tick.
    """
    unfinished = job.attempts.filter(Q(ended_at=None) | Q(decided_at=None), cancel_asked_at=None)
    unfinished.update(cancel_asked_at=timezone.now(), cancel_asked_by=game_day.started_by)
    if not unfinished.exists():
        store(drill, state, why)


def _end(game_day: GameDay, problem: str) -> None:
    waiting: QuerySet[Drill] = game_day.drills.filter(state=State.WAITING)
    waiting.update(state=State.NOT_TRIED, detail=problem)
    GameDay.objects.active().filter(pk=game_day.pk).update(ended_at=timezone.now(), problem=problem)
