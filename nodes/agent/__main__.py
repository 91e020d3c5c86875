"""The node agent: `python -P -m nodes.agent`, or `python vigil-agent.pyz` (docs/agent.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nodes.agent.speaking import say

USAGE = """\
What a node does, told to a portal of Vigil. Settings come from the environment (docs/agent.md).

  (nothing)        run until SIGTERM
  --once [--json]  print one sample of everything, and end
  check            say whether jobs may start here: exit 0 if so, 1 with a sentence if not; within 2 s
"""


def main(arguments: Sequence[str]) -> int:
    words = list(arguments)
    period = float(words.pop(words.index("--period") + 1)) if "--period" in words[:-1] else 1.0  # for tests
    words = [word for word in words if word != "--period"]
    if words == ["check"]:
        from nodes.agent.checking import main as check

        return check()
    if words and set(words) <= {"--once", "--json"} and "--once" in words:
        from nodes.agent.once import main as once

        return once(as_json="--json" in words)
    if words:
        print(USAGE, end="", file=sys.stdout if words in (["--help"], ["-h"]) else sys.stderr)
        return 0 if words in (["--help"], ["-h"]) else 2
    return _run(period)


def _run(period: float) -> int:
    from nodes.agent.buffer import Refused
    from nodes.agent.loop import Agent, Pace
    from nodes.agent.settings import WrongSetting, read_settings

    try:
        Agent(read_settings(posts=True), Pace(period)).run()
    except (WrongSetting, Refused) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Threads that ask a portal or a directory service, and may wait for long, hold nothing up.
    sys.stdout.flush()
    os._exit(code)
