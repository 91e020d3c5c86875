"""Run one node's launcher: start, watch, stop and restart the ranks, and report the end (protocols.md §1, §2, §6)."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from training.attempt.files import DISK_FULL, write_json
from training.attempt.heartbeat import heartbeat_path, read_beat
from training.attempt.lineage import publish_generation, read_generation
from training.launch.attempt import Attempt
from training.launch.capturing import EnvironmentCapture
from training.launch.environment import RankCommand, rank_environment
from training.launch.exits import ExitReport
from training.launch.failures import RankFailure, classify_exit, premature_exit
from training.launch.gpus import GpuMonitor, gpu_names
from training.launch.incarnation import Decision, Ending, Incarnation
from training.launch.leader import FENCED, Leader
from training.launch.members import Members
from training.launch.node_inspection import NodeInspection
from training.launch.outcome import write_exit_code
from training.launch.plan import BAD_PLAN, LaunchPlan
from training.launch.ranks import CannotStart, Rank, descendants, kill_all, reap, start
from training.launch.resources import ResourceMeter
from training.launch.shipping import ShipperProcess
from training.launch.stop import STOP_SIGNALS, AttemptStop, Regroup, Signals
from training.launch.watchdog import Watchdog
from training.manifest import newest_save_seconds
from training.reporting.reporter import Reporter

CAUSE_WAIT_SECONDS = 2.0  # for the rank that really failed to end, when a peer noticed first
POLL_SECONDS = 0.25  # between two readings of the heartbeats
FOLLOWER_POLL_SECONDS = 1.0  # the same for launchers that do not lead; lifelines notify them sooner
DUMP_SECONDS = 2.0
DISK_FULL_SECONDS = 60.0  # for somebody to free space on a full disk, where the launcher must write a file
DISK_FULL_RETRY_SECONDS = 0.5
DEPUTIES = 3  # the first members, who lead in turn: every launcher watches these, the leader watches all


class Launcher:
    def __init__(
        self,
        plan: LaunchPlan,
        attempt: Attempt,
        *,
        command: RankCommand,
        signals: Signals,
        reporter: Reporter,
        log: Callable[[str], None],
    ) -> None:
        self._plan, self._attempt, self._command = plan, attempt, command
        self._signals, self._reporter, self._log = signals, reporter, log
        self._members = Members(attempt.folder / "members", plan)
        self._stop = AttemptStop(attempt.folder, plan.run_dir, plan.exchange_dir)
        self._regroup = Regroup(attempt.folder)
        self._leading = Leader(
            plan,
            attempt,
            self._members,
            stop=self._stop,
            regroup=self._regroup,
            reporter=reporter,
            log=log,
        )
        self._shipping = ShipperProcess(plan, attempt)
        self._capturing = EnvironmentCapture(plan, attempt, command)
        self._ends = ExitReport(plan, attempt)
        self._inspection = NodeInspection(plan, attempt)
        self._meter = ResourceMeter()
        names = gpu_names(plan.gpus_per_node, os.environ.get("CUDA_VISIBLE_DEVICES", "")) if plan.gpus_per_node else []
        self._gpus = GpuMonitor(names, every=plan.sample_seconds, emit=partial(reporter.event, node=plan.node))
        # On the monotonic clock: the wall clock may be set back, and the file server's may be ahead.
        self._began_at = time.monotonic() - max(0.0, time.time() - (attempt.folder / "owner.json").stat().st_mtime)
        self._next_poll = self._grace = 0.0
        self._last_sample = -1
        self._next_sample = time.monotonic() + min(1.0, plan.sample_seconds)
        self._last: Incarnation | None = None
        self._watchdog: Watchdog | None = None
        self._started_at = 0.0
        self._ready_after: float | None = None

    def run(self) -> int:
        """Run every incarnation of this attempt and return its exit code. All started processes have ended by then."""
        try:
            code = self._run()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            self._log(f"the launcher cannot continue: {error}")
            code = 1
        finally:
            self._gpus.close()
            self._capturing.finish()
            self._inspection.finish()
            self._ends.finish()
            kill_all([], spare=self._helper_pids)
            self._reporter.close()
            self._shipping.drain()
        return code

    def _run(self) -> int:
        while True:
            decision = self._await_decision(self._last)
            if isinstance(decision, Ending):
                return self._finish(decision)
            self._last, node_index = decision, decision.node_index(self._members.me)
            if node_index < 0:
                self._log(f"incarnation {decision.number} runs without this node, which stands by")
                continue
            # Claimed before the decision but published only now: the loser of the race must not fence the winner.
            self._retry_while_full(publish_generation, self._plan.job_dir, decision.generation)
            self._retry_while_full(self._members.report_ended, decision.number, self._supervise(decision, node_index))

    # Agreeing on what comes next.

    def _await_decision(self, last: Incarnation | None) -> Decision:
        """Wait until it is decided what follows `last`, and return that; decide it if this launcher leads."""
        number = last.number + 1 if last else 0
        while True:
            self._tick()
            if (decision := self._members.decision(number)) is not None:
                return decision
            if self._members.is_replaced:
                self._log("a later launcher of this node has taken over")
                return Ending(FENCED.to_dict())
            if self._members.leads(last):
                self._retry_while_full(self._leading.decide, last)
                if (decision := self._members.decision(number)) is not None:
                    return decision
            self._wait([], 0.05)

    def _finish(self, ending: Ending) -> int:
        """Write result.json unless another launcher has: the one that decided the end may have died since."""
        if self._members.is_replaced:
            return ending.exit_code
        if not os.path.exists(result := self._attempt.folder / "result.json"):
            with suppress(OSError):  # the exit code is passed on regardless
                self._retry_while_full(write_json, result, ending.result, durable=True)
        write_exit_code(self._plan, ending.exit_code)
        return ending.exit_code

    # Watching.

    def _supervise(self, incarnation: Incarnation, node_index: int) -> list[RankFailure]:
        """Start the ranks, wait until all have ended or end them.

        Return the failures that this launcher did not cause.
        """
        try:
            ranks = self._start(incarnation, node_index)
        except CannotStart as error:
            kill_all([], spare=self._helper_pids)  # ranks that were started before the one that could not be
            rank = node_index * self._plan.ranks_per_node
            self._abort(incarnation.number, reason="failed", ranks=[rank])
            return [RankFailure(rank, "exception", BAD_PLAN, error=str(error))]
        try:
            self._watch(ranks, incarnation)
        finally:
            failures = self._failures(ranks, incarnation)  # before the kill: a rank that we end has not failed
            abort = self._members.abort_request(incarnation.number)
            if not self._stop.reason and (failures or (abort and abort["reason"] != "fenced")):
                self._inspection.measure()
            kill_all(ranks, spare=self._helper_pids)
            self._reporter.event("ranks.ended", **self._ends.write(incarnation, ranks))
            self._inspection.start(incarnation, self._gpus.buses)
        return failures

    def _start(self, incarnation: Incarnation, node_index: int) -> list[Rank]:
        plan, number = self._plan, incarnation.number
        self._log(
            f"incarnation {number}, generation {incarnation.generation}, "
            f"node {node_index} of {len(incarnation.members)}: from {incarnation.resume or 'the start'}"
        )
        self._watchdog, self._started_at, self._ready_after = None, time.monotonic(), None
        self._ends.begin()
        self._inspection.begin()
        if node_index == 0 and plan.script is None:
            world = range(len(incarnation.members) * plan.ranks_per_node)
            self._watchdog = Watchdog(
                self._attempt.folder, incarnation=number, ranks=world, limits=plan.limits, unit=plan.unit
            )
        store_file = self._members.store_file(number)
        ranks = []
        for local_rank in range(plan.ranks_per_node):
            rank = node_index * plan.ranks_per_node + local_rank
            environment = rank_environment(
                plan,
                self._attempt,
                incarnation,
                self._command,
                node_index=node_index,
                local_rank=local_rank,
                store_file=store_file,
            )
            ranks.append(
                start(
                    rank,
                    self._command.arguments,
                    environment=environment,
                    directory=self._command.directory,
                    log=self._attempt.folder / "logs" / f"{number}.{rank}.log",
                    # A script may handle SIGTERM itself; signals that would only kill it stay with the launcher.
                    ignored=STOP_SIGNALS if plan.script is None else STOP_SIGNALS[1:],
                )
            )
        self._capturing.begin()
        return ranks

    def _watch(self, ranks: list[Rank], incarnation: Incarnation) -> None:
        """Return when every rank has succeeded, or when the incarnation is aborted."""
        number, cause_wait_until = incarnation.number, None
        several = len(incarnation.members) > 1
        for member in incarnation.members[:DEPUTIES]:
            self._members.is_live(member)  # opens their lifelines: from now on their end is noticed at once
        while True:
            # The end of a rank here wakes us; a message of another launcher is a file that must be polled.
            self._wait(ranks, 0.1 if several or cause_wait_until else POLL_SECONDS)
            self._tick(ranks)
            failures = self._failures(ranks, incarnation)
            if not failures and all(rank.poll() for rank in ranks):
                return
            abort = self._members.abort_request(number) if failures or several else None
            if failures and not abort:
                self._abort(number, reason="failed", ranks=[failure.rank for failure in failures])
            elif not abort and not (abort := self._find_fault(incarnation)):
                continue
            if abort and abort["reason"] in {"hang", "grace"}:
                # Each launcher dumps its own ranks before it kills them: where a rank is stuck is lost with it.
                self._dump(ranks, number)
                return
            # Losing a peer is only a consequence: give the lost rank a moment to be noticed, here or on its node.
            cause_wait_until = cause_wait_until or time.monotonic() + CAUSE_WAIT_SECONDS
            # Stop waiting once the cause is known: a failure that is no lost peer, another reason, a dead launcher.
            roots = [failure for failure in failures if failure.kind != "lost_peer"]
            is_explained = (abort and abort["reason"] != "failed") or any(
                map(self._members.is_proven_dead, incarnation.members)
            )
            if roots or is_explained or time.monotonic() > cause_wait_until:
                return

    def _find_fault(self, incarnation: Incarnation) -> dict[str, object] | None:
        """Check for problems while every rank here runs; abort the incarnation, and return why, if there is one."""
        number = incarnation.number
        if self._stop.reason and self._stop.seconds > self._grace:
            self._abort(number, reason="grace")
        elif time.monotonic() >= self._next_poll or any(map(self._members.is_proven_dead, incarnation.members)):
            leads = self._members.leads(incarnation)
            self._next_poll = time.monotonic() + (POLL_SECONDS if leads else FOLLOWER_POLL_SECONDS)
            if self._is_fenced(incarnation):
                self._abort(number, reason="fenced")
            elif not leads:
                return None
            elif absent := [member for member in incarnation.members if not self._members.is_live(member)]:
                lost = [incarnation.node_index(member) * self._plan.ranks_per_node for member in absent]
                self._abort(number, reason="node", ranks=lost)
            elif self._watchdog and (hang := self._watchdog.poll()):
                self._log(str(hang))
                self._abort(number, reason="hang", **hang.as_payload())
            else:
                self._check_for_joiners(incarnation)
                return None
        else:
            return None
        # Read back, as only the first reason counts: another launcher may have given another one before us.
        return self._members.abort_request(number)

    def _check_for_joiners(self, incarnation: Incarnation) -> None:
        """Ask the ranks to end at the next step boundary if standby nodes are worth a restart."""
        running = time.monotonic() - self._started_at
        if self._ready_after is None and self._watchdog and self._watchdog.has_stepped:
            self._ready_after = running
        if self._regroup.is_requested(incarnation.number):
            return
        if self._leading.wants_more_nodes(incarnation, ready_after=self._ready_after, running=running):
            self._log("more nodes stand by: the ranks save, and start again with them")
            self._regroup.request(incarnation.number)

    def _abort(self, number: int, *, reason: str, **more: Any) -> None:
        self._retry_while_full(self._members.abort, number, reason=reason, **more)

    def _failures(self, ranks: list[Rank], incarnation: Incarnation) -> list[RankFailure]:
        """Return the failures of ranks here that ended by themselves and without success."""
        failures = []
        for rank in ranks:
            ended = rank.exit or rank.poll()
            if ended and not ended.ok:
                failures.append(classify_exit(rank.rank, ended.exit_code, ended.signal, rank.log, order=ended.at))
            elif ended and self._plan.script is None:
                path = heartbeat_path(self._attempt.folder, rank=rank.rank, incarnation=incarnation.number)
                failures += premature_exit(rank.rank, read_beat(path), order=ended.at)
        return failures

    def _dump(self, ranks: list[Rank], number: int) -> None:
        """Have every rank here write its stacks and flight recorder, before it is killed."""
        for rank in ranks:
            rank.dump()
        names = [f"{number}.{rank.rank}" for rank in ranks if not rank.exit]
        waiting = [self._attempt.folder / "stacks" / f"{name}.txt" for name in names]
        waiting += [self._attempt.folder / "flight" / f"{name}.json" for name in names]
        deadline = time.monotonic() + DUMP_SECONDS
        while time.monotonic() < deadline and not all(_size(path) for path in waiting):
            time.sleep(0.02)

    def _is_fenced(self, incarnation: Incarnation) -> bool:
        """Return whether this launcher was replaced, left behind by the others, or superseded by a newer launch."""
        return self._members.is_replaced or read_generation(self._plan.job_dir) > incarnation.generation

    def _retry_while_full(self, write: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Retry a write for a while if the disk is full: somebody may free space."""
        until = 0.0
        while True:
            try:
                write(*arguments, **options)
            except OSError as error:
                if error.errno not in DISK_FULL or (until and time.monotonic() > until):
                    raise
                if not until:
                    until = time.monotonic() + DISK_FULL_SECONDS
                    self._log(f"the disk of {self._plan.run_dir} is full: waiting for room")
            else:
                return
            self._wait([], DISK_FULL_RETRY_SECONDS)
            self._tick()

    # Periodic work.

    @property
    def _helper_pids(self) -> list[int]:
        """Process ids of the launcher's helpers, which are not killed with the ranks."""
        return [
            pid for pid in (self._shipping.pid, self._capturing.pid, self._inspection.pid) if pid is not None
        ] + self._gpus.pids

    def _tick(self, ranks: list[Rank] | None = None) -> None:
        self._members.refresh()
        if message := self._shipping.poll():
            self._log(message)
        self._capturing.poll()
        if self._stop.poll(self._signals.received):
            # Twice the last measured write plus the plan's own grace time (30 s).
            needed = self._plan.grace_seconds + 2 * newest_save_seconds(self._plan.checkpoints)
            self._grace = min(needed, self._plan.max_grace_seconds)
            self._log(f"asked to stop: {self._stop.reason}; {self._grace:.0f} s of grace")
            if self._members.leads(self._last):
                self._reporter.event("stop.requested", reason=self._stop.reason, grace_seconds=self._grace)
            self._pass_on_term(ranks or [])
        if ranks:
            self._gpus.poll()
        if ranks and time.monotonic() >= self._next_sample:
            self._next_sample = time.monotonic() + self._plan.sample_seconds
            self._sample(ranks)

    def _sample(self, ranks: list[Rank]) -> None:
        """Log the resources that the job uses on this node, at most once per second.

        The sample's step is the number of seconds since the attempt began.
        """
        reap(spare=self._helper_pids, but={rank.process.pid for rank in ranks})
        self._inspection.sample()
        processes, second = descendants(spare=self._helper_pids), int(time.monotonic() - self._began_at)
        if processes and second > self._last_sample:
            self._last_sample = second
            self._reporter.log(second, **self._meter.sample(processes), **self._gpus.sample())

    def _pass_on_term(self, ranks: list[Rank]) -> None:
        """Forward SIGTERM to a script.

        One that handles it runs its handler, one that calls vigil_report.stopping() ignores SIGTERM, any other ends.
        """
        for rank in ranks:
            if self._plan.script is not None and not rank.ignores(signal.SIGTERM):
                rank.signal(signal.SIGTERM)

    def _wait(self, ranks: list[Rank], seconds: float) -> None:
        """Wait until a rank ends, a signal arrives, or the time is up."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.wake, selectors.EVENT_READ)
            for rank in ranks:
                if rank.exit is None:
                    selector.register(rank.pidfd, selectors.EVENT_READ)
            selector.select(seconds)
        self._signals.clear_wake()


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
