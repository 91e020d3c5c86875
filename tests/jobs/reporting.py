"""Create posts as a shipper would send them, and read what was stored of them."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.test import Client

from jobs.intake import checkpoint_events, wire
from jobs.models import Attempt, Event, Job, Stream
from portal.models import Chunk, Project, User, digest
from portal.series import codec

SECRET = "the attempt's own token"
WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def attempt_of(job: Job | None = None, *, number: int = 1, secret: str = SECRET, **fields: Any) -> Attempt:
    """Return a running attempt that accepts reports with `secret`."""
    job = job or job_of()
    fields = {"state": "running", "token_digest": digest(secret)} | fields
    attempt = Attempt.objects.create(job=job, number=number, **fields)
    Job.objects.filter(pk=job.pk).update(latest=attempt)
    return attempt


def job_of(username: str = "ada", project: str = "default") -> Job:
    owner, _ = User.objects.get_or_create(username=username)
    where, _ = Project.objects.get_or_create(slug=project)
    return Job.objects.create(project=where, owner=owner, name="a job", kind="distributed", spec={}, spec_toml="")


@dataclass
class Batch:
    time: float = 1_000.0
    series: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Spooled:
    """The stream of a rank with all its batches, from which posts are cut."""

    rank: int = 0
    incarnation: int = 0
    uid: str = ""
    batches: list[Batch] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.uid = self.uid or f"{self.incarnation:04x}{self.rank & 0xFFFFFFFF:08x}{0:04x}"

    def log(self, step: int, time: float = 1_000.0, **values: float) -> Spooled:
        """Add a batch with one step."""
        self.batches.append(Batch(time, {name: [(step, value)] for name, value in values.items()}))
        return self

    def add_event(self, kind: str, time: float = 1_000.0, **data: Any) -> Spooled:
        """Add a batch with one event."""
        self.batches.append(Batch(time, {}, [{"kind": kind, "time": time, **data}]))
        return self


def frame(*cuts: Spooled | tuple[Spooled, int, int]) -> dict[str, Any]:
    """Return the body of a post of whole streams, or of (stream, first, stop) cuts of them."""
    streams: list[dict[str, Any]] = []
    series: dict[str, dict[str, list[Any]]] = {}
    events: list[dict[str, Any]] = []
    for cut in cuts:
        spooled, first, stop = cut if isinstance(cut, tuple) else (cut, 0, len(cut.batches))
        part = spooled.batches[first:stop]
        for i, batch in enumerate(part):
            for name, points in batch.series.items():
                columns = series.setdefault(name, {"runs": [], "step": [], "value": []})
                columns["runs"].append([len(streams), i, len(points)])
                columns["step"] += [step for step, _ in points]
                columns["value"] += [WORDS.get(str(value), value) for _, value in points]
            events += [{"stream": len(streams), "batch": i, **event} for event in batch.events]
        streams.append(
            {
                "id": spooled.uid,
                "incarnation": spooled.incarnation,
                "rank": spooled.rank,
                "node": "node-1",
                "boot_id": "b",
                "restart_count": 0,
                "first": first,
                "times": [batch.time for batch in part],
                "end": spooled.ended and first + len(part) == len(spooled.batches),
            }
        )
    return {"version": 1, "streams": streams, "series": series, "events": events}


def post(*cuts: Spooled | tuple[Spooled, int, int]) -> wire.ReportPost:
    return wire.parse(json.dumps(frame(*cuts)).encode())


def packed(body: dict[str, Any] | bytes) -> bytes:
    return gzip.compress(body if isinstance(body, bytes) else json.dumps(body).encode())


def send(attempt: Attempt, body: Any, *, secret: str = SECRET, encoding: str = "gzip") -> Any:
    """Post over HTTP and return the response."""
    data = body if isinstance(body, bytes) else packed(body)
    headers = {"Authorization": f"Bearer {secret}"} | ({"Content-Encoding": encoding} if encoding else {})
    return Client().post(
        f"/api/v1/attempts/{attempt.pk}/reports", data, content_type="application/json", headers=headers
    )


def stored(attempt: Attempt) -> dict[tuple[str, int, int, int], list[float]]:
    """Return every value in the database by identity; a list of more than one value is a point stored twice."""
    found: dict[tuple[str, int, int, int], list[float]] = {}
    rows = Chunk.objects.filter(series__owner_id=attempt.pk, series__column="", kind=Chunk.Kind.LOOSE)
    for name, incarnation, data in rows.order_by("id").values_list("series__name", "incarnation", "data"):
        for rank, points in codec.decode_loose(bytes(data)):
            for step, value in zip(points.step.tolist(), points.value.tolist(), strict=True):
                found.setdefault((name, incarnation, rank, step), []).append(value)
    return found


def world(attempt: Attempt) -> tuple[Any, ...]:
    """Return everything that an intake may change."""
    attempt.refresh_from_db()
    row = {k: v for k, v in vars(attempt).items() if not k.startswith("_")}
    streams = list(Stream.objects.order_by("id").values())
    return row, streams, list(Event.objects.order_by("id").values()), list(Chunk.objects.order_by("id").values())


def note_checkpoints(attempt: Attempt, *events: dict[str, Any]) -> None:
    """Apply events about checkpoints like the intake, without a post."""
    with transaction.atomic():
        checkpoint_events.apply(attempt, events)
