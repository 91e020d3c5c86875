"""Find limits and reservations by which Slurm would refuse a job, or keep it waiting for ever, by field.

For most of these Slurm itself only reports "error 2050", or accepts the job and never starts it.
"""

from __future__ import annotations

from collections.abc import Iterator

from django.utils import timezone

from jobs.errors import Problem
from jobs.models import Attempt, Predecessor
from jobs.spec import JobSpec
from jobs.waiting import blocks, limits
from jobs.waiting.block import Block
from jobs.waiting.limits import JOBS, LimitCheck, Usage
from jobs.waiting.requests import request_of
from nodes.cluster import read
from nodes.models import Reading
from nodes.scheduling.capacity import ClusterCapacity, Request
from portal.models import Project, User
from vigil_core import formatting

_FIELDS = {
    "PartitionTimeLimit": "time_limit", "PartitionNodeLimit": "nodes", "QOSNotAllowed": "qos",
    "AccountNotAllowed": "partition",
}  # fmt: skip
_UNITS = {"time": "time_limit", "node": "nodes", "mem": "memory_gib", "gres/gpu": "gpus_per_node"}


def problems(user: User, spec: JobSpec, project: Project, *, many: int = 1) -> list[Problem]:
    """Return problems that waiting will not help against, one per field.

    `many`: jobs of a sweep with equal requests.
    """
    if not Reading.objects.exclude(read_at=None).exists():  # nothing has been read from the scheduler yet
        return []
    there = read.read()
    if there.simulates_nodes:
        return []
    spec = spec.with_absolute_begin(now=timezone.now(), zone=timezone.get_default_timezone())
    request = request_of(spec, user=user.slurm_user or "", account=project.slurm_account)
    by_field: dict[str, Problem] = {}
    for problem in (
        *_partition_problems(request, there),
        *_limit_problems(spec, request, there),
        *_reservation_problems(request, there),
        *_submit_limit_problems(user, spec, request, there, many),
    ):
        by_field.setdefault(problem.field, problem)
    return list(by_field.values())


def _partition_problems(request: Request, there: ClusterCapacity) -> Iterator[Problem]:
    for block in blocks.partition_blocks(request, there):
        if block.is_final:
            field = _FIELDS[block.name]
            if field == "qos" and not request.qos:
                field = "partition"  # the partition refuses the account's default QOS
            yield Problem(f"resources.{field}", f"{block.text}{_partition_advice(block)}")


def _partition_advice(block: Block) -> str:
    if block.amount == "seconds" and block.limit:
        return f" Request {formatting.duration(block.limit)} at most, or choose another partition."
    return " Choose another partition." if block.name.endswith("NotAllowed") else ""


def _limit_problems(spec: JobSpec, request: Request, there: ClusterCapacity) -> Iterator[Problem]:
    for check in limits.checks(request, there, Usage(there)):
        if check.is_final and check.scope != "minutes" and check.tres != JOBS:
            text = limits.sentence(check, you=request.user)
            most = limits.amount(check.tres, check.limit)
            yield Problem(f"resources.{_field(check, spec)}", f"{text} Request {most} at most.")


def _field(check: LimitCheck, spec: JobSpec) -> str:
    """Return the field by which a person requests what the limit counts."""
    unit = check.tres.partition(":")[0]
    if unit == "gres/gpu" and check.scope != "node" and check.limit >= spec.resources.gpus_per_node:
        return "nodes"  # one node's GPUs would do
    if unit in _UNITS:
        return _UNITS[unit]
    alone = spec.resources.cpus_per_rank == 1 and not spec.resources.gpus_per_node
    return "ranks_per_node" if alone else "cpus_per_rank"


def _reservation_problems(request: Request, there: ClusterCapacity) -> Iterator[Problem]:
    """Yield problems with the reservation. A missing one is reported as an unknown name elsewhere."""
    if all(reservation.name not in request.reservation.split(",") for reservation in there.reservations):
        return
    for block in blocks.reservation_blocks(request, there):
        if not block.is_final:
            continue
        if block.kind == "reservation":
            yield Problem("resources.reservation", f"Reservation {block.name} is for others. Remove it.")
        elif block.limit:
            most = formatting.duration(max(60, block.limit // 60 * 60))
            yield Problem("resources.time_limit", f"{block.text} Request {most} at most.")
        else:
            yield Problem("resources.begin" if request.begin_at else "resources.reservation", block.text)


def _submit_limit_problems(
    user: User, spec: JobSpec, request: Request, there: ClusterCapacity, many: int
) -> Iterator[Problem]:
    """Yield that the person has as many jobs in the queue as allowed: one more is refused, however small."""
    if limits.submit_check(request, there) is None:
        return
    check = limits.submit_check(request, there, unseen=_not_yet_queued(user, spec, there, request.account), many=many)
    if check is not None and check.is_over:
        field = "resources.qos" if check.source.startswith("QOS") else "project"
        yield Problem(field, f"{_submit_limit_text(check)} {_submit_limit_advice(check)}")


def _submit_limit_text(check: LimitCheck) -> str:
    limit = formatting.plural(check.limit, "job")
    request_text = "" if check.requested == 1 else f"; this job requests {formatting.count(check.requested)} more"
    return (
        f"{check.source} lets a person have {limit} waiting and running at once; {check.counted_for} has"
        f" {formatting.count(check.used)}{request_text}."
    )


def _submit_limit_advice(check: LimitCheck) -> str:
    if check.is_final:
        return f"Submit {formatting.plural(check.limit, 'job')} at most."
    return (
        "Submit it once one has ended, or cancel one."
        if check.requested == 1
        else "Submit fewer, or submit them later."
    )


def _not_yet_queued(user: User, spec: JobSpec, there: ClusterCapacity, account: str) -> int:
    """Return how many of their jobs the queue does not have yet; jobs that wait for others count later."""
    queued = {job.scheduler_id for job in there.queue}
    waiting = Attempt.objects.alive().filter(state=Attempt.State.PENDING, job__owner=user)
    waiting = waiting.filter(job__spec__resources__qos=spec.resources.qos, job__project__slurm_account=account)
    waiting_for_others = Predecessor.objects.filter(met=False).values("job")
    ids = waiting.exclude(job__in=waiting_for_others).values_list("scheduler_id", flat=True)
    return sum(id not in queued and id.partition("_")[0] not in queued for id in ids)
