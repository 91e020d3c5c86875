"""Count what this process has done, for /metrics: an addition under a lock. Imports no Django."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from vigil_core.exposition import Family

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "vigil_http_requests_total": (("method", "status"), "Requests answered, by class of status."),
    "vigil_http_request_seconds_total": (("method", "status"), "Seconds from a request's arrival to its answer's end."),
    "vigil_intake_posts_total": (("kind", "outcome"), "Posts of launchers and agents: taken, refused or failed."),
    "vigil_intake_batches_total": (("kind",), "Batches in posts that brought something new."),
    "vigil_intake_values_total": (("kind",), "Points of series and samples in those."),
}
_lock = threading.Lock()
_counts: dict[str, dict[tuple[str, ...], float]] = {name: defaultdict(float) for name in _FAMILIES}


def add(name: str, *labels: str, by: float = 1) -> None:
    with _lock:
        _counts[name][labels] += by


def count_request(method: str, status: int, seconds: float) -> None:
    """Count a request that was answered."""
    labels = (method if method in METHODS else "other", f"{status // 100}xx")
    with _lock:
        _counts["vigil_http_requests_total"][labels] += 1
        _counts["vigil_http_request_seconds_total"][labels] += seconds


@contextmanager
def count_post(kind: str) -> Iterator[None]:
    """Count the result of a post; an exception with a status below 500 counts as refused."""
    try:
        yield
    except Exception as error:
        refused = getattr(error, "status", 500) < 500
        add("vigil_intake_posts_total", kind, "refused" if refused else "failed")
        raise
    add("vigil_intake_posts_total", kind, "taken")


def count_batches(kind: str, batches: int, values: int) -> None:
    """Count a post that brought something new."""
    with _lock:
        _counts["vigil_intake_batches_total"][(kind,)] += batches
        _counts["vigil_intake_values_total"][(kind,)] += values


def families(process: str) -> Iterator[Family]:
    """Yield all counters; the label `process` distinguishes processes."""
    with _lock:
        counts = {name: list(found.items()) for name, found in _counts.items()}
    for name, (labels, description) in _FAMILIES.items():
        samples = [((process, *values), value) for values, value in sorted(counts[name])]
        yield Family(name, "counter", description, ("process", *labels), samples)
