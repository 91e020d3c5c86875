"""Variants of a request that could start sooner: other nodes, another type of GPU, less time, fewer GPUs.

Pure. A variant is proposed only if the specification allows it and there is room: now, or but for those ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from jobs.errors import SpecError
from jobs.spec import JobSpec, limit_of
from nodes.scheduling import gpu_types
from nodes.scheduling.capacity import Cluster, Request, of_partition
from training.config.run_config import RunConfig
from training.planning import checking
from vigil_core import formatting

MOST = 5
ALIKE = 2  # of a kind that start now
TRIED = 8  # of each way to change it
LEAST_TIME_S = 600
MARGIN_S = 120  # between its end and what comes then: starting takes a moment
SAME, OTHER, LESS = range(3)  # as many GPUs of the same kind; elsewhere or of another kind; fewer


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What to change in the spec, by dotted path, and whether that would start now."""

    text: str
    changes: dict[str, Any]
    starts_now: bool
    why: str


def as_options(changes: dict[str, Any]) -> list[str]:
    """The changes as `vigil submit --set` takes them: resources.nodes=2."""
    return [f"{path}={value}" for path, value in changes.items()]


@dataclass(frozen=True)
class Outcome:
    """What became of a trial: "now", "free" (but others are ahead) or "" (no room); and why."""

    room: str
    why: str = ""


@dataclass(frozen=True)
class _Idea:
    tier: int
    cost: float
    text: str
    changes: dict[str, Any]
    request: Request


def propose(
    spec: JobSpec, request: Request, cluster: Cluster, attempt: Callable[[Request], Outcome], ends: list[float]
) -> tuple[Variant, ...]:
    """Proposes at most MOST, best first. `ends`: moments before which it would have to be over to slip in."""
    limits = sorted({_rounded(end - cluster.now - MARGIN_S) for end in ends}, reverse=True)
    times = [limit for limit in limits if LEAST_TIME_S <= limit < request.time_limit_s][:3]
    tried: list[tuple[_Idea, Outcome]] = []
    for idea in _ideas(spec, request, cluster):
        outcome = attempt(idea.request)
        tried.append((idea, outcome))
    shaped = [idea for idea, outcome in tried if outcome.room != "now" and idea.tier == SAME]
    shorter = _shorter([_Idea(SAME, 0, "", {}, request), *shaped], times, attempt)
    useful = {"now"} if attempt(request).room else {"now", "free"}  # not one that waits just as it does itself
    found = [pair for pair in [*tried, *shorter] if pair[1].room in useful]
    found.sort(key=lambda pair: (pair[1].room != "now", pair[0].tier, pair[0].cost))
    return tuple(_varied(_allowed(spec, found)))


def _shorter(
    ideas: list[_Idea], times: list[int], attempt: Callable[[Request], Outcome]
) -> Iterator[tuple[_Idea, Outcome]]:
    """Each with the longest time limit with which it starts now."""
    for idea in ideas:
        for limit in times:
            request = replace(idea.request, time_limit_s=limit)
            outcome = attempt(request)
            if outcome.room != "now":
                continue
            less = f"{formatting.duration(limit)} instead of {formatting.duration(idea.request.time_limit_s)}"
            text = f"{idea.text}, {less}" if idea.text else f"A time limit of {less}"
            changes = {**idea.changes, "resources.time_limit": limit_of(limit)}
            yield _Idea(idea.tier, idea.cost + 0.5, text, changes, request), outcome
            break


def _ideas(spec: JobSpec, request: Request, cluster: Cluster) -> Iterator[_Idea]:
    if not cluster.is_one_machine and isinstance(spec.resources.nodes, int):
        shapes = sorted(_shapes(spec, request, cluster), key=lambda idea: idea.cost)
        yield from shapes[:TRIED]
    yield from islice(_elsewhere(spec, request, cluster), TRIED)
    yield from islice(_fewer_nodes(spec, request), TRIED)
    yield from islice(_fewer_ranks(spec, request), TRIED)


def _shapes(spec: JobSpec, request: Request, cluster: Cluster) -> Iterator[_Idea]:
    """Spreads the same number of ranks over more or fewer nodes."""
    ranks, largest = spec.world_size, _largest(spec, cluster)
    for local in range(1, min(ranks, largest) + 1):
        if ranks % local or local == spec.resources.local_world_size:
            continue
        nodes = ranks // local
        named = len(request.required_nodes)
        if nodes + spec.resources.spares > len(cluster.nodes) or (named and nodes < named):
            continue
        away = abs(nodes - spec.resources.min_nodes)
        yield _shaped(spec, request, nodes, local, tier=SAME, cost=1 + away)


def _fewer_nodes(spec: JobSpec, request: Request) -> Iterator[_Idea]:
    """The most first; the run must divide over them."""
    local, nodes = spec.resources.local_world_size, spec.resources.min_nodes
    for fewer in range(nodes - 1, max(0, len(request.required_nodes) - 1), -1):
        if _divides(spec, fewer * local):
            yield _shaped(spec, request, fewer, local, tier=LESS, cost=(nodes - fewer) * local)


def _fewer_ranks(spec: JobSpec, request: Request) -> Iterator[_Idea]:
    """Takes fewer ranks on each node."""
    local, nodes = spec.resources.local_world_size, spec.resources.min_nodes
    for fewer in range(local - 1, 0, -1):
        if _divides(spec, nodes * fewer):
            yield _shaped(spec, request, nodes, fewer, tier=LESS, cost=nodes * (local - fewer) + 0.2)


def _shaped(spec: JobSpec, request: Request, nodes: int, local: int, *, tier: int, cost: float) -> _Idea:
    """Asks for so many nodes, and the spares beside, with so many ranks each; memory goes with the ranks."""
    asked = spec.resources
    unit = "GPU" if asked.gpus_per_node else "rank"
    changes: dict[str, Any] = {}
    if nodes != asked.min_nodes:
        changes["resources.nodes"] = f"{nodes}:{asked.max_nodes}" if isinstance(asked.nodes, str) else nodes
    memory = request.memory_mib
    if local != asked.local_world_size:
        changes["resources.gpus_per_node" if asked.gpus_per_node else "resources.ranks_per_node"] = local
        if asked.memory_gib:
            each = round(asked.memory_gib * local / asked.local_world_size, 3)
            changes["resources.memory_gib"] = each
            memory = max(1, round(each * 1024))
    shaped = replace(
        request,
        min_nodes=nodes + asked.spares,
        max_nodes=max(nodes, request.max_nodes) if isinstance(asked.nodes, str) else nodes + asked.spares,
        cpus=local * asked.cpus_per_rank,
        gpus=local if asked.gpus_per_node else 0,
        memory_mib=memory,
    )
    text = _shape_text(nodes, local, unit)
    was = _shape_text(asked.min_nodes, asked.local_world_size, unit)
    return _Idea(tier, cost, f"{text} instead of {was}", changes, shaped)


def _shape_text(nodes: int, local: int, unit: str) -> str:
    each = " each" if nodes > 1 else ""
    return f"{formatting.plural(nodes, 'node')} with {formatting.plural(local, unit)}{each}"


def _elsewhere(spec: JobSpec, request: Request, cluster: Cluster) -> Iterator[_Idea]:
    """Another type of GPU, another partition."""
    if request.gpus and request.gpu_type:
        known = {name.lower(): name for name in gpu_types.names(cluster.nodes)}
        for name in sorted(set(known) - {request.gpu_type.lower()}):
            other = replace(request, gpu_type=known[name])
            text = f"{known[name]} GPUs instead of {request.gpu_type}"
            yield _Idea(OTHER, 1, text, {"resources.gpu_type": known[name]}, other)
    now_in = cluster.partition(request.partition)
    for partition in cluster.partitions:
        if now_in is None or partition.name in {now_in.name, *request.partition.split(",")}:
            continue
        other = replace(request, partition=partition.name)
        text = f"Partition {partition.name} instead of {request.partition or now_in.name}"
        kinds = gpu_types.names(of_partition(partition.name, cluster)) if request.gpus else []
        text += f", with {formatting.listed(kinds)} GPUs" if kinds else ""
        yield _Idea(OTHER, 0, text, {"resources.partition": partition.name}, other)


def _allowed(spec: JobSpec, found: list[tuple[_Idea, Outcome]]) -> Iterator[tuple[_Idea, Outcome]]:
    """Picks those that the specification allows, few of a kind, so that none crowds out another."""
    plain = spec.model_dump(mode="json")
    chosen: Counter[tuple[str, int]] = Counter()
    for idea, outcome in found:
        kind = (outcome.room, idea.tier)
        if (
            chosen[kind] < (ALIKE if outcome.room == "now" else 1)
            and chosen.total() < MOST
            and _is_allowed(plain, idea.changes)
        ):
            chosen[kind] += 1
            yield idea, outcome


def _varied(chosen: Iterator[tuple[_Idea, Outcome]]) -> Iterator[Variant]:
    for idea, outcome in chosen:
        text = idea.text[:1].upper() + idea.text[1:]
        yield Variant(text=text, changes=idea.changes, starts_now=outcome.room == "now", why=outcome.why)


def _is_allowed(plain: dict[str, Any], changes: dict[str, Any]) -> bool:
    changed: dict[str, Any] = {**plain, "resources": dict(plain["resources"])}
    for path, value in changes.items():
        changed["resources"][path.removeprefix("resources.")] = value
    try:
        JobSpec.parse(changed)
    except SpecError:
        return False
    return True


def _divides(spec: JobSpec, ranks: int) -> bool:
    """Whether the run can be shared out among so many ranks."""
    return not isinstance(spec.run, RunConfig) or checking.can_work(spec.run, ranks)


def _largest(spec: JobSpec, cluster: Cluster) -> int:
    """Ranks that the largest node could hold."""
    if spec.resources.gpus_per_node:
        wanted = spec.resources.gpu_type
        return min(64, max((gpu_types.of(gpu_types.there(node), wanted) for node in cluster.nodes), default=0))
    each = spec.resources.cpus_per_rank
    return min(1024, max((node.cpus // each for node in cluster.nodes), default=0))


def _rounded(seconds: float) -> int:
    """Down to a time limit that people would write."""
    unit = 900 if seconds >= 3600 else 300 if seconds >= 1200 else 60
    return int(seconds // unit) * unit
