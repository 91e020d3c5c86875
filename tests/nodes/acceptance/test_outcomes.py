"""The burn-in, all pairs and the count of failures become clauses; one failed clause rejects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jobs.reliability.comparison import compare
from nodes.acceptance.clauses import (
    ACCEPTED,
    FAILED,
    INCONCLUSIVE,
    NOT_APPLICABLE,
    NOT_CHECKED,
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
    burn_in_clause,
    distinct_failures,
    failures_clause,
    node_days,
    pairs_clause,
)
from nodes.burnin.evidence import EVENT, GAP, TEST, BurnInFinding, NodeResults
from nodes.burnin.reports import BurnInMachine, ItemSummary

H100 = "NVIDIA H100, torch 2.13, CUDA 13.0"
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


def test_many_failures_leave_room_for_the_published_rates() -> None:
    (row,) = (row for row in stored([failures_clause(count(40))]) if row["key"] == "failures")
    assert "And 30\N{NO-BREAK SPACE}more failures." in row["details"]
    assert any("arXiv 2407.21783" in text for text in row["details"])


def test_a_single_failure_is_chance() -> None:
    assert failures_clause(count(1)).outcome == PASSED
    assert failures_clause(count(0)).outcome == PASSED


def test_failures_are_not_judged_without_time_or_gpus() -> None:
    assert failures_clause(count(1, hours=0)).outcome == NOT_CHECKED
    assert failures_clause(count(1, gpus=0)).outcome == NOT_APPLICABLE


@given(failures=st.integers(0, 30), days=st.floats(0.01, 5_000))
def test_more_failures_are_never_more_probable(failures: int, days: float) -> None:
    for fewer, more in zip(compare(failures, days), compare(failures + 1, days), strict=True):
        assert 0 <= more.p <= fewer.p <= 1


def test_findings_that_come_together_count_as_a_single_failure() -> None:
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
    bad = NodeVerdictRow("dgx-03", "failed", (BurnInFinding("GPU 3, memory: 12 words differ."),))
    found = burn_in_clause([*good, bad], "")
    assert (found.outcome, found.details) == (FAILED, ("dgx-03: GPU 3, memory: 12 words differ.",))
    unclear = burn_in_clause([*good, NodeVerdictRow("dgx-04", "")], "Cancelled.")
    assert (unclear.outcome, unclear.measured, unclear.details) == (NOT_CHECKED, "Cancelled.", ("dgx-04: Cancelled.",))
    assert burn_in_clause([], "").outcome == NOT_CHECKED


def verdict_with(*failures: tuple[str, bool, str], verdict: str = "failed") -> str:
    """Return the verdict of a node's tests, by its findings: text, whether it is a warning, and kind."""
    findings = tuple(BurnInFinding(*failure) for failure in failures)
    return NodeVerdictRow("dgx-01", verdict, findings).verdict_of_tests


def test_what_befell_a_node_is_left_to_the_clause_about_failures() -> None:
    xid = ("GPU fell off the bus during the burn-in (health rule off-bus).", False, EVENT)
    assert verdict_with(xid) == "passed"
    assert verdict_with(xid, ("Disk is slow.", True, TEST)) == "passed"
    assert verdict_with(xid, ("GPU 3, memory: 12 words differ.", False, TEST)) == "failed"
    assert verdict_with(xid, ("No test has a result.", False, GAP)) == "inconclusive"
    assert verdict_with(("The node failed during the burn-in.", False, GAP)) == "inconclusive"
    assert verdict_with(("GPU 3, memory: 12 words differ.", False, TEST)) == "failed"
    assert verdict_with(verdict="") == ""


CPUS = "Xeon, torch 2.13, 2 ranks"


def met(node: str, *partners: str, speed: float = 40.0, detail: str = "", basis: str = f"{H100}, 16 ranks",
        gpus: int = 8, **more: Any) -> NodeResults:  # fmt: skip
    """Return a node that met these partners."""
    tests = [
        ItemSummary("pair", partner, "GB/s", basis, 1, int(bool(detail)), values=[speed], detail=detail)
        for partner in partners
    ]
    return NodeResults(node, BurnInMachine("NVIDIA H100", gpus), tests, ended=True, expected_gpus=gpus, **more)


def test_all_pairs() -> None:
    assert pairs_clause([met("a", "b", "c"), met("b", "c"), met("c")]).outcome == PASSED
    missing = pairs_clause([met("a", "b"), met("b", "c"), met("c")])
    assert (missing.outcome, missing.details) == (NOT_CHECKED, ("No result on their GPUs: a and c.",))
    assert pairs_clause([met("a")]).outcome == NOT_APPLICABLE
    wrong = pairs_clause([met("a", "b", "c"), met("b", "c", detail="sums are wrong"), met("c", "b")])
    assert (wrong.outcome, wrong.details) == (FAILED, ("b and c: sums are wrong.",))
    slow = pairs_clause([met("a", "b", "c"), met("b", "c", speed=12.0), met("c")])
    assert (slow.outcome, slow.details) == (FAILED, ("b and c: 12 GB/s; fastest other pair: 40 GB/s.",))


def test_a_node_that_names_itself_has_tested_no_pair() -> None:
    found = pairs_clause([met("a", "a", "b", "c"), met("b"), met("c")])
    assert (found.outcome, found.measured[:6]) == (NOT_CHECKED, "2 of 3")


def test_a_pair_of_nodes_with_gpus_must_be_tested_on_them() -> None:
    assert pairs_clause([met("a", "b", basis=CPUS), met("b", "a", basis=CPUS)]).outcome == NOT_CHECKED
    assert pairs_clause([met("a", "b", basis=CPUS), met("b", "a", basis=CPUS, gpus=0)]).outcome == PASSED


def test_pairs_of_unlike_nodes_are_not_compared() -> None:
    large = [met(name, *(other for other in "abc" if other != name)) for name in "abc"]
    both = ("abc", f"{H100}, 4 ranks")
    small = [
        met(name, *(other for other in "de" if other != name), *both[0], speed=12.0, basis=both[1], gpus=2)
        for name in "de"
    ]
    assert pairs_clause([*large, *small]).outcome == PASSED


def test_what_failed_with_a_lost_node_is_no_result() -> None:
    found = pairs_clause([met("a", "b", detail="timed out"), met("b", is_node_lost=True)])
    assert (found.outcome, found.details) == (NOT_CHECKED, ("No result on their GPUs: a and b.",))


OUTCOMES = st.lists(
    st.tuples(
        st.sampled_from([clause.key for clause in requirements()]), st.sampled_from([PASSED, FAILED, NOT_CHECKED])
    )
)


ESSENTIAL = ("agents", "gpus", "burn_in", "pairs", "failures")


def test_nothing_is_accepted_before_all_pairs_were_tested() -> None:
    passed = [ClauseOutcome(key, PASSED, "measured.") for key in ESSENTIAL if key != "pairs"]
    assert verdict_of(passed) == INCONCLUSIVE
    assert verdict_of([*passed, ClauseOutcome("pairs", NOT_CHECKED, "27 of 28 pairs tested.")]) == INCONCLUSIVE
    assert verdict_of([*passed, ClauseOutcome("pairs", PASSED, "28 of 28 pairs tested.")]) == ACCEPTED
    alone = ClauseOutcome("pairs", NOT_APPLICABLE, "There is only one node.")
    assert verdict_of([*passed, alone, ClauseOutcome("vbios", NOT_CHECKED, "No GPU reports it.")]) == ACCEPTED


@given(OUTCOMES)
def test_nothing_is_accepted_with_a_failed_clause_or_without_a_burn_in(rows: list[tuple[str, str]]) -> None:
    outcomes = [ClauseOutcome(key, outcome, "measured.") for key, outcome in dict(rows).items()]
    verdict = verdict_of(outcomes)
    assert (verdict == REJECTED) == (FAILED in dict(rows).values())
    assert (verdict == ACCEPTED) <= (dict(rows).get("burn_in") == PASSED)
    assert (verdict == ACCEPTED) <= all(dict(rows).get(key) == PASSED for key in ESSENTIAL)
    assert verdict in (ACCEPTED, REJECTED, INCONCLUSIVE)
    assert len(stored(outcomes)) == len(requirements())


def test_summary() -> None:
    rows = stored(
        [ClauseOutcome("driver", FAILED, "2 different ones."), ClauseOutcome("clock", PASSED, "At most 0.1 s.")]
    )
    assert summary(rows) == f"Of {len(rows)} clauses 1 failed (Driver), 1 passed, {len(rows) - 2} pending."
