"""Test `vigil profile` and `vigil profiles`, and goodput in `vigil job`."""

import json

from tests.vigil_cli.commands import JOB, portal, problem, vigil  # noqa: F401
from vigil_cli import profiles

NAME = "step-90-94.rank0.abc123.json.gz"
WAITS = {
    "id": "abc123", "attempt": 2, "rank": 0, "name": "", "first_step": None, "last_step": None, "bytes": 0,
    "is_pending": True, "problem": "", "requested_at": "2026-01-31T12:00:00Z", "saved_at": None,
}  # fmt: skip
SAVED = {**WAITS, "name": NAME, "first_step": 90, "last_step": 94, "bytes": 504_344, "is_pending": False}


def test_requests_a_profile(portal):  # noqa: F811
    portal.answers["POST", "jobs/7/profile"] = {"id": "abc123"}
    assert "Requested 9 steps from rank 3 of #7." in vigil("profile", "7", "--steps", "9", "--rank", "3").output
    assert json.loads(portal.asked[-1].content) == {"steps": 9, "rank": 3}
    assert json.loads(vigil("profile", "7", "--json").output) == {"id": "abc123"}
    portal.answers["POST", "jobs/7/profile"] = problem(409, "Not profiled. #7 is not running: it is completed.")
    assert "Not profiled." in vigil("profile", "7", status=1).stderr
    vigil("profile", "7", "--steps", "0", status=2)


def test_waits_and_fetches(portal, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiles, "POLL_S", 0.0)
    portal.answers["POST", "jobs/7/profile"] = {"id": "abc123"}
    portal.answers["GET", "jobs/7/profiles"] = [
        {"items": [], "next": None},
        {"items": [WAITS], "next": None},
        {"items": [SAVED], "next": None},
    ]
    portal.answers["GET", f"jobs/7/profiles/2/{NAME}"] = {"traceEvents": []}
    output = vigil("profile", "7", "--wait").output
    assert output == f"job-7.2-{NAME}: steps 90-94 of rank 0\n"
    assert (tmp_path / f"job-7.2-{NAME}").read_bytes()


def test_reports_that_none_was_written(portal):  # noqa: F811
    portal.answers["POST", "jobs/7/profile"] = {"id": "abc123"}
    lost = {**WAITS, "is_pending": False, "problem": "Its attempt ended before it was written."}
    portal.answers["GET", "jobs/7/profiles"] = {"items": [lost], "next": None}
    assert "Its attempt ended" in vigil("profile", "7", "--wait", status=1).stderr


def test_lists(portal, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    portal.answers["GET", "jobs/7/profiles"] = {"items": [SAVED, WAITS], "next": None}
    head, first, second = vigil("profiles", "7").output.splitlines()
    assert head.split() == ["ATTEMPT", "RANK", "STEPS", "SIZE", "NAME"]
    assert first.split() == ["2", "0", "90-94", "504", "kB", NAME]
    assert "requested, not written yet" in second
    portal.answers["GET", f"jobs/7/profiles/2/{NAME}"] = {"traceEvents": []}
    assert vigil("profiles", "7", "--fetch", NAME).output == f"job-7.2-{NAME}\n"
    assert "has no profile" in vigil("profiles", "7", "--fetch", "x", status=1).stderr


def test_goodput_is_among_a_jobs_facts(portal):  # noqa: F811
    portal.answers["GET", "jobs/7"] = {**JOB, "goodput": None}
    assert "goodput" not in vigil("job", "7").output
    payload = {"fraction": 0.969, "useful_seconds": 3600.0, "wall_seconds": 3715.0}
    portal.answers["GET", "jobs/7"] = {**JOB, "goodput": payload}
    assert "96.9 %: 1 h of steps in 1 h 02 min" in vigil("job", "7").output
