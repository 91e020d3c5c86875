"""What a script said of how far it was when it was asked to stop and left: exit code 0 alone does not tell.

Each rank that asked `vigil_report.stopping()` or told `progress` leaves `said-<incarnation>.<rank>.json` in the
attempt's folder. Any of them may have been the one to ask, so their words count together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.attempt.files import read_json


@dataclass(frozen=True)
class Left:
    """`is_done`: it has done all its steps, or says so. `has_saved`: this attempt has committed something."""

    is_done: bool = False
    has_heard: bool = False
    step: int | None = None
    steps: int | None = None
    has_saved: bool = False

    @property
    def is_undone(self) -> bool:
        """Whether it is known to have left before its end: it told of more steps, or stopped because it was asked."""
        return not self.is_done and (self.has_heard or self.steps is not None)

    @property
    def told(self) -> str:
        """What is told of a script that has saved nothing to go on from."""
        where = f" at step {self.step:,} of {self.steps:,}" if self.steps is not None else ""
        return f"it was asked to stop and left with exit code 0{where}, with no checkpoint reported since its start"


def read_left(folder: Path, incarnation: int, *, has_saved: bool) -> Left:
    """What the ranks of one incarnation left, all together."""
    words = list(_words(folder, incarnation))
    counted = [(said["step"], said["steps"]) for said in words if _is_count(said.get("step"), said.get("steps"))]
    step, steps = max(counted, default=(None, None))
    return Left(
        is_done=any(said.get("finished") is True for said in words) or any(one >= all_ for one, all_ in counted),
        has_heard=any(said.get("stopping") is True for said in words),
        step=step,
        steps=steps,
        has_saved=has_saved,
    )


def _words(folder: Path, incarnation: int) -> Iterator[Mapping[str, Any]]:
    for path in sorted(folder.glob(f"said-{incarnation}.*.json")):
        found = read_json(path)
        if isinstance(found, dict):
            yield found


def _is_count(step: object, steps: object) -> bool:
    return type(step) is int and type(steps) is int and steps > 0
