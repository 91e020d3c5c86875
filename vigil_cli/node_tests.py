"""Start tests of nodes and follow them to their end: what `vigil burnin` and `vigil accept` share. No Django."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from vigil_cli.drain import DRAINED
from vigil_cli.portal import CliError, Portal
from vigil_cli.terminal import echo

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
Record = dict[str, Any]


class Duration(click.ParamType[int]):
    """A duration such as 90s, 10m, 48h or 2d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        number, unit = value[:-1], value[-1:]
        if unit not in UNITS or not (number.isascii() and number.isdecimal()) or len(number) > 6:
            self.fail(f"{value!r} is not a duration. Write 10m, 2h or 1d.", param, ctx)
        return int(number) * UNITS[unit]


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
