"""Slurm says by itself that a job started or ended: its hooks call docs/slurm/jobcomp.sh, which wakes the follower."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.portal import Portal, language, portal_on
from tests.stack import REPOSITORY

SECRET = "what the lab's hooks know"


@pytest.fixture
def portal(slurm: Cluster) -> Iterator[Portal]:
    with portal_on(slurm, VIGIL_PUSH_SECRET=SECRET) as made:
        yield made


@contextmanager
def hooks(slurm: Cluster, portal: Portal) -> Iterator[None]:
    """The script as JobCompLoc and as PrologSlurmctld."""
    script, conf, settings = slurm.layout.job_ended_hook, slurm.layout.folder / "etc" / "push.conf", slurm.layout
    before = settings.slurm_conf.read_text()
    conf.touch(0o600)
    conf.write_text(f'url = "{portal.url}/api/v1/scheduler/wake"\nheader = "Authorization: Bearer {SECRET}"\n')
    shutil.copy(REPOSITORY / "docs" / "slurm" / "jobcomp.sh", script)
    settings.slurm_conf.write_text(f"{before}PrologSlurmctld={script}\n")
    slurm.run("scontrol", "reconfigure")
    try:
        assert slurm.run(script, "--test").strip() == '{"woken":true}'
        yield
    finally:
        settings.slurm_conf.write_text(before)
        slurm.run("scontrol", "reconfigure")
        script.unlink()
        conf.unlink()
        slurm.wait_for(slurm.is_well, "every node to answer again")


def test_starts_and_ends_are_seen_without_a_tick(slurm: Cluster, portal: Portal) -> None:
    """Beat stands still, so only a push makes anybody look."""
    alice = portal.as_person("alice")
    with hooks(slurm, portal), alice.client:
        os.kill(portal.pid("beat"), signal.SIGSTOP)
        job_id = alice.submit(language())
        alice.wait(job_id, "running", timeout_s=60)
        done = alice.wait(job_id, timeout_s=60)
        assert done["state"] == "completed"
