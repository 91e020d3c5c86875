"""What stands in a waiting job's way, each thing a sentence with its amounts. Pure; `explain` gathers the facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from math import inf

from jobs.why import crowded, limits
from jobs.why.blocks import Block, Facts, Kind, are, clock, word_of
from jobs.why.reasons import explained
from nodes.schedulers.cluster import ReservationInfo
from nodes.schedulers.launch import is_launch_failed, nodes_of
from nodes.scheduling import licenses
from nodes.scheduling.capacity import Cluster, Request, may_use
from nodes.scheduling.licenses import Demand
from vigil_core import formatting

# What kind of thing Slurm's word means, the first pattern that fits.
KINDS: dict[str, Kind] = {
    "Resources": "nodes", "Priority": "priority", "Dependency*": "dependency", "BeginTime": "time",
    "Reservation*": "reservation", "ReqNodeNotAvail": "nodes", "Nodes_required*": "nodes", "NodeDown": "nodes",
    "BadConstraints": "nodes", "PartitionTimeLimit": "time", "Partition*": "partition",
    "AccountNotAllowed": "partition", "QOSNotAllowed": "partition",
    "JobHeld*": "held", "JobLaunchFailure": "held", "launch_failed*": "held",
    "*MaxWall*": "time", "QOS*": "limit", "Assoc*": "limit", "Max*PerAccount": "limit", "Licenses": "limit",
    "JobArrayTaskLimit": "limit", "Invalid*": "partition", "Requeued": "time", "Cleaning": "nodes",
}  # fmt: skip
# Nothing that is asked for differently helps against these.
UNCHANGEABLE = frozenset({"dependency", "held"})
BEGIN = "BeginTime"
LICENSES = "Licenses"
REQUEUE = "After a requeue that takes about two minutes."
# A QOS may let its jobs past what the partition allows, by these flags.
BEYOND = {"PARTITION_TIME_LIMIT": "time", "PARTITION_MAXIMUM_NODE": "at most", "PARTITION_MINIMUM_NODE": "at least"}
# A reservation that comes again, or whose jobs may go on after it, is not over for good.
NOT_BOUND = frozenset({"FLEX", "HOURLY", "DAILY", "WEEKLY", "WEEKDAY", "WEEKEND"})


def blocks(facts: Facts) -> list[Block]:
    """Everything in the way: what the scheduler names first, then what waiting will not help against."""
    if facts.held_by_vigil:
        kind: Kind = "dependency" if facts.reason.startswith("Waits for #") else "held"
        text = facts.reason or "Vigil has not handed it to the scheduler yet; it does within seconds."
        return [Block(kind=kind, text=text, is_said=True)]
    found = [
        *_begin(facts),
        *_closed(facts),
        *_limits(facts),
        *_reservation(facts),
        *_licenses(facts),
        *crowded.blocks(facts, said=kind_of(facts.reason) == "nodes"),
        *_priority(facts),
    ]
    if not any(block.is_said for block in found) and (said := _said(facts)):
        found.append(said)
    return sorted(found, key=lambda block: (not block.is_said, not block.is_final))


def may_change(found: Sequence[Block]) -> bool:
    """Whether asking differently could help: not while somebody holds it, another job must end first, or it is to
    begin later."""
    return not any((block.kind in UNCHANGEABLE or block.name == BEGIN) and block.is_said for block in found)


def closed_partition(request: Request, cluster: Cluster) -> bool:
    """Whether a partition would not take the request as it is."""
    return next(of_partition(request, cluster), None) is not None


def kind_of(reason: str) -> Kind | None:
    word = word_of(reason)
    return next((kind for form, kind in KINDS.items() if fnmatchcase(word, form)), None) if word else None


def _said(facts: Facts) -> Block | None:
    """The scheduler's word alone, where nothing that we count stands for it."""
    kind, word = kind_of(facts.reason), word_of(facts.reason)
    if kind is None or word in {"Resources", "Priority"}:
        return None
    text = explained(facts.reason, facts.scheduler_id, facts.job_id)
    if is_launch_failed(facts.reason):
        text = f"{text} {_of_failed_nodes(facts)}".rstrip()
    if kind == "dependency" and facts.own and facts.own.dependency:
        text = f"{text} Slurm writes it as {facts.own.dependency}."
    if word == BEGIN and facts.own:
        text = f"{text} {REQUEUE}" if facts.own.restart_count else _not_before(facts.own.starts_at, facts) or text
    final = "never starts" in text or "Cancel it" in text
    return Block(kind=kind, text=text, name=word, is_said=True, is_final=final)


def _of_failed_nodes(facts: Facts) -> str:
    """Return Slurm's reasons of the nodes where the launch failed, or of all with a failed prolog if it names none."""
    named = nodes_of(facts.reason)
    nodes = [node for node in facts.cluster.nodes if node.name in named] if named else facts.cluster.nodes
    said = [
        f"{node.name}: {node.reason}" for node in nodes if node.reason and (named or "prolog" in node.reason.lower())
    ]
    return f"Slurm says of {formatting.listed(said[:3])}." if said else ""


def _begin(facts: Facts) -> Iterator[Block]:
    """Yield that the job asked to begin later. A hold or a dependency that the scheduler reports comes first."""
    begin = facts.request.begin_at
    if begin and begin > facts.cluster.now:
        is_said = kind_of(facts.reason) not in UNCHANGEABLE
        yield Block(kind="time", text=_not_before(begin, facts), name=BEGIN, is_said=is_said)


def _not_before(begin: float | None, facts: Facts) -> str:
    now = facts.cluster.now
    if not begin or begin <= now:
        return ""
    return f"It is scheduled to start at {clock(begin, now)}, in {formatting.duration(begin - now)}, and not before."


def _closed(facts: Facts) -> Iterator[Block]:
    for block in of_partition(facts.request, facts.cluster):
        said = block.name and word_of(facts.reason) == block.name
        yield Block(**{**vars(block), "is_said": bool(said)})


def of_partition(request: Request, cluster: Cluster) -> Iterator[Block]:
    """What the partition does not take; `name` is Slurm's word for it."""
    partition = cluster.partition(request.partition)
    if partition is None or "," in request.partition:
        return
    beyond = _beyond(request, cluster)
    where = f"Partition {partition.name}"
    if partition.state not in {"up", ""}:
        word = {"down": "PartitionDown", "drain": "PartitionDown", "inactive": "PartitionInactive"}.get(partition.state)
        text = f"{where} is {partition.state} and starts nothing. A Slurm administrator opens it."
        yield Block(kind="partition", text=text, name=word or "PartitionDown")
    if "time" not in beyond and partition.max_time_s is not None and request.time_limit_s > partition.max_time_s:
        most, wants = formatting.duration(partition.max_time_s), formatting.duration(request.time_limit_s)
        yield Block(
            kind="time", text=f"{where} lets a job run for {most}; this asks for {wants}.", name="PartitionTimeLimit",
            amount="seconds", limit=partition.max_time_s, asked=request.time_limit_s, is_final=True,
        )  # fmt: skip
    for bound, limit in (("at most", partition.max_nodes), ("at least", partition.min_nodes)):
        if bound in beyond:
            continue
        over = limit is not None and (request.min_nodes > limit if bound == "at most" else request.max_nodes < limit)
        if over and limit is not None:
            text = f"{where} gives a job {bound} {formatting.plural(limit, 'node')}; this asks for {request.min_nodes}."
            yield Block(
                kind="partition", text=text, name="PartitionNodeLimit", amount="nodes", limit=limit,
                asked=request.min_nodes, is_final=True,
            )  # fmt: skip
    account, qos = limits.account_of(request, cluster), limits.qos_of(request, cluster)
    for what, name, allowed, denied, word in (
        ("account", account, partition.allowed_accounts, partition.denied_accounts, "AccountNotAllowed"),
        ("QOS", qos, partition.allowed_qos, partition.denied_qos, "QOSNotAllowed"),
    ):
        if name and ((allowed and name not in allowed) or name in denied):
            takes = f"It takes {formatting.listed(list(allowed[:5]))}." if allowed else ""
            text = f"{where} does not take {what} {name}. {takes}".strip()
            yield Block(kind="partition", text=text, name=word, is_final=True)


def _beyond(request: Request, cluster: Cluster) -> set[str]:
    """The limits of the partition that the job's QOS sets aside."""
    name = limits.qos_of(request, cluster)
    flags = next((set(qos.flags) for qos in cluster.qos if qos.name == name), set())
    return {BEYOND[flag] for flag in flags & BEYOND.keys()}


def _limits(facts: Facts) -> Iterator[Block]:
    """Limits that are reached, and the one that the scheduler names whether we count it so or not."""
    for check in facts.checks:
        said = limits.is_called(check, facts.reason)
        if not check.is_over and not said:
            continue
        text = limits.sentence(check, you=facts.you)
        if check.is_final and check.scope != "minutes":
            text += " It never starts as it is."
        elif said and not check.is_over and check.scope != "minutes":
            text += f" {word_of(facts.reason)} is what Slurm says; what runs may have changed since."
        yield Block(
            kind="time" if check.scope == "time" else "limit",
            text=text,
            name=check.source,
            amount=check.tres,
            limit=check.limit,
            used=check.used,
            asked=check.asked,
            is_said=said,
            is_final=check.is_final and check.scope != "minutes",
        )


def _reservation(facts: Facts) -> Iterator[Block]:
    """The reservation that it asks for."""
    said = word_of(facts.reason).startswith("Reservation")
    for block in of_reservation(facts.request, facts.cluster):
        yield Block(**{**vars(block), "is_said": said})


def of_reservation(request: Request, cluster: Cluster) -> Iterator[Block]:
    """Why the request cannot start inside the reservation that it names, or not yet."""
    if not request.reservation:
        return
    names = request.reservation.split(",")
    own = next((r for r in cluster.reservations if r.name in names), None)
    if own is None:
        text = f"Reservation {request.reservation} is not there, or not any more. Cancel it and submit it without."
        yield Block(kind="reservation", text=text, name=request.reservation, is_final=True)
        return
    accounts = limits.Usage(cluster).line(limits.account_of(request, cluster))
    if not any(may_use(own, user=request.user, account=account) for account in accounts):
        text = f"Reservation {own.name} is for others. Cancel it and submit it without."
        yield Block(kind="reservation", text=text, name=own.name, is_final=True)
        return
    if own.starts_at and own.starts_at > cluster.now:
        text = f"Reservation {own.name} begins at {clock(own.starts_at, cluster.now)}."
        yield Block(kind="reservation", text=text, name=own.name)
    yield from _too_late(request, own, cluster.now)


def _too_late(request: Request, own: ReservationInfo, now: float) -> Iterator[Block]:
    """Tells that it could not be over before the reservation is, even if it started as soon as it may."""
    start = max(now, own.starts_at or 0.0, request.begin_at or 0.0)
    if not own.ends_at or start + request.time_limit_s <= own.ends_at or NOT_BOUND & set(own.flags):
        return
    wants, left = formatting.duration(request.time_limit_s), own.ends_at - start
    if left <= 0:
        text = f"Reservation {own.name} is over at {clock(own.ends_at, now)}, before this may begin."
    elif start > now:
        text = f"Reservation {own.name} has {formatting.duration(left)} for this; it asks for {wants}."
    else:
        text = f"Reservation {own.name} ends in {formatting.duration(left)}; this asks for {wants}."
    seconds = max(0, int(left))
    yield Block(
        kind="time", text=text, name=own.name, amount="seconds", limit=seconds, asked=request.time_limit_s,
        is_final=True,
    )  # fmt: skip


def _licenses(facts: Facts) -> Iterator[Block]:
    """Say which licences are short; where Slurm says so and none is by the last reading, all that it asks for."""
    is_said = word_of(facts.reason) == LICENSES
    demands = [*licenses.demands(facts.request, facts.cluster)]
    short = [demand for demand in demands if demand.is_short]
    for demand in short or (demands if is_said else ()):
        text = _license_text(demand)
        if not demand.is_short:
            text += f" {LICENSES} is what Slurm says; what runs may have changed since."
        yield _license_block(demand, text, is_said=is_said)


def of_licenses(request: Request, cluster: Cluster) -> Iterator[Block]:
    """Yield the licences of which too few are free for the request."""
    for demand in licenses.demands(request, cluster):
        if demand.is_short:
            yield _license_block(demand, _license_text(demand))


def _license_block(demand: Demand, text: str, *, is_said: bool = False) -> Block:
    there = demand.license
    return Block(
        kind="limit", text=text, name=demand.name, amount="licenses", limit=there.total if there else 0,
        used=there.used if there else 0, asked=demand.asked, is_said=is_said, is_final=demand.is_more_than_all,
    )  # fmt: skip


def _license_text(demand: Demand) -> str:
    """Return "matlab: 2 of 2 in use; this asks for 1."."""
    name, there, asks = demand.name, demand.license, f"this asks for {formatting.count(demand.asked)}."
    if there is None:
        return f"{name}: the scheduler has no such licence; {asks} It never starts as it is."
    total = formatting.count(there.total)
    if demand.is_more_than_all:
        return f"{name}: there {are(there.total)} {total} in all; {asks} It never starts as it is."
    reserved = f", {formatting.count(there.reserved)} reserved" if there.reserved else ""
    return f"{name}: {formatting.count(there.used)} of {total} in use{reserved}; {asks}"


def _priority(facts: Facts) -> Iterator[Block]:
    """Tells who gets what is free before it."""
    ahead, said = facts.ahead, word_of(facts.reason) == "Priority"
    if not ahead.jobs:
        if said:
            text = "Jobs ahead of it start first; which ones, the scheduler has not told yet."
            yield Block(kind="priority", text=text, is_said=True)
        return
    gpus = f", for {formatting.plural(ahead.gpus, 'GPU')} in all" if ahead.gpus else ""
    waits = "waits" if ahead.jobs == 1 else "wait"
    order = "before it" if facts.cluster.is_one_machine else "with a higher priority"
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
    yield Block(kind="priority", text=f"{text}.", amount="jobs", used=ahead.jobs, is_said=said)
