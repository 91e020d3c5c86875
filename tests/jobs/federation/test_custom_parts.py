"""Test a federation with a custom aggregation, selection or split before it runs: the portal does not open the file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from jobs.disk import rundir
from jobs.errors import Refused, SpecError
from jobs.following import follow
from jobs.presenting.submit_form.sections import sections
from jobs.presenting.submit_form.spec_text import merge_form
from jobs.spec import JobSpec, SweepSpec, read_toml
from jobs.spec.trust import misuses
from jobs.submitting import sweeps
from jobs.submitting.dryrun import DryRunFinding, dry_run, sweep_run
from jobs.submitting.submit import submit
from portal.models import Project, User
from tests.jobs.federation.federations import a_federation
from tests.jobs.pages.reading import text
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import packed
from tests.lab import bearer, person, signed_in, sysadmin
from vigil_core.formatting import NBSP

TEXT = """\
name = "mine"
kind = "federated"

[client]
directory = "."

[run]
recipe = "tabular"
aggregation = "own_aggregation"
selection = "own_selection"
split = "own_split"

[run.own_aggregation]
trim = 2
"""


def with_parts(*fields: str, **run: Any) -> JobSpec:
    chosen = {field: f"own_{field}" for field in fields}
    table = {"recipe": "tabular", "clients": 7, "rounds": 20, **chosen, **run}
    return JobSpec.parse({"name": "x", "kind": "federated", "client": {"directory": "."}, "run": table})


def test_files_are_named_by_field() -> None:
    spec = JobSpec.parse_toml(TEXT)
    files = {f"client.{name}": f"{name}.py" for name in ("aggregation", "selection", "split")}
    assert spec.entries == files
    named = JobSpec.parse_toml(TEXT.replace('directory = "."', 'directory = "."\naggregation = "rules/mine.py"'))
    assert named.entries == {**files, "client.aggregation": "rules/mine.py"}
    assert named.run is not None
    assert named.run.options_of("own_aggregation") == {"trim": 2}


def test_custom_is_another_name_of_own() -> None:
    """Both are accepted; the older one is stored, as checkpoints of earlier releases have its hash."""
    renamed = TEXT.replace("own_", "custom_")
    assert renamed != TEXT
    assert JobSpec.parse_toml(renamed).run == JobSpec.parse_toml(TEXT).run
    both = renamed + "[run.own_aggregation]\ntrim = 1\n"
    options = JobSpec.parse_toml(both).run.options_of("own_aggregation")
    assert options["trim"] == 1, "as a form writes it"


@pytest.mark.parametrize("field", ["aggregation", "selection", "split"])
def test_the_table_that_brings_them_must_be_there(field: str) -> None:
    with pytest.raises(SpecError) as refused:
        JobSpec.parse({"name": "x", "kind": "federated", "run": {field: f"own_{field}"}})
    (problem,) = refused.value.problems
    assert problem.field == "client"
    assert f"where {field}.py with " in problem.message


def test_they_leave_the_recipe_to_custom_clients() -> None:
    """[client] brings the recipe, unless it brings the split of another recipe's samples."""
    given = {"name": "x", "kind": "federated", "client": {"directory": "."}}
    for field, recipe in {"aggregation": "client", "selection": "client", "split": "tabular"}.items():
        spec = JobSpec.parse({**given, "run": {field: f"own_{field}"}})
        assert spec.run is not None
        assert (field, spec.run.recipe) == (field, recipe)


def test_they_are_code() -> None:
    named = TEXT.replace('directory = "."', 'directory = "."\naggregation = "a.py"\nselection = "b.py"\nsplit = "c.py"')
    found = [problem.field for problem in misuses(JobSpec.parse_toml(named), ())]
    assert found == ["client.directory", "client.aggregation", "client.selection", "client.split"]


@pytest.mark.parametrize("choice", [("run.split", "iid"), ("run.aggregation", "median"), ("run.selection", "uniform")])
def test_the_form_has_their_files_as_long_as_they_are_chosen(choice: tuple[str, str]) -> None:
    def shown(text: str) -> dict[str, list[str]]:
        found = [section for section in sections(read_toml(text)) if section.takes_code]
        return {item.title: [drawn.path for drawn in item.shown] for item in found}

    where = ["client.git", "client.ref", "client.directory"]
    files = ["client.aggregation", "client.selection", "client.split"]
    assert shown(TEXT) == {"Your aggregation, selection and split": [*where, *files, "run.own_aggregation.trim"]}
    text = merge_form(TEXT, {choice[0]: choice[1]})
    (paths,) = shown(text).values()
    assert choice[0].replace("run.", "client.") not in paths
    assert JobSpec.parse_toml(text).client is not None
    without = merge_form(text, {"run.split": "iid", "run.aggregation": "mean", "run.selection": "uniform"})
    assert "client" not in read_toml(without)
    assert "own_aggregation" not in read_toml(without)["run"]
    again = merge_form(without, {choice[0]: f"own_{choice[0].partition('.')[2]}"})
    assert read_toml(again)["client"] == {"directory": "."}
    JobSpec.parse_toml(again)


@pytest.mark.django_db
class TestBeforeItRuns:
    def found(self, user: User, spec: JobSpec) -> dict[str, DryRunFinding]:
        found = {item.title: item for item in dry_run(user, spec)}
        return {title: replace(item, text=item.text.replace(NBSP, " ")) for title, item in found.items()}

    def test_the_split_is_not_drawn(self, project: Project) -> None:
        found = self.found(sysadmin(), with_parts("split", "aggregation"))
        assert found["Specification"].text.startswith(
            "Valid: 20 rounds of fedavg on tabular with your own aggregation and split, 7 clients"
        )
        message = (
            "The split is yours: divide() gives 7 clients their samples when the job starts. Its page then shows them."
        )
        assert (found["Split"].level, found["Split"].text, found["Split"].split) == ("info", message, None)
        assert found["Code"].text.endswith("aggregation.py and split.py must be in it.")
        assert "Pace" not in found

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            (["selection"], "the selection is yours"),
            (["split"], "the split is yours"),
            (["selection", "split"], "the selection and split are yours"),
        ],
    )
    def test_nobody_foretells_whom_a_deadline_leaves_out(self, project: Project, fields: list[str], why: str) -> None:
        found = self.found(sysadmin(), with_parts(*fields, pace="deadline", deadline={"quantile": 0.3, "late": "drop"}))
        message = f"""Which clients "deadline" leaves out cannot be forecast: {why}. """
        message += "The job's page shows it from round 5 on."
        assert (found["Pace"].level, found["Pace"].text) == ("info", message)

    def test_every_file_is_searched_for(self, project: Project) -> None:
        some = SimpleUploadedFile("code.tar.gz", packed(aggregation_py="1", split_py="2"))
        sam = sysadmin()
        answer = bearer(sam).post("/api/v1/jobs", {"spec_toml": TEXT, "code": some})
        assert [error["field"] for error in answer.json()["errors"]] == ["client.selection"]
        whole = packed(aggregation_py="1", split_py="2", selection_py="3")
        assert submit(sam, JobSpec.parse_toml(TEXT), spec_toml=TEXT, code=whole)[1]


@pytest.mark.django_db
def test_the_page_calls_them_own(project: Project) -> None:
    mira = person("mira", project)
    job = a_federation(mira, project)
    job.spec["run"] |= {field: f"own_{field}" for field in ("aggregation", "selection", "split")}
    job.save()
    page = text(signed_in(mira).get(f"/jobs/{job.pk}"))
    assert "fedavg, own aggregation of updates, own selection, own split" in page


SWEEP = TEXT.replace('split = "own_split"\n', "").replace('selection = "own_selection"\n', "")
SWEEP += '\n[sweep.over]\n"run.aggregation" = ["median", "own_aggregation"]\n'


def test_a_sweep_compares_a_rule_with_vigil_s() -> None:
    """The job that uses no file of [client] has no such table; a sweep in which no job does is refused."""
    sweep = SweepSpec.parse_toml(SWEEP)
    assert [point.spec.entries for point in sweep.points] == [{}, {"client.aggregation": "aggregation.py"}]
    assert [point.spec.client is None for point in sweep.points] == [True, False]
    assert ["client" in read_toml(point.spec_toml) for point in sweep.points] == [False, True]
    assert sweep.code is not None
    without = SWEEP.replace('"own_aggregation"]', '"krum"]').replace("[run.own_aggregation]\ntrim = 2\n", "")
    with pytest.raises(SpecError, match="It is not used"):
        SweepSpec.parse_toml(without)


@pytest.mark.django_db
class TestSweep:
    def test_sends_its_code_to_the_jobs_that_use_it(self, project: Project, settings: Any) -> None:
        settings.VIGIL_LOCAL_TRUST = "everyone"
        user = person("oskar", project)
        with pytest.raises(SpecError) as refused:
            sweeps.submit(user, SweepSpec.parse_toml(SWEEP), spec_toml=SWEEP, code=packed(other_py="1"))
        assert [problem.field for problem in refused.value.problems] == ["client.aggregation"]
        code = packed(aggregation_py="1")
        sweep, _ = sweeps.submit(user, SweepSpec.parse_toml(SWEEP), spec_toml=SWEEP, code=code)
        follow.tick(ScriptedScheduler())
        has = [(rundir.path_of(job.directory) / "job" / "code").is_dir() for job in sweep.jobs.order_by("sweep_index")]
        assert has == [False, True]

    def test_is_code_though_its_first_job_brings_none(self, project: Project) -> None:
        sweep = SweepSpec.parse_toml(SWEEP)
        with pytest.raises(Refused, match="only sysadmins may bring code"):
            sweeps.submit(person("oskar", project), sweep, spec_toml=SWEEP, code=packed(aggregation_py="1"))

    def test_names_what_it_needs(self, project: Project) -> None:
        found = {item.title: item for item in sweep_run(sysadmin(), SweepSpec.parse_toml(SWEEP))}
        assert found["Code"].text.endswith("aggregation.py must be in it.")
        assert found["Split"].split is not None
