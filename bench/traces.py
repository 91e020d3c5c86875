"""Write what the jobs of a long history left behind: sweeps, streams, events, curves, checkpoints, audit log."""

from __future__ import annotations

from typing import Any

import numpy as np
from django.db import connection, models, transaction

from bench import bulk
from jobs.models import Checkpoint, Event, Stream, Sweep
from portal.models import AuditEntry, Chunk, Series
from portal.series import codec

KINDS: tuple[type[models.Model], ...] = (Sweep, Stream, Event, Checkpoint, Series, Chunk, AuditEntry)
EVERY, JOBS = 200, 50  # of so many jobs in a row, how many are one sweep's
SWEPT = f"i %% {EVERY} < {JOBS} AND i >= {EVERY}"


def write(cursor: Any, jobs: int, block: int) -> None:
    """Write per job a stream, an event and a curve of one merged chunk, for every other job a checkpoint, and for every
    tenth a line of the audit log."""
    created = bulk.time_of("created", connection.vendor)
    points = codec.Points(np.array([1, 2], np.int64), np.array([0.0, 1.0]), np.array([2.5, 2.4]))
    sweep = Sweep(project_id=0, owner_id=0, name="", spec_toml="# " + "x" * 200, axes=[["train.seed", [1, 2]]])
    of_sweep = {"id": f"i / {EVERY}", "project_id": "project", "owner_id": "owner", "name": "name", "key": "'s' || i"}
    chunk = Chunk(
        incarnation=0, kind=Chunk.Kind.MERGED, rank=0, rank_last=0, first_step=1, last_step=2, n=2, stride=1,
        first_time=0.0, last_time=1.0, min=2.4, max=2.5, sum=4.9, odd=0, data=codec.encode_merged(points),
    )  # fmt: skip
    checkpoint = Checkpoint(step=150, name="step-150", generation=1, state="verified", bytes=4096, seconds=0.5)
    of_attempt = {"attempt_id": "i * 2"}
    every_job: list[tuple[models.Model, dict[str, str], str]] = [
        (sweep, of_sweep | {"created_at": created}, f"i %% {EVERY} = 0"),
        (Stream(incarnation=0, rank=0, node="dgx-01", ended=True), of_attempt | {"uid": "'u' || i"}, "1 = 1"),
        (Event(kind="attempt.submitted", data={}), of_attempt | {"time": created}, "1 = 1"),
        (Series(owner_kind="attempt", name="loss"), {"id": "i", "owner_id": "i * 2"}, "1 = 1"),
        (chunk, {"id": "i", "series_id": "i"}, "1 = 1"),
        (checkpoint, of_attempt | {"job_id": "i", "created_at": created}, "i %% 2 = 0"),
        (AuditEntry(action="job.cancel"), {"user_id": "owner", "thing": "'#' || i", "at": created}, "i %% 10 = 0"),
    ]
    for before in range(0, jobs, block):
        with transaction.atomic():
            for like, differs, where in every_job:
                bulk.insert(cursor, like, differs, f"history WHERE i > {before} AND i <= {before + block} AND {where}")
    bulk.count_on(connection, KINDS, jobs + 1)
