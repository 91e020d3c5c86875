"""Read what `sacct` and `scontrol show job` print, as signs with the line that each comes from."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from diagnosis.logs.prefixes import Prefix
from diagnosis.signs.sign import Sign

MAX_BYTES = 2 << 20  # of one file

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


def signs_of_record(kind: str, name: str, text: str) -> list[Sign]:
    """Return the signs of a table by sacct (`kind` is "sacct") or of `scontrol show job`."""
    return _sacct_signs(name, text) if kind == "sacct" else _scontrol_signs(name, text)


def _sacct_signs(name: str, text: str) -> list[Sign]:
    """Read a table by sacct, with or without -P: the job's last row, and steps that were killed for memory."""
    lines = [line for line in text.splitlines() if line.strip()]
    at = next((index for index, line in enumerate(lines) if re.match(r" *JobID", line)), None)
    if at is None:
        return []
    split = (
        _split_at_bars
        if "|" in lines[at]
        else _column_splitter(lines[at], lines[at + 1] if at + 1 < len(lines) else "")
    )
    head = [column.strip() for column in split(lines[at])]
    signs: list[Sign] = []
    jobs: dict[str, Sign] = {}
    for number, line in enumerate(text.splitlines(), 1):
        cells = dict(zip(head, (cell.strip() for cell in split(line)), strict=False))
        job = cells.get("JobID") or cells.get("JobIDRaw") or ""
        state = cells.get("State", "")
        if not re.match(r"\d", job) or not state:
            continue
        sign = _sign_of_state(
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
            signs.append(sign)
    return signs + list(jobs.values())


def _split_at_bars(line: str) -> list[str]:
    return line.split("|")


def _column_splitter(head: str, rule: str) -> Any:
    if re.fullmatch(r"[- ]+", rule.strip() or "x"):
        spans = [(match.start(), match.end()) for match in re.finditer(r"-+", rule)]
        return lambda line: [line[start : end + 1] for start, end in spans]
    return lambda line: re.split(r" {2,}|\t", line.strip())


def _sign_of_state(name: str, number: int, line: str, state: str, exit_code: str, end: str, node: str) -> Sign | None:
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
    return Sign(
        name,
        number,
        line,
        cause=cause,
        role=role,
        prefix=Prefix(stamp=_unix_time(end), is_dated=True),
        groups=groups,
        source_kind="slurm",
    )


def _unix_time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _scontrol_signs(name: str, text: str) -> list[Sign]:
    """Read what `scontrol show job` prints of one or several jobs."""
    signs: list[Sign] = []
    for record in re.finditer(r"(?ms)^\s*JobId=\d+ .*?(?=^\s*JobId=\d+ |\Z)", text):
        words = dict(re.findall(r"(\w+)=(\S*)", record[0]))
        start = text.count("\n", 0, record.start()) + 1
        offset = next((index for index, line in enumerate(record[0].split("\n")) if "JobState=" in line), 0)
        line = record[0].split("\n")[offset].strip()
        node = words.get("NodeList", "")
        sign = _sign_of_state(
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
        signs.append(sign)
    return signs
