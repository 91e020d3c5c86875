"""Propose variants of a request that could start sooner: other nodes, another GPU type, less time, fewer GPUs.

Pure. A variant is proposed only if the specification allows it and it would fit: now, or once jobs ahead have started.
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
from nodes.scheduling.capacity import ClusterCapacity, Request, of_partition
from training.config.run_config import RunConfig
from training.planning import checking
from vigil_core import formatting

MAX_VARIANTS = 5
MAX_ALIKE = 2  # of a kind that start now
MAX_TRIED = 8  # of each way to change it
MIN_TIME_S = 600
MARGIN_S = 120  # between its end and the next start, which takes a moment
SAME, OTHER, LESS = range(3)  # as many GPUs of the same kind; elsewhere or of another kind; fewer


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A change of the spec, by dotted path, and whether the result would start now."""

    text: str
    changes: dict[str, Any]
    starts_now: bool
    why: str


def as_options(changes: dict[str, Any]) -> list[str]:
    """Return the changes as options of `vigil submit --set`: resources.nodes=2."""
    return [f"{path}={value}" for path, value in changes.items()]


@dataclass(frozen=True)
class TrialOutcome:
    """The result of a trial: "now", "free" (but others are ahead) or "" (no room); and why."""

    room: str
    why: str = ""


@dataclass(frozen=True)
class _Candidate:
    tier: int
    cost: float
    text: str
    changes: dict[str, Any]
    request: Request


def propose(
    spec: JobSpec,
    request: Request,
    cluster: ClusterCapacity,
    try_request: Callable[[Request], TrialOutcome],
    ends: list[float],
) -> tuple[Variant, ...]:
    """Return at most MAX_VARIANTS, the best first. `ends`: moments before which it would have to end to fit in."""
    limits = sorted({_rounded(end - cluster.now - MARGIN_S) for end in ends}, reverse=True)
    times = [limit for limit in limits if MIN_TIME_S <= limit < request.time_limit_s][:3]
    tried: list[tuple[_Candidate, TrialOutcome]] = []
    for candidate in _candidates(spec, request, cluster):
        outcome = try_request(candidate.request)
        tried.append((candidate, outcome))
    shaped = [candidate for candidate, outcome in tried if outcome.room != "now" and candidate.tier == SAME]
    shorter = _shorter([_Candidate(SAME, 0, "", {}, request), *shaped], times, try_request)
    useful = {"now"} if try_request(request).room else {"now", "free"}  # not those that wait like the job itself
    useful_variants = [pair for pair in [*tried, *shorter] if pair[1].room in useful]
    useful_variants.sort(key=lambda pair: (pair[1].room != "now", pair[0].tier, pair[0].cost))
    return tuple(_varied(_allowed(spec, useful_variants)))


def _shorter(
    candidates: list[_Candidate], times: list[int], try_request: Callable[[Request], TrialOutcome]
) -> Iterator[tuple[_Candidate, TrialOutcome]]:
    """Yield each candidate with the longest time limit with which it starts now."""
    for candidate in candidates:
        for limit in times:
            request = replace(candidate.request, time_limit_s=limit)
            outcome = try_request(request)
            if outcome.room != "now":
                continue
            less = f"{formatting.duration(limit)} instead of {formatting.duration(candidate.request.time_limit_s)}"
            text = f"{candidate.text}, {less}" if candidate.text else f"A time limit of {less}"
            changes = {**candidate.changes, "resources.time_limit": limit_of(limit)}
            yield _Candidate(candidate.tier, candidate.cost + 0.5, text, changes, request), outcome
            break


def _candidates(spec: JobSpec, request: Request, cluster: ClusterCapacity) -> Iterator[_Candidate]:
    if not cluster.simulates_nodes and isinstance(spec.resources.nodes, int):
        shapes = sorted(_shapes(spec, request, cluster), key=lambda candidate: candidate.cost)
        yield from shapes[:MAX_TRIED]
    yield from islice(_elsewhere(spec, request, cluster), MAX_TRIED)
    yield from islice(_fewer_nodes(spec, request), MAX_TRIED)
    yield from islice(_fewer_ranks(spec, request), MAX_TRIED)


def _shapes(spec: JobSpec, request: Request, cluster: ClusterCapacity) -> Iterator[_Candidate]:
    """Yield the same number of ranks over more or fewer nodes."""
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


def _fewer_nodes(spec: JobSpec, request: Request) -> Iterator[_Candidate]:
    """Yield fewer nodes, the most first; the run must divide over them."""
    local, nodes = spec.resources.local_world_size, spec.resources.min_nodes
    for fewer in range(nodes - 1, max(0, len(request.required_nodes) - 1), -1):
        if _divides(spec, fewer * local):
            yield _shaped(spec, request, fewer, local, tier=LESS, cost=(nodes - fewer) * local)


def _fewer_ranks(spec: JobSpec, request: Request) -> Iterator[_Candidate]:
    """Yield fewer ranks on each node."""
    local, nodes = spec.resources.local_world_size, spec.resources.min_nodes
    for fewer in range(local - 1, 0, -1):
        if _divides(spec, nodes * fewer):
            yield _shaped(spec, request, nodes, fewer, tier=LESS, cost=nodes * (local - fewer) + 0.2)


def _shaped(spec: JobSpec, request: Request, nodes: int, local: int, *, tier: int, cost: float) -> _Candidate:
    """Return the request for `nodes` nodes, plus spares, with `local` ranks each; memory scales with the ranks."""
    resources = spec.resources
    unit = "GPU" if resources.gpus_per_node else "rank"
    changes: dict[str, Any] = {}
    if nodes != resources.min_nodes:
        changes["resources.nodes"] = f"{nodes}:{resources.max_nodes}" if isinstance(resources.nodes, str) else nodes
    memory = request.memory_mib
    if local != resources.local_world_size:
        changes["resources.gpus_per_node" if resources.gpus_per_node else "resources.ranks_per_node"] = local
        if resources.memory_gib:
            each = round(resources.memory_gib * local / resources.local_world_size, 3)
            changes["resources.memory_gib"] = each
            memory = max(1, round(each * 1024))
    shaped = replace(
        request,
        min_nodes=nodes + resources.spares,
        max_nodes=max(nodes, request.max_nodes) if isinstance(resources.nodes, str) else nodes + resources.spares,
        cpus=local * resources.cpus_per_rank,
        gpus=local if resources.gpus_per_node else 0,
        memory_mib=memory,
    )
    text = _shape_text(nodes, local, unit)
    was = _shape_text(resources.min_nodes, resources.local_world_size, unit)
    return _Candidate(tier, cost, f"{text} instead of {was}", changes, shaped)


def _shape_text(nodes: int, local: int, unit: str) -> str:
    each = " each" if nodes > 1 else ""
    return f"{formatting.plural(nodes, 'node')} with {formatting.plural(local, unit)}{each}"


def _elsewhere(spec: JobSpec, request: Request, cluster: ClusterCapacity) -> Iterator[_Candidate]:
    """Yield other types of GPU and other partitions."""
    if request.gpus and request.gpu_type:
        types = {name.lower(): name for name in gpu_types.names(cluster.nodes)}
        for name in sorted(set(types) - {request.gpu_type.lower()}):
            other = replace(request, gpu_type=types[name])
            text = f"{types[name]} GPUs instead of {request.gpu_type}"
            yield _Candidate(OTHER, 1, text, {"resources.gpu_type": types[name]}, other)
    now_in = cluster.partition(request.partition)
    for partition in cluster.partitions:
        if now_in is None or partition.name in {now_in.name, *request.partition.split(",")}:
            continue
        other = replace(request, partition=partition.name)
        text = f"Partition {partition.name} instead of {request.partition or now_in.name}"
        kinds = gpu_types.names(of_partition(partition.name, cluster)) if request.gpus else []
        text += f", with {formatting.listed(kinds)} GPUs" if kinds else ""
        yield _Candidate(OTHER, 0, text, {"resources.partition": partition.name}, other)


def _allowed(spec: JobSpec, found: list[tuple[_Candidate, TrialOutcome]]) -> Iterator[tuple[_Candidate, TrialOutcome]]:
    """Yield candidates that the specification allows, few of each kind, so that none crowds out another."""
    plain = spec.model_dump(mode="json")
    chosen: Counter[tuple[str, int]] = Counter()
    for candidate, outcome in found:
        kind = (outcome.room, candidate.tier)
        if (
            chosen[kind] < (MAX_ALIKE if outcome.room == "now" else 1)
            and chosen.total() < MAX_VARIANTS
            and _is_allowed(plain, candidate.changes)
        ):
            chosen[kind] += 1
            yield candidate, outcome


def _varied(chosen: Iterator[tuple[_Candidate, TrialOutcome]]) -> Iterator[Variant]:
    for candidate, outcome in chosen:
        text = candidate.text[:1].upper() + candidate.text[1:]
        yield Variant(text=text, changes=candidate.changes, starts_now=outcome.room == "now", why=outcome.why)


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
    """Return whether the run can be divided among this number of ranks."""
    return not isinstance(spec.run, RunConfig) or checking.can_work(spec.run, ranks)


def _largest(spec: JobSpec, cluster: ClusterCapacity) -> int:
    """Return how many ranks the largest node has room for."""
    if spec.resources.gpus_per_node:
        wanted = spec.resources.gpu_type
        return min(
            64, max((gpu_types.count_of(gpu_types.installed(node), wanted) for node in cluster.nodes), default=0)
        )
    each = spec.resources.cpus_per_rank
    return min(1024, max((node.cpus // each for node in cluster.nodes), default=0))


def _rounded(seconds: float) -> int:
    """Round down to a time limit that people would write."""
    unit = 900 if seconds >= 3600 else 300 if seconds >= 1200 else 60
    return int(seconds // unit) * unit
