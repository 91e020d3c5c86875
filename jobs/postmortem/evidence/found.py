"""What has been gathered of one incident so far, and how a source adds to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.disk import folders, rundir
from jobs.disk.logs import LogFile
from jobs.models import Incident
from jobs.postmortem import rank_ends
from jobs.postmortem.offline import Read
from jobs.postmortem.prefixes import Prefix
from jobs.postmortem.rank_ends import End
from jobs.postmortem.sign import Sign
from jobs.postmortem.signatures import Catalogue

MOST_FILES = 2_048  # of one incarnation


@dataclass(slots=True)
class Evidence:
    """Everything that was gathered of one incident."""

    incarnation: int = 0
    """The one that failed: the last, where the attempt ended by it."""
    logs: list[LogFile] = field(default_factory=list)
    read: Read = field(default_factory=Read)
    ends: list[End] = field(default_factory=list)
    signs: list[Sign] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    not_seen: list[str] = field(default_factory=list)

    def node_of(self, rank: int | None) -> str:
        """Where a rank ran, by its launcher's file and the scheduler's order of nodes; never by its own word."""
        return next((end.node for end in self.ends if end.rank == rank), "")

    @property
    def ended_at(self) -> dict[int, float]:
        """When ranks ended by themselves, and not well."""
        return {end.rank: end.at for end in rank_ends.failures(self.ends) if end.at is not None}


Source = Callable[[Incident, Catalogue, Evidence], None]


@dataclass(frozen=True, slots=True)
class Written:
    """The attempt's folder, as its job left it: everything in it is read without trust."""

    root: Path
    name: str

    def names(self, part: str) -> list[str]:
        return rundir.names_under(self.root, f"job/{self.name}/{part}")

    def table(self, name: str, *, limit: int = 1 << 20) -> dict[str, Any] | None:
        """A JSON object, or None where there is none that can be read."""
        return rundir.read_json_under(self.root, f"job/{self.name}/{name}", limit=limit)

    def of_nodes(self, part: str, incarnation: int, *, limit: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """What each launcher left of an incarnation, `<incarnation>.<node>.json`, by the node's number."""
        files = [found for name in self.names(part) if (found := rank_ends.FILE.match(name))]
        mine = [found for found in files if int(found["incarnation"]) == incarnation]
        for found in mine[:MOST_FILES]:
            told = self.table(f"{part}/{found[0]}", limit=limit)
            if told is not None:
                yield int(found["node"]), told


def written(incident: Incident) -> Written | None:
    """None while the run directory is away, or where the attempt has none."""
    attempt = incident.attempt
    if attempt.job.is_attached or folders.is_away(attempt):
        return None
    root, folder = folders.root_of(attempt), folders.find_folder(attempt)
    return Written(root, folder) if root is not None and folder else None


def context(file: str, text: str, *, cause: str = "unknown", node: str = "", at: float | None = None) -> Sign:
    """Something worth knowing, which is no reason for anything by itself."""
    prefix = Prefix(node=node, stamp=at, is_dated=at is not None)
    return Sign(file, 0, text[:1000], cause, "context", prefix, of="context")


def some(names: Iterable[str], most: int = 8) -> str:
    """The first few, and how many more there are."""
    everybody = list(names)
    more = f" and {len(everybody) - most:,} more" if len(everybody) > most else ""
    return ", ".join(everybody[:most]) + more
