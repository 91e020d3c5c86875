"""Read the current state of GPUs and nodes, as observations for health rules.

One query per table, however many nodes there are: a thousand nodes are read every five seconds. A machine whose agent
is silent reports nothing but its silence: what its GPUs do is unknown then, and what is unknown neither opens nor
clears anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from nodes.health.progress import Observation, Subject
from nodes.health.rules.condition import FieldValue
from nodes.inventory import comparison
from nodes.inventory.minimums import MinimumVersions
from nodes.inventory.software import NodeSoftware, read_facts
from nodes.models import Agent, Gpu, Node, NodeEvent, Reading
from nodes.monitoring import assessments
from nodes.monitoring.gpu_fields import counter_fields, sample_fields
from nodes.monitoring.reported import host_values, listed, mounted, number, table
from nodes.scheduling import node_states
from nodes.software_inventory import minimums_in_force
from vigil_core import untrusted

FRESH = timedelta(seconds=60)
_UNREAD = ("facts", "first_seen_at", "counted_at", "fault")
MIN_SILENT = 3
"""Silent agents from which on their share matters."""


@dataclass(frozen=True)
class States:
    """Everything that is read for one evaluation. `agents` are those of real machines, by row id."""

    now: datetime
    agents: Mapping[int, Agent]
    gpus: Mapping[int, tuple[Gpu, ...]]
    nodes: Mapping[str, Node]
    lasting: Mapping[int, tuple[NodeEvent, ...]]
    gone: Mapping[int, tuple[Gpu, ...]]
    """GPUs that were last seen there and are no longer listed, the last to leave first."""
    sliced: frozenset[int]
    """The agents of which a GPU is or was cut into MIG slices: the scheduler lists slices, and NVML whole GPUs."""
    nodes_are_fresh: bool = True
    """Whether the scheduler has reported its nodes lately: else jobs may run that the rows do not show."""

    @classmethod
    def read(cls, now: datetime) -> States:
        agents = {agent.pk: agent for agent in Agent.objects.filter(is_made_up=False).exclude(heard_at=None)}
        gpus: defaultdict[int, list[Gpu]] = defaultdict(list)
        rows = Gpu.objects.filter(gone_at=None, agent__in=list(agents)).defer(*_UNREAD)
        for gpu in rows.order_by("agent", "index"):
            gpus[gpu.agent_id].append(gpu)
        lasting: defaultdict[int, list[NodeEvent]] = defaultdict(list)
        open_events = NodeEvent.objects.filter(is_open=True, kind__in=("gpu.silent", "mount.slow"))
        for event in open_events.order_by("at"):
            lasting[event.agent_id].append(event)
        return cls(
            now,
            agents,
            {pk: tuple(rows) for pk, rows in gpus.items()},
            {node.name: node for node in Node.objects.reported()},
            {pk: tuple(rows) for pk, rows in lasting.items()},
            _gone_gpus(agents),
            frozenset(Gpu.objects.filter(has_mig=True).order_by().values_list("agent", flat=True)),
            Reading.objects.filter(part=Reading.Part.NODES, read_at__gt=now - FRESH).exists(),
        )

    def observations(self) -> Iterator[Observation]:
        """Yield one observation per signal and subject."""
        for agent in self.agents.values():
            yield self._agent(agent)
            if not agent.is_silent(self.now):
                yield from self._machine(agent)
        yield from self._all_agents()
        yield from assessments.observations(self.now)

    def _machine(self, agent: Agent) -> Iterator[Observation]:
        at = self.now.timestamp()
        for signal, fields in (
            ("host", self._host(agent)),
            ("nvml", {"silent_s": self._silent_s(agent)} | _planted_field(self._silent_event(agent))),
            ("gpu_count", self._gpu_count(agent)),
            ("software", self._software(agent)),
            ("leftover", self._leftover(agent)),
        ):
            yield Observation(signal, Subject(agent.node), at, fields)
        yield from self._mounts(agent, at)
        yield from self._ports(agent, at)
        if not self._silent_s(agent):  # while NVML hangs, what is stored about its GPUs is old
            yield from self._gpus(agent, at)

    def _gpus(self, agent: Agent, at: float) -> Iterator[Observation]:
        rows = self.gpus.get(agent.pk, ())
        samples = {gpu.pk: table(table(table(agent.newest).get("gpus")).get(gpu.uuid)) for gpu in rows}
        counters = counter_fields({gpu.pk: table(gpu.counters) for gpu in rows}, samples)
        for gpu in rows:
            subject = Subject(agent.node, gpu.uuid)
            yield Observation("gpu_lost", subject, at, {"is_lost": gpu.lost_at is not None})
            if gpu.lost_at is None:
                yield Observation("gpu_samples", subject, at, sample_fields(gpu, samples[gpu.pk]))
                yield Observation("gpu_counters", subject, at, counters[gpu.pk])
        for gpu in self._vanished(agent):
            yield Observation("gpu_lost", Subject(agent.node, gpu.uuid), at, {"is_lost": True})

    def _agent(self, agent: Agent) -> Observation:
        silent_s = (self.now - agent.heard_at).total_seconds() if agent.heard_at else None
        if agent.pk in self._retired:
            silent_s = 0.0  # nobody misses it: what was found of its silence ends
        node = self.nodes.get(agent.node)
        fields: dict[str, FieldValue] = {
            "silent_s": silent_s,
            "silent_share": self._silent_share,
            "is_down": None if node is None else _is_down(node.state),
        }
        return Observation("agent", Subject(agent.node), self.now.timestamp(), fields)

    def _all_agents(self) -> Iterator[Observation]:
        if agents := len(self.agents) - len(self._retired):
            fields = {"agents": agents, "silent": self._silent, "silent_share": self._silent / agents}
            yield Observation("agents", Subject(""), self.now.timestamp(), fields)

    @cached_property
    def _silent(self) -> int:
        return sum(agent.is_silent(self.now) for agent in self.agents.values()) - len(self._retired)

    @cached_property
    def _retired(self) -> frozenset[int]:
        """Return the agents of nodes that were taken away; none while the scheduler is not read."""
        if not self.nodes_are_fresh:
            return frozenset()
        return frozenset(agent.pk for agent in self.agents.values() if agent.is_retired(self.now, self.nodes))

    @property
    def _silent_share(self) -> float:
        """Return the share of silent agents; 0 for one or two, which are no sign of something common."""
        return self._silent / (len(self.agents) - len(self._retired)) if self._silent >= MIN_SILENT else 0.0

    def _silent_s(self, agent: Agent) -> float:
        event = self._silent_event(agent)
        return (self.now - event.at).total_seconds() if event else 0.0

    def _silent_event(self, agent: Agent) -> NodeEvent | None:
        return next((event for event in self.lasting.get(agent.pk, ()) if event.kind == "gpu.silent"), None)

    def _gpu_count(self, agent: Agent) -> dict[str, FieldValue]:
        missing = self._missing(agent)
        return {
            "found": len(self.gpus.get(agent.pk, ())),
            "missing": None if missing is None else missing - len(self._vanished(agent)),
        }

    def _missing(self, agent: Agent) -> int | None:
        """Return how many GPUs fewer the agent lists than the scheduler expects; None if that is unknown."""
        node = self.nodes.get(agent.node)
        if node is None or node.gpus > MAX_PHYSICAL or agent.pk in self.sliced:
            return None
        return max(0, node.gpus - len(self.gpus.get(agent.pk, ())))

    def _vanished(self, agent: Agent) -> Sequence[Gpu]:
        """Return the GPUs that should be there and are not: each of them is lost.

        If NVML lists none at all, its driver has failed, not every GPU. One whose slot another GPU has was replaced.
        Without the scheduler's number, only those count of which the agent said that they vanished.
        """
        listed, gone = self.gpus.get(agent.pk, ()), self.gone.get(agent.pk, ())
        if not listed or not gone:
            return ()
        occupied = {gpu.bus for gpu in listed if gpu.bus}
        gone = tuple(gpu for gpu in gone if gpu.bus not in occupied)
        missing = self._missing(agent)
        return gone[:missing] if missing is not None else [gpu for gpu in gone if gpu.lost_at is not None]

    def _leftover(self, agent: Agent) -> dict[str, FieldValue]:
        """Return the processes that name a job, while the scheduler says that none runs there.

        While jobs run, nobody knows for certain whose process is whose: an array task's own id is not in the queue.
        """
        node = self.nodes.get(agent.node)
        if node is None or not self.nodes_are_fresh:
            return {"processes": None, "user": None}
        rows = [row for row in listed(agent.processes) if isinstance(row, dict) and row.get("job")]
        users = {untrusted.line(row.get("user"), 64) for row in rows}
        if node.has_jobs or not rows:
            return {"processes": 0, "user": ""}
        return {"processes": len(rows), "user": users.pop() if len(users) == 1 else ""}

    def _host(self, agent: Agent) -> dict[str, FieldValue]:
        host = host_values(agent)
        root_total, root_used = number(host, "disk_total_mib:/"), number(host, "disk_used_mib:/")
        shm_total, shm_used = number(host, "shm_total_mib"), number(host, "shm_used_mib")
        return {
            "blocked_processes": number(host, "blocked_processes"),
            "clock_offset_s": None if agent.clock_offset_s is None else abs(agent.clock_offset_s),
            "root_free_share": _free_share(root_total, root_used),
            "root_free_mib": None if root_total is None or root_used is None else root_total - root_used,
            "shm_free_share": _free_share(shm_total, shm_used),
        }

    def _mounts(self, agent: Agent, at: float) -> Iterator[Observation]:
        slow = {
            str(event.data.get("mount")): event
            for event in self.lasting.get(agent.pk, ())
            if event.kind == "mount.slow"
        }
        for path, source in mounted(agent).items():
            event = slow.get(path)
            fields: dict[str, FieldValue] = {
                "is_slow": event is not None,
                "slow_s": (self.now - event.at).total_seconds() if event else 0.0,
                "problem": untrusted.line(event.data.get("problem"), 200) if event else "",
                "affected_share": self._affected_shares.get(source, 0.0),
                **_planted_field(event),
            }
            yield Observation("mount", Subject(agent.node, item=path), at, fields)

    @cached_property
    def _affected_shares(self) -> dict[str, float]:
        """Return by source on which share of the nodes that mount it it is slow now."""
        machines: Counter[str] = Counter()
        slow: Counter[str] = Counter()
        for agent in self.agents.values():
            if agent.is_silent(self.now):
                continue
            sources = mounted(agent)
            machines.update(set(sources.values()))
            paths = {str(event.data.get("mount")) for event in self.lasting.get(agent.pk, ())}
            slow.update({source for path, source in sources.items() if path in paths})
        return {source: slow[source] / mounting for source, mounting in machines.items()}

    def _ports(self, agent: Agent, at: float) -> Iterator[Observation]:
        for name, value in host_values(agent).items():
            kind, _, port = name.partition(":")
            if kind == "ib_up" and port and isinstance(value, int | float):
                fields = {"is_up": bool(value), "usually_up": self._usually_up(name, bool(value))}
                yield Observation("port", Subject(agent.node, item=port[:64]), at, fields)

    def _usually_up(self, name: str, is_up: bool) -> bool:
        """Return whether a port of this name is active on most other nodes: one that is not is not cabled."""
        up, there = self._ports_up[name]
        return 2 * (up - is_up) > there - 1

    @cached_property
    def _ports_up(self) -> dict[str, tuple[int, int]]:
        up: Counter[str] = Counter()
        there: Counter[str] = Counter()
        for agent in self.agents.values():
            if agent.is_silent(self.now):
                continue
            ports = {name: value for name, value in host_values(agent).items() if name.startswith("ib_up:")}
            there.update(ports)
            up.update(name for name, value in ports.items() if value)
        return {name: (up[name], nodes) for name, nodes in there.items()}

    def _software(self, agent: Agent) -> dict[str, FieldValue]:
        node = self._software_by_agent[agent.pk]
        findings = comparison.node_findings(node, self._usual_versions, self._minimums)
        odd = {finding.software.name for finding in findings if finding.usual}
        comparable = {
            software.name
            for software in node.versions
            if comparison.expected_version(node, software, self._usual_versions)
        }
        fields: dict[str, FieldValue] = {
            f"{name}_differs": not odd.isdisjoint(names) if not comparable.isdisjoint(names) else None
            for name, names in _COMPARED.items()
        }
        below = [finding for finding in findings if finding.minimum is not None]
        fields["below_minimum"] = len(below) if node.versions else None
        fields["outdated"] = "; ".join(
            f"{finding.software.title} {finding.version}, at least {finding.minimum.version}"
            for finding in below[:MAX_OUTDATED]
            if finding.minimum is not None
        )
        return fields

    @cached_property
    def _software_by_agent(self) -> dict[int, NodeSoftware]:
        return {
            pk: read_facts(agent.node, self._partition(agent), table(agent.facts)) for pk, agent in self.agents.items()
        }

    @cached_property
    def _usual_versions(self) -> comparison.UsualVersions:
        return comparison.usual_versions(self._software_by_agent.values())

    @cached_property
    def _minimums(self) -> MinimumVersions:
        return minimums_in_force()

    def _partition(self, agent: Agent) -> str:
        node = self.nodes.get(agent.node)
        return str(node.partitions[0]) if node is not None and node.partitions else ""


MAX_OUTDATED = 5
_COMPARED = {
    "driver": {"driver"},
    "kernel": {"kernel"},
    "vbios": {"vbios"},
    "firmware": {"inforom", "hca", "fabric_manager"},
}
MAX_PHYSICAL = 16
"""A scheduler that lists more GPUs than this on a node lists MIG slices."""


def _is_down(state: str) -> bool:
    """Return whether the scheduler has lost the node, rather than told it to reboot."""
    return not node_states.UNREACHABLE.isdisjoint(node_states.state_words(state)) and not node_states.is_rebooting(
        state
    )


def _gone_gpus(agents: Mapping[int, Agent]) -> dict[int, tuple[Gpu, ...]]:
    rows = Gpu.objects.filter(agent__in=list(agents), gone_at__isnull=False).defer("counters", *_UNREAD)
    gone: defaultdict[int, list[Gpu]] = defaultdict(list)
    for gpu in rows.order_by("agent", "-gone_at"):
        gone[gpu.agent_id].append(gpu)
    return {pk: tuple(gpus) for pk, gpus in gone.items()}


def _planted_field(event: NodeEvent | None) -> dict[str, FieldValue]:
    """Return the number of the game day's fault as a field, if the state was planted; no field otherwise."""
    return {"planted": event.planted} if event is not None and event.is_planted else {}


def _free_share(total: float | None, used: float | None) -> float | None:
    return None if not total or used is None else max(0.0, 1 - used / total)
