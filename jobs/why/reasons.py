"""Why a job waits, in plain words beside the scheduler's own. Pure: the pages, the API and the CLI may all use it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from jobs.following.cause import NUMERICS, described
from jobs.following.release_text import release_ways
from nodes.schedulers.launch import is_launch_failed, nodes_of
from vigil_core import formatting

if TYPE_CHECKING:
    from jobs.models import Attempt

# Slurm's word, or a pattern of several, the first that fits; what it means for who waits. Others stay as they are.
MEANINGS = {
    "Resources": "what it asks for is not free yet.",
    "Priority": "jobs ahead of it start first.",
    "None": "the scheduler has not looked at it yet.",
    "Requeued": "it is back in the queue and starts again.",
    "Dependency": "another job has to end before it.",
    "DependencyNeverSatisfied": "the job before it did not end as it had to. It never starts: cancel it.",
    "BeginTime": "it is scheduled to start later.",
    "Reservation": "the reservation that it asks for has not begun.",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved.",
    "Nodes_required_for_job_are_DOWN": "nodes that it needs are down, drained or reserved.",
    "NodeDown": "a node that it needs is down.",
    "PartitionDown": "its partition takes jobs but starts none. A Slurm administrator opens it.",
    "PartitionInactive": "its partition is closed. A Slurm administrator opens it.",
    "PartitionTimeLimit": "its time limit is longer than the partition allows. Cancel it and ask for less.",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives to a job. Cancel it and ask for fewer.",
    "JobHeldUser": "somebody holds it. Its owner lets it start by {release}.",
    "JobHeldAdmin": "a Slurm administrator holds it. They or a sysadmin let it start by {release}.",
    "JobArrayTaskLimit": "as many of its sweep or array run as may at once.",
    "JobLaunchFailure": "it could not be launched and is held. Once its node is repaired, {release} lets it start.",
    "Licenses": "the licences that it needs are in use.",
    "Cleaning": "what is left of its run before is still being cleaned up.",
    "BadConstraints": "no node has what it asks for. It never starts: cancel it.",
    "InvalidAccount": "its account is unknown to Slurm. Cancel it and ask a Slurm administrator.",
    "InvalidQOS": "its QOS is unknown to Slurm. Cancel it and ask a Slurm administrator.",
    "AccountNotAllowed": "its partition does not take its account. Cancel it and ask a Slurm administrator.",
    "QOSNotAllowed": "its partition does not take its QOS. Cancel it and ask a Slurm administrator.",
    "QOSMax*PerJob*": "it asks for more than its QOS allows a job. Cancel it and ask for less.",
    "QOSMax*PerNode*": "it asks for more on each node than its QOS allows. Cancel it and ask for less.",
    "QOSMaxWallDurationPerJobLimit": "its time limit is longer than its QOS allows. Cancel it and ask for less.",
    "QOSMax*PerUser*": "with it, its owner would run more than the QOS allows one person.",
    "QOSMax*PerAccount*": "with it, its account would run more than the QOS allows one account.",
    "QOSMin*": "it asks for less than its QOS requires. Cancel it and ask for more.",
    "QOSGrp*": "everybody in its QOS together is at the QOS’s limit.",
    "QOS*": "its QOS is at a limit.",
    "AssocGrp*": "its account is at its limit, all its people together.",
    "AssocMax*PerJob*": "it asks for more than the account allows a job. Cancel it and ask for less.",
    "AssocMax*PerNode*": "it asks for more on each node than the account allows. Cancel it and ask for less.",
    "AssocMax*": "with it, its owner would run more than the account allows one person.",
    "Max*PerAccount": "with it, its account would run more than it may.",
}


def explained(reason: str, scheduler_id: str = "", job_id: int | None = None) -> str:
    """Return the scheduler's reason with its meaning, as "Resources: what it asks for is not free yet.".

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
        f"Slurm could not launch it{where}, most often because a prolog failed, and holds it."
        f" Once {node} is in order, {release} lets the job start."
    )


def reason_of(attempt: Attempt) -> str:
    """Return why it waits or ended, in one line: the first failing rank's error or exit code where there is one.

    What the guards of our own trainer said is a sentence already; all ranks end with it, whichever came first.
    """
    failure = attempt.failure if isinstance(attempt.failure, dict) else {}
    if attempt.cause in NUMERICS.values() and attempt.reason:
        return attempt.reason.strip()
    if not attempt.is_alive and (text := described(failure, attempt.cause)):
        return text
    return explained_of(attempt)


def explained_of(attempt: Attempt) -> str:
    """Return an attempt's reason; of one that waits with what the scheduler's word means."""
    if attempt.state != "pending":
        return attempt.reason.strip()
    return explained(attempt.reason, attempt.scheduler_id, attempt.job_id)
