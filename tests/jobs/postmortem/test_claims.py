"""Check that sysadmins hear of broken hardware from its machine or the scheduler, never from a job or a person."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils import timezone

from diagnosis import offline
from diagnosis.causes import CAUSES
from diagnosis.corroboration import ATTEMPT
from diagnosis.diagnose import diagnose
from diagnosis.signatures.catalogue import shipped_catalogue
from diagnosis.verdict import Verdict
from jobs.failures import counting
from jobs.following.decisions.policy import decide
from jobs.models import Event, Failure, Incident
from jobs.postmortem import editing, incident_notices, incidents
from nodes.models import Agent, Gpu, NodeEvent
from portal.models import Notice, User
from tests.jobs.postmortem.attempt_files import Left
from tests.jobs.postmortem.failed_attempts import RAISED, dead
from tests.lab import a_project, bearer, person, signed_in, sysadmin
from tests.vigil_cli.commands import portal, vigil  # noqa: F401

pytestmark = pytest.mark.django_db
XID = "NVRM: Xid (PCI:0000:ab:00): 79, pid=41833, name=python, GPU has fallen off the bus."
SMI = "\n==============NVSMI LOG==============\n\nDriver Version : 570.86.15\n\nGPU 00000000:AB:00.0\n"
OF_SYSADMINS = sorted(code for code, cause in CAUSES.items() if cause.owner == "sysadmin")


@pytest.fixture(autouse=True)
def _as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    incident_notices.forget()
    monkeypatch.setattr(incident_notices, "DECISION_WAIT", timedelta())


def notices(kind: str) -> list[Notice]:
    incident_notices.notify_new()
    return list(Notice.objects.active().filter(kind=kind).order_by("pk"))


def with_gpus(left: Left, gpus: int) -> None:
    job = left.attempt.job
    job.spec = {**job.spec, "resources": {**job.spec["resources"], "gpus_per_node": gpus}}
    job.save(update_fields=["spec"])


def watched(*nodes: str) -> list[Agent]:
    later = timezone.now() + timedelta(seconds=5)
    return [Agent.objects.create(node=node, heard_at=later) for node in nodes]


def off_bus(agent: Agent, at: datetime) -> None:
    """Store what an agent reports when a GPU fell off the bus."""
    gpu = Gpu.objects.create(uuid="GPU-2", agent=agent, index=2, bus="0000:ab:00")
    text = "GPU has fallen off the bus."
    NodeEvent.objects.create(agent=agent, gpu=gpu, kind="xid", code=79, text=text, at=at, last_at=at)


class TestPrinted:
    """Test a line in the job's log, which any program may print."""

    def test_by_a_job_without_a_gpu_is_no_verdict(self, left: Left) -> None:
        with_gpus(left, 0)
        left.write("logs/0.1.log", f"step 1 loss 2.0\n{XID}\n")
        incident, report = left.diagnosed()
        assert (incident.cause, incident.confirmed_cause) == ("unknown", "")
        assert report["runner_up"]["cause"] == "gpu.off_bus"
        assert "no GPU was allocated to the job" in report["runner_up"]["why"]
        assert notices("incident.site") == []

    def test_does_not_hide_what_the_program_raised(self, left: Left) -> None:
        with_gpus(left, 0)
        left.write("logs/0.1.log", f"{XID}\n{RAISED}")
        assert left.diagnosed()[0].cause == "program.exception"

    def test_is_less_sure_where_agents_watched_and_saw_nothing(self, left: Left) -> None:
        watched("dgx-01", "dgx-02")
        left.write("logs/0.1.log", f"step 1 loss 2.0\n{XID}\n")
        incident, report = left.diagnosed()
        assert (incident.cause, report["source"]) == ("gpu.off_bus", "program")
        assert report["confidence"] < 0.6
        assert report["says"].startswith("According to its own log: GPU fell off the bus")
        assert report["doubts"] == ["the agents on its nodes saw no such event"]
        assert report["advice"].startswith("No evidence from the machine itself confirms this.")
        assert notices("incident.site") == []
        (notice,) = notices("incident")
        assert dict(notice.facts)["Reported by"] == "the program only; the agents on its nodes saw no such event"
        assert not notice.detail.startswith("Drain")

    def test_is_reported_to_sysadmins_once_the_machine_confirms_it(self, left: Left) -> None:
        (agent, _) = watched("dgx-02", "dgx-01")
        left.write("logs/0.1.log", f"step 1 loss 2.0\n{XID}\n")
        incident, _ = left.diagnosed()
        off_bus(agent, incident.at)
        Incident.objects.update(due_at=timezone.now())
        assert incidents.diagnose(incident.pk)
        incident.refresh_from_db()
        assert (incident.confirmed_cause, incident.node) == ("gpu.off_bus", "dgx-02")
        (notice,) = notices("incident.site")
        assert dict(notice.facts)["Reported by"] == "the node (kernel or agent)"
        assert notice.detail.startswith("Drain the node")

    def test_a_log_in_the_form_of_a_kernels_is_still_the_jobs(self, left: Left) -> None:
        lines = [f"[ {n}.000001] usb 1-1: new device" for n in range(20)]
        left.write("logs/0.1.log", "\n".join([*lines, f"[ 21.000001] {XID}", ""]))
        incident, report = left.diagnosed()
        assert (incident.confirmed_cause, report["source"]) == ("", "program")

    def test_so_is_a_log_with_lines_that_a_container_engine_wrapped(self, left: Left) -> None:
        lines = [f"[ {n}.000001] usb 1-1: new device" for n in range(20)] + [f"[ 21.000001] {XID}"]
        wrapped = [
            json.dumps({"log": f"{line}\n", "stream": "stdout", "time": "2026-11-21T03:01:31Z"}) for line in lines
        ]
        left.write("logs/0.1.log", "\n".join([*wrapped, ""]))
        incident, report = left.diagnosed()
        assert (incident.confirmed_cause, report["source"]) == ("", "program")

    def test_a_log_in_the_form_of_the_schedulers_record_is_still_the_jobs(self, left: Left) -> None:
        left.write("logs/0.1.log", "JobID|State|ExitCode|NodeList\n7|NODE_FAIL|0:0|dgx-02\n")
        incident, _ = left.diagnosed()
        assert (incident.cause, incident.confirmed_cause) == ("unknown", "")

    def test_what_the_scheduler_does_not_know_is_no_verdict(self, left: Left) -> None:
        left.write(
            "logs/0.1.log", "slurmstepd: error: *** JOB 7 ON dgx-02 CANCELLED AT 2026-11-21 DUE TO NODE FAILURE ***\n"
        )
        incident, report = left.diagnosed()
        assert (incident.cause, incident.confirmed_cause) == ("unknown", "")
        assert "the scheduler reports no such event" in str(report["runner_up"])

    def test_a_report_of_a_guard_is_the_jobs_claim(self, left: Left) -> None:
        data = {"step": 9, "check": "replica", "ranks": [1], "what": "differs"}
        Event.objects.create(
            attempt=left.attempt, time=timezone.now(), kind="guard.corruption", rank=0, incarnation=0, data=data
        )
        incident, report = left.diagnosed()
        assert (incident.cause, report["source"], incident.confirmed_cause) == ("numerics.corruption", "program", "")
        assert notices("incident.site") == []


class TestLaunchersReport:
    """Test a launcher's last snapshot, a file in the job's folder that the job can write itself."""

    def forged(self, left: Left, **more: object) -> tuple[Incident, dict[str, Any]]:
        left.ends(1, r1=(1, None, 0.5))
        payload: dict[str, Any] = {"kernel": [[timezone.now().timestamp() - 5, XID]], "gpus": ["00000000:AB:00.0"]}
        left.write_snapshot(0)
        left.write_snapshot(1, **(payload | more))
        return left.diagnosed()

    def test_raises_no_alarm_and_is_labelled(self, left: Left) -> None:
        incident, report = self.forged(left)
        assert (incident.cause, incident.confirmed_cause, report["source"]) == ("gpu.off_bus", "", "launcher")
        assert report["confidence"] < 0.9
        assert report["says"].startswith("According to its launcher: GPU fell off the bus")
        assert report["advice"].startswith("No evidence from the machine itself confirms this.")
        assert notices("incident.site") == []
        (notice,) = notices("incident")
        reported = "the job's launcher only; no agent monitored its nodes"
        assert dict(notice.facts)["Reported by"] == reported
        assert not notice.detail.startswith("Drain")
        counting.count()
        assert not Failure.objects.filter(is_interruption=True).exists()

    def test_is_doubted_where_agents_watched_and_saw_nothing(self, left: Left) -> None:
        watched("dgx-01", "dgx-02")
        incident, report = self.forged(left)
        assert incident.confirmed_cause == ""
        assert report["confidence"] < 0.6
        assert report["doubts"] == ["the agents on its nodes saw no such event"]

    def test_by_a_job_without_a_gpu_is_no_verdict(self, left: Left) -> None:
        with_gpus(left, 0)
        incident, report = self.forged(left)
        assert (incident.cause, incident.confirmed_cause) == ("unknown", "")
        assert notices("incident.site") == []

    def test_confirms_no_line_that_the_job_printed(self, left: Left) -> None:
        left.write("logs/0.1.log", f"step 1 loss 2.0\n{XID}\n")
        incident, report = self.forged(left)
        assert (incident.confirmed_cause, report["source"]) == ("", "launcher")

    def test_is_the_machines_once_its_agent_confirms_it(self, left: Left) -> None:
        (agent,) = watched("dgx-02")
        off_bus(agent, timezone.now())
        incident, report = self.forged(left)
        assert (incident.confirmed_cause, report["source"], report["doubts"]) == ("gpu.off_bus", "machine", [])
        assert report["confidence"] > 0.9
        assert len(notices("incident.site")) == 1

    @pytest.mark.parametrize(
        "more",
        [
            {"kernel": [], "disk": {"free_mib": 0, "problem": "ENOSPC"}},
            {"kernel": [], "nvidia_smi": f"{SMI}    Remapped Rows\n        Remapping Failure Occurred        : Yes\n"},
        ],
        ids=["disk", "nvidia-smi"],
    )
    def test_of_a_full_disk_or_of_nvidia_smi_neither(self, left: Left, more: dict[str, Any]) -> None:
        left.write("logs/0.1.log", "")
        incident, report = self.forged(left, **more)
        assert CAUSES[incident.cause].owner == "sysadmin"
        assert (incident.confirmed_cause, report["source"]) == ("", "launcher")
        assert notices("incident.site") == []


def judged(text: str) -> Verdict:
    read = offline.read_logs([offline.log_from_text(text, "0.0.log")], shipped_catalogue(), of_job=True)
    return diagnose(read.scanned, shipped_catalogue(), records=read.records, available={ATTEMPT})


@pytest.mark.parametrize("cause", OF_SYSADMINS)
def test_no_line_that_a_job_prints_is_the_machines_word(cause: str) -> None:
    """Test every catalogue entry whose cause sysadmins must act on."""
    entries = [
        item for item in shipped_catalogue() if item.cause == cause and not item.is_for_tracebacks and item.example
    ]
    assert entries
    for entry in entries:
        verdict = judged(f"step 1 loss 2.0\n{entry.example}\n")
        assert verdict.confirmed_cause == "", entry.name


def test_without_a_portal_a_kernel_log_is_the_machines_word() -> None:
    kernel = "\n".join(f"[ {n}.000001] usb 1-1: new device" for n in range(9)) + f"\n[ 21.000001] {XID}\n"
    verdict = offline.diagnose_logs(offline.logs_from_texts({"train.log": "step 1 loss 2.0\n", "dmesg.txt": kernel}))
    assert (verdict.cause, verdict.source, verdict.doubts) == ("gpu.off_bus", "machine", [])
    alone = offline.diagnose_text(f"step 1 loss 2.0\n{XID}\n")
    assert (alone.cause, alone.source) == ("gpu.off_bus", "program")
    assert alone.confidence > 0.9, "what the log allows, as nobody knows more"


class TestOverruled:
    """Test a person's judgement: it is shown with their name, and calls nobody to a node."""

    @pytest.mark.parametrize("cause", OF_SYSADMINS)
    def test_calls_no_sysadmin(self, mira: User, runs: Path, cause: str) -> None:
        incident = dead(mira, runs)
        editing.overrule(mira, incident, cause=cause, why="I saw it.")
        assert notices("incident.site") == []
        (notice,) = notices("incident")
        assert "according to mira" in notice.title
        facts = dict(notice.facts)
        assert (facts["Cause"], facts["Reported by"]) == (f"{cause}, overruled by mira", "mira: I saw it.")

    def test_is_named_wherever_it_is_shown(self, mira: User, runs: Path, portal: SimpleNamespace) -> None:  # noqa: F811
        incident = dead(mira, runs)
        editing.overrule(mira, incident, cause="gpu.off_bus", why="I saw it")
        job = incident.attempt.job_id
        payload = bearer(mira).get(f"/api/v1/jobs/{job}/postmortem").json()
        assert (payload["reported_by"], payload["is_confirmed"]) == ("mira; not confirmed by the machine", False)
        assert payload["advice"].startswith("No evidence from the machine itself confirms this.")
        portal.answers["GET", f"jobs/{job}"] = bearer(mira).get(f"/api/v1/jobs/{job}").json()
        portal.answers["GET", f"jobs/{job}/postmortem"] = payload
        for text in (
            signed_in(mira).get(f"/jobs/{job}/postmortem").content.decode(),
            signed_in(mira).get(f"/jobs/{job}").content.decode(),
            signed_in(mira).get(f"/jobs/{job}/postmortem.md").content.decode(),
            vigil("postmortem", str(job)).output,
        ):
            assert "GPU fell off the bus, according to mira: I saw it." in text
            assert "What to do: Drain" not in text

    def test_silences_no_alarm_unless_a_sysadmin_confirms_it(self, mira: User, runs: Path) -> None:
        incident = dead(mira, runs)
        Incident.objects.update(cause="gpu.ecc", confirmed_cause="gpu.ecc", node="dgx-02")
        incident.refresh_from_db()
        assert len(notices("incident.site")) == 1
        editing.overrule(mira, incident, cause="program.exception", why="It was me.")
        assert len(notices("incident.site")) == 1
        page = signed_in(mira).get(f"/jobs/{incident.attempt.job_id}/postmortem").content.decode()
        assert "itself reports <code>gpu.ecc</code>; sysadmins stay notified" in page
        assert "Sysadmins were not notified" not in page
        editing.overrule(sysadmin(), incident, cause="program.exception", why="It was her.")
        assert notices("incident.site") == []

    def test_taken_back_the_machines_word_holds_again(self, left: Left) -> None:
        (agent,) = watched("dgx-02")
        off_bus(agent, timezone.now())
        incident, _ = left.diagnosed()
        assert incident.confirmed_cause == "gpu.off_bus"
        admin = sysadmin()
        editing.overrule(admin, incident, cause="data.corrupt", why="I saw it.")
        assert incident.confirmed_cause == ""
        editing.withdraw(admin, incident)
        assert (incident.cause, incident.confirmed_cause) == ("gpu.off_bus", "gpu.off_bus")

    def test_excludes_the_node_for_their_job_alone(self, mira: User, runs: Path) -> None:
        incident = dead(mira, runs)
        Incident.objects.update(node="dgx-02")
        incident.refresh_from_db()
        editing.overrule(mira, incident, cause="gpu.off_bus", why="I saw it.")
        decision = decide(incident.attempt, "exception")
        assert "(according to mira)" in decision.text
        other = dead(person("lena", a_project("elsewhere")), runs, project="elsewhere")
        assert "dgx-02" not in decide(other.attempt, "exception").blamed

    def test_of_many_jobs_makes_no_node_an_offender(self, mira: User, runs: Path) -> None:
        for _ in range(4):
            incident = dead(mira, runs)
            editing.overrule(mira, incident, cause="gpu.off_bus", why="I saw it.")
        counting.count()
        assert set(Failure.objects.values_list("cause", "program", "is_interruption")) == {
            ("gpu.off_bus", f"claims of {mira.pk}", False)
        }

    def test_is_no_evidence_for_the_failure_of_somebody_else(self, left: Left, mira: User, runs: Path) -> None:
        for _ in range(3):
            incident = dead(mira, runs)
            editing.overrule(mira, incident, cause="storage.io", why="I saw it.")
        _, report = left.diagnosed()
        assert "because a file system failed" not in json.dumps(report)
