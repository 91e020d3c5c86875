"""Measure what a checkpoint costs: our asynchronous save and torch's `dcp.save`, 400 MiB on two ranks, in one run.

    python -m bench.checkpoint [SIZE_MIB]

A pair is A: `dcp.save`, for which training stands still, then B: our save, beside which training goes on until it is
committed and read back (bench.saving). A/B/A/B, medians of the paired ratios. Bars: the stall for the copy is ≤ 12 % of
dcp.save's, and C, all that the save costs (that stall, and by how much the steps during the write were slower), is
≤ 1.0× of it.
"""

from __future__ import annotations

import statistics
import sys

from bench import saving, stage

PAIRS = 5
WINDOW_S = 4.0
STALL = 0.12
COST = 1.0


def main(arguments: list[str]) -> int:
    size = int(arguments[0]) if arguments else saving.SIZE_MIB
    print(stage.machine())
    found = saving.measure(size=size, pairs=PAIRS, window=WINDOW_S)
    theirs = found["dcp"]
    stalls = [ours / their for ours, their in zip(found["stall"], theirs, strict=True)]
    costs = [ours / their for ours, their in zip(found["cost"], theirs, strict=True)]
    print(f"{size} MiB held by each of {saving.RANKS} ranks, {PAIRS} pairs A/B/A/B; s")
    for label, row in (
        ("dcp.save, stall", theirs),
        ("ours, stall", found["stall"]),
        ("ours, write", found["write"]),
        ("ours, C", found["cost"]),
        ("stall ÷ dcp.save", stalls),
        ("C ÷ dcp.save", costs),
    ):
        print(f"  {label:18}" + "".join(f"{value:9.4f}" for value in row))
    before, after = (value / 2**20 for value in found["resident"])
    print(f"  a step alone {found['step'] * 1e3:.1f} ms; stall of the first save {found['first']:.4f} s")
    print(
        f"  memory kept for staging: {found['staged'] / 2**20:.0f} MiB on each rank; resident {before:.0f} MiB before"
    )
    print(f"  the first save, {after:.0f} MiB after the last")
    stall, cost = statistics.median(stalls), statistics.median(costs)
    bars = {
        "stall": stage.bar("stall ÷ dcp.save's", stall, STALL, at_least=False),
        "cost": stage.bar("C ÷ dcp.save's stall", cost, COST, at_least=False),
    }
    return stage.result("checkpoint", bars=bars, size_mib=size, stall=stall, cost=cost, staged_bytes=found["staged"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
