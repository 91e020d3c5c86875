"""Export open health entries and the breaker for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from django.db.models import Count

from nodes.health.rules.rule import ACTIONS, SEVERITIES
from nodes.models import HealthControl, HealthEntry
from nodes.monitoring.site_rules import rules_in_force
from vigil_core.exposition import Family, Value

Decision = HealthEntry.EntryDecision
State = HealthEntry.EntryState


def families() -> Iterator[Family]:
    """Yield every metric family, with a 0 for each severity and action that has no entry."""
    rows = HealthEntry.objects.of_real_nodes().active().exclude(state=State.WATCHING).order_by()
    grouped = rows.values_list("state", "decision", "severity", "action").annotate(Count("pk"))
    number: dict[tuple[str, ...], Value] = dict.fromkeys(((s, a) for s in SEVERITIES for a in ACTIONS), 0)
    waiting = 0
    for state, decision, severity, action, count in grouped:
        if state == State.OPEN:
            number[severity, action] = number.get((severity, action), 0) + count
            waiting += count if decision == Decision.PROPOSED else 0
    yield Family(
        "vigil_health_open", "gauge", "Open health entries; those that somebody dismissed are left out.",
        ("severity", "action"), sorted(number.items()),
    )  # fmt: skip
    yield Family("vigil_health_waiting", "gauge", "Open entries that wait for a decision.", (), [((), waiting)])
    yield from _by_rule()
    tripped = HealthControl.objects.filter(pk=HealthControl.ID, tripped_at__isnull=False).exists()
    description = "1: one rule opened on many nodes at once, and Vigil does nothing automatically."
    yield Family("vigil_health_breaker_tripped", "gauge", description, (), [((), int(tripped))])


def _by_rule() -> Iterator[Family]:
    """Yield the open entries by rule, and those of them whose severity is that of the rule's escalation."""
    rules = rules_in_force()
    raised = {
        name: rule.escalation.severity
        for name, rule in rules.items()
        if rule.escalation is not None and rule.escalation.severity != rule.severity
    }
    by_rule, escalated = dict.fromkeys(rules, 0), dict.fromkeys(raised, 0)
    rows = HealthEntry.objects.of_real_nodes().open().order_by().values_list("rule", "severity")
    for name, severity, count in rows.annotate(Count("pk")):
        by_rule[name] = by_rule.get(name, 0) + count
        if severity == raised.get(name):
            escalated[name] += count
    for metric, text, numbers in (
        ("vigil_health_rule_open", "Open health entries by rule.", by_rule),
        ("vigil_health_rule_escalated", "Open entries by rule whose severity rose: the rule opened again.", escalated),
    ):
        yield Family(metric, "gauge", text, ("rule",), [((name,), count) for name, count in sorted(numbers.items())])
