"""Test an attempt's post-mortem: its project reads it, some members edit it, and nobody else sees it."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db.models import F
from django.test import Client
from django.utils import timezone

from jobs.following import ending
from jobs.following.decisions.next_attempt import next_attempt
from jobs.following.end_causes.cause import AttemptEnd
from jobs.gathering import similar
from jobs.intake import reports
from jobs.models import Attempt, Diagnosis, FollowUp, Incident, PostMortem, Stream
from jobs.postmortem import incidents
from portal.models import AuditEntry, User
from tests.jobs.pages.reading import save, text
from tests.jobs.postmortem.failed_attempts import RAISED, dead, running
from tests.jobs.reporting import Spooled, post
from tests.lab import a_project, person, signed_in, sysadmin

pytestmark = pytest.mark.django_db


@pytest.fixture
def incident(mira: User, runs: Path) -> Incident:
    return dead(mira, runs)


def page_of(client: Client, incident: Incident, query: str = "") -> str:
    answer = client.get(f"/jobs/{incident.attempt.job_id}/postmortem{query}")
    assert answer.status_code == 200
    return text(answer)


def send(client: Client, incident: Incident, what: str, **fields: Any) -> str:
    where = f"/jobs/{incident.attempt.job_id}/postmortem/{what}?attempt={incident.attempt.number}"
    return text(client.post(where, fields, follow=True))


def test_leads_with_what_happened_and_what_to_do(incident: Incident, client: Client) -> None:
    html = page_of(client, incident)
    assert "Unhandled exception on rank 1: KeyError: 'label'." in html.replace("&#x27;", "'")
    assert "90 %" in html or "sure</small>" in html
    assert "<dd>researcher</dd>" in html
    assert f'href="/runbooks/{incident.cause}"' in html
    assert 'aria-labelledby="ln-t ln-d"' in html
    assert "dgx-01" in html
    assert "Opened this post-mortem" in html


def test_the_cause_is_named_once_at_its_head(incident: Incident, client: Client) -> None:
    message = "Unhandled exception (94 % confidence). Not restarted: the same would happen again."
    Attempt.objects.update(decision=f"{message}", decided_at=timezone.now())
    head = re.search(r'<p class="say">(.*?)</p>', page_of(client, incident), re.DOTALL)
    assert head
    assert head[1].count("Unhandled exception") == 1
    assert "Not restarted: the same would happen again." in head[1]


def test_each_line_is_one_click_from_its_log(incident: Incident, client: Client) -> None:
    found = re.search(r'href="(/jobs/\d+/logs\?[^"]+)"[^>]*><code>KeyError', page_of(client, incident))
    assert found
    assert "KeyError" in text(client.get(found[1].replace("&amp;", "&")))


def test_a_line_with_a_secret_is_found_by_what_is_before_it(mira: User, client: Client, runs: Path) -> None:
    incident = dead(mira, runs, RAISED.replace("'label'", "'label' token=hf_abcdefghijklmnop end"))
    found = re.search(r'href="(/jobs/\d+/logs\?[^"]+)"[^>]*><code>KeyError', page_of(client, incident))
    assert found
    assert "hf_abcdefghijklmnop end" in text(client.get(found[1].replace("&amp;", "&")))


def test_lines_of_a_log_are_plain_text(mira: User, client: Client, runs: Path) -> None:
    evil = RAISED.replace("'label'", "'<script>alert(1)</script>\x1b[31m ```` <b>hf_abcdefghijklmnop'")
    incident = dead(mira, runs, evil)
    html = page_of(client, incident)
    assert "<script>alert" not in html
    assert "hf_abcdefghijklmnop" not in html
    written = client.get(f"/jobs/{incident.attempt.job_id}/postmortem.md")
    assert written.headers["Content-Type"].startswith("text/markdown")
    document = written.text
    fenced = re.search(r"\n(`{3,})\nKeyError[^\n]*(````)[^\n]*\n\1\n", document)
    assert fenced
    assert len(fenced[1]) > 4
    outside = re.sub(r"\n(`{3,})\n.*?\n\1\n", "\n", document, flags=re.S)
    assert "<" not in outside.replace("&lt;", "")
    assert "hf_abcdefghijklmnop" not in document
    assert "\x1b" not in document


def test_how_it_went_on_and_what_that_cost(mira: User, client: Client, runs: Path, settings: Any) -> None:
    settings.VIGIL_GPU_HOUR_PRICE = 2.0
    incident = dead(mira, runs)
    attempt, job = incident.attempt, incident.attempt.job
    long_ago = timedelta(minutes=10)  # times in the future are taken to be now
    Incident.objects.filter(pk=incident.pk).update(at=incident.at - long_ago)
    Attempt.objects.filter(pk=attempt.pk).update(
        started_at=F("started_at") - long_ago, ended_at=F("ended_at") - long_ago
    )
    incident = Incident.objects.get(pk=incident.pk)
    attempt = incident.attempt
    job.spec = {**job.spec, "resources": {**job.spec["resources"], "nodes": 2, "gpus_per_node": 8}}
    job.save(update_fields=["spec"])
    job.latest = attempt
    ended = incident.at
    stored = save(job, 100, created_at=ended - timedelta(minutes=6))
    following = next_attempt(attempt, Attempt.Origin.RESTARTED, resume_from=stored)
    again = ended + timedelta(minutes=2)
    Attempt.objects.filter(pk=following.pk).update(
        state="running", started_at=again, nodes=["dgx-01", "dgx-04"], token_digest="x", step=130
    )
    payload = {attempt: (range(90, 121), ended - timedelta(seconds=30)), following: (range(101, 131), again)}
    for item, (steps, began) in payload.items():
        spooled = Spooled().add_event(
            "run.started", (began + timedelta(minutes=1)).timestamp(), start_step=steps[0] - 1
        )
        for i, step in enumerate(steps):
            spooled.log(
                step,
                (began + timedelta(minutes=1, seconds=i)).timestamp() if item is following else began.timestamp(),
                loss=2.0,
            )
        reports.ingest(item.pk, post(spooled))
    html = page_of(client, incident)
    assert "Training resumed from step 100 on dgx-01 and dgx-04 after 3 min" in html
    assert "<dd>20 <small>of 120</small></dd>" in html
    # Six minutes of work and one more of allocation on 16 GPUs, at 2.00 each.
    assert "1.87 <small>GPU-h · €3.73</small>" in html
    assert "Loss across the restart" in html
    assert "identical values" in html
    assert "new in the next attempt" in html


def test_only_failures_have_a_post_mortem(mira: User, client: Client, runs: Path) -> None:
    for ended in (
        AttemptEnd("completed", 0),
        AttemptEnd("failed", 75),
        AttemptEnd("preempted"),
        AttemptEnd("cancelled"),
    ):
        attempt = running(mira, runs)
        assert ending.end(attempt, ended)
        none = client.get(f"/jobs/{attempt.job_id}/postmortem")
        assert none.status_code == 404
        assert "has no post-mortem: none of its attempts has failed." in text(none)
        assert f"/jobs/{attempt.job_id}/postmortem" not in text(client.get(f"/jobs/{attempt.job_id}"))


@pytest.mark.parametrize("query", ["?attempt=2", "?attempt=x", "?attempt=99999999999999999999", "?attempt=-1"])
def test_an_attempt_that_there_is_not(incident: Incident, client: Client, query: str) -> None:
    assert client.get(f"/jobs/{incident.attempt.job_id}/postmortem{query}").status_code == 404


def test_odd_spans_and_strangers(incident: Incident, client: Client) -> None:
    for query in ("?span=hour", "?span=attempt", "?span=%00", "?evidence=all"):
        page_of(client, incident, query)
    stranger = signed_in(person("stranger", a_project("elsewhere")))
    job_id = incident.attempt.job_id
    assert stranger.get(f"/jobs/{job_id}/postmortem").status_code == 404
    assert stranger.get(f"/jobs/{job_id}/postmortem.md").status_code == 404
    for what in ("write", "publish", "overrule"):
        assert stranger.post(f"/jobs/{job_id}/postmortem/{what}").status_code == 404


class TestWriting:
    def test_its_owner_writes(self, incident: Incident, client: Client, oskar: User) -> None:
        new = {"text-new0": "Write a test", "owner-new0": "oskar", "due-new0": "2026-12-01"}
        payload = {
            "narrative": "It <b>fell</b> over.\r\nTwice.",
            "factors": "no test\n\nhaste",
            "row": ["new0", "new1"],
        }
        html = send(client, incident, "write", revision=0, **payload, **new)
        assert "It &lt;b&gt;fell&lt;/b&gt; over. Twice." in html
        assert "last by mira" in html
        written = PostMortem.objects.get()
        assert (written.factors, written.revision) == (["no test", "haste"], 1)
        action = FollowUp.objects.get()
        assert (action.text, action.owner, str(action.due), action.done_at) == (
            "Write a test",
            oskar,
            "2026-12-01",
            None,
        )
        key = str(action.pk)
        send(client, incident, "write", revision=1, row=[key], **{f"text-{key}": "Write tests", f"done-{key}": "1"})
        action.refresh_from_db()
        assert (action.text, action.owner, action.done_at is not None) == ("Write tests", None, True)
        send(client, incident, "write", revision=2, row=[key], **{f"text-{key}": ""})
        assert not FollowUp.objects.exists()

    def test_what_somebody_else_wrote_meanwhile_is_not_lost(self, incident: Incident, client: Client) -> None:
        send(client, incident, "write", revision=0, narrative="mine")
        html = send(client, incident, "write", revision=0, narrative="yours")
        assert "Somebody else changed it" in html
        assert ">yours</textarea>" in html, "to be copied"
        assert 'name="revision" value="0"' in html
        assert PostMortem.objects.get().narrative == "mine"

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"row": "new0", "text-new0": "x", "owner-new0": "nobody.here"},
                "No member of this project is called nobody.here",
            ),
            ({"row": "new0", "text-new0": "x", "due-new0": "tomorrow"}, "is not a date"),
            ({"narrative": "x" * 20_001}, "At most 20000 are allowed"),
            ({"factors": "x" * 501}, "At most 500 are allowed"),
            ({"factors": "x\n" * 51}, "at most 50 are allowed"),
            ({"row": "new0", "text-new0": "x" * 301}, "At most 300 are allowed"),
            (
                {"row": [f"new{i}" for i in range(51)], **{f"text-new{i}": "x" for i in range(51)}},
                "at most 50 are allowed",
            ),
        ],
    )
    def test_what_cannot_be_is_refused_whole_and_stays_in_the_form(
        self, incident: Incident, client: Client, fields: dict[str, Any], message: str
    ) -> None:
        fields = {"narrative": "<i>mine</i>", "factors": "haste", **fields}
        where = f"/jobs/{incident.attempt.job_id}/postmortem/write?attempt=1"
        answer = client.post(where, {"revision": 0, **fields})
        html = text(answer)
        assert answer.status_code == 422
        assert message in html
        assert "&lt;i&gt;mine&lt;/i&gt;</textarea>" in html or len(fields["narrative"]) > 99
        assert 'name="text-new0" value="x' in html or "row" not in fields
        assert 'value="nobody.here"' in html or "owner-new0" not in fields
        assert '<details class="write" open><summary>Write about it' in html
        assert not PostMortem.objects.exists()
        assert client.get(where).headers["Location"].endswith("/postmortem?attempt=1"), "for links of that page"

    def test_members_read_and_leads_and_sysadmins_write(self, incident: Incident, oskar: User) -> None:
        member, lead = signed_in(oskar), signed_in(person("lena", a_project(), role="lead"))
        assert "Overrule the cause" not in page_of(member, incident)
        for what in ("write", "publish", "overrule"):
            html = send(member, incident, what, narrative="x", published="1", cause="gpu.ecc", why="x")
            assert "belongs to mira" in html
        assert not PostMortem.objects.exists()
        send(lead, incident, "write", narrative="by a lead")
        assert PostMortem.objects.get().narrative == "by a lead"
        send(signed_in(sysadmin()), incident, "publish", published="1")
        assert AuditEntry.objects.get().action == "postmortem.published"
        assert "published by sam" in page_of(member, incident)
        send(lead, incident, "publish", published="0")
        assert "published" not in page_of(member, incident)


class TestOverruling:
    def test_is_final_and_keeps_the_cause_by_evidence(self, incident: Incident, client: Client) -> None:
        html = send(client, incident, "overrule", cause="data.corrupt", why="The index of shard 7 was cut off.")
        assert "Corrupt data, according to mira: The index of shard 7 was cut off." in html
        assert "by the evidence it was <code>program.exception</code>" in html
        incident.refresh_from_db()
        assert (incident.cause, incident.is_final, incident.due_at) == ("data.corrupt", True, None)
        Incident.objects.update(due_at=timezone.now())
        incidents.diagnose(incident.pk)
        incident.refresh_from_db()
        assert incident.cause == "data.corrupt"
        assert Diagnosis.objects.get().cause == "program.exception"
        assert "Corrupt data, according to mira" in text(client.get(f"/jobs/{incident.attempt.job_id}"))

    def test_a_verdict_that_was_being_made_meanwhile_does_not_come_before_it(
        self, mira: User, runs: Path, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        incident = dead(mira, runs)
        verdict_on = incidents.diagnose_incident

        def meanwhile(found: Incident) -> Any:
            send(client, found, "overrule", cause="data.corrupt", why="I saw it.")
            return verdict_on(found)

        monkeypatch.setattr(incidents, "diagnose_incident", meanwhile)
        Incident.objects.update(due_at=timezone.now())
        assert not incidents.diagnose(incident.pk)
        incident.refresh_from_db()
        assert incident.cause == "data.corrupt"

    def test_may_be_taken_back(self, incident: Incident, client: Client) -> None:
        send(client, incident, "overrule", cause="data.corrupt", why="So it seemed.")
        assert "program.exception" in send(client, incident, "overrule")
        incident.refresh_from_db()
        assert (incident.cause, incident.overruled_at, incident.overruled_why) == ("program.exception", None, "")
        assert not incident.is_final, "evidence may have come meanwhile"
        assert incident.due_at <= timezone.now()

    def test_waits_for_the_first_verdict(self, mira: User, runs: Path, client: Client) -> None:
        """An incident that nobody diagnoses any more would otherwise have no verdict for ever."""
        attempt = running(mira, runs)
        assert ending.end(attempt, AttemptEnd("failed", 1))
        incident = Incident.objects.get()
        assert "Overrule the cause" not in page_of(client, incident)
        assert "Its logs are being read" in send(client, incident, "overrule", cause="gpu.ecc", why="I saw it.")
        incident.refresh_from_db()
        assert (incident.overruled_at, incident.is_final) == (None, False)
        incidents.diagnose(incident.pk)
        assert "Overrule the cause" in page_of(client, incident)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"cause": "witchcraft", "why": "I saw it."}, "is not a cause"),
            ({"cause": "gpu.ecc"}, "Give a reason"),
            ({"cause": "gpu.ecc", "why": "x" * 2_001}, "At most 2000 are allowed"),
        ],
    )
    def test_needs_a_cause_and_a_reason(
        self, incident: Incident, client: Client, fields: dict[str, str], message: str
    ) -> None:
        html = send(client, incident, "overrule", **fields)
        assert message in html
        assert f'value="{fields.get("why", "")}"' in html
        assert '<option value="gpu.ecc" selected>' in html or fields["cause"] != "gpu.ecc"
        assert Incident.objects.get().overruled_at is None


def test_a_revision_is_shown(incident: Incident, client: Client) -> None:
    verdict = Diagnosis.objects.get().verdict
    Diagnosis.objects.create(
        incident=incident, version=2, cause="gpu.off_bus", confidence=0.97, verdict=verdict | {"cause": "gpu.off_bus"}
    )
    Incident.objects.update(version=2, cause="gpu.off_bus")
    html = page_of(client, incident)
    assert "first <code>program.exception</code>, now <code>gpu.off_bus</code>" in html
    assert "Revised it: now gpu.off_bus" in html


def test_similar_incidents_are_only_those_visible_to_the_reader(mira: User, runs: Path, client: Client) -> None:
    incident, same = dead(mira, runs), dead(mira, runs)
    hidden = dead(person("stranger", a_project("elsewhere")), runs, project="elsewhere")
    assert hidden.fingerprint == incident.fingerprint == same.fingerprint
    html = page_of(client, incident)
    assert f"/jobs/{same.attempt.job_id}/postmortem" in html
    assert "same failure" in html
    assert f"/jobs/{hidden.attempt.job_id}/" not in html
    assert f"/jobs/{hidden.attempt.job_id}/" in page_of(signed_in(sysadmin()), incident)


def test_incidents_on_its_node_stand_next_to_those_of_its_program(mira: User, runs: Path, client: Client) -> None:
    incident, on_node = dead(mira, runs), dead(mira, runs)
    newer = [dead(mira, runs) for _ in range(5)]
    Incident.objects.update(node="dgx-01")
    Incident.objects.exclude(pk__in=[incident.pk, *(item.pk for item in newer)]).update(fingerprint="another")
    incident.refresh_from_db()
    found = similar.find(incident, mira)
    assert [(item.incident.pk, item.what) for item in found][-1] == (on_node.pk, "same node")
    assert len(found) == 6


def test_is_linked_from_job_and_home_pages(incident: Incident, client: Client) -> None:
    address = f"/jobs/{incident.attempt.job_id}/postmortem?attempt=1"
    for path in ("", "/attempts", "/life"):
        assert address in text(client.get(f"/jobs/{incident.attempt.job_id}{path}")), path
    home = text(client.get("/"))
    assert address in home
    assert "Unhandled exception on rank 1: KeyError" in home
    assert 'href="/postmortems"' in home


def test_of_a_thousand_ranks(mira: User, runs: Path, client: Client) -> None:
    incident = dead(mira, runs, nodes=[f"dgx-{n:03}" for n in range(128)])
    Stream.objects.bulk_create(
        Stream(attempt=incident.attempt, uid=f"{rank:08x}", incarnation=0, rank=rank, node=f"dgx-{rank // 8:03}")
        for rank in range(1024)
    )
    html = page_of(client, incident)
    assert "more nodes" in html
    assert len(html) < 120_000
