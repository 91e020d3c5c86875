"""Explain the scheduler's reasons in plain words. Pure: pages, API and CLI use it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from jobs.following.end_causes.cause import NUMERICS, describe_failure
from jobs.following.held_jobs.release_text import release_ways
from nodes.schedulers.launch import is_launch_failed, nodes_of
from vigil_core import formatting

if TYPE_CHECKING:
    from jobs.models import Attempt

# Slurm's word, or a pattern of several, the first that fits; what it means for who waits. Others stay as they are.
MEANINGS = {
    "Resources": "its resources are not free yet.",
    "Priority": "jobs ahead of it start first.",
    "None": "the scheduler has not considered it yet.",
    "Requeued": "it is back in the queue and will start again.",
    "Dependency": "another job must end first.",
    "DependencyNeverSatisfied": "the job before it did not end as required. It never starts: cancel it.",
    "BeginTime": "it is scheduled to start later.",
    "Reservation": "its reservation has not begun.",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved.",
    "Nodes_required_for_job_are_DOWN": "nodes that it needs are down, drained or reserved.",
    "NodeDown": "a node that it needs is down.",
    "PartitionDown": "its partition accepts jobs but starts none. A Slurm administrator can open it.",
    "PartitionInactive": "its partition is closed. A Slurm administrator can open it.",
    "PartitionTimeLimit": "its time limit is longer than the partition allows. Cancel it and request less.",
    "PartitionNodeLimit": "it requests more nodes than the partition allows per job. Cancel it and request fewer.",
    "JobHeldUser": "it is held by a user. Its owner can release it: {release}.",
    "JobHeldAdmin": "it is held by a Slurm administrator. They or a sysadmin can release it: {release}.",
    "JobArrayTaskLimit": "its sweep or array runs as many jobs at once as it may.",
    "JobLaunchFailure": "it could not be launched and is held. Once its node is repaired, release it: {release}.",
    "Licenses": "its licenses are in use.",
    "Cleaning": "its previous run is still being cleaned up.",
    "BadConstraints": "no node has the resources that it requests. It never starts: cancel it.",
    "InvalidAccount": "Slurm does not know its account. Cancel it and ask a Slurm administrator.",
    "InvalidQOS": "Slurm does not know its QOS. Cancel it and ask a Slurm administrator.",
    "AccountNotAllowed": "its partition does not accept its account. Cancel it and ask a Slurm administrator.",
    "QOSNotAllowed": "its partition does not accept its QOS. Cancel it and ask a Slurm administrator.",
    "QOSMax*PerJob*": "it requests more than its QOS allows per job. Cancel it and request less.",
    "QOSMax*PerNode*": "it requests more per node than its QOS allows. Cancel it and request less.",
    "QOSMaxWallDurationPerJobLimit": "its time limit is longer than its QOS allows. Cancel it and request less.",
    "QOSMax*PerUser*": "its owner would exceed the QOS’s limit per person.",
    "QOSMax*PerAccount*": "its account would exceed the QOS’s limit per account.",
    "QOSMin*": "it requests less than its QOS requires. Cancel it and request more.",
    "QOSGrp*": "the QOS has reached its limit for all users together.",
    "QOS*": "its QOS has reached a limit.",
    "AssocGrp*": "its account has reached its limit for all users together.",
    "AssocMax*PerJob*": "it requests more than the account allows per job. Cancel it and request less.",
    "AssocMax*PerNode*": "it requests more per node than the account allows. Cancel it and request less.",
    "AssocMax*": "its owner would exceed the account’s limit per person.",
    "Max*PerAccount": "its account would exceed its limit.",
}


def explained(reason: str, scheduler_id: str = "", job_id: int | None = None) -> str:
    """Return the scheduler's reason with its meaning, as "Resources: its resources are not free yet.".

    A reason that the table lacks stays as it is. The ids, the scheduler's and Vigil's, complete what releases a held
    job; without Vigil's only the scheduler's command is named.
    """
    reason = reason.strip()
    word, _, more = reason.partition(",")
    if is_launch_failed(reason):
        return _launch_failed(nodes_of(reason), release_ways(scheduler_id, job_id))
    meaning = MEANINGS.get(word) or next((why for form, why in MEANINGS.items() if fnmatchcase(word, form)), "")
    if not meaning:
        return reason
    meaning = meaning.format(release=release_ways(scheduler_id, job_id))
    more = more.strip(" _").replace("_", " ")
    return f"{word} ({more}): {meaning}" if more else f"{word}: {meaning}"


def _launch_failed(nodes: list[str], release: str) -> str:
    where, node = (f" on {formatting.listed(nodes)}", "that node") if nodes else ("", "the node")
    return (
        f"Slurm could not launch it{where}, usually because a prolog failed, and holds it."
        f" Once {node} is repaired, release the job: {release}."
    )


def reason_of(attempt: Attempt) -> str:
    """Return why it waits or ended, in one line: the first failing rank's error or exit code if there is one.

    A message of our own trainer's guards is a sentence already; all ranks end with it, whichever came first.
    """
    failure = attempt.failure if isinstance(attempt.failure, dict) else {}
    if attempt.cause in NUMERICS.values() and attempt.reason:
        return attempt.reason.strip()
    if not attempt.is_alive and (text := describe_failure(failure, attempt.cause)):
        return text
    return explained_of(attempt)


def waiting_reason_of(attempt: Attempt, spec: Mapping[str, Any], now: datetime) -> str:
    """Return `reason_of` the attempt of this job; for one that waits for its requested start, that time instead."""
    start = scheduled_start(attempt.reason, spec, now) if attempt.state == "pending" else ""
    return start or reason_of(attempt)


def scheduled_start(reason: str, spec: Mapping[str, Any], now: datetime) -> str:
    """Return when a job starts that waits only for the time that its specification requests; "" for any other.

    Slurm gives the same reason for its own pause before it restarts a requeued job: the requested time is then past.
    """
    begin = (spec.get("resources") or {}).get("begin")
    if reason.strip() != "BeginTime" or not begin:
        return ""
    starts_at = datetime.fromisoformat(begin)
    return f"Scheduled to start at {formatting.clock(starts_at, now)}." if starts_at > now else ""


def explained_of(attempt: Attempt) -> str:
    """Return an attempt's reason; with its meaning if the attempt waits."""
    if attempt.state != "pending":
        return attempt.reason.strip()
    return explained(attempt.reason, attempt.scheduler_id, attempt.job_id)
