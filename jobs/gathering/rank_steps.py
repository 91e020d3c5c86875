"""Query the last step that each rank of an incarnation reported, and the node that it ran on."""

from __future__ import annotations

from django.db import connection

from jobs.intake.reports import owner_of
from jobs.models import Attempt, Stream
from portal.models import Chunk
from portal.series import store
from portal.series.codec import decode_loose

SERIES = ("step_seconds", "loss")  # the first is measured by each rank
MAX_LOOSE = 64  # newest chunks, not merged yet
# The end of each rank's range of the index; a GROUP BY would read all rows of a long run.
_MERGED = (
    "SELECT ranks.rank, (SELECT last_step FROM portal_chunk WHERE series_id = %s AND kind = 2 AND rank = ranks.rank"
    " AND incarnation = %s ORDER BY last_step DESC LIMIT 1)"
    " FROM (SELECT DISTINCT rank FROM jobs_stream WHERE attempt_id = %s AND incarnation = %s AND rank >= 0) ranks"
)


def last_steps(attempt: Attempt, incarnation: int) -> dict[int, int]:
    """Return the last step by rank; empty if ranks report no series."""
    ids = store.find(owner_of(attempt.pk), SERIES)
    series_id = next((ids[name] for name in SERIES if name in ids), None)
    if series_id is None:
        return {}
    with connection.cursor() as cursor:
        cursor.execute(_MERGED, [series_id, incarnation, attempt.pk, incarnation])
        steps = {rank: step for rank, step in cursor.fetchall() if step is not None}
    loose = Chunk.objects.filter(series_id=series_id, incarnation=incarnation, kind__lt=Chunk.Kind.MERGED)
    for data in loose.order_by("-last_step").values_list("data", flat=True)[:MAX_LOOSE]:
        for rank, points in decode_loose(bytes(data)):
            if rank >= 0 and len(points):
                steps[rank] = max(steps.get(rank, 0), int(points.step.max()))
    return steps


def nodes(attempt: Attempt, incarnation: int) -> dict[int, str]:
    """Return the node of each rank, as its stream reports; nodes that were never the attempt's are ignored."""
    streams = Stream.objects.filter(attempt=attempt, incarnation=incarnation, rank__gte=0).order_by("rank", "id")
    names = set(attempt.nodes)
    return {rank: node for rank, node in streams.values_list("rank", "node") if node in names or not names}
