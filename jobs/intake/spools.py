"""Store what trainers left in their spools and never posted, as after an outage or the end of a node."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from django.db import DatabaseError, DataError

from jobs.disk import rundir
from jobs.intake import reports, wire
from jobs.models import Attempt, Stream
from portal.http.posts import Malformed
from training.reporting import spool

logger = logging.getLogger(__name__)

_BATCHES_PER_READ = (
    64  # batches stored at once; a batch has at most POINTS_PER_BATCH of training.reporting.lines points
)


def collect(
    attempt: Attempt,
    root: Path,
    *,
    until: float = math.inf,
    streams: Callable[[int], Iterable[str]] = spool.spool_names,
) -> int:
    """Store what was never posted from an attempt's spools in run directory `root`; return how many batches.

    Stops at `until` (monotonic seconds); the next call continues from the cursors. `streams` yields the names of those
    in an open spool folder that may have grown, each when the one before has been read.
    """
    taken = 0
    if not attempt.directory:
        return taken
    try:
        with rundir.folder_under(root, f"job/{attempt.directory}/spool") as folder:
            for name in islice(streams(folder), reports.STREAMS):
                if time.monotonic() >= until:
                    break
                try:
                    taken += _collect_stream(attempt.pk, spool.Spool(folder, name), until)
                except (Malformed, OSError, DataError) as error:
                    logger.warning("%s: the spool %s cannot be stored: %s", attempt, name, error)
                except (reports.AttemptClosed, DatabaseError):
                    raise
                except Exception:  # whatever a job wrote into one spool, the others are still read
                    logger.exception("%s: the spool %s cannot be stored", attempt, name)
    except (FileNotFoundError, rundir.UnsafePath) as error:
        logger.warning("%s: its spools cannot be listed: %s", attempt, error)
    except reports.AttemptClosed:
        pass
    return taken


def _collect_stream(attempt_id: int, stream: spool.Spool, until: float) -> int:
    """Post the rest of a stream, as its shipper would have; no more at once than a post may hold."""
    stream.read(0)
    if stream.header is None:
        return 0
    row = Stream.objects.filter(attempt_id=attempt_id, uid=stream.stream).first()
    cursor, ended = (row.next_seq, row.ended) if row is not None else (0, False)
    near = spool.SpoolPosition(row.place_seq, row.place_segment, row.place_offset) if row and row.place_offset else None
    first = cursor
    while not ended and time.monotonic() < until:
        stream.seek(cursor, hint=near, until=until)
        if stream.next_seq < cursor:
            break  # no time to count further, or the file has lost its end
        batches = stream.read(_BATCHES_PER_READ)
        if not batches and not stream.has_ended:
            break  # more may come
        post = wire.post_from_spool(stream.header, batches, end=stream.has_ended)
        post.streams[0].first = cursor
        answer = reports.ingest(attempt_id, post)
        ended = stream.has_ended and answer.streams[stream.stream] >= stream.next_seq
        if answer.streams[stream.stream] <= cursor and batches:
            break  # a shipper was quicker: the next call sees what is left
        cursor = answer.streams[stream.stream]
    if (place := stream.position) is not None and not ended and place.seq > (near.seq if near else 0):
        where = {"place_seq": place.seq, "place_segment": place.segment, "place_offset": place.offset}
        Stream.objects.filter(attempt_id=attempt_id, uid=stream.stream).update(**where)
    return cursor - first
