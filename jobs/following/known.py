"""What is known of why an attempt ended when it is decided what follows: a verdict, or only how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.utils import timezone

from diagnosis.causes import CAUSES, NONE, UNKNOWN
from jobs.following.cause import NUMERICS, WORDS
from jobs.models import Attempt, Incident

VERDICT_WITHIN = timedelta(seconds=15)  # of the end; what follows does not wait for it any longer

# The cause that the mere end of an attempt speaks for, by its one word (jobs.following.cause).
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
# What the trainer or the batch script says of itself is known without reading logs.
CERTAIN = frozenset({*NUMERICS.values(), "permission", "unsaved"})


@dataclass(frozen=True)
class Known:
    """`code`: of diagnosis.causes. `version`: of the verdict that it is by; 0: there was none."""

    code: str
    says: str
    node: str = ""
    fingerprint: str = ""
    version: int = 0


def known_of(attempt: Attempt, cause: str) -> Known:
    """By the newest verdict, a person's word first; where there is none, by how the attempt ended."""
    incident = (
        Incident.objects.filter(attempt=attempt, incarnation=None, version__gt=0).select_related("overruled_by").first()
    )
    mechanical = BY_END.get(cause, "program.exception")
    if incident is None:
        return Known(mechanical, WORDS.get(cause, ""), node=_only(attempt))
    code = incident.overruled_cause or incident.cause
    if cause in CERTAIN or code == NONE or code not in CAUSES:
        return Known(mechanical, WORDS[cause], _node(incident, attempt), incident.fingerprint, incident.version)
    sure = "" if code == UNKNOWN else f" ({100 * (incident.confidence or 0):.0f} % sure)"
    if incident.overruled_cause:
        sure = f" (according to {incident.overruled_by or 'somebody'})"
    node = _node(incident, attempt)
    on = f" on {node}" if node and CAUSES[code].owner == "sysadmin" else ""
    says = f"{CAUSES[code].heading}{on}{sure}."
    return Known(code, says, node, incident.fingerprint, incident.version)


def _node(incident: Incident, attempt: Attempt) -> str:
    """The node it was on: where there was but one that one, unless what failed lies between nodes."""
    if len(attempt.nodes) == 1 and (incident.overruled_cause or incident.cause) in BETWEEN_NODES:
        return ""
    return incident.node if incident.node in attempt.nodes else _only(attempt)


def _only(attempt: Attempt) -> str:
    return attempt.nodes[0] if len(attempt.nodes) == 1 else ""


def is_awaited(attempt: Attempt) -> bool:
    """Whether the verdict on its end is still worth waiting for."""
    since = timezone.now() - VERDICT_WITHIN
    return Incident.objects.filter(attempt=attempt, incarnation=None, version=0, opened_at__gt=since).exists()
