"""Results are read in bounded parts, and none is judged before it was read."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from jobs.burnins import advance, results
from jobs.disk import rundir
from nodes.models import BurnIn
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, good_lines, line

pytestmark = pytest.mark.django_db


def test_a_backlog_is_read_before_it_is_judged(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "READ_BYTES", 400)
    cluster.start()
    cluster.until_running()
    cluster.write(good_lines())
    cluster.lab.scheduler.update_job(cluster.burn_in.scheduler_id, state="completed")
    cluster.tick()
    BurnIn.objects.update(job_ended_at=cluster.burn_in.job_ended_at - advance.LATE_RESULTS)
    cluster.until_ended()
    assert cluster.row().verdict == "passed"


def test_a_tick_reads_no_longer_than_its_budget(cluster: SimulatedCluster) -> None:
    cluster.start("dgx-01", "dgx-02")
    cluster.until_running()
    for node in ("dgx-01", "dgx-02"):
        cluster.write([line("copy", "host to GPU 0", value=20.0)], node)
    assert not results.read_results(cluster.burn_in, 0.0)
    assert [row.tests.count() for row in cluster.burn_in.nodes.order_by("node")] == [1, 0]
    results.read_results(cluster.burn_in, 0.0)
    assert [row.tests.count() for row in cluster.burn_in.nodes.order_by("node")] == [1, 1], "each has its turn"


def test_a_file_that_cannot_be_read_stops_neither_others_nor_the_end(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start("dgx-01", "dgx-02")
    cluster.until_running()
    open_under = rundir.open_under

    def open_stale(root: Path, relative: str) -> int:
        if relative.endswith("dgx-01.jsonl"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return open_under(root, relative)

    monkeypatch.setattr(rundir, "open_under", open_stale)
    for node in ("dgx-01", "dgx-02"):
        cluster.write(good_lines(), node)
    cluster.end_job()
    cluster.until_ended()
    assert (cluster.row("dgx-01").verdict, cluster.row("dgx-02").verdict) == ("inconclusive", "passed")
