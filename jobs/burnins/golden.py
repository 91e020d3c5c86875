"""Keep golden records: medians of what passed burn-ins measured, by model and driver."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from django.db import transaction

from nodes.burnin.evidence import GoldenKey, GoldenValue, NodeResults
from nodes.burnin.reports import MOUNT, ItemSummary
from nodes.burnin.speeds import is_slow
from nodes.models import GoldenRecord
from portal.access import note
from portal.models import User

MAX_VALUES = 50


def records_for(nodes: Sequence[NodeResults]) -> dict[GoldenKey, GoldenValue]:
    """Return the golden records for what these nodes measured."""
    rows = GoldenRecord.objects.filter(model__in=_models(nodes))
    return {row.key: GoldenValue(row.count, value_of(row), row.digest) for row in rows}


def value_of(row: GoldenRecord) -> float | None:
    return median(row.values) if row.values else None


def add(nodes: Sequence[NodeResults]) -> None:
    """Add nodes that passed: for each, the median of each kind of item. Only the follower calls it, under its lease.

    What contradicts a record, though the node passed, is left out: it must not change the record little by little.
    """
    rows = {row.key: row for row in GoldenRecord.objects.filter(model__in=_models(nodes))}
    changed: dict[GoldenKey, GoldenRecord] = {}
    for results in nodes:
        for key, (value, unit, digest) in _measured(results).items():
            row = changed.get(key) or rows.get(key) or GoldenRecord(**vars(key), unit=unit)
            if _contradicts(key, value, digest, row):
                continue
            changed[key] = row
            row.values = [*row.values, value][-MAX_VALUES:]
            row.digest = row.digest or digest
            row.count += 1
    new = [row for row in changed.values() if row.pk is None]
    GoldenRecord.objects.bulk_update([row for row in changed.values() if row.pk], ["values", "digest", "count"])
    GoldenRecord.objects.bulk_create(new)


def _contradicts(key: GoldenKey, value: float, digest: str, row: GoldenRecord) -> bool:
    if row.digest and digest and digest != row.digest:
        return True
    normal = value_of(row)
    return normal is not None and key.is_gpu and is_slow(key, value, normal)


def _measured(results: NodeResults) -> dict[GoldenKey, tuple[float, str, str]]:
    """Return median, unit and digest of each kind of item of a node."""
    groups: dict[GoldenKey, list[ItemSummary]] = {}
    for test in results.tests if results.machine is not None else ():
        if test.test != MOUNT and test.values:
            groups.setdefault(results.key(test), []).append(test)
    return {
        key: (
            median(median(test.values) for test in tests), tests[0].unit,
            next((test.digests[0] for test in tests if len(test.digests) == 1), ""),
        )
        for key, tests in groups.items()
    }  # fmt: skip


def _models(nodes: Sequence[NodeResults]) -> set[str]:
    return {results.machine.model for results in nodes if results.machine is not None}


def reset(user: User, model: str, driver: str) -> int:
    """Delete the records of a model and driver, such as after a wrong one was learnt; return how many there were."""
    with transaction.atomic():
        count, _ = GoldenRecord.objects.filter(model=model, driver=driver).delete()
        if count:
            note(user, "burnin.golden_reset", f"{model} {driver}".strip())
    return count
