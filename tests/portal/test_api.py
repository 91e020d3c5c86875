"""Test the API as a whole: every error is a problem document, the schema is right, lists page by cursor."""

import asyncio
import json
import re

import pytest
from django.db import OperationalError
from django.test import Client
from ninja import Schema

from nodes.models import Node
from portal.accounts import api
from portal.http import limits
from portal.models import Token
from tests import lab
from tests.lab import send

pytestmark = pytest.mark.django_db


@pytest.fixture
def mira():
    return lab.person("mira", lab.a_project())


def is_problem(answer, status: int) -> dict:
    assert answer.status_code == status, answer.content
    assert answer.headers["Content-Type"] == "application/problem+json"
    document = answer.json()
    assert set(document) == {"type", "title", "status", "detail", "errors"}
    assert document["status"] == status
    assert document["detail"]
    return document


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("get", "/api/nowhere", None, 404),
        ("get", "/api/v1/nowhere", None, 404),
        ("get", "/api/v1/jobs/abc", None, 404),
        ("get", "/api/v1/jobs/-1", None, 404),
        ("get", "/api/v1/jobs/1/nowhere", None, 404),
        ("get", "/api/v1/jobs/99999999999999999999999", None, 404),
        ("get", "/api/v1/nodes/none", None, 404),
        ("get", "/api/nowhere/", None, 404),
        ("delete", "/api/v1/me", None, 405),
        ("put", "/api/v1/jobs", {}, 405),
        ("post", "/api/v1/tokens", {"name": 5}, 422),
        ("post", "/api/v1/tokens", {"name": "x", "colour": "red"}, 422),
        ("post", "/api/v1/tokens", [], 400),
        ("get", "/api/v1/jobs?limit=0", None, 422),
        ("get", "/api/v1/jobs?limit=1000", None, 422),
        ("get", "/api/v1/jobs?q=%00", None, 422),
        ("get", "/api/v1/jobs?cursor=nonsense", None, 422),
    ],
)
def test_every_error_is_a_problem_document(mira, method, path, body, status):
    is_problem(send(lab.bearer(mira), method, path, body), status)


def test_an_anonymous_request_is_refused_with_the_way_to_a_token():
    answer = Client().get("/api/v1/jobs")
    assert "/me/" in is_problem(answer, 401)["detail"]
    is_problem(send(Client(enforce_csrf_checks=True), "post", "/api/v1/jobs", {}), 401)


@pytest.mark.parametrize(
    "body", ["{", "nul", '{"name": NaN}', "[" * 100_000, '"\ud800"'.encode("utf-8", "surrogatepass")]
)
def test_what_is_not_json(mira, body):
    answer = lab.bearer(mira).post("/api/v1/tokens", data=body, content_type="application/json")
    is_problem(answer, 400)


def test_a_refused_method_comes_with_the_allowed_ones(mira):
    answer = lab.bearer(mira).delete("/api/v1/me")
    assert answer.headers["Allow"] == "GET"


def test_an_internal_error_is_reported_without_its_details(mira, monkeypatch):
    client = lab.bearer(mira, raise_request_exception=False)

    def fail(*args):
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(api.actions, "tokens_of", fail)
    assert "hunter2" not in str(is_problem(client.get("/api/v1/tokens"), 500))


def test_a_busy_database_answers_with_retry_after(mira, monkeypatch):
    def fail(*args):
        raise OperationalError("database is locked")

    monkeypatch.setattr(api.actions, "tokens_of", fail)
    answer = lab.bearer(mira).get("/api/v1/tokens")
    is_problem(answer, 503)
    assert answer.headers["Retry-After"] == "5"


def test_validation_names_the_field(mira):
    answer = send(lab.bearer(mira), "post", "/api/v1/tokens", {"name": "x", "days": "soon"})
    assert [error["field"] for error in is_problem(answer, 422)["errors"]] == ["days"]
    answer = lab.bearer(mira).get("/api/v1/jobs?limit=many&state=asleep")
    assert {error["field"] for error in is_problem(answer, 422)["errors"]} == {"limit", "state"}


def test_a_refusal_does_not_echo_a_long_request(mira):
    answer = send(lab.bearer(mira), "post", "/api/v1/tokens", {"name": "x", "k" * 200_000: 1})
    is_problem(answer, 422)
    assert len(answer.content) < 30_000


def test_large_bodies(mira):
    answer = lab.bearer(mira).post("/api/v1/tokens", data=b" " * 3_000_000, content_type="application/json")
    is_problem(answer, 413)


def send_bounded(headers: dict[str, str], chunks: list[bytes], path: str = "/api/v1/jobs") -> tuple[int, int]:
    """(status, chunks read) of a body through the bound, before an application that would read everything."""
    sent: list[dict] = []
    left = list(chunks)

    async def application(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    asyncio.run(limits.BodyLimit(application)(scope, receive, send))
    if sent[0]["status"] in {401, 413}:
        assert json.loads(sent[1]["body"])["status"] == sent[0]["status"]
    return sent[0]["status"], len(chunks) - len(left)


@pytest.fixture
def bearer_headers(transactional_db):
    """Return the headers of a person with a token."""
    secret = Token.issue(lab.person("mira", lab.a_project()), "t")[1]
    return {"authorization": f"Bearer {secret}"}


def test_bodies_are_cut_off_before_they_are_stored(bearer_headers):
    mib = b" " * limits.MIB
    assert send_bounded(bearer_headers, [mib, mib]) == (200, 2)
    assert send_bounded(bearer_headers, [mib] * 100) == (413, 3)
    assert send_bounded({**bearer_headers, "content-length": str(10**10)}, [mib]) == (413, 0)
    form = {**bearer_headers, "content-type": "multipart/form-data; boundary=x"}
    for path in ("/api/v1/jobs", "/api/v1/sweeps", "/submit"):
        assert send_bounded(form, [mib] * 52, path) == (200, 52)
        assert send_bounded(form, [mib] * 60, path) == (413, 53)
    for path in ("/accounts/login/", "/jobs/7/edit"):
        assert send_bounded(form, [mib] * 60, path) == (413, 3)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer vgl_wrong"}, {"cookie": "sessionid=wrong"}])
def test_a_strangers_body_is_not_read(transactional_db, headers):
    """300 anonymous posts of 1 MB each took 290 MB."""
    chunk = b" " * 10_000
    assert send_bounded({**headers, "content-length": "9000"}, [chunk[:9_000]]) == (200, 1)
    assert send_bounded({**headers, "content-length": "1000000"}, [chunk] * 100) == (401, 0)
    assert send_bounded(headers, [chunk] * 100) == (401, 2), "of unknown length"
    assert send_bounded({**headers, "content-length": "1000000"}, [chunk] * 100, "/submit") == (302, 0)


def test_a_token_that_may_only_read_sends_no_body(transactional_db):
    secret = Token.issue(lab.person("mira", lab.a_project()), "t", scope="read")[1]
    headers = {"authorization": f"Bearer {secret}", "content-length": "1000000"}
    assert send_bounded(headers, [b" " * 10_000] * 100) == (401, 0)


def test_large_bodies_are_counted_per_person(bearer_headers, monkeypatch):
    monkeypatch.setattr(limits, "MAX_LARGE_REQUESTS", 2)
    release, answers = asyncio.Event(), []

    async def application(scope, receive, send):
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        if "status" in message:
            answers.append(message["status"])
            if message["status"] == 429:
                release.set()

    async def play():
        scope = {"type": "http", "path": "/api/v1/jobs", "headers": [(b"content-length", b"1000000")]}
        scope["headers"] += [(name.encode(), value.encode()) for name, value in bearer_headers.items()]
        bounded = limits.BodyLimit(application)
        await asyncio.gather(*(bounded(scope, None, send) for _ in range(3)))
        await bounded(scope, None, send)
        assert not bounded.large

    asyncio.run(play())
    assert answers == [429, 200, 200, 200]


def test_a_session_may_send_more(transactional_db):
    browser = lab.signed_in(lab.person("mira", lab.a_project()))
    cookie = {"cookie": f"a=b; sessionid={browser.cookies['sessionid'].value}"}
    assert send_bounded(cookie, [b" " * 10_000] * 100, "/submit") == (200, 100)


def test_the_schema_is_made_once():
    """Anybody may request it, and it took most of a second each time."""
    from console.urls import api as whole

    assert whole.get_openapi_schema() is whole.get_openapi_schema()


def test_schema_is_openapi_3_1_with_problem_documents():
    schema = Client().get("/api/openapi.json").json()
    assert schema["openapi"].startswith("3.1")
    for path in (
        "jobs",
        "jobs/{job_id}",
        "jobs/{job_id}/cancel",
        "jobs/check",
        "nodes/{name}",
        "tokens",
        "spec/schema",
    ):
        assert f"/api/v1/{path}" in schema["paths"], path


def test_operations_keep_their_names_in_whichever_package_their_modules_are():
    """Generated clients name their functions by them."""
    paths = Client().get("/api/openapi.json").json()["paths"].values()
    names = [operation["operationId"] for operations in paths for operation in operations.values()]
    assert len(names) == len({*names})
    assert {"jobs_api_jobs_jobs", "jobs_api_series_series", "jobs_api_postmortems_postmortems"} <= {*names}


def test_no_two_shapes_have_the_same_name():
    """The schema has them by their names: of two, one would be described as the other."""
    Client().get("/api/openapi.json")  # all addresses are known, so all shapes are
    names = [f"{shape.__module__}.{shape.__name__}" for shape in shapes_below(Schema)]
    unqualified = [name.rpartition(".")[2] for name in names if name.startswith(("jobs.", "nodes.", "portal."))]
    assert sorted(unqualified) == sorted(set(unqualified))


def shapes_below(shape):
    return {item for child in shape.__subclasses__() for item in (child, *shapes_below(child))}


def every_operation():
    for path, operations in Client().get("/api/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            yield method, path, operation


def test_every_operation_describes_what_it_does_and_how_it_fails():
    for method, path, operation in every_operation():
        assert operation["summary"], (method, path)
        assert len(operation["description"]) > 20, (method, path)
        errors = {status: answer for status, answer in operation["responses"].items() if int(status) >= 400}
        assert {"401", "500", "503"} <= set(errors), (method, path)
        if method != "get" and {"Session": []} in operation["security"]:
            assert "403" in errors, (method, path)
        for status, answer in errors.items():
            assert answer["description"], (method, path, status)
            schema = answer["content"]["application/problem+json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ProblemDocument"}


def test_errors_are_described_at_the_operations_that_return_them():
    report = {(method, path): operation["responses"] for method, path, operation in every_operation()}
    refused = report["delete", "/api/v1/jobs/{job_id}"]["409"]["description"]
    assert refused.startswith("The job has not ended (cancel it first)")
    assert "Retry-After" in report["get", "/api/v1/jobs"]["429"]["headers"]
    assert "415" in report["post", "/api/v1/jobs"]
    assert "422" in report["get", "/api/v1/jobs/{job_id}"], "a query parameter that it does not have"
    assert "400" not in report["get", "/api/v1/jobs/{job_id}"], "it takes no body"


def test_me_projects_and_nodes(mira):
    lab.a_project("siskin")
    Node.objects.create(name="dgx-01", cpus=128, gpus=8)
    client = lab.bearer(mira)
    assert client.get("/api/v1/me").json()["token_scope"] == "write"
    projects = client.get("/api/v1/projects").json()["items"]
    assert [(p["slug"], p["role"]) for p in projects] == [("default", "researcher")]
    assert {p["slug"] for p in lab.bearer(lab.sysadmin()).get("/api/v1/projects").json()["items"]} == {
        "default",
        "siskin",
    }
    assert [n["name"] for n in client.get("/api/v1/nodes").json()["items"]] == ["dgx-01"]
    assert client.get("/api/v1/nodes/dgx-01").json()["gpus"] == 8


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "waste?from=2026-01-01&to=2026-02-01",
            "Unknown query parameter 'from'. This address takes days, by, sort",
        ),
        ("jobs?stat=alive", "Did you mean state?"),
        ("me?limit=1", "this address takes none"),
        ("waste.csv?day=3", "Did you mean days?"),
    ],
)
def test_unknown_query_parameters_are_refused_by_name(mira, path, message):
    """They were ignored, so that the answer was that to another query."""
    problem = is_problem(lab.bearer(mira).get(f"/api/v1/{path}"), 422)
    assert message in problem["detail"]
    assert [error["field"] for error in problem["errors"]] == [
        pair.partition("=")[0] for pair in path.partition("?")[2].split("&")
    ]


def test_nobody_hears_of_parameters_before_signing_in():
    is_problem(Client().get("/api/v1/waste?from=1"), 401)


def test_every_address_refuses_unknown_query_parameters(mira):
    """Only reading addresses are tried: a body would have to be right first."""
    client, schema = lab.bearer(mira), Client().get("/api/openapi.json").json()
    paths = [path for path, methods in schema["paths"].items() if "get" in methods]
    assert len(paths) > 40
    for path in paths:
        filled = re.sub(r"\{(\w+)\}", lambda match: "1", path)
        answer = client.get(f"{filled}?nonsense=1")
        assert answer.status_code == 422, (path, answer.content)
        assert "nonsense" in answer.json()["detail"]
