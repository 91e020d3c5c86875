"""Define what a scheduler reports about its cluster besides nodes.

Partitions, limits, reservations, licenses, shares and the queue, as plain dataclasses without Django. Times are Unix
seconds, durations seconds, memory MiB; None means no limit, or not reported. A TRES limit is a map such as
{"gres/gpu": 8, "cpu": 128, "node": 2}, with memory in MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ALLOCATED_STATES = frozenset({"running", "suspended", "completing"})  # job states in which it has its nodes


@dataclass(frozen=True, kw_only=True)
class PartitionInfo:
    name: str
    state: str = "up"  # up, down, drain, inactive
    is_default: bool = False
    nodes: tuple[str, ...] = ()
    max_time_s: int | None = None
    default_time_s: int | None = None
    max_nodes: int | None = None  # of one job
    min_nodes: int = 0
    priority_tier: int = 1
    preempt_mode: str = ""  # what happens to its jobs when a higher tier needs their nodes: off, requeue, cancel …
    qos: str = ""
    allowed_accounts: tuple[str, ...] = ()  # empty: all
    denied_accounts: tuple[str, ...] = ()
    allowed_qos: tuple[str, ...] = ()
    denied_qos: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a QOS or an association.

    `group` limits everybody in it together; `user` and `account` limit each user or account in it.
    """

    group: Mapping[str, int] = field(default_factory=dict)  # TRES in use at once
    user: Mapping[str, int] = field(default_factory=dict)
    account: Mapping[str, int] = field(default_factory=dict)
    job: Mapping[str, int] = field(default_factory=dict)  # TRES of one job
    node: Mapping[str, int] = field(default_factory=dict)  # TRES of one job on each node
    group_minutes: Mapping[str, int] = field(default_factory=dict)  # TRES-minutes in total
    group_jobs: int | None = None
    user_jobs: int | None = None  # running
    user_submitted: int | None = None  # pending and running
    max_time_s: int | None = None  # of one job


@dataclass(frozen=True, kw_only=True)
class QosInfo:
    name: str
    description: str = ""
    priority: int = 0
    preempts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class AssociationInfo:
    """An account (`user` empty), or a user's membership of it; `partition` empty: in every partition."""

    account: str
    user: str = ""
    partition: str = ""
    parent: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    is_default: bool = False  # the user's default account
    shares: int | None = None
    fair_share: float | None = None  # 0 … 1; 1 has used the least of its share
    usage: float | None = None  # its fraction of all recent usage, 0 … 1
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class ReservationInfo:
    name: str
    nodes: tuple[str, ...] = ()
    starts_at: float | None = None
    ends_at: float | None = None
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    partition: str = ""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LicenseInfo:
    """A license that jobs occupy while they run; `name` is "matlab", or "matlab@server" if accounting manages it."""

    name: str
    total: int = 0
    used: int = 0  # including use outside Slurm, where Slurm knows of it
    reserved: int = 0  # by reservations


@dataclass(frozen=True, kw_only=True)
class QueuedJobInfo:
    """A pending or running job of any user. Pending tasks of one array are one entry; `tasks` counts them."""

    scheduler_id: str
    name: str
    user: str
    state: str
    component: str = ""  # "85+1" of heterogeneous job 85, as Slurm's commands write it; "" for every other job
    account: str = ""
    partition: str = ""
    qos: str = ""
    reason: str = ""
    priority: int = 0
    submitted_at: float | None = None
    started_at: float | None = None
    starts_at: float | None = None  # the scheduler's estimate for a pending job
    ends_at: float | None = None  # by its time limit
    time_limit_s: int | None = None
    nodes: tuple[str, ...] = ()
    node_count: int = 1
    cpus: int = 0
    gpus: int = 0
    gpu_type: str = ""  # the most frequent one; "": any
    gpus_by_type: Mapping[str, int] = field(default_factory=dict)  # set only if it requests several types
    memory_mib: int = 0  # in total
    gpu_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by node
    tasks: int = 1
    reservation: str = ""
    features: str = ""
    dependency: str = ""
    licenses: str = ""  # in Slurm's syntax: "matlab:2,abaqus"
    restart_count: int = 0


@dataclass(frozen=True, kw_only=True)
class AccountsInfo:
    """QOS and associations; both are empty without accounting. `unreadable` counts records that could not be parsed."""

    qos: tuple[QosInfo, ...] = ()
    associations: tuple[AssociationInfo, ...] = ()
    unreadable: int = 0
