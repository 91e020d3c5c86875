"""Judge whether the problem that a node was drained for persists, from later reports of agents and scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from nodes.drains.reasons import DrainCause, DrainHolder, DrainReason
from vigil_core import formatting


class ReasonValidity(StrEnum):
    """Tells whether the problem that a reason names persists."""

    VALID = "stands"
    OUTDATED = "over"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class DrainEvidence:
    """Contains what was reported about a node since it was drained. None: nobody reports it."""

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
    """Tells whether the problem persists, with the facts for and against it."""

    validity: ReasonValidity
    facts: tuple[str, ...]


def judge(reason: DrainReason, evidence: DrainEvidence) -> ReasonJudgement:
    """Return whether the problem persists, and the facts."""
    return ReasonJudgement(_validity(reason, evidence), tuple(_facts(reason, evidence)))


def _validity(reason: DrainReason, evidence: DrainEvidence) -> ReasonValidity:
    if reason.holder == DrainHolder.RULE:
        if evidence.open_findings:
            return ReasonValidity.VALID
        return ReasonValidity.OUTDATED if evidence.cleared_findings else ReasonValidity.UNKNOWN
    if reason.holder == DrainHolder.MAINTENANCE:
        return ReasonValidity.VALID if evidence.open_findings else _validity_if(evidence.is_window_open)
    if reason.holder == DrainHolder.SPARE:
        return ReasonValidity.VALID
    return _of_cause(reason.cause, evidence)


def _of_cause(cause: DrainCause, evidence: DrainEvidence) -> ReasonValidity:
    match cause:
        case DrainCause.KILL_FAILED:
            return _validity_if(_process_remains(evidence))
        case DrainCause.NOT_RESPONDING | DrainCause.POWER:
            return _validity_if(None if evidence.is_reachable is None else not evidence.is_reachable)
        case DrainCause.REBOOTED:
            return _validity_if(False if evidence.is_reachable or evidence.agent_reports else None)
        case DrainCause.FEWER_GPUS:
            return _validity_if(None if evidence.gpus_found is None else evidence.gpus_found < evidence.gpus_expected)
        case DrainCause.LESS_MEMORY:
            # slurmd counts whole MiB of MemTotal, as the agent does.
            return _validity_if(None if not evidence.memory_mib else evidence.memory_mib < evidence.memory_expected_mib)
        case _:
            return ReasonValidity.UNKNOWN


def _process_remains(evidence: DrainEvidence) -> bool | None:
    """Return whether the process that could not be killed is still there; None where nobody reports it."""
    if _rebooted(evidence):
        return False
    if evidence.completing_jobs:
        return True
    if not evidence.agent_reports or evidence.blocked_processes is None or evidence.stray_processes is None:
        return None
    return bool(evidence.blocked_processes or evidence.stray_processes)


def _facts(reason: DrainReason, evidence: DrainEvidence) -> Iterator[str]:
    if evidence.open_findings:
        yield f"{formatting.plural(evidence.open_findings, 'finding')} open"
    elif evidence.cleared_findings:
        yield "its findings are cleared"
    if _rebooted(evidence) and evidence.booted_at is not None:
        yield f"rebooted since ({formatting.clock(evidence.booted_at)})"
    if evidence.replaced_gpus:
        slots = formatting.listed([str(slot) for slot in evidence.replaced_gpus])
        yield f"GPU {slots} was replaced" if len(evidence.replaced_gpus) == 1 else f"GPUs {slots} were replaced"
    if evidence.driver_reloaded_at is not None:
        version = f", now {evidence.driver}" if evidence.driver else ""
        yield f"NVIDIA driver reloaded ({formatting.clock(evidence.driver_reloaded_at)}{version})"
    if evidence.gpus_found is not None and evidence.gpus_expected and evidence.gpus_found < evidence.gpus_expected:
        verb = "is" if evidence.gpus_found == 1 else "are"
        yield f"{evidence.gpus_found} of {evidence.gpus_expected} GPUs {verb} present"
    elif reason.cause == DrainCause.FEWER_GPUS and evidence.gpus_found is not None:
        yield "all GPUs are present"
    if reason.cause == DrainCause.KILL_FAILED:
        yield from _process_facts(evidence)
    if reason.cause in (DrainCause.NOT_RESPONDING, DrainCause.POWER, DrainCause.REBOOTED):
        yield from _reach_facts(evidence)


def _process_facts(evidence: DrainEvidence) -> Iterator[str]:
    if evidence.completing_jobs:
        jobs = formatting.listed(list(evidence.completing_jobs[:3]))
        yield f"job {jobs} is still completing" if len(evidence.completing_jobs) == 1 else f"jobs {jobs} are completing"
    remains = _process_remains(evidence)
    if remains is False and not _rebooted(evidence):
        yield "no process is blocked or left on a GPU"
    elif evidence.blocked_processes:
        yield f"{formatting.plural(round(evidence.blocked_processes), 'process', 'processes')} blocked (state D)"
    elif evidence.stray_processes:
        yield f"{formatting.plural(evidence.stray_processes, 'process', 'processes')} left on GPUs"
    elif remains is None and not evidence.agent_reports:
        yield "no agent reports its processes"


def _reach_facts(evidence: DrainEvidence) -> Iterator[str]:
    if evidence.is_reachable is False and evidence.agent_reports:
        yield "the machine is up: its agent reports. Check slurmd"
    elif evidence.is_reachable:
        yield "it responds again"


def _rebooted(evidence: DrainEvidence) -> bool:
    return evidence.booted_at is not None and evidence.since is not None and evidence.booted_at > evidence.since


def _validity_if(stands: bool | None) -> ReasonValidity:
    if stands is None:
        return ReasonValidity.UNKNOWN
    return ReasonValidity.VALID if stands else ReasonValidity.OUTDATED
