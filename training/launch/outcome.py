"""What follows when all ranks of an incarnation have ended: the leader's judgement, and the attempt's last word."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from training.config.exit_codes import STOPPED
from training.launch.failures import Failure, first_failure
from training.launch.left import Left
from training.launch.plan import Plan
from training.launch.stop import Stop

PORT_TRIES = 3
SAVE_FAILED = "CheckpointError: "  # as the last line of a rank that has trained for a while


@dataclass(frozen=True)
class Outcome:
    """How the attempt ends. `cause`: completed, stopped, unsaved, failed, hang, stop_timeout, fenced, node.

    `node`: fewer nodes are left than the job can do with. With exit code 75 it is worth being queued again at once.
    `asked`: to stop, by what: time_limit, cancel, signal.
    """

    exit_code: int
    cause: str
    first_failure: Failure | None = None
    incarnation: int = 0
    error: str = ""
    asked: str = ""

    def told(self) -> dict[str, Any]:
        """result.json."""
        first = self.first_failure
        return {
            "exit_code": self.exit_code,
            "cause": self.cause,
            "asked": self.asked,
            "error": self.error or (first.summary if first else ""),
            "first_failure": {**first.told(), "incarnation": self.incarnation} if first else None,
        }


class Budget:
    """Restarts in place that are left: `in_place` of them, all of them again after each new commit."""

    def __init__(self, in_place: int, newest: str, used: int = 0, ports: int = 0) -> None:
        self._in_place, self._newest = in_place, newest
        self._used, self._ports = used, ports

    @property
    def spent(self) -> dict[str, Any]:
        """What whoever leads next goes on from."""
        return {"newest": self._newest, "used": self._used, "ports": self._ports}

    def take(self, failure: Failure, newest: str) -> bool:
        """Whether one more start is granted after this failure, `newest` being the newest commit now."""
        if failure.kind == "address_in_use":  # somebody took the port between our look and the rank's bind
            self._ports += 1
            return self._ports <= PORT_TRIES
        if newest != self._newest:
            self._newest, self._used = newest, 0
        self._used += 1
        return self._used <= self._in_place


def judge(
    failures: list[Failure],
    *,
    incarnation: int,
    broken: dict[str, Any] | None,
    stop: Stop,
    budget: Budget,
    newest: str,
    started_from: str,
    start_is_damaged: bool = False,
    regroups: bool = False,
    left: Left | None = None,
    spares: bool = False,
) -> Outcome | None:
    """The attempt's outcome, or None: start the ranks again. `newest` and `started_from` are checkpoints' names.

    `start_is_damaged`: the ranks found it to be no good, and nobody chose it: an older one will do. `regroups`: they
    were asked to save and end so that more nodes can take part, which the budget does not count. `left`: what a script
    said of how far it was, where it was asked to stop. `spares`: another node stands by.
    """
    reason = broken["reason"] if broken else ""
    if reason == "fenced":
        return Outcome(1, "fenced", error="a newer launch of this job has taken over")
    if stop.reason and stop.saved and not (left and left.is_done and not failures):
        return Outcome(STOPPED, "stopped")  # whatever became of a rank after that: nothing is lost
    if reason == "grace":
        error = "the ranks did not stop within the grace time and were killed"
        return Outcome(137, "stop_timeout", error=error, asked=stop.reason)
    if not failures and left and left.is_undone:
        return Outcome(STOPPED, "stopped") if left.has_saved else Outcome(1, "unsaved", error=left.told)
    if not failures:
        # Perhaps it was completed at that very step: then the next incarnation has nothing to do but say so.
        return None if regroups else Outcome(0, "completed")
    first = first_failure(failures)
    cause = first.kind if first.kind in {"hang", "node"} else "failed"
    if regroups and not stop.reason and first.kind == "lost_peer":
        return None  # one rank left before another had hung up
    if stop.reason and first.signal == signal.SIGTERM:
        # A script that knows no better way to stop. What it committed on its way is worth going on from.
        return Outcome(STOPPED if newest != started_from else first.code, "stopped", asked=stop.reason)
    # That it could not save as it was asked to is no reason to end what would have gone on without being asked.
    may_help = first.in_place(spares=spares) or start_is_damaged or (regroups and first.error.startswith(SAVE_FAILED))
    if stop.reason or not may_help or not budget.take(first, newest):
        # To ask for another turn is for us: a program that nobody has asked to stop could have turns forever.
        code = 1 if first.code == STOPPED and not stop.reason else first.code
        return Outcome(code, cause, first, incarnation)
    return None


def tell_code(plan: Plan, code: int) -> None:
    """Tell the batch script the code, if there is one: from srun it hears only the highest code of all nodes."""
    with suppress(OSError):
        if plan.told.is_dir():
            temporary = plan.told / f".code.{os.getpid()}"
            temporary.write_text(f"{code}\n")
            os.replace(temporary, plan.told / "code")
