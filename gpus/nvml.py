"""Reads this node's GPUs by NVIDIA's library (NVML), in a process of its own, since a call may never return.

    python -P -m gpus.nvml SECONDS [--all] [GPU …]

Each GPU is named as in CUDA_VISIBLE_DEVICES, by index or UUID; with none, all are meant. What it tells are lines of
JSON, in which a GPU is its place in "gpus", and what is not told is left out (gpus.told has the same, typed):

    {"driver", "cuda", "nvml", "gpus": [{"gpu", "uuid", "index", "minor", "bus", "name", "memory_mib"}]}
        first, and again whenever it is something else; a slice (MIG) has a "parent"
    {"at": monotonic, "time": Unix, "looks": [{"gpu_percent", …} or {"lost": true}]}
        every SECONDS, by the columns of protocols.md §11; with 0 seconds it ends after the first line
    {"none": why, "later": whether that may change}
        the only line of a machine without NVML, or whose driver does not answer

With --all there are, besides: of each GPU "serial", "vbios", "power_cap_watts", "slowdown_c", "numa_node", "mig" and
"instances"; "topology"; and

    {"at", "time", "counters": [{…}], "processes": [[{"pid", "memory_mib", "gpu_instance"}]]}    every 10 s
    {"at", "time", "event": {"place", "kind": "xid" or "recovery" or "mig" or "ecc", "value"}}
        at once; equal ones count as one until the next look

Where NVML has to be opened anew, this program is started anew in the same process, so that the library is that of the
driver, too; its first line then says "reopened": true.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from gpus.node import Node

PR_SET_PDEATHSIG = 1
PARENTS_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
COUNTERS_SECONDS = 10.0
REOPENED = "--reopened"


@dataclass(frozen=True)
class Asked:
    seconds: float
    names: list[str]
    everything: bool
    reopened: bool

    @classmethod
    def of(cls, arguments: list[str]) -> Asked:
        names = [one for one in arguments[1:] if not one.startswith("--")]
        return cls(float(arguments[0]), names, "--all" in arguments, REOPENED in arguments)


def main(asked: Asked) -> int:
    stay_with_parent()
    try:
        from gpus.asking import REOPEN
        from gpus.node import Node, NVMLError, may_change
    except ImportError as error:
        tell({"none": f"nvidia-ml-py is missing here: {error}", "later": False})
        return 0
    give_memory_back()
    has_looked = False
    try:
        node = Node(asked.names, everything=asked.everything)
        tell({**node.about(), **({"reopened": True} if asked.reopened else {})})
        for line in lines(node, asked):
            tell(line)
            has_looked = True
    except NVMLError as error:
        # What fails right after it was opened would do so again at once.
        if asked.seconds and (has_looked or not asked.reopened) and error.value in REOPEN:
            start_anew()
        tell({"none": str(error), "later": may_change(error)})
    return 0


def lines(node: Node, asked: Asked) -> Iterator[dict[str, Any]]:
    """What there is to tell, for as long as NVML is open: raises NVMLError where it must be opened anew."""
    due = 0.0
    while asked.seconds:
        is_due = asked.everything and time.monotonic() >= due
        if node.has_changed(slices=is_due):
            yield node.about()
        moment = now()
        yield {**moment, "looks": node.looks()}
        if is_due:
            due = time.monotonic() + COUNTERS_SECONDS - asked.seconds / 2
            yield {**now(), "counters": node.counters(), "processes": node.processes()}
        for event in node.wait(next_look(asked.seconds, moment["time"])):
            due = 0.0 if event["kind"] == "mig" else due
            yield {**now(), "event": event}


def now() -> dict[str, float]:
    """The monotonic clock is the system's own: whoever reads this can tell how old it is."""
    return {"at": time.monotonic(), "time": time.time()}


def next_look(seconds: float, last: float) -> float:
    """By the monotonic clock: in the middle of the wall clock's next period, so that each second gets one look."""
    due = (last // seconds + 1.5) * seconds
    return time.monotonic() + min(due - time.time(), 2 * seconds)


def stay_with_parent() -> None:
    """Dies with it, but of no signal that is sent to all of a job: what ends us is for the parent to say."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in () if sys.stdout.isatty() else PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    reader = select.poll()
    reader.register(1, select.POLLERR)
    if any(event & select.POLLERR for _, event in reader.poll(0)):  # the parent died before the first line here
        os._exit(0)


def give_memory_back() -> None:
    """What compiling took, ten MiB, where this code lies in one archive (the agent's): no interpreter keeps it then."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def start_anew() -> NoReturn:
    arguments = [one for one in sys.argv[1:] if one != REOPENED]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "gpus.nvml", *arguments, REOPENED])


def tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    try:
        code = main(Asked.of(sys.argv[1:]))
    except BrokenPipeError:
        code = 0
    # NVIDIA's library has something to do when a process ends in good order, too.
    os._exit(code)
