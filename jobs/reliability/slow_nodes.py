"""Find nodes that are slow for their kind: programs take longer steps there than elsewhere. No Django.

A step time is the product of what the program does and how fast its slowest node is, so its logarithm is a program's
effect plus a node's. Both are taken out by medians (the first step of Tukey's median polish, Exploratory Data Analysis,
1977, chapter 11): a program's jobs on the node are divided by the median of its jobs elsewhere, and the median of these
ratios over programs, each of which has one vote, is the node's. So one program that happens to be slow there changes
nothing. A program votes "slow" if the ratio is at least MIN_RATIO and exceeds three of its own spreads elsewhere (the
scaled median absolute deviation; Leys et al., 2013, doi 10.1016/j.jesp.2013.03.013).

Step times are what jobs report of themselves. Restarts of a job therefore count once, a program is always one person's,
and a vote names that person: rules can ask for the evidence of several people.

In a job over several nodes all of them wait for the slowest. The node with most slow programs is therefore taken out
with its jobs, and the rest judged again: who only ran beside it is not blamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Self

MIN_RATIO = 1.1
MIN_OTHER_NODES = 2
MIN_SPREAD = 0.01
MAD_TO_SIGMA = 1.4826
SPREADS = 3.0
MAX_NODES = 50
"""Slow nodes that are found at once; if there are more, they are not outliers."""
MAX_COMPARED = 200
"""Times of a program, the first ones, that those on a node are compared with: a sweep may have thousands of jobs."""


@dataclass(frozen=True)
class StepTime:
    """The median step of one attempt of a job.

    `program`: a key that is equal for jobs of one person, the `owner`, that do the same on equal nodes.
    """

    program: str
    owner: int
    job: int
    nodes: frozenset[str]
    seconds: float


@dataclass(frozen=True)
class NodePace:
    """Compares a node with others over the programs that ran on both.

    `ratio`: median over programs of its step time to that elsewhere, 1.2: a fifth slower. `slow_share`: the share of
    these programs that vote "slow", `owners` the people whose programs these are. `jobs` ran on the node, on
    `other_nodes` the ones that they are compared with.
    """

    node: str
    ratio: float
    programs: int
    slow_programs: int
    slow_share: float
    owners: int
    jobs: int
    other_nodes: int


def slow_nodes(times: Iterable[StepTime], also: Collection[str] = ()) -> list[NodePace]:
    """Return the nodes that are at least MIN_RATIO times as slow as others, the slowest first; times are newest first.

    The nodes of `also` follow, if they are not slow and can be compared.
    """
    programs = _ComparedPrograms(_by_job(time for time in times if time.seconds > 0))
    candidates: Collection[str] = programs.nodes()
    paces: list[NodePace] = []
    while candidates and len(paces) < MAX_NODES:
        votes = {node: programs.votes(node) for node in candidates}
        votes = {node: node_votes for node, node_votes in votes.items() if _slow(node_votes)}
        slow = [node for node, node_votes in votes.items() if _ratio(node_votes) >= MIN_RATIO]
        if not slow:
            break
        worst = max(slow, key=lambda node: (len(_slow(votes[node])), _ratio(votes[node]), node))
        paces.append(_pace(worst, votes[worst]))
        programs.remove(worst)
        candidates = votes.keys() - {worst}
    paces.sort(key=lambda pace: (-pace.ratio, pace.node))
    others = sorted(set(also) - {pace.node for pace in paces})
    return [*paces, *(_pace(node, votes_of_other) for node in others if (votes_of_other := programs.votes(node)))]


def _by_job(times: Iterable[StepTime]) -> list[StepTime]:
    """Return one time for each job and the nodes that it ran on: the median of its attempts there."""
    found: defaultdict[tuple[str, int, frozenset[str]], list[StepTime]] = defaultdict(list)
    for time in times:
        found[time.program, time.job, time.nodes].append(time)
    return [replace(group[0], seconds=median(time.seconds for time in group)) for group in found.values()]


@dataclass(frozen=True)
class _ComparedProgram:
    """A program's jobs: all of them, the first ones by their step times, and those on each node."""

    key: str
    times: Sequence[StepTime]
    compared: Sequence[StepTime]
    by_node: Mapping[str, Sequence[StepTime]]

    @classmethod
    def of(cls, key: str, times: Sequence[StepTime]) -> Self:
        by_node: defaultdict[str, list[StepTime]] = defaultdict(list)
        for time in times:
            for node in time.nodes:
                by_node[node].append(time)
        return cls(key, times, sorted(times[:MAX_COMPARED], key=lambda time: time.seconds), by_node)

    def elsewhere(self, node: str) -> list[StepTime]:
        return [time for time in self.compared if node not in time.nodes]

    def vote(self, node: str) -> _ProgramVote | None:
        """Return how its steps on the node compare; None if too few ran elsewhere."""
        elsewhere = self.elsewhere(node)
        if len(elsewhere) < MIN_OTHER_NODES or not _are_on_several(elsewhere):
            return None
        middle = median(time.seconds for time in elsewhere)
        ratio = median(time.seconds for time in self.by_node[node]) / middle
        is_slow = ratio >= MIN_RATIO
        if is_slow:
            spread = MAD_TO_SIGMA * median(abs(time.seconds / middle - 1) for time in elsewhere)
            is_slow = ratio >= 1 + SPREADS * max(spread, MIN_SPREAD)
        return _ProgramVote(self, ratio, is_slow)


@dataclass(frozen=True)
class _ProgramVote:
    program: _ComparedProgram
    ratio: float
    is_slow: bool


class _ComparedPrograms:
    """All programs, by key and by the nodes that they ran on."""

    def __init__(self, times: Iterable[StepTime]) -> None:
        self._by_key: dict[str, _ComparedProgram] = {}
        self._of_node: defaultdict[str, set[str]] = defaultdict(set)
        by_key: defaultdict[str, list[StepTime]] = defaultdict(list)
        for time in times:
            by_key[time.program].append(time)
        for key, program_times in by_key.items():
            self._by_key[key] = _ComparedProgram.of(key, program_times)
            for node in self._by_key[key].by_node:
                self._of_node[node].add(key)

    def nodes(self) -> Collection[str]:
        return self._of_node.keys()

    def votes(self, node: str) -> list[_ProgramVote]:
        programs = (self._by_key[key] for key in self._of_node.get(node, ()))
        return [vote for program in programs if (vote := program.vote(node)) is not None]

    def remove(self, node: str) -> None:
        """Take a node out with all jobs that ran there."""
        for key in self._of_node.pop(node, ()):
            old = self._by_key[key]
            new = self._by_key[key] = _ComparedProgram.of(key, [time for time in old.times if node not in time.nodes])
            for other in old.by_node.keys() - new.by_node.keys() - {node}:
                self._of_node[other].discard(key)


def _are_on_several(times: Iterable[StepTime]) -> bool:
    names: set[str] = set()
    for time in times:
        names |= time.nodes
        if len(names) >= MIN_OTHER_NODES:
            return True
    return False


def _ratio(votes: Iterable[_ProgramVote]) -> float:
    return median(vote.ratio for vote in votes)


def _slow(votes: Iterable[_ProgramVote]) -> list[_ProgramVote]:
    return [vote for vote in votes if vote.is_slow]


def _pace(node: str, votes: Sequence[_ProgramVote]) -> NodePace:
    slow = _slow(votes)
    return NodePace(
        node,
        round(_ratio(votes), 4),
        programs=len(votes),
        slow_programs=len(slow),
        slow_share=round(len(slow) / len(votes), 3),
        owners=len({vote.program.times[0].owner for vote in slow}),
        jobs=len({time.job for vote in votes for time in vote.program.by_node[node]}),
        other_nodes=len({name for vote in votes for time in vote.program.elsewhere(node) for name in time.nodes}),
    )
