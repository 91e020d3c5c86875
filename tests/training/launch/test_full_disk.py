"""Test a disk that is full for a while: launchers' messages wait for space, and no node is considered lost."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from tests.file_systems import small_file_system
from tests.training.launching import Run
from tests.waiting import PATIENCE_S, until
from training.attempt.lineage import claim_generation
from training.launch import members as meeting
from training.launch.attempt import Attempt
from training.launch.incarnation import Incarnation
from training.launch.members import Members
from training.launch.node_inspection import NodeInspection
from training.launch.plan import LaunchPlan


@pytest.fixture
def job_dir(run: Run) -> Iterator[Path]:
    """Provide a job folder on a file system of 4 MiB and 1,024 inodes, where one may be mounted."""
    with small_file_system(run.path / "job", "4m", inodes="1k") as place:
        yield place


FILLS_AND_DIES = """
import os, signal, sys
if os.environ["VIGIL_INCARNATION"] == "0":
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
    for size in (65536, 4096):
        try:
            while True:
                os.write(file, bytes(size))
        except OSError:
            pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_ranks_start_again_once_there_is_room(run: Run, job_dir: Path) -> None:
    launcher = run.script(FILLS_AND_DIES, script=f'args = ["{job_dir / "filler"}"]')
    until(lambda: "is full: waiting for room" in run.log())
    (job_dir / "filler").unlink()
    assert launcher.wait(PATIENCE_S) == 0, run.log()
    assert run.result()["cause"] == "completed"
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("full", ["room", "inodes"])
def test_a_node_report_uses_the_reserved_space(job_dir: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    (job_dir / "logs").mkdir()
    monkeypatch.setenv("VIGIL_KMSG", "/nowhere/kmsg")
    plan = LaunchPlan(run_dir=job_dir, scheduler_id="1", restart_count=0, node="dgx01")
    inspection = NodeInspection(plan, Attempt(job_dir, 1))
    inspection.begin()
    with open(job_dir / "filler", "wb", buffering=0) as file, suppress(OSError):
        for number in itertools.count():
            file.write(bytes(4096)) if full == "room" else (job_dir / str(number)).touch()
    inspection.measure()
    inspection.start(Incarnation(0, 1, "", "127.0.0.1", 1, ()), [])
    inspection.finish()
    payload = json.loads((job_dir / "looks" / "0.0.json").read_text())
    assert payload["disk"]["problem"] == "ENOSPC"
    assert payload["disk"]["free_mib" if full == "room" else "inodes_free"] == 0
    assert payload["not_seen"] == {"kernel": "/nowhere/kmsg: No such file or directory"}


def _is_denied(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_launchers_still_show_that_they_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LaunchPlan(run_dir=tmp_path, scheduler_id="1", restart_count=0, node="a", nodes=2, max_nodes=2)
    ours, theirs = (Members(tmp_path, replace(plan, node=f"dgx0{node}", node_rank=node)) for node in range(2))
    theirs.refresh()
    assert ours.is_live(theirs.me)
    before = ours._peer_files[theirs.me.id].beats
    monkeypatch.setattr(meeting, "write_json", _is_denied)
    theirs._refreshed_at = ours._peer_files[theirs.me.id].read_at = 0.0
    theirs.refresh()
    assert ours.is_live(theirs.me)
    assert ours._peer_files[theirs.me.id].beats == before + 1


def test_a_start_that_could_not_be_recorded_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _is_denied)
        with pytest.raises(OSError, match="No space left"):
            claim_generation(tmp_path, previous=None, resume="step-400")
    assert not list((tmp_path / "generations").iterdir())
