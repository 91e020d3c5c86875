"""`vigil logs`: print a job's log, and follow it while the job runs. No Django here."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from vigil_cli.portal import CliError, Portal
from vigil_cli.terminal import echo_log

FOLLOW_S = 0.7
PAGE = 2000


@dataclass(frozen=True)
class LogQuery:
    """A log of a job, and what to print of it."""

    rank: int
    """Negative: the launcher of node −rank−1."""
    attempt: int | None
    """The latest if None, as of `incarnation`."""
    incarnation: int | None
    lines: int
    """How many of the last lines."""
    search: str | None
    """Only lines that contain this text."""

    @property
    def which(self) -> dict[str, Any]:
        """Return the parameters that choose the log."""
        return {"rank": self.rank, "attempt": self.attempt, "incarnation": self.incarnation}


def show(portal: Portal, job_id: int, query: LogQuery, *, follow: bool, as_json: bool) -> None:
    """Print the end of a log, and with `follow` everything written after it until the job is over."""
    if query.search:
        _print_matches(portal, job_id, query.which, query.search, as_json)
        return
    page = _last_lines(portal, job_id, query.which, query.lines, follow)
    _print(page, as_json)
    while follow:
        over, number = _progress(portal, job_id, query.attempt)
        if page is not None and number != page["attempt"]:  # restarted: continue with the next attempt's log
            page = None
        try:
            page = _print_rest(portal, job_id, {**query.which, "attempt": number}, page, as_json)
        except CliError as error:
            if error.status != 404:
                raise
        if over:
            return
        time.sleep(FOLLOW_S)


def _last_lines(portal: Portal, job_id: int, which: dict[str, Any], lines: int, follow: bool) -> dict[str, Any] | None:
    """Return the last lines, from as many pages as needed; None while there is no log yet and we follow."""
    try:
        page: dict[str, Any] = portal.get(f"jobs/{job_id}/logs", **which, limit=min(lines, PAGE))
        while len(page["items"]) < lines and page["start"] > 0:
            limit = min(PAGE, lines - len(page["items"]))
            before = portal.get(f"jobs/{job_id}/logs", **which, before=page["start"], limit=limit)
            if not before["items"]:
                break
            page = {**page, "start": before["start"], "items": before["items"] + page["items"]}
        return page
    except CliError as error:
        if not follow or error.status != 404:
            raise
        portal.get(f"jobs/{job_id}")  # raises if the job does not exist
        return None


def _print_rest(
    portal: Portal, job_id: int, which: dict[str, Any], page: dict[str, Any] | None, as_json: bool
) -> dict[str, Any]:
    """Print everything beyond the page and return the last page."""
    while True:
        after = page["end"] if page else 0
        page = portal.get(f"jobs/{job_id}/logs", **which, after=after, limit=PAGE)
        _print(page, as_json)
        if not page["items"] or page["end"] >= page["size"]:
            return page


def _print_matches(portal: Portal, job_id: int, which: dict[str, Any], search: str, as_json: bool) -> None:
    after = 0
    while True:
        page = portal.get(f"jobs/{job_id}/logs", **which, search=search, after=after, limit=PAGE)
        _print(page, as_json)
        if page["next"] is None or page["end"] <= after:
            return
        after = page["end"]


def _progress(portal: Portal, job_id: int, attempt: int | None) -> tuple[bool, int]:
    """Return whether the log is complete, and the attempt to read. Call it before reading, so that no line is lost."""
    job = portal.get(f"jobs/{job_id}")
    latest = job["attempt"]["number"]
    return job["over"] or (attempt is not None and latest > attempt), attempt or latest


def _print(page: dict[str, Any] | None, as_json: bool) -> None:
    for line in page["items"] if page else []:
        echo_log(json.dumps(line) if as_json else line["text"])
