"""Hold what has been collected about one incident so far; each source adds to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from diagnosis.logs.prefixes import Prefix
from diagnosis.offline import ReadLogs
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs import rank_exits
from diagnosis.signs.rank_exits import RankExit
from diagnosis.signs.sign import Sign
from jobs.disk import folders, rundir
from jobs.disk.logs import LogFile
from jobs.models import Incident

NEAR_END = timedelta(minutes=10)  # from an end, within which other events may be related
MAX_COLLECTING_S = 100.0  # for all sources; logs take most of it (diagnosis.logs.files)


@dataclass(slots=True)
class IncidentEvidence:
    """Everything that was collected about one incident."""

    incarnation: int = 0
    """The incarnation that failed; the last one if the attempt ended."""
    until: float = field(default_factory=lambda: time.monotonic() + MAX_COLLECTING_S)
    """When to stop collecting, in monotonic seconds."""
    logs: list[LogFile] = field(default_factory=list)
    read: ReadLogs = field(default_factory=ReadLogs)
    exits: list[RankExit] = field(default_factory=list)
    signs: list[Sign] = field(default_factory=list)
    available: set[str] = field(default_factory=set)
    unavailable: list[str] = field(default_factory=list)

    def node_of(self, rank: int | None) -> str:
        """Return where a rank ran, by its launcher's file and the scheduler's order of nodes.

        The rank's own output is never used.
        """
        return next((end.node for end in self.exits if end.rank == rank), "")

    @property
    def ended_at(self) -> dict[int, float]:
        """Return when ranks failed by themselves, in Unix seconds by rank."""
        return {end.rank: end.at for end in rank_exits.failures(self.exits) if end.at is not None}


Source = Callable[[Incident, Catalogue, IncidentEvidence], None]


@dataclass(frozen=True, slots=True)
class JobFolder:
    """An attempt's folder as its job left it; nothing in it is trusted."""

    root: Path
    name: str
    nodes: list[str]

    def names(self, part: str) -> list[str]:
        return rundir.names_under(self.root, f"job/{self.name}/{part}")

    def table(self, name: str, *, limit: int = 1 << 20) -> dict[str, Any] | None:
        """Return a JSON object, or None if it cannot be read."""
        return rundir.read_json_under(self.root, f"job/{self.name}/{name}", limit=limit)

    def of_nodes(self, part: str, found: IncidentEvidence, *, limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what each launcher left of an incarnation (`<incarnation>.<node>.json`), with the name of its node.

        The name is the scheduler's; the one that the job itself gives is ignored.
        """
        for number, node in enumerate(self.nodes or [""]):
            if time.monotonic() > found.until:
                found.unavailable.append(f"{part} of {len(self.nodes) - number:,} nodes: no time was left")
                return
            if (document := self.table(f"{part}/{found.incarnation}.{number}.json", limit=limit)) is not None:
                yield node, document


def job_folder(incident: Incident) -> JobFolder | None:
    """Return the attempt's folder; None while the run directory is unavailable, or if the attempt has none."""
    attempt = incident.attempt
    if attempt.job.is_attached or folders.is_unreachable(attempt):
        return None
    root, folder = folders.root_of(attempt), folders.find_folder(attempt)
    return JobFolder(root, folder, attempt.nodes) if root is not None and folder else None


def context(file: str, text: str, *, cause: str = "unknown", node: str = "", at: float | None = None) -> Sign:
    """Return a sign that is worth knowing and never a cause."""
    prefix = Prefix(node=node, stamp=at, is_dated=at is not None)
    return Sign(file, 0, text[:1000], cause=cause, role="context", prefix=prefix, source_kind="context")


def first_few(names: Iterable[str], most: int = 8) -> str:
    """Return the first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
