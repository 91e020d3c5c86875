"""Test a burn-in on a real Slurm: reserved, then undrained, tested inside, drained before the reservation ends."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.burnins.start import NeedsAgreement, cancel, start
from jobs.following import follow
from nodes.cluster import sync
from nodes.models import BurnIn, Node, Reading
from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from nodes.schedulers.slurm.tokens import KeyFileTokens
from tests.lab import sysadmin
from tests.slurm.cluster import Cluster
from tests.slurm.people import PORTAL, People
from tests.waiting import until

pytestmark = pytest.mark.django_db
REASON = "fan 3"


@pytest.fixture
def scheduler(slurm: Cluster, settings: Any) -> Iterator[Slurm]:
    tokens = KeyFileTokens(slurm.layout.jwt_key)
    http = SlurmHttp(slurm.url, tokens=tokens, user=PORTAL)
    settings.VIGIL_SCHEDULER, settings.VIGIL_SLURM_USER = "slurm", PORTAL
    settings.VIGIL_RUNS = Path(tempfile.mkdtemp(prefix="vigil-runs-"))
    shutil.chown(settings.VIGIL_RUNS, group=People().group)
    settings.VIGIL_RUNS.chmod(0o2710)
    yield Slurm(SlurmRest(http), tokens=tokens, user=PORTAL, scontrol=str(slurm.layout.bin / "scontrol"))
    http.close()
    shutil.rmtree(settings.VIGIL_RUNS, ignore_errors=True)


@pytest.fixture
def drained(slurm: Cluster, scheduler: Slurm) -> Iterator[Node]:
    name = slurm.layout.names[0]
    scheduler.drain(name, REASON)

    def read() -> bool:
        sync.read(scheduler, Reading.Part.NODES)
        return Node.objects.get(name=name).state == "drained"

    until(read)
    yield Node.objects.get(name=name)
    scheduler.undrain(name)


def test_a_drained_node_is_tested_inside_a_reservation(slurm: Cluster, scheduler: Slurm, drained: Node) -> None:
    """The private cluster's GPUs are device files of terminals, which torch cannot find: the node must fail."""
    ops = sysadmin("ops")
    with pytest.raises(NeedsAgreement, match=REASON):
        start(ops, [drained.name], 60)
    burn_in = start(ops, [drained.name], 60, may_undrain=True)

    def ticked(condition: Callable[[BurnIn], object]) -> Callable[[], bool]:
        def tick() -> bool:
            BurnIn.objects.exclude(state="running").update(tried_at=None)
            follow.tick(scheduler)
            burn_in.refresh_from_db()
            return bool(condition(burn_in))

        return tick

    def is_tested(row: BurnIn) -> bool:
        assert row.state != "ended", (row.problem, row.log)
        return row.nodes.get().tests.exists()

    until(ticked(is_tested), 240)
    shown = slurm.run("scontrol", "show", "reservation", burn_in.reservation)
    assert f"Nodes={drained.name} " in shown
    assert "MAINT" in shown
    assert "IGNORE_JOBS" in shown
    assert f"Reservation={burn_in.reservation}" in slurm.run("scontrol", "show", "job", burn_in.scheduler_id)
    cancel(ops, burn_in)
    until(ticked(lambda row: row.state == "ended"))
    assert burn_in.reservation not in slurm.run("scontrol", "show", "reservation")
    row = burn_in.nodes.get()
    assert (row.verdict, row.outcome) == ("failed", "Drained.")
    assert row.findings[0]["text"] == f"Found 0 of {drained.gpus} GPUs."
    reason = slurm.run("sinfo", "--noheader", "--nodes", drained.name, "--format=%E").strip()
    assert reason == f"[node] Found 0 of {drained.gpus} GPUs (vigil: burn-in)"
