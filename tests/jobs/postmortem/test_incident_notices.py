"""Test notices of failures: to the owner and the project once there is a decision, to sysadmins where they must act."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils import timezone

from diagnosis.causes import CAUSES
from jobs.models import Attempt, Diagnosis, Incident, Job, Sweep
from jobs.postmortem import incident_notices
from portal.models import Channel, Delivery, Notice, User
from portal.sending.due import send_due
from tests.lab import a_checkpoint, a_job, a_project, sysadmin

pytestmark = pytest.mark.django_db
Die = Callable[..., Incident]


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was notified, and stop the clock: no call reaches its time limit, however busy the machine is."""
    incident_notices.forget()
    monkeypatch.setattr(incident_notices, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture
def die(mira: User) -> Die:
    """A job that died, with a verdict and a decision."""

    def make(cause: str = "program.exception", sweep: Sweep | None = None, **fields: Any) -> Incident:
        decision = fields.pop("decision", "Not started again: the same would happen.")
        attempt = {"decision": decision, "nodes": ["dgx-03"], "step": 120}
        job = a_job(mira, a_project(), state="failed", name="wren", sweep=sweep, attempt=attempt)
        given = {"version": 1, "confidence": 0.91, "says": "KeyError: 'label' (rank 1).", "fingerprint": "f" * 16}
        given["confirmed_cause"] = cause if CAUSES[cause].owner == "sysadmin" else ""  # by its machine
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


def test_describes_what_happened_and_what_vigil_did(die: Die, mira: User) -> None:
    incident = die()
    a_checkpoint(incident.attempt.job, 100)
    assert incident_notices.notify_new() == 1
    notice = Notice.objects.get()
    assert (notice.user, notice.title) == (
        mira,
        f"wren (#{incident.attempt.job_id}) failed: KeyError: 'label' (rank 1).",
    )
    assert notice.link == f"/jobs/{incident.attempt.job_id}/postmortem?attempt=1"
    facts = dict(notice.facts)
    assert facts["Cause"] == "program.exception, 91% confidence"
    assert facts["What Vigil did"] == "Not started again: the same would happen."
    assert facts["Lost"].replace("\N{NO-BREAK SPACE}", " ") == "20 steps since the checkpoint at step 100"
    assert facts["Runbook"] == "http://127.0.0.1:8000/runbooks/program.exception"
    assert "dgx-03" in facts["Attempt"]
    assert "hf_abc" not in str(notice.facts), "secrets are masked"
    assert incident_notices.notify_new() == 0


def test_waits_for_the_decision_but_not_for_ever(die: Die) -> None:
    incident = die()
    Attempt.objects.update(decided_at=None, decision="")
    assert incident_notices.notify_new() == 0
    Incident.objects.update(opened_at=timezone.now() - timedelta(minutes=1))
    assert incident_notices.notify_new() == 1
    assert dict(Notice.objects.get().facts)["What Vigil did"] == "nothing yet"
    Attempt.objects.update(decided_at=timezone.now(), decision="Started again as attempt 2.")
    assert incident_notices.notify_new() == 1
    assert dict(Notice.objects.get().facts)["What Vigil did"] == "Started again as attempt 2."
    assert Notice.objects.get().key == f"incident:{incident.pk}"


def test_a_restarted_process_notifies_nobody_twice(die: Die, mira: User) -> None:
    Channel.objects.create(user=mira, kind="email", address="mira@lab.example")
    die()
    incident_notices.notify_new()
    incident_notices.forget()
    assert incident_notices.notify_new() == 1
    assert (Notice.objects.count(), Delivery.objects.count()) == (1, 1)


@pytest.mark.parametrize(
    "where", ["portal.notify._facts", "portal.notify.fill", "jobs.postmortem.incident_notices._withdraw_from_sysadmins"]
)
def test_a_run_killed_in_the_midst_is_made_up_for(
    die: Die, mira: User, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Killed before the notice, within its transaction, or after it: the next run leaves one notice and one message."""

    def be_killed(*about: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    Channel.objects.create(user=mira, kind="email", address="mira@lab.example")
    die()
    with monkeypatch.context() as patch:
        patch.setattr(where, be_killed)
        with pytest.raises(KeyboardInterrupt):
            incident_notices.notify_new()
    assert Notice.objects.count() == Delivery.objects.count()
    assert incident_notices.notify_new() == 1
    assert (Notice.objects.count(), Delivery.objects.count()) == (1, 1)


def test_an_incident_that_cannot_be_notified_stops_no_other(
    die: Die, mira: User, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    incidents = [die(), die(), die()]
    notify = incident_notices._notify

    def fails(pk: int) -> None:
        if pk == incidents[1].pk:
            raise ValueError("no title")
        notify(pk)

    with monkeypatch.context() as patch:
        patch.setattr(incident_notices, "_notify", fails)
        assert incident_notices.notify_new() == 2
    assert f"incident {incidents[1].pk}: no notice was raised" in caplog.text
    assert incident_notices.notify_new() == 1
    assert Notice.objects.count() == 3


def test_a_pass_ends_in_time_and_the_next_goes_on(die: Die, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        die()
    with monkeypatch.context() as patch:
        clock = iter([0.0, 1.0, incident_notices.BUDGET_S + 1, incident_notices.BUDGET_S + 2])
        patch.setattr(incident_notices, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert incident_notices.notify_new() == 1
    assert incident_notices.notify_new() == 2
    assert incident_notices.notify_new() == 0


def test_the_oldest_of_a_storm_is_notified_too(die: Die) -> None:
    """A thousand that came after it have no verdict yet: the longest due is diagnosed first."""
    oldest = die().attempt
    attempts = [Attempt(job=oldest.job, number=n, origin=oldest.origin) for n in range(2, 1002)]
    Incident.objects.bulk_create(
        Incident(attempt=attempt, project=oldest.job.project, at=timezone.now())
        for attempt in Attempt.objects.bulk_create(attempts)
    )
    assert incident_notices.notify_new() == 1


def test_a_revision_is_sent_only_where_somebody_else_must_act(die: Die, mira: User) -> None:
    Channel.objects.create(user=mira, kind="email", address="mira@lab.example")
    incident = die("program.exception")
    incident_notices.notify_new()
    Incident.objects.update(version=2, cause="program.config", says="A wrong argument.")
    incident_notices.notify_new()
    assert titles() == [f"wren (#{incident.attempt.job_id}) failed: A wrong argument."]
    assert Delivery.objects.count() == 1
    Incident.objects.update(
        version=3, cause="gpu.off_bus", confirmed_cause="gpu.off_bus", says="A GPU was lost.", node="dgx-03"
    )
    incident_notices.notify_new()
    assert Delivery.objects.count() == 2
    Incident.objects.update(overruled_cause="data.missing", overruled_why="I know it.")
    incident_notices.notify_new()
    assert Delivery.objects.count() == 3
    assert dict(Notice.objects.get(kind="incident").facts)["Cause"] == "data.missing, overruled by somebody"


@pytest.mark.parametrize("cause", ["none", "scheduler.cancelled", "scheduler.preempted"])
def test_where_nobody_must_act_nobody_is_notified(die: Die, cause: str) -> None:
    die(cause)
    incident_notices.notify_new()
    assert not Notice.objects.exists()


@pytest.mark.parametrize("change", [{"overruled_cause": "none", "cause": "none"}, {"cause": "scheduler.preempted"}])
def test_where_nobody_must_act_any_more_it_is_withdrawn(die: Die, mira: User, change: dict[str, str]) -> None:
    for person_ in (mira, sysadmin()):
        Channel.objects.create(user=person_, kind="email", address="x@lab.example", digest="daily")
    die("gpu.off_bus", node="dgx-03")
    incident_notices.notify_new()
    assert Notice.objects.active().count() == Delivery.objects.unsent().count() == 2
    Incident.objects.update(version=2, confirmed_cause="", **change)
    incident_notices.notify_new()
    assert not Notice.objects.active().exists()
    Delivery.objects.update(due_at=timezone.now())
    assert send_due(5) == 0


def test_neither_what_started_again_in_place_nor_what_has_no_verdict(die: Die) -> None:
    die(incarnation=2)
    die(version=0)
    assert incident_notices.notify_new() == 0


def test_what_is_long_ago_is_notified_to_nobody(die: Die) -> None:
    die(opened_at=timezone.now() - timedelta(days=2))
    assert incident_notices.notify_new() == 0


def test_jobs_of_a_sweep_that_die_alike_are_a_single_notice(die: Die, mira: User) -> None:
    Channel.objects.create(user=mira, kind="email", address="mira@lab.example")
    sweep = Sweep.objects.create(project=a_project(), owner=mira, name="lr", spec_toml="")
    for _ in range(3):
        die(sweep=sweep)
        incident_notices.notify_new()
    die(sweep=sweep, fingerprint="other")
    incident_notices.notify_new()
    assert titles()[0] == "3 jobs of sweep lr failed in the same way: KeyError: 'label' (rank 1)."
    assert len(titles()) == Delivery.objects.count() == 2
    assert Notice.objects.first().link == f"/sweeps/{sweep.pk}"
    assert Delivery.objects.earliest("pk").due_at > timezone.now() + timedelta(seconds=30), "more may come"


class TestSweepRevised:
    """Later verdicts on other jobs of the incident raise no second notice and send no second message."""

    @pytest.fixture
    def sweep(self, mira: User) -> Sweep:
        Channel.objects.create(user=mira, kind="email", address="mira@lab.example")
        return Sweep.objects.create(project=a_project(), owner=mira, name="lr", spec_toml="")

    def revise(self, *incidents: Incident, cause: str = "program.config", fingerprint: str = "e" * 16) -> None:
        for incident in incidents:
            Incident.objects.filter(pk=incident.pk).update(
                version=2, cause=cause, says="A wrong argument.", fingerprint=fingerprint
            )
            incident_notices.notify_new()

    def standing(self) -> list[str]:
        return list(Notice.objects.active().filter(kind="incident").order_by("pk").values_list("title", flat=True))

    def sent(self) -> int:
        Delivery.objects.unsent().update(due_at=timezone.now())
        return send_due(5)

    @pytest.mark.parametrize("is_sent", [True, False])
    def test_all_of_them_at_once(self, die: Die, sweep: Sweep, is_sent: bool) -> None:
        died = [die(sweep=sweep) for _ in range(3)]
        incident_notices.notify_new()
        assert (self.sent() if is_sent else 1) == 1
        self.revise(*died)
        assert self.standing() == ["3 jobs of sweep lr failed in the same way: A wrong argument."]
        assert self.sent() == (0 if is_sent else 1)

    def test_an_incident_without_evidence_at_first(self, die: Die, sweep: Sweep) -> None:
        died = [die("unknown", sweep=sweep, fingerprint="") for _ in range(2)]
        incident_notices.notify_new()
        assert (len(self.standing()), self.sent()) == (2, 2)
        self.revise(*died)
        assert self.standing() == ["2 jobs of sweep lr failed in the same way: A wrong argument."]
        assert self.sent() == 1, "now the owner alone must act"

    def test_somebody_else_must_act(self, die: Die, sweep: Sweep) -> None:
        died = [die(sweep=sweep) for _ in range(2)]
        incident_notices.notify_new()
        self.sent()
        self.revise(*died, cause="storage.full")
        assert self.standing() == ["2 jobs of sweep lr failed in the same way: A wrong argument."]
        assert self.sent() == 1

    def test_one_of_them_alone(self, die: Die, sweep: Sweep) -> None:
        died = [die(sweep=sweep) for _ in range(3)]
        incident_notices.notify_new()
        self.revise(died[0])
        assert sorted(self.standing())[1] == f"wren (#{died[0].attempt.job_id}) failed: A wrong argument."
        assert len(self.standing()) == 2

    def test_overruled_is_shown_for_that_incident_alone(self, die: Die, sweep: Sweep) -> None:
        died = [die(sweep=sweep) for _ in range(2)]
        incident_notices.notify_new()
        Incident.objects.filter(pk=died[0].pk).update(overruled_cause="data.missing", cause="data.missing")
        incident_notices.notify_new()
        assert sorted(self.standing()) == [
            "2 jobs of sweep lr failed in the same way: KeyError: 'label' (rank 1).",
            f"wren (#{died[0].attempt.job_id}) failed: Data or model not found, according to somebody.",
        ]
        Incident.objects.filter(pk=died[1].pk).update(overruled_cause="none", cause="none")
        incident_notices.notify_new()
        assert self.standing() == [
            f"wren (#{died[0].attempt.job_id}) failed: Data or model not found, according to somebody."
        ]

    def test_what_started_again_in_place_is_not_counted(self, die: Die, sweep: Sweep) -> None:
        died = [die(sweep=sweep) for _ in range(2)]
        Incident.objects.filter(pk=died[0].pk).update(incarnation=1)
        incident_notices.notify_new()
        assert self.standing() == [f"wren (#{died[1].attempt.job_id}) failed: KeyError: 'label' (rank 1)."]


def test_the_project_s_channel_is_notified_of_its_jobs_alone(die: Die) -> None:
    ours = Channel.objects.create(project=a_project(), kind="slack", address="https://hooks.slack.com/x")
    Channel.objects.create(project=a_project("other"), kind="slack", address="https://hooks.slack.com/y")
    die()
    incident_notices.notify_new()
    assert Delivery.objects.get().channel == ours


class TestSysadmins:
    def test_are_notified_once_a_node_and_day(self, die: Die) -> None:
        Channel.objects.create(user=sysadmin(), kind="email", address="sam@lab.example")
        for _ in range(3):
            die("gpu.off_bus", node="dgx-03")
        die("gpu.off_bus", node="dgx-04")
        die("program.exception", node="dgx-03")
        incident_notices.notify_new()
        assert sorted(title.replace("\N{NO-BREAK SPACE}", " ") for title in titles("incident.site")) == [
            "GPU fell off the bus on dgx-03: 3 attempts failed.",
            f"GPU fell off the bus on dgx-04: wren (#{Job.objects.order_by('pk')[3].pk}) failed.",
        ]
        assert Delivery.objects.filter(kind="incident.site").count() == 2
        assert Notice.objects.filter(kind="incident.site", link="/nodes/dgx-03").exists()

    def test_a_notice_that_was_no_fault_of_the_site_is_withdrawn(self, die: Die) -> None:
        died = [die("gpu.off_bus", node="dgx-03"), die("gpu.off_bus", node="dgx-03"), die("gpu.ecc", node="")]
        incident_notices.notify_new()
        for incident, left in zip(died, (2, 1, 0), strict=True):
            Incident.objects.filter(pk=incident.pk).update(version=2, cause="program.exception", confirmed_cause="")
            incident_notices.notify_new()
            assert Notice.objects.active().filter(kind="incident.site").count() == left

    def test_a_node_that_another_verdict_named_is_cleared(self, die: Die) -> None:
        incident = die("gpu.off_bus", node="dgx-03")
        Diagnosis.objects.update(verdict={"node": "dgx-03"})
        incident_notices.notify_new()
        Incident.objects.filter(pk=incident.pk).update(version=2, cause="gpu.off_bus", node="dgx-04")
        incident_notices.notify_new()
        assert Notice.objects.active().get(kind="incident.site").link == "/nodes/dgx-04"

    def test_another_day_it_is_news_again(self, die: Die) -> None:
        Channel.objects.create(user=sysadmin(), kind="email", address="sam@lab.example")
        die("gpu.ecc", node="dgx-03", at=timezone.now() - timedelta(days=1))
        incident_notices.notify_new()
        die("gpu.ecc", node="dgx-03")
        incident_notices.notify_new()
        assert (Notice.objects.filter(kind="incident.site").count(), Delivery.objects.count()) == (2, 2)
        incident_notices.forget()
        incident_notices.notify_new()
        assert Delivery.objects.count() == 2, "a process that restarts sends nothing twice"


def test_a_worker_s_task_notifies(die: Die) -> None:
    from jobs.tasks import diagnose

    die()
    diagnose()
    assert Notice.objects.exists()
