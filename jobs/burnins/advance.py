"""Advance burn-ins by one step a tick. The state is in the database, and every step may be repeated after a crash.

    waiting     reserve the nodes; wait until no job runs on them
    starting    undrain them inside the reservation, where others stay out, made again if somebody deleted it;
                submit the tests
    running     store results as they are made, until the scheduler reports the end; then judge
    returning   drain what failed, leave in service what passed, drain again what was drained and has no verdict;
                remove the reservation last, so that no job starts in between
    ended

Slurm starts nothing on a drained node, in a reservation or not, hence this order. Only the follower calls this, under
its lease; a step that needs the scheduler and does not get it is tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import transaction
from django.utils import timezone

from jobs.burnins import results, returning, submission, verdicts
from jobs.burnins.start import maintenance_text
from jobs.disk import rundir
from jobs.errors import JobError
from jobs.lease import ActiveLease
from nodes.burnin import plan
from nodes.cluster import drain, sync
from nodes.health.requesters import BURN_IN
from nodes.models import BurnIn, BurnInNode, Node, NodeOrder, Reading
from nodes.schedulers.base import ENDED, UNKNOWN, JobStatus, Scheduler, SchedulerError
from vigil_core import formatting

logger = logging.getLogger(__name__)

BUDGET_S = 2.0  # per tick
MAX_PER_TICK = 50
RETRY_AFTER = timedelta(seconds=10)  # before a call to the scheduler that failed is repeated
WAIT_FOR_JOBS = timedelta(days=7)  # the reservation lasts so long beyond the tests
MISSING_FOR = timedelta(seconds=60)  # before a job that the scheduler does not know counts as lost
UNKNOWN_STATE_FOR = timedelta(minutes=10)  # before a job counts as over whose state the scheduler does not know
LATE_RESULTS = timedelta(seconds=20)  # after its end: shared file systems show new lines late
LATE_BACKLOG = timedelta(hours=1)  # the same, while not all of what is there was read
BACKLOG_S = 5.0  # per tick, to read it
LOST = frozenset({"node_fail", "boot_fail"})
State = BurnIn.BurnInState


def scheduler_ids() -> set[str]:
    """Return the ids of jobs whose status `advance` needs."""
    rows = BurnIn.objects.filter(state=State.RUNNING).exclude(scheduler_id="")
    return set(rows.values_list("scheduler_id", flat=True))


def advance(lease: ActiveLease, scheduler: Scheduler, statuses: Mapping[str, JobStatus] | None) -> None:
    """Advance burn-ins that are not over. `statuses` is None if the scheduler did not answer in this tick.

    If there are more than a tick handles, chance decides, so that none waits for the end of others.
    """
    until = time.monotonic() + BUDGET_S
    burn_ins = list(BurnIn.objects.active().order_by("?")[:MAX_PER_TICK])
    for burn_in in burn_ins:
        if time.monotonic() > until:
            return
        lease.check()
        try:
            seconds = BUDGET_S / len(burn_ins) if burn_in.job_ended_at is None else BACKLOG_S
            _Step(burn_in, scheduler, statuses, read_until=time.monotonic() + seconds).run()
        except (SchedulerError, JobError, OSError) as error:
            _record_failure(burn_in, error)
        except Exception:
            logger.exception("%s failed in this tick", burn_in)


def _record_failure(burn_in: BurnIn, error: Exception) -> None:
    """Keep a burn-in that could not be advanced; end it where trying again cannot help."""
    text = str(error)
    is_permanent = isinstance(error, JobError) or (isinstance(error, SchedulerError) and error.permanent)
    if is_permanent and burn_in.state in (State.WAITING, State.STARTING):
        _end_early(burn_in, text)
        return
    logger.warning("%s: %s", burn_in, text)
    BurnIn.objects.filter(pk=burn_in.pk).update(detail=text, tried_at=timezone.now())


def _end_early(burn_in: BurnIn, problem: str) -> None:
    """Go on with returning the nodes, without results."""
    rows = BurnIn.objects.filter(pk=burn_in.pk, state=burn_in.state)
    rows.update(state=State.RETURNING, problem=problem, detail="", tried_at=None)


@dataclass(frozen=True)
class _Step:
    burn_in: BurnIn
    scheduler: Scheduler
    statuses: Mapping[str, JobStatus] | None
    read_until: float
    """By the monotonic clock: no results are read after it."""

    def run(self) -> None:
        if self._waits_to_retry():
            return
        {
            State.WAITING: self._wait,
            State.STARTING: self._start,
            State.RUNNING: self._follow,
            State.RETURNING: self._return,
        }[State(self.burn_in.state)]()

    def _waits_to_retry(self) -> bool:
        tried_at = self.burn_in.tried_at
        if self.burn_in.state == State.RUNNING or tried_at is None:
            return False
        return timezone.now() - RETRY_AFTER < tried_at <= timezone.now()

    def _wait(self) -> None:
        if self.burn_in.cancel_requested_at is not None:
            _end_early(self.burn_in, "Cancelled before it started.")
            return
        if self.statuses is None:
            return
        nodes = self._nodes()
        if problem := self._obstacle(nodes):
            _end_early(self.burn_in, problem)
            return
        if self.burn_in.reserved_at is None:
            self._reserve()
            self._set(reserved_at=timezone.now(), detail="Waits for the scheduler to report its nodes.", tried_at=None)
            sync.hurry(Reading.Part.NODES)
        elif sync.nodes_read_since(self.burn_in.reserved_at):
            busy = [node.name for node in nodes if node.has_jobs]
            if busy:
                self._set_detail(f"Waits for jobs on {formatting.listed(busy[:8])} to end.")
            else:
                self._move(State.STARTING, detail="")

    def _reserve(self) -> str:
        """Reserve the nodes unless they are reserved, and return the reservation's name."""
        name, names = self._reservation(), submission.names(self.burn_in)
        longest = plan.time_limit_s(self.burn_in.seconds, len(names))
        self.scheduler.reserve(name, names, seconds=longest + int(WAIT_FOR_JOBS.total_seconds()))
        return name

    def _reservation(self) -> str:
        """Return the reservation's name; earlier versions reserved the same nodes under one without the time."""
        earlier, names = f"vigil_burnin_{self.burn_in.pk}", set(submission.names(self.burn_in))
        listed = self.scheduler.reservations()
        is_earlier = any(found.name == earlier and set(found.nodes) == names for found in listed)
        return earlier if is_earlier else self.burn_in.reservation

    def _nodes(self) -> list[Node]:
        return list(Node.objects.filter(name__in=submission.names(self.burn_in)).order_by("name"))

    def _obstacle(self, nodes: Sequence[Node]) -> str:
        """Return why the tests can no longer start on these nodes; "" if they can."""
        if missing := set(submission.names(self.burn_in)) - {node.name for node in nodes}:
            return f"The scheduler no longer knows {formatting.listed(sorted(missing)[:8])}."
        if in_maintenance := maintenance_text(submission.names(self.burn_in)):
            return in_maintenance
        reserved_at = self.burn_in.reserved_at
        if reserved_at is not None and timezone.now() - reserved_at > WAIT_FOR_JOBS:
            return f"The tests could not start within {WAIT_FOR_JOBS.days} days."
        return ""

    def _obstacle_after_undrain(self) -> str:
        """Return the same once all nodes were undrained."""
        nodes = self._nodes()
        drained = next((f"{node} was drained meanwhile: {node.reason}" for node in nodes if node.is_drained), "")
        return self._obstacle(nodes) or drained

    def _start(self) -> None:
        if self.statuses is None:
            return
        if self.burn_in.scheduler_id == "" and self.burn_in.submitting_at is not None:
            existing_id = self.scheduler.find(self.burn_in.key, user=sync.service_user())
            if existing_id is not None:
                self._set(scheduler_id=existing_id)
                self._move(State.RUNNING, detail="")
                return
        if self.burn_in.cancel_requested_at is not None:
            _end_early(self.burn_in, "Cancelled before it started.")
            return
        if problem := self._obstacle(self._nodes()):
            _end_early(self.burn_in, problem)
            return
        if not self._are_undrained():
            return
        if problem := self._obstacle_after_undrain():
            _end_early(self.burn_in, problem)
            return
        reservation = self._reserve()
        request = submission.submission(self.burn_in, submission.prepare(self.burn_in), reservation)
        if not submission.claim(self.burn_in):
            self._set_detail("Waits until it is known whether the scheduler accepted the tests.")
            return
        self._set(scheduler_id=self.scheduler.submit(request))
        self._move(State.RUNNING, detail="")

    def _are_undrained(self) -> bool:
        """Order to undrain the nodes that were drained; return whether all are undrained now."""
        for row in self.burn_in.nodes.filter(was_drained=True).select_related("undrain_order"):
            order = row.undrain_order or self._order_undrain(row)
            if order is None:
                return False
            if order.is_open:
                self._set_detail(f"Waits for the scheduler to undrain {row.node}.")
                return False
            if order.state != NodeOrder.State.DONE:
                _end_early(self.burn_in, f"{row.node} was not undrained: {order.outcome or order.get_state_display()}")
                return False
            node = Node.objects.get(name=row.node)
            if not sync.nodes_read_since(order.ended_at):
                self._set_detail(f"Waits for the scheduler to report {row.node}.")
                return False
            if node.is_drained:
                _end_early(self.burn_in, f"{row.node} was drained again: {node.reason}")
                return False
        return True

    def _order_undrain(self, row: BurnInNode) -> NodeOrder | None:
        node = Node.objects.get(name=row.node)
        if not node.is_drained:  # somebody undrained it meanwhile
            BurnInNode.objects.filter(pk=row.pk).update(was_drained=False)
            return None
        if node.reason != row.earlier_reason:
            _end_early(self.burn_in, f"{row.node} has another reason to be drained by now: {node.reason}")
            return None
        self._reserve()  # somebody may have deleted the reservation meanwhile, and others' jobs would start
        try:
            with transaction.atomic():
                order = drain.request_order(None, node, NodeOrder.Action.UNDRAIN, replaces=node.reason, rule=BURN_IN)
                BurnInNode.objects.filter(pk=row.pk).update(undrain_order=order)
        except (drain.OrderedByPerson, drain.NodeGone) as error:
            _end_early(self.burn_in, str(error))
            return None
        return order

    def _follow(self) -> None:
        is_all_read = results.read_results(self.burn_in, self.read_until)
        if self.burn_in.job_ended_at is not None:
            self._judge_if_complete(is_all_read)
            return
        if self.statuses is None:
            return
        status = self.statuses.get(self.burn_in.scheduler_id)
        if status is None or status.state == UNKNOWN:
            self._handle_unknown(status)
        elif self.burn_in.unknown_since is not None:
            self._set(unknown_since=None)
        if status is None or self.burn_in.job_ended_at is not None:
            return
        if status.state in ENDED:
            self._note_end(status)
        elif problem := self._stop_reason(status):
            self._stop(status, problem)
        elif status.started_at is not None and self.burn_in.started_at is None:
            self._set(started_at=datetime.fromtimestamp(status.started_at, UTC), detail="", tried_at=None)
        elif status.started_at is None and status.state != UNKNOWN:
            self._set_detail(f"Waits for the scheduler to start it{f': {status.reason}' if status.reason else ''}.")

    def _handle_unknown(self, status: JobStatus | None) -> None:
        """End the tests if the scheduler does not know the job, or its state, for a while."""
        now, job = timezone.now(), self.burn_in.scheduler_id
        since = self.burn_in.unknown_since
        if since is None:
            self._set(unknown_since=now)
        elif status is None and now - since > MISSING_FOR:
            self._set(job_ended_at=now, problem=f"The scheduler does not know job {job}.")
        elif status is not None and now - since > UNKNOWN_STATE_FOR:
            with suppress(SchedulerError):
                self.scheduler.cancel(job, user=sync.service_user())
            self._set(job_ended_at=now, problem=f"The scheduler no longer reports the state of job {job}.")

    def _stop_reason(self, status: JobStatus) -> str:
        """Return why the job must be cancelled; "" if it goes on."""
        if self.burn_in.cancel_requested_at:
            return "Cancelled."
        if status.restart_count:
            return "A node failed, so the scheduler requeued it."
        has_started = self.burn_in.started_at is not None or status.started_at is not None
        return self.burn_in.problem or ("" if has_started else self._obstacle_after_undrain())

    def _stop(self, status: JobStatus, problem: str) -> None:
        """Cancel the job: a person wants it, Slurm requeued it because a node failed, or it cannot start any more."""
        lost = status.previous_nodes if status.restart_count and len(status.previous_nodes) == 1 else ()
        verdicts.mark_lost(self.burn_in.nodes.filter(node__in=lost))
        if self.burn_in.problem != problem:
            self._set(problem=problem)
        if self.burn_in.tried_at is None or timezone.now() - self.burn_in.tried_at > RETRY_AFTER:
            self._set(tried_at=timezone.now())
            self.scheduler.cancel(self.burn_in.scheduler_id, user=sync.service_user())

    def _note_end(self, status: JobStatus) -> None:
        problem = self.burn_in.problem or ("" if status.state == "completed" else verdicts.end_text(status))
        if status.state in LOST and self.burn_in.nodes.count() == 1:
            verdicts.mark_lost(self.burn_in.nodes.all())
        started = self.burn_in.started_at or (
            datetime.fromtimestamp(status.started_at, UTC) if status.started_at else None
        )
        self._set(job_ended_at=timezone.now(), problem=problem, started_at=started, tried_at=None, detail="")

    def _judge_if_complete(self, is_all_read: bool) -> None:
        ended_at = self.burn_in.job_ended_at or timezone.now()
        is_complete = not self.burn_in.nodes.filter(has_ended=False).exists()
        patience = LATE_RESULTS if is_all_read else LATE_BACKLOG
        if not is_complete and ended_at <= timezone.now() < ended_at + patience:
            return
        log, found = _end_of_log(self.burn_in), verdicts.verdicts_of(self.burn_in)
        with transaction.atomic():
            if self._move(State.RETURNING, detail="", log=log):
                verdicts.store(self.burn_in, found)

    def _return(self) -> None:
        if waits_for := returning.order_all(self.burn_in, BURN_IN):
            self._set_detail(waits_for)
            return
        if self.statuses is None:
            return
        if self.burn_in.scheduler_id == "" and self.burn_in.submitting_at is not None:
            existing_id = self.scheduler.find(self.burn_in.key, user=sync.service_user())
            if existing_id is not None:  # submitted just before the worker was killed
                self.scheduler.cancel(existing_id, user=sync.service_user())
        self.scheduler.unreserve(self._reservation())
        sync.hurry(Reading.Part.RESERVATIONS)
        sync.hurry(Reading.Part.NODES)
        returning.finish(self.burn_in)

    def _set_detail(self, detail: str) -> None:
        if self.burn_in.detail != detail:
            self._set(detail=detail)

    def _set(self, **changes: object) -> None:
        BurnIn.objects.filter(pk=self.burn_in.pk).update(**changes)
        for name, value in changes.items():
            setattr(self.burn_in, name, value)

    def _move(self, state: State, **changes: object) -> bool:
        """Change the state, and return whether this call did."""
        rows = BurnIn.objects.filter(pk=self.burn_in.pk, state=self.burn_in.state)
        if not rows.update(state=state, tried_at=None, **changes):
            return False
        self.burn_in.state = state
        logger.info("%s: %s", self.burn_in, state)
        return True


def _end_of_log(burn_in: BurnIn) -> str:
    try:
        data = rundir.read_under(rundir.path_of(burn_in.directory), "job/batch.log", limit=1 << 22)
    except OSError:
        return ""
    text = data[-4_000:].decode(errors="replace")
    return "".join(letter for letter in text if letter.isprintable() or letter == "\n")
