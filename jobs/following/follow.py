"""Run the follower: one tick every two seconds by the holder of the lease, with all due work read from the database.

    poll      scheduler states → attempt states (poll)
    release   held jobs for which somebody requested it (releases)
    cancel    requested → signalled → killed, a step a tick (cancels); submissions that came too late (strays)
    give back allocations whose job has ended (leftover_allocations)
    settle    attempts that ended: collect, decide, close (ending)
    submit    attempts that no scheduler has yet (handover; sweeps: arrays)
    burn-ins  a step of each that is not over (jobs.burnins.advance)
Nothing here may take long: a tick that is cut short continues in the next one. A scheduler that did not answer the poll
gets no other call in that tick, and nothing is concluded from its silence.
"""

from __future__ import annotations

import json
import time
from functools import partial

from django.db.models import Q

from jobs import allocations, lease
from jobs.burnins import advance as burn_ins
from jobs.disk import folders, pins, rundir, tokens
from jobs.disk.prepare import chosen_start
from jobs.following import attached, ending, slurm_steps
from jobs.following.cancellation import cancels, leftover_allocations, strays
from jobs.following.held_jobs import held_launches, releases
from jobs.following.idle import has_orders, is_idle
from jobs.following.poll import Poll
from jobs.following.submission import arrays, dependencies, handover
from jobs.following.tick_context import TickContext, logger
from jobs.lease import LeaseLost
from jobs.models import Attempt, Job
from nodes.cluster import drain, sync
from nodes.drains import reservations
from nodes.schedulers.base import Scheduler, SchedulerError

FOLDERS_S = 1.0  # budget per tick for each part that may have much to do, so that none delays the others
SUBMIT_S = 2.0
ARRAY_S = 1.5  # for sweeps: their run directories are many
SETTLE_S = 2.5
COLLECT_S = 1.0  # of that, for one attempt


def is_needed() -> bool:
    """Return whether a tick would find anything to do. If not, nothing is locked or queried."""
    return not is_idle() or has_orders() or sync.is_due()


def tick(scheduler: Scheduler | None = None) -> bool:
    """Run one tick unless another process holds the lease. Return whether this process ran it."""
    active = lease.take("follow")
    if active is None:
        return False
    try:
        Tick(active, scheduler or sync.scheduler()).run()
    except SchedulerError as error:  # the settings name an unknown scheduler
        logger.warning("no job is followed, because the scheduler cannot be opened: %s", error)
    except LeaseLost:
        logger.warning("lost the lease in the middle of a tick; the process that has it now continues")
        return True
    active.release()
    return True


class Tick(TickContext):
    """A tick of the follower, under its lease."""

    def run(self) -> None:
        if is_idle():
            self.run_isolated(self.sync_cluster, "sync_cluster")
            return
        scheduler_parts = (self.poll, self.find_folders, self.cancel, self.give_back)
        for part in (
            *scheduler_parts,
            self.submit,
            self.settle,
            self.submit,
            self.fetch_steps,
            self.advance_burn_ins,
            self.sync_nodes,
            self.notify_of_launch_failures,
            pins.repair,
        ):
            self.run_isolated(part, part.__name__)

    def poll(self) -> None:
        Poll(self).run()

    def find_folders(self) -> None:
        """Link attempts to the folders that their launchers made, and leave a token where there is none yet."""
        until = time.monotonic() + FOLDERS_S
        ours = Attempt.objects.open().exclude(scheduler_id="").exclude(job__kind=Job.ATTACHED)
        there = ours.with_job()
        needs_token = Q(token_digest="") | ~Q(tailed=tokens.is_tailed())
        for attempt in there.filter(needs_token, ended_at=None).order_by("?")[:200]:
            if time.monotonic() > until:
                return
            self.run_isolated(partial(self.leave_token, attempt), f"attempt {attempt.pk}")
        for attempt in there.filter(directory="").exclude(state=Attempt.State.PENDING).order_by("?")[:200]:
            if time.monotonic() > until:
                return
            self.run_isolated(partial(folders.find_folder, attempt), f"attempt {attempt.pk}")

    def cancel(self) -> None:
        if self.outage is None:
            releases.advance(self)
            cancels.advance(self)
            strays.cancel_due(self)

    def give_back(self) -> None:
        if self.outage is None:
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
        """Read the spools of ended attempts, decide what follows, close them. Undecided ones go first."""
        until = time.monotonic() + SETTLE_S
        rows = Attempt.objects.open().exclude(ended_at=None).with_job().select_related("resume_from")
        for attempt in rows.annotate(is_undecided=Q(decided_at=None)).order_by("-is_undecided", "?")[:200]:
            if time.monotonic() > until:
                return
            self.run_isolated(partial(self._settle, attempt, until), f"attempt {attempt.pk}")

    def submit(self) -> None:
        until = time.monotonic() + SUBMIT_S
        self.run_isolated(dependencies.advance, "jobs that wait for others")
        if self.outage is not None:
            return
        for attempt_id in handover.due(arrays=self.scheduler.capabilities.has_arrays):
            if time.monotonic() > until:
                break
            self.lease.check()
            self.run_isolated(partial(handover.hand_over, attempt_id, self.scheduler), f"attempt {attempt_id}")
        until = time.monotonic() + ARRAY_S
        for sweep_id in arrays.due() if self.scheduler.capabilities.has_arrays else ():
            if time.monotonic() > until:
                return
            self.lease.check()
            self.run_isolated(partial(arrays.hand_over, sweep_id, self.scheduler, until=until), f"sweep {sweep_id}")

    def fetch_steps(self) -> None:
        if self.outage is None:
            slurm_steps.fetch(self)

    def advance_burn_ins(self) -> None:
        burn_ins.advance(self.lease, self.scheduler, None if self.outage else self.statuses)

    def notify_of_launch_failures(self) -> None:
        if self.outage is None:
            held_launches.notify_people()

    def sync_nodes(self) -> None:
        if self.outage is not None:  # shown on the pages without another call
            drain.note_outage(self.outage)
            sync.note_outage(self.outage)
            return
        if self.sync_cluster():
            attached.describe(self)

    def sync_cluster(self) -> bool:
        """Read the cluster's state if it is due. Return whether anything was read."""
        if has_orders():
            drain.carry_out(self.scheduler)
        is_new = sync.sync(self.scheduler)
        if is_new:
            self.run_isolated(allocations.update, "allocations.update")
            self.run_isolated(partial(reservations.carry_out, self.scheduler), "reservations for maintenance")
        return is_new

    def _settle(self, attempt: Attempt, until: float) -> None:
        if ending.is_collecting_due(attempt):
            ending.collect(attempt, until=min(until, time.monotonic() + COLLECT_S))
        attempt.refresh_from_db(fields=["last_report_at", "decided_at", "cancel_asked_at"])
        if attempt.decided_at is None and ending.may_decide(attempt):
            with self.lease.writing():
                ending.follow_up(attempt)
        if ending.is_closable(attempt):
            with self.lease.writing():
                ending.close(attempt)
