"""What went wrong while a trainer ran, in words: what its guards found, and checkpoints that came to nothing.

An event comes from the job's own folder, so nothing of it is believed beyond its shape.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from django.db.models import Count, F, Max, Q, Window
from django.db.models.functions import RowNumber

from jobs.models import Attempt, Event
from portal import words

Incident = tuple[datetime, str]
NOT_SAVED = "checkpoint.skipped"
SHOWN = 5
"""Of one kind in one attempt; the others are counted."""
SHOWN_NEWEST = 3


def newest(attempt: Attempt) -> tuple[list[Incident], bool]:
    """The last few of one attempt, newest first, and whether there are more."""
    last = Event.objects.filter(_told(), attempt=attempt).order_by("-id")[: SHOWN_NEWEST + 1]
    found = [(at, _SAY[kind](data)) for kind, at, data in last.values_list("kind", "time", "data")]
    return found[:SHOWN_NEWEST], len(found) > SHOWN_NEWEST


def of(attempts: Iterable[Attempt]) -> dict[int, list[Incident]]:
    """By attempt, in the order in which they happened."""
    events = Event.objects.filter(_told(), attempt__in=list(attempts)).order_by("id")
    found: dict[int, list[Incident]] = defaultdict(list)
    place = Window(RowNumber(), partition_by=[F("attempt_id"), F("kind")], order_by=F("id").asc())
    first = events.annotate(place=place).filter(place__lte=SHOWN)
    for attempt_id, kind, at, data in first.values_list("attempt_id", "kind", "time", "data"):
        found[attempt_id].append((at, _SAY[kind](data)))
    counted = events.order_by().values("attempt_id", "kind").annotate(count=Count("id"), last=Max("time"))
    for kinds in counted.filter(count__gt=SHOWN):
        found[kinds["attempt_id"]].append((kinds["last"], f"and {kinds['count'] - SHOWN} more like it, the last"))
    return {attempt_id: sorted(incidents, key=lambda incident: incident[0]) for attempt_id, incidents in found.items()}


def _told() -> Q:
    """A save that was left out because the one before was still going on is no incident."""
    return Q(kind__in=_SAY.keys() - {NOT_SAVED}) | Q(kind=NOT_SAVED, data__failed=True)


def _skipped(data: Mapping[str, Any]) -> str:
    norm, mean = _number(data.get("norm")), _number(data.get("mean"))
    usual = f": gradient norm {words.measure(norm)}, usually {words.measure(mean)}" if norm and mean else ""
    samples = data.get("samples")
    first = samples.get("first_place") if isinstance(samples, dict) else None
    batch = f" (samples from place {words.count(first)})" if type(first) is int else ""
    return f"step {_step(data)} skipped{usual}{batch}"


def _straggler(data: Mapping[str, Any]) -> str:
    factor = _number(data.get("factor"))
    times = f"{factor:.1f} times" if factor is not None else "longer than"
    node = f" on {_text(data['node'])}" if data.get("node") else ""
    part = {"data": "waiting for data", "compute": "computing", "host": "between steps"}.get(str(data.get("part")), "")
    spent = f", most of it {part}" if part else ""
    return f"rank {_step(data, 'rank')}{node} keeps the others waiting: {times} the usual time of its own{spent}"


def _nonfinite(data: Mapping[str, Any]) -> str:
    where = f", first in {_text(data['where'])} on rank {_step(data, 'rank')}" if data.get("where") else ""
    return f"step {_step(data)} was not finite{where}"


def _corruption(data: Mapping[str, Any]) -> str:
    ranks = data.get("ranks")
    named = ", ".join(str(rank) for rank in ranks[:8] if type(rank) is int) if isinstance(ranks, list) else ""
    who = f"rank {named}" if named else "ranks that differ, and cannot tell which is wrong"
    return f"the {_text(data.get('check'))} check at step {_step(data)} finds {who}"


def _divergence(data: Mapping[str, Any]) -> str:
    return f"diverged at step {_step(data)}: {_text(data.get('what'))}"


def _not_saved(data: Mapping[str, Any]) -> str:
    return f"not saved at step {_step(data)}: {_text(data.get('reason'))}"


def _unpinned(data: Mapping[str, Any]) -> str:
    return _text(data.get("reason"))


def _damaged(data: Mapping[str, Any]) -> str:
    return f"the checkpoint of step {_step(data)} is damaged: {_text(data.get('reason'))}"


_SAY: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "guard.skipped": _skipped,
    "straggler": _straggler,
    "guard.nonfinite": _nonfinite,
    "guard.corruption": _corruption,
    "guard.divergence": _divergence,
    NOT_SAVED: _not_saved,
    "checkpoint.damaged": _damaged,
    "checkpoint.unpinned": _unpinned,
}


def _step(data: Mapping[str, Any], name: str = "step") -> str:
    value = data.get(name)
    return words.count(value) if type(value) is int else words.MISSING


def _text(value: object) -> str:
    return str(value)[:200]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
