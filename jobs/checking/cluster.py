"""What Slurm has: nodes with their GPUs, partitions."""

from __future__ import annotations

from collections.abc import Iterator

from jobs.checking.finding import Finding, bad, ok, warn
from jobs.checking.site import Site


def nodes(site: Site) -> Iterator[Finding]:
    """GPUs by type, as Slurm tells them, and which nodes are not there."""
    counted: dict[str, int] = {}
    for node in site.nodes:
        if node.gpus:
            kind = node.gpu_type or "GPUs without a type"
            counted[kind] = counted.get(kind, 0) + node.gpus
    seen = ", ".join(f"{count} × {kind}" for kind, count in sorted(counted.items())) or "no GPUs"
    away = [node.name for node in site.nodes if node.state.startswith(("down", "drain", "fail", "unknown"))]
    if away:
        remedy = "sinfo -R says why; scontrol update NodeName=… State=RESUME brings one back."
        yield warn("Nodes", f"{len(site.nodes)} with {seen}; {len(away)} away: {', '.join(away[:8])}", remedy)
    elif not site.nodes:
        yield bad("Nodes", "Slurm names none", "See slurm.conf.")
    else:
        yield ok("Nodes", f"{len(site.nodes)} with {seen}")


def partitions(site: Site) -> Iterator[Finding]:
    """Since v0.0.40 slurmrestd tells them only while slurmdbd is up."""
    if site.partitions:
        yield ok("Partitions", ", ".join(one.name for one in site.partitions))
    else:
        yield bad("Partitions", "Slurm names none", "See slurm.conf.")
