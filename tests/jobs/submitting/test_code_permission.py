"""Test that with jobs running as the portal's user, no researcher can run code or read another's file by any route."""

import os
import pwd
import tomllib
from pathlib import Path
from typing import Any

import pytest

from jobs import code_permission
from jobs.disk import rundir
from jobs.errors import SpecError
from jobs.following.submission import handover
from jobs.models import Attempt, Job
from jobs.spec import JobSpec, SweepSpec, write_toml
from jobs.submitting import sweeps
from jobs.submitting.dryrun import dry_run, sweep_run
from jobs.submitting.submit import resume
from portal.models import Project, User
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import ENTRIES, coded, its_code, spec_of, submit_spec
from tests.lab import a_job, bearer, person, send, signed_in, sysadmin

pytestmark = pytest.mark.django_db
PYTHON: dict[str, Any] = {"environment": {"python": "/any/program"}}
EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("*.toml"))
SWEEP = 'name = "s"\n[sweep.over]\n"run.language.source" = ["stdlib", "/srv/secrets"]\n'


class TestEveryDoor:
    def test_submit_and_dry_run(self, oskar: User) -> None:
        with pytest.raises(SpecError) as error:
            submit_spec(oskar, spec_of(**PYTHON))
        assert [problem.field for problem in error.value.problems] == ["environment.python"]
        (finding,) = dry_run(oskar, spec_of(**PYTHON))
        assert finding.level == "error"
        assert "environment.python" in finding.text
        assert not Job.objects.exists()

    def test_rest(self, oskar: User) -> None:
        client = bearer(oskar)
        answer = send(client, "post", "/api/v1/jobs", {"spec": {"name": "x", **PYTHON}})
        assert answer.status_code == 422
        assert [error["field"] for error in answer.json()["errors"]] == ["environment.python"]
        answer = send(client, "post", "/api/v1/jobs/check", {"spec": {"name": "x", **PYTHON}})
        assert "environment.python" in answer.content.decode()

    def test_the_page_and_a_clone(self, oskar: User, project: Project) -> None:
        theirs, _ = submit_spec(sysadmin(), spec_of(**PYTHON))
        client = signed_in(oskar)
        page = client.get(f"/submit?from={theirs.pk}")
        assert "Chooses what code runs" in page.content.decode()
        form = {"toml": theirs.spec_toml, "side": "toml", "do": "submit", "from": theirs.pk}
        assert client.post("/submit", form).status_code == 422
        assert Job.objects.count() == 1

    def test_each_job_of_a_sweep(self, oskar: User) -> None:
        sweep = SweepSpec.parse_toml(SWEEP)
        with pytest.raises(SpecError, match="/srv/secrets would be read"):
            sweeps.submit(oskar, sweep, spec_toml=SWEEP)
        assert "/srv/secrets would be read" in sweep_run(oskar, sweep)[0].text
        page = signed_in(oskar).post("/submit", {"toml": SWEEP, "side": "toml", "do": "submit"})
        assert page.status_code == 422
        assert not Job.objects.exists()

    def test_resume_of_what_a_sysadmin_submitted(self, oskar: User, project: Project) -> None:
        lead = person("lea", project, role="lead")
        spec = spec_of(**PYTHON)
        job = a_job(sysadmin(), project, state="failed", spec=spec.model_dump(mode="json"))
        with pytest.raises(SpecError, match=r"environment\.python"):
            resume(lead, job)

    def test_restart_once_trust_was_withdrawn(self, oskar: User, scheduler: ScriptedScheduler, settings: Any) -> None:
        settings.VIGIL_LOCAL_TRUST = "everyone"
        stored, _ = submit_spec(oskar, spec_of(**PYTHON))
        brought = [
            (submit_spec(oskar, coded(table), code=its_code(table))[0], "VIGIL_LOCAL_TRUST=everyone")
            for table in ENTRIES
        ]
        settings.VIGIL_LOCAL_TRUST = "sysadmins"
        for job, text in ((stored, "environment.python"), *brought):
            attempt = Attempt.objects.get(job=job)
            handover.hand_over(attempt.pk, scheduler)
            attempt.refresh_from_db()
            assert (attempt.state, attempt.cause) == ("failed", "rejected")
            assert text in attempt.reason
        assert not scheduler.submissions

    def test_no_project_setting_is_a_leads(self, project: Project) -> None:
        """Only sysadmins set, in the admin site, what the project's jobs run with."""
        client = signed_in(person("lea", project, role="lead"))
        options = {"job_environment": 'python = "/any/program"', "keep_checkpoints_days": 3}
        assert client.post(f"/admin/portal/project/{project.pk}/change/", options).status_code in {302, 403}
        assert send(client, "patch", "/api/v1/projects/default", options).status_code in {403, 422}
        client.post("/disk/default/keep", {**options, "days": "3"})
        project.refresh_from_db()
        assert project.job_environment == ""


class TestUserOfJobs:
    def test_sysadmins_may(self, project: Project) -> None:
        assert submit_spec(sysadmin(), spec_of(**PYTHON))[1]

    def test_everybody_may_where_the_system_decides(self, oskar: User, settings: Any) -> None:
        for name, value in (("SCHEDULER", "slurm"), ("LOCAL_TRUST", "everyone"), ("LOCAL_USER", "nobody")):
            before = getattr(settings, f"VIGIL_{name}")
            setattr(settings, f"VIGIL_{name}", value)
            assert not code_permission.problems(oskar, spec_of(**PYTHON))
            assert code_permission.roots_of(oskar) is None
            setattr(settings, f"VIGIL_{name}", before)

    @pytest.mark.parametrize("user", ["root", "portal"])
    def test_not_where_the_other_user_is_the_portals(self, oskar: User, settings: Any, user: str) -> None:
        settings.VIGIL_LOCAL_USER = "root" if user == "root" else pwd.getpwuid(os.geteuid()).pw_name
        assert code_permission.problems(oskar, spec_of(**PYTHON))

    @pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
    def test_the_examples_are_for_researchers(self, oskar: User, example: Path) -> None:
        text = example.read_text()
        if "[sweep]" in text:
            assert sweeps.submit(oskar, SweepSpec.parse_toml(text), spec_toml=text)[1]
        else:
            assert submit_spec(oskar, JobSpec.parse_toml(text))[1]


def test_the_trainer_is_configured_with_where_it_may_read(
    oskar: User, scheduler: ScriptedScheduler, settings: Any, tmp_path: Path
) -> None:
    settings.VIGIL_DATA_ROOTS = (tmp_path / "data",)
    spec = spec_of(run={"language": {"source": str(tmp_path / "data" / "texts")}})
    for user, roots in ((oskar, [str(tmp_path / "data")]), (sysadmin(), None)):
        job, _ = submit_spec(user, spec)
        handover.hand_over(Attempt.objects.get(job=job).pk, scheduler)
        job.refresh_from_db()
        run = tomllib.loads((rundir.path_of(job.directory) / "portal" / "run.toml").read_text())
        assert run["launch"].get("data_roots") == roots
    assert "/any" not in write_toml(spec)
