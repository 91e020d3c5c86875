"""Test the site's catalogue entries over REST: for sysadmins only, tried before acceptance, replayed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import Client

from jobs.models import Replay, SiteEntry
from jobs.postmortem import replay
from portal.models import User
from tests.lab import bearer, send, sysadmin

pytestmark = pytest.mark.django_db
WHERE = "/api/v1/catalogue"
OURS: dict[str, Any] = {
    "name": "storage.ours_down",
    "role": "root",
    "cause": "storage.io",
    "source": "our own mounter",
    "pattern": r"ourfs: volume \S+ went away",
    "example": "ourfs: volume scratch-07 went away after 512 ms",
    "look_alike": "ourfs: volume scratch-07 came back",
}


@pytest.fixture
def ops() -> Client:
    return bearer(sysadmin("ops"), scope="admin")


def test_a_life_of_an_entry(ops: Client) -> None:
    created = send(ops, "post", f"{WHERE}/entries", OURS)
    assert created.status_code == 201, created.json()
    payload = created.json()
    assert (payload["name"], payload["is_enabled"], payload["made_by"]) == (OURS["name"], True, "ops")
    assert ops.get(f"{WHERE}/entries").json()["items"] == [payload]
    assert ops.get(f"{WHERE}/entries/{OURS['name']}").json() == payload
    assert send(ops, "post", f"{WHERE}/entries", OURS).status_code == 409
    changed = send(ops, "put", f"{WHERE}/entries/{OURS['name']}", {**OURS, "name": "x.y", "advice": "Wait."}).json()
    assert (changed["name"], changed["advice"]) == ("x.y", "Wait.")
    assert not send(ops, "patch", f"{WHERE}/entries/x.y", {"is_enabled": False}).json()["is_enabled"]
    assert ops.delete(f"{WHERE}/entries/x.y").status_code == 204
    assert not SiteEntry.objects.exists()
    for method in ("get", "delete"):
        assert send(ops, method, f"{WHERE}/entries/x.y").status_code == 404


def test_unfit_entries_are_reported_by_field(ops: Client) -> None:
    slow = {**OURS, "pattern": r".{2,1000}.{2,1000}went away"}
    answer = send(ops, "post", f"{WHERE}/entries", slow)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "pattern"
    assert error["message"].startswith("It took ")
    payload = send(ops, "post", f"{WHERE}/check", {**OURS, "look_alike": OURS["example"]}).json()
    assert (payload["is_fit"], payload["findings"][0]["field"]) == (False, "look_alike")
    assert send(ops, "post", f"{WHERE}/check", {**OURS, "pattern": "a\0b"}).status_code == 422
    assert send(ops, "post", f"{WHERE}/check", {**OURS, "colour": "red"}).status_code == 422
    assert not SiteEntry.objects.exists()


def test_a_replay(ops: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "enqueue", lambda number: None)
    begun = send(ops, "post", f"{WHERE}/replays", {**OURS, "most": 10})
    assert begun.status_code == 202
    where = f"{WHERE}/replays/{begun.json()['id']}"
    assert ops.get(where).json()["state"] == "going"
    replay.run_slice(begun.json()["id"])
    assert ops.get(where).json()["state"] == "done"
    assert ops.delete(where).status_code == 204
    assert ops.get(where).status_code == 404
    assert ops.get(f"{WHERE}/replays/99999999999999999999").status_code == 404
    assert not Replay.objects.exists()


def test_examples_of_none_are_none(ops: Client) -> None:
    answer = ops.get(f"{WHERE}/examples?limit=5")
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    assert b"".join(answer.streaming_content) == b""  # type: ignore[attr-defined]


def test_for_sysadmins_alone_and_with_their_token(client: Client, mira: User) -> None:
    row = SiteEntry.objects.create(**OURS)
    other = Replay.objects.create(asked_by=mira, entry={})
    requests: list[tuple[str, str, Any]] = [
        ("get", "entries", None),
        ("post", "entries", OURS),
        ("get", f"entries/{row.name}", None),
        ("put", f"entries/{row.name}", OURS),
        ("patch", f"entries/{row.name}", {"is_enabled": False}),
        ("delete", f"entries/{row.name}", None),
        ("post", "check", OURS),
        ("post", "replays", OURS),
        ("get", f"replays/{other.pk}", None),
        ("delete", f"replays/{other.pk}", None),
        ("get", "examples", None),
    ]
    for who in (client, bearer(sysadmin("sam"))):
        for method, path, body in requests:
            answer = send(who, method, f"{WHERE}/{path}", body)
            assert answer.status_code == 403, (method, path)
            assert "Only sysadmins" in answer.json()["detail"] or "scope admin" in answer.json()["detail"]
    assert SiteEntry.objects.filter(is_enabled=True).count() == 1
    assert json.dumps(OURS["pattern"])[1:-1] not in Client().get(f"{WHERE}/entries").text
