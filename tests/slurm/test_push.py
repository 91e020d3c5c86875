"""Test that Slurm's hooks call docs/slurm/jobcomp.sh when a job starts or ends, which wakes the follower."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.portal import Portal, portal_on, script
from tests.stack import REPOSITORY
from tests.waiting import until

SECRET = "what the lab's hooks know"


@pytest.fixture
def portal(slurm: Cluster) -> Iterator[Portal]:
    with portal_on(slurm, VIGIL_PUSH_SECRET=SECRET) as created:
        yield created


@contextmanager
def hooks(slurm: Cluster, portal: Portal) -> Iterator[None]:
    """The script as JobCompLoc and as PrologSlurmctld."""
    script, conf, settings = slurm.layout.job_ended_hook, slurm.layout.folder / "etc" / "push.conf", slurm.layout
    before = settings.slurm_conf.read_text()
    conf.touch(0o600)
    conf.write_text(f'url = "{portal.url}/api/v1/scheduler/wake"\nheader = "Authorization: Bearer {SECRET}"\n')
    text = (REPOSITORY / "docs" / "slurm" / "jobcomp.sh").read_text()
    script.write_text(text.replace("\n", f"\necho called >>{called(slurm)}\n", 1))
    script.chmod(0o755)
    called(slurm).touch()
    called(slurm).chmod(0o666)
    with slurm.without("slurmctld"):  # which does not check it later
        settings.slurm_conf.write_text(f"{before}PrologSlurmctld={script}\n")
    try:
        assert slurm.run(script, "--test").strip() == '{"woken":true}'
        yield
    finally:
        with slurm.without("slurmctld"):
            settings.slurm_conf.write_text(before)
        script.unlink()
        conf.unlink()


def called(slurm: Cluster) -> Path:
    """Return a line for each call of the hook."""
    return slurm.layout.scratch / "called"


def test_starts_and_ends_are_noticed_without_a_tick(slurm: Cluster, portal: Portal) -> None:
    """Beat stands still, so only a push causes a poll. The prolog's comes some moments before the job runs, which
    are longer here than anybody echoes it: so once more when it does, as a tick would.
    """
    alice = portal.as_person("alice")
    with hooks(slurm, portal), alice.client:
        os.kill(portal.pid("beat"), signal.SIGSTOP)
        called(slurm).write_text("")
        job_id = alice.submit(script(100))
        slurm_id = until(lambda: alice.job(job_id)["attempt"]["scheduler_id"], "Slurm's number")
        slurm.wait_for(lambda: slurm.state(slurm_id) == "RUNNING", "the job to run")
        assert called(slurm).read_text(), "PrologSlurmctld was not called"
        slurm.run(slurm.layout.job_ended_hook, "--test")
        alice.wait(job_id, "running")
        assert alice.wait(job_id)["state"] == "completed"
