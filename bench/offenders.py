"""Score the rules on repeat offenders on simulated clusters in which it is known what is broken.

    python -m bench.offenders [--clusters 2000] [--seed 1]

Bars: at least 95 % of the clusters judged right (all that is broken is named, and nothing else), precision and recall
of nodes and of programs at least 95 % each. Each cluster has 30 days of jobs of 40 programs on 64 nodes. Sound nodes
fail 6.5 times in 1,000 node-days (arXiv 2410.21680); a broken one fails a fifth to three fifths of the attempts on it.
A third of the clusters has a broken node, a third a program that fails in most of its attempts, a third neither. A
researcher who tries things out on one node, whose attempts fail within minutes, a third of them for no known reason, is
in all of them. A fifth of what a broken node causes is put down to the program, as a diagnosis may. The programs are
those of ten people.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from jobs.reliability.offenders import NodeFailures, ProgramFailures, offenders
from nodes.health.rules.catalogue import shipped_rules

NODES, PROGRAMS, OWNERS, DAYS, RECENT = 64, 40, 10, 30.0, 14.0
TRIES_THINGS = (OWNERS, "claims of its owner")
"""The owner who tries things out, and the program that counts for what nothing explains."""
BASE_RATE = 6.5 / 1000
BAR = 0.95


@dataclass
class Counts:
    """Counts of one kind of finding over all clusters."""

    right: int = 0
    wrong: int = 0
    missed: int = 0

    @property
    def precision(self) -> float:
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    @property
    def recall(self) -> float:
        return self.right / (self.right + self.missed) if self.right + self.missed else 1.0

    def add(self, found: set[str], true: set[str]) -> None:
        self.right += len(found & true)
        self.wrong += len(found - true)
        self.missed += len(true - found)


@dataclass
class SimulatedCluster:
    """Holds what a portal has counted after DAYS, and what is broken."""

    bad_nodes: set[str]
    bad_programs: set[str]
    node_days: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    machine_failures: list[tuple[str, int, str]] = field(default_factory=list)
    """Node, owner and program of failures that are not put down to the program."""
    program_failures: defaultdict[str, list[list[str]]] = field(default_factory=lambda: defaultdict(list))
    """By error, the nodes of each attempt that failed with it in the last two weeks."""


def simulate(random: Random) -> SimulatedCluster:
    names = [f"n{number:02}" for number in range(NODES)]
    kind = random.choice(("node", "program", "nothing"))
    cluster = SimulatedCluster(set(), set())
    cluster.bad_nodes |= {random.choice(names)} if kind == "node" else set()
    bad_program = random.randrange(PROGRAMS) if kind == "program" else -1
    harm = random.uniform(0.2, 0.6)
    for program in range(PROGRAMS):
        size, often = random.choice((1, 1, 1, 2, 4)), random.uniform(0.6, 2.0)
        for at in _moments(random, often):
            nodes = random.sample(names, size)
            days = random.expovariate(1 / 0.7)
            is_bad = program == bad_program and random.random() < 0.8
            _run(random, cluster, program, nodes, 0.02 if is_bad else days, at, harm, is_bad)
        if program == bad_program:
            cluster.bad_programs.add(f"error-{program}")
    desk = random.choice(names)
    for number, at in enumerate(_moments(random, 3.0)):  # somebody tries things out, each time something else
        cluster.node_days[desk] += 0.005
        unexplained = (desk, *TRIES_THINGS)
        if number % 3 == 0:
            if unexplained not in cluster.machine_failures:  # once a person
                cluster.machine_failures.append(unexplained)
        elif at > DAYS - RECENT:
            cluster.program_failures[f"trial-{number}"].append([desk])
    return cluster


def _run(
    random: Random,
    cluster: SimulatedCluster,
    program: int,
    nodes: list[str],
    days: float,
    at: float,
    harm: float,
    is_bad: bool,
) -> None:
    for node in nodes:
        cluster.node_days[node] += days
        is_broken = node in cluster.bad_nodes and random.random() < harm
        if is_broken and random.random() < 0.2:
            if at > DAYS - RECENT:
                cluster.program_failures[f"crash-{program}"].append(nodes)
        elif is_broken or random.random() < 1 - 2.718281828 ** (-BASE_RATE * days):
            cluster.machine_failures.append((node, program % OWNERS, f"job {program}"))
    if is_bad and at > DAYS - RECENT:
        cluster.program_failures[f"error-{program}"].append(nodes)


def _moments(random: Random, a_day: float) -> Iterator[float]:
    at = random.expovariate(a_day)
    while at < DAYS:
        yield at
        at += random.expovariate(a_day)


def judge(cluster: SimulatedCluster) -> tuple[set[str], set[str]]:
    """Return the nodes and the errors that the shipped rules name."""
    failures = Counter(node for node, _, _ in cluster.machine_failures)
    programs = Counter(node for node, _, _ in set(cluster.machine_failures))
    owners = Counter(node for node, _ in {(node, owner) for node, owner, _ in cluster.machine_failures})
    counted = [NodeFailures(node, failures[node], programs[node], days) for node, days in cluster.node_days.items()]
    rules = shipped_rules()
    node_rule, program_rule = (rules[name].triggers[0] for name in ("repeat-offender", "failing-program"))
    nodes = {
        offender.counts.node
        for offender in offenders(counted)
        if node_rule.matches(
            "repeat_failures",
            {
                "is_node": offender.is_node,
                "programs": offender.counts.programs,
                "owners": owners[offender.counts.node],
                "programs_chance": offender.programs_chance,
            },
        )
    }
    found = {name: ProgramFailures.count(places) for name, places in cluster.program_failures.items()}
    errors = {name for name, counts in found.items() if program_rule.matches("program_failures", vars_of(counts))}
    return nodes, errors


def vars_of(counts: ProgramFailures) -> dict[str, float]:
    return {"failures": counts.failures, "nodes": counts.nodes, "share_of_one_node": counts.share_of_one_node}


def score(clusters: int, seed: int) -> tuple[float, Counts, Counts]:
    """Return the share of clusters judged right, and the counts of nodes and programs."""
    nodes, programs, right = Counts(), Counts(), 0
    for number in range(clusters):
        cluster = simulate(Random(seed * 1_000_003 + number))
        found = judge(cluster)
        nodes.add(found[0], cluster.bad_nodes)
        programs.add(found[1], cluster.bad_programs)
        right += found == (cluster.bad_nodes, cluster.bad_programs)
    return right / clusters, nodes, programs


def main() -> int:
    from bench import stage

    parser = argparse.ArgumentParser(prog="python -m bench.offenders")
    parser.add_argument("--clusters", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    right, nodes, programs = score(options.clusters, options.seed)
    figures = {
        "clusters judged right": right,
        "precision of nodes": nodes.precision,
        "recall of nodes": nodes.recall,
        "precision of programs": programs.precision,
        "recall of programs": programs.recall,
    }
    bars = {
        name.replace(" ", "_"): stage.bar(name, 100 * share, 100 * BAR, unit=" %") for name, share in figures.items()
    }
    return stage.result(
        "offenders",
        bars=bars,
        clusters=options.clusters,
        seed=options.seed,
        **{name.replace(" ", "_"): round(share, 4) for name, share in figures.items()},
    )


if __name__ == "__main__":
    raise SystemExit(main())
