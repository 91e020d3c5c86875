"""What Slurm would refuse, or keep waiting without end, as far as the rows tell: limits and reservations, by field.

Slurm itself says of most of these "error 2050", or takes the job and never starts it.
"""

from __future__ import annotations

from collections.abc import Iterator

from django.utils import timezone

from jobs.errors import Problem
from jobs.models import Attempt, Predecessor
from jobs.spec import JobSpec
from jobs.why import limits, stuck
from jobs.why.blocks import Block
from jobs.why.limits import JOBS, Check, Usage
from jobs.why.requests import request_of
from nodes.cluster import read
from nodes.models import Reading
from nodes.scheduling.capacity import Cluster, Request
from portal.models import Project, User
from vigil_core import formatting

_FIELDS = {
    "PartitionTimeLimit": "time_limit", "PartitionNodeLimit": "nodes", "QOSNotAllowed": "qos",
    "AccountNotAllowed": "partition",
}  # fmt: skip
_UNITS = {"time": "time_limit", "node": "nodes", "mem": "memory_gib", "gres/gpu": "gpus_per_node"}


def problems(user: User, spec: JobSpec, project: Project, *, many: int = 1) -> list[Problem]:
    """Each thing that waiting will not help against, once a field. `many`: jobs of a sweep, which ask for the same."""
    if not Reading.objects.exclude(read_at=None).exists():  # the scheduler has told nothing yet
        return []
    there = read.read()
    if there.is_one_machine:
        return []
    spec = spec.settled(now=timezone.now(), zone=timezone.get_default_timezone())
    request = request_of(spec, user=user.slurm_user or "", account=project.slurm_account)
    found: dict[str, Problem] = {}
    for problem in (*_of_partition(request, there), *_of_limits(spec, request, there), *_of_reservation(request, there),
                    *_of_submitted(user, spec, request, there, many)):  # fmt: skip
        found.setdefault(problem.field, problem)
    return list(found.values())


def _of_partition(request: Request, there: Cluster) -> Iterator[Problem]:
    for block in stuck.of_partition(request, there):
        if block.is_final:
            field = _FIELDS[block.name]
            if field == "qos" and not request.qos:
                field = "partition"  # it is the account's default that the partition does not take
            yield Problem(f"resources.{field}", f"{block.text}{_at_most(block)}")


def _at_most(block: Block) -> str:
    if block.amount == "seconds" and block.limit:
        return f" Take {formatting.duration(block.limit)} at most, or another partition."
    return " Take another partition." if block.name.endswith("NotAllowed") else ""


def _of_limits(spec: JobSpec, request: Request, there: Cluster) -> Iterator[Problem]:
    for check in limits.checks(request, there, Usage(there)):
        if check.is_final and check.scope != "minutes" and check.tres != JOBS:
            text = limits.sentence(check, you=request.user)
            most = limits.amount(check.tres, check.limit)
            yield Problem(f"resources.{_field(check, spec)}", f"{text} Ask for {most} at most.")


def _field(check: Check, spec: JobSpec) -> str:
    """The field in which a person asks for what the limit counts."""
    unit = check.tres.partition(":")[0]
    if unit == "gres/gpu" and check.scope != "node" and check.limit >= spec.resources.gpus_per_node:
        return "nodes"  # one node's GPUs would do
    if unit in _UNITS:
        return _UNITS[unit]
    alone = spec.resources.cpus_per_rank == 1 and not spec.resources.gpus_per_node
    return "ranks_per_node" if alone else "cpus_per_rank"


def _of_reservation(request: Request, there: Cluster) -> Iterator[Problem]:
    """One that is not there is told as an unknown name."""
    if all(one.name not in request.reservation.split(",") for one in there.reservations):
        return
    for block in stuck.of_reservation(request, there):
        if not block.is_final:
            continue
        if block.kind == "reservation":
            yield Problem("resources.reservation", f"Reservation {block.name} is for others. Take it out.")
        elif block.limit:
            most = formatting.duration(max(60, block.limit // 60 * 60))
            yield Problem("resources.time_limit", f"{block.text} Take {most} at most.")
        else:
            yield Problem("resources.begin" if request.begin_at else "resources.reservation", block.text)


def _of_submitted(user: User, spec: JobSpec, request: Request, there: Cluster, many: int) -> Iterator[Problem]:
    """How many jobs they may have in the queue: one more is refused, however little it asks for."""
    if limits.submit_check(request, there) is None:
        return
    check = limits.submit_check(request, there, unseen=_unseen(user, spec, there, request.account), many=many)
    if check is not None and check.is_over:
        field = "resources.qos" if check.source.startswith("QOS") else "project"
        yield Problem(field, f"{_submitted(check)} {_less(check)}")


def _submitted(check: Check) -> str:
    limit = formatting.plural(check.limit, "job")
    asks = "" if check.asked == 1 else f"; this asks for {formatting.count(check.asked)} more"
    return (
        f"{check.source} lets a person have {limit} waiting and running at once; {check.whose} has"
        f" {formatting.count(check.used)}{asks}."
    )


def _less(check: Check) -> str:
    if check.is_final:
        return f"Take {formatting.plural(check.limit, 'job')} at most."
    return "Submit it once one has ended, or cancel one." if check.asked == 1 else "Take fewer, or submit them later."


def _unseen(user: User, spec: JobSpec, there: Cluster, account: str) -> int:
    """Their jobs for the same QOS and account that the queue, as last read, lacks; those held here count later."""
    queued = {job.scheduler_id for job in there.queue}
    waiting = Attempt.objects.alive().filter(state=Attempt.State.PENDING, job__owner=user)
    waiting = waiting.filter(job__spec__resources__qos=spec.resources.qos, job__project__slurm_account=account)
    held = Predecessor.objects.filter(met=False).values("job")
    ids = waiting.exclude(job__in=held).values_list("scheduler_id", flat=True)
    return sum(known not in queued and known.partition("_")[0] not in queued for known in ids)
