"""Dry runs: what would happen to a spec, without asking any scheduler."""

from __future__ import annotations

import pytest

from jobs.dryrun import dry_run
from nodes import inventory
from nodes.models import Node
from portal.models import Project, User
from tests.jobs.asking import spec_of
from tests.jobs.schedulers import Told
from tests.lab import a_job

pytestmark = pytest.mark.django_db


def test_says_what_it_would_do(oskar: User) -> None:
    inventory.sync(Told())
    found = {finding.title: finding for finding in dry_run(oskar, spec_of())}
    assert found["Specification"].level == "ok"
    assert found["Start"].text == "Starts now on dgx-01."
    assert found["Data"].text
    assert "free" in found["Disk"].text


def test_says_what_it_waits_for(oskar: User, project: Project) -> None:
    inventory.sync(Told())
    Node.objects.update(cpus_used=8)
    a_job(oskar, project, state="running", name="wren")
    a_job(oskar, project, state="pending")
    start = next(finding for finding in dry_run(oskar, spec_of()) if finding.title == "Start")
    assert start.level == "warn"
    assert "1 CPU asked for, 0 free; 1 job waits before it" in start.text
    assert "wren" in start.text


def test_nodes_of_the_demonstration_promise_nothing(oskar: User) -> None:
    inventory.sync(Told())
    Node.objects.update(cpus_used=8)
    Node.objects.create(name="a-made-up-one", is_made_up=True, cpus=224, gpus=8)
    start = next(finding for finding in dry_run(oskar, spec_of()) if finding.title == "Start")
    assert start.text.startswith("Waits")
    spec = spec_of(resources={"gpus_per_node": 8})
    assert "dgx-01 has 4." in dry_run(oskar, spec)[0].text


def test_tells_refusals_as_findings(oskar: User) -> None:
    found = dry_run(oskar, spec_of(kind="script", script={"directory": "."}))
    assert [finding.level for finding in found] == ["error"]
    assert "VIGIL_LOCAL_TRUST" in found[0].text
