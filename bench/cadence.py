"""Measure how often we save: simulated against the best interval, and predicted costs against measured ones.

    python -m bench.cadence

Three bars (protocols.md §7):
- simulated runs that fail at random lose, over a grid of costs and failure rates, within 5 % of what they would with
  the best constant interval, which is computed exactly;
- at τ = 1 h and 400 MiB on two ranks, the overhead of the saves that the cadence predicts is within 1.5× of what a
  clock around as many steps with a save and without one measures (medians of pairs, interleaved);
- C of our save is ≤ 1.0× the stall of `dcp.save` in the same run.
"""

from __future__ import annotations

import itertools
import statistics
import sys

from bench import saving, stage
from tests.training.checkpoint.simulating import least_loss, lost
from training.checkpoint.cadence import best_interval, overhead

COSTS = (0.1, 1.0, 10.0, 60.0)
HOURS = (1, 6, 24, 168)
FAILURES = 300
SIMULATED = 1.05
PAIRS = 9
WINDOW_S = 3.0
PREDICTION = 1.5
COST = 1.0


def main() -> int:
    print(stage.machine())
    worst = _simulate()
    found = saving.measure(size=saving.SIZE_MIB, pairs=PAIRS, window=WINDOW_S)
    cost, clock = statistics.median(found["cost"]), max(statistics.median(found["clock"]), 1e-9)
    ratio = statistics.median(ours / their for ours, their in zip(found["cost"], found["dcp"], strict=True))
    best = best_interval(cost, saving.HOUR)
    predicted, measured = cost / best, clock / best
    print(f"{saving.SIZE_MIB} MiB held by each of {saving.RANKS} ranks, {PAIRS} pairs A/B/A/B; s")
    for label, row in (
        ("dcp.save, stall", found["dcp"]),
        ("C, cadence's", found["cost"]),
        ("C, by a clock", found["clock"]),
    ):
        print(f"  {label:16}" + "".join(f"{value:8.3f}" for value in row))
    print(
        f"  at τ = 1 h: save every {best:.0f} s; overhead of the saves predicted {predicted:.3%}, measured "
        f"{measured:.3%}; with the work lost to failures {overhead(best, cost, saving.HOUR):.3%}"
    )
    factor = max(predicted / measured, measured / predicted)
    bars = {
        "simulated": stage.bar("loss ÷ the best interval's, worst of the grid", worst, SIMULATED, at_least=False),
        "prediction": stage.bar("predicted ÷ measured, or the inverse", factor, PREDICTION, at_least=False, unit="×"),
        "cost": stage.bar("C ÷ dcp.save's stall", ratio, COST, at_least=False),
    }
    return stage.result("cadence", bars=bars, worst=worst, factor=factor, cost=ratio)


def _simulate() -> float:
    """Return the worst ratio of the grid."""
    print(f"simulated loss ÷ the best interval's; {FAILURES} failures each, C in rows (s), τ in columns (h)")
    print("        " + "".join(f"{hours:8}" for hours in HOURS))
    ratios = {
        (cost, hours): lost(cost, hours * saving.HOUR, failures=FAILURES) / least_loss(cost, hours * saving.HOUR)
        for cost, hours in itertools.product(COSTS, HOURS)
    }
    for cost in COSTS:
        print(f"  {cost:6g}" + "".join(f"{ratios[cost, hours]:8.3f}" for hours in HOURS))
    return max(ratios.values())


if __name__ == "__main__":
    sys.exit(main())
