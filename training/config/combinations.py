"""Which parallelisms can be combined: those that a test has compared with one process.

docs/reference/parallelism.md lists them.

Everything else is refused before anything is allocated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

AXES = ("pp", "dp", "shard", "cp", "tp")
"""Axes of the mesh, outermost first."""
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Combination:
    """A parallelism, the axes along which it has several ranks, and, with a pipeline, the schedules that work."""

    parallelism: str
    axes: frozenset[str]
    schedules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " × ".join([self.parallelism, *sorted(self.axes, key=AXES.index)])


def _row(parallelism: str, axes: str, schedules: tuple[str, ...] = ()) -> Combination:
    return Combination(parallelism, frozenset(axes.split()), schedules)


def _all_combinations(parallelism: str) -> Iterator[Combination]:
    """Yield every set of axes with every schedule."""
    for count in range(len(AXES) + 1):
        for axes in itertools.combinations(AXES, count):
            yield Combination(parallelism, frozenset(axes), SCHEDULES if "pp" in axes else ())


def _replicas(parallelism: str) -> Iterator[Combination]:
    """Yield the combinations of a reducer.

    torch's reducer counts the micro-batches of all schedules but 1F1B as backward passes.
    """
    yield from (_row(parallelism, axes) for axes in ("", "dp", "cp", "dp cp"))
    yield _row(parallelism, "pp", SCHEDULES)
    yield from (_row(parallelism, axes, ("1F1B",)) for axes in ("pp dp", "pp cp", "pp dp cp"))


COMBINATIONS = (
    *_replicas("ddp"),
    # That reducer does not support split matrices either: without replicas there is none.
    _row("ddp", "tp"),
    _row("ddp", "pp tp", SCHEDULES),
    *_replicas("zero1"),
    *_all_combinations("fsdp"),
)


def covers(parallelism: str) -> bool:
    """Return whether it is one of ours; a parallelism that somebody added to the folder checks its own combinations."""
    return any(row.parallelism == parallelism for row in COMBINATIONS)


def problem(parallelism: str, axes: frozenset[str], schedule: str | None) -> str | None:
    """Return why these cannot be combined, and what can; None if they can."""
    wanted = Combination(parallelism, axes)
    row = next((row for row in COMBINATIONS if (row.parallelism, row.axes) == (parallelism, axes)), None)
    if row is None:
        return f'{wanted} cannot be combined. Write "fsdp", which supports all of these axes.'
    if "pp" in axes and schedule not in (*row.schedules, None):
        return (
            f'{wanted} works with {" or ".join(row.schedules)} only, not {schedule}. Write "fsdp", which supports it.'
        )
    return None


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| parallelism | several ranks along | pipeline schedules |"
    yield "| --- | --- | --- |"
    for row in COMBINATIONS:
        if row.parallelism != "fsdp":
            axes = ", ".join(sorted(row.axes, key=AXES.index)) or "none: one rank"
            schedules = "all seven" if row.schedules == SCHEDULES else ", ".join(row.schedules)
            yield f"| {row.parallelism} | {axes} | {schedules} |"
    yield f"| fsdp | any of {', '.join(AXES)}, together or not | all seven |"
