"""Run the `vigil` command in this process, with a portal that returns canned answers."""

from types import SimpleNamespace

import httpx
import pytest
from click.testing import CliRunner

from vigil_cli import portal as client
from vigil_cli.main import main

JOB = {
    "id": 7, "name": "wren", "kind": "distributed", "project": "default", "owner": "mira", "tags": [], "notes": "",
    "state": "running", "reason": "", "attempt": {"number": 1, "nodes": [], "decision": ""}, "latest": {"loss": 2.25},
    "progress": {"step": 50, "steps": 200, "fraction": 0.25, "eta_seconds": 75.0}, "parent": None, "directory": "",
    "created_at": "2026-01-31T12:00:00Z", "started_at": None, "ended_at": None, "over": False,
    "url": "http://portal/jobs/7",
}  # fmt: skip


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Configure no portal."""
    for name in ("VIGIL_URL", "VIGIL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VIGIL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def portal(monkeypatch):
    """Provide a portal that answers from a list of functions or JSON values, and records the requests."""
    monkeypatch.setenv("VIGIL_URL", "http://portal")
    monkeypatch.setenv("VIGIL_TOKEN", "secret")
    monkeypatch.setattr(client, "RETRY_S", 0)
    state = SimpleNamespace(asked=[], answers={})

    def answer(request: httpx.Request) -> httpx.Response:
        state.asked.append(request)
        found = state.answers[request.method, request.url.path.removeprefix("/api/v1/")]
        found = found.pop(0) if isinstance(found, list) else found
        if isinstance(found, BaseException):
            raise found
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)

    created = httpx.Client(base_url="http://portal/api/v1/", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(client.Portal, "http", created)
    return state


def problem(status: int, detail: str, *errors: tuple[str, str]) -> httpx.Response:
    fields = [{"field": field, "message": message} for field, message in errors]
    return httpx.Response(status, json={"title": "x", "status": status, "detail": detail, "errors": fields})


def vigil(*arguments: str, status: int = 0):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == status, result.output + repr(result.exception)
    return result
