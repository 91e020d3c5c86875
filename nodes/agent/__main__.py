"""Run the node agent: `python -P -m nodes.agent`, or `python vigil-agent.pyz` (docs/how-to/agent.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nodes.agent.log import log

USAGE = """\
Report what this node does to a Vigil portal. Settings come from the environment (docs/how-to/agent.md).

  (nothing)        run until SIGTERM
  --once [--json]  print one sample of everything and exit
  check            check whether jobs may start here, within 2 s: exit 0 if so, else 1 with the reason
"""


def main(arguments: Sequence[str]) -> int:
    words = list(arguments)
    period = float(words.pop(words.index("--period") + 1)) if "--period" in words[:-1] else 1.0  # for tests
    words = [word for word in words if word != "--period"]
    if words == ["check"]:
        from nodes.agent.checking import main as check

        return check()
    if words and set(words) <= {"--once", "--json"} and "--once" in words:
        from nodes.agent.print_once import main as once

        return once(as_json="--json" in words)
    if words:
        print(USAGE, end="", file=sys.stdout if words in (["--help"], ["-h"]) else sys.stderr)
        return 0 if words in (["--help"], ["-h"]) else 2
    return _run(period)


def _run(period: float) -> int:
    from nodes.agent.loop import AgentLoop, AgentTiming
    from nodes.agent.reporting.buffer import StateUnusable
    from nodes.agent.settings import InvalidSetting, read_settings

    try:
        AgentLoop(read_settings(posts=True), AgentTiming(period)).run()
    except (InvalidSetting, StateUnusable) as error:
        log(str(error))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Exit without joining threads: one may be waiting for the portal or a directory service.
    sys.stdout.flush()
    os._exit(code)
