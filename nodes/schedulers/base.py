"""What Vigil asks of a scheduler, in plain dataclasses. No Django: the worker, tests and `vigil check` use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeVar

from nodes.schedulers.cluster import Accounts, License, Partition, QueuedJob, Reservation

# Slurm's words for a job, lower-case. A scheduler answers these and no others: of what it can't tell it says UNKNOWN.
ALIVE = frozenset({"pending", "running", "suspended", "completing"})
ENDED = frozenset(
    {
        "completed", "cancelled", "failed", "timeout", "node_fail", "preempted", "out_of_memory", "boot_fail",
        "deadline",
    }
)  # fmt: skip
UNKNOWN = "unknown"
_STATES = ALIVE | ENDED | {UNKNOWN}
CLOCKS_APART = timedelta(minutes=15)  # at most
T = TypeVar("T")


class SchedulerError(Exception):
    """The scheduler refused (`permanent`) or could not be reached (try again). The message says what to do.

    `number` is the scheduler's own number of the error, where it gave one.
    """

    def __init__(self, message: str, *, permanent: bool = False, number: int | None = None) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.number = number


class Listing(list[T]):
    """Records that a scheduler listed; `unreadable` counts those that it sent and nobody could read."""

    def __init__(self, records: Iterable[T] = (), *, unreadable: int = 0) -> None:
        super().__init__(records)
        self.unreadable = unreadable


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One request for an allocation. `key` is the attempt's own: it goes into the scheduler's name and comment."""

    key: str
    name: str
    user: str  # the Unix user that it runs as; "" where a scheduler knows but one
    script: str  # absolute path of batch.sh
    directory: str  # the run directory, also the working directory
    output: str  # absolute path for the batch script's own output
    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0  # of these, that stand by
    ranks_per_node: int = 1
    cpus_per_node: int = 1
    gpus_per_node: int = 0
    gpu_type: str = ""  # "": any
    memory_mib_per_node: int | None = None
    time_limit_s: int
    grace_s: int  # the warning lead: SIGUSR1 to the batch script this long before the limit
    environment: dict[str, str] = field(default_factory=dict)
    account: str = ""  # "" in these five: the scheduler's default
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""  # of node features, as Slurm writes it: "h100&nvlink"
    licenses: str = ""  # as Slurm writes them: "matlab:2,abaqus"
    exclusive: bool = False  # whole nodes
    required_nodes: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] = ()
    begin_at: float | None = None  # Unix seconds

    @property
    def goes_on(self) -> bool:
        """Whether the loss of a node does not end it: it goes on in those that are left."""
        return self.max_nodes > self.min_nodes or self.spares > 0


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What the scheduler says of one of its jobs. Times are Unix seconds; `state` is of ALIVE, ENDED, or UNKNOWN."""

    scheduler_id: str
    state: str
    key: str = ""
    other_key: str = ""  # where its name has another one than its comment: somebody has changed one of them
    user: str = ""  # "": not told
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    nodes: tuple[str, ...] = ()
    restart_count: int = 0
    before: str = ""  # why the run before the last restart ended, of ENDED; "" where that is not told
    nodes_before: tuple[str, ...] = ()  # of that run, where the accounts tell

    def __post_init__(self) -> None:
        if self.state not in _STATES:
            raise ValueError(f"{self.state!r} is no state of a job")

    @property
    def keys(self) -> frozenset[str]:
        """What it goes by. None where somebody has changed both, or where it came past Vigil."""
        return frozenset({self.key, self.other_key} - {""})

    def is_of(self, user: str) -> bool:
        """Whether it may be this person's, as far as that is told."""
        return not (self.user and user) or self.user == user

    def may_be_from(self, since: datetime | None, until: datetime | None) -> bool:
        """Whether it may have been submitted between these moments of our clock. Slurm's may differ.

        A requeue makes it look younger than it is.
        """
        if self.submitted_at is None or self.restart_count:
            return True
        at = datetime.fromtimestamp(self.submitted_at, UTC)
        return not (since and at < since - CLOCKS_APART) and not (until and at > until + CLOCKS_APART)


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """One `srun` of a job, or its batch script, after its end. `number`: "batch", "extern", "0", "1" …"""

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
    """A machine. `state` is Slurm's word as sinfo writes it: idle, mixed, allocated, down, drained …"""

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
    gpu_type: str = ""  # of the most of them
    gpus_by_type: Mapping[str, int] = field(default_factory=dict)  # where it has several types; see gpu_types
    gpus_used_by_type: Mapping[str, int] = field(default_factory=dict)  # likewise
    gpus_allocated: tuple[int, ...] = ()  # indices on the node; empty where the scheduler does not tell
    memory_mib: int = 0
    memory_used_mib: int = 0  # allocated, not resident
    load: float | None = None
    booted_at: float | None = None
    plays_many: bool = False  # one machine that plays as many nodes as a job asks for (the local scheduler's)


class Scheduler(Protocol):
    """Slurm, or this machine. Every call may raise SchedulerError; none blocks longer than its time-out.

    `user` is the one whose job it is: what is done to a job is done in its owner's name.
    """

    @property
    def has_arrays(self) -> bool:
        """Whether it takes many jobs as one array. Else Vigil submits them one by one, and counts how many run."""
        ...

    def submit(self, submission: Submission) -> str:
        """Hand over one job; answers the scheduler's id."""
        ...

    def submit_array(self, submission: Submission, tasks: Sequence[int], *, at_once: int | None) -> list[str]:
        """Hand over a job for each of the numbers; answers their ids, "<array>_<number>".

        The script reads SLURM_ARRAY_TASK_ID. `at_once`: how many of them may run at the same time.
        """
        ...

    def find(self, key: str, *, user: str = "", task: int | None = None) -> str | None:
        """The id of the job submitted with this key, ended ones included, or None: never submit a key twice.

        Of an array its own id, without a task's number; with `task` that one's id, if the array has it.
        """
        ...

    def status(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        """What is known of these jobs, ended ones included: where the live queue has forgotten one, the accounts say.

        An id that is missing from the answer is unknown to the scheduler. One that could not be asked about raises.
        """
        ...

    def steps(self, scheduler_id: str, restart_count: int = 0) -> tuple[SlurmStep, ...]:
        """The steps of a run that has ended, as the accounts tell them: none while, or where, these have none."""
        ...

    def cancelled_by(self, scheduler_id: str, restart_count: int = 0) -> str:
        """Return the scheduler's user who cancelled a run, from the accounts; "" where these do not tell."""
        ...

    def signal(self, scheduler_id: str, name: str, *, user: str = "") -> None:
        """Send TERM, USR1 or KILL to the batch script's process; a job that has ended is no error."""
        ...

    def release(self, scheduler_id: str, *, user: str = "") -> None:
        """End a hold, as `scontrol release`; of one that nothing holds no error. `user` "": the portal's own."""
        ...

    def cancel(self, scheduler_id: str, *, user: str = "") -> None:
        """End it for good: out of the queue, or SIGKILL to everything it started."""
        ...

    def nodes(self) -> Listing[NodeStatus]: ...

    def queue(self) -> Listing[QueuedJob]:
        """Everybody's jobs that wait or run, as far as the scheduler shows them to us."""
        ...

    def partitions(self) -> Listing[Partition]: ...

    def reservations(self) -> Listing[Reservation]: ...

    def licenses(self) -> Listing[License]: ...

    def clock(self) -> float | None:
        """Return the scheduler's time in Unix seconds; None where it has no clock of its own, or does not tell it."""
        ...

    def accounts(self) -> Accounts:
        """QOS and associations with their limits and shares. Raises where the accounts do not answer."""
        ...

    def drain(self, node: str, reason: str) -> None:
        """Let nothing new start on a node; what runs there goes on."""
        ...

    def undrain(self, node: str) -> None: ...
