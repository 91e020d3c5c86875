"""Check the limits that apply to a waiting job: of its QOS, its account and its partition. Pure.

They apply as in Slurm: a partition's QOS comes before the job's own, and a limit of a QOS replaces the account's.
Usage is what runs according to the queue; TRES-minutes used so far are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from nodes.schedulers.cluster import ALLOCATED_STATES, AssociationInfo, Limits, QosInfo, QueuedJobInfo
from nodes.scheduling import gpu_types
from nodes.scheduling.capacity import ClusterCapacity, Request
from vigil_core import formatting

Scope = Literal["job", "node", "user", "account", "group", "time", "minutes"]
JOBS = "jobs"  # the number of jobs, which is not a TRES of Slurm's
_WORDS = {"cpu": "Cpu", "mem": "Mem", "node": "Node", "billing": "Billing", "energy": "Energy", "bb": "BB"}


@dataclass(frozen=True, kw_only=True)
class LimitCheck:
    """A limit compared with the request. `word`: Slurm's reason when it holds a job back for it."""

    word: str
    source: str  # "QOS small", "Account vision"
    scope: Scope
    tres: str  # "gres/gpu", "cpu", "jobs", "time" …
    limit: int
    used: int = 0
    requested: int = 0
    counted_for: str = ""  # the person or account that it is counted for

    @property
    def is_over(self) -> bool:
        return self.used + self.requested > self.limit

    @property
    def is_final(self) -> bool:
        """Return whether waiting will not help: the job alone exceeds the limit."""
        return self.requested > self.limit


@dataclass(frozen=True)
class _LimitSource:
    """A source of limits: a QOS, or an account's or person's association (`user`)."""

    name: str
    prefix: str  # of Slurm's word
    limits: Limits
    key: str
    user: str = ""
    partition: str = ""  # of an association that applies to this partition only


def checks(request: Request, cluster: ClusterCapacity, usage: Usage) -> list[LimitCheck]:
    """Return every limit that applies to the request, exceeded or not."""
    limit_checks: list[LimitCheck] = []
    settled: set[tuple[str, str]] = set()
    for source in _sources(request, cluster):
        checks_of_source = list(_source_checks(source, request, usage))
        limit_checks += [check for check in checks_of_source if _kind(check) not in settled]
        # A QOS's limits replace those of accounts; a group's limits apply at every level of accounts.
        settled |= {
            _kind(check)
            for check in checks_of_source
            if source.prefix == "QOS" or not check.word.startswith("AssocGrp")
        }
    return limit_checks


def submit_check(request: Request, cluster: ClusterCapacity, *, unseen: int = 0, many: int = 1) -> LimitCheck | None:
    """Check how many jobs a person may have waiting and running: Slurm refuses any further submission.

    Only the first source that limits it counts. `unseen`: the person's jobs that the queue does not have yet; `many`:
    how many are requested now.
    """
    source = next((source for source in _sources(request, cluster) if _limits_submitted(source)), None)
    if source is None or not request.user:
        return None
    theirs = [job for job in cluster.queue if job.user == request.user]
    through = {p.name: p.qos for p in cluster.partitions if p.qos}
    if source.prefix == "QOS":
        counted = [job for job in theirs if source.key in {job.qos, through.get(job.partition, "")}]
    else:
        counted = [job for job in theirs if job.account == source.key and source.partition in {"", job.partition}]
    return LimitCheck(
        word=f"{source.prefix}MaxSubmitJob{'PerUser' if source.prefix == 'QOS' else ''}", source=source.name,
        scope="user", tres=JOBS, limit=source.limits.user_submitted or 0, requested=many, counted_for=request.user,
        used=sum(job.tasks for job in counted) + unseen,
    )  # fmt: skip


def _limits_submitted(source: _LimitSource) -> bool:
    """Return whether the source limits submissions.

    Of accounts only a person's own counts: it includes inherited values.
    """
    return source.limits.user_submitted is not None and (source.prefix == "QOS" or bool(source.user))


def amount(tres: str, number: int) -> str:
    """Return an amount with its unit: "2 GPUs", "64 GiB of memory", "4 h"."""
    if tres == "time":
        return formatting.duration(number)
    if tres == "mem":
        return f"{formatting.memory(number * 1024**2)} of memory"
    return formatting.plural(number, _unit(tres))


def sentence(check: LimitCheck, *, you: str = "") -> str:
    """Return the limit, its usage and the request in a sentence. `you`: the reader's user name in the scheduler."""
    limit = amount(check.tres, check.limit)
    request_text = f"this job requests {_bare(check.tres, check.requested)}"
    who = "you" if check.counted_for == you and you else check.counted_for
    uses = f"{who} use{'' if who == 'you' else 's'} {_bare(check.tres, check.used)}"
    match check.scope:
        case "time":
            return f"{check.source} limits jobs to {limit}; {request_text}."
        case "job":
            return f"{check.source} lets one job use {limit}; {request_text}."
        case "node":
            return f"{check.source} lets one job use {limit} on each node; {request_text}."
        case "minutes":
            return (
                f"{check.source} may use {formatting.count(check.limit)} {_unit(check.tres)}-minutes; they are used up."
            )
        case "user":
            whom = f"lets {who}" if check.source.startswith("Account") else "lets each person"
        case "account":
            whom = "lets each account"
        case _:
            whom, uses = "lets everybody in it together", f"{_bare(check.tres, check.used)} in use"
    if check.tres == JOBS:
        runs = f"{who} run{'' if who == 'you' else 's'}" if check.scope != "group" else "there run"
        return f"{check.source} {whom} run {limit} at once; {runs} {formatting.count(check.used)}."
    return f"{check.source} {whom} use {limit} at once; {uses}, {request_text}."


class Usage:
    """The running jobs of a queue, by whom a limit counts them for."""

    def __init__(self, cluster: ClusterCapacity) -> None:
        self._running = [job for job in cluster.queue if job.state in ALLOCATED_STATES]
        self._cluster = cluster

    @cached_property
    def _parents(self) -> Mapping[str, str]:
        return {a.account: a.parent for a in self._cluster.associations if not a.user}

    @cached_property
    def _partition_qos(self) -> Mapping[str, str]:
        return {p.name: p.qos for p in self._cluster.partitions if p.qos}

    def of_qos(self, qos: str, *, user: str | None = None, account: str | None = None) -> list[QueuedJobInfo]:
        """Return jobs under a QOS, their own or their partition's."""
        through = {name for name, its in self._partition_qos.items() if its == qos}
        return [
            job
            for job in self._running
            if (job.qos == qos or job.partition in through)
            and (user is None or job.user == user)
            and (account is None or job.account == account)
        ]

    def of_account(self, account: str, *, user: str = "") -> list[QueuedJobInfo]:
        """Return jobs of an account and those below it; or of one person in it."""
        if user:
            return [job for job in self._running if job.user == user and job.account == account]
        below = {name for name in {job.account for job in self._running} if account in self.line(name)}
        return [job for job in self._running if job.account in below]

    def line(self, account: str) -> list[str]:
        """Return the account and those above it."""
        found = [account]
        while (parent := self._parents.get(found[-1], "")) and parent not in found:
            found.append(parent)
        return found


def used(tres: str, jobs: Iterable[QueuedJobInfo]) -> int:
    """Return how much of a resource these jobs use."""
    if tres == JOBS:
        return sum(1 for _ in jobs)
    if tres == "node":
        return len({node for job in jobs for node in job.nodes})
    kind = tres.partition(":")[2]
    match tres.partition(":")[0]:
        case "cpu":
            return sum(job.cpus for job in jobs)
        case "mem":
            return sum(job.memory_mib for job in jobs)
        case "gres/gpu":
            return sum(_gpus_of(job, kind) for job in jobs)
    return 0


def _gpus_of(job: QueuedJobInfo, kind: str) -> int:
    """Return how many GPUs of this type the job has or asks for; all for ""."""
    return gpu_types.count_of(job.gpus_by_type or {job.gpu_type: job.gpus}, kind)


def requested(tres: str, request: Request, *, nodes: int | None = None) -> int:
    """Return how much of a resource the request needs, at its smallest number of nodes."""
    many = request.min_nodes if nodes is None else nodes
    kind = tres.partition(":")[2]
    match tres.partition(":")[0]:
        case "node":
            return many
        case "cpu":
            return request.cpus * many
        case "mem":
            return request.memory_mib * many
        case "gres/gpu":
            return request.gpus * many if not kind or kind.lower() == request.gpu_type.lower() else 0
    return 0


def account_of(request: Request, cluster: ClusterCapacity) -> str:
    """Return the request's account, else the person's default one."""
    if request.account:
        return request.account
    defaults = (a.account for a in cluster.associations if a.user == request.user and a.is_default)
    return next(defaults, "") if request.user else ""


def qos_of(request: Request, cluster: ClusterCapacity) -> str:
    """Return the request's QOS, else the association's default one."""
    if request.qos:
        return request.qos
    account = account_of(request, cluster)
    defaults = (a.default_qos for a in cluster.associations if a.account == account and a.user == request.user)
    return next((name for name in defaults if name), "")


def _sources(request: Request, cluster: ClusterCapacity) -> Iterator[_LimitSource]:
    """Yield the sources that may limit the request, in their order of precedence."""
    by_name: Mapping[str, QosInfo] = {qos.name: qos for qos in cluster.qos}
    partition, job_qos = cluster.partition(request.partition), qos_of(request, cluster)
    names = [partition.qos if partition else "", job_qos]
    if job_qos in by_name and "OVERRIDE_PARTITION_QOS" in by_name[job_qos].flags:
        names.reverse()
    for name in dict.fromkeys(names):
        if name in by_name:
            yield _LimitSource(f"QOS {name}", "QOS", by_name[name].limits, name)
    yield from (_of_association(a) for a in _associations(request, cluster))


def _of_association(association: AssociationInfo) -> _LimitSource:
    name = f"Account {association.account}"
    return _LimitSource(
        name, "Assoc", association.limits, association.account, association.user, association.partition
    )  # fmt: skip


def _associations(request: Request, cluster: ClusterCapacity) -> Iterator[AssociationInfo]:
    """Yield the person's own associations, then the accounts upwards."""
    account = account_of(request, cluster)
    accounts = {a.account: a for a in cluster.associations if not a.user}
    if request.user:
        associations = [a for a in cluster.associations if a.user == request.user and a.account == account]
        partitions = ("", *request.partition.split(","))
        yield from sorted((a for a in associations if a.partition in partitions), key=lambda a: not a.partition)
    visited: set[str] = set()
    while account in accounts and account not in visited:
        visited.add(account)
        yield accounts[account]
        account = accounts[account].parent


def _source_checks(source: _LimitSource, request: Request, usage: Usage) -> Iterator[LimitCheck]:
    limits = source.limits
    yield from _per_job(source, request, "job", limits.job, nodes=None)
    yield from _per_job(source, request, "node", limits.node, nodes=1)
    if limits.max_time_s is not None:
        word = f"{source.prefix}MaxWallDurationPerJobLimit"
        yield LimitCheck(
            word=word, source=source.name, scope="time", tres="time", limit=limits.max_time_s,
            requested=request.time_limit_s,
        )  # fmt: skip
    yield from _at_once(source, request, usage)
    for tres, limit in limits.group_minutes.items():
        yield LimitCheck(
            word=_word(source.prefix, "Grp", tres, "Minutes"), source=source.name, scope="minutes", tres=tres,
            limit=limit,
        )  # fmt: skip


def _per_job(
    source: _LimitSource, request: Request, scope: Scope, limits: Mapping[str, int], *, nodes: int | None
) -> Iterator[LimitCheck]:
    """Yield what one job may use, in total or on each node."""
    suffix = "PerJob" if scope == "job" else "PerNode"
    for tres, limit in limits.items():
        want = requested(tres, request, nodes=nodes)
        word = _word(source.prefix, "Max", tres, suffix)
        yield LimitCheck(word=word, source=source.name, scope=scope, tres=tres, limit=limit, requested=want)


def _at_once(source: _LimitSource, request: Request, usage: Usage) -> Iterator[LimitCheck]:
    """Yield what several jobs may use at once."""
    limits, qos = source.limits, source.prefix == "QOS"
    scopes: list[tuple[Scope, Mapping[str, int], int | None, str, str]] = [
        ("group", limits.group, limits.group_jobs, "", "Grp"),
        ("user", limits.user, limits.user_jobs, request.user, "PerUser"),
        ("account", limits.account, None, request.account, "PerAccount"),
    ]
    for scope, by_tres, most_jobs, counted_for, way in scopes:
        wanted = {**by_tres, **({JOBS: most_jobs} if most_jobs is not None else {})}
        if not wanted:
            continue
        if qos:
            running = usage.of_qos(
                source.key,
                user=request.user if scope == "user" else None,
                account=request.account if scope == "account" else None,
            )
        else:
            person = request.user if scope == "user" else source.user
            running = usage.of_account(source.key, user=person)
        start, end = ("Grp", "") if way == "Grp" else ("Max", way)
        effective_scope: Scope = "user" if not qos and source.user else scope
        for tres, limit in wanted.items():
            yield LimitCheck(
                word=_word(source.prefix, start, tres, end), source=source.name, scope=effective_scope, tres=tres,
                limit=limit, used=used(tres, running), requested=1 if tres == JOBS else requested(tres, request),
                counted_for=counted_for or (source.user if effective_scope == "user" else ""),
            )  # fmt: skip


def _word(prefix: str, start: str, tres: str, end: str) -> str:
    """Return Slurm's reason without its endings, which differ: QOSMaxCpuPerUserLimit and QOSMaxGRESPerUser."""
    if tres == JOBS:
        return f"{prefix}{start}Jobs{end if prefix == 'QOS' else ''}"
    name = "GRES" if tres.startswith("gres") else _WORDS.get(tres, "Unknown")
    return f"{start}{name}{end}" if end == "PerAccount" else f"{prefix}{start}{name}{end}"


def _kind(check: LimitCheck) -> tuple[str, str]:
    return check.word.removeprefix("QOS").removeprefix("Assoc"), check.tres


def names_limit(check: LimitCheck, reason: str) -> bool:
    """Return whether Slurm's reason means this limit."""
    word = reason.partition(",")[0].strip()
    return bool(word) and _plain(check.word) == _plain(word)


def _plain(word: str) -> str:
    return word.casefold().removesuffix("limit").replace("memory", "mem")


def _unit(tres: str) -> str:
    name, _, kind = tres.partition(":")
    if name == "gres/gpu":
        return f"{kind} GPU".strip()
    return {"cpu": "CPU", "node": "node", JOBS: "job", "mem": "MiB"}.get(name, name)


def _bare(tres: str, number: int) -> str:
    """Return the number without its unit, if the limit next to it has the unit."""
    return amount(tres, number).removesuffix(" of memory") if tres in {"time", "mem"} else formatting.count(number)
