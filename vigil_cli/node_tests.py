"""Start tests of nodes and follow them to their end: for `vigil burnin`, `accept` and `gameday`. No Django."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vigil_cli.drain import DRAINED
from vigil_cli.portal import CliError, Portal
from vigil_cli.terminal import echo

OUTAGE_S = 900.0
NO_RESPONSE = frozenset({0, 502, 503, 504})  # none, or a proxy's while the portal is away
Record = dict[str, Any]


def start_tests(portal: Portal, path: str, body: Record) -> Record:
    """Post the request. Raises CliError, which names the option to add if a person drained one of the nodes."""
    try:
        started: Record = portal.post(path, json=body)
    except CliError as error:
        if error.problem.get("type") != DRAINED:
            raise
        drained = str(error).partition(" Send ")[0]
        raise CliError(f"{drained} Add --may-undrain to agree.", status=409) from None
    return started


def follow_tests(
    portal: Portal, path: str, record: Record, *, is_over: Callable[[Record], bool], progress: Callable[[Record], str],
    poll_s: float,
) -> Record:  # fmt: skip
    """Return the record once it is over; each change of its progress goes to stderr."""
    last = ""
    while not is_over(record):
        text = progress(record)
        if text != last:
            echo(text, err=True)
            last = text
        time.sleep(poll_s)
        record = poll(portal, f"{path}/{record['id']}", poll_s)
    return record


def poll(portal: Portal, path: str, poll_s: float) -> Record:
    """Return a record; try again for some minutes while the portal does not respond, as while it is upgraded."""
    until = time.monotonic() + OUTAGE_S
    while True:
        try:
            found: Record = portal.get(path)
        except CliError as error:
            if error.status not in NO_RESPONSE or time.monotonic() > until:
                raise
            time.sleep(poll_s)
        else:
            return found
