"""Build the body of POST /job/submit from a Submission, in the old form of REST v0.0.38 or the new one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nodes.schedulers.base import Submission
from nodes.schedulers.slurm.versions import NEW_JOB_FORM, NODES_BY_NAME, OLDEST, SCRIPT_IN_JOB, Version

PATH = "/usr/local/bin:/usr/bin:/bin"
MAX_NAME_LENGTH = 200


def job_name(submission: Submission) -> str:
    """Return the user's job name with the key appended, so that accounting can be searched for it."""
    return f"{submission.name[:MAX_NAME_LENGTH]}.{submission.key}"


def comment(submission: Submission) -> str:
    return f"vigil:{submission.key}"


def needs_node_update(submission: Submission, version: Version) -> bool:
    """Return whether this version cannot express the submission's wanted or excluded nodes.

    The job is then submitted on hold and changed before it may start.
    """
    return version < NODES_BY_NAME and bool(submission.required_nodes or submission.excluded_nodes)


def array_expression(tasks: Sequence[int], at_once: int | None) -> str:
    """Return Slurm's array expression such as "0-19%4": ascending numbers, and how many may run at once."""
    spans: list[list[int]] = []
    for task in sorted(tasks):
        if spans and task == spans[-1][1] + 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    expression = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{expression}%{at_once}" if at_once is not None else expression


def request(submission: Submission, script: str, version: Version, *, array: str = "") -> dict[str, Any]:
    """Return the body of POST /job/submit. `array` is an expression like "0-19%4"."""
    job = _new_form(submission) if version >= NEW_JOB_FORM else _old_form(submission)
    if array:
        job["array"] = array
    if version >= SCRIPT_IN_JOB:
        return {"job": {"script": script, **job}}
    return {"script": script, "job": job}


def _common(submission: Submission) -> dict[str, Any]:
    """Return the fields that have the same name in both forms."""
    job: dict[str, Any] = {
        "name": job_name(submission),
        "comment": comment(submission),
        "current_working_directory": submission.directory,
        "standard_output": submission.output,
        "standard_input": "/dev/null",
        "tasks_per_node": 1,  # a launcher on each node; it starts the ranks
        "cpus_per_task": submission.cpus_per_node,
        "requeue": True,
    }
    optional = {
        "account": submission.account,
        "partition": submission.partition,
        "qos": submission.qos,
        "reservation": submission.reservation,
        "constraints": submission.constraint,
        "licenses": submission.licenses,
    }
    return job | {name: value for name, value in optional.items() if value}


def _old_form(submission: Submission) -> dict[str, Any]:
    """Build the job for v0.0.38.

    It reads no #SBATCH lines, has no fields for required or excluded nodes, and signals only steps (the launchers).
    """
    job = _common(submission) | {
        "environment": _environment(submission),
        "nodes": _node_range(submission),  # a list is accepted as well, but yields one node
        "time_limit": minutes(submission.time_limit_s),
        "open_mode": "append",
        "signal": f"USR1@{submission.grace_s}",
    }
    if submission.gpus_per_node:
        job["gres"] = gres(submission)
    if submission.memory_mib_per_node:
        job["memory_per_node"] = submission.memory_mib_per_node
    if submission.exclusive:
        job["exclusive"] = "exclusive"  # neither "true" nor true works
    if submission.begin_at is not None:
        job["begin_time"] = f"uts{math.ceil(submission.begin_at)}"
    if submission.survives_node_loss:
        job["no_kill"] = "set"
    if submission.max_nodes > submission.min_nodes:
        del job["tasks_per_node"]  # with it 22.05 grants only min_nodes; srun gets it anyway
    if needs_node_update(submission, OLDEST):
        job["hold"] = True
    return job


def _new_form(submission: Submission) -> dict[str, Any]:
    job = _common(submission) | {
        "environment": [f"{name}={value}" for name, value in _environment(submission).items()],
        "nodes": _node_range(submission),
        "time_limit": _number(minutes(submission.time_limit_s)),
        "open_mode": ["APPEND"],
        "kill_warning_signal": "USR1",
        "kill_warning_delay": _number(submission.grace_s),
        "kill_warning_flags": ["BATCH_JOB"],
    }
    if submission.gpus_per_node:
        job["tres_per_node"] = f"gres/{gres(submission)}"
    if submission.memory_mib_per_node:
        job["memory_per_node"] = _number(submission.memory_mib_per_node)
    if submission.exclusive:
        job["shared"] = ["none"]
    if submission.begin_at is not None:
        job["begin_time"] = _number(math.ceil(submission.begin_at))
    if submission.required_nodes:
        job["required_nodes"] = list(submission.required_nodes)
    if submission.excluded_nodes:
        job["excluded_nodes"] = list(submission.excluded_nodes)
    if submission.survives_node_loss:
        job["kill_on_node_fail"] = False
    return job


def gres(submission: Submission) -> str:
    kind = f"{submission.gpu_type}:" if submission.gpu_type else ""
    return f"gpu:{kind}{submission.gpus_per_node}"


def minutes(seconds: int) -> int:
    """Round up to whole minutes, Slurm's unit for time limits."""
    return max(1, math.ceil(seconds / 60))


def _environment(submission: Submission) -> dict[str, str]:
    """Return a job's environment from an allow list: nothing of the portal's environment."""
    return {"PATH": PATH, "LANG": "C.UTF-8", **submission.environment}


def _node_range(submission: Submission) -> str:
    return (
        str(submission.min_nodes)
        if submission.max_nodes == submission.min_nodes
        else f"{submission.min_nodes}-{submission.max_nodes}"
    )


def _number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}
