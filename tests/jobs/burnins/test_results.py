"""Results are read in bounded parts, and none is judged before it was read."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from jobs.burnins import advance, results
from jobs.disk import rundir
from nodes.models import BurnIn
from tests.jobs.burnins.bench import Bench, good_lines, line

pytestmark = pytest.mark.django_db


def test_a_backlog_is_read_before_it_is_judged(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "READ_BYTES", 400)
    bench.start()
    bench.until_running()
    bench.write(good_lines())
    bench.lab.scheduler.update_job(bench.burn_in.scheduler_id, state="completed")
    bench.tick()
    BurnIn.objects.update(job_ended_at=bench.burn_in.job_ended_at - advance.LATE_RESULTS)
    bench.until_ended()
    assert bench.row().verdict == "passed"


def test_a_tick_reads_no_longer_than_its_budget(bench: Bench) -> None:
    bench.start("dgx-01", "dgx-02")
    bench.until_running()
    for node in ("dgx-01", "dgx-02"):
        bench.write([line("copy", "host to GPU 0", value=20.0)], node)
    assert not results.read_results(bench.burn_in, 0.0)
    assert [row.tests.count() for row in bench.burn_in.nodes.order_by("node")] == [1, 0]
    results.read_results(bench.burn_in, 0.0)
    assert [row.tests.count() for row in bench.burn_in.nodes.order_by("node")] == [1, 1], "each has its turn"


def test_a_file_that_cannot_be_read_stops_neither_others_nor_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start("dgx-01", "dgx-02")
    bench.until_running()
    open_under = rundir.open_under

    def open_stale(root: Path, relative: str) -> int:
        if relative.endswith("dgx-01.jsonl"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return open_under(root, relative)

    monkeypatch.setattr(rundir, "open_under", open_stale)
    for node in ("dgx-01", "dgx-02"):
        bench.write(good_lines(), node)
    bench.end_job()
    bench.until_ended()
    assert (bench.row("dgx-01").verdict, bench.row("dgx-02").verdict) == ("inconclusive", "passed")
