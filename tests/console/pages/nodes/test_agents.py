"""Test the page of agents: silent ones, wrong clocks, missing nodes, and the enrolment secret for many nodes."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from console.pages.nodes import agents
from nodes.models import Agent, AgentStream, EnrolmentSecret, Node, NodeEvent
from nodes.telemetry.enrolment import enroll_by_secret
from portal.models import AuditEntry, User
from tests.jobs.pages.reading import page_text
from tests.lab import person, signed_in, sysadmin

pytestmark = pytest.mark.django_db
NBSP = "\N{NO-BREAK SPACE}"


@pytest.fixture
def mira() -> User:
    return person("mira")


def agent(node: str, *, silent_for: float | None = 0, **fields: Any) -> Agent:
    received = None if silent_for is None else timezone.now() - timedelta(seconds=silent_for)
    return Agent.objects.create(node=node, heard_at=received, **{"version": agents.VERSION, **fields})


def text(user: User, address: str = "/agents") -> str:
    return page_text(user, address)


def order(html: str) -> list[str]:
    return re.findall(r'class="name" href="/nodes/([^"]+)"', html)


def test_worst_first_and_a_sentence(mira: User) -> None:
    agent("dgx-10")
    agent("dgx-2")
    agent("lost-late", silent_for=300)
    agent("lost-early", silent_for=9_000)
    agent("off", clock_offset_s=-124.0)
    agent("new", silent_for=None)
    gap = agent("gap")
    NodeEvent.objects.create(agent=gap, kind="agent.gap", at=timezone.now(), last_at=timezone.now())
    NodeEvent.objects.create(agent=gap, kind="agent.gap", at=timezone.now() - timedelta(days=8), last_at=timezone.now())
    AgentStream.objects.create(agent=gap, uid="0" * 16, given_up=7)
    html = text(mira)
    assert order(html) == ["lost-early", "lost-late", "off", "gap", "new", "dgx-2", "dgx-10"]
    assert re.search(r"2 of 6 agents are silent: lost-early since [^,]+, lost-late since [^,]+\. <", html)
    assert "The clock of off is off by −2 min 04 s; portal time is used." in html
    assert "Samples of gap are missing from the last 7 days." in html
    assert "1 in 7 d" in html
    assert "7 batches dropped" in html
    assert "new is enrolled but has never reported." in html


def test_all_is_well(mira: User) -> None:
    agent("dgx-01")
    assert "The agent reports." in text(mira)
    agent("dgx-02", version="0.0.9", clock_offset_s=0.3)
    html = text(mira)
    assert "All 2 agents report." in html
    assert f"not {agents.VERSION}" in html
    assert "+0.3 s" in html


def test_many_silent_ones_are_counted(mira: User) -> None:
    for i in range(5):
        agent(f"n{i}", silent_for=1_000 - i)
    html = text(mira)
    assert re.search(r"5 of 5 agents are silent: n0 since [^,]+, n1 since [^,]+, n2 since [^,]+ and 2 more\.", html)


def test_a_single_silent_agent_is_named(mira: User) -> None:
    agent("n", silent_for=100)
    agent("m")
    assert "1 of 2 agents is silent: n since" in text(mira)


def test_without_agents_it_explains_how_to_enrol_one(mira: User) -> None:
    html = text(mira)
    assert "No node has an agent yet." in html
    assert "<code>vigil agent enroll NODE</code>" in html
    assert "enrolment secret</button>" not in html, "that is for sysadmins"
    Node.objects.create(name="dgx-09")
    agent("dgx-01")
    assert "1 node has no agent" in text(mira)


def test_a_page_has_so_many(mira: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "AGENTS_PER_PAGE", 2)
    for i in range(5):
        agent(f"n{i}")
    assert order(text(mira)) == ["n0", "n1"]
    second = text(mira, "/agents?from=2")
    assert order(second) == ["n2", "n3"]
    assert "3–4 of 5 agents" in second
    assert order(text(mira, "/agents?from=999")) == ["n4"]
    assert order(text(mira, "/agents?from=x")) == ["n0", "n1"]


def test_names_are_escaped(mira: User) -> None:
    agent("dgx-01", version="<i>1", enrolled_by="<b>x</b>")
    html = signed_in(mira).get("/agents").text
    assert "<i>1" not in html
    assert "<b>x" not in html


def test_a_secret_is_shown_once_to_sysadmins() -> None:
    ops = sysadmin("ops")
    client = signed_in(ops)
    answer = client.post("/agents/secret")
    assert answer.status_code == 200
    found = re.search(r'id="secret-text"[^>]*>(vge_[^<]+)<', answer.text)
    assert found
    assert found[1] not in client.get("/agents").text
    assert enroll_by_secret("dgx-01", found[1]).startswith("vga_")
    assert AuditEntry.objects.filter(action="agent.secret", user=ops).count() == 1
    assert found[1] not in "".join(map(str, AuditEntry.objects.values_list("thing", "detail")))


def test_others_make_no_secret(mira: User) -> None:
    assert signed_in(mira).post("/agents/secret").status_code == 403
    assert signed_in(mira).get("/agents/secret").status_code == 405
    assert signed_in(sysadmin(), enforce_csrf_checks=True).post("/agents/secret").status_code == 403
    assert EnrolmentSecret.objects.count() == 0
