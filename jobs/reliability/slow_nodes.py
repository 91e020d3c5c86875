"""Find nodes that are slow for their kind: programs take longer steps there than elsewhere. No Django.

A step time is the product of what the program does and how fast its slowest node is, so its logarithm is a program's
effect plus a node's. Both are taken out by medians (the first step of Tukey's median polish, Exploratory Data Analysis,
1977, chapter 11): a program's attempts on the node are divided by the median of its attempts elsewhere, and the median
of these ratios over programs, each of which has one vote, is the node's. So one program that happens to be slow there
changes nothing. A program votes "slow" if the ratio is at least LEAST and exceeds three of its own spreads elsewhere
(the scaled median absolute deviation; Leys et al., 2013, doi 10.1016/j.jesp.2013.03.013).

In a job over several nodes all of them wait for the slowest. The node with most slow programs is therefore taken out
with its attempts, and the rest judged again: who only ran beside it is not blamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

LEAST = 1.1
LEAST_OTHER_NODES = 2
LEAST_SPREAD = 0.01
MAD_TO_SIGMA = 1.4826
SPREADS = 3.0
MOST_NODES = 50
"""Slow nodes that are found at once; if there are more, they are not outliers."""


@dataclass(frozen=True)
class StepTime:
    """The median step of one attempt. `program`: a key that is equal for attempts that do the same on equal nodes."""

    program: str
    nodes: frozenset[str]
    seconds: float


@dataclass(frozen=True)
class NodePace:
    """Compares a node with others over the programs that ran on both.

    `ratio`: median over programs of its step time to that elsewhere, 1.2: a fifth slower. `slow_share`: the share of
    these programs that vote "slow". `attempts` ran on the node, on `other_nodes` the ones that they are compared with.
    """

    node: str
    ratio: float
    programs: int
    slow_programs: int
    slow_share: float
    attempts: int
    other_nodes: int


def slow_nodes(times: Iterable[StepTime]) -> list[NodePace]:
    """Return the nodes that are at least LEAST times as slow as others, the slowest first."""
    left = [time for time in times if time.seconds > 0]
    found: list[NodePace] = []
    candidates = {node for time in left for node in time.nodes}
    while candidates and len(found) < MOST_NODES:
        by_program = _by_program(left)
        paces = [pace for node in candidates if (pace := _pace(node, by_program)) is not None and pace.slow_programs]
        slow = [pace for pace in paces if pace.ratio >= LEAST]
        if not slow:
            break
        worst = max(slow, key=lambda pace: (pace.slow_programs, pace.ratio, pace.node))
        found.append(worst)
        left = [time for time in left if worst.node not in time.nodes]
        candidates = {pace.node for pace in paces} - {worst.node}
    return sorted(found, key=lambda pace: (-pace.ratio, pace.node))


@dataclass
class _ProgramTimes:
    """A program's attempts: all of them, and by node."""

    times: list[StepTime]
    by_node: dict[str, list[StepTime]]


def _by_program(times: Sequence[StepTime]) -> list[_ProgramTimes]:
    found: defaultdict[str, list[StepTime]] = defaultdict(list)
    for time in times:
        found[time.program].append(time)
    programs = []
    for several in found.values():
        by_node: defaultdict[str, list[StepTime]] = defaultdict(list)
        for time in several:
            for node in time.nodes:
                by_node[node].append(time)
        if len(by_node) > LEAST_OTHER_NODES:
            programs.append(_ProgramTimes(several, by_node))
    return programs


def _pace(node: str, programs: Sequence[_ProgramTimes]) -> NodePace | None:
    ratios, slow, attempts = [], 0, 0
    others: set[str] = set()
    for program in programs:
        here = program.by_node.get(node)
        if not here:
            continue
        elsewhere = [time for time in program.times if node not in time.nodes]
        nodes = {name for time in elsewhere for name in time.nodes}
        if len(nodes) < LEAST_OTHER_NODES or len(elsewhere) < LEAST_OTHER_NODES:
            continue
        middle = median(time.seconds for time in elsewhere)
        ratio = median(time.seconds for time in here) / middle
        spread = MAD_TO_SIGMA * median(abs(time.seconds / middle - 1) for time in elsewhere)
        slow += ratio >= max(LEAST, 1 + SPREADS * max(spread, LEAST_SPREAD))
        ratios.append(ratio)
        attempts += len(here)
        others |= nodes
    if not ratios:
        return None
    return NodePace(
        node, round(median(ratios), 4), len(ratios), slow, round(slow / len(ratios), 3), attempts, len(others)
    )
