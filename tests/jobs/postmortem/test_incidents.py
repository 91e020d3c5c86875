"""Test incidents: opened at a failure, diagnosed once from what the attempt left, and again with more evidence."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs.following import ending
from jobs.following.end_causes.cause import AttemptEnd
from jobs.models import Attempt, Diagnosis, Incident, Job
from jobs.postmortem import incidents
from nodes.models import Agent, Gpu, Holding, NodeEvent
from portal.models import User
from tests.jobs.reporting import attempt_of, job_of
from tests.lab import a_project, bearer, person, signed_in

pytestmark = pytest.mark.django_db
RAISED = """step 1 loss 2.0
Traceback (most recent call last):
  File "/home/mira/train.py", line 40, in main
    batch = data["label"]
KeyError: 'label'
"""
GONE = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:9885\n"
BUS = "00000000:AB:00.0"


@pytest.fixture
def attempt(runs: Path) -> Attempt:
    """Return a running job on two nodes, with its folder on disk."""
    job = job_of()
    Job.objects.filter(pk=job.pk).update(directory="default/1-abcdef")
    job.refresh_from_db()
    (runs / "default/1-abcdef/job/attempt-1/logs").mkdir(parents=True)
    (runs / "default/1-abcdef/portal").mkdir()
    return attempt_of(
        job, scheduler_id="7", nodes=["dgx-01", "dgx-02"], directory="attempt-1", started_at=timezone.now()
    )


def write(runs: Path, name: str, text: str) -> Path:
    path = runs / "default/1-abcdef/job/attempt-1/logs" / name
    path.write_text(text)
    return path


def fail(attempt: Attempt, ended: AttemptEnd | None = None, **more: Any) -> Incident:
    failure = {"cause": "failed", "first_failure": {"rank": 1, "kind": "exception", "exit_code": 1, "error": "x"}}
    assert ending.end(attempt, ended or AttemptEnd("failed", 1, result=failure), **more)
    return Incident.objects.get(attempt=attempt)


def of_today(incident: Incident) -> Diagnosis:
    found = incident.diagnoses.first()
    assert found is not None
    return found


def test_a_bad_end_is_an_incident_with_a_verdict(attempt: Attempt, runs: Path) -> None:
    write(runs, "0.0.log", GONE)
    write(runs, "0.1.log", RAISED)
    incident = fail(attempt)
    assert (incident.version, incident.due_at is not None) == (0, True)
    assert incidents.diagnose(incident.pk)
    incident.refresh_from_db()
    assert (incident.cause, incident.rank, incident.version) == ("program.exception", 1, 1)
    assert incident.says == "Unhandled exception on rank 1: KeyError: 'label'."
    assert incident.fingerprint
    verdict = of_today(incident).verdict
    assert [(item["file"], item["line"]) for item in verdict["evidence"] if item["role"] == "root"] == [("0.1.log", 5)]
    assert verdict["exception"] == "KeyError"


def test_of_what_nobody_knows_none_are_alike(attempt: Attempt, runs: Path) -> None:
    write(runs, "0.0.log", "step 1 loss 2.0\n")
    incident = fail(attempt, AttemptEnd("failed", 1))
    assert incidents.diagnose(incident.pk)
    incident.refresh_from_db()
    assert (incident.cause, incident.fingerprint) == ("unknown", "")


@pytest.mark.parametrize(
    "ended",
    [
        AttemptEnd("completed", 0),
        AttemptEnd("failed", 75),
        AttemptEnd("preempted"),
        AttemptEnd("requeued"),
        AttemptEnd("cancelled"),
    ],
)
def test_an_end_as_it_was_meant_is_none(attempt: Attempt, ended: AttemptEnd) -> None:
    assert ending.end(attempt, ended)
    assert not Incident.objects.exists()


def test_only_the_incarnation_that_failed_is_read(attempt: Attempt, runs: Path) -> None:
    write(runs, "0.0.log", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    write(runs, "1.0.log", RAISED)
    incidents.diagnose(fail(attempt).pk)
    assert Incident.objects.get().cause == "program.exception"


def test_two_workers_make_one_version(attempt: Attempt, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(runs, "0.0.log", RAISED)
    incident = fail(attempt)
    verdict_on = incidents.diagnose_incident

    def meanwhile(incident: Incident) -> Any:
        """Let another worker, which took it for abandoned, finish first."""
        monkeypatch.setattr(incidents, "diagnose_incident", verdict_on)
        Incident.objects.filter(pk=incident.pk).update(due_at=timezone.now())
        assert incidents.diagnose(incident.pk)
        return verdict_on(incident)

    monkeypatch.setattr(incidents, "diagnose_incident", meanwhile)
    assert not incidents.diagnose(incident.pk)
    assert Diagnosis.objects.count() == 1


def test_an_incident_that_a_worker_dies_of_is_left_alone_for_a_while(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    incident = fail(attempt)

    def die(incident: Incident) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(incidents, "diagnose_incident", die)
    with pytest.raises(KeyboardInterrupt):
        incidents.diagnose(incident.pk)
    assert not incidents.diagnose(incident.pk)
    assert not Incident.objects.due().exists()
    Incident.objects.update(due_at=timezone.now() - timedelta(seconds=1))
    assert list(Incident.objects.due()) == [incident]


def test_a_first_verdict_that_is_waited_for_comes_before_all_others(attempt: Attempt) -> None:
    ended = fail(attempt)
    other = attempt_of(job_of(), scheduler_id="8")
    payload = {"project": other.job.project, "at": timezone.now()}
    ago = [timezone.now() - timedelta(seconds=seconds) for seconds in (30, 20)]
    again = Incident.objects.create(attempt=other, version=1, due_at=ago[1], **payload)
    in_place = Incident.objects.create(attempt=other, incarnation=0, due_at=ago[0], **payload)
    assert list(Incident.objects.due()) == [ended, in_place, again]


def test_it_is_diagnosed_ever_less_often(attempt: Attempt) -> None:
    """A diagnosis reads all evidence again."""
    incident = fail(attempt)
    later = []
    for minutes in (0, 1, 5, 20):
        Incident.objects.update(due_at=timezone.now(), at=timezone.now() - timedelta(minutes=minutes))
        assert incidents.diagnose(incident.pk)
        incident.refresh_from_db()
        assert incident.due_at is not None
        later.append(round((incident.due_at - timezone.now()) / timedelta(minutes=1)))
    assert later == [1, 1, 5, 20]


def test_what_stays_as_it_was_is_not_counted_again(attempt: Attempt, runs: Path) -> None:
    write(runs, "0.0.log", RAISED)
    incident = fail(attempt)
    for is_counted in (False, True, False):
        incidents.diagnose(incident.pk)
        incident.refresh_from_db()
        assert incident.is_counted is is_counted
        Incident.objects.update(due_at=timezone.now(), is_counted=True)
        if is_counted:
            write(runs, "0.0.log", RAISED.replace("label", "weight"))


class TestWhatCannotBeDiagnosed:
    """It is tried five times, then reported as unknown; by then what follows has long been decided."""

    @pytest.fixture
    def incident(self, attempt: Attempt) -> Incident:
        return fail(attempt)

    def again(self, times: int) -> None:
        for _ in range(times):
            Incident.objects.exclude(due_at=None).update(due_at=timezone.now())
            incidents.diagnose_due(time.monotonic() + 5)

    def test_ends_as_unknown_and_explains_why(self, incident: Incident, monkeypatch: pytest.MonkeyPatch) -> None:
        failed = ValueError("no\0t\nwhat it seems, password=hunter2hunter2")
        monkeypatch.setattr(incidents, "diagnose_incident", raises(failed))
        self.again(4)
        incident.refresh_from_db()
        assert (incident.version, incident.tries) == (0, 4)
        self.again(3)
        incident.refresh_from_db()
        assert (incident.cause, incident.version, incident.is_final, incident.due_at) == ("unknown", 1, True, None)
        assert incident.says.startswith(
            "It could not be diagnosed: reading its files failed 5 times: ValueError: not what it seems"
        )
        assert "hunter2" not in incident.says

    def test_so_does_an_incident_that_each_worker_dies_of(
        self, incident: Incident, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(incidents, "diagnose_incident", raises(KeyboardInterrupt()))
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                self.again(1)
        self.again(1)
        incident.refresh_from_db()
        assert "its worker was killed at each of 5 attempts" in incident.says
        assert incident.is_final

    def test_the_verdict_that_there_is_stays(
        self, attempt: Attempt, runs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(runs, "0.0.log", RAISED)
        incident = fail(attempt)
        incidents.diagnose(incident.pk)
        monkeypatch.setattr(incidents, "diagnose_incident", raises(ValueError("x")))
        self.again(6)
        incident.refresh_from_db()
        assert (incident.cause, incident.version, incident.is_final) == ("program.exception", 1, True)
        assert incident.due_at is None

    def test_the_others_do_not_wait_for_it(
        self, incident: Incident, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = fail(attempt_of(job_of(), scheduler_id="8"))
        verdict_on = incidents.diagnose_incident
        monkeypatch.setattr(
            incidents,
            "diagnose_incident",
            lambda due: raises(ValueError())() if due.pk == incident.pk else verdict_on(due),
        )
        assert incidents.diagnose_due(time.monotonic() + 5) == 1
        other.refresh_from_db()
        assert other.version == 1

    def test_a_success_resets_the_count(self, incident: Incident, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(incidents, "diagnose_incident", raises(ValueError()))
            self.again(4)
        self.again(1)
        incident.refresh_from_db()
        assert (incident.version, incident.tries) == (1, 0)


def raises(error: BaseException) -> Callable[..., Any]:
    def act(*about: Any) -> Any:
        raise error

    return act


def test_evidence_that_comes_late_is_a_further_version_and_the_last_is_final(attempt: Attempt, runs: Path) -> None:
    write(runs, "0.0.log", RAISED)
    incident = fail(attempt)
    agent = Agent.objects.create(node="dgx-02", heard_at=timezone.now())
    gpu = Gpu.objects.create(uuid="GPU-1", agent=agent, index=3, bus=BUS)
    since = incident.at - timedelta(hours=1)
    Holding.objects.create(gpu=gpu, agent=agent, scheduler_id="7", source="scheduler", since=since)
    incidents.diagnose(incident.pk)
    NodeEvent.objects.create(
        agent=agent, gpu=gpu, kind="xid", code=79, text="pid=41833, name=python, GPU has fallen off the bus.",
        at=incident.at - timedelta(seconds=9), last_at=incident.at - timedelta(seconds=9),
    )  # fmt: skip
    Incident.objects.update(due_at=timezone.now())
    incidents.diagnose(incident.pk)
    incident.refresh_from_db()
    assert (incident.cause, incident.node, incident.version, incident.is_final) == ("gpu.off_bus", "dgx-02", 2, False)
    assert [diagnosis.cause for diagnosis in incident.diagnoses.all()] == ["gpu.off_bus", "program.exception"]
    Attempt.objects.update(closed_at=timezone.now(), slurm_steps_at=timezone.now())
    Incident.objects.update(due_at=timezone.now())
    assert incidents.diagnose(incident.pk)
    incident.refresh_from_db()
    assert (incident.version, incident.is_final, incident.due_at) == (2, True, None)


def test_an_xid_of_somebody_elses_gpu_on_the_same_machine_is_none_of_it(attempt: Attempt, runs: Path) -> None:
    write(runs, "0.0.log", RAISED)
    incident = fail(attempt)
    agent = Agent.objects.create(node="dgx-02", heard_at=timezone.now())
    other = Gpu.objects.create(uuid="GPU-2", agent=agent, index=2, bus=BUS)
    since = timezone.now() - timedelta(hours=1)
    Holding.objects.create(gpu=other, agent=agent, scheduler_id="8", source="scheduler", since=since)
    NodeEvent.objects.create(
        agent=agent, gpu=other, kind="xid", code=79, text="GPU has fallen off the bus.",
        at=incident.at, last_at=incident.at,
    )  # fmt: skip
    incidents.diagnose(incident.pk)
    assert Incident.objects.get().cause == "program.exception"


@pytest.mark.parametrize(("gpus", "cause"), [(0, "program.exception"), (8, "gpu.off_bus")])
def test_a_gpu_that_was_lost_is_nothing_to_a_job_without_any(
    attempt: Attempt, runs: Path, gpus: int, cause: str
) -> None:
    """Jobs with and without GPUs run on one machine; nobody has reported yet which of them had this GPU."""
    spec = attempt.job.spec
    spec["resources"] = {**spec.get("resources", {}), "gpus_per_node": gpus}
    attempt.job.save()
    write(runs, "0.0.log", RAISED)
    incident = fail(attempt)
    agent = Agent.objects.create(node="dgx-02", heard_at=timezone.now())
    gpu = Gpu.objects.create(uuid="GPU-2", agent=agent, index=2, bus=BUS)
    text = "pid=1, name=python, GPU has fallen off the bus."
    NodeEvent.objects.create(agent=agent, gpu=gpu, kind="xid", code=79, text=text, at=incident.at, last_at=incident.at)
    incidents.diagnose(incident.pk)
    assert Incident.objects.get().cause == cause


def test_what_the_scheduler_reports_where_no_log_is_left(attempt: Attempt) -> None:
    incidents.diagnose(fail(attempt, AttemptEnd("timeout", signal=15)).pk)
    incident = Incident.objects.get()
    assert incident.cause == "scheduler.time_limit"
    missing = of_today(incident).verdict["not_seen"]
    assert any("logs" in item for item in missing)
    assert any("dgx-01, dgx-02: no agent" in item for item in missing)


def test_a_log_that_is_a_link_a_pipe_or_a_device_is_not_read(attempt: Attempt, runs: Path, tmp_path: Path) -> None:
    logs = write(runs, "0.0.log", RAISED).parent
    secret = tmp_path / "secret"
    secret.write_text("CUDA out of memory. Tried to allocate 2.00 GiB\n")
    (logs / "0.1.log").symlink_to(secret)
    (logs / "0.2.log").symlink_to("/dev/zero")
    os.mkfifo(logs / "0.3.log")
    incidents.diagnose(fail(attempt).pk)
    incident = Incident.objects.get()
    assert incident.cause == "program.exception"
    assert "out of memory" not in str(of_today(incident).verdict)


def test_what_no_database_takes_is_left_out(attempt: Attempt, runs: Path) -> None:
    write(runs, "0.0.log", RAISED.replace("'label'", "'la\0bel'").replace("train.py", "tr\0ain.py"))
    assert incidents.diagnose(fail(attempt).pk)
    assert "KeyError: 'label'" in str(of_today(Incident.objects.get()).verdict)


def test_only_members_see_it(attempt: Attempt, mira: Any) -> None:
    fail(attempt)
    assert Incident.objects.visible_to(mira).exists()
    assert not Incident.objects.visible_to(person("stranger", a_project("elsewhere"))).exists()


class TestShown:
    """The page and REST show it to members only, and text of logs is escaped."""

    @pytest.fixture
    def job_id(self, attempt: Attempt, runs: Path) -> int:
        write(runs, "0.0.log", GONE)
        write(runs, "0.1.log", RAISED.replace("'label'", "'<script>alert(1)</script> hf_abcdefghijklmnop'"))
        incidents.diagnose(fail(attempt).pk)
        return attempt.job_id

    def test_on_the_jobs_page(self, job_id: int, mira: User) -> None:
        html = signed_in(mira).get(f"/jobs/{job_id}").content.decode()
        assert "Why it failed" in html
        assert "program.exception" in html
        assert "&lt;script&gt;alert(1)" in html
        assert "<script>alert" not in html
        assert "hf_abcdefghijklmnop" not in html
        found = re.search(r'href="(/jobs/\d+/logs\?[^"]+)">rank 1, line 5', html)
        assert found
        shown = signed_in(mira).get(found[1].replace("&amp;", "&"))
        assert "KeyError" in shown.content.decode()

    def test_by_rest(self, job_id: int, mira: User) -> None:
        client = bearer(mira)
        payload = client.get(f"/api/v1/jobs/{job_id}/postmortem").json()
        assert (payload["cause"], payload["owner"], payload["rank"], payload["version"]) == (
            "program.exception",
            "researcher",
            1,
            1,
        )
        assert client.get(f"/api/v1/jobs/{job_id}/postmortem?attempt=1").json() == payload
        assert client.get(f"/api/v1/jobs/{job_id}/postmortem?attempt=2").status_code == 404
        stranger = bearer(person("stranger", a_project("elsewhere")))
        assert stranger.get(f"/api/v1/jobs/{job_id}/postmortem").status_code == 404

    def test_of_what_did_not_go_wrong_there_is_none(self, mira: User) -> None:
        attempt = attempt_of(job_of())
        assert ending.end(attempt, AttemptEnd("completed", 0))
        assert bearer(mira).get(f"/api/v1/jobs/{attempt.job_id}/postmortem").status_code == 404
        assert "Why it failed" not in signed_in(mira).get(f"/jobs/{attempt.job_id}").content.decode()
