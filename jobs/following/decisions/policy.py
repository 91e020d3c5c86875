"""Decide what follows an attempt's end, a restart or a stop, by why it ended and what it has saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from diagnosis.causes import UNKNOWN
from jobs import blamed_nodes, checkpoints
from jobs.following.decisions import moves
from jobs.following.end_causes import end_reason
from jobs.following.end_causes.cause import CAUSE_TEXTS
from jobs.following.end_causes.end_reason import EndReason
from jobs.models import Attempt, Checkpoint
from jobs.spec.restarts import Move

# What a person can do about a failure that would only recur.
ADVICE = {
    "permission": "Grant access, then resume it.",
    "unsaved": "Save with vigil_report.checkpoint(), or call vigil_report.finished() if the run was done.",
    "nonfinite": "Its folder numerics/ has the samples, the module and the norms. Clone it with the fix.",
    "corruption": "Exclude that rank's node, and resume from a checkpoint before the last clean check.",
}
LOWER_LEARNING_RATE = "Clone it with a lower learning rate."
REWIND_STEPS = 200
"""A diverged run goes back this far at least: the detector needs about 100 steps (docs/explanations/guards.md)."""
UNCOUNTED = frozenset({"stopped", "preempted", "requeued"})  # count against neither max_restarts nor in_place
# An attempt that ends for one of these did not fail itself, or never started.
NEVER_RESTARTED = frozenset({"rejected", "unmet", "fenced", "withdrawn"})


@dataclass(frozen=True)
class Decision:
    """The decision on what follows an attempt's end, with a sentence for people.

    `blamed`: nodes that the next attempts avoid for a day; `excluded_nodes`: all that the next one avoids.
    `starts_back`: it does not resume from the newest checkpoint. `version`: of the verdict that it is based on.
    """

    restart: bool
    text: str
    resume_from: Checkpoint | None = None
    blamed: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] | None = None  # None: those that were blamed before
    starts_back: bool = False
    version: int = 0


def decide(attempt: Attempt, cause: str) -> Decision:
    """Decide to restart from the newest checkpoint of the attempt's line, or to stop, and explain why."""
    if cause == "completed":
        return Decision(False, "")
    if attempt.job.is_attached:
        return Decision(False, "Not restarted: Vigil did not submit it.")
    if cause == "cancelled" or attempt.cancel_asked_at is not None:
        return Decision(False, "Not restarted: it was cancelled. Resume continues from its newest checkpoint.")
    if cause in NEVER_RESTARTED:
        return Decision(False, f"{CAUSE_TEXTS[cause]} {_WOULD_RECUR}")
    if cause in UNCOUNTED:
        return _continue_uncounted(attempt, cause)
    why = end_reason.end_reason_of(attempt, cause)
    if (refused := _inactive(attempt, why.text)) is not None:
        return replace(refused, version=why.version)
    decision = replace(_by_cause(attempt, cause, why), version=why.version)
    if why.version or cause in end_reason.CERTAIN:
        return decision
    return replace(decision, text=f"{decision.text} {_BEFORE_VERDICT}")


_BEFORE_VERDICT = "Decided before the cause was known."
_WOULD_RECUR = "Not restarted: the same would happen again."


def _continue_uncounted(attempt: Attempt, cause: str) -> Decision:
    """Continue an attempt that was requested to end, without counting a restart, unless it makes no progress at all."""
    if (refused := _inactive(attempt, CAUSE_TEXTS[cause])) is not None:
        return refused
    if cause == "stopped" and failed_twice(attempt, cause):
        return Decision(False, f"{CAUSE_TEXTS[cause]} {_FAILED_TWICE}")
    return _restart_decision(attempt, CAUSE_TEXTS[cause], count_text="")


_FAILED_TWICE = "Failed twice for the same reason without saving a checkpoint; not restarted."


def _inactive(attempt: Attempt, reason: str) -> Decision | None:
    if attempt.job.owner.is_active:
        return None
    return Decision(False, f"{reason} Not restarted: the account of {attempt.job.owner} is deactivated.")


def _by_cause(attempt: Attempt, cause: str, why: EndReason) -> Decision:
    move = moves.move_of(why.code, node=why.node, job=attempt.job.spec, project=attempt.job.project)
    if move == "stop":
        instead = f" {ADVICE[cause]}" if cause in ADVICE else ""
        return Decision(False, f"{why.text} {_WOULD_RECUR}{instead}")
    if failed_twice(attempt, cause, why):
        return Decision(False, f"{why.text} {_FAILED_TWICE}")
    used, allowed = restarts_used(attempt), attempt.job.spec.get("restart", {}).get("max_restarts", 0)
    if used >= allowed:
        return Decision(False, f"{why.text} Not restarted: its {allowed} restarts are used up.")
    return _MOVE_FUNCTIONS[move](_RestartRequest(attempt, cause, why, move, f" Restart {used + 1} of {allowed}."))


class _Exclusion(NamedTuple):
    """Nodes that are blamed now, and all that the next attempt excludes."""

    blamed: tuple[str, ...]
    excluded: tuple[str, ...]


class _RestartRequest(NamedTuple):
    """A failed attempt for which a move decides between restart and stop."""

    attempt: Attempt
    cause: str
    why: EndReason
    move: Move
    count_text: str

    def stop(self, because: str) -> Decision:
        return Decision(False, f"{self.why.text} Not restarted: {because}")

    def restart(self, without: _Exclusion | None = None) -> Decision:
        return _restart_decision(self.attempt, self.why.text, count_text=self.count_text, exclusion=without)


# One function for each move of jobs.spec.restarts.


def _restart(request: _RestartRequest) -> Decision:
    return request.restart()


def _once(request: _RestartRequest) -> Decision:
    if any(
        end_reason.end_reason_of(earlier, earlier.cause).code == request.why.code
        for earlier in _failures_since_manual_start(request.attempt)
    ):
        return request.stop("it was restarted for the same reason before.")
    return request.restart()


def _once_if_saved(request: _RestartRequest) -> Decision:
    if not checkpoints.committed_by(request.attempt):
        return request.stop("it saved no checkpoint since its start, so the same would happen again.")
    return _once(request)


def _apart(request: _RestartRequest) -> Decision:
    """Restart anywhere the first time; the second time without the nodes that both attempts had, if enough are left."""
    for earlier in _failures_since_manual_start(request.attempt):
        if end_reason.end_reason_of(earlier, earlier.cause).code != request.why.code:
            continue
        shared = [node for node in request.attempt.nodes if node in earlier.nodes]
        if exclusion := _exclude(request.attempt, shared):
            return request.restart(exclusion)
        break
    return request.restart()


def _restart_elsewhere(request: _RestartRequest) -> Decision:
    if request.cause == blamed_nodes.CAUSE:
        return _away_from_corruption(request)
    if not request.why.node:
        return _apart(request)
    if exclusion := _exclude(request.attempt, [request.why.node]):
        return request.restart(exclusion)
    if request.why.code.startswith("scheduler."):  # the scheduler starts nothing on a node that is down or drained
        return request.restart()
    return request.stop(_too_few_nodes(request.why.node))


def _too_few_nodes(node: str) -> str:
    return f"it failed on {node}, and too few nodes are left without it."


def _away_from_corruption(request: _RestartRequest) -> Decision:
    """Restart without the node that was named, from a checkpoint that is sound as far as it is known."""
    attempt, corruption = request.attempt, blamed_nodes.corruption_finding(request.attempt)
    if corruption is None or not (corruption.node or corruption.is_intact):
        return request.stop(f"the faulty node is unknown. {ADVICE['corruption']}")
    if corruption.is_intact:
        start = checkpoints.newest_on_line(attempt)
    elif (start := checkpoints.newest_before(attempt, corruption.clean_step)) is None:
        return request.stop(f"it has no checkpoint from before the last clean check. {ADVICE['corruption']}")
    exclusion = _exclude(attempt, [corruption.node]) if corruption.node else None
    if corruption.node and not exclusion:
        return request.stop(_too_few_nodes(corruption.node))
    which = "" if corruption.node else " The faulty node is unknown."
    decision = _restart_decision(
        attempt, f"{request.why.text}{which}", count_text=request.count_text, exclusion=exclusion, start=start
    )
    return replace(decision, starts_back=True)


def _rewind(request: _RestartRequest) -> Decision:
    """Restart a diverged run well before it diverged, with half the learning rate (jobs.disk.prepare writes it)."""
    attempt, reason = request.attempt, request.why.text
    if request.cause != "diverged":  # a user's program, whose learning rate Vigil cannot set
        return request.stop(f"the same would happen again. {LOWER_LEARNING_RATE}")
    start = checkpoints.newest_before(attempt, (attempt.step or 0) - REWIND_STEPS)
    if start is None:
        many = attempt.job.job_kind.units
        return request.stop(f"it has no checkpoint that is at least {REWIND_STEPS} {many} older. {LOWER_LEARNING_RATE}")
    unit = attempt.job.job_kind.unit
    text = f"{reason} Restarted from {unit} {start.step:,} with half the learning rate as attempt {attempt.number + 1}."
    return Decision(True, f"{text}{request.count_text}", start, starts_back=True)


def _before(request: _RestartRequest) -> Decision:
    """Restart before the checkpoint that cannot be read: the attempt's newest, else the one that it resumed from."""
    attempt = request.attempt
    rows = Checkpoint.objects.filter(attempt=attempt).exclude(state=Checkpoint.State.PRUNED)
    bad = rows.order_by("-generation", "-step").first() or attempt.resume_from
    if bad is not None and bad.resumable:
        start = checkpoints.newest_before(attempt, bad.step - 1)
    else:  # its trainer, or Vigil, has already found that out: every remaining checkpoint is older
        start = checkpoints.newest_on_line(attempt) if bad is not None else None
    if start is None:
        return request.stop("it has no earlier checkpoint.")
    return replace(
        _restart_decision(attempt, request.why.text, count_text=request.count_text, start=start), starts_back=True
    )


_MOVE_FUNCTIONS: Mapping[Move, Callable[[_RestartRequest], Decision]] = {
    "elsewhere": _restart_elsewhere,
    "apart": _apart,
    "restart": _restart,
    "once": _once,
    "once-if-saved": _once_if_saved,
    "rewind": _rewind,
    "before": _before,
}


def _restart_decision(
    attempt: Attempt,
    reason: str,
    *,
    count_text: str,
    exclusion: _Exclusion | None = None,
    start: Checkpoint | None = None,
) -> Decision:
    start = start or checkpoints.newest_on_line(attempt)
    where = f"from {attempt.job.job_kind.unit} {start.step:,}" if start is not None else "from the beginning"
    but = f" without {', '.join(exclusion.blamed)}" if exclusion else ""
    text = f"{reason} Restarted {where}{but} as attempt {attempt.number + 1}.{count_text}"
    if exclusion is None:
        return Decision(True, text, start)
    return Decision(True, text, start, blamed=exclusion.blamed, excluded_nodes=exclusion.excluded)


def _exclude(attempt: Attempt, nodes: list[str]) -> _Exclusion | None:
    """Return which of the nodes the next attempt can exclude; None if too few others would be left."""
    if not nodes:
        return None
    others = blamed_nodes.EligibleNodes.for_job(attempt.job)
    excluded = others.at_most([*nodes, *blamed_nodes.blamed(attempt.job, before=attempt.number)])
    blamed = tuple(node for node in nodes if node in excluded)
    return _Exclusion(blamed, tuple(excluded)) if blamed and others.are_enough(excluded) else None


def advice_instead_of_resume(cause: str) -> str:
    """Return what a person should do if the newest checkpoint would lead to the same end; "" if it would not."""
    return LOWER_LEARNING_RATE if cause == "diverged" else ADVICE.get(cause, "")


def failed_twice(attempt: Attempt, cause: str, why: EndReason | None = None) -> bool:
    """Return whether the attempt before failed for the same reason and this one saved no checkpoint in between.

    The reason is the same if both verdicts have one fingerprint; if a verdict is missing or unknown, if both ended
    alike.
    """
    if attempt.origin == Attempt.Origin.RESUMED or checkpoints.committed_by(attempt):
        return False
    before = Attempt.objects.filter(job_id=attempt.job_id, number=attempt.number - 1).with_job().first()
    if before is None:
        return False
    if why is not None and why.fingerprint and why.code != UNKNOWN:
        then = end_reason.end_reason_of(before, before.cause)
        if then.fingerprint and then.code != UNKNOWN:
            return why.fingerprint == then.fingerprint
    return before.cause == cause


def restarts_used(attempt: Attempt) -> int:
    """Return the number of counted restarts since a person last started or resumed the job."""
    return sum(
        after.origin == Attempt.Origin.RESTARTED and before.cause not in UNCOUNTED
        for after, before in _successive_attempts(attempt)
    )


def _failures_since_manual_start(attempt: Attempt) -> list[Attempt]:
    """Return the earlier attempts that failed since a person last started or resumed the job, newest first."""
    return [before for _, before in _successive_attempts(attempt) if before.cause not in UNCOUNTED]


def _successive_attempts(attempt: Attempt) -> list[tuple[Attempt, Attempt]]:
    """Return each attempt since then with the one before it, newest first."""
    rows = Attempt.objects.filter(job_id=attempt.job_id, number__lte=attempt.number).order_by("-number")
    attempts, found = list(rows.with_job()), []
    for after, before in zip(attempts, attempts[1:], strict=False):
        if after.origin in {Attempt.Origin.RESUMED, Attempt.Origin.SUBMITTED}:
            break
        found.append((after, before))
    return found
