"""Test the demo lab: created once, complete, and displayed by the same rules as real jobs."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction
from django.test import override_settings

from console.demo import cluster, failures, lab, telemetry
from console.demo.scenarios import LIVE, NODES, PROJECTS, STORIES
from jobs import lease, rounds
from jobs.models import Attempt, Checkpoint, Failure, Job
from nodes import software_inventory
from nodes.cluster import sync
from nodes.drains import overview
from nodes.drains.reasons import DrainHolder
from nodes.models import Agent, BurnInNode, Gpu, GpuUse, HealthEntry, Node, NodeEvent, NodeOrder
from nodes.monitoring import metrics
from nodes.remediation.notices import notify_sysadmins
from nodes.tasks import health as health_task
from nodes.telemetry import enrolment
from nodes.telemetry.fields import gpu_owner
from portal.accounts import actions
from portal.models import Chunk, Notice, Project, User
from tests.jobs.schedulers import ScriptedScheduler
from tests.nodes.telemetry.curves import outline

pytestmark = pytest.mark.django_db
Made = tuple[list[str], Path]
"""The names of its jobs, and where their runs lie."""


def test_what_failed_is_made_once_nobody_counts_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for slug in PROJECTS:
        Project.objects.get_or_create(slug=slug)
    other = lease.take("reliability")
    assert other is not None
    monkeypatch.setattr(failures, "sleep", lambda seconds: other.release())
    failures.make()
    assert Failure.objects.exists()


@pytest.fixture(scope="class")
def made(django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Make the lab once for all tests of a class; what each test changes is rolled back."""
    runs = tmp_path_factory.mktemp("runs")
    with django_db_blocker.unblock(), override_settings(VIGIL_RUNS=runs), transaction.atomic():
        actions.first_start()
        yield lab.make(), runs
        transaction.set_rollback(True)


@pytest.mark.lengthy
class TestLab:
    def test_is_made_once(self, made: Made) -> None:
        names, _ = made
        assert len(names) == len(STORIES) + len(LIVE)
        chunks, users = Chunk.objects.count(), User.objects.count()
        call_command("demo")
        assert (Job.objects.count(), Chunk.objects.count(), User.objects.count()) == (len(names), chunks, users)
        sync.read(ScriptedScheduler(machines=[]))
        assert Node.objects.count() == len(NODES), "its nodes outlive what the scheduler says"

    def test_its_health_is_shown_and_alarms_nobody(self, made: Made) -> None:
        assert set(HealthEntry.objects.values_list("state", flat=True)) == {"watching", "open", "cleared"}
        assert HealthEntry.objects.filter(decision="proposed").exists()
        drained = {row.node.name: row.holder for row in overview.described(overview.out_of_service())}
        assert drained == {"dgx-03": DrainHolder.RULE, "dgx-06": DrainHolder.PERSON}
        assert set(BurnInNode.objects.values_list("verdict", flat=True)) == {"passed", "failed"}
        inventory = software_inventory.read_inventory()
        assert {finding.node for finding in inventory.findings} == {telemetry.OLD_DRIVER[0]}
        notify_sysadmins()
        assert not Notice.objects.filter(kind="hardware.state").exists()
        samples = [sample for family in metrics.families() for sample in family.samples]
        assert all(value == 0 for _, value in samples)
        health_task()
        assert HealthEntry.objects.active().count() == 6, "no rule ends or acts on what is made up"
        assert not NodeOrder.objects.open().exists()

    def test_the_past_is_whole_and_over(self, made: Made) -> None:
        _, runs = made
        past = Attempt.objects.filter(job__name__in=[story.name for story in STORIES])
        assert past.count() == sum(len(story.attempts) for story in STORIES)
        for undone in ("ended_at", "closed_at", "decided_at"):
            assert past.filter(**{undone: None}).count() == 0, "nothing is left to the follower"
        assert not Checkpoint.objects.filter(state=Checkpoint.State.COMMITTED).exists(), "nothing to verify on disk"
        for attempt in past:
            assert attempt.created_at <= attempt.started_at <= attempt.ended_at  # type: ignore[operator]
        for story in STORIES:
            latest = Job.objects.get(name=story.name).latest
            assert latest is not None
            assert (latest.step, latest.steps) == (story.attempts[-1].last_step, story.steps)
            assert latest.latest["loss"]

        job = Job.objects.get(name="gpt-760m-context-4k")
        first, second = job.attempts.order_by("number")  # type: ignore[attr-defined]
        assert (first.state, second.state) == ("node_fail", "completed")
        assert second.resume_from is not None
        assert (second.resume_from.step, second.resume_from.attempt) == (3000, first)

        job = Job.objects.get(name="gpt-760m-batch-4096")
        log = runs / job.directory / "job" / "attempt-1" / "logs" / "0.0.log"
        assert "OutOfMemoryError" in log.read_text(), "logs lie where pages look"

        job = Job.objects.get(name="gpt-by-package")
        clients = {client.name: client for client in job.clients.all()}  # type: ignore[attr-defined]
        assert (len(clients), job.latest.rounds.count()) == (12, 90)  # type: ignore[union-attr]
        assert clients["multiprocessing"].rejected > 20
        assert clients["tkinter"].late > clients["tkinter"].dropped
        assert clients["wsgiref"].dropped > 2
        assert rounds.splits(job, [0])[1] == {0: [2310, *[0] * 11]}
        assert (clients["wsgiref"].evaluation_samples, clients["unittest"].evaluation_samples) == (11, 186)

        waiting = Attempt.objects.filter(job__tags__name="live", state="pending", scheduler_id="")
        assert waiting.count() == len(LIVE), "what runs is real, and due to be submitted"

    def test_its_machines_have_a_past_and_go_on(self, made: Made) -> None:
        assert Agent.objects.filter(is_made_up=True).count() == len(NODES)
        assert Gpu.objects.filter(lost_at__isnull=False).get().agent.node == telemetry.LOST[0]
        assert NodeEvent.objects.get(kind="xid").code == 79
        now = time.time()
        agent = Agent.objects.get(node="dgx-07")
        gpu = agent.gpus.first()
        assert gpu is not None
        for days in (0.01, 1, 20):
            end = int(now - days * telemetry.DAY_S)
            watts = outline(agent, gpu_owner(gpu.pk), "watts", start=end - 3600, end=end)
            assert len(watts.first) >= 6, f"{days} days ago"
        telemetry.report_now(now)
        telemetry.report_now(now + 10)
        agent.refresh_from_db()
        assert not agent.is_silent()
        assert agent.newest["gpus"][gpu.uuid]["gpu_percent"] > 0
        assert GpuUse.objects.filter(user="kofi.mensah", idle_s__gt=3600).exists(), (
            "somebody holds one and does nothing"
        )


def test_a_node_that_gets_a_real_agent_leaves_the_demonstration(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up samples went on among the real ones, of GPUs that are not there."""
    now = time.time()
    monkeypatch.setattr(telemetry, "NODES", NODES[:1])
    monkeypatch.setattr(telemetry, "WEEKS_S", 3 * telemetry.DAY_S)  # its past is not what is tested
    cluster.make(NODES)
    telemetry.make(now=now)
    name = NODES[0][0]
    agent = Agent.objects.get(node=name)
    assert agent.gpus.filter(gone_at=None).count() == cluster.GPUS
    token = enrolment.enroll(name, by=User.objects.create_superuser("root"))
    telemetry.report_now(now + 10)
    agent.refresh_from_db()
    assert agent.is_made_up, "a token alone reports nothing"
    post = {
        "version": 1, "stream": "ab" * 8, "first": 0, "boot_id": "b", "sent_at": now,
        "batches": [{"at": int(now) // 10 * 10, "n": 10, "gpus": ["GPU-real"], "columns": {"watts": [[70] * 10]}}],
    }  # fmt: skip
    answer = client.post(
        f"/api/v1/nodes/{name}/telemetry", post, content_type="application/json",
        headers={"Authorization": f"Bearer {token}"},
    )  # fmt: skip
    assert answer.status_code == 200, answer.content
    for _ in range(2):
        now += 20
        telemetry.make(now=now)
        telemetry.report_now(now)
    agent = Agent.objects.get(node=name)
    assert not agent.is_made_up
    assert list(agent.gpus.filter(gone_at=None).values_list("uuid", flat=True)) == ["GPU-real"]
    assert not agent.holdings.filter(until=None).exists()
    assert list(agent.newest["gpus"]) == ["GPU-real"]
    assert not Agent.objects.filter(is_made_up=True).exists()
