"""What Slurm has: nodes with their GPUs, partitions."""

from __future__ import annotations

from collections.abc import Iterator

from jobs.checking.finding import Finding, bad, of_error, ok, warn
from jobs.checking.site import Site
from nodes.schedulers.base import SchedulerError
from nodes.scheduling import gpu_types


def nodes(site: Site) -> Iterator[Finding]:
    """GPUs by type, as Slurm tells them, and which nodes are not there."""
    try:
        there = site.nodes
    except SchedulerError as error:
        remedy = f"Where slurm.conf has PrivateData=nodes: sacctmgr modify user {site.user} set AdminLevel=Admin"
        yield of_error("Nodes", error, remedy)
        return
    counted: dict[str, int] = {}
    for node in there:
        for kind, count in gpu_types.there(node).items():
            kind = kind or "GPUs without a type"
            counted[kind] = counted.get(kind, 0) + count
    seen = ", ".join(f"{count} × {kind}" for kind, count in sorted(counted.items())) or "no GPUs"
    away = [node.name for node in there if node.state.startswith(("down", "drain", "fail", "unknown"))]
    if away:
        remedy = "sinfo -R says why; scontrol update NodeName=… State=RESUME brings one back."
        yield warn("Nodes", f"{len(there)} with {seen}; {len(away)} away: {', '.join(away[:8])}", remedy)
    elif not there:
        yield bad("Nodes", "Slurm names none", "See slurm.conf.")
    else:
        yield ok("Nodes", f"{len(there)} with {seen}")
    yield from _left_out("Nodes", there.unreadable)


def partitions(site: Site) -> Iterator[Finding]:
    """Whether the partitions are told: since v0.0.40 slurmrestd does so only while slurmdbd is up."""
    try:
        found = site.partitions
    except SchedulerError as error:
        yield of_error("Partitions", error, "Mend slurmdbd first: while it is away, slurmrestd tells of none.")
        return
    if found:
        yield ok("Partitions", ", ".join(one.name for one in found))
    else:
        yield bad("Partitions", "Slurm names none", "See slurm.conf.")
    yield from _left_out("Partitions", found.unreadable)


def _left_out(title: str, unreadable: int) -> Iterator[Finding]:
    if unreadable:
        remedy = "The worker's log names them. Report it with the answer of slurmrestd."
        yield warn(title, f"{unreadable} could not be read and {'is' if unreadable == 1 else 'are'} left out", remedy)
