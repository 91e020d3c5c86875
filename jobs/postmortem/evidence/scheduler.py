"""Collect what the scheduler reports about the job, its steps and its nodes around the end."""

from __future__ import annotations

from django.db.models import Q

from diagnosis.logs.prefixes import Prefix
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs.sign import Sign
from jobs.models import Attempt, Incident
from jobs.postmortem.evidence.collected import NEAR_END, IncidentEvidence, context
from nodes.models import Node, NodeOrder

SCHEDULER = "scheduler"
MAX_NODES = 20

# States that name a cause by themselves.
_STATES = {
    "timeout": "scheduler.time_limit",
    "deadline": "scheduler.time_limit",
    "node_fail": "scheduler.node_fail",
    "boot_fail": "scheduler.node_fail",
    "preempted": "scheduler.preempted",
    "out_of_memory": "memory.host_oom",
}

_ENDS = {
    "launch": "scheduler.launch",
    "permission": "storage.permission",
    "timeout": "scheduler.time_limit",  # warned of its limit, it ended before that
}


def collect_scheduler_report(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add the job's state, exit code, signal and cancellation, and steps that were killed for memory."""
    attempt = incident.attempt
    if incident.incarnation is not None:
        return
    found.available.add("scheduler")
    at = attempt.ended_at.timestamp() if attempt.ended_at else None
    node = attempt.nodes[0] if len(attempt.nodes) == 1 else ""
    if attempt.state == "node_fail" and not node:
        node = _lost_node(incident)
    prefix = Prefix(stamp=at, is_dated=True, node=node)
    text = f"{attempt.state} {attempt.reason}".strip()
    if cause := _cause_of(attempt):
        found.signs.append(
            Sign(SCHEDULER, 0, text, cause=cause, role="root", prefix=prefix, at=at, source_kind="slurm")
        )
    elif (attempt.exit_code or attempt.signal) and attempt.failure.get("kind") != "hang":  # then it is its launcher's
        groups = {"signal": str(attempt.signal)} if attempt.signal else {"code": str(attempt.exit_code)}
        # Not attempt.reason, which quotes the program where the scheduler gives none.
        how = (
            f"{attempt.state}, signal {attempt.signal}"
            if attempt.signal
            else f"{attempt.state}, exit code {attempt.exit_code}"
        )
        found.signs.append(
            Sign(
                SCHEDULER,
                0,
                how,
                cause="unknown",
                role="exit",
                prefix=prefix,
                groups=groups,
                at=at,
                source_kind="slurm",
            )
        )
    for step in attempt.slurm_steps:
        if isinstance(step, dict) and step.get("state") == "out_of_memory" and step.get("name") != "extern":
            step_text = f"step {step.get('number')} out_of_memory"
            found.signs.append(
                Sign(
                    SCHEDULER,
                    0,
                    step_text,
                    cause="memory.host_oom",
                    role="root",
                    prefix=prefix,
                    at=at,
                    source_kind="slurm",
                )
            )


def _cause_of(attempt: Attempt) -> str:
    if cause := _STATES.get(attempt.state):
        return cause
    if attempt.cancel_asked_at is not None or attempt.state == "cancelled":
        return "scheduler.cancelled"
    return _ENDS.get(attempt.cause, "")


def _lost_node(incident: Incident) -> str:
    """Return the node that went down around the end, if it was exactly one."""
    down = [node.name for node in _changed_nodes(incident) if not node.is_in_service and "drain" not in node.state]
    return down[0] if len(down) == 1 else ""


def _changed_nodes(incident: Incident) -> list[Node]:
    """Return the attempt's nodes whose state was given a reason around the end."""
    near = Q(reason_at__gte=incident.at - NEAR_END, reason_at__lte=incident.at + NEAR_END)
    return list(Node.objects.filter(near, name__in=incident.attempt.nodes).order_by("name")[:MAX_NODES])


def collect_node_states(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add nodes that went down or were drained within ten minutes, with the reason."""
    nodes = incident.attempt.nodes
    if not nodes:
        return
    for node in _changed_nodes(incident):
        text = f"{node.name} is {node.state}" + (f": {node.reason}" if node.reason else "")
        at = node.reason_at.timestamp() if node.reason_at else None
        found.signs.append(context(SCHEDULER, text, cause="scheduler.node_fail", node=node.name, at=at))
    near = Q(ended_at__gte=incident.at - NEAR_END, ended_at__lte=incident.at + NEAR_END)
    orders = NodeOrder.objects.filter(near, node__in=nodes, state=NodeOrder.State.DONE).order_by("id")
    for order in orders[:MAX_NODES]:
        done = "drained" if order.action == NodeOrder.Action.DRAIN else "put back into service"
        text = f"{order.node} was {done}" + (f": {order.reason}" if order.reason else "")
        at = order.ended_at.timestamp() if order.ended_at else None
        found.signs.append(context(SCHEDULER, text, node=order.node, at=at))
