"""Read which versions of the REST API a slurmrestd serves, and choose the one to use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.values import mapping
from nodes.schedulers.slurm.versions import NEWEST, OLDEST, Version, text_of

NEEDED = frozenset({"job/submit", "job/{job_id}", "jobs", "nodes", "partitions"})
_PATH = re.compile(r"/(slurm|slurmdb)/v(\d+)\.(\d+)\.(\d+)/(.+?)/?\Z")

Service = Literal["slurm", "slurmdb"]
Json = Mapping[str, Any]


class UnknownVersion(SchedulerError):
    """It serves only versions of the REST API that are newer than what Vigil was tested with."""

    def __init__(self, version: Version, problem: str) -> None:
        super().__init__(
            f"This slurmrestd serves only REST {text_of(version)} and later, which are newer than Vigil knows"
            f" ({text_of(NEWEST)}): {problem}. Let slurmrestd serve {text_of(NEWEST)} as well"
            f" (-d {text_of(NEWEST)}), or upgrade Vigil."
        )


@dataclass(frozen=True)
class Served:
    """The paths that a slurmrestd serves, in the version that we use."""

    slurm: Version
    slurmdb: Version | None
    paths: frozenset[tuple[str, str]]  # (service/path without version, method)

    @property
    def is_unknown(self) -> bool:
        """Return whether the version is newer than any that Vigil was tested with: then nothing is written."""
        return self.slurm > NEWEST

    def has(self, path: str, method: str = "get", *, service: Service = "slurm") -> bool:
        return (f"{service}/{path}", method) in self.paths

    def version_of(self, service: Service) -> str:
        version = self.slurm if service == "slurm" else self.slurmdb
        if version is None:
            raise SchedulerError("This slurmrestd serves no accounts (slurmdb). Start it with openapi/slurmdbd.")
        return text_of(version)


def served_by(document: Json) -> Served:
    """Return the newest known version that has every path we need; SchedulerError if all are too old.

    Where it serves only versions that are newer than NEWEST, it is the oldest of those, which is read-only.
    """
    found: dict[tuple[str, Version], set[tuple[str, str]]] = {}
    for path, methods in mapping(document.get("paths")).items():
        if match := _PATH.match(str(path)):
            service, *digits, rest = match.groups()
            version: Version = (int(digits[0]), int(digits[1]), int(digits[2]))
            known = found.setdefault((service, version), set())
            known.update((f"{service}/{rest}", method.lower()) for method in mapping(methods))
    versions = sorted({version for service, version in found if service == "slurm"}, reverse=True)
    fitting = [v for v in versions if v >= OLDEST and {path[6:] for path, _ in found["slurm", v]} >= NEEDED]
    if not fitting:
        there = ", ".join(map(text_of, reversed(versions))) or "nothing of Slurm's"
        raise SchedulerError(
            f"This slurmrestd serves {there}. Vigil needs v0.0.38 or later: Slurm 22.05. Upgrade Slurm.", permanent=True
        )
    slurm = next((version for version in fitting if version <= NEWEST), fitting[-1])
    accounts = sorted((v for service, v in found if service == "slurmdb" and v >= OLDEST), reverse=True)
    slurmdb = slurm if slurm in accounts else (accounts[0] if accounts else None)
    paths = frozenset(found["slurm", slurm] | (found["slurmdb", slurmdb] if slurmdb else set()))
    return Served(slurm, slurmdb, paths)
