"""Describe how often a job saves checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.presenting.cost import price_text
from jobs.reliability.save_interval import LEAST_GAIN
from vigil_core import formatting

if TYPE_CHECKING:
    from jobs.gathering.cadence import SaveCadence

_SOURCES = {"config": "as configured", "seen": "observed on its nodes", "assumed": "assumed"}


def summary(cadence: SaveCadence) -> tuple[str, str]:
    """Return two sentences: whether the job saves as often as it should, and what the difference costs."""
    best = formatting.duration(cadence.best_s)
    if cadence.is_automatic:
        aim = formatting.duration(cadence.aim_s) if cadence.aim_s else best
        return "The save interval is chosen automatically.", f"It is approaching {aim}."
    if cadence.present_s is None:
        return "It saves only at the end.", f"A failure would lose all its work. The best interval is {best}."
    every = f"It saves every {formatting.duration(cadence.present_s)}"
    if not cadence.is_worth_it:
        least = formatting.percent(LEAST_GAIN)
        return (
            f"{every}, which is close to the best interval.",
            f"Saving every {best} would gain less than {least} of its time.",
        )
    gain = formatting.percent(cadence.gain)
    return f"{every}; every {best} would leave {gain} more of its time for training.", _cost(cadence)


def facts(cadence: SaveCadence, counts: str = "step") -> list[tuple[str, str]]:
    """Return (title, value) pairs for the page. `counts` is the job's unit of progress: "step" or "round"."""
    best_part = formatting.percent(1 - cadence.best_efficiency)
    now, part = [], f"{best_part} of the time at best"
    if cadence.present_s is not None and cadence.efficiency is not None:
        now = [("Now", f"every {formatting.duration(cadence.present_s)}")]
        part = f"{formatting.percent(1 - cadence.efficiency)} of the time, {best_part} at best"
    return [
        ("A save costs", formatting.duration(cadence.cost_s)),
        ("Between failures", f"{formatting.duration(cadence.mtbf_s)}, {_SOURCES[cadence.source]}"),
        *now,
        ("Best", f"every {formatting.duration(cadence.best_s)}{_steps(cadence.best_every, counts)}"),
        ("Saves and lost work", part),
    ]


def _steps(every: int | None, counts: str) -> str:
    return f", {formatting.plural(every, counts)}" if every else ""


def _cost(cadence: SaveCadence) -> str:
    if not cadence.gpus:
        return ""
    text = f"That is {_hours(cadence.gpu_hours_a_day)} a day"
    if (left := cadence.gpu_hours_left) is not None:
        text += f", {_hours(left)} for what is left"
    return f"{text}."


def _hours(gpu_hours: float) -> str:
    """Return GPU-hours with their cost, if the site has set a price."""
    text = f"{formatting.measure(gpu_hours)}{formatting.NBSP}GPU-hours"
    price = price_text(gpu_hours)
    return f"{text} ({price})" if price else text
