"""List the profiles of a job, requested and written, from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jobs.models import Attempt, Event
from vigil_core import untrusted

REQUESTED, SAVED, FAILED = "profile.asked", "profile.saved", "profile.failed"
MAX_PROFILES = 50


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A requested profile. `name` is "" until its rank has written it, `problem` explains why it did not."""

    id: str
    attempt: int
    """The attempt's number."""
    rank: int
    requested_at: datetime | None = None
    saved_at: datetime | None = None
    name: str = ""
    first_step: int | None = None
    last_step: int | None = None
    bytes: int = 0
    problem: str = ""
    is_pending: bool = False
    """Whether it was requested and its attempt can still write it."""


def profiles(attempts: Iterable[Attempt]) -> list[Profile]:
    """Return the profiles, newest first, from at most the newest 2 × MAX_PROFILES events."""
    numbers = {attempt.pk: attempt for attempt in attempts}
    rows = Event.objects.filter(attempt__in=list(numbers), kind__in=(REQUESTED, SAVED, FAILED)).order_by("-id")[
        : 2 * MAX_PROFILES
    ]
    by_number: dict[tuple[int, str], dict[str, Any]] = {}
    for event in rows:
        number = event.data.get("id")
        if not isinstance(number, str) or len(number) > 32:
            continue
        merged = by_number.setdefault((event.attempt_id, number), {"id": number, "kinds": set()})
        merged["kinds"].add(event.kind)
        merged |= _fields_of(event)
    # A rank obeys the last request: once that is answered, no earlier one can still be.
    answered: dict[tuple[int, int], datetime] = {}
    for (attempt_id, _), merged in by_number.items():
        if merged["kinds"] > {REQUESTED}:
            at = answered.get((attempt_id, merged["rank"]), merged["requested_at"])
            answered[attempt_id, merged["rank"]] = max(at, merged["requested_at"])
    return [
        _profile(merged, numbers[attempt_id], answered.get((attempt_id, merged.get("rank", 0))))
        for (attempt_id, _), merged in by_number.items()
    ][:MAX_PROFILES]


def _profile(merged: dict[str, Any], attempt: Attempt, answered: datetime | None) -> Profile:
    kinds = merged.pop("kinds")
    is_replaced = kinds == {REQUESTED} and answered is not None and merged["requested_at"] < answered
    is_pending = kinds == {REQUESTED} and attempt.state == Attempt.State.RUNNING and not is_replaced
    problem = merged.pop("problem", "")
    if is_replaced:
        problem = "Another profile was requested before it began."
    elif kinds == {REQUESTED} and not is_pending:
        problem = "Its attempt ended before it was written."
    return Profile(**{"rank": 0, **merged}, attempt=attempt.number, is_pending=is_pending, problem=problem)


def _fields_of(event: Event) -> dict[str, Any]:
    """Return an event's fields of its profile; any program may have sent it, so nothing is trusted."""
    data = event.data
    if event.kind == REQUESTED:
        return {"requested_at": event.time, "rank": untrusted.count(data.get("rank")) or 0}
    if event.kind == FAILED:
        return {"problem": untrusted.line(data.get("reason")) or "It failed."}
    name = data.get("name")
    return {
        "name": untrusted.line(name, 160),
        "rank": untrusted.count(data.get("of_rank")) or 0,
        "first_step": untrusted.count(data.get("first_step")) or 0,
        "last_step": untrusted.count(data.get("last_step")) or 0,
        "bytes": untrusted.count(data.get("bytes")) or 0,
        "saved_at": event.time,
    }
