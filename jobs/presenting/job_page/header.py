"""Build the fact strip in the head of a job's page, and labels of its restarts. Pure: facts in, text out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jobs.presenting.job_page.sentence import WorstClient
from jobs.presenting.metric_values import number
from jobs.presenting.size import ATTACHED, has_ranks, limit_seconds, ranks_and_nodes
from vigil_core import formatting
from vigil_core.kinds import JobKind

MAX_FACTS = 7
_OMIT_FIRST = ("step_seconds", "clients")
RECOVERIES = ("incarnation.ended", "nodes.lost", "nodes.joined")
"""Events that launchers report when ranks are restarted within an attempt."""
EventRow = tuple[str, int, int | None, int, datetime, dict[str, Any]]
"""An event: kind, attempt id, incarnation of the stream, incarnation that it is about, time, data."""
HUNG = "hang"  # reported by a launcher if ranks made no progress and were killed for it


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
    worst: WorstClient
    sent_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class StripFacts:
    """The input of the fact strip: the latest attempt, and totals over all attempts."""

    kind: JobKind
    spec: dict[str, Any]
    latest: dict[str, Any]
    """The newest values that rank 0 reported."""
    is_alive: bool
    nodes: list[str]
    now: datetime
    started_at: datetime | None
    ended_at: datetime | None
    done_at: datetime | None
    ran_s: float | None
    step: int | None
    steps: int | None
    fraction: float | None
    lost_steps: int
    checkpoint: tuple[int, datetime] | None
    """Step and time of the newest checkpoint to resume from."""
    spread: tuple[int, int] | None
    """Ranks and nodes of an elastic job since its last restart in place."""
    traffic: RoundTraffic | None


def strip(facts: StripFacts) -> list[HeaderFact]:
    """Return at most seven cells: those that a chart or drawing also shows are left out first."""
    cells = [*_training(facts), *_running(facts)]
    return [cell for cell in cells if cell.live not in _OMIT_FIRST] if len(cells) > MAX_FACTS else cells


def _training(facts: StripFacts) -> list[HeaderFact]:
    if facts.kind.name == ATTACHED and facts.step is None:
        return []  # it may never report
    cells = [
        HeaderFact(
            name=facts.kind.unit.capitalize(),
            value=formatting.count(facts.step),
            small=f"of {formatting.count(facts.steps)}{_round_time(facts.traffic)}" if facts.steps else "",
            live="step",
            bar=facts.fraction,
        )
    ]
    if facts.traffic is not None and "accuracy" in facts.latest:
        return [*cells, *_federated(facts.latest, facts.traffic)]
    cells += _values(facts)
    if facts.kind.name != ATTACHED:
        step, at = facts.checkpoint or (None, None)
        cells.append(
            HeaderFact(
                name="Checkpoint",
                value=formatting.count(step) if at else formatting.MISSING,
                small="" if at else "none yet" if facts.is_alive else "none",
                since=at,
            )
        )
    return cells


def _values(facts: StripFacts) -> list[HeaderFact]:
    """Return loss, throughput and step time, as far as the job reports them."""
    latest, cells = facts.latest, []
    if facts.kind.trains or "loss" in latest:
        validation = number(latest, "validation_loss")
        small = f"val {formatting.loss(validation)}" if validation is not None else ""
        cells.append(HeaderFact(name="Loss", value=formatting.loss(number(latest, "loss")), small=small, live="loss"))
    speed = next((name for name in ("tokens_per_second", "samples_per_second") if name in latest), None)
    if speed or facts.kind.profiles:
        speed = speed or "tokens_per_second"
        title = "Tokens/s" if speed.startswith("tokens") else "Samples/s"
        cells.append(HeaderFact(name=title, value=formatting.measure(number(latest, speed)), live="speed"))
        step_s = number(latest, "step_seconds")
        cells.append(HeaderFact(name="Step time", value=formatting.duration(step_s), live="step_seconds"))
    return cells


def _round_time(traffic: RoundTraffic | None) -> str:
    """Return the duration of the newest round."""
    seconds = traffic.seconds if traffic else None
    return f" · {formatting.duration(seconds)}" if seconds is not None else ""


def _federated(latest: dict[str, Any], traffic: RoundTraffic) -> list[HeaderFact]:
    """Return the quality of the global model, overall and for its worst client, and its cost."""
    loss = f"loss {formatting.loss(number(latest, 'loss'))}"
    return [
        HeaderFact(name="Accuracy", value=formatting.loss(number(latest, "accuracy")), small=loss, live="accuracy"),
        HeaderFact(
            name="Worst client",
            value=formatting.loss(None if traffic.worst.is_unknown else number(latest, "client_accuracy_min")),
            small=traffic.worst.text,
        ),
        HeaderFact(
            name="Clients",
            value=formatting.count(traffic.counted),
            small=f"of {formatting.count(traffic.selected)} selected",
            live="clients",
        ),
        HeaderFact(name="Sent and received", value=formatting.disk(traffic.sent_bytes)),
    ]


def _running(facts: StripFacts) -> list[HeaderFact]:
    cells = [_size_fact(facts.spec, facts.nodes, facts.spread)]
    if facts.is_alive and facts.done_at:
        small = formatting.until(facts.done_at, facts.now)
        clock = formatting.clock(facts.done_at, facts.now)
        cells.append(HeaderFact(name="Done", value=clock, small=small, live="done"))
    elif facts.started_at and facts.ended_at:
        cells.append(HeaderFact(name="Ran", value=formatting.duration(facts.ran_s)))
    elif facts.started_at:
        most = limit_seconds(facts.spec)
        limit = f"of {formatting.duration(most)}" if most else ""
        seconds = (facts.now - facts.started_at).total_seconds()
        cells.append(HeaderFact(name="Runs", value=formatting.duration(seconds), small=limit))
    if facts.lost_steps:
        cells.append(HeaderFact(name="Lost so far", value=formatting.count(facts.lost_steps), small=facts.kind.units))
    return cells


def recoveries(rows: list[EventRow], last: dict[int, int]) -> dict[int, list[tuple[datetime, str]]]:
    """Return when ranks were lost and restarted within each attempt, by attempt id.

    `last` is the newest incarnation of each attempt.
    """
    by_attempt: dict[int, list[tuple[datetime, str]]] = defaultdict(list)
    # Lost nodes are reported with the incarnation that lost them, new ones with the next incarnation.
    lost = {(pk, about): _names(data) for kind, pk, _, about, _, data in rows if kind == "nodes.lost"}
    came = {(pk, about): _names(data) for kind, pk, _, about, _, data in rows if kind == "nodes.joined"}
    for kind, attempt_id, incarnation, about, at, data in rows:
        number = incarnation or about
        if kind != "incarnation.ended" or number >= last[attempt_id]:
            continue
        gone, more = lost.get((attempt_id, number)), came.get((attempt_id, number + 1))
        how = "hung" if data.get("failure") == HUNG else "lost"
        what = f"{gone} lost" if gone else f"rank {data['rank']} {how}" if data.get("rank") is not None else ""
        again = f"restarted with {more}" if more else "restarted without" if gone else "restarted in place"
        by_attempt[attempt_id].append((at, ", ".join(part for part in (what, again) if part)))
    return by_attempt


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
