"""Waste in a sentence."""

from __future__ import annotations

from jobs.presenting.cost import price_text
from jobs.waste.reading import Found, Hours, Wanted
from portal import formatting

LITTLE = 0.05  # hours: what would be written as 0


def say(found: Found, wanted: Wanted, idle_gpus: int) -> tuple[str, str]:
    """What was held, used and idle in these days and whose most of it was; and what is idle now."""
    total = found.total
    when = "Today" if wanted.days == 1 else f"In {formatting.plural(wanted.days, 'day')}"
    if not total.held:
        return f"{when} no GPU-hours were counted.", now(idle_gpus)
    share = formatting.percent(total.share)
    told = f"{when} {hours(total.held)} {_were(total.held)} held and {share} used; {_idle(total)}"
    most = found.most
    if most is not None and most.hours.idle >= LITTLE:
        told += f": most by {most.name} ({figure(most.hours.idle)})" if most.hours != total else f", all by {most.name}"
    return f"{told}.", now(idle_gpus)


def now(gpus: int) -> str:
    if not gpus:
        return "No GPU is held idle now."
    return f"{formatting.plural(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} held idle now."


def hours(value: float) -> str:
    """ "1,204 GPU-hours", "0.5 GPU-hours", "1 GPU-hour"."""
    return f"{figure(value)}{formatting.NBSP}GPU-{'hour' if figure(value) == '1' else 'hours'}"


def figure(value: float) -> str:
    """Whole hours, of few their tenths."""
    return formatting.count(round(value)) if value >= 9.95 else f"{value:.1f}".removesuffix(".0")


def cells(hours: Hours) -> dict[str, str]:
    """Its figures as a table has them: none shorter than a tenth of an hour; and what the idle ones cost."""
    told = {name: _cell(getattr(hours, name)) for name in ("held", "used", "idle")}
    return {**told, "idle_cost": price_text(hours.idle) if hours.idle else ""}


def _cell(value: float) -> str:
    return "< 0.1" if 0 < value < LITTLE else formatting.count(round(value)) if value >= 99.95 else f"{value:.1f}"


def _were(value: float) -> str:
    return "was" if figure(value) == "1" else "were"


def _idle(total: Hours) -> str:
    if total.idle < LITTLE:
        return "none were idle"
    price = price_text(total.idle)
    return f"{figure(total.idle)}{f' ({price})' if price else ''} {_were(total.idle)} idle"
