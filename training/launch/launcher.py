"""One node's launcher: starts, watches, stops and restarts the ranks, says how it ended (protocols.md §1, §2, §6)."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from training.attempt.files import FULL, write_json
from training.attempt.heartbeat import heartbeat_path, read_beat
from training.attempt.lineage import publish_generation, read_generation
from training.launch.attempt import Attempt
from training.launch.capturing import Capturing
from training.launch.ends import Ends
from training.launch.environment import RankCommand, rank_environment
from training.launch.failures import Failure, failure_of, left_early
from training.launch.gpus import Gpus, named
from training.launch.incarnation import Ending, Incarnation, Turn
from training.launch.last_look import LastLook
from training.launch.leading import FENCED, Leading
from training.launch.members import Members
from training.launch.outcome import tell_code
from training.launch.plan import BAD_PLAN, Plan
from training.launch.ranks import CannotStart, Rank, descendants, kill_all, reap, start
from training.launch.resources import Meter
from training.launch.shipping import Shipping
from training.launch.stop import STOP_SIGNALS, Regroup, Signals, Stop
from training.launch.watchdog import Watchdog
from training.manifest import committed
from training.reporting.reporter import Reporter

SETTLE_SECONDS = 2.0  # for the rank that really failed to show, when a peer noticed first
LOOK_SECONDS = 0.25  # between two looks at heartbeats
FOLLOW_SECONDS = 1.0  # between two looks of those that do not lead; lifelines tell them sooner
DUMP_SECONDS = 2.0
ROOM_SECONDS = 60.0  # for somebody to make room on a full disk, where going on takes a file
ROOM_LOOK_SECONDS = 0.5
DEPUTIES = 3  # who lead in turn: these every launcher keeps an eye on, the leader on all


class Launcher:
    def __init__(
        self,
        plan: Plan,
        attempt: Attempt,
        *,
        command: RankCommand,
        signals: Signals,
        reporter: Reporter,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._attempt, self._command = plan, attempt, command
        self._signals, self._reporter, self._say = signals, reporter, say
        self._members = Members(attempt.folder / "members", plan)
        self._stop = Stop(attempt.folder, plan.run_dir, plan.told)
        self._regroup = Regroup(attempt.folder)
        self._leading = Leading(
            plan,
            attempt,
            self._members,
            stop=self._stop,
            regroup=self._regroup,
            reporter=reporter,
            say=say,
        )
        self._shipping = Shipping(plan, attempt)
        self._capturing = Capturing(plan, attempt, command)
        self._ends = Ends(plan, attempt)
        self._look = LastLook(plan, attempt)
        self._meter = Meter()
        names = named(plan.gpus_per_node, os.environ.get("CUDA_VISIBLE_DEVICES", "")) if plan.gpus_per_node else []
        self._gpus = Gpus(names, every=plan.sample_seconds, tell=partial(reporter.event, node=plan.node))
        # By the monotonic clock: the other may be set back, or the file server's be ahead.
        self._began = time.monotonic() - max(0.0, time.time() - (attempt.folder / "owner.json").stat().st_mtime)
        self._next_look = self._grace = 0.0
        self._sampled = -1
        self._next_sample = time.monotonic() + min(1.0, plan.sample_seconds)
        self._last: Incarnation | None = None
        self._watchdog: Watchdog | None = None
        self._started_at = 0.0
        self._ready_after: float | None = None

    def run(self) -> int:
        """All incarnations of this attempt, to its exit code. Nothing that was started is left when this returns."""
        try:
            code = self._run()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._say(f"the launcher cannot go on: {error}")
            code = 1
        finally:
            self._gpus.close()
            self._capturing.finish()
            self._look.finish()
            self._ends.finish()
            kill_all([], spare=self._spared)
            self._reporter.close()
            self._shipping.drain()
        return code

    def _run(self) -> int:
        while True:
            turn = self._next(self._last)
            if isinstance(turn, Ending):
                return self._obey(turn)
            self._last, place = turn, turn.place(self._members.me)
            if place < 0:
                self._say(f"incarnation {turn.number} runs without this node, which stands by")
                continue
            # Claimed before the turn, but published only now: who loses the race for a turn must not fence who wins it.
            self._patiently(publish_generation, self._plan.job_dir, turn.generation)
            self._patiently(self._members.tell_ended, turn.number, self._supervise(turn, place))

    # Meeting.

    def _next(self, last: Incarnation | None) -> Turn:
        """What follows `last`, once that is decided: by us, where it is for us to say."""
        number = last.number + 1 if last else 0
        while True:
            self._keep_house()
            if (turn := self._members.turn(number)) is not None:
                return turn
            if self._members.is_replaced:
                self._say("a later launcher of this node has taken over")
                return Ending(FENCED.told())
            if self._members.leads(last):
                self._patiently(self._leading.decide, last)
                if (turn := self._members.turn(number)) is not None:
                    return turn
            self._wait([], 0.05)

    def _obey(self, ending: Ending) -> int:
        """The attempt's last word, written by whoever comes first: the one who said it may have died since."""
        if self._members.is_replaced:
            return ending.exit_code
        if not os.path.exists(result := self._attempt.folder / "result.json"):
            with suppress(OSError):  # the code is told all the same
                self._patiently(write_json, result, ending.result, durable=True)
        tell_code(self._plan, ending.exit_code)
        return ending.exit_code

    # Watching.

    def _supervise(self, incarnation: Incarnation, place: int) -> list[Failure]:
        """Start the ranks, wait until all have ended, or end them; the failures that were not of our making."""
        try:
            ranks = self._start(incarnation, place)
        except CannotStart as error:
            kill_all([], spare=self._spared)  # those that were started before the one that could not be
            rank = place * self._plan.ranks_per_node
            self._break_off(incarnation.number, reason="failed", ranks=[rank])
            return [Failure(rank, "exception", BAD_PLAN, error=str(error))]
        try:
            self._watch(ranks, incarnation)
        finally:
            failures = self._failures(ranks, incarnation)  # before the kill: what we end has not failed
            broken = self._members.broken(incarnation.number)
            if not self._stop.reason and (failures or (broken and broken["reason"] != "fenced")):
                self._look.glance()
            kill_all(ranks, spare=self._spared)
            self._reporter.event("ranks.ended", **self._ends.tell(incarnation, ranks))
            self._look.start(incarnation, self._gpus.buses)
        return failures

    def _start(self, incarnation: Incarnation, place: int) -> list[Rank]:
        plan, number = self._plan, incarnation.number
        self._say(
            f"incarnation {number}, generation {incarnation.generation}, node {place} of {len(incarnation.members)}: "
            f"from {incarnation.resume or 'the start'}"
        )
        self._watchdog, self._started_at, self._ready_after = None, time.monotonic(), None
        self._ends.begin()
        self._look.begin()
        if place == 0 and plan.script is None:
            world = range(len(incarnation.members) * plan.ranks_per_node)
            self._watchdog = Watchdog(
                self._attempt.folder, incarnation=number, ranks=world, limits=plan.limits, counts=plan.counts
            )
        store_file = self._members.store_file(number)
        ranks = []
        for local_rank in range(plan.ranks_per_node):
            rank = place * plan.ranks_per_node + local_rank
            environment = rank_environment(
                plan,
                self._attempt,
                incarnation,
                self._command,
                place=place,
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
                    # A script of somebody's may want its own TERM; what would only kill it stays with us.
                    ignored=STOP_SIGNALS if plan.script is None else STOP_SIGNALS[1:],
                )
            )
        self._capturing.begin()
        return ranks

    def _watch(self, ranks: list[Rank], incarnation: Incarnation) -> None:
        """Returns when every rank has ended well, or when the incarnation is broken off."""
        number, settle_until = incarnation.number, None
        several = len(incarnation.members) > 1
        for member in incarnation.members[:DEPUTIES]:
            self._members.is_live(member)  # from now on their end is noticed at once
        while True:
            # The end of a rank here wakes us; another launcher's word is a file, and only looking finds it.
            self._wait(ranks, 0.1 if several or settle_until else LOOK_SECONDS)
            self._keep_house(ranks)
            failures = self._failures(ranks, incarnation)
            if not failures and all(rank.poll() for rank in ranks):
                return
            broken = self._members.broken(number) if failures or several else None
            if failures and not broken:
                self._break_off(number, reason="failed", ranks=[failure.rank for failure in failures])
            elif not broken and not (broken := self._find_fault(incarnation)):
                continue
            if broken and broken["reason"] in {"hang", "grace"}:
                # Each launcher for its own ranks, before it kills them: what one is stuck in is lost with it.
                self._dump(ranks, number)
                return
            # A lost peer is only an echo: give the rank that was lost a moment to be seen, here or on its own node.
            settle_until = settle_until or time.monotonic() + SETTLE_SECONDS
            # Nothing is left to wait for once the cause is known: a failure of its own, another word, a dead launcher.
            roots = [failure for failure in failures if failure.kind != "lost_peer"]
            is_told = (broken and broken["reason"] != "failed") or any(
                map(self._members.is_known_dead, incarnation.members)
            )
            if roots or is_told or time.monotonic() > settle_until:
                return

    def _find_fault(self, incarnation: Incarnation) -> dict[str, object] | None:
        """What is wrong though every rank here runs: found by this launcher, and said to the others."""
        number = incarnation.number
        if self._stop.reason and self._stop.seconds > self._grace:
            self._break_off(number, reason="grace")
        elif time.monotonic() >= self._next_look or any(map(self._members.is_known_dead, incarnation.members)):
            leads = self._members.leads(incarnation)
            self._next_look = time.monotonic() + (LOOK_SECONDS if leads else FOLLOW_SECONDS)
            if self._is_fenced(incarnation):
                self._break_off(number, reason="fenced")
            elif not leads:
                return None
            elif absent := [one for one in incarnation.members if not self._members.is_live(one)]:
                lost = [incarnation.place(one) * self._plan.ranks_per_node for one in absent]
                self._break_off(number, reason="node", ranks=lost)
            elif self._watchdog and (hang := self._watchdog.look()):
                self._say(str(hang))
                self._break_off(number, reason="hang", **asdict(hang))
            else:
                self._look_for_more(incarnation)
                return None
        else:
            return None
        # Read back, as only the first word is heard: another launcher may have named another reason before us.
        return self._members.broken(number)

    def _look_for_more(self, incarnation: Incarnation) -> None:
        """Ask the ranks to end at the next step's boundary where more nodes stand by, and are worth it."""
        running = time.monotonic() - self._started_at
        if self._ready_after is None and self._watchdog and self._watchdog.has_stepped:
            self._ready_after = running
        if self._regroup.was_asked(incarnation.number):
            return
        if self._leading.wants_more(incarnation, ready_after=self._ready_after, running=running):
            self._say("more nodes stand by: the ranks save, and start again with them")
            self._regroup.ask(incarnation.number)

    def _break_off(self, number: int, *, reason: str, **more: Any) -> None:
        self._patiently(self._members.break_off, number, reason=reason, **more)

    def _failures(self, ranks: list[Rank], incarnation: Incarnation) -> list[Failure]:
        """The failures of the ranks here that have ended by themselves, and not well."""
        found = []
        for rank in ranks:
            ended = rank.exit or rank.poll()
            if ended and not ended.ok:
                found.append(failure_of(rank.rank, ended.exit_code, ended.signal, rank.log, order=ended.at))
            elif ended and self._plan.script is None:
                path = heartbeat_path(self._attempt.folder, rank=rank.rank, incarnation=incarnation.number)
                found += left_early(rank.rank, read_beat(path), order=ended.at)
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

    def _is_fenced(self, incarnation: Incarnation) -> bool:
        """Whether this launcher was replaced, the others have gone on without it, or a newer launch has taken over."""
        return self._members.is_replaced or read_generation(self._plan.job_dir) > incarnation.generation

    def _patiently(self, write: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Where the disk is full, again and again for a while: somebody may make room."""
        until = 0.0
        while True:
            try:
                write(*arguments, **options)
            except OSError as error:
                if error.errno not in FULL or (until and time.monotonic() > until):
                    raise
                if not until:
                    until = time.monotonic() + ROOM_SECONDS
                    self._say(f"the disk of {self._plan.run_dir} is full: waiting for room")
            else:
                return
            self._wait([], ROOM_LOOK_SECONDS)
            self._keep_house()

    # What goes on all the time.

    @property
    def _spared(self) -> list[int]:
        """Processes of ours beside the ranks."""
        return [
            pid for pid in (self._shipping.pid, self._capturing.pid, self._look.pid) if pid is not None
        ] + self._gpus.pids

    def _keep_house(self, ranks: list[Rank] | None = None) -> None:
        self._members.refresh()
        if said := self._shipping.tend():
            self._say(said)
        self._capturing.tend()
        if self._stop.look(self._signals.asked):
            # Twice the last measured write, and the plan's own (30 s).
            needed = self._plan.grace_seconds + 2 * _last_write(self._plan.checkpoints)
            self._grace = min(needed, self._plan.max_grace_seconds)
            self._say(f"asked to stop: {self._stop.reason}; {self._grace:.0f} s of grace")
            if self._members.leads(self._last):
                self._reporter.event("stop.requested", reason=self._stop.reason, grace_seconds=self._grace)
            self._pass_on_term(ranks or [])
        if ranks:
            self._gpus.tend()
        if ranks and time.monotonic() >= self._next_sample:
            self._next_sample = time.monotonic() + self._plan.sample_seconds
            self._sample(ranks)

    def _sample(self, ranks: list[Rank]) -> None:
        """What the job uses here; its step is the second since the attempt began, each at most once."""
        reap(spare=self._spared, but={rank.process.pid for rank in ranks})
        self._look.sample()
        processes, second = descendants(spare=self._spared), int(time.monotonic() - self._began)
        if processes and second > self._sampled:
            self._sampled = second
            self._reporter.log(second, **self._meter.look(processes), **self._gpus.look())

    def _pass_on_term(self, ranks: list[Rank]) -> None:
        """A script that handles TERM gets it; one that asks vigil_report.stopping() ignores it; others end by it."""
        for rank in ranks:
            if self._plan.script is not None and not rank.ignores(signal.SIGTERM):
                rank.signal(signal.SIGTERM)

    def _wait(self, ranks: list[Rank], seconds: float) -> None:
        """Wait until a rank ends, a signal arrives, or the time is over."""
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


def _last_write(checkpoints: Path) -> float:
    """Seconds that the newest commit took to write, as its manifest says; 0 where there is none."""
    newest = max(committed(checkpoints), key=lambda manifest: (manifest.generation, manifest.step), default=None)
    return float(newest.seconds or 0.0) if newest else 0.0
