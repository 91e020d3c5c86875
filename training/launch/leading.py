"""What the leading launcher says: what follows when an incarnation has ended, and when more nodes are worth a restart.

Nothing here decides alone: Members.decide takes the first word, so two that both think they lead do no harm.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from training.attempt.lineage import (
    Fenced,
    claim_generation,
    give_up_claim,
    newest_on_lineage,
    raise_generation,
    read_generation,
)
from training.config.exit_codes import STOPPED
from training.launch.attempt import Attempt
from training.launch.failures import Failure, first_failure
from training.launch.incarnation import Ending, Incarnation, Member, Turn
from training.launch.left import Left, read_left
from training.launch.members import Members, free_port
from training.launch.outcome import Budget, Outcome, judge
from training.launch.plan import Plan
from training.launch.sizes import most_nodes
from training.launch.stop import Regroup, Stop
from training.launch.watchdog import Hang, behind_in_collectives
from training.manifest import DAMAGED
from training.reporting.reporter import Reporter

MEET_SECONDS = 600.0  # for as many launchers as the run needs to appear
NODES_DOING = frozenset({"signal", "hang", "gpu"})  # of failures, those that another node may be spared
FENCED = Outcome(1, "fenced", error="a newer launch of this job has taken over")


@dataclass(frozen=True)
class _Judged:
    """An incarnation that has ended: the outcome, or None where it is to be started again."""

    number: int
    outcome: Outcome | None
    failures: list[Failure]
    why: str
    budget: Budget
    since: float
    blamed: tuple[int, ...] = ()  # nodes, as of the next incarnation


class Leading:
    def __init__(
        self,
        plan: Plan,
        attempt: Attempt,
        members: Members,
        *,
        stop: Stop,
        regroup: Regroup,
        reporter: Reporter,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._attempt, self._members = plan, attempt, members
        self._stop, self._regroup, self._reporter, self._say = stop, regroup, reporter, say
        self._began = time.monotonic()
        self._judged: _Judged | None = None
        self._waiting: tuple[list[Member], float] = ([], 0.0)
        self._has_kept_choice = False

    def decide(self, last: Incarnation | None) -> None:
        """Say what follows `last`, if that is clear already; whether our word was heard, Members.turn tells."""
        number = last.number + 1 if last else 0
        try:
            turn = self._after(last) if last else self._first()
        except Fenced as fenced:
            self._say(str(fenced))
            turn = _ending(FENCED)
        if turn is None:
            return
        was_heard = False
        try:
            was_heard = self._members.decide(number, turn)
        finally:
            # A claim that stayed would pass for a launch: a resume could go on from what it had meant to start from.
            if not was_heard and isinstance(turn, Incarnation):
                give_up_claim(self._plan.job_dir, turn.generation)
        if was_heard:
            self._report(last, turn)

    # The first.

    def _first(self) -> Turn | None:
        plan, seconds, live = self._plan, time.monotonic() - self._began, self._members.live()
        is_late = seconds > plan.gather_seconds and len(live) >= plan.min_nodes
        are_enough = len(live) >= plan.nodes or (is_late and most_nodes(plan, len(live)) >= plan.min_nodes)
        if are_enough and not self._stop.reason:
            budget = Budget(plan.in_place, newest_on_lineage(plan.job_dir))
            return self._form(None, live, budget, resume=self._attempt.resume)
        self._keep_choice()
        if self._stop.reason:
            return self._stopped()
        if seconds > MEET_SECONDS:
            there = {member.node for member in live}
            absent = ", ".join(str(node) for node in range(plan.nodes) if node not in there)
            error = f"no launcher appeared on node {absent} within {MEET_SECONDS:.0f} s"
            return _ending(Outcome(1, "node", error=error))
        return None

    def _keep_choice(self) -> None:
        """Put what a person chose on the line of descent: should this attempt start nothing, the next one finds it."""
        if self._attempt.resume and not self._has_kept_choice:
            raise_generation(self._plan.job_dir, mine=None, resume=self._attempt.resume)
            self._has_kept_choice = True

    # The next.

    def _after(self, last: Incarnation) -> Turn | None:
        # Judged once, though asked many times a second while nodes are waited for: what was lost is told and forgotten
        # then, and the wait for it to come back counts from there.
        if self._judged is None or self._judged.number != last.number:
            if (failures := self._gather(last)) is None:
                return None
            self._judged = self._judge(last, failures)
        judged = self._judged
        if judged.outcome is not None:
            return _ending(judged.outcome)
        if self._stop.reason:
            return self._stopped(last)
        # Who stands by is only counted on once it is known to live: an old file of one that died may lie about.
        known = self._members.is_proven_live
        live = [one for one in self._members.live() if last.place(one) >= 0 or known(one)]
        if most_nodes(self._plan, len(live)) >= self._plan.min_nodes:
            return self._form(last, live, judged.budget, blamed=judged.blamed)
        if time.monotonic() - judged.since > self._plan.return_seconds:
            return _ending(self._too_few(last, len(live), judged.failures))
        return None

    def _gather(self, last: Incarnation) -> list[Failure] | None:
        """The failures that every launcher has told, and those that can tell none any more; None: some still may."""
        failures, lost = [], []
        for place, member in enumerate(last.members):
            told = self._members.ended(last.number, member)
            if told is not None:
                failures += told
            elif self._members.is_live(member):
                return None
            else:
                lost.append(member)
                failures.append(lost_node(place * self._plan.ranks_per_node, member))
        for member in lost:
            self._members.forget(member)
        if lost:
            self._say(f"lost: {', '.join(member.name for member in lost)}")
            self._reporter.event(
                "nodes.lost",
                incarnation=last.number,
                nodes=[member.name for member in lost],
                left=len(last.members) - len(lost),
                needed=self._plan.min_nodes,
            )
        return failures

    def _judge(self, last: Incarnation, failures: list[Failure]) -> _Judged:
        broken = self._members.broken(last.number)
        if read_generation(self._plan.job_dir) > last.generation:  # a rank may have noticed before we did
            broken = {"reason": "fenced"}
        if broken and broken["reason"] == "hang":
            failures = self._hung(last.number, broken)
        elif broken and not failures:  # its ranks were ended, and none had failed: a launcher was slow, not lost
            failures = [
                Failure(rank, "node", signal=9, error="its launcher was thought lost") for rank in _ranks(broken)
            ]
        budget = Budget(self._plan.in_place, **last.spent)
        regroups = self._regroup.was_asked(last.number)
        outcome = judge(
            failures,
            incarnation=last.number,
            broken=broken,
            stop=self._stop,
            budget=budget,
            newest=newest_on_lineage(self._plan.job_dir),
            started_from=last.resume,
            start_is_damaged=self._is_damaged(last),
            regroups=regroups,
            left=self._left(last),
            spares=bool(self._standing_by(last)),
        )
        if regroups and not self._stop.reason:
            self._regroup.finish(last.number)
        why = _why(failures, outcome, regroups)
        blamed = last.blamed if outcome or regroups else self._blamed(last, failures)
        return _Judged(last.number, outcome, failures, why, budget, time.monotonic(), blamed)

    def _standing_by(self, last: Incarnation) -> list[Member]:
        """Who could take the place of one of the members: whoever is known to live and is none of them."""
        if not self._plan.spares:
            return []
        known = self._members.is_proven_live
        return [one for one in self._members.live() if last.place(one) < 0 and known(one)]

    def _blamed(self, last: Incarnation, failures: list[Failure]) -> tuple[int, ...]:
        """Last of all the node whose rank failed first, by what may be its doing, where another can take its place."""
        if not failures or not self._standing_by(last):
            return last.blamed
        first = first_failure(failures)
        place = first.rank // self._plan.ranks_per_node
        if first.kind not in NODES_DOING or place >= len(last.members):
            return last.blamed
        node = last.members[place].node
        return (*(one for one in last.blamed if one != node), node)

    def _left(self, last: Incarnation) -> Left | None:
        """What a script that was asked to stop said of how far it was; our own trainer says it by what it saves."""
        if self._plan.script is None or not self._stop.reason:
            return None
        return read_left(self._attempt.folder, last.number, has_saved=self._has_progressed())

    def _has_progressed(self) -> bool:
        """Whether this attempt has committed anything."""
        began = self._members.turn(0)
        return isinstance(began, Incarnation) and newest_on_lineage(self._plan.job_dir) != began.resume

    def _is_damaged(self, last: Incarnation) -> bool:
        """Whether what this incarnation was to start from was found damaged, and is not what a person chose."""
        is_chosen = last.number == 0 and bool(self._attempt.resume)
        start = self._plan.checkpoints / last.resume
        return bool(last.resume) and not is_chosen and os.path.exists(start / DAMAGED)

    def _hung(self, number: int, broken: dict[str, Any]) -> list[Failure]:
        """The ranks to blame for a hang, now that all have left their evidence."""
        ranks = behind_in_collectives(self._attempt.folder / "flight", incarnation=number, ranks=broken["ranks"])
        hang = Hang(ranks, broken["of"], broken["phase"], broken["step"], broken["seconds"], self._plan.counts)
        return [Failure(rank, "hang", signal=9, error=str(hang)) for rank in ranks]

    def _form(
        self,
        last: Incarnation | None,
        live: list[Member],
        budget: Budget,
        *,
        resume: str = "",
        blamed: tuple[int, ...] = (),
    ) -> Incarnation:
        """The next incarnation: us, who was there in its order, then who stood by, as many as can share the work.

        Whoever was to blame for the end of one comes after all others, the latest last, be it us.
        """
        # Who comes first leads, and has rank 0: so the store's port is probed on the node where it is bound.
        before = list(last.members) if last else []
        stayed = [member for member in before if member in live]
        order = [*stayed, *(member for member in live if member not in stayed)]
        since = {node: turn for turn, node in enumerate(blamed)}
        order.sort(key=lambda one: (since.get(one.node, -1), one.id != self._members.me.id))  # others stay in order
        # Where no number of nodes fits, at the start, the ranks themselves say what is wrong.
        taken = order[: most_nodes(self._plan, len(order)) or None]
        resume = resume or newest_on_lineage(self._plan.job_dir)
        generation = claim_generation(self._plan.job_dir, mine=last.generation if last else None, resume=resume)
        return Incarnation(
            number=last.number + 1 if last else 0,
            generation=generation,
            resume=resume,
            host=self._members.host(taken),
            port=free_port(),  # probed on this node, which is rank 0's, unless it is to blame
            members=tuple(taken),
            spent=budget.spent,
            blamed=blamed,
        )

    def _stopped(self, last: Incarnation | None = None) -> Ending:
        """The end of an attempt that was asked to stop while no rank runs."""
        resumable = bool(self._attempt.resume or newest_on_lineage(self._plan.job_dir))
        code = STOPPED if resumable else 143
        number = last.number + 1 if last else 0
        return _ending(Outcome(code, "stopped", incarnation=number, asked=self._stop.reason))

    def _too_few(self, last: Incarnation, live: int, failures: list[Failure]) -> Outcome:
        """What was committed is worth another turn at once; where nothing was, starts are counted (protocols.md §1)."""
        first = first_failure(failures) if failures else None
        waited = f" and none came back within {self._plan.return_seconds:.0f} s" if self._plan.return_seconds else ""
        before = f"{first.summary}: " if first else ""
        error = f"{before}{live} of at least {self._plan.min_nodes} nodes were left{waited}"
        code = STOPPED if self._has_progressed() and self._plan.is_elastic else first.code if first else 1
        return Outcome(code, "node", replace(first, error=error) if first else None, last.number, error)

    # While it runs.

    def wants_more(self, incarnation: Incarnation, *, ready_after: float | None, running: float) -> bool:
        """Whether launchers stand by for which this incarnation should end, at a step boundary.

        They are taken in once they have waited for as long as all nodes together lose by a restart (`ready_after`:
        seconds it took this one to its first step; None: not there yet). Whatever happens next, at most twice as much
        is lost as with foresight. Scripts of people's take them in when they are restarted anyway: not every one saves
        when asked to.
        """
        plan, now = self._plan, time.monotonic()
        if not (plan.is_elastic or plan.spares) or self._stop.reason:
            return False
        # Looked at from the start: only who is known to live is taken in when a node is lost, which may be soon.
        there = [member for member in self._members.live() if incarnation.place(member) < 0]
        if plan.spares or plan.script is not None or ready_after is None:
            return False
        waiting = [member for member in there if self._members.is_proven_live(member)]
        count = len(incarnation.members)
        more = most_nodes(plan, count + len(waiting)) - count if waiting else 0
        if more <= 0:
            self._waiting = ([], now)
            return False
        if self._waiting[0] != waiting:
            self._waiting = (waiting, now)
        waited = now - self._waiting[1]
        return running >= plan.grow_seconds and waited * more / (count + more) >= ready_after

    # Telling.

    def _report(self, last: Incarnation | None, turn: Turn) -> None:
        """What was decided: once, as only one launcher's word is heard."""
        if last is not None and self._judged is not None:
            self._report_end(last, turn, self._judged)
        if isinstance(turn, Ending):
            return
        known = last.members if last else ()
        joined = [one.name for one in turn.members if last is not None and one not in known]
        world_size = len(turn.members) * self._plan.ranks_per_node
        if joined:
            self._reporter.event("nodes.joined", incarnation=turn.number, nodes=joined, world_size=world_size)
        self._reporter.event(
            "incarnation.started",
            incarnation=turn.number,
            world_size=world_size,
            nodes=turn.names,
            generation=turn.generation,
            resumed_from=turn.resume,
        )

    def _report_end(self, last: Incarnation, turn: Turn, judged: _Judged) -> None:
        failures, restarting = judged.failures, isinstance(turn, Incarnation)
        first = first_failure(failures).told() if failures else {"rank": None, "exit_code": 0, "signal": None}
        result = {} if isinstance(turn, Incarnation) else turn.result
        again = "starting again" if restarting else f"the attempt ends: {result['cause']}, {result['exit_code']}"
        self._say(f"incarnation {last.number} ended: {first}; {again}")
        told = {("failure" if key == "kind" else key): value for key, value in first.items()}
        why = judged.why if restarting or judged.outcome else str(result["cause"])
        told |= {"incarnation": last.number, "restarting": restarting, "why": why, "nodes": len(last.members)}
        self._reporter.event("incarnation.ended", **told)


def lost_node(rank: int, member: Member) -> Failure:
    return Failure(rank, "node", signal=9, error=f"the launcher on {member.name or member.node} was lost", order=-1)


def _ranks(broken: dict[str, Any]) -> list[int]:
    return list(broken.get("ranks") or [0])


def _ending(outcome: Outcome) -> Ending:
    return Ending(outcome.told())


def _why(failures: list[Failure], outcome: Outcome | None, regroups: bool) -> str:
    """Why it ended, in one word: the outcome's cause, `joined` (more nodes), or the kind of the first failure."""
    if outcome is not None:
        return outcome.cause
    return "joined" if regroups and not failures else first_failure(failures).kind if failures else "failed"
