"""Lay out the timeline of a post-mortem: scheduler, Vigil, nodes and ranks on one time axis, in per cent of the width.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from jobs.presenting.scale import AxisTick, Scale
from vigil_core import formatting

LABEL_WIDTH = 13.0  # per cent of the width for the names of lanes
HEIGHT, TOP = 30, 26  # of a lane, and above the first
WIDTH_PX, LETTER_PX = 720, 6.4  # for measuring labels: no narrower than on paper
MAX_NODES = 8
ACT = 1.7  # per cent of the width for a number
MARGIN_BEFORE, MARGIN_AFTER = timedelta(minutes=3), timedelta(minutes=1)  # margin around the incident
MAX_WAIT_FOR_NEXT = timedelta(minutes=30)  # how long the default view waits for the next attempt
HOUR = timedelta(hours=1)
SPANS = ("near", "hour", "attempt")


@dataclass(frozen=True, kw_only=True)
class LaneSign:
    """A log line found on a node. `role` is root, echo, confirmation or survived."""

    at: datetime
    role: str
    text: str
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node of the attempt and the signs found on it."""

    name: str
    ranks: int = 0
    signs: tuple[LaneSign, ...] = ()
    is_blamed: bool = False


@dataclass(frozen=True, kw_only=True)
class LaneFacts:
    """The input of the timeline. `trained_from` and `trained_until` are the times of the first and last step."""

    number: int
    state: str
    started_at: datetime
    ended_at: datetime
    trained_from: datetime | None = None
    trained_until: datetime | None = None
    bad_at: datetime | None = None
    last_step: int | None = None
    unit: str = "step"  # or round
    rank: int | None = None  # the rank or node blamed
    nodes: tuple[NodeFacts, ...] = ()
    acts: tuple[datetime, ...] = ()  # Vigil's actions, numbered as listed
    next_number: int | None = None  # the next attempt's number
    next_started_at: datetime | None = None
    next_ended_at: datetime | None = None  # None: still going on
    next_nodes: tuple[str, ...] = ()
    resumed_at: datetime | None = None
    resumed_step: int | None = None


@dataclass(frozen=True)
class LaneBar:
    x1: float
    x2: float
    css_class: str  # beat, beat stall


@dataclass(frozen=True)
class LaneMark:
    """A glyph, dot or number, with its label on one side, or without a label if there is no room."""

    x: float
    kind: str  # glyph, dot, act
    state: str
    label: str = ""
    side: str = ""


@dataclass
class AttemptLane:
    name: str
    y: int
    is_inner: bool = False
    is_hot: bool = False
    bars: list[LaneBar] = field(default_factory=list)
    marks: list[LaneMark] = field(default_factory=list)

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
    """Everything that the template draws; every x is in per cent."""

    lanes: list[AttemptLane]
    axis: list[AxisTick]
    first_x: float | None
    first_label: str
    resumed_x: float | None
    resumed_label: str
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
        """Return where the label is anchored: centred above its line, unless the next label is close."""
        if self.first_x is None or self.first_x < LABEL_WIDTH + 9:
            return "start"
        return (
            "end" if self.first_x > 88 or (self.resumed_x is not None and self.resumed_x - self.first_x < 22) else "mid"
        )

    @property
    def resumed_side(self) -> str:
        """Return where the label is anchored; "" if there is no room for it."""
        if self.resumed_x is None:
            return ""
        if self.first_x is not None and self.resumed_x - self.first_x < 22:
            return "start" if self.resumed_x < 80 else ""
        return "end" if self.resumed_x > 92 else "mid"


def draw(facts: LaneFacts, span: str = "near") -> Lanes:
    """Lay out the lanes around the failure. `span` is one of SPANS."""
    scale = Scale(*_window(facts, span if span in SPANS else "near"), left=LABEL_WIDTH)
    lanes = [_scheduler(facts, scale), _vigil(facts, scale), *_nodes(facts, scale)]
    for i, lane in enumerate(lanes):
        lane.y = TOP + HEIGHT * i + HEIGHT // 2
        _place_labels(lane)
    bad, again = facts.bad_at, facts.resumed_at
    step = (
        f"{facts.unit} {formatting.count(facts.resumed_step)}" if facts.resumed_step is not None else "training again"
    )
    return Lanes(
        lanes=lanes,
        axis=_axis(scale),
        first_x=scale(bad) if bad is not None and scale.has(bad) else None,
        first_label=formatting.second(bad) if bad is not None else "",
        resumed_x=scale(again) if again is not None and scale.has(again) else None,
        resumed_label=f"{step} · {formatting.second(again)}" if again is not None else "",
        words=_description(facts),
        span=span,
    )


def _bar(scale: Scale, since: datetime, until: datetime, css_class: str) -> list[LaneBar]:
    """Return the bar as a list; empty if it is outside the visible time."""
    if until <= scale.start or since >= scale.end or until <= since:
        return []
    x1, x2 = scale(since), scale(until)
    return [LaneBar(x1, max(x2, x1 + 0.15), css_class)]


def _window(facts: LaneFacts, span: str) -> tuple[datetime, datetime]:
    first = min(facts.bad_at or facts.ended_at, facts.ended_at)
    last = facts.ended_at
    again = facts.resumed_at or facts.next_started_at
    if again is not None and again - last <= MAX_WAIT_FOR_NEXT:
        last = max(last, again)
    if span == "attempt":
        return facts.started_at, max(last, facts.started_at + timedelta(seconds=20)) + (last - facts.started_at) * 0.04
    if span == "hour":
        middle = first + (last - first) / 2
        return min(middle - HOUR / 2, first - MARGIN_BEFORE), max(middle + HOUR / 2, last + MARGIN_AFTER)
    around = max((last - first) * 0.35, timedelta(seconds=20))
    return max(facts.started_at - timedelta(seconds=20), first - max(around, MARGIN_BEFORE)), last + max(
        around / 2, MARGIN_AFTER
    )


def _scheduler(facts: LaneFacts, scale: Scale) -> AttemptLane:
    lane = AttemptLane("Scheduler", 0)
    lane.bars += _bar(scale, facts.started_at, facts.ended_at, "beat")
    if scale.has(facts.ended_at):
        label = f"attempt {facts.number} {formatting.word(facts.state)}"
        lane.marks.append(LaneMark(scale(facts.ended_at), "glyph", facts.state, label))
    if facts.next_started_at is not None:
        lane.bars += _bar(scale, facts.next_started_at, facts.next_ended_at or scale.end, "beat")
        if scale.has(facts.next_started_at):
            lane.marks.append(
                LaneMark(scale(facts.next_started_at), "glyph", "running", f"attempt {facts.next_number}")
            )
    return lane


def _vigil(facts: LaneFacts, scale: Scale) -> AttemptLane:
    """Return the lane of Vigil's actions; marks closer than one number's width are moved apart."""
    lane = AttemptLane("Vigil", 0)
    visible = [(i, scale(at)) for i, at in enumerate(facts.acts, 1) if scale.has(at)]
    taken, places = 0.0, []
    for _, x in visible:
        taken = max(x, taken + ACT)
        places.append(taken)
    limit = 100 - ACT / 2
    for place in reversed(range(len(places))):
        places[place] = limit = min(places[place], limit)
        limit -= ACT
    lane.marks = [LaneMark(round(x, 3), "act", "running", str(i)) for (i, _), x in zip(visible, places, strict=True)]
    return lane


def _nodes(facts: LaneFacts, scale: Scale) -> list[AttemptLane]:
    """Return lanes of the nodes, blamed ones and those with signs first; nodes beyond MAX_NODES share one lane."""
    nodes = list(facts.nodes)
    shown = nodes
    if len(nodes) > MAX_NODES:
        preferred = sorted(nodes, key=lambda node: (not node.is_blamed, not node.signs))[: MAX_NODES - 1]
        shown = [node for node in nodes if node in preferred]
    lanes = [lane for node in shown for lane in _node(facts, node, scale)]
    if rest := [node for node in nodes if node not in shown]:
        lane = AttemptLane(f"{formatting.count(len(rest))} more nodes", 0)
        _train(facts, lane, scale, continues=any(node.name in facts.next_nodes for node in rest))
        lanes.append(lane)
    for name in [name for name in facts.next_nodes if name not in {node.name for node in nodes}][:3]:
        lane = AttemptLane(name, 0)
        _add_next_attempt(facts, lane, scale)
        if facts.next_started_at is not None and scale.has(facts.next_started_at):
            lane.marks.append(LaneMark(scale(facts.next_started_at), "dot", "running", "new in the next attempt"))
        lanes.append(lane)
    return lanes


def _node(facts: LaneFacts, node: NodeFacts, scale: Scale) -> list[AttemptLane]:
    """Return one lane; for a node with the blamed rank also one for that rank and one for the other ranks there."""
    lane = AttemptLane(node.name, 0, is_hot=node.is_blamed)
    goes_on = node.name in facts.next_nodes
    rank_signs = [sign for sign in node.signs if sign.rank is not None and sign.rank == facts.rank]
    if not node.is_blamed or facts.rank is None or node.ranks < 2:
        _train(facts, lane, scale, continues=goes_on)
        lane.marks += _signs(node.signs, scale)
        return [lane]
    rank_lane = AttemptLane(f"rank {facts.rank}", 0, is_inner=True, is_hot=True)
    rank_lane.bars += _bar(scale, facts.trained_from or facts.started_at, facts.bad_at or facts.ended_at, "beat")
    rank_lane.marks += _signs(rank_signs, scale) or _stopped(facts, scale)
    rest = AttemptLane(f"other {formatting.plural(node.ranks - 1, 'rank')}", 0, is_inner=True)
    _train(facts, rest, scale, continues=goes_on)
    others = [sign for sign in node.signs if sign not in rank_signs]
    rest.marks += _signs([sign for sign in others if sign.rank is not None], scale)
    lane.marks += _signs([sign for sign in others if sign.rank is None], scale)
    return [lane, rank_lane, rest]


def _train(facts: LaneFacts, lane: AttemptLane, scale: Scale, *, continues: bool) -> None:
    """Add bars: waiting for the first step, training until the last, waiting for the end."""
    first, last = facts.trained_from or facts.started_at, facts.trained_until or facts.ended_at
    lane.bars += _bar(scale, facts.started_at, first, "beat stall")
    lane.bars += _bar(scale, first, last, "beat")
    lane.bars += _bar(scale, last, facts.ended_at, "beat stall")
    if continues:
        _add_next_attempt(facts, lane, scale)


def _add_next_attempt(facts: LaneFacts, lane: AttemptLane, scale: Scale) -> None:
    if facts.next_started_at is None:
        return
    until = facts.next_ended_at or scale.end
    trained = facts.resumed_at or until
    lane.bars += _bar(scale, facts.next_started_at, min(trained, until), "beat stall")
    lane.bars += _bar(scale, trained, until, "beat")


def _stopped(facts: LaneFacts, scale: Scale) -> list[LaneMark]:
    at = facts.bad_at
    step = f"last {facts.unit} {formatting.count(facts.last_step)}" if facts.last_step is not None else "stopped"
    return [LaneMark(scale(at), "glyph", "failed", step)] if at is not None and scale.has(at) else []


def _signs(signs: tuple[LaneSign, ...] | list[LaneSign], scale: Scale) -> list[LaneMark]:
    """Return one mark per role and distinguishable moment, labelled by the earliest sign."""
    marks: list[LaneMark] = []
    for sign in sorted(signs, key=lambda sign: (sign.role != "root", sign.at)):
        if not scale.has(sign.at):
            continue
        x = scale(sign.at)
        if any(abs(mark.x - x) < 1.4 for mark in marks):
            continue
        is_root = sign.role == "root"
        state = "failed" if is_root else "warn" if sign.role == "confirmation" else "cancelled"
        marks.append(LaneMark(x, "glyph" if is_root else "dot", state, sign.text))
    return sorted(marks, key=lambda mark: mark.x)


def _place_labels(lane: AttemptLane) -> None:
    """Put each label right of its mark, cut to the available room, or left if there is more room, or leave it out."""
    placed: list[LaneMark] = []
    for i, mark in enumerate(lane.marks):
        if not mark.label or mark.kind == "act":
            placed.append(mark)
            continue
        following = lane.marks[i + 1].x if i + 1 < len(lane.marks) else 100.0
        before = lane.marks[i - 1].x if i else LABEL_WIDTH
        if i and placed[-1].side == "right":
            before = following  # that side is occupied
        right, left = _letters(following - mark.x), _letters(mark.x - before)
        wanted = min(len(mark.label), 24)
        # Anything that begins here has its bar to the right.
        is_right = left < wanted if mark.state == "running" else right >= wanted or right >= left
        side, room = ("right", right) if is_right else ("left", left)
        label = mark.label if len(mark.label) <= room else f"{mark.label[: max(0, room - 1)].rstrip()}…"
        if room < 8:
            label, side = "", ""
        placed.append(LaneMark(mark.x, mark.kind, mark.state, label, side))
    lane.marks = placed


def _letters(share: float) -> int:
    return int((share / 100 * WIDTH_PX - 22) / LETTER_PX)


def _axis(scale: Scale) -> list[AxisTick]:
    """Return at most nine ticks, without those whose labels would hang over."""
    return [tick for tick in scale.axis(9) if tick.x < (95 if tick.is_day else 98)]


def _description(facts: LaneFacts) -> str:
    """Return the timeline as sentences, for screen readers."""
    sentences = []
    if facts.bad_at is not None:
        sentences.append(f"The first sign of failure was at {formatting.second(facts.bad_at)}.")
    for node in facts.nodes:
        for sign in sorted(node.signs, key=lambda sign: sign.at)[:2]:
            sentences.append(f"{node.name} at {formatting.second(sign.at)}: {sign.role}.")
    sentences.append(
        f"Attempt {facts.number} ended at {formatting.second(facts.ended_at)}: {formatting.word(facts.state)}."
    )
    if facts.next_started_at is not None:
        sentences.append(f"Attempt {facts.next_number} started at {formatting.second(facts.next_started_at)}.")
    if facts.resumed_at is not None:
        sentences.append(f"It completed its first {facts.unit} at {formatting.second(facts.resumed_at)}.")
    return " ".join(sentences[:14])
