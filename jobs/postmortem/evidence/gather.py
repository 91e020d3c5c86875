"""What is known of an attempt's end, from every side: each source gives its signs, or says what it could not see.

All of it is hostile but the scheduler's word and ours: files are opened by the one opener of run directories, bounded,
and may mislead no more than the verdict on their own job.
"""

from __future__ import annotations

import time

from diagnosis.corroboration import ATTEMPT
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs import flight_recorder, stacks
from diagnosis.signs.sign import Sign
from jobs.models import Incident
from jobs.postmortem.evidence.clients import clients_of_federation
from jobs.postmortem.evidence.collected import Evidence, Source
from jobs.postmortem.evidence.history import changes_of_environment, lineage_of_checkpoints, others_that_failed
from jobs.postmortem.evidence.launchers import ends_of_ranks, looks_at_nodes, word_of_launcher
from jobs.postmortem.evidence.machines import curves_of_machines, events_of_machines
from jobs.postmortem.evidence.ranks import guards_of_trainer, logs_of_ranks, stacks_of_ranks, steps_of_ranks
from jobs.postmortem.evidence.scheduler import states_of_nodes, word_of_scheduler
from jobs.postmortem.evidence.series import reported_series

# In this order: logs tell which incarnation failed, the launchers' files where each rank ran.
SOURCES: tuple[Source, ...] = (
    logs_of_ranks,
    ends_of_ranks,
    word_of_scheduler,
    word_of_launcher,
    looks_at_nodes,
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


def gather(incident: Incident, catalogue: Catalogue) -> Evidence:
    """Ask every source; one that fails only says that it could not be seen."""
    found = Evidence(incarnation=incident.incarnation or 0, seen={ATTEMPT})
    for source in SOURCES:
        name = source.__name__.replace("_", " ")
        if time.monotonic() > found.until:
            found.not_seen.append(f"{name}: there was no time left")
            continue
        try:
            source(incident, catalogue, found)
        except OSError as error:
            found.not_seen.append(f"{name}: {error.strerror or error}")
    return found


def records_of(found: Evidence) -> list[Sign]:
    """The signs that are no lines of a log."""
    flights, dumped = flight_recorder.signs_of_flights(found.read.flights), stacks.signs_of_stacks(found.read.stacks)
    return [*found.signs, *found.read.records, *flights, *dumped]
