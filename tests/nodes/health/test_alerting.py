"""Test the alert rules for Prometheus and the dashboard for Grafana that are made from the health rules."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from nodes.health.alerting import alerts, dashboard, main, shipped_and
from tests.lab import bearer, sysadmin

DOCS = Path(__file__).parents[3] / "docs" / "monitoring"
SITE_RULE = """
[[rule]]
name = "my-xid"
title = "Our \\"own\\" Xid: {{ braces }}"
source = "us"
severity = "critical"
action = "watch"
signal = "xid"
where = { code = 999 }
clears = "quiet"
clears_after = "1h"
[[rule.example]]
fires = true
steps = [{ code = 999 }]
[[rule.example]]
fires = false
steps = [{ code = 998 }]
"""


def test_the_shipped_files_are_those_of_the_shipped_rules() -> None:
    """After a change of the rules: python -m nodes.health.alerting docs/monitoring."""
    rules = shipped_and()
    assert "strict-program-error" in {rule.name for rule in rules}
    assert (DOCS / "alerts.yml").read_text() == alerts(rules)
    assert (DOCS / "grafana.json").read_text() == dashboard(rules)
    names = re.findall(r"- alert: (\w+)", alerts(rules))
    assert len(set(names)) == len(names)


def test_prometheus_accepts_them_with_a_site_rule(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(SITE_RULE)
    main([str(tmp_path), str(tmp_path / "site.toml")])
    checked = subprocess.run(
        ["promtool", "check", "rules", tmp_path / "alerts.yml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "VigilMyXid" in (tmp_path / "alerts.yml").read_text()


def test_the_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """Four agents of which one is silent are no outage, a portal without metrics is one, and so is an escalation."""

    def agents(up: int, silent: int) -> list[dict[str, str]]:
        return [
            {"series": f'vigil_agent_up{{node="n{number}"}}', "values": f"{int(number < up)}x20"}
            for number in range(up + silent)
        ]

    waiting = {"series": "vigil_health_waiting", "values": "0x20"}
    escalated = {"series": 'vigil_health_rule_escalated{rule="thermal-slowdown"}', "values": "1x20"}
    outage, missing, slowdown = "VigilAgentsDown", "VigilMetricsMissing", "VigilThermalSlowdownEscalated"
    cases: list[tuple[list[dict[str, str]], set[str]]] = [
        ([waiting, *agents(3, 1)], set()),
        ([waiting, *agents(8, 3)], {outage}),
        ([waiting, *agents(97, 3)], set()),
        (agents(4, 0), {missing}),
        ([waiting, escalated], {slowdown}),
    ]
    (tmp_path / "alerts.yml").write_text(alerts(shipped_and()))
    tests = [
        {
            "interval": "1m",
            "input_series": series,
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                    "eval_time": "15m",
                    "exp_samples": [{"labels": "{}", "value": int(name in firing)}],
                }
                for name in (outage, missing, slowdown)
            ],
        }
        for series, firing in cases
    ]  # fmt: skip
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": tests}))
    command = ["promtool", "test", "rules", "test.yml"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.django_db
def test_rules_that_the_site_saved_become_alerts(tmp_path: Path) -> None:
    """Follow the steps of docs/reference/metrics.md: the list of rules, then the text of each, in a separate file."""
    client = bearer(sysadmin("ops"), "admin")

    def send(method: str, path: str, **body: Any) -> Any:
        answer = getattr(client, method)(f"/api/v1/health/rules{path}", body or None, content_type="application/json")
        assert answer.status_code < 300, answer.content
        return answer.json()

    shared = SITE_RULE.replace('severity = "critical"\n', "")
    for name in ("my-xid", "your-xid", "off-xid"):
        text = 'severity = "critical"\n' + shared.replace("my-xid", name)
        proof = send("post", "/try", toml=text)["proof"]
        send("post", "", toml=text, dry_run=proof, reason="ours")
    send("put", "/off-xid", is_enabled=False, version=1, reason="too many")
    files = []
    for rule in client.get("/api/v1/health/rules").json()["items"]:
        if rule["is_site"] and rule["is_enabled"]:
            files.append(tmp_path / f"{rule['name']}.toml")
            files[-1].write_text(client.get(f"/api/v1/health/rules/{rule['name']}").json()["toml"])
    main([str(tmp_path), *map(str, files)])
    made = (tmp_path / "alerts.yml").read_text()
    assert [name in made for name in ("VigilMyXid", "VigilYourXid", "VigilOffXid")] == [True, True, False]


def test_an_invalid_file_of_a_site_is_named(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("null\n")
    with pytest.raises(SystemExit, match=r"site\.toml: "):
        main([str(tmp_path), str(tmp_path / "site.toml")])


@pytest.mark.django_db
def test_they_use_metrics_that_exist(settings: Any) -> None:
    settings.VIGIL_METRICS_TOKEN = "a token of prometheus's own"
    answer = Client().get("/metrics", headers={"Authorization": f"Bearer {settings.VIGIL_METRICS_TOKEN}"})
    exported = set(re.findall(r"^# TYPE (\S+)", answer.text, re.MULTILINE)) | {"vigil_task_queue_length"}
    panels = json.loads((DOCS / "grafana.json").read_text())["panels"]
    used = [target["expr"] for panel in panels for target in panel["targets"]]
    used += re.findall(r'expr: "(.*)"$', (DOCS / "alerts.yml").read_text(), re.MULTILINE)
    named = {name for expression in used for name in re.findall(r"\bvigil_\w+", expression)}
    assert len(named) > 8
    assert named <= exported


def test_no_panel_overlaps_another() -> None:
    places = [panel["gridPos"] for panel in json.loads((DOCS / "grafana.json").read_text())["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert all(place["x"] + place["w"] <= 24 for place in places)
