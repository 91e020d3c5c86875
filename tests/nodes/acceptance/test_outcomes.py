"""The burn-in, all pairs and the count of failures become clauses; one failed clause rejects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from jobs.reliability.comparison import compare
from nodes.acceptance.clauses import (
    ACCEPTED,
    FAILED,
    INCONCLUSIVE,
    NOT_TRIED,
    PASSED,
    REJECTED,
    ClauseOutcome,
    requirements,
    stored,
    summary,
    verdict_of,
)
from nodes.acceptance.outcomes import (
    ExpectedFailures,
    FailureCount,
    NodeVerdictRow,
    PairResult,
    burn_in_clause,
    distinct_failures,
    failures_clause,
    merge_pairs,
    node_days,
    pairs_clause,
)

BEGAN = datetime(2026, 11, 28, 9, tzinfo=UTC)
EVENTS = st.lists(st.tuples(st.sampled_from(["dgx-01", "dgx-02"]), st.integers(0, 2_000)))


def count(failures: int, *, hours: float = 48, gpus: int = 64) -> FailureCount:
    expected = tuple(
        ExpectedFailures(row.name, row.source, row.expected, row.p, row.name == "Meta RSC-1")
        for row in compare(failures, node_days(gpus, hours))
    )
    return FailureCount(hours, gpus, tuple(f"dgx-0{number}: lost." for number in range(failures)), expected)


def test_two_failures_are_too_many_in_48_hours_of_64_gpus() -> None:
    found = failures_clause(count(2))
    assert found.outcome == FAILED
    assert found.measured.replace("\N{NO-BREAK SPACE}", " ") == (
        "2 failures in 48 h × 64 GPUs; the published rate expects 0.104; p = 0.005."
    )
    assert found.details[:2] == ("dgx-00: lost.", "dgx-01: lost.")
    assert any("arXiv 2407.21783" in text for text in found.details)


def test_one_failure_is_chance() -> None:
    assert failures_clause(count(1)).outcome == PASSED
    assert failures_clause(count(0)).outcome == PASSED


def test_failures_are_not_judged_without_time_or_gpus() -> None:
    assert failures_clause(count(1, hours=0)).outcome == NOT_TRIED
    assert failures_clause(count(1, gpus=0)).outcome == NOT_TRIED


@given(failures=st.integers(0, 30), days=st.floats(0.01, 5_000))
def test_more_failures_are_never_more_probable(failures: int, days: float) -> None:
    for fewer, more in zip(compare(failures, days), compare(failures + 1, days), strict=True):
        assert 0 <= more.p <= fewer.p <= 1


def test_findings_that_come_together_are_one_failure() -> None:
    at = [("dgx-01", BEGAN + timedelta(minutes=m), f"{m}") for m in (0, 3, 9, 30)] + [("dgx-02", BEGAN, "other")]
    assert [text for _, _, text in distinct_failures(at)] == ["0", "other", "30"]


@given(EVENTS)
def test_distinct_failures_are_some_of_the_events_apart_from_each_other(events: list[tuple[str, int]]) -> None:
    rows = [(node, BEGAN + timedelta(minutes=minute), "") for node, minute in events]
    found = distinct_failures(rows)
    assert {node for node, *_ in found} == {node for node, *_ in rows}
    assert set(found) <= set(rows)
    assert len(found) == len({(node, at) for node, at, _ in found})


def test_burn_in() -> None:
    good = [NodeVerdictRow(f"dgx-0{number}", "passed") for number in (1, 2)]
    assert burn_in_clause(good, "").outcome == PASSED
    bad = NodeVerdictRow("dgx-03", "failed", ("GPU 3, memory: 12 words differ.",))
    found = burn_in_clause([*good, bad], "")
    assert (found.outcome, found.details) == (FAILED, ("dgx-03: GPU 3, memory: 12 words differ.",))
    unclear = burn_in_clause([*good, NodeVerdictRow("dgx-04", "")], "Cancelled.")
    assert (unclear.outcome, unclear.measured, unclear.details) == (NOT_TRIED, "Cancelled.", ("dgx-04: Cancelled.",))
    assert burn_in_clause([], "").outcome == NOT_TRIED


def pair(first: str, second: str, speed: float | None = 40.0, failures: int = 0) -> PairResult:
    return PairResult(first, second, failures, "sums are wrong" if failures else "", speed, "GB/s", is_on_gpus=True)


def test_all_pairs() -> None:
    pairs = [pair("a", "b"), pair("a", "c", 41.0), pair("b", "c")]
    assert pairs_clause(3, pairs).outcome == PASSED
    assert pairs_clause(3, pairs[:2]).outcome == NOT_TRIED
    assert pairs_clause(1, []).outcome == NOT_TRIED
    assert pairs_clause(3, [*pairs[:2], pair("b", "c", failures=1)]).details == ("b and c: sums are wrong.",)
    slow = pairs_clause(3, [*pairs[:2], pair("b", "c", 12.0)])
    assert (slow.outcome, slow.details) == (FAILED, ("b and c: 12.0 GB/s, others 40.5.",))


def test_a_failure_that_one_node_of_a_pair_noticed_counts() -> None:
    merged = merge_pairs([pair("a", "b"), pair("b", "a", None, failures=1)])
    assert [(row.failures, row.first) for row in merged] == [(1, "b")]
    assert [row.speed for row in merge_pairs([pair("a", "b", None), pair("b", "a", 40.0)])] == [40.0]


OUTCOMES = st.lists(
    st.tuples(st.sampled_from([clause.key for clause in requirements()]), st.sampled_from([PASSED, FAILED, NOT_TRIED]))
)


@given(OUTCOMES)
def test_nothing_is_accepted_with_a_failed_clause_or_without_a_burn_in(rows: list[tuple[str, str]]) -> None:
    outcomes = [ClauseOutcome(key, outcome, "measured.") for key, outcome in dict(rows).items()]
    verdict = verdict_of(outcomes)
    assert (verdict == REJECTED) == (FAILED in dict(rows).values())
    assert (verdict == ACCEPTED) <= (dict(rows).get("burn_in") == PASSED)
    assert verdict in (ACCEPTED, REJECTED, INCONCLUSIVE)
    assert len(stored(outcomes)) == len(requirements())


def test_summary() -> None:
    rows = stored(
        [ClauseOutcome("driver", FAILED, "2 different ones."), ClauseOutcome("clock", PASSED, "At most 0.1 s.")]
    )
    assert summary(rows) == f"Of {len(rows)} clauses 1 failed (Driver), 1 passed, {len(rows) - 2} pending."
