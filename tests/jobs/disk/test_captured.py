"""Test an attempt's captured environment: read from an untrusted folder, shown, compared, rerun."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from jobs.disk import provenance, rundir
from jobs.models import Attempt, Job
from jobs.spec import JobSpec
from portal.models import Project, User
from tests.jobs.pages.reading import text
from tests.jobs.submissions import ENTRIES, text_of
from tests.lab import a_job, a_project, bearer, on_disk, person, signed_in

pytestmark = pytest.mark.django_db
COMMIT, OTHER = "0123456789" * 4, "9876543210" * 4
CAPTURED: dict[str, Any] = {
    "version": 1, "captured_at": 1_790_000_000.5, "node": "dgx01", "python": "3.11.7", "implementation": "cpython",
    "executable": "/venv/bin/python", "torch": "2.12.0+cu128", "torch_for": "CUDA 12.8",
    "packages": {"numpy": "2.4.6", "torch": "2.12.0+cu128", "gone": "1.0"}, "os": "Ubuntu 24.04",
    "kernel": "Linux 6.8.0", "machine": "x86_64", "cpu": "EPYC", "cpus": 16, "memory_gib": 128.0,
    "driver": "570.86", "cuda": "12.8",
    "gpus": [{"name": "H100", "memory_gib": 80.0}] * 2, "vigil": "0.1.0", "vigil_commit": COMMIT,
    "vigil_digest": "ab" * 32, "config_hash": "0123456789abcdef", "variables": ["ALPHA"],
}  # fmt: skip


@pytest.fixture
def job(mira: User, project: Project) -> Job:
    job = a_job(mira, project, state="failed", attempt={"directory": "attempt-1"})
    on_disk(job)
    return job


def place(job: Job, number: int = 1) -> Path:
    folder = rundir.path_of(job.directory) / "job" / f"attempt-{number}"
    folder.mkdir(exist_ok=True)
    return folder / "environment.json"


def write_capture(job: Job, number: int = 1, **changes: Any) -> None:
    place(job, number).write_text(json.dumps({**CAPTURED, **changes}))


def attempt(job: Job, number: int, **fields: Any) -> Attempt:
    created = Attempt.objects.create(job=job, number=number, directory=f"attempt-{number}", **fields)
    Job.objects.filter(pk=job.pk).update(latest=created)
    return created


def answer(user: User, job: Job, number: int = 1, status: int = 200) -> dict[str, Any]:
    response = bearer(user).get(f"/api/v1/jobs/{job.pk}/attempts/{number}/environment")
    assert response.status_code == status, response.content
    found: dict[str, Any] = response.json()
    return found


# Over REST


def test_it_is_reported_whole(job: Job, mira: User) -> None:
    write_capture(job)
    report = answer(mira, job)
    expected = {name: value for name, value in CAPTURED.items() if name not in {"version", "captured_at"}}
    assert {name: report[name] for name in expected} == expected
    assert (report["attempt"], report["since"], report["changes"]) == (1, None, [])
    assert report["captured_at"].startswith("2026-09-21T")


def test_changes_come_in_the_order_that_matters(job: Job, mira: User) -> None:
    write_capture(job, git="https://example.org/a", ref="main", commit=COMMIT)
    attempt(job, 2)
    attempt(job, 3)
    packages = {"numpy": "2.4.6", "torch": "2.13.0", "new": "3"}
    write_capture(job, 3, commit=OTHER, driver="575.1", packages=packages, variables=["BETA"], gpus=[{"name": "H100"}])
    report = answer(mira, job, 3)
    assert report["since"] == 1, "attempt 2 left none"
    assert [(change["what"], change["before"], change["after"]) for change in report["changes"]] == [
        ("driver", "570.86", "575.1"),
        ("GPUs", "2 × H100", "H100"),
        ("commit", COMMIT, OTHER),
        ("gone", "1.0", ""),
        ("new", "", "3"),
        ("torch", "2.12.0+cu128", "2.13.0"),
        ("variable ALPHA", "set", ""),
        ("variable BETA", "", "set"),
    ]


def test_what_could_not_be_read_is_no_change(job: Job, mira: User) -> None:
    write_capture(job, packages_left_out=7)
    attempt(job, 2)
    write_capture(job, 2, driver="", kernel=None, gpus=[], packages={**CAPTURED["packages"], "was-cut": "1"})
    assert answer(mira, job, 2)["changes"] == []
    attempt(job, 3)
    write_capture(job, 3, vigil_digest="cd" * 32)
    assert [change["what"] for change in answer(mira, job, 3)["changes"]][:1] == ["Vigil's trainer"]


def test_a_driver_that_is_gone_is_a_change(job: Job, mira: User) -> None:
    write_capture(job)
    attempt(job, 2)
    write_capture(job, 2, driver=None, cuda=None, gpus=None)
    assert [(change["what"], change["after"]) for change in answer(mira, job, 2)["changes"]] == [
        ("driver", ""),
        ("GPUs", ""),
    ]
    html = text(signed_in(mira).get(f"/jobs/{job.pk}/attempts"))
    assert "driver 570.86 removed, GPUs 2 × H100 removed, since" in html


def test_there_is_none_yet(job: Job, mira: User) -> None:
    report = answer(mira, job, status=404)
    assert report["detail"] == f"Attempt 1 of #{job.pk} has no captured environment. Its launcher did not capture it."
    attempt(job, 2, state="running")
    assert "when its ranks have started" in answer(mira, job, 2, status=404)["detail"]
    for number in (3, 0, 2**70):
        assert f"has no attempt {number}" in answer(mira, job, number, status=404)["detail"]


def test_a_strangers_is_not_there(job: Job) -> None:
    write_capture(job)
    oskar = person("oskar", a_project("elsewhere"))
    assert answer(oskar, job, status=404)["detail"] == f"There is no job {job.pk} that you can see."
    assert bearer(oskar).get(f"/api/v1/jobs/{job.pk}/spec?pinned=true").status_code == 404
    assert Client().get(f"/api/v1/jobs/{job.pk}/attempts/1/environment").status_code == 401


# Hostile files


WRONG: list[Any] = [
    None,
    True,
    -1,
    2**80,
    1e400,
    float("nan"),
    "",
    "x" * 5000,
    "a\nb",
    "\u202e",
    "\ud800",
    [],
    {},
    [[]],
]


@pytest.mark.parametrize("name", sorted(CAPTURED.keys() - {"version"}) + ["commit", "dirty", "digest", "git"])
def test_a_field_that_is_wrong_costs_no_other(name: str) -> None:
    absent = provenance.parse({key: value for key, value in CAPTURED.items() if key != name})
    assert absent
    nothing = {name: getattr(absent, name)}
    for wrong in WRONG:
        found = provenance.parse({**CAPTURED, name: wrong, "more": wrong})
        assert found
        assert replace(found, **nothing) == absent
        stored = getattr(found, name)
        assert stored == nothing[name] or type(stored) in {type(wrong), float, datetime}
        json.dumps(asdict(found), default=str, allow_nan=False).encode()


@pytest.mark.parametrize("name", ["node", "python", "kernel", "driver", "git", "commit", "vigil_digest", "config_hash"])
@pytest.mark.parametrize("wrong", ["x" * 301, "a\nb", "a\x1b[2Jb", "\u202ecod.exe", "\ud800", "\x00"])
def test_texts_are_printable_and_short(name: str, wrong: str) -> None:
    found = provenance.parse({**CAPTURED, name: wrong})
    assert found
    assert getattr(found, name) == ""


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'{"version": 2}', b'{"version": true}', b'{"version": "1"}', b"[" * 100_000,
        b'{"version": 1, "node": "' + b"x" * 300_000 + b'"}', b"{}", b"\xff\xfe",
    ],
)  # fmt: skip
def test_what_is_no_environment_is_none(job: Job, mira: User, content: bytes) -> None:
    place(job).write_bytes(content)
    answer(mira, job, status=404)
    assert signed_in(mira).get(f"/jobs/{job.pk}/attempts").status_code == 200


@pytest.mark.parametrize("plant", ["link", "fifo", "folder", "sparse", "device", "linked folder"])
def test_what_is_no_file_is_not_opened(job: Job, mira: User, plant: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps({**CAPTURED, "node": "stolen"}))
    path = place(job)
    if plant == "link":
        path.symlink_to(tmp_path / "secret")
    elif plant == "fifo":
        os.mkfifo(path)
    elif plant == "folder":
        path.mkdir()
    elif plant == "sparse":
        with open(path, "wb") as file:
            file.truncate(2**40)
    elif plant == "device":
        path.symlink_to("/dev/zero")
    else:
        path.parent.rmdir()
        (tmp_path / "environment.json").write_text(json.dumps(CAPTURED))
        path.parent.symlink_to(tmp_path)
    answer(mira, job, status=404)
    html = text(signed_in(mira).get(f"/jobs/{job.pk}/attempts"))
    assert "stolen" not in html
    assert "Ran with" not in html


# The page


def test_the_page_shows_and_compares(job: Job, mira: User) -> None:
    write_capture(job)
    attempt(job, 2, state="failed")
    write_capture(job, 2, driver="575.1")
    attempt(job, 3, state="running")
    packages = {**CAPTURED["packages"], "torch": "2.13.0", **{f"x{n}": "1" for n in range(9)}}
    write_capture(job, 3, driver="575.1", torch="2.13.0+cpu", torch_for="CPU", packages=packages)
    html = text(signed_in(mira).get(f"/jobs/{job.pk}/attempts"))
    assert "Ran with Python 3.11.7, torch 2.12.0 (CUDA 12.8), driver 570.86, Linux 6.8.0; 3 packages" in html
    assert "Runs with Python 3.11.7, torch 2.13.0 (CPU), driver 575.1, Linux 6.8.0; 12 packages" in html
    assert 'driver 570.86 → 575.1, since <a href="#attempt-1">attempt 1</a>' in html
    assert 'the same 3 packages as <a href="#attempt-1">attempt 1</a>' in html
    assert "torch is for CUDA 12.8 → CPU, torch 2.12.0+cu128 → 2.13.0, x0 1 added" in html
    assert "x3 1 added and 5 more, since" in html
    assert html.count("<li>numpy <span>2.4.6</span></li>") == 2
    assert "2 × H100" in html
    assert "16 × EPYC, 128 GiB" in html


def test_the_page_escapes_and_survives(job: Job, mira: User) -> None:
    write_capture(job, node="<script>alert(1)</script>", python="<b>", packages={"<i>": "1"})
    html = text(signed_in(mira).get(f"/jobs/{job.pk}/attempts"))
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)" in html
    write_capture(job, **{name: None for name in CAPTURED if name != "version"})
    assert "Ran with an unknown environment" in text(signed_in(mira).get(f"/jobs/{job.pk}/attempts"))


def test_only_the_newest_are_read(job: Job, mira: User) -> None:
    for number in range(2, 29):
        attempt(job, number, state="failed")
    for number in range(1, 29):
        write_capture(job, number)
    html = text(signed_in(mira).get(f"/jobs/{job.pk}/attempts"))
    assert html.count("Ran with") == 25
    assert f"vigil environment {job.pk} --attempt N" in html


# Rerun

TABLES = pytest.mark.parametrize("table", ENTRIES)


def coded(job: Job, toml: str) -> None:
    spec = JobSpec.parse_toml(toml)
    job.kind, job.spec, job.spec_toml = spec.kind, spec.model_dump(mode="json"), toml
    job.save()


def spec_of(user: User, job: Job, status: int = 200) -> str:
    response = bearer(user).get(f"/api/v1/jobs/{job.pk}/spec?pinned=true")
    assert response.status_code == status, response.content
    return str(response.json()["spec_toml" if status == 200 else "detail"])


@TABLES
def test_code_from_git_is_pinned_to_what_ran(job: Job, mira: User, table: str) -> None:
    toml = f'{text_of(table, git="https://example.org/a.git")}ref = "main"  # ours\n'
    coded(job, toml)
    assert "has not fetched its code yet" in spec_of(mira, job, status=409)
    page = f"/jobs/{job.pk}/spec"
    line = f"vigil spec {job.pk} &gt; again.toml &amp;&amp; vigil submit again.toml"
    assert line in text(signed_in(mira).get(page))
    code = place(job).parent.parent / "code.json"
    code.write_text(json.dumps({"commit": COMMIT}))
    assert spec_of(mira, job) == toml.replace('ref = "main"', f'ref = "{COMMIT}"')
    html = text(signed_in(mira).get(page))
    assert line.replace("&gt;", "--pinned &gt;", 1) in html
    assert COMMIT[:12] in html
    for wrong in ("--upload-pack=x", COMMIT + "\n", '"\nentry = "evil.py"', 7, COMMIT[:20], None):
        code.write_text(json.dumps({"commit": wrong}))
        spec_of(mira, job, status=409)
    code.unlink()
    code.symlink_to("/etc/passwd")
    spec_of(mira, job, status=409)


@TABLES
def test_an_upload_is_described(job: Job, mira: User, table: str) -> None:
    toml = text_of(table)
    coded(job, toml)
    assert spec_of(mira, job) == toml
    payload = {"digest": "ab" * 32, "commit": COMMIT, "dirty": True}
    (rundir.path_of(job.directory) / "portal" / "code.json").write_text(json.dumps(payload))
    html = text(signed_in(mira).get(f"/jobs/{job.pk}/spec"))
    assert "with uncommitted changes" in html
    assert COMMIT[:12] in html
    assert f"Digest <code>{'ab' * 6}</code>" in html


def test_a_trainers_job_is_itself(job: Job, mira: User) -> None:
    assert spec_of(mira, job, status=422)  # "# as written" is no spec: it is checked before it is handed out
    Job.objects.filter(pk=job.pk).update(spec_toml='name = "wren"\n')
    assert spec_of(mira, job) == 'name = "wren"\n'
    assert f"vigil spec {job.pk} &gt; again.toml" in text(signed_in(mira).get(f"/jobs/{job.pk}/spec"))
