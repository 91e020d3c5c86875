"""What has been gathered of one incident so far, and how a source adds to it."""

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

AROUND = timedelta(minutes=10)  # an end, in which something else may have to do with it
MOST_S = 100.0  # of asking all sources; the logs take most of it (diagnosis.logs.files)


@dataclass(slots=True)
class Evidence:
    """Everything that was gathered of one incident."""

    incarnation: int = 0
    """The one that failed: the last, where the attempt ended by it."""
    until: float = field(default_factory=lambda: time.monotonic() + MOST_S)
    """When to leave it at what was seen by then, in monotonic seconds."""
    logs: list[LogFile] = field(default_factory=list)
    read: ReadLogs = field(default_factory=ReadLogs)
    ends: list[RankExit] = field(default_factory=list)
    signs: list[Sign] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    not_seen: list[str] = field(default_factory=list)

    def node_of(self, rank: int | None) -> str:
        """Where a rank ran, by its launcher's file and the scheduler's order of nodes; never by its own word."""
        return next((end.node for end in self.ends if end.rank == rank), "")

    @property
    def ended_at(self) -> dict[int, float]:
        """When ranks ended by themselves, and not well."""
        return {end.rank: end.at for end in rank_exits.failures(self.ends) if end.at is not None}


Source = Callable[[Incident, Catalogue, Evidence], None]


@dataclass(frozen=True, slots=True)
class Written:
    """The attempt's folder, as its job left it: everything in it is read without trust."""

    root: Path
    name: str
    nodes: list[str]

    def names(self, part: str) -> list[str]:
        return rundir.names_under(self.root, f"job/{self.name}/{part}")

    def table(self, name: str, *, limit: int = 1 << 20) -> dict[str, Any] | None:
        """A JSON object, or None where there is none that can be read."""
        return rundir.read_json_under(self.root, f"job/{self.name}/{name}", limit=limit)

    def of_nodes(self, part: str, found: Evidence, *, limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """What each launcher left of an incarnation, `<incarnation>.<node>.json`, by the node as the scheduler has it:
        what the job says of its name does not count.
        """
        for number, node in enumerate(self.nodes or [""]):
            if time.monotonic() > found.until:
                found.not_seen.append(f"{part} of {len(self.nodes) - number:,} nodes: there was no time left")
                return
            if (told := self.table(f"{part}/{found.incarnation}.{number}.json", limit=limit)) is not None:
                yield node, told


def written(incident: Incident) -> Written | None:
    """None while the run directory is away, or where the attempt has none."""
    attempt = incident.attempt
    if attempt.job.is_attached or folders.is_unreachable(attempt):
        return None
    root, folder = folders.root_of(attempt), folders.find_folder(attempt)
    return Written(root, folder, attempt.nodes) if root is not None and folder else None


def context(file: str, text: str, *, cause: str = "unknown", node: str = "", at: float | None = None) -> Sign:
    """Something worth knowing, which is no reason for anything by itself."""
    prefix = Prefix(node=node, stamp=at, is_dated=at is not None)
    return Sign(file, 0, text[:1000], cause, "context", prefix, source_kind="context")


def some(names: Iterable[str], most: int = 8) -> str:
    """The first few, and how many more there are."""
    everybody = list(names)
    more = f" and {len(everybody) - most:,} more" if len(everybody) > most else ""
    return ", ".join(everybody[:most]) + more
