"""Load a job with its attempts and checkpoints, and turn them into facts for the head of its page."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db.models import Count, F, Max
from django.urls import reverse
from django.utils import timezone

from diagnosis.causes import CAUSES, NONE, UNKNOWN
from jobs import rounds
from jobs.checkpoints import newest_on_line
from jobs.client_name import client_name
from jobs.following.decisions.policy import advice_instead_of_resume
from jobs.gathering.clients import RELIABLE
from jobs.incarnations import number_of, size_of
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Checkpoint, Client, Event, Incident, Job
from jobs.presenting.job_page import header
from jobs.presenting.job_page import ribbon as ribbons
from jobs.presenting.job_page import sentence as sentences
from jobs.presenting.job_page.header import HeaderFact, RoundTraffic
from jobs.presenting.job_page.sentence import WorstClient, soon
from jobs.presenting.metric_values import number
from jobs.presenting.size import is_elastic, limit_seconds, wants
from jobs.progress import Progress, progress
from jobs.waiting.reasons import waiting_reason_of
from training.federation.tables import MIN_EVALUATED
from vigil_core import formatting

MAX_EVENTS = 600
EVALUATED_WITHIN = 20
"""Rounds to search for the worst client, which is only reported for rounds that evaluate clients."""


@dataclass(kw_only=True)
class JobLife:
    """A job with everything that the head of its page shows."""

    job: Job
    attempts: list[Attempt]
    checkpoints: list[Checkpoint]  # newest first, pruned ones left out
    progress: Progress
    now: datetime
    # The checkpoint that "Resume" would start from, if the job has ended.
    resumable: Checkpoint | None = None
    done_at: datetime | None = None
    limit_at: datetime | None = None
    restarts: dict[int, list[tuple[datetime, str]]] = field(default_factory=dict)
    # Step and time of the newest checkpoint that each attempt saved, even if pruned since.
    saved: dict[int, tuple[int, datetime]] = field(default_factory=dict)
    # Ranks and nodes of an elastic job since its last restart in place, as its launcher reported.
    spread: tuple[int, int] | None = None
    # For a federation, once a round is done.
    exchange: RoundTraffic | None = None
    # By attempt that has a post-mortem: the newest verdict's cause and its sentence, "" while there is none.
    postmortems: dict[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def latest(self) -> Attempt:
        return self.attempts[-1]

    @property
    def steps_left(self) -> bool:
        """Return whether a resume has anything left to do."""
        steps = self.progress.steps
        return steps is None or self.resumable is None or self.resumable.step < steps

    @property
    def first_due(self) -> int | None:
        """Return the step at which the next checkpoint is due, if the trainer saves at a fixed interval of steps."""
        every = self._saves_every
        return ((self.progress.step or 0) // every + 1) * every if isinstance(every, int) and every else None

    @property
    def saves_by_itself(self) -> bool:
        """Return whether the trainer decides when to save, based on the cost of a save."""
        return self._saves_every == "auto"

    @property
    def _saves_every(self) -> object:
        return (self.job.spec.get("run") or {}).get("checkpoint_every")

    @property
    def unit(self) -> str:
        """Return the unit of progress: "step" or "round"."""
        return self.job.job_kind.unit

    @property
    def cancelling(self) -> bool:
        return self.latest.is_alive and self.latest.cancel_asked_at is not None

    @property
    def killing(self) -> bool:
        return self.latest.is_alive and self.latest.kill_requested_at is not None

    @property
    def saves_before_it_ends(self) -> bool:
        """Return whether cancelling lets the job save a last checkpoint first."""
        return self.latest.is_alive and self.latest.state != "pending" and not self.job.is_attached

    @property
    def ran_s(self) -> float | None:
        """Return the total run time of all attempts in seconds; None before the first has started."""
        spans = [((a.ended_at or self.now) - a.started_at).total_seconds() for a in self.attempts if a.started_at]
        return sum(spans) if spans else None

    @property
    def ribbon(self) -> ribbons.Ribbon:
        spans = [self._span(attempt) for attempt in self.attempts]
        saves = [self._save(checkpoint) for checkpoint in self.checkpoints]
        of_rounds = self.unit == "round" and self.progress.steps
        goal = f"round {formatting.count(self.progress.steps)}" if of_rounds else ""
        return ribbons.draw(spans, saves, now=self.now, done_at=self.done_at, limit_at=self.limit_at, goal=goal)

    @property
    def sentence(self) -> sentences.Sentence:
        attempt = self.latest
        newest = self.resumable
        return sentences.describe_job(
            sentences.SentenceFacts(
                state=attempt.state,
                now=self.now,
                number=attempt.number,
                reason=waiting_reason_of(attempt, self.job.spec, self.now),
                wants=wants(self.job.spec),
                queued_at=attempt.submitted_at or attempt.created_at,
                started_at=attempt.started_at,
                ended_at=attempt.ended_at,
                ran_s=self.ran_s,
                ends_by=self.limit_at,
                done_at=self.done_at,
                step=attempt.step,
                steps=self.progress.steps,
                unit=self.unit,
                phase=attempt.phase,
                last_report_at=attempt.last_report_at,
                resumed_step=attempt.resume_from.step if attempt.resume_from else None,
                newest_checkpoint=newest.step if newest else None,
                instead=advice_instead_of_resume(attempt.cause),
                diagnosis=self._diagnosis,
                advice=self._advice,
                validation_loss=number(attempt.latest, "validation_loss"),
                accuracy=number(attempt.latest, "accuracy") if self.exchange else None,
                worst=self.exchange.worst if self.exchange else None,
                worst_accuracy=number(attempt.latest, "client_accuracy_min"),
                cancelling=self.cancelling,
                cancelled_by=attempt.cancel_asked_by.username if attempt.cancel_asked_by else "",
                killing=self.killing,
                killed_by=attempt.kill_requested_by.username if attempt.kill_requested_by else "",
                reports=self.job.job_kind.trains or attempt.last_report_at is not None,
                attached=self.job.is_attached,
                unconfirmed=attempt.is_unconfirmed,
            )
        )

    @property
    def _diagnosis(self) -> str:
        """Return the verdict on the latest attempt in one sentence; "" if its cause is unknown."""
        cause, says = self.postmortems.get(self.latest.pk, ("", ""))
        return says if cause in CAUSES and cause not in (UNKNOWN, NONE) else ""

    @property
    def _advice(self) -> str:
        """Return what the job's owner should do about the cause; "" if it is the sysadmins' to repair."""
        cause = CAUSES.get(self.postmortems.get(self.latest.pk, ("", ""))[0])
        return cause.advice if cause is not None and cause.owner in ("researcher", "both") else ""

    @property
    def facts(self) -> list[HeaderFact]:
        """Return the cells of the fact strip."""
        attempt, done, newest = self.latest, self.progress, self.resumable
        return header.strip(
            header.StripFacts(
                kind=self.job.job_kind,
                spec=self.job.spec,
                latest=attempt.latest,
                is_alive=attempt.is_alive,
                nodes=attempt.nodes,
                now=self.now,
                started_at=attempt.started_at,
                ended_at=attempt.ended_at,
                done_at=self.done_at,
                ran_s=self.ran_s,
                step=done.step,
                steps=done.steps,
                fraction=done.fraction,
                lost_steps=sum(_lost_steps(attempt, self.saved) for attempt in self.attempts),
                checkpoint=(newest.step, newest.created_at) if newest else None,
                spread=self.spread,
                traffic=self.exchange,
            )
        )

    def _span(self, attempt: Attempt) -> ribbons.AttemptSpan:
        lost = _lost_steps(attempt, self.saved)
        return ribbons.AttemptSpan(
            number=attempt.number,
            state=attempt.state,
            began=attempt.submitted_at or attempt.created_at,
            started=attempt.started_at,
            ended=attempt.ended_at,
            note=_note(attempt, lost, self.unit),
            lost_from=self.saved.get(attempt.pk, (0, attempt.started_at))[1] if lost else None,
            resumed_from=attempt.resume_from.created_at if attempt.resume_from else None,
            restarts=tuple(self.restarts.get(attempt.pk, ())),
            rounds=self._rounds_of(attempt),
            url=reverse("job_attempts", args=[self.job.pk]) + f"#attempt-{attempt.number}",
            postmortem=self.postmortem_of(attempt),
        )

    def _rounds_of(self, attempt: Attempt) -> tuple[int, int] | None:
        """Return the first and last round that a federation's attempt did."""
        if self.unit != "round" or attempt.step is None:
            return None
        first = attempt.resume_from.step + 1 if attempt.resume_from else 1
        return (first, attempt.step) if attempt.step >= first else None

    def postmortem_of(self, attempt: Attempt) -> str:
        """Return the address of the attempt's post-mortem; "" if it did not fail."""
        if attempt.pk not in self.postmortems:
            return ""
        return f"{reverse('job_postmortem', args=[self.job.pk])}?attempt={attempt.number}"

    def _save(self, checkpoint: Checkpoint) -> ribbons.RibbonSave:
        return ribbons.RibbonSave(
            at=checkpoint.created_at,
            state=checkpoint.state,
            url=reverse("job_checkpoints", args=[self.job.pk]) + f"#{checkpoint.name}",
            title=(
                f"Checkpoint at {self.unit} {formatting.count(checkpoint.step)},"
                f" {checkpoint.get_state_display().lower()}"
            ),
        )


def load(job: Job, now: datetime | None = None) -> JobLife:
    """Load the job's attempts, checkpoints and progress in few queries."""
    now = now or timezone.now()
    attempts = list(
        job.attempts.select_related("resume_from", "cancel_asked_by", "kill_requested_by").order_by("number")
    )
    checkpoints: list[Checkpoint] = list(
        job.checkpoints.exclude(state=Checkpoint.State.PRUNED)
        .order_by("-created_at", "-pk")
        .annotate(attempt_number=F("attempt__number"))
    )
    latest = attempts[-1]
    done = progress(latest, now)
    limit = limit_seconds(job.spec)
    return JobLife(
        job=job,
        attempts=attempts,
        checkpoints=checkpoints,
        progress=done,
        now=now,
        resumable=_resumable(latest, checkpoints),
        done_at=soon(now, done.eta_seconds),
        limit_at=latest.started_at + timedelta(seconds=limit) if latest.started_at and limit else None,
        restarts=_restarts(attempts),
        exchange=_round_traffic(job, attempts) if job.kind == "federated" else None,
        saved=_saved(job),
        spread=size_of(latest) if is_elastic(job.spec) else None,
        postmortems={
            attempt: (cause, says)
            for attempt, cause, says in Incident.objects.filter(attempt__in=attempts, incarnation=None)
            .order_by()
            .values_list("attempt", "cause", "says")
        },
    )


def _resumable(latest: Attempt, checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the newest checkpoint on the latest attempt's parent chain, or the newest of all if none is left there."""
    resumable = [checkpoint for checkpoint in checkpoints if checkpoint.resumable]
    return (newest_on_line(latest) or resumable[0]) if resumable else None


def _round_traffic(job: Job, attempts: list[Attempt]) -> RoundTraffic | None:
    """Return a federation's newest round; None before the first."""
    newest = rounds.newest(rounds.spans(attempts), EVALUATED_WITHIN)
    if not newest:
        return None
    row = newest[-1]
    worst = next((row.worst for row in reversed(newest) if row.worst is not None), None)
    sent = rounds.sent_bytes([owner_of(attempt.pk) for attempt in attempts])
    return RoundTraffic(
        counted=row.counted, selected=row.requested, seconds=row.seconds, worst=_worst(job, worst), sent_bytes=sent
    )


def _worst(job: Job, client: int | None) -> WorstClient:
    """Return the client that the server named as worst, unless too few samples evaluate it."""
    few, measured = Count("pk", filter=~RELIABLE), Count("evaluation_samples")
    counts = Client.objects.filter(job=job).aggregate(few=few, known=measured)
    row = Client.objects.filter(job=job, number=client).first() if client is not None else None
    samples = row.evaluation_samples if row else None
    is_named = client is not None and (samples is None or samples >= MIN_EVALUATED)
    return WorstClient(
        name=client_name(client, row.name if row else "") if client is not None and is_named else "",
        samples=samples,
        unreliable=counts["few"],
        is_unknown=0 < counts["known"] == counts["few"],
    )


def _saved(job: Job) -> dict[int, tuple[int, datetime]]:
    rows = job.checkpoints.exclude(state=Checkpoint.State.CORRUPT).order_by().values_list("attempt_id")
    return {pk: (step, at) for pk, step, at in rows.annotate(Max("step"), Max("created_at")) if pk is not None}


def _restarts(attempts: list[Attempt]) -> dict[int, list[tuple[datetime, str]]]:
    """Return restarts in place by attempt id."""
    events = Event.objects.filter(attempt__in=attempts, kind__in=header.RECOVERIES).order_by("id")
    rows = [
        (kind, pk, incarnation, number_of(data), at, data)
        for kind, pk, incarnation, at, data in events.values_list("kind", "attempt_id", "incarnation", "time", "data")[
            :MAX_EVENTS
        ]
    ]
    return header.recoveries(rows, {attempt.pk: attempt.incarnation for attempt in attempts})


def _note(attempt: Attempt, lost: int, unit: str) -> str:
    note = formatting.word(attempt.state)
    return f"{note} · {formatting.plural(lost, unit)} lost" if lost else note


def _lost_steps(attempt: Attempt, saved: dict[int, tuple[int, datetime]]) -> int:
    """Return the steps done after the newest checkpoint of an attempt that did not complete."""
    if attempt.is_alive or attempt.state == "completed" or attempt.step is None:
        return 0
    saved_here = saved.get(attempt.pk)
    base = saved_here[0] if saved_here else attempt.resume_from.step if attempt.resume_from else 0
    return max(0, attempt.step - base)
