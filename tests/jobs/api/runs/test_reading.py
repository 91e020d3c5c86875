"""Test curves, CSV and logs over REST: the line of record, superseded points, gaps, bands, and invalid requests."""

import csv
import json
import math

import pytest
from django.utils import timezone

from jobs.disk import rundir
from jobs.intake.reports import ingest
from jobs.models import Attempt, Job
from tests import lab
from tests.jobs.reporting import Spooled, post

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(project):
    return lab.bearer(lab.person("tomas", project))


@pytest.fixture
def job(project):
    """Attempt 1 reached step 3 and restarted in place from step 2; attempt 2 continued from step 3."""
    job = lab.a_job(lab.person("mira", project), project, state="failed")
    first = job.latest
    assert first is not None
    second = Attempt.objects.create(job=job, number=2, state="running", started_at=timezone.now())
    Job.objects.filter(pk=job.pk).update(latest=second)
    report(first, 0, {1: 4.0, 2: 3.0, 3: math.nan}, rank=0)
    report(first, 1, {2: 3.5, 3: 2.5}, rank=0)
    report(second, 0, {3: 2.25, 4: 2.0}, rank=0)
    report(second, 0, {3: 2.5, 4: 1.0}, rank=1)
    return job


def report(attempt: Attempt, incarnation: int, losses: dict[int, float], *, rank: int) -> None:
    stream = Spooled(rank=rank, incarnation=incarnation)
    for step, loss in losses.items():
        stream.log(step, time=1000.0 + step, loss=loss)
    ingest(attempt.pk, post(stream))


def items(answer) -> list[dict]:
    assert answer.status_code == 200, answer.content
    return answer.json()["items"]


def path(job: Job, rest: str) -> str:
    return f"/api/v1/jobs/{job.pk}/{rest}"


# Curves


def test_the_line_of_record_runs_over_attempts(client, job):
    answer = client.get(path(job, "series"))
    (line,) = items(answer)
    assert (line["step"], line["value"]) == ([1, 2, 3, 4], [4.0, 3.5, 2.25, 2.0])
    assert line["breaks"] == [2, 3]
    assert line["superseded"] == [[2, 3]]
    assert (line["count"], line["last_step"]) == (4, 4)
    assert line["gaps"] == []
    job.refresh_from_db()
    assert (answer.json()["attempt"], answer.json()["version"]) == (job.latest_id, job.latest.version)


def test_ghosts_and_nan(client, job):
    lines = items(client.get(path(job, "series?all=true")))
    assert [(line["attempt"], line["incarnation"], line["step"]) for line in lines] == [
        (1, 0, [1, 2, 3]),
        (1, 1, [2, 3]),
        (2, 0, [3, 4]),
    ]
    assert lines[0]["value"] == [4.0, 3.0, None]
    assert lines[0]["gaps"] == [[3, 3, "NaN"]]


def test_ranges_ranks_several_names_and_unknown_ones(client, job):
    assert items(client.get(path(job, "series?from=2&to=3")))[0]["step"] == [2, 3]
    assert items(client.get(path(job, "series?rank=1")))[0]["value"] == [2.5, 1.0]
    lines = items(client.get(path(job, "series?name=loss&name=none&name=loss")))
    assert [(line["name"], len(line["step"])) for line in lines] == [("loss", 4), ("none", 0)]
    assert items(client.get(path(job, "series/names"))) == ["loss"]


def test_bands_across_ranks(client, job):
    (band,) = items(client.get(path(job, "series?band=true&from=4")))
    assert (band["step"], band["min"], band["median"], band["max"]) == ([4], [1.0], [1.5], [2.0])


def test_long_curves_come_as_stretches(client, project):
    job = lab.a_job(lab.person("lena", project), project, state="running")
    report(job.latest, 0, {step: float(step) for step in range(3000)}, rank=0)
    (line,) = items(client.get(path(job, "series?points=100")))
    assert len(line["step"]) <= 200
    assert line["min"][0] == 0.0
    assert max(line["max"]) == 2999.0
    assert line.get("value") is None
    assert (line["count"], line["last_step"]) == (3000, 2999)


@pytest.mark.parametrize("query", ["points=1", "points=1000000", "from=5&to=2", "from=-1", "rank=x", "name=%00"])
def test_wrong_questions(client, job, query):
    answer = client.get(path(job, f"series?{query}"))
    assert answer.status_code == 422
    assert answer.headers["Content-Type"] == "application/problem+json"


def test_csv_has_every_point_in_order(client, job):
    def rows(query: str) -> list[list[str]]:
        answer = client.get(path(job, f"series.csv?{query}"))
        assert answer.headers["Content-Type"].startswith("text/csv")
        return list(csv.reader(answer.getvalue().decode().splitlines()))

    head, *lines = rows("")
    assert ",".join(head) == "attempt,incarnation,rank,step,time,value"
    assert lines == [
        ["1", "0", "0", "1", "1001.0", "4.0"],
        ["1", "1", "0", "2", "1002.0", "3.5"],
        ["2", "0", "0", "3", "1003.0", "2.25"],
        ["2", "0", "0", "4", "1004.0", "2.0"],
    ]
    everything = rows("all=true")[1:]
    assert len(everything) == 7
    assert everything == sorted(everything)
    assert ["1", "0", "0", "3", "1003.0", "NaN"] in everything
    assert rows("name=none") == [head]


# Logs


@pytest.fixture
def logs(job, tmp_path, settings):
    """Return the folder of attempt 2's logs."""
    settings.VIGIL_RUNS = tmp_path
    job.refresh_from_db()
    directory = rundir.make("default", job.pk)
    Job.objects.filter(pk=job.pk).update(directory=directory)
    Attempt.objects.filter(pk=job.latest_id).update(directory="attempt-2", scheduler_id="7")
    folder = rundir.path_of(directory) / "job" / "attempt-2"
    (folder / "logs").mkdir(parents=True)
    (folder / "owner.json").write_text(json.dumps({"scheduler_id": "7", "restart_count": 0}))
    return folder / "logs"


def test_log_pages_and_cursors(client, job, logs):
    (logs / "0.0.log").write_text("".join(f"line {n}\n" for n in range(30)))
    page = client.get(path(job, "logs?limit=10")).json()
    assert [line["text"] for line in page["items"]] == [f"line {n}" for n in range(20, 30)]
    assert (page["attempt"], page["end"], page["next"]) == (2, page["size"], None)
    before = client.get(path(job, f"logs?limit=10&before={page['start']}")).json()
    assert before["items"][-1]["text"] == "line 19"
    with (logs / "0.0.log").open("a") as file:
        file.write("more\n")
    after = client.get(path(job, f"logs?after={page['end']}")).json()
    assert [line["text"] for line in after["items"]] == ["more"]
    found = client.get(path(job, "logs?search=LINE%201&limit=3")).json()
    assert [line["text"] for line in found["items"]] == ["line 1", "line 10", "line 11"]
    assert found["next"]


def test_which_logs_there_are(client, job, logs):
    for name in ("0.0.log", "0.1.log", "launcher.0.log"):
        (logs / name).write_text(f"{name}\n")
    files = items(client.get(path(job, "logs/files")))
    assert [(file["rank"], file["incarnation"]) for file in files] == [(0, 0), (1, 0), (-1, 0)]
    for rank, text in ((1, "0.1.log"), (-1, "launcher.0.log")):
        assert items(client.get(path(job, f"logs?rank={rank}")))[0]["text"] == text


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("rank=5", 404),
        ("attempt=9", 404),
        ("attempt=1", 404),
        ("rank=batch", 404),
        ("rank=999999999999", 404),
        ("rank=../../portal/token", 422),
        ("incarnation=-1", 422),
        ("after=-1", 422),
        ("after=1e400", 422),
        ("limit=100000", 422),
        ("search=%00", 422),
    ],
)
def test_logs_that_there_are_not(client, job, logs, query, status):
    (logs / "0.0.log").write_text("x\n")
    assert client.get(path(job, f"logs?{query}")).status_code == status


def test_a_whole_log_as_a_file(client, job, logs):
    (logs / "1.0.log").write_text("begun anew\n")
    answer = client.get(path(job, "logs/file"))
    assert answer.getvalue() == b"begun anew\n", "the newest start"
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert f'filename="job-{job.pk}.2-rank-0-start-2.log"' in answer.headers["Content-Disposition"]
    assert client.get(path(job, "logs/file?rank=77")).status_code == 404
    assert client.get(path(job, "logs/file?rank=../x")).status_code == 422


def test_a_link_in_place_of_a_log_is_not_followed(client, job, logs, tmp_path):
    (tmp_path / "secret").write_text("hush\n")
    (logs / "0.0.log").symlink_to(tmp_path / "secret")
    answer = client.get(path(job, "logs"))
    assert answer.status_code == 404
    assert "hush" not in answer.content.decode()


@pytest.mark.parametrize("rest", ["series", "series.csv", "series/names", "logs", "logs/files", "logs/file"])
def test_nothing_of_other_peoples_jobs(job, rest):
    stranger = lab.bearer(lab.person("oskar", lab.a_project("siskin")))
    assert stranger.get(path(job, rest)).status_code == 404
