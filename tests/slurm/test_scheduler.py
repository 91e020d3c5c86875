"""Test Slurm as a scheduler: the common contract, and what only Slurm does."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from nodes.schedulers.slurm.tokens import KeyFileTokens
from tests.nodes.scheduler_contract import SchedulerContract
from tests.slurm.cluster import Cluster
from tests.slurm.people import ALICE, PORTAL, People


@pytest.fixture
def scheduler(slurm: Cluster) -> Iterator[Slurm]:
    """Return a new scheduler for each test: it remembers nothing of others."""
    tokens = KeyFileTokens(slurm.layout.jwt_key)
    http = SlurmHttp(slurm.url, tokens=tokens, user=PORTAL)
    yield Slurm(SlurmRest(http), tokens=tokens, user=PORTAL, scontrol=str(slurm.layout.bin / "scontrol"))
    http.close()


@pytest.fixture
def work(slurm: Cluster) -> Iterator[Path]:
    """A folder that alice's jobs can reach on every node."""
    folder = Path(tempfile.mkdtemp(prefix="vigil-work-"))
    people = People()
    shutil.chown(folder, people.alice.uid, people.alice.gid)
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


class TestSlurm(SchedulerContract):
    user, reservation_user = ALICE, PORTAL
    patience_s = 120.0
    shortest_limit_s, grace_s = 60, 10  # Slurm warns up to half a minute early: a longer one before its step is there
    apart = ""  # without cgroups, as here, Slurm loses sight of other sessions

    def test_refuses_more_than_there_is(self, scheduler: Slurm, work: Path) -> None:  # type: ignore[override]
        """24.11 refuses it at once; 22.05 and 26.05, by default, accept it and give the reason why it waits."""
        request = self.submission(work, "true", cpus_per_node=30_000)
        if (0, 0, 40) <= scheduler.rest.version <= (0, 0, 42):
            with pytest.raises(SchedulerError) as refused:
                scheduler.submit(request)
            assert (refused.value.permanent, refused.value.number) == (True, 2014)
            return
        scheduler_id = scheduler.submit(request)
        assert self.state(scheduler, scheduler_id, "pending").reason == "PartitionConfig"
        scheduler.cancel(scheduler_id, user=self.user)
        self.state(scheduler, scheduler_id, "cancelled")
