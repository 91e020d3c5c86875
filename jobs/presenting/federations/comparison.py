"""Compare two federations after the same number of rounds and after the same number of bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jobs.presenting.federations.significance import chance_margin
from portal.drawing import polyline
from portal.series.codec import Floats
from vigil_core import formatting

WIDTH, HEIGHT = 1000.0, 200.0
MAX_OVERHANG = 4.0
"""Multiple of the compared range that is drawn; otherwise a much longer run would flatten the other."""
TITLES = {"accuracy": "Accuracy", "validation_loss": "Validation loss", "loss": "Loss"}


@dataclass(frozen=True)
class JobRef:
    """The number and name of a job, for links."""

    pk: int
    name: str


@dataclass(frozen=True)
class RoundCurve:
    """Values by round, rounds ascending."""

    round: Floats
    value: Floats

    def at(self, round_: float) -> float | None:
        """Return the newest value at or before this round."""
        place = int(np.searchsorted(self.round, round_, "right")) - 1
        return float(self.value[place]) if place >= 0 else None

    def up_to(self, round_: float) -> Floats:
        """Return all values at or before this round."""
        return self.value[: int(np.searchsorted(self.round, round_, "right"))]


@dataclass(frozen=True, kw_only=True)
class ComparedFederation:
    """A federation: its metrics by round, and the cumulative cost of its rounds."""

    job: JobRef
    rounds: int
    lines: dict[str, RoundCurve]
    sent: RoundCurve
    """Cumulative bytes by round."""
    seconds: RoundCurve
    data: dict[str, str]
    """What determines the clients' training and test samples: recipe, split and clients, with their options."""
    evaluation_samples: float | None
    """Number of samples that an accuracy is averaged over, if known."""
    setup: object
    """Everything that determines the run except the seed; None for the user's own code, which may have changed."""
    is_alive: bool

    def sent_at(self, rounds: Floats) -> Floats:
        """Return the bytes sent up to each of these rounds."""
        found: Floats = np.interp(rounds, [0.0, *self.sent.round], [0.0, *self.sent.value])
        return found

    def round_at(self, sent: float) -> int:
        """Return the last round that this number of bytes was enough for."""
        return int(np.floor(np.interp(sent, [0.0, *self.sent.value], [0.0, *self.sent.round]) + 1e-6))


@dataclass(frozen=True, kw_only=True)
class ComparedResult:
    """The state of one federation after some round. `color` is that of its line."""

    job: JobRef
    color: int
    round: int
    value: float | None
    sent: float
    seconds: float | None
    is_ahead: bool
    chance: str
    """Why a difference is not meaningful; "" if it is, or if there is none."""


@dataclass(frozen=True, kw_only=True)
class ComparisonDrawing:
    """Both federations over rounds or bytes. `at` is the point of comparison, on a scale of 0 to 1000."""

    title: str
    lines: list[tuple[int, str]]
    low: float
    high: float
    at: float
    ends: tuple[str, str]
    standings: list[ComparedResult]
    caption: str


@dataclass(frozen=True, kw_only=True)
class FederationComparison:
    measure: str
    lead: str
    rest: str
    drawings: list[ComparisonDrawing]

    @property
    def title(self) -> str:
        return TITLES[self.measure]


def compare(sides: tuple[ComparedFederation, ComparedFederation]) -> FederationComparison | None:
    """Compare two federations; return None until both have reported one common metric."""
    measure = next((name for name in TITLES if all(name in side.lines for side in sides)), None)
    rounds = min(side.rounds for side in sides)
    if measure is None or not rounds:
        return None
    difference = _data_difference(sides)
    sent = min(float(side.sent.value[-1]) if len(side.sent.value) else 0.0 for side in sides)
    same_rounds = _results(sides, measure, [rounds, rounds], data_difference=difference)
    same_bytes = _results(
        sides, measure, [min(side.rounds, side.round_at(sent)) for side in sides], data_difference=difference
    )
    many = "accuracies" if measure == "accuracy" else "losses"
    so_far = " so far" if any(side.is_alive for side in sides) else ""
    lead = f"After {formatting.plural(rounds, 'round')}{so_far}, {_verdict(same_rounds, measure)}"
    rest = f"For the same {formatting.disk(sent)} on the wire, {_verdict(same_bytes, measure)}" if sent else ""
    return FederationComparison(
        measure=measure,
        lead=f"Trained on different data ({difference}): {many} cannot be compared." if difference else lead,
        rest="" if difference else rest,
        drawings=[
            _draw(sides, measure, same_rounds, at=float(rounds), x=lambda side, round_: round_, form=_round),
            *(
                [_draw(sides, measure, same_bytes, at=sent, x=ComparedFederation.sent_at, form=formatting.disk)]
                if sent
                else []
            ),
        ],
    )


def _data_difference(sides: tuple[ComparedFederation, ComparedFederation]) -> str:
    """Return the first difference between their data: "recipe text vs. tabular"; "" if there is none."""
    first, second = (side.data for side in sides)
    for name in [*first, *(name for name in second if name not in first)]:
        left, right = first.get(name), second.get(name)
        if left != right:
            return f"{name} {left or 'none'} vs. {right or 'none'}"
    return ""


def _results(
    sides: tuple[ComparedFederation, ComparedFederation], measure: str, rounds: list[int], *, data_difference: str
) -> list[ComparedResult]:
    values = [side.lines[measure].at(round_) for side, round_ in zip(sides, rounds, strict=True)]
    measured = [value for value in values if value is not None]
    chance = _chance_reason(sides, measure, rounds, measured) if len(measured) == 2 else ""
    is_open = bool(data_difference) or bool(chance) or (len(measured) == 2 and _are_shown_equal(measured))
    best = (max if measure == "accuracy" else min)(measured) if measured and not is_open else None
    return [
        ComparedResult(
            job=side.job,
            color=color,
            round=round_,
            value=value,
            sent=float(side.sent_at(np.array([round_], np.float64))[0]),
            seconds=side.seconds.at(round_),
            is_ahead=value is not None and value == best,
            chance=chance,
        )
        for color, (side, round_, value) in enumerate(zip(sides, rounds, values, strict=True), 1)
    ]


def _are_shown_equal(values: list[float]) -> bool:
    return formatting.loss(values[0]) == formatting.loss(values[1])


def _chance_reason(
    sides: tuple[ComparedFederation, ComparedFederation], measure: str, rounds: list[int], values: list[float]
) -> str:
    """Return why the two values differ by no more than chance; "" if the difference is significant."""
    first, second = sides
    if first.setup is not None and first.setup == second.setup:
        return "the same setup with two seeds"
    samples = [side.evaluation_samples if measure == "accuracy" else None for side in sides]
    ends = tuple(side.lines[measure].up_to(round_) for side, round_ in zip(sides, rounds, strict=True))
    margin = chance_margin((values[0], values[1]), (samples[0], samples[1]), ends)
    is_chance = abs(values[0] - values[1]) <= margin
    return f"within the variation between seeds, ± {formatting.loss(margin)}" if is_chance and margin else ""


def _verdict(standings: list[ComparedResult], measure: str) -> str:
    """Return the result as a sentence, such as "#7 heron is ahead: accuracy 0.957 vs. 0.897"."""
    ahead = next((result for result in standings if result.is_ahead), None)
    what = TITLES[measure].lower()
    if ahead is None:
        first, second = (formatting.loss(standing.value) for standing in standings)
        values = first if first == second else f"{first} vs. {second}, {standings[0].chance}"
        return f"no difference: {what} {values}."
    behind = next(result for result in standings if not result.is_ahead)
    if behind.value is None:
        unmeasured = f"#{behind.job.pk} {behind.job.name} had not been measured yet"
        return f"#{ahead.job.pk} {ahead.job.name} is ahead: {unmeasured}."
    return (
        f"#{ahead.job.pk} {ahead.job.name} is ahead: {what} {formatting.loss(ahead.value)}"
        f" vs. {formatting.loss(behind.value)}."
    )


def _draw(
    sides: tuple[ComparedFederation, ComparedFederation],
    measure: str,
    standings: list[ComparedResult],
    *,
    at: float,
    x: Callable[[ComparedFederation, Floats], Floats],
    form: Callable[[float], str],
) -> ComparisonDrawing:
    along = [(x(side, side.lines[measure].round), side.lines[measure].value) for side in sides]
    first, last = (max(float(xs[end]) for xs, _ in along) for end in (0, -1))
    most = max(min(last, MAX_OVERHANG * at), first) or 1.0
    along = [_clip(most, xs, values) for xs, values in along]
    values = np.concatenate([value for _, value in along])
    low, high = float(values.min()), float(values.max())
    of_rounds, height = form is _round, (high - low) or 1.0
    return ComparisonDrawing(
        title="At equal rounds" if of_rounds else "At equal bytes",
        lines=[
            (color, polyline(xs / most, (ys - low) / height, WIDTH, HEIGHT, margin=2))
            for color, (xs, ys) in enumerate(along, 1)
        ],
        low=low,
        high=high,
        at=round(min(1.0, at / most) * WIDTH, 1),
        ends=("round 0" if of_rounds else "0 B", form(most)),
        standings=standings,
        caption=f"{TITLES[measure]} over {'rounds' if of_rounds else 'bytes sent, up and down'}",
    )


def _clip(most: float, xs: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the line up to `most`, with an interpolated point at the end."""
    if xs[-1] <= most:
        return xs, values
    count = int(np.searchsorted(xs, most, "right"))
    return np.append(xs[:count], most), np.append(values[:count], np.interp(most, xs, values))


def _round(value: float) -> str:
    return f"round {formatting.count(int(value))}"
