"""Report how fresh the data is on the pages of nodes and of the queue."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from nodes.cluster import sync
from nodes.models import Reading
from vigil_core import formatting

LATE_AFTER = timedelta(seconds=90)  # a part is read at least every minute
SILENT = timedelta(seconds=10)
"""Nodes are polled every 5 s, so a hanging Slurm is noticed long before its call times out. With a page's refresh of
another 5 s, the page shows it within 15 s."""
# These parts have no page of their own: what could not be read of them is shown with the nodes, or the queue.
PARTS_SHOWN_WITH = {
    Reading.Part.NODES: (Reading.Part.NODES, Reading.Part.PARTITIONS, Reading.Part.RESERVATIONS),
    Reading.Part.QUEUE: (Reading.Part.QUEUE, Reading.Part.LICENSES),
}


def scheduler_name() -> str:
    return sync.capabilities().label


def stale_text(part: Reading.Part, now: datetime) -> str:
    """Return what is wrong with the data of a page that shows this part; "" while it is fresh and complete."""
    readings = sync.readings()
    unread = (readings[shown].unreadable_text for shown in PARTS_SHOWN_WITH.get(part, (part,)))
    return " ".join(filter(None, (_silence(readings[part], now) or _pause(readings.values(), now), *unread)))


def _pause(readings: Iterable[Reading], now: datetime) -> str:
    """Report that Slurm has not answered for too long, though no call has failed yet; "" while it answers."""
    last_read_at = max((reading.read_at for reading in readings if reading.read_at), default=None)
    if not sync.capabilities().is_remote or last_read_at is None or now - last_read_at <= SILENT:
        return ""
    seconds = formatting.rough((now - last_read_at).total_seconds())
    shown = f"showing its answer from {formatting.clock(last_read_at, now)}."
    return f"{scheduler_name()} has not answered for {seconds}; {shown}"


def _silence(reading: Reading, now: datetime) -> str:
    if reading.read_at is None:
        return f"{scheduler_name()} does not answer. {_with_full_stop(reading.error)}" if reading.error else ""
    shown = f"showing its answer from {formatting.clock(reading.read_at, now)}."
    silent = formatting.rough((now - reading.read_at).total_seconds())
    if reading.error:
        return f"{scheduler_name()} has not answered for {silent}; {shown} {_with_full_stop(reading.error)}"
    if now - reading.read_at > LATE_AFTER:
        return f"{scheduler_name()} was last polled {silent} ago; {shown} Is Vigil’s worker running?"
    return ""


def _with_full_stop(text: str) -> str:
    return text if not text or text[-1] in ".!?…" else f"{text}."
