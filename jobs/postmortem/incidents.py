"""Open an incident for each failure, diagnose it soon after, and again when more evidence has arrived.

    open_end    in the transaction that ends the attempt; due at once. jobs.restart_incidents opens those of restarts
                in place
    diagnose    reads all evidence and stores one more version; only one worker's counts; gives up after five tries
    last        once no report can arrive any more; then the verdict is final

What is due is stored in the row: a lost message, a killed worker or an emptied Redis delay a diagnosis and lose
nothing.
"""

from __future__ import annotations

import io
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from hashlib import blake2b

from django.db import IntegrityError, transaction
from django.db.models import F
from django.urls import reverse
from django.utils import timezone

from diagnosis import offline
from diagnosis.causes import UNKNOWN
from diagnosis.diagnose import diagnose as find_cause
from diagnosis.logs.files import Log
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.verdict import Verdict
from jobs import live
from jobs.models import Attempt, Diagnosis, Incident
from jobs.postmortem import site_catalogue
from jobs.postmortem.evidence.gather import gather, records_of
from jobs.queueing import queue
from portal import database
from vigil_core.masking import masked

logger = logging.getLogger(__name__)

# Ends of attempts that are not failures: as requested, or before they ran.
NOT_FAILURES = frozenset(
    {"", "completed", "stopped", "preempted", "requeued", "cancelled", "rejected", "unmet", "fenced", "withdrawn"}
)
RETRY_AFTER = timedelta(seconds=60)  # for late evidence: kernel logs, accounting
RETRY_IN_PLACE = timedelta(minutes=11)  # again if the attempt continues: agents have reported by then
FINAL_AFTER = timedelta(minutes=30)
LOCK_TIME = timedelta(minutes=2)  # from an incident during whose diagnosis a worker may have been killed
MAX_TRIES = 5  # without a verdict; then it gives up
READ_BY_HAND = (
    "This is a fault of Vigil, not of the job. See logs/diagnose.log, or run `vigil diagnose` on the job's logs."
)


def open_end(attempt: Attempt, at: datetime) -> Incident | None:
    """Open the incident of a failed attempt, due at once, in the transaction that ends the attempt.

    None if nothing failed.
    """
    if attempt.cause in NOT_FAILURES:
        return None
    incident, _ = Incident.objects.get_or_create(
        attempt=attempt,
        incarnation=None,
        defaults={"project_id": attempt.job.project_id, "at": at, "due_at": timezone.now()},
    )
    transaction.on_commit(lambda: enqueue(incident.pk))
    return incident


def enqueue(incident_id: int = 0) -> None:
    """Queue the diagnosis of this incident, or without an id of whatever is due."""
    queue("jobs.tasks.diagnose", incident_id)


@cache
def warm_up() -> None:
    """Load what the first diagnosis and its notice need, before somebody waits for them.

    It takes a second of CPU time, which may be twenty where jobs use the machine.
    """
    catalogue = site_catalogue.current_catalogue()
    read = offline.read_logs([Log("nothing", io.BytesIO(b"RuntimeError: nothing\n"), None)], catalogue)
    find_cause(read.scanned, catalogue)
    reverse("home")  # a notice has links; resolving the first one loads every page
    logger.info("ready to diagnose by %d entries", len(catalogue.entries))


def diagnose_due(until: float, before_each: Callable[[], object] = lambda: None) -> int:
    """Diagnose what is due until a moment (monotonic seconds); return how many.

    `before_each`: other work that must not wait.
    """
    count = 0
    while time.monotonic() < until:
        try:
            before_each()
        except Exception:
            logger.exception("work between two incidents failed")
        first = Incident.objects.due().values_list("pk", flat=True).first()
        if first is None:
            break
        count += diagnose(first)
    return count


def diagnose(incident_id: int) -> bool:
    """Store one more version of an incident's verdict if it is due; return whether this call did.

    The incident is postponed before work on it begins: if reading it kills the process, it must not kill the next one
    at once.
    """
    now = timezone.now()
    due = Incident.objects.filter(pk=incident_id, due_at__lte=now)
    if due.update(due_at=now + LOCK_TIME, tries=F("tries") + 1) != 1:
        return False
    incident = Incident.objects.select_related("attempt__job").get(pk=incident_id)
    if incident.tries > MAX_TRIES:
        return _stop_trying(incident, f"its worker was killed at each of {MAX_TRIES} attempts")
    began = time.monotonic()
    try:
        verdict = diagnose_incident(incident)
        return _store(incident, verdict, time.monotonic() - began)
    except database.ERRORS:
        # The incident is not to blame: it is due at once, and this try does not count. The task is retried.
        begun = Incident.objects.filter(pk=incident_id, due_at=now + LOCK_TIME)
        database.retried(lambda: begun.update(due_at=now, tries=F("tries") - 1))
        raise
    except Exception as error:  # an incident that cannot be read must not block the others
        logger.exception("attempt %s: not diagnosed at try %d", incident.attempt_id, incident.tries)
        if incident.tries < MAX_TRIES:
            return False
        return _stop_trying(incident, f"reading its files failed {MAX_TRIES} times: {_one_line(error)}")


def _stop_trying(incident: Incident, why: str) -> bool:
    """Finish an incident that cannot be diagnosed: with the existing verdict, else with one that says so."""
    logger.error("attempt %s: not diagnosed: %s", incident.attempt_id, why)
    if incident.version:
        Incident.objects.filter(pk=incident.pk, version=incident.version).update(due_at=None, is_final=True)
        return False
    return _store(
        incident, Verdict(UNKNOWN, 0.0, f"It could not be diagnosed: {why}.", READ_BY_HAND), 0.0, is_last=True
    )


def _one_line(error: Exception) -> str:
    """Return an error as one masked line without NUL, which databases refuse."""
    return masked(" ".join(f"{type(error).__name__}: {error}".replace("\0", "").split()))[:160].rstrip(".: ")


def diagnose_incident(incident: Incident) -> Verdict:
    """Return the verdict by all evidence available now; nothing is written."""
    first = incident.diagnoses.order_by("version").first()
    catalogue = site_catalogue.current_catalogue() if first is None else site_catalogue.catalogue_at(first.made_at)
    return diagnose_with(incident, catalogue)[0]


def diagnose_with(incident: Incident, catalogue: Catalogue) -> tuple[Verdict, bool]:
    """Return the verdict by this catalogue, and whether there was any log to read."""
    found = gather(incident, catalogue)
    verdict = find_cause(
        found.read.scanned, catalogue, records=records_of(found), available=found.available, ends=found.ended_at
    )
    return replace(verdict, unavailable=[*found.unavailable, *verdict.unavailable]), bool(found.read.scanned)


def _store(incident: Incident, verdict: Verdict, seconds: float, *, is_last: bool = False) -> bool:
    """Write the version after the one that was read, and when the next is due.

    Return False if another worker was faster.
    """
    verdict_json, now = verdict.as_json(), timezone.now()
    is_final = is_last or _is_final(incident, now)
    last = incident.diagnoses.first()
    is_new = last is None or last.verdict != verdict_json
    version = incident.version + is_new
    changes = {
        "version": version,
        "due_at": None if is_final else _next_due_at(incident, now),
        "is_final": is_final,
        "tries": 0,
        "cause": verdict.cause,
        "confirmed_cause": verdict.confirmed_cause,
        "confidence": verdict.confidence,
        "says": verdict.summary[:300],
        "entry": verdict.entry[:64],
        "rank": verdict.rank,
        "node": _node_of(incident.attempt, verdict),
        "fingerprint": fingerprint(verdict),
    }
    if is_new or changes["node"] != incident.node:
        changes["is_counted"] = False
    try:
        with transaction.atomic():
            unchanged = Incident.objects.filter(pk=incident.pk, version=incident.version, overruled_at=None)
            if unchanged.update(**changes) != 1:
                return False
            if is_new:
                Diagnosis.objects.create(
                    incident=incident, version=version, made_at=now, seconds=seconds, cause=verdict.cause,
                    confidence=verdict.confidence, verdict=verdict_json,
                )  # fmt: skip
                _announce(incident)
    except IntegrityError:
        return False
    if is_new:
        logger.info(
            "attempt %s: %s, %.0f %% confidence, version %d",
            incident.attempt_id,
            verdict.cause,
            100 * verdict.confidence,
            version,
        )
    return True


def _announce(incident: Incident) -> None:
    """Update open pages of the job, whose latest attempt may be another one by now."""
    latest = incident.attempt.job.latest_id
    for attempt_id in {incident.attempt_id, latest or incident.attempt_id}:
        live.announce(attempt_id)


def _next_due_at(incident: Incident, now: datetime) -> datetime:
    """Return when to diagnose again: soon after the end, when most late evidence arrives, then ever less often."""
    if incident.incarnation is None:
        return now + max(RETRY_AFTER, now - incident.at)
    return max(now + RETRY_AFTER, incident.at + RETRY_IN_PLACE)


def _is_final(incident: Incident, now: datetime) -> bool:
    """Return whether no more evidence can arrive: reports are closed and steps accounted for, or it ended long ago."""
    if incident.incarnation is not None:
        return now - incident.at >= RETRY_IN_PLACE
    attempt = incident.attempt
    if attempt.ended_at is None:
        return False
    has_steps = attempt.slurm_steps_at is not None or not attempt.scheduler_id
    return (attempt.closed_at is not None and has_steps) or now - attempt.ended_at > FINAL_AFTER


def _node_of(attempt: Attempt, verdict: Verdict) -> str:
    """Return the verdict's node if it is one of the attempt's: logs may name any."""
    return verdict.node if verdict.node in attempt.nodes else attempt.nodes[0] if len(attempt.nodes) == 1 else ""


def fingerprint(verdict: Verdict) -> str:
    """Return a hash that is equal for failures of the same program.

    It covers cause, exception, innermost user frame, and the message without numbers and paths.

    Returns "" if the cause is unknown and no log line says more than that it failed: such failures are not alike.
    """
    root = next((line for line in verdict.evidence if line.role == "root"), None)
    if verdict.cause == UNKNOWN and (root is None or not root.line):
        return ""
    words = re.sub(r"(?:/[\w.-]+)+|0x[0-9a-f]+|\d+(?:\.\d+)?", "#", root.text if root else "")[:300]
    frame = re.sub(r"^.*/", "", verdict.frame)
    about = "\0".join((verdict.cause, verdict.exception, frame, words))
    return blake2b(about.encode(), digest_size=8).hexdigest()
