"""`vigil inventory`: versions of software and firmware on all nodes, and which need attention. No Django."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from vigil_cli.params import as_json, out
from vigil_cli.portal import find_portal
from vigil_cli.tables.columns import table
from vigil_core import formatting

MAX_NAMES = 4


@click.command()
@as_json
def inventory(as_json: bool) -> None:
    """List versions of software on all nodes.

    Drivers, CUDA, NCCL, firmware, kernels, Slurm and agents; then nodes that differ from those of the same partition
    and model of GPU, and versions below a minimum.
    """
    out(find_portal().get("inventory"), lambda answer: list(_lines(answer)), as_json)


def _lines(answer: dict[str, Any]) -> Iterator[str]:
    rows = [
        [
            group["title"] if place == 0 else "",
            version["version"],
            str(version["count"]),
            _names(version),
            _note(version),
        ]
        for group in answer["items"]
        for place, version in enumerate(group["versions"])
    ]
    yield from table(["SOFTWARE", "VERSION", "NODES>", "", "NOTE"], rows, "No node has reported its software yet.")
    titles = {(group["software"], group["part"]): group["title"] for group in answer["items"]}
    if answer["mixed"]:
        yield ""
        yield "No usual version:"
    for mixed in answer["mixed"]:
        yield f"  {_mixed(titles, mixed)}"
    if answer["findings"]:
        yield ""
        yield "Needs attention:"
    for finding in answer["findings"]:
        yield f"  {finding['node']}: {_finding(titles, finding)}"
    if answer["more_findings"]:
        yield f"  and {answer['more_findings']} more"
    if answer["problem"]:
        yield f"The site's minimum versions are ignored: {answer['problem']}"


def _names(version: dict[str, Any]) -> str:
    """Return the nodes if they are few: those of the usual version are of no interest."""
    names = version["odd"] or version["nodes"]
    if version["count"] > MAX_NAMES and not version["odd"]:
        return ""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _note(version: dict[str, Any]) -> str:
    notes = [f"below {version['minimum']['version']}"] if version["minimum"] else []
    if version["odd"]:
        notes.append(f"{formatting.plural(len(version['odd']), 'node differs', 'nodes differ')} from peers")
    if not version["is_judged"]:
        notes.append("branch not judged")
    return ", ".join(notes)


def _mixed(titles: dict[tuple[str, str], str], mixed: dict[str, Any]) -> str:
    title = titles.get((mixed["software"], mixed["part"]), mixed["software"])
    where = ", ".join(text for text in (mixed["partition"], mixed["model"]) if text)
    counts = [f"{version['version']} on {formatting.plural(version['count'], 'node')}" for version in mixed["versions"]]
    return f"{title}{f' ({where})' if where else ''}: {formatting.listed(counts, MAX_NAMES)}"


def _finding(titles: dict[tuple[str, str], str], finding: dict[str, Any]) -> str:
    title = titles.get((finding["software"], finding["part"]), finding["software"])
    text = f"{title} {finding['version']}"
    if finding["usual"]:
        text += f", its peers have {finding['usual']}"
    if minimum := finding["minimum"]:
        text += f", should be {minimum['version']} or newer ({minimum['why']}; {minimum['source']})"
    return text


ALL = (inventory,)
