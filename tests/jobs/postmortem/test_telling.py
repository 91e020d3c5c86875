"""Notices of what died: to its owner and the project once there is a decision, to sysadmins where they must act."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs.models import Attempt, Diagnosis, Incident, Job, Sweep
from jobs.postmortem import telling
from portal.models import Channel, Delivery, Notice, User
from tests.lab import a_checkpoint, a_job, a_project, person, sysadmin

pytestmark = pytest.mark.django_db
Die = Callable[..., Incident]


@pytest.fixture(autouse=True)
def _as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "_told", {})


@pytest.fixture
def mira() -> User:
    return person("mira", a_project())


@pytest.fixture
def die(mira: User) -> Die:
    """A job that died, with a verdict and a decision."""

    def make(cause: str = "program.exception", sweep: Sweep | None = None, **fields: Any) -> Incident:
        decision = fields.pop("decision", "Not started again: the same would happen.")
        attempt = {"decision": decision, "nodes": ["dgx-03"], "step": 120}
        job = a_job(mira, a_project(), state="failed", name="wren", sweep=sweep, attempt=attempt)
        given = {"version": 1, "confidence": 0.91, "says": "KeyError: 'label' (rank 1).", "fingerprint": "f" * 16}
        fields = {"at": timezone.now(), **given, **fields}
        incident = Incident.objects.create(attempt=job.latest, project=job.project, cause=cause, **fields)
        evidence = [
            {"role": "root", "text": "KeyError: 'label' token=hf_abcdefghijklmnop", "file": "0.1.log", "line": 5}
        ]
        Diagnosis.objects.create(
            incident=incident, version=1, cause=cause, confidence=0.91, verdict={"evidence": evidence}
        )
        return incident

    return make


def titles(kind: str = "incident") -> list[str]:
    return list(Notice.objects.filter(kind=kind).order_by("pk").values_list("title", flat=True))


def test_says_what_happened_and_what_vigil_did(die: Die, mira: User) -> None:
    incident = die()
    a_checkpoint(incident.attempt.job, 100)
    assert telling.tell() == 1
    notice = Notice.objects.get()
    assert (notice.user, notice.title) == (mira, f"wren (#{incident.attempt.job_id}) died: KeyError: 'label' (rank 1).")
    assert notice.link == f"/jobs/{incident.attempt.job_id}/postmortem?attempt=1"
    facts = dict(notice.facts)
    assert facts["Cause"] == "program.exception, 91% sure"
    assert facts["What Vigil did"] == "Not started again: the same would happen."
    assert facts["Lost"].replace("\N{NO-BREAK SPACE}", " ") == "20 steps since the checkpoint at step 100"
    assert facts["Runbook"] == "http://127.0.0.1:8000/runbooks/program.exception"
    assert "dgx-03" in facts["Attempt"]
    assert "hf_abc" not in str(notice.facts), "secrets are masked"
    assert telling.tell() == 0


def test_waits_for_the_decision_but_not_for_ever(die: Die) -> None:
    incident = die()
    Attempt.objects.update(decided_at=None, decision="")
    assert telling.tell() == 0
    Incident.objects.update(opened_at=timezone.now() - timedelta(minutes=1))
    assert telling.tell() == 1
    assert dict(Notice.objects.get().facts)["What Vigil did"] == "nothing yet"
    Attempt.objects.update(decided_at=timezone.now(), decision="Started again as attempt 2.")
    assert telling.tell() == 1
    assert dict(Notice.objects.get().facts)["What Vigil did"] == "Started again as attempt 2."
    assert Notice.objects.get().key == f"incident:{incident.pk}"


def test_a_process_that_starts_anew_tells_nothing_twice(die: Die, mira: User, monkeypatch: pytest.MonkeyPatch) -> None:
    Channel.objects.create(user=mira, kind="email", address="mira@lab.example")
    die()
    telling.tell()
    monkeypatch.setattr(telling, "_told", {})
    assert telling.tell() == 1
    assert (Notice.objects.count(), Delivery.objects.count()) == (1, 1)


def test_one_killed_after_the_verdict_is_made_up_for(die: Die) -> None:
    """There is nothing to lose but the rows: whoever looks next tells it."""
    die()
    assert not Notice.objects.exists()
    telling.tell()
    assert Notice.objects.exists()


def test_a_revision_is_sent_only_where_somebody_else_must_act(die: Die, mira: User) -> None:
    Channel.objects.create(user=mira, kind="email", address="mira@lab.example")
    incident = die("program.exception")
    telling.tell()
    Incident.objects.update(version=2, cause="program.config", says="A wrong argument.")
    telling.tell()
    assert titles() == [f"wren (#{incident.attempt.job_id}) died: A wrong argument."]
    assert Delivery.objects.count() == 1
    Incident.objects.update(version=3, cause="gpu.off_bus", says="A GPU was lost.", node="dgx-03")
    telling.tell()
    assert Delivery.objects.count() == 2
    Incident.objects.update(overruled_cause="data.missing", overruled_why="I know it.")
    telling.tell()
    assert Delivery.objects.count() == 3
    assert dict(Notice.objects.get(kind="incident").facts)["Cause"] == "data.missing, overruled by a person"


@pytest.mark.parametrize("cause", ["none", "scheduler.cancelled", "scheduler.preempted"])
def test_where_nobody_must_act_nobody_is_told(die: Die, cause: str) -> None:
    die(cause)
    telling.tell()
    assert not Notice.objects.exists()


def test_neither_what_started_again_in_place_nor_what_has_no_verdict(die: Die) -> None:
    die(incarnation=2)
    die(version=0)
    assert telling.tell() == 0


def test_what_is_long_ago_is_told_to_nobody(die: Die) -> None:
    die(opened_at=timezone.now() - timedelta(days=2))
    assert telling.tell() == 0


def test_jobs_of_a_sweep_that_die_alike_are_one_notice(die: Die, mira: User) -> None:
    Channel.objects.create(user=mira, kind="email", address="mira@lab.example")
    sweep = Sweep.objects.create(project=a_project(), owner=mira, name="lr", spec_toml="")
    for _ in range(3):
        die(sweep=sweep)
        telling.tell()
    die(sweep=sweep, fingerprint="other")
    telling.tell()
    assert titles()[0] == "3 jobs of sweep lr died alike: KeyError: 'label' (rank 1)."
    assert len(titles()) == Delivery.objects.count() == 2
    assert Notice.objects.first().link == f"/sweeps/{sweep.pk}"
    assert Delivery.objects.earliest("pk").due_at > timezone.now() + timedelta(seconds=30), "more may come"


def test_the_project_s_channel_is_told_of_its_own_jobs_alone(die: Die) -> None:
    ours = Channel.objects.create(project=a_project(), kind="slack", address="https://hooks.slack.com/x")
    Channel.objects.create(project=a_project("other"), kind="slack", address="https://hooks.slack.com/y")
    die()
    telling.tell()
    assert Delivery.objects.get().channel == ours


class TestSysadmins:
    def test_are_told_once_a_node_and_day(self, die: Die) -> None:
        Channel.objects.create(user=sysadmin(), kind="email", address="sam@lab.example")
        for _ in range(3):
            die("gpu.off_bus", node="dgx-03")
        die("gpu.off_bus", node="dgx-04")
        die("program.exception", node="dgx-03")
        telling.tell()
        assert sorted(title.replace("\N{NO-BREAK SPACE}", " ") for title in titles("incident.site")) == [
            "A GPU was lost from the bus on dgx-03: 3 attempts died of it.",
            f"A GPU was lost from the bus on dgx-04: wren (#{Job.objects.order_by('pk')[3].pk}) died of it.",
        ]
        assert Delivery.objects.filter(kind="incident.site").count() == 2
        assert Notice.objects.filter(kind="incident.site", link="/nodes/dgx-03").exists()

    def test_another_day_it_is_news_again(self, die: Die) -> None:
        Channel.objects.create(user=sysadmin(), kind="email", address="sam@lab.example")
        die("gpu.ecc", node="dgx-03", at=timezone.now() - timedelta(days=1))
        telling.tell()
        die("gpu.ecc", node="dgx-03")
        telling.tell()
        assert (Notice.objects.filter(kind="incident.site").count(), Delivery.objects.count()) == (2, 2)
        telling._told.clear()
        telling.tell()
        assert Delivery.objects.count() == 2, "a process that starts anew tells nothing twice"


def test_a_worker_s_task_tells(die: Die) -> None:
    from jobs.tasks import diagnose

    die()
    diagnose()
    assert Notice.objects.exists()
