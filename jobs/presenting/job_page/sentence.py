"""Write the sentence that leads a job's page: the state, then what follows from it. Pure: facts in, words out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from training.federation.tables import MIN_EVALUATED
from vigil_core import formatting

SILENT_S = 60  # without a report for longer, the page says so


@dataclass(frozen=True)
class Sentence:
    """`lead` is emphasised, `rest` follows it muted; `move` is what the reader should do, in bold."""

    lead: str
    rest: str = ""
    move: str = ""


@dataclass(frozen=True, kw_only=True)
class WorstClient:
    """The client with the lowest accuracy, of those with enough evaluation samples."""

    name: str = ""
    """"": unknown."""
    samples: int | None = None
    """Number of samples that it is evaluated on; None if unknown."""
    unreliable: int = 0
    """Number of clients evaluated on too few samples, which are not compared."""
    is_unknown: bool = False
    """Whether this applies to all clients."""

    @property
    def text(self) -> str:
        """Return "client 7 on 14 samples"."""
        if self.is_unknown:
            return f"no client has {MIN_EVALUATED} evaluation samples"
        return f"{self.name} on {formatting.plural(self.samples, 'sample')}" if self.samples is not None else self.name


@dataclass(frozen=True, kw_only=True)
class SentenceFacts:
    """The facts that the sentence is made of."""

    state: str
    now: datetime
    number: int = 1  # of the attempt
    reason: str = ""
    wants: str = ""  # "2 ranks on 1 node"
    queued_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    ran_s: float | None = None  # over all attempts, without their time in the queue
    ends_by: datetime | None = None  # the time limit
    done_at: datetime | None = None  # the estimate
    step: int | None = None
    steps: int | None = None
    unit: str = "step"  # or round
    phase: str = ""
    last_report_at: datetime | None = None
    resumed_step: int | None = None
    newest_checkpoint: int | None = None
    diagnosis: str = ""  # the cause of a failure in one sentence; empty: unknown
    advice: str = ""  # what its owner should do about that cause
    instead: str = ""  # what to do if resuming from that checkpoint would end the same way
    validation_loss: float | None = None
    accuracy: float | None = None  # a federation's
    worst: WorstClient | None = None  # the client with the worst result
    worst_accuracy: float | None = None
    cancelling: bool = False
    cancelled_by: str = ""
    killing: bool = False
    killed_by: str = ""
    reports: bool = True  # a script may never report
    attached: bool = False  # Vigil follows it but did not start it
    unconfirmed: bool = False  # and the scheduler has not confirmed that it is this person's


def describe_job(facts: SentenceFacts) -> Sentence:
    """Return the sentence for a job in any state."""
    if facts.state == "pending":
        return _pending(facts)
    if facts.state in {"running", "completing", "suspended"}:
        return _running(facts)
    return _ended(facts)


def never_starts(why: str) -> Sentence:
    """Return the sentence for a job that can never start. `why` is the limit, or what the cluster lacks."""
    return Sentence(
        "It can never start as requested.",
        why.replace(" It can never start as requested.", ""),
        "Cancel it, and submit it again within the limit.",
    )


def _pending(facts: SentenceFacts) -> Sentence:
    if facts.cancelling:
        return Sentence("Cancelling before it started.", "It leaves the queue within seconds.")
    waited = (facts.now - facts.queued_at).total_seconds() if facts.queued_at else 0
    again = f" for attempt {facts.number}" if facts.number > 1 else ""
    lead = f"Waiting{again} for {facts.wants}." if facts.wants else f"Waiting in the queue{again}."
    rest = _as_sentence(facts.reason) or (
        f"In the queue for {formatting.duration(waited)}."
        if waited >= 5
        else "It starts as soon as resources are free."
    )
    return Sentence(lead, rest)


def _running(facts: SentenceFacts) -> Sentence:
    if facts.killing:
        return Sentence("Killing.", "Its processes end without a last checkpoint.")
    if facts.cancelling and facts.attached:
        return Sentence("Cancelling.", "Slurm sends SIGTERM, and kills what is left after its KillWait.")
    if facts.cancelling:
        return Sentence(
            "Cancelling.", "The ranks save a last checkpoint and stop; those that do not exit in time are killed."
        )
    if facts.state == "suspended":
        return Sentence(f"Suspended{_at_step(facts)}.", _as_sentence(facts.reason) or "The scheduler has suspended it.")
    if facts.state == "completing":
        return Sentence(
            f"Finishing{_at_step(facts)}.", _as_sentence(facts.reason) or "The scheduler is ending its processes."
        )
    since = formatting.clock(facts.started_at, facts.now) if facts.started_at else "now"
    if facts.step is None:
        return _starting(facts, since)
    silent = (facts.now - facts.last_report_at).total_seconds() if facts.last_report_at else 0.0
    if silent > SILENT_S:
        return Sentence(
            f"No report for {formatting.duration(silent)}.",
            f"The scheduler says it is running; its last report was at {facts.unit} {formatting.count(facts.step)}.",
        )
    counted = _counted(facts)
    lead = f"{counted}, training since {since}" if counted else f"Training since {since}"
    if facts.resumed_step is not None:
        lead += f", resumed from {facts.unit} {formatting.count(facts.resumed_step)}"
    return Sentence(f"{lead}. {_finish(facts)}".strip(), _margin(facts))


def _counted(facts: SentenceFacts) -> str:
    """Return the current round, for a job that counts rounds: they are few and long."""
    if facts.unit == "step" or not facts.steps:
        return ""
    now = min(facts.steps, (facts.step or 0) + 1)
    return f"{facts.unit.capitalize()} {formatting.count(now)} of {formatting.count(facts.steps)}"


def _starting(facts: SentenceFacts, since: str) -> Sentence:
    if facts.attached and not facts.reports:
        return Sentence(f"Running since {since}.", "It has not reported anything; Vigil shows its state in Slurm.")
    if not facts.reports:
        return Sentence(
            f"Running since {since}.", "The script has not reported any values; its logs and resource use are below."
        )
    phase = {"restore": "restoring a checkpoint", "init": "setting up", "compile": "compiling"}.get(facts.phase, "")
    return Sentence(
        f"Started {formatting.ago(facts.started_at, facts.now) if facts.started_at else 'just now'}"
        f"{', ' + phase if phase else ''}.",
        f"The first values come once {facts.unit} 1 is done.",
    )


def _finish(facts: SentenceFacts) -> str:
    if facts.done_at is None:
        return ""
    left = (facts.done_at - facts.now).total_seconds()
    if left < 60:
        return "It should finish within a minute."
    when = formatting.clock(facts.done_at, facts.now)
    return f"It should finish in {formatting.rough(left)}, at {when}." if left < 86400 else f"It should finish {when}."


def _margin(facts: SentenceFacts) -> str:
    """Return how the estimated end relates to the time limit."""
    if facts.done_at is None or facts.ends_by is None:
        return ""
    spare = (facts.ends_by - facts.done_at).total_seconds()
    if spare < 0:
        return (
            f"That is {formatting.rough(-spare)} after its time limit: it will stop at "
            f"{formatting.clock(facts.ends_by, facts.now)} with a checkpoint, to be resumed."
        )
    return "" if spare > 6 * 3600 else f"That is {formatting.rough(spare)} before its time limit."


def _ended(facts: SentenceFacts) -> Sentence:
    if facts.unconfirmed:
        return Sentence("Not attached.", _as_sentence(facts.reason))
    took = f" in {formatting.duration(facts.ran_s)}" if facts.ran_s is not None else ""
    if facts.state == "completed":
        rest = formatting.plural(facts.step, facts.unit) if facts.step else ""
        if facts.validation_loss is not None:
            rest += f"{', ' if rest else ''}validation loss {formatting.loss(facts.validation_loss)}"
        attempts = f" over {formatting.plural(facts.number, 'attempt')}" if facts.number > 1 else ""
        if facts.accuracy is not None:
            after = f" after {formatting.plural(facts.step, facts.unit)}" if facts.step else ""
            lead = f"Accuracy {formatting.loss(facts.accuracy)}{after}, completed{took}{attempts}."
            return Sentence(lead, _worst(facts))
        return Sentence(f"Completed{took}{attempts}.", f"{rest[:1].upper()}{rest[1:]}." if rest else "")
    if facts.state == "cancelled":
        by = f" by {facts.killed_by or facts.cancelled_by}" if facts.killed_by or facts.cancelled_by else ""
        lead = f"{'Killed' if facts.killed_by else 'Cancelled'}{by}{_at_step(facts)}."
        # The reason is informative if nobody in Vigil requested it: scancel, or a failed dependency.
        more = "" if by else _as_sentence(facts.reason)
        rest = _resumable(facts)
        return Sentence(lead, rest) if more in {"", "Cancelled."} else Sentence(more, rest)
    lead = {
        "timeout": f"Reached its time limit{_at_step(facts)}.",
        "out_of_memory": f"Ran out of memory{_at_step(facts)}.",
        "node_fail": f"Lost a node{_at_step(facts)}.",
        "preempted": f"Preempted{_at_step(facts)}.",
        "requeued": f"Requeued{_at_step(facts)}.",
        "boot_fail": "Its node did not boot.",
        "deadline": f"Passed its deadline{_at_step(facts)}.",
    }.get(facts.state, f"Failed{_at_step(facts)}.")
    move = facts.instead or _resumable(facts)
    fix = facts.advice or (
        "Check its output, then submit it with sbatch again."
        if facts.attached
        else "Check the log, then clone the job with a fix."
    )
    return Sentence(lead, _as_sentence(facts.diagnosis or facts.reason), move or fix)


def _worst(facts: SentenceFacts) -> str:
    worst, value = facts.worst, facts.worst_accuracy
    if worst is None or not worst.name or value is None:
        return ""
    among = f" with at least {MIN_EVALUATED} evaluation samples" if worst.unreliable else ""
    on = f" on {formatting.plural(worst.samples, 'sample')}" if worst.samples is not None else ""
    return f"Worst client{among}: {worst.name} at {formatting.loss(value)}{on}."


def _at_step(facts: SentenceFacts) -> str:
    return f" at {facts.unit} {formatting.count(facts.step)}" if facts.step is not None else ""


def _resumable(facts: SentenceFacts) -> str:
    if facts.newest_checkpoint is None:
        return ""
    lost = (facts.step or 0) - facts.newest_checkpoint
    after = f", {formatting.plural(lost, facts.unit)} back" if lost > 0 else ""
    return f"It can be resumed from {facts.unit} {formatting.count(facts.newest_checkpoint)}{after}."


def _as_sentence(text: str) -> str:
    """Return the text with a full stop."""
    text = text.strip()
    return text if not text or text[-1] in ".!?…" else f"{text}."


def soon(now: datetime, seconds: float | None) -> datetime | None:
    """Return the time this many seconds from now."""
    return now + timedelta(seconds=seconds) if seconds is not None else None
