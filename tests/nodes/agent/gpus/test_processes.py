"""Test to which user and job a process on a GPU belongs."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpus.reports import GpuCounters, GpuInfo
from nodes.agent.gpus.processes import GpuProcesses, job_of_cgroup, job_of_environment
from tests.waiting import until

GPUS = (GpuInfo("0", uuid="GPU-0"), GpuInfo("1", uuid="GPU-1"), GpuInfo("2"))


def counters(*processes: Sequence[dict[str, int]] | None) -> GpuCounters:
    return GpuCounters(
        0.0, 0.0, tuple({} for _ in processes), tuple(None if p is None else tuple(p) for p in processes)
    )


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("11:memory:/slurm/uid_1000/job_4711/step_0/task_0\n1:name=systemd:/system.slice", "4711"),
        ("0::/system.slice/slurmstepd.scope/job_815/step_batch/user/task_0\n", "815"),
        ("0::/system.slice/node01_slurmstepd.scope/job_9/step_extern/user/task_special\n", "9"),
        ("4:cpuset:/slurm_node01/uid_0/job_12\n", "12"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
        ("0::/job_x/step_0\n", ""),
        ("0::/my_job_5/step_0\n", ""),
        ("0::/job_99999999999/step_0\n", ""),
        ("", ""),
    ],
)
def test_a_job_by_its_control_group(text: str, job: str) -> None:
    assert job_of_cgroup(text) == job


@pytest.mark.parametrize(
    ("text", "job"),
    [
        (b"A=1\0VIGIL_LOCAL_JOB=/srv/vigil/local/jobs/17\0SLURM_JOB_ID=3\0", "17"),
        (b"SLURM_JOB_ID=42\0PATH=/bin", "42"),
        (b"VIGIL_LOCAL_JOB=/srv/vigil/local/jobs/none\0SLURM_JOB_ID=5\0", "5"),
        (b"VIGIL_LOCAL_JOB=\0", ""),
        (b"XSLURM_JOB_ID=5\0SLURM_JOB_ID=5;rm\0", ""),
        (b"SLURM_JOB_ID=12345678901\0", ""),
    ],
)
def test_a_job_by_its_environment(text: bytes, job: str) -> None:
    assert job_of_environment(text) == job


@given(st.text(), st.binary())
def test_nothing_that_stands_there_raises(text: str, data: bytes) -> None:
    for job in (job_of_cgroup(text), job_of_environment(data)):
        assert job == "" or job.isdigit()


def test_a_real_process_is_reported_with_its_user_and_job() -> None:
    environment = {**os.environ, "VIGIL_LOCAL_JOB": "/srv/jobs/23"}
    code = "import sys, ctypes; ctypes.CDLL(None).prctl(15, b'a\\x1b[31m b'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        report = counters([{"pid": process.pid, "memory_mib": 512}], [{"pid": process.pid}], [{"pid": process.pid}])
        processes = GpuProcesses()
        user = os.environ.get("USER") or "root"
        found = until(lambda: [item for item in [processes.payloads(report, GPUS)] if item[0]["user"] == user])[0]
        process.communicate()
    expected: dict[str, Any] = {"pid": process.pid, "user": user, "name": "a [31m b", "job": "23"}
    assert found == [{**expected, "gpu": "GPU-0", "memory_mib": 512}, {**expected, "gpu": "GPU-1"}]


@pytest.mark.parametrize(("cgroup", "job"), [("", ""), ("0::/system.slice/slurmstepd.scope/job_9/step_0\n", "9")])
def test_a_user_without_a_name_cannot_name_somebody_elses_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, job: str
) -> None:
    """The portal cannot compare the owners of the process and the job in a user namespace."""
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "comm").write_text("python\n")
    (folder / "cgroup").write_text(cgroup)
    (folder / "environ").write_bytes(b"SLURM_JOB_ID=9\0")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    (payload,) = GpuProcesses(tmp_path).payloads(counters([{"pid": 7}]), GPUS)
    assert (payload["user"], payload["job"]) == (str(owner), job)


def test_a_process_that_has_ended_is_reported_without_its_details() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    report = GpuProcesses().payloads(counters([{"pid": process.pid, "memory_mib": 1}]), GPUS)
    assert report == [{"gpu": "GPU-0", "pid": process.pid, "user": "", "name": "", "job": "", "memory_mib": 1}]


def test_a_gpu_without_a_list_of_processes_reports_none() -> None:
    assert GpuProcesses().payloads(counters(None, []), GPUS) == []
    assert GpuProcesses().payloads(None, GPUS) == []


def test_there_are_no_more_than_the_portal_takes() -> None:
    assert len(GpuProcesses().payloads(counters([{"pid": 2**22 + n} for n in range(600)]), GPUS)) == 500
