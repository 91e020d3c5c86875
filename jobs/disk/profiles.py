"""Request profiles from a rank through the run directory, and read the untrusted files that it writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.disk import rundir
from jobs.disk.folders import find_folder, root_of
from jobs.errors import ProfileError
from jobs.models import Attempt

REQUEST, FOLDER = "profile.json", "profiles"  # as training.metrics.profiling has them
NAME = re.compile(r"step-\d{1,16}-\d{1,16}\.rank\d{1,9}\.[a-z0-9]{1,32}\.json\.gz\Z")
PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class ProfileDownload:
    """A whole trace: a file name, and its bytes piece by piece."""

    name: str
    pieces: Iterator[bytes]


def request_profile(attempt: Attempt, *, number: str, rank: int, steps: int) -> None:
    """Write the request for a profile.

    The rank reads it at a step boundary within about a second. Of several requests only the last counts.
    """
    root, folder = root_of(attempt), find_folder(attempt)
    if root is None or not folder:
        raise ProfileError(f"Attempt {attempt.number} has not started: there is nothing to profile yet.")
    request = {"id": number, "directory": folder, "rank": rank, "steps": steps}
    rundir.write(root / "portal" / REQUEST, json.dumps(request))


def download(attempt: Attempt, name: str) -> ProfileDownload:
    """Return a trace as its rank wrote it. Raises ProfileError if there is none of that name."""
    root, folder = root_of(attempt), find_folder(attempt)
    if root is None or not folder or not NAME.match(name):
        raise ProfileError(f"Attempt {attempt.number} has no profile {name[:120]}.")
    relative = f"job/{folder}/{FOLDER}/{name}"
    try:
        os.close(rundir.open_under(root, relative))  # fail now, before the response has begun
    except OSError:
        raise ProfileError(f"{name} of attempt {attempt.number} is no longer on disk.") from None
    return ProfileDownload(f"job-{attempt.job_id}.{attempt.number}-{name}", _pieces(root, relative))


def _pieces(root: Path, relative: str) -> Iterator[bytes]:
    """Yield the file in pieces, up to its size when it was opened."""
    with os.fdopen(rundir.open_under(root, relative), "rb", buffering=0) as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0 and (piece := file.read(min(PIECE_BYTES, left))):
            left -= len(piece)
            yield piece
