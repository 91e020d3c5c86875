"""Compute what is free on a cluster and what could start on it now. Pure: dataclasses in and out, no Django.

    cluster = ClusterCapacity(nodes=…, partitions=…, reservations=…, queue=…, now=…)
    candidates = survey(request, cluster)          each node as this request may use it
    fit = assess(request, candidates, cluster)     could it start, on which nodes, and why not on the others

It uses only what the scheduler reports. The scheduler alone decides, and knows more (topology, cores per socket).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import inf

from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import (
    AssociationInfo,
    LicenseInfo,
    PartitionInfo,
    QosInfo,
    QueuedJobInfo,
    ReservationInfo,
)
from nodes.scheduling import features, gpu_types
from nodes.scheduling.node_states import closed_reason, is_in_service

WINDOW = "window"  # reason: another's reservation or planned start begins before the job would end


@dataclass(frozen=True)
class FreeCapacity:
    """Resources of a node, all or the free ones: CPUs, GPUs, MiB. `types` are its GPUs by type, adding to `gpus`."""

    cpus: int = 0
    gpus: int = 0
    memory_mib: int = 0
    types: Mapping[str, int] = field(default_factory=dict)

    def of_type(self, wanted: str) -> FreeCapacity:
        """Return the same capacity with only the GPUs of this type; with all GPUs for "", which any type satisfies."""
        return replace(self, gpus=gpu_types.count_of(self.types, wanted)) if wanted else self

    def less(self, taken: FreeCapacity, times: int = 1) -> FreeCapacity:
        """Return what remains after `taken` is subtracted `times` times.

        GPUs of no particular type come from the types in the node's order, as observed with Slurm.
        """
        types = dict(self.types)
        for kind, count in taken.types.items():
            types[kind] = types.get(kind, 0) - count * times
        untyped = (taken.gpus - sum(taken.types.values())) * times
        for kind, available in types.items():
            assigned = min(max(0, available), untyped)
            types[kind] -= assigned
            untyped -= assigned
        return FreeCapacity(
            self.cpus - taken.cpus * times,
            self.gpus - taken.gpus * times,
            max(0, self.memory_mib - taken.memory_mib * times),
            types,
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A requested allocation. CPUs, GPUs and memory are per node."""

    min_nodes: int = 1
    max_nodes: int = 1
    cpus: int = 1
    gpus: int = 0
    gpu_type: str = ""  # "": any
    memory_mib: int = 0  # 0: the scheduler's default, which is unknown here
    time_limit_s: int = 3600
    exclusive: bool = False
    partition: str = ""  # "": the default one; several separated by commas
    constraint: str = ""
    reservation: str = ""
    licenses: str = ""  # "matlab:2,abaqus"
    required_nodes: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] = ()
    user: str = ""
    account: str = ""
    qos: str = ""
    begin_at: float | None = None  # Unix seconds; earliest start

    @property
    def room(self) -> FreeCapacity:
        return FreeCapacity(self.cpus, self.gpus, self.memory_mib)


@dataclass(frozen=True, kw_only=True)
class ClusterCapacity:
    """Everything that the scheduler last reported."""

    now: float  # Unix seconds
    nodes: Sequence[NodeStatus] = ()
    partitions: Sequence[PartitionInfo] = ()
    qos: Sequence[QosInfo] = ()
    associations: Sequence[AssociationInfo] = ()
    reservations: Sequence[ReservationInfo] = ()
    licenses: Sequence[LicenseInfo] = ()
    queue: Sequence[QueuedJobInfo] = ()

    @property
    def simulates_nodes(self) -> bool:
        """Return whether one machine stands for as many nodes as a job requests."""
        return bool(self.nodes) and self.nodes[0].plays_many

    def partition(self, name: str) -> PartitionInfo | None:
        """Return the partition of that name, or the default one for ""; of several names the first that exists."""
        wanted = name.split(",") if name else []
        partitions = (p for p in self.partitions if (p.name in wanted if wanted else p.is_default))
        return next(partitions, None)


@dataclass(frozen=True)
class CandidateNode:
    """A node as one request may use it. `why` is the obstacle or ""; `until` is when others' reserved time begins."""

    node: NodeStatus
    room: FreeCapacity  # free now
    why: str = ""
    until: float = inf
    taken_by: str = ""  # for whom that time is reserved
    is_permanent: bool = False  # why it cannot be used never changes
    size: FreeCapacity = field(default_factory=FreeCapacity)  # its total of the requested type


class NodeSuitability(IntEnum):
    """Grades of how close a node is to accepting a request; each includes those before it."""

    UNSUITABLE = 0  # too small, or does not match the request
    SUITABLE = 1  # suitable, but out of service
    IN_SERVICE = 2  # in service
    UNRESERVED = 3  # and not reserved for others during the job
    FREE = 4  # and enough of it is free


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a request could start now, and what prevents it. Counts are of nodes."""

    starts: bool
    nodes: tuple[str, ...]  # with room for it now
    suitable_nodes: int  # in service, and large enough if they were empty
    fits_if_empty: bool  # there are enough of those, so waiting helps
    can_ever_fit: bool  # there are enough, including those out of service now
    obstacles: tuple[tuple[str, int], ...]  # by number of nodes, most first: ("drained", 2), ("room:gpus", 5)
    free_gpus: Mapping[int, int] = field(default_factory=dict)  # of the suitable nodes: free GPUs → nodes
    until: float = inf  # the earliest time at which a reservation of others is in the way
    is_sure: bool = True  # False: the features could not be parsed


def total(node: NodeStatus) -> FreeCapacity:
    return FreeCapacity(node.cpus, node.gpus, node.memory_mib, gpu_types.installed(node))


def free(node: NodeStatus) -> FreeCapacity:
    """Return the unallocated resources."""
    return FreeCapacity(
        max(0, node.cpus - node.cpus_used),
        max(0, node.gpus - node.gpus_used),
        max(0, node.memory_mib - node.memory_used_mib),
        gpu_types.free(node),
    )


def lacking(need: FreeCapacity, room: FreeCapacity, *, is_memory_reported: bool = True) -> str:
    """Return which resource is insufficient: "gpus", "cpus", "memory", or ""."""
    if need.gpus > room.gpus:
        return "gpus"
    if need.cpus > room.cpus:
        return "cpus"
    return "memory" if is_memory_reported and need.memory_mib > room.memory_mib else ""


def copies(need: FreeCapacity, room: FreeCapacity, *, is_memory_reported: bool = True) -> int:
    """Return how many nodes of this size one machine could stand for."""
    pairs = [
        (need.cpus, room.cpus),
        (need.gpus, room.gpus),
        (need.memory_mib if is_memory_reported else 0, room.memory_mib),
    ]
    return min((have // needed for needed, have in pairs if needed), default=2**31)


def survey(
    request: Request, cluster: ClusterCapacity, *, left: Mapping[str, FreeCapacity] | None = None
) -> list[CandidateNode]:
    """Return each node of the request's partition as it may use it. `left` overrides what the nodes report as free."""
    claims = _claims(request, cluster)
    alternatives = features.read(request.constraint)
    feature_tests = [way.every for way in alternatives] if alternatives is not None else [features.ANY]
    own_reservations = (
        [r for r in cluster.reservations if r.name in request.reservation.split(",")] if request.reservation else None
    )
    fits_by_features: dict[tuple[str, ...], bool] = {}
    candidates = []
    for node in of_partition(request.partition, cluster):
        if node.features not in fits_by_features:
            fits_by_features[node.features] = any(features.holds(test, node.features) for test in feature_tests)
        why = _permanent_obstacle(
            request, node, fits=fits_by_features[node.features], own_reservations=own_reservations
        )
        until, reserved_by = claims.get(node.name, (inf, ""))
        room = left.get(node.name, FreeCapacity()) if left is not None else free(node)
        is_permanent = bool(why)
        if not why and until <= cluster.now:
            why = "reserved"
        obstacle = why or closed_reason(node.state)
        if obstacle == "reserved" and not why and own_reservations:
            obstacle = ""  # its own reservation is what closes the node to others
        if not obstacle and request.exclusive and (node.cpus_used or node.gpus_used):
            room = FreeCapacity()
        wanted = request.gpu_type if request.gpus else ""
        candidates.append(
            CandidateNode(
                node, room.of_type(wanted), obstacle, until, reserved_by, is_permanent, total(node).of_type(wanted)
            )
        )
    return candidates


def assess(request: Request, candidates: Sequence[CandidateNode], cluster: ClusterCapacity) -> Fit:
    """Return whether the request could start now on these candidates; if not, what prevents it."""
    end = cluster.now + request.time_limit_s
    rated = [(candidate, *_rate(candidate, request.room, end)) for candidate in candidates]

    def at_least(least: NodeSuitability) -> list[CandidateNode]:
        return [candidate for candidate, suitability, _ in rated if suitability >= least]

    free_candidates, in_service, suitable = (
        at_least(NodeSuitability.FREE),
        at_least(NodeSuitability.IN_SERVICE),
        at_least(NodeSuitability.SUITABLE),
    )
    ways = features.read(request.constraint)
    return Fit(
        starts=ways is not None and _enough(request, free_candidates, ways, cluster),
        nodes=tuple(candidate.node.name for candidate in free_candidates),
        suitable_nodes=len(in_service),
        fits_if_empty=ways is None or _enough(request, in_service, ways, cluster, empty=True),
        can_ever_fit=ways is None or _enough(request, suitable, ways, cluster, empty=True),
        obstacles=tuple(Counter(why for _, _, why in rated if why).most_common()),
        free_gpus=Counter(candidate.room.gpus for candidate in at_least(NodeSuitability.UNRESERVED)),
        until=min((candidate.until for candidate, _, why in rated if why == WINDOW), default=inf),
        is_sure=ways is not None,
    )


def starts(request: Request, candidates: Iterable[CandidateNode], cluster: ClusterCapacity) -> bool:
    """Return only whether `assess` would find that it starts; quicker, for trying many requests."""
    end, need = cluster.now + request.time_limit_s, request.room
    ways = features.read(request.constraint)
    free_candidates = [
        candidate
        for candidate in candidates
        if not candidate.why
        and need.gpus <= candidate.room.gpus
        and need.cpus <= candidate.room.cpus
        and end <= candidate.until
        and (need.memory_mib <= candidate.room.memory_mib or not candidate.node.memory_mib)
    ]
    return ways is not None and _enough(request, free_candidates, ways, cluster)


def of_partition(name: str, cluster: ClusterCapacity) -> list[NodeStatus]:
    """Return the partition's nodes; the default one's for "", or all nodes if the default is unknown."""
    names = set(name.split(",")) if name else {p.name for p in cluster.partitions if p.is_default}
    if not names:
        return list(cluster.nodes)
    listed = {node for p in cluster.partitions if p.name in names for node in p.nodes}
    return [node for node in cluster.nodes if node.name in listed or not names.isdisjoint(node.partitions)]


def may_use(reservation: ReservationInfo, *, user: str, account: str) -> bool:
    """Return whether a reservation is for this user or account; "-anna" excludes."""
    barred = {name[1:] for name in (*reservation.users, *reservation.accounts) if name.startswith("-")}
    if barred & {user, account}:
        return False
    invited = {name for name in (*reservation.users, *reservation.accounts) if not name.startswith("-")}
    return not invited or user in invited or account in invited


def _rate(candidate: CandidateNode, need: FreeCapacity, end: float) -> tuple[NodeSuitability, str]:
    """Return how suitable a candidate is for this need until `end`, and what prevents more; "" if nothing does."""
    node, is_memory_reported = candidate.node, candidate.node.memory_mib > 0
    if candidate.is_permanent:
        return NodeSuitability.UNSUITABLE, candidate.why
    if too_small := lacking(need, candidate.size, is_memory_reported=is_memory_reported):
        return NodeSuitability.UNSUITABLE, f"small:{too_small}"
    if not is_in_service(node.state):
        return NodeSuitability.SUITABLE, candidate.why
    if candidate.why:
        return NodeSuitability.IN_SERVICE, candidate.why
    if candidate.until < end:
        return NodeSuitability.IN_SERVICE, WINDOW
    if shortage := lacking(need, candidate.room, is_memory_reported=is_memory_reported):
        return NodeSuitability.UNRESERVED, f"room:{shortage}"
    return NodeSuitability.FREE, ""


def _claims(request: Request, cluster: ClusterCapacity) -> dict[str, tuple[float, str]]:
    """Return from when each node is reserved for others, and by what; now if the reservation has begun."""
    own_names = request.reservation.split(",") if request.reservation else []
    found: dict[str, tuple[float, str]] = {}
    for reservation in cluster.reservations:
        begins, ends = reservation.starts_at or 0.0, reservation.ends_at or inf
        if reservation.name in own_names or ends <= cluster.now:
            continue
        for name in reservation.nodes:
            if begins < found.get(name, (inf, ""))[0]:
                found[name] = (begins, reservation.name)
    return found


def _permanent_obstacle(
    request: Request, node: NodeStatus, *, fits: bool, own_reservations: list[ReservationInfo] | None
) -> str:
    """Return why a node can never satisfy this request, however long it waits."""
    if node.name in request.excluded_nodes:
        return "excluded"
    if node.name not in request.required_nodes and 0 < request.max_nodes <= len(set(request.required_nodes)):
        return "not asked for"
    if own_reservations is not None and not any(node.name in r.nodes or "FLEX" in r.flags for r in own_reservations):
        return "outside the reservation"
    if not fits:
        return "other features"
    if request.gpus and request.gpu_type and not gpu_types.has(node, request.gpu_type):
        return "other GPUs"
    return ""


def _enough(
    request: Request,
    candidates: Sequence[CandidateNode],
    alternatives: Iterable[features.FeatureSet],
    cluster: ClusterCapacity,
    *,
    empty: bool = False,
) -> bool:
    """Return whether these candidates suffice for the allocation. `empty`: as if nothing else ran on them."""
    if cluster.simulates_nodes:
        rooms = ((s.size if empty else s.room, s.node.memory_mib > 0) for s in candidates)
        return (
            sum(copies(request.room, room, is_memory_reported=is_reported) for room, is_reported in rooms)
            >= request.min_nodes
        )
    required = set(request.required_nodes)
    if not required <= {candidate.node.name for candidate in candidates}:
        return False
    return any(_is_met(request, candidates, way, required) for way in alternatives)


def _is_met(
    request: Request, candidates: Sequence[CandidateNode], way: features.FeatureSet, required: Collection[str]
) -> bool:
    matching = [
        candidate.node
        for candidate in candidates
        if way.every is features.ANY or features.holds(way.every, candidate.node.features)
    ]
    required_features = [node.features for node in matching if node.name in required]
    if len(required_features) < len(required) or not features.is_served(way, [node.features for node in matching]):
        return False
    size = max(request.min_nodes, len(required_features) + features.size_of(way, required_features))
    return size <= len(matching) and size <= max(request.max_nodes, request.min_nodes)
