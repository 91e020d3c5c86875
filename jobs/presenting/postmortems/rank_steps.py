"""Present the last step of each rank: a cell per rank, bands of equal steps, and outliers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from vigil_core import formatting

MAX_CELLS = 128  # ranks; with more, each cell is a node and shows its slowest rank
BANDS = 4
MAX_NAMED_RANKS = 8
STEPS_OF_COLOUR = 4  # on either side of the middle of the ramp


@dataclass(frozen=True)
class RankCell:
    """A rank, or the slowest of a node. `colour` is its position on the ramp; 4 means level with most ranks."""

    title: str
    colour: int
    is_odd: bool


@dataclass(frozen=True)
class NodeRanks:
    """The cells of one node."""

    node: str
    cells: list[RankCell]


@dataclass(frozen=True)
class RankSteps:
    """The strip, and the same in words."""

    groups: list[NodeRanks]
    bands: list[tuple[int, str]]  # step and ranks
    finding: str
    ranks: int
    unit: str = "step"  # or round

    @property
    def words(self) -> str:
        return f"Last {self.unit} of {formatting.plural(self.ranks, 'rank')}. {self.finding}"


def compare_ranks(
    steps: Mapping[int, int], nodes: Mapping[int, str], blamed: int | None, unit: str = "step"
) -> RankSteps | None:
    """Compare the ranks by the last step that each reported; return None if none reported any.

    `blamed` is the rank that the verdict names, `unit` the job's unit of progress.
    """
    if not steps:
        return None
    by_step = Counter(steps.values())
    usual = max(by_step, key=lambda step: (by_step[step], step))
    behind = sorted(rank for rank, step in steps.items() if step < usual)
    odd = set(behind) if 0 < len(behind) <= max(MAX_NAMED_RANKS, len(steps) // 10) else set()
    if blamed is not None and blamed in steps:
        odd.add(blamed)
    return RankSteps(
        groups=_groups(steps, nodes, usual, odd, unit),
        bands=_bands(steps),
        finding=_finding(steps, usual, behind, blamed, unit),
        ranks=len(steps),
        unit=unit,
    )


def _groups(
    steps: Mapping[int, int], nodes: Mapping[int, str], usual: int, odd: set[int], unit: str
) -> list[NodeRanks]:
    by_node: dict[str, list[int]] = {}
    for rank in sorted(steps):
        by_node.setdefault(nodes.get(rank, ""), []).append(rank)
    spread = max(1, usual - min(steps.values()), max(steps.values()) - usual)
    groups = []
    for node, ranks in by_node.items():
        shown = ranks if len(steps) <= MAX_CELLS else [min(ranks, key=lambda rank: (rank not in odd, steps[rank]))]
        cells = [
            RankCell(
                f"rank {rank}{f' on {node}' if node else ''}: {unit} {formatting.count(steps[rank])}",
                _colour(steps[rank] - usual, spread),
                rank in odd,
            )
            for rank in shown
        ]
        groups.append(NodeRanks(node, cells))
    if len(steps) > MAX_CELLS:  # one row of nodes
        return [NodeRanks("one cell per node: its slowest rank", [cell for group in groups for cell in group.cells])]
    return groups


def _colour(difference: int, spread: int) -> int:
    """Return the position on the ramp; ranks that are behind get the warm side."""
    return 4 - round(STEPS_OF_COLOUR * difference / spread) if difference else 4


def _bands(steps: Mapping[int, int]) -> list[tuple[int, str]]:
    """Return the bands, furthest steps first; with many, the last band combines the rest."""
    by_step: dict[int, list[int]] = {}
    for rank, step in steps.items():
        by_step.setdefault(step, []).append(rank)
    rows = sorted(by_step.items(), reverse=True)
    if len(rows) > BANDS:
        common = sorted(rows, key=lambda row: (-len(row[1]), -row[0]))[: BANDS - 2]
        last = rows[-1:]
        shown = sorted({row[0]: row for row in (*common, *last)}.values(), reverse=True)
        left = sorted(rank for step, ranks in rows if step not in {row[0] for row in shown} for rank in ranks)
        return [*((step, ranks_text(ranks)) for step, ranks in shown), (-1, f"between: {ranks_text(left)}")]
    return [(step, ranks_text(ranks)) for step, ranks in rows]


def ranks_text(ranks: list[int]) -> str:
    """Return "rank 21", "ranks 16–20, 22 and 23", or "1,021 ranks"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    if len(runs) > MAX_NAMED_RANKS:
        return formatting.plural(len(ranks), "rank")
    parts = [part for a, b in runs for part in ([f"{a}–{b}"] if b > a + 1 else [str(n) for n in range(a, b + 1)])]
    return f"ranks {formatting.listed(parts)}"


def _finding(steps: Mapping[int, int], usual: int, behind: list[int], blamed: int | None, unit: str) -> str:
    where = f"{unit.capitalize()} {formatting.count(usual)}"
    if not behind:
        whole = f"{where} on every rank" if len(set(steps.values())) == 1 else f"{where} or later on every rank"
        if blamed in steps and len(steps) > 1:
            return f"{whole}; rank {blamed} is the one named in the verdict."
        return f"{whole}."
    least = min(steps.values())
    last = [rank for rank in behind if steps[rank] == least]
    others = f"; {ranks_text(last)} {'was' if len(last) == 1 else 'were'} last, at {formatting.count(least)}"
    later = " or later" if max(steps.values()) > usual else ""
    return f"{where}{later} on {formatting.plural(len(steps) - len(behind), 'rank')}{others}."
