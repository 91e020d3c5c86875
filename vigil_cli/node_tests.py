"""Start tests of nodes and follow them to their end: for `vigil burnin`, `accept` and `gameday`. No Django."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from vigil_cli.drains.one_node import DRAINED
from vigil_cli.portal import CliError, Portal
from vigil_cli.terminal import echo
from vigil_cli.watch import Record, poll_until


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
    portal: Portal, path: str, record: Record, *, title: str, is_over: Callable[[Record], bool],
    progress: Callable[[Record], str], poll_s: float,
) -> Record:  # fmt: skip
    """Return the record once it is over; each change of its progress goes to stderr."""

    def show(record: Record) -> None:
        if not is_over(record):
            echo(progress(record), err=True)

    with continues_on_interrupt(title, record):
        return poll_until(portal, f"{path}/{record['id']}", is_over=is_over, key=progress, changed=show, every_s=poll_s)


@contextmanager
def continues_on_interrupt(title: str, record: Record) -> Iterator[None]:
    """Say on Ctrl-C that the tests continue, and exit with code 1."""
    try:
        yield
    except KeyboardInterrupt:
        echo(f"{title} {record['id']} continues: {record['url']}", err=True)
        raise click.exceptions.Exit(1) from None
