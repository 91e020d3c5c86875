"""What follows a failure, by its cause: Vigil's own table, and what site, project and job change of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from django.conf import settings

from jobs.errors import SpecError
from jobs.spec import restarts
from jobs.spec.restarts import Move
from portal.models import Project

TABLE: Mapping[str, Move] = {
    "gpu.*": "elsewhere",
    "numerics.corruption": "elsewhere",
    "scheduler.node_fail": "elsewhere",
    "scheduler.launch": "elsewhere",
    "network.fabric": "apart",
    "storage.io": "apart",
    "collective.timeout": "apart",
    "rendezvous.failed": "apart",
    "unknown": "apart",
    "scheduler.time_limit": "once-if-saved",
    "memory.*": "once-if-saved",
    "collective.mismatch": "once-if-saved",
    "numerics.divergence": "rewind",
    "checkpoint.corrupt": "before",
    "federated.quorum": "once",
    "scheduler.preempted": "restart",
}
"""Whatever is not named here would only happen again: Vigil stops."""

WHERE_NAMED: Mapping[str, Move] = {"network.fabric": "elsewhere", "environment.driver": "elsewhere"}
"""What follows instead where it is known on which node it was."""


def move_of(code: str, *, node: str, job: Mapping[str, Any], project: Project) -> Move:
    """What follows this cause, on this node if it is known. `job`: its specification, as plain values."""
    asked = restarts.named(code, (_of_job(job), of_project(project), of_site()))
    if asked is not None:
        return asked
    return WHERE_NAMED.get(code, _own(code)) if node else _own(code)


def _own(code: str) -> Move:
    return restarts.named(code, [TABLE]) or "stop"


def changed(job: Mapping[str, Any], project: Project) -> dict[str, tuple[Move, str]]:
    """The rows that somebody has changed, by cause or kind of causes: to what, and whether job, project or site did."""
    found: dict[str, tuple[Move, str]] = {}
    for whose, on in (("the job", _of_job(job)), ("its project", of_project(project)), ("the site", of_site())):
        for key, move in on.items():
            found.setdefault(key, (move, whose))
    return found


def summary() -> list[str]:
    """What Vigil itself does after what people ask about first, a clause each."""
    return [f"{after} {restarts.MOVES[_own(code)]}" for after, code in _ASKED_FIRST]


_ASKED_FIRST = (
    ("after a broken GPU or a lost node it", "gpu.ecc"),
    ("after a fault of network or storage, a hang, or what nothing explains, it", "unknown"),
    ("out of memory or time it", "memory.gpu_oom"),
    ("a run that diverges", "numerics.divergence"),
    ("what cannot read its checkpoint", "checkpoint.corrupt"),
)


def of_site() -> Mapping[str, Move]:
    return _read(settings.VIGIL_RESTART_ON)


def of_project(project: Project) -> Mapping[str, Move]:
    return _read(project.restart_on)


def _of_job(job: Mapping[str, Any]) -> Mapping[str, Move]:
    on = (job.get("restart") or {}).get("on")
    return on if isinstance(on, dict) else {}


@lru_cache(maxsize=256)
def _read(text: str) -> Mapping[str, Move]:
    """What was checked when it was written: should it not hold any more, the table is as if it were not there."""
    try:
        return restarts.parse_toml(text)
    except SpecError:
        return {}
