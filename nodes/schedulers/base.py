"""Define what Vigil needs from a scheduler, as plain dataclasses and one protocol.

No Django here: the worker, the tests and `vigil check` use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeVar

from nodes.schedulers.cluster import AccountsInfo, LicenseInfo, PartitionInfo, QueuedJobInfo, ReservationInfo

# Slurm's job states, lower-case. A scheduler reports only these, and UNKNOWN where it cannot tell.
ALIVE = frozenset({"pending", "running", "suspended", "completing"})
ENDED = frozenset(
    {
        "completed", "cancelled", "failed", "timeout", "node_fail", "preempted", "out_of_memory", "boot_fail",
        "deadline",
    }
)  # fmt: skip
UNKNOWN = "unknown"
_STATES = ALIVE | ENDED | {UNKNOWN}
MAX_CLOCK_SKEW = timedelta(minutes=15)  # between our clock and the scheduler's
T = TypeVar("T")


class SchedulerError(Exception):
    """Raised when the scheduler refused (`permanent`) or could not be reached (worth a retry).

    The message says what to do. `number` is the scheduler's error number, where it gave one.
    """

    def __init__(self, message: str, *, permanent: bool = False, number: int | None = None) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.number = number


class Listing(list[T]):
    """A list of records from a scheduler; `unreadable` counts the records that could not be parsed."""

    def __init__(self, records: Iterable[T] = (), *, unreadable: int = 0) -> None:
        super().__init__(records)
        self.unreadable = unreadable


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request for one allocation.

    `key` identifies the attempt; it goes into the job's name and comment in the scheduler.
    """

    key: str
    name: str
    user: str  # the Unix user that it runs as; "" where a scheduler has only one
    script: str  # absolute path of batch.sh
    directory: str  # the run directory, also the working directory
    output: str  # absolute path for the batch script's own output
    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0  # of max_nodes: how many start as standby nodes
    ranks_per_node: int = 1
    cpus_per_node: int = 1
    gpus_per_node: int = 0
    gpu_type: str = ""  # "": any
    memory_mib_per_node: int | None = None
    time_limit_s: int
    grace_s: int  # the warning lead: SIGUSR1 to the batch script this long before the limit
    environment: dict[str, str] = field(default_factory=dict)
    account: str = ""  # "" in the next four fields too: the scheduler's default
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""  # on node features, in Slurm's syntax: "h100&nvlink"
    licenses: str = ""  # in Slurm's syntax: "matlab:2,abaqus"
    exclusive: bool = False  # whole nodes
    required_nodes: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] = ()
    begin_at: float | None = None  # Unix seconds

    @property
    def survives_node_loss(self) -> bool:
        """Return whether the job survives the loss of a node and continues on the remaining ones."""
        return self.max_nodes > self.min_nodes or self.spares > 0


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The state of one job as the scheduler reports it.

    Times are Unix seconds; `state` is one of ALIVE or ENDED, or UNKNOWN.
    """

    scheduler_id: str
    state: str
    key: str = ""
    other_key: str = ""  # set if its name and comment have different keys: somebody edited one of them
    user: str = ""  # "": not reported
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    nodes: tuple[str, ...] = ()
    restart_count: int = 0
    previous_end: str = ""  # why the run before the last restart ended, one of ENDED; "" if not reported
    previous_nodes: tuple[str, ...] = ()  # of that run, where accounting reports them

    def __post_init__(self) -> None:
        if self.state not in _STATES:
            raise ValueError(f"{self.state!r} is not a job state")

    @property
    def keys(self) -> frozenset[str]:
        """Return its attempt keys; empty if somebody edited both, or if it was submitted outside Vigil."""
        return frozenset({self.key, self.other_key} - {""})

    def may_belong_to(self, user: str) -> bool:
        """Return whether the job may belong to this user; True where either is not reported."""
        return not (self.user and user) or self.user == user

    def may_be_submitted_between(self, since: datetime | None, until: datetime | None) -> bool:
        """Return whether it may have been submitted between these times by our clock.

        Slurm's clock may differ by MAX_CLOCK_SKEW. A requeue resets the submit time, so a restarted job always may.
        """
        if self.submitted_at is None or self.restart_count:
            return True
        at = datetime.fromtimestamp(self.submitted_at, UTC)
        return not (since and at < since - MAX_CLOCK_SKEW) and not (until and at > until + MAX_CLOCK_SKEW)


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """A finished `srun` step of a job, or its batch script. `number`: "batch", "extern", "0", "1" …"""

    number: str
    name: str
    state: str
    exit_code: int | None = None
    signal: int | None = None
    nodes: tuple[str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """A node as the scheduler reports it. `state` is sinfo's word: idle, mixed, allocated, down, drained …"""

    name: str
    state: str
    reason: str = ""
    reason_by: str = ""
    reason_at: float | None = None
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    cpus: int = 0
    cpus_used: int = 0
    gpus: int = 0
    gpus_used: int = 0
    gpu_type: str = ""  # the most frequent one
    gpus_by_type: Mapping[str, int] = field(default_factory=dict)  # set only if it has several types; see gpu_types
    gpus_used_by_type: Mapping[str, int] = field(default_factory=dict)  # likewise
    gpus_allocated: tuple[int, ...] = ()  # indices on the node; empty where not reported
    memory_mib: int = 0
    memory_used_mib: int = 0  # allocated, not resident
    load: float | None = None
    booted_at: float | None = None
    plays_many: bool = False  # the local scheduler's machine stands for as many nodes as a job requests


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a scheduler can do, known without opening a connection: see `choose.capabilities_of`."""

    label: str
    """How a sentence about it begins: "Slurm", "The scheduler"."""
    has_arrays: bool
    """Many jobs can be submitted as one array. Otherwise Vigil submits them one by one and limits how many run."""
    is_remote: bool
    """It is a service that may not respond, and whose requests need an address and a user with a token."""
    runs_jobs_here: bool
    """Jobs run on the portal's own machine, in the portal's Python environment by default."""
    runs_as_owner: bool
    """Each job runs as its owner's own Unix user. Otherwise all share one user, and their code must be trusted."""
    has_slurm_options: bool
    """Account, partition, QOS, reservation, constraint and licenses mean something to it."""
    has_pyxis: bool
    """It can start containers through Pyxis."""
    can_attach: bool
    """A job that was submitted outside Vigil can be attached to it."""
    numbers_whole_gpus: bool
    """Its GPU indices are NVML's. Otherwise they count the device files that are configured for the node."""


class Scheduler(Protocol):
    """The interface to Slurm, or to the local scheduler on this machine.

    Every call may raise SchedulerError, and none blocks longer than its timeout. `user` is the job's owner: actions on
    a job are carried out in the owner's name.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def submit(self, submission: Submission) -> str:
        """Submit one job and return the scheduler's id."""
        ...

    def submit_array(self, submission: Submission, tasks: Sequence[int], *, at_once: int | None) -> list[str]:
        """Submit one job per task number and return their ids, "<array>_<number>".

        The script reads SLURM_ARRAY_TASK_ID. `at_once` limits how many of them run at the same time.
        """
        ...

    def find(self, key: str, *, user: str = "", task: int | None = None) -> str | None:
        """Return the id of the job submitted with this key, or None; ended jobs count, so no key is used twice.

        Of an array, return the array's id without a task number; with `task`, that task's id if the array has it.
        """
        ...

    def status(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        """Return the status of these jobs by id, ended ones included.

        Accounting fills in for jobs that the live queue has forgotten. An id that the scheduler does not know is
        missing from the result; a job whose status cannot be read is UNKNOWN, or raises.
        """
        ...

    def steps(self, scheduler_id: str, restart_count: int = 0) -> tuple[SlurmStep, ...]:
        """Return the steps of a finished run from accounting; empty while, or where, it has none."""
        ...

    def cancelled_by(self, scheduler_id: str, restart_count: int = 0) -> str:
        """Return the scheduler's user who cancelled a run, from accounting; "" where that is not recorded."""
        ...

    def signal(self, scheduler_id: str, name: str, *, user: str = "") -> None:
        """Send TERM, USR1 or KILL to the batch script's process. Does nothing if the job has ended."""
        ...

    def release(self, scheduler_id: str, *, user: str = "") -> None:
        """Release a held job, like `scontrol release`. Does nothing if it is not held.

        `user` "" releases it in the name of the portal's own user.
        """
        ...

    def cancel(self, scheduler_id: str, *, user: str = "") -> None:
        """End the job for good: remove it from the queue, or SIGKILL everything it started."""
        ...

    def nodes(self) -> Listing[NodeStatus]: ...

    def queue(self) -> Listing[QueuedJobInfo]:
        """Return everybody's pending and running jobs, as far as the scheduler shows them to us."""
        ...

    def partitions(self) -> Listing[PartitionInfo]: ...

    def reservations(self) -> Listing[ReservationInfo]: ...

    def licenses(self) -> Listing[LicenseInfo]: ...

    def clock(self) -> float | None:
        """Return the scheduler's time in Unix seconds; None if it has no clock of its own or does not report it."""
        ...

    def accounts(self) -> AccountsInfo:
        """Return QOS and associations with limits and shares. Raises if accounting does not respond."""
        ...

    def drain(self, node: str, reason: str) -> None:
        """Keep new jobs off a node; running jobs continue."""
        ...

    def undrain(self, node: str) -> None: ...

    def reserve(self, name: str, nodes: Sequence[str], *, seconds: int) -> None:
        """Reserve nodes for the portal's own jobs, even while others' jobs still run there.

        Jobs run in it that name it (`Submission.reservation`). Does nothing if a reservation of this name exists.
        """
        ...

    def unreserve(self, name: str) -> None:
        """Remove a reservation. Does nothing if there is none of this name."""
        ...

    def reserve_window(self, name: str, nodes: Sequence[str], *, starts_at: float, ends_at: float) -> None:
        """Reserve nodes for maintenance between these Unix seconds: no job starts that would overlap.

        Does nothing if a reservation of this name exists. Raises a permanent SchedulerError if it cannot reserve ahead.
        """
        ...
