"""Advance acceptances: observe their nodes while the burn-in runs, and judge once it has ended.

    running     each call judges the configuration again and remembers what GPUs did at work (a GPU that idles lowers
                its PCIe generation, and is neither hot nor slow), and which clauses failed for a while
    ended       with the burn-in: all clauses are judged, and the result is stored once. A node whose agent has not yet
                reported all of the tests has ten minutes to do so: after an outage of the portal it takes one or two

The burn-in has a state machine of its own (jobs.burnins.advance). Here a call changes one row by a conditional update,
so it may be repeated after a crash, and two workers do no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
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
from nodes.acceptance.history import ClauseHistory, read_histories
from nodes.acceptance.versions import versions_clause
from nodes.models import Acceptance, Agent, BurnIn, NodeEvent
from nodes.monitoring.events import UNJUDGED
from nodes.software_inventory import minimums_in_force
from portal.access import note
from portal.audit import Change

logger = logging.getLogger(__name__)
MAX_PER_TICK = 50
AGENT_REPORT_TIMEOUT = timedelta(minutes=10)  # to report again, before their node fails for its silence
RULE_LAG = timedelta(seconds=30)  # samples must be so much newer than the end of the tests


def advance_all() -> None:
    """Advance every acceptance that is not over; those that were not observed for longest first."""
    rows = Acceptance.objects.active().select_related("burn_in")
    for acceptance in rows.order_by(F("observed_at").asc(nulls_first=True), "pk")[:MAX_PER_TICK]:
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
    histories = _histories(acceptance, outcomes, nodes, now)
    outcomes = [histories[item.key].applied(item) if item.key in histories else item for item in outcomes]
    is_over = burn_in.state == BurnIn.BurnInState.ENDED
    if not is_over or _waits_for_agents(burn_in, nodes, now):
        _store(acceptance, outcomes, peaks, histories, now)
        return
    outcomes += outcome_clauses(burn_in, rows)
    stored = clauses.stored(outcomes)
    result, summary = clauses.verdict_of(outcomes), clauses.summary(stored)
    with transaction.atomic():
        ended = Acceptance.objects.active().filter(pk=acceptance.pk)
        if ended.update(result=result, summary=summary, clauses=stored, peaks={}, ended_at=now, observed_at=now):
            note(None, f"acceptance.{result}", acceptance, change=Change(after={"summary": summary}))


def _waits_for_agents(burn_in: BurnIn, nodes: list[NodeConfiguration], now: datetime) -> bool:
    """Return whether an agent may still report what happened during the tests, or health rules have not judged it."""
    if (
        burn_in.cancel_requested_at is not None
        or burn_in.ended_at is None
        or now >= burn_in.ended_at + AGENT_REPORT_TIMEOUT
    ):
        return False
    if not all(node.is_reporting for node in nodes):
        return True
    since = (burn_in.job_ended_at or burn_in.ended_at) + RULE_LAG
    agents = Agent.objects.filter(node__in=[node.node for node in nodes])
    if agents.exclude(sampled_at__gte=since.timestamp()).exists():
        return True
    return NodeEvent.objects.filter(UNJUDGED, agent__in=agents).exists()


def _store(
    acceptance: Acceptance,
    outcomes: list[ClauseOutcome],
    peaks: Mapping[str, GpuPeaks],
    histories: Mapping[str, ClauseHistory],
    now: datetime,
) -> None:
    """Store the progress, unless another worker stored its own meanwhile."""
    stored = clauses.stored(outcomes)
    for row in stored:
        if row["key"] in histories:
            row["history"] = vars(histories[row["key"]])
    rows = Acceptance.objects.active().filter(pk=acceptance.pk, observed_at=acceptance.observed_at)
    rows.update(
        clauses=stored,
        summary=clauses.summary(stored),
        peaks={uuid: vars(peak) for uuid, peak in peaks.items()},
        observed_at=now,
    )


def _histories(
    acceptance: Acceptance, outcomes: list[ClauseOutcome], nodes: list[NodeConfiguration], now: datetime
) -> dict[str, ClauseHistory]:
    """Return the histories of clauses, with this observation if the tests run now and an agent reports."""
    histories = read_histories(acceptance.clauses)
    burn_in = acceptance.burn_in
    is_running = burn_in.state == BurnIn.BurnInState.RUNNING and burn_in.job_ended_at is None
    if not is_running or not any(node.is_reporting for node in nodes):  # if none does, it may be the portal's fault
        return {key: replace(history, since=None) for key, history in histories.items()}
    previous = (acceptance.observed_at or now).timestamp()
    by_key = {outcome.key: outcome for outcome in outcomes}
    return {
        key: history.observed(by_key[key], now.timestamp(), previous)
        for key, history in histories.items() if key in by_key
    }  # fmt: skip


def _peaks(acceptance: Acceptance, nodes: list[NodeConfiguration]) -> Mapping[str, GpuPeaks]:
    """Return the peaks so far, with this observation if the tests run now."""
    peaks = {uuid: GpuPeaks(**peak) for uuid, peak in acceptance.peaks.items()}
    if acceptance.burn_in.state != BurnIn.BurnInState.RUNNING:
        return peaks
    return merge_peaks(peaks, [gpu for node in nodes for gpu in node.gpus])
