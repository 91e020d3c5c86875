"""One node's launcher: starts, watches, stops and restarts the ranks, and says how it ended (PROTOCOLS §1, §2, §6)."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.launch.attempt import Attempt, Fenced, newest_on_lineage, raise_generation, read_generation
from training.launch.capturing import Capturing
from training.launch.environment import Command, rank_environment
from training.launch.failures import Failure, failure_of, first_failure
from training.launch.members import MEET_SECONDS, Incarnation, Members, free_port
from training.launch.plan import BAD_PLAN, Plan
from training.launch.ranks import CannotStart, Rank, descendants, kill_all, reap, start
from training.launch.resources import Meter
from training.launch.shipping import Shipping
from training.launch.stop import STOP_SIGNALS, STOPPED, Signals, Stop
from training.launch.verdict import Budget, Verdict, judge, tell_code
from training.manifest import DAMAGED, committed
from training.rendezvous import write_json
from training.report import Reporter
from training.watchdog import Hang, Watchdog, behind_in_collectives

SETTLE_SECONDS = 2.0  # for the rank that really failed to show, when a peer noticed first
LOOK_SECONDS = 0.25  # between two looks at heartbeats
DUMP_SECONDS = 2.0


class Launcher:
    def __init__(
        self,
        plan: Plan,
        attempt: Attempt,
        *,
        command: Command,
        signals: Signals,
        reporter: Reporter,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._attempt, self._command = plan, attempt, command
        self._signals, self._reporter, self._say = signals, reporter, say
        self._members = Members(attempt.folder / "members", plan)
        self._stop = Stop(attempt.folder, plan.run_dir, plan.told)
        self._shipping = Shipping(plan, attempt)
        self._capturing = Capturing(plan, attempt, command)
        self._meter = Meter(gpus=plan.gpus_per_node, visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        self._began = (attempt.folder / "owner.json").stat().st_mtime
        self._next_look = self._grace = 0.0
        self._sampled = -1
        self._next_sample = time.monotonic() + min(1.0, plan.sample_seconds)
        self._generation: int | None = None
        self._watchdog: Watchdog | None = None

    def run(self) -> int:
        """All incarnations of this attempt, to its exit code. Nothing that was started is left when this returns."""
        try:
            code = self._run()
        finally:
            self._capturing.finish()
            kill_all([], spare=self._spared)
            self._reporter.close()
            self._shipping.drain()
        return code

    def _run(self) -> int:
        number = self._members.first_number()
        budget = Budget(self._plan.in_place, newest_on_lineage(self._plan.job_dir))
        while True:
            incarnation = self._meet(number)
            if incarnation is None:
                return self._obey(number)
            failures = self._supervise(incarnation)
            self._members.tell_ended(number, failures)
            if self._plan.leads and (verdict := self._judge(incarnation, budget)):
                return self._end(verdict)
            number += 1

    # Meeting.

    def _meet(self, number: int) -> Incarnation | None:
        """The incarnation with this number, once it is formed; None if the attempt ends instead."""
        began = time.monotonic()
        while True:
            self._keep_house()
            if self._members.verdict() is not None:
                return None
            if self._plan.leads:
                if self._stop.reason:
                    return None
                if not self._members.absent():
                    return self._form(number)
                if time.monotonic() - began > MEET_SECONDS:
                    return None
            elif found := self._members.formed(number):
                return found
            elif self._members.leader_is_lost(began):
                return None
            self._wait([], 0.1)

    def _form(self, number: int) -> Incarnation | None:
        try:
            chosen = self._attempt.resume if number == 0 else ""
            resume = chosen or newest_on_lineage(self._plan.job_dir)
            self._generation = raise_generation(self._plan.job_dir, mine=self._generation, resume=resume)
        except Fenced as fenced:
            self._say(str(fenced))
            return None
        # The port is probed on this node, which is rank 0's.
        incarnation = Incarnation(number, self._generation, resume, self._members.host(), free_port())
        self._members.form(incarnation)
        return incarnation

    def _obey(self, number: int) -> int:
        """No further incarnation: the leader's verdict, or the leader's own reason not to form one."""
        verdict = self._members.verdict()
        if verdict is not None or not self._plan.leads:
            return 1 if verdict is None else verdict
        if self._stop.reason:
            resumable = bool(self._attempt.resume or newest_on_lineage(self._plan.job_dir))
            return self._end(Verdict(STOPPED if resumable else 143, "stopped", incarnation=number))
        if self._is_fenced():
            return self._end(Verdict(1, "fenced", error="a newer launch of this job has taken over"))
        absent = ", ".join(str(node) for node in self._members.absent())
        return self._end(Verdict(1, "node", error=f"no launcher appeared on node {absent} within {MEET_SECONDS:.0f} s"))

    # Watching.

    def _supervise(self, incarnation: Incarnation) -> list[Failure]:
        """Start the ranks, wait until all have ended, or end them; the failures that were not of our making."""
        try:
            ranks = self._start(incarnation)
        except CannotStart as error:
            kill_all([], spare=self._spared)  # those that were started before the one that could not be
            self._members.break_off(incarnation.number, reason="failed", ranks=[self._plan.first_rank])
            return [Failure(self._plan.first_rank, "exception", BAD_PLAN, error=str(error))]
        try:
            self._watch(ranks, incarnation)
        finally:
            failures = self._failures(ranks, incarnation)
            kill_all(ranks, spare=self._spared)
        return failures

    def _start(self, incarnation: Incarnation) -> list[Rank]:
        plan, number = self._plan, incarnation.number
        self._say(
            f"incarnation {number}, generation {incarnation.generation}: from {incarnation.resume or 'the start'}"
        )
        if plan.leads:
            self._reporter.event(
                "incarnation.started",
                incarnation=number,
                world_size=plan.world_size,
                generation=incarnation.generation,
                resumed_from=incarnation.resume,
            )
        self._watchdog = None
        if plan.leads and plan.script is None:
            self._watchdog = Watchdog(
                self._attempt.folder, incarnation=number, ranks=range(plan.world_size), limits=plan.limits
            )
        store_file = self._members.store_file(number)
        ranks = []
        for local_rank in range(plan.ranks_per_node):
            rank = plan.first_rank + local_rank
            environment = rank_environment(
                plan, self._attempt, incarnation, self._command, local_rank=local_rank, store_file=store_file
            )
            ranks.append(
                start(
                    rank,
                    self._command.arguments,
                    environment=environment,
                    directory=self._command.directory,
                    log=self._attempt.folder / "logs" / f"{number}.{rank}.log",
                    # A script of somebody's may want its own TERM; what would only kill it stays with us.
                    ignored=STOP_SIGNALS if plan.script is None else STOP_SIGNALS[1:],
                )
            )
        self._capturing.begin()
        return ranks

    def _watch(self, ranks: list[Rank], incarnation: Incarnation) -> None:
        """Returns when every rank has ended well, or when the incarnation is broken off."""
        number, settle_until = incarnation.number, None
        while True:
            self._wait(ranks, 0.1 if self._plan.nodes > 1 or settle_until else LOOK_SECONDS)
            self._keep_house(ranks)
            failures = self._failures(ranks, incarnation)
            if not failures and all(rank.poll() for rank in ranks):
                return
            broken = self._members.broken(number) if failures or self._plan.nodes > 1 else None
            if failures and not broken:
                self._members.break_off(number, reason="failed", ranks=[failure.rank for failure in failures])
            elif not broken and not (broken := self._find_fault(incarnation)):
                continue
            if broken and broken["reason"] in {"hang", "grace"}:
                self._dump(ranks, number)
                return
            # A lost peer is only an echo: give the rank that was lost a moment to be seen, here or on its own node.
            settle_until = settle_until or time.monotonic() + SETTLE_SECONDS
            roots = [failure for failure in failures if failure.kind != "lost_peer"]
            if roots or (broken and broken["reason"] != "failed") or time.monotonic() > settle_until:
                return

    def _find_fault(self, incarnation: Incarnation) -> dict[str, object] | None:
        """What is wrong though every rank here runs: found by this launcher, and said to the others."""
        number = incarnation.number
        if self._stop.reason and self._stop.seconds > self._grace:
            self._members.break_off(number, reason="grace")
        elif self._plan.leads and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            if self._is_fenced():
                self._members.break_off(number, reason="fenced")
            elif absent := self._members.absent():
                lost = [node * self._plan.ranks_per_node for node in absent]
                self._members.break_off(number, reason="node", ranks=lost)
            elif self._watchdog and (hang := self._watchdog.look()):
                self._say(str(hang))
                self._members.break_off(number, reason="hang", **asdict(hang))
            else:
                return None
        else:
            return None
        return self._members.broken(number)

    def _failures(self, ranks: list[Rank], incarnation: Incarnation) -> list[Failure]:
        """Of the ranks that have ended by themselves, those that did not end well."""
        found = []
        for rank in ranks:
            ended = rank.exit or rank.poll()
            if ended and not ended.ok:
                found.append(failure_of(rank.rank, ended.exit_code, ended.signal, rank.log, order=ended.at))
        return found

    def _dump(self, ranks: list[Rank], number: int) -> None:
        """Stacks and flight recorder of every rank here, before they are killed."""
        for rank in ranks:
            rank.dump()
        names = [f"{number}.{rank.rank}" for rank in ranks if not rank.exit]
        waiting = [self._attempt.folder / "stacks" / f"{name}.txt" for name in names]
        waiting += [self._attempt.folder / "flight" / f"{name}.json" for name in names]
        deadline = time.monotonic() + DUMP_SECONDS
        while time.monotonic() < deadline and not all(_size(path) for path in waiting):
            time.sleep(0.02)

    def _is_fenced(self) -> bool:
        """Whether a newer launch has taken over. What cannot be read is no newer launch."""
        return self._generation is not None and read_generation(self._plan.job_dir) > self._generation

    # Judging, on the lowest node.

    def _judge(self, incarnation: Incarnation, budget: Budget) -> Verdict | None:
        failures = self._gather(incarnation.number)
        broken = self._members.broken(incarnation.number)
        if self._is_fenced():  # a rank may have noticed before we did
            broken = {"reason": "fenced"}
        if broken and broken["reason"] == "hang":
            failures = self._hung(incarnation.number, broken)
        verdict = judge(
            failures,
            incarnation=incarnation.number,
            broken=broken,
            stop=self._stop,
            budget=budget,
            newest=newest_on_lineage(self._plan.job_dir),
            started_from=incarnation.resume,
            start_is_damaged=self._is_damaged(incarnation),
        )
        self._report_end(incarnation, failures, verdict)
        return verdict

    def _is_damaged(self, incarnation: Incarnation) -> bool:
        """Whether what this incarnation was to start from was found damaged, and is not what a person chose."""
        is_chosen = incarnation.number == 0 and bool(self._attempt.resume)
        start = self._plan.checkpoints / incarnation.resume
        return bool(incarnation.resume) and not is_chosen and (start / DAMAGED).exists()

    def _gather(self, number: int) -> list[Failure]:
        """The failures that every node's launcher has told, and the launchers that can tell none any more."""
        lost: list[int] = []
        while len(told := self._members.ended(number)) + len(lost) < self._plan.nodes:
            self._keep_house()
            self._wait([], 0.05)
            lost = [node for node in self._members.absent() if node not in told]
        failures = [failure for failures in told.values() for failure in failures]
        ranks = [node * self._plan.ranks_per_node for node in lost]
        return failures + [_lost_node(rank) for rank in ranks]

    def _hung(self, number: int, broken: dict[str, Any]) -> list[Failure]:
        """The ranks to blame for a hang, now that all have left their evidence."""
        ranks = behind_in_collectives(self._attempt.folder / "flight", incarnation=number, ranks=broken["ranks"])
        hang = Hang(ranks, broken["phase"], broken["step"], broken["seconds"])
        return [Failure(rank, "hang", signal=9, error=str(hang)) for rank in ranks]

    def _report_end(self, incarnation: Incarnation, failures: list[Failure], verdict: Verdict | None) -> None:
        first = first_failure(failures).told() if failures else {"rank": None, "exit_code": 0, "signal": None}
        again = "starting again" if verdict is None else f"the attempt ends: {verdict.cause}, {verdict.exit_code}"
        self._say(f"incarnation {incarnation.number} ended: {first}; {again}")
        told = {("failure" if key == "kind" else key): value for key, value in first.items()}
        told |= {"incarnation": incarnation.number, "restarting": verdict is None}
        self._reporter.event("incarnation.ended", **told)

    def _end(self, verdict: Verdict) -> int:
        """The launcher's last word, then the others'."""
        write_json(self._attempt.folder / "result.json", verdict.told(), durable=True)
        tell_code(self._plan, verdict.exit_code)
        self._members.decide(verdict.exit_code)
        return verdict.exit_code

    # What goes on all the time.

    @property
    def _spared(self) -> list[int]:
        """Processes of ours beside the ranks."""
        return [pid for pid in (self._shipping.pid, self._capturing.pid) if pid is not None]

    def _keep_house(self, ranks: list[Rank] | None = None) -> None:
        self._members.refresh()
        if said := self._shipping.tend():
            self._say(said)
        self._capturing.tend()
        if self._stop.look(self._signals.asked):
            # Twice the last measured write, and the plan's own (30 s).
            self._grace = self._plan.grace_seconds + 2 * _last_write(self._plan.checkpoints)
            self._say(f"asked to stop: {self._stop.reason}; {self._grace:.0f} s of grace")
            if self._plan.leads:
                self._reporter.event("stop.requested", reason=self._stop.reason, grace_seconds=self._grace)
            self._pass_on_term(ranks or [])
        if ranks and time.monotonic() >= self._next_sample:
            self._next_sample = time.monotonic() + self._plan.sample_seconds
            self._sample(ranks)

    def _sample(self, ranks: list[Rank]) -> None:
        """What the job uses here; its step is the second since the attempt began, each at most once."""
        reap(spare=self._spared, but={rank.process.pid for rank in ranks})
        processes, second = descendants(spare=self._spared), int(time.time() - self._began)
        if processes and second > self._sampled:
            self._sampled = second
            self._reporter.log(second, **self._meter.look(processes))

    def _pass_on_term(self, ranks: list[Rank]) -> None:
        """A script that handles TERM gets it; one that asks vigil_report.stopping() ignores it; others end by it."""
        for rank in ranks:
            if self._plan.script is not None and not rank.ignores(signal.SIGTERM):
                rank.signal(signal.SIGTERM)

    def _wait(self, ranks: list[Rank], seconds: float) -> None:
        """Until a rank ends, a signal arrives, or the time is over."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.wake, selectors.EVENT_READ)
            for rank in ranks:
                if rank.exit is None:
                    selector.register(rank.pidfd, selectors.EVENT_READ)
            selector.select(seconds)
        self._signals.clear_wake()


def _lost_node(rank: int) -> Failure:
    return Failure(rank, "node", signal=9, error="the launcher on its node was lost", order=-1)


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _last_write(checkpoints: Path) -> float:
    """Seconds that the newest commit took to write, as its manifest says; 0 where there is none."""
    newest = max(committed(checkpoints), key=lambda manifest: (manifest.generation, manifest.step), default=None)
    return float(newest.seconds or 0.0) if newest else 0.0
