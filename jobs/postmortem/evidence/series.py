"""Use reported series as evidence: a loss that was NaN or diverged, gradients, throughput, memory.

Definitions, over the points of the incarnation that failed:
    NaN          the training loss was not finite from a step on to its last point
    divergence   the last points of the training loss are above 3 × its minimum and 1.5 × the median of its first half,
                 as for losses in logs (diagnosis.logs.progress). A spike that recovers is none: they are common and
                 harmless in large runs (PaLM, Chowdhery et al. 2022, arXiv:2204.02311, section 5.1)
    explosion    the last gradient norm is above 100 × the median of the first half, or not finite; healthy norms stay
                 within one order of magnitude of it, and clipping bounds them (Pascanu et al. 2013, arXiv:1211.5063)
    collapse     the mean throughput of the last tenth is below half of the median before it
    memory       the last value is above 90 % of what the job asked for on a node, and twice that of the first half

Series may have a million points, and there may be thousands of them: only some are read, from the summaries of their
chunks (minimum, maximum, sum, how many values are not finite); points are read only to find a step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diagnosis.logs import progress
from diagnosis.logs.prefixes import Prefix
from diagnosis.root_cause import REPORTED_SERIES
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs.sign import Sign
from jobs.models import Incident
from jobs.postmortem.evidence.collected import IncidentEvidence, context
from jobs.postmortem.evidence.launchers import failure_of
from portal.models import Chunk, Series
from portal.series.codec import Floats
from portal.series.envelope import Outline
from portal.series.read import incarnation_curves, outline_of, word

FILE = "reported series"
SECONDS = 5.0  # of a hundred for all sources; a series of a million points takes some 20 ms
MAX_NAMES = 5_000
MAX_PER_KIND = 8
MAX_RANKS = 4  # of a series, besides rank 0
MAX_STRETCHES = 1_000
NORM_EXPLODED = 100.0
RATE_COLLAPSED = 0.5
NEARLY_FULL = 0.9
MIN_GROWTH = 2.0
MIN_POINTS = 10  # points; with fewer only values that are not finite are judged

_EVALUATION = re.compile(r"(?i)(?:^|[_./-])(?:val|valid|validation|eval|test|dev|holdout|client)(?:[_./-]|$)")
_KINDS = {
    "loss": re.compile(r"(?i)(?:^|[_./-])(?:loss|nll|cross_entropy)(?:[_./-](?:train|total|mean|avg))?$"),
    "norm": re.compile(r"(?i)(?:^|[_./-])(?:grad(?:ient)?s?[_./-]?norm|gnorm)(?:[_./-](?:total|global))?$"),
    "rate": re.compile(r"(?i)(?:per_s(?:ec|econd)?|throughput|samples_s|tokens_s|it_s|fps)$"),
}
# A loss that is the training's as a whole; parts of one, as of a policy or a value function, rise and fall by design.
_WHOLE_LOSS = re.compile(
    r"(?i)^(?:(?:train|training|total|lm|mean|avg|ce|metrics|scalars)[_./-])*(?:loss|nll|cross_entropy)"
)
# How an attempt ends that the program itself ended. A loss explains no other end.
_ENDED_BY_PROGRAM = frozenset({"", "exception"})


@dataclass(frozen=True, slots=True)
class ReportedCurve:
    """A series of a rank, as reported by the incarnation that failed."""

    name: str
    rank: int
    outline: Outline

    @property
    def means(self) -> Floats:
        """Return the mean of each stretch; NaN where nothing of it is finite."""
        return self.outline.mean()

    @property
    def finite(self) -> Floats:
        means = self.means
        return means[np.isfinite(means)]


def collect_reported_series(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Read the series that say how training went; what they show is a cause only if the program ended by itself."""
    reader = _SeriesReader(incident, found)
    if not reader.names:
        return
    found.available.add("series")
    role = "root" if _ended_by_itself(incident) else "context"
    losses = [sign for curve in reader.curves("loss") for sign in _loss_signs(curve, reader, role)]
    found.signs += losses[:2]
    cause = losses[0].cause if losses else "numerics.divergence"
    found.signs += [sign for curve in reader.curves("norm") for sign in _norm_signs(curve, cause)][:1]
    found.signs += [sign for curve in reader.curves("rate") for sign in _rate_signs(curve)][:1]
    found.signs += _memory_signs(incident, reader)
    if reader.is_late:
        found.unavailable.append("some reported series: no time was left")


def _ended_by_itself(incident: Incident) -> bool:
    """Return whether the program left with an exit code of its own, unasked."""
    attempt, failure = incident.attempt, failure_of(incident)
    if failure.get("signal") or str(failure.get("kind") or "") not in _ENDED_BY_PROGRAM:
        return False
    if incident.incarnation is not None:
        return True
    return attempt.state == "failed" and not attempt.signal and attempt.cancel_asked_at is None


class _SeriesReader:
    """Read an attempt's series within bounds of time and number."""

    def __init__(self, incident: Incident, found: IncidentEvidence) -> None:
        self._owner = ("attempt", incident.attempt_id)
        lost = incident.incarnation is None and not found.logs  # then no log shows which incarnation was last
        self._incarnation = incident.attempt.incarnation or 0 if lost else found.incarnation
        self._until = min(found.until, time.monotonic() + SECONDS)
        self.is_late = False
        rows = Series.objects.filter(owner_kind="attempt", owner_id=incident.attempt_id, column="")
        self.names = dict(rows.order_by("id").values_list("name", "id")[:MAX_NAMES])

    def curves(self, kind: str) -> Iterator[ReportedCurve]:
        """Yield the series of a kind, shortest names first, each of rank 0 and of ranks with values not finite."""
        names = [name for name in self.names if _KINDS[kind].search(name) and not _EVALUATION.search(name)]
        for name in sorted(names, key=lambda name: (len(name), name))[:MAX_PER_KIND]:
            for rank in self._ranks(self.names[name]):
                if (curve := self.curve(name, rank)) is not None:
                    yield curve

    def curve(self, name: str, rank: int, *, start: int | None = None, end: int | None = None) -> ReportedCurve | None:
        if time.monotonic() > self._until:
            self.is_late = True
            return None
        outline = outline_of(
            self._owner, name, self._incarnation, rank=rank, start=start, end=end, points=MAX_STRETCHES
        )
        return ReportedCurve(name, rank, outline) if len(outline.first) else None

    def word_at(self, curve: ReportedCurve, step: int) -> str:
        """Return what a value that is not finite is called."""
        for life in incarnation_curves([self._owner], curve.name, rank=curve.rank, start=step, end=step, points=None):
            if life.value is not None and len(life.value) and life.sources[int(life.source[0])][1] == self._incarnation:
                return word(float(life.value[0]))
        return "not finite"

    def _ranks(self, series_id: int) -> list[int]:
        """Return rank 0, or the lowest that there is, and those with values that are not finite."""
        rows = Chunk.objects.filter(series_id=series_id, incarnation=self._incarnation, rank_last__gte=0)
        first = rows.order_by("rank").values_list("rank", flat=True).first()
        if first is None:
            return []
        odd = rows.filter(odd__gt=0).order_by("rank").values_list("rank", flat=True).distinct()[: MAX_RANKS + 1]
        return list(dict.fromkeys([max(0, first), *(max(0, rank) for rank in odd)]))[: MAX_RANKS + 1]


def _sign(curve: ReportedCurve, text: str, cause: str, role: str, at: float | None) -> Sign:
    prefix = Prefix(rank=curve.rank if curve.rank > 0 else None, stamp=at, is_dated=at is not None)
    if role == "context":
        return context(FILE, text, cause=cause, at=at)
    return Sign(FILE, 0, text, cause=cause, role=role, prefix=prefix, source_kind=REPORTED_SERIES)


# The loss.


def _loss_signs(curve: ReportedCurve, reader: _SeriesReader, role: str) -> Iterator[Sign]:
    """Yield that it was not finite to its end, or that it had diverged."""
    if (bad := _not_finite_since(curve, reader)) is not None:
        step, last, value, at = bad
        since = (
            f"from step {step:,} to its last point at step {last:,}" if last > step else f"at its last step, {step:,}"
        )
        whole = _WHOLE_LOSS.search(curve.name) is not None
        if whole and _climbed(curve.finite):
            text = f"{curve.name} rose to {curve.finite[-1]:.4g}, then was {value} {since}, as the program reported it"
            yield _sign(curve, text, "numerics.divergence", role, at)
            return
        yield _sign(curve, f"{curve.name} was {value} {since}, as the program reported it", "numerics.nan", role, at)
        return
    if _WHOLE_LOSS.search(curve.name) is None:
        return
    tail = reader.curve(curve.name, curve.rank, start=int(curve.outline.first[-1]))
    values = np.concatenate([curve.finite[:-1], tail.finite if tail is not None else curve.finite[-1:]])
    if _climbed(values):
        low, last = float(values.min()), int(curve.outline.last[-1])
        text = f"{curve.name} rose from its minimum of {low:.4g} to {values[-1]:.4g} by step {last:,}"
        text += ", as the program reported it"
        yield _sign(curve, text, "numerics.divergence", role, float(curve.outline.time[-1]))


def _not_finite_since(curve: ReportedCurve, reader: _SeriesReader) -> tuple[int, int, str, float] | None:
    """Return the first and the last step of values that are not finite to the end, their word, and when that began."""
    outline = curve.outline
    if outline.finite[-1] == outline.n[-1]:
        return None
    finite = np.flatnonzero(outline.finite > 0)
    place = int(finite[-1]) if len(finite) else -1  # the last stretch with a number in it
    step, at = 0, 0.0
    if place + 1 < len(outline.first):
        step, at = int(outline.first[place + 1]), float(outline.time[place + 1])
    if place >= 0 and outline.finite[place] < outline.n[place]:
        within = reader.curve(curve.name, curve.rank, start=int(outline.first[place]), end=int(outline.last[place]))
        if within is None:
            return None
        begin = int(np.flatnonzero(within.outline.finite > 0)[-1]) + 1
        if begin < len(within.outline.first):
            step, at = int(within.outline.first[begin]), float(within.outline.time[begin])
        elif place + 1 == len(outline.first):
            return None  # it ends with a number
    return step, int(outline.last[-1]), reader.word_at(curve, step), at


def _climbed(losses: Floats) -> bool:
    """Return whether a loss that is positive ended far above its minimum."""
    if len(losses) < MIN_POINTS or losses.min() < 0:
        return False
    return progress.has_climbed(losses.tolist())


# Supporting evidence.


def _norm_signs(curve: ReportedCurve, cause: str) -> Iterator[Sign]:
    """Yield that the gradient norm exploded, which supports what the loss says and is not a cause by itself."""
    outline, means = curve.outline, curve.finite
    if len(means) < MIN_POINTS:
        return
    usual, last = float(np.median(means[: len(means) // 2])), float(outline.max[-1])
    at, step = float(outline.time[-1]), int(outline.last[-1])
    if outline.finite[-1] == 0:
        yield _sign(
            curve, f"{curve.name} was not finite at step {step:,}, usually {usual:.3g}", cause, "confirmation", at
        )
    elif usual > 0 and last > NORM_EXPLODED * usual:
        text = f"{curve.name} was {last:.4g} by step {step:,}, {last / usual:,.0f} × its usual {usual:.3g}"
        yield _sign(curve, f"{text}, as the program reported it", cause, "confirmation", at)


def _rate_signs(curve: ReportedCurve) -> Iterator[Sign]:
    """Yield that throughput collapsed: worth knowing, whatever the cause was."""
    means = curve.finite
    if len(means) < 2 * MIN_POINTS:
        return
    cut = len(means) - max(2, len(means) // 10)
    usual, last = float(np.median(means[:cut])), float(means[cut:].mean())
    if usual > 0 and last < RATE_COLLAPSED * usual:
        text = f"{curve.name} fell from {usual:,.4g} to {last:,.4g} in the end, as the program reported it"
        yield _sign(curve, text, "unknown", "context", float(curve.outline.time[-1]))


def _memory_signs(incident: Incident, reader: _SeriesReader) -> list[Sign]:
    """Return that a node's memory grew to what the job requested, as its launcher measured it."""
    limit = (incident.attempt.job.spec.get("resources") or {}).get("memory_gib")
    if "memory_gib" not in reader.names or not isinstance(limit, int | float) or not limit > 0:
        return []
    for number, node in enumerate(incident.attempt.nodes[:MAX_RANKS] or [""]):
        curve = reader.curve("memory_gib", -1 - number)
        if curve is None or len(curve.finite) < MIN_POINTS:
            continue
        before, last = float(np.median(curve.finite[: len(curve.finite) // 2])), float(curve.finite[-1])
        if last >= NEARLY_FULL * limit and last >= MIN_GROWTH * before:
            at = float(curve.outline.time[-1])
            text = f"memory grew from {before:.1f} to {last:.1f} of {limit:g} GiB, as the launcher measured it"
            prefix = Prefix(node=node, stamp=at, is_dated=True)
            return [
                Sign(FILE, 0, text, cause="memory.host_oom", role="confirmation", prefix=prefix, source_kind="trainer")
            ]
    return []
