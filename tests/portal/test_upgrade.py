"""Test an upgrade in place: what the previous code started continues under today's, and ends well."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.portal.test_up_kill import NO_END, check, job_of, new_rank, submit_to, wait_for_end, wait_for_step
from tests.stack import REPOSITORY, Stack
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

BEFORE = "95747fa1884d3b146253745d5c098a735c2bfb39"
"""The last commit of version 0.1: after it packages moved and modules were renamed. What processes of then call by name
must stay (protocols.md §9)."""
PRESERVED = {"var", ".venv"}


def before(folder: Path) -> None:
    """The code of then, as a checkout of its own."""
    archive = subprocess.run(["git", "archive", BEFORE], cwd=REPOSITORY, capture_output=True, check=False)
    assert archive.returncode == 0, "the repository's history is not here: clone it whole"
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


def upgrade(folder: Path) -> None:
    """Today's code in the place of the other, as `git pull` leaves it: file by file, and then what is gone."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    names = {name for name in os.fsdecode(listed).split("\0") if name}
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / f"{name}.new", follow_symlinks=False)  # links are tracked as links
        (folder / f"{name}.new").replace(folder / name)
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if path.is_file() and str(relative) not in names and relative.parts[0] not in PRESERVED:
            path.unlink()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    checkout = tmp_path / "vigil"
    checkout.mkdir()
    before(checkout)
    stack = Stack(checkout=checkout, VIGIL_LOCAL_CPUS="2")
    yield stack
    stack.close()


def test_what_ran_and_what_waited_goes_on(stack: Stack) -> None:
    stack.start()
    runs, waits = submit_to(stack, NO_END, trained=True), submit_to(stack, 40, trained=True)
    wait_for_step(stack, runs, 120)
    until(lambda: job_of(stack, waits)["attempt"]["scheduler_id"], "the second job to wait at the scheduler")
    stack.stop()
    upgrade(stack.checkout)
    stack.start()
    wait_for_step(stack, runs, (job_of(stack, runs)["progress"]["step"] or 0) + 50)
    # Its launcher, of the code before, starts ranks of today's.
    rank = new_rank(stack, but=set())
    assert rank is not None
    rank.kill()
    until(lambda: job_of(stack, runs)["attempt"]["incarnation"] == 1, "the ranks to be started again")
    wait_for_step(stack, runs, (job_of(stack, runs)["progress"]["step"] or 0) + 50)
    with stack.client() as client:
        assert client.post(f"/api/v1/jobs/{runs}/cancel").status_code == 202
        assert wait_for_end(stack, runs)["state"] == "cancelled"
        assert wait_for_end(stack, waits)["state"] == "completed"
        # Today's code goes on from what the other saved.
        newest = client.get(f"/api/v1/jobs/{runs}/checkpoints").json()["items"][0]["step"]
        resumed = client.post(f"/api/v1/jobs/{runs}/resume", json={"steps": newest + 20})
        assert resumed.status_code == 201, resumed.text
    assert wait_for_end(stack, runs)["state"] == "completed"
    check(stack, waits)


def test_an_old_supervisor_starts_new_workers(stack: Stack) -> None:
    """Files are replaced while the portal runs: what it starts from then on is today's code."""
    stack.start()
    job = submit_to(stack, NO_END, trained=True)
    wait_for_step(stack, job, 20)
    upgrade(stack.checkout)
    for name in ("follow", "web"):
        stack.wait_for_new(name, stack.kill(name), 60)
    wait_for_step(stack, job, (job_of(stack, job)["progress"]["step"] or 0) + 50)
    with stack.client() as client:
        assert client.post(f"/api/v1/jobs/{job}/cancel").status_code == 202
    assert wait_for_end(stack, job)["state"] == "cancelled"


def test_a_backup_made_before_an_upgrade_brings_the_old_version_back(stack: Stack, tmp_path: Path) -> None:
    """Go back as docs/how-to/backup.md describes."""
    stack.start()
    job = submit_to(stack, 40)
    assert wait_for_end(stack, job)["state"] == "completed"
    backup = tmp_path / "before.tar.gz"
    created = stack.vigil("backup", str(backup))
    assert created.returncode == 0, created.stderr
    stack.stop()
    upgrade(stack.checkout)
    stack.start()
    stack.stop()
    shutil.rmtree(stack.checkout)
    stack.checkout.mkdir()
    before(stack.checkout)
    restored = stack.vigil("restore", str(backup), "--force")
    assert restored.returncode == 0, restored.stderr
    stack.start()
    assert job_of(stack, job)["state"] == "completed"
