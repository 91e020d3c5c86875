"""Read how far a script was when it left after a stop request: its exit code 0 alone does not say.

Each rank that called `vigil_report.stopping()` or `progress` leaves `said-<incarnation>.<rank>.json` in the attempt's
folder. The script may call them on any rank, so the files are read together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.attempt.files import read_json


@dataclass(frozen=True)
class ScriptProgress:
    """How far a script was.

    `is_done`: all steps done, or reported finished. `has_saved`: this attempt saved a checkpoint.
    """

    is_done: bool = False
    has_noticed_stop: bool = False
    step: int | None = None
    steps: int | None = None
    has_saved: bool = False

    @property
    def is_unfinished(self) -> bool:
        """Return whether the script is known to have left before its end.

        It reported more steps than it did, or noticed the stop request.
        """
        return not self.is_done and (self.has_noticed_stop or self.steps is not None)

    @property
    def description(self) -> str:
        """Describe a script that left without a checkpoint to resume from."""
        where = f" at step {self.step:,} of {self.steps:,}" if self.steps is not None else ""
        return f"it was asked to stop and left with exit code 0{where}, with no checkpoint reported since its start"


def read_progress(folder: Path, incarnation: int, *, has_saved: bool) -> ScriptProgress:
    """Return the combined progress of all ranks of one incarnation."""
    reports = list(_reports(folder, incarnation))
    counted = [
        (report["step"], report["steps"]) for report in reports if _is_count(report.get("step"), report.get("steps"))
    ]
    step, steps = max(counted, default=(None, None))
    return ScriptProgress(
        is_done=any(report.get("finished") is True for report in reports)
        or any(done >= total for done, total in counted),
        has_noticed_stop=any(report.get("stopping") is True for report in reports),
        step=step,
        steps=steps,
        has_saved=has_saved,
    )


def _reports(folder: Path, incarnation: int) -> Iterator[Mapping[str, Any]]:
    for path in sorted(folder.glob(f"said-{incarnation}.*.json")):
        found = read_json(path)
        if isinstance(found, dict):
            yield found


def _is_count(step: object, steps: object) -> bool:
    return type(step) is int and type(steps) is int and steps > 0
