"""Test what Slurm could not start at all (0:53): a missing permission is named; nothing else is guessed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.disk import rundir, sharing
from jobs.disk.access import barrier
from jobs.models import Attempt, Job
from portal.models import User
from tests.jobs.following.launchers import launched, newest
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import submit_spec
from tests.slurm.people import ALICE, BOB, GROUP, PORTAL, People

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("useradd"), reason="Unix users are made by root"),
]


@pytest.fixture
def root(settings: Any) -> Iterator[Path]:
    """Return a run root as in docs/how-to/slurm.md, which everybody may reach."""
    People()
    folder = Path(tempfile.mkdtemp(prefix="vigil-runs-"))
    shutil.chown(folder, "root", GROUP)
    folder.chmod(0o2710)
    settings.VIGIL_RUNS, settings.VIGIL_SCHEDULER = folder, "slurm"
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def job(root: Path, oskar: User, tick: Callable[[], bool]) -> Job:
    User.objects.filter(pk=oskar.pk).update(slurm_user=ALICE)
    oskar.refresh_from_db()
    created, _ = submit_spec(oskar)
    tick()
    return created


def end(scheduler: ScriptedScheduler, tick: Callable[[], bool], **status: Any) -> Attempt:
    scheduler.update_job("101", **{"state": "failed", "signal": 53, "nodes": ("dgx01",), **status})
    tick()
    return Attempt.objects.get(number=1)


@pytest.mark.parametrize("status", [{}, {"signal": None, "exit_code": 1}])  # alone, and as a task of an array
def test_a_folder_that_is_closed_is_named_and_not_tried_again(
    job: Job, root: Path, scheduler: ScriptedScheduler, tick: Callable[[], bool], status: dict[str, Any]
) -> None:
    shutil.chown(root, "root", PORTAL)
    root.chmod(0o2710)
    attempt = end(scheduler, tick, **status)
    assert attempt.cause == "permission"
    assert attempt.reason == (
        f"{ALICE} may not enter {root}: it is open to the group {PORTAL}, and {ALICE} is not in it."
        f" A sysadmin can fix it: usermod -aG {PORTAL} {ALICE}, on the portal and on the nodes."
    )
    assert "the same would happen again. Grant access, then resume it." in attempt.decision
    assert Attempt.objects.count() == 1


def test_a_mode_that_lets_no_group_through_is_reported(
    job: Job, root: Path, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    root.chmod(0o2700)
    attempt = end(scheduler, tick)
    assert f"{ALICE} may not enter {root}: its mode is 2700, of root and the group {GROUP}." in attempt.reason
    assert f"chmod g+x {root}" in attempt.reason


def test_its_folder_is_opened_again_by_a_resume(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    folder = rundir.path_of(Job.objects.get().directory) / "job"
    folder.chmod(0o2700)  # for a folder with an ACL these bits are the mask
    attempt = end(scheduler, tick)
    assert attempt.cause == "permission"
    assert f"{ALICE} may not write to {folder}" in attempt.reason
    assert attempt.reason.endswith(f"resume the job, and Vigil grants {ALICE} access again.")


def test_where_nothing_is_closed_no_permission_is_claimed(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    attempt = end(scheduler, tick)
    assert attempt.cause == "launch"
    log = rundir.path_of(Job.objects.get().directory) / "job" / "batch.1.log"
    assert attempt.reason == (
        f"Slurm could not start it on dgx01 (0:53): the node could not write {log} (is it mounted there?)"
        f" or does not know {ALICE}; see slurmd's log on that node."
    )
    assert newest().number == 2, "another node may do"


@pytest.mark.parametrize("began", ["told", "launcher"])
def test_a_script_that_died_of_that_signal_itself_was_started(
    job: Job, root: Path, scheduler: ScriptedScheduler, tick: Callable[[], bool], began: str
) -> None:
    if began == "told":
        (rundir.path_of(Job.objects.get().directory) / "job" / "told" / "101.0").mkdir(parents=True)
    else:
        launched(newest())
    root.chmod(0o2700)
    assert end(scheduler, tick).cause == "lost"


def test_other_failures_stay_what_they_are(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    assert end(scheduler, tick, signal=None, exit_code=3).cause == "failed"


def test_barriers_follow_the_access_lists_as_the_kernel_does(root: Path) -> None:
    people, place = People(), root / "run"
    place.mkdir(0o700)
    assert barrier(place, "root") is None
    assert barrier(place, "nobody-of-this-name") is None, "who is not known here may be on the nodes"
    assert barrier(root / "none", ALICE) is None
    for acl, may_enter, may_write in (
        (sharing.Acl(users={people.alice.uid: 7}, mask=7), True, True),
        (sharing.Acl(users={people.alice.uid: 7}, mask=5), True, False),
        (sharing.Acl(users={people.alice.uid: 0}, mask=7, other=7), False, False),
        (sharing.Acl(groups={people.group: 5}, mask=7), True, False),
        (sharing.Acl(users={people.bob.uid: 7}, mask=7), False, False),
    ):
        os.setxattr(place, sharing.ACCESS, sharing.pack(acl))
        assert (barrier(place, ALICE) is None) is may_enter
        assert (barrier(place, ALICE, write=True) is None) is may_write
    os.removexattr(place, sharing.ACCESS)
    place.chmod(0o700)
    shutil.chown(place, BOB)
    assert barrier(place, BOB, write=True) is None
