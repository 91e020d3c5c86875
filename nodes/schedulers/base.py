"""What Vigil asks of a scheduler, in plain dataclasses. No Django: the worker, tests and `vigil check` use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class SchedulerError(Exception):
    """The scheduler refused (`permanent`) or could not be reached (try again). The message says what to do."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One request for an allocation. `key` is the attempt's own: it goes into the scheduler's name and comment."""

    key: str
    name: str
    user: str
    script: str  # absolute path of batch.sh
    directory: str  # the run directory, also the working directory
    output: str  # absolute path for the batch script's own output
    min_nodes: int = 1
    max_nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_node: int = 1
    gpus_per_node: int = 0
    memory_mib_per_node: int | None = None
    time_limit_s: int
    grace_s: int  # the warning lead: SIGUSR1 to the batch script this long before the limit
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What the scheduler says of one of its jobs. Times are Unix seconds; `state` is Slurm's word, lower-case."""

    scheduler_id: str
    state: str
    key: str = ""
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    nodes: tuple[str, ...] = ()
    restart_count: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    name: str
    state: str
    reason: str = ""
    partition: str = ""
    cpus: int = 0
    cpus_used: int = 0
    gpus: int = 0
    gpus_used: int = 0
    gpu_type: str = ""
    memory_mib: int = 0


class Scheduler(Protocol):
    """Slurm, or this machine. Every call may raise SchedulerError; none blocks longer than its time-out."""

    def submit(self, submission: Submission) -> str:
        """Hand over one job; answers the scheduler's id."""
        ...

    def find(self, key: str) -> str | None:
        """The id of the job submitted with this key, ended ones included, or None: never submit a key twice."""
        ...

    def status(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        """What is known of these jobs; an id that is missing from the answer is unknown to the scheduler."""
        ...

    def signal(self, scheduler_id: str, name: str) -> None:
        """Send TERM, USR1 or KILL to the batch script's process; a job that has ended is no error."""
        ...

    def cancel(self, scheduler_id: str) -> None:
        """End it for good: out of the queue, or SIGKILL to everything it started."""
        ...

    def nodes(self) -> list[NodeStatus]: ...
