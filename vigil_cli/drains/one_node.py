"""Drain or return one node: place the order, then wait for the scheduler. No Django here."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from vigil_cli.portal import CliError, Portal
from vigil_cli.tables.cluster import order_text
from vigil_cli.terminal import echo

DRAINED = "urn:vigil:problem:drained"
WAIT_S = 30.0
POLL_S = 0.5


def carry_out(portal: Portal, node: str, action: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the order once it has ended, or its state after 30 s; progress goes to stderr."""
    order = _place(portal, node, action, body)
    name = order["node"]
    echo(f"{action.capitalize()}ing {name}; waiting for the scheduler.", err=True)
    until = time.monotonic() + WAIT_S
    last_outcome = ""
    while order["state"] == "asked" and time.monotonic() < until:
        time.sleep(POLL_S)
        order = _reload(portal, node, order)
        if order["state"] == "asked" and order["outcome"] not in {"", last_outcome}:
            last_outcome = order["outcome"]
            echo(f"{last_outcome} Retrying.", err=True)
    if order["state"] == "asked":
        echo(f"Not done within {WAIT_S:.0f} s; Vigil keeps trying. See `vigil node {name}`.", err=True)
    elif order["state"] == "done":
        done = "accepts no new jobs" if action == "drain" else "accepts jobs again"
        echo(f"Done: {name} {done}.", err=True)
    else:
        echo(f"Not done, {order_text(order)}", err=True)
    return order


def _place(portal: Portal, node: str, action: str, body: dict[str, Any]) -> dict[str, Any]:
    """Place the order. If somebody else drained the node, ask first; a script has to pass --replace."""
    address = f"{node}/{action}"
    try:
        order: dict[str, Any] = portal.post(address, json=body)
    except CliError as error:
        if error.problem.get("type") != DRAINED:
            raise
        standing = str(error).partition(" Send ")[0]
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise CliError(f"{standing} Add --replace to {action} it anyway.", status=409) from None
        reason = portal.get(node)["reason"]  # before the question: another one may come while the person thinks
        echo(standing, err=True)
        if not click.confirm(f"{action.capitalize()} it anyway?", err=True):
            raise click.exceptions.Exit(1) from None
        order = portal.post(address, json={**body, "replaces": reason})
    return order


def _reload(portal: Portal, node: str, order: dict[str, Any]) -> dict[str, Any]:
    """Reload the order; somebody else may have placed another one since."""
    found = (item for item in portal.items(f"{node}/orders", most=50) if item["id"] == order["id"])
    return next(found, order)
