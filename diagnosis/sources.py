"""What people have at hand beside logs, read as what it is: the scheduler's records, flight recorders, kernel logs.

`kind_of` tells by how it begins; tables and records become signs, like lines of a log. Whatever else is read as a log.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from diagnosis import stacks
from diagnosis.prefixes import Prefix
from diagnosis.sign import Sign
from vigil_core import untrusted

TOP = 4  # lines that tell what a file is
MOST = 16 << 20  # bytes of one that is no log
MOST_TABLE = 2 << 20  # of one by the scheduler
MOST_RANKS = 1_000_000
MOST_ENTRIES = 8_192  # of one flight recorder; torch keeps 2,000, of each library
NEWEST = 128  # of them in one group

_SACCT = re.compile(rb"(?m)^ *Job(?:ID|IDRaw)[ |].*\bState\b")
_SCONTROL = re.compile(rb"(?m)^\s*JobId=\d+ ")
_KERNEL = re.compile(
    rb"(?m)^(?:<\d+>)?\[ *\d+\.\d{6}\] |^\[[A-Z][a-z]{2} [A-Z][a-z]{2} .{14,16}\] |^[\w:.+ -]{15,40} [\w.-]+ kernel: "
)
_SMI = re.compile(rb"=+NVSMI LOG=+|\| NVIDIA-SMI ")
_DF = re.compile(rb"(?m)^Filesystem +.*Mounted on")
_PYSPY = re.compile(rb"(?m)^Process \d+: .*\nPython v\d")

# States of jobs and steps, in sacct's and scontrol's words: cause, and what part they play.
_STATES = {
    "COMPLETED": ("none", "completed"),
    "TIMEOUT": ("scheduler.time_limit", "root"),
    "DEADLINE": ("scheduler.time_limit", "root"),
    "PREEMPTED": ("scheduler.preempted", "root"),
    "NODE_FAIL": ("scheduler.node_fail", "root"),
    "BOOT_FAIL": ("scheduler.node_fail", "root"),
    "OUT_OF_MEMORY": ("memory.host_oom", "root"),
    "LAUNCH_FAILED": ("scheduler.launch", "root"),
    "FAILED": ("unknown", "exit"),
}
# scontrol's Reason of a job that did not end by itself.
_REASONS = {
    "TimeLimit": "scheduler.time_limit",
    "OutOfMemory": "memory.host_oom",
    "NodeFail": "scheduler.node_fail",
    "NodeDown": "scheduler.node_fail",
    "JobLaunchFailure": "scheduler.launch",
    "launch_failed_requeued_held": "scheduler.launch",
    "BootFail": "scheduler.node_fail",
    "RaisedSignal:53": "program.config",
}


def kind_of(head: bytes) -> str:
    """sacct, scontrol, flight, kernel, nvidia-smi, df, stacks, or log."""
    start = head[:65_536]
    top = b"\n".join(line for line in start[:4096].split(b"\n") if line.strip(b"+#$= \r")[:1])
    top = b"\n".join(top.split(b"\n")[:TOP])
    if start.lstrip()[:1] == b"{" and b'"collective_seq_id"' in head[:262_144]:
        return "flight"
    for kind, pattern in (("sacct", _SACCT), ("scontrol", _SCONTROL)):  # a log may have either further down
        if pattern.search(top):
            return kind
    if stacks.is_dump(head):
        return "stacks"
    for kind, pattern in (("nvidia-smi", _SMI), ("df", _DF), ("stacks", _PYSPY)):
        if pattern.search(top):
            return kind
    lines = start.count(b"\n") or 1
    return "kernel" if len(_KERNEL.findall(start)) * 2 > lines else "log"


def signs_of_record(kind: str, name: str, text: str) -> list[Sign]:
    return _of_sacct(name, text) if kind == "sacct" else _of_scontrol(name, text)


def _of_sacct(name: str, text: str) -> list[Sign]:
    """A table by sacct, with or without -P: of the job what its last row says, of its steps what memory took."""
    lines = [line for line in text.splitlines() if line.strip()]
    at = next((index for index, line in enumerate(lines) if re.match(r" *JobID", line)), None)
    if at is None:
        return []
    split = _by_bar if "|" in lines[at] else _by_column(lines[at], lines[at + 1] if at + 1 < len(lines) else "")
    head = [column.strip() for column in split(lines[at])]
    found: list[Sign] = []
    jobs: dict[str, Sign] = {}
    for number, line in enumerate(text.splitlines(), 1):
        cells = dict(zip(head, (cell.strip() for cell in split(line)), strict=False))
        job = cells.get("JobID") or cells.get("JobIDRaw") or ""
        state = cells.get("State", "")
        if not re.match(r"\d", job) or not state:
            continue
        sign = _of_state(
            name,
            number,
            line.strip(),
            state,
            cells.get("ExitCode", ""),
            cells.get("End", ""),
            cells.get("NodeList", ""),
        )
        if sign is None:
            continue
        if "." not in job:
            jobs[job] = sign
        elif sign.cause == "memory.host_oom" and not job.endswith(".extern"):
            found.append(sign)
    return found + list(jobs.values())


def _by_bar(line: str) -> list[str]:
    return line.split("|")


def _by_column(head: str, rule: str) -> Any:
    if re.fullmatch(r"[- ]+", rule.strip() or "x"):
        spans = [(match.start(), match.end()) for match in re.finditer(r"-+", rule)]
        return lambda line: [line[start : end + 1] for start, end in spans]
    return lambda line: re.split(r" {2,}|\t", line.strip())


def _of_state(name: str, number: int, line: str, state: str, exit_code: str, end: str, node: str) -> Sign | None:
    word = state.split()[0].rstrip("+")
    cause, role = _STATES.get(word, ("", ""))
    if word.startswith("CANCELLED"):
        by = re.search(r"by (\d+)", state)
        cause, role = "scheduler.cancelled", "echo" if by and by[1] == "0" else "root"
    if not role:
        match = next((full for full in _STATES if len(word) >= 4 and full.startswith(word)), None)
        if match is None:
            return None
        cause, role = _STATES[match]
    code, _, number_of_signal = exit_code.partition(":")
    groups = {"code": code} if code.isdigit() and code != "0" else {}
    if number_of_signal.isdigit() and number_of_signal != "0":
        if exit_code == "0:125":
            cause, role = "memory.host_oom", "root"
        elif int(number_of_signal) < 65:
            groups = {"signal": number_of_signal}
    if role == "exit" and node and re.fullmatch(r"[\w.-]+", node):
        groups["node"] = node
    return Sign(name, number, line, cause, role, Prefix(stamp=_moment(end), is_dated=True), groups=groups, of="slurm")


def _moment(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _of_scontrol(name: str, text: str) -> list[Sign]:
    """What `scontrol show job` prints of one job, or of several."""
    found: list[Sign] = []
    for record in re.finditer(r"(?ms)^\s*JobId=\d+ .*?(?=^\s*JobId=\d+ |\Z)", text):
        words = dict(re.findall(r"(\w+)=(\S*)", record[0]))
        start = text.count("\n", 0, record.start()) + 1
        offset = next((index for index, line in enumerate(record[0].split("\n")) if "JobState=" in line), 0)
        line = record[0].split("\n")[offset].strip()
        node = words.get("NodeList", "")
        sign = _of_state(
            name,
            start + offset,
            line,
            words.get("JobState", ""),
            words.get("ExitCode", ""),
            words.get("EndTime", ""),
            node,
        )
        if sign is None:
            continue
        if (cause := _REASONS.get(words.get("Reason", ""))) and sign.role != "completed":
            sign.cause, sign.role = cause, "root"
        found.append(sign)
    return found


# Flight recorders.


@dataclass(slots=True)
class Flight:
    """Which collective operations one rank has begun: by group and sequence number, what each was."""

    name: str
    rank: int
    begun: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def last(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for group, number in self.begun:
            found[group] = max(found.get(group, 0), number)
        return found


def flight_of(name: str, text: str) -> Flight | None:
    """A flight recorder's dump as JSON, the newest operations of each group; nothing is ever unpickled."""
    begun: dict[str, dict[int, str]] = {}
    try:
        told = json.loads(text)
        rank = untrusted.count(told.get("rank", _number_in(name)), MOST_RANKS)
        for entry in told["entries"][-MOST_ENTRIES:]:
            operation = str(entry.get("profiling_name", "?"))
            group = f"{operation.partition(':')[0]} {entry.get('process_group', '')}"
            sizes = json.dumps(entry.get("input_sizes", ""))[:200]
            number = untrusted.count(entry["collective_seq_id"])
            if number is not None:
                calls = begun.setdefault(untrusted.plain(group[:200]), {})
                calls[number] = untrusted.plain(f"{operation.rpartition(':')[2]} of {sizes}"[:400])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if rank is None:
        return None
    newest = {(group, number): calls[number] for group, calls in begun.items() for number in sorted(calls)[-NEWEST:]}
    return Flight(name, rank, newest)


def _number_in(name: str) -> int:
    found = re.findall(r"\d+", name.rpartition("/")[2])
    return int(found[-1][:6]) if found else -1


def signs_of_flights(flights: Sequence[Flight]) -> list[Sign]:
    """Ranks that called something else than the others at the same place of a group, else those that are behind."""
    if len(flights) < 2:
        return []
    found: list[Sign] = []
    by_place: dict[tuple[str, int], dict[int, str]] = {}
    for flight in flights:
        for place, what in flight.begun.items():
            by_place.setdefault(place, {})[flight.rank] = what
    for place, called in sorted(by_place.items(), key=lambda one: (one[0][1], one[0][0])):
        usual, count = Counter(called.values()).most_common(1)[0]
        odd = [rank for rank, what in called.items() if what != usual]
        if odd and count >= len(odd):
            rank = min(odd)
            text = f"rank {rank} called {called[rank]}, the others {usual} (collective {place[1]} of group {place[0]})"
            name = next(flight.name for flight in flights if flight.rank == rank)
            found.append(Sign(name, 1, text, "collective.mismatch", "root", Prefix(rank=rank), of="flight"))
            break
    if found:
        return found
    most: dict[str, int] = {}
    for flight in flights:
        for group, number in flight.last.items():
            most[group] = max(most.get(group, 0), number)
    lag = {flight.rank: sum(most[group] - number for group, number in flight.last.items()) for flight in flights}
    worst = max(lag.values())
    behind = sorted(rank for rank, count in lag.items() if count == worst)
    if worst and len(behind) < len(flights):
        name = next(flight.name for flight in flights if flight.rank == behind[0])
        text = f"rank {behind[0]} is {worst} collectives behind the others"
        found.append(Sign(name, 1, text, "collective.timeout", "confirmation", Prefix(rank=behind[0]), of="flight"))
    return found
