"""Write the short texts of a job's row in a list. Pure."""

from __future__ import annotations

from typing import Any

from jobs.presenting.metric_values import number
from jobs.presenting.size import size
from vigil_core import formatting


def progress_text(
    *, step: int | None, steps: int | None, unit: str, state: str, phase: str, spec: dict[str, Any]
) -> str:
    """Return the text under the progress bar: the progress, or what the job waits for."""
    if step is not None:
        done = formatting.count(step)
        return f"{done} / {formatting.count(steps)}" if steps else f"{unit} {done}"
    if state == "pending":
        needs = size(spec)
        return f"needs {needs}" if needs else formatting.MISSING
    return phase or formatting.MISSING


def speed_text(latest: dict[str, Any]) -> str:
    """Return "290 k tok/s" if the job reports its throughput; else ""."""
    for name, unit in (("tokens_per_second", "tok/s"), ("samples_per_second", "samples/s")):
        if (value := number(latest, name)) is not None:
            return f"{formatting.measure(value)}{formatting.NBSP}{unit}"
    return ""
