"""Test submitting over REST: in three forms, once per idempotency key; invalid specs and invalid requests."""

import io
import tarfile

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from jobs.models import Job
from tests import lab
from tests.jobs.submissions import ENTRIES, its_code, packed, text_of
from tests.lab import send

pytestmark = pytest.mark.django_db
JOBS = "/api/v1/jobs"
TOML = 'name = "wren"\n[run]\nrecipe = "language"\nsteps = 200  # enough\n'


def test_submit_as_json(client):
    answer = send(client, "post", JOBS, {"spec": {**lab.SPEC, "tags": ["b", "a"], "notes": "first"}})
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["Location"] == f"{JOBS}/{job['id']}"
    assert {**job, "attempt": None, "created_at": None} == {
        "id": Job.objects.get().pk, "name": "wren", "kind": "distributed", "project": "default", "owner": "mira",
        "state": "pending", "reason": "", "explained": "", "attempt": None, "latest": {},
            "tags": ["a", "b"], "notes": "first",
        "progress": {"step": None, "steps": 200, "fraction": None, "eta_seconds": None}, "created_at": None,
        "started_at": None, "ended_at": None, "over": False, "parent": None, "sweep": None,
        "url": f"http://127.0.0.1:8000/jobs/{job['id']}",
    }  # fmt: skip
    assert (job["attempt"]["number"], job["attempt"]["state"]) == (1, "pending")
    detail = client.get(answer.headers["Location"]).json()
    assert detail["spec"]["resources"]["nodes"] == 1
    assert 'name = "wren"' in detail["spec_toml"]


@pytest.mark.parametrize("kind", ["application/toml", "text/toml; charset=utf-8"])
def test_submit_as_toml_keeps_the_text(client, kind):
    answer = client.post(JOBS, data=TOML, content_type=kind)
    assert answer.status_code == 201
    assert client.get(f"{JOBS}/{answer.json()['id']}/spec").json()["spec_toml"] == TOML


def test_submit_toml_within_json(client):
    assert send(client, "post", JOBS, {"spec_toml": TOML}).status_code == 201


def code(**files: str) -> SimpleUploadedFile:
    return SimpleUploadedFile("code.tar.gz", packed(**files))


@pytest.mark.parametrize("table", ENTRIES)
def test_submit_with_code(settings, table):
    sam = lab.sysadmin()
    lab.a_project()
    toml = text_of(table)
    sent = {"spec_toml": toml, "code": SimpleUploadedFile("code.tar.gz", its_code(table))}
    answer = lab.bearer(sam).post(JOBS, sent)
    assert answer.status_code == 201, answer.content
    assert len(list(settings.VIGIL_RUNS.glob(".uploads/*.tar.gz"))) == 1
    refused = {
        f"{table}.entry": {"spec_toml": toml, "code": code(other_py="print(1)")},
        f"{table}.directory": {"spec_toml": toml},
        "code": {"spec_toml": text_of(table, git="https://x.org/y", ref="v1"), "code": code(other_py="")},
    }
    for field, wrong in refused.items():
        assert [error["field"] for error in lab.bearer(sam).post(JOBS, wrong).json()["errors"]] == [field]
    stranger = lab.bearer(sam).post(JOBS, {"spec_toml": toml, "file": code(train_py="print(1)")})
    assert stranger.json()["errors"][0]["field"] == "file"


def test_a_shell_script_without_a_first_line_is_refused_by_field():
    sam = lab.bearer(lab.sysadmin())
    lab.a_project()
    text = text_of("script").replace('entry = "train.py"', 'entry = "run.sh"')
    sent = {"spec_toml": text if "run.sh" in text else f'{text}\nentry = "run.sh"\n'}
    (error,) = sam.post(JOBS, sent | {"code": plain("run.sh", "export A=1\n")}).json()["errors"]
    assert error["field"] == "script.entry"
    assert "#!/bin/bash" in error["message"]
    created = sam.post(JOBS, sent | {"code": plain("run.sh", "#!/bin/bash\nexport A=1\n")})
    assert created.status_code == 201, created.content


def plain(name: str, text: str) -> SimpleUploadedFile:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(text), 0o644
        archive.addfile(member, io.BytesIO(text.encode()))
    return SimpleUploadedFile("code.tar.gz", buffer.getvalue())


def test_submit_toml_as_a_file():
    """The request is what curl sends for `-F spec_toml=@job.toml`."""
    sam = lab.bearer(lab.sysadmin())
    lab.a_project()
    sent = {"spec_toml": SimpleUploadedFile("job.toml", TOML.encode())}
    assert sam.post(JOBS, sent).status_code == 201
    assert sam.post(JOBS, {"spec_toml": SimpleUploadedFile("job.toml", b"\xff")}).status_code == 400


def test_every_file_that_a_federation_is_made_of_is_searched_for():
    sam = lab.bearer(lab.sysadmin())
    lab.a_project()
    both = 'name = "mine"\nkind = "federated"\n[client]\ndirectory = "."\n[run]\nrecipe = "client"\nalgorithm = "own"\n'
    lacking = {"spec_toml": both, "code": code(client_py="")}
    assert [error["field"] for error in sam.post(JOBS, lacking).json()["errors"]] == ["client.algorithm"]
    neither = sam.post(JOBS, {"spec_toml": both, "code": code(other_py="")})
    assert [error["field"] for error in neither.json()["errors"]] == ["client.entry", "client.algorithm"]
    alone = both.replace('recipe = "client"\n', "")
    assert sam.post(JOBS, {"spec_toml": alone, "code": code(algorithm_py="")}).status_code == 201


@pytest.mark.parametrize("kind", ["federated", "distributed"])
def test_code_that_no_table_needs_is_refused(kind):
    lab.a_project()
    sent = {"spec_toml": f'name = "x"\nkind = "{kind}"\n', "code": code(client_py="")}
    answer = lab.bearer(lab.sysadmin()).post(JOBS, sent)
    assert [(error["field"], "[client]" in error["message"]) for error in answer.json()["errors"]] == [("code", True)]


@pytest.mark.parametrize("table", ENTRIES)
def test_code_of_whoever_is_not_trusted_is_refused(client, table):
    for toml in (text_of(table), text_of(table, git="https://x.org/y", ref="v1")):
        sent = {"spec_toml": toml, "code": SimpleUploadedFile("code.tar.gz", its_code(table))}
        answer = client.post(JOBS, sent)
        assert (answer.status_code, "VIGIL_LOCAL_TRUST" in answer.content.decode()) == (403, True)
        assert "VIGIL_LOCAL_TRUST" in send(client, "post", f"{JOBS}/check", {"spec_toml": toml}).content.decode()
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({**lab.SPEC, "colour": "red"}, "colour"),
        ({**lab.SPEC, "run": {"recipe": "language", "stepps": 5}}, "run.stepps"),
        ({**lab.SPEC, "run": {"steps": "many"}}, "run.steps"),
        ({**lab.SPEC, "resources": {"nodes": 0}}, "resources.nodes"),
        ({**lab.SPEC, "resources": {"time_limit": "12 hours"}}, "resources.time_limit"),
        ({**lab.SPEC, "name": "../../etc"}, "name"),
        ({**lab.SPEC, "kind": "federal"}, "kind"),
        ({**lab.SPEC, "project": "siskin"}, "project"),
        ({"kind": "distributed"}, "name"),
    ],
)
def test_a_wrong_spec_names_the_field_and_changes_nothing(client, spec, field):
    lab.a_project("siskin")
    for path in (JOBS, f"{JOBS}/check")[: 1 if field == "project" else 2]:
        answer = send(client, "post", path, {"spec": spec})
        assert answer.status_code == 422
        assert answer.json()["type"] == "urn:vigil:problem:invalid-spec"
        assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        ({"spec": lab.SPEC, "spec_toml": TOML}, "application/json", 422),
        ({}, "application/json", 422),
        ({"spec": lab.SPEC, "more": 1}, "application/json", 422),
        ({"spec": []}, "application/json", 422),
        ("[]", "application/json", 400),
        ('{"spec": {"name": NaN}}', "application/json", 400),
        ('{"spec": ' * 50_000, "application/json", 422),
        (b"\xff", "application/toml", 400),
        ("name = ", "application/toml", 422),
        (f'name = "{"x" * 70_000}"', "application/toml", 422),
        (b"x" * 10_000_000, "application/toml", 413),
        (TOML, "text/plain", 415),
        ({"spec": lab.SPEC, "parent": 12345}, "application/json", 422),
        ({"spec": lab.SPEC, "parent": 2**70}, "application/json", 422),
    ],
)
def test_what_is_no_request(client, body, kind, status):
    answer = client.post(JOBS, data=body, content_type=kind)
    assert answer.status_code == status, answer.content
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert not Job.objects.exists()


def test_an_unwrapped_spec_is_refused_with_how_to_wrap_it(client):
    answer = send(client, "post", JOBS, {"name": "birds", "spce": lab.SPEC})
    assert answer.status_code == 422
    assert {error["field"]: error["message"] for error in answer.json()["errors"]} == {
        "name": 'Unknown field "name". Did you mean to wrap the specification in "spec"?',
        "spce": 'Unknown field "spce". Did you mean "spec"?',
    }


def test_a_repeat_with_the_same_key_makes_no_second_job(client, mira):
    first = send(client, "post", JOBS, {"spec": lab.SPEC}, Idempotency_Key="k1")
    again = send(client, "post", JOBS, {"spec": lab.SPEC}, Idempotency_Key="k1")
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    other = send(client, "post", JOBS, {"spec": {**lab.SPEC, "name": "other"}}, Idempotency_Key="k1")
    assert other.status_code == 422
    assert other.json()["type"] == "urn:vigil:problem:idempotency"
    tomas = lab.person("tomas", lab.a_project())
    assert send(lab.bearer(tomas), "post", JOBS, {"spec": lab.SPEC}, Idempotency_Key="k1").status_code == 201
    assert Job.objects.count() == 2
    assert send(client, "post", JOBS, {"spec": lab.SPEC}, Idempotency_Key="k" * 300).status_code == 422


def test_clone_names_its_parent(client):
    first = send(client, "post", JOBS, {"spec": lab.SPEC}).json()
    toml = client.get(f"{JOBS}/{first['id']}/spec").json()["spec_toml"]
    clone = send(client, "post", JOBS, {"spec_toml": toml, "parent": first["id"]}).json()
    assert clone["parent"] == first["id"]
    assert client.get(f"{JOBS}?parent={first['id']}").json()["items"][0]["id"] == clone["id"]


def test_check_describes_what_would_happen_and_changes_nothing(client):
    answer = send(client, "post", f"{JOBS}/check", {"spec": lab.SPEC})
    assert answer.status_code == 200
    assert answer.json()["spec"]["restart"]["max_restarts"] == 3
    assert "max_restarts = 3" in answer.json()["spec_toml"]
    assert {"level", "title", "text"} == set(answer.json()["findings"][0])
    assert not Job.objects.exists()


def test_spec_schema(client):
    schema = client.get("/api/v1/spec/schema").json()
    assert "resources" in schema["properties"]
