"""Test that sysadmins are notified of every finding that needs a repair or a decision, and of nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from nodes.models import Agent, HealthEntry
from nodes.remediation import inbox, notices
from nodes.remediation.notices import MAX_ENTRIES, MAX_NOTICES
from nodes.schedulers.base import SchedulerError
from nodes.tasks import alert
from portal.models import Notice
from tests.lab import a_project, bearer, person, sysadmin
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


@pytest.fixture
def lab() -> Lab:
    return Lab()


def titles(lab: Lab) -> list[str]:
    lab.step()
    alert()
    return sorted(Notice.objects.active().values_list("title", flat=True))


def test_a_critical_xid_is_reported_once(lab: Lab) -> None:
    for code in (13, 31, 43, 45, 63, 94, 999):  # a program's own, and what ends by itself
        lab.xid(code)
    assert titles(lab) == []
    lab.xid(79, gpu=1)
    assert titles(lab) == titles(lab) == ["GPU 1 of dgx-01: GPU fell off the bus."]
    assert Notice.objects.count() == 1
    before = Notice.objects.get().raised_at
    lab.xid(79, gpu=0)
    assert titles(lab) == ["GPUs 0 and 1 of dgx-01: GPU fell off the bus."]
    assert Notice.objects.get().raised_at > before, "another GPU is news"


def test_only_sysadmins_see_it_and_it_leads_to_the_decision(lab: Lab) -> None:
    lab.xid(119)
    titles(lab)
    (notice,) = bearer(sysadmin(), "read").get("/api/v1/notices").json()["items"]
    assert notice["link"] == f"/nodes/dgx-01#entry-{HealthEntry.objects.get().pk}"
    assert notice["detail"].startswith("Vigil proposes to drain the node")
    assert bearer(person("mira", a_project()), "read").get("/api/v1/notices").json()["items"] == []


def test_it_names_the_button_of_a_proposal_to_exclude(lab: Lab) -> None:
    lab.xid(119)
    lab.step()
    HealthEntry.objects.update(action="exclude", decision="proposed", severity="critical")
    alert()
    assert "choose Exclude or Dismiss" in Notice.objects.get().detail


def test_it_mentions_that_vigil_acted(lab: Lab, settings: Any) -> None:
    settings.VIGIL_HEALTH = "act"
    lab.xid(79)
    titles(lab)
    notice = Notice.objects.get()
    assert notice.detail.startswith("Vigil drains the node.")
    assert notice.link == "/nodes/dgx-01"


def test_an_order_that_was_refused_is_news_and_its_approval_is_not(lab: Lab, settings: Any) -> None:
    settings.VIGIL_HEALTH = "act"
    lab.xid(79)
    lab.scheduler.broken_parts["drain"] = SchedulerError("not today", permanent=True)
    titles(lab)
    before = Notice.objects.get().raised_at
    titles(lab)
    notice = Notice.objects.get()
    assert notice.detail.startswith("Vigil proposes to drain the node")
    assert notice.link.startswith("/nodes/dgx-01#entry-")
    assert notice.raised_at > before
    del lab.scheduler.broken_parts["drain"]
    inbox.approve(sysadmin(), HealthEntry.objects.get().pk, "right")
    titles(lab)
    after = Notice.objects.get()
    assert (after.detail.startswith("Vigil"), after.raised_at) == (False, notice.raised_at)


def test_long_names_and_many_places_are_distinguished(lab: Lab) -> None:
    now = timezone.now()
    common = {"rule": "mount-hung", "title": "Mount hangs", "state": "open", "severity": "critical", "action": "watch"}
    times = {"first_seen": now, "last_seen": now, "opened_at": now}
    for end in "ab":
        HealthEntry.objects.create(node="n" * 253 + end, item="/data", **common, **times)
    alert()
    assert Notice.objects.active().count() == 2
    before = set(Notice.objects.values_list("raised_at", flat=True))
    HealthEntry.objects.create(node="n" * 253 + "a", item="/" + "m" * 90, **common, **times)
    alert()
    between = set(Notice.objects.values_list("raised_at", flat=True)) - before
    assert len(between) == 1
    HealthEntry.objects.create(node="n" * 253 + "a", item="/" + "m" * 90 + "2", **common, **times)
    alert()
    assert not between & set(Notice.objects.values_list("raised_at", flat=True))


def test_old_evidence_that_arrives_late_is_history(lab: Lab) -> None:
    lab.xid(79, ago=2 * 86_400)
    assert titles(lab) == []


def test_a_fatal_sxid_is_reported(lab: Lab) -> None:
    for seq, (code, fatal) in enumerate(((20034, True), (11004, False), (12028, None)), start=1):
        lab.happens("sxid", sxid=code, seq=seq, text=f"{code}", fatal=fatal)
    assert titles(lab) == ["dgx-01: Fatal NVSwitch error."]


@pytest.mark.parametrize("decide", [inbox.clear, inbox.dismiss])
def test_a_decision_withdraws_it(lab: Lab, decide: Any) -> None:
    lab.xid(79)
    assert len(titles(lab)) == 1
    decide(sysadmin(), HealthEntry.objects.get().pk, "a reseated card")
    assert titles(lab) == []
    lab.step()
    assert titles(lab) == []


@pytest.mark.parametrize("max_entries", [MAX_ENTRIES, 40])
def test_findings_on_everything_are_bounded(lab: Lab, monkeypatch: pytest.MonkeyPatch, max_entries: int) -> None:
    monkeypatch.setattr(notices, "MAX_ENTRIES", max_entries)
    now = timezone.now()
    HealthEntry.objects.bulk_create(
        HealthEntry(
            node=f"n{number}", rule="off-bus", title="GPU fell off the bus", state="open", severity="fatal",
            action="drain", first_seen=now, last_seen=now, opened_at=now, decision="proposed",
        ) for number in range(MAX_NOTICES + 7)
    )  # fmt: skip
    alert()
    found = Notice.objects.active()
    shown = min(MAX_NOTICES, max_entries)
    assert found.count() == shown + 1
    more = found.get(key="hardware.state:more").title.replace("\N{NO-BREAK SPACE}", " ")
    assert more == f"{MAX_NOTICES + 7 - shown} more findings on nodes."


def test_the_demonstration_alarms_nobody(lab: Lab) -> None:
    lab.machine()
    lab.xid(79)
    Agent.objects.update(is_made_up=True)  # a post of a real agent would end the demonstration's node
    assert titles(lab) == []


def test_notices_of_an_earlier_release_are_withdrawn(lab: Lab) -> None:
    Notice.objects.create(
        key="hardware.error:1:xid:79", kind="hardware.error", audience=Notice.Audience.SYSADMINS, title="Xid 79",
        raised_at=timezone.now(), last_raised_at=timezone.now(),
    )  # fmt: skip
    assert titles(lab) == []
