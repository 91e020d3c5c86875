"""Query a federation's clients in a chosen order; clients without a value come last."""

from __future__ import annotations

from typing import Any

from django.db.models import Case, F, FloatField, Q, QuerySet, Value, When
from django.db.models.functions import Cast, Coalesce

from jobs.models import Client, Job
from portal.http.paging import SortOrder
from training.federation.tables import MIN_EVALUATED

_LAST_PLACE = 1e300
_SLOWER = 1e200
NEVER_IN_TIME = Q(timed=0, trained=0) & (Q(late__gt=0) | Q(dropped__gt=0))
"""Outcomes without a known duration, except that it exceeded all others: the more often, the slower."""
_MEAN = Case(
    When(timed__gt=0, then=F("seconds_sum") / F("timed")),
    When(NEVER_IN_TIME, then=Cast(F("late") + F("dropped"), FloatField()) * Value(_SLOWER)),
    default=None,
    output_field=FloatField(),
)
RELIABLE = Q(evaluation_samples__isnull=True) | Q(evaluation_samples__gte=MIN_EVALUATED)
"""Clients with a meaningful accuracy; older runs did not record how many samples it was measured on."""
_ACCURACY = Case(When(RELIABLE, then=F("accuracy")), default=None, output_field=FloatField())
_TROUBLE = F("late") + F("dropped") + F("rejected") + F("broken")
_KEYS: dict[str, tuple[Any, bool]] = {
    "number": (F("number"), False),
    "worst": (_ACCURACY, False),
    "loss": (F("loss"), True),
    "samples": (F("samples"), False),
    "seconds": (_MEAN, True),
    "trouble": (_TROUBLE, True),
    **{name: (F(name), True) for name in ("trained", "late", "dropped", "rejected", "broken")},
}
"""Sort key, and whether the largest come first."""
SORTS = tuple(name for key in _KEYS for name in (key, f"-{key}"))
WORST = "worst"


def is_descending(sort: str) -> bool:
    """Return whether this order puts the largest values first."""
    return _KEYS[sort][1]


def ordered(job: Job, sort: str = WORST) -> tuple[QuerySet[Client], SortOrder]:
    """Return the job's clients, and the order for paging: `worst` puts the least accurate first, `-worst` last.

    Clients with fewer than MIN_EVALUATED evaluation samples come after all others: chance ranks them.
    """
    key, falls = _KEYS[sort.removeprefix("-")]
    falls ^= sort.startswith("-")
    name = f"by_{sort.replace('-', 'reverse_')}"
    nothing = Value(-_LAST_PLACE if falls else _LAST_PLACE, output_field=FloatField())
    by = Coalesce(Cast(key, FloatField()), nothing, output_field=FloatField())
    return Client.objects.filter(job=job).annotate(**{name: by}), SortOrder(name, descending=falls)


def first_clients(job: Job, sort: str, limit: int, only: Q | None = None) -> list[Client]:
    """Return the first clients in this order."""
    rows, order = ordered(job, sort)
    return list(rows.filter(only or Q()).order_by(f"{'-' if order.descending else ''}{order.field}", "number")[:limit])
