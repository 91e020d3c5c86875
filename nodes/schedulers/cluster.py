"""What a scheduler says of its cluster besides nodes: partitions, limits, reservations, licences, shares, the queue.

Plain dataclasses, no Django. Times are Unix seconds, durations seconds, memory MiB; None: no limit, or not told.
A limit on TRES is a map such as {"gres/gpu": 8, "cpu": 128, "node": 2}; memory in it is MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HOLDING = frozenset({"running", "suspended", "completing"})  # states of jobs that have their nodes


@dataclass(frozen=True, kw_only=True)
class Partition:
    name: str
    state: str = "up"  # up, down, drain, inactive
    is_default: bool = False
    nodes: tuple[str, ...] = ()
    max_time_s: int | None = None
    default_time_s: int | None = None
    max_nodes: int | None = None  # of one job
    min_nodes: int = 0
    priority_tier: int = 1
    preempt_mode: str = ""  # what happens to its jobs when a higher tier wants their nodes: off, requeue, cancel …
    qos: str = ""
    allowed_accounts: tuple[str, ...] = ()  # empty: all
    denied_accounts: tuple[str, ...] = ()
    allowed_qos: tuple[str, ...] = ()
    denied_qos: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a QOS or an association allows. `group`: everybody in it together; `user`, `account`: each one of them."""

    group: Mapping[str, int] = field(default_factory=dict)  # TRES in use at once
    user: Mapping[str, int] = field(default_factory=dict)
    account: Mapping[str, int] = field(default_factory=dict)
    job: Mapping[str, int] = field(default_factory=dict)  # TRES of one job
    node: Mapping[str, int] = field(default_factory=dict)  # TRES of one job on each node
    group_minutes: Mapping[str, int] = field(default_factory=dict)  # TRES-minutes in all
    group_jobs: int | None = None
    user_jobs: int | None = None  # running
    user_submitted: int | None = None  # pending and running
    max_time_s: int | None = None  # of one job


@dataclass(frozen=True, kw_only=True)
class Qos:
    name: str
    description: str = ""
    priority: int = 0
    preempts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class Association:
    """An account (`user` empty), or a person in it; `partition` empty: in every one."""

    account: str
    user: str = ""
    partition: str = ""
    parent: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    is_default: bool = False  # the person's own default account
    shares: int | None = None
    fair_share: float | None = None  # 0 … 1: 1 has used least of what is due to it
    usage: float | None = None  # its part of everything used lately, 0 … 1
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class Reservation:
    name: str
    nodes: tuple[str, ...] = ()
    starts_at: float | None = None
    ends_at: float | None = None
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    partition: str = ""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class License:
    """A licence that jobs take while they run; `name` is "matlab", or "matlab@server" for one of the accounts."""

    name: str
    total: int = 0
    used: int = 0  # also outside of Slurm, where it knows
    reserved: int = 0  # by reservations


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job that is waiting or running, whoever's it is. An array's waiting tasks are one, with `tasks` of them."""

    scheduler_id: str
    name: str
    user: str
    state: str
    component: str = ""  # "85+1" of heterogeneous job 85, as Slurm's commands write it; "" of every other job
    account: str = ""
    partition: str = ""
    qos: str = ""
    reason: str = ""
    priority: int = 0
    submitted_at: float | None = None
    started_at: float | None = None
    starts_at: float | None = None  # the scheduler's own guess for one that waits
    ends_at: float | None = None  # by its time limit
    time_limit_s: int | None = None
    nodes: tuple[str, ...] = ()
    node_count: int = 1
    cpus: int = 0
    gpus: int = 0
    gpu_type: str = ""  # of the most of them; "": any
    gpus_by_type: Mapping[str, int] = field(default_factory=dict)  # where it asks for several types
    memory_mib: int = 0  # in all
    gpu_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by node
    tasks: int = 1
    reservation: str = ""
    features: str = ""
    dependency: str = ""
    licenses: str = ""  # as Slurm writes them: "matlab:2,abaqus"
    restart_count: int = 0


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """QOS and associations; both are empty where nothing is accounted. `unreadable`: records that are left out."""

    qos: tuple[Qos, ...] = ()
    associations: tuple[Association, ...] = ()
    unreadable: int = 0
