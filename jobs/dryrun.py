"""What a spec would do, before anything is allocated: findings for the form, the API and `vigil submit --check`.

Nodes are those that the last tick wrote down: no scheduler is asked inside a request.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from django.db.models import Max

from jobs.admission import check
from jobs.errors import JobError
from jobs.models import Attempt, Checkpoint, Job
from jobs.room import free_of, in_service, shortfalls
from jobs.rundir import runs_root
from jobs.spec import JobSpec
from nodes.models import Node
from portal.models import User
from training import choices


@dataclass(frozen=True)
class Finding:
    """One thing that a dry run found."""

    level: Literal["ok", "info", "warn", "error"]
    title: str
    text: str


def dry_run(user: User, spec: JobSpec) -> list[Finding]:
    """What stops this spec, and what it would do."""
    try:
        check(user, spec, code=b"" if spec.script and spec.script.directory else None, dry=True)
    except JobError as error:
        return [Finding("error", "Specification", str(error))]
    return [_specification(spec), *_start(user, spec), *_data(spec), *_disk(spec)]


def _specification(spec: JobSpec) -> Finding:
    ranks = f"{spec.world_size} rank{'s' * (spec.world_size > 1)}"
    what = (
        f"{spec.run.steps:,} steps of {spec.run.recipe}" if spec.run else f"{spec.script.entry if spec.script else ''}"
    )
    limit = spec.resources.time_limit
    return Finding("ok", "Specification", f"Holds: {what} on {ranks}, {limit} at most for each attempt.")


def _start(user: User, spec: JobSpec) -> Iterator[Finding]:
    """Whether it would start now, or what it would wait for."""
    nodes = in_service()
    if not nodes:
        yield Finding(
            "info", "Start", "The scheduler has not told of its nodes yet; it does within seconds of starting."
        )
        return
    ahead = Attempt.objects.alive().filter(state=Attempt.State.PENDING).count()
    local = nodes[0].plays_many
    times = spec.resources.min_nodes if local else 1
    free = [node for node in nodes if not list(shortfalls(spec, free_of(node), times=times, where=""))]
    if len(free) >= (1 if local else spec.resources.min_nodes) and not ahead:
        names = ", ".join(node.name for node in free[: 1 if local else spec.resources.min_nodes])
        yield Finding("ok", "Start", f"Starts now on {names}.")
        return
    running = Attempt.objects.filter(state=Attempt.State.RUNNING, job__in=Job.objects.visible_to(user)).order_by(
        "started_at"
    )
    names = ", ".join(f"#{a.job_id} {a.job.name}" for a in running.select_related("job")[:3])
    waits = f"Waits: {_lacking(spec, nodes, times)}"
    waits += f"; {ahead} {'job waits' if ahead == 1 else 'jobs wait'} before it" if ahead else ""
    yield Finding("warn", "Start", f"{waits}." + (f" Running now: {names}." if names else ""))


def _lacking(spec: JobSpec, nodes: list[Node], times: int) -> str:
    cpus, gpus = spec.resources.cpus_per_node * times, spec.resources.gpus_per_node * times
    if gpus and all(free_of(node).gpus < gpus for node in nodes):
        return f"{gpus} GPU{'s' * (gpus > 1)} asked for, {max(free_of(node).gpus for node in nodes)} free"
    return f"{cpus} CPU{'s' * (cpus > 1)} asked for, {max(free_of(node).cpus for node in nodes)} free"


def _data(spec: JobSpec) -> Iterator[Finding]:
    if spec.run is not None:
        described = choices.get("recipes", spec.run.recipe).description.rstrip(".")
        yield Finding(
            "info", "Data", f"{described}. Prepared by the first run that needs it, then kept under the run root."
        )
    elif spec.script is not None and spec.script.git:
        yield Finding(
            "info", "Data", f"{spec.script.git} at {spec.script.ref} is fetched inside the allocation, as the job."
        )
    else:
        yield Finding(
            "info",
            "Data",
            "The directory is sent on submit, 50 MB at most: `vigil submit` packs it, the form takes a tar.gz.",
        )


def _disk(spec: JobSpec) -> Iterator[Finding]:
    """Free space beside what the checkpoints of a job like this took."""
    root = runs_root()
    try:
        free = shutil.disk_usage(root if root.is_dir() else root.parent).free
    except OSError:
        yield Finding("warn", "Disk", f"{root} cannot be read. Make it, or set VIGIL_RUNS.")
        return
    kept = spec.run.keep_checkpoints if spec.run else 1
    one = _checkpoint_bytes(spec)
    if one is None:
        yield Finding(
            "info", "Disk", f"{free / 1e9:,.0f} GB free for runs; how large its checkpoints are is not known yet."
        )
        return
    needed = one * (kept + 2)  # one being written, one it started from
    text = (
        f"About {needed / 1e6:,.0f} MB for checkpoints ({kept} kept of {one / 1e6:,.0f} MB); {free / 1e9:,.0f} GB free."
    )
    yield Finding("ok" if needed < free else "error", "Disk", text)


def _checkpoint_bytes(spec: JobSpec) -> int | None:
    """The largest checkpoint of the newest job with the same recipe and options."""
    alike = Job.objects.filter(kind=spec.kind, project__slug=spec.project)
    if spec.run is not None:
        alike = alike.filter(spec__run__recipe=spec.run.recipe)
        for table, options in spec.run.options.items():
            alike = alike.filter(**{f"spec__run__{table}": options})
    newest = alike.filter(checkpoints__isnull=False).order_by("-id").first()
    if newest is None:
        return None
    found: int | None = Checkpoint.objects.filter(job=newest).aggregate(most=Max("bytes"))["most"]
    return found
