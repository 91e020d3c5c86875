"""`vigil metrics`: print a job's metrics. No Django here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

import click

from vigil_cli.params import out
from vigil_cli.portal import CliError, Portal, kind_of
from vigil_cli.tables import jobs as job_tables
from vigil_cli.terminal import echo_whole

SERIES_PER_REQUEST = 32  # the portal's limit of series per request
MAX_POINTS = 20_000


def show(
    portal: Portal, job_id: int, *, names: tuple[str, ...], rank: int, superseded: bool, as_csv: bool, as_json: bool
) -> None:
    """Print the newest values for people, or every point for machines."""
    if as_csv and len(names) > 1:
        raise click.UsageError("--csv prints one series: choose it with --series NAME.")
    there: list[str] = portal.get(f"jobs/{job_id}/series/names")["items"]
    if as_csv:
        name = names[0] if names else "loss"
        if names or there:
            _check(job_id, [name], there)
        _csv(portal, job_id, {"name": name, "rank": rank, "all": _flag(superseded)})
        return
    _check(job_id, names, there)
    wanted = list(dict.fromkeys(names)) or there
    which = {"rank": rank, "all": _flag(superseded)}
    if as_json:
        found = _curves(portal, job_id, wanted, {**which, "points": MAX_POINTS})
        click.echo(json.dumps({"items": found}, indent=2))
        return
    found = [item for item in _curves(portal, job_id, wanted, {**which, "points": 2}) if item["step"]]
    if wanted and not found:
        raise CliError(f"Rank {rank} of #{job_id} has no metrics yet. Choose another rank with --rank.")
    newest = _newest(portal, job_id, found, which)
    out(
        found,
        lambda items: job_tables.metrics(items, newest, units=kind_of(portal, job_id).units, superseded=superseded),
        as_json,
    )


def _check(job_id: int, names: Iterable[str], there: list[str]) -> None:
    """Raise CliError, listing the existing series, if the job has no such series."""
    for name in names:
        if name not in there:
            close = difflib.get_close_matches(name, there, n=1)
            guess = f" Did you mean {close[0]}?" if close else ""
            has = f"It has {', '.join(there)}." if there else "It has no metrics yet."
            raise CliError(f"#{job_id} has no series {name}.{guess} {has}")


def _curves(portal: Portal, job_id: int, names: list[str], parameters: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for at in range(0, len(names), SERIES_PER_REQUEST):
        found += portal.get(f"jobs/{job_id}/series", name=names[at : at + SERIES_PER_REQUEST], **parameters)["items"]
    return found


def _newest(
    portal: Portal, job_id: int, items: list[dict[str, Any]], which: dict[str, Any]
) -> dict[tuple[Any, ...], float | str | None]:
    """Return the last value of each of these curves. For downsampled curves only a query of the last step tells it."""
    names: dict[int, list[str]] = {}
    for item in items:
        names.setdefault(item["last_step"], []).append(item["name"])
    found: dict[tuple[Any, ...], float | str | None] = {}
    for step, those in names.items():
        at = {**which, "from": step, "to": step}
        for item in _curves(portal, job_id, list(dict.fromkeys(those)), at):
            if item["step"]:
                words = [word for _, _, word in item["gaps"]]
                found[*job_tables.line_of(item), step] = words[-1] if words else item["value"][-1]
    return found


def _csv(portal: Portal, job_id: int, parameters: dict[str, Any]) -> None:
    for piece in portal.stream(f"jobs/{job_id}/series.csv", **parameters):
        echo_whole(piece, end="")


def _flag(value: bool) -> str | None:
    return "true" if value else None
