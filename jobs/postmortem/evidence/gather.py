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
from jobs.postmortem.evidence.clients import clients_of_federation
from jobs.postmortem.evidence.collected import IncidentEvidence, Source
from jobs.postmortem.evidence.history import changes_of_environment, lineage_of_checkpoints, others_that_failed
from jobs.postmortem.evidence.launchers import exits_of_ranks, report_of_launcher, snapshots_of_nodes
from jobs.postmortem.evidence.machines import curves_of_machines, events_of_machines
from jobs.postmortem.evidence.ranks import guards_of_trainer, logs_of_ranks, stacks_of_ranks, steps_of_ranks
from jobs.postmortem.evidence.scheduler import report_of_scheduler, states_of_nodes
from jobs.postmortem.evidence.series import reported_series

# In this order: logs tell which incarnation failed, the launchers' files where each rank ran.
SOURCES: tuple[Source, ...] = (
    logs_of_ranks,
    exits_of_ranks,
    report_of_scheduler,
    report_of_launcher,
    snapshots_of_nodes,
    events_of_machines,
    curves_of_machines,
    stacks_of_ranks,
    steps_of_ranks,
    guards_of_trainer,
    reported_series,
    clients_of_federation,
    lineage_of_checkpoints,
    states_of_nodes,
    others_that_failed,
    changes_of_environment,
)


def gather(incident: Incident, catalogue: Catalogue) -> IncidentEvidence:
    """Query every source; one that fails is listed as unavailable."""
    found = IncidentEvidence(incarnation=incident.incarnation or 0, available={ATTEMPT})
    for source in SOURCES:
        name = source.__name__.replace("_", " ")
        if time.monotonic() > found.until:
            found.unavailable.append(f"{name}: no time was left")
            continue
        try:
            source(incident, catalogue, found)
        except OSError as error:
            found.unavailable.append(f"{name}: {error.strerror or error}")
    return found


def records_of(found: IncidentEvidence) -> list[Sign]:
    """Return the signs that come from no log."""
    flights, dumped = flight_recorder.signs_of_flights(found.read.flights), stacks.signs_of_stacks(found.read.stacks)
    return [*found.signs, *found.read.records, *flights, *dumped]
