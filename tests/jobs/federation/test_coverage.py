"""Test clients that no round counted: on the page, over REST, on the command line, in notices, in forecasts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from jobs.disk.prepare import run_toml
from jobs.following import ending
from jobs.models import Attempt, Job
from jobs.submitting.dryrun import dry_run
from portal.models import Notice, Project, User
from tests.jobs.federation.federations import a_federation, everybody, ingest, spec_of, table
from tests.jobs.pages.reading import text
from tests.jobs.reporting import Spooled
from tests.lab import bearer, signed_in
from training import run_file
from training.federation import coverage_forecast
from training.federation.tables import Coverage
from vigil_cli.tables import jobs as job_tables
from vigil_core.formatting import NBSP

pytestmark = pytest.mark.django_db
SUMMARY = "3 of 7 clients never counted, 54 % of samples."
NEVER = Coverage(clients=7, never=3, excluded=3, samples=1497, never_samples=804, foremost=(0, 3, 6))
SUBSET: dict[str, Any] = {
    **{"clients": 7, "rounds": 20, "split": "quantity", "dirichlet": None, "seed": 5},
    **{"pace": "deadline", "deadline": {"quantile": 0.3, "late": "drop"}},
}


def trained(mira: User, project: Project, *, rounds: int, coverage: Coverage = NEVER, **fields: Any) -> Job:
    job = a_federation(mira, project, run=SUBSET, **fields)
    stream = Spooled().add_event(
        "round.clients", step=rounds, **table({rounds: everybody(4)}), coverage=coverage.pack()
    )
    ingest(job, stream)
    assert job.latest is not None
    Attempt.objects.filter(pk=job.latest.pk).update(step=rounds)
    return Job.objects.get(pk=job.pk)


@pytest.mark.parametrize(
    ("rounds", "state", "message"), [(4, "running", ""), (5, "running", SUMMARY), (20, "completed", SUMMARY)]
)
def test_page_rest_and_command_line_show_it_from_round_five_on(
    rounds: int, state: str, message: str, mira: User, project: Project
) -> None:
    job = trained(mira, project, rounds=rounds, state=state)
    html = text(signed_in(mira).get(f"/jobs/{job.pk}"))
    assert (SUMMARY in html) == bool(message)
    answer = bearer(mira).get(f"/api/v1/jobs/{job.pk}").json()
    assert answer["coverage"]["text"] == message
    assert (answer["coverage"]["never"], answer["coverage"]["never_samples"]) == (3, 804)
    assert any(SUMMARY in line for line in job_tables.job(answer)) == bool(message)


def test_other_jobs_have_none(mira: User, project: Project) -> None:
    job = a_federation(mira, project, run=SUBSET, state="running")
    assert bearer(mira).get(f"/api/v1/jobs/{job.pk}").json()["coverage"] is None


@pytest.mark.parametrize(("state", "excluded", "notices"), [("completed", 3, 1), ("completed", 0, 0), ("failed", 3, 0)])
def test_the_owner_of_a_completed_job_is_notified(
    state: str, excluded: int, notices: int, mira: User, project: Project
) -> None:
    coverage = Coverage(clients=7, never=3, excluded=excluded, samples=1497, never_samples=804, foremost=(0, 3, 6))
    job = trained(mira, project, rounds=20, coverage=coverage, state=state)
    attempt = Attempt.objects.select_related("job__owner", "job__project").get(pk=job.latest_id)
    Attempt.objects.filter(pk=attempt.pk).update(decided_at=attempt.ended_at, closed_at=None)
    ending.close(attempt)
    ending.close(attempt)
    found = list(Notice.objects.filter(kind="federation.coverage", user=mira))
    assert len(found) == notices
    assert all(SUMMARY.removesuffix(".") in item.title and "0, 3, 6" in item.detail for item in found)


def test_the_dry_run_names_whom_a_deadline_leaves_out(
    mira: User, project: Project, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage_forecast, "MAX_SECONDS", float("inf"))  # on a busy machine fewer rounds fit in
    settings.VIGIL_FEDERATED_LEAST_SHARE = 0.6
    (found,) = [item for item in dry_run(mira, spec_of(**SUBSET)) if item.title == "Pace"]
    assert found.level == "warn"
    text = found.text.replace(NBSP, " ")
    assert "expected to leave 3 clients of 7 out of all 20 rounds (0, 3, 6): 54 % of samples never count" in text
    assert "This site needs 60 %" in text
    for change in ({"pace": "rounds", "deadline": None}, {"deadline": {"quantile": 1.0}}):
        assert not [item for item in dry_run(mira, spec_of(**{**SUBSET, **change})) if item.title == "Pace"]


def test_a_site_s_least_share_reaches_the_run(settings: Any, tmp_path: Path) -> None:
    assert "least_share" not in tomllib.loads(run_toml(spec_of(**SUBSET), {}))["launch"]
    settings.VIGIL_FEDERATED_LEAST_SHARE = 0.6
    (tmp_path / "run.toml").write_text(run_toml(spec_of(**SUBSET), {}))
    assert run_file.load(tmp_path / "run.toml").least_share == 0.6
