"""Jobs over REST: submit in three forms, find, change, cancel, resume, delete; and what others may not even know of."""

import io
import json
import tarfile
from datetime import timedelta

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.utils import timezone

from jobs.models import Checkpoint, Event, Job
from portal.models import AuditEntry
from tests import lab
from tests.lab import send

pytestmark = pytest.mark.django_db
JOBS = "/api/v1/jobs"
TOML = 'name = "wren"\n[run]\nrecipe = "language"\nsteps = 200  # enough\n'


@pytest.fixture(autouse=True)
def runs(tmp_path, settings):
    settings.VIGIL_RUNS = tmp_path / "runs"
    settings.VIGIL_RUNS.mkdir()


@pytest.fixture
def project():
    return lab.a_project()


@pytest.fixture
def mira(project):
    return lab.person("mira", project)


@pytest.fixture
def client(mira):
    return lab.bearer(mira)


def code(**files: str) -> SimpleUploadedFile:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("_", "."))
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return SimpleUploadedFile("code.tar.gz", packed.getvalue())


def checkpoint(job: Job, step: int, **fields) -> Checkpoint:
    given = {"name": f"step-{step}", "generation": 1, "created_at": timezone.now(), "attempt": job.latest}
    return Checkpoint.objects.create(job=job, step=step, **{**given, **fields})


# Submitting


def test_submit_as_json(client):
    answer = send(client, "post", JOBS, {"spec": {**lab.SPEC, "tags": ["b", "a"], "notes": "first"}})
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["Location"] == f"{JOBS}/{job['id']}"
    assert {**job, "attempt": None, "created_at": None} == {
        "id": Job.objects.get().pk, "name": "wren", "kind": "distributed", "project": "default", "owner": "mira",
        "state": "pending", "reason": "", "attempt": None, "latest": {}, "tags": ["a", "b"], "notes": "first",
        "progress": {"step": None, "steps": 200, "fraction": None, "eta_seconds": None}, "created_at": None,
        "started_at": None, "ended_at": None, "over": False, "parent": None,
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


def test_submit_a_script_with_its_code(settings):
    sam = lab.sysadmin()
    lab.a_project()
    toml = 'name = "mine"\nkind = "script"\n[script]\ndirectory = "."\n'
    sent = {"spec_toml": toml, "code": code(train_py="print(1)")}
    answer = lab.bearer(sam).post(JOBS, sent)
    assert answer.status_code == 201, answer.content
    assert len(list(settings.VIGIL_RUNS.glob(".uploads/*.tar.gz"))) == 1
    missing = lab.bearer(sam).post(JOBS, {"spec_toml": toml, "code": code(other_py="print(1)")})
    assert missing.json()["errors"][0]["field"] == "script.entry"
    stranger = lab.bearer(sam).post(JOBS, {"spec_toml": toml, "file": code(train_py="print(1)")})
    assert stranger.json()["errors"][0]["field"] == "file"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({**lab.SPEC, "colour": "red"}, "colour"),
        ({**lab.SPEC, "run": {"recipe": "language", "stepps": 5}}, "run.stepps"),
        ({**lab.SPEC, "run": {"steps": "many"}}, "run.steps"),
        ({**lab.SPEC, "resources": {"nodes": 0}}, "resources.nodes"),
        ({**lab.SPEC, "resources": {"time_limit": "12 hours"}}, "resources.time_limit"),
        ({**lab.SPEC, "name": "../../etc"}, "name"),
        ({**lab.SPEC, "kind": "federated"}, "kind"),
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
        ('{"spec": ' * 50_000, "application/json", 400),
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


def test_a_repeat_with_the_same_key_makes_one_job(client, mira):
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


def test_check_says_what_would_happen_and_changes_nothing(client):
    answer = send(client, "post", f"{JOBS}/check", {"spec": lab.SPEC})
    assert answer.status_code == 200
    assert answer.json()["spec"]["restart"]["max_restarts"] == 3
    assert "max_restarts = 3" in answer.json()["spec_toml"]
    assert {"level", "title", "text"} == set(answer.json()["findings"][0])
    assert not Job.objects.exists()


def test_spec_schema(client):
    schema = client.get("/api/v1/spec/schema").json()
    assert "resources" in schema["properties"]


# Finding


def ids(answer) -> list[int]:
    assert answer.status_code == 200, answer.content
    return [job["id"] for job in answer.json()["items"]]


@pytest.fixture
def four(mira, project):
    tomas = lab.person("tomas", project)
    return [
        lab.a_job(mira, project, name="gpt-small", tags=("lora", "night")),
        lab.a_job(mira, project, name="gpt-large", state="running", attempt={"step": 50, "steps": 200}),
        lab.a_job(tomas, project, name="vision", state="failed", tags=("lora",)),
        lab.a_job(tomas, project, name="a_b", state="pending"),
    ]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", [3, 2, 1, 0]),
        ("sort=created", [0, 1, 2, 3]),
        ("sort=name", [3, 1, 0, 2]),
        ("sort=-name", [2, 0, 1, 3]),
        ("sort=state", [0, 2, 3, 1]),
        ("sort=owner", [0, 1, 2, 3]),
        ("sort=-project", [3, 2, 1, 0]),
        ("state=running", [1]),
        ("state=failed&state=pending", [3, 2]),
        ("state=alive", [3, 1]),
        ("state=bad", [2]),
        ("state=ended", [2, 0]),
        ("q=GPT", [1, 0]),
        ("q=gpt+small", [0]),
        ("q=lora", [2, 0]),
        ("q=tomas", [3, 2]),
        ("q=%25", []),
        ("q=_", [3]),
        ("q=a_b", [3]),
        ("tag=lora&tag=night", [0]),
        ("owner=tomas", [3, 2]),
        ("kind=script", []),
        ("project=default", [3, 2, 1, 0]),
        ("project=none", []),
        ("created_before=2000-01-01T00:00:00Z", []),
        ("created_after=2000-01-01T00:00:00Z", [3, 2, 1, 0]),
    ],
)
def test_filters_search_and_order(client, four, query, found):
    assert ids(client.get(f"{JOBS}?{query}")) == [four[i].pk for i in found]


def test_search_by_number(client, four):
    assert ids(client.get(f"{JOBS}?q={four[2].pk}")) == [four[2].pk]
    assert ids(client.get(JOBS, {"q": f"#{four[2].pk}"})) == [four[2].pk]


@pytest.mark.parametrize("query", ["state=asleep", "sort=colour", "created_after=2020-01-01T00:00:00", "limit=0"])
def test_wrong_filters_say_what_there_is(client, query):
    answer = client.get(f"{JOBS}?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == query.split("=")[0]


@pytest.mark.parametrize(
    "sort", ["-created", "created", "name", "-name", "state", "-ended", "started", "owner", "-project"]
)
def test_pages_hold_each_job_once_in_every_order(client, mira, project, sort):
    for i in range(11):
        state = ["pending", "running", "completed"][i % 3]
        lab.a_job(mira, project, name=f"same-{i % 2}", state=state)
    seen, cursor = [], ""
    while cursor is not None:
        answer = client.get(f"{JOBS}?sort={sort}&limit=3&cursor={cursor}")
        seen += ids(answer)
        cursor = answer.json()["next"]
    assert len(seen) == len(set(seen)) == 11
    assert seen == ids(client.get(f"{JOBS}?sort={sort}&limit=100"))


def test_a_new_job_shifts_no_page(client, mira, project):
    old = [lab.a_job(mira, project) for _ in range(4)]
    first = client.get(f"{JOBS}?limit=2").json()
    lab.a_job(mira, project)
    second = client.get(f"{JOBS}?limit=2&cursor={first['next']}").json()
    assert [job["id"] for job in second["items"]] == [old[1].pk, old[0].pk]


@pytest.mark.parametrize("cursor", ["x", "bm9uc2Vuc2U", "WyItY3JlYXRlZCIsbnVsbCwiYSJd", "W10", "é"])
def test_a_cursor_that_is_none_of_ours(client, four, cursor):
    assert client.get(JOBS, {"cursor": cursor}).status_code == 422


def test_a_cursor_belongs_to_its_order(client, four):
    cursor = client.get(f"{JOBS}?sort=name&limit=1").json()["next"]
    assert client.get(f"{JOBS}?sort=-name&limit=1&cursor={cursor}").status_code == 422


def test_lists_cost_the_same_number_of_queries_however_long(client, mira, project, django_assert_num_queries):
    client.get("/api/v1/me")
    for count in (1, 12):
        for _ in range(count):
            lab.a_job(mira, project, tags=("a", "b"))
        with django_assert_num_queries(4):  # the token, the page's keys, its jobs, their tags
            client.get(f"{JOBS}?limit=100")


def test_progress_of_a_running_job(client, mira, project):
    ago = timezone.now() - timedelta(seconds=2)
    pace = {"pace_seconds": 10.0, "pace_steps": 20.0, "last_report_at": ago}
    attempt = {"step": 50, "steps": 200, "latest": {"loss": 2.5}, **pace}
    job = lab.a_job(mira, project, state="running", attempt=attempt)
    answer = client.get(f"{JOBS}/{job.pk}").json()
    assert answer["progress"]["fraction"] == 0.25
    assert 70 <= answer["progress"]["eta_seconds"] <= 73
    assert answer["latest"]["loss"] == 2.5


# Other people's


@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("get", ""), ("patch", ""), ("delete", ""), ("post", "/cancel"), ("post", "/resume"), ("get", "/spec"),
        ("get", "/attempts"), ("get", "/checkpoints"), ("get", "/events"),
    ],
)  # fmt: skip
def test_a_job_that_one_may_not_see_is_not_there(mira, method, rest):
    siskin = lab.a_project("siskin")
    job = lab.a_job(lab.person("oskar", siskin), siskin)
    client = lab.bearer(mira)
    body = {} if method in {"patch", "post"} else None
    hidden = send(client, method, f"{JOBS}/{job.pk}{rest}", body)
    missing = send(client, method, f"{JOBS}/{job.pk + 1}{rest}", body)
    assert hidden.status_code == missing.status_code == 404
    assert hidden.json()["detail"].replace(str(job.pk), "N") == missing.json()["detail"].replace(str(job.pk + 1), "N")
    assert Job.objects.filter(pk=job.pk).exists()
    assert ids(client.get(JOBS)) == []


def test_a_colleagues_job_may_be_seen_but_not_changed(mira, project):
    job = lab.a_job(mira, project, state="running")
    client = lab.bearer(lab.person("tomas", project))
    assert client.get(f"{JOBS}/{job.pk}").status_code == 200
    for method, rest, body in (("patch", "", {"notes": "x"}), ("delete", "", None), ("post", "/cancel", None)):
        answer = send(client, method, f"{JOBS}/{job.pk}{rest}", body)
        assert answer.status_code == 403
        assert "mira" in answer.json()["detail"]
    job.latest.refresh_from_db()
    assert job.latest.cancel_asked_at is None


# Changing


def test_change_name_tags_and_notes(client, mira, project):
    job = lab.a_job(mira, project, tags=("old", "kept"))
    answer = send(client, "patch", f"{JOBS}/{job.pk}", {"name": "better", "tags": ["kept", "new", "new"], "notes": "n"})
    assert (answer.json()["name"], answer.json()["tags"], answer.json()["notes"]) == ("better", ["kept", "new"], "n")
    answer = send(client, "patch", f"{JOBS}/{job.pk}", {"tags": []})
    assert (answer.json()["name"], answer.json()["tags"]) == ("better", [])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "../x"}, "name"),
        ({"name": None}, "name"),
        ({"tags": ["a b"]}, "tags.0"),
        ({"notes": "\0"}, "notes"),
        ({"state": "completed"}, "state"),
    ],
)
def test_wrong_changes_change_nothing(client, mira, project, changes, field):
    job = lab.a_job(mira, project, tags=("kept",))
    answer = send(client, "patch", f"{JOBS}/{job.pk}", changes)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
    assert client.get(f"{JOBS}/{job.pk}").json()["tags"] == ["kept"]


def test_cancel_asks_once_and_refuses_the_ended(client, mira, project):
    job = lab.a_job(mira, project, state="running")
    answer = send(client, "post", f"{JOBS}/{job.pk}/cancel")
    assert answer.status_code == 202
    assert answer.json()["attempt"]["cancel_asked_at"]
    ended = lab.a_job(mira, project)
    assert send(client, "post", f"{JOBS}/{ended.pk}/cancel").status_code == 409


def test_resume(client, mira, project):
    running = lab.a_job(mira, project, state="running")
    assert send(client, "post", f"{JOBS}/{running.pk}/resume").status_code == 409
    job = lab.a_job(mira, project, state="failed")
    checkpoint(job, 100)
    wrong = send(client, "post", f"{JOBS}/{job.pk}/resume", {"step": 90})
    assert wrong.status_code == 422
    assert wrong.json()["errors"][0]["field"] == "step"
    answer = send(client, "post", f"{JOBS}/{job.pk}/resume", {"step": 100}, Idempotency_Key="r")
    assert answer.status_code == 201
    assert answer.json()["number"] == 2
    again = send(client, "post", f"{JOBS}/{job.pk}/resume", {"step": 100}, Idempotency_Key="r")
    assert again.json()["id"] == answer.json()["id"]
    completed = lab.a_job(mira, project)
    assert send(client, "post", f"{JOBS}/{completed.pk}/resume", {}).status_code == 409


@pytest.mark.parametrize("body", [{"step": -1}, {"step": "100"}, {"step": 1.5}, {"step": 2**70}, {"to": 5}])
def test_resume_refuses_nonsense(client, mira, project, body):
    job = lab.a_job(mira, project, state="failed")
    assert send(client, "post", f"{JOBS}/{job.pk}/resume", body).status_code in {400, 422}
    assert job.attempts.count() == 1


def test_delete_takes_everything_with_it(client, mira, project, settings):
    running = lab.a_job(mira, project, state="running")
    assert client.delete(f"{JOBS}/{running.pk}").status_code == 409
    folder = settings.VIGIL_RUNS / "default" / "7-abc"
    folder.mkdir(parents=True)
    job = lab.a_job(mira, project, directory="default/7-abc")
    checkpoint(job, 100)
    assert client.delete(f"{JOBS}/{job.pk}").status_code == 204
    assert client.get(f"{JOBS}/{job.pk}").status_code == 404
    assert not folder.exists()


def test_what_sysadmins_do_to_others_is_in_the_log(mira, project):
    sam = lab.sysadmin()
    job = lab.a_job(mira, project, state="running")
    assert send(lab.bearer(sam), "post", f"{JOBS}/{job.pk}/cancel").status_code == 202
    assert AuditEntry.objects.get().action == "job.cancelled"


# Parts


def test_attempts_checkpoints_and_events(client, mira, project):
    job = lab.a_job(mira, project, state="running")
    first = checkpoint(job, 100, bytes=5_000_000, seconds=0.4)
    checkpoint(job, 200, state="pruned")
    for i in range(5):
        data = {"step": i}
        Event.objects.create(attempt=job.latest, time=timezone.now(), kind="phase" if i else "run.started", data=data)
    attempts = client.get(f"{JOBS}/{job.pk}/attempts").json()["items"]
    assert [(a["number"], a["state"]) for a in attempts] == [(1, "running")]
    checkpoints = client.get(f"{JOBS}/{job.pk}/checkpoints").json()["items"]
    assert [(c["step"], c["resumable"], c["attempt"]) for c in checkpoints] == [(200, False, 1), (100, True, 1)]
    assert checkpoints[1]["id"] == first.pk
    page = client.get(f"{JOBS}/{job.pk}/events?limit=3").json()
    rest = client.get(f"{JOBS}/{job.pk}/events?limit=3&cursor={page['next']}").json()
    assert [event["data"]["step"] for event in page["items"] + rest["items"]] == [0, 1, 2, 3, 4]
    assert rest["next"] is None
    assert len(client.get(f"{JOBS}/{job.pk}/events?kind=phase&attempt=1").json()["items"]) == 4
    assert json.dumps(page)
