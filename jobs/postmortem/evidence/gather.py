"""Collect what is known about the end of an attempt: each source adds signs, or says what it could not read.

Nothing is trusted but the scheduler's records and ours: files are opened by the one opener of run directories, within
bounds, and can mislead no more than the verdict on their own job.
"""

from __future__ import annotations

import time

from diagnosis.corroboration import ATTEMPT
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs import flight_recorder, stacks
from diagnosis.signs.sign import Sign
from jobs.models import Incident
from jobs.postmortem.evidence.clients import collect_federation_clients
from jobs.postmortem.evidence.collected import IncidentEvidence, Source
from jobs.postmortem.evidence.history import collect_checkpoints, collect_environment_changes, collect_other_failures
from jobs.postmortem.evidence.launchers import collect_launcher_report, collect_node_snapshots, collect_rank_exits
from jobs.postmortem.evidence.machines import collect_machine_curves, collect_machine_events
from jobs.postmortem.evidence.ranks import (
    collect_guard_events,
    collect_rank_logs,
    collect_rank_stacks,
    collect_rank_steps,
)
from jobs.postmortem.evidence.scheduler import collect_node_states, collect_scheduler_report
from jobs.postmortem.evidence.series import collect_reported_series

# In this order: logs tell which incarnation failed, the launchers' files where each rank ran.
SOURCES: tuple[tuple[str, Source], ...] = (
    ("ranks' logs", collect_rank_logs),
    ("exits of ranks", collect_rank_exits),
    ("the scheduler's report", collect_scheduler_report),
    ("the launcher's report", collect_launcher_report),
    ("snapshots of nodes", collect_node_snapshots),
    ("machine events", collect_machine_events),
    ("memory and temperatures of machines", collect_machine_curves),
    ("stacks of ranks", collect_rank_stacks),
    ("steps of ranks", collect_rank_steps),
    ("the trainer's guards", collect_guard_events),
    ("reported series", collect_reported_series),
    ("clients of the federation", collect_federation_clients),
    ("checkpoints", collect_checkpoints),
    ("states of nodes", collect_node_states),
    ("other failures at that time", collect_other_failures),
    ("changes since the previous attempt", collect_environment_changes),
)


def gather(incident: Incident, catalogue: Catalogue) -> IncidentEvidence:
    """Query every source; one that fails is listed as unavailable."""
    evidence = IncidentEvidence(incarnation=incident.incarnation or 0, available={ATTEMPT})
    for name, source in SOURCES:
        if time.monotonic() > evidence.until:
            evidence.unavailable.append(f"{name}: no time was left")
            continue
        try:
            source(incident, catalogue, evidence)
        except OSError as error:
            evidence.unavailable.append(f"{name}: {error.strerror or error}")
    return evidence


def records_of(found: IncidentEvidence) -> list[Sign]:
    """Return the signs that come from no log."""
    flights, dumped = flight_recorder.signs_of_flights(found.read.flights), stacks.signs_of_stacks(found.read.stacks)
    return [*found.signs, *found.read.records, *flights, *dumped]
