"""List the nodes that are out of service: who took each out, whether the reason still stands, and what that costs.

A page of nodes takes one query per table, however many nodes there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from django.conf import settings
from django.db.models import Max, Prefetch, QuerySet
from django.utils import timezone

from nodes.cluster import drain
from nodes.cluster.newest_orders import newest_orders
from nodes.drains.reasons import DrainHolder, DrainReason, read_reason
from nodes.drains.validity import DrainEvidence, ReasonJudgement, ReasonValidity, judge
from nodes.health.requesters import MAINTENANCE_PREFIX
from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import (
    Agent,
    Gpu,
    GpuPlace,
    HealthEntry,
    Holding,
    MaintenanceWindow,
    Node,
    NodeEvent,
    NodeOrder,
    QueuedJob,
)
from nodes.monitoring.site_rules import rules_in_force
from nodes.scheduling import node_states
from vigil_core import untrusted

MAX_EVENTS = 2_000


@dataclass(frozen=True)
class DrainedNode:
    """A node out of service, with whose drain it is and whether its reason still stands."""

    node: Node
    reason: DrainReason
    judgement: ReasonJudgement
    has_jobs: bool
    order: NodeOrder | None
    """The order of Vigil that drained it; None: somebody else did."""
    pending: NodeOrder | None
    """An order that waits for the scheduler."""
    findings: tuple[HealthEntry, ...] = ()
    last_order: NodeOrder | None = None
    """The last order for the node that was carried out, whether or not it explains why it is out."""

    @property
    def holder(self) -> DrainHolder:
        return self.reason.holder

    @property
    def holder_name(self) -> str:
        """Return a person's or a rule's name, or who else drained it: "Slurm", "NHC"; "" if nobody knows."""
        if self.holder == DrainHolder.RULE and self.reason.requester:
            return self.reason.requester
        if self.order is not None:
            return self.order.requester
        names = {DrainHolder.SLURM: "Slurm", DrainHolder.NHC: "NHC", DrainHolder.HEALTH_CHECK: "HealthCheckProgram"}
        return names.get(self.holder) or self.reason.requester or self.node.reason_by

    @property
    def approved_by(self) -> str:
        """Return the person who approved the drain that a rule proposed; "" if Vigil drained by itself."""
        if self.holder != DrainHolder.RULE or self.order is None or self.order.asked_by is None:
            return ""
        return self.order.asked_by.username

    @property
    def idle_gpus(self) -> int:
        """Return how many GPUs nobody can use because of it: those in use by running jobs are not lost yet."""
        return max(0, self.node.gpus - self.node.gpus_used)

    @property
    def is_over(self) -> bool:
        return self.judgement.validity == ReasonValidity.OUTDATED

    @property
    def advice(self) -> str:
        """Return what to do next, in one or two sentences."""
        if self.has_jobs:
            return "Wait until its jobs have ended before you repair it."
        if self.is_over:
            return "The problem is gone: test the node and return it to service."
        if self.holder == DrainHolder.BURN_IN:
            return "It did not pass. See the burn-in's results, repair the node, then test it again."
        if self.holder == DrainHolder.MAINTENANCE:
            is_broken = any(entry.is_active for entry in self.findings)
            return (
                "It stays drained after its maintenance: repair it, then return it to service." if is_broken
                else "It returns when its maintenance ends."
            )  # fmt: skip
        if self.holder == DrainHolder.RULE:
            if settings.VIGIL_HEALTH == "act":
                return "See the finding. Vigil returns the node once it has cleared."
            return "See the finding. Once it has cleared, return the node: Vigil does not, as it only proposes."
        if self.holder == DrainHolder.PERSON:
            name = self.holder_name
            return f"Ask {name}." if name else "Ask who drained it."
        return self.reason.advice or "Find out who drained it, and why."


def out_of_service() -> QuerySet[Node]:
    """Select the nodes that are drained, draining, down or failing."""
    states = Node.objects.values_list("state", flat=True).distinct().order_by()
    return Node.objects.filter(state__in=[state for state in states if not node_states.is_in_service(state)])


def described(nodes: Iterable[Node], now: datetime | None = None) -> list[DrainedNode]:
    """Return what is known about the drains of these nodes, in their order."""
    nodes = list(nodes)
    records = _Records(nodes, now or timezone.now())
    return [records.describe(node) for node in nodes]


class _Records:
    """The rows that a page of drained nodes needs, read once."""

    def __init__(self, nodes: Sequence[Node], now: datetime) -> None:
        self.nodes = nodes
        self.now = now
        self.names = [node.name for node in nodes]
        self.since = min((node.reason_at for node in nodes if node.reason_at), default=now)
        self.rules = frozenset(rules_in_force())

    def describe(self, node: Node) -> DrainedNode:
        last = order = self.orders.get(node.name)
        if order is not None and not (order.action == NodeOrder.Action.DRAIN and drain.is_reason_of(order, node)):
            order = None
        rules = self.rules | {order.rule} if order is not None and order.rule else self.rules
        reason = read_reason(node.reason, node.reason_by, rules)
        findings = tuple(order.health_entries.all()) if order is not None else ()
        if order is not None and order.asked_by is not None:
            holder = DrainHolder.RULE if order.is_for_finding else DrainHolder.PERSON
            requester = findings[0].rule if order.is_for_finding else order.requester
            reason = DrainReason(order.reason, holder, reason.cause, requester, reason.about)
        if reason.holder == DrainHolder.MAINTENANCE:
            findings = self.unrepaired.get(node.name, ())
        elif reason.holder == DrainHolder.RULE:  # another rule may have found something since
            linked = {entry.pk for entry in findings}
            findings += tuple(entry for entry in self.unrepaired.get(node.name, ()) if entry.pk not in linked)
        return DrainedNode(
            node, reason, judge(reason, self._evidence(node, findings)), node.has_jobs, order,
            self.pending.get(node.name), findings, last,
        )  # fmt: skip

    def _evidence(self, node: Node, findings: Sequence[HealthEntry]) -> DrainEvidence:
        agent = self.agents.get(node.name)
        reports = agent is not None and not agent.is_silent(self.now)
        host = _table(agent.newest.get("host")) if agent is not None and reports else {}
        events = self.events.get(agent.pk, {}) if agent is not None else {}
        after = {kind: at for kind, at in events.items() if node.reason_at is None or at > node.reason_at}
        booted = [at for at in (node.booted_at, after.get("boot")) if at is not None]
        words = frozenset(node_states.state_words(node.state))
        open_findings = sum(entry.is_active for entry in findings)
        return DrainEvidence(
            since=node.reason_at,
            has_jobs=node.has_jobs,
            completing_jobs=tuple(self.completing.get(node.name, ())),
            is_reachable=node_states.UNREACHABLE.isdisjoint(words),
            agent_reports=reports,
            booted_at=max(booted, default=None),
            driver_reloaded_at=after.get("driver.reloaded"),
            driver=untrusted.line(agent.facts.get("driver"), 40) if agent is not None else "",
            replaced_gpus=self._replaced(agent, node.reason_at),
            gpus_found=len(self.gpus.get(agent.pk, ())) if agent is not None and reports else None,
            gpus_expected=node.gpus,
            memory_mib=untrusted.number(host.get("memory_total_mib"), 1e12),
            memory_expected_mib=node.memory_mib,
            blocked_processes=untrusted.number(host.get("blocked_processes"), 1e6),
            stray_processes=self._stray(node, agent) if agent is not None and reports else None,
            open_findings=open_findings,
            cleared_findings=len(findings) - open_findings,
            is_window_open=self.windows.get(self._requester(node)),
        )

    def _requester(self, node: Node) -> str:
        order = self.orders.get(node.name)
        return order.rule if order is not None else node.reason_by

    @cached_property
    def windows(self) -> Mapping[str, bool]:
        """Return whether each window is unfinished, by the name under which it drains."""
        names = {self._requester(node) for node in self.nodes}
        numbers = [number for name in names if (number := untrusted.whole(name.removeprefix(MAINTENANCE_PREFIX)))]
        rows = MaintenanceWindow.objects.filter(pk__in=numbers)
        return {window.requester: window.is_unfinished for window in rows}

    def _replaced(self, agent: Agent | None, since: datetime | None) -> tuple[int, ...]:
        """Return the slots that another GPU has taken since."""
        if agent is None or since is None:
            return ()
        left = {place.index for place in self.places.get(agent.pk, ()) if place.until and place.until > since}
        came = {place.index for place in self.places.get(agent.pk, ()) if place.until is None and place.since > since}
        return tuple(sorted(left & came))

    def _stray(self, node: Node, agent: Agent) -> int:
        """Return how many processes of ended jobs are on its GPUs: while no job runs, all that name one."""
        free = {gpu.uuid for gpu in self.gpus.get(agent.pk, ())} - self.allocated.get(agent.pk, set())
        rows = agent.processes if isinstance(agent.processes, list) else []
        is_empty = not node.has_jobs
        return sum(
            isinstance(row, dict) and (row.get("gpu") in free or (is_empty and bool(row.get("job")))) for row in rows
        )

    @cached_property
    def orders(self) -> Mapping[str, NodeOrder]:
        """Return the newest order of each node that was carried out, with the findings that it follows."""
        nodes = Node.objects.filter(name__in=self.names)
        entries = HealthEntry.objects.order_by("pk").select_related("gpu").defer("evidence", "progress")
        rows = newest_orders(nodes, state=NodeOrder.State.DONE).select_related("asked_by")
        return {row.node: row for row in rows.prefetch_related(Prefetch("health_entries", queryset=entries))}

    @cached_property
    def pending(self) -> Mapping[str, NodeOrder]:
        rows = NodeOrder.objects.open().filter(node__in=self.names).select_related("asked_by")
        return {row.node: row for row in rows}

    @cached_property
    def unrepaired(self) -> Mapping[str, tuple[HealthEntry, ...]]:
        """Return by node what wants it out of service, whoever drained it: after a window it does not return."""
        found: defaultdict[str, list[HealthEntry]] = defaultdict(list)
        rows = HealthEntry.objects.open().filter(node__in=self.names, action__in=OUT_OF_SERVICE)
        for entry in rows.select_related("gpu").defer("evidence", "progress"):
            found[entry.node].append(entry)
        return {node: tuple(entries) for node, entries in found.items()}

    @cached_property
    def agents(self) -> Mapping[str, Agent]:
        return {agent.node: agent for agent in Agent.objects.filter(node__in=self.names)}

    @cached_property
    def gpus(self) -> Mapping[int, list[Gpu]]:
        found: defaultdict[int, list[Gpu]] = defaultdict(list)
        agents = [agent.pk for agent in self.agents.values()]
        rows = Gpu.objects.filter(agent__in=agents, gone_at=None, lost_at=None).only("uuid", "index", "agent_id")
        for gpu in rows:
            found[gpu.agent_id].append(gpu)
        return found

    @cached_property
    def allocated(self) -> Mapping[int, set[str]]:
        found: defaultdict[int, set[str]] = defaultdict(set)
        agents = [agent.pk for agent in self.agents.values()]
        rows = Holding.objects.filter(agent__in=agents, until=None).values_list("agent", "gpu__uuid")
        for agent, uuid in rows:
            found[agent].add(uuid)
        return found

    @cached_property
    def places(self) -> Mapping[int, list[GpuPlace]]:
        found: defaultdict[int, list[GpuPlace]] = defaultdict(list)
        agents = [agent.pk for agent in self.agents.values()]
        for place in GpuPlace.objects.filter(agent__in=agents, since__gt=self.since)[:MAX_EVENTS]:
            found[place.agent_id].append(place)
        for place in GpuPlace.objects.filter(agent__in=agents, since__lte=self.since, until__gt=self.since)[
            :MAX_EVENTS
        ]:
            found[place.agent_id].append(place)
        return found

    @cached_property
    def events(self) -> Mapping[int, dict[str, datetime]]:
        """Return when each machine last booted or reloaded its driver, since the oldest drain of the page."""
        found: defaultdict[int, dict[str, datetime]] = defaultdict(dict)
        rows = NodeEvent.objects.filter(
            agent__in=[agent.pk for agent in self.agents.values()], kind__in=("boot", "driver.reloaded"),
            at__gt=self.since,
        ).order_by()  # fmt: skip
        for agent, kind, at in (
            rows.values("agent", "kind").annotate(newest=Max("at")).values_list("agent", "kind", "newest")
        ):
            found[agent][kind] = at
        return found

    @cached_property
    def completing(self) -> Mapping[str, list[str]]:
        found: defaultdict[str, list[str]] = defaultdict(list)
        for scheduler_id, nodes in QueuedJob.objects.filter(state="completing").values_list("scheduler_id", "nodes"):
            for name in nodes:
                found[name].append(scheduler_id)
        return found


def _table(value: object) -> Mapping[str, Any]:
    """Return what an agent reported as a table; {} if it is none."""
    return value if isinstance(value, dict) else {}
