"""Lay out the attempt ribbon: a job's life on one time line, in per cent of the width. Pure; the template draws it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.utils import timezone

from jobs.presenting.scale import AxisTick, Scale
from vigil_core import formatting

# Width in pixels assumed when keeping labels apart.
WIDTH_PX = 1040
LETTER_PX, MARGIN_PX = 6, 26  # width of a label: its letters, and its glyph with a margin
MIN_LOST = 1.0  # per cent, so that lost work stays visible
MAX_TICKS = WIDTH_PX // 4


@dataclass(frozen=True, kw_only=True)
class AttemptSpan:
    """An attempt as the ribbon needs it.

    Times are aware; `lost_from` is the time of the state that it fell back to.
    """

    number: int
    state: str
    began: datetime  # when it joined the queue
    started: datetime | None = None
    ended: datetime | None = None
    note: str = ""  # label of its mark
    lost_from: datetime | None = None
    resumed_from: datetime | None = None
    rounds: tuple[int, int] | None = None  # of a federation: its first and last round
    restarts: tuple[tuple[datetime, str], ...] = ()  # recoveries in place: when, and what happened
    url: str = ""
    postmortem: str = ""  # its address, if it ended badly


@dataclass(frozen=True, kw_only=True)
class RibbonSave:
    """A checkpoint, drawn as a tick."""

    at: datetime
    state: str
    url: str = ""
    title: str = ""


@dataclass(frozen=True)
class RibbonSegment:
    number: int
    state: str
    x: float
    width: float
    label: str
    lost_x: float | None
    lost_width: float
    url: str
    title: str

    @property
    def end(self) -> float:
        return round(self.x + self.width, 3)

    @property
    def wide(self) -> bool:
        return self.width >= 9


@dataclass(frozen=True)
class RibbonMark:
    """A failure: a glyph at its time, with the label on one side, or without a label if there is no room."""

    x: float
    state: str
    label: str
    side: str
    url: str = ""


@dataclass
class Ribbon:
    """Everything that the template draws; every x and width is in per cent."""

    segments: list[RibbonSegment] = field(default_factory=list)
    waits: list[tuple[float, float, str]] = field(default_factory=list)
    marks: list[RibbonMark] = field(default_factory=list)
    ticks: list[tuple[float, str, str, str]] = field(default_factory=list)  # x, class, url, title
    rounds: list[float] = field(default_factory=list)
    brackets: list[tuple[float, float]] = field(default_factory=list)
    nights: list[tuple[float, float]] = field(default_factory=list)
    axis: list[AxisTick] = field(default_factory=list)
    now: float | None = None
    done: float | None = None
    done_label: str = ""
    limit: float | None = None
    begins: str = ""
    words: str = ""

    @property
    def ahead(self) -> float:
        """Return the width of the dashed outline from now to the estimated end."""
        return round(max(0.0, (self.done or 0.0) - (self.now or 0.0)), 3)

    @property
    def names_limit(self) -> bool:
        """Return whether the label "limit" fits next to the label of now, "now · step 88".

        That label is right of now, or left of it near the end.
        """
        if self.limit is None or self.now is None:
            return self.limit is not None
        return self.limit - self.now > (3 if self.now > 78 else 14)

    @property
    def crowded(self) -> bool:
        """Return whether a phone has no room for both the start time and the first label of the axis."""
        return bool(self.axis) and self.axis[0].x < 28

    @property
    def lost(self) -> bool:
        return any(segment.lost_x is not None for segment in self.segments)


def draw(
    pieces: list[AttemptSpan],
    saves: list[RibbonSave],
    *,
    now: datetime,
    done_at: datetime | None = None,
    limit_at: datetime | None = None,
    goal: str = "",
) -> Ribbon:
    """Lay out the ribbon of a job with at least one attempt.

    `goal` is what the job will have reached when it is done.
    """
    first, last = pieces[0].began, pieces[-1]
    alive = last.ended is None
    scale = Scale(first, _right_edge(first, last, now, done_at, limit_at))
    ribbon = Ribbon(begins=formatting.clock(first, now), words=_description(pieces, now, done_at if alive else None))
    for piece in pieces:
        _draw_piece(ribbon, piece, scale, now)
    ribbon.ticks = _ticks(saves, scale)
    if alive:
        ribbon.now = scale(now)
        if done_at and last.started:
            clock = formatting.clock(done_at, now)
            ribbon.done, ribbon.done_label = scale(done_at), f"{goal} · {clock}" if goal else f"done {clock}"
        if limit_at and limit_at <= scale.end:
            ribbon.limit = scale(limit_at)
    _place_labels(ribbon)
    ribbon.axis, ribbon.nights = _axis(scale), _nights(scale)
    return ribbon


def _right_edge(
    first: datetime, last: AttemptSpan, now: datetime, done_at: datetime | None, limit_at: datetime | None
) -> datetime:
    """Return max(ETA, time limit), but never so far that the past shrinks to a sliver."""
    least = first + timedelta(seconds=20)
    if last.ended:
        return max(least, last.ended + (last.ended - first) * 0.015)
    ahead = max(done_at or now, now)
    furthest = first + (ahead - first) * (1.25 if done_at else 2.5) + timedelta(seconds=30)
    return max(least, ahead + (ahead - first) * 0.03, min(limit_at or ahead, furthest))


def _draw_piece(ribbon: Ribbon, piece: AttemptSpan, scale: Scale, now: datetime) -> None:
    waited_until = piece.started or piece.ended or now
    if (waited_until - piece.began).total_seconds() > scale.seconds * 0.004:
        title = f"pending {formatting.duration((waited_until - piece.began).total_seconds())}"
        ribbon.waits.append((scale(piece.began), scale(waited_until), title))
    end = piece.ended or now
    if piece.started:
        ribbon.segments.append(_segment(piece, piece.started, end, scale))
        ribbon.rounds += _rounds(piece, ribbon.segments[-1])
        if piece.resumed_from:
            ribbon.brackets.append((scale(piece.resumed_from), scale(piece.started)))
    for at, what in piece.restarts:
        ribbon.marks.append(RibbonMark(scale(at), "warn", what, ""))
    if piece.ended and piece.state != "completed":
        note = piece.note or formatting.word(piece.state)
        ribbon.marks.append(RibbonMark(scale(end), piece.state, note, "", piece.postmortem))


def _segment(piece: AttemptSpan, start: datetime, end: datetime, scale: Scale) -> RibbonSegment:
    x = scale(start)
    width = round(max(0.25, scale(end) - x), 3)
    ran = formatting.duration((end - start).total_seconds())
    lost_x, lost_width = None, 0.0
    if piece.lost_from:
        lost_width = round(min(width, max(MIN_LOST, x + width - scale(max(piece.lost_from, start)))), 3)
        lost_x = round(x + width - lost_width, 3)
    did = "rounds {:,}–{:,}".format(*piece.rounds) if piece.rounds else ""
    title = f"Attempt {piece.number}: {formatting.word(piece.state)}, {f'{did}, ' if did else ''}{ran}"
    return RibbonSegment(piece.number, piece.state, x, width, did or ran, lost_x, lost_width, piece.url, title)


def _rounds(piece: AttemptSpan, segment: RibbonSegment) -> list[float]:
    """Return a tick per round, evenly spaced since their times are not recorded; thinned if there are many."""
    if piece.rounds is None:
        return []
    count = piece.rounds[1] - piece.rounds[0] + 1
    every = -(-count // max(1, int(MAX_TICKS * segment.width / 100)))
    return [round(segment.x + segment.width * at / count, 3) for at in range(every, count + 1, every)]


def _ticks(saves: list[RibbonSave], scale: Scale) -> list[tuple[float, str, str, str]]:
    """Return a tick per checkpoint, oldest first; thinned evenly, but never the newest or a damaged one."""
    saves = sorted((save for save in saves if save.state != "pruned"), key=lambda save: save.at)
    every = -(-len(saves) // MAX_TICKS) or 1
    shown = [save for i, save in enumerate(reversed(saves)) if i % every == 0 or save.state == "corrupt"]
    classes = {"verified": "tick", "committed": "tick soft", "corrupt": "corrupt"}
    return [
        (scale(save.at), classes.get(save.state, "tick") + (" newest" if i == 0 else ""), save.url, save.title)
        for i, save in enumerate(shown)
    ][::-1]


def _place_labels(ribbon: Ribbon) -> None:
    """Put each label right of its glyph, or left of it, or leave it out if neither side has room.

    The right side has no room if the next mark or now is close.
    """
    stops = sorted([*(mark.x for mark in ribbon.marks), *([ribbon.now] if ribbon.now is not None else []), 100.0])
    placed: list[RibbonMark] = []
    taken = 0.0
    for mark in sorted(ribbon.marks, key=lambda mark: mark.x):
        room = 100 * (len(mark.label) * LETTER_PX + MARGIN_PX) / WIDTH_PX
        following = next((x for x in stops if x > mark.x), 100.0)
        if following - mark.x >= room:
            side, taken = "right", mark.x + room
        elif mark.x - taken >= room:
            side, taken = "left", mark.x
        else:
            side, taken = "", max(taken, mark.x)
        placed.append(RibbonMark(mark.x, mark.state, mark.label, side, mark.url))
    ribbon.marks = placed


def _axis(scale: Scale) -> list[AxisTick]:
    """Return at most eight ticks, without those whose labels would hang over."""
    return [tick for tick in scale.axis(8) if 8 < tick.x < (92 if tick.is_day else 97)]


def _nights(scale: Scale) -> list[tuple[float, float]]:
    """Return the spans from 22:00 to 06:00, if the time line is long enough for nights to matter."""
    if scale.seconds < 2 * 3600:
        return []
    start = timezone.localtime(scale.start).replace(hour=22, minute=0, second=0, microsecond=0) - timedelta(days=1)
    nights: list[tuple[float, float]] = []
    while start < scale.end and len(nights) < 60:
        x, end = scale(start), scale(start + timedelta(hours=8))
        if end > x:
            nights.append((x, round(end - x, 3)))
        start += timedelta(days=1)
    return nights


def _description(pieces: list[AttemptSpan], now: datetime, done_at: datetime | None) -> str:
    """Return the attempts as sentences, for screen readers."""
    sentences = [f"{formatting.plural(len(pieces), 'attempt')} since {formatting.clock(pieces[0].began, now)}."]
    for piece in pieces[-12:]:
        what = formatting.word(piece.state)
        if piece.ended:
            line = f"Attempt {piece.number} ended {formatting.clock(piece.ended, now)}: {what}"
            line += f", {piece.note}" if piece.note and piece.note != what else ""
        else:
            line = f"Attempt {piece.number} is {what}"
            line += f" since {formatting.clock(piece.started or piece.began, now)}"
        sentences.append(f"{line}.")
    if done_at:
        sentences.append(f"Done about {formatting.clock(done_at, now)}.")
    return " ".join(sentences)
