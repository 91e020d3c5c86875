"""Score the rule on slow nodes on simulated clusters in which it is known which node is slow.

    python -m bench.slow_nodes [--clusters 1000] [--seed 1]

Bars: at least 95 % of the clusters judged right, precision and recall at least 95 %; a sweep of 20,000 jobs on 1,000
nodes takes at most 8 times the CPU of one of 5,000 jobs on 250 nodes. Each cluster has a week of 20 programs of eight
people on 48 nodes, each with 8 to 20 jobs of 1, 2 or 4 nodes and steps that vary by 2 % from job to job. In half of the
clusters one node is 15 to 40 % slower than its peers; in all of them one program is slow by itself, and
one varies by 15 %, as with texts of different lengths.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from random import Random

from bench.offenders import Counts
from jobs.reliability.slow_nodes import StepTime, slow_nodes
from nodes.health.rules.catalogue import shipped_rules

NODES, PROGRAMS, OWNERS = 48, 20, 8
BAR = 0.95
MAX_GROWTH = 8.0
"""For four times the jobs and nodes; 16 if each node is compared with every job of the sweep."""


def simulate(random: Random) -> tuple[list[StepTime], set[str]]:
    """Return the step times of a week, and the nodes that are slow."""
    names = [f"n{number:02}" for number in range(NODES)]
    slow = {random.choice(names): random.uniform(1.15, 1.4)} if random.random() < 0.5 else {}
    times: list[StepTime] = []
    for program in range(PROGRAMS):
        base, size = random.uniform(0.05, 4.0), random.choice((1, 1, 2, 4))
        base, noise = (3 * base, 0.02) if program == 0 else (base, 0.15 if program == 1 else 0.02)
        for _ in range(random.randrange(8, 21)):
            nodes = random.sample(names, size)
            factor = max(slow.get(node, 1.0) for node in nodes)
            seconds = base * factor * random.gauss(1.0, noise)
            times.append(StepTime(f"p{program}", program % OWNERS, len(times), frozenset(nodes), seconds))
    return times, set(slow)


def judge(times: Sequence[StepTime]) -> set[str]:
    """Return the nodes that the shipped rule names."""
    rule = shipped_rules()["slow-for-its-kind"]
    found = set()
    for pace in slow_nodes(times):
        if any(trigger.matches("step_time", asdict(pace)) for trigger in rule.triggers):
            found.add(pace.node)
    return found


def score(clusters: int, seed: int) -> tuple[float, Counts]:
    """Return the share of clusters judged right, and the counts of nodes."""
    counts, right = Counts(), 0
    for number in range(clusters):
        times, slow = simulate(Random(seed * 1_000_003 + number))
        found = judge(times)
        counts.add(found, slow)
        right += found == slow
    return right / clusters, counts


def sweep_seconds(nodes: int) -> float:
    """Return the CPU time of searching one program's 20 jobs on each node, three of which are slow."""
    names = [f"n{number}" for number in range(nodes)]
    jobs = enumerate((name, place) for place in range(20) for name in names)
    times = [
        StepTime("sweep", 1, number, frozenset({name}), (1.3 if name in names[:3] else 1.0) + place * 1e-4)
        for number, (name, place) in jobs
    ]
    began = time.process_time()
    slow_nodes(times)
    return time.process_time() - began


def main() -> int:
    from bench import stage

    parser = argparse.ArgumentParser(prog="python -m bench.slow_nodes")
    parser.add_argument("--clusters", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    right, counts = score(options.clusters, options.seed)
    figures = {"clusters_judged_right": right, "precision": counts.precision, "recall": counts.recall}
    bars = {
        name: stage.bar(name.replace("_", " "), 100 * share, 100 * BAR, unit=" %") for name, share in figures.items()
    }
    growth = sweep_seconds(1_000) / sweep_seconds(250)
    bars["growth"] = stage.bar("a sweep four times as large, CPU", growth, MAX_GROWTH, unit="×", at_least=False)
    return stage.result("slow_nodes", bars=bars, clusters=options.clusters, seed=options.seed, **figures)


if __name__ == "__main__":
    raise SystemExit(main())
