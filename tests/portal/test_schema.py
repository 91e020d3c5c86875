"""Test the API against its own schema: for any request of schemathesis, no server error and no undocumented answer."""

from functools import cache

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from diagnosis.verdict import Verdict
from jobs.models import Diagnosis, Event, Incident
from portal.models import Channel, Token
from portal.notify import raise_notice
from tests import lab
from tests.examples import examples
from tests.portal import behind_addresses

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
PARTS = 12


@cache
def addresses():
    """Return all operations. They are read by the test, not at collection, which every worker does."""
    schema = schemathesis.openapi.from_wsgi("/api/openapi.json", get_wsgi_application())
    return [found.ok() for found in schema.get_all_operations()]


@schemathesis.serializer("application/toml")
def as_text(context, value):
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@pytest.fixture
def single_connection():
    """Let requests leave the test's connection and its transaction alone, as Django's test client does."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.fixture
def rows(tmp_path, settings, single_connection):
    """A lab with something behind every address, requested by a sysadmin: others get 403 from half of them."""
    settings.VIGIL_RUNS = tmp_path
    settings.VIGIL_API_RATE = 10**6
    settings.VIGIL_HEALTH = "propose"
    project = lab.a_project()
    mira = lab.person("mira", project)
    job = lab.a_job(mira, project, state="running", attempt={"step": 5, "steps": 10, "latest": {"loss": "NaN"}})
    Event.objects.create(attempt=job.latest, time=job.created_at, kind="phase", data={"phase": "step"})
    Channel.objects.create(user=mira, kind="email", address="mira@lab.example")
    verdict = Verdict("unknown", 0.3, "Failed for an unknown reason.", "Look again.").as_json()
    incident = Incident.objects.create(
        attempt=job.latest, project=project, at=job.created_at, version=1, cause="unknown", confidence=0.3
    )
    Diagnosis.objects.create(incident=incident, version=1, cause="unknown", confidence=0.3, verdict=verdict)
    raise_notice("gpu.idle:1", kind="gpu.idle", to=mira, title="A GPU is idle.", link=f"/jobs/{job.pk}")
    found = behind_addresses.fill(project)
    found.names |= {"job_id": job.pk, "code": "unknown"}
    return found


@pytest.fixture
def secret(rows):
    return Token.issue(rows.ops, "test", scope=Token.Scope.ADMIN)[1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(PARTS))
def test_api_conforms_to_its_schema(part, rows, secret):
    """A twelfth of the addresses: a test for each of them would be of one name, and workers run each name once."""
    for address in addresses()[part::PARTS]:
        check_address(address, rows, secret)


def check_address(address, rows, secret):
    @given(case=address.as_strategy())
    @settings(
        max_examples=examples(15), deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )  # fmt: skip
    def keeps_its_schema(case):
        headers = {"Authorization": f"Bearer {secret}"}
        values = rows.parameters(case.path)  # or hardly anything would be reached
        for name, value in (case.path_parameters or {}).items():
            if name in values and (value if isinstance(value, int) else len(value)) % 4:
                case.path_parameters[name] = values[name]
        if len(str(case.body)) % 2:
            case.body = rows.named(case.body)
        if "attempts" in case.path:  # has a door of its own
            headers = {}
        case.call_and_validate(headers=headers, checks=CHECKS)

    keeps_its_schema()
