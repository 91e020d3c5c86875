"""A dry run over stored history finds what live evaluation found while it happened."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nodes.health.progress import Observation, Subject
from nodes.health.replay import replay
from nodes.health.rules.rule import parse_rules
from nodes.models import HealthEntry, NodeEvent, SiteRule
from nodes.monitoring.dry_run.run import dry_run
from nodes.monitoring.dry_run.silences import SILENT_S
from nodes.monitoring.evaluate import evaluate
from tests.examples import examples
from tests.nodes.monitoring.dry_run.history import NOW, StoredCluster

pytestmark = pytest.mark.django_db

RULE = """
[[rule]]
name = "tried"
title = "Tried"
source = "a test"
severity = "warning"
action = "watch"
signal = "xid"
where = {{ code = [48, 63] }}
count = {count}
within = "{within}"
clears = "{clears}"
{after}
escalates = {{ count = 2, within = "5d", action = "drain" }}
"""
WAIT = timedelta(days=25)


def rule_text(count: int, within: str, clears: str) -> str:
    after = 'clears_after = "6h"' if clears in ("quiet", "reset") else ""
    return RULE.format(count=count, within=within, clears=clears, after=after)


happenings = st.lists(
    st.tuples(
        st.sampled_from(["xid", "again", "driver.reloaded", "boot"]),
        st.integers(1, 2_000),  # minutes since the one before
        st.integers(0, 1),  # GPU
        st.sampled_from([48, 63, 31]),
    ),
    max_size=10,
)


def run_live(cluster: StoredCluster, steps: list[tuple[str, int, int, int]]) -> None:
    now = NOW - WAIT
    for number, (kind, minutes, gpu, code) in enumerate(steps):
        now += timedelta(minutes=minutes)
        run_until(now)
        if kind == "xid":
            text = "letters differ: " + chr(ord("a") + number)
            cluster.xid(code, 0, gpu=gpu, ago=NOW - now, text=text)
        elif kind == "again":
            row = NodeEvent.objects.filter(kind="xid", count=1).order_by("-at").first()
            if row is not None and row.last_at >= now - timedelta(minutes=10):
                row.count, row.last_at = 2, now
                row.save()
        else:
            cluster.event(kind, 0, NOW - now, gpu=None)
        evaluate(now + timedelta(seconds=1))
    run_until(NOW)
    evaluate(NOW)


def run_until(moment: datetime) -> None:
    """Let the worker's evaluations come that would have come by then, as far as they change something."""
    while (due := HealthEntry.objects.due(moment).order_by("due_at").first()) is not None and due.due_at is not None:
        evaluate(due.due_at + timedelta(milliseconds=1))


@given(
    happenings,
    st.integers(1, 3),
    st.sampled_from(["30m", "20h", "7d"]),
    st.sampled_from(["quiet", "reset", "boot", "person"]),
)
def test_events(steps: list[tuple[str, int, int, int]], count: int, within: str, clears: str) -> None:
    with transaction.atomic():
        text = rule_text(count, within, clears)
        SiteRule.objects.create(name="tried", toml=text)
        cluster = StoredCluster(nodes=1)
        run_live(cluster, steps)
        live = [
            (row.gpu.index if row.gpu else None, row.opened_at, row.cleared_at, row.count, row.action)
            for row in HealthEntry.objects.filter(rule="tried").exclude(opened_at=None).order_by("opened_at", "gpu")
        ]
        (rule,) = parse_rules(text)
        found = dry_run(rule, now=NOW, budget_s=None)
        assert [(e.gpu, e.opened_at, e.cleared_at, e.count) for e in found.entries] == [row[:4] for row in live]
        assert [e.action for e in found.entries if e.cleared_at is None] == [row[4] for row in live if row[2] is None]
        transaction.set_rollback(True)


HEAT = """
[[rule]]
name = "heat"
title = "Hot"
source = "a test"
severity = "warning"
action = "watch"
signal = "gpu_samples"
where = { margin_c = "<= 3", throttle = "has 0x60" }
for = "1m"
clears = "recovered"
clears_after = "2m"
clears_where = { margin_c = "> 5" }
"""
stretches = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from([60, 83, 84, 90]), st.sampled_from([0, 4, 0x40])), max_size=12
)


# A pause of exactly the clearing time, and whole chunks (1,024 s) of one value.
@example([(20, 90, 0x40), (12, 60, 0), (20, 90, 0x40)])
@example([(30, 90, 0x40)] * 8 + [(30, 60, 0)] * 8)
@settings(max_examples=examples(12), deadline=None)
@given(stretches)
def test_samples(stretches: list[tuple[int, int, int]]) -> None:
    """Columns leave out what changes nothing; this shows that it does change nothing."""
    with transaction.atomic():
        cluster = StoredCluster(nodes=1)
        temperatures = [float(t) for tens, t, _ in stretches for _ in range(10 * tens)]
        throttles = [float(bits) for tens, _, bits in stretches for _ in range(10 * tens)]
        ago = timedelta(hours=30)
        if temperatures:
            cluster.seconds("temperature_c", temperatures, ago)
            cluster.seconds("throttle", throttles, ago)
        (rule,) = parse_rules(HEAT)
        found = dry_run(rule, now=NOW, budget_s=None)
        first = (NOW - ago).timestamp()
        dense = [
            Observation("gpu_samples", Subject("dgx-01"), first + i, {"margin_c": 87 - t, "throttle": int(bits)})
            for i, (t, bits) in enumerate(zip(temperatures, throttles, strict=True))
            if i % 10 == 9 or i == len(temperatures) - 1
        ]
        if dense:  # the agent was silent from then on
            dense.append(Observation("gpu_samples", Subject("dgx-01"), dense[-1].at + SILENT_S, {}))
        live = list(replay(rule, Subject("dgx-01"), dense, NOW.timestamp()))
        assert [_times(entry) for entry in found.entries] == [_times(entry) for entry in live]
        transaction.set_rollback(True)


def _times(entry: Any) -> tuple[float, float | None]:
    def seconds(at: Any) -> float | None:
        return at.timestamp() if isinstance(at, datetime) else at

    return seconds(entry.opened_at) or 0.0, seconds(entry.cleared_at)
