"""`vigil logs` and `vigil metrics`: what a job wrote and measured. No Django here."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from portal import tables
from portal.client import Portal, Trouble

FOLLOW_S = 0.7
PAGE = 2000


def logs(
    portal: Portal,
    job_id: int,
    *,
    follow: bool,
    rank: int,
    attempt: int | None,
    incarnation: int | None,
    lines: int,
    search: str | None,
    as_json: bool,
) -> None:
    """Print the end of a log, and with `follow` what comes after it until the job is over."""
    which = {"rank": rank, "attempt": attempt, "incarnation": incarnation}
    if search:
        _found(portal, job_id, which, search, as_json)
        return
    page = _first(portal, job_id, which, lines, follow)
    _print(page, as_json)
    while follow:
        over, number = _standing(portal, job_id, attempt)
        if page is not None and number != page["attempt"]:  # started anew: on to the next attempt's log
            page = None
        try:
            page = _rest(portal, job_id, {**which, "attempt": number}, page, as_json)
        except Trouble as trouble:
            if trouble.status != 404:
                raise
        if over:
            return
        time.sleep(FOLLOW_S)


def metrics(
    portal: Portal, job_id: int, *, names: tuple[str, ...], rank: int, ghosts: bool, as_csv: bool, as_json: bool
) -> None:
    """The newest values for people; every point for machines."""
    if as_csv:
        if len(names) > 1:
            raise click.UsageError("--csv is of one series: choose it with --series NAME.")
        _csv(portal, job_id, {"name": names[0] if names else "loss", "rank": rank, "all": _flag(ghosts)})
        return
    wanted = list(names) or portal.get(f"jobs/{job_id}/series/names")["items"]
    if not wanted:
        click.echo(json.dumps({"items": []}) if as_json else "No metrics yet.")
        return
    found = []
    for at in range(0, len(wanted), 32):
        part = {
            "name": wanted[at : at + 32],
            "rank": rank,
            "all": _flag(ghosts),
            "points": 20_000 if as_json else 1_000,
        }
        found += portal.get(f"jobs/{job_id}/series", **part)["items"]
    if as_json:
        click.echo(json.dumps({"items": found}, indent=2))
        return
    latest = portal.get(f"jobs/{job_id}")["latest"] if rank == 0 and not ghosts else {}
    click.echo("\n".join(_newest(found, latest)))


def _first(portal: Portal, job_id: int, which: dict[str, Any], lines: int, follow: bool) -> dict[str, Any] | None:
    """The last lines, from as many pages as they need; None while there is no log yet and we wait for it."""
    try:
        page: dict[str, Any] = portal.get(f"jobs/{job_id}/logs", **which, limit=min(lines, PAGE))
        while len(page["items"]) < lines and page["start"] > 0:
            limit = min(PAGE, lines - len(page["items"]))
            before = portal.get(f"jobs/{job_id}/logs", **which, before=page["start"], limit=limit)
            if not before["items"]:
                break
            page = {**page, "start": before["start"], "items": before["items"] + page["items"]}
        return page
    except Trouble as trouble:
        if not follow or trouble.status != 404:
            raise
        portal.get(f"jobs/{job_id}")  # a job that is not there is not waited for
        return None


def _rest(
    portal: Portal, job_id: int, which: dict[str, Any], page: dict[str, Any] | None, as_json: bool
) -> dict[str, Any]:
    """Print what is there beyond the page; answers the last one."""
    while True:
        after = page["end"] if page else 0
        page = portal.get(f"jobs/{job_id}/logs", **which, after=after, limit=PAGE)
        _print(page, as_json)
        if not page["items"] or page["end"] >= page["size"]:
            return page


def _found(portal: Portal, job_id: int, which: dict[str, Any], search: str, as_json: bool) -> None:
    after = 0
    while True:
        page = portal.get(f"jobs/{job_id}/logs", **which, search=search, after=after, limit=PAGE)
        _print(page, as_json)
        if page["next"] is None or page["end"] <= after:
            return
        after = page["end"]


def _standing(portal: Portal, job_id: int, attempt: int | None) -> tuple[bool, int]:
    """Whether nothing more will be written, and which attempt to read; asked before its log is, so no line is lost."""
    job = portal.get(f"jobs/{job_id}")
    latest = job["attempt"]["number"]
    return job["over"] or (attempt is not None and latest > attempt), attempt or latest


def _print(page: dict[str, Any] | None, as_json: bool) -> None:
    for line in page["items"] if page else []:
        click.echo(json.dumps(line) if as_json else line["text"])


def _csv(portal: Portal, job_id: int, parameters: dict[str, Any]) -> None:
    for piece in portal.stream(f"jobs/{job_id}/series.csv", **parameters):
        click.echo(piece, nl=False)


def _newest(items: list[dict[str, Any]], latest: dict[str, Any]) -> list[str]:
    rows = []
    for item in (item for item in items if item["step"]):  # a rank need not have every series
        values = item.get("value") or item.get("mean") or []
        last = tables.number(latest.get(item["name"], values[-1] if values else None))
        steps = f"{item['step'][0]:,}–{item['step'][-1]:,}"
        rows.append([item["name"], last, steps, str(len(item["step"]))])
    return tables.table(["SERIES", "NEWEST>", "STEPS>", "POINTS>"], rows, "No metrics yet.")


def _flag(value: bool) -> str | None:
    return "true" if value else None
