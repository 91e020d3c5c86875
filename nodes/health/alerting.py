"""Write alert rules for Prometheus and a dashboard for Grafana from the health rules. No Django.

    python -m nodes.health.alerting docs/monitoring    write alerts.yml and grafana.json into that folder

A rule of severity critical or fatal becomes an alert with its title and advice; one that only escalates to such a
severity becomes an alert on findings that have. Further alerts watch Vigil itself. A site that has rules of its own
runs it again with their TOML files after the folder. The site's rules are in the database:
docs/reference/metrics.md (Alerts) reads them over REST into one file for each rule, since a rule's text may begin with
values that would otherwise belong to the rule before it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nodes.health.rules.catalogue import active_rules
from nodes.health.rules.rule import Rule, parse_rules

ALERTING = ("critical", "fatal")
RULE_METRIC, ESCALATED_METRIC = "vigil_health_rule_open", "vigil_health_rule_escalated"
_PORTAL_ALERTS = (
    ("VigilDecisionWaits", "vigil_health_waiting > 0", "30m", "warning", "Findings wait for a decision on /health",
     "Drain or exclude the nodes, or dismiss or clear the findings: until then the nodes keep accepting jobs."),
    ("VigilBreakerTripped", "vigil_health_breaker_tripped == 1", "", "critical", "Vigil stopped acting by itself",
     "One rule fired on many nodes at once. Find out why, then reset the breaker on /health."),
    ("VigilMetricsMissing", "absent(vigil_health_waiting)", "5m", "critical", "Prometheus gets no metrics from Vigil",
     "The portal is down, or its token for /metrics is wrong: meanwhile no other alert can fire."),
    ("VigilAgentsDown",
     "count(vigil_agent_up == 0) >= 3 and count(vigil_agent_up == 0) / count(vigil_agent_up) > 0.2", "5m", "critical",
     "Three agents or more, and a fifth of all, do not report",
     "The portal, the network or an upgrade of the agents is at fault."),
    ("VigilCheckFailing", "vigil_check_ok == 0", "5m", "warning", "A check of the portal fails: {{ $labels.check }}",
     "Open /readyz or run `vigil check portal` on the portal's machine."),
    ("VigilRedisDown", "vigil_redis_up == 0", "2m", "critical", "Redis does not answer",
     "Live pages and tasks stand still; jobs go on."),
    ("VigilTasksWait", "vigil_task_queue_length > 1000", "10m", "warning", "Tasks pile up: {{ $labels.queue }}",
     "A worker is missing or hangs: see vigil_heartbeat_age_seconds."),
)  # fmt: skip
"""Name, expression, duration, severity, summary, what to do."""


def alerts(rules: Iterable[Rule]) -> str:
    """Return a file of alert rules in YAML."""
    lines = ["# Made from the health rules by `python -m nodes.health.alerting`; edit those instead.", "groups:"]
    lines += ["  - name: vigil-health", "    rules:"]
    for rule in rules:
        lines += _rule_alert(rule)
    lines += ["  - name: vigil-portal", "    rules:"]
    for name, expression, wait, severity, summary, description in _PORTAL_ALERTS:
        lines += _alert(name, expression, wait, severity, summary, description)
    return "\n".join(lines) + "\n"


def _rule_alert(rule: Rule) -> Iterator[str]:
    """Yield the alert of a rule that is critical or fatal, or may become so; nothing for others."""
    title, advice = _literal(rule.title), _literal(rule.advice) or "See /health."
    escalation = rule.escalation
    if rule.severity in ALERTING:
        if rule.action != "ignore":
            expression = f'{RULE_METRIC}{{rule="{rule.name}"}} > 0'
            yield from _alert(_alert_name(rule.name), expression, "", rule.severity, title, advice, action=rule.action)
    elif escalation is not None and escalation.severity in ALERTING and escalation.action != "ignore":
        expression = f'{ESCALATED_METRIC}{{rule="{rule.name}"}} > 0'
        name, summary = f"{_alert_name(rule.name)}Escalated", f"{title}, again and again"
        yield from _alert(name, expression, "", escalation.severity, summary, advice, action=escalation.action)


def _alert(
    name: str, expression: str, wait: str, severity: str, summary: str, description: str, **labels: str
) -> Iterator[str]:
    yield f"      - alert: {name}"
    yield f"        expr: {json.dumps(expression)}"
    if wait:
        yield f"        for: {wait}"
    yield f"        labels: {json.dumps({'severity': severity, **labels})}"
    yield "        annotations:"
    yield f"          summary: {json.dumps(summary, ensure_ascii=False)}"
    yield f"          description: {json.dumps(description, ensure_ascii=False)}"


def _alert_name(rule: str) -> str:
    return "Vigil" + "".join(part.capitalize() for part in rule.replace(".", "-").replace("_", "-").split("-"))


def _literal(text: str) -> str:
    """Return the text for an annotation, where Prometheus expands {{ … }}."""
    return text.replace("{{", '{{"{{"}}')


def dashboard(rules: Iterable[Rule]) -> str:
    """Return a dashboard that Grafana imports."""
    titles = {rule.name: rule.title for rule in rules}
    panels = list(_laid_out(_panels(titles)))
    source = {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}
    return json.dumps(
        {
            "__inputs": [source | {"description": "", "pluginName": "Prometheus"}],
            "title": "Vigil: cluster health", "uid": "vigil-health", "schemaVersion": 39, "version": 1,
            "tags": ["vigil"], "timezone": "browser", "refresh": "30s", "time": {"from": "now-6h", "to": "now"},
            "templating": {"list": []}, "annotations": {"list": []}, "panels": panels,
        },
        indent=1, ensure_ascii=False,
    ) + "\n"  # fmt: skip


Panel = dict[str, Any]


def _panels(titles: dict[str, str]) -> Iterator[Panel]:
    """Yield the panels with their width and height in grid units; a row is 24 units wide."""
    red: list[dict[str, Any]] = [{"color": "green", "value": None}, {"color": "red", "value": 1}]
    yield _panel("Wait for a decision", "stat", 4, 4, "vigil_health_waiting", steps=red)
    yield _panel("Fatal", "stat", 4, 4, 'sum(vigil_health_open{severity="fatal"})', steps=red)
    yield _panel("Critical", "stat", 4, 4, 'sum(vigil_health_open{severity="critical"})', steps=red)
    yield _panel("Warnings", "stat", 4, 4, 'sum(vigil_health_open{severity="warning"})')
    yield _panel("Silent agents", "stat", 4, 4, "count(vigil_agent_up == 0) or vector(0)", steps=red)
    yield _panel("Breaker", "stat", 4, 4, "vigil_health_breaker_tripped", steps=red)
    found = _panel("Open findings by rule", "bargauge", 12, 10, f"sort_desc({RULE_METRIC} > 0)", legend="{{rule}}")
    found["options"] = {"displayMode": "basic", "orientation": "horizontal"}
    found["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "displayName", "value": title}]}
        for name, title in titles.items()
    ]
    yield found
    history = "sum by (severity) (vigil_health_open)"
    yield _panel("Open findings", "timeseries", 12, 10, history, legend="{{severity}}")
    counter = "vigil_gpu_xid_total"  # a series begins with its first Xid, in which Prometheus sees no increase
    first = f"{counter} unless {counter} offset $__rate_interval"
    xids = f"sum by (node, xid) (increase({counter}[$__rate_interval]) > 0 or ({first}))"
    yield _panel("Xids", "timeseries", 12, 8, xids, legend="{{node}} Xid {{xid}}")
    hottest = "topk(10, vigil_gpu_temperature_celsius)"
    yield _panel("Hottest GPUs", "timeseries", 12, 8, hottest, legend="{{node}} GPU {{gpu}}", unit="celsius")
    free = "sum(vigil_node_gpus_free)"
    yield _panel("Free GPUs", "timeseries", 12, 8, free, legend="free")
    yield _panel("Queue", "timeseries", 12, 8, "sum by (state) (vigil_queue_jobs)", legend="{{state}}")


def _panel(
    title: str, kind: str, width: int, height: int, expression: str, *, legend: str = "", unit: str = "short",
    steps: list[dict[str, Any]] | None = None,
) -> Panel:  # fmt: skip
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    target = {"refId": "A", "datasource": source, "expr": expression, "legendFormat": legend or title}
    defaults: dict[str, Any] = {"unit": unit, "decimals": 0 if unit == "short" else None}
    if steps:
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "title": title, "type": kind, "datasource": source, "targets": [target],
        "gridPos": {"w": width, "h": height}, "fieldConfig": {"defaults": defaults, "overrides": []},
    }  # fmt: skip


def _laid_out(panels: Iterable[Panel]) -> Iterator[Panel]:
    """Number the panels and place them from left to right, row after row."""
    x = y = 0
    for number, panel in enumerate(panels, start=1):
        place = panel["gridPos"]
        if x + place["w"] > 24:
            x = 0
        yield {"id": number, **panel, "gridPos": {"x": x, "y": y, **place}}
        x += place["w"]
        if x >= 24:
            x, y = 0, y + place["h"]


def shipped_and(site: Iterable[Rule] = ()) -> list[Rule]:
    """Return all rules that may apply: those of VIGIL_HEALTH_STRICT, too, whose alerts fire nowhere else."""
    site = list(site)
    return list({**active_rules(site), **active_rules(site, is_strict=True)}.values())


def main(arguments: list[str]) -> None:
    folder, *files = map(Path, arguments)
    rules = shipped_and(rule for path in files for rule in _read_site_rules(path))
    (folder / "alerts.yml").write_text(alerts(rules), encoding="utf-8")
    (folder / "grafana.json").write_text(dashboard(rules), encoding="utf-8")


def _read_site_rules(path: Path) -> list[Rule]:
    """Return the rules of a site's file; an invalid one ends the program with the file's name."""
    try:
        return parse_rules(path.read_text(encoding="utf-8"), is_site=True)
    except ValueError as error:
        sys.exit(f"{path}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
