"""Write the reliability report as sentences: rates with their intervals, times between failures, and outliers."""

from __future__ import annotations

from jobs.failures.report import FailureFilter, FailureReport
from jobs.presenting.price import price_text
from jobs.reliability.forecast import Forecast
from jobs.reliability.offenders import Offender
from jobs.reliability.published import TYPICAL_RATE
from jobs.reliability.rate import AssumedRate, Rate
from vigil_core import formatting
from vigil_core.formatting import MISSING

DAY_S = 86_400.0
TOO_FEW = "too few"
KINDS = {"all": "failure", "machines": "machine failure", "programs": "program failure"}


def summary(found: FailureReport, filters: FailureFilter) -> tuple[str, str]:
    """Return what failed in these days and how often, and which node stands out."""
    rate = found.total.rate
    when = "today" if filters.days == 1 else f"in the last {formatting.plural(filters.days, 'day')}"
    if not rate.node_days:
        return f"No node was allocated {when}.", "Rates appear minutes after the first job has ended."
    singular = KINDS[filters.kind]
    plural = singular.replace("failure", "failures", 1)
    node_days = f"{formatting.measure(rate.node_days)} node-days"
    if not rate.failures:
        which = "Nothing" if filters.kind == "all" else f"No {filters.kind}"
        return f"{which} failed {when}, over {node_days}.", ""
    often, ends = per_thousand(rate)
    failures = formatting.plural(rate.failures, singular, plural)
    lead = f"{failures} {when}, over {node_days}: {often} per 1,000 node-days ({ends})."
    days, between = mtbf(rate)
    also = (
        f"Mean time between failures per node: {days} ({between})."
        if not rate.is_few
        else "Too few failures to estimate the time between failures."
    )
    return lead, " ".join([also, *(_stands_out(offender) for offender in found.offenders[:1])])


def _stands_out(offender: Offender) -> str:
    how = "across different programs" if offender.is_node else "mostly in one program"
    times = f"{offender.times:.1f}" if offender.times < 9.95 else formatting.count(round(offender.times))
    return f"{offender.counts.node} fails {times}× as often as expected from its node-days, {how}."


def per_thousand(rate: Rate) -> tuple[str, str]:
    """Return the rate and its interval: "6.2", "4.1 to 9"."""
    ends = rate.per_thousand_interval
    if ends is None:
        return MISSING, ""
    return formatting.measure(rate.per_thousand), _between(*ends)


def mtbf(rate: Rate) -> tuple[str, str]:
    """Return the mean time between failures of a node and its interval: "160 d", "110 d to 241 d"; or "too few"."""
    days, ends = rate.mtbf_days, rate.mtbf_days_interval
    if days is None or ends is None:
        return (TOO_FEW if rate.node_days else MISSING), ""
    low, high = (formatting.rough(day * DAY_S) for day in ends)
    return formatting.duration(days * DAY_S), f"{low} to {high}"


def lost(gpu_hours: float) -> tuple[str, str]:
    """Return GPU-hours, and their cost if the site has set a price."""
    hours = formatting.count(round(gpu_hours)) if gpu_hours >= 9.95 else f"{gpu_hours:.1f}".removesuffix(".0")
    return hours, price_text(gpu_hours)


def _chance(chance: float) -> str:
    return formatting.percent(chance) if chance >= 0.001 else f"less than 0.1{formatting.NBSP}%"


def _days(days: float) -> str:
    return formatting.plural(int(days), "day") if days == int(days) else f"{formatting.measure(days)} days"


def _between(low: float, high: float) -> str:
    return f"{formatting.measure(low)} to {formatting.measure(high)}"


def forecast_text(found: Forecast) -> tuple[str, str]:
    """Return a forecast in two sentences: how many failures to expect, and how often to save."""
    plan = found.plan
    run = f"{formatting.plural(plan.nodes, 'node')} for {_days(plan.days)}"
    if isinstance(found.rate, AssumedRate):
        published = f"Meta's published rate of {TYPICAL_RATE} per 1,000 node-days"
        basis = f"Too few failures were observed here, so {published} is used."
        many = formatting.measure(found.failures)
    else:
        basis = ""
        many = f"{formatting.measure(found.failures)} ({_between(found.failures_low, found.failures_high)})"
    fails = f"{run}: expect {many} {'failure' if many == '1' else 'failures'}, one every"
    chance, share = _chance(found.no_failure_probability), formatting.percent(found.best_useful_share)
    lead = f"{fails} {formatting.duration(found.mtbf_seconds)}; the chance of none is {chance}."
    best = f"The best save interval is {formatting.duration(found.best_seconds)}: {share}"
    return lead, f"{best} of the time is then useful training. {basis}".strip()
