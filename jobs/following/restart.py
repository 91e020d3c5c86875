"""Why an attempt ended, and what follows: the next attempt, or the decision to stop. Pure rules above, rows below."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs import checkpoints
from jobs.errors import Conflict
from jobs.intake.wire import storable
from jobs.models import Attempt, Checkpoint, Job

STOPPED = 75  # the launcher's exit code for "stopped with a committed checkpoint"

# Causes, in one word each; what a page says about them is in WORDS.
WORDS = {
    "completed": "It has done all its steps.",
    "cancelled": "Somebody cancelled it.",
    "stopped": "It was asked to stop, saved a checkpoint and ended.",
    "preempted": "The scheduler took its nodes for another job.",
    "requeued": "It was put back into the queue, by somebody or by the scheduler.",
    "node_fail": "A node was lost.",
    "forgotten": "The scheduler does not know it any more.",
    "lost": "A process was killed from outside.",
    "hang": "A rank did not move any more.",
    "exception": "The program raised an exception.",
    "diverged": "Its loss or gradient ran away.",
    "nonfinite": "Its loss or gradient was not finite.",
    "corruption": "What must be the same bits on several ranks was not: some hardware is broken.",
    "out_of_memory": "It ran out of memory.",
    "timeout": "It reached its time limit before it could save.",
    "unmet": "A job that it was to wait for did not complete.",
    "rejected": "The scheduler did not take it.",
    "fenced": "A newer launch of the same job had taken over.",
    "failed": "The program ended with an error.",
}
# What ends a run whose numbers can't be trusted: by the trainer's word for it, and what a person can do.
NUMERICS = {"divergence": "diverged", "nonfinite": "nonfinite", "corruption": "corruption"}
MOVES = {
    "nonfinite": "Its folder numerics/ has the samples, the module and the norms. Clone it with the fix.",
    "corruption": "Keep it from that rank's node, and resume it from a checkpoint before the last clean check.",
}
LOWER = "Clone it with a lower learning rate."
REWIND_STEPS = 200
"""A run that has diverged goes back at least so far: the detector takes some 100 steps to be sure (docs/guards.md)."""
RESTARTED = frozenset(
    {"stopped", "preempted", "requeued", "node_fail", "forgotten", "lost", "hang", "timeout", "diverged"}
)
_NUMERICS = re.compile(rf"(?:[\w.]+\.)?NumericsError: numerics\.({'|'.join(NUMERICS)}): (.+)")
FREE = frozenset({"stopped", "preempted", "requeued"})  # count neither against max_restarts nor in_place (PROTOCOLS §1)


@dataclass(frozen=True)
class Ended:
    """What is known of the end of an attempt: the scheduler's words, and the launcher's last one."""

    state: str
    exit_code: int | None = None
    signal: int | None = None
    result: Mapping[str, Any] | None = None  # result.json
    cancelled: bool = False  # a person asked for it
    forgotten: bool = False  # the scheduler cannot tell

    @classmethod
    def untold(cls, result: Mapping[str, Any] | None, *, cancelled: bool) -> Ended:
        """Of a job that the scheduler has forgotten: by the launcher's last word, if it had one."""
        if result is None:
            return cls("failed", cancelled=cancelled, forgotten=True)
        code = result.get("exit_code")
        known = code if type(code) is int and 0 <= code < 256 else None
        return cls("completed" if known == 0 else "failed", known, result=result, cancelled=cancelled)


def cause_of(ended: Ended) -> tuple[str, dict[str, Any]]:
    """The cause in one word, and the first failure that the launcher saw."""
    result = ended.result or {}
    failure = _failure(result.get("first_failure"))
    if ended.state == "completed":
        return "completed", failure
    if ended.cancelled or ended.state == "cancelled":
        return "cancelled", failure
    if ended.forgotten:
        return "forgotten", failure
    if ended.exit_code == STOPPED or result.get("cause") == "stopped":
        return "stopped", failure
    if ended.state in {"preempted", "requeued"}:
        return ended.state, failure
    if ended.state in {"node_fail", "boot_fail"}:
        return "node_fail", failure
    if ended.state in {"timeout", "deadline"}:
        return "timeout", failure
    if ended.state == "out_of_memory":
        return "out_of_memory", failure
    return _cause_of_failure(ended, failure), failure


def _cause_of_failure(ended: Ended, failure: Mapping[str, Any]) -> str:
    """Of a plain `failed`: the launcher's word on the first rank if there is one, else the exit code's."""
    known = {"hang": "hang", "stop_timeout": "hang", "node": "node_fail", "fenced": "fenced"}
    if (told := known.get(str((ended.result or {}).get("cause")))) is not None:
        return told
    kind = failure.get("kind")
    if kind == "exception" and (numerics := numerics_of(failure)):
        return numerics[0]
    if kind in {"exception", "hang"}:
        return str(kind)
    if kind in {"signal", "lost_peer", "node", "address_in_use"}:
        return "lost"
    if ended.signal or (ended.exit_code or 0) > 128:
        return "lost"
    return "failed"


def numerics_of(failure: Mapping[str, Any]) -> tuple[str, str] | None:
    """The cause and what the guards of our own trainer said, where they ended the run (training.guards.numerics)."""
    found = _NUMERICS.match(str(failure.get("error", "")))
    return (NUMERICS[found[1]], found[2][:1].upper() + found[2][1:]) if found else None


def _failure(value: object) -> dict[str, Any]:
    """The first failure in known shapes: the file comes from the job, so nothing of it is believed blindly."""
    if not isinstance(value, dict):
        return {}
    kept: dict[str, Any] = {}
    for name in ("rank", "incarnation", "exit_code", "signal"):
        if isinstance(value.get(name), int) and not isinstance(value[name], bool) and abs(value[name]) < 2**31:
            kept[name] = value[name]
    for name, longest in (("kind", 32), ("error", 2000)):
        if isinstance(value.get(name), str):
            kept[name] = storable(value[name])[:longest]
    return kept


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
    if cause in MOVES:
        return Decision(False, f"That would happen again, so Vigil does not start it anew. {MOVES[cause]} Your move.")
    if cause not in RESTARTED:
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
    start = checkpoints.newest_on_line(attempt)
    counted = "" if cause in FREE else f" Restart {used + 1} of {allowed}."
    where = f"from step {start.step:,}" if start is not None else "from the beginning"
    return Decision(True, f"{WORDS[cause]} Started anew {where} as attempt {attempt.number + 1}.{counted}", start)


def _rewind(attempt: Attempt, counted: str) -> Decision:
    """From well before, with half the learning rate (jobs.disk.prepare writes it)."""
    start = checkpoints.newest_before(attempt, (attempt.step or 0) - REWIND_STEPS)
    if start is None:
        text = f"{WORDS['diverged']} It has no checkpoint from {REWIND_STEPS} steps before or earlier to go back to."
        return Decision(False, f"{text} {LOWER} Your move.")
    text = f"{WORDS['diverged']} Started anew from step {start.step:,} with half the learning rate as attempt"
    return Decision(True, f"{text} {attempt.number + 1}.{counted}", start)


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


def next_attempt(last: Attempt, origin: str, *, resume_from: Checkpoint | None = None) -> Attempt:
    """One more attempt of the same job, due to be submitted. In a transaction; whoever comes second gets Conflict."""
    if Attempt.objects.filter(job_id=last.job_id, number__gt=last.number).exists():
        raise Conflict(f"#{last.job_id} was started anew by somebody else just now.")
    attempt = Attempt.objects.create(
        job_id=last.job_id,
        number=last.number + 1,
        origin=origin,
        resume_from=resume_from,
        step=resume_from.step if resume_from is not None else None,
        steps=last.steps,
    )
    Job.objects.filter(pk=last.job_id).update(latest=attempt)
    return attempt
