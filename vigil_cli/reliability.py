"""`vigil reliability` and `vigil forecast`: failure rates, and what to expect. No Django here."""

from __future__ import annotations

from typing import Any

import click

from vigil_cli.params import as_json, limit_option, out
from vigil_cli.portal import find_portal
from vigil_cli.tables.columns import table
from vigil_core import formatting

GROUPINGS = ["cause", "node", "rack", "partition", "project", "week"]


@click.command()
@click.option("--days", type=click.IntRange(1, 366), default=30, show_default=True, help="UTC days, including today.")
@click.option("--by", type=click.Choice(GROUPINGS), default="cause", show_default=True, help="Group rows by this.")
@click.option(
    "--kind", type=click.Choice(["all", "machines", "programs"]), default="all", show_default=True,
    help="Failures of what.",
)  # fmt: skip
@click.option("--project", default="", help="Short name of a project.")
@limit_option(50, 200)
@as_json
def reliability(days: int, by: str, kind: str, project: str, limit: int, as_json: bool) -> None:
    """Show failure rates and what failures cost.

    Rates per 1,000 node-days of allocation, with exact 95 % intervals.
    """
    out(find_portal().get("reliability", days=days, by=by, kind=kind, project=project, limit=limit), _lines, as_json)


@click.command()
@click.option("--nodes", type=click.IntRange(1, 100_000), required=True, metavar="N", help="How many nodes.")
@click.option(
    "--days", type=click.FloatRange(0, 366, min_open=True), required=True, metavar="T", help="Days of training."
)
@click.option(
    "--save-seconds", type=click.FloatRange(0, 86_400, min_open=True), default=30.0, show_default=True,
    help="Seconds that one checkpoint takes to save.",
)  # fmt: skip
@click.option(
    "--restart-seconds", type=click.FloatRange(0, 86_400),
    help="Seconds that a restart takes; default: as measured on this cluster.",
)  # fmt: skip
@as_json
def forecast(nodes: int, days: float, save_seconds: float, restart_seconds: float | None, as_json: bool) -> None:
    """Forecast failures for N nodes over T days."""
    wanted: dict[str, Any] = {"nodes": nodes, "days": days, "save_seconds": save_seconds}
    if restart_seconds is not None:
        wanted["restart_seconds"] = restart_seconds
    out(find_portal().get("reliability/forecast", **wanted), lambda answer: [answer["text"]], as_json)


def _lines(answer: dict[str, Any]) -> list[str]:
    lines = [answer["text"]]
    if answer["effective_time"] is not None:
        lines.append(f"Effective training time of ended jobs: {formatting.percent(answer['effective_time'])}.")
    for node in answer["offenders"]:
        lines.append(
            f"  {node['node']}: {node['failures']} failures, {formatting.measure(node['expected'])} expected,"
            f" in {formatting.plural(node['programs'], 'program')}: the {node['blame']}"
        )
    head = [answer["by"].upper(), "FAILURES>", "NODE-DAYS>", "PER 1,000>", "(95 %)", "MTBF>", "LOST GPU-HOURS>"]
    rows = [
        [
            *(row["name"], str(row["failures"]), formatting.measure(row["node_days"])),
            formatting.measure(row["per_1000_node_days"]),
            _between(row["per_1000_interval"]),
            _mtbf(row),
            f"{row['lost_gpu_hours']:.1f}",
        ]
        for row in answer["items"]
    ]
    return [*lines, "", *table(head, rows, "No failures in this period.")]


def _between(ends: list[float] | None) -> str:
    return f"{formatting.measure(ends[0])}–{formatting.measure(ends[1])}" if ends else ""


def _mtbf(row: dict[str, Any]) -> str:
    days = row["mttf_days"]
    return "too few" if days is None else formatting.duration(days * 86_400)


ALL = (reliability, forecast)
