"""Compare a node's results with its peers, its own last burn-in and the golden record, for pages and the API."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from django.db.models import Count, Prefetch, Q
from django.utils import timezone

from jobs.burnins.golden import records_for
from jobs.burnins.verdicts import results_of
from nodes.burnin.evidence import kind_of
from nodes.burnin.reports import TESTS, ItemSummary
from nodes.burnin.speeds import PeerMedians
from nodes.models import BurnIn, BurnInNode, BurnInTest


def counted_nodes(rows: Any) -> Any:
    """Add to nodes how many tests have results (`test_count`), and how many of these failed (`failed_count`)."""
    failed = Count("tests", filter=Q(tests__failures__gt=0))
    return rows.annotate(test_count=Count("tests"), failed_count=failed).order_by("node")


COUNTED = Prefetch("nodes", counted_nodes(BurnInNode.objects.all()))
VERDICTS = Prefetch("nodes", BurnInNode.objects.only("burn_in", "node", "verdict").order_by("node"))
"""All that a list shows of nodes: 50 burn-ins of 256 nodes have 4 million results."""
MAX_PEERS = 20_000
MAX_EARLIER = 10


@dataclass(frozen=True)
class ItemReport:
    """Compares one test of one item. `peers`, `golden` and `earlier` are medians; None where there are none."""

    summary: ItemSummary
    value: float | None
    peers: float | None
    golden: float | None
    earlier: float | None

    @property
    def is_right(self) -> bool:
        return not self.summary.failures


def item_reports(row: BurnInNode) -> list[ItemReport]:
    """Return the node's tests in the order in which they run."""
    results = results_of(row, row.burn_in)
    golden = records_for([results])
    peers = _peers(row)
    earlier = {(test.test, test.item, test.basis): test for test in _earlier_tests(row)}
    reports = []
    for test in sorted(results.tests, key=lambda test: TESTS.index(test.test) if test.test in TESTS else -1):
        group, value = peers.get((test.test, kind_of(test), test.basis)), median(test.values) if test.values else None
        others = group.without(value) if group is not None and value is not None else None
        record, before = golden.get(results.key(test)), earlier.get((test.test, test.item, test.basis))
        reports.append(
            ItemReport(
                test,
                value,
                others,
                record.value if record else None,
                median(before.values) if before and before.values else None,
            )  # fmt: skip
        )
    return reports


def earlier_rows(row: BurnInNode) -> list[BurnInNode]:
    """Return the node's earlier burn-ins, newest first."""
    rows = BurnInNode.objects.filter(node=row.node, pk__lt=row.pk).select_related("burn_in").order_by("-pk")
    return list(rows[:MAX_EARLIER])


def progress(burn_in: BurnIn, now: datetime | None = None) -> float | None:
    """Return the fraction of the tests' time that has passed; None unless they run."""
    if burn_in.state != BurnIn.BurnInState.RUNNING or burn_in.started_at is None:
        return None
    return min(1.0, ((now or timezone.now()) - burn_in.started_at).total_seconds() / burn_in.seconds)


def _earlier_tests(row: BurnInNode) -> Iterable[BurnInTest]:
    last = BurnInNode.objects.filter(node=row.node, pk__lt=row.pk).exclude(machine={}).order_by("-pk").first()
    return last.tests.all() if last is not None else ()


def _peers(row: BurnInNode) -> dict[tuple[str, str, str], PeerMedians]:
    """Return the medians of each kind of test in the burn-in: of this node, and of others up to a limit."""
    others = BurnInTest.objects.filter(burn_in_node__burn_in=row.burn_in).exclude(burn_in_node=row)[:MAX_PEERS]
    found: dict[tuple[str, str, str], list[float]] = {}
    for test in (*row.tests.all(), *others):
        if test.values:
            found.setdefault((test.test, kind_of(test.summary()), test.basis), []).append(median(test.values))
    return {key: PeerMedians(values) for key, values in found.items()}
