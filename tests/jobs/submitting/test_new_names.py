"""Test that a name unknown at Slurm's last poll is queried once more before a submission is refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from jobs.errors import SpecError
from jobs.models import Job
from jobs.submitting import names
from jobs.submitting.dryrun import dry_run
from nodes.cluster import sync
from nodes.models import Reading
from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import PartitionInfo
from portal.models import User
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import spec_of, submit_spec
from tests.lab import a_project, person
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)
NODE = NodeStatus(name="dgx-01", state="idle", cpus=64, partitions=("batch",))


@pytest.fixture
def mira() -> User:
    return person("mira", a_project("default"), slurm_user="mira")


@pytest.fixture
def slurm() -> ScriptedScheduler:
    """It was read half a minute ago, when it had one partition."""
    scheduler = ScriptedScheduler(machines=[NODE], divided=[PartitionInfo(name="batch", is_default=True)])
    sync.read(scheduler)
    Reading.objects.update(read_at=timezone.now() - timedelta(seconds=30))
    return scheduler


@contextmanager
def worker(scheduler: ScriptedScheduler) -> Iterator[None]:
    """Let the follower poll as soon as somebody wakes it."""
    is_over = threading.Event()

    def run() -> None:
        try:
            until(lambda: is_over.is_set() or Reading.objects.filter(asked_at=None).exists())
            sync.sync(scheduler)
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    is_over.set()
    thread.join()


def test_a_partition_that_was_made_just_now_is_taken(mira: User, slurm: ScriptedScheduler) -> None:
    slurm.divided.append(PartitionInfo(name="urgent"))
    with worker(slurm):
        submit_spec(mira, spec_of(resources={"partition": "urgent"}))
    assert Job.objects.count() == 1


def test_what_is_not_there_is_refused_as_of_now(mira: User, slurm: ScriptedScheduler) -> None:
    with worker(slurm), pytest.raises(SpecError) as refused:
        submit_spec(mira, spec_of(resources={"partition": "urgent"}))
    (problem,) = refused.value.problems
    assert re.fullmatch(r'Slurm has no partition "urgent" \(as of .+\)\. It has batch\.', problem.message)
    read_at = Reading.objects.get(part="partitions").read_at
    assert read_at is not None
    assert timezone.now() - read_at < timedelta(seconds=20)


def test_nobody_waits_for_a_worker_that_is_not_there(
    mira: User, slurm: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "WAIT_S", 0.05)
    with pytest.raises(SpecError, match=r'no partition "urgent" \(as of '):
        submit_spec(mira, spec_of(resources={"partition": "urgent"}))


def test_a_dry_run_waits_for_nothing(mira: User, slurm: ScriptedScheduler) -> None:
    found = dry_run(mira, spec_of(resources={"partition": "urgent"}))
    assert 'Slurm has no partition "urgent" (as of' in found[0].text
    assert not Reading.objects.filter(asked_at=None).exists()
