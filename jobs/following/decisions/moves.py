"""Choose what follows a failure by its cause: Vigil's own table, and what site, project and job change of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from django.conf import settings

from jobs.errors import SpecError
from jobs.spec import restarts
from jobs.spec.restarts import Move
from portal.models import Project

DEFAULT_MOVES: Mapping[str, Move] = {
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
"""A cause that is not named here would only recur: Vigil stops."""

MOVES_ON_KNOWN_NODE: Mapping[str, Move] = {"network.fabric": "elsewhere", "environment.driver": "elsewhere"}
"""What follows instead if the failed node is known."""


def move_of(code: str, *, node: str, job: Mapping[str, Any], project: Project) -> Move:
    """Return what follows this cause, on this node if it is known. `job`: its specification, as plain values."""
    configured = restarts.lookup(code, (_job_moves(job), project_moves(project), site_moves()))
    if configured is not None:
        return configured
    return MOVES_ON_KNOWN_NODE.get(code, _default(code)) if node else _default(code)


def _default(code: str) -> Move:
    return restarts.lookup(code, [DEFAULT_MOVES]) or "stop"


def overrides(job: Mapping[str, Any], project: Project) -> dict[str, tuple[Move, str]]:
    """Return the changed rows, by cause or kind of causes: the move, and whether job, project or site changed it."""
    by_key: dict[str, tuple[Move, str]] = {}
    for level, on in (
        ("the job", _job_moves(job)),
        ("its project", project_moves(project)),
        ("the site", site_moves()),
    ):
        for key, move in on.items():
            by_key.setdefault(key, (move, level))
    return by_key


def summary() -> list[str]:
    """Return what Vigil does by default after the most common failures, a clause each."""
    return [f"{after}: {restarts.MOVES[_default(code)]}" for after, code in _SUMMARY]


_SUMMARY = (
    ("broken GPU or failed node", "gpu.ecc"),
    ("network or storage fault, hang or unknown failure", "unknown"),
    ("out of memory or time", "memory.gpu_oom"),
    ("divergence", "numerics.divergence"),
    ("corrupt checkpoint", "checkpoint.corrupt"),
)


def site_moves() -> Mapping[str, Move]:
    return _parse(settings.VIGIL_RESTART_ON)


def project_moves(project: Project) -> Mapping[str, Move]:
    return _parse(project.restart_on)


def _job_moves(job: Mapping[str, Any]) -> Mapping[str, Move]:
    on = (job.get("restart") or {}).get("on")
    return on if isinstance(on, dict) else {}


@lru_cache(maxsize=256)
def _parse(text: str) -> Mapping[str, Move]:
    """Parse moves that were valid when they were written. If they are not valid any more, they count as empty."""
    try:
        return restarts.parse_toml(text)
    except SpecError:
        return {}
