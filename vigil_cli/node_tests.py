"""Start tests of nodes and follow them to their end: what `vigil burnin` and `vigil accept` share. No Django."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vigil_cli.drain import DRAINED
from vigil_cli.portal import CliError, Portal
from vigil_cli.terminal import echo

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
        record = portal.get(f"{path}/{record['id']}")
    return record
