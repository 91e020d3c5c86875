"""Describe how often a job saves checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.presenting.price import price_text
from jobs.reliability.save_interval import MIN_GAIN
from vigil_core import formatting

_SOURCES = {"config": "as configured", "seen": "observed on its nodes", "assumed": "assumed"}
MAX_EVERY = 10**9


@dataclass(frozen=True, kw_only=True)
class CadenceFacts:
    """The save intervals of a job. They are in seconds from one save to the next.

    `efficiency` is the share of time that is useful training at the present interval, `best_efficiency` at the best
    one.
    """

    cost_s: float
    present_s: float | None
    best_s: float
    is_automatic: bool
    aim_s: float | None
    """The interval that an automatic trainer aims at, by the time between failures given to it at its start."""
    mtbf_s: float
    source: str
    """Source of the time between failures: config (set by a person), seen (observed here), assumed."""
    efficiency: float | None
    best_efficiency: float
    step_s: float | None
    gpus: int
    left_s: float | None

    @property
    def gain(self) -> float:
        return max(0.0, self.best_efficiency - self.efficiency) if self.efficiency is not None else 0.0

    @property
    def is_worth_it(self) -> bool:
        return self.gain >= MIN_GAIN and not self.is_automatic

    @property
    def best_every(self) -> int | None:
        """Return the best interval in steps; None if the duration of a step is unknown."""
        return min(MAX_EVERY, max(1, round(self.best_s / self.step_s))) if self.step_s else None

    @property
    def gpu_hours_a_day(self) -> float:
        """Return what the difference to the best interval costs per day."""
        return 24 * self.gain * self.gpus

    @property
    def gpu_hours_left(self) -> float | None:
        """Return what the difference costs for the rest of the run; None if its end is unknown."""
        return None if self.left_s is None else self.left_s / 3600 * self.gain * self.gpus


def summary(cadence: CadenceFacts) -> tuple[str, str]:
    """Return two sentences: whether the job saves as often as it should, and what the difference costs."""
    best = formatting.duration(cadence.best_s)
    if cadence.is_automatic:
        aim = formatting.duration(cadence.aim_s) if cadence.aim_s else best
        return "The save interval is chosen automatically.", f"It is approaching {aim}."
    if cadence.present_s is None:
        return "It saves only at the end.", f"A failure would lose all its work. The best interval is {best}."
    every = f"It saves every {formatting.duration(cadence.present_s)}"
    if not cadence.is_worth_it:
        least = formatting.percent(MIN_GAIN)
        return (
            f"{every}, which is close to the best interval.",
            f"Saving every {best} would gain less than {least} of its time.",
        )
    gain = formatting.percent(cadence.gain)
    now = formatting.duration(cadence.present_s)
    return f"Saving every {best} instead of every {now} would leave {gain} more time for training.", _cost(cadence)


def facts(cadence: CadenceFacts, unit: str = "step") -> list[tuple[str, str]]:
    """Return (title, value) pairs for the page. `unit` is the job's unit of progress: "step" or "round"."""
    best_part = formatting.percent(1 - cadence.best_efficiency)
    now, part = [], f"{best_part} of the time at best"
    if cadence.present_s is not None and cadence.efficiency is not None:
        now = [("Now", f"every {formatting.duration(cadence.present_s)}")]
        part = f"{formatting.percent(1 - cadence.efficiency)} of the time, {best_part} at best"
    return [
        ("A save costs", formatting.duration(cadence.cost_s)),
        ("Between failures", f"{formatting.duration(cadence.mtbf_s)}, {_SOURCES[cadence.source]}"),
        *now,
        ("Best", f"every {formatting.duration(cadence.best_s)}{_steps(cadence.best_every, unit)}"),
        ("Saves and lost work", part),
    ]


def _steps(every: int | None, unit: str) -> str:
    return f", {formatting.plural(every, unit)}" if every else ""


def _cost(cadence: CadenceFacts) -> str:
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
