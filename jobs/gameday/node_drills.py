"""Plant the faults of nodes: ask an agent, follow what health rules make of it, clean up, judge.

The node is idle and sound, and its operator lets it take part (VIGIL_AGENT_GAMEDAY=yes): nobody's job is touched. A
request is withdrawn if a job starts first, and the agent refuses it beside jobs. The fault ends by itself, on the node.
Then the entries whose evidence was planted, all of it, are cleared (what comes later, by jobs.gameday.leftovers); a
drain that followed from one is undone like any drain by a health rule (nodes.remediation.return_to_service), and a
person's never is.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from jobs.gameday.faults import FAULTS, Fault
from jobs.gameday.judge import describe_node
from jobs.gameday.results import State, store
from jobs.models import Drill, GameDay
from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import Agent, BurnInNode, HealthEntry, MaintenanceWindow, Node, NodeEvent, NodeOrder, Partition
from nodes.remediation import inbox
from nodes.telemetry import planting
from portal.access import note
from vigil_core import formatting

IDLE_NODE_TIMEOUT = timedelta(minutes=10)
"""How long to wait for an idle node."""
RETURN_TIMEOUT = timedelta(minutes=10)
"""How long after the fault a node may take to be back in service."""
SLACK = timedelta(seconds=30)
"""For the rules and the scheduler, after a fault has ended."""
LATE_REPORT = timedelta(seconds=30)
"""How long after a request was taken back its agent may report the fault: it had read the request just before."""
MAX_ENTRIES, MAX_EVENTS = 50, 50
Decision = HealthEntry.EntryDecision
HOW_TO = "Set VIGIL_AGENT_GAMEDAY=yes for the agent of a node there (docs/how-to/game-day.md)."


class NoNode(Exception):
    """Raised if no node can take the fault now; the message says why. `may_change`: waiting may help."""

    def __init__(self, text: str, *, may_change: bool = True) -> None:
        super().__init__(text)
        self.may_change = may_change


def begin(game_day: GameDay, drill: Drill) -> None:
    """Ask an agent to plant the fault; leave the drill waiting while every node is busy, for ten minutes at most."""
    now = timezone.now()
    waiting = Drill.objects.filter(pk=drill.pk, state=State.WAITING)
    waiting.filter(submitted_at=None).update(submitted_at=now)
    try:
        node = _idle_node(game_day.partition, FAULTS[drill.fault], now)
    except NoNode as error:
        has_waited = drill.submitted_at is not None and now - drill.submitted_at > IDLE_NODE_TIMEOUT
        if not error.may_change or has_waited:
            waiting.update(state=State.NOT_TRIED, detail=f"Not tried: {error}")
        else:
            waiting.update(detail=f"Waits for a node: {error}")
        return
    describe_node(drill, node)
    with transaction.atomic():
        agent = Agent.objects.select_for_update(no_key=True).get(node=node)
        facts = {"node": drill.node, "driver": drill.driver, "slurm": drill.slurm}
        if not waiting.update(state=State.RUNNING, submitted_at=now, detail="", **facts):
            return  # another worker was faster, maybe on another node
        if not planting.request_fault(agent, drill.pk, drill.fault, FAULTS[drill.fault].seconds):
            transaction.set_rollback(True)  # another game day was faster on this node
            return
        note(game_day.started_by, "gameday.fault", node, f"{FAULTS[drill.fault].title}, injected by {game_day}")


def follow(game_day: GameDay, drill: Drill) -> None:
    """Note what has become of the fault, and end the drill once everything is as it was before."""
    now, fault = timezone.now(), FAULTS[drill.fault]
    is_cancelled = game_day.cancel_requested_at is not None
    assert drill.submitted_at is not None
    report = planting.report_of(drill.node, drill.pk, drill.submitted_at, fault.seconds)
    if report is None:
        _wait_for_agent(game_day, drill, now)
        return
    planting.withdraw(drill.node, drill.pk)
    if report.until is None:
        store(drill, State.NOT_TRIED, f"Not tried: the agent of {drill.node} refused. {report.text}")
        return
    drill.planted_at = report.at
    _measure(drill, fault, now)
    is_expected = not _is_settled(drill) and now < report.until + SLACK  # also if cancelled: the node has it by now
    if is_expected or (_is_still_reported(drill) and now < report.until + RETURN_TIMEOUT):
        store(drill, State.RUNNING)
    elif problem := _clean_up(game_day, drill, now):
        store(drill, State.FAILED if now > report.until + RETURN_TIMEOUT else State.RUNNING, problem)
    else:
        problems = _problems(drill, fault)
        state = State.NOT_TRIED if is_cancelled else State.FAILED if problems else State.PASSED
        store(drill, state, "Cancelled." if is_cancelled else " ".join(problems))


def _wait_for_agent(game_day: GameDay, drill: Drill, now: datetime) -> None:
    """Withdraw the request if its time is over, or a job has started on the node; then end the drill.

    While a drill runs, and its fault is not planted, its detail says why the request was withdrawn early.
    """
    assert drill.submitted_at is not None
    is_cancelled = game_day.cancel_requested_at is not None
    withdrawn_at = min(game_day.cancel_requested_at or now, drill.submitted_at + planting.OFFERED_FOR)
    node = Node.objects.filter(name=drill.node).first()
    if not drill.detail and node is not None and node.has_jobs:
        drill.detail = f"A job started on {drill.node} before the fault was injected."
        store(drill, State.RUNNING, drill.detail)
    if not (drill.detail or is_cancelled or now > withdrawn_at):
        return
    planting.withdraw(drill.node, drill.pk)
    if now < withdrawn_at + LATE_REPORT:
        return
    if is_cancelled:
        store(drill, State.NOT_TRIED, "Cancelled.")
    elif drill.detail:
        store(drill, State.NOT_TRIED, drill.detail)
    else:
        waited = formatting.duration((now - drill.submitted_at).total_seconds())
        store(drill, State.FAILED, f"The agent of {drill.node} has not injected it after {waited}.")


def _idle_node(partition: str, fault: Fault, now: datetime) -> str:
    """Return a node of the partition that takes faults and on which nothing else happens. Raises NoNode."""
    rows = Partition.objects.reported()
    row = rows.filter(name=partition).first() if partition else rows.filter(is_default=True).first()
    names = set(row.nodes) if row else set()
    agents = [agent for agent in Agent.objects.filter(facts__game_day=True, is_made_up=False) if agent.node in names]
    if not agents:
        name = partition or "the default partition"
        raise NoNode(f"no agent on {name} lets game days inject faults. {HOW_TO}", may_change=False)
    in_maintenance = MaintenanceWindow.ends_by_node(now)
    unusable: list[str] = []
    for agent in sorted(agents, key=lambda agent: agent.node):
        problem = "is in maintenance" if agent.node in in_maintenance else _why_unusable(agent, fault, now)
        if not problem:
            return agent.node
        unusable.append(f"{agent.node} {problem}")
    raise NoNode(f"{formatting.listed(unusable[:5])}.")


def _why_unusable(agent: Agent, fault: Fault, now: datetime) -> str:
    """Return why the node can take no fault now; "" if it can."""
    node = Node.objects.reported().filter(name=agent.node).first()
    if node is None or not node.is_in_service:
        return "is out of service"
    if agent.is_silent(now):
        return "has an agent that is silent"
    if node.has_jobs:
        return "runs jobs"
    if BurnInNode.objects.filter(node=agent.node, is_active=True).exists():
        return "is in a burn-in"
    findings = HealthEntry.objects.active().filter(node=agent.node)
    if finding := findings.filter(Q(rule__in=fault.rules) | Q(action__in=OUT_OF_SERVICE)).first():
        return f"has a finding of its own: {finding.title}"
    if NodeOrder.objects.open().filter(node=agent.node).exists() or planting.wanted_of(agent) is not None:
        return "has an open order or another injected fault"
    if Drill.objects.filter(node=agent.node, state=State.RUNNING).exists():
        return "has another injected fault"
    return ""


def _measure(drill: Drill, fault: Fault, now: datetime) -> None:
    """Note the entry that followed, what was decided, and how long that took. `now` counts where no row has a time."""
    assert drill.planted_at is not None
    entries = [entry for entry in _entries(drill) if entry.opened_at is not None]
    if not entries:
        return
    entry = min(entries, key=lambda entry: (entry.rule not in fault.rules, entry.pk))
    if drill.noticed_s is None:
        noticed_at = entry.order.asked_at if entry.order else now
        drill.noticed_s = round(max(0.0, (noticed_at - drill.planted_at).total_seconds()), 3)
    drill.entry, drill.cause, drill.is_cause_right = entry, entry.rule, entry.rule in fault.rules
    drill.action = _action(entry)
    if entry.action not in OUT_OF_SERVICE:
        drill.is_action_right = not fault.drains
    elif entry.decision != Decision.NONE:
        drill.is_action_right = fault.drains


def _entries(drill: Drill) -> list[HealthEntry]:
    """Return what was found on the node because of the fault, and of nothing else."""
    rows = HealthEntry.objects.filter(node=drill.node, is_planted=True).select_related("order__asked_by", "decided_by")
    newest = sorted(rows.order_by("-pk")[:MAX_ENTRIES], key=lambda entry: entry.pk)
    return [entry for entry in newest if any(o.fields.get("planted") == drill.pk for o in entry.observations())]


def _action(entry: HealthEntry) -> str:
    if entry.action not in OUT_OF_SERVICE:
        return "Watched: no action on the node."
    if entry.order is not None:
        return f"Drained by {entry.order.requester}: {entry.order.reason}."
    if entry.decision == Decision.PROPOSED:
        return f"Drain proposed. {entry.held_back}".strip()
    return ""


def _is_settled(drill: Drill) -> bool:
    """Return whether the rules have done what they do: noticed it, decided, and drained the node if that follows."""
    if drill.entry is None or drill.is_action_right is None:
        return False
    order = drill.entry.order
    return order is None or not order.is_open


def _is_still_reported(drill: Drill) -> bool:
    """Return whether the node still reports the planted state."""
    rows = NodeEvent.objects.filter(agent__node=drill.node, is_open=True, kind__in=("gpu.silent", "mount.slow"))
    return any(row.data.get("planted") == drill.pk for row in rows[:MAX_EVENTS])


def _clean_up(game_day: GameDay, drill: Drill, now: datetime) -> str:
    """Clear what was planted; return what is not yet as it was before, "" if all is."""
    assert drill.planted_at is not None
    entries = _entries(drill)
    for entry in entries:
        if entry.is_active:
            inbox.clear(game_day.started_by, entry.pk, f"Injected by {game_day}.")
    orders = [entry.order for entry in entries if entry.order is not None and not entry.order.asked_by_id]
    node = Node.objects.filter(name=drill.node).first()
    if not orders or node is None:
        return ""
    newest = NodeOrder.objects.filter(node=drill.node).first()
    if not node.is_in_service or newest is None or newest.action != NodeOrder.Action.UNDRAIN or newest.is_open:
        return f"{drill.node} is not back in service. /drains says why; undrain it there."
    if drill.in_service_s is None:
        drill.in_service_s = round(((newest.ended_at or now) - drill.planted_at).total_seconds(), 3)
    return ""


def _problems(drill: Drill, fault: Fault) -> list[str]:
    if drill.entry is None:
        return ["No health rule noticed it."]
    problems = []
    if _is_still_reported(drill):
        problems.append(f"The fault has not ended on {drill.node}: what lasts is real. /health says what to do.")
    if not drill.is_cause_right:
        problems.append(f"The rule {drill.cause} noticed it, not {' or '.join(sorted(fault.rules))}.")
    if not drill.is_action_right:
        wrong = "No drain was ordered or proposed." if fault.drains else "Its rule takes the node out of service."
        problems.append(wrong)
    if drill.entry.decision == Decision.APPROVED:
        problems.append(f"{drill.entry.decided_by} approved the drain: undrain {drill.node}.")
    return problems
