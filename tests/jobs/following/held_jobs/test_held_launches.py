"""Test a job that Slurm could not launch and holds: people are notified, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from django.utils import timezone

from jobs.following.held_jobs import held_launches
from jobs.models import Attempt, Job
from nodes.cluster import sync
from nodes.schedulers.base import NodeStatus
from portal.models import Notice, User
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import bearer, signed_in

pytestmark = pytest.mark.django_db
REASON = "launch_failed_requeued_held, dgx03"


def test_its_owner_and_sysadmins_are_notified_once(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.machines = [NodeStatus(name="dgx03", state="drained", reason="Prolog error", gpus=8, cpus=8)]
    sync.read(scheduler)
    scheduler.update_job("101", restart_count=1, reason=REASON, previous_nodes=("dgx03",))
    for _ in range(3):
        tick()
    first, second = Attempt.objects.order_by("number")
    assert (first.state, first.nodes) == ("requeued", ["dgx03"])
    assert first.reason == "Slurm could not launch it on dgx03 and requeued it."
    assert (second.state, second.reason) == ("pending", REASON)
    notices = {notice.kind: notice for notice in Notice.objects.active()}
    assert set(notices) == {"job.held", "job.held.site"}
    assert (notices["job.held"].user, notices["job.held.site"].audience) == (oskar, Notice.Audience.SYSADMINS)
    for notice in notices.values():
        assert "could not launch" in notice.title
        assert "on dgx03" in notice.title
        assert "Prolog error" in notice.detail
        assert f"release it: “Release it” on its page, vigil release {job.pk} or scontrol release 101." in notice.detail
        assert notice.link == f"/jobs/{job.pk}"
    assert "nohold_on_prolog_fail" in notices["job.held.site"].detail
    scheduler.update_job("101", reason="Resources")
    tick()
    assert not Notice.objects.active().exists(), "it was released"


def test_notices_of_more_jobs_than_a_tick_raises_stand_until_they_are_released(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_launches, "MAX_PER_TICK", 2)
    copies = [Job.objects.create(project=job.project, owner=job.owner, name=f"held-{n}", spec={}) for n in range(4)]
    pending = {"state": "pending", "scheduler_id": "102", "submitted_at": timezone.now()}
    attempts = [Attempt.objects.create(job=copy, number=1, **pending) for copy in copies]
    waits, *held = attempts
    Attempt.objects.filter(pk__in=[attempt.pk for attempt in held]).update(reason=REASON)
    sites = Notice.objects.active().filter(kind="job.held.site")
    held_launches.notify_people()
    assert sites.count() == 2
    held_launches.notify_people()
    assert sites.count() == 3
    raised = set(sites.values_list("key", "raised_at"))
    Attempt.objects.filter(pk=waits.pk).update(reason=REASON)
    for _ in range(2):
        held_launches.notify_people()
    assert sites.count() == 4
    assert raised < set(sites.values_list("key", "raised_at")), "they were neither withdrawn nor sent again"
    Attempt.objects.filter(pk=held[0].pk).update(reason="Resources")
    held_launches.notify_people()
    assert sites.count() == 3


def test_its_page_and_why_explain_what_to_do(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.machines = [
        NodeStatus(name="dgx03", state="drained", reason="Prolog error", gpus=8, cpus=8),
        NodeStatus(name="dgx04", state="idle", gpus=8, cpus=8),
    ]
    sync.read(scheduler)
    scheduler.update_job("101", reason=REASON)
    tick()
    ways = f"release the job: “Release it” on its page, vigil release {job.pk} or scontrol release 101."
    found = bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why").json()
    for text in ("Slurm could not launch it on dgx03,", "dgx03: Prolog error", ways):
        assert text in found["text"]
    assert [block["kind"] for block in found["blocks"]][:1] == ["held"]
    assert found["variants"] == []
    page = signed_in(oskar).get(f"/jobs/{job.pk}").content.decode()
    assert "Slurm could not launch it" in page
    assert ways in page


def test_a_persons_hold_notifies_nobody(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    scheduler.jobs["101"] = replace(scheduler.jobs["101"], reason="JobHeldUser")
    tick()
    assert not Notice.objects.exists()
