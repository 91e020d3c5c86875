"""A small job on each partition's nodes, made and handed over as any job is: it proves what no question can.

Its run directory is made, shared, read back and removed by the functions that do so for people's jobs; its batch
script is theirs, with a program of ours instead of the launcher. No row is written: nobody sees it in Vigil.
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

from jobs.checking.finding import Finding, bad, of_error, ok, skip, warn
from jobs.checking.rights import account_fits
from jobs.checking.seen import plain, read
from jobs.checking.site import Site, Who
from jobs.disk import environments, rundir, sharing, trash
from jobs.errors import JobError
from jobs.spec import STOP_SECONDS, Environment, JobSpec
from jobs.why.reasons import explained
from nodes.schedulers.base import ALIVE, JobStatus, SchedulerError, Submission
from nodes.schedulers.cluster import PartitionInfo
from nodes.schedulers.launch import LAUNCH_FAILED
from portal.models import Project

PROBE = environments.START.with_name("probe.py")
LIMIT_S = 300
PATIENCE_S = 120.0
EVERY_S = 1.0
REMOVAL_S = 5.0
NO_PROJECT = "vigil-check"  # the folder for whoever has none
# Reasons that no patience helps against.
NEVER = (
    "Partition", "InvalidAccount", "InvalidQOS", "BadConstraints", "AccountNotAllowed", "QOSNotAllowed", "JobHeld",
    "JobLaunchFailure", LAUNCH_FAILED, "AssocMaxWall", "ReqNodeNotAvail", "Nodes_required",
)  # fmt: skip
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """One that was handed over. `root` is its run directory, `directory` the same below the run root."""

    partition: str
    who: Who
    gpus: int
    directory: str
    root: Path
    scheduler_id: str


@dataclass(frozen=True)
class Wishes:
    """The partitions to try (empty: all), as whom (empty: somebody who may), and the seconds to wait for each."""

    partitions: tuple[str, ...] = ()
    user: str = ""
    patience_s: float = PATIENCE_S


def look(site: Site, wishes: Wishes, tell: Tell) -> Iterator[Finding]:
    """Partition by partition; then, as another person, the refusal."""
    chosen = [one for one in site.partitions if not wishes.partitions or one.name in wishes.partitions]
    for name in sorted(set(wishes.partitions) - {one.name for one in chosen}):
        known = ", ".join(one.name for one in site.partitions)
        yield bad(f"Partition {name}", "there is none of this name", f"Name one of {known}.")
    kept: list[Trial] = []
    try:
        for partition in chosen:
            yield from _on(site, partition, wishes, tell, kept)
        yield from _refusal(site, kept, wishes, tell)
    finally:
        for trial in kept:
            yield from _remove(site, trial)


def _on(site: Site, partition: PartitionInfo, wishes: Wishes, tell: Tell, kept: list[Trial]) -> Iterator[Finding]:
    title = f"Partition {partition.name}"
    if partition.state != "up":
        yield bad(title, f"is {partition.state}", f"scontrol update PartitionName={partition.name} State=UP")
        return
    who = next(_candidates(site, partition, wishes.user), None)
    if who is None:
        detail = f"nobody known to Vigil may use it{f' as {wishes.user}' if wishes.user else ''}"
        yield warn(title, detail, "Name a person with --user, or give somebody a Slurm user and an association.")
        return
    gpus = int(any(node.gpus and partition.name in node.partitions for node in site.nodes))
    trial = yield from _hand_over(site, partition, who, gpus, {"report": site.reports == "post"}, title)
    if trial is None:
        return
    kept.append(trial)
    status = yield from _wait(site, trial, wishes, tell, title)
    if status is not None:
        yield from read(site, trial.root, partition.name, status, gpus=trial.gpus, user=who.slurm_user)


def _candidates(site: Site, partition: PartitionInfo, user: str) -> Iterator[Who]:
    """Finds who may use it; other Unix users than our own first, as the run directory is shared with them."""
    people = list(site.people or ())
    ours = Who(site.user, site.user, NO_PROJECT)
    if user:
        people = [who for who in people if user in {who.name, who.slurm_user}] or [Who(user, user, NO_PROJECT)]
    else:
        people = [*(who for who in people if who.slurm_user != site.user), ours]
    for who in people:
        allowed = not partition.allowed_accounts or not who.account or who.account in partition.allowed_accounts
        if allowed and who.account not in partition.denied_accounts and account_fits(site, who):
            yield who


def _hand_over(
    site: Site, partition: PartitionInfo, who: Who, gpus: int, asked: Mapping[str, Any], title: str
) -> Generator[Finding, None, Trial | None]:
    try:
        return _submitted(site, partition, who, gpus, asked)
    except (SchedulerError, JobError) as error:
        yield of_error(title, error, _why(error))
    except OSError as error:
        yield bad(title, f"no run directory could be made for {who.slurm_user}: {error}", "See VIGIL_RUNS above.")
    return None


def _why(error: Exception) -> str:
    return (
        "See what Slurm says of this person's associations: sacctmgr show assoc user=…"
        if getattr(error, "number", None)
        else ""
    )


def _submitted(site: Site, partition: PartitionInfo, who: Who, gpus: int, asked: Mapping[str, Any]) -> Trial:
    directory = rundir.make(who.project, 0)
    root = rundir.path_of(directory)
    try:
        sharing.share(root, who.slurm_user)
        limit = min(LIMIT_S, partition.max_time_s or LIMIT_S)
        spec = _spec(who, partition.name, gpus, limit)
        token = {"attempt": 0, "url": site.report_url, "token": f"vga_{secrets.token_urlsafe(32)}"}
        rundir.write(root / "portal" / "token", json.dumps(token), mode=0o600)
        rundir.write(root / "portal" / "check.json", json.dumps(asked))
        batch = replace(environments.batch(spec, _environment(spec), root, lead=STOP_SECONDS), start=PROBE)
        rundir.write(root / "portal" / "batch.sh", batch.text(), mode=0o750)
        scheduler_id = site.scheduler.submit(_submission(spec, who, root, limit))
    except BaseException:
        _discard(directory)
        raise
    return Trial(partition.name, who, gpus, directory, root, scheduler_id)


def _spec(who: Who, partition: str, gpus: int, limit_s: int) -> JobSpec:
    limit = f"{limit_s // 3600:02}:{limit_s // 60 % 60:02}:{limit_s % 60:02}"
    resources = {"partition": partition, "gpus_per_node": gpus, "time_limit": limit}
    return JobSpec.parse({"name": "vigil-check", "project": who.project, "resources": resources})


def _environment(spec: JobSpec) -> Environment:
    try:
        project = Project.objects.named(spec.project).first()
    except DatabaseError:  # before Vigil's first start
        project = None
    return environments.of(spec, project) if project is not None else environments.of_site()


def _submission(spec: JobSpec, who: Who, root: Path, limit_s: int) -> Submission:
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
    site: Site, trial: Trial, wishes: Wishes, tell: Tell, title: str
) -> Generator[Finding, None, JobStatus | None]:
    """Waits until it has ended, and returns its status then. One that takes too long is cancelled, and says why."""
    began, since, said = time.monotonic(), time.monotonic(), ""
    status = JobStatus(scheduler_id=trial.scheduler_id, state="unknown")
    # A job that has begun has as long again: a first import of torch over NFS takes its time.
    while time.monotonic() - since < wishes.patience_s:
        try:
            found = site.scheduler.status([trial.scheduler_id]).get(trial.scheduler_id)
        except SchedulerError as error:
            tell(f"{title}: {error}")
            found = None
        if found is not None:
            if found.state == "running" and status.state != "running":
                since = time.monotonic()
            status = found
            if status.state not in ALIVE | {"unknown"}:
                return status
        words = f"{status.state} {explained(status.reason)}".strip()
        if words != said:
            tell(f"{title}: job {trial.scheduler_id} of {trial.who.slurm_user} is {words}")
            said = words
        time.sleep(EVERY_S)
    _cancel(site, trial)
    yield _too_long(status, time.monotonic() - began, title)
    return None


def _too_long(status: JobStatus, seconds: float, title: str) -> Finding:
    why = explained(status.reason) or status.state
    if status.state == "pending" and status.reason.startswith(NEVER):
        return bad(title, f"the job did not start: {why}", "See sinfo -R and scontrol show partition.")
    if status.state == "pending":
        detail = f"busy, not broken: the job still waits after {seconds:.0f} s. {why}"
        return warn(title, detail, "Check again when there is room, or wait longer with --wait SECONDS.")
    return bad(
        title,
        f"the job is {status.state} after {seconds:.0f} s",
        "See the node's slurmd log, and whether its disks hang.",
    )


def _refusal(site: Site, kept: list[Trial], wishes: Wishes, tell: Tell) -> Iterator[Finding]:
    """What one person's job wrote, another person's job neither reads nor lists."""
    title = "Others are refused"
    first = next(
        (one for one in kept if one.who.slurm_user != site.user and (one.root / "job" / "check.json").exists()), None
    )
    if first is None:
        yield skip(title, "no job of a person's ran, so there is nothing to keep from others")
        return
    partition = next(one for one in site.partitions if one.name == first.partition)
    others = (
        who for who in _candidates(site, partition, "") if who.slurm_user not in {first.who.slurm_user, site.user}
    )
    other = next(others, None)
    if other is None:
        remedy = "Give a second person a Slurm user and an association, and check again."
        yield skip(title, f"nobody besides {first.who.slurm_user} may use {first.partition}", remedy)
        return
    foreign = {name: str(first.root / name) for name in ("", "job", "portal", "job/check.json", "portal/token")}
    foreign["project"] = str(first.root.parent)
    second = yield from _hand_over(site, partition, other, 0, {"foreign": foreign}, title)
    if second is None:
        return
    kept.append(second)
    status = yield from _wait(site, second, wishes, tell, title)
    if status is not None:
        yield _judge(site, first, second)


def _judge(site: Site, first: Trial, second: Trial) -> Finding:
    title = "Others are refused"
    told = rundir.read_json_under(site.runs, f"{second.directory}/job/check.json") or {}
    refused = told.get("refused")
    if not isinstance(refused, dict) or len(refused) < 6:
        return bad(
            title, f"the job of {second.who.slurm_user} told nothing", "See what is said of its partition above."
        )
    # Through the project's folder everybody goes, and nobody may list it.
    open_to = {
        name or "the folder": plain(way) for name, way in refused.items() if way and (name, way) != ("project", "enter")
    }
    if open_to:
        said = ", ".join(f"{way} {name}" for name, way in open_to.items())
        return bad(
            title,
            f"{second.who.slurm_user} can {said} of {first.who.slurm_user}'s run",
            f"chmod 2710 {site.runs}, and check again.",
        )
    return ok(title, f"{second.who.slurm_user} can neither list nor read the run of {first.who.slurm_user}")


def _remove(site: Site, trial: Trial) -> Iterator[Finding]:
    _cancel(site, trial)
    left = _discard(trial.directory)
    if left is not None:
        remedy = "Its owner, or root, removes it. Does the file system keep default access control lists?"
        yield bad(f"Partition {trial.partition}", f"its run directory cannot be removed: {left}", remedy)


def _cancel(site: Site, trial: Trial) -> None:
    try:
        site.scheduler.cancel(trial.scheduler_id, user=trial.who.slurm_user)
    except SchedulerError:
        return  # it has a time limit


def _discard(directory: str) -> Path | None:
    """Remove a run directory as the worker does; what is left of it, if anything."""
    with trash.discarded(directory):
        pass
    trash.empty()
    rubbish = rundir.runs_root() / trash.TRASH
    if directory.startswith(
        f"{NO_PROJECT}/"
    ):  # a project's own folder stays: somebody's job may be about to be made in it
        with suppress(OSError):
            os.rmdir(rundir.path_of(directory).parent)
    deadline = time.monotonic() + REMOVAL_S  # the worker may be at it, too
    while (left := next(rubbish.glob(f"{directory.replace('/', '-')}-*"), None)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
