"""Test what follows a failure by its verdict: where the job restarts, without which nodes, or that it stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from diagnosis.causes import CAUSES
from jobs.following.decisions import moves
from jobs.following.submission import handover
from jobs.models import Attempt, Incident, Job
from jobs.spec import JobSpec, restarts, write_toml
from jobs.submitting.submit import submit
from nodes.models import Node, NodeOrder
from nodes.schedulers.base import SchedulerError
from portal.models import Project, User
from tests.jobs.following.launchers import EXCEPTION, die, launched, machines, newest, verdict
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import a_checkpoint, bearer, send, signed_in, sysadmin

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("_verdicts_are_waited_for")]
Tick = Callable[[], bool]


@pytest.fixture
def job(job_of_two_nodes: Job) -> Job:
    return job_of_two_nodes


def test_it_is_decided_once_the_cause_is_found(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    attempt = newest()
    launched(attempt, exit_code=1, cause="failed", first_failure=EXCEPTION)
    scheduler.update_job("101", state="failed", exit_code=1, nodes=("dgx01", "dgx02"))
    tick()
    attempt.refresh_from_db()
    assert (attempt.cause, attempt.decided_at) == ("exception", None), "waits for the verdict"
    verdict(attempt, "gpu.off_bus", node="dgx02")
    tick()
    attempt.refresh_from_db()
    assert attempt.decision == (
        "GPU fell off the bus on dgx02 (94 % confidence). "
        "Restarted from the beginning without dgx02 as attempt 2. Restart 1 of 5."
    )
    assert (attempt.blamed_nodes, attempt.decided_version) == (["dgx02"], 1)
    assert newest().excluded_nodes == ["dgx02"]
    assert [submission.excluded_nodes for submission in scheduler.submissions] == [(), ("dgx02",)]


def test_where_nobody_finds_out_in_time_its_end_decides(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    launched(newest(), exit_code=1, cause="failed", first_failure=EXCEPTION)
    scheduler.update_job("101", state="failed", exit_code=1)
    tick()
    Incident.objects.update(opened_at=timezone.now() - timedelta(seconds=16))
    tick()
    assert newest().decision.startswith("The program raised an exception. Not restarted: the same would happen again")
    assert newest().decided_version == 0


@pytest.mark.parametrize(
    ("cause", "more", "text", "without"),
    [
        ("gpu.ecc", {"node": "dgx01"}, "Restarted from step 20 without dgx01 as attempt 2.", ("dgx01",)),
        ("gpu.ecc", {}, "Restarted from step 20 as attempt 2.", ()),
        ("gpu.ecc", {"node": "of-somebody"}, "Restarted from step 20 as attempt 2.", ()),
        ("scheduler.node_fail", {"node": "dgx02"}, "Restarted from step 20 without dgx02", ("dgx02",)),
        ("scheduler.launch", {"node": "dgx02"}, "Restarted from step 20 without dgx02", ("dgx02",)),
        ("environment.driver", {"node": "dgx02"}, "Restarted from step 20 without dgx02", ("dgx02",)),
        ("environment.driver", {}, "Not restarted: the same would happen again", None),
        ("network.fabric", {"node": "dgx02"}, "Restarted from step 20 without dgx02", ("dgx02",)),
        ("network.fabric", {}, "Restarted from step 20 as attempt 2.", ()),
        ("storage.io", {}, "Restarted from step 20 as attempt 2.", ()),
        ("collective.timeout", {}, "Restarted from step 20 as attempt 2.", ()),
        ("rendezvous.failed", {}, "Restarted from step 20 as attempt 2.", ()),
        ("unknown", {}, "Failed for an unknown reason. Restarted from step 20 as attempt 2.", ()),
        ("memory.gpu_oom", {}, "Restarted from step 20 as attempt 2.", ()),
        ("scheduler.time_limit", {}, "Restarted from step 20 as attempt 2.", ()),
        ("collective.mismatch", {}, "Restarted from step 20 as attempt 2.", ()),
        ("checkpoint.corrupt", {}, "it has no earlier checkpoint.", None),
        ("numerics.divergence", {}, "Clone it with a lower learning rate.", None),
        ("numerics.nan", {}, "Not restarted: the same would happen again", None),
        ("program.exception", {}, "Not restarted: the same would happen again", None),
        ("program.config", {}, "Not restarted: the same would happen again", None),
        ("storage.full", {}, "Not restarted: the same would happen again", None),
        ("data.missing", {}, "Not restarted: the same would happen again", None),
        ("none", {}, "The program raised an exception. Not restarted: the same would happen again", None),
    ],
)
def test_each_cause_is_followed_by_its_row(
    job: Job,
    scheduler: ScriptedScheduler,
    tick: Tick,
    cause: str,
    more: dict[str, Any],
    text: str,
    without: tuple[str, ...] | None,
) -> None:
    """If `without` is None, the job stops."""
    a_checkpoint(job, 20, attempt=newest())
    attempt = die(scheduler, tick, cause, **more)
    assert text in attempt.decision
    assert Attempt.objects.count() == (1 if without is None else 2)
    if without is not None:
        assert scheduler.submissions[-1].excluded_nodes == without
    else:
        assert "Not restarted: " in attempt.decision


@pytest.mark.parametrize("cause", ["memory.host_oom", "memory.shm", "scheduler.time_limit", "collective.mismatch"])
def test_what_had_saved_nothing_is_not_begun_again(
    job: Job, scheduler: ScriptedScheduler, tick: Tick, cause: str
) -> None:
    assert "it saved no checkpoint since its start" in die(scheduler, tick, cause).decision
    assert Attempt.objects.count() == 1


def test_what_a_restart_does_not_mend_has_a_single_attempt(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    for step in (20, 40):
        a_checkpoint(job, step, attempt=newest())
        attempt = die(scheduler, tick, "memory.gpu_oom")
    assert attempt.number == 2
    assert "Not restarted: it was restarted for the same reason before." in attempt.decision


def test_the_second_time_it_excludes_the_nodes_that_both_had(
    job: Job, scheduler: ScriptedScheduler, tick: Tick
) -> None:
    a_checkpoint(job, 20, attempt=newest())
    die(scheduler, tick, "network.fabric", nodes=("dgx01", "dgx02"))
    a_checkpoint(job, 40, attempt=newest())
    second = die(scheduler, tick, "network.fabric", nodes=("dgx02", "dgx03"))
    assert "from step 40 without dgx02 as attempt 3" in second.decision
    assert [submission.excluded_nodes for submission in scheduler.submissions] == [(), (), ("dgx02",)]


def test_the_same_twice_without_a_checkpoint_stops(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    die(scheduler, tick, "gpu.off_bus", node="dgx01", fingerprint="same")
    second = die(scheduler, tick, "gpu.off_bus", node="dgx03", nodes=("dgx03", "dgx04"), fingerprint="same")
    assert "Failed twice for the same reason without saving a checkpoint; not restarted." in second.decision
    assert Attempt.objects.count() == 2


def test_another_failure_is_not_the_same(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    die(scheduler, tick, "gpu.off_bus", node="dgx01")
    second = die(scheduler, tick, "storage.io", nodes=("dgx03", "dgx04"))
    assert "as attempt 3" in second.decision


def test_on_a_single_machine_no_node_is_left_out(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    machines(scheduler, "dgx01", "dgx02")
    attempt = die(scheduler, tick, "gpu.off_bus", node="dgx02")
    assert "Not restarted: it failed on dgx02, and too few nodes are left without it." in attempt.decision


def test_a_persons_word_comes_before_the_machines(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    attempt = die(scheduler, tick, "program.exception", overruled_cause="storage.io")
    assert attempt.decision.startswith("File system error (according to somebody). Restarted")


def test_what_is_handed_over_stays(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    first = die(scheduler, tick, "unknown")
    verdict(first, "program.config", version=2)
    tick()
    assert newest().scheduler_id == "102"
    assert newest().is_alive


def test_free_ends_are_no_failures_that_came_before(oskar: User, scheduler: ScriptedScheduler, tick: Tick) -> None:
    """A restart after a preemption does not count as one because of the program."""
    machines(scheduler, "dgx01", "dgx02", "dgx03")
    spec = JobSpec.parse({"name": "gpt", "restart": {"on": {"program.exception": "once"}}})
    submit(oskar, spec, spec_toml=write_toml(spec))
    tick()
    scheduler.update_job("101", state="preempted", nodes=("dgx01",))
    tick()
    assert newest().number == 2
    assert "as attempt 3" in die(scheduler, tick, "program.exception", nodes=("dgx01",)).decision


def test_a_fault_between_nodes_is_on_none_of_a_single_node_job(
    oskar: User, scheduler: ScriptedScheduler, tick: Tick
) -> None:
    machines(scheduler, "dgx01")
    spec = JobSpec.parse({"name": "gpt"})
    submit(oskar, spec, spec_toml=write_toml(spec))
    tick()
    attempt = die(scheduler, tick, "network.fabric", nodes=("dgx01",), node="dgx01")
    assert "Restarted from the beginning as attempt 2" in attempt.decision


@pytest.mark.parametrize("claimed", [False, True], ids=["due", "asked for, and not taken"])
def test_a_later_verdict_takes_back_what_no_scheduler_has(
    job: Job, scheduler: ScriptedScheduler, tick: Tick, claimed: bool
) -> None:
    scheduler.refuses_submissions = SchedulerError("Slurm does not answer")
    first = die(scheduler, tick, "unknown")
    scheduler.refuses_submissions = None
    then = None if not claimed else timezone.now() - handover.RETRY_AFTER * 2
    Attempt.objects.filter(number=2).update(submitting_at=then)
    verdict(first, "program.config", version=2)
    tick()
    second = newest()
    assert (second.state, second.cause, second.scheduler_id) == ("failed", "withdrawn", "")
    first.refresh_from_db()
    assert first.decision.startswith(
        "Invalid argument or setting (94 % confidence). Not restarted: the same would happen"
    )
    assert first.decision.endswith("Attempt 2, decided before this was known, was not started.")
    tick()
    assert Attempt.objects.count() == 2
    assert not Incident.objects.filter(attempt=second).exists()


def test_a_persons_word_takes_it_back_too(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    scheduler.refuses_submissions = SchedulerError("Slurm does not answer")
    first = die(scheduler, tick, "unknown")
    scheduler.refuses_submissions = None
    Attempt.objects.filter(number=2).update(submitting_at=None)
    verdict(first, "program.config", overruled_cause="program.config", overruled_at=timezone.now())
    tick()
    assert newest().cause == "withdrawn"


def test_what_somebody_else_is_handing_over_is_not_reported_as_taken_back(
    job: Job, scheduler: ScriptedScheduler, tick: Tick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has its row by then: nothing was ended, so nothing is reported."""
    scheduler.refuses_submissions = SchedulerError("Slurm does not answer")
    first = die(scheduler, tick, "unknown")
    Attempt.objects.filter(number=2).update(submitting_at=None)
    verdict(first, "program.config", version=2)
    monkeypatch.setattr(handover, "end", lambda *given, **more: False)
    tick()
    first.refresh_from_db()
    assert "was not started" not in first.decision


def test_a_federation_that_lost_its_quorum_restarts_once(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    """The same clients in the same rounds repeat failures of clients, and may not repeat failures of machines."""
    assert "Restarted from the beginning as attempt 2" in die(scheduler, tick, "federated.quorum").decision
    a_checkpoint(job, 40, attempt=newest())
    assert (
        "Not restarted: it was restarted for the same reason before."
        in die(scheduler, tick, "federated.quorum").decision
    )


def test_a_federation_of_failed_clients_does_not(job: Job, scheduler: ScriptedScheduler, tick: Tick) -> None:
    decision = die(scheduler, tick, "federated.clients").decision
    assert decision == ("All clients failed (94 % confidence). Not restarted: the same would happen again.")


class TestOthers:
    """The nodes on which the job may run decide whether enough are left."""

    @pytest.mark.parametrize(
        ("resources", "text"),
        [
            ({"gpus_per_node": 1, "gpu_type": "h100"}, "too few nodes are left without it"),
            ({"exclude_nodes": ["dgx03", "dgx04"]}, "too few nodes are left without it"),
            ({}, "without dgx01 as attempt 2"),
        ],
    )
    def test_are_those_that_it_may_run_on(
        self, oskar: User, scheduler: ScriptedScheduler, tick: Tick, resources: dict[str, Any], text: str
    ) -> None:
        machines(scheduler, "dgx01", "dgx02", "dgx03", "dgx04")
        for number, machine in enumerate(scheduler.machines):
            scheduler.machines[number] = replace(machine, gpu_type="h100" if number < 2 else "a100")
        Node.objects.update(gpus=4)
        Node.objects.filter(name__in=["dgx01", "dgx02"]).update(gpu_type="h100")
        Node.objects.filter(name__in=["dgx03", "dgx04"]).update(gpu_type="a100")
        spec = JobSpec.parse({"name": "gpt", "resources": {"nodes": 2, **resources}})
        submit(oskar, spec, spec_toml=write_toml(spec))
        tick()
        assert text in die(scheduler, tick, "gpu.ecc", node="dgx01").decision

    def test_a_node_that_was_put_back_into_service_counts_again(
        self, job: Job, scheduler: ScriptedScheduler, tick: Tick
    ) -> None:
        die(scheduler, tick, "gpu.ecc", node="dgx01")
        assert newest().excluded_nodes == ["dgx01"]
        order = {"node": "dgx01", "action": NodeOrder.Action.UNDRAIN, "state": NodeOrder.State.DONE}
        NodeOrder.objects.create(**order, ended_at=timezone.now())
        die(scheduler, tick, "storage.io", nodes=("dgx03", "dgx04"))
        assert newest().excluded_nodes == []


class TestChangedRows:
    def test_of_the_job(self, oskar: User, scheduler: ScriptedScheduler, tick: Tick) -> None:
        machines(scheduler, "dgx01", "dgx02", "dgx03")
        spec = JobSpec.parse({"name": "gpt", "restart": {"on": {"program.*": "restart", "gpu.ecc": "stop"}}})
        submit(oskar, spec, spec_toml=write_toml(spec))
        tick()
        assert "as attempt 2" in die(scheduler, tick, "program.exception", nodes=("dgx01",)).decision
        attempt = die(scheduler, tick, "gpu.ecc", nodes=("dgx01",), node="dgx01")
        assert "Not restarted: the same would happen again." in attempt.decision

    def test_nearer_ones_win(
        self, job: Job, scheduler: ScriptedScheduler, tick: Tick, settings: Any, project: Project
    ) -> None:
        settings.VIGIL_RESTART_ON = '"storage.full" = "once"\n"gpu.*" = "stop"\n'
        Project.objects.update(restart_on='"gpu.*" = "restart"')
        attempt = die(scheduler, tick, "gpu.ecc", node="dgx01")
        assert "Restarted from the beginning as attempt 2" in attempt.decision
        assert "as attempt 3" in die(scheduler, tick, "storage.full").decision

    @pytest.mark.parametrize(
        ("on", "text"),
        [
            ({"gpu.exploded": "stop"}, "is not a cause"),
            ({"none": "restart"}, "is not a cause"),
            ({"scheduler.preempted": "stop"}, "is not a cause"),
            ({"gpu.*": "explode"}, "'once-if-saved'"),
            ({"gpu.*": 3}, ""),
        ],
    )
    def test_what_does_not_hold_is_refused(self, oskar: User, on: dict[str, Any], text: str) -> None:
        answer = send(bearer(oskar), "post", "/api/v1/jobs", {"spec": {"name": "x", "restart": {"on": on}}})
        assert answer.status_code == 422, answer.content
        assert text in answer.text
        assert "restart.on" in answer.text

    def test_a_project_s_is_checked_when_it_is_written(self, project: Project) -> None:
        client: Client = signed_in(sysadmin())
        path = f"/admin/portal/project/{project.pk}/change/"
        inline = {"memberships-TOTAL_FORMS": 0, "memberships-INITIAL_FORMS": 0}
        form = {"slug": project.slug, "title": "", **inline}
        assert "is not a cause" in client.post(path, {**form, "restart_on": '"gpu.x" = "stop"'}).text
        client.post(path, {**form, "restart_on": '"gpu.*" = "stop"'})
        project.refresh_from_db()
        assert project.restart_on == '"gpu.*" = "stop"'


def test_a_dry_run_describes_what_would_happen(oskar: User) -> None:
    text = 'name = "x"\n[restart.on]\n"memory.gpu_oom" = "stop"\n'
    answer = send(bearer(oskar), "post", "/api/v1/jobs/check", {"spec_toml": text})
    found = {finding["title"]: finding["text"] for finding in answer.json()["findings"]}
    assert "without the node" in found["If it fails"]
    assert "memory.gpu_oom: stops, set by the job." in found["If it fails"]


def test_causes_without_a_row_stop() -> None:
    shown = {code: moves.move_of(code, node="", job={}, project=Project()) for code in CAUSES}
    assert shown["gpu.thermal"] == "elsewhere"
    assert shown["program.device_assert"] == "stop"
    assert {code for key in moves.DEFAULT_MOVES for code in CAUSES if restarts.lookup(code, [{key: "once"}])} == {
        code for code, move in shown.items() if move != "stop"
    }
