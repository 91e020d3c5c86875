"""`vigil logs` and `vigil metrics`: what a job wrote and measured. No Django here."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Iterable
from typing import Any

import click

from portal import tables
from portal.client import Portal, Trouble

FOLLOW_S = 0.7
PAGE = 2000
AT_ONCE = 32  # series in one question, as the portal has it
MOST_POINTS = 20_000


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
    if as_csv and len(names) > 1:
        raise click.UsageError("--csv is of one series: choose it with --series NAME.")
    there: list[str] = portal.get(f"jobs/{job_id}/series/names")["items"]
    if as_csv:
        name = names[0] if names else "loss"
        if names or there:
            _check(job_id, [name], there)
        _csv(portal, job_id, {"name": name, "rank": rank, "all": _flag(ghosts)})
        return
    _check(job_id, names, there)
    wanted = list(dict.fromkeys(names)) or there
    which = {"rank": rank, "all": _flag(ghosts)}
    if as_json:
        found = _curves(portal, job_id, wanted, {**which, "points": MOST_POINTS})
        click.echo(json.dumps({"items": found}, indent=2))
        return
    found = [item for item in _curves(portal, job_id, wanted, {**which, "points": 2}) if item["step"]]
    if wanted and not found:
        raise Trouble(f"Rank {rank} of #{job_id} has measured nothing yet. Choose another with --rank.")
    newest = _newest(portal, job_id, found, which)
    click.echo("\n".join(tables.metrics(found, newest, ghosts=ghosts)))


def _check(job_id: int, names: Iterable[str], there: list[str]) -> None:
    """Trouble, naming those that there are, if the job has no such series."""
    for name in names:
        if name not in there:
            close = difflib.get_close_matches(name, there, n=1)
            guess = f" Did you mean {close[0]}?" if close else ""
            has = f"It has {', '.join(there)}." if there else "It has measured nothing yet."
            raise Trouble(f"#{job_id} has no series {name}.{guess} {has}")


def _curves(portal: Portal, job_id: int, names: list[str], parameters: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for at in range(0, len(names), AT_ONCE):
        found += portal.get(f"jobs/{job_id}/series", name=names[at : at + AT_ONCE], **parameters)["items"]
    return found


def _newest(
    portal: Portal, job_id: int, items: list[dict[str, Any]], which: dict[str, Any]
) -> dict[tuple[Any, ...], float | str | None]:
    """The value at the end of each of these curves: of a curve made of stretches, only its last step can tell."""
    names: dict[int, list[str]] = {}
    for item in items:
        names.setdefault(item["last_step"], []).append(item["name"])
    found: dict[tuple[Any, ...], float | str | None] = {}
    for step, those in names.items():
        at = {**which, "from": step, "to": step}
        for item in _curves(portal, job_id, list(dict.fromkeys(those)), at):
            if item["step"]:
                words = [word for _, _, word in item["gaps"]]
                found[*tables.line_of(item), step] = words[-1] if words else item["value"][-1]
    return found


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


def _flag(value: bool) -> str | None:
    return "true" if value else None
