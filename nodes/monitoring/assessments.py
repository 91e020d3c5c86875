"""Store and read assessments: results about days of jobs or temperatures, which are computed every few minutes.

Other packages compute them (jobs may import nodes, not the other way round) and store them here; the evaluation of
health rules reads them as it reads the state of a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from django.db import transaction

from nodes.health.progress import Observation, Subject
from nodes.health.rules.condition import FieldValue
from nodes.models import Assessment
from portal import bulk

logger = logging.getLogger(__name__)

NORMAL_FOR = timedelta(days=7)
"""How long a subject that is normal again is still reported as such, so that findings about it clear."""
MOST = 2_000
"""Subjects of one signal."""
MAX_VALUE = 1e15


def replace(
    signal: str, found: Mapping[Subject, Mapping[str, FieldValue]], normal: Mapping[str, FieldValue], at: datetime
) -> None:
    """Store the current result of a signal: what was found, by subject.

    A subject that was found before and is not any more gets the fields of `normal`, for NORMAL_FOR.
    """
    found = dict(list(found.items())[:MOST])
    with transaction.atomic():
        stored = {Subject(row.node, "", row.item): row for row in Assessment.objects.filter(signal=signal)}
        new, changed, over = [], [], []
        for subject, fields in found.items():
            row = stored.pop(subject, None)
            if row is None:
                row = Assessment(signal=signal, node=subject.node, item=subject.item[:300])
                new.append(row)
            else:
                changed.append(row)
            row.fields, row.assessed_at, row.noticed_at = dict(fields), at, at
        for row in stored.values():
            was_normal = row.fields == normal
            if was_normal and row.noticed_at < at - NORMAL_FOR:
                over.append(row.pk)
                continue
            row.fields, row.assessed_at = dict(normal), at
            row.noticed_at = row.noticed_at if was_normal else at
            changed.append(row)
        Assessment.objects.bulk_create(new, ignore_conflicts=True)
        bulk.update_rows(changed, ("fields", "assessed_at", "noticed_at"))
        Assessment.objects.filter(pk__in=over).delete()


def observations(now: datetime) -> Iterator[Observation]:
    """Yield the fresh assessments as states that hold now, until the next one is overdue."""
    for row in Assessment.objects.fresh(now):
        if not _is_readable(row.fields):
            logger.error("the assessment %s cannot be read and is left out", row)
            continue
        yield Observation(row.signal, Subject(row.node, "", row.item), now.timestamp(), row.fields)


def _is_readable(fields: object) -> bool:
    return isinstance(fields, dict) and all(
        value is None or isinstance(value, bool | str) or (isinstance(value, int | float) and abs(value) < MAX_VALUE)
        for value in fields.values()
    )
