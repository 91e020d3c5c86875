"""Describe an attempt's Slurm steps: how each `srun` ended, according to Slurm's accounting."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from training.config.exit_codes import STOPPED

_NAMES = {"batch": "the batch script", "extern": "the external step", "interactive": "the shell"}


@dataclass
class SlurmSteps:
    """`wrong` says whether a step failed, which the summary then names. Stopping to be resumed is not a failure."""

    summary: str
    lines: list[str]
    wrong: bool


def describe_steps(reported: Iterable[object], *, is_attached: bool) -> SlurmSteps | None:
    """Return the steps; None if Slurm reported none."""
    steps = [step for step in reported if isinstance(step, dict)]
    if not steps:
        return None
    lines = [_line(step, _stopped(step, is_attached=is_attached)) for step in steps]
    others = [(step, line) for step, line in zip(steps, lines, strict=True) if step.get("state") != "completed"]
    total = f"{len(steps)} Slurm step{'s' * (len(steps) != 1)}"
    if not others:
        return SlurmSteps(f"{total}, all completed", lines, wrong=False)
    wrong = [line for step, line in others if not _stopped(step, is_attached=is_attached)]
    if not wrong:
        return SlurmSteps(f"{total}, stopped to be resumed", lines, wrong=False)
    first = wrong[0] + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
    return SlurmSteps(f"{total}: {first}", lines, wrong=True)


def _stopped(step: dict[str, Any], *, is_attached: bool) -> bool:
    """Return whether the launcher stopped the step with a checkpoint to be resumed.

    The exit code may mean something else for programs of attached jobs.
    """
    return step.get("exit_code") == STOPPED and not step.get("signal") and not is_attached


def _line(step: dict[str, Any], stopped: bool) -> str:
    number, name = str(step.get("number", "")), str(step.get("name", ""))
    what = _NAMES.get(number) or f"step {number}" + (f" ({name})" if name else "")
    how = "stopped to be resumed" if stopped else str(step.get("state", "")).replace("_", " ")
    parts = [f"{what} {how}"]
    if (code := step.get("exit_code")) or step.get("state") == "failed":
        parts.append(f"exit {code}" if code is not None else "no exit code")
    if number_of := step.get("signal"):
        parts.append(_signal(number_of))
    if nodes := step.get("nodes"):
        parts.append(f"on {', '.join(nodes[:8])}" + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""))
    return ", ".join(parts)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
