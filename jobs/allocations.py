"""Where GPUs meet jobs: which a job holds and held, by the scheduler's id and the time, and what its launchers say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from django.db.models import Exists, Max, OuterRef, Q
from django.db.models.lookups import IsNull

from jobs.models import Attempt, Event
from jobs.models.attempt import AttemptQuerySet
from nodes.models import Holding
from nodes.telemetry import holdings
from nodes.telemetry.claims import MAX_REPORTED_GPUS, LauncherReport
from vigil_core import untrusted

TOLD = "gpus"  # the launcher's event
AT_ONCE = 500
_Told = tuple[int, datetime]  # the number of an event, and its time
_known: dict[_Told, list[str]] = {}
"""What was read of events before: they never change."""


def hold() -> None:
    """Bring in step who holds which GPU."""
    holdings.update(_words())


def _words() -> Iterator[LauncherReport]:
    """The last word of each launcher of what runs, in the order in which they came."""
    told = Event.objects.filter(kind=TOLD, rank__lt=0, attempt__ended_at=None).exclude(attempt__scheduler_id="")
    last = told.values("attempt", "attempt__scheduler_id", "rank").annotate(last=Max("pk"), at=Max("time"))
    whose = {(pk, at): job for pk, at, job in last.order_by("last").values_list("last", "at", "attempt__scheduler_id")}
    for gone in _known.keys() - whose.keys():
        del _known[gone]
    _read([key for key in whose if key not in _known])
    for key, scheduler_id in whose.items():
        if key in _known:
            yield LauncherReport(scheduler_id, _known[key])


def _read(keys: Sequence[_Told]) -> None:
    for start in range(0, len(keys), AT_ONCE):
        some = dict(keys[start : start + AT_ONCE])
        rows = Event.objects.filter(pk__in=some).order_by().values_list("pk", "data")
        _known.update(((pk, some[pk]), _uuids(data)) for pk, data in rows)


def _uuids(data: dict[str, object]) -> list[str]:
    """The whole GPUs that are named: of a slice (MIG) the one that it is cut from."""
    gpus = data.get("gpus")
    named = [one for one in gpus if isinstance(one, dict)] if isinstance(gpus, list) else []
    found = (untrusted.name(one.get("parent") or one.get("uuid"), 96) for one in named[:MAX_REPORTED_GPUS])
    return list(dict.fromkeys(uuid for uuid in found if uuid))


def held_by(attempts: Iterable[Attempt]) -> dict[int, list[Holding]]:
    """What each attempt held. The scheduler may use a number again, so its time counts, too."""
    rows = {attempt.pk: attempt for attempt in attempts if attempt.scheduler_id and attempt.started_at}
    by_id: dict[str, list[Attempt]] = {}
    for attempt in rows.values():
        by_id.setdefault(attempt.scheduler_id, []).append(attempt)
    found: dict[int, list[Holding]] = {pk: [] for pk in rows}
    held = (
        Holding.objects.filter(scheduler_id__in=by_id)
        .select_related("gpu", "agent")
        .order_by("agent__node", "gpu__index")
    )
    for holding in held:
        for attempt in by_id[holding.scheduler_id]:
            if is_of(holding, attempt):
                found[attempt.pk].append(holding)
    return found


def is_of(holding: Holding, attempt: Attempt) -> bool:
    """Whether an attempt with the holding's number ran while it lasted."""
    began, ended = attempt.started_at, attempt.ended_at
    if began is None or (ended is not None and holding.since >= ended):
        return False
    return holding.until is None or holding.until > began


def of_any(attempts: AttemptQuerySet) -> Exists:
    """Selects the holdings of these attempts: `is_of`, asked of the database."""
    began = Q(started_at__lt=OuterRef("until")) | Q(IsNull(OuterRef("until"), True), started_at__isnull=False)
    ended = Q(ended_at=None) | Q(ended_at__gt=OuterRef("since"))
    same = attempts.exclude(scheduler_id="").filter(scheduler_id=OuterRef("scheduler_id"))
    return Exists(same.filter(began, ended))
