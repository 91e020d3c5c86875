"""Keep golden records: medians of what passed burn-ins measured, by model and driver."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from django.db import transaction

from nodes.burnin.judge import GoldenKey, GoldenValue, NodeResults
from nodes.models import GoldenRecord
from portal.access import note
from portal.models import User

MOST_VALUES = 50


def records_for(nodes: Sequence[NodeResults]) -> dict[GoldenKey, GoldenValue]:
    """Return the golden records for what these nodes measured."""
    models = {results.machine.model for results in nodes if results.machine is not None}
    rows = GoldenRecord.objects.filter(model__in=models)
    return {row.key: GoldenValue(row.count, value_of(row), row.digest) for row in rows}


def value_of(row: GoldenRecord) -> float | None:
    return median(row.values) if row.values else None


def add(results: NodeResults) -> None:
    """Add a passed node: the median of each kind of item, and the digest of its products. Call it once a node."""
    values: dict[GoldenKey, list[float]] = {}
    units: dict[GoldenKey, str] = {}
    digests: dict[GoldenKey, str] = {}
    for test in results.tests:
        if test.test == "mount" or not test.values:
            continue
        key = results.key(test)
        values.setdefault(key, []).append(median(test.values))
        units[key] = test.unit
        if len(test.digests) == 1:
            digests[key] = test.digests[0]
    for key, measured in values.items():
        row, _ = GoldenRecord.objects.select_for_update().get_or_create(**vars(key), defaults={"unit": units[key]})
        row.values = [*row.values, median(measured)][-MOST_VALUES:]
        row.digest = row.digest or digests.get(key, "")
        row.count += 1
        row.save()


def reset(user: User, model: str, driver: str) -> int:
    """Forget the records of a model and driver, such as after a wrong one was learnt; return how many there were."""
    with transaction.atomic():
        count, _ = GoldenRecord.objects.filter(model=model, driver=driver).delete()
        if count:
            note(user, "burnin.golden_reset", f"{model} {driver}".strip())
    return count
