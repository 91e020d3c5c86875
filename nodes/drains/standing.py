"""Judge whether the reason of a drain is still true, from what agents and the scheduler report since. No Django."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from nodes.drains.reasons import DrainCause, DrainHolder, DrainReason
from vigil_core import formatting


class ReasonStanding(StrEnum):
    """Whether a reason is still true."""

    STANDS = "stands"
    OVER = "over"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class NodeSince:
    """What is known about a node since it was drained. None: nobody reports it."""

    since: datetime | None
    has_jobs: bool
    completing_jobs: tuple[str, ...] = ()
    is_reachable: bool | None = None
    """Whether the scheduler reaches the node."""
    agent_reports: bool = False
    booted_at: datetime | None = None
    driver_reloaded_at: datetime | None = None
    driver: str = ""
    replaced_gpus: tuple[int, ...] = ()
    """Slots in which there is another GPU than before."""
    gpus_found: int | None = None
    gpus_expected: int = 0
    memory_mib: float | None = None
    memory_expected_mib: int = 0
    blocked_processes: float | None = None
    stray_processes: int | None = None
    """Processes on GPUs that no job has."""
    open_findings: int = 0
    cleared_findings: int = 0
    is_window_open: bool | None = None
    """Whether the maintenance window is not over yet, for a drain by one."""


@dataclass(frozen=True)
class ReasonJudgement:
    """Whether the reason still stands, with the facts that speak for and against it."""

    standing: ReasonStanding
    facts: tuple[str, ...]


def judge(reason: DrainReason, node: NodeSince) -> ReasonJudgement:
    """Return whether the reason is still true, and the facts."""
    return ReasonJudgement(_standing(reason, node), tuple(_facts(reason, node)))


def _standing(reason: DrainReason, node: NodeSince) -> ReasonStanding:
    if reason.holder == DrainHolder.RULE:
        if node.open_findings:
            return ReasonStanding.STANDS
        return ReasonStanding.OVER if node.cleared_findings else ReasonStanding.UNKNOWN
    if reason.holder == DrainHolder.MAINTENANCE:
        return ReasonStanding.STANDS if node.open_findings else _known(node.is_window_open)
    if reason.holder == DrainHolder.SPARE:
        return ReasonStanding.STANDS
    return _of_cause(reason.cause, node)


def _of_cause(cause: DrainCause, node: NodeSince) -> ReasonStanding:
    match cause:
        case DrainCause.KILL_FAILED:
            return _known(_process_remains(node))
        case DrainCause.NOT_RESPONDING | DrainCause.POWER:
            return _known(None if node.is_reachable is None else not node.is_reachable)
        case DrainCause.REBOOTED:
            return _known(False if node.is_reachable or node.agent_reports else None)
        case DrainCause.FEWER_GPUS:
            return _known(None if node.gpus_found is None else node.gpus_found < node.gpus_expected)
        case DrainCause.LESS_MEMORY:
            # slurmd counts whole MiB of MemTotal, as the agent does.
            return _known(None if not node.memory_mib else node.memory_mib < node.memory_expected_mib)
        case _:
            return ReasonStanding.UNKNOWN


def _process_remains(node: NodeSince) -> bool | None:
    """Return whether the process that could not be killed is still there; None where nobody reports it."""
    if _rebooted(node):
        return False
    if node.completing_jobs:
        return True
    if not node.agent_reports or node.blocked_processes is None or node.stray_processes is None:
        return None
    return bool(node.blocked_processes or node.stray_processes)


def _facts(reason: DrainReason, node: NodeSince) -> Iterator[str]:
    if node.open_findings:
        yield f"{formatting.plural(node.open_findings, 'finding')} open"
    elif node.cleared_findings:
        yield "its findings are cleared"
    if _rebooted(node) and node.booted_at is not None:
        yield f"rebooted since ({formatting.clock(node.booted_at)})"
    if node.replaced_gpus:
        slots = formatting.listed([str(slot) for slot in node.replaced_gpus])
        yield f"GPU {slots} was replaced" if len(node.replaced_gpus) == 1 else f"GPUs {slots} were replaced"
    if node.driver_reloaded_at is not None:
        version = f", now {node.driver}" if node.driver else ""
        yield f"NVIDIA driver reloaded ({formatting.clock(node.driver_reloaded_at)}{version})"
    if node.gpus_found is not None and node.gpus_expected and node.gpus_found < node.gpus_expected:
        yield f"{node.gpus_found} of {node.gpus_expected} GPUs are there"
    elif reason.cause == DrainCause.FEWER_GPUS and node.gpus_found is not None:
        yield f"all {node.gpus_expected} GPUs are there"
    if reason.cause == DrainCause.KILL_FAILED:
        yield from _process_facts(node)
    if reason.cause in (DrainCause.NOT_RESPONDING, DrainCause.POWER, DrainCause.REBOOTED):
        yield from _reach_facts(node)


def _process_facts(node: NodeSince) -> Iterator[str]:
    if node.completing_jobs:
        jobs = formatting.listed(list(node.completing_jobs[:3]))
        yield f"job {jobs} is still completing" if len(node.completing_jobs) == 1 else f"jobs {jobs} are completing"
    remains = _process_remains(node)
    if remains is False and not _rebooted(node):
        yield "no process is blocked or left on a GPU"
    elif node.blocked_processes:
        yield f"{formatting.plural(round(node.blocked_processes), 'process', 'processes')} blocked (state D)"
    elif node.stray_processes:
        yield f"{formatting.plural(node.stray_processes, 'process', 'processes')} left on GPUs"
    elif remains is None and not node.agent_reports:
        yield "no agent reports its processes"


def _reach_facts(node: NodeSince) -> Iterator[str]:
    if node.is_reachable is False and node.agent_reports:
        yield "the machine is up: its agent reports. Check slurmd"
    elif node.is_reachable:
        yield "it responds again"


def _rebooted(node: NodeSince) -> bool:
    return node.booted_at is not None and node.since is not None and node.booted_at > node.since


def _known(stands: bool | None) -> ReasonStanding:
    if stands is None:
        return ReasonStanding.UNKNOWN
    return ReasonStanding.STANDS if stands else ReasonStanding.OVER
