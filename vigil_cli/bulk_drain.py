"""`vigil drain 'dgx[01-16]'`: show what it hits, ask, and order it. No Django here."""

from __future__ import annotations

import json
from typing import Any

import click

from vigil_cli.params import confirm
from vigil_cli.portal import Portal
from vigil_cli.terminal import echo
from vigil_core import formatting


def drain_many(portal: Portal, nodes: str, reason: str, *, replace: bool, is_confirmed: bool, as_json: bool) -> None:
    """Drain every node of the expression; exit with code 1 if one of them could not be ordered."""
    found = portal.post("drains/preview", json={"nodes": nodes})
    for line in preview_lines(found):
        echo(line.replace(formatting.NBSP, " "), err=True)
    many = formatting.plural(len(found["nodes"]), "node").replace(formatting.NBSP, " ")
    confirm("Drain them?", is_confirmed, f"Add --yes to drain {many}.")
    replaces = found["reasons"] if replace else {}
    answer = portal.post("drains", json={"nodes": nodes, "reason": reason, "replaces": replaces})
    left = [item for item in answer["items"] if item["order"] is None]
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    for item in left:
        echo(problem_line(item, "drain it anyway", replace=replace), err=True)
    requested = formatting.plural(len(answer["items"]) - len(left), "node").replace(formatting.NBSP, " ")
    echo(f"Requested the drain of {requested}. `vigil drains` shows when the scheduler has done it.", err=True)
    raise click.exceptions.Exit(1 if left else 0)


def problem_line(item: dict[str, Any], remedy: str, *, replace: bool) -> str:
    """Return why nothing was ordered for a node, and how to replace somebody else's drain."""
    if not item["is_drained_by_another"]:
        return str(item["problem"])
    return f"{item['problem']} {'That is new since the preview.' if replace else f'Add --replace to {remedy}.'}"


def preview_lines(found: dict[str, Any]) -> list[str]:
    """Return what a drain would hit: nodes, jobs, and each partition."""
    names = formatting.listed([*found["nodes"][:5], *([f"{len(found['nodes']) - 5} more"] * (len(found["nodes"]) > 5))])
    lines = [f"{formatting.plural(len(found['nodes']), 'node')}: {names}"]
    if found["cluster_gpus"]:
        lines.append(f"GPUs: {found['gpus']} of {found['cluster_gpus']} in service")
    owners = f" of {', '.join(found['users'][:5])}" if found["users"] else ""
    lines.append(f"Running there: {formatting.plural(found['jobs'], 'job')}{owners}")
    lines += [
        f"Partition {share['name']}: {share['out']} of {share['nodes']} nodes out of service afterwards"
        for share in found["partitions"]
    ]
    if found["out_already"]:
        lines.append(f"Out of service already: {', '.join(found['out_already'][:10])}")
    return lines
