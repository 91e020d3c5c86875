"""Collect every point of a job, on disk and in the database: exactly-once delivery means that both are equal.

python -m tests.points JOB_ID      prints both as JSON, for a portal of another process (VIGIL_HOME)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.stack import REPOSITORY, Stack

# (attempt's number, incarnation, rank, series, step)
Identity = tuple[int, int, int, str, int]


@dataclass(frozen=True)
class Points:
    """A job's points. `spooled` and `stored` count every identity; `closed`: nothing more is accepted."""

    spooled: Counter[Identity]
    stored: Counter[Identity]
    closed: bool

    def check_exactly_once(self) -> None:
        doubled = [identity for identity, times in self.stored.items() if times > 1]
        assert not doubled, f"stored more than once: {doubled[:5]} and {len(doubled)} in all"
        lost, made_up = self.spooled.keys() - self.stored.keys(), self.stored.keys() - self.spooled.keys()
        assert not lost, f"lost: {sorted(lost)[:5]} and {len(lost)} in all"
        assert not made_up, f"never reported: {sorted(made_up)[:5]} and {len(made_up)} in all"

    def record(self, series: str = "loss", rank: int = 0) -> list[int]:
        """Return the steps of the line of record: for each step the point of the newest attempt and incarnation."""
        return sorted({step for _, _, of, name, step in self.stored if (of, name) == (rank, series)})


def points_of(stack: Stack, job_id: int) -> Points:
    """Return both sides, read by a separate process with that portal's settings."""
    environment = {**stack.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
    command = [sys.executable, "-m", "tests.points", str(job_id)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    counts = [Counter({tuple(identity): times for *identity, times in found[name]}) for name in ("spooled", "stored")]
    return Points(*counts, closed=found["closed"])


def _print(job_id: int) -> None:
    import django

    django.setup()
    from jobs.models import Job

    job = Job.objects.get(pk=job_id)
    counts = {"spooled": _spooled(job), "stored": _stored(job)}
    found = {name: [[*identity, n] for identity, n in count.items()] for name, count in counts.items()}
    closed = not job.attempts.filter(closed_at=None).exists()  # type: ignore[attr-defined]
    print(json.dumps({**found, "closed": closed}))


def _spooled(job: object) -> Counter[Identity]:
    from django.conf import settings

    from jobs.models import Job
    from training.reporting.spool import read_spool

    assert isinstance(job, Job)
    found: Counter[Identity] = Counter()
    for attempt in job.attempts.all():  # type: ignore[attr-defined]
        folder = Path(settings.VIGIL_RUNS) / job.directory / "job" / f"attempt-{attempt.number}" / "spool"
        for path in folder.glob("*.jsonl"):
            header, batches, _ = read_spool(os.fspath(path))
            assert header, path
            for batch in batches:
                for name, points in batch.series.items():
                    for step, _ in points:
                        found[attempt.number, header.incarnation, header.rank, name, step] += 1
    return found


def _stored(job: object) -> Counter[Identity]:
    from jobs.models import Job
    from portal.models import Chunk

    assert isinstance(job, Job)
    found: Counter[Identity] = Counter()
    for attempt in job.attempts.all():  # type: ignore[attr-defined]
        owned = Chunk.objects.filter(series__owner_kind="attempt", series__owner_id=attempt.pk, series__column="")
        for chunk in owned.select_related("series"):
            for rank, steps in _steps_of(chunk):
                found.update((attempt.number, chunk.incarnation, rank, chunk.series.name, step) for step in steps)
    return found


def _steps_of(chunk: object) -> list[tuple[int, list[int]]]:
    from portal.models import Chunk
    from portal.series.codec import decode_loose, decode_merged

    assert isinstance(chunk, Chunk)
    if chunk.kind == Chunk.Kind.MERGED:
        return [(chunk.rank, decode_merged(bytes(chunk.data)).step.tolist())]
    return [(rank, points.step.tolist()) for rank, points in decode_loose(bytes(chunk.data))]


if __name__ == "__main__":
    _print(int(sys.argv[1]))
