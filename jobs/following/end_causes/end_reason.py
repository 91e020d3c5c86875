"""Determine why an attempt ended when its follow-up is decided: by a verdict, else by how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.utils import timezone

from diagnosis.causes import CAUSES, NONE, UNKNOWN
from jobs.following.end_causes.cause import CAUSE_TEXTS, NUMERICS
from jobs.models import Attempt, Incident

VERDICT_WITHIN = timedelta(seconds=15)  # of the end; the follow-up waits no longer for it

# The cause that an attempt's end suggests by itself, by its one word (jobs.following.end_causes.cause).
BY_END = {
    "node_fail": "scheduler.node_fail",
    "launch": "scheduler.launch",
    "forgotten": UNKNOWN,
    "lost": UNKNOWN,
    "hang": "collective.timeout",
    "timeout": "scheduler.time_limit",
    "out_of_memory": "memory.host_oom",
    "permission": "storage.permission",
    "exception": "program.exception",
    "failed": "program.exception",
    "unsaved": "program.exception",
    "diverged": "numerics.divergence",
    "nonfinite": "numerics.nan",
    "corruption": "numerics.corruption",
}
BETWEEN_NODES = frozenset({"network.fabric"})
# Causes that the trainer or the batch script reports itself: certain without reading logs.
CERTAIN = frozenset({*NUMERICS.values(), "permission", "unsaved"})


@dataclass(frozen=True)
class EndReason:
    """Why an attempt ended, as far as it is known when its follow-up is decided.

    `code`: of diagnosis.causes. `version`: of the verdict that it comes from; 0: there was none.
    """

    code: str
    text: str
    node: str = ""
    fingerprint: str = ""
    version: int = 0


def end_reason_of(attempt: Attempt, cause: str) -> EndReason:
    """Return the reason by the newest verdict, where a person's overrules; without one, by how the attempt ended."""
    incident = (
        Incident.objects.filter(attempt=attempt, incarnation=None, version__gt=0).select_related("overruled_by").first()
    )
    mechanical = BY_END.get(cause, "program.exception")
    if incident is None:
        return EndReason(mechanical, CAUSE_TEXTS.get(cause, ""), node=_only(attempt))
    code = incident.overruled_cause or incident.cause
    if cause in CERTAIN or code == NONE or code not in CAUSES:
        return EndReason(
            mechanical, CAUSE_TEXTS[cause], _node(incident, attempt), incident.fingerprint, incident.version
        )
    sure = "" if code == UNKNOWN else f" ({100 * (incident.confidence or 0):.0f} % confidence)"
    if incident.overruled_cause:
        sure = f" (according to {incident.overruled_by or 'somebody'})"
    node = _node(incident, attempt)
    on = f" on {node}" if node and CAUSES[code].owner == "sysadmin" else ""
    text = f"{CAUSES[code].heading}{on}{sure}."
    return EndReason(code, text, node, incident.fingerprint, incident.version)


def _node(incident: Incident, attempt: Attempt) -> str:
    """Return the node that failed: a single-node job's only node, unless the cause lies between nodes."""
    if len(attempt.nodes) == 1 and (incident.overruled_cause or incident.cause) in BETWEEN_NODES:
        return ""
    return incident.node if incident.node in attempt.nodes else _only(attempt)


def _only(attempt: Attempt) -> str:
    return attempt.nodes[0] if len(attempt.nodes) == 1 else ""


def is_verdict_awaited(attempt: Attempt) -> bool:
    """Return whether the verdict on its end is still worth waiting for."""
    since = timezone.now() - VERDICT_WITHIN
    return Incident.objects.filter(attempt=attempt, incarnation=None, version=0, opened_at__gt=since).exists()
