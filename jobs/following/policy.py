"""What follows an attempt's end: the next attempt, or the decision to stop; by why it ended and what it has left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from diagnosis.causes import UNKNOWN
from jobs import checkpoints, suspects
from jobs.following import known, moves
from jobs.following.cause import WORDS
from jobs.following.known import Known
from jobs.models import Attempt, Checkpoint
from jobs.spec.restarts import Move

# What a person can do where the same would only happen again.
MOVES = {
    "permission": "Let them in, then resume it.",
    "unsaved": "Let it save with vigil_report.checkpoint(), or say vigil_report.finished() where it was done.",
    "nonfinite": "Its folder numerics/ has the samples, the module and the norms. Clone it with the fix.",
    "corruption": "Keep it from that rank's node, and resume it from a checkpoint before the last clean check.",
}
LOWER = "Clone it with a lower learning rate."
REWIND_STEPS = 200
"""A run that has diverged goes back at least so far: the detector takes some 100 steps to be sure (docs/guards.md)."""
FREE = frozenset({"stopped", "preempted", "requeued"})  # count against neither max_restarts nor in_place
# How an attempt ends without having failed, or before it could.
NEVER = frozenset({"rejected", "unmet", "fenced", "withdrawn"})


@dataclass(frozen=True)
class Decision:
    """What follows an attempt's end, in a sentence for people.

    `blamed`: nodes that the next attempts are kept from for a day; `excluded_nodes`: all that the next one is.
    `starts_back`: not from the newest checkpoint. `version`: of the verdict that it is by.
    """

    restart: bool
    text: str
    resume_from: Checkpoint | None = None
    blamed: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] | None = None  # None: those that were blamed before
    starts_back: bool = False
    version: int = 0


def decide(attempt: Attempt, cause: str) -> Decision:
    """Start anew from the newest checkpoint on the line, or stop and say why."""
    if cause == "completed":
        return Decision(False, "")
    if attempt.job.is_attached:
        return Decision(False, "Vigil did not submit it, so it does not start it anew.")
    if cause == "cancelled" or attempt.cancel_asked_at is not None:
        return Decision(False, "Cancelled, so Vigil does not start it anew. Resume goes on from its newest checkpoint.")
    if cause in NEVER:
        return Decision(False, f"{WORDS[cause]} {_AGAIN} Your move.")
    if cause in FREE:
        return _free(attempt, cause)
    why = known.known_of(attempt, cause)
    if (refused := _inactive(attempt, why.says)) is not None:
        return replace(refused, version=why.version)
    decision = replace(_by_cause(attempt, cause, why), version=why.version)
    if why.version or cause in known.CERTAIN:
        return decision
    return replace(decision, text=f"{decision.text} {_UNTOLD}")


_UNTOLD = "Decided by how it ended, before it was known why."
_AGAIN = "That would happen again, so Vigil does not start it anew."


def _free(attempt: Attempt, cause: str) -> Decision:
    """What was asked to end goes on, and nothing is counted: unless it gets nowhere at all."""
    if (refused := _inactive(attempt, WORDS[cause])) is not None:
        return refused
    if cause == "stopped" and struck_twice(attempt, cause):
        return Decision(False, f"{WORDS[cause]} {_TWICE}")
    return _anew(attempt, WORDS[cause], counted="")


_TWICE = "The same struck twice with no checkpoint between. Your move."


def _inactive(attempt: Attempt, says: str) -> Decision | None:
    if attempt.job.owner.is_active:
        return None
    who = f"The account of {attempt.job.owner} is deactivated"
    return Decision(False, f"{says} {who}, so Vigil does not start it anew.")


def _by_cause(attempt: Attempt, cause: str, why: Known) -> Decision:
    move = moves.move_of(why.code, node=why.node, job=attempt.job.spec, project=attempt.job.project)
    if move == "stop":
        instead = f" {MOVES[cause]}" if cause in MOVES else ""
        return Decision(False, f"{why.says} {_AGAIN}{instead} Your move.")
    if struck_twice(attempt, cause, why):
        return Decision(False, f"{why.says} {_TWICE}")
    used, allowed = restarts_used(attempt), attempt.job.spec.get("restart", {}).get("max_restarts", 0)
    if used >= allowed:
        return Decision(False, f"{why.says} Its {allowed} restarts are used up. Your move.")
    return _CARRIED_OUT[move](_Asked(attempt, cause, why, move, f" Restart {used + 1} of {allowed}."))


class _Kept(NamedTuple):
    """Nodes that are blamed now, and all that the next attempt is kept from."""

    blamed: tuple[str, ...]
    all: tuple[str, ...]


class _Asked(NamedTuple):
    attempt: Attempt
    cause: str
    why: Known
    move: Move
    counted: str

    def stop(self, because: str) -> Decision:
        return Decision(False, f"{self.why.says} {because} Your move.")

    def anew(self, without: _Kept | None = None) -> Decision:
        return _anew(self.attempt, self.why.says, counted=self.counted, without=without)


# One function a move of jobs.spec.restarts.


def _restart(asked: _Asked) -> Decision:
    return asked.anew()


def _once(asked: _Asked) -> Decision:
    if any(known.known_of(one, one.cause).code == asked.why.code for one in _since_a_person(asked.attempt)):
        return asked.stop("It had been started anew for that before.")
    return asked.anew()


def _once_if_saved(asked: _Asked) -> Decision:
    if not checkpoints.committed_by(asked.attempt):
        return asked.stop("It had not saved anything since its start, so the same would happen again.")
    return _once(asked)


def _apart(asked: _Asked) -> Decision:
    """The first time anew wherever there is room; then without the nodes that both had, if others are left."""
    for one in _since_a_person(asked.attempt):
        if known.known_of(one, one.cause).code != asked.why.code:
            continue
        shared = [node for node in asked.attempt.nodes if node in one.nodes]
        if kept := _room_without(asked.attempt, shared):
            return asked.anew(kept)
        break
    return asked.anew()


def _elsewhere(asked: _Asked) -> Decision:
    if asked.cause == suspects.CAUSE:
        return _away_from_corruption(asked)
    if not asked.why.node:
        return _apart(asked)
    if kept := _room_without(asked.attempt, [asked.why.node]):
        return asked.anew(kept)
    if asked.why.code.startswith("scheduler."):  # the scheduler starts nothing on a node that is not well
        return asked.anew()
    return asked.stop(f"It was on {asked.why.node}, and without it there are too few nodes.")


def _away_from_corruption(asked: _Asked) -> Decision:
    """Goes on without the node that was named, from a checkpoint that is sound for all that is known."""
    attempt, found = asked.attempt, suspects.finding(asked.attempt)
    if found is None or not (found.node or found.is_intact):
        return asked.stop(f"Which node cannot be told. {MOVES['corruption']}")
    if found.is_intact:
        start = checkpoints.newest_on_line(attempt)
    elif (start := checkpoints.newest_before(attempt, found.clean_step)) is None:
        return asked.stop(f"It has no checkpoint from before the last clean check. {MOVES['corruption']}")
    kept = _room_without(attempt, [found.node]) if found.node else None
    if found.node and not kept:
        return asked.stop(f"It was on {found.node}, and without it there are too few nodes.")
    which = "" if found.node else " Which node it was cannot be told."
    decision = _anew(attempt, f"{asked.why.says}{which}", counted=asked.counted, without=kept, start=start)
    return replace(decision, starts_back=True)


def _rewind(asked: _Asked) -> Decision:
    """Decides whether a diverged run goes well back, with half the learning rate (jobs.disk.prepare writes it)."""
    attempt, says = asked.attempt, asked.why.says
    if asked.cause != "diverged":  # somebody's own program: its learning rate is its own
        return asked.stop(f"{_AGAIN} {LOWER}")
    start = checkpoints.newest_before(attempt, (attempt.step or 0) - REWIND_STEPS)
    if start is None:
        many = attempt.job.of_kind.many
        return asked.stop(f"It has no checkpoint from {REWIND_STEPS} {many} before or earlier to go back to. {LOWER}")
    counts = attempt.job.of_kind.counts
    text = (
        f"{says} Started anew from {counts} {start.step:,} with half the learning rate as attempt {attempt.number + 1}."
    )
    return Decision(True, f"{text}{asked.counted}", start, starts_back=True)


def _before(asked: _Asked) -> Decision:
    """From the checkpoint before the one that cannot be read: its own newest, else the one that it started from."""
    attempt = asked.attempt
    own = Checkpoint.objects.filter(attempt=attempt).exclude(state=Checkpoint.State.PRUNED)
    bad = own.order_by("-generation", "-step").first() or attempt.resume_from
    if bad is not None and bad.resumable:
        start = checkpoints.newest_before(attempt, bad.step - 1)
    else:  # its trainer, or Vigil, has found it out already: what is left is before it
        start = checkpoints.newest_on_line(attempt) if bad is not None else None
    if start is None:
        return asked.stop("It has no checkpoint before that one.")
    return replace(_anew(attempt, asked.why.says, counted=asked.counted, start=start), starts_back=True)


_CARRIED_OUT: Mapping[Move, Callable[[_Asked], Decision]] = {
    "elsewhere": _elsewhere,
    "apart": _apart,
    "restart": _restart,
    "once": _once,
    "once-if-saved": _once_if_saved,
    "rewind": _rewind,
    "before": _before,
}


def _anew(
    attempt: Attempt,
    says: str,
    *,
    counted: str,
    without: _Kept | None = None,
    start: Checkpoint | None = None,
) -> Decision:
    start = start or checkpoints.newest_on_line(attempt)
    where = f"from {attempt.job.of_kind.counts} {start.step:,}" if start is not None else "from the beginning"
    but = f" without {', '.join(without.blamed)}" if without else ""
    text = f"{says} Started anew {where}{but} as attempt {attempt.number + 1}.{counted}"
    if without is None:
        return Decision(True, text, start)
    return Decision(True, text, start, blamed=without.blamed, excluded_nodes=without.all)


def _room_without(attempt: Attempt, nodes: list[str]) -> _Kept | None:
    """Those of the nodes that the next attempt can be kept from; None where too few others would be left."""
    if not nodes:
        return None
    others = suspects.Others.of(attempt.job)
    kept = others.at_most([*nodes, *suspects.blamed(attempt.job, before=attempt.number)])
    blamed = tuple(node for node in nodes if node in kept)
    return _Kept(blamed, tuple(kept)) if blamed and others.are_enough(kept) else None


def instead_of_resuming(cause: str) -> str:
    """What a person should do where the newest checkpoint would lead to the same end; "" where it would not."""
    return LOWER if cause == "diverged" else MOVES.get(cause, "")


def struck_twice(attempt: Attempt, cause: str, why: Known | None = None) -> bool:
    """Whether the attempt before ended of the same and this one committed nothing in between.

    Of the same: the verdicts have one fingerprint; where either has none, or does not know why, the same word.
    """
    if attempt.origin == Attempt.Origin.RESUMED or checkpoints.committed_by(attempt):
        return False
    before = Attempt.objects.filter(job_id=attempt.job_id, number=attempt.number - 1).with_job().first()
    if before is None:
        return False
    if why is not None and why.fingerprint and why.code != UNKNOWN:
        then = known.known_of(before, before.cause)
        if then.fingerprint and then.code != UNKNOWN:
            return why.fingerprint == then.fingerprint
    return before.cause == cause


def restarts_used(attempt: Attempt) -> int:
    """Restarts that count, since a person last started or resumed the job."""
    return sum(
        after.origin == Attempt.Origin.RESTARTED and before.cause not in FREE for after, before in _pairs(attempt)
    )


def _since_a_person(attempt: Attempt) -> list[Attempt]:
    """The attempts before it that failed since a person last started or resumed the job, newest first."""
    return [before for _, before in _pairs(attempt) if before.cause not in FREE]


def _pairs(attempt: Attempt) -> list[tuple[Attempt, Attempt]]:
    """Each attempt since then with the one before it, newest first."""
    rows = Attempt.objects.filter(job_id=attempt.job_id, number__lte=attempt.number).order_by("-number")
    attempts, found = list(rows.with_job()), []
    for after, before in zip(attempts, attempts[1:], strict=False):
        if after.origin in {Attempt.Origin.RESUMED, Attempt.Origin.SUBMITTED}:
            break
        found.append((after, before))
    return found
