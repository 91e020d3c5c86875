"""`vigil waste`: GPU-hours allocated, used and idle. No Django here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from vigil_cli.params import as_json, limit_option, out
from vigil_cli.portal import find_portal
from vigil_cli.tables.columns import current, table
from vigil_core import formatting


@click.command()
@click.option("--days", type=click.IntRange(1, 90), default=7, show_default=True, help="UTC days, including today.")
@click.option(
    "--by", type=click.Choice(["project", "person", "job"]), default="person", show_default=True,
    help="Group rows by this.",
)  # fmt: skip
@limit_option(20, 200)
@as_json
def waste(days: int, by: str, limit: int, as_json: bool) -> None:
    """Show GPU-hours allocated, used and idle, most idle first.

    Also lists jobs with GPUs that have been idle for 15 minutes.
    """
    found = find_portal().get("waste", days=days, by=by, limit=limit)
    out(found, _lines, as_json)


def _lines(answer: dict[str, Any]) -> list[str]:
    lines = [answer["text"]]
    for job in answer["idle_now"]:
        name = f"{job['name']} (#{job['job']})" if job["job"] else f"{job['name']} ({job['scheduler_id']})"
        since = datetime.now(UTC) - datetime.fromisoformat(job["since"])
        long = formatting.rough(since.total_seconds())
        gpus = f"{job['gpus']} of {current(job, 'allocated_gpus', 'held')}"
        lines.append(f"  {name} of {job['person'] or 'an unknown user'}: {gpus} idle for {long}")
    head = [answer["by"].upper(), "ALLOCATED>", "USED>", "USED SHARE>", "IDLE>"]
    rows = [
        [
            f"{row['name']} (#{row['job']})" if row["job"] else row["name"],
            formatting.measure(current(row, "allocated_hours", "held_hours")),
            formatting.measure(row["used_hours"]),
            formatting.percent(row["used_share"]),
            formatting.measure(row["idle_hours"]),
        ]
        for row in answer["items"]
    ]
    return [*lines, "", *table(head, rows, "No GPU time in this period.")]


ALL = (waste,)
