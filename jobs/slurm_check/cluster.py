"""Check what Slurm has: nodes with their GPUs, and partitions."""

from __future__ import annotations

from collections.abc import Iterator

from jobs.slurm_check.checked_site import CheckedSite
from jobs.slurm_check.finding import CheckFinding, failed, from_exception, ok, warn
from nodes.schedulers.base import SchedulerError
from nodes.scheduling import gpu_types


def nodes(site: CheckedSite) -> Iterator[CheckFinding]:
    """Report GPUs by type, as Slurm lists them, and which nodes are unavailable."""
    try:
        listed = site.nodes
    except SchedulerError as error:
        remedy = f"If slurm.conf has PrivateData=nodes: sacctmgr modify user {site.user} set AdminLevel=Admin"
        yield from_exception("Nodes", error, remedy)
        return
    counted: dict[str, int] = {}
    for node in listed:
        for kind, count in gpu_types.installed(node).items():
            kind = kind or "GPUs without a type"
            counted[kind] = counted.get(kind, 0) + count
    types = ", ".join(f"{count} × {kind}" for kind, count in sorted(counted.items())) or "no GPUs"
    unavailable = [node.name for node in listed if node.state.startswith(("down", "drain", "fail", "unknown"))]
    if unavailable:
        remedy = "sinfo -R says why; scontrol update NodeName=… State=RESUME brings one back."
        names = ", ".join(unavailable[:8])
        yield warn("Nodes", f"{len(listed)} with {types}; {len(unavailable)} unavailable: {names}", remedy)
    elif not listed:
        yield failed("Nodes", "Slurm reports none", "See slurm.conf.")
    else:
        yield ok("Nodes", f"{len(listed)} with {types}")
    yield from _left_out("Nodes", listed.unreadable)


def partitions(site: CheckedSite) -> Iterator[CheckFinding]:
    """Check that partitions are listed: since v0.0.40 slurmrestd lists them only while slurmdbd is up."""
    try:
        listed = site.partitions
    except SchedulerError as error:
        yield from_exception(
            "Partitions", error, "Fix slurmdbd first: while it is down, slurmrestd lists no partitions."
        )
        return
    if listed:
        yield ok("Partitions", ", ".join(partition.name for partition in listed))
    else:
        yield failed("Partitions", "Slurm reports none", "See slurm.conf.")
    yield from _left_out("Partitions", listed.unreadable)


def _left_out(title: str, unreadable: int) -> Iterator[CheckFinding]:
    if unreadable:
        remedy = "The worker's log names them. Report it with slurmrestd's response."
        yield warn(title, f"{unreadable} could not be read and {'is' if unreadable == 1 else 'are'} ignored", remedy)
