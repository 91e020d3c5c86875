"""Build the head of a job's page: state, sentence, ribbon and fact strip."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.urls import reverse

from jobs.following.policy import instead_of_resuming
from jobs.incarnations import number_of
from jobs.presenting import ribbon as ribbons
from jobs.presenting import sentence as sentences
from jobs.presenting.size import has_ranks, limit_seconds, ranks_and_nodes, wants
from jobs.progress import Progress
from jobs.why.reasons import reason_of
from vigil_core import formatting

if TYPE_CHECKING:
    from jobs.models import Attempt, Checkpoint, Job

MAX_FACTS = 7
_LEAVE_FIRST = ("step_seconds", "clients")
RECOVERIES = ("incarnation.ended", "nodes.lost", "nodes.joined")
"""What launchers tell when ranks are started again within an attempt."""
EventRow = tuple[str, int, int | None, datetime, dict[str, Any]]
"""An event: kind, attempt, incarnation, time, data."""
HUNG = "hang"  # a launcher's word for ranks that stood still, and were killed for it


@dataclass(frozen=True, kw_only=True)
class HeaderFact:
    """A cell of the fact strip. `live` names the value that live updates replace."""

    name: str
    value: str
    small: str = ""
    live: str = ""
    bar: float | None = None
    since: datetime | None = None  # shown after `small`, as how long ago


@dataclass(frozen=True, kw_only=True)
class RoundTraffic:
    """A federation's newest round, and the bytes sent over all rounds."""

    counted: int
    selected: int
    seconds: float | None
    worst: sentences.WorstClient
    sent_bytes: float | None


@dataclass(kw_only=True)
class JobLife:
    """A job as its page's head shows it."""

    job: Job
    attempts: list[Attempt]
    checkpoints: list[Checkpoint]  # newest first, pruned ones left out
    progress: Progress
    now: datetime
    # What "Resume" would start from, if the job has ended.
    resumable: Checkpoint | None = None
    done_at: datetime | None = None
    limit_at: datetime | None = None
    restarts: dict[int, list[tuple[datetime, str]]] = field(default_factory=dict)
    # By attempt, step and time of the newest that it saved, pruned since or not.
    saved: dict[int, tuple[int, datetime]] = field(default_factory=dict)
    # Ranks and nodes that an elastic job trains on since its last restart in place, as its launcher told.
    spread: tuple[int, int] | None = None
    # Of a federation, once a round is done.
    exchange: RoundTraffic | None = None
    # The attempts that have a post-mortem, by id.
    postmortems: frozenset[int] = frozenset()

    @property
    def latest(self) -> Attempt:
        return self.attempts[-1]

    @property
    def steps_left(self) -> bool:
        """Whether a resume has anything left to do."""
        steps = self.progress.steps
        return steps is None or self.resumable is None or self.resumable.step < steps

    @property
    def first_due(self) -> int | None:
        """The step at which the next checkpoint is due, if the trainer makes them by step."""
        every = self._saves_every
        return ((self.progress.step or 0) // every + 1) * every if isinstance(every, int) and every else None

    @property
    def saves_by_itself(self) -> bool:
        """Whether the trainer decides when to save, by what it costs."""
        return self._saves_every == "auto"

    @property
    def _saves_every(self) -> object:
        return (self.job.spec.get("run") or {}).get("checkpoint_every")

    @property
    def counts(self) -> str:
        """What it counts: "step" or "round"."""
        return self.job.of_kind.counts

    @property
    def cancelling(self) -> bool:
        return self.latest.is_alive and self.latest.cancel_asked_at is not None

    @property
    def killing(self) -> bool:
        return self.latest.is_alive and self.latest.kill_requested_at is not None

    @property
    def saves_before_it_ends(self) -> bool:
        """Return whether a cancel lets it save a last checkpoint first."""
        return self.latest.is_alive and self.latest.state != "pending" and not self.job.is_attached

    @property
    def ran_s(self) -> float | None:
        """Seconds that its attempts ran, all together; None before the first has started."""
        spans = [((a.ended_at or self.now) - a.started_at).total_seconds() for a in self.attempts if a.started_at]
        return sum(spans) if spans else None

    @property
    def ribbon(self) -> ribbons.Ribbon:
        pieces = [self._piece(attempt) for attempt in self.attempts]
        saves = [self._save(checkpoint) for checkpoint in self.checkpoints]
        of_rounds = self.counts == "round" and self.progress.steps
        goal = f"round {formatting.count(self.progress.steps)}" if of_rounds else ""
        return ribbons.draw(pieces, saves, now=self.now, done_at=self.done_at, limit_at=self.limit_at, goal=goal)

    @property
    def sentence(self) -> sentences.Sentence:
        attempt = self.latest
        newest = self.resumable
        return sentences.describe_job(
            sentences.SentenceFacts(
                state=attempt.state,
                now=self.now,
                number=attempt.number,
                reason=reason_of(attempt),
                wants=wants(self.job.spec),
                queued_at=attempt.submitted_at or attempt.created_at,
                started_at=attempt.started_at,
                ended_at=attempt.ended_at,
                ran_s=self.ran_s,
                ends_by=self.limit_at,
                done_at=self.done_at,
                step=attempt.step,
                steps=self.progress.steps,
                counts=self.counts,
                phase=attempt.phase,
                last_report_at=attempt.last_report_at,
                resumed_step=attempt.resume_from.step if attempt.resume_from else None,
                newest_checkpoint=newest.step if newest else None,
                instead=instead_of_resuming(attempt.cause),
                validation_loss=number(attempt.latest, "validation_loss"),
                accuracy=number(attempt.latest, "accuracy") if self.exchange else None,
                worst=self.exchange.worst if self.exchange else None,
                worst_accuracy=number(attempt.latest, "client_accuracy_min"),
                cancelling=self.cancelling,
                cancelled_by=attempt.cancel_asked_by.username if attempt.cancel_asked_by else "",
                killing=self.killing,
                killed_by=attempt.kill_requested_by.username if attempt.kill_requested_by else "",
                reports=self.job.of_kind.trains or attempt.last_report_at is not None,
                attached=self.job.is_attached,
                unconfirmed=attempt.is_unconfirmed,
            )
        )

    @property
    def facts(self) -> list[HeaderFact]:
        """Chooses at most seven: what a chart or a drawing has, too, gives way."""
        facts = [*self._training(), *self._running()]
        return [fact for fact in facts if fact.live not in _LEAVE_FIRST] if len(facts) > MAX_FACTS else facts

    def _training(self) -> list[HeaderFact]:
        latest, done = self.latest.latest, self.progress
        if self.job.is_attached and done.step is None:
            return []  # it may never report
        facts = [
            HeaderFact(
                name=self.counts.capitalize(),
                value=formatting.count(done.step),
                small=f"of {formatting.count(done.steps)}{self._round_time}" if done.steps else "",
                live="step",
                bar=done.fraction,
            )
        ]
        if self.exchange is not None and "accuracy" in latest:
            return [*facts, *self._federated(self.exchange)]
        if self.job.of_kind.trains or "loss" in latest:
            validation = number(latest, "validation_loss")
            small = f"val {formatting.loss(validation)}" if validation is not None else ""
            facts.append(
                HeaderFact(name="Loss", value=formatting.loss(number(latest, "loss")), small=small, live="loss")
            )
        speed = next((name for name in ("tokens_per_second", "samples_per_second") if name in latest), None)
        if speed or self.job.of_kind.profiles:
            speed = speed or "tokens_per_second"
            title = "Tokens/s" if speed.startswith("tokens") else "Samples/s"
            facts.append(HeaderFact(name=title, value=formatting.measure(number(latest, speed)), live="speed"))
            step_s = number(latest, "step_seconds")
            facts.append(HeaderFact(name="Step time", value=formatting.duration(step_s), live="step_seconds"))
        if self.job.is_attached:
            return facts
        newest = self.resumable
        facts.append(
            HeaderFact(
                name="Checkpoint",
                value=formatting.count(newest.step) if newest else formatting.MISSING,
                small="" if newest else "none yet" if self.latest.is_alive else "none",
                since=newest.created_at if newest else None,
            )
        )
        return facts

    @property
    def _round_time(self) -> str:
        """How long the newest one took."""
        seconds = self.exchange.seconds if self.exchange else None
        return f" · {formatting.duration(seconds)}" if seconds is not None else ""

    def _federated(self, traffic: RoundTraffic) -> list[HeaderFact]:
        """How good the global model is, for whom it is worst, and what that cost."""
        latest = self.latest.latest
        of = f"of {formatting.count(traffic.selected)} selected"
        loss = f"loss {formatting.loss(number(latest, 'loss'))}"
        return [
            HeaderFact(name="Accuracy", value=formatting.loss(number(latest, "accuracy")), small=loss, live="accuracy"),
            HeaderFact(
                name="Worst client",
                value=formatting.loss(None if traffic.worst.is_nobody else number(latest, "client_accuracy_min")),
                small=traffic.worst.text,
            ),
            HeaderFact(name="Clients", value=formatting.count(traffic.counted), small=of, live="clients"),
            HeaderFact(name="Sent and received", value=formatting.disk(traffic.sent_bytes)),
        ]

    def _running(self) -> list[HeaderFact]:
        attempt, facts = self.latest, [_size_fact(self.job.spec, self.latest.nodes, self.spread)]
        if attempt.is_alive and self.done_at:
            small = formatting.until(self.done_at, self.now)
            facts.append(
                HeaderFact(name="Done", value=formatting.clock(self.done_at, self.now), small=small, live="done")
            )
        elif attempt.started_at:
            seconds = ((attempt.ended_at or self.now) - attempt.started_at).total_seconds()
            if attempt.ended_at:
                facts.append(HeaderFact(name="Ran", value=formatting.duration(self.ran_s)))
            else:
                most = limit_seconds(self.job.spec)
                limit = f"of {formatting.duration(most)}" if most else ""
                facts.append(HeaderFact(name="Runs", value=formatting.duration(seconds), small=limit))
        if lost := sum(_lost_steps(a, self.saved) for a in self.attempts):
            facts.append(HeaderFact(name="Lost so far", value=formatting.count(lost), small=self.job.of_kind.many))
        return facts

    def _piece(self, attempt: Attempt) -> ribbons.AttemptSpan:
        lost = _lost_steps(attempt, self.saved)
        return ribbons.AttemptSpan(
            number=attempt.number,
            state=attempt.state,
            began=attempt.submitted_at or attempt.created_at,
            started=attempt.started_at,
            ended=attempt.ended_at,
            note=_note(attempt, lost, self.counts),
            lost_from=self.saved.get(attempt.pk, (0, attempt.started_at))[1] if lost else None,
            resumed_from=attempt.resume_from.created_at if attempt.resume_from else None,
            restarts=tuple(self.restarts.get(attempt.pk, ())),
            rounds=self._rounds_of(attempt),
            url=reverse("job_attempts", args=[self.job.pk]) + f"#attempt-{attempt.number}",
            postmortem=self.postmortem_of(attempt),
        )

    def _rounds_of(self, attempt: Attempt) -> tuple[int, int] | None:
        """The first and the last that it did, of a federation."""
        if self.counts != "round" or attempt.step is None:
            return None
        first = attempt.resume_from.step + 1 if attempt.resume_from else 1
        return (first, attempt.step) if attempt.step >= first else None

    def postmortem_of(self, attempt: Attempt) -> str:
        """Its address; "" where it did not end badly."""
        if attempt.pk not in self.postmortems:
            return ""
        return f"{reverse('job_postmortem', args=[self.job.pk])}?attempt={attempt.number}"

    def _save(self, checkpoint: Checkpoint) -> ribbons.RibbonSave:
        return ribbons.RibbonSave(
            at=checkpoint.created_at,
            state=checkpoint.state,
            url=reverse("job_checkpoints", args=[self.job.pk]) + f"#{checkpoint.name}",
            title=(
                f"Checkpoint at {self.counts} {formatting.count(checkpoint.step)},"
                f" {checkpoint.get_state_display().lower()}"
            ),
        )


def recoveries(rows: list[EventRow], last: dict[int, int]) -> dict[int, list[tuple[datetime, str]]]:
    """Return when ranks were lost and restarted within each attempt, by attempt id.

    `last` is the newest incarnation of each attempt.
    """
    found: dict[int, list[tuple[datetime, str]]] = defaultdict(list)
    # What was lost is told with the number of the incarnation that lost it, what came with that of the next.
    lost = {(pk, number_of(data)): _names(data) for kind, pk, _, _, data in rows if kind == "nodes.lost"}
    came = {(pk, number_of(data)): _names(data) for kind, pk, _, _, data in rows if kind == "nodes.joined"}
    for kind, attempt_id, incarnation, at, data in rows:
        number = incarnation or number_of(data)
        if kind != "incarnation.ended" or number >= last[attempt_id]:
            continue
        gone, more = lost.get((attempt_id, number)), came.get((attempt_id, number + 1))
        how = "hung" if data.get("failure") == HUNG else "lost"
        what = f"{gone} lost" if gone else f"rank {data['rank']} {how}" if data.get("rank") is not None else ""
        again = f"restarted with {more}" if more else "restarted without" if gone else "restarted in place"
        found[attempt_id].append((at, ", ".join(part for part in (what, again) if part)))
    return found


def _names(data: dict[str, Any]) -> str:
    """Return the first three of the node names that a launcher reported, and how many more there are."""
    names = data.get("nodes")
    shown = [str(name)[:64] for name in names[:3]] if isinstance(names, list) else []
    return ", ".join(shown) + (f" and {len(names) - 3} more" if isinstance(names, list) and len(names) > 3 else "")


def _size_fact(spec: dict[str, Any], nodes: list[str], spread: tuple[int, int] | None) -> HeaderFact:
    """Return the number of ranks and nodes. An elastic job shows its current ranks, not its minimum."""
    least, wanted, gpus = ranks_and_nodes(spec)
    if not gpus and not has_ranks(spec):
        count = len(nodes) or (wanted if spec.get("resources") else None)
        return HeaderFact(
            name="Nodes", value=formatting.count(count), small=f"on {nodes[0]}" if len(nodes) == 1 else ""
        )
    given = len(nodes) or wanted
    ranks, used = spread or (least // wanted * given, given)
    where = nodes[0] if len(nodes) == 1 else formatting.plural(given, "node")
    where = f"on {used} of {where}" if used < given else f"on {where}"
    return HeaderFact(name="GPUs" if gpus else "Ranks", value=formatting.count(ranks), small=where)


def _note(attempt: Attempt, lost: int, counts: str) -> str:
    note = formatting.word(attempt.state)
    return f"{note} · {formatting.plural(lost, counts)} lost" if lost else note


def _lost_steps(attempt: Attempt, saved: dict[int, tuple[int, datetime]]) -> int:
    """Return the steps done after the newest checkpoint of an attempt that did not complete."""
    if attempt.is_alive or attempt.state == "completed" or attempt.step is None:
        return 0
    saved_here = saved.get(attempt.pk)
    base = saved_here[0] if saved_here else attempt.resume_from.step if attempt.resume_from else 0
    return max(0, attempt.step - base)


def number(values: dict[str, Any], name: str) -> float | None:
    """Return a value of `latest` as a float; NaN and infinities are stored as words there."""
    value = values.get(name)
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    return float(value) if isinstance(value, int | float) else None
