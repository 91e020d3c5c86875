"""Advance acceptances: observe their nodes while the burn-in runs, and judge once it has ended.

    running     each call judges the configuration again and remembers what GPUs did at work: a GPU that idles lowers
                its PCIe generation, and is neither hot nor slow
    ended       with the burn-in: all clauses are judged, and the result is stored once. A node whose agent does not
                report has ten minutes to do so: after an outage of the portal it does within one

The burn-in has a state machine of its own (jobs.burnins.advance). Here a call changes one row by a conditional update,
so it may be repeated after a crash, and two workers do no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from jobs.acceptances.configuration import read_configuration, read_software, with_peaks
from jobs.acceptances.outcomes import outcome_clauses
from nodes.acceptance import clauses
from nodes.acceptance.clauses import ClauseOutcome
from nodes.acceptance.configuration import configuration_clauses
from nodes.acceptance.facts import GpuPeaks, NodeConfiguration, merge_peaks
from nodes.acceptance.versions import versions_clause
from nodes.models import Acceptance, BurnIn
from nodes.monitoring.software import minimums_in_force
from portal.access import note
from portal.audit import Change

logger = logging.getLogger(__name__)
AT_ONCE = 50
FOR_AGENTS = timedelta(minutes=10)  # to report again, before their node fails for its silence


def advance_all() -> None:
    """Advance every acceptance that is not over; those that were not observed for longest first."""
    rows = Acceptance.objects.active().select_related("burn_in")
    for acceptance in rows.order_by(F("observed_at").asc(nulls_first=True), "pk")[:AT_ONCE]:
        try:
            advance(acceptance)
        except Exception:
            logger.exception("%s failed in this tick", acceptance)


def advance(acceptance: Acceptance) -> None:
    """Observe and judge one acceptance as far as its burn-in has come."""
    burn_in, now = acceptance.burn_in, timezone.now()
    rows = list(burn_in.nodes.order_by("node"))
    nodes = read_configuration(rows, now)
    peaks = _peaks(acceptance, nodes)
    outcomes = configuration_clauses(with_peaks(nodes, peaks), settings.VIGIL_PUBLIC_URL)
    outcomes.append(versions_clause(read_software(rows), len(rows), minimums_in_force()))
    is_over = burn_in.state == BurnIn.BurnInState.ENDED
    if not is_over or _waits_for_agents(burn_in, nodes, now):
        _store(acceptance, outcomes, peaks, now)
        return
    outcomes += outcome_clauses(burn_in, rows)
    stored = clauses.stored(outcomes)
    result, summary = clauses.verdict_of(outcomes), clauses.summary(stored)
    with transaction.atomic():
        ended = Acceptance.objects.active().filter(pk=acceptance.pk)
        if ended.update(result=result, summary=summary, clauses=stored, peaks={}, ended_at=now, observed_at=now):
            note(None, f"acceptance.{result}", acceptance, change=Change(after={"summary": summary}))


def _waits_for_agents(burn_in: BurnIn, nodes: list[NodeConfiguration], now: datetime) -> bool:
    if burn_in.cancel_requested_at is not None or burn_in.ended_at is None:
        return False
    return now < burn_in.ended_at + FOR_AGENTS and not all(node.is_reporting for node in nodes)


def _store(acceptance: Acceptance, outcomes: list[ClauseOutcome], peaks: Mapping[str, GpuPeaks], now: datetime) -> None:
    """Store the progress, unless another worker stored its own meanwhile."""
    stored = clauses.stored(outcomes)
    rows = Acceptance.objects.active().filter(pk=acceptance.pk, observed_at=acceptance.observed_at)
    rows.update(
        clauses=stored,
        summary=clauses.summary(stored),
        peaks={uuid: vars(peak) for uuid, peak in peaks.items()},
        observed_at=now,
    )


def _peaks(acceptance: Acceptance, nodes: list[NodeConfiguration]) -> Mapping[str, GpuPeaks]:
    """Return the peaks so far, with this observation if the tests run now."""
    peaks = {uuid: GpuPeaks(**peak) for uuid, peak in acceptance.peaks.items()}
    if acceptance.burn_in.state != BurnIn.BurnInState.RUNNING:
        return peaks
    return merge_peaks(peaks, [gpu for node in nodes for gpu in node.gpus])
