"""The pages of acceptances: start one in the form, see it run, read the report."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from nodes.acceptance import clauses
from nodes.acceptance.clauses import ClauseOutcome
from nodes.models import Acceptance, BurnIn
from tests.jobs.burnins.simulated_cluster import SimulatedCluster
from tests.lab import person

pytestmark = pytest.mark.django_db


def start(client: Client, nodes: str = "dgx-[01-02]", **more: Any) -> Any:
    return client.post("/acceptances/start", {"nodes": nodes, "seconds": "60", **more})


def test_start_and_cancel(cluster: SimulatedCluster, client: Client) -> None:
    assert "No acceptances yet" in client.get("/acceptances").content.decode()
    started = start(client)
    found = Acceptance.objects.get()
    assert started.headers["Location"] == f"/acceptances/{found.pk}"
    page = client.get(f"/acceptances/{found.pk}").content.decode()
    assert "All nodes have the same NVIDIA driver." in page
    assert "Meta&#x27;s gcm (manifest)" in page
    assert "dgx-[01-02]" in client.get("/acceptances").content.decode()
    client.post(f"/acceptances/{found.pk}/cancel")
    assert BurnIn.objects.get().cancel_requested_by == cluster.user
    assert "Being cancelled by ops" in client.get(f"/acceptances/{found.pk}").content.decode()


def test_an_accepted_cluster_lists_what_was_not_checked(cluster: SimulatedCluster, client: Client) -> None:
    start(client)
    stored = clauses.stored([ClauseOutcome("vbios", "not checked", "No GPU reports it.")])
    Acceptance.objects.update(result="accepted", clauses=stored, summary=clauses.summary(stored))
    page = client.get(f"/acceptances/{Acceptance.objects.get().pk}").content.decode()
    assert "accepted, 1\N{NO-BREAK SPACE}clause not checked</span>" in page.lower()


def test_what_agents_report_is_escaped(cluster: SimulatedCluster, client: Client) -> None:
    start(client)
    stored = clauses.stored([ClauseOutcome("driver", "failed", "<b>2</b>", ("<script>: dgx-02.",))])
    Acceptance.objects.update(result="rejected", clauses=stored, summary=clauses.summary(stored))
    page = client.get(f"/acceptances/{Acceptance.objects.get().pk}").content.decode()
    assert "&lt;b&gt;2&lt;/b&gt;" in page
    assert "<script>: dgx-02" not in page
    assert "rejected" in client.get("/acceptances").content.decode()


@pytest.mark.parametrize("nodes", ["", "dgx-[01", "dgx-99", "dgx-01;reboot", "x" * 3_000])
def test_bad_input_is_an_error_above_the_form(client: Client, nodes: str) -> None:
    answer = start(client, nodes)
    assert answer.status_code == 422
    assert f'value="{nodes}"' in answer.content.decode()
    assert 'aria-describedby="accept-e"' in answer.content.decode()
    assert '<option value="60" selected>' in answer.content.decode()
    assert not Acceptance.objects.exists()


def test_only_for_sysadmins(cluster: SimulatedCluster, client: Client) -> None:
    start(client)
    address = f"/acceptances/{Acceptance.objects.get().pk}"
    mira = Client()
    mira.force_login(person("mira"))
    assert [mira.get(place).status_code for place in ("/acceptances", address)] == [403, 403]
    assert start(mira, "dgx-05").status_code == 403
    assert mira.post(f"{address}/cancel").status_code == 403
    assert client.get("/acceptances/999").status_code == 404
    assert client.get("/acceptances?after=nonsense").status_code == 200, "the first page"
