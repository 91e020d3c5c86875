"""Why an attempt ended, in one word: the scheduler's state and exit code, and the launcher's last word. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.intake.wire import storable
from training.config.exit_codes import STOPPED
from vigil_core.masking import masked

# The causes, in one word each, and what a page says of them.
WORDS = {
    "completed": "It has done all that it was to do.",
    "cancelled": "Somebody cancelled it.",
    "stopped": "It was asked to stop, saved a checkpoint and ended.",
    "unsaved": "It was asked to stop and left with exit code 0 before it was done, with no checkpoint to go on from.",
    "preempted": "The scheduler took its nodes for another job.",
    "requeued": "It was put back into the queue, by somebody or by the scheduler.",
    "node_fail": "A node was lost.",
    "forgotten": "The scheduler does not know it any more.",
    "permission": "Its Unix user may not use its run directory.",
    "launch": "A node could not start it.",
    "lost": "A process was killed from outside.",
    "hang": "A rank did not move any more.",
    "exception": "The program raised an exception.",
    "diverged": "Its loss or gradient ran away.",
    "nonfinite": "Its loss or gradient was not finite.",
    "corruption": "What must come out the same did not: some hardware is broken.",
    "out_of_memory": "It ran out of memory.",
    "timeout": "It reached its time limit before it could save.",
    "unmet": "A job that it was to wait for did not complete.",
    "rejected": "The scheduler did not take it.",
    "fenced": "A newer launch of the same job had taken over.",
    "withdrawn": "What was found out since its start was decided says that it would fail again.",
    "failed": "The program ended with an error.",
}
# What ends a run whose numbers can't be trusted, by the trainer's word for it.
NUMERICS = {"divergence": "diverged", "nonfinite": "nonfinite", "corruption": "corruption"}
_NUMERICS = re.compile(rf"(?:[\w.]+\.)?NumericsError: numerics\.({'|'.join(NUMERICS)}): (.+)")

MOST_LINES, MOST_LINE = 3, 200  # quoted from the end of a log, as many as the launcher sends


@dataclass(frozen=True)
class Ended:
    """What is known of the end of an attempt: the scheduler's words, and the launcher's last one."""

    state: str
    exit_code: int | None = None
    signal: int | None = None
    result: Mapping[str, Any] | None = None  # result.json
    cancelled: bool = False  # a person asked for it
    forgotten: bool = False  # the scheduler cannot tell
    unlaunched: str = ""  # permission or launch: its batch script was never started (jobs.following.unlaunched)

    @classmethod
    def untold(cls, result: Mapping[str, Any] | None, *, cancelled: bool) -> Ended:
        """The end of a job that the scheduler has forgotten, by the launcher's last word if it had one."""
        if result is None:
            return cls("failed", cancelled=cancelled, forgotten=True)
        code = result.get("exit_code")
        known = code if type(code) is int and 0 <= code < 256 else None
        return cls("completed" if known == 0 else "failed", known, result=result, cancelled=cancelled)


def cause_of(ended: Ended) -> tuple[str, dict[str, Any]]:
    """The cause in one word, and the first failure that the launcher saw."""
    result = ended.result or {}
    failure = _failure(result.get("first_failure"))
    if ended.state == "completed":
        return "completed", failure
    if ended.cancelled or ended.state == "cancelled":
        return "cancelled", failure
    if ended.forgotten:
        return "forgotten", failure
    if ended.state == "failed" and _ran_out_of_time(result):
        return "timeout", failure
    if ended.exit_code == STOPPED or (result.get("cause") == "stopped" and not _is_told(ended)):
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
    """Whether the warning of its time limit ended it, or not heeding that, before it had saved anything."""
    is_unsaved = result.get("cause") in {"stopped", "stop_timeout"} and result.get("exit_code") != STOPPED
    return is_unsaved and result.get("asked") == "time_limit"


def _is_told(ended: Ended) -> bool:
    """Whether the scheduler says why it was asked to stop, and its launcher that it could not save."""
    code = (ended.result or {}).get("exit_code")
    return ended.state not in {"failed", "timeout", "deadline"} and code not in {None, STOPPED}


def _cause_of_failure(ended: Ended, failure: Mapping[str, Any]) -> str:
    """The cause of a plain `failed`: the launcher's word on the first rank if there is one, else the exit code's."""
    if ended.unlaunched:
        return ended.unlaunched
    known = {"hang": "hang", "stop_timeout": "hang", "node": "node_fail", "fenced": "fenced", "unsaved": "unsaved"}
    if (told := known.get(str((ended.result or {}).get("cause")))) is not None:
        return told
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
    """The cause and what the guards of our own trainer said, where they ended the run (training.guards.numerics)."""
    found = _NUMERICS.match(str(failure.get("error", "")))
    return (NUMERICS[found[1]], found[2][:1].upper() + found[2][1:]) if found else None


def _failure(value: object) -> dict[str, Any]:
    """The first failure in known shapes: the file comes from the job, so nothing of it is believed blindly."""
    if not isinstance(value, dict):
        return {}
    kept: dict[str, Any] = {}
    for name in ("rank", "incarnation", "exit_code", "signal"):
        if isinstance(value.get(name), int) and not isinstance(value[name], bool) and abs(value[name]) < 2**31:
            kept[name] = value[name]
    for name, longest in (("kind", 32), ("error", 2000)):
        if isinstance(value.get(name), str):
            kept[name] = masked(storable(value[name])[: 2 * longest])[:longest]  # no secret is cut before it is found
    if lines := value.get("last_lines"):
        kept["last_lines"] = _lines(lines)
    return kept


def _lines(value: object) -> list[str]:
    """Return the lines that the launcher quotes from the end of a log, with secrets masked, within bounds."""
    lines = [line for line in value if isinstance(line, str)] if isinstance(value, list) else []
    text = "\n".join(storable(line)[: 2 * MOST_LINE] for line in lines[-MOST_LINES:])
    return [line[:MOST_LINE] for line in masked(text).split("\n") if line.strip()]


def described(failure: Mapping[str, Any], cause: str) -> str:
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
