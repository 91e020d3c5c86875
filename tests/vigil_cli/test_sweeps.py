"""Test sweeps on the command line."""

import json

import pytest

from tests.vigil_cli.commands import JOB, nowhere, portal, vigil  # noqa: F401
from vigil_cli import watch

SWEEP = {
    "id": 3, "name": "rates", "project": "default", "owner": "mira", "values": {"run.seed": [1, 2]}, "at_once": 1,
    "counts": {"pending": 1, "running": 1}, "jobs": 2, "over": False, "created_at": "2026-01-31T12:00:00Z",
    "url": "http://portal/sweeps/3",
}  # fmt: skip
JOBS = [{**JOB, "id": n, "sweep": {"id": 3, "index": n, "values": {"run.seed": n + 1}}} for n in range(2)]
DONE = {**SWEEP, "counts": {"completed": 2}, "over": True}


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text('name = "rates"\n[sweep.over]\n"run.seed" = [1, 2]\n')
    return str(path)


@pytest.fixture(autouse=True)
def answers(nowhere, portal, monkeypatch):  # noqa: F811
    portal.answers["POST", "sweeps"] = SWEEP
    portal.answers["GET", "sweeps/3"] = SWEEP
    portal.answers["GET", "sweeps"] = {"items": [SWEEP], "next": None}
    portal.answers["GET", "jobs"] = {"items": JOBS, "next": None}
    portal.answers["POST", "sweeps/3/cancel"] = SWEEP
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)


def test_submit_prints_its_jobs(portal, spec):  # noqa: F811
    output = vigil("submit", spec).stdout
    assert output.startswith("Submitted sweep 3 rates with 2 jobs: http://portal/sweeps/3\n")
    assert "ID  STATE    seed    DONE   LOSS" in output
    assert portal.asked[0].headers["Idempotency-Key"]


@pytest.mark.parametrize(("counts", "status"), [({"completed": 2}, 0), ({"completed": 1, "failed": 1}, 1)])
def test_watch_prints_counts_and_ends_with_them(portal, spec, counts, status):  # noqa: F811
    portal.answers["GET", "sweeps/3"] = [SWEEP, SWEEP, {**DONE, "counts": counts}]
    output = vigil("submit", spec, "--watch", status=status).stderr
    assert output.count("1 pending, 1 running") == 1
    assert "completed" in output


def test_sweep_sweeps_and_cancel(portal):  # noqa: F811
    assert "1 pending, 1 running, 1 at once" in vigil("sweep", "3").stdout
    assert len(json.loads(vigil("sweep", "3", "--json").stdout)["items"]) == 2
    assert "rates" in vigil("sweeps").stdout
    assert "Cancelling the jobs" in vigil("sweep", "3", "--cancel").stdout
    assert "not a sweep number" in vigil("sweep", "x", status=2).stderr


def test_cancel_and_watch_waits_for_the_last_job(portal):  # noqa: F811
    portal.answers["GET", "sweeps/3"] = [SWEEP, {**DONE, "counts": {"cancelled": 2}}]
    lines = vigil("sweep", "3", "--cancel", "--watch", status=1).stderr.splitlines()
    assert lines == ["Cancelling the jobs of sweep 3.", "sweep 3 1 pending, 1 running", "sweep 3 2 cancelled"]
