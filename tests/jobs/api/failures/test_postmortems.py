"""Test post-mortems over REST: the document with its figures, allowed changes, and the list of failures."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from jobs.models import Attempt, Incident
from portal.models import User
from tests.jobs.postmortem.failed_attempts import dead
from tests.lab import a_job, a_project, bearer, person, send, sysadmin

pytestmark = pytest.mark.django_db


@pytest.fixture
def incident(mira: User, runs: Path) -> Incident:
    return dead(mira, runs)


def address(incident: Incident) -> str:
    return f"/api/v1/jobs/{incident.attempt.job_id}/postmortem"


def patch(client: Client, incident: Incident, status: int = 200, **changes: Any) -> Any:
    answer = send(client, "patch", address(incident), changes)
    assert answer.status_code == status, answer.content
    return answer.json()


def test_the_document(incident: Incident, client: Client) -> None:
    payload = client.get(address(incident)).json()
    assert (payload["cause"], payload["evidence_cause"], payload["owner"]) == ("program.exception",) * 2 + (
        "researcher",
    )
    assert payload["evidence"][0]["role"] == "root"
    assert payload["figures"]["steps_lost"] == 120
    assert 590 < payload["figures"]["lost_seconds"] < 700
    assert (payload["figures"]["gpu_hours"], payload["figures"]["money"]) == (None, None)
    assert [version["version"] for version in payload["versions"]] == [1]
    assert (payload["published_at"], payload["overruled"], payload["revision"]) == (None, None, 0)
    assert payload["url"].endswith(f"/jobs/{incident.attempt.job_id}/postmortem?attempt=1")
    markdown = client.get(f"{address(incident)}.md")
    assert markdown.headers["Content-Type"].startswith("text/markdown")
    assert "KeyError: 'label'" in markdown.text


def test_is_written_published_and_overruled(incident: Incident, client: Client, oskar: User) -> None:
    response = patch(
        client, incident, narrative="It fell.", factors=["haste"], is_published=True, revision=0,
        actions=[{"text": "Write a test", "owner": "oskar", "due": "2026-12-01"}, {"text": "Rest", "is_done": True}],
        overrule={"cause": "data.corrupt", "why": "I saw it."},
    )  # fmt: skip
    assert (response["narrative"], response["factors"], response["revision"]) == ("It fell.", ["haste"], 1)
    assert (response["cause"], response["evidence_cause"], response["overruled"]["by"]) == (
        "data.corrupt",
        "program.exception",
        "mira",
    )
    assert response["published_at"]
    assert [
        (action["text"], action["owner"], action["due"], bool(action["done_at"])) for action in response["actions"]
    ] == [
        ("Write a test", "oskar", "2026-12-01", False),
        ("Rest", "", None, True),
    ]
    first = response["actions"][0]["id"]
    response = patch(
        client, incident, actions=[{"id": first, "text": "Write tests"}], overrule=None, is_published=False
    )
    assert [(action["id"], action["text"]) for action in response["actions"]] == [(first, "Write tests")]
    assert (response["cause"], response["overruled"], response["published_at"]) == ("program.exception", None, None)
    assert response["narrative"] == "It fell."


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"narrative": None}, 422),
        ({"narrative": "x" * 20_001}, 422),
        ({"factors": [""]}, 422),
        ({"actions": [{"text": "x", "owner": "nobody.here"}]}, 422),
        ({"actions": [{"text": "x", "due": "soon"}]}, 422),
        ({"actions": [{"text": "x"}] * 51}, 422),
        ({"overrule": {"cause": "witchcraft", "why": "x"}}, 422),
        ({"overrule": {"cause": "gpu.ecc", "why": "  "}}, 422),
        ({"overrule": {"cause": "gpu.ecc"}}, 422),
        ({"narrative": "a\0b"}, 422),
        ({"colour": "red"}, 422),
        ({"narrative": "x", "revision": 7}, 409),
    ],
)
def test_what_cannot_be_changes_nothing(
    incident: Incident, client: Client, changes: dict[str, Any], status: int
) -> None:
    before = client.get(address(incident)).json()
    patch(client, incident, status, **{"is_published": True, **changes})
    assert client.get(address(incident)).json() == before


def test_who_may(incident: Incident, oskar: User) -> None:
    patch(bearer(oskar), incident, 403, narrative="x")
    patch(bearer(person("lena", a_project(), role="lead")), incident, narrative="x")
    patch(bearer(sysadmin()), incident, narrative="y")
    stranger = bearer(person("stranger", a_project("elsewhere")))
    patch(stranger, incident, 404, narrative="x")
    assert stranger.get(f"{address(incident)}.md").status_code == 404


class TestList:
    @pytest.fixture
    def many(self, mira: User) -> list[Incident]:
        """Create ninety post-mortems of three causes on three nodes, an hour apart; half of them in another project."""
        jobs = [a_job(mira, a_project(), state="failed"), a_job(mira, a_project("elsewhere"), state="failed")]
        now, rows = timezone.now(), []
        for n in range(90):
            job = jobs[n % 2]
            attempt = Attempt.objects.create(job=job, number=n + 2, state="failed", ended_at=now)
            rows.append(
                Incident(
                    attempt=attempt, project=job.project, at=now - timedelta(hours=n), version=1,
                    cause=("gpu.ecc", "data.missing", "unknown")[n % 3], node=f"dgx-{n % 5}", says=f"thing {n}",
                    published_at=now if n % 10 == 0 else None,
                )
            )  # fmt: skip
        return Incident.objects.bulk_create(rows)

    def all_of(self, client: Client, query: str, limit: int = 7) -> list[str]:
        found, cursor = [], ""
        for _ in range(20):
            page = client.get(f"/api/v1/postmortems?limit={limit}&{query}{cursor}").json()
            found += [item["summary"] for item in page["items"]]
            assert all(item["says"] == item["summary"] for item in page["items"]), "its name in earlier releases"
            if not page["next"]:
                return found
            cursor = f"&cursor={page['next']}"
        raise AssertionError("there is no end of it")

    @pytest.mark.parametrize(
        ("query", "wanted"),
        [
            ("", lambda n: True),
            ("cause=gpu.ecc", lambda n: n % 3 == 0),
            ("cause=gpu.ecc&cause=unknown", lambda n: n % 3 != 1),
            ("owner=sysadmin", lambda n: n % 3 == 0),
            ("owner=researcher&cause=gpu.ecc", lambda n: False),
            ("node=dgx-4", lambda n: n % 5 == 4),
            ("node=dgx-4&cause=unknown", lambda n: n % 5 == 4 and n % 3 == 2),
            ("published=true", lambda n: n % 10 == 0),
            ("published=false&cause=gpu.ecc", lambda n: n % 10 and n % 3 == 0),
            ("project=elsewhere", lambda n: n % 2 == 1),
            ("project=elsewhere&project=default&cause=unknown", lambda n: n % 3 == 2),
            ("project=nowhere", lambda n: False),
        ],
    )
    def test_filters_and_pages(self, many: list[Incident], query: str, wanted: Any) -> None:
        whole = [f"thing {n}" for n in range(90) if wanted(n)]
        assert self.all_of(bearer(sysadmin()), query) == whole
        mira = User.objects.get(username="mira")  # a member of one of the two projects
        assert self.all_of(bearer(mira), query) == [text for text in whole if int(text.split()[1]) % 2 == 0]

    def test_since_and_what_is_refused(self, many: list[Incident], client: Client) -> None:
        since = (timezone.now() - timedelta(hours=10)).isoformat().replace("+00:00", "Z")
        assert len(self.all_of(client, f"since={since}")) == 5
        for query in (
            "since=2026-01-01T00:00:00",
            "cause=x",
            "owner=x",
            "limit=0",
            "cursor=x",
            "node=%00",
            "published=x",
        ):
            assert client.get(f"/api/v1/postmortems?{query}").status_code == 422, query

    def test_the_page_counts_by_cause_and_shows_nobody_elses(self, many: list[Incident], mira: User) -> None:
        from tests.lab import signed_in

        html = signed_in(mira).get("/postmortems?cause=gpu.ecc").text
        assert "45 incidents." in html
        for cause in ("gpu.ecc", "data.missing", "unknown"):
            assert f"<code>{cause}</code> 15" in html
        assert "thing 0" in html
        assert "thing 3<" not in html
        older = signed_in(mira).get("/postmortems?after=nonsense&published=maybe&since=x&owner=y&node=%00")
        assert older.status_code == 200


def test_former_names_of_fields_are_deprecated() -> None:
    from console.urls import api

    schemas = api.get_openapi_schema()["components"]["schemas"]
    for schema, former, name in (
        ("IncidentRow", "says", "summary"),
        ("ReplayChange", "says", "summary"),
        ("PostMortemShape", "says", "summary"),
        ("PostMortemShape", "not_seen", "unavailable"),
        ("PostMortemShape", "did", "actions_taken"),
        ("PostMortemFigures", "bad_at", "first_sign_at"),
        ("PostMortemFigures", "kept_step", "resume_step"),
        ("PostMortemFigures", "again_seconds", "resume_seconds"),
        ("CadenceOrderShape", "asked_by", "requested_by"),
        ("CadenceOrderShape", "asked_at", "requested_at"),
        ("OrderShape", "asked_by", "requested_by"),
        ("OrderShape", "asked_at", "requested_at"),
        ("ProfileShape", "asked_at", "requested_at"),
        ("ProfileShape", "waits", "is_pending"),
        ("AttemptShape", "cancel_asked_at", "cancel_requested_at"),
        ("AgentShape", "heard_at", "last_report_at"),
        ("AgentShape", "given_up", "discarded_batches"),
        ("Telemetry", "heard_at", "last_report_at"),
        ("UnseenShape", "kept", "unsubmitted"),
        ("RoundShape", "told_at", "reported_at"),
        ("WhyShape", "told_at", "reported_at"),
        ("WhyShape", "said", "scheduler_reason"),
        ("WhyShape", "never", "can_never_start"),
        ("BlockShape", "asked", "requested"),
        ("BlockShape", "is_said", "is_scheduler_reason"),
        ("WasteRow", "held_hours", "allocated_hours"),
        ("WasteTotal", "held_hours", "allocated_hours"),
        ("IdleShape", "held", "allocated_gpus"),
    ):
        fields = schemas[schema]["properties"]
        assert fields[former]["deprecated"], former
        assert fields[former]["description"] == f"Deprecated: use `{name}`."
        assert "deprecated" not in fields[name]
