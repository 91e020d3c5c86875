"""Test last steps by rank: bands and outliers in words, one cell per rank, or per node where there are many."""

from __future__ import annotations

from jobs.presenting.postmortems.rank_steps import compare_ranks, ranks_text


def test_level_ranks_need_no_bands() -> None:
    report = compare_ranks(dict.fromkeys(range(8), 40), dict.fromkeys(range(8), "dgx-01"), None)
    assert report is not None
    assert report.finding == "Step 40 on every rank."
    assert [len(group.cells) for group in report.groups] == [8]
    assert not any(cell.is_odd for cell in report.groups[0].cells)


def test_who_stayed_behind_is_named() -> None:
    steps = dict.fromkeys(range(32), 41_312) | {21: 41_300}
    report = compare_ranks(steps, {rank: f"dgx-{rank // 8}" for rank in range(32)}, 21)
    assert report is not None
    assert report.finding == "Step 41,312 on 31\N{NO-BREAK SPACE}ranks; rank 21 was last, at 41,300."
    assert [cell.title for group in report.groups for cell in group.cells if cell.is_odd] == [
        "rank 21 on dgx-2: step 41,300"
    ]
    assert report.bands[-1] == (41_300, "rank 21")


def test_a_thousand_ranks_are_a_cell_a_node_and_few_bands() -> None:
    steps = {rank: 1_000 - rank % 7 for rank in range(1_024)} | {700: 3}
    report = compare_ranks(steps, {rank: f"dgx-{rank // 8:03}" for rank in range(1_024)}, None)
    assert report is not None
    assert [len(group.cells) for group in report.groups] == [128]
    assert len(report.bands) <= 5
    assert (3, "rank 700") in report.bands


def test_no_rank_reported_any() -> None:
    assert compare_ranks({}, {}, 3) is None


def test_ranks_are_named_by_runs() -> None:
    assert ranks_text([5]) == "rank 5"
    assert ranks_text([16, 17, 18, 19, 20, 22, 23]) == "ranks 16–20, 22 and 23"
    assert ranks_text(list(range(0, 40, 2))) == "20\N{NO-BREAK SPACE}ranks"
