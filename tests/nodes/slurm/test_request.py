"""Test the exact requests to Slurm, in each version's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from nodes.schedulers.base import SchedulerError, Submission
from nodes.schedulers.slurm.request import request
from tests.nodes.slurm.simulated_rest import VERSIONS, SimulatedRest, load

KEY = "0123456789abcdef"
SCRIPT = "#!/bin/bash\nsrun true # ü\n"


def submission_of(folder: Path, **options: Any) -> Submission:
    values: dict[str, Any] = {
        "key": KEY, "name": "train", "user": "alice", "script": str(folder / "batch.sh"), "directory": "/runs/1",
        "output": "/runs/1/output", "time_limit_s": 3601, "grace_s": 90,
    }  # fmt: skip
    return Submission(**{**values, **options})


EVERYTHING: dict[str, Any] = {
    "min_nodes": 2, "max_nodes": 4, "cpus_per_node": 16, "gpus_per_node": 8, "gpu_type": "h100",
    "memory_mib_per_node": 64_000, "environment": {"A": "1=2", "LANG": "de_DE.UTF-8"}, "account": "vision",
    "partition": "batch", "qos": "small", "reservation": "course", "constraint": "h100&nvlink", "exclusive": True,
    "licenses": "matlab:2,abaqus",
    "required_nodes": ("dgx01", "dgx02"), "excluded_nodes": ("dgx07",), "begin_at": 1_700_000_000.2,
}  # fmt: skip
COMMON = {
    "name": f"train.{KEY}", "comment": f"vigil:{KEY}", "current_working_directory": "/runs/1",
    "standard_output": "/runs/1/output", "standard_input": "/dev/null", "tasks_per_node": 1, "requeue": True,
}  # fmt: skip
CHOSEN = {
    "account": "vision", "partition": "batch", "qos": "small", "reservation": "course", "constraints": "h100&nvlink",
    "licenses": "matlab:2,abaqus", "cpus_per_task": 16,
}  # fmt: skip


def number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}


def test_the_old_form(tmp_path: Path) -> None:
    assert request(submission_of(tmp_path), SCRIPT, (0, 0, 38)) == {
        "script": SCRIPT,
        "job": COMMON
        | {
            "cpus_per_task": 1, "environment": {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
            "nodes": "1", "time_limit": 61, "open_mode": "append", "signal": "USR1@90",
        },
    }  # fmt: skip
    elastic = {name: value for name, value in COMMON.items() if name != "tasks_per_node"}
    assert request(submission_of(tmp_path, **EVERYTHING), SCRIPT, (0, 0, 38)) == {
        "script": SCRIPT,
        "job": elastic
        | CHOSEN
        | {
            "environment": {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "de_DE.UTF-8", "A": "1=2"},
            "nodes": "2-4", "time_limit": 61, "open_mode": "append", "signal": "USR1@90", "gres": "gpu:h100:8",
            "memory_per_node": 64_000, "exclusive": "exclusive", "begin_time": "uts1700000001", "no_kill": "set",
            "hold": True,
        },
    }  # fmt: skip


@pytest.mark.parametrize("version", [(0, 0, 39), (0, 0, 40), (0, 0, 41), (0, 0, 42), (0, 0, 45), (0, 1, 0)])
def test_the_new_form(tmp_path: Path, version: tuple[int, int, int]) -> None:
    report = request(submission_of(tmp_path, **EVERYTHING), SCRIPT, version)
    job = COMMON | CHOSEN | {
        "environment": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=de_DE.UTF-8", "A=1=2"], "nodes": "2-4",
        "time_limit": number(61), "open_mode": ["APPEND"], "kill_warning_signal": "USR1",
        "kill_warning_delay": number(90), "kill_warning_flags": ["BATCH_JOB"], "tres_per_node": "gres/gpu:h100:8",
        "memory_per_node": number(64_000), "shared": ["none"], "begin_time": number(1_700_000_001),
        "required_nodes": ["dgx01", "dgx02"], "excluded_nodes": ["dgx07"], "kill_on_node_fail": False,
    }  # fmt: skip
    if version >= (0, 0, 40):
        assert report == {"job": {"script": SCRIPT, **job}}
    else:
        assert report == {"script": SCRIPT, "job": job}


@pytest.mark.parametrize("version", VERSIONS)
def test_an_array(tmp_path: Path, version: str) -> None:
    digits = tuple(map(int, version[1:].split(".")))
    assert request(submission_of(tmp_path), SCRIPT, digits, array="0-19%4")["job"]["array"] == "0-19%4"  # type: ignore[arg-type]


@pytest.mark.parametrize("version", VERSIONS)
def test_submitting(tmp_path: Path, version: str) -> None:
    (tmp_path / "batch.sh").write_bytes(SCRIPT.encode())
    played = SimulatedRest(version)
    report = load(version, "taken/submit-submitted")
    played.answers["job/submit"] = report
    assert played.slurm.submit(submission_of(tmp_path)) == str(report.json()["job_id"])
    (sent,) = played.requests_to("job/submit")
    assert json.loads(sent.content) == json.loads(
        json.dumps(request(submission_of(tmp_path), SCRIPT, played.rest.version))
    )
    assert sent.headers["content-type"] == "application/json"
    assert sent.headers["x-slurm-user-name"] == "alice"


def test_a_job_without_a_user_is_not_submitted_as_the_portal(tmp_path: Path) -> None:
    """A sysadmin may take the Slurm user from somebody whose job was about to be restarted."""
    (tmp_path / "batch.sh").write_text(SCRIPT)
    played = SimulatedRest(VERSIONS[-1])
    with pytest.raises(SchedulerError, match="has no Slurm user") as refused:
        played.slurm.submit(submission_of(tmp_path, user=""))
    assert refused.value.permanent
    assert not played.requests_to("job/submit")


@pytest.mark.parametrize("name", ["account", "partition", "qos", "reservation"])
@pytest.mark.parametrize("version", VERSIONS)
def test_refusals_are_final_and_keep_slurm_s_words(tmp_path: Path, version: str, name: str) -> None:
    (tmp_path / "batch.sh").write_text(SCRIPT)
    played = SimulatedRest(version)
    played.answers["job/submit"] = load(version, f"refused/submit-{name}")
    with pytest.raises(SchedulerError, match=r"Slurm error 2\d{3}: .*[Ii]nvalid") as refused:
        played.slurm.submit(submission_of(tmp_path))
    assert refused.value.permanent
    assert len(played.requests_to("job/submit")) == 1


@pytest.mark.parametrize(
    ("answer", "job_id"),
    [
        ({"job_id": 7, "errors": [{"error_number": 2042, "error": "Job is held"}]}, "7"),
        ({"job_id": {"set": True, "number": 8}}, "8"),
        ({"result": {"job_id": 9}}, "9"),
        ({"job_id": "10"}, "10"),
        ({"job_id": 0, "errors": [{"error": "Odd"}]}, ""),
        ({}, ""),
    ],
)
def test_an_id_counts_whatever_else_the_response_has(tmp_path: Path, answer: dict[str, Any], job_id: str) -> None:
    (tmp_path / "batch.sh").write_text(SCRIPT)
    played = SimulatedRest(VERSIONS[-1])
    played.answers["job/submit"] = httpx.Response(200, json=answer)
    if job_id:
        assert played.slurm.submit(submission_of(tmp_path)) == job_id
    else:
        with pytest.raises(SchedulerError, match="returned no id"):
            played.slurm.submit(submission_of(tmp_path))


def test_scripts_that_cannot_be_read(tmp_path: Path) -> None:
    played = SimulatedRest(VERSIONS[-1])
    with pytest.raises(SchedulerError, match="cannot be read"):
        played.slurm.submit(submission_of(tmp_path))
    (tmp_path / "batch.sh").write_bytes(b"#!/bin/sh\necho \xff\n")
    with pytest.raises(SchedulerError, match="cannot be read"):
        played.slurm.submit(submission_of(tmp_path))
    assert not played.requests
