"""Publish to sockets: after each commit one binary message per job, and one line for the lists of its project.

A frame is a little-endian uint32, that many bytes of JSON (padded with blanks to a multiple of 8), then columns: for
each entry of the header's `series` the steps (n × f64), then the values (n × f32; a band has four such columns: min,
median, max, worst rank). A message on Redis is a uint32, that many bytes of frame, and what the hub makes bands of:
the points of all ranks but 0 in the same form, or nothing if there are none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from django.db import transaction
from django.db.models import F
from numpy.typing import NDArray

from jobs.models import Attempt, Event
from portal.publish import publish as send
from portal.series.store import NewPoints

POINTS = 8_192  # per message; after an outage there are more, which pages read from the database
EVENTS = 64
BAND = ("min", "median", "max", "worst")
_LENGTH = struct.Struct("<I")
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def job_topic(job_id: int) -> str:
    return f"vigil:job:{job_id}"


def project_topic(project_id: int) -> str:
    return f"vigil:project:{project_id}"


def announce(attempt_id: int) -> None:
    """Announce that something that pages show of an attempt changed: its version rises, sockets get a header.

    Call it after the change, in its transaction or outside of one.
    """
    with transaction.atomic():
        if not Attempt.objects.filter(pk=attempt_id).update(version=F("version") + 1):
            return
        attempt = Attempt.objects.with_job().get(pk=attempt_id)
        transaction.on_commit(lambda: publish(attempt, [], []))


def publish(attempt: Attempt, columns: Sequence[NewPoints], events: Sequence[Event]) -> None:
    """Send the sockets of a job, and the lists of its project, what was just committed."""
    job, about = attempt.job, header(attempt)
    about["events"] = [event_message(event) for event in events[:EVENTS]]
    partial = len(events) > EVENTS or sum(len(fresh.step) for fresh in columns) > POINTS
    if partial:
        about["partial"], columns = True, []  # who sees this reads again
    frame = pack(about, *_values(about, columns))
    message = _LENGTH.pack(len(frame)) + frame + _others(about, columns)
    send({job_topic(job.pk): message, project_topic(job.project_id): msgspec.json.encode(line(attempt))})


def header(attempt: Attempt) -> dict[str, Any]:
    """Return the fields that every frame begins with."""
    return {
        "attempt": attempt.pk,
        "number": attempt.number,
        "version": attempt.version,
        "state": attempt.state,
        "step": attempt.step,
        "steps": attempt.steps,
        "phase": attempt.phase,
        "incarnation": attempt.incarnation,
    }


def line(attempt: Attempt) -> dict[str, Any]:
    """Return a job's line for lists."""
    return {"job": attempt.job_id, **header(attempt), "latest": attempt.latest}


def event_message(event: Event) -> dict[str, Any]:
    """Return an event as sockets receive it; long texts are cut, and read from the database when needed."""
    data = {key: value[:500] if isinstance(value, str) else value for key, value in event.data.items()}
    about = {"kind": event.kind, "time": event.time.timestamp(), "rank": event.rank, "incarnation": event.incarnation}
    return {**data, **about}


def pack(about: dict[str, Any], *columns: NDArray[Any]) -> bytes:
    """Return a frame: the header, then the columns as they are."""
    text = msgspec.json.encode(about)
    text += b" " * (-(len(text) + _LENGTH.size) % 8)
    return b"".join((_LENGTH.pack(len(text)), text, *(np.ascontiguousarray(column).tobytes() for column in columns)))


def unpack(frame: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return a frame's header, and the bytes of its columns."""
    (length,) = _LENGTH.unpack_from(frame)
    end = _LENGTH.size + length
    return msgspec.json.decode(frame[_LENGTH.size : end]), memoryview(frame)[end:]


def columns_of(about: dict[str, Any], data: memoryview) -> list[dict[str, NDArray[Any]]]:
    """Return the columns of each entry of the header's `series`, by name."""
    series_columns, at = [], 0
    for entry in about.get("series", ()):
        n, columns = entry["n"], {"step": np.frombuffer(data, "<f8", entry["n"], at)}
        at += 8 * n
        for name in BAND if entry.get("kind") == "band" else ("value",):
            columns[name] = np.frombuffer(data, "<f4", n, at)
            at += 4 * n
        series_columns.append(columns)
    return series_columns


def split(message: bytes) -> tuple[bytes, bytes]:
    """Return a message's frame, and its block of all ranks' points."""
    (length,) = _LENGTH.unpack_from(message)
    end = _LENGTH.size + length
    return message[_LENGTH.size : end], message[end:]


def narrow(value: NDArray[Any]) -> NDArray[np.float32]:
    """Convert to float32 for drawing. Finite values stay finite."""
    return np.where(np.isfinite(value), np.clip(value, -_FLOAT32_MAX, _FLOAT32_MAX), value).astype("<f4")


def _values(about: dict[str, Any], columns: Iterable[NewPoints]) -> list[NDArray[Any]]:
    """Return the columns of rank 0 and of the first launcher, and list them in the header."""
    about["series"], arrays = [], []
    for fresh in columns:
        ranks = {run[0] for run in fresh.runs}
        for rank in sorted(ranks & {0, -1}):
            step, value = fresh.step, fresh.value
            if len(ranks) > 1:
                mask = np.repeat([run[0] == rank for run in fresh.runs], [run[2] for run in fresh.runs])
                step, value = step[mask], value[mask]
            about["series"].append(
                {"name": fresh.name, "kind": "value", "rank": rank, "incarnation": fresh.incarnation, "n": len(step)}
            )
            arrays += [step.astype("<f8"), narrow(value)]
    return arrays


def _others(about: dict[str, Any], columns: Sequence[NewPoints]) -> bytes:
    """Return the points of all ranks but 0, which the frame has."""
    entries, flat = [], []
    for fresh in columns:
        ranks, counts = [run[0] for run in fresh.runs], [run[2] for run in fresh.runs]
        wanted = [rank > 0 for rank in ranks]
        if not any(wanted):
            continue
        step, value = fresh.step, fresh.value
        if not all(wanted):
            mask = np.repeat(wanted, counts)
            step, value = step[mask], value[mask]
        runs = [(rank, count) for rank, count in zip(ranks, counts, strict=True) if rank > 0]
        entries.append({"name": fresh.name, "incarnation": fresh.incarnation, "runs": runs, "n": len(step)})
        flat += [step.astype("<f8"), narrow(value)]
    return pack({**about, "series": entries, "events": []}, *flat) if entries else b""
