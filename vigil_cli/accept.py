"""Accept a rented or new cluster: `vigil accept NODES… --for 48h`, `vigil acceptance ID`, `vigil acceptances`."""

from __future__ import annotations

import textwrap
from typing import Any

import click

from vigil_cli.node_tests import follow_tests, start_tests
from vigil_cli.params import as_json, node_names, out
from vigil_cli.portal import find_portal
from vigil_cli.tables.columns import table
from vigil_cli.terminal import echo
from vigil_cli.times import Duration

POLL_S = 5.0
WIDTH = 100
EXIT_CODES = {"": 0, "accepted": 0, "rejected": 1, "inconclusive": 3}
"""2 is a mistake in the command line."""


@click.command()
@node_names
@click.option("--for", "seconds", type=Duration(), default="48h", help="How long to test: 1m to 48h; 48h by default.")
@click.option("--may-undrain", is_flag=True, help="Also return nodes that a person, Slurm or a health check drained.")
@click.option("--no-wait", is_flag=True, help="Print the address of its page and do not follow it.")
@as_json
def accept(nodes: tuple[str, ...], seconds: int, may_undrain: bool, no_wait: bool, as_json: bool) -> None:
    """Accept or reject nodes, clause by clause (sysadmins).

    NODES are names and host expressions such as dgx[01-08]. Checks the configuration, runs a burn-in with every pair
    of nodes, and compares failures with published rates. Exits with 0 if the nodes are accepted, 1 if they are
    rejected, and 3 if the result is inconclusive. Ctrl-C only stops following; the acceptance continues.
    """
    portal = find_portal()
    acceptance = start_tests(
        portal, "acceptances", {"nodes": ",".join(nodes), "seconds": seconds, "may_undrain": may_undrain}
    )
    echo(f"Acceptance {acceptance['id']}: {acceptance['url']}", err=True)
    if not no_wait:
        acceptance = follow_tests(
            portal, "acceptances", acceptance, title="Acceptance", is_over=lambda found: bool(found["result"]),
            progress=_progress, poll_s=POLL_S,
        )  # fmt: skip
    out(acceptance, _lines, as_json)
    raise click.exceptions.Exit(EXIT_CODES.get(acceptance["result"], 1))


@click.command()
@click.argument("acceptance_id", metavar="ID", type=click.IntRange(min=1))
@click.option("--cancel", "cancels", is_flag=True, help="End its tests.")
@as_json
def acceptance(acceptance_id: int, cancels: bool, as_json: bool) -> None:
    """Show an acceptance, or cancel it (sysadmins). Exits as `vigil accept` does; with 0 while it is not over."""
    portal = find_portal()
    path = f"acceptances/{acceptance_id}"
    found = portal.post(f"{path}/cancel") if cancels else portal.get(path)
    out(found, _lines, as_json)
    raise click.exceptions.Exit(EXIT_CODES.get(found["result"], 1))


@click.command()
@as_json
def acceptances(as_json: bool) -> None:
    """List the newest acceptances (sysadmins)."""
    out(find_portal().get("acceptances"), _list_lines, as_json)


def _progress(acceptance: dict[str, Any]) -> str:
    if acceptance["progress"] is None:
        waits_for = acceptance["detail"] or f"Burn-in: {acceptance['state']}."
        return f"{waits_for} {acceptance['summary']}".strip()
    return f"Running tests, {int(acceptance['progress'] * 20) * 5} %. {acceptance['summary']}"


def _lines(acceptance: dict[str, Any]) -> list[str]:
    rows = [[clause["title"], clause["outcome"], clause["measured"] or "–"] for clause in acceptance["clauses"]]
    lines = table(["CLAUSE", "OUTCOME", "MEASURED"], rows, "No clauses.")
    for clause in acceptance["clauses"]:
        if clause["outcome"] == "failed":
            requirement = f"{clause['title']}: {clause['requirement']} ({clause['source']})"
            lines += ["", *textwrap.wrap(requirement, WIDTH), *(f"  {detail}" for detail in clause["details"])]
    return [*lines, "", f"{(acceptance['result'] or 'not over').capitalize()}. {acceptance['summary']}"]


def _list_lines(found: dict[str, Any]) -> list[str]:
    rows = [
        [str(row["id"]), row["nodes"], row["result"] or row["state"], row["summary"] or "–"] for row in found["items"]
    ]
    return table(["ID", "NODES", "RESULT", "SUMMARY"], rows, "No acceptances yet. Start one: vigil accept NODES…")


ALL = (accept, acceptance, acceptances)
