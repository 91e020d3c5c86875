"""The largest requests that people and their scripts may legally send, by REST (`bench.writer_hold`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from django.test import Client

Case = tuple[str, str, Callable[[], Any]]
"""The endpoint, what is sent, and the function that sends it."""

SPEC = '[run]\nrecipe = "language"\nsteps = 200\n'


def cases() -> Iterator[Case]:
    from tests import lab

    project = lab.a_project()
    admin, client = lab.bearer(lab.sysadmin(), "admin"), lab.bearer(lab.person("mira", project))
    job = lab.a_job(lab.person("oskar", project), project, state="running")
    owner = lab.bearer(job.owner)
    yield from _job_cases(client)
    yield from _sweep_cases(client)
    changes = {"notes": "x" * 20_000, "tags": [f"tag-{i}" for i in range(50)]}
    yield "jobs", "notes and tags", partial(_send, owner, "patch", f"/api/v1/jobs/{job.pk}", changes)
    yield "post-mortems", "50 factors and actions", partial(_send, owner, "patch", *_postmortem(job))
    over = lab.a_job(job.owner, project)
    yield "jobs", "delete", partial(_send, owner, "delete", f"/api/v1/jobs/{over.pk}")
    yield "tokens", "make", partial(_send, client, "post", "/api/v1/tokens", {"name": "x" * 60, "scope": "write"})
    yield "agents", "enrol", partial(_send, admin, "post", "/api/v1/nodes/dgx-07/token", {})
    yield "catalogue", "an entry", partial(_send, admin, "post", "/api/v1/catalogue/entries", _catalogue_entry())
    for what, rack in (("10,000 places", "r"), ("10,000 places, all moved", "s")):
        racks = [{"node": f"node-{i:05}", "rack": f"{rack}{i // 40}", "slot": i % 40 + 1} for i in range(10_000)]
        yield "racks", what, partial(_send, admin, "put", "/api/v1/racks", {"items": racks})
    yield "racks", "10,000 places, all gone", partial(_send, admin, "put", "/api/v1/racks", {"items": []})


def _job_cases(client: Client) -> Iterator[Case]:
    for what, head in (("submit", ""), ("submit, 19 kB of notes", f'notes = "{"x" * 19_000}"\n')):
        yield "jobs", what, partial(_submit, client, "jobs", f'name = "wren"\n{head}{SPEC}')


def _sweep_cases(client: Client) -> Iterator[Case]:
    from jobs.models import Job, Sweep

    values = ", ".join(str(1e-6 * (i + 1)) for i in range(1_000))
    over = f'{SPEC}[sweep.over]\n"run.learning_rate" = [{values}]\n'
    tags = ", ".join(f'"tag-{i}"' for i in range(10))
    yield "sweeps", "1,000 jobs", partial(_submit, client, "sweeps", f'name = "wide"\n{over}')
    yield "sweeps", "1,000 jobs of 10 tags", partial(_submit, client, "sweeps", f'name = "t"\ntags = [{tags}]\n{over}')
    fifty = list(Job.objects.order_by("-pk").values_list("pk", flat=True)[:50])
    text = f'name = "late"\nafter = {fifty[:10]}\n{over}'
    yield "sweeps", "1,000 jobs that wait for 10", partial(_submit, client, "sweeps", text)
    few = over.replace(values, ", ".join(str(1e-6 * (i + 1)) for i in range(200)))
    text = f'name = "few"\nafter = {fifty}\n{few}'
    yield "sweeps", "200 jobs that wait for 50", partial(_submit, client, "sweeps", text)
    for sweep in Sweep.objects.order_by("pk"):
        yield "sweeps", f"cancel {sweep.name}", partial(_send, client, "post", f"/api/v1/sweeps/{sweep.pk}/cancel", {})


def _postmortem(job: Any) -> tuple[str, dict[str, Any]]:
    """Return the address of a job's post-mortem, and the longest text that people may write into it."""
    from jobs.following import ending
    from jobs.following.end_causes.cause import AttemptEnd
    from jobs.models import Attempt, Incident
    from jobs.postmortem import incidents

    attempt = Attempt.objects.get(job=job)
    ending.end(attempt, AttemptEnd("failed", 1))
    incidents.diagnose(Incident.objects.get(attempt=attempt).pk)
    actions = [{"text": f"{i} {'x' * 290}", "owner": "oskar", "due": "2027-01-01"} for i in range(50)]
    factors = [f"{i} {'x' * 490}" for i in range(50)]
    text = {"narrative": "x" * 20_000, "factors": factors, "actions": actions, "is_published": True}
    return f"/api/v1/jobs/{job.pk}/postmortem", text


def _catalogue_entry() -> dict[str, Any]:
    from tests.jobs.api.failures.test_catalogue import OURS

    return {**OURS, "name": "bench.worst", "advice": "Restart the mounter. " * 40}


def _submit(client: Client, endpoint: str, specification: str) -> int:
    return client.post(f"/api/v1/{endpoint}", specification, content_type="application/toml").status_code


def _send(client: Client, method: str, path: str, body: Any = None) -> int:
    from tests import lab

    return int(lab.send(client, method, path, body).status_code)
