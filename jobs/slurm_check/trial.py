"""Submit a small trial job to each partition like any other job: it proves what no query can.

Its run directory is made, shared, read back and removed by the functions that do so for people's jobs; its batch
script is theirs, with a program of ours in place of the launcher. No row is written: it does not appear in Vigil.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from django.db import DatabaseError

from jobs import environments
from jobs.disk import rundir, sharing, trash
from jobs.disk.job_batch import START, job_batch
from jobs.errors import JobError
from jobs.slurm_check.checked_site import CheckedSite, Submitter
from jobs.slurm_check.finding import CheckFinding, failed, from_exception, ok, skip, warn
from jobs.slurm_check.rights import account_fits
from jobs.slurm_check.trial_report import printable, read
from jobs.spec import STOP_SECONDS, Environment, JobSpec
from jobs.waiting.reasons import explained
from nodes.schedulers.base import ALIVE, JobStatus, SchedulerError, Submission
from nodes.schedulers.cluster import PartitionInfo
from nodes.schedulers.launch import LAUNCH_FAILED
from portal.models import Project

PROBE = START.with_name("probe.py")
LIMIT_S = 300
PATIENCE_S = 120.0
EVERY_S = 1.0
REMOVAL_S = 5.0
NO_PROJECT = "vigil-check"  # the folder for people without a project
# Reasons that no patience helps against.
PERMANENT_REASONS = (
    "Partition", "InvalidAccount", "InvalidQOS", "BadConstraints", "AccountNotAllowed", "QOSNotAllowed", "JobHeld",
    "JobLaunchFailure", LAUNCH_FAILED, "AssocMaxWall", "ReqNodeNotAvail", "Nodes_required",
)  # fmt: skip
ProgressReporter = Callable[[str], None]


@dataclass(frozen=True)
class TrialJob:
    """A submitted trial. `root` is its run directory, `directory` the same relative to the run root."""

    partition: str
    who: Submitter
    gpus: int
    directory: str
    root: Path
    scheduler_id: str


@dataclass(frozen=True)
class TrialOptions:
    """The partitions to try (empty: all), as whom (empty: somebody who may), and the seconds to wait for each."""

    partitions: tuple[str, ...] = ()
    user: str = ""
    patience_s: float = PATIENCE_S


def run_trials(site: CheckedSite, options: TrialOptions, report: ProgressReporter) -> Iterator[CheckFinding]:
    """Try each partition, then check that another person is refused access."""
    chosen = [
        partition for partition in site.partitions if not options.partitions or partition.name in options.partitions
    ]
    for name in sorted(set(options.partitions) - {partition.name for partition in chosen}):
        names = ", ".join(partition.name for partition in site.partitions)
        yield failed(f"Partition {name}", "there is no partition of this name", f"Name one of {names}.")
    trials: list[TrialJob] = []
    try:
        for partition in chosen:
            yield from _try_partition(site, partition, options, report, trials)
        yield from _refusal(site, trials, options, report)
    finally:
        for trial in trials:
            yield from _remove(site, trial)


def _try_partition(
    site: CheckedSite, partition: PartitionInfo, options: TrialOptions, report: ProgressReporter, trials: list[TrialJob]
) -> Iterator[CheckFinding]:
    title = f"Partition {partition.name}"
    if partition.state != "up":
        yield failed(title, f"is {partition.state}", f"scontrol update PartitionName={partition.name} State=UP")
        return
    who = next(_candidates(site, partition, options.user), None)
    if who is None:
        detail = f"nobody in Vigil may use it{f' as {options.user}' if options.user else ''}"
        yield warn(title, detail, "Name a person with --user, or give somebody a Slurm user and an association.")
        return
    gpus = int(any(node.gpus and partition.name in node.partitions for node in site.nodes))
    trial = yield from _hand_over(site, partition, who, gpus, {"report": site.reports == "post"}, title)
    if trial is None:
        return
    trials.append(trial)
    status = yield from _wait(site, trial, options, report, title)
    if status is not None:
        yield from read(site, trial.root, partition.name, status, gpus=trial.gpus, user=who.slurm_user)


def _candidates(site: CheckedSite, partition: PartitionInfo, user: str) -> Iterator[Submitter]:
    """Yield who may use the partition.

    Other Unix users than the portal's first, as run directories are shared with them.
    """
    people = list(site.people or ())
    ours = Submitter(site.user, site.user, NO_PROJECT)
    if user:
        people = [who for who in people if user in {who.name, who.slurm_user}] or [Submitter(user, user, NO_PROJECT)]
    else:
        people = [*(who for who in people if who.slurm_user != site.user), ours]
    for who in people:
        allowed = not partition.allowed_accounts or not who.account or who.account in partition.allowed_accounts
        if allowed and who.account not in partition.denied_accounts and account_fits(site, who):
            yield who


def _hand_over(
    site: CheckedSite, partition: PartitionInfo, who: Submitter, gpus: int, probe_options: Mapping[str, Any], title: str
) -> Generator[CheckFinding, None, TrialJob | None]:
    try:
        return _submit(site, partition, who, gpus, probe_options)
    except (SchedulerError, JobError) as error:
        yield from_exception(title, error, _remedy(error))
    except OSError as error:
        yield failed(title, f"no run directory could be made for {who.slurm_user}: {error}", "See VIGIL_RUNS above.")
    return None


def _remedy(error: Exception) -> str:
    return (
        "See this person's associations in Slurm: sacctmgr show assoc user=…" if getattr(error, "number", None) else ""
    )


def _submit(
    site: CheckedSite, partition: PartitionInfo, who: Submitter, gpus: int, probe_options: Mapping[str, Any]
) -> TrialJob:
    directory = rundir.make(who.project, 0)
    root = rundir.path_of(directory)
    try:
        sharing.share(root, who.slurm_user)
        limit = min(LIMIT_S, partition.max_time_s or LIMIT_S)
        spec = _spec(who, partition.name, gpus, limit)
        token = {"attempt": 0, "url": site.report_url, "token": f"vga_{secrets.token_urlsafe(32)}"}
        rundir.write(root / "portal" / "token", json.dumps(token), mode=0o600)
        rundir.write(root / "portal" / "check.json", json.dumps(probe_options))
        batch = replace(job_batch(spec, _environment(spec), root, lead=STOP_SECONDS), start=PROBE)
        rundir.write(root / "portal" / "batch.sh", batch.text(), mode=0o750)
        scheduler_id = site.scheduler.submit(_submission(spec, who, root, limit))
    except BaseException:
        _discard(directory)
        raise
    return TrialJob(partition.name, who, gpus, directory, root, scheduler_id)


def _spec(who: Submitter, partition: str, gpus: int, limit_s: int) -> JobSpec:
    limit = f"{limit_s // 3600:02}:{limit_s // 60 % 60:02}:{limit_s % 60:02}"
    resources = {"partition": partition, "gpus_per_node": gpus, "time_limit": limit}
    return JobSpec.parse({"name": "vigil-check", "project": who.project, "resources": resources})


def _environment(spec: JobSpec) -> Environment:
    try:
        project = Project.objects.named(spec.project).first()
    except DatabaseError:  # before Vigil's first start
        project = None
    return environments.environment_of(spec, project) if project is not None else environments.site_environment()


def _submission(spec: JobSpec, who: Submitter, root: Path, limit_s: int) -> Submission:
    key = secrets.token_hex(8)
    return Submission(
        key=key,
        name=spec.name,
        user=who.slurm_user,
        script=str(root / "portal" / "batch.sh"),
        directory=str(root),
        output=str(root / "job" / "batch.1.log"),
        gpus_per_node=spec.resources.gpus_per_node,
        time_limit_s=limit_s,
        grace_s=min(STOP_SECONDS, limit_s // 2),
        environment={"VIGIL_SUBMISSION": key},
        account=who.account,
        partition=spec.resources.partition,
    )


def _wait(
    site: CheckedSite, trial: TrialJob, options: TrialOptions, report: ProgressReporter, title: str
) -> Generator[CheckFinding, None, JobStatus | None]:
    """Wait until the job has ended, and return its status. A job that takes too long is cancelled and reported."""
    began, since, last_line = time.monotonic(), time.monotonic(), ""
    status = JobStatus(scheduler_id=trial.scheduler_id, state="unknown")
    # A running job gets the same time again: a first import of torch over NFS is slow.
    while time.monotonic() - since < options.patience_s:
        try:
            reported = site.scheduler.status([trial.scheduler_id]).get(trial.scheduler_id)
        except SchedulerError as error:
            report(f"{title}: {error}")
            reported = None
        if reported is not None:
            if reported.state == "running" and status.state != "running":
                since = time.monotonic()
            status = reported
            if status.state not in ALIVE | {"unknown"}:
                return status
        words = f"{status.state} {explained(status.reason)}".strip()
        if words != last_line:
            report(f"{title}: job {trial.scheduler_id} of {trial.who.slurm_user} is {words}")
            last_line = words
        time.sleep(EVERY_S)
    _cancel(site, trial)
    yield _too_long(status, time.monotonic() - began, title)
    return None


def _too_long(status: JobStatus, seconds: float, title: str) -> CheckFinding:
    why = explained(status.reason) or status.state
    if status.state == "pending" and status.reason.startswith(PERMANENT_REASONS):
        return failed(title, f"the job did not start: {why}", "See sinfo -R and scontrol show partition.")
    if status.state == "pending":
        detail = f"busy, not broken: the job is still waiting after {seconds:.0f} s. {why}"
        return warn(title, detail, "Check again when resources are free, or wait longer with --wait SECONDS.")
    return failed(
        title,
        f"the job is {status.state} after {seconds:.0f} s",
        "See the node's slurmd log, and whether its disks hang.",
    )


def _refusal(
    site: CheckedSite, trials: list[TrialJob], options: TrialOptions, report: ProgressReporter
) -> Iterator[CheckFinding]:
    """Check that another person's job can neither read nor list what the first one wrote."""
    title = "Access by others is refused"
    first = next(
        (
            trial
            for trial in trials
            if trial.who.slurm_user != site.user and (trial.root / "job" / "check.json").exists()
        ),
        None,
    )
    if first is None:
        yield skip(title, "no job of another user ran, so there is nothing to protect")
        return
    partition = next(item for item in site.partitions if item.name == first.partition)
    others = (
        who for who in _candidates(site, partition, "") if who.slurm_user not in {first.who.slurm_user, site.user}
    )
    other = next(others, None)
    if other is None:
        remedy = "Give a second person a Slurm user and an association, and check again."
        yield skip(title, f"nobody except {first.who.slurm_user} may use {first.partition}", remedy)
        return
    foreign = {name: str(first.root / name) for name in ("", "job", "portal", "job/check.json", "portal/token")}
    foreign["project"] = str(first.root.parent)
    second = yield from _hand_over(site, partition, other, 0, {"foreign": foreign}, title)
    if second is None:
        return
    trials.append(second)
    status = yield from _wait(site, second, options, report, title)
    if status is not None:
        yield _check_refusal(site, first, second)


def _check_refusal(site: CheckedSite, first: TrialJob, second: TrialJob) -> CheckFinding:
    title = "Access by others is refused"
    probe_report = rundir.read_json_under(site.runs, f"{second.directory}/job/check.json") or {}
    refused = probe_report.get("refused")
    if not isinstance(refused, dict) or len(refused) < 6:
        return failed(
            title, f"the job of {second.who.slurm_user} reported nothing", "See the findings on its partition above."
        )
    # Everybody may enter the project's folder, and nobody may list it.
    open_to = {
        name or "the folder": printable(way)
        for name, way in refused.items()
        if way and (name, way) != ("project", "enter")
    }
    if open_to:
        access = ", ".join(f"{way} {name}" for name, way in open_to.items())
        return failed(
            title,
            f"{second.who.slurm_user} can {access} of {first.who.slurm_user}'s run",
            f"chmod 2710 {site.runs}, and check again.",
        )
    return ok(title, f"{second.who.slurm_user} can neither list nor read the run of {first.who.slurm_user}")


def _remove(site: CheckedSite, trial: TrialJob) -> Iterator[CheckFinding]:
    _cancel(site, trial)
    left = _discard(trial.directory)
    if left is not None:
        remedy = "Its owner, or root, can remove it. Does the file system support default access control lists?"
        yield failed(f"Partition {trial.partition}", f"its run directory cannot be removed: {left}", remedy)


def _cancel(site: CheckedSite, trial: TrialJob) -> None:
    try:
        site.scheduler.cancel(trial.scheduler_id, user=trial.who.slurm_user)
    except SchedulerError:
        return  # it has a time limit


def _discard(directory: str) -> Path | None:
    """Remove a run directory as the worker does. Return what is left of it, if anything."""
    with trash.moved_to_trash(directory):
        pass
    trash.empty()
    trash_folder = rundir.runs_root() / trash.TRASH
    if directory.startswith(
        f"{NO_PROJECT}/"
    ):  # a project's own folder stays: somebody's job may be about to be made in it
        with suppress(OSError):
            os.rmdir(rundir.path_of(directory).parent)
    deadline = time.monotonic() + REMOVAL_S  # the worker may be deleting it at the same time
    while (left := next(trash_folder.glob(f"{directory.replace('/', '-')}-*"), None)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
