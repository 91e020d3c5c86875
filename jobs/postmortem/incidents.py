"""Incidents: opened with the end that they are of, diagnosed soon after, and again when evidence has come.

    open_end    in the transaction that ends the attempt; due at once (jobs.restarts opens those of restarts in place)
    diagnose    reads everything, writes one more version; a second worker's is nothing; after five tries it gives up
    revise      once no report can come any more, a last time; then the verdict is final
What is due stands in the row: a lost message, a killed worker or Redis without its data delay, and lose nothing.
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

# How attempts end without anything having gone wrong: as asked, or before they ran.
NOT_BAD = frozenset(
    {"", "completed", "stopped", "preempted", "requeued", "cancelled", "rejected", "unmet", "fenced", "withdrawn"}
)
AGAIN_AFTER = timedelta(seconds=60)  # for what comes late: the kernel's word, the accounts'
AGAIN_IN_PLACE = timedelta(minutes=11)  # and once more where the attempt goes on: machines have told by then
FINAL_AFTER = timedelta(minutes=30)
KEEP_AWAY = timedelta(minutes=2)  # from an incident that a worker died of
MOST_TRIES = 5  # that end without a verdict; then nobody tries again
READ_BY_HAND = "Vigil is at fault, not the job. logs/diagnose.log says more; `vigil diagnose` reads its logs by hand."


def open_end(attempt: Attempt, at: datetime) -> Incident | None:
    """The incident of an attempt's bad end, due at once; in the transaction of that end, so once."""
    if attempt.cause in NOT_BAD:
        return None
    incident, _ = Incident.objects.get_or_create(
        attempt=attempt,
        incarnation=None,
        defaults={"project_id": attempt.job.project_id, "at": at, "due_at": timezone.now()},
    )
    transaction.on_commit(lambda: hurry(incident.pk))
    return incident


def hurry(incident_id: int = 0) -> None:
    """Ask for this one, or for whatever is due."""
    queue("jobs.tasks.diagnose", incident_id)


@cache
def get_ready() -> None:
    """Load what the first diagnosis and its notice need before those come, and somebody waits for the next.

    It takes a second of processor time, which may be twenty where jobs have the machine.
    """
    known = site_catalogue.current_catalogue()
    read = offline.read_logs([Log("nothing", io.BytesIO(b"RuntimeError: nothing\n"), None)], known)
    find_cause(read.scanned, known)
    reverse("home")  # a notice has links, and the first one loads every page
    logger.info("ready to diagnose by %d entries", len(known.entries))


def diagnose_due(until: float, before_each: Callable[[], object] = lambda: None) -> int:
    """Diagnose what is due until a moment (monotonic seconds); how many. `before_each`: what else must not wait."""
    count = 0
    while time.monotonic() < until:
        try:
            before_each()
        except Exception:
            logger.exception("what is done between two incidents failed")
        first = Incident.objects.due().values_list("pk", flat=True).first()
        if first is None:
            break
        count += diagnose(first)
    return count


def diagnose(incident_id: int) -> bool:
    """One more version of an incident's verdict, if it is due; whether this was it.

    It is put off before it is begun: what kills the process that reads it must not kill the next at once.
    """
    now = timezone.now()
    due = Incident.objects.filter(pk=incident_id, due_at__lte=now)
    if due.update(due_at=now + KEEP_AWAY, tries=F("tries") + 1) != 1:
        return False
    incident = Incident.objects.select_related("attempt__job").get(pk=incident_id)
    if incident.tries > MOST_TRIES:
        return _give_up(incident, f"its worker was killed each of the {MOST_TRIES} times that it read what was left")
    began = time.monotonic()
    try:
        verdict = verdict_on(incident)
        return _keep(incident, verdict, time.monotonic() - began)
    except database.ERRORS:
        # The incident is not to blame: it is due at once, and this try does not count. The task is retried.
        begun = Incident.objects.filter(pk=incident_id, due_at=now + KEEP_AWAY)
        database.retried(lambda: begun.update(due_at=now, tries=F("tries") - 1))
        raise
    except Exception as error:  # one that nobody can read must not keep the others waiting
        logger.exception("attempt %s: not diagnosed at try %d", incident.attempt_id, incident.tries)
        if incident.tries < MOST_TRIES:
            return False
        return _give_up(incident, f"reading what was left failed {MOST_TRIES} times, with {_in_a_line(error)}")


def _give_up(incident: Incident, why: str) -> bool:
    """The last word on what cannot be diagnosed: the verdict that there is, else one that says so."""
    logger.error("attempt %s: not diagnosed: %s", incident.attempt_id, why)
    if incident.version:
        Incident.objects.filter(pk=incident.pk, version=incident.version).update(due_at=None, is_final=True)
        return False
    return _keep(incident, Verdict(UNKNOWN, 0.0, f"It could not be diagnosed: {why}.", READ_BY_HAND), 0.0, is_last=True)


def _in_a_line(error: Exception) -> str:
    """An error as no database refuses it."""
    return masked(" ".join(f"{type(error).__name__}: {error}".replace("\0", "").split()))[:160].rstrip(".: ")


def verdict_on(incident: Incident) -> Verdict:
    """The verdict by everything that can be seen now; nothing is written."""
    first = incident.diagnoses.order_by("version").first()
    known = site_catalogue.current_catalogue() if first is None else site_catalogue.catalogue_at(first.made_at)
    return judged(incident, known)[0]


def judged(incident: Incident, known: Catalogue) -> tuple[Verdict, bool]:
    """The verdict by this catalogue, and whether there was any log to read."""
    found = gather(incident, known)
    verdict = find_cause(
        found.read.scanned, known, records=records_of(found), available=found.seen, ends=found.ended_at
    )
    return replace(verdict, unavailable=[*found.not_seen, *verdict.unavailable]), bool(found.read.scanned)


def _keep(incident: Incident, verdict: Verdict, seconds: float, *, is_last: bool = False) -> bool:
    """Write the version after the one that was read, with what is next; False where somebody else has."""
    told, now = verdict.as_json(), timezone.now()
    is_final = is_last or _is_final(incident, now)
    last = incident.diagnoses.first()
    is_new = last is None or last.verdict != told
    version = incident.version + is_new
    changes = {
        "version": version,
        "due_at": None if is_final else _again_at(incident, now),
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
            same = Incident.objects.filter(pk=incident.pk, version=incident.version, overruled_at=None)
            if same.update(**changes) != 1:
                return False
            if is_new:
                Diagnosis.objects.create(
                    incident=incident, version=version, made_at=now, seconds=seconds, cause=verdict.cause,
                    confidence=verdict.confidence, verdict=told,
                )  # fmt: skip
                _announce(incident)
    except IntegrityError:
        return False
    if is_new:
        logger.info(
            "attempt %s: %s, %.0f %% sure, version %d",
            incident.attempt_id,
            verdict.cause,
            100 * verdict.confidence,
            version,
        )
    return True


def _announce(incident: Incident) -> None:
    """Say it to who looks at the job, which may be at its next attempt by now."""
    latest = incident.attempt.job.latest_id
    for attempt_id in {incident.attempt_id, latest or incident.attempt_id}:
        live.announce(attempt_id)


def _again_at(incident: Incident, now: datetime) -> datetime:
    """Soon after the end, when most comes that comes late; then ever less often, as each look reads everything."""
    if incident.incarnation is None:
        return now + max(AGAIN_AFTER, now - incident.at)
    return max(now + AGAIN_AFTER, incident.at + AGAIN_IN_PLACE)


def _is_final(incident: Incident, now: datetime) -> bool:
    """Whether no evidence can come any more: reports are closed and its steps are told, or it is long ago."""
    if incident.incarnation is not None:
        return now - incident.at >= AGAIN_IN_PLACE
    attempt = incident.attempt
    if attempt.ended_at is None:
        return False
    is_told = attempt.slurm_steps_at is not None or not attempt.scheduler_id
    return (attempt.closed_at is not None and is_told) or now - attempt.ended_at > FINAL_AFTER


def _node_of(attempt: Attempt, verdict: Verdict) -> str:
    """The node that it was on, if it is one of the attempt's: logs may say anything."""
    return verdict.node if verdict.node in attempt.nodes else attempt.nodes[0] if len(attempt.nodes) == 1 else ""


def fingerprint(verdict: Verdict) -> str:
    """Equal for failures of the same program: cause, exception, innermost own frame, message less numbers and paths.
    "" where nobody knows why and no line of a log says more than that it failed: those are not alike."""
    root = next((one for one in verdict.evidence if one.role == "root"), None)
    if verdict.cause == UNKNOWN and (root is None or not root.line):
        return ""
    words = re.sub(r"(?:/[\w.-]+)+|0x[0-9a-f]+|\d+(?:\.\d+)?", "#", root.text if root else "")[:300]
    frame = re.sub(r"^.*/", "", verdict.frame)
    about = "\0".join((verdict.cause, verdict.exception, frame, words))
    return blake2b(about.encode(), digest_size=8).hexdigest()
