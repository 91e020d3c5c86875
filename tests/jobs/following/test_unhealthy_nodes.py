"""Nodes that a health rule excludes are avoided from the first attempt on, as far as enough others are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from jobs.models import Job
from jobs.spec import JobSpec, write_toml
from jobs.submitting.dryrun import dry_run
from jobs.submitting.submit import submit
from nodes.models import HealthEntry, Node
from portal.models import User
from tests.jobs.following.launchers import machines, newest
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import bearer, signed_in
from vigil_cli.tables import jobs as job_tables

pytestmark = pytest.mark.django_db
Tick = Callable[[], bool]
NAMES = [f"dgx{number:02}" for number in range(1, 21)]
SLOW = "Heat slows the GPU down"


@pytest.fixture
def scheduler_of_twenty(scheduler: ScriptedScheduler) -> ScriptedScheduler:
    machines(scheduler, *NAMES)
    return scheduler


def finding(node: str, **fields: Any) -> HealthEntry:
    now = timezone.now()
    given = {"rule": "thermal-slowdown", "title": SLOW, "state": "open", "severity": "warning", "action": "exclude"}
    return HealthEntry.objects.create(node=node, first_seen=now, last_seen=now, opened_at=now, **{**given, **fields})


def request(oskar: User, **resources: Any) -> Job:
    spec = JobSpec.parse({"name": "gpt", "resources": resources, "run": {"global_batch": 80}})
    created, _ = submit(oskar, spec, spec_toml=write_toml(spec))
    return created


def test_the_first_attempt_avoids_them_and_explains_why(
    oskar: User, scheduler_of_twenty: ScriptedScheduler, tick: Tick
) -> None:
    finding("dgx03")
    (nodes,) = [found.text for found in dry_run(oskar, JobSpec.parse({"name": "gpt"})) if found.title == "Nodes"]
    assert nodes == f"Avoids dgx03 ({SLOW})."
    job = request(oskar)
    tick()
    assert scheduler_of_twenty.submissions[-1].excluded_nodes == ("dgx03",)
    assert newest().excluded_nodes == ["dgx03"]
    answer = bearer(oskar, "read").get(f"/api/v1/jobs/{job.pk}/why").json()
    assert answer["avoids"] == [{"node": "dgx03", "reason": SLOW}]
    assert f"  avoids: dgx03: {SLOW}" in job_tables.why(answer)
    assert SLOW in signed_in(oskar).get(f"/jobs/{job.pk}").content.decode()


@pytest.mark.parametrize(
    "fields",
    [{"state": "watching"}, {"state": "dismissed"}, {"state": "cleared"}, {"action": "watch"}, {"action": "drain"}],
)
def test_other_findings_exclude_nothing(
    oskar: User, scheduler_of_twenty: ScriptedScheduler, tick: Tick, fields: dict[str, str]
) -> None:
    finding("dgx03", **fields)
    request(oskar)
    tick()
    assert scheduler_of_twenty.submissions[-1].excluded_nodes == ()
    assert not [found for found in dry_run(oskar, JobSpec.parse({"name": "gpt"})) if found.title == "Nodes"]


def test_a_node_that_the_job_requires_or_needs_is_used(
    oskar: User, scheduler_of_twenty: ScriptedScheduler, tick: Tick
) -> None:
    finding("dgx03")
    request(oskar, nodes=16)  # of twenty: one may be missing
    request(oskar, nodes=20)
    request(oskar, require_nodes=["dgx03"])
    tick()
    assert [submission.excluded_nodes for submission in scheduler_of_twenty.submissions] == [("dgx03",), (), ()]


def test_nodes_that_are_drained_are_not_enough(oskar: User, scheduler_of_twenty: ScriptedScheduler, tick: Tick) -> None:
    """A job on a doubtful node is better than one that waits for a repair."""
    finding("dgx03")
    Node.objects.exclude(name__in=["dgx02", "dgx03"]).update(state="idle+drain")
    request(oskar, nodes=2)
    request(oskar, nodes=1)
    tick()
    assert [submission.excluded_nodes for submission in scheduler_of_twenty.submissions] == [(), ("dgx03",)]


def test_at_most_a_tenth_of_the_nodes_is_avoided(
    oskar: User, scheduler_of_twenty: ScriptedScheduler, tick: Tick
) -> None:
    for node in NAMES[:6]:
        finding(node)
    finding("dgx09", severity="critical", rule="node-unreachable")
    request(oskar)
    tick()
    assert scheduler_of_twenty.submissions[-1].excluded_nodes == ("dgx09", "dgx01"), "the worst, then the oldest"


def test_a_node_of_another_partition_takes_no_place(
    oskar: User, scheduler_of_twenty: ScriptedScheduler, tick: Tick
) -> None:
    for node in ("elsewhere-1", "elsewhere-2", "dgx03"):
        finding(node)
    request(oskar)
    tick()
    assert scheduler_of_twenty.submissions[-1].excluded_nodes == ("dgx03",)
