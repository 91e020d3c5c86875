"""Counters of GPUs are shown in words, and what needs attention comes first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.presenting.counters import attention_text, counter_row, sorted_rows

WELL: dict[str, Any] = {
    "ecc_corrected": 0, "ecc_uncorrected": 0, "ecc_corrected_lifetime": 12, "ecc_uncorrected_lifetime": 1,
    "remapped_corrected": 0, "remapped_uncorrected": 2, "remapped_pending": 0, "remapped_failed": 0,
    "pcie_generation": 5, "pcie_generation_most": 5, "pcie_width": 16, "pcie_width_most": 16, "nvlinks": [1] * 18,
    "power_cap_watts": 700, "recovery_action": 0,
}  # fmt: skip


def row(index: int = 0, *, throttle: int | None = 0, is_busy: bool = True, **changes: Any) -> Any:
    return counter_row(index, {**WELL, **changes}, throttle=throttle, is_busy=is_busy)


def test_a_gpu_that_is_well() -> None:
    found = row()
    assert found.urgency == 0
    assert found.memory_errors.text == "none"
    assert found.lifetime_errors.text.replace("\xa0", " ") == "1 uncorrectable, 12 corrected"
    assert found.remapped.text.replace("\xa0", " ") == "2 rows"
    assert found.links.text == "18 up"
    assert found.clocks.text == "full speed"


@pytest.mark.parametrize(
    ("changes", "cell", "text", "tone"),
    [
        ({"ecc_uncorrected": 2}, "memory_errors", "2 uncorrectable", "failed"),
        ({"ecc_corrected": 7}, "memory_errors", "7 corrected", ""),
        ({"remapped_pending": 1}, "remapped", "a row waits for a reset", "warn"),
        ({"remapped_failed": 1}, "remapped", "a row could not be remapped", "failed"),
        ({"nvlinks": [1] * 16 + [0, 0]}, "links", "2 of 18 down", "failed"),
        ({"pcie_width": 8}, "pcie", "generation 5 ×8 of 5 ×16", "failed"),
        ({"pcie_generation": 3}, "pcie", "generation 3 ×16 of 5 ×16", "warn"),
        ({"pcie_generation": 1, "is_busy": False}, "pcie", "generation 1 ×16 of 5 ×16, idle now", ""),
        ({"throttle": 0x04}, "clocks", "power limit reached", ""),
        ({"throttle": 0x44}, "clocks", "heat (hardware), power limit reached", "warn"),
        ({"throttle": 0x80}, "clocks", "power brake: the machine’s power supply demands it", "warn"),
        ({"throttle": None}, "clocks", "–", ""),
    ],
)
def test_what_needs_attention_is_marked(changes: dict[str, Any], cell: str, text: str, tone: str) -> None:
    found = getattr(row(**changes), cell)
    assert (found.text.replace("\xa0", " "), found.tone) == (text, tone)


def test_the_worst_comes_first() -> None:
    rows = sorted_rows([row(0), row(1, remapped_pending=1), row(2), row(3, nvlinks=[0, 1]), row(4, recovery_action=1)])
    assert [item.index for item in rows] == [3, 4, 1, 0, 2]
    assert rows[1].recovery == "needs a reset"
    assert attention_text(rows) == "GPUs 1, 3 and 4 need attention"
    assert attention_text([row(7, remapped_failed=1)]) == "GPU 7 needs attention"
    assert attention_text([row()]) == "no GPU needs attention"
    assert attention_text([row(), row(7, remapped_failed=1)], [5]) == "GPUs 5 (lost) and 7 need attention"


def test_pages_of_older_gpus() -> None:
    found = counter_row(0, {"retired_corrected": 1, "retired_uncorrected": 2}, throttle=None, is_busy=False)
    assert found.remapped.text.replace("\xa0", " ") == "3 retired pages"


@given(
    st.dictionaries(
        st.sampled_from(sorted(WELL)),
        st.none() | st.text(max_size=3) | st.integers() | st.lists(st.integers(), max_size=3),
    )
)
def test_whatever_a_node_reports_is_shown(counters: dict[str, Any]) -> None:
    assert counter_row(0, counters, throttle=2**40, is_busy=True).power_limit.text
