"""Test dry runs: what would happen to a spec, without a call to any scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jobs.submitting.dryrun import dry_run
from nodes.cluster import sync
from nodes.models import Node
from nodes.schedulers.cluster import QueuedJobInfo
from portal.models import Project, User
from tests.jobs.schedulers import DGX_01, ScriptedScheduler
from tests.jobs.submissions import ENTRIES, coded, spec_of
from tests.lab import a_job, a_project, sysadmin

pytestmark = pytest.mark.django_db


def test_describes_what_it_would_do(oskar: User) -> None:
    sync.sync(ScriptedScheduler())
    found = {finding.title: finding for finding in dry_run(oskar, spec_of())}
    assert found["Specification"].level == "ok"
    assert found["Start"].text == "Starts now on dgx-01."
    assert found["Data"].text.endswith("then kept for later ones.")
    assert "free" in found["Disk"].text


def test_paths_in_a_spec_are_not_opened(oskar: User, settings: Any) -> None:
    settings.VIGIL_LOCAL_TRUST = "everyone"
    spec = spec_of(run={"language": {"source": "/data/field notes", "tokenizer": "~/bpe.json"}})
    (data,) = [finding for finding in dry_run(oskar, spec) if finding.title == "Data"]
    assert "standard library" not in data.text
    assert data.text.endswith("/data/field notes and ~/bpe.json: opened inside the allocation, as the job's user.")


def test_names_what_it_waits_for(oskar: User, project: Project) -> None:
    wren = a_job(oskar, project, state="running", name="wren", attempt={"scheduler_id": "5"})
    full = replace(DGX_01, cpus_used=8, state="allocated")
    queued = [
        QueuedJobInfo(scheduler_id="5", name="wren", user="lab", state="running", cpus=6),
        QueuedJobInfo(scheduler_id="6", name="other", user="lab", state="running", cpus=2),
        QueuedJobInfo(scheduler_id="7", name="waits", user="lab", state="pending", cpus=2),
    ]
    sync.read(ScriptedScheduler(machines=[full], queued=queued))
    a_job(oskar, project, state="pending")  # not handed over yet
    start = next(finding for finding in dry_run(oskar, spec_of()) if finding.title == "Start")
    assert start.level == "warn"
    text = start.text.replace("\N{NO-BREAK SPACE}", " ")
    assert f"It needs 1 CPU, 0 are free; #{wren.pk} uses 6, others use 2." in text
    assert "1 job waits before it." in text
    assert "1 job is being submitted before it." in text


def test_names_what_would_start_instead(oskar: User) -> None:
    halves = [replace(DGX_01, name=f"n{i}", gpus=8, gpus_used=4, plays_many=False) for i in range(3)]
    sync.read(ScriptedScheduler(machines=halves))
    spec = spec_of(resources={"gpus_per_node": 8, "time_limit": "12:00:00"})
    start = next(finding for finding in dry_run(oskar, spec) if finding.title == "Start")
    text = start.text.replace("\N{NO-BREAK SPACE}", " ")
    assert "none has that: 3 have fewer than 8 free GPUs." in text
    assert "(`resources.nodes=2, resources.gpus_per_node=4`)" in text


def test_nodes_of_the_demonstration_promise_nothing(oskar: User) -> None:
    sync.sync(ScriptedScheduler())
    Node.objects.update(cpus_used=8)
    Node.objects.create(name="a-made-up-one", is_made_up=True, cpus=224, gpus=8)
    start = next(finding for finding in dry_run(oskar, spec_of()) if finding.title == "Start")
    assert start.text.startswith("Waits")
    spec = spec_of(resources={"gpus_per_node": 8})
    assert "dgx-01 has 4." in dry_run(oskar, spec)[0].text


def test_returns_refusals_as_findings(oskar: User) -> None:
    found = dry_run(oskar, spec_of(kind="script", script={"directory": "."}))
    assert [finding.level for finding in found] == ["error"]
    assert "VIGIL_LOCAL_TRUST" in found[0].text


@pytest.mark.parametrize("table", ENTRIES)
def test_names_where_code_comes_from(table: str) -> None:
    a_project()
    sam = sysadmin()
    for spec, text in (
        (coded(table), "The directory is sent on submit"),
        (coded(table, git="https://x.org/y", ref="v1"), "https://x.org/y at v1 is fetched inside the allocation"),
    ):
        (code,) = (finding.text for finding in dry_run(sam, spec) if finding.title == "Code")
        assert code.startswith(text)
        assert code.endswith(f" {ENTRIES[table]} must be in it.")
