"""Ten minutes' worth of reports that wait for a portal which is away: how soon it has them, and that it has each once.

    python -m bench.outage

Eight ranks have spooled ten steps a second of eight series for ten minutes, with the trainer's own Reporter, while
nothing listens at the portal's address. Their shipper keeps trying; then the web process starts. Bars: caught up within
a tenth of the outage, every point there exactly once, and the shipper no larger for what has piled up.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from bench import stage
from bench.shipping import SECRET, run_directory, shipper

OUTAGE_S = 600
RANKS = 8
STEPS_PER_SECOND = 10
SERIES = [f"series_{i}" for i in range(8)]
TRYING_S = 8.0  # of the outage that really pass: enough for the longest pause between two tries
CATCH_UP_S = OUTAGE_S / 10
SHIPPER_MIB = 64
POINTS = OUTAGE_S * STEPS_PER_SECOND * RANKS * len(SERIES)


def main() -> int:
    print(stage.machine())
    with stage.site() as place, ExitStack() as stack:
        stage.django(place)
        from tests.jobs.reporting import attempt_of, job_of

        attempt = attempt_of(job_of(), secret=SECRET).pk
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vigil-outage-")))
        port = stage.free_port()
        attempt_dir = run_directory(run_dir, attempt, port)
        for rank in range(RANKS):
            _spool(attempt_dir, rank)
        child = stack.enter_context(shipper(run_dir, attempt_dir, place))
        time.sleep(TRYING_S)
        stack.enter_context(place.web(port=port))
        began = time.monotonic()
        largest = 0.0
        while (there := _points(attempt)) < POINTS and time.monotonic() - began < 5 * CATCH_UP_S:
            largest = max(largest, psutil.Process(child.pid).memory_info().rss / 2**20)
            time.sleep(0.05)
        seconds = time.monotonic() - began
        _check(attempt)
    print(f"{POINTS:,} points of {OUTAGE_S // 60} minutes, {RANKS} ranks × {len(SERIES)} series")
    print(f"  there {seconds:.1f} s after the portal was, {there / seconds:,.0f} points a second")
    bars = {
        "caught_up": stage.bar("caught up", seconds, CATCH_UP_S, at_least=False, unit=" s", has_timers=True),
        "shipper": stage.bar("memory of the shipper", largest, SHIPPER_MIB, at_least=False, unit=" MiB"),
    }
    return stage.result("outage", bars=bars, seconds=seconds, points_per_second=there / seconds, shipper_mib=largest)


def _spool(attempt_dir: Path, rank: int) -> None:
    from training.reporting.reporter import Reporter

    reporter = Reporter(
        attempt_dir, rank=rank, incarnation=0, node="here", flush_seconds=1e9, flush_steps=STEPS_PER_SECOND
    )
    for step in range(1, OUTAGE_S * STEPS_PER_SECOND + 1):
        reporter.log(step, **dict.fromkeys(SERIES, step + rank / 10))
    reporter.close()


def _points(attempt: int) -> int:
    from django.db.models import Sum

    from portal.models import Chunk

    found: int | None = Chunk.objects.filter(series__owner_id=attempt).aggregate(n=Sum("n"))["n"]
    return found or 0


def _check(attempt: int) -> None:
    """Check that each step of each rank and series is there once, with its own value."""
    from jobs.intake.reports import owner_of
    from portal.series import read

    if _points(attempt) != POINTS:
        raise SystemExit(f"{_points(attempt):,} points are there, not {POINTS:,}")
    steps = OUTAGE_S * STEPS_PER_SECOND
    for rank in range(RANKS):
        for name in SERIES:
            curve = read.curve([owner_of(attempt)], name, rank=rank, points=None)
            assert curve.value is not None
            wrong = curve.value != curve.step + rank / 10
            if curve.step.tolist() != list(range(1, steps + 1)) or wrong.any():
                raise SystemExit(f"rank {rank}, {name}: not each step once with its value")


if __name__ == "__main__":
    sys.exit(main())
