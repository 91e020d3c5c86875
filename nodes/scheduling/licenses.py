"""Count licenses as Slurm does: how many a job requests, and how many are free. Pure, like capacity.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nodes.schedulers.cluster import LicenseInfo, QueuedJobInfo
from nodes.scheduling.capacity import ClusterCapacity, Request

_ITEM = re.compile(r"([^:|()\s]+)(?::([0-9]{1,9}))?\Z")


@dataclass(frozen=True)
class Demand:
    """The demand for one license; `license` is None if the scheduler has none of that name."""

    name: str
    requested: int
    license: LicenseInfo | None
    free: int  # for this request

    @property
    def is_short(self) -> bool:
        return self.requested > self.free

    @property
    def is_more_than_all(self) -> bool:
        return self.license is None or self.requested > self.license.total


def counts(text: str) -> dict[str, int]:
    """Return how many of each license "matlab:2,abaqus" requests; nothing for a list with alternatives ("a:1|b:1")."""
    found: dict[str, int] = {}
    for item in text.split(",") if text else ():
        match = _ITEM.match(item)
        if match is None:
            return {}
        found[match[1]] = found.get(match[1], 0) + int(match[2] or 1)
    return found


def demands(request: Request, cluster: ClusterCapacity) -> Iterator[Demand]:
    """Yield each license of the request; none where the scheduler has not listed any."""
    there = {license.name: license for license in cluster.licenses}
    for name, requested in counts(request.licenses).items() if there else ():
        license = there.get(name)
        yield Demand(name, requested, license, _free(license, request) if license else 0)


def are_taken(request: Request, cluster: ClusterCapacity, ahead: Iterable[QueuedJobInfo]) -> bool:
    """Return whether too few of a license are left after the jobs ahead have taken theirs."""
    if not request.licenses:
        return False
    taken: Counter[str] = Counter()
    for job in ahead:
        taken.update({name: many * job.tasks for name, many in counts(job.licenses).items()})
    return any(demand.requested > demand.free - taken[demand.name] for demand in demands(request, cluster))


def _free(license: LicenseInfo, request: Request) -> int:
    """Return how many the request may use: licenses of a reservation are only for jobs inside it."""
    reserved = 0 if request.reservation else license.reserved
    return max(0, license.total - license.used - reserved)
