"""Test where a waiting job is explained: REST, the job's page, the form of a variant, the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from jobs.models import Attempt, Job
from jobs.spec import write_toml
from nodes.cluster import read, sync
from nodes.models import Reading
from nodes.schedulers.base import NodeStatus, SchedulerError
from nodes.schedulers.cluster import (
    AccountsInfo,
    AssociationInfo,
    Limits,
    PartitionInfo,
    QosInfo,
    QueuedJobInfo,
    ReservationInfo,
)
from portal.models import Project, User
from tests.jobs.pages.reading import text
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import spec_of
from tests.lab import a_job, a_project, bearer, person, signed_in
from tests.vigil_cli.commands import nowhere, portal, vigil  # noqa: F401

HALVES = [
    NodeStatus(name=f"dgx-0{i}", state="mixed", cpus=64, cpus_used=8, gpus=8, gpus_used=4, gpu_type="h100",
               partitions=("gpu",), memory_mib=512_000)
    for i in range(1, 4)
]  # fmt: skip
GPU = PartitionInfo(name="gpu", is_default=True, nodes=("dgx-01", "dgx-02", "dgx-03"))


def eight_gpus(owner: User, project: Project, **attempt: Any) -> Job:
    """Return a job that waits for a whole node."""
    options = {"gpus_per_node": 8, "time_limit": "12:00:00"}
    spec = spec_of(name="wren", project=project.slug, resources=options, run={"global_batch": 32})
    attempt = {"scheduler_id": "77", "scheduler_user": "oskar", "reason": "Resources", **attempt}
    plain, toml = spec.model_dump(mode="json"), write_toml(spec)
    return a_job(owner, project, state="pending", name="wren", spec=plain, spec_toml=toml, attempt=attempt)


def queued(scheduler_id: str, **facts: Any) -> QueuedJobInfo:
    given = {"name": "j", "user": "oskar", "state": "pending", "partition": "gpu", "gpus": 8, "cpus": 8}
    return QueuedJobInfo(scheduler_id=scheduler_id, **{**given, **facts})


def read_queue(*queue: QueuedJobInfo, **facts: Any) -> None:
    sync.read(ScriptedScheduler(machines=HALVES, divided=[GPU], queued=list(queue), **facts))


def plain(words: str) -> str:
    return words.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.django_db
def test_rest_returns_blocks_and_variants(oskar: User, project: Project) -> None:
    starts = timezone.now() + timedelta(hours=2)
    read_queue(queued("77", starts_at=starts.timestamp(), priority=5), queued("70", priority=9, gpus=16, node_count=2))
    job = eight_gpus(oskar, project)
    answer = bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why")
    assert answer.status_code == 200
    found = answer.json()
    assert (found["job"], found["state"], found["scheduler_reason"]) == (job.pk, "pending", "Resources")
    assert [block["kind"] for block in found["blocks"]] == ["nodes", "fragmentation", "priority"]
    assert plain(found["text"]).startswith("It needs 1 node with 8 free GPUs")
    assert found["starts_at"].startswith(starts.strftime("%Y-%m-%dT"))
    assert found["ahead"] == {"jobs": 1, "gpus": 16, "named": []}
    assert found["reported_at"]
    assert not found["stale"]
    best = found["variants"][0]
    assert best["changes"] == {"resources.nodes": 2, "resources.gpus_per_node": 4}
    assert best["set"] == ["resources.nodes=2", "resources.gpus_per_node=4"]
    assert f"/submit?from={job.pk}&set=resources.nodes%3D2&set=resources.gpus_per_node%3D4" in best["url"]


@pytest.mark.django_db
def test_counts_no_node_that_the_attempt_excludes(oskar: User, project: Project) -> None:
    """dgx-01 would be free, but it was to blame for the end of the attempt before (jobs.blamed_nodes)."""
    sync.read(ScriptedScheduler(machines=[replace(HALVES[0], gpus_used=0), *HALVES[1:]], divided=[GPU]))
    job = eight_gpus(oskar, project)
    assert "dgx-01" not in bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why").json()["text"]
    second = job.latest
    assert second is not None
    Attempt.objects.filter(pk=second.pk).update(excluded_nodes=["dgx-01"])
    found = bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why").json()
    assert plain(found["text"]).endswith("none has that: 2 have fewer than 8 free GPUs, 1 is excluded.")


@pytest.mark.django_db
def test_names_only_jobs_that_the_reader_may_see(oskar: User, project: Project) -> None:
    elsewhere = a_project("elsewhere")
    anna = person("anna", elsewhere)
    hidden = a_job(anna, elsewhere, state="pending", name="secret", attempt={"scheduler_id": "70"})
    visible = a_job(oskar, project, state="pending", name="mine", attempt={"scheduler_id": "71"})
    read_queue(queued("70", priority=9), queued("71", priority=8), queued("77", priority=1))
    job = eight_gpus(oskar, project)
    found = bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why").json()
    assert found["ahead"] == {"jobs": 2, "gpus": 16, "named": [f"#{visible.pk} mine"]}
    assert "secret" not in json.dumps(found)
    assert bearer(oskar).get(f"/api/v1/jobs/{hidden.pk}/why").status_code == 404
    assert bearer(oskar).get("/api/v1/jobs/999999/why").status_code == 404


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("state", "text"),
    [("running", "It is not waiting: it is running since "), ("failed", "It is not waiting: it ended as failed at ")],
)
def test_a_job_that_does_not_wait_is_described_as_such(oskar: User, project: Project, state: str, text: str) -> None:
    job = a_job(oskar, project, state=state, attempt={"nodes": ["dgx-01"], "reason": "NonZeroExitCode"})
    found = bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why").json()
    assert plain(found["text"]).startswith(text)
    assert ("NonZeroExitCode" in found["text"]) == (state == "failed")
    assert found["blocks"] == found["variants"] == []


@pytest.mark.django_db
def test_what_vigil_holds_itself(oskar: User, project: Project) -> None:
    job = eight_gpus(oskar, project, scheduler_id="", reason="Waits for #12 to complete.")
    found = bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why").json()
    assert found["text"] == "Waits for #12 to complete."
    assert [block["kind"] for block in found["blocks"]] == ["dependency"]


@pytest.mark.django_db
def test_a_hold_shows_with_what_ends_it(oskar: User, project: Project) -> None:
    read_queue(queued("77", reason="JobHeldUser"))
    job = eight_gpus(oskar, project, reason="JobHeldUser")
    found = bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why").json()
    ways = f"“Release it” on its page, vigil release {job.pk} or scontrol release 77"
    assert ways in found["text"]
    assert found["variants"] == []
    assert ways in text(signed_in(oskar).get(f"/jobs/{job.pk}"))
    assert ways in bearer(oskar).get(f"/api/v1/jobs/{job.pk}").json()["explained"]


@pytest.mark.django_db
def test_a_job_that_is_to_begin_later_is_offered_nothing_sooner(oskar: User, project: Project) -> None:
    begin = timezone.now() + timedelta(hours=3)
    read_queue(queued("77", starts_at=begin.timestamp()))
    job = eight_gpus(oskar, project, reason="Priority")
    Job.objects.update(spec={**job.spec, "resources": {**job.spec["resources"], "begin": begin.isoformat()}})
    found = bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why").json()
    assert found["text"].startswith("Scheduled to start at ")
    assert found["variants"] == []
    assert "would start now" not in text(signed_in(oskar).get(f"/jobs/{job.pk}"))


@pytest.mark.django_db
def test_reports_when_the_scheduler_has_fallen_silent(oskar: User, project: Project) -> None:
    read_queue(queued("77"))
    sync.read(ScriptedScheduler(broken=SchedulerError("Slurm did not answer for 10 s.")))
    found = bearer(oskar).get(f"/api/v1/jobs/{eight_gpus(oskar, project).pk}/why").json()
    assert found["stale"] == "Slurm did not answer for 10 s."
    assert found["blocks"], "its last answer still stands"


@pytest.mark.django_db
def test_the_reason_comes_explained_wherever_it_is_shown(oskar: User, project: Project) -> None:
    job = eight_gpus(oskar, project)
    client = bearer(oskar)
    found = client.get(f"/api/v1/jobs/{job.pk}").json()
    meaning = "Resources: its resources are not free yet."
    assert (found["reason"], found["explained"]) == ("Resources", meaning)
    assert found["attempt"]["explained"] == meaning
    assert client.get("/api/v1/jobs").json()["items"][0]["explained"] == meaning
    Attempt.objects.update(state="failed", reason="Resources")
    assert client.get(f"/api/v1/jobs/{job.pk}").json()["explained"] == "Resources"


@pytest.mark.django_db
def test_the_page_shows_it_while_it_waits(oskar: User, project: Project) -> None:
    read_queue(queued("77"))
    job, client = eight_gpus(oskar, project), signed_in(oskar)
    for address in (f"/jobs/{job.pk}", f"/jobs/{job.pk}/life?tab=overview"):
        page = text(client.get(address))
        assert "Why it waits" in page
        assert "12 GPUs are free, but fragmented: 3 nodes have 4 free GPUs each, none has 8." in page
        assert "2 nodes with 4 GPUs each instead of 1 node with 8 GPUs." in page
    Reading.objects.update(read_at=None, error="slurmrestd does not respond.")
    page = text(client.get(f"/jobs/{job.pk}"))
    assert "slurmrestd does not respond." in page
    assert "As of" not in page, "the scheduler was never read"
    assert "Why it waits" not in text(client.get(f"/jobs/{job.pk}/life?tab=spec"))
    Attempt.objects.update(state="running", started_at=timezone.now())
    assert "Why it waits" not in text(client.get(f"/jobs/{job.pk}"))


@pytest.mark.django_db
def test_a_variant_opens_the_form_with_its_changes(oskar: User, project: Project) -> None:
    read_queue(queued("77"))
    job = eight_gpus(oskar, project)
    url = bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why").json()["variants"][0]["url"]
    page = text(signed_in(oskar).get(url.partition("8000")[2]))
    assert "nodes = 2" in page
    assert "gpus_per_node = 4" in page
    assert "wren-2" in page
    assert Job.objects.count() == 1, "nothing is submitted by looking"


@pytest.mark.django_db
@pytest.mark.parametrize("option", ["name=x", "resources.nope=1", "resources.nodes", "run.steps=9", "=", "x" * 3000])
def test_a_link_changes_nothing_else(client: Client, oskar: User, option: str) -> None:
    page = signed_in(oskar).get("/submit", {"set": option})
    assert page.status_code == 200
    assert "my-first-run" in text(page)


@pytest.mark.django_db
def test_reads_back_what_was_written() -> None:
    node = NodeStatus(
        name="n", state="mixed", reason="r", reason_at=5.5, partitions=("a", "b"), features=("x",), cpus=4, gpus=2,
        gpus_allocated=(0, 1), load=0.5, booted_at=9.0, plays_many=True,
    )  # fmt: skip
    job = queued("5", nodes=("n",), gpu_indices={"n": (0, 1)}, submitted_at=1.25, dependency="afterok:4")
    qos = QosInfo(name="q", preempts=("p",), limits=Limits(group={"cpu": 4}, user_jobs=3))
    association = AssociationInfo(account="a", user="u", qos=("q",), limits=Limits(max_time_s=60))
    reservation = ReservationInfo(name="r", nodes=("n",), starts_at=1.0, flags=("MAINT",))
    partition = replace(GPU, max_time_s=60, allowed_qos=("q",))
    source = ScriptedScheduler(machines=[node], queued=[job], divided=[partition], reserved=[reservation],
                  accounted=AccountsInfo(qos=(qos,), associations=(association,)))  # fmt: skip
    sync.read(source)
    found = read.read()
    assert found.nodes == (node,)
    assert found.queue == (job,)
    assert found.partitions == (partition,)
    assert found.qos == (qos,)
    assert found.associations == (association,)
    assert found.reservations == (reservation,)


@pytest.mark.django_db
def test_rows_are_taken_once_a_reading(django_assert_num_queries: Any) -> None:
    read_queue(queued("5"))
    assert len(read.read().nodes) == 3
    with django_assert_num_queries(1):
        assert len(read.read().queue) == 1
    read_queue(queued("5"), queued("6"))
    assert len(read.read().queue) == 2


WHY = {
    "job": 7, "state": "pending", "text": "It needs 8 free GPUs.", "scheduler_reason": "Resources",
    "reported_at": "2026-01-31T12:00:00Z",
    "meaning": "Resources: its resources are not free yet.", "starts_at": "2026-01-31T14:00:00Z",
    "can_never_start": False,
    "blocks": [{"kind": "nodes", "text": "It needs 8 free GPUs."}, {"kind": "priority", "text": "2 jobs wait."}],
    "ahead": {"jobs": 2, "gpus": 0, "named": []}, "stale": "",
    "variants": [
        {"text": "2 nodes with 4 GPUs each", "changes": {}, "set": ["resources.nodes=2", "resources.gpus_per_node=4"],
         "starts_now": True, "why": "There is room on a and b.", "url": ""},
    ],
}  # fmt: skip


def test_the_command_line(portal):  # noqa: F811
    portal.answers["GET", "jobs/7/why"] = WHY
    lines = vigil("why", "7").output.splitlines()
    assert lines[:3] == [
        "It needs 8 free GPUs.", "  scheduler: Resources: its resources are not free yet.", "  also: 2 jobs wait."
    ]  # fmt: skip
    assert lines[3].startswith("  starts: about 2026-01-31 ")
    assert lines[5:8] == [
        "Would start now:",
        "  2 nodes with 4 GPUs each. There is room on a and b.",
        "    --set resources.nodes=2 --set resources.gpus_per_node=4",
    ]
    assert json.loads(vigil("why", "7", "--json").output) == WHY
    portal.answers["GET", "jobs/7/why"] = {
        **WHY, "state": "running", "text": "It does not wait.", "scheduler_reason": "", "starts_at": None,
        "blocks": [], "variants": [],
    }  # fmt: skip
    assert vigil("why", "7").output == "It does not wait.\n"
