"""Check that every process that the site needs reports: web, beat, and a worker for each queue."""

from __future__ import annotations

from collections.abc import Iterator

from django.conf import settings

from console.health import heartbeats
from console.health.finding import Finding
from console.health.heartbeats import Process
from vigil_core import formatting

NAMES = {"web": "The web process", "beat": "Beat"}
CONSEQUENCES = {
    "web": "pages and reports are not answered",
    "follow": "jobs are neither started nor followed",
    "work": "checkpoints are not verified, and curves are not merged",
    "diagnose": "failures are not diagnosed, and notifications are not sent",
    "tail": "reports are not read from the run directories",
    "pull": "dcgm-exporters are not queried",
    "beat": "no scheduled task runs",
}


def required() -> list[str]:
    """Return the roles of which at least one process must run."""
    roles = ["web", "follow", "work", "diagnose"]
    if settings.VIGIL_REPORTS == "tail":
        roles.append("tail")
    if settings.VIGIL_DCGM_EXPORTERS:
        roles.append("pull")
    return [*roles, "beat"]


def check() -> Iterator[Finding]:
    found = heartbeats.processes()
    roles = [role for role in required() if role != "beat"]
    silent = [role for role in roles if not _alive(found, role)]
    workers = [role for role in roles if role != "web"]
    for role in silent:
        yield _role_is_silent(role, [process for process in found if process.role == role])
    # Beat is seen only through the tasks that workers take: while no worker works, its state is unknown.
    if not set(workers) <= set(silent) and not _alive(found, "beat"):
        yield _role_is_silent("beat", [process for process in found if process.role == "beat"])
    for process in found:
        if process.is_silent and _alive(found, process.role):
            yield _process_is_silent(process)


def _alive(found: list[Process], role: str) -> bool:
    return any(process.role == role and not process.is_silent for process in found)


def _role_is_silent(role: str, processes: list[Process]) -> Finding:
    name = NAMES.get(role, f"The {role} worker")
    last = min(processes, key=lambda process: process.silent_s, default=None)
    silent = (
        f"has not responded for {formatting.duration(last.silent_s)}" if last else "is not running, or is just starting"
    )
    return Finding(
        "processes",
        role if role in NAMES else f"worker.{role}",
        "error",
        f"{name} {silent}: {CONSEQUENCES[role]}.",
        _last(last) if last and last.pid else "",
        _remedy(role),
    )


def _process_is_silent(process: Process) -> Finding:
    return Finding(
        "processes",
        f"process.{process.role}",
        "warning",
        f"One of several {process.role} processes has not responded for {formatting.duration(process.silent_s)}.",
        _last(process),
        f"{_remedy(process.role)} A process that was removed for good is forgotten after ten minutes.",
    )


def _last(process: Process) -> str:
    doing = f", in {process.task} for {formatting.duration(process.task_seconds)}" if process.task else ""
    return f"Last seen as process {process.pid} on {process.host}{doing}."


def _remedy(role: str) -> str:
    return (
        f"`vigil up` restarts it after {settings.VIGIL_UNRESPONSIVE_SECONDS:g} s; where it is a service of its own,"
        f" restart that. Its log is `$VIGIL_HOME/logs/{role}.log`, or the service's."
    )
