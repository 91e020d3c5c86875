"""Test sweeps over REST: submitting, reading, cancelling, and who may."""

import pytest

from jobs.models import Attempt, Job, Sweep
from tests import lab
from tests.lab import send

pytestmark = pytest.mark.django_db
SWEEPS = "/api/v1/sweeps"
TOML = 'name = "rates"\n[run]\nsteps = 20\n[sweep]\nat_once = 2\n[sweep.over]\n"run.seed" = [1, 2, 3]\n'
SPEC = {"name": "rates", "run": {"steps": 20}, "sweep": {"at_once": 2, "over": {"run.seed": [1, 2, 3]}}}


@pytest.fixture
def made(client):
    answer = send(client, "post", SWEEPS, {"spec_toml": TOML})
    assert answer.status_code == 201, answer.content
    assert answer.headers["Location"] == f"{SWEEPS}/{answer.json()['id']}"
    return answer.json()


@pytest.mark.parametrize("body", [{"spec": SPEC}, {"spec_toml": TOML}])
def test_submit(client, body):
    payload = send(client, "post", SWEEPS, body).json()
    assert (payload["name"], payload["jobs"], payload["at_once"], payload["over"]) == ("rates", 3, 2, False)
    assert (payload["values"], payload["counts"]) == ({"run.seed": [1, 2, 3]}, {"pending": 3})
    assert "[sweep" in payload["spec_toml"]
    items = client.get("/api/v1/jobs", {"sweep": payload["id"], "sort": "created"}).json()["items"]
    assert [job["sweep"] for job in items] == [
        {"id": payload["id"], "index": n, "values": {"run.seed": n + 1}} for n in range(3)
    ]
    assert client.get(f"/api/v1/jobs/{items[1]['id']}").json()["spec"]["run"]["seed"] == 2


def test_the_same_key_is_the_same_sweep(client):
    first = send(client, "post", SWEEPS, {"spec_toml": TOML}, Idempotency_Key="k")
    again = send(client, "post", SWEEPS, {"spec_toml": TOML}, Idempotency_Key="k")
    assert (first.status_code, again.status_code, first.json()["id"]) == (201, 200, again.json()["id"])
    assert Job.objects.count() == 3


def test_each_door_points_to_the_other(client):
    answer = send(client, "post", "/api/v1/jobs", {"spec_toml": TOML})
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:vigil:problem:sweep")
    assert "/api/v1/sweeps" in answer.json()["detail"]
    answer = send(client, "post", SWEEPS, {"spec": lab.SPEC})
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:vigil:problem:no-sweep")
    assert "/api/v1/jobs" in answer.json()["detail"]


def test_wrong_values_are_named_and_change_nothing(client):
    for path in (SWEEPS, "/api/v1/jobs/check"):
        answer = send(client, "post", path, {"spec_toml": TOML.replace("[1, 2, 3]", "[1, -2]")})
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["field"] == "sweep.over.run.seed"
        assert "-2" in error["message"]
    assert not Sweep.objects.exists()


@pytest.mark.parametrize("key", ["tags", "after"])
def test_more_tags_and_predecessors_than_a_transaction_takes(client, key):
    listed = [f"t{i}" for i in range(11)] if key == "tags" else list(range(1, 12))
    over = {"run.seed": list(range(1_000))}
    answer = send(client, "post", SWEEPS, {"spec": {**SPEC, key: listed, "sweep": {"over": over}}})
    assert answer.status_code == 422
    assert "1,000 jobs of 11 tags and jobs to wait for each are too much" in answer.json()["detail"]


def test_each_job_has_the_tags(client):
    payload = send(client, "post", SWEEPS, {"spec": {**SPEC, "tags": ["b", "a"]}}).json()
    items = client.get("/api/v1/jobs", {"sweep": payload["id"]}).json()["items"]
    assert [sorted(job["tags"]) for job in items] == [["a", "b"]] * 3


def test_check_counts_the_jobs(client):
    found = send(client, "post", "/api/v1/jobs/check", {"spec_toml": TOML}).json()
    assert found["findings"][0]["title"] == "Sweep"
    assert "3 of run.seed, 2 at once" in found["findings"][0]["text"]


def test_list_read_and_cancel(client, made):
    assert [item["id"] for item in client.get(SWEEPS).json()["items"]] == [made["id"]]
    answer = send(client, "post", f"{SWEEPS}/{made['id']}/cancel")
    assert answer.status_code == 202
    assert Attempt.objects.exclude(cancel_asked_at=None).count() == 3
    Attempt.objects.update(ended_at="2026-01-01T00:00Z", decided_at="2026-01-01T00:00Z", state="cancelled")
    found = client.get(f"{SWEEPS}/{made['id']}").json()
    assert (found["counts"], found["over"]) == ({"cancelled": 3}, True)
    assert send(client, "post", f"{SWEEPS}/{made['id']}/cancel").status_code == 409


def test_a_stranger_s_sweep_does_not_exist_and_a_member_s_is_not_cancelled(client, made):
    stranger = lab.bearer(lab.person("eve", lab.a_project("other")))
    assert stranger.get(f"{SWEEPS}/{made['id']}").status_code == 404
    assert stranger.get(SWEEPS).json()["items"] == []
    assert stranger.get("/api/v1/jobs", {"sweep": made["id"]}).json()["items"] == []
    assert send(stranger, "post", f"{SWEEPS}/{made['id']}/cancel").status_code == 404
    member = lab.bearer(lab.person("tomas", lab.a_project()))
    assert member.get(f"{SWEEPS}/{made['id']}").status_code == 200
    assert send(member, "post", f"{SWEEPS}/{made['id']}/cancel").status_code == 403
