"""Read the results that nodes append to their files, a bounded part at a time, and store their sums."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from jobs.disk import rundir
from nodes.burnin.reports import END, MAX_LINE, MAX_TESTS_OF_NODE, BurnInMachine, BurnInResult, parse_line
from nodes.models import BurnIn, BurnInNode, BurnInTest

logger = logging.getLogger(__name__)

_SUMS = ("unit", "basis", "count", "failures", "absences", "values", "digests", "detail")
READ_BYTES = 256 * 1024  # per node and tick
MAX_BYTES = 1024 * 1024 * 1024  # of one node: 48 hours of 64 GPUs are a quarter of it


def read_results(burn_in: BurnIn, until: float) -> bool:
    """Store what is new in each node's file; return whether nothing more is there.

    Reading stops at `until` (monotonic), and goes on in the next call with the nodes of which it is longest ago.
    """
    root = rundir.path_of(burn_in.directory)
    rows = burn_in.nodes.filter(is_active=True, has_ended=False)
    is_all_read = True
    for number, row in enumerate(rows.order_by(F("last_result_at").asc(nulls_first=True), "node")):
        if number and time.monotonic() > until:
            return False
        try:
            is_all_read = _read(row, root) and is_all_read
        except OSError as error:  # of the shared file system
            logger.warning("%s: results cannot be read: %s", row, error)
    return is_all_read


def _read(row: BurnInNode, root: Path) -> bool:
    """Store the next part of a node's file; return whether there is no other."""
    if row.read_bytes >= MAX_BYTES:
        return True
    try:
        descriptor = rundir.open_under(root, f"job/results/{row.node}.jsonl")
    except (FileNotFoundError, PermissionError, rundir.UnsafePath):
        return True
    try:
        data = os.pread(descriptor, READ_BYTES, row.read_bytes)
    finally:
        os.close(descriptor)
    complete = data[: data.rfind(b"\n") + 1]
    if not complete and len(data) > MAX_LINE:
        complete = data  # no line of ours is so long
    if complete:
        _store(row, complete)
    return len(data) < READ_BYTES


def _store(row: BurnInNode, data: bytes) -> None:
    with transaction.atomic():
        tests = {(test.test, test.item): test for test in BurnInTest.objects.filter(burn_in_node=row)}
        changed: dict[tuple[str, str], BurnInTest] = {}
        for line in data.splitlines():
            result = parse_line(line)
            if isinstance(result, BurnInMachine):
                row.machine = vars(result)
            elif result is not None and result.test == END:
                row.has_ended = True
            elif result is not None and (test := _row_of(row, result, tests)) is not None:
                _add(test, result)
                changed[test.test, test.item] = test
        new = [test for test in changed.values() if test.pk is None]
        BurnInTest.objects.bulk_update([test for test in changed.values() if test.pk is not None], _SUMS)
        BurnInTest.objects.bulk_create(new)
        before, row.read_bytes = row.read_bytes, row.read_bytes + len(data)
        row.last_result_at = timezone.now()
        stored = BurnInNode.objects.filter(pk=row.pk, read_bytes=before).update(
            read_bytes=row.read_bytes, machine=row.machine, has_ended=row.has_ended, last_result_at=row.last_result_at
        )
        if not stored:  # another worker has stored it
            transaction.set_rollback(True)


def _row_of(row: BurnInNode, found: BurnInResult, tests: dict[tuple[str, str], BurnInTest]) -> BurnInTest | None:
    key = (found.test, found.item)
    if key not in tests and len(tests) < MAX_TESTS_OF_NODE:
        tests[key] = BurnInTest(burn_in_node=row, test=found.test, item=found.item)
    return tests.get(key)


def _add(test: BurnInTest, found: BurnInResult) -> None:
    summary = test.summary()
    summary.add(found)
    for name, value in vars(summary).items():
        setattr(test, name, value)
