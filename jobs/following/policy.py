"""What follows an attempt's end: the next attempt, or the decision to stop. By its cause, and by what it has left."""

from __future__ import annotations

from dataclasses import dataclass

from jobs import checkpoints, suspects
from jobs.following.cause import WORDS
from jobs.models import Attempt, Checkpoint
from jobs.spec import JobSpec

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
RESTARTED = frozenset(
    {"stopped", "preempted", "requeued", "node_fail", "forgotten", "launch", "lost", "hang", "timeout", "diverged"}
)
FREE = frozenset({"stopped", "preempted", "requeued"})  # count against neither max_restarts nor in_place


@dataclass(frozen=True)
class Decision:
    """What follows an attempt's end, in a sentence for people."""

    restart: bool
    text: str
    resume_from: Checkpoint | None = None


def decide(attempt: Attempt, cause: str) -> Decision:
    """Start anew from the newest checkpoint on the line, or stop and say why."""
    if cause == "completed":
        return Decision(False, "")
    if attempt.job.is_attached:
        return Decision(False, "Vigil did not submit it, so it does not start it anew.")
    if cause == "cancelled" or attempt.cancel_asked_at is not None:
        return Decision(False, "Cancelled, so Vigil does not start it anew. Resume goes on from its newest checkpoint.")
    if cause in MOVES and cause != suspects.CAUSE:
        return Decision(False, f"That would happen again, so Vigil does not start it anew. {MOVES[cause]} Your move.")
    if cause not in RESTARTED and cause != suspects.CAUSE:
        return Decision(
            False, f"{WORDS.get(cause, '')} That would happen again, so Vigil does not start it anew. Your move."
        )
    if not attempt.job.owner.is_active:
        who = f"The account of {attempt.job.owner} is deactivated"
        return Decision(False, f"{WORDS[cause]} {who}, so Vigil does not start it anew.")
    if cause not in {"preempted", "requeued"} and struck_twice(attempt, cause):
        return Decision(False, f"{WORDS[cause]} The same struck twice with no checkpoint between. Your move.")
    used, allowed = restarts_used(attempt), attempt.job.spec.get("restart", {}).get("max_restarts", 0)
    if cause not in FREE and used >= allowed:
        return Decision(False, f"{WORDS[cause]} Its {allowed} restarts are used up. Your move.")
    if cause == "diverged":
        return _rewind(attempt, f" Restart {used + 1} of {allowed}.")
    if cause == suspects.CAUSE:
        return _elsewhere(attempt, f" Restart {used + 1} of {allowed}.")
    start = checkpoints.newest_on_line(attempt)
    counted = "" if cause in FREE else f" Restart {used + 1} of {allowed}."
    where = f"from step {start.step:,}" if start is not None else "from the beginning"
    return Decision(True, f"{WORDS[cause]} Started anew {where} as attempt {attempt.number + 1}.{counted}", start)


def _rewind(attempt: Attempt, counted: str) -> Decision:
    """Decides whether a diverged run goes well back, with half the learning rate (jobs.disk.prepare writes it)."""
    start = checkpoints.newest_before(attempt, (attempt.step or 0) - REWIND_STEPS)
    if start is None:
        text = f"{WORDS['diverged']} It has no checkpoint from {REWIND_STEPS} steps before or earlier to go back to."
        return Decision(False, f"{text} {LOWER} Your move.")
    text = f"{WORDS['diverged']} Started anew from step {start.step:,} with half the learning rate as attempt"
    return Decision(True, f"{text} {attempt.number + 1}.{counted}", start)


def _elsewhere(attempt: Attempt, counted: str) -> Decision:
    """Goes on without the node that was named, from a checkpoint that is sound for all that is known."""
    found = suspects.finding(attempt)
    if found is None or not (found.node or found.is_intact):
        return Decision(False, f"{WORDS['corruption']} Which node cannot be told. {MOVES['corruption']} Your move.")
    if found.is_intact:
        start = checkpoints.newest_on_line(attempt)
    elif (start := checkpoints.newest_before(attempt, found.clean_step)) is None:
        text = f"{WORDS['corruption']} It has no checkpoint from before the last clean check."
        return Decision(False, f"{text} {MOVES['corruption']} Your move.")
    spec = JobSpec.parse(attempt.job.spec)
    kept = suspects.kept_from(attempt.job_id, spec, before=attempt.number + 1)
    if kept and not suspects.has_others(spec, kept):
        text = f"{WORDS['corruption']} It was on {found.node}, and without it there are too few nodes."
        return Decision(False, f"{text} Your move.")
    where = f"from step {start.step:,}" if start is not None else "from the beginning"
    without = f" without {', '.join(kept)}" if kept else ""
    which = "" if found.node else " Which node it was cannot be told."
    text = f"{WORDS['corruption']}{which} Started anew {where}{without} as attempt {attempt.number + 1}.{counted}"
    return Decision(True, text, start)


def instead_of_resuming(cause: str) -> str:
    """What a person should do where the newest checkpoint would lead to the same end; "" where it would not."""
    return LOWER if cause == "diverged" else MOVES.get(cause, "")


def struck_twice(attempt: Attempt, cause: str) -> bool:
    """Whether the attempt before ended of the same cause and this one committed nothing in between."""
    if attempt.origin == Attempt.Origin.RESUMED or checkpoints.committed_by(attempt):
        return False
    before = Attempt.objects.filter(job_id=attempt.job_id, number=attempt.number - 1).first()
    return before is not None and before.cause == cause


def restarts_used(attempt: Attempt) -> int:
    """Restarts that count, since a person last started or resumed the job."""
    used = 0
    attempts = list(Attempt.objects.filter(job_id=attempt.job_id, number__lte=attempt.number).order_by("-number"))
    for current, before in zip(attempts, attempts[1:], strict=False):
        if current.origin in {Attempt.Origin.RESUMED, Attempt.Origin.SUBMITTED}:
            break
        used += current.origin == Attempt.Origin.RESTARTED and before.cause not in FREE
    return used
