"""The end of an attempt: its last word, what it left on disk, and the moment from which it takes no reports any more.

    end        the scheduler's final state and the cause, by a conditional update; whoever changed the row goes on
    collect    what the shipper had not posted, from the spools
    follow_up  the next attempt, or the decision to stop (policy, next_attempt)
    close      once nothing can come any more
Each leaves a row that the next tick finds: ended_at without decided_at, decided_at without closed_at.
"""

from __future__ import annotations

import logging
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from jobs import coverage, live
from jobs.disk import folders, rundir
from jobs.following import known
from jobs.following.cause import NUMERICS, WORDS, Ended, cause_of, described, numerics_of
from jobs.following.hopeless import stop_sweep
from jobs.following.next_attempt import next_attempt
from jobs.following.policy import decide
from jobs.intake import spools
from jobs.models import Attempt, Stream
from jobs.postmortem import incidents
from vigil_core.masking import masked

logger = logging.getLogger(__name__)

NO_GROWTH = timedelta(minutes=10)
AWAY_AT_MOST = timedelta(days=1)  # a run directory for so long is not away, but gone
DECIDE_AFTER = timedelta(seconds=20)  # of looking through spools; that goes on until the attempt is closed
_SPOOL = re.compile(r"\d+\.-?\d+\.[0-9a-f]+\.jsonl\Z")


def end(
    attempt: Attempt,
    ended: Ended,
    *,
    cause: str = "",
    reason: str = "",
    at: float | None = None,
    only: Q | None = None,
    **fields: Any,
) -> bool:
    """Write the end of an attempt, `only` if its row is still so; whether it was us. In the caller's transaction."""
    found, failure = cause_of(ended)
    cause = cause or found
    now = timezone.now()
    state = Attempt.State.CANCELLED if cause == "cancelled" else ended.state
    changes = {
        "state": state,
        "ended_at": min(datetime.fromtimestamp(at, UTC), now) if at else now,
        "exit_code": ended.exit_code,
        "signal": ended.signal,
        "cause": cause,
        "failure": failure,
        "reason": reason or reason_of(attempt, cause, failure),
        **fields,
    }
    with transaction.atomic():
        if Attempt.objects.filter(only or Q(), pk=attempt.pk, ended_at=None).update(**changes) != 1:
            return False
        for name, value in changes.items():
            setattr(attempt, name, value)
        incidents.open_end(attempt, changes["ended_at"])
        live.announce(attempt.pk)
    logger.info("attempt %s: %s, %s", attempt.pk, state, cause)
    return True


def reason_of(attempt: Attempt, cause: str, failure: dict[str, Any]) -> str:
    """Why it ended, in a sentence for people."""
    if cause == "completed":
        return ""
    if cause == "cancelled":
        return _who_cancelled(attempt)
    if cause in NUMERICS.values() and (numerics := numerics_of(failure)):
        return f"{numerics[1]}."
    if text := described(failure, cause):
        return text
    before = masked(folders.said_before_launch(attempt)) if cause == "failed" else ""
    return before or WORDS.get(cause, "")


CANCELLED_OUTSIDE = "Cancelled outside Vigil, as by scancel."
"""Stands until accounting names the person (jobs.following.steps)."""


def _who_cancelled(attempt: Attempt) -> str:
    who, sweep = attempt.cancel_asked_by, attempt.job.sweep
    if who is None and attempt.cancel_asked_at is not None and sweep is not None and sweep.stopped_why:
        return f"Its sweep was stopped. {sweep.stopped_why}"
    if not attempt.scheduler_id:
        return "Cancelled before it was submitted."
    if attempt.kill_requested_at is not None:
        return f"Killed by {attempt.kill_requested_by}." if attempt.kill_requested_by else "Killed."
    if who is not None:
        return f"Cancelled by {who}."
    return CANCELLED_OUTSIDE if attempt.cancel_asked_at is None else "Cancelled."


def follow_up(attempt: Attempt) -> Attempt | None:
    """Decide what comes after an attempt that has ended, once; the next attempt, if there is one. In a transaction.

    A cancel that came since the attempt was read leaves it undecided: the next tick knows of it.
    """
    decision = decide(attempt, attempt.cause)
    undecided = Attempt.objects.filter(pk=attempt.pk, decided_at=None)
    if decision.restart:
        undecided = undecided.filter(cancel_asked_at=None)
    told = {"decision": decision.text, "decided_version": decision.version, "blamed_nodes": list(decision.blamed)}
    if undecided.update(decided_at=timezone.now(), **told) != 1:
        return None
    live.announce(attempt.pk)
    logger.info("attempt %s: %s", attempt.pk, decision.text or "nothing follows")
    if not decision.restart:
        stop_sweep(attempt)
        return None
    following = next_attempt(
        attempt,
        Attempt.Origin.RESTARTED,
        resume_from=decision.resume_from,
        starts_back=decision.starts_back,
        excluded_nodes=decision.excluded_nodes,
    )
    live.announce(following.pk)
    return following


def collect(attempt: Attempt, *, until: float) -> None:
    """Take in from disk what was never posted, until a moment (monotonic seconds); the row says how far that came."""
    is_first = attempt.collecting_since is None
    if is_first:
        _note(attempt, collecting_since=timezone.now())
    if folders.is_away(attempt):
        if is_first:
            logger.warning("attempt %s: its run directory is not there; looked for again", attempt.pk)
        return
    try:
        root, folder = folders.root_of(attempt), folders.find_folder(attempt)
        if root is not None and folder and attempt.closed_at is None:
            spools.collect(attempt, root, until=until)
    except Exception:  # what is damaged must not hold up what follows
        logger.exception("attempt %s: its spools cannot be read in this tick", attempt.pk)
    if time.monotonic() < until:
        _note(attempt, collected_at=timezone.now())


def _note(attempt: Attempt, **changes: datetime) -> None:
    Attempt.objects.filter(pk=attempt.pk).update(**changes)
    for name, value in changes.items():
        setattr(attempt, name, value)


def is_collecting_due(attempt: Attempt) -> bool:
    """Whether to look for late reports: until one look is through, then twice a minute, as each reads all spools."""
    assert attempt.ended_at is not None
    since = (timezone.now() - attempt.ended_at).total_seconds()
    return attempt.collected_at is None or since < 10 or since % 30 < 3


def may_decide(attempt: Attempt) -> bool:
    """Whether its spools have been read and it is known why it ended, or what follows shall not wait for that any more.

    A person who cancels it decides by that.
    """
    if attempt.cancel_asked_at is None and known.is_awaited(attempt):
        return False
    if attempt.collected_at is not None:
        return True
    return attempt.collecting_since is not None and timezone.now() - attempt.collecting_since > DECIDE_AFTER


def nothing_can_come(attempt: Attempt) -> bool:
    """Whether every stream on disk is read and has ended, or nothing has grown for ten minutes after the end."""
    assert attempt.ended_at is not None
    last = max(attempt.ended_at, attempt.last_report_at or attempt.ended_at)
    if folders.is_away(attempt):
        return timezone.now() - last > AWAY_AT_MOST
    if attempt.collected_at is None:
        return False
    if timezone.now() - last > NO_GROWTH:
        return True
    root, folder = folders.root_of(attempt), folders.find_folder(attempt)
    streams = Stream.objects.filter(attempt=attempt)
    if attempt.job.is_attached:  # whoever posts for it ends with it
        return not streams.filter(ended=False).exists()
    if root is None or not folder:
        return not streams.exists()
    on_disk = sum(1 for name in rundir.names_under(root, f"job/{folder}/spool") if _SPOOL.match(name))
    return streams.filter(ended=True).count() >= max(on_disk, streams.count())


def close(attempt: Attempt) -> None:
    """No reports from now on: the token is dead. What is still undecided stays open, so that a tick finds it."""
    rows = Attempt.objects.filter(pk=attempt.pk, closed_at=None).exclude(decided_at=None)
    if rows.update(closed_at=timezone.now(), token_digest="") == 1:
        live.announce(attempt.pk)
        coverage.notify_excluded(attempt)
