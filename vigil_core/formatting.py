"""Format numbers, times, durations and states in one place, for pages, messages and the command line.

No Django. Times are in the process's zone: the site's in the portal (TZ, which Django sets), a person's at a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

NBSP = "\N{NO-BREAK SPACE}"
MISSING = "–"

# Rare states of Slurm share the glyph and colour of a common one.
FAMILY = {"boot_fail": "node_fail", "deadline": "timeout", "requeued": "pending"}


def word(state: str) -> str:
    """Return Slurm's state for people: `out_of_memory` is "out of memory", `down+reboot_issued` two states."""
    return state.replace("_", " ").replace("+", " and ")


def family(state: str) -> str:
    """Return the state family, which decides glyph and colour."""
    return FAMILY.get(state, state)


def _non_finite(value: float | None) -> str | None:
    """Return the text for None, NaN and infinities; None for finite numbers."""
    if value is None:
        return MISSING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return None


def _signed(text: str) -> str:
    return text.replace("-", "−")


def count(value: int | None) -> str:
    """Return a whole number, grouped from 1,000."""
    return MISSING if value is None else _signed(f"{value:,}")


SMALL_LOSS = 0.01  # static/js/words.js has the same


def loss(value: float | None) -> str:
    """Return a loss with three decimals; below 0.01 with three significant digits: 1.278, 0.00412, 4.1e-5."""
    if (odd := _non_finite(value)) is not None or value is None:
        return odd or MISSING
    return measure(value) if abs(value) < SMALL_LOSS else _signed(f"{value:,.3f}")


def series_value(name: str, value: float | str | None) -> str:
    """Return a value of a series, by its name; non-finite numbers arrive as words."""
    if isinstance(value, str):
        return value
    return loss(value) if name.endswith("loss") else measure(value)


def measure(value: float | None) -> str:
    """Return three significant digits: 0.43, 2.55, 41.1, 305, 9,412, 290 k, 1.24 M."""
    if (odd := _non_finite(value)) is not None or value is None:
        return odd or MISSING
    size = abs(value)
    if size and size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return _signed(f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}")
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= factor * 0.9995:
            scale = 1e3 if letter == "k" else factor
            return _signed(f"{_three_digits(value / scale)}{NBSP}{letter}")
    return _signed(_three_digits(value))


def _three_digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{float(f'{value:.3g}'):g}"


def percent(fraction: float | None) -> str:
    """Return a fraction in per cent with three significant digits; 1 is 100 %."""
    if (odd := _non_finite(fraction)) is not None or fraction is None:
        return odd or MISSING
    return _signed(f"{_three_digits(fraction * 100)}{NBSP}%")


def share(fraction: float | None) -> str:
    """Return progress in whole per cent, 100 only when it is done."""
    if (odd := _non_finite(fraction)) is not None or fraction is None:
        return odd or MISSING
    return f"{min(99, round(fraction * 100)) if fraction < 1 else 100}{NBSP}%"


def disk(size: float | None) -> str:
    """Return bytes on a disk, in powers of ten: 81.4 GB."""
    return _scaled(size, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def memory(size: float | None) -> str:
    """Return bytes of memory, in powers of two: 79.1 GiB."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def money(value: float, currency: str) -> str:
    """Return an amount with two decimals, a sign before it or a word after it: €19.80, 19.80 CHF."""
    amount = _signed(f"{value:,.2f}")
    return f"{amount}{NBSP}{currency}" if currency.isalpha() and len(currency) > 1 else f"{currency}{amount}"


def _scaled(size: float | None, base: int, units: tuple[str, ...]) -> str:
    if (odd := _non_finite(size)) is not None or size is None:
        return odd or MISSING
    for unit in units[:-1]:
        if abs(size) < base * 0.9995:
            return f"{_three_digits(size)}{NBSP}{unit}"
        size /= base
    return f"{_three_digits(size)}{NBSP}{units[-1]}"


def duration(seconds: float | None) -> str:
    """Return a duration in up to two units: 6.18 ms, 0.43 s, 2.55 s, 38 s, 4 min 22 s, 18 h 04 min, 2 d 3 h."""
    if (odd := _non_finite(seconds)) is not None or seconds is None:
        return odd or MISSING
    seconds = max(0.0, seconds)
    if 0 < seconds < 0.01:
        return f"{measure(seconds * 1000)}{NBSP}ms"
    if seconds < 9.995:
        return f"{_three_digits(seconds)}{NBSP}s"
    total = round(seconds)
    if total < 60:
        return f"{total}{NBSP}s"
    if total < 3600:
        return _two_units(total // 60, "min", total % 60, "s")
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return _two_units(minutes // 60, "h", minutes % 60, "min")
    hours = round(seconds / 3600)
    return f"{hours // 24}{NBSP}d" + (f" {hours % 24}{NBSP}h" if hours % 24 else "")


def _two_units(big: int, big_unit: str, small: int, small_unit: str) -> str:
    return f"{big}{NBSP}{big_unit}" + (f" {small:02d}{NBSP}{small_unit}" if small else "")


def rough(seconds: float) -> str:
    """Return a duration in one unit: 12 s, 38 min, 14 h, 3 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)}{NBSP}{unit}"
    return f"{int(seconds)}{NBSP}s"


def rough_words(seconds: float) -> str:
    """Return a long duration in words: 38 minutes, 14 hours, 3 days."""
    minutes = int(seconds // 60)
    if minutes < 120:
        return plural(minutes, "minute")
    return plural(minutes // 60, "hour") if minutes < 48 * 60 else plural(minutes // 1440, "day")


def ago(then: datetime, now: datetime | None = None) -> str:
    """Return how long ago: 12 s ago, 38 min ago, 14 h ago, yesterday, 2 d ago, 2 Oct."""
    now = now or datetime.now(UTC)
    seconds = (now - then).total_seconds()
    if seconds < 1:
        return "now"
    if seconds < 86400:
        return f"{rough(seconds)} ago"
    days = (_local(now).date() - _local(then).date()).days
    if days <= 1:
        return "yesterday"
    return f"{days}{NBSP}d ago" if days < 14 else date(then, now)


def _local(then: datetime) -> datetime:
    try:
        return then.astimezone()
    except OverflowError:  # in the year 1 or 9999, which no page may fail on
        return then


def until(then: datetime, now: datetime | None = None) -> str:
    """Return how long until: in 16 h."""
    seconds = (then - (now or datetime.now(UTC))).total_seconds()
    return f"in {rough(seconds)}" if seconds >= 1 else "now"


def clock(then: datetime, now: datetime | None = None) -> str:
    """Return the time of day, with the day if that is not today: 09:14, Sun 01:08, 2 Oct 09:14."""
    now = _local(now or datetime.now(UTC))
    local = _local(then)
    days = abs((local.date() - now.date()).days)
    if not days:
        return f"{local:%H:%M}"
    return f"{local:%a}{NBSP}{local:%H:%M}" if days < 7 else f"{date(then, now)}{NBSP}{local:%H:%M}"


def date(then: datetime, now: datetime | None = None) -> str:
    """Return the day: 2 Oct, with the year if that is not this one."""
    local, this = _local(then), _local(now or datetime.now(UTC))
    text = f"{local.day}{NBSP}{local:%b}"
    return text if local.year == this.year else f"{text}{NBSP}{local.year}"


def second(then: datetime) -> str:
    """Return the time of day to the second, or to the millisecond where it has them: 03:01:09, 03:01:09.412."""
    local = _local(then)
    return f"{local:%H:%M:%S}" + (f".{local.microsecond // 1000:03d}" if local.microsecond >= 1000 else "")


def exact(then: datetime) -> str:
    """Return a time to the millisecond with the lab's zone: 2026-11-21 03:01:09.412 CET."""
    local = _local(then)
    return f"{local:%Y-%m-%d %H:%M:%S}.{local.microsecond // 1000:03d} {local:%Z}"


def minute(then: datetime) -> str:
    """Return a time to the minute, for texts that are read elsewhere or later: 29 Nov 2026, 09:14 CET."""
    local = _local(then)
    return f"{local.day}{NBSP}{local:%b}{NBSP}{local.year}, {local:%H:%M}{NBSP}{local:%Z}"


def machine_time(then: datetime) -> str:
    """Return a time in UTC, as a `datetime` attribute expects it."""
    return then.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plain_spaces(text: str) -> str:
    """Return the text with ordinary spaces, for terminals, files and clients of REST."""
    return text.replace(NBSP, " ")


def plural(number: int, singular: str, plural_form: str = "") -> str:
    """Return a number with its noun: "1 job", "2 jobs", "1,284 jobs"."""
    return f"{count(number)}{NBSP}{singular if number == 1 else plural_form or singular + 's'}"


def listed(things: Sequence[str], most: int | None = None) -> str:
    """Join with commas and "and": "a", "a and b", "a, b and c"; beyond `most`: "a, b and 7 more"."""
    if most is not None and len(things) > most:
        things = [*things[:most], f"{len(things) - most:,} more"]
    return f"{', '.join(things[:-1])} and {things[-1]}" if len(things) > 1 else "".join(things)
