"""What the pages of nodes and of the queue share: how fresh they are, in words."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse

from nodes.cluster import sync
from nodes.models import Reading
from portal.access import CLUSTER, can, user_of
from portal.models import User
from vigil_core import formatting

LATE = timedelta(seconds=90)  # a part is read at least every minute
SILENT = timedelta(seconds=10)
"""Nodes are read every 5 s, so a Slurm that hangs is seen long before its call runs out of time. With a page's refresh,
another 5 s, whoever looks reads of it within 15 s."""
# These parts have no page of their own: what could not be read of them is said beside the nodes, or the queue.
SHOWN_WITH = {
    Reading.Part.NODES: (Reading.Part.NODES, Reading.Part.PARTITIONS, Reading.Part.RESERVATIONS),
    Reading.Part.QUEUE: (Reading.Part.QUEUE, Reading.Part.LICENSES),
}


def scheduler_name() -> str:
    return "Slurm" if settings.VIGIL_SCHEDULER == "slurm" else "The scheduler"


def stale(part: Reading.Part, now: datetime) -> str:
    """Return what is wrong with a page that shows this part; "" while it is fresh and whole."""
    readings = sync.readings()
    unread = (readings[shown].unreadable_text for shown in SHOWN_WITH.get(part, (part,)))
    return " ".join(filter(None, (_silence(readings[part], now) or _pause(readings.values(), now), *unread)))


def _pause(readings: Iterable[Reading], now: datetime) -> str:
    """Return that Slurm has answered nothing for too long, though no call has failed yet; "" where it answers."""
    heard_at = max((reading.read_at for reading in readings if reading.read_at), default=None)
    if settings.VIGIL_SCHEDULER != "slurm" or heard_at is None or now - heard_at <= SILENT:
        return ""
    seconds = formatting.rough((now - heard_at).total_seconds())
    said = f"this is what it said at {formatting.clock(heard_at, now)}."
    return f"{scheduler_name()} has not answered for {seconds}; {said}"


def _silence(reading: Reading, now: datetime) -> str:
    if reading.read_at is None:
        return f"{scheduler_name()} does not answer. {_ended(reading.error)}" if reading.error else ""
    said = f"this is what it said at {formatting.clock(reading.read_at, now)}."
    silent = formatting.rough((now - reading.read_at).total_seconds())
    if reading.error:
        return f"{scheduler_name()} has not answered for {silent}; {said} {_ended(reading.error)}"
    if now - reading.read_at > LATE:
        return f"{scheduler_name()} was last asked {silent} ago; {said} Is Vigil’s worker running?"
    return ""


def varied(response: HttpResponse) -> HttpResponse:
    """Page and fragment share an address: no cache must mix them up."""
    response.headers["Vary"] = "HX-Request, HX-Target, Cookie"
    return response


def is_fragment(request: HttpRequest) -> bool:
    """Whether only what is live on the page is asked for."""
    return request.headers.get("HX-Target") == "live"


def _ended(text: str) -> str:
    return text if not text or text[-1] in ".!?…" else f"{text}."


def sysadmin_of(request: HttpRequest, what: str) -> User:
    """Who asks, where they may change the cluster; `what` it is that only sysadmins do."""
    user = user_of(request)
    if not can(user, "change", CLUSTER):
        raise PermissionDenied(f"Only sysadmins {what}. Ask one of them.")
    return user
