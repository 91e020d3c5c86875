"""End an attempt: its result, what it left on disk, and the moment from which it accepts no more reports.

    end        store the scheduler's final state and the cause by a conditional update; whoever changed the row goes on
    collect    read from the spools what the shipper had not posted
    follow_up  create the next attempt, or decide to stop (policy, next_attempt)
    close      once no more reports can come
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
from jobs.following.decisions.next_attempt import next_attempt
from jobs.following.decisions.policy import decide
from jobs.following.decisions.sweep_stop import stop_sweep
from jobs.following.end_causes import end_reason
from jobs.following.end_causes.cause import CAUSE_TEXTS, NUMERICS, AttemptEnd, cause_of, describe_failure, numerics_of
from jobs.intake import spools
from jobs.models import Attempt, Stream
from jobs.postmortem import incidents
from vigil_core.masking import masked

logger = logging.getLogger(__name__)

NO_GROWTH = timedelta(minutes=10)
AWAY_LIMIT = timedelta(days=1)  # a run directory that is unreachable for longer counts as deleted
DECIDE_AFTER = timedelta(seconds=20)  # of reading spools; reading goes on until the attempt is closed
_SPOOL = re.compile(r"\d+\.-?\d+\.[0-9a-f]+\.jsonl\Z")


def end(
    attempt: Attempt,
    ended: AttemptEnd,
    *,
    cause: str = "",
    reason: str = "",
    at: float | None = None,
    only: Q | None = None,
    **fields: Any,
) -> bool:
    """Store the end of an attempt in the caller's transaction, unless another process has.

    Return whether this call did.

    `only` narrows it to a row that is still in that condition.
    """
    detected_cause, failure = cause_of(ended)
    cause = cause or detected_cause
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
    """Return why it ended, in a sentence for people."""
    if cause == "completed":
        return ""
    if cause == "cancelled":
        return _cancel_reason(attempt)
    if cause in NUMERICS.values() and (numerics := numerics_of(failure)):
        return f"{numerics[1]}."
    if text := describe_failure(failure, cause):
        return text
    before = masked(folders.launch_error(attempt)) if cause == "failed" else ""
    return before or CAUSE_TEXTS.get(cause, "")


CANCELLED_OUTSIDE = "Cancelled outside Vigil, as by scancel."
"""The reason until accounting names the person (jobs.following.slurm_steps)."""


def _cancel_reason(attempt: Attempt) -> str:
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
    """Decide once what follows an attempt that has ended. Return the next attempt, if there is one.

    Needs a transaction.

    A cancel that came after the attempt was read leaves it undecided: the next tick reads the cancel.
    """
    decision = decide(attempt, attempt.cause)
    undecided = Attempt.objects.filter(pk=attempt.pk, decided_at=None)
    if decision.restart:
        undecided = undecided.filter(cancel_asked_at=None)
    changes = {"decision": decision.text, "decided_version": decision.version, "blamed_nodes": list(decision.blamed)}
    if undecided.update(decided_at=timezone.now(), **changes) != 1:
        return None
    live.announce(attempt.pk)
    logger.info("attempt %s: %s", attempt.pk, decision.text or "no further attempt follows")
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
    """Ingest reports from disk that were never posted, until a moment (monotonic seconds).

    The row stores the progress.
    """
    is_first = attempt.collecting_since is None
    if is_first:
        _note(attempt, collecting_since=timezone.now())
    if folders.is_unreachable(attempt):
        if is_first:
            logger.warning("attempt %s: its run directory is unreachable; a later tick tries again", attempt.pk)
        return
    try:
        root, folder = folders.root_of(attempt), folders.find_folder(attempt)
        if root is not None and folder and attempt.closed_at is None:
            spools.collect(attempt, root, until=until)
    except Exception:  # a damaged spool must not delay the follow-up
        logger.exception("attempt %s: its spools cannot be read in this tick", attempt.pk)
    if time.monotonic() < until:
        _note(attempt, collected_at=timezone.now())


def _note(attempt: Attempt, **changes: datetime) -> None:
    Attempt.objects.filter(pk=attempt.pk).update(**changes)
    for name, value in changes.items():
        setattr(attempt, name, value)


def is_collecting_due(attempt: Attempt) -> bool:
    """Return whether to read the spools: until one pass is complete, then twice a minute, as each reads them all."""
    assert attempt.ended_at is not None
    since = (timezone.now() - attempt.ended_at).total_seconds()
    return attempt.collected_at is None or since < 10 or since % 30 < 3


def may_decide(attempt: Attempt) -> bool:
    """Return whether the spools are read and the verdict is known, or have been awaited for long enough.

    Once a person has cancelled the job, nothing is awaited.
    """
    if attempt.cancel_asked_at is None and end_reason.is_verdict_awaited(attempt):
        return False
    if attempt.collected_at is not None:
        return True
    return attempt.collecting_since is not None and timezone.now() - attempt.collecting_since > DECIDE_AFTER


def is_closable(attempt: Attempt) -> bool:
    """Return whether every stream on disk is read and ended, or nothing has grown for ten minutes after the end."""
    assert attempt.ended_at is not None
    last = max(attempt.ended_at, attempt.last_report_at or attempt.ended_at)
    if folders.is_unreachable(attempt):
        return timezone.now() - last > AWAY_LIMIT
    if attempt.collected_at is None:
        return False
    if timezone.now() - last > NO_GROWTH:
        return True
    root, folder = folders.root_of(attempt), folders.find_folder(attempt)
    streams = Stream.objects.filter(attempt=attempt)
    if attempt.job.is_attached:  # its reporting process ends with the job
        return not streams.filter(ended=False).exists()
    if root is None or not folder:
        return not streams.exists()
    on_disk = sum(1 for name in rundir.names_under(root, f"job/{folder}/spool") if _SPOOL.match(name))
    return streams.filter(ended=True).count() >= max(on_disk, streams.count())


def close(attempt: Attempt) -> None:
    """Accept no more reports: revoke the token.

    An attempt that is still undecided stays open, so that a tick finds it.
    """
    rows = Attempt.objects.filter(pk=attempt.pk, closed_at=None).exclude(decided_at=None)
    if rows.update(closed_at=timezone.now(), token_digest="") == 1:
        live.announce(attempt.pk)
        coverage.notify_excluded(attempt)
