"""The follower: one tick every two seconds by whoever holds the lease. Everything that is due is found in the database.

    poll      scheduler states → attempt states (poll)
    release   jobs that are held, and are to start (releases)
    cancel    asked → signalled → killed, a step a tick (cancels); what came too late (strays)
    give back what has ended and still holds its nodes (leftover_allocations)
    settle    what ended: collect, decide, close (ending)
    submit    what no scheduler has yet (handover; sweeps: arrays)
Nothing here may take long: a tick that is cut short goes on with the next one. A scheduler that did not answer the poll
is not asked anything else in that tick, and nothing is concluded from its silence.
"""

from __future__ import annotations

import json
import time
from functools import partial

from django.db.models import Q

from jobs import allocations, lease
from jobs.disk import folders, pins, rundir, tokens
from jobs.disk.prepare import chosen_start
from jobs.following import (
    arrays,
    attached,
    cancels,
    dependencies,
    ending,
    handover,
    held_launches,
    leftover_allocations,
    releases,
    steps,
    strays,
)
from jobs.following.idle import has_orders, is_idle
from jobs.following.poll import Poll
from jobs.following.tick import TickContext, logger
from jobs.lease import LeaseLost
from jobs.models import Attempt, Job
from nodes.cluster import drain, sync
from nodes.schedulers.base import Scheduler, SchedulerError

FOLDERS_S = 1.0  # a tick's budget for each part that may have much to do, so that none keeps the others waiting
SUBMIT_S = 2.0
ARRAY_S = 1.5  # for sweeps: their run directories are many
SETTLE_S = 2.5
COLLECT_S = 1.0  # of that, for one attempt


def is_needed() -> bool:
    """Whether a tick would find anything to do. Where not, nothing is locked or asked."""
    return not is_idle() or has_orders() or sync.is_due()


def tick(scheduler: Scheduler | None = None) -> bool:
    """One tick, if nobody else is at it; whether it was us."""
    held = lease.take("follow")
    if held is None:
        return False
    try:
        Tick(held, scheduler or sync.scheduler()).run()
    except SchedulerError as error:  # it cannot even be opened: the settings name one that is not there
        logger.warning("nothing is followed: %s", error)
    except LeaseLost:
        logger.warning("lost the lease in the middle of a tick; whoever has it now goes on")
        return True
    held.release()
    return True


class Tick(TickContext):
    """One tick of the follower, under its lease."""

    def run(self) -> None:
        if is_idle():
            self.live_through(self.look_at_cluster, "look_at_cluster")
            return
        ask = (self.poll, self.find_folders, self.cancel, self.give_back)
        for part in (
            *ask,
            self.submit,
            self.settle,
            self.submit,
            self.ask_for_steps,
            self.look_at_nodes,
            self.notify_of_held_launches,
            pins.repair,
        ):
            self.live_through(part, part.__name__)

    def poll(self) -> None:
        Poll(self).run()

    def find_folders(self) -> None:
        """Tie attempts to the folders that their launchers made, and leave a token where there is none yet."""
        until = time.monotonic() + FOLDERS_S
        ours = Attempt.objects.open().exclude(scheduler_id="").exclude(job__kind=Job.ATTACHED)
        there = ours.with_job()
        odd = Q(token_digest="") | ~Q(tailed=tokens.is_tailed())
        for attempt in there.filter(odd, ended_at=None).order_by("?")[:200]:
            if time.monotonic() > until:
                return
            self.live_through(partial(self.leave_token, attempt), f"attempt {attempt.pk}")
        for attempt in there.filter(directory="").exclude(state=Attempt.State.PENDING).order_by("?")[:200]:
            if time.monotonic() > until:
                return
            self.live_through(partial(folders.find_folder, attempt), f"attempt {attempt.pk}")

    def cancel(self) -> None:
        if self.away is None:
            releases.advance(self)
            cancels.advance(self)
            strays.pursue(self)

    def give_back(self) -> None:
        if self.away is None:
            leftover_allocations.give_back(self)

    def leave_token(self, attempt: Attempt) -> None:
        root = folders.root_of(attempt)
        if root is None:
            return
        hint = {"number": attempt.number, "resume": chosen_start(attempt)}
        if attempt.origin == Attempt.Origin.REQUEUED:
            rundir.write(root / "portal" / "attempt.json", json.dumps(hint))
        tokens.leave(attempt)

    def settle(self) -> None:
        """What has ended and is not closed: read its spools, decide what follows, close it. Undecided ones go first."""
        until = time.monotonic() + SETTLE_S
        rows = Attempt.objects.open().exclude(ended_at=None).with_job().select_related("resume_from")
        for attempt in rows.annotate(is_undecided=Q(decided_at=None)).order_by("-is_undecided", "?")[:200]:
            if time.monotonic() > until:
                return
            self.live_through(partial(self._settle, attempt, until), f"attempt {attempt.pk}")

    def submit(self) -> None:
        until = time.monotonic() + SUBMIT_S
        self.live_through(dependencies.look, "jobs that wait for others")
        if self.away is not None:
            return
        for attempt_id in handover.due(arrays=self.scheduler.capabilities.has_arrays):
            if time.monotonic() > until:
                break
            self.held.check()
            self.live_through(partial(handover.hand_over, attempt_id, self.scheduler), f"attempt {attempt_id}")
        until = time.monotonic() + ARRAY_S
        for sweep_id in arrays.due() if self.scheduler.capabilities.has_arrays else ():
            if time.monotonic() > until:
                return
            self.held.check()
            self.live_through(partial(arrays.hand_over, sweep_id, self.scheduler, until=until), f"sweep {sweep_id}")

    def ask_for_steps(self) -> None:
        if self.away is None:
            steps.ask(self)

    def notify_of_held_launches(self) -> None:
        if self.away is None:
            held_launches.notify_people()

    def look_at_nodes(self) -> None:
        if self.away is not None:  # said where people look, without asking once more
            drain.put_off(self.away)
            sync.miss(self.away)
            return
        if self.look_at_cluster():
            attached.describe(self)

    def look_at_cluster(self) -> bool:
        """Whether anything of it was read anew."""
        if has_orders():
            drain.carry_out(self.scheduler)
        is_new = sync.sync(self.scheduler)
        if is_new:
            self.live_through(allocations.hold, "allocations.hold")
        return is_new

    def _settle(self, attempt: Attempt, until: float) -> None:
        if ending.is_collecting_due(attempt):
            ending.collect(attempt, until=min(until, time.monotonic() + COLLECT_S))
        attempt.refresh_from_db(fields=["last_report_at", "decided_at", "cancel_asked_at"])
        if attempt.decided_at is None and ending.may_decide(attempt):
            with self.held.writing():
                ending.follow_up(attempt)
        if ending.nothing_can_come(attempt):
            with self.held.writing():
                ending.close(attempt)
