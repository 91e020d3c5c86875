"""The leading launcher's decisions: what follows an incarnation, and when more nodes are worth a restart.

A decision counts only once Members.decide has recorded it, and the first one recorded wins: two launchers that both
believe they lead do no harm.
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
    newest_on_lineage,
    raise_generation,
    read_generation,
    withdraw_claim,
)
from training.config.exit_codes import STOPPED
from training.launch.attempt import Attempt
from training.launch.failures import RankFailure, first_failure
from training.launch.incarnation import Decision, Ending, Incarnation, Member
from training.launch.members import Members, free_port
from training.launch.node_counts import max_usable_nodes
from training.launch.outcome import EndedIncarnation, Outcome, RestartBudget, judge
from training.launch.plan import LaunchPlan
from training.launch.script_progress import ScriptProgress, read_progress
from training.launch.stop import AttemptStop, Regroup
from training.launch.watchdog import Hang, behind_in_collectives
from training.manifest import DAMAGED
from training.reporting.reporter import Reporter

GATHER_TIMEOUT_SECONDS = 600.0  # for as many launchers as the run needs to appear
NODE_FAULTS = frozenset({"signal", "hang", "gpu"})  # failures that may not happen on another node
FENCED = Outcome(1, "fenced", error="a newer launch of this job has taken over")


@dataclass(frozen=True)
class _Verdict:
    """The judgement on an incarnation that has ended. `outcome`: the attempt's, or None if the ranks are restarted."""

    number: int
    outcome: Outcome | None
    failures: list[RankFailure]
    why: str
    budget: RestartBudget
    judged_at: float
    blamed: tuple[int, ...] = ()  # nodes, for the next incarnation


class Leader:
    def __init__(
        self,
        plan: LaunchPlan,
        attempt: Attempt,
        members: Members,
        *,
        stop: AttemptStop,
        regroup: Regroup,
        reporter: Reporter,
        log: Callable[[str], None],
    ) -> None:
        self._plan, self._attempt, self._members = plan, attempt, members
        self._stop, self._regroup, self._reporter, self._log = stop, regroup, reporter, log
        self._began_at = time.monotonic()
        self._verdict: _Verdict | None = None
        self._waiting: tuple[list[Member], float] = ([], 0.0)
        self._has_recorded_choice = False

    def decide(self, last: Incarnation | None) -> None:
        """Decide what follows `last`, if that can be decided yet.

        Members.decision tells whether this decision counted.
        """
        number = last.number + 1 if last else 0
        try:
            decision = self._decide_next(last) if last else self._decide_first()
        except Fenced as fenced:
            self._log(str(fenced))
            decision = _ending(FENCED)
        if decision is None:
            return
        is_recorded = False
        try:
            is_recorded = self._members.decide(number, decision)
        finally:
            # A claim left behind would look like a launch: a later resume could continue from its start checkpoint.
            if not is_recorded and isinstance(decision, Incarnation):
                withdraw_claim(self._plan.job_dir, decision.generation)
        if is_recorded:
            self._report(last, decision)

    # The first incarnation.

    def _decide_first(self) -> Decision | None:
        plan, seconds, live = self._plan, time.monotonic() - self._began_at, self._members.live()
        is_late = seconds > plan.gather_seconds and len(live) >= plan.min_nodes
        are_enough = len(live) >= plan.nodes or (is_late and max_usable_nodes(plan, len(live)) >= plan.min_nodes)
        if are_enough and not self._stop.reason:
            budget = RestartBudget(plan.in_place, newest_on_lineage(plan.job_dir))
            return self._form_incarnation(None, live, budget, resume=self._attempt.resume)
        self._record_choice()
        if self._stop.reason:
            return self._stopped_ending()
        if seconds > GATHER_TIMEOUT_SECONDS:
            present = {member.node for member in live}
            absent = ", ".join(str(node) for node in range(plan.nodes) if node not in present)
            error = f"no launcher appeared on node {absent} within {GATHER_TIMEOUT_SECONDS:.0f} s"
            return _ending(Outcome(1, "node", error=error))
        return None

    def _record_choice(self) -> None:
        """Record the checkpoint that a person chose.

        If this attempt never starts, the next one still resumes from it.
        """
        if self._attempt.resume and not self._has_recorded_choice:
            raise_generation(self._plan.job_dir, previous=None, resume=self._attempt.resume)
            self._has_recorded_choice = True

    # The incarnations after that.

    def _decide_next(self, last: Incarnation) -> Decision | None:
        # Judged once, though this runs many times a second while waiting for nodes: lost nodes are reported and
        # forgotten then, and the wait for their return starts there.
        if self._verdict is None or self._verdict.number != last.number:
            if (failures := self._gather_failures(last)) is None:
                return None
            self._verdict = self._judge(last, failures)
        verdict = self._verdict
        if verdict.outcome is not None:
            return _ending(verdict.outcome)
        if self._stop.reason:
            return self._stopped_ending(last)
        # A standby counts only once it is proven live: an old file of a dead launcher may still be there.
        is_proven = self._members.is_proven_live
        live = [member for member in self._members.live() if last.node_index(member) >= 0 or is_proven(member)]
        if max_usable_nodes(self._plan, len(live)) >= self._plan.min_nodes:
            return self._form_incarnation(last, live, verdict.budget, blamed=verdict.blamed)
        if time.monotonic() - verdict.judged_at > self._plan.return_seconds:
            return _ending(self._too_few_nodes(last, len(live), verdict.failures))
        return None

    def _gather_failures(self, last: Incarnation) -> list[RankFailure] | None:
        """Return the failures that the launchers reported, with one per lost launcher.

        None while some have yet to report.
        """
        failures, lost = [], []
        for index, member in enumerate(last.members):
            reported = self._members.reported_failures(last.number, member)
            if reported is not None:
                failures += reported
            elif self._members.is_live(member):
                return None
            else:
                lost.append(member)
                failures.append(lost_node(index * self._plan.ranks_per_node, member))
        for member in lost:
            self._members.forget(member)
        if lost:
            self._log(f"lost: {', '.join(member.name for member in lost)}")
            self._reporter.event(
                "nodes.lost",
                incarnation=last.number,
                nodes=[member.name for member in lost],
                left=len(last.members) - len(lost),
                needed=self._plan.min_nodes,
            )
        return failures

    def _judge(self, last: Incarnation, failures: list[RankFailure]) -> _Verdict:
        abort = self._members.abort_request(last.number)
        if read_generation(self._plan.job_dir) > last.generation:  # a rank may notice before the launcher does
            abort = {"reason": "fenced"}
        if abort and abort["reason"] == "hang":
            failures = self._hang_failures(last.number, abort)
        elif abort and not failures:  # the ranks were ended though none had failed: a launcher was slow, not lost
            failures = [
                RankFailure(rank, "node", signal=9, error="its launcher was thought lost") for rank in _ranks(abort)
            ]
        budget = RestartBudget(self._plan.in_place, **last.spent)
        regroups = self._regroup.is_requested(last.number)
        ended = EndedIncarnation(
            number=last.number,
            failures=failures,
            abort=abort,
            newest=newest_on_lineage(self._plan.job_dir),
            started_from=last.resume,
            start_is_damaged=self._is_start_damaged(last),
            regroups=regroups,
            progress=self._script_progress(last),
            has_spares=bool(self._standby(last)),
        )
        outcome = judge(ended, stop=self._stop, budget=budget)
        if regroups and not self._stop.reason:
            self._regroup.finish(last.number)
        why = _end_reason(failures, outcome, regroups)
        blamed = last.blamed if outcome or regroups else self._next_blamed(last, failures)
        return _Verdict(last.number, outcome, failures, why, budget, time.monotonic(), blamed)

    def _standby(self, last: Incarnation) -> list[Member]:
        """Return the launchers that could replace a member: those proven live that are not members."""
        if not self._plan.spares:
            return []
        is_proven = self._members.is_proven_live
        return [member for member in self._members.live() if last.node_index(member) < 0 and is_proven(member)]

    def _next_blamed(self, last: Incarnation, failures: list[RankFailure]) -> tuple[int, ...]:
        """Append the node whose rank failed first, if the node may be the cause and another can replace it."""
        if not failures or not self._standby(last):
            return last.blamed
        first = first_failure(failures)
        index = first.rank // self._plan.ranks_per_node
        if first.kind not in NODE_FAULTS or index >= len(last.members):
            return last.blamed
        node = last.members[index].node
        return (*(blamed for blamed in last.blamed if blamed != node), node)

    def _script_progress(self, last: Incarnation) -> ScriptProgress | None:
        """Return how far a script was that was asked to stop; our own trainer shows it by its checkpoints."""
        if self._plan.script is None or not self._stop.reason:
            return None
        return read_progress(self._attempt.folder, last.number, has_saved=self._has_progressed())

    def _has_progressed(self) -> bool:
        """Return whether this attempt has committed a checkpoint."""
        began = self._members.decision(0)
        return isinstance(began, Incarnation) and newest_on_lineage(self._plan.job_dir) != began.resume

    def _is_start_damaged(self, last: Incarnation) -> bool:
        """Return whether the checkpoint this incarnation started from is damaged, unless a person chose it."""
        is_chosen = last.number == 0 and bool(self._attempt.resume)
        start = self._plan.checkpoints / last.resume
        return bool(last.resume) and not is_chosen and os.path.exists(start / DAMAGED)

    def _hang_failures(self, number: int, abort: dict[str, Any]) -> list[RankFailure]:
        """Return a failure per rank to blame for a hang, now that all ranks have left their evidence."""
        ranks = behind_in_collectives(self._attempt.folder / "flight", incarnation=number, ranks=abort["ranks"])
        hang = Hang(ranks, abort["of"], abort["phase"], abort["step"], abort["seconds"], self._plan.unit)
        return [RankFailure(rank, "hang", signal=9, error=str(hang)) for rank in ranks]

    def _form_incarnation(
        self,
        last: Incarnation | None,
        live: list[Member],
        budget: RestartBudget,
        *,
        resume: str = "",
        blamed: tuple[int, ...] = (),
    ) -> Incarnation:
        """Return the next incarnation: this launcher, the previous members in order, then standbys, as many as fit.

        Nodes that were to blame for an earlier end come after all others, the latest last, even this one.
        """
        # The first member leads and has rank 0, so the store's port is probed on the node where it is bound.
        before = list(last.members) if last else []
        stayed = [member for member in before if member in live]
        order = [*stayed, *(member for member in live if member not in stayed)]
        blame_order = {node: position for position, node in enumerate(blamed)}
        order.sort(
            key=lambda member: (blame_order.get(member.node, -1), member.id != self._members.me.id)
        )  # the others keep their order
        # Where no number of nodes fits at the start, the ranks report what is wrong.
        chosen = order[: max_usable_nodes(self._plan, len(order)) or None]
        resume = resume or newest_on_lineage(self._plan.job_dir)
        generation = claim_generation(self._plan.job_dir, previous=last.generation if last else None, resume=resume)
        return Incarnation(
            number=last.number + 1 if last else 0,
            generation=generation,
            resume=resume,
            host=self._members.host(chosen),
            port=free_port(),  # probed on this node, which is rank 0's, unless it is to blame
            members=tuple(chosen),
            spent=budget.spent,
            blamed=blamed,
        )

    def _stopped_ending(self, last: Incarnation | None = None) -> Ending:
        """Return the ending of an attempt that was asked to stop while no rank runs."""
        resumable = bool(self._attempt.resume or newest_on_lineage(self._plan.job_dir))
        code = STOPPED if resumable else 143
        number = last.number + 1 if last else 0
        return _ending(Outcome(code, "stopped", incarnation=number, stop_reason=self._stop.reason))

    def _too_few_nodes(self, last: Incarnation, live: int, failures: list[RankFailure]) -> Outcome:
        """Return the outcome when too few nodes are left.

        Committed progress is worth requeueing at once; without any, starts are counted (protocols.md §1).
        """
        first = first_failure(failures) if failures else None
        waited = f" and none came back within {self._plan.return_seconds:.0f} s" if self._plan.return_seconds else ""
        before = f"{first.summary}: " if first else ""
        error = f"{before}{live} of at least {self._plan.min_nodes} nodes were left{waited}"
        code = STOPPED if self._has_progressed() and self._plan.is_elastic else first.code if first else 1
        return Outcome(code, "node", replace(first, error=error) if first else None, last.number, error)

    # While an incarnation runs.

    def wants_more_nodes(self, incarnation: Incarnation, *, ready_after: float | None, running: float) -> bool:
        """Return whether this incarnation should end, at a step boundary, to take in launchers that stand by.

        They are taken in once they have waited for as long as a restart costs all nodes together (`ready_after`:
        seconds from this incarnation's start to its first step; None before that). Whatever happens next, this loses
        at most twice the time that a decision with foresight would. Scripts take standbys in only when they restart
        anyway, as not every script saves on request.
        """
        plan, now = self._plan, time.monotonic()
        if not (plan.is_elastic or plan.spares) or self._stop.reason:
            return False
        # Polled from the start: only launchers proven live can replace a lost node, which may be needed soon.
        standby = [member for member in self._members.live() if incarnation.node_index(member) < 0]
        if plan.spares or plan.script is not None or ready_after is None:
            return False
        waiting = [member for member in standby if self._members.is_proven_live(member)]
        count = len(incarnation.members)
        more = max_usable_nodes(plan, count + len(waiting)) - count if waiting else 0
        if more <= 0:
            self._waiting = ([], now)
            return False
        if self._waiting[0] != waiting:
            self._waiting = (waiting, now)
        waited = now - self._waiting[1]
        return running >= plan.grow_seconds and waited * more / (count + more) >= ready_after

    # Reporting.

    def _report(self, last: Incarnation | None, decision: Decision) -> None:
        """Report a decision, once: by the launcher whose decision was recorded."""
        if last is not None and self._verdict is not None:
            self._report_end(last, decision, self._verdict)
        if isinstance(decision, Ending):
            return
        previous = last.members if last else ()
        joined = [member.name for member in decision.members if last is not None and member not in previous]
        world_size = len(decision.members) * self._plan.ranks_per_node
        if joined:
            self._reporter.event("nodes.joined", incarnation=decision.number, nodes=joined, world_size=world_size)
        self._reporter.event(
            "incarnation.started",
            incarnation=decision.number,
            world_size=world_size,
            nodes=decision.names,
            generation=decision.generation,
            resumed_from=decision.resume,
        )

    def _report_end(self, last: Incarnation, decision: Decision, verdict: _Verdict) -> None:
        failures, restarting = verdict.failures, isinstance(decision, Incarnation)
        first = first_failure(failures).to_dict() if failures else {"rank": None, "exit_code": 0, "signal": None}
        result = {} if isinstance(decision, Incarnation) else decision.result
        outcome = "starting again" if restarting else f"the attempt ends: {result['cause']}, {result['exit_code']}"
        self._log(f"incarnation {last.number} ended: {first}; {outcome}")
        fields = {("failure" if key == "kind" else key): value for key, value in first.items()}
        why = verdict.why if restarting or verdict.outcome else str(result["cause"])
        fields |= {"incarnation": last.number, "restarting": restarting, "why": why, "nodes": len(last.members)}
        self._reporter.event("incarnation.ended", **fields)


def lost_node(rank: int, member: Member) -> RankFailure:
    return RankFailure(rank, "node", signal=9, error=f"the launcher on {member.name or member.node} was lost", order=-1)


def _ranks(abort: dict[str, Any]) -> list[int]:
    return list(abort.get("ranks") or [0])


def _ending(outcome: Outcome) -> Ending:
    return Ending(outcome.to_dict())


def _end_reason(failures: list[RankFailure], outcome: Outcome | None, regroups: bool) -> str:
    """Return in one word why an incarnation ended.

    The outcome's cause, `joined` (more nodes), or the first failure's kind.
    """
    if outcome is not None:
        return outcome.cause
    return "joined" if regroups and not failures else first_failure(failures).kind if failures else "failed"
