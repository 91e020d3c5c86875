"""Read this node's GPUs through NVML in a child process, because an NVML call may never return.

    python -P -m gpus.nvml SECONDS [--all] [GPU …]

GPUs are named as in CUDA_VISIBLE_DEVICES, by index or UUID; without any, all are read. Output is lines of JSON, in
which a GPU is its place in "gpus", and unavailable values are left out (gpus.reports has the same, typed):

    {"driver", "cuda", "nvml", "gpus": [{"gpu", "uuid", "index", "minor", "bus", "name", "memory_mib"}]}
        first, and again whenever it changes; a MIG slice has a "parent"
    {"at": monotonic, "time": Unix, "looks": [{"gpu_percent", …} or {"lost": true}]}
        every SECONDS, with the columns of protocols.md §11; with 0 seconds it exits after the first line
    {"none": why, "later": whether that may change}
        the only line of a machine without NVML, or whose driver does not respond

With --all there are also, of each GPU, "serial", "vbios", "inforom", "power_cap_watts", "slowdown_c", "numa_node",
"mig" and "instances"; "topology"; and

    {"at", "time", "counters": [{…}], "processes": [[{"pid", "memory_mib", "gpu_instance"}]]}    every 10 s
    {"at", "time", "event": {"place", "kind": "xid" or "recovery" or "mig" or "ecc", "value"}}
        immediately; equal events count as one until the next sample

If NVML must be reopened, this program prints {"reopening": true} and re-executes itself in the same process, so that
the library matches the driver again; its next first line then has "reopened": true.
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
    from gpus.node import NvmlNode

PR_SET_PDEATHSIG = 1
PARENTS_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
COUNTERS_SECONDS = 10.0
REOPENED = "--reopened"


@dataclass(frozen=True)
class ReaderOptions:
    seconds: float
    names: list[str]
    detailed: bool
    reopened: bool

    @classmethod
    def parse(cls, arguments: list[str]) -> ReaderOptions:
        names = [argument for argument in arguments[1:] if not argument.startswith("--")]
        return cls(float(arguments[0]), names, "--all" in arguments, REOPENED in arguments)


def main(options: ReaderOptions) -> int:
    die_with_parent()
    try:
        from gpus.node import NVMLError, NvmlNode, may_change
        from gpus.queries import REOPEN
    except ImportError as error:
        print_line({"none": f"nvidia-ml-py is not installed: {error}", "later": False})
        return 0
    trim_memory()
    has_sampled = False
    try:
        node = NvmlNode(options.names, detailed=options.detailed)
        print_line({**node.describe(), **({"reopened": True} if options.reopened else {})})
        for line in lines(node, options):
            print_line(line)
            has_sampled = True
    except NVMLError as error:
        # A failure right after opening would repeat immediately.
        if options.seconds and (has_sampled or not options.reopened) and error.value in REOPEN:
            reexecute()
        print_line({"none": str(error), "later": may_change(error)})
    return 0


def lines(node: NvmlNode, options: ReaderOptions) -> Iterator[dict[str, Any]]:
    """Yield the output lines for as long as NVML is open. Raises NVMLError if it must be reopened."""
    due = 0.0
    while options.seconds:
        is_due = options.detailed and time.monotonic() >= due
        if node.has_changed(slices=is_due):
            yield node.describe()
        timestamp = now()
        yield {**timestamp, "looks": node.samples()}
        if is_due:
            due = time.monotonic() + COUNTERS_SECONDS - options.seconds / 2
            yield {**now(), "counters": node.counters(), "processes": node.processes()}
        for event in node.wait(next_sample_at(options.seconds, timestamp["time"])):
            due = 0.0 if event["kind"] == "mig" else due
            yield {**now(), "event": event}


def now() -> dict[str, float]:
    """Return both clocks; the monotonic one is the system's, so that readers can compute the age."""
    return {"at": time.monotonic(), "time": time.time()}


def next_sample_at(seconds: float, last: float) -> float:
    """Return the monotonic time of the next sample: mid-period by the wall clock, so that each second gets one."""
    due = (last // seconds + 1.5) * seconds
    return time.monotonic() + min(due - time.time(), 2 * seconds)


def die_with_parent() -> None:
    """Die with the parent, but ignore signals that are sent to the whole job: the parent decides when we end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in () if sys.stdout.isatty() else PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    reader = select.poll()
    reader.register(1, select.POLLERR)
    if any(event & select.POLLERR for _, event in reader.poll(0)):  # the parent died before the first line here
        os._exit(0)


def trim_memory() -> None:
    """Return memory that compiling took (10 MiB) if this code runs from the agent's archive, without .pyc files."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def reexecute() -> NoReturn:
    print_line({"reopening": True})  # opening may take long, or fail until the driver is loaded again
    arguments = [argument for argument in sys.argv[1:] if argument != REOPENED]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "gpus.nvml", *arguments, REOPENED])


def print_line(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    try:
        code = main(ReaderOptions.parse(sys.argv[1:]))
    except BrokenPipeError:
        code = 0
    # NVIDIA's library may hang in its exit handlers, so skip them.
    os._exit(code)
