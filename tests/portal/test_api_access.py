"""Test who may use each operation of the API. A new operation needs a row in one of the tables below."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
from django.test import Client

from jobs.models import Job
from portal.models import Token, User
from tests import lab
from tests.portal import behind_addresses
from tests.portal.behind_addresses import AddressedLab

pytestmark = [pytest.mark.django_db, pytest.mark.lengthy]
SAFE = {"GET", "HEAD"}

MACHINES = """
POST /attempts/{attempt_id}/reports
POST /nodes/{name}/telemetry
POST /scheduler/wake
"""
"""Jobs, agents and the scheduler send these with other tokens: neither a person's token nor a session grants access."""

EVERYBODY = """
GET /accounts
GET /agents
GET /announcements
GET /drains
GET /gpus
GET /health
GET /health/breaker
GET /health/rules
GET /health/rules/{name}
GET /health/{entry_id}
GET /inventory
GET /inventory/nodes
GET /jobs
GET /licenses
GET /maintenance
GET /me
GET /nodes
GET /nodes/{name}
GET /nodes/{name}/events
GET /nodes/{name}/gpus
GET /nodes/{name}/orders
GET /nodes/{name}/series
GET /nodes/{name}/series.csv
GET /nodes/{name}/series.parquet
GET /nodes/{name}/telemetry
GET /notices
GET /outbox
GET /partitions
GET /policies
GET /postmortems
GET /projects
GET /projects/disk
GET /qos
GET /queue
GET /racks
GET /racks/temperatures
GET /reliability
GET /reliability.csv
GET /reliability/forecast
GET /reservations
GET /runbooks/{code}
GET /spares
GET /spec/schema
GET /sweeps
GET /tokens
GET /waste
GET /waste.csv
POST /jobs
POST /jobs/attach
POST /jobs/check
POST /sweeps
POST /tokens
"""
"""For everybody who is signed in; lists show what is visible to them."""

MEMBERS = """
DELETE /jobs/{job_id}
DELETE /tokens/{token_id}
GET /jobs/{job_id}
GET /jobs/{job_id}/attempts
GET /jobs/{job_id}/attempts/{number}/environment
GET /jobs/{job_id}/cadence
GET /jobs/{job_id}/checkpoints
GET /jobs/{job_id}/clients
GET /jobs/{job_id}/events
GET /jobs/{job_id}/gpus
GET /jobs/{job_id}/logs
GET /jobs/{job_id}/logs/file
GET /jobs/{job_id}/logs/files
GET /jobs/{job_id}/postmortem
GET /jobs/{job_id}/postmortem.md
GET /jobs/{job_id}/profiles
GET /jobs/{job_id}/profiles/{number}/{name}
GET /jobs/{job_id}/rounds
GET /jobs/{job_id}/series
GET /jobs/{job_id}/series.csv
GET /jobs/{job_id}/series.parquet
GET /jobs/{job_id}/series/names
GET /jobs/{job_id}/spec
GET /jobs/{job_id}/why
GET /sweeps/{sweep_id}
PATCH /jobs/{job_id}
PATCH /jobs/{job_id}/checkpoints/{name}
PATCH /jobs/{job_id}/postmortem
PATCH /projects/{slug}
POST /jobs/{job_id}/cancel
POST /jobs/{job_id}/kill
POST /jobs/{job_id}/profile
POST /jobs/{job_id}/release
POST /jobs/{job_id}/resume
POST /notices/{notice_id}/read
POST /outbox/{delivery_id}/give-up
POST /outbox/{delivery_id}/resend
POST /sweeps/{sweep_id}/cancel
PUT /jobs/{job_id}/cadence
"""
"""A project's or a person's: for anybody else it does not exist."""

SYSADMINS = """
DELETE /catalogue/entries/{name}
DELETE /catalogue/replays/{replay_id}
DELETE /health/rules/{name}
GET /acceptances
GET /acceptances/{acceptance_id}
GET /burnins
GET /burnins/golden
GET /burnins/{burn_in_id}
GET /burnins/{burn_in_id}/nodes/{node}
GET /catalogue/entries
GET /catalogue/entries/{name}
GET /catalogue/examples
GET /catalogue/replays/{replay_id}
GET /gamedays
GET /gamedays/{game_day_id}
PATCH /catalogue/entries/{name}
POST /acceptances
POST /acceptances/{acceptance_id}/cancel
POST /agents/secret
POST /announcements
POST /announcements/{announcement_id}/withdraw
POST /burnins
POST /burnins/golden/reset
POST /burnins/{burn_in_id}/cancel
POST /catalogue/check
POST /catalogue/entries
POST /catalogue/replays
POST /drains
POST /drains/preview
POST /drains/return
POST /drains/return/preview
POST /gamedays
POST /gamedays/{game_day_id}/cancel
POST /health/breaker/reset
POST /health/rules
POST /health/rules/try
POST /health/{entry_id}/approve
POST /health/{entry_id}/clear
POST /health/{entry_id}/dismiss
POST /maintenance
POST /maintenance/{window_id}/cancel
POST /nodes/{name}/drain
POST /nodes/{name}/token
POST /nodes/{name}/undrain
POST /spares
POST /spares/{node}/remove
PUT /catalogue/entries/{name}
PUT /health/rules/{name}
PUT /policies
PUT /racks
"""
"""Only for sysadmins; what changes something needs a session or a token of scope admin."""


class Operation(NamedTuple):
    """An operation of the API, with a request that is valid by its description."""

    method: str
    path: str
    query: Mapping[str, Any]
    body: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path.removeprefix('/api/v1')}"

    def request(self, client: Client, rows: AddressedLab) -> Any:
        address = rows.path(self.path)
        query = "&".join(f"{name}={value}" for name, value in self.query.items())
        return client.generic(self.method, f"{address}?{query}", data=_json(self.body), content_type="application/json")


@cache
def operations() -> tuple[Operation, ...]:
    return tuple(_read(Client().get("/api/openapi.json").json()))


def of(table: str) -> list[Operation]:
    names = set(table.split("\n"))
    return [operation for operation in operations() if str(operation) in names]


@pytest.fixture
def rows(settings: Any) -> AddressedLab:
    settings.VIGIL_API_RATE = 10**6
    settings.VIGIL_HEALTH = "propose"
    project = lab.a_project()
    mira = lab.person("mira", project)
    found = behind_addresses.fill(project)
    found.names |= {"job_id": lab.a_job(mira, project).pk, "token_id": Token.issue(mira, "hers")[0].pk}
    return found


@pytest.fixture
def outsider(rows: AddressedLab) -> User:
    """Somebody in no project."""
    return lab.person("oskar")


def refused(selected: list[Operation], client: Client, rows: AddressedLab, status: int, kind: str = "") -> list[str]:
    """Return the operations that do not answer with this status and kind of problem."""
    wrong = []
    for operation in selected:
        answer = operation.request(client, rows)
        is_right = answer.status_code == status and (not kind or answer.json()["type"].endswith(f":{kind}"))
        if not is_right:
            wrong.append(f"{operation}: {answer.status_code}")
    return wrong


def test_every_operation_is_in_exactly_one_table() -> None:
    rows = [row for table in (MACHINES, EVERYBODY, MEMBERS, SYSADMINS) for row in table.split("\n") if row]
    assert sorted(rows) == sorted(str(operation) for operation in operations())


def test_nobody_and_no_agent_may_anything(rows: AddressedLab) -> None:
    persons = of(EVERYBODY) + of(MEMBERS) + of(SYSADMINS)
    agent = Client(headers={"Authorization": f"Bearer {rows.lab.machine().token}"})
    for client in (Client(), agent):
        assert refused(persons, client, rows, 401) == []
    assert refused(of(MACHINES)[:2], lab.bearer(rows.ops, "admin"), rows, 401) == []


def test_a_token_to_read_changes_nothing(rows: AddressedLab) -> None:
    changing = [operation for operation in of(EVERYBODY + MEMBERS + SYSADMINS) if operation.method not in SAFE]
    assert refused(changing, lab.bearer(rows.ops, "read"), rows, 403, "scope") == []


def test_a_session_without_its_csrf_token_changes_nothing(rows: AddressedLab) -> None:
    changing = [operation for operation in of(EVERYBODY + MEMBERS + SYSADMINS) if operation.method not in SAFE]
    browser = lab.signed_in(rows.ops, enforce_csrf_checks=True)
    assert refused(changing, browser, rows, 403, "csrf") == []


def test_a_person_in_no_project_sees_the_cluster_and_nobodys_jobs(rows: AddressedLab, outsider: User) -> None:
    for client in (lab.bearer(outsider, "admin"), lab.signed_in(outsider)):
        assert refused(of(SYSADMINS), client, rows, 403) == []
        hidden = {operation.request(client, rows).status_code for operation in of(MEMBERS)}
        assert hidden <= {404, 422}, "422: its body is checked first"
        answers = {str(operation): operation.request(client, rows).status_code for operation in of(EVERYBODY)}
        assert {name: status for name, status in answers.items() if status in {401, 403} or status >= 500} == {}
    assert Job.objects.count() == 1


def test_sysadmins_need_the_scope_to_change_something(rows: AddressedLab) -> None:
    changing = [operation for operation in of(SYSADMINS) if operation.method not in SAFE]
    assert refused(changing, lab.bearer(rows.ops, "write"), rows, 403, "scope") == []
    admin = lab.bearer(rows.ops, "admin")
    answers = {str(operation): operation.request(admin, rows).status_code for operation in of(SYSADMINS)}
    assert {name: status for name, status in answers.items() if status in {401, 403} or status >= 500} == {}
    assert sum(status < 400 for status in answers.values()) > len(answers) / 2, "most requests are valid"


BODIES: dict[str, Any] = {
    "PUT /policies": {"modes": {"drain": "propose"}, "reason": "a test"},
    "POST /drains": {"nodes": "dgx-02", "reason": "a test"},
    "POST /drains/preview": {"nodes": "dgx-02"},
    "POST /drains/return": {"nodes": "dgx-02", "reason": "a test"},
    "POST /drains/return/preview": {"nodes": "dgx-02"},
    "POST /burnins": {"nodes": ["dgx-03"]},
    "POST /acceptances": {"nodes": "dgx-04"},
    "POST /spares": {"node": "dgx-10", "partition": "gpu"},
    "POST /health/rules/try": {"toml": behind_addresses.RULE},
    "POST /burnins/golden/reset": {"model": "NVIDIA H100", "driver": "570.1"},
}


def _json(body: Any) -> bytes:
    return b"" if body is None else json.dumps(body).encode()


def _read(schema: dict[str, Any]) -> Iterator[Operation]:
    for path, methods in schema["paths"].items():
        for method, described in methods.items():
            required = [part for part in described.get("parameters", ()) if part["in"] == "query" and part["required"]]
            query = {part["name"]: _smallest(part["schema"], schema) for part in required}
            content = described.get("requestBody", {}).get("content", {})
            found = Operation(method.upper(), path, query, None)
            body = BODIES.get(str(found))
            if body is None and "application/json" in content:
                body = _smallest(content["application/json"]["schema"], schema)
            yield found._replace(body=body)


def _smallest(described: dict[str, Any], schema: dict[str, Any]) -> Any:
    """Return the smallest value that a JSON schema of ours allows."""
    if "$ref" in described:
        name = re.sub(".*/", "", described["$ref"])
        return _smallest(schema["components"]["schemas"][name], schema)
    if "const" in described or "enum" in described:
        return described.get("const", described.get("enum", [None])[0])
    for choice in described.get("anyOf", described.get("oneOf", described.get("allOf", [])))[:1]:
        return _smallest(choice, schema)
    match described.get("type"):
        case "object":
            parts = described.get("properties", {})
            return {name: _smallest(parts[name], schema) for name in described.get("required", ()) if name in parts}
        case "array":
            return [_smallest(described["items"], schema)] * described.get("minItems", 0)
        case "integer" | "number":
            return described.get("minimum", 0)
        case "boolean":
            return False
        case "string" if described.get("format") == "date-time":
            return "2030-01-01T00:00:00Z"
        case _:
            return "x" * max(1, described.get("minLength", 1))
