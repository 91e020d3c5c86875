"""Two federations side by side: where each was after as many rounds, and after as many bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jobs.presenting.significance import chance_margin
from vigil_core import formatting

if TYPE_CHECKING:
    from jobs.models import Job

Floats = NDArray[np.float64]
WIDTH, HEIGHT = 1000.0, 200.0
BEYOND = 4.0
"""Times of where two are compared that are drawn: one that went on for long would press the other flat."""
TITLES = {"accuracy": "Accuracy", "validation_loss": "Validation loss", "loss": "Loss"}


@dataclass(frozen=True)
class Line:
    """Values by round, rising."""

    round: Floats
    value: Floats

    def at(self, round_: float) -> float | None:
        """The newest value up to there."""
        place = int(np.searchsorted(self.round, round_, "right")) - 1
        return float(self.value[place]) if place >= 0 else None

    def up_to(self, round_: float) -> Floats:
        """Return all values up to there."""
        return self.value[: int(np.searchsorted(self.round, round_, "right"))]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One federation: how good it was by round, and what all rounds up to one have cost."""

    job: Job
    rounds: int
    lines: dict[str, Line]
    sent: Line
    """Bytes of all rounds up to one."""
    seconds: Line
    data: dict[str, str]
    """What decides on which samples its clients train and are judged: recipe, split and clients, with their options."""
    held_out: float | None
    """Samples that an accuracy is the mean of, as far as is known."""
    setup: object
    """Everything that decides how it goes, but the seed. None: somebody's own code, which may have changed."""
    is_alive: bool

    def sent_at(self, rounds: Floats) -> Floats:
        """Bytes up to each of these rounds."""
        found: Floats = np.interp(rounds, [0.0, *self.sent.round], [0.0, *self.sent.value])
        return found

    def round_at(self, sent: float) -> int:
        """The last round that so many bytes were enough for."""
        return int(np.floor(np.interp(sent, [0.0, *self.sent.value], [0.0, *self.sent.round]) + 1e-6))


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a side was after some round; `color` is its line's."""

    job: Job
    color: int
    round: int
    value: float | None
    sent: float
    seconds: float | None
    is_ahead: bool
    chance: str
    """Why a difference says nothing; "" where it does, or where there is none."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Both sides over rounds or bytes; `at`: where they are compared, of 1000."""

    title: str
    lines: list[tuple[int, str]]
    low: float
    high: float
    at: float
    ends: tuple[str, str]
    standings: list[Standing]
    caption: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    measure: str
    lead: str
    rest: str
    drawings: list[Drawing]

    @property
    def title(self) -> str:
        return TITLES[self.measure]


def compare(sides: tuple[Side, Side]) -> Comparison | None:
    """None while one of them has told of nothing that both tell of."""
    measure = next((name for name in TITLES if all(name in side.lines for side in sides)), None)
    rounds = min(side.rounds for side in sides)
    if measure is None or not rounds:
        return None
    apart = _apart(sides)
    sent = min(float(side.sent.value[-1]) if len(side.sent.value) else 0.0 for side in sides)
    same_rounds = _standings(sides, measure, [rounds, rounds], apart=apart)
    same_bytes = _standings(sides, measure, [min(side.rounds, side.round_at(sent)) for side in sides], apart=apart)
    many = "accuracies" if measure == "accuracy" else "losses"
    so_far = " so far" if any(side.is_alive for side in sides) else ""
    lead = f"After {formatting.plural(rounds, 'round')}{so_far}, {_says(same_rounds, measure)}"
    rest = f"For the same {formatting.disk(sent)} on the wire, {_says(same_bytes, measure)}" if sent else ""
    return Comparison(
        measure=measure,
        lead=f"They were trained on different data ({apart}): {many} can't be compared." if apart else lead,
        rest="" if apart else rest,
        drawings=[
            _draw(sides, measure, same_rounds, at=float(rounds), x=lambda side, round_: round_, form=_round),
            *(
                [_draw(sides, measure, same_bytes, at=sent, x=lambda side, round_: side.sent_at(round_), form=_bytes)]
                if sent
                else []
            ),
        ],
    )


def _apart(sides: tuple[Side, Side]) -> str:
    """The first thing in which their data differ: "recipe text against tabular"."""
    one, other = (side.data for side in sides)
    for name in [*one, *(name for name in other if name not in one)]:
        mine, its = one.get(name), other.get(name)
        if mine != its:
            return f"{name} {mine or 'none'} against {its or 'none'}"
    return ""


def _standings(sides: tuple[Side, Side], measure: str, rounds: list[int], *, apart: str) -> list[Standing]:
    values = [side.lines[measure].at(round_) for side, round_ in zip(sides, rounds, strict=True)]
    known = [value for value in values if value is not None]
    chance = _chance(sides, measure, rounds, known) if len(known) == 2 else ""
    is_open = bool(apart) or bool(chance) or (len(known) == 2 and _read_alike(known))
    best = (max if measure == "accuracy" else min)(known) if known and not is_open else None
    return [
        Standing(
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


def _read_alike(values: list[float]) -> bool:
    return formatting.loss(values[0]) == formatting.loss(values[1])


def _chance(sides: tuple[Side, Side], measure: str, rounds: list[int], values: list[float]) -> str:
    """Return why the two values differ by no more than chance; "" where they do."""
    one, other = sides
    if one.setup is not None and one.setup == other.setup:
        return "of one set-up with two seeds"
    held_out = [side.held_out if measure == "accuracy" else None for side in sides]
    ends = tuple(side.lines[measure].up_to(round_) for side, round_ in zip(sides, rounds, strict=True))
    margin = chance_margin((values[0], values[1]), (held_out[0], held_out[1]), ends)
    is_chance = abs(values[0] - values[1]) <= margin
    return f"within what seeds make, ± {formatting.loss(margin)}" if is_chance and margin else ""


def _says(standings: list[Standing], measure: str) -> str:
    """ "#7 heron is ahead: accuracy 0.957 against 0.897."."""
    ahead = next((one for one in standings if one.is_ahead), None)
    what = TITLES[measure].lower()
    if ahead is None:
        one, other = (formatting.loss(standing.value) for standing in standings)
        values = one if one == other else f"{one} against {other}, {standings[0].chance}"
        return f"no difference: {what} {values}."
    other_one = next(one for one in standings if not one.is_ahead)
    if other_one.value is None:
        had = f"#{other_one.job.pk} {other_one.job.name} had been measured in no round yet"
        return f"#{ahead.job.pk} {ahead.job.name} is ahead: {had}."
    return (
        f"#{ahead.job.pk} {ahead.job.name} is ahead: {what} {formatting.loss(ahead.value)}"
        f" against {formatting.loss(other_one.value)}."
    )


def _draw(
    sides: tuple[Side, Side],
    measure: str,
    standings: list[Standing],
    *,
    at: float,
    x: Callable[[Side, Floats], Floats],
    form: Callable[[float], str],
) -> Drawing:
    along = [(x(side, side.lines[measure].round), side.lines[measure].value) for side in sides]
    first, last = (max(float(xs[end]) for xs, _ in along) for end in (0, -1))
    most = max(min(last, BEYOND * at), first) or 1.0
    along = [_up_to(most, xs, values) for xs, values in along]
    values = np.concatenate([value for _, value in along])
    low, high = float(values.min()), float(values.max())
    of_rounds, height = form is _round, (high - low) or 1.0
    return Drawing(
        title="At equal rounds" if of_rounds else "At equal bytes",
        lines=[(color, _points(xs / most, (ys - low) / height)) for color, (xs, ys) in enumerate(along, 1)],
        low=low,
        high=high,
        at=round(min(1.0, at / most) * WIDTH, 1),
        ends=("round 0" if of_rounds else "0 B", form(most)),
        standings=standings,
        caption=f"{TITLES[measure]} over {'rounds' if of_rounds else 'bytes sent, up and down'}",
    )


def _up_to(most: float, xs: Floats, values: Floats) -> tuple[Floats, Floats]:
    """The part of a line that is shown, to its very end."""
    if xs[-1] <= most:
        return xs, values
    kept = int(np.searchsorted(xs, most, "right"))
    return np.append(xs[:kept], most), np.append(values[:kept], np.interp(most, xs, values))


def _points(x: Floats, y: Floats) -> str:
    ys = HEIGHT - 2 - np.clip(y, 0, 1) * (HEIGHT - 4)
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x * WIDTH, ys, strict=True))


def _round(value: float) -> str:
    return f"round {formatting.count(int(value))}"


def _bytes(value: float) -> str:
    return formatting.disk(value)
