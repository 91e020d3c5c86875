"""Judge an incarnation that has ended: restart the ranks, or end the attempt with an outcome."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from training.config.exit_codes import STOPPED
from training.launch.failures import RankFailure, first_failure
from training.launch.plan import LaunchPlan
from training.launch.script_progress import ScriptProgress
from training.launch.stop import AttemptStop

PORT_TRIES = 3
SAVE_FAILED = "CheckpointError: "  # begins the last line of a rank that trained but could not save


@dataclass(frozen=True)
class Outcome:
    """How the attempt ends. `cause`: completed, stopped, unsaved, failed, hang, stop_timeout, fenced, node.

    `node`: fewer nodes are left than the job needs; with exit code 75 it is worth requeueing at once.
    `stop_reason`: time_limit, cancel or signal, where the attempt was asked to stop.
    """

    exit_code: int
    cause: str
    first_failure: RankFailure | None = None
    incarnation: int = 0
    error: str = ""
    stop_reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of result.json."""
        first = self.first_failure
        return {
            "exit_code": self.exit_code,
            "cause": self.cause,
            "asked": self.stop_reason,
            "error": self.error or (first.summary if first else ""),
            "first_failure": {**first.to_dict(), "incarnation": self.incarnation} if first else None,
        }


class RestartBudget:
    """Counts restarts in place: `in_place` of them are allowed, and a new checkpoint refills the budget."""

    def __init__(self, in_place: int, newest: str, used: int = 0, ports: int = 0) -> None:
        self._in_place, self._newest = in_place, newest
        self._used, self._ports = used, ports

    @property
    def spent(self) -> dict[str, Any]:
        """State that the next leader continues from."""
        return {"newest": self._newest, "used": self._used, "ports": self._ports}

    def grant(self, failure: RankFailure, newest: str) -> bool:
        """Return whether one more start is granted after this failure. `newest`: the newest checkpoint now."""
        if failure.kind == "address_in_use":  # another program took the port between our probe and the rank's bind
            self._ports += 1
            return self._ports <= PORT_TRIES
        if newest != self._newest:
            self._newest, self._used = newest, 0
        self._used += 1
        return self._used <= self._in_place


@dataclass(frozen=True, kw_only=True)
class EndedIncarnation:
    """An incarnation whose ranks have all ended, and what a restart would start from."""

    number: int
    failures: list[RankFailure]
    abort: dict[str, Any] | None
    """Why the launchers ended it, if they did: its `reason` is grace, hang or fenced."""
    newest: str
    """The name of the newest checkpoint now."""
    started_from: str
    """The name of the checkpoint that it started from."""
    start_is_damaged: bool = False
    """Whether the ranks found that checkpoint damaged, and nobody chose it, so that an older one will do."""
    regroups: bool = False
    """Whether the ranks were asked to save and end so that more nodes can take part; the budget does not count that."""
    progress: ScriptProgress | None = None
    """Of a script that was asked to stop."""
    has_spares: bool = False
    """Whether another node stands by."""


def judge(ended: EndedIncarnation, *, stop: AttemptStop, budget: RestartBudget) -> Outcome | None:
    """Return the attempt's outcome, or None if the ranks are to be restarted."""
    failures, progress, regroups = ended.failures, ended.progress, ended.regroups
    reason = ended.abort["reason"] if ended.abort else ""
    if reason == "fenced":
        return Outcome(1, "fenced", error="a newer launch of this job has taken over")
    if stop.reason and stop.is_saved and not (progress and progress.is_done and not failures):
        return Outcome(STOPPED, "stopped")  # whatever happened to a rank after that, nothing is lost
    if reason == "grace":
        error = "the ranks did not stop within the grace time and were killed"
        return Outcome(137, "stop_timeout", error=error, stop_reason=stop.reason)
    if not failures and progress and progress.is_unfinished:
        return Outcome(STOPPED, "stopped") if progress.has_saved else Outcome(1, "unsaved", error=progress.description)
    if not failures:
        # The run may have completed at that very step: then the next incarnation only reports so.
        return None if regroups else Outcome(0, "completed")
    first = first_failure(failures)
    cause = first.kind if first.kind in {"hang", "node"} else "failed"
    if regroups and not stop.reason and first.kind == "lost_peer":
        return None  # one rank left before another had closed its connection
    if stop.reason and first.signal == signal.SIGTERM:
        # A script with no other way to stop. A checkpoint that it saved meanwhile is worth resuming from.
        return Outcome(
            STOPPED if ended.newest != ended.started_from else first.code, "stopped", stop_reason=stop.reason
        )
    # A rank that failed to save for a regroup would have kept training without one: do not end the attempt for it.
    may_help = (
        first.may_restart(spares=ended.has_spares)
        or ended.start_is_damaged
        or (regroups and first.error.startswith(SAVE_FAILED))
    )
    if stop.reason or not may_help or not budget.grant(first, ended.newest):
        # Only the launcher may ask for a requeue (exit code 75): a program that uses it could be requeued forever.
        code = 1 if first.code == STOPPED and not stop.reason else first.code
        return Outcome(code, cause, first, ended.number)
    return None


def write_exit_code(plan: LaunchPlan, code: int) -> None:
    """Write the exit code for the batch script, if there is one: srun passes on only the highest code of all nodes."""
    with suppress(OSError):
        if plan.exchange_dir.is_dir():
            temporary = plan.exchange_dir / f".code.{os.getpid()}"
            temporary.write_text(f"{code}\n")
            os.replace(temporary, plan.exchange_dir / "code")
