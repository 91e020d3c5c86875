"""Define what a job requests of its scheduler, with what follows from it: ranks, bounds on nodes, seconds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from jobs.errors import Problem
from jobs.spec import slurm, values
from jobs.spec.table import SpecTable


class Resources(SpecTable):
    """[resources]: what the scheduler is to allocate."""

    nodes: Annotated[int | str, BeforeValidator(values.nodes)] = Field(
        default=1, title="Nodes", description='A number, or "min:max" for an elastic job.'
    )
    spares: int = Field(
        default=0,
        ge=0,
        le=64,
        title="Spare nodes",
        description="Additional nodes on standby; they replace nodes that fail.",
    )
    gpus_per_node: int = Field(
        default=0, ge=0, le=64, title="GPUs per node", description="One rank per GPU; 0 runs on CPUs."
    )
    ranks_per_node: int = Field(default=1, ge=1, le=1024, title="Ranks per node", description="For jobs without GPUs.")
    cpus_per_rank: int = Field(
        default=1, ge=1, le=1024, title="CPUs per rank", description="Cores for each rank's process."
    )
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        le=100_000,
        allow_inf_nan=False,
        title="Memory per node (GiB)",
        description="Empty: the scheduler's default.",
    )
    time_limit: Annotated[str, AfterValidator(values.time_limit)] = Field(
        default="01:00:00", title="Time limit", description="HH:MM:SS or D-HH:MM:SS, for each attempt."
    )
    gpu_type: Annotated[str, AfterValidator(slurm.word)] = Field(
        default="", title="GPU type", description="As Slurm names it, such as h100; empty: any."
    )
    partition: Annotated[str, AfterValidator(slurm.word)] = Field(
        default="", title="Partition", description="Empty: Slurm’s default."
    )
    qos: Annotated[str, AfterValidator(slurm.word)] = Field(
        default="", title="QOS", description="Empty: your account’s default."
    )
    constraint: Annotated[str, AfterValidator(slurm.constraint)] = Field(
        default="", title="Node features", description="As Slurm writes them, such as nvlink&(h100|h200)."
    )
    reservation: Annotated[str, AfterValidator(slurm.word)] = Field(
        default="", title="Reservation", description="The reservation to run in."
    )
    licenses: Annotated[str, AfterValidator(slurm.licenses)] = Field(
        default="", title="Licenses", description="As Slurm writes them, such as matlab:2,abaqus."
    )
    begin: Annotated[str, BeforeValidator(values.moment), AfterValidator(slurm.begin)] = Field(
        default="", title="Start after", description="2026-12-01T02:00 in the site’s time zone, or +2h."
    )
    exclusive: bool = Field(default=False, title="Whole nodes", description="No other jobs run on its nodes.")
    require_nodes: Annotated[list[str], Field(max_length=200), AfterValidator(slurm.hosts)] = Field(
        default_factory=list, title="Required nodes", description="The job runs on all of these, such as dgx[01-04]."
    )
    exclude_nodes: Annotated[list[str], Field(max_length=200), AfterValidator(slurm.hosts)] = Field(
        default_factory=list, title="Excluded nodes", description="The job runs on none of these, such as dgx07."
    )

    @property
    def min_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.split(":")[0])

    @property
    def max_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.split(":")[1])

    @property
    def least_allocated(self) -> int:
        """Return the least number of nodes to allocate, spares included."""
        return self.min_nodes + self.spares

    @property
    def most_allocated(self) -> int:
        return self.max_nodes + self.spares

    @property
    def is_elastic(self) -> bool:
        """Return whether the allocation survives the loss of a node: the job continues on the others."""
        return self.max_nodes > self.min_nodes or self.spares > 0

    @property
    def local_world_size(self) -> int:
        """Return the number of ranks on each node."""
        return self.gpus_per_node or self.ranks_per_node

    @property
    def cpus_per_node(self) -> int:
        return self.local_world_size * self.cpus_per_rank

    @property
    def memory_mib_per_node(self) -> int | None:
        return None if self.memory_gib is None else max(1, round(self.memory_gib * 1024))

    @property
    def time_limit_seconds(self) -> int:
        return values.seconds_of(self.time_limit)

    @property
    def begin_at(self) -> datetime | None:
        """Return when a submitted job may begin: its offset was stored with it."""
        return datetime.fromisoformat(self.begin) if self.begin else None

    def cross_field_problems(self) -> Iterator[Problem]:
        """Yield the problems that no single field can show."""
        if self.gpu_type and not self.gpus_per_node:
            yield Problem("resources.gpu_type", "No GPUs are requested. Set gpus_per_node, too, or remove the type.")
        if self.spares and self.max_nodes > self.min_nodes:
            yield Problem(
                "resources.spares", "An elastic job continues without the nodes that it loses. Remove spares."
            )
        if len(self.require_nodes) > self.most_allocated:
            named = len(self.require_nodes)
            yield Problem("resources.require_nodes", f"{named} nodes are named. Write nodes = {named}, or name fewer.")
        if both := sorted({*self.require_nodes} & {*self.exclude_nodes}):
            yield Problem(
                "resources.exclude_nodes", f"{both[0]} is both required and excluded. Remove it from one of them."
            )
