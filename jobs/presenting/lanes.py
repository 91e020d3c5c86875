"""The lanes of a post-mortem: scheduler, Vigil, nodes and ranks on one time axis, in per cent of the width. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from jobs.presenting.scale import Scale
from vigil_core import formatting

LEFT = 13.0  # per cent of the width for the names of lanes
HEIGHT, TOP = 30, 26  # of a lane, and above the first
WIDTH_PX, LETTER_PX = 720, 6.4  # what labels are measured by: no narrower than on paper
MOST_NODES = 8
ACT = 1.7  # per cent that a number takes
BEFORE, AFTER = timedelta(minutes=3), timedelta(minutes=1)  # around what happened
LONGEST_AFTER = timedelta(minutes=30)  # that the usual view waits for the next attempt
HOUR = timedelta(hours=1)
SPANS = ("near", "hour", "attempt")
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800)


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A line that was found on a node. `role`: root, echo, confirmation, survived."""

    at: datetime
    role: str
    says: str
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node of the attempt, and what is known of it."""

    name: str
    ranks: int = 0
    signs: tuple[Sign, ...] = ()
    is_blamed: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the lanes are made of. `trained_*`: from its first step to its last."""

    number: int
    state: str
    started_at: datetime
    ended_at: datetime
    trained_from: datetime | None = None
    trained_until: datetime | None = None
    bad_at: datetime | None = None
    last_step: int | None = None
    counts: str = "step"  # or round
    rank: int | None = None  # that is blamed
    nodes: tuple[NodeFacts, ...] = ()
    acts: tuple[datetime, ...] = ()  # what Vigil did, numbered as listed
    again: int | None = None  # the next attempt's number
    again_at: datetime | None = None
    again_until: datetime | None = None  # None: it goes on
    again_nodes: tuple[str, ...] = ()
    again_trained_at: datetime | None = None
    again_step: int | None = None


@dataclass(frozen=True)
class Bar:
    x1: float
    x2: float
    look: str  # beat, beat stall


@dataclass(frozen=True)
class Mark:
    """A glyph, a dot or a number; its label right or left of it, or nowhere if there is no room."""

    x: float
    kind: str  # glyph, dot, act
    state: str
    label: str = ""
    side: str = ""


@dataclass
class Lane:
    name: str
    y: int
    is_inner: bool = False
    is_hot: bool = False
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def text_y(self) -> int:
        return self.y + 4

    @property
    def bottom(self) -> int:
        return self.y + HEIGHT // 2

    @property
    def top(self) -> int:
        return self.y - HEIGHT // 2


@dataclass
class Lanes:
    """Everything the template draws; every x is in per cent."""

    lanes: list[Lane]
    axis: list[tuple[float, str]]
    first_x: float | None
    first_label: str
    again_x: float | None
    again_label: str
    words: str
    span: str

    @property
    def bottom(self) -> int:
        return TOP + HEIGHT * len(self.lanes)

    @property
    def height(self) -> int:
        return self.bottom + 22

    @property
    def label_y(self) -> int:
        return self.bottom + 17

    @property
    def first_side(self) -> str:
        """The word stands in the middle above its line, but where the next one's is near."""
        if self.first_x is None or self.first_x < LEFT + 9:
            return "start"
        return "end" if self.first_x > 88 or (self.again_x is not None and self.again_x - self.first_x < 22) else "mid"

    @property
    def again_side(self) -> str:
        """ "": there is no room for it."""
        if self.again_x is None:
            return ""
        if self.first_x is not None and self.again_x - self.first_x < 22:
            return "start" if self.again_x < 80 else ""
        return "end" if self.again_x > 92 else "mid"


def draw(facts: Facts, span: str = "near") -> Lanes:
    """The lanes between two moments around what happened; `span`: one of SPANS."""
    scale = Scale(*_window(facts, span if span in SPANS else "near"), left=LEFT)
    lanes = [_scheduler(facts, scale), _vigil(facts, scale), *_nodes(facts, scale)]
    for i, lane in enumerate(lanes):
        lane.y = TOP + HEIGHT * i + HEIGHT // 2
        _place_labels(lane)
    bad, again = facts.bad_at, facts.again_trained_at
    step = f"{facts.counts} {formatting.count(facts.again_step)}" if facts.again_step is not None else "training again"
    return Lanes(
        lanes=lanes,
        axis=_axis(scale),
        first_x=scale(bad) if bad is not None and scale.has(bad) else None,
        first_label=formatting.second(bad) if bad is not None else "",
        again_x=scale(again) if again is not None and scale.has(again) else None,
        again_label=f"{step} · {formatting.second(again)}" if again is not None else "",
        words=_in_words(facts),
        span=span,
    )


def _bar(scale: Scale, since: datetime, until: datetime, look: str) -> list[Bar]:
    """None where nothing of it is in sight."""
    if until <= scale.start or since >= scale.end or until <= since:
        return []
    x1, x2 = scale(since), scale(until)
    return [Bar(x1, max(x2, x1 + 0.15), look)]


def _window(facts: Facts, span: str) -> tuple[datetime, datetime]:
    first = min(facts.bad_at or facts.ended_at, facts.ended_at)
    last = facts.ended_at
    again = facts.again_trained_at or facts.again_at
    if again is not None and again - last <= LONGEST_AFTER:
        last = max(last, again)
    if span == "attempt":
        return facts.started_at, max(last, facts.started_at + timedelta(seconds=20)) + (last - facts.started_at) * 0.04
    if span == "hour":
        middle = first + (last - first) / 2
        return min(middle - HOUR / 2, first - BEFORE), max(middle + HOUR / 2, last + AFTER)
    around = max((last - first) * 0.35, timedelta(seconds=20))
    return max(facts.started_at - timedelta(seconds=20), first - max(around, BEFORE)), last + max(around / 2, AFTER)


def _scheduler(facts: Facts, scale: Scale) -> Lane:
    lane = Lane("Scheduler", 0)
    lane.bars += _bar(scale, facts.started_at, facts.ended_at, "beat")
    if scale.has(facts.ended_at):
        label = f"attempt {facts.number} {formatting.word(facts.state)}"
        lane.marks.append(Mark(scale(facts.ended_at), "glyph", facts.state, label))
    if facts.again_at is not None:
        lane.bars += _bar(scale, facts.again_at, facts.again_until or scale.end, "beat")
        if scale.has(facts.again_at):
            lane.marks.append(Mark(scale(facts.again_at), "glyph", "running", f"attempt {facts.again}"))
    return lane


def _vigil(facts: Facts, scale: Scale) -> Lane:
    """What was done within one number's width of another stands beside it."""
    lane = Lane("Vigil", 0)
    seen = [(i, scale(at)) for i, at in enumerate(facts.acts, 1) if scale.has(at)]
    taken, places = 0.0, []
    for _, x in seen:
        taken = max(x, taken + ACT)
        places.append(taken)
    limit = 100 - ACT / 2
    for place in reversed(range(len(places))):
        places[place] = limit = min(places[place], limit)
        limit -= ACT
    lane.marks = [Mark(round(x, 3), "act", "running", str(i)) for (i, _), x in zip(seen, places, strict=True)]
    return lane


def _nodes(facts: Facts, scale: Scale) -> list[Lane]:
    """Those that are blamed or told something first, as many as are easily seen; the others are one lane."""
    nodes = list(facts.nodes)
    shown = nodes
    if len(nodes) > MOST_NODES:
        telling = sorted(nodes, key=lambda one: (not one.is_blamed, not one.signs))[: MOST_NODES - 1]
        shown = [one for one in nodes if one in telling]
    lanes = [lane for one in shown for lane in _node(facts, one, scale)]
    if rest := [one for one in nodes if one not in shown]:
        lane = Lane(f"{formatting.count(len(rest))} more nodes", 0)
        _train(facts, lane, scale, goes_on=any(one.name in facts.again_nodes for one in rest))
        lanes.append(lane)
    for name in [name for name in facts.again_nodes if name not in {one.name for one in nodes}][:3]:
        lane = Lane(name, 0)
        _train_again(facts, lane, scale)
        if facts.again_at is not None and scale.has(facts.again_at):
            lane.marks.append(Mark(scale(facts.again_at), "dot", "running", "new in the next attempt"))
        lanes.append(lane)
    return lanes


def _node(facts: Facts, node: NodeFacts, scale: Scale) -> list[Lane]:
    """One lane; of a node with the blamed rank also one of that rank, and one of the others there."""
    lane = Lane(node.name, 0, is_hot=node.is_blamed)
    goes_on = node.name in facts.again_nodes
    mine = [sign for sign in node.signs if sign.rank is not None and sign.rank == facts.rank]
    if not node.is_blamed or facts.rank is None or node.ranks < 2:
        _train(facts, lane, scale, goes_on=goes_on)
        lane.marks += _signs(node.signs, scale)
        return [lane]
    own = Lane(f"rank {facts.rank}", 0, is_inner=True, is_hot=True)
    own.bars += _bar(scale, facts.trained_from or facts.started_at, facts.bad_at or facts.ended_at, "beat")
    own.marks += _signs(mine, scale) or _stopped(facts, scale)
    rest = Lane(f"other {formatting.plural(node.ranks - 1, 'rank')}", 0, is_inner=True)
    _train(facts, rest, scale, goes_on=goes_on)
    others = [sign for sign in node.signs if sign not in mine]
    rest.marks += _signs([sign for sign in others if sign.rank is not None], scale)
    lane.marks += _signs([sign for sign in others if sign.rank is None], scale)
    return [lane, own, rest]


def _train(facts: Facts, lane: Lane, scale: Scale, *, goes_on: bool) -> None:
    """It waits for its first step, trains until its last, and waits for the end."""
    first, last = facts.trained_from or facts.started_at, facts.trained_until or facts.ended_at
    lane.bars += _bar(scale, facts.started_at, first, "beat stall")
    lane.bars += _bar(scale, first, last, "beat")
    lane.bars += _bar(scale, last, facts.ended_at, "beat stall")
    if goes_on:
        _train_again(facts, lane, scale)


def _train_again(facts: Facts, lane: Lane, scale: Scale) -> None:
    if facts.again_at is None:
        return
    until = facts.again_until or scale.end
    trained = facts.again_trained_at or until
    lane.bars += _bar(scale, facts.again_at, min(trained, until), "beat stall")
    lane.bars += _bar(scale, trained, until, "beat")


def _stopped(facts: Facts, scale: Scale) -> list[Mark]:
    at = facts.bad_at
    step = f"last {facts.counts} {formatting.count(facts.last_step)}" if facts.last_step is not None else "stopped"
    return [Mark(scale(at), "glyph", "failed", step)] if at is not None and scale.has(at) else []


def _signs(signs: tuple[Sign, ...] | list[Sign], scale: Scale) -> list[Mark]:
    """One mark a role and moment that can be told apart; the earliest names it."""
    marks: list[Mark] = []
    for sign in sorted(signs, key=lambda sign: (sign.role != "root", sign.at)):
        if not scale.has(sign.at):
            continue
        x = scale(sign.at)
        if any(abs(mark.x - x) < 1.4 for mark in marks):
            continue
        is_root = sign.role == "root"
        state = "failed" if is_root else "warn" if sign.role == "confirmation" else "cancelled"
        marks.append(Mark(x, "glyph" if is_root else "dot", state, sign.says))
    return sorted(marks, key=lambda mark: mark.x)


def _place_labels(lane: Lane) -> None:
    """Right of its mark and cut to the room that there is, left of it where that is more, or nowhere."""
    placed: list[Mark] = []
    for i, mark in enumerate(lane.marks):
        if not mark.label or mark.kind == "act":
            placed.append(mark)
            continue
        following = lane.marks[i + 1].x if i + 1 < len(lane.marks) else 100.0
        before = lane.marks[i - 1].x if i else LEFT
        if i and placed[-1].side == "right":
            before = following  # that side is taken
        right, left = _letters(following - mark.x), _letters(mark.x - before)
        wanted = min(len(mark.label), 24)
        # What begins here has its bar at the right.
        is_right = left < wanted if mark.state == "running" else right >= wanted or right >= left
        side, room = ("right", right) if is_right else ("left", left)
        label = mark.label if len(mark.label) <= room else f"{mark.label[: max(0, room - 1)].rstrip()}…"
        if room < 8:
            label, side = "", ""
        placed.append(Mark(mark.x, mark.kind, mark.state, label, side))
    lane.marks = placed


def _letters(share: float) -> int:
    return int((share / 100 * WIDTH_PX - 22) / LETTER_PX)


def _axis(scale: Scale) -> list[tuple[float, str]]:
    """Sets at most nine ticks, at round local times."""
    step, marks = scale.marks(_STEPS_S, 9)
    ticks = []
    for at in marks:
        text = f"{at:%H:%M:%S}" if step < 60 else f"{at:%H:%M}" if step < 86400 else f"{at.day} {at:%b}"
        if (x := scale(at)) < 98:
            ticks.append((x, text))
    return ticks


def _in_words(facts: Facts) -> str:
    """The same in sentences, for those who do not see the drawing."""
    said = []
    if facts.bad_at is not None:
        said.append(f"The first bad moment was at {formatting.second(facts.bad_at)}.")
    for node in facts.nodes:
        for sign in sorted(node.signs, key=lambda sign: sign.at)[:2]:
            said.append(f"{node.name} at {formatting.second(sign.at)}: {sign.role}.")
    said.append(f"Attempt {facts.number} ended at {formatting.second(facts.ended_at)}: {formatting.word(facts.state)}.")
    if facts.again_at is not None:
        said.append(f"Attempt {facts.again} started at {formatting.second(facts.again_at)}.")
    if facts.again_trained_at is not None:
        said.append(f"It made its first {facts.counts} at {formatting.second(facts.again_trained_at)}.")
    return " ".join(said[:14])
