"""The follower: one tick every two seconds by whoever holds the lease. Everything that is due is found in the database.

    poll      scheduler states → attempt states, by conditional updates; a requeue becomes an attempt of its own
    cancel    asked → signalled → killed, a step a tick
    settle    what ended: sweep, decide, close
    submit    what no scheduler has yet
Nothing here may take long: a tick that is cut short goes on with the next one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from django.db.models import F
from django.utils import timezone

from jobs import after, ending, handover, lease, live, pins, rundir, tokens
from jobs.lease import Held, LeaseLost
from jobs.models import Attempt
from jobs.restart import Ended, next_attempt
from jobs.script import grace_of
from nodes import inventory, orders
from nodes.schedulers.base import UNKNOWN, JobStatus, Scheduler, SchedulerError

logger = logging.getLogger(__name__)

UNKNOWN_FOR = timedelta(seconds=60)  # before a scheduler that does not know a job is believed
LAUNCHER_WAIT = timedelta(seconds=15)  # beyond the grace: the launcher kills and reports in good order first
KILL_AGAIN = timedelta(seconds=10)
SUBMIT_S = 2.0  # a tick's budget for each part that may have much to do, so that neither keeps the other waiting
SETTLE_S = 2.5
SWEEP_S = 1.0  # of that, for one attempt


def tick(scheduler: Scheduler | None = None) -> bool:
    """One round, if nobody else is at it; whether it was us."""
    held = lease.take("follow")
    if held is None:
        return False
    try:
        Tick(held, scheduler or inventory.scheduler()).run()
    except SchedulerError as error:  # it cannot even be opened: the settings name one that is not there
        logger.warning("nothing is followed: %s", error)
    except LeaseLost:
        logger.warning("lost the lease in the middle of a tick; whoever has it now goes on")
        return True
    held.release()
    return True


class Tick:
    """One round of the follower, under its lease."""

    def __init__(self, held: Held, scheduler: Scheduler) -> None:
        self.held, self.scheduler = held, scheduler

    def run(self) -> None:
        ask = (self.poll, self.find_folders, self.cancel)
        for part in (*ask, self.submit, self.settle, self.submit, self.look_at_nodes, pins.repair):
            self._live_through(part, part.__name__)

    def poll(self) -> None:
        """Ask the scheduler about everything that has not ended."""
        following = Attempt.objects.alive().exclude(scheduler_id="").with_job().select_related("cancel_asked_by")
        attempts = list(following.order_by("id"))
        if not attempts:
            return
        statuses = self.scheduler.status(sorted({attempt.scheduler_id for attempt in attempts}))
        for attempt in attempts:
            status = statuses.get(attempt.scheduler_id)
            self._live_through(partial(self.apply, attempt, status), f"attempt {attempt.pk}")

    def apply(self, attempt: Attempt, status: JobStatus | None) -> None:
        """Bring one attempt in step with what the scheduler says of it."""
        if status is None:
            self.miss(attempt)
            return
        if not handover.is_of(attempt, status):  # not ours to cancel either
            self._lose(attempt, f"The scheduler's job {attempt.scheduler_id} is another one: it counts anew.")
            return
        if attempt.unknown_since is not None:
            self._note(attempt, unknown_since=None)
        if status.state == UNKNOWN:
            return
        if status.restart_count > attempt.scheduler_restart_count:
            following = self.requeued(attempt, status)
            if following is not None:
                self.apply(following, status)
        elif status.state in Attempt.ALIVE:
            self._move(attempt, status)
        else:
            self._move(attempt, status, keep_state=True)
            ended = Ended(
                status.state,
                status.exit_code,
                status.signal,
                ending.result_of(attempt),
                cancelled=attempt.cancel_asked_at is not None,
            )
            self._end(attempt, ended, reason=status.reason, at=status.ended_at)

    def miss(self, attempt: Attempt) -> None:
        """The scheduler's answer is without this job: believed once that has lasted."""
        now = timezone.now()
        if attempt.unknown_since is None:
            self._note(attempt, unknown_since=now)
        elif now - attempt.unknown_since > UNKNOWN_FOR:
            try:  # should it live on unseen: nothing is started beside it
                self.scheduler.cancel(attempt.scheduler_id, user=attempt.scheduler_user)
            except SchedulerError as error:
                if not error.permanent:  # "there is no such job" is what was to be expected
                    raise
            self._lose(attempt, f"The scheduler does not know its job {attempt.scheduler_id} any more.")

    def requeued(self, attempt: Attempt, status: JobStatus) -> Attempt | None:
        """The scheduler has started the same job anew: this attempt has ended, and there is a next one."""
        ended = Ended(status.before or "requeued", result=ending.result_of(attempt))
        following = None
        with self.held.writing():
            now = timezone.now()
            text = f"Requeued by the scheduler; it goes on as attempt {attempt.number + 1}."
            if not ending.end(attempt, ended, decided_at=now, decision=text):
                return None
            # Read under the row's lock: whoever asks later finds this attempt decided, and asks for the next one's end.
            attempt.refresh_from_db(fields=["cancel_asked_at", "cancel_asked_by"])
            following = next_attempt(attempt, Attempt.Origin.REQUEUED)
            following.scheduler_id = attempt.scheduler_id
            following.scheduler_user = attempt.scheduler_user
            following.scheduler_restart_count = attempt.scheduler_restart_count + 1
            following.submitting_at = following.submitted_at = now
            following.cancel_asked_at = attempt.cancel_asked_at  # who wanted the end wants it still
            following.cancel_asked_by = attempt.cancel_asked_by
            following.save()
            live.announce(following.pk)
        return following

    def find_folders(self) -> None:
        """Tie attempts to the folders that their launchers made, and leave a token where there is none yet."""
        open_ones = Attempt.objects.open().exclude(scheduler_id="").with_job()
        for attempt in open_ones.filter(token_digest="", ended_at=None):
            self._live_through(partial(self.leave_token, attempt), f"attempt {attempt.pk}")
        for attempt in open_ones.filter(directory="").exclude(state=Attempt.State.PENDING):
            self._live_through(partial(ending.find_folder, attempt), f"attempt {attempt.pk}")

    def leave_token(self, attempt: Attempt) -> None:
        root = ending.root_of(attempt)
        if root is None:
            return
        hint = {"number": attempt.number, "resume": None}
        if attempt.origin == Attempt.Origin.REQUEUED:
            rundir.write(root / "portal" / "attempt.json", json.dumps(hint))
        tokens.leave(attempt)

    def cancel(self) -> None:
        """Take each cancelling one step further."""
        asked = Attempt.objects.alive().exclude(scheduler_id="").exclude(cancel_asked_at=None)
        for attempt in asked.with_job():
            self._live_through(partial(self.advance_cancel, attempt), f"attempt {attempt.pk}")

    def advance_cancel(self, attempt: Attempt) -> None:
        now = timezone.now()
        if attempt.state == Attempt.State.PENDING:
            if attempt.cancel_killed_at is None or now - attempt.cancel_killed_at > KILL_AGAIN:
                self._kill(attempt, now)
        elif attempt.cancel_signalled_at is None:
            root = ending.root_of(attempt)
            if root is not None:  # batch.sh does not ask to be requeued, the launcher says why it stopped
                rundir.write(root / "portal" / "cancelled", now.isoformat())
            self.scheduler.signal(attempt.scheduler_id, "TERM", user=attempt.scheduler_user)
            self._note(attempt, cancel_signalled_at=now)
        elif attempt.cancel_killed_at is None:
            grace = timedelta(seconds=grace_of(attempt)) + LAUNCHER_WAIT
            if now - attempt.cancel_signalled_at > grace:
                self._kill(attempt, now)
        elif now - attempt.cancel_killed_at > KILL_AGAIN:
            self._kill(attempt, now)

    def settle(self) -> None:
        """What has ended and is not closed: read its spools, decide what follows, close it. Undecided ones go first."""
        until = time.monotonic() + SETTLE_S
        rows = Attempt.objects.open().exclude(ended_at=None).with_job().select_related("resume_from")
        for attempt in rows.order_by(F("decided_at").asc(nulls_first=True), "ended_at")[:200]:
            if time.monotonic() > until:
                return
            self._live_through(partial(self._settle, attempt, until), f"attempt {attempt.pk}")

    def submit(self) -> None:
        until = time.monotonic() + SUBMIT_S
        self._live_through(after.look, "jobs that wait for others")
        for attempt_id in handover.due():
            if time.monotonic() > until:
                return
            with self.held.writing():  # still ours? then ask
                pass
            self._live_through(partial(handover.hand_over, attempt_id, self.scheduler), f"attempt {attempt_id}")

    def look_at_nodes(self) -> None:
        orders.carry_out(self.scheduler)
        if inventory.is_due():
            inventory.sync(self.scheduler)

    def _settle(self, attempt: Attempt, until: float) -> None:
        if ending.is_sweep_due(attempt):
            ending.sweep(attempt, until=min(until, time.monotonic() + SWEEP_S))
        attempt.refresh_from_db(fields=["last_report_at", "decided_at", "cancel_asked_at"])
        if attempt.decided_at is None and ending.may_decide(attempt):
            with self.held.writing():
                ending.follow_up(attempt)
        if ending.nothing_can_come(attempt):
            with self.held.writing():
                ending.close(attempt)

    def _move(self, attempt: Attempt, status: JobStatus, *, keep_state: bool = False) -> None:
        """State, nodes, start and reason of one that lives; nothing is written when nothing changed."""
        told: dict[str, Any] = {"nodes": list(status.nodes) or attempt.nodes, "started_at": _time(status.started_at)}
        if not keep_state:
            told |= {"state": status.state, "reason": status.reason}
        changes = {name: value for name, value in told.items() if value != getattr(attempt, name)}
        if not changes or (keep_state and changes.keys() == {"started_at"} and not told["started_at"]):
            return
        with self.held.writing():
            rows = Attempt.objects.filter(pk=attempt.pk, state=attempt.state, ended_at=None)
            if rows.update(**changes) != 1:
                return
            live.announce(attempt.pk)
        if "state" in changes:
            logger.info("attempt %s: %s → %s", attempt.pk, attempt.state, status.state)
        for name, value in changes.items():
            setattr(attempt, name, value)

    def _end(self, attempt: Attempt, ended: Ended, *, reason: str = "", at: float | None = None) -> None:
        with self.held.writing():
            ending.end(attempt, ended, reason=reason, at=at)

    def _lose(self, attempt: Attempt, reason: str) -> None:
        """The end of one that the scheduler has nothing to say of, unless its launcher had a last word."""
        ended = Ended.untold(ending.result_of(attempt), cancelled=attempt.cancel_asked_at is not None)
        self._end(attempt, ended, reason="" if ended.result or ended.cancelled else reason)

    def _kill(self, attempt: Attempt, now: datetime) -> None:
        self.scheduler.cancel(attempt.scheduler_id, user=attempt.scheduler_user)
        self._note(attempt, cancel_killed_at=now)

    def _note(self, attempt: Attempt, **changes: datetime | None) -> None:
        with self.held.writing():
            Attempt.objects.filter(pk=attempt.pk, ended_at=None).update(**changes)
            live.announce(attempt.pk)

    def _live_through(self, part: Callable[[], object], name: str) -> None:
        """One thing that fails must not keep the others from being followed; the next tick tries it again."""
        try:
            part()
        except LeaseLost:
            raise
        except SchedulerError as error:
            logger.warning("%s: %s", name, error)
        except Exception:
            logger.exception("%s failed in this tick", name)


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
