"""A Submission as slurmrestd wants it: the old form of REST v0.0.38, the new one since, and arrays of either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nodes.schedulers.base import Submission
from nodes.schedulers.slurm.versions import NEW_FORM, NODES_BY_NAME, OLDEST, SCRIPT_IN_JOB, Version

PATH = "/usr/local/bin:/usr/bin:/bin"
LONGEST_NAME = 200


def job_name(asked: Submission) -> str:
    """The person's own name with the key behind it: what accounts can be searched for."""
    return f"{asked.name[:LONGEST_NAME]}.{asked.key}"


def comment(asked: Submission) -> str:
    return f"vigil:{asked.key}"


def lacks_nodes(asked: Submission, version: Version) -> bool:
    """Whether this version cannot be told which nodes are wanted, or not: the job is changed before it may start."""
    return version < NODES_BY_NAME and bool(asked.required_nodes or asked.excluded_nodes)


def array_of(tasks: Sequence[int], at_once: int | None) -> str:
    """ "0-19%4": numbers in ascending order as Slurm writes them, and how many of them run at the same time."""
    spans: list[list[int]] = []
    for task in sorted(tasks):
        if spans and task == spans[-1][1] + 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    told = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{told}%{at_once}" if at_once is not None else told


def request(asked: Submission, script: str, version: Version, *, array: str = "") -> dict[str, Any]:
    """The body of POST /job/submit. `array`: "0-19%4"."""
    job = _new(asked) if version >= NEW_FORM else _old(asked)
    if array:
        job["array"] = array
    if version >= SCRIPT_IN_JOB:
        return {"job": {"script": script, **job}}
    return {"script": script, "job": job}


def _common(asked: Submission) -> dict[str, Any]:
    """What both forms call the same."""
    job: dict[str, Any] = {
        "name": job_name(asked),
        "comment": comment(asked),
        "current_working_directory": asked.directory,
        "standard_output": asked.output,
        "standard_input": "/dev/null",
        "tasks_per_node": 1,  # a launcher on each node; it starts the ranks
        "cpus_per_task": asked.cpus_per_node,
        "requeue": True,
    }
    optional = {
        "account": asked.account,
        "partition": asked.partition,
        "qos": asked.qos,
        "reservation": asked.reservation,
        "constraints": asked.constraint,
        "licenses": asked.licenses,
    }
    return job | {name: value for name, value in optional.items() if value}


def _old(asked: Submission) -> dict[str, Any]:
    """v0.0.38. It reads no #SBATCH lines, knows no fields for nodes by name, and warns steps (the launchers) alone."""
    job = _common(asked) | {
        "environment": _environment(asked),
        "nodes": _span(asked),  # of a list, which it takes as well, it makes one node
        "time_limit": minutes(asked.time_limit_s),
        "open_mode": "append",
        "signal": f"USR1@{asked.grace_s}",
    }
    if asked.gpus_per_node:
        job["gres"] = gres(asked)
    if asked.memory_mib_per_node:
        job["memory_per_node"] = asked.memory_mib_per_node
    if asked.exclusive:
        job["exclusive"] = "exclusive"  # and neither "true" nor true
    if asked.begin_at is not None:
        job["begin_time"] = f"uts{math.ceil(asked.begin_at)}"
    if asked.goes_on:
        job["no_kill"] = "set"
    if asked.max_nodes > asked.min_nodes:
        del job["tasks_per_node"]  # with it 22.05 grants the fewest nodes; srun is told all the same
    if lacks_nodes(asked, OLDEST):
        job["hold"] = True
    return job


def _new(asked: Submission) -> dict[str, Any]:
    job = _common(asked) | {
        "environment": [f"{name}={value}" for name, value in _environment(asked).items()],
        "nodes": _span(asked),
        "time_limit": _number(minutes(asked.time_limit_s)),
        "open_mode": ["APPEND"],
        "kill_warning_signal": "USR1",
        "kill_warning_delay": _number(asked.grace_s),
        "kill_warning_flags": ["BATCH_JOB"],
    }
    if asked.gpus_per_node:
        job["tres_per_node"] = f"gres/{gres(asked)}"
    if asked.memory_mib_per_node:
        job["memory_per_node"] = _number(asked.memory_mib_per_node)
    if asked.exclusive:
        job["shared"] = ["none"]
    if asked.begin_at is not None:
        job["begin_time"] = _number(math.ceil(asked.begin_at))
    if asked.required_nodes:
        job["required_nodes"] = list(asked.required_nodes)
    if asked.excluded_nodes:
        job["excluded_nodes"] = list(asked.excluded_nodes)
    if asked.goes_on:
        job["kill_on_node_fail"] = False
    return job


def gres(asked: Submission) -> str:
    kind = f"{asked.gpu_type}:" if asked.gpu_type else ""
    return f"gpu:{kind}{asked.gpus_per_node}"


def minutes(seconds: int) -> int:
    """Slurm counts time limits in whole minutes."""
    return max(1, math.ceil(seconds / 60))


def _environment(asked: Submission) -> dict[str, str]:
    """A job's environment, by an allow list: nothing of the portal's own."""
    return {"PATH": PATH, "LANG": "C.UTF-8", **asked.environment}


def _span(asked: Submission) -> str:
    return str(asked.min_nodes) if asked.max_nodes == asked.min_nodes else f"{asked.min_nodes}-{asked.max_nodes}"


def _number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}
