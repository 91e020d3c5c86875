"""Read which API versions a slurmrestd serves, and choose the one to use."""

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


class UntestedVersion(SchedulerError):
    """slurmrestd serves only API versions that are newer than those Vigil was tested with."""

    def __init__(self, version: Version, problem: str) -> None:
        super().__init__(
            f"This slurmrestd serves only REST {text_of(version)} and later, newer than Vigil supports"
            f" ({text_of(NEWEST)}): {problem}. Let slurmrestd serve {text_of(NEWEST)} as well"
            f" (-d {text_of(NEWEST)}), or upgrade Vigil."
        )


@dataclass(frozen=True)
class ServedApi:
    """The paths that a slurmrestd serves, in the API version that we use."""

    slurm: Version
    slurmdb: Version | None
    paths: frozenset[tuple[str, str]]  # (service/path without version, method)

    @property
    def is_untested(self) -> bool:
        """Return whether the version is newer than any that Vigil was tested with: Vigil then only reads."""
        return self.slurm > NEWEST

    def has(self, path: str, method: str = "get", *, service: Service = "slurm") -> bool:
        return (f"{service}/{path}", method) in self.paths

    def version_of(self, service: Service) -> str:
        version = self.slurm if service == "slurm" else self.slurmdb
        if version is None:
            raise SchedulerError("This slurmrestd serves no accounting (slurmdb). Start it with openapi/slurmdbd.")
        return text_of(version)


def choose_api(document: Json) -> ServedApi:
    """Return the newest supported version that has every path we need; raise SchedulerError if all are too old.

    If it serves only versions newer than NEWEST, return the oldest of those, which is then read-only.
    """
    found: dict[tuple[str, Version], set[tuple[str, str]]] = {}
    for path, methods in mapping(document.get("paths")).items():
        if match := _PATH.match(str(path)):
            service, *digits, rest = match.groups()
            version: Version = (int(digits[0]), int(digits[1]), int(digits[2]))
            paths_of_version = found.setdefault((service, version), set())
            paths_of_version.update((f"{service}/{rest}", method.lower()) for method in mapping(methods))
    versions = sorted({version for service, version in found if service == "slurm"}, reverse=True)
    usable = [v for v in versions if v >= OLDEST and {path[6:] for path, _ in found["slurm", v]} >= NEEDED]
    if not usable:
        served = ", ".join(map(text_of, reversed(versions))) or "no Slurm API"
        raise SchedulerError(
            f"This slurmrestd serves {served}. Vigil needs v0.0.38 or later: Slurm 22.05. Upgrade Slurm.",
            permanent=True,
        )
    slurm = next((version for version in usable if version <= NEWEST), usable[-1])
    accounts = sorted((v for service, v in found if service == "slurmdb" and v >= OLDEST), reverse=True)
    slurmdb = slurm if slurm in accounts else (accounts[0] if accounts else None)
    paths = frozenset(found["slurm", slurm] | (found["slurmdb", slurmdb] if slurmdb else set()))
    return ServedApi(slurm, slurmdb, paths)
