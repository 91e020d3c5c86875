"""Drain or return several nodes, such as dgx[01-16]: show what that hits, ask, and order it. No Django here."""

from __future__ import annotations

import json
from typing import Any

import click

from vigil_cli.params import confirm
from vigil_cli.portal import Portal
from vigil_cli.tables.drains import STANDING, drained_by
from vigil_cli.terminal import echo
from vigil_core import formatting

MAX_NAMED = 10


def drain_many(portal: Portal, nodes: str, reason: str, *, replace: bool, is_confirmed: bool, as_json: bool) -> None:
    """Drain every node of the expression; exit with code 1 if one of them could not be ordered."""
    found = portal.post("drains/preview", json={"nodes": nodes})
    for line in preview_lines(found):
        echo(line, err=True)
    many = formatting.plural(len(found["nodes"]), "node")
    confirm("Drain them?", is_confirmed, f"Add --yes to drain {many}.")
    replaces = found["reasons"] if replace else {}
    answer = portal.post("drains", json={"nodes": nodes, "reason": reason, "replaces": replaces})
    left = [item for item in answer["items"] if item["order"] is None]
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    for item in left:
        echo(problem_line(item, "drain it anyway", replace=replace), err=True)
    requested = formatting.plural(len(answer["items"]) - len(left), "node")
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


def return_many(portal: Portal, nodes: str, reason: str, *, replace: bool, is_confirmed: bool, as_json: bool) -> None:
    """Undrain every node of the expression; exit with code 1 if a drain was left as it is."""
    found = portal.post("drains/return/preview", json={"nodes": nodes})
    for line in _preview_lines(found, replace=replace):
        echo(line, err=True)
    affected = len(found["yours"]) + len(found["by_others"]) * replace
    if affected:
        many = formatting.plural(affected, "node")
        confirm("Return them to service?", is_confirmed, f"Add --yes to return {many} to service.")
    replaces = found["reasons"] if replace else {}
    answer = portal.post("drains/return", json={"nodes": nodes, "reason": reason, "replaces": replaces})
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    in_service = set(found["in_service"])
    left = [item for item in answer["items"] if item["order"] is None and item["node"] not in in_service]
    for item in left:
        echo(problem_line(item, "end that", replace=replace), err=True)
    requested = formatting.plural(sum(item["order"] is not None for item in answer["items"]), "node")
    echo(f"Requested the return of {requested}. `vigil drains` shows what is still out of service.", err=True)
    raise click.exceptions.Exit(1 if left else 0)


def _preview_lines(found: dict[str, Any], *, replace: bool) -> list[str]:
    """Return which drains would end, which would stay, and which nodes are in service already."""
    by_others = "Drained by others" if replace else "Drained by others: these stay without --replace"
    lines = _preview_group("Your drains", found["yours"]) + _preview_group(by_others, found["by_others"])
    if found["in_service"]:
        more = len(found["in_service"]) - MAX_NAMED
        names = [*found["in_service"][:MAX_NAMED], *([f"{more} more"] if more > 0 else [])]
        lines.append(f"In service already: {formatting.listed(names)}")
    return lines


def _preview_group(head: str, drained: list[dict[str, Any]]) -> list[str]:
    lines = [f"{head}:"] if drained else []
    for item in drained[:MAX_NAMED]:
        holder = f", by {drained_by(item)}" if drained_by(item) else ""
        jobs = ", jobs run there" if item["has_jobs"] else ""
        standing = f"problem {STANDING.get(item['standing'], item['standing'])}"
        lines.append(f"  {item['node']}: {item['reason'] or 'no reason'}{holder} ({standing}{jobs})")
    more = len(drained) - MAX_NAMED
    return lines + ([f"  and {formatting.count(more)} more"] if more > 0 else [])
