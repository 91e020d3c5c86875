"""Load a post-mortem: everything known about an attempt's failure, for its page, REST and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from django.conf import settings

from diagnosis.causes import CAUSES, UNKNOWN, Cause
from jobs import lost_work
from jobs.gathering import cost, rank_steps, restart_curve, similar, verdicts
from jobs.lost_work import LostWork
from jobs.models import Attempt, Checkpoint, Diagnosis, FollowUp, Incident, Job, PostMortem
from jobs.presenting.postmortems import headline, lanes, markdown, restart_drawing
from jobs.presenting.postmortems import rank_steps as strips
from jobs.presenting.postmortems.cost import Cost, NextAttempt
from jobs.presenting.postmortems.evidence import EvidencePiece
from jobs.reliability.node_time import whole
from portal.models import User
from vigil_core import formatting

MAX_PIECES = 40


@dataclass(frozen=True)
class VerdictVersion:
    """A version of the verdict."""

    number: int
    made_at: datetime
    cause: str
    confidence: float


@dataclass(frozen=True)
class VigilAction:
    """Something that Vigil did after the failure, or that followed from it."""

    at: datetime
    text: str
    more: str = ""


@dataclass
class Document:
    """The post-mortem of one attempt. Parts that cost queries are loaded on first use."""

    incident: Incident
    verdict: dict[str, Any]  # the latest automatic diagnosis; empty if there is none
    versions: list[VerdictVersion]  # oldest first
    following: Attempt | None
    written: PostMortem | None

    @property
    def attempt(self) -> Attempt:
        return self.incident.attempt

    @property
    def job(self) -> Job:
        return self.attempt.job

    @property
    def cause(self) -> Cause:
        """Return the cause given by a person or by the evidence; unknown if neither has named one."""
        return CAUSES.get(self.incident.cause) or CAUSES[UNKNOWN]

    @property
    def machine_cause(self) -> str:
        return str(self.verdict.get("cause", ""))

    @property
    def advice(self) -> str:
        return verdicts.advice(self.incident, self.verdict)

    @property
    def reported_by(self) -> str:
        return verdicts.reported_by(self.incident, self.verdict)

    @property
    def revised(self) -> tuple[VerdictVersion, VerdictVersion] | None:
        """Return the previous and the newest verdict if the cause changed between them."""
        for before, after in zip(self.versions[::-1][1:], self.versions[::-1], strict=False):
            if before.cause != after.cause:
                return before, after
        return None

    @cached_property
    def pieces(self) -> list[EvidencePiece]:
        """Return the evidence of the verdict, piece by piece with node and time."""
        return verdicts.pieces(self.attempt, self.verdict, MAX_PIECES)

    @cached_property
    def evidence(self) -> list[EvidencePiece]:
        """Return the evidence with equal lines of several ranks grouped."""
        return verdicts.grouped(self.pieces)

    @cached_property
    def follow_ups(self) -> list[FollowUp]:
        return list(self.written.follow_ups.select_related("owner")) if self.written else []

    @cached_property
    def series(self) -> str:
        return restart_curve.progress_series(self.attempt)

    @cached_property
    def trained(self) -> restart_curve.TrainingSpan:
        start = self.attempt.resume_from.step if self.attempt.resume_from else 0
        return restart_curve.training_span(self.attempt, self.series, start + 1)

    @cached_property
    def bad_at(self) -> datetime | None:
        """Return the first sign of the failure.

        That is the earliest root with a time, else the last step before everything stopped.
        """
        began, ended = self.attempt.started_at, self.incident.at
        roots = [piece.at for piece in self.pieces if piece.role == "root" and piece.at is not None]
        inside = [at for at in roots if at <= ended and (began is None or at >= began)]
        if inside:
            return min(inside)
        last = self.trained.last
        return last if last is not None and last <= ended and (began is None or last >= began) else None

    @cached_property
    def lost(self) -> LostWork:
        return lost_work.lost_work(self.incident)

    @property
    def resume_point(self) -> Checkpoint | None:
        """Return the checkpoint that the next attempt resumed from, or the newest that it could have."""
        return self.lost.checkpoint

    @cached_property
    def again(self) -> NextAttempt | None:
        attempt = self.following
        if attempt is None:
            return None
        start = attempt.resume_from.step if attempt.resume_from else 0
        last = self.attempt.step
        return NextAttempt(
            number=attempt.number,
            state=attempt.state,
            queued_at=attempt.submitted_at or attempt.created_at,
            started_at=attempt.started_at,
            ended_at=attempt.ended_at,
            from_step=start,
            first_step_at=restart_curve.done_at(attempt, self.series, start + 1),
            caught_up_at=restart_curve.done_at(attempt, self.series, last) if last is not None else None,
            nodes=tuple(attempt.nodes),
        )

    @cached_property
    def cost(self) -> Cost:
        return cost.measure(
            self.lost,
            step=self.attempt.step,
            gpus=whole((self.job.spec.get("resources") or {}).get("gpus_per_node")),
            caught_up_at=self.again.caught_up_at if self.again else None,
            price=settings.VIGIL_GPU_HOUR_PRICE,
            currency=settings.VIGIL_CURRENCY,
        )

    @cached_property
    def headline(self) -> headline.Headline:
        if not self.incident.cause:
            rest = "Its logs are being read. Reload this page in a few seconds to see the cause."
            return headline.Headline(f"Attempt {self.attempt.number} failed.", rest)
        return headline.headline(
            verdict_text=verdicts.summary(self.incident),
            cause=self.cause,
            advice=self.advice,
            decision=self.attempt.decision,
            again=self.again,
            cost=self.cost,
            unit=self.job.job_kind.unit,
        )

    @cached_property
    def acts(self) -> list[VigilAction]:
        """Return Vigil's actions in chronological order."""
        return sorted(self._acts(), key=lambda act: act.at)

    def _acts(self) -> Iterator[VigilAction]:
        yield VigilAction(self.incident.opened_at, "Opened this post-mortem")
        for before, version in zip([None, *self.versions], self.versions, strict=False):
            sure = f"{formatting.share(version.confidence)} sure" if version.cause != UNKNOWN else ""
            if before is None:
                yield VigilAction(version.made_at, f"Named the cause: {version.cause}", sure)
            elif before.cause != version.cause:
                yield VigilAction(version.made_at, f"Revised it: now {version.cause}", sure)
            else:
                yield VigilAction(version.made_at, "Examined more evidence, with the same result", sure)
        if self.attempt.decided_at is not None and self.attempt.decision:
            yield VigilAction(self.attempt.decided_at, self.attempt.decision)
        again = self.again
        if again is not None and again.started_at is not None:
            waited = formatting.duration((again.started_at - again.queued_at).total_seconds())
            where = f" on {formatting.listed(list(again.nodes[:4]))}" if again.nodes and len(again.nodes) <= 4 else ""
            yield VigilAction(
                again.started_at, f"Attempt {again.number} started{where}", f"after {waited} in the queue"
            )
        if again is not None and again.first_step_at is not None:
            done = f"{self.job.job_kind.unit.capitalize()} {formatting.count(again.from_step + 1)}"
            yield VigilAction(again.first_step_at, f"{done}: training resumed")

    @cached_property
    def ranks(self) -> dict[int, str]:
        """Return the node of each rank of the incarnation that ended."""
        return rank_steps.nodes(self.attempt, self.attempt.incarnation)

    @cached_property
    def rank_steps(self) -> strips.RankSteps | None:
        steps = rank_steps.last_steps(self.attempt, self.attempt.incarnation)
        return strips.compare_ranks(steps, self.ranks, self.incident.rank, unit=self.job.job_kind.unit)

    @cached_property
    def curve(self) -> restart_drawing.RestartCurve | None:
        if self.following is None:
            return None
        start = self.following.resume_from.step if self.following.resume_from else 0
        return restart_curve.draw(self.attempt, self.following, self.series, start)

    def timeline(self, span: str) -> lanes.Lanes | None:
        """Return the timeline; None if the attempt never ran."""
        if self.attempt.started_at is None:
            return None
        again = self.again
        return lanes.draw(
            lanes.LaneFacts(
                number=self.attempt.number,
                state=self.attempt.state,
                started_at=self.attempt.started_at,
                ended_at=self.attempt.ended_at or self.incident.at,
                trained_from=self.trained.first,
                trained_until=self.trained.last,
                bad_at=self.bad_at,
                last_step=self.attempt.step,
                unit=self.job.job_kind.unit,
                rank=self.incident.rank,
                nodes=tuple(self._nodes()),
                acts=tuple(act.at for act in self.acts),
                next_number=again.number if again else None,
                next_started_at=again.started_at if again else None,
                next_ended_at=again.ended_at if again else None,
                next_nodes=again.nodes if again else (),
                resumed_at=again.first_step_at if again else None,
                resumed_step=again.from_step + 1 if again else None,
            ),
            span,
        )

    def _nodes(self) -> Iterator[lanes.NodeFacts]:
        counts = Counter(self.ranks.values())
        blamed = self.incident.node or self.ranks.get(self.incident.rank if self.incident.rank is not None else -1, "")
        signs: dict[str, list[lanes.LaneSign]] = {}
        for piece in self.pieces:
            node = piece.node or (self.ranks.get(piece.rank, "") if piece.rank is not None else "")
            if piece.at is not None and node:
                text = piece.text.splitlines()[0][:120] if piece.text else ""
                many = f"{formatting.count(piece.count)} × " if piece.count > 1 else ""
                sign = lanes.LaneSign(at=piece.at, role=piece.role, text=f"{many}{text}", rank=piece.rank)
                signs.setdefault(node, []).append(sign)
        for name in self.attempt.nodes:
            yield lanes.NodeFacts(
                name=name, ranks=counts[name], signs=tuple(signs.get(name, ())), is_blamed=name == blamed
            )

    def as_markdown(self) -> str:
        """Return the document for a ticket or a repository."""
        incident, attempt, written = self.incident, self.attempt, self.written
        overruled = (self.machine_cause, str(incident.overruled_by or "somebody"), incident.overruled_why)
        return markdown.write(
            markdown.PostMortemText(
                job=self.job.pk,
                job_name=self.job.name,
                attempt=attempt.number,
                nodes=attempt.nodes,
                state=attempt.state,
                at=incident.at,
                is_published=incident.published_at is not None,
                headline=self.headline,
                cause=incident.cause if incident.is_overruled else self.cause.code,
                overruled=overruled if incident.is_overruled else None,
                confidence=incident.confidence,
                reported_by=self.reported_by,
                owner=self.cause.owner,
                advice=self.advice,
                unit=self.job.job_kind.unit,
                cost=self.cost,
                evidence=self.evidence,
                verdict=self.verdict,
                rank_steps=self.rank_steps,
                across_restart=self.curve.words if self.curve else "",
                vigil_actions=[(act.at, f"{act.text}{f', {act.more}' if act.more else ''}") for act in self.acts],
                narrative=written.narrative if written else "",
                factors=written.factors if written else [],
                actions=[_action_item(follow_up) for follow_up in self.follow_ups],
            )
        )

    def similar_incidents(self, user: User) -> list[similar.SimilarIncident]:
        return similar.find(self.incident, user)


def _action_item(follow_up: FollowUp) -> markdown.ActionItem:
    owner = str(follow_up.owner) if follow_up.owner else ""
    return markdown.ActionItem(
        text=follow_up.text, owner=owner, due=follow_up.due, is_done=follow_up.done_at is not None
    )


def load(job: Job, number: int | None) -> Document | None:
    """Load the post-mortem of this attempt, or of the newest failed one; None if none failed."""
    ends = Incident.objects.filter(attempt__job=job, incarnation=None)
    if number is not None:
        ends = ends.filter(attempt__number=number)
    incidents = ends.select_related("attempt__resume_from", "overruled_by", "published_by", "written__edited_by")
    incident = incidents.order_by("-attempt__number").first()
    if incident is None:
        return None
    incident.attempt.job = job
    newest = Diagnosis.objects.filter(incident=incident).order_by("-version").values_list("verdict", flat=True).first()
    made = Diagnosis.objects.filter(incident=incident).order_by("version")
    following = job.attempts.filter(number=incident.attempt.number + 1).select_related("resume_from").first()
    return Document(
        incident=incident,
        verdict=verdicts.masked_verdict(newest or {}),
        versions=[VerdictVersion(*row) for row in made.values_list("version", "made_at", "cause", "confidence")],
        following=following,
        written=getattr(incident, "written", None),
    )
