"""Write the waste report as sentences."""

from __future__ import annotations

from jobs.presenting.price import price_text
from jobs.waste.report import OUTSIDE_VIGIL, AllocatedHours, WasteFilter, WasteReport
from vigil_core import formatting

MIN_SHOWN_HOURS = 0.05  # hours that would be shown as 0


def summary(found: WasteReport, filters: WasteFilter, idle_gpus: int) -> tuple[str, str]:
    """Return what was allocated, used and idle in these days, who had most idle hours, and what is idle now."""
    total = found.total
    when = "Today" if filters.days == 1 else f"In the last {formatting.plural(filters.days, 'day')},"
    if not total.allocated:
        return f"{when} no GPU-hours were counted.", now(idle_gpus)
    share = formatting.percent(total.share)
    of = "it" if figure(total.allocated) == "1" else "them"
    lead = (
        f"{when} {hours(total.allocated)} {_were(total.allocated)} allocated and {share} of {of} used; {_idle(total)}"
    )
    most = found.most
    if most is not None and most.hours.idle >= MIN_SHOWN_HOURS:
        lead += (
            f", {_most_idle(most.name, filters)} ({figure(most.hours.idle)})"
            if most.hours != total
            else f", {_most_idle(most.name, filters, all_of=True)}"
        )
    return f"{lead}.", now(idle_gpus)


def _most_idle(name: str, filters: WasteFilter, *, all_of: bool = False) -> str:
    """Return "most in vision", "most by mira", "all outside Vigil"."""
    relation = "" if name == OUTSIDE_VIGIL else "in " if filters.by == "project" else "by "
    return f"{'all' if all_of else 'most'} {relation}{name}"


def now(gpus: int) -> str:
    if not gpus:
        return "No allocated GPU is idle now."
    return f"{formatting.plural(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} allocated and idle now."


def hours(value: float) -> str:
    """Return "1,204 GPU-hours", "0.5 GPU-hours", "1 GPU-hour"."""
    return f"{figure(value)}{formatting.NBSP}GPU-{'hour' if figure(value) == '1' else 'hours'}"


def figure(value: float) -> str:
    """Return whole hours; below ten with one decimal."""
    return formatting.count(round(value)) if value >= 9.95 else f"{value:.1f}".removesuffix(".0")


def cells(hours: AllocatedHours) -> dict[str, str]:
    """Return the figures for a table, to at least a tenth of an hour, and the cost of idle hours."""
    texts = {name: _cell(getattr(hours, name)) for name in ("allocated", "used", "idle")}
    return {**texts, "idle_cost": price_text(hours.idle) if hours.idle else ""}


def _cell(value: float) -> str:
    return (
        "< 0.1" if 0 < value < MIN_SHOWN_HOURS else formatting.count(round(value)) if value >= 99.95 else f"{value:.1f}"
    )


def _were(value: float) -> str:
    return "was" if figure(value) == "1" else "were"


def _idle(total: AllocatedHours) -> str:
    if total.idle < MIN_SHOWN_HOURS:
        return "none were idle"
    price = price_text(total.idle)
    return f"{figure(total.idle)}{f' ({price})' if price else ''} {_were(total.idle)} idle"
