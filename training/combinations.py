"""Which parallelisms go together: those that a test has run against one process. docs/parallelism.md is made of this.

What is not here is refused before anything is allocated, with the nearest that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

AXES = ("pp", "dp", "shard", "cp", "tp")
"""The mesh's, outermost first."""
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Combination:
    """A parallelism, the axes along which it has several ranks, and with a pipeline the schedules that work."""

    parallelism: str
    axes: frozenset[str]
    schedules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " × ".join([self.parallelism, *sorted(self.axes, key=AXES.index)])


def _rows(parallelism: str, axes: str, schedules: tuple[str, ...] = ()) -> Combination:
    return Combination(parallelism, frozenset(axes.split()), schedules)


COMBINATIONS = (
    _rows("ddp", ""),
    _rows("ddp", "dp"),
    _rows("ddp", "cp"),
    _rows("ddp", "dp cp"),
    _rows("ddp", "tp"),
    _rows("ddp", "pp", SCHEDULES),
    _rows("ddp", "pp tp", ("1F1B", "ZBVZeroBubble")),
    _rows("ddp", "pp cp", ("1F1B",)),
    # torch's reducer takes the micro-batches of the other schedules for several backward passes.
    _rows("ddp", "pp dp", ("1F1B",)),
    _rows("zero1", ""),
    _rows("zero1", "dp"),
    _rows("fsdp", ""),
    _rows("fsdp", "dp"),
    _rows("fsdp", "shard"),
    _rows("fsdp", "dp shard"),
    _rows("fsdp", "tp"),
    _rows("fsdp", "dp tp"),
    _rows("fsdp", "shard tp"),
    _rows("fsdp", "dp shard tp"),
    _rows("fsdp", "cp"),
    _rows("fsdp", "shard cp"),
    _rows("fsdp", "cp tp"),
    _rows("fsdp", "shard cp tp"),
    _rows("fsdp", "pp"),
    _rows("fsdp", "pp shard", SCHEDULES),
    _rows("fsdp", "pp dp shard", ("1F1B",)),
    _rows("fsdp", "pp shard tp", ("1F1B",)),
    _rows("fsdp", "pp shard cp", ("1F1B",)),
)


def knows(parallelism: str) -> bool:
    """Whether it is one of ours; what somebody has dropped into the folder answers for itself."""
    return any(row.parallelism == parallelism for row in COMBINATIONS)


def problem(parallelism: str, axes: frozenset[str], schedule: str | None) -> str | None:
    """Why these can't be combined, and the nearest that can; None if they can."""
    wanted = Combination(parallelism, axes)
    row = next((row for row in COMBINATIONS if (row.parallelism, row.axes) == (parallelism, axes)), None)
    if row is None:
        near = sorted(COMBINATIONS, key=lambda other: (len(other.axes ^ axes), other.parallelism != parallelism))
        return f"{wanted} has not been tried against one process. Nearest that have: {near[0]}, {near[1]}."
    if "pp" in axes and schedule not in (row.schedules or ("1F1B",)):
        takers = [other for other in COMBINATIONS if schedule in other.schedules]
        taker = min(takers, key=lambda other: (len(_cuts(other.axes) ^ _cuts(axes)), other.parallelism != parallelism))
        works = _either(row.schedules or ("1F1B",))
        return f"{wanted} works with {works} only, not {schedule}. The nearest that takes it: {taker}."
    return None


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| parallelism | several ranks along | pipeline schedules |"
    yield "| --- | --- | --- |"
    for row in COMBINATIONS:
        axes = ", ".join(sorted(row.axes, key=AXES.index)) or "none: one rank"
        schedules = "" if "pp" not in row.axes else ", ".join(row.schedules or ("1F1B",))
        yield f"| {row.parallelism} | {axes} | {'all seven' if row.schedules == SCHEDULES else schedules} |"


def _cuts(axes: frozenset[str]) -> frozenset[str]:
    """With dp and shard as one: either divides the batch."""
    return frozenset("dp" if axis == "shard" else axis for axis in axes)


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(words)
