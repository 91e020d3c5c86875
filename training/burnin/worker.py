"""Run the tests of one device, of the host, or one rank of an all-reduce, in a process of their own (see child.py)."""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from typing import Any

from training.burnin.results import reserve_stdout

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run one kind of test with its options, a table in JSON. torch is imported only by those that need it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing is left if the main process is killed
    reserve_stdout()
    kind, options = arguments[0], json.loads(arguments[1])
    {"facts": _facts, "device": _device, "copies": _copies, "host": _host, "rank": _rank}[kind](options)
    return 0


def _facts(options: dict[str, Any]) -> None:
    from training.burnin.facts import emit_facts

    emit_facts()


def _device(options: dict[str, Any]) -> None:
    from training.burnin.device_tests import test_device

    test_device(options["gpu"], options["item"], seconds=options["seconds"])


def _copies(options: dict[str, Any]) -> None:
    from training.burnin.copies import test_copies

    test_copies(options["gpus"], seconds=options["seconds"])


def _host(options: dict[str, Any]) -> None:
    from training.burnin.host_tests import test_host

    test_host(options["mounts"], options["scratch"], seconds=options["seconds"])


def _rank(options: dict[str, Any]) -> None:
    from training.burnin.collective import RankOptions, test_all_reduce

    test_all_reduce(RankOptions(**options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
