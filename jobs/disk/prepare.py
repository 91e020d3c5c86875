"""Prepare an attempt: write the portal's files into its run directory, and build the request to the scheduler."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomlkit
from django.conf import settings
from django.utils import timezone

from jobs import blamed_nodes, checkpoints, code_permission, environments
from jobs.disk import pins, rundir, sharing, upload
from jobs.disk.batch import array_text
from jobs.disk.job_batch import job_batch
from jobs.disk.missing import RunDirectoryMissing
from jobs.errors import Refused
from jobs.models import Attempt, CadenceOrder, Job, Sweep
from jobs.reliability import mtbf
from jobs.spec import STOP_SECONDS, JobSpec, seconds_of
from nodes.cluster import read, sync
from nodes.schedulers.base import Submission
from nodes.scheduling import gpu_types


def prepare(attempt: Attempt) -> Path:
    """Write everything that the batch script needs, before the submission. Safe to repeat for the same attempt.

    The owner's trust is checked again: it may have been withdrawn since the job was submitted.
    """
    job = attempt.job
    requested = JobSpec.parse(job.spec)
    code_permission.check(job.owner, requested)
    root = _directory_of(job)
    sharing.share(root, sync.unix_user(attempt.scheduler_user))
    spec = _with_halved_learning_rate(
        blamed_nodes.with_exclusions(_with_ordered_cadence(requested, job), attempt), attempt.rewinds
    )
    texts = {
        "spec.toml": job.spec_toml,
        **_environment_texts(attempt, spec, root),
        "attempt.json": json.dumps({"number": attempt.number, "resume": chosen_start(attempt)}),
    }
    (root / "portal" / "cancelled").unlink(missing_ok=True)
    for name, text in texts.items():
        rundir.write(root / "portal" / name, text, mode=0o750 if name.endswith(".sh") else 0o640)
    pins.write(job)
    if spec.code is not None and spec.code.directory:
        _unpack_code(job, root)
    return root


def _environment_texts(attempt: Attempt, spec: JobSpec, root: Path) -> dict[str, str]:
    """Return the files that launcher and scheduler read, by name, all of the same environment."""
    environment = environments.environment_of(spec, attempt.job.project)
    run = run_toml(
        spec,
        environments.variables(environment),
        mtbf_hours=mtbf.hours_between_failures(spec.resources.max_nodes, partition=spec.resources.partition),
        data_roots=code_permission.roots_of(attempt.job.owner),
    )
    batch = job_batch(spec, environment, root, lead=grace_of(attempt))
    return {"run.toml": run, "batch.sh": batch.text()}


def chosen_start(attempt: Attempt) -> str | None:
    """Return the checkpoint that it must start from, or None for the newest that its launchers find."""
    return attempt.resume_from.name if attempt.has_chosen_start and attempt.resume_from is not None else None


def _with_ordered_cadence(spec: JobSpec, job: Job) -> JobSpec:
    """Return the spec with the checkpoint interval that somebody has requested since the submission."""
    every = CadenceOrder.objects.filter(job=job).values_list("every", flat=True).first()
    if every is None or spec.run is None:
        return spec
    return spec.model_copy(update={"run": spec.run.model_copy(update={"checkpoint_every": every})})


def _with_halved_learning_rate(spec: JobSpec, rewinds: int) -> JobSpec:
    """Return the spec with the learning rate halved once for each rewind of the job."""
    if not rewinds or spec.run is None:
        return spec
    return spec.model_copy(
        update={"run": spec.run.model_copy(update={"learning_rate": spec.run.learning_rate / 2**rewinds})}
    )


def submission(attempt: Attempt, root: Path) -> Submission:
    """Return the request to the scheduler."""
    job = attempt.job
    resources = blamed_nodes.with_exclusions(JobSpec.parse(job.spec), attempt).resources
    begin = resources.begin_at
    return Submission(
        key=attempt.key,
        name=job.name,
        user=attempt.scheduler_user,
        script=str(root / "portal" / "batch.sh"),
        directory=str(root),
        output=str(root / "job" / f"batch.{attempt.number}.log"),
        min_nodes=resources.least_allocated,
        max_nodes=resources.most_allocated,
        spares=resources.spares,
        ranks_per_node=resources.local_world_size,
        cpus_per_node=resources.cpus_per_node,
        gpus_per_node=resources.gpus_per_node,
        gpu_type=_spelling(resources.gpu_type),
        memory_mib_per_node=resources.memory_mib_per_node,
        time_limit_s=resources.time_limit_seconds,
        grace_s=grace_of(attempt),
        environment={"VIGIL_SUBMISSION": attempt.key},
        account=job.project.slurm_account,
        partition=resources.partition,
        qos=resources.qos,
        reservation=resources.reservation,
        constraint=resources.constraint,
        licenses=resources.licenses,
        exclusive=resources.exclusive,
        required_nodes=tuple(resources.require_nodes),
        excluded_nodes=tuple(resources.exclude_nodes),
        begin_at=begin.timestamp() if begin and begin > timezone.now() else None,
    )


def _spelling(gpu_type: str) -> str:
    """Return the GPU type as the cluster spells it: Slurm knows no "H100" where it was configured as "h100"."""
    return gpu_types.spelling(gpu_type, read.gpu_types()) or gpu_type if gpu_type else ""


def array_submission(sweep: Sweep, attempts: Sequence[Attempt]) -> Submission:
    """Return one request for the first attempts of a sweep's jobs. All are prepared, and request the same resources."""
    root = rundir.path_of(attempts[0].job.directory)
    runs = {attempt.job.sweep_index or 0: (rundir.path_of(attempt.job.directory), attempt.key) for attempt in attempts}
    path = root / "portal" / "array.sh"
    rundir.write(path, array_text((root / "portal" / "batch.sh").read_text(), runs), mode=0o750)
    template = submission(attempts[0], root)
    return replace(template, key=sweep.key, name=sweep.name, script=str(path), output="/dev/null", environment={})


def grace_of(attempt: Attempt) -> int:
    """Return the seconds that stopping may take: twice the last write plus half a minute, up to the site's limit."""
    needed = STOP_SECONDS + math.ceil(2 * (checkpoints.last_write_seconds(attempt.job_id) or 0.0))
    return min(needed, settings.VIGIL_MAX_GRACE_SECONDS)


def run_toml(
    spec: JobSpec,
    variables: dict[str, str],
    *,
    mtbf_hours: float | None = None,
    data_roots: Sequence[str] | None = None,
) -> str:
    """Return run.toml for launcher and trainer; `python -m training run.toml` runs it without a portal.

    `data_roots`: the only folders that it may read paths from; None: any.
    """
    resources = spec.resources
    document: dict[str, Any] = {
        "name": spec.name,
        "kind": spec.kind,
        "launch": {
            "nodes": resources.min_nodes,
            "max_nodes": resources.max_nodes,
            "spares": resources.spares,
            "ranks_per_node": resources.ranks_per_node,
            "gpus_per_node": resources.gpus_per_node,
            "cpus_per_rank": resources.cpus_per_rank,
            "in_place": spec.restart.in_place,
            "grace_seconds": STOP_SECONDS,
            "max_grace_seconds": settings.VIGIL_MAX_GRACE_SECONDS,
            "time_limit_seconds": seconds_of(resources.time_limit),
        },
    }
    if mtbf_hours is not None:
        document["launch"]["mtbf_hours"] = round(mtbf_hours, 3)
    if spec.kind == "federated" and settings.VIGIL_FEDERATED_LEAST_SHARE:
        document["launch"]["least_share"] = settings.VIGIL_FEDERATED_LEAST_SHARE
    if data_roots is not None:
        document["launch"]["data_roots"] = list(data_roots)
    if variables:
        document["environment"] = {"env": variables}
    if spec.run is not None:
        document["run"] = spec.run.model_dump(mode="json", exclude_none=True)
    if spec.code is not None:
        document[spec.code.TABLE] = spec.code.model_dump(mode="json", exclude={"directory"})
    return tomlkit.dumps(document)


def _directory_of(job: Job) -> Path:
    """Return the job's run directory, made if it has none yet. Raise OSError if its file system is missing."""
    rundir.open_root()
    if not job.directory:
        _make_directory(job)
    root = rundir.path_of(job.directory)
    if not (root / "job").is_dir():
        raise RunDirectoryMissing(job.directory)
    return root


def _make_directory(job: Job) -> None:
    """Make a run directory; of two workers at the same time, the row takes one and the other one is removed."""
    made = rundir.make(job.project.slug, job.pk)
    if Job.objects.filter(pk=job.pk, directory="").update(directory=made) != 1:
        for part in ("portal", "job", ""):
            os.rmdir(rundir.path_of(made) / part)
        made = Job.objects.values_list("directory", flat=True).get(pk=job.pk)
    job.directory = made


def _unpack_code(job: Job, root: Path) -> None:
    """Unpack the uploaded directory once: every attempt of a job runs the same snapshot. code.json describes it."""
    target = root / "job" / "code"
    if target.exists():
        return
    key = job.sweep.key if job.sweep is not None else job.attempts.values_list("key", flat=True).get(number=1)
    try:
        uploaded = upload.describe(key)
    except FileNotFoundError:
        reason = "Its uploaded code is gone: an upload is stored for a day unless a job starts with it."
        raise Refused(reason, "Submit it again, with its code.") from None
    rundir.write(root / "portal" / "code.json", json.dumps(asdict(uploaded)))
    upload.unpack(key, target)
    if job.sweep is None:  # the sweep's other jobs need it as well: it is deleted once all have it (tasks.empty_trash)
        upload.delete(key)
