"""Test a database locked by another writer: every route answers 503 with `Retry-After`, and tasks are retried."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection
from django.test import Client
from django.utils import timezone

from jobs import tasks as job_tasks
from jobs.models import Incident
from jobs.postmortem import incidents
from nodes import tasks as node_tasks
from portal import tasks as portal_tasks
from portal.celery import app
from portal.http import limits, sockets
from portal.models import Project
from tests import lab
from tests.jobs.reporting import SECRET, Spooled, attempt_of, frame, packed

pytestmark = pytest.mark.django_db(transaction=True)
TABLES = ("portal_user", "portal_token", "django_session", "portal_project", "jobs_attempt", "axes_accessattempt")


@contextmanager
def locked() -> Iterator[None]:
    """Another connection holds the writer (SQLite) or what requests write (PostgreSQL), and nobody waits for long."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("PRAGMA busy_timeout = 20")
            name = str(connection.settings_dict["NAME"])
            with closing(sqlite3.connect(name, uri=True, timeout=0, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                yield
            return
        cursor.execute("SET lock_timeout = '50ms'")
        with psycopg.connect(**connection.get_connection_params() | {"cursor_factory": psycopg.Cursor}) as other:
            other.execute(f"LOCK TABLE {', '.join(TABLES)} IN SHARE MODE")  # others may read
            yield
            other.rollback()
        cursor.execute("SET lock_timeout = 0")


def is_busy(answer: Any) -> None:
    assert answer.status_code == 503, answer.content[:300]
    assert int(answer.headers["Retry-After"]) > 0


@pytest.fixture
def mira() -> Any:
    return lab.person("mira", lab.a_project())


def sign_in(client: Client) -> Any:
    return client.post("/accounts/login/", {"login": "mira", "password": lab.PASSWORD})


def test_signing_in(mira: Any) -> None:
    client = Client(raise_request_exception=False)
    with locked():
        answer = sign_in(client)
    is_busy(answer)
    assert "The database is busy" in answer.content.decode()
    assert sign_in(client).status_code == 302


def test_a_session_that_cannot_be_saved_is_not_called_deleted(mira: Any) -> None:
    client = lab.signed_in(mira, raise_request_exception=False)
    session = client.session
    session.set_expiry(1_000_000)
    session.save()
    with locked():
        is_busy(client.post("/accounts/logout/"))


def test_pages_and_records() -> None:
    client = lab.signed_in(lab.sysadmin(), raise_request_exception=False)
    project = Project.objects.create(slug="vision")
    with locked():
        is_busy(client.post("/me/tokens/", {"name": "laptop", "scope": "read", "days": "30"}))
        is_busy(client.post(f"/admin/portal/project/{project.pk}/delete/", {"post": "yes"}))
    assert Project.objects.filter(slug="vision").exists()


def test_rest(mira: Any) -> None:
    client = lab.bearer(mira, raise_request_exception=False)
    with locked():
        answer = lab.send(client, "post", "/api/v1/tokens", {"name": "laptop"})
    is_busy(answer)
    assert answer.headers["Content-Type"] == "application/problem+json"


def test_reports() -> None:
    attempt, body = attempt_of(), packed(frame(Spooled().log(1, loss=1.0)))
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Encoding": "gzip"}
    client = Client(raise_request_exception=False, headers=headers)
    path = f"/api/v1/attempts/{attempt.pk}/reports"
    with locked():
        is_busy(client.post(path, body, content_type="application/json"))
    assert client.post(path, body, content_type="application/json").json()["streams"].popitem()[1] == 1


def test_the_handshake_of_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = _answers_of_socket(monkeypatch, extensions={"websocket.http.response": {}})
    assert [message["type"] for message in sent] == ["websocket.http.response.start", "websocket.http.response.body"]
    assert sent[0]["status"] == 503
    assert dict(sent[0]["headers"])[b"retry-after"] == b"5"


def test_a_large_body_is_refused_while_its_sender_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    def refuse(*about: str) -> None:
        raise OperationalError("connection refused")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def nobody(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the body of a stranger was read")

    monkeypatch.setattr(limits.senders, "writer_of", refuse)
    scope = {"type": "http", "path": "/submit", "headers": [(b"content-length", b"100000")]}
    asyncio.run(limits.BodyLimit(nobody)(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 503
    assert dict(sent[0]["headers"])[b"retry-after"] == b"5"


def test_a_server_that_cannot_answer_a_handshake_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answers_of_socket(monkeypatch, extensions={}) == [{"type": "websocket.close", "code": 1013}]


def _answers_of_socket(monkeypatch: pytest.MonkeyPatch, extensions: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    def refuse(token: str) -> None:
        raise OperationalError("connection refused")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def nobody(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("a socket without a person was let in")

    monkeypatch.setattr(sockets, "user_of_token", refuse)
    headers = [(b"host", b"127.0.0.1:8000"), (b"authorization", b"Bearer x")]
    scope = {"type": "websocket", "path": "/ws/jobs", "headers": headers, "extensions": extensions}
    asyncio.run(sockets.SocketGate(nobody)(scope, None, send))
    return sent


def test_every_task_is_retried_a_few_times() -> None:
    app.loader.import_default_modules()
    ours = [task for name, task in app.tasks.items() if name.split(".")[0] in {"jobs", "nodes", "portal"}]
    assert len(ours) > 15
    for task in ours:
        assert OperationalError in task.autoretry_for
        assert task.max_retries == 5


TASKS: list[Callable[[], Any]] = [
    lambda: job_tasks.submit.apply([1]),
    lambda: job_tasks.follow.apply(),
    lambda: job_tasks.waste.apply(),
    lambda: job_tasks.reliability.apply(),
    lambda: node_tasks.forget.apply(),
    lambda: portal_tasks.tidy.apply(),
]


@pytest.mark.parametrize("run", TASKS)
def test_a_task_is_done_once_the_database_answers(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Retried at once here, where no broker is between the tries."""
    attempt_of()
    with locked():
        assert run().status in {"FAILURE", "SUCCESS"}
    assert run().status == "SUCCESS"


def test_a_retried_task_is_done_once_the_database_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([OperationalError("database is locked")] * 2)

    def work(until: float) -> None:
        if (error := next(tries, None)) is not None:
            raise error

    monkeypatch.setattr("jobs.intake.rounds.apply_left_over", work)
    # By name: another test may have made beat's application the current one, whose tasks are not retried.
    assert app.tasks[job_tasks.apply_rounds.name].apply().status == "SUCCESS"
    assert next(tries, None) is None


def test_an_incident_is_not_given_up_for_a_database_that_is_busy(mira: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = lab.a_job(mira, lab.a_project()).latest
    incident = Incident.objects.create(
        attempt=attempt, project=lab.a_project(), at=timezone.now(), due_at=timezone.now()
    )

    def fail(_: Incident) -> None:
        raise OperationalError("database is locked")

    monkeypatch.setattr(incidents, "diagnose_incident", fail)
    for _ in range(incidents.MAX_TRIES + 1):
        with pytest.raises(OperationalError):
            incidents.diagnose(incident.pk)
    incident.refresh_from_db()
    assert (incident.tries, incident.version) == (0, 0)
    assert incident.due_at is not None
    assert incident.due_at <= timezone.now()
