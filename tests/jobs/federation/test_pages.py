"""Test a federation's pages: rounds and clients, accuracy by client, stragglers and reasons for dropping out."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from jobs.models import Event, Job
from portal.models import Project, User
from tests.jobs.federation.federations import Did, a_federation, everybody, ingest, names, split, table
from tests.jobs.pages.reading import text
from tests.jobs.reporting import Spooled
from tests.lab import a_job, a_project, person

pytestmark = pytest.mark.django_db


@pytest.fixture
def job(mira: User, project: Project) -> Job:
    """Twelve of thirty rounds of five clients: client 3 is rejected since round 5, client 4 slow and often late."""
    now = timezone.now()
    job = a_federation(
        mira, project, state="running", run={"clients": 5, "algorithm": "fedavg"},
        attempt={"step": 12, "last_report_at": now},
    )  # fmt: skip
    stream = Spooled().add_event("clients.split", **split([[4, 1], [1, 1], [0, 9], [2, 2], [3, 0]])[0])
    for number in range(1, 13):
        did: list[Did] = [(item, "trained", 0.5, 0.9 + item / 100, 1.0) for item in range(3)]
        did.append((3, "rejected" if number >= 5 else "trained", 0.75, 0.25, 1.0))
        did.append((4, "late" if number % 2 else "trained", 0.75, 0.5, 8.0))
        stream.add_event("round.clients", **table({number: did}))
        stream.log(number, loss=0.5, accuracy=0.875, client_accuracy_min=0.25, mib_up=1.0, mib_down=2.0)
    ingest(job, stream)
    return job


def matrix(html: str) -> dict[str, Any]:
    found = re.search(r'<script id="matrix-data" type="application/json">(.*?)</script>', html)
    assert found
    return dict(json.loads(found[1]))


def rows_of(html: str, section: str) -> list[str]:
    """Return the first cells of a section's table."""
    return re.findall(
        r'<tr[^>]*><td class="nowrap">(client \d+)', html.split(f'id="{section}"')[1].split("</table>")[0]
    )


class TestRounds:
    def test_it_shows_who_did_what(self, client: Client, job: Job) -> None:
        data = matrix(text(client.get(f"/jobs/{job.pk}")))
        assert (data["first"], data["columns"], data["done"]) == (1, 30, 12)
        assert [row["name"] for row in data["rows"]] == [f"client {number}" for number in range(5)]
        assert data["rows"][3]["values"][:6] == [0, 0, 0, 0, 3, 3]
        assert data["rows"][3]["values"][12:] == [-1] * 18, "those to come"
        assert (data["rows"][3]["note"], data["rows"][3]["odd"]) == ("rejected 8×", True)
        assert data["rows"][0]["note"] == "100\N{NO-BREAK SPACE}%"

    def test_the_sentence_names_who_misbehaves(self, client: Client, job: Job) -> None:
        html = text(client.get(f"/jobs/{job.pk}"))
        assert "Round 13 of 30, training since" in html
        assert "Client 3 has been rejected in 8 of its last 12 rounds. 1 more client has problems." in html

    def test_late_is_no_trouble_where_the_pace_is_meant_so(self, client: Client, mira: User, project: Project) -> None:
        for pace, is_shown in {"rounds": True, "deadline": False, "asynchronous": False}.items():
            job = a_federation(
                mira, project, state="running", run={"clients": 2, "pace": pace},
                attempt={"step": 4, "last_report_at": timezone.now()},
            )  # fmt: skip
            did: list[Did] = [(0, "trained", 0.5, 0.9, 1.0), (1, "late", 0.5, 0.9, 8.0)]
            ingest(job, Spooled().add_event("round.clients", **table(dict.fromkeys(range(1, 5), did))))
            assert ("Client 1 was late in 4" in text(client.get(f"/jobs/{job.pk}"))) is is_shown

    def test_its_facts_are_those_of_a_federation(self, client: Client, job: Job) -> None:
        html = text(client.get(f"/jobs/{job.pk}"))
        for fact in ("of 30 · 2 s", "0.875", "client 3", "of 5 selected", "37.7 MB"):
            assert fact in html, fact

    def test_once_it_has_ended_its_accuracy_leads(self, client: Client, mira: User, project: Project) -> None:
        job = a_federation(
            mira, project, state="completed", run={"clients": 3},
            attempt={"step": 2, "latest": {"accuracy": 0.957, "client_accuracy_min": 0.8}},
        )  # fmt: skip
        judged, after = table({1: everybody(3)}), table({2: everybody(3)}, worst=-1)
        stream = Spooled().add_event("round.clients", **judged).add_event("round.clients", **after)
        ingest(job, stream.add_event("clients.named", **names("ada")[0]))
        html = text(client.get(f"/jobs/{job.pk}"))
        assert "Accuracy 0.957 after 2 rounds, completed" in html
        assert "Worst client: client 0 (ada) at 0.800." in html

    def test_chance_names_no_worst_client(self, client: Client, mira: User, project: Project) -> None:
        """Three rows make an accuracy of 0; they make nobody the worst, and the others have counts next to them."""

        def shown(evaluated: list[int], worst: int) -> str:
            job = a_federation(
                mira, project, state="completed", run={"clients": 3},
                attempt={"step": 1, "latest": {"accuracy": 0.957, "client_accuracy_min": 0.8}},
            )  # fmt: skip
            stream = Spooled().add_event("round.clients", **table({1: everybody(3)}, worst=worst))
            ingest(job, stream.add_event("clients.split", **split([[9, 9]] * 3, evaluated=evaluated)[0]))
            return text(client.get(f"/jobs/{job.pk}"))

        html = shown([3, 14, 12], worst=1)
        assert "Worst client with at least 10 evaluation samples: client 1 at 0.800 on 14 samples." in html
        assert rows_of(html, "h-fairness") == ["client 1", "client 2", "client 0"], "the last one on three samples"
        assert "Worst client: client 1 at 0.800 on 14 samples." in shown([10, 14, 12], worst=1)
        html = shown([3, 4, 5], worst=-1)
        assert "worst:" not in html
        assert "no client has 10 evaluation samples" in html

    def test_fairness_has_the_worst_first_and_how_their_data_lie(self, client: Client, job: Job) -> None:
        html = text(client.get(f"/jobs/{job.pk}"))
        assert rows_of(html, "h-fairness") == ["client 3", "client 4", "client 0", "client 1", "client 2"]
        assert 'aria-label="no 4, yes 1"' in html
        assert "· rejected 8×" in html

    def test_stragglers_are_ranked_by_their_seconds(self, client: Client, job: Job) -> None:
        html = text(client.get(f"/jobs/{job.pk}"))
        assert rows_of(html, "h-slow")[0] == "client 4"
        assert "8 ×" in html

    def test_who_was_never_in_time_is_the_slowest(self, client: Client, mira: User, project: Project) -> None:
        job = a_federation(mira, project, state="running", run={"clients": 4, "pace": "deadline"})
        stream = Spooled()
        for number in range(1, 5):
            did: list[Did] = [(item, "trained", 0.5, 0.9, 1.0 + item) for item in range(2)]
            did += [(2, "dropped", math.nan, math.nan, math.nan), (3, "late", 0.5, 0.9, math.nan)]
            stream.add_event("round.clients", **table({number: did[: 4 if number > 1 else 3]}))
        ingest(job, stream)
        html = text(client.get(f"/jobs/{job.pk}"))
        assert rows_of(html, "h-slow") == ["client 2", "client 3", "client 1", "client 0"]
        assert (html.count("never in time"), html.count("always late")) == (1, 1)
        html = text(client.get(f"/jobs/{job.pk}/clients?sort=seconds"))
        assert rows_of(html, "h-clients") == ["client 2", "client 3", "client 1", "client 0"]

    def test_its_charts_are_those_of_rounds(self, client: Client, job: Job) -> None:
        html = text(client.get(f"/jobs/{job.pk}"))
        for title in ("Accuracy", "Loss", "Seconds per round", "Bytes per round"):
            assert f"<h3>{title} <span>" in html
        assert 'data-awaits="accuracy"' in html

    def test_what_changes_is_sent_again_while_it_lives(self, client: Client, job: Job) -> None:
        html = text(client.get(f"/jobs/{job.pk}/life?tab=overview"))
        assert 'id="of-matrix" hx-swap-oob="true"' in html
        assert 'id="of-rounds" hx-swap-oob="true"' in html
        assert 'id="newest"' not in html
        assert matrix(html)["done"] == 12
        assert 'id="of-matrix"' not in text(client.get(f"/jobs/{job.pk}/life?tab=logs"))

    def test_before_the_first_round_it_describes_what_to_expect(
        self, client: Client, mira: User, project: Project
    ) -> None:
        for state, message in {"pending": "is in the queue", "running": "within a second", "failed": "its log"}.items():
            html = text(client.get(f"/jobs/{a_federation(mira, project, state=state).pk}"))
            assert "No rounds yet" in html
            assert message in html
            assert matrix(html)["done"] == 0

    def test_of_many_clients_those_in_trouble_and_a_sample_are_shown(
        self, client: Client, mira: User, project: Project
    ) -> None:
        job = a_federation(mira, project, state="running", run={"clients": 1000, "split": "iid", "dirichlet": None})
        did = everybody(900)
        did[777] = (777, "dropped", math.nan, math.nan, math.nan)
        ingest(job, Spooled().add_event("round.clients", **table({1: did})))
        html = text(client.get(f"/jobs/{job.pk}"))
        rows = matrix(html)["rows"]
        assert len(rows) == 60
        assert rows[0]["name"] == "client 777"
        assert "Showing 60 of 1,000 clients: those with problems, and a sample of the others." in html

    def test_of_many_rounds_the_newest_are_shown_and_older_ones_behind_a_link(
        self, client: Client, mira: User, project: Project
    ) -> None:
        job = a_federation(mira, project, state="running", run={"rounds": 500}, attempt={"step": 300})
        stream = Spooled()
        for first in (1, 101, 201):
            stream.add_event("round.clients", **table({number: everybody(2) for number in range(first, first + 100)}))
        ingest(job, stream)
        html = text(client.get(f"/jobs/{job.pk}"))
        assert (matrix(html)["first"], matrix(html)["columns"], matrix(html)["done"]) == (181, 120, 120)
        assert "Rounds 181 to 300." in html
        older = text(client.get(f"/jobs/{job.pk}?before=181"))
        assert matrix(older)["first"] == 61
        assert "?before=301" in older
        assert "&amp;before=181" in older, "and stays while the page is updated"
        oldest = text(client.get(f"/jobs/{job.pk}?before=61"))
        assert (matrix(oldest)["first"], matrix(oldest)["done"]) == (1, 60)
        assert "No rounds yet" in text(client.get(f"/jobs/{job.pk}?before=1"))
        assert client.get(f"/jobs/{job.pk}?before=nonsense").status_code == 200

    def test_without_accuracy_loss_shows_for_whom_it_is_worst(
        self, client: Client, mira: User, project: Project
    ) -> None:
        job = a_federation(mira, project, state="running", run={"clients": 2})
        did = [(0, "trained", 0.5, math.nan, math.nan), (1, "trained", 1.5, math.nan, math.nan)]
        ingest(job, Spooled().log(1, loss=1.0).add_event("round.clients", **table({1: did}, accuracy=math.nan)))
        html = text(client.get(f"/jobs/{job.pk}"))
        assert rows_of(html, "h-fairness") == ["client 1", "client 0"]
        assert "Loss by client, worst first" in html
        assert "h-slow" not in html
        assert "<h3>Accuracy" not in html
        html = text(client.get(f"/jobs/{job.pk}/clients"))
        assert rows_of(html, "h-clients") == ["client 1", "client 0"]
        assert '<th scope="col" class="num" aria-sort="descending"><a href="?sort=-loss">Loss' in html
        assert "Per round</" not in html, "they are computed together"

    def test_who_has_a_name_is_called_by_it_and_nothing_of_it_is_markup(self, client: Client, job: Job) -> None:
        ingest(job, Spooled(uid="cd" * 8).add_event("clients.named", **names("ada", "", "", "<b>dora</b>", "eve")[0]))
        html = text(client.get(f"/jobs/{job.pk}"))
        assert "<b>dora" not in html
        assert "Client 3 (&lt;b&gt;dora&lt;/b&gt;) has been rejected in 8 of its last 12 rounds." in html
        assert "<small>client 3 (&lt;b&gt;dora" in html, "the fact"
        assert [row["name"] for row in matrix(html)["rows"]][:2] == ["client 0 (ada)", "client 1"]
        assert 'client 4 <span class="owner" title="eve">eve</span>' in html.split('id="h-slow"')[1]
        assert ">3 <span" in html.split('id="data"')[1].split("</table>")[0], "the worst of each round"
        assert 'title="&lt;b&gt;dora' in text(client.get(f"/jobs/{job.pk}/clients"))


class TestClients:
    def test_they_are_listed_and_sorted(self, client: Client, job: Job) -> None:
        html = text(client.get(f"/jobs/{job.pk}/clients"))
        assert rows_of(html, "h-clients")[:2] == ["client 3", "client 4"]
        assert 'aria-sort="ascending"><a href="?sort=-worst">Accuracy' in html
        html = text(client.get(f"/jobs/{job.pk}/clients?sort=seconds"))
        assert rows_of(html, "h-clients")[0] == "client 4"
        assert 'aria-sort="descending"><a href="?sort=-seconds">Per round' in html
        for odd in ("sort=beauty", "after=nonsense", "sort=-late&after=%00"):
            assert client.get(f"/jobs/{job.pk}/clients?{odd}").status_code == 200

    def test_they_come_page_by_page(self, client: Client, mira: User, project: Project) -> None:
        job = a_federation(mira, project, state="running", run={"clients": 60})
        ingest(job, Spooled().add_event("round.clients", **table({1: everybody(60)})))
        html = client.get(f"/jobs/{job.pk}/clients?sort=number").content.decode()
        following = re.search(r'rel="next" href="([^"]+)"', html)
        assert following
        rest = text(client.get(f"/jobs/{job.pk}/clients{following[1].replace('&amp;', '&')}"))
        assert rows_of(rest, "h-clients") == [f"client {number}" for number in range(50, 60)]

    def test_each_reason_for_dropping_out_is_shown_once(self, client: Client, job: Job) -> None:
        stream = Spooled(uid="ab" * 8)
        for number in (4, 7):
            trace = 'Traceback (most recent call last):\n  File "c.py", line 1\nOSError: <b>gone</b>'
            stream.add_event("client.dropped", step=number, client=2, name="cy <3", traceback=trace)
        stream.add_event("client.dropped", step=9, client="x", traceback=5).add_event("client.dropped", traceback={})
        ingest(job, stream)
        html = text(client.get(f"/jobs/{job.pk}/clients"))
        assert html.count("OSError: &lt;b&gt;gone") == 2, "the sentence, and the whole"
        assert "2 times, last client 2 (cy &lt;3) in round 7" in html
        assert "Client 2 (cy &lt;3) dropped out of round 7" in text(client.get(f"/jobs/{job.pk}"))
        assert Event.objects.filter(kind="client.dropped").count() == 4

    def test_only_a_federation_with_custom_parts_has_any(self, client: Client, mira: User, project: Project) -> None:
        assert client.get(f"/jobs/{a_job(mira, project).pk}/clients").status_code == 404
        elsewhere = a_project("elsewhere")
        hidden = a_federation(person("noor", elsewhere), elsewhere)
        assert client.get(f"/jobs/{hidden.pk}/clients").status_code == 404

    def test_before_any_is_there_it_explains_when(self, client: Client, mira: User, project: Project) -> None:
        job = a_federation(mira, project, state="running")
        assert "No clients yet" in text(client.get(f"/jobs/{job.pk}/clients"))
