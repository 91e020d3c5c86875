"""Find what blocks a waiting job, each block in a sentence with its amounts. Pure; `explain` gathers the facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from math import inf

from jobs.waiting import limits, maintenance, node_capacity
from jobs.waiting.block import Block, BlockKind, WaitFacts, are, clock, reason_word
from jobs.waiting.reasons import explained
from nodes.schedulers.cluster import ReservationInfo
from nodes.schedulers.launch import is_launch_failed, nodes_of
from nodes.scheduling import licenses
from nodes.scheduling.capacity import ClusterCapacity, Request, may_use
from nodes.scheduling.licenses import Demand
from vigil_core import formatting

# What kind of thing Slurm's word means, the first pattern that fits.
KINDS: dict[str, BlockKind] = {
    "Resources": "nodes", "Priority": "priority", "Dependency*": "dependency", "BeginTime": "time",
    "Reservation*": "reservation", "ReqNodeNotAvail": "nodes", "Nodes_required*": "nodes", "NodeDown": "nodes",
    "BadConstraints": "nodes", "PartitionTimeLimit": "time", "Partition*": "partition",
    "AccountNotAllowed": "partition", "QOSNotAllowed": "partition",
    "JobHeld*": "held", "JobLaunchFailure": "held", "launch_failed*": "held",
    "*MaxWall*": "time", "QOS*": "limit", "Assoc*": "limit", "Max*PerAccount": "limit", "Licenses": "limit",
    "JobArrayTaskLimit": "limit", "Invalid*": "partition", "Requeued": "time", "Cleaning": "nodes",
}  # fmt: skip
# No other request helps against these.
UNCHANGEABLE = frozenset({"dependency", "held"})
BEGIN = "BeginTime"
LICENSES = "Licenses"
REQUEUE = "Slurm waits about two minutes before it restarts a requeued job."
# A QOS may let its jobs past what the partition allows, by these flags.
OVERRIDES = {"PARTITION_TIME_LIMIT": "time", "PARTITION_MAXIMUM_NODE": "at most", "PARTITION_MINIMUM_NODE": "at least"}
# The end of a reservation does not bind jobs if it recurs, or if they may continue after it.
UNBOUNDED_FLAGS = frozenset({"FLEX", "HOURLY", "DAILY", "WEEKLY", "WEEKDAY", "WEEKEND"})


def blocks_of(facts: WaitFacts) -> list[Block]:
    """Return all blocks: what the scheduler names first, then those that waiting will not help against."""
    if facts.waits_in_vigil:
        kind: BlockKind = "dependency" if facts.reason.startswith("Waits for #") else "held"
        text = facts.reason or "Vigil will submit it to the scheduler within seconds."
        return [Block(kind=kind, text=text, is_reason=True)]
    blocks = [
        *_begin(facts),
        *_closed(facts),
        *_limits(facts),
        *_reservation(facts),
        *_licenses(facts),
        *maintenance.blocks(facts, is_reason=kind_of(facts.reason) == "nodes"),
        *node_capacity.blocks(facts, is_reason=kind_of(facts.reason) == "nodes"),
        *_priority(facts),
    ]
    if not any(block.is_reason for block in blocks) and (reason_block := _reason_block(facts)):
        blocks.append(reason_block)
    return sorted(blocks, key=lambda block: (not block.is_reason, not block.is_final))


def may_change(found: Sequence[Block]) -> bool:
    """Return whether another request could help: not if the job is held, depends on another, or begins later."""
    return not any((block.kind in UNCHANGEABLE or block.name == BEGIN) and block.is_reason for block in found)


def is_partition_closed(request: Request, cluster: ClusterCapacity) -> bool:
    """Return whether the partition would refuse the request as it is."""
    return next(partition_blocks(request, cluster), None) is not None


def kind_of(reason: str) -> BlockKind | None:
    word = reason_word(reason)
    return next((kind for form, kind in KINDS.items() if fnmatchcase(word, form)), None) if word else None


def _reason_block(facts: WaitFacts) -> Block | None:
    """Return the scheduler's reason itself, if nothing that Vigil counts accounts for it."""
    kind, word = kind_of(facts.reason), reason_word(facts.reason)
    if kind is None or word in {"Resources", "Priority"}:
        return None
    text = explained(facts.reason, facts.scheduler_id, facts.job_id)
    if is_launch_failed(facts.reason):
        text = f"{text} {_failed_nodes_text(facts)}".rstrip()
    if kind == "dependency" and facts.queued and facts.queued.dependency:
        text = f"{text} Slurm's dependency: {facts.queued.dependency}."
    if word == BEGIN and facts.queued:
        text = (
            _requeue_text(facts, text)
            if facts.queued.restart_count
            else _not_before(facts.queued.starts_at, facts) or text
        )
    final = "never starts" in text or "Cancel it" in text
    return Block(kind=kind, text=text, name=word, is_reason=True, is_final=final)


def _failed_nodes_text(facts: WaitFacts) -> str:
    """Return Slurm's reasons for the nodes where the launch failed; if it names none, for failed prologs."""
    named = nodes_of(facts.reason)
    nodes = [node for node in facts.cluster.nodes if node.name in named] if named else facts.cluster.nodes
    reasons = [
        f"{node.name}: {node.reason}" for node in nodes if node.reason and (named or "prolog" in node.reason.lower())
    ]
    return f"Slurm's reason for {formatting.listed(reasons[:3])}." if reasons else ""


def _begin(facts: WaitFacts) -> Iterator[Block]:
    """Yield that the job is to begin later. A hold or a dependency that the scheduler reports comes first."""
    begin = facts.request.begin_at
    if begin and begin > facts.cluster.now:
        is_reason = kind_of(facts.reason) not in UNCHANGEABLE
        yield Block(kind="time", text=_not_before(begin, facts), name=BEGIN, is_reason=is_reason)


def _not_before(begin: float | None, facts: WaitFacts) -> str:
    now = facts.cluster.now
    if not begin or begin <= now:
        return ""
    return f"Scheduled to start at {clock(begin, now)}, in {formatting.duration(begin - now)}."


def _requeue_text(facts: WaitFacts, meaning: str) -> str:
    """Return until when Slurm delays a requeued job, or `meaning` with the usual delay if it reports no time."""
    starts_at, now = facts.queued.starts_at if facts.queued else None, facts.cluster.now
    if not starts_at or starts_at <= now:
        return f"{meaning} {REQUEUE}"
    return f"Slurm waits until {clock(starts_at, now)} before it restarts the requeued job."


def _closed(facts: WaitFacts) -> Iterator[Block]:
    for block in partition_blocks(facts.request, facts.cluster):
        is_reason = block.name and reason_word(facts.reason) == block.name
        yield Block(**{**vars(block), "is_reason": bool(is_reason)})


def partition_blocks(request: Request, cluster: ClusterCapacity) -> Iterator[Block]:
    """Yield what the partition refuses; `name` is Slurm's reason for it."""
    partition = cluster.partition(request.partition)
    if partition is None or "," in request.partition:
        return
    beyond = _overridden(request, cluster)
    where = f"Partition {partition.name}"
    if partition.state not in {"up", ""}:
        word = {"down": "PartitionDown", "drain": "PartitionDown", "inactive": "PartitionInactive"}.get(partition.state)
        text = f"{where} is {partition.state} and starts no jobs. A Slurm administrator can open it."
        yield Block(kind="partition", text=text, name=word or "PartitionDown")
    if "time" not in beyond and partition.max_time_s is not None and request.time_limit_s > partition.max_time_s:
        most, wants = formatting.duration(partition.max_time_s), formatting.duration(request.time_limit_s)
        yield Block(
            kind="time", text=f"{where} limits jobs to {most}; this job requests {wants}.", name="PartitionTimeLimit",
            amount="seconds", limit=partition.max_time_s, requested=request.time_limit_s, is_final=True,
        )  # fmt: skip
    for bound, limit in (("at most", partition.max_nodes), ("at least", partition.min_nodes)):
        if bound in beyond:
            continue
        over = limit is not None and (request.min_nodes > limit if bound == "at most" else request.max_nodes < limit)
        if over and limit is not None:
            gives = f"{where} gives a job {bound} {formatting.plural(limit, 'node')}"
            text = f"{gives}; this job requests {request.min_nodes}."
            yield Block(
                kind="partition", text=text, name="PartitionNodeLimit", amount="nodes", limit=limit,
                requested=request.min_nodes, is_final=True,
            )  # fmt: skip
    account, qos = limits.account_of(request, cluster), limits.qos_of(request, cluster)
    for what, name, allowed, denied, word in (
        ("account", account, partition.allowed_accounts, partition.denied_accounts, "AccountNotAllowed"),
        ("QOS", qos, partition.allowed_qos, partition.denied_qos, "QOSNotAllowed"),
    ):
        if name and ((allowed and name not in allowed) or name in denied):
            takes = f"It accepts {formatting.listed(list(allowed[:5]))}." if allowed else ""
            text = f"{where} does not accept {what} {name}. {takes}".strip()
            yield Block(kind="partition", text=text, name=word, is_final=True)


def _overridden(request: Request, cluster: ClusterCapacity) -> set[str]:
    """Return the limits of the partition that the job's QOS overrides."""
    name = limits.qos_of(request, cluster)
    flags = next((set(qos.flags) for qos in cluster.qos if qos.name == name), set())
    return {OVERRIDES[flag] for flag in flags & OVERRIDES.keys()}


def _limits(facts: WaitFacts) -> Iterator[Block]:
    """Yield limits that are reached, and the one that the scheduler names, whether it counts as reached here or not."""
    for check in facts.checks:
        is_reason = limits.names_limit(check, facts.reason)
        if not check.is_over and not is_reason:
            continue
        text = limits.sentence(check, you=facts.you)
        if check.is_final and check.scope != "minutes":
            text += " It can never start as requested."
        elif is_reason and not check.is_over and check.scope != "minutes":
            text += f" {reason_word(facts.reason)} is Slurm's reason; usage may have changed since."
        yield Block(
            kind="time" if check.scope == "time" else "limit",
            text=text,
            name=check.source,
            amount=check.tres,
            limit=check.limit,
            used=check.used,
            requested=check.requested,
            is_reason=is_reason,
            is_final=check.is_final and check.scope != "minutes",
        )


def _reservation(facts: WaitFacts) -> Iterator[Block]:
    """Yield what the reservation that the job requests blocks."""
    is_reason = reason_word(facts.reason).startswith("Reservation")
    for block in reservation_blocks(facts.request, facts.cluster):
        yield Block(**{**vars(block), "is_reason": is_reason})


def reservation_blocks(request: Request, cluster: ClusterCapacity) -> Iterator[Block]:
    """Yield why the request cannot start inside the reservation that it names, or not yet."""
    if not request.reservation:
        return
    names = request.reservation.split(",")
    reservation = next((r for r in cluster.reservations if r.name in names), None)
    if reservation is None:
        text = (
            f"Reservation {request.reservation} does not exist. Cancel the job and submit it without the reservation."
        )
        yield Block(kind="reservation", text=text, name=request.reservation, is_final=True)
        return
    accounts = limits.Usage(cluster).line(limits.account_of(request, cluster))
    if not any(may_use(reservation, user=request.user, account=account) for account in accounts):
        text = f"Reservation {reservation.name} is for others. Cancel the job and submit it without the reservation."
        yield Block(kind="reservation", text=text, name=reservation.name, is_final=True)
        return
    if reservation.starts_at and reservation.starts_at > cluster.now:
        text = f"Reservation {reservation.name} begins at {clock(reservation.starts_at, cluster.now)}."
        yield Block(kind="reservation", text=text, name=reservation.name)
    yield from _too_late(request, reservation, cluster.now)


def _too_late(request: Request, reservation: ReservationInfo, now: float) -> Iterator[Block]:
    """Yield that it could not end before the reservation does, even if it started as soon as possible."""
    start = max(now, reservation.starts_at or 0.0, request.begin_at or 0.0)
    if (
        not reservation.ends_at
        or start + request.time_limit_s <= reservation.ends_at
        or UNBOUNDED_FLAGS & set(reservation.flags)
    ):
        return
    wants, left = formatting.duration(request.time_limit_s), reservation.ends_at - start
    if left <= 0:
        text = f"Reservation {reservation.name} is over at {clock(reservation.ends_at, now)}, before this may start."
    elif start > now:
        text = f"Reservation {reservation.name} has {formatting.duration(left)} for this; this job requests {wants}."
    else:
        text = f"Reservation {reservation.name} ends in {formatting.duration(left)}; this job requests {wants}."
    seconds = max(0, int(left))
    yield Block(
        kind="time", text=text, name=reservation.name, amount="seconds", limit=seconds, requested=request.time_limit_s,
        is_final=True,
    )  # fmt: skip


def _licenses(facts: WaitFacts) -> Iterator[Block]:
    """Yield licenses that are short; if Slurm names licenses and none is short here, all that the job requests."""
    is_reason = reason_word(facts.reason) == LICENSES
    demands = [*licenses.demands(facts.request, facts.cluster)]
    short = [demand for demand in demands if demand.is_short]
    for demand in short or (demands if is_reason else ()):
        text = _license_text(demand)
        if not demand.is_short:
            text += f" {LICENSES} is Slurm's reason; usage may have changed since."
        yield _license_block(demand, text, is_reason=is_reason)


def license_blocks(request: Request, cluster: ClusterCapacity) -> Iterator[Block]:
    """Yield the licenses of which too few are free for the request."""
    for demand in licenses.demands(request, cluster):
        if demand.is_short:
            yield _license_block(demand, _license_text(demand))


def _license_block(demand: Demand, text: str, *, is_reason: bool = False) -> Block:
    there = demand.license
    return Block(
        kind="limit", text=text, name=demand.name, amount="licenses", limit=there.total if there else 0,
        used=there.used if there else 0, requested=demand.requested, is_reason=is_reason,
        is_final=demand.is_more_than_all,
    )  # fmt: skip


def _license_text(demand: Demand) -> str:
    """Return a text such as "matlab: 2 of 2 in use; this job requests 1."."""
    name, there, request_text = demand.name, demand.license, f"this job requests {formatting.count(demand.requested)}."
    if there is None:
        return f"{name}: the scheduler has no such license; {request_text} It can never start as requested."
    total = formatting.count(there.total)
    if demand.is_more_than_all:
        return f"{name}: there {are(there.total)} {total} in all; {request_text} It can never start as requested."
    reserved = f", {formatting.count(there.reserved)} reserved" if there.reserved else ""
    return f"{name}: {formatting.count(there.used)} of {total} in use{reserved}; {request_text}"


def _priority(facts: WaitFacts) -> Iterator[Block]:
    """Yield the jobs that get free resources before it."""
    ahead, is_reason = facts.ahead, reason_word(facts.reason) == "Priority"
    if not ahead.jobs:
        if is_reason:
            text = "Jobs ahead of it start first; the scheduler has not listed them yet."
            yield Block(kind="priority", text=text, is_reason=True)
        return
    gpus = f", for {formatting.plural(ahead.gpus, 'GPU')} in all" if ahead.gpus else ""
    waits = "waits" if ahead.jobs == 1 else "wait"
    order = "before it" if facts.cluster.simulates_nodes else "with a higher priority"
    text = f"{formatting.plural(ahead.jobs, 'job')} {waits} {order}{gpus}"
    text += f": {formatting.listed(list(ahead.named))}" if len(ahead.named) == ahead.jobs else ""
    if facts.fit.starts:
        room = "There is room for it, but"
        until = (
            f"; it may go first only if it is over by {clock(facts.free_until, facts.cluster.now)}"
            if facts.cluster.now < facts.free_until < inf
            else ""
        )
        text = f"{room} {text[:1].lower()}{text[1:]}{until}"
    yield Block(kind="priority", text=f"{text}.", amount="jobs", used=ahead.jobs, is_reason=is_reason)
