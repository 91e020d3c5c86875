"""Forecast failures from the rate observed here, or from published rates if too few failures were observed."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.failures.report import FailureReport
from jobs.reliability.forecast import Forecast, Plan, forecast
from jobs.reliability.published import TYPICAL_RATE
from jobs.reliability.rate import THOUSAND, AssumedRate, Rate
from vigil_core import untrusted

MAX_NODES, MAX_DAYS, MAX_SECONDS = 100_000, 366, 86_400
NODES, DAYS = 8, 14
SAVE_S, RESTART_S = 30.0, 300.0


def from_observed(plan: Plan, observed: Rate) -> Forecast:
    is_enough = not observed.is_few and observed.node_days
    return forecast(plan, observed if is_enough else AssumedRate(TYPICAL_RATE / THOUSAND))


def plan_of(nodes: int, days: float, save: float | None, restart: float | None, recover: float | None) -> Plan:
    """Return the plan with defaults filled in: a restart takes as long as it has taken here."""
    restart = restart if restart is not None else recover or RESTART_S
    return Plan(nodes, days, save if save is not None else SAVE_S, restart)


def from_form(params: Mapping[str, str], found: FailureReport) -> Forecast:
    """Return the forecast for the form's fields; invalid fields are treated as empty."""
    nodes, days = untrusted.whole(params.get("nodes"), MAX_NODES + 1), _number(params.get("for"), MAX_DAYS)
    save, restart = (_number(params.get(name), MAX_SECONDS) for name in ("save", "restart"))
    plan = plan_of(nodes or NODES, days or DAYS, save or None, restart, found.total.recover_s)
    return from_observed(plan, found.interruptions)


def _number(text: str | None, most: float) -> float | None:
    try:
        return untrusted.number(float(text or ""), most)
    except ValueError:
        return None
