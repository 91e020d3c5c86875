"""A small lab for tests: people, a project, jobs in any state, and signed-in clients."""

import re
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from django.test import Client
from django.utils import timezone

from jobs.disk import rundir
from jobs.models import Attempt, Checkpoint, Job, Tag
from jobs.spec import JobSpec
from portal.models import Membership, Project, Token, User

PASSWORD = "long enough for a lab"
SPEC = {"name": "wren", "run": {"recipe": "language", "steps": 200}}


def person(name: str, project: Project | None = None, *, role: str = "researcher", **fields: Any) -> User:
    """Create a person with a password, as a member of the project."""
    user = User.objects.create_user(name, password=PASSWORD, **fields)
    if project is not None:
        Membership.objects.create(user=user, project=project, role=role)
    return user


def sysadmin(name: str = "sam") -> User:
    return person(name, is_superuser=True)


def a_project(slug: str = "default") -> Project:
    return Project.objects.get_or_create(slug=slug)[0]


def a_job(owner: User, project: Project, *, state: str = "completed", tags: tuple[str, ...] = (), **fields: Any) -> Job:
    """Create a job with one attempt in the given state, with matching times and decision."""
    attempt = fields.pop("attempt", {})
    spec = JobSpec.parse({**SPEC, "name": fields.get("name", "wren"), "project": project.slug})
    given = {"name": spec.name, "kind": spec.kind, "spec": spec.model_dump(mode="json"), "spec_toml": "# as written\n"}
    job = Job.objects.create(project=project, owner=owner, **{**given, **fields})
    Tag.objects.bulk_create([Tag(job=job, name=name) for name in tags])
    now = timezone.now()
    times: dict[str, Any] = {} if state == "pending" else {"started_at": now - timedelta(minutes=5)}
    if state not in Attempt.ALIVE:
        times |= {"ended_at": now, "decided_at": now}
    job.latest = Attempt.objects.create(job=job, **{"number": 1, "state": state, **times, **attempt})
    job.save(update_fields=["latest"])
    return job


def on_disk(job: Job) -> Path:
    """Create the job's run directory."""
    job.directory = rundir.make(job.project.slug, job.pk)
    job.save(update_fields=["directory"])
    return rundir.path_of(job.directory)


def a_checkpoint(job: Job, step: int, **fields: Any) -> Checkpoint:
    """Create a checkpoint that the job's latest attempt committed."""
    given = {"attempt": job.latest, "name": f"step-{step}", "generation": 1, "created_at": timezone.now()}
    return Checkpoint.objects.create(job=job, step=step, **{**given, **fields})


@cache
def documented() -> dict[tuple[str, str], set[int]]:
    """Return the statuses that the OpenAPI description has for (method, route)."""
    paths = Client().get("/api/openapi.json").json()["paths"]
    return {
        (method.upper(), path.lstrip("/")): set(map(int, operation["responses"]))
        for path, operations in paths.items()
        for method, operation in operations.items()
    }


class Documented(Client):
    """A client that rejects API answers with a status that the OpenAPI description lacks."""

    def request(self, **request: Any) -> Any:
        answer: Any = super().request(**request)
        match = getattr(answer, "resolver_match", None)
        route = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", match.route) if match else ""
        statuses = documented().get((request["REQUEST_METHOD"], route))
        assert statuses is None or answer.status_code in statuses, (
            f"{route} answered {answer.status_code}, of {statuses}"
        )
        return answer


def bearer(user: User, scope: str = "write", **options: Any) -> Client:
    """Return a client that sends a token of this person."""
    _, secret = Token.issue(user, "test", scope=scope)
    return Documented(headers={"Authorization": f"Bearer {secret}"}, **options)


def signed_in(user: User, **options: Any) -> Client:
    """Return a browser client with this person's session."""
    client = Client(**options)
    client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
    return client


def send(client: Client, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """Send a request with a JSON body and return the response."""
    given = {"content_type": "application/json"} if method != "get" else {}
    given |= {} if body is None else {"data": body}
    return getattr(client, method)(path, headers={k.replace("_", "-"): v for k, v in headers.items()}, **given)
