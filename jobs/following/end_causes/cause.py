"""Find out in one word why an attempt ended, from the scheduler's state and exit code and the launcher's result.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.intake.wire import storable
from training.config.exit_codes import STOPPED
from vigil_core.masking import masked

# The causes, in one word each, with the sentence that pages show.
CAUSE_TEXTS = {
    "completed": "Completed.",
    "cancelled": "Cancelled.",
    "stopped": "Stopped on request after saving a checkpoint.",
    "unsaved": "Stopped on request with exit code 0 before it was done, without a checkpoint to resume from.",
    "preempted": "Preempted: the scheduler gave its nodes to another job.",
    "requeued": "Requeued by a person or by the scheduler.",
    "node_fail": "A node failed.",
    "forgotten": "The scheduler no longer knows the job.",
    "permission": "Its Unix user has no access to its run directory.",
    "launch": "A node could not start it.",
    "lost": "A process was killed from outside.",
    "hang": "A rank stopped making progress.",
    "exception": "The program raised an exception.",
    "diverged": "Loss or gradient diverged.",
    "nonfinite": "Loss or gradient became NaN or infinite.",
    "corruption": "Results that must be identical differ: some hardware is faulty.",
    "out_of_memory": "Out of memory.",
    "timeout": "It reached its time limit before it could save.",
    "unmet": "A job that it depends on did not complete.",
    "rejected": "The scheduler rejected it.",
    "fenced": "A newer launch of the same job had taken over.",
    "withdrawn": "Its restart was withdrawn: a later finding shows that it would fail again.",
    "failed": "The program exited with an error.",
}
# The cause of a run whose numbers cannot be trusted, by the trainer's name for the error.
NUMERICS = {"divergence": "diverged", "nonfinite": "nonfinite", "corruption": "corruption"}
_NUMERICS = re.compile(rf"(?:[\w.]+\.)?NumericsError: numerics\.({'|'.join(NUMERICS)}): (.+)")

MAX_LINES, MAX_LINE_LENGTH = 3, 200  # quoted from the end of a log, as many as the launcher sends


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt, according to the scheduler and the launcher."""

    state: str
    exit_code: int | None = None
    signal: int | None = None
    result: Mapping[str, Any] | None = None  # result.json
    cancelled: bool = False  # a person requested it
    forgotten: bool = False  # the scheduler no longer knows it
    launch_failure: str = ""  # permission or launch: its batch script was never started (launch_failure.py)

    @classmethod
    def from_result(cls, result: Mapping[str, Any] | None, *, cancelled: bool) -> AttemptEnd:
        """Return the end of a job that the scheduler has forgotten, by the launcher's result where there is one."""
        if result is None:
            return cls("failed", cancelled=cancelled, forgotten=True)
        code = result.get("exit_code")
        exit_code = code if type(code) is int and 0 <= code < 256 else None
        return cls("completed" if exit_code == 0 else "failed", exit_code, result=result, cancelled=cancelled)


def cause_of(ended: AttemptEnd) -> tuple[str, dict[str, Any]]:
    """Return the cause in one word, and the first failure that the launcher saw."""
    result = ended.result or {}
    failure = _parse_failure(result.get("first_failure"))
    if ended.state == "completed":
        return "completed", failure
    if ended.cancelled or ended.state == "cancelled":
        return "cancelled", failure
    if ended.forgotten:
        return "forgotten", failure
    if ended.state == "failed" and _ran_out_of_time(result):
        return "timeout", failure
    if ended.exit_code == STOPPED or (result.get("cause") == "stopped" and not _is_stop_explained(ended)):
        return "stopped", failure
    if ended.state in {"preempted", "requeued"}:
        return ended.state, failure
    if ended.state in {"node_fail", "boot_fail"}:
        return "node_fail", failure
    if ended.state in {"timeout", "deadline"}:
        return "timeout", failure
    if ended.state == "out_of_memory":
        return "out_of_memory", failure
    return _cause_of_failure(ended, failure), failure


def _ran_out_of_time(result: Mapping[str, Any]) -> bool:
    """Return whether it reached its time limit before it had saved, whether it heeded the warning or not."""
    is_unsaved = result.get("cause") in {"stopped", "stop_timeout"} and result.get("exit_code") != STOPPED
    return is_unsaved and result.get("asked") == "time_limit"


def _is_stop_explained(ended: AttemptEnd) -> bool:
    """Return whether the scheduler explains why it had to stop, while its launcher could not save."""
    code = (ended.result or {}).get("exit_code")
    return ended.state not in {"failed", "timeout", "deadline"} and code not in {None, STOPPED}


def _cause_of_failure(ended: AttemptEnd, failure: Mapping[str, Any]) -> str:
    """Return the cause of a plain `failed`: by the launcher's word on the first rank, else by the exit code."""
    if ended.launch_failure:
        return ended.launch_failure
    causes = {"hang": "hang", "stop_timeout": "hang", "node": "node_fail", "fenced": "fenced", "unsaved": "unsaved"}
    if (cause := causes.get(str((ended.result or {}).get("cause")))) is not None:
        return cause
    kind = failure.get("kind")
    if kind == "exception" and (numerics := numerics_of(failure)):
        return numerics[0]
    if kind in {"exception", "hang"}:
        return str(kind)
    if kind == "gpu":
        return "exception"
    if kind in {"signal", "lost_peer", "node", "address_in_use"}:
        return "lost"
    if ended.signal or (ended.exit_code or 0) > 128:
        return "lost"
    return "failed"


def numerics_of(failure: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the cause and the message of our trainer's guards, where they ended the run (training.guards.numerics)."""
    found = _NUMERICS.match(str(failure.get("error", "")))
    return (NUMERICS[found[1]], found[2][:1].upper() + found[2][1:]) if found else None


def _parse_failure(value: object) -> dict[str, Any]:
    """Return the first failure with known fields only: the file comes from the job, so none of it is trusted."""
    if not isinstance(value, dict):
        return {}
    failure: dict[str, Any] = {}
    for name in ("rank", "incarnation", "exit_code", "signal"):
        if isinstance(value.get(name), int) and not isinstance(value[name], bool) and abs(value[name]) < 2**31:
            failure[name] = value[name]
    for name, longest in (("kind", 32), ("error", 2000)):
        if isinstance(value.get(name), str):
            failure[name] = masked(storable(value[name])[: 2 * longest])[
                :longest
            ]  # a secret that is cut in two would not be found
    if lines := value.get("last_lines"):
        failure["last_lines"] = _lines(lines)
    return failure


def _lines(value: object) -> list[str]:
    """Return the lines that the launcher quotes from the end of a log, with secrets masked, within bounds."""
    lines = [line for line in value if isinstance(line, str)] if isinstance(value, list) else []
    text = "\n".join(storable(line)[: 2 * MAX_LINE_LENGTH] for line in lines[-MAX_LINES:])
    return [line[:MAX_LINE_LENGTH] for line in masked(text).split("\n") if line.strip()]


def describe_failure(failure: Mapping[str, Any], cause: str) -> str:
    """Return how the first rank failed, in words for people: its error, else its exit code with its last output.

    The last lines of a program that names no error are context and not a reason, so they are labelled. Empty where the
    launcher reported neither, or where the attempt's cause says more than an exit code.
    """
    rank, error, code = failure.get("rank"), str(failure.get("error") or "").strip(), failure.get("exit_code")
    if error:
        return f"Rank {rank}: {error}" if rank is not None else error
    if cause not in {"exception", "failed"} or failure.get("kind") != "exception" or code is None:
        return ""
    who = f"Rank {rank}" if rank is not None else "It"
    lines = failure.get("last_lines")
    if not lines:
        return f"{who} ended with exit code {code} and printed no error."
    return f"{who} ended with exit code {code}. Its log names no error and ends with: {' / '.join(lines)}"
