"""The rehearsal shows what Vigil would have done about past findings, within its limits."""

from __future__ import annotations

from nodes.health.progress import Subject
from nodes.health.rehearsal import rehearse
from nodes.health.replay import ReplayedEntry

NODES = [f"dgx-{number:02}" for number in range(40)]
HOUR = 3_600.0


def finding(node: str, opened_at: float, cleared_at: float | None) -> ReplayedEntry:
    return ReplayedEntry(Subject(node), opened_at, cleared_at, "fatal", "drain", 1, None)


def outcomes(*entries: ReplayedEntry, partition: int = 10) -> list[str]:
    found = rehearse("off-bus", entries, {"gpu": NODES[:partition]}, NODES)
    return [decision.outcome for decision in found.decisions]


def test_a_node_is_out_until_the_last_of_its_findings_is_over() -> None:
    found = outcomes(
        finding("dgx-00", 0, 5 * HOUR),
        finding("dgx-00", HOUR, 9 * HOUR),
        finding("dgx-01", 2 * HOUR, 3 * HOUR),
        finding("dgx-02", 6 * HOUR, None),
        finding("dgx-03", 8 * HOUR, None),
        finding("dgx-00", 9 * HOUR, None),
        finding("dgx-04", 20 * HOUR, None),
    )
    assert found == ["drained", "already_drained", "drained", "drained", "held_back", "drained", "held_back"]


def test_an_unknown_node_is_never_drained() -> None:
    found = rehearse("off-bus", [finding("other", 0, None)], {}, NODES)
    assert [decision.held_back for decision in found.decisions] == ["The scheduler does not know this node."]


def test_nothing_is_drained_once_the_breaker_has_tripped() -> None:
    found = rehearse("off-bus", [finding(node, 0, None) for node in NODES[:4]], {"gpu": NODES}, NODES)
    assert found.tripped_at == 0
    assert {decision.outcome for decision in found.decisions} == {"held_back"}
