"""The captured environment of an attempt, as plain data, and short texts of its hardware. No Django."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Texts are empty and numbers None where nothing is known."""

    captured_at: datetime | None = None
    node: str = ""
    python: str = ""
    implementation: str = ""
    executable: str = ""
    torch: str = ""
    torch_for: str = ""  # CPU, CUDA 12.8
    packages: dict[str, str] = field(default_factory=dict)
    packages_left_out: int = 0
    os: str = ""
    kernel: str = ""
    machine: str = ""
    cpu: str = ""
    cpus: int | None = None
    memory_gib: float | None = None
    gpus: list[Gpu] = field(default_factory=list)
    driver: str = ""
    cuda: str = ""
    vigil: str = ""
    vigil_commit: str = ""
    vigil_digest: str = ""
    git: str = ""
    ref: str = ""
    commit: str = ""
    dirty: bool = False
    digest: str = ""
    config_hash: str = ""
    variables: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was; "" is nothing."""

    what: str
    before: str
    after: str


@dataclass(frozen=True)
class Ran:
    """An attempt's environment beside that of the newest earlier attempt that has one (`since`, its number)."""

    environment: Captured
    since: int | None = None
    changes: list[Change] = field(default_factory=list)


def gpus_of(environment: Captured) -> str:
    """ "8 × NVIDIA H100 80GB HBM3", each kind once."""
    names = [gpu.name for gpu in environment.gpus]
    kinds = [(names.count(name), name) for name in dict.fromkeys(names)]
    return ", ".join(f"{count} × {name}" if count > 1 else name for count, name in kinds)


def cpu_of(environment: Captured) -> str:
    if environment.cpus is None:
        return environment.cpu
    return f"{environment.cpus} × {environment.cpu or environment.machine or 'CPU'}"
