"""`python -P -m training.burnin RUN_DIRECTORY`: burn in this node as the plan in the run directory says."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from training.burnin.node_run import NodeRun
from training.burnin.plan import UnreadablePlan, node_name, read_plan


def main(arguments: list[str]) -> int:
    """Run the tests of one node; its results are in `job/results/<node>.jsonl` as they are made."""
    if len(arguments) != 1:
        print("usage: python -P -m training.burnin RUN_DIRECTORY", file=sys.stderr)
        return 2
    run = Path(arguments[0])
    try:
        plan = read_plan(run)
        node = node_name(plan)
    except (OSError, UnreadablePlan) as error:
        print(f"This node cannot be tested: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children are killed on the way out
    NodeRun(run, plan, node).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
