"""Test nodes from the command line: `vigil burnin NODES… [--for 10m]`. No Django."""

from __future__ import annotations

from typing import Any

import click

from vigil_cli.node_tests import follow_tests, start_tests
from vigil_cli.params import as_json, node_names, out
from vigil_cli.portal import find_portal
from vigil_cli.tables.columns import table
from vigil_cli.terminal import echo
from vigil_cli.times import Duration
from vigil_core import formatting

POLL_S = 2.0


@click.command()
@node_names
@click.option("--for", "seconds", type=Duration(), default="10m", help="How long, from 1m to 48h; 10m by default.")
@click.option("--may-undrain", is_flag=True, help="Also return nodes that a person, Slurm or a health check drained.")
@click.option("--no-wait", is_flag=True, help="Print the address of its page and do not follow it.")
@as_json
def burnin(nodes: tuple[str, ...], seconds: int, may_undrain: bool, no_wait: bool, as_json: bool) -> None:
    """Test nodes before they return to service (sysadmins).

    NODES are names and host expressions such as dgx[01-08]. A node is reserved,
    undrained inside the reservation, and tested once no job runs there. One
    that fails is drained. Ctrl-C only stops following; the burn-in continues.
    """
    portal = find_portal()
    burn_in = start_tests(portal, "burnins", {"nodes": list(nodes), "seconds": seconds, "may_undrain": may_undrain})
    echo(f"Burn-in {burn_in['id']}: {burn_in['url']}", err=True)
    if not no_wait:
        burn_in = follow_tests(
            portal, "burnins", burn_in, title="Burn-in", is_over=lambda found: bool(found["state"] == "ended"),
            progress=_progress, poll_s=POLL_S,
        )  # fmt: skip
    out(burn_in, _lines, as_json)
    if not no_wait and any(node["verdict"] != "passed" for node in burn_in["nodes"]):
        raise click.exceptions.Exit(1)


def _progress(burn_in: dict[str, Any]) -> str:
    if burn_in["progress"] is None:
        return str(burn_in["detail"] or f"{burn_in['state'].capitalize()}.")
    done = int(burn_in["progress"] * 20) * 5  # in steps of 5 %, so that a log has few lines
    failed = sum(node["failures"] for node in burn_in["nodes"])
    failures = f", {formatting.plural(failed, 'test')} failed" if failed else ""
    return f"Running tests, {done} %{failures}."


def _lines(burn_in: dict[str, Any]) -> list[str]:
    rows = [
        [node["node"], node["verdict"] or "not judged", node["outcome"] or "–", _first(node)]
        for node in burn_in["nodes"]
    ]
    lines = table(["NODE", "VERDICT", "OUTCOME", "WHY"], rows, "No nodes.")
    more = [f"{node['node']}: {finding['text']}" for node in burn_in["nodes"] for finding in node["findings"][1:]]
    problem = [burn_in["problem"]] if burn_in["problem"] else []
    return [*lines, *more, *problem]


def _first(node: dict[str, Any]) -> str:
    return str(node["findings"][0]["text"]) if node["findings"] else ""


ALL = (burnin,)
