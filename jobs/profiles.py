"""The profiles of a job: which were asked for, which there are, as events tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jobs.models import Attempt, Event
from vigil_core import untrusted

ASKED, SAVED, FAILED = "profile.asked", "profile.saved", "profile.failed"
MOST = 50


@dataclass(frozen=True, kw_only=True)
class Profile:
    """`name` is "" until its rank has written it, `problem` says why it did not."""

    id: str
    attempt: int
    """Its number."""
    rank: int
    asked_at: datetime | None = None
    saved_at: datetime | None = None
    name: str = ""
    first_step: int | None = None
    last_step: int | None = None
    bytes: int = 0
    problem: str = ""
    waits: bool = False
    """Asked for, and its attempt can still write it."""


def profiles(attempts: Iterable[Attempt]) -> list[Profile]:
    """Newest first, at most the newest so many events tell."""
    numbers = {attempt.pk: attempt for attempt in attempts}
    rows = Event.objects.filter(attempt__in=list(numbers), kind__in=(ASKED, SAVED, FAILED)).order_by("-id")[: 2 * MOST]
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for event in rows:
        number = event.data.get("id")
        if not isinstance(number, str) or len(number) > 32:
            continue
        told = found.setdefault((event.attempt_id, number), {"id": number, "kinds": set()})
        told["kinds"].add(event.kind)
        told |= _told(event)
    # A rank goes by the last that was asked of it: once that is answered, none before it can still come.
    answered: dict[tuple[int, int], datetime] = {}
    for (attempt_id, _), told in found.items():
        if told["kinds"] > {ASKED}:
            at = answered.get((attempt_id, told["rank"]), told["asked_at"])
            answered[attempt_id, told["rank"]] = max(at, told["asked_at"])
    return [
        _profile(told, numbers[attempt_id], answered.get((attempt_id, told.get("rank", 0))))
        for (attempt_id, _), told in found.items()
    ][:MOST]


def _profile(told: dict[str, Any], attempt: Attempt, answered: datetime | None) -> Profile:
    kinds = told.pop("kinds")
    is_replaced = kinds == {ASKED} and answered is not None and told["asked_at"] < answered
    waits = kinds == {ASKED} and attempt.state == Attempt.State.RUNNING and not is_replaced
    problem = told.pop("problem", "")
    if is_replaced:
        problem = "Another was asked for before it began."
    elif kinds == {ASKED} and not waits:
        problem = "Its attempt ended before it was written."
    return Profile(**{"rank": 0, **told}, attempt=attempt.number, waits=waits, problem=problem)


def _told(event: Event) -> dict[str, Any]:
    """What an event says of its profile; anybody's program may have told it."""
    data = event.data
    if event.kind == ASKED:
        return {"asked_at": event.time, "rank": untrusted.count(data.get("rank")) or 0}
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
