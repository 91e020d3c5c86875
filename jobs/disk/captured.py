"""The captured environment of an attempt, as plain data, and short texts of its hardware. No Django."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class CapturedGpu:
    name: str
    memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class CapturedEnvironment:
    """A captured environment. Unknown texts are empty, unknown numbers None."""

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
    gpus: list[CapturedGpu] = field(default_factory=list)
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
class EnvironmentChange:
    """A difference between two environments; "" where a side has nothing."""

    what: str
    before: str
    after: str


@dataclass(frozen=True)
class EnvironmentDiff:
    """An attempt's environment, and its changes since the newest earlier attempt that has one (`since`, its number)."""

    environment: CapturedEnvironment
    since: int | None = None
    changes: list[EnvironmentChange] = field(default_factory=list)


def gpus_of(environment: CapturedEnvironment) -> str:
    """Return the GPUs as "8 × NVIDIA H100 80GB HBM3", each type once."""
    names = [gpu.name for gpu in environment.gpus]
    kinds = [(names.count(name), name) for name in dict.fromkeys(names)]
    return ", ".join(f"{count} × {name}" if count > 1 else name for count, name in kinds)


def cpu_of(environment: CapturedEnvironment) -> str:
    if environment.cpus is None:
        return environment.cpu
    return f"{environment.cpus} × {environment.cpu or environment.machine or 'CPU'}"
