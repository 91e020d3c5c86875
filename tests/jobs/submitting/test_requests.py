"""Test what a spec requests of Slurm and Python, from the text to the request, run.toml and the batch script."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from jobs.disk import rundir
from jobs.errors import Refused, SpecError
from jobs.following.submission import handover
from jobs.models import Attempt, Job
from jobs.spec import Environment, JobSpec
from jobs.spec.slurm import absolute, hosts
from nodes.models import License, Node, Partition, Reading
from nodes.schedulers.base import Submission
from portal.models import Project, User
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import spec_of, submit_spec
from tests.lab import send, signed_in, sysadmin

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
ALL = {
    "nodes": "2:4", "gpus_per_node": 8, "gpu_type": "h100", "partition": "batch", "qos": "high", "reservation": "maint",
    "constraint": "nvlink&(h100|h200)", "exclusive": True, "require_nodes": ["dgx[01-02]"], "exclude_nodes": ["dgx07"],
    "licenses": "matlab:2,abaqus",
}  # fmt: skip


def handed(job: Job, scheduler: ScriptedScheduler) -> Submission:
    """Hand the job over and return the submission that the scheduler received."""
    assert job.latest_id is not None
    handover.hand_over(job.latest_id, scheduler)
    assert scheduler.submissions, Attempt.objects.get(pk=job.latest_id).reason
    return scheduler.submissions[-1]


def written(job: Job, name: str) -> str:
    return (rundir.path_of(Job.objects.get(pk=job.pk).directory) / "portal" / name).read_text()


def problems(**changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        spec_of(**changes)
    return {problem.field: problem.message for problem in caught.value.problems}


def test_all_of_it_reaches_the_request_and_the_script(
    oskar: User, project: Project, scheduler: ScriptedScheduler
) -> None:
    Project.objects.filter(pk=project.pk).update(slurm_account="siskin")
    job, _ = submit_spec(oskar, spec_of(resources=ALL, run={"global_batch": 64}))
    request = handed(job, scheduler)
    assert (request.account, request.partition, request.qos, request.reservation) == (
        "siskin",
        "batch",
        "high",
        "maint",
    )
    assert (request.gpu_type, request.constraint, request.exclusive) == ("h100", "nvlink&(h100|h200)", True)
    assert request.licenses == "matlab:2,abaqus"
    assert (request.required_nodes, request.excluded_nodes) == (("dgx01", "dgx02"), ("dgx07",))
    script = written(job, "batch.sh")
    for line in ("--no-kill", "--nodelist=dgx01,dgx02", "--exclude=dgx07", "--open-mode=append"):
        assert f"#SBATCH {line}\n" in script


def test_a_moment_is_made_absolute_when_it_is_submitted(oskar: User, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar, spec_of(resources={"begin": "+2h"}))
    stored = datetime.fromisoformat(job.spec["resources"]["begin"])
    assert abs(stored - timezone.now() - timedelta(hours=2)) < timedelta(seconds=30)
    assert 'begin = "+2h"' in job.spec_toml, "the text stays as it was written"
    assert handed(job, scheduler).begin_at == stored.timestamp()
    Job.objects.filter(pk=job.pk).update(spec={**job.spec, "resources": {"begin": "2020-01-01T00:00:00+00:00"}})
    Attempt.objects.filter(job=job).update(scheduler_id="", submitting_at=None)
    scheduler.jobs.clear()
    assert handed(job, scheduler).begin_at is None, "a later attempt does not wait for what has passed"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("+30m", "2026-11-21T13:30:00+01:00"),
        ("+1d2h", "2026-11-22T15:00:00+01:00"),
        ("2026-12-01T02:00", "2026-12-01T02:00:00+01:00"),
        ("2026-12-01T02:00Z", "2026-12-01T03:00:00+01:00"),
        ("2026-12-01 02:00:30-05:00", "2026-12-01T08:00:30+01:00"),
    ],
)
def test_moments(text: str, moment: str) -> None:
    spec = spec_of(resources={"begin": text})
    assert spec.with_absolute_begin(now=NOW, zone=ZoneInfo("Europe/Berlin")).resources.begin == moment
    assert absolute(moment, now=NOW, zone=ZoneInfo("Europe/Berlin")) == moment


def test_a_moment_of_the_past_or_far_ahead_is_refused(oskar: User) -> None:
    for text, message in (("2020-01-01T00:00", "has passed"), ("2090-01-01T00:00", "more than a year ahead")):
        with pytest.raises(SpecError, match=message):
            submit_spec(oskar, spec_of(resources={"begin": text}))


@pytest.mark.parametrize("text", ["0001-01-01T00:00+14:00", "9999-12-31T23:59-14:00"])
def test_a_moment_before_or_after_all_days_is_none(text: str) -> None:
    assert "is not a date and time" in problems(resources={"begin": text})["resources.begin"]


def test_what_does_not_hold_is_refused_with_the_fix() -> None:
    found = problems(resources={"partition": "a b", "qos": "-x", "constraint": "a&(b", "begin": "tomorrow"})
    assert found["resources.partition"].startswith('"a b" is not a valid name in Slurm.')
    assert "is not a valid name in Slurm" in found["resources.qos"]
    assert "Write it without spaces, like h100&nvlink" in found["resources.constraint"]
    assert "or +2h for two hours from now" in found["resources.begin"]
    assert "Set gpus_per_node, too" in problems(resources={"gpu_type": "h100"})["resources.gpu_type"]
    assert "Write nodes = 2" in problems(resources={"require_nodes": ["dgx[1-2]"]})["resources.require_nodes"]
    both = {"require_nodes": ["dgx1"], "exclude_nodes": ["dgx1"]}
    assert "is both required and excluded" in problems(resources=both)["resources.exclude_nodes"]


@pytest.mark.parametrize(
    "field", ["partition", "qos", "reservation", "gpu_type", "constraint", "licenses", "require_nodes"]
)
@given(text=st.text(min_size=1, max_size=12))
def test_nothing_gets_through_that_could_end_a_line(field: str, text: str) -> None:
    value = [text] if field == "require_nodes" else text
    try:
        spec = JobSpec.parse({"name": "x", "resources": {field: value, "gpus_per_node": 1, "nodes": 900}, "run": {}})
    except SpecError:
        return
    taken = getattr(spec.resources, field)
    assert all("!" <= letter <= "~" for letter in "".join(taken))


def test_lists_of_nodes_are_expanded_within_bounds() -> None:
    assert hosts(["dgx[01-03,7]", "dgx02", "login"]) == ["dgx01", "dgx02", "dgx03", "dgx7", "login"]
    assert hosts(["rack[9-11]-a"]) == ["rack9-a", "rack10-a", "rack11-a"]
    assert hosts(["r[1-2]n[1-2]", "dgx01,dgx02"]) == ["r1n1", "r1n2", "r2n1", "r2n2", "dgx01", "dgx02"]
    assert hosts(["a b", "c\nd"]) == ["a", "b", "c", "d"]  # as in all other lists of nodes
    for wrong in ("dgx[1-99999]", "dgx[3-1]", "dgx[a]", "dgx[1", "-x", "a;b", ""):
        with pytest.raises(ValueError, match=r"more than|is no|names no|counts down|do not match"):
            hosts([wrong])
    for hostile in (["n[1-999]"] * 200, ["n" + "[1,1]" * 9], ["n" + "[1,1]" * 8] * 200, ["x" * 1000] * 200):
        with pytest.raises(ValueError, match=r"more than"):
            hosts(hostile)


def test_names_that_slurm_lacks_are_reported_with_similar_names(oskar: User) -> None:
    submit_spec(oskar, spec_of(resources={"partition": "bacth"}))  # no reading of the cluster yet
    Partition.objects.create(name="batch")
    Node.objects.create(name="dgx01", cpus=128, gpus=8, gpu_type="h100", memory_mib=1000, features=["nvlink"])
    with pytest.raises(SpecError) as caught:
        submit_spec(
            oskar,
            spec_of(
                resources={"partition": "bacth", "gpus_per_node": 1, "gpu_type": "a100", "exclude_nodes": ["dxg01"]}
            ),
        )
    assert {problem.field: problem.message for problem in caught.value.problems} == {
        "resources.partition": 'Slurm has no partition "bacth". Did you mean "batch"?',
        "resources.gpu_type": 'Slurm has no GPU of type "a100". Did you mean "h100"?',
        "resources.exclude_nodes": 'Slurm has no node "dxg01". Did you mean "dgx01"?',
    }


@pytest.mark.parametrize(
    ("wanted", "there", "sent"),
    [("H100", ["h100"], "h100"), ("h100", ["H100"], "H100"), ("h100", ["H100", "h100"], "h100"), ("h100", [], "h100")],
)
def test_a_gpu_type_is_sent_as_the_cluster_spells_it(
    oskar: User, scheduler: ScriptedScheduler, wanted: str, there: list[str], sent: str
) -> None:
    for number, kind in enumerate(there):
        Node.objects.create(name=f"dgx{number}", cpus=128, gpus=8, gpu_type=kind, memory_mib=1_000_000)
    job, _ = submit_spec(oskar, spec_of(resources={"gpus_per_node": 1, "gpu_type": wanted}))
    assert handed(job, scheduler).gpu_type == sent
    assert job.spec["resources"]["gpu_type"] == wanted, "the specification stays as it was written"


@pytest.mark.parametrize("text", ["matlab:0", "matlab 2", "matlab:2,", "a:1|b:1", "-x", "a:1000000", "a,b,a"])
def test_what_is_no_list_of_licenses(text: str) -> None:
    assert "Write it" in problems(resources={"licenses": text})["resources.licenses"]


@pytest.mark.parametrize("text", ["matlab", "matlab:2,abaqus", "matlab@flex.lab:10", ""])
def test_lists_of_licenses(text: str) -> None:
    assert spec_of(resources={"licenses": text}).resources.licenses == text


@pytest.mark.parametrize(
    ("licenses", "message"),
    [
        ("matlb:1", 'Slurm has no license "matlb" (as of 21:04). Did you mean "matlab"?'),
        ("matlab,nothing-like:1", 'Slurm has no license "nothing-like" (as of 21:04). It has matlab.'),
        ("matlab:3", "Slurm has 2 matlab licenses in all (as of 21:04); this job requests 3. Request fewer."),
    ],
)
def test_licenses_that_slurm_lacks(oskar: User, licenses: str, message: str) -> None:
    submit_spec(oskar, spec_of(resources={"licenses": licenses}))  # no reading of the cluster yet
    License.objects.create(name="matlab", total=2, used=2)
    Reading.objects.create(part="licenses", read_at=timezone.now().replace(hour=21, minute=4, second=0))
    submit_spec(oskar, spec_of(resources={"licenses": "matlab:2"}))
    with pytest.raises(SpecError) as caught:
        submit_spec(oskar, spec_of(resources={"licenses": licenses}))
    (problem,) = caught.value.problems
    assert problem.field == "resources.licenses"
    assert problem.message.replace("\N{NO-BREAK SPACE}", " ") == message


def test_a_cluster_without_licenses_is_reported(oskar: User) -> None:
    Reading.objects.create(part="licenses", read_at=timezone.now())
    with pytest.raises(SpecError, match=r"It has none\. Remove it\."):
        submit_spec(oskar, spec_of(resources={"licenses": "matlab"}))


def test_a_single_machine_counts_no_licenses(oskar: User) -> None:
    Node.objects.create(name="here", cpus=8, plays_many=True)
    with pytest.raises(SpecError, match="Jobs run on one machine here, which has no licenses") as caught:
        submit_spec(oskar, spec_of(resources={"licenses": "matlab"}))
    assert [problem.field for problem in caught.value.problems] == ["resources.licenses"]


def test_without_a_slurm_user_nothing_is_submitted(oskar: User, settings: Any) -> None:
    settings.VIGIL_SCHEDULER = "slurm"
    with pytest.raises(Refused, match="A sysadmin can set it under People"):
        submit_spec(oskar)
    User.objects.filter(pk=oskar.pk).update(slurm_user="oskar")
    oskar.refresh_from_db()
    submit_spec(oskar)


# The Python of a job


def test_the_nearer_environment_wins() -> None:
    site = Environment(python="/opt/venv", modules=["cuda/12.4"], mounts=["/data"], env={"A": "site", "B": "site"})
    project = Environment(container="nvcr.io/nvidia/pytorch:24.10-py3", env={"B": "project"})
    job = Environment(mounts=["/scratch:/tmp"], modules=[], env={"C": "job"})
    found = job.merged_over(project.merged_over(site))
    assert (found.python, found.container) == (None, project.container), "a container has a Python of its own"
    assert (found.modules, found.mounts) == ([], ["/data", "/scratch:/tmp"])
    assert found.env == {"A": "site", "B": "project", "C": "job"}
    assert Environment(python="").merged_over(project).container is None, "the site's own Python again"


@pytest.mark.parametrize(
    ("image", "engine", "runs_in", "arrives"),
    [
        ("nvcr.io/nvidia/pytorch:24.10-py3", None, "pyxis", "nvcr.io#nvidia/pytorch:24.10-py3"),
        ("ubuntu:24.04", None, "pyxis", "ubuntu:24.04"),
        ("/images/torch.sqsh", None, "pyxis", "/images/torch.sqsh"),
        ("/images/torch.sif", None, "apptainer", "/images/torch.sif"),
        ("docker://ubuntu", None, "apptainer", "docker://ubuntu"),
        ("nvcr.io/nvidia/pytorch:24.10-py3", "apptainer", "apptainer", "docker://nvcr.io/nvidia/pytorch:24.10-py3"),
    ],
)
def test_an_image_is_named_as_its_engine_wants_it(image: str, engine: Any, runs_in: str, arrives: str) -> None:
    found = Environment.model_validate({"container": image, "engine": engine})
    assert (found.runs_in, found.image) == (runs_in, arrives)


def test_it_reaches_run_toml_and_the_script(
    oskar: User, project: Project, scheduler: ScriptedScheduler, settings: Any
) -> None:
    settings.VIGIL_JOB_ENVIRONMENT = 'modules = ["cuda/12.4"]'
    settings.VIGIL_NCCL_INTERFACE = "ib0"
    settings.VIGIL_LOCAL_TRUST = "everyone"
    Project.objects.filter(pk=project.pk).update(job_environment='container = "/images/torch.sif"\nmounts = ["/data"]')
    job, _ = submit_spec(oskar, spec_of(environment={"env": {"WANDB_MODE": "offline; touch x"}}))
    handed(job, scheduler)
    env = tomllib.loads(written(job, "run.toml"))["environment"]["env"]
    assert env == {"NCCL_SOCKET_IFNAME": "ib0", "WANDB_MODE": "offline; touch x"}
    script = written(job, "batch.sh")
    assert "modules=(cuda/12.4)" in script
    runs = settings.VIGIL_RUNS
    assert (
        f"apptainer exec --bind {runs}:{runs} --bind {settings.BASE_DIR}:{settings.BASE_DIR}:ro --bind /data:/data"
        in script
    )
    assert "WANDB" not in script, "what ranks see goes through no shell"


def test_by_default_it_is_the_portals(oskar: User, scheduler: ScriptedScheduler, settings: Any) -> None:
    settings.VIGIL_JOB_PYTHON = "/shared/vigil/bin/python"
    job, _ = submit_spec(oskar)
    handed(job, scheduler)
    assert "\npython=/shared/vigil/bin/python\n" in written(job, "batch.sh")


def test_a_projects_text_that_no_longer_holds_is_reported(oskar: User, project: Project) -> None:
    Project.objects.filter(pk=project.pk).update(job_environment="pyhton = 3")
    with pytest.raises(SpecError, match=r'project default is invalid.*Did you mean "python"'):
        submit_spec(oskar)


def test_this_machine_has_no_containers_of_pyxis(oskar: User) -> None:
    with pytest.raises(SpecError, match='write engine = "apptainer"'):
        submit_spec(oskar, spec_of(environment={"container": "ubuntu:24.04"}))


def test_sysadmins_set_a_projects_environment(project: Project) -> None:
    client, path = signed_in(sysadmin()), f"/admin/portal/project/{project.pk}/change/"
    form = {"slug": "default", "memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}
    answer = client.post(path, {**form, "job_environment": 'python = "bin/python"'})
    assert "must be the absolute path" in answer.content.decode()
    assert client.post(path, {**form, "job_environment": 'modules = ["cuda/12.4"]'}).status_code == 302
    project.refresh_from_db()
    assert project.job_environment == 'modules = ["cuda/12.4"]'


def test_rest_takes_and_returns_it(oskar: User, settings: Any) -> None:
    settings.VIGIL_LOCAL_TRUST = "everyone"
    spec = {"name": "x", "resources": {"qos": "high", "begin": "+1h"}, "environment": {"modules": ["cuda"]}}
    answer = send(signed_in(oskar), "post", "/api/v1/jobs", {"spec": spec})
    assert answer.status_code in {200, 201}, answer.content
    job = Job.objects.get().spec
    assert (job["resources"]["qos"], job["environment"]["modules"]) == ("high", ["cuda"])
