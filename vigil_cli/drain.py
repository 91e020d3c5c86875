"""`vigil drain` and `vigil undrain`: ask, then wait for what the scheduler says. No Django here."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from vigil_cli.cluster_tables import ordered
from vigil_cli.portal import Portal, Trouble
from vigil_cli.terminal import echo

DRAINED = "urn:vigil:problem:drained"
WAIT_S = 30.0
LOOK_S = 0.5


def carry_out(portal: Portal, node: str, action: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the order as it ended, or as it stands after 30 s; what happens meanwhile goes to stderr."""
    order = _place(portal, f"{node}/{action}", action, body)
    name = order["node"]
    echo(f"Asked to {action} {name}; waiting for the scheduler.", err=True)
    until = time.monotonic() + WAIT_S
    said = ""
    while order["state"] == "asked" and time.monotonic() < until:
        time.sleep(LOOK_S)
        order = _look(portal, node, order)
        if order["state"] == "asked" and order["outcome"] not in {"", said}:
            said = order["outcome"]
            echo(f"{said} It is asked again.", err=True)
    if order["state"] == "asked":
        echo(f"Not done within {WAIT_S:.0f} s; Vigil goes on trying. See `vigil node {name}`.", err=True)
    elif order["state"] == "done":
        done = "takes no new jobs" if action == "drain" else "takes jobs again"
        echo(f"Done: {name} {done}.", err=True)
    else:
        echo(f"Not done, {ordered(order)}", err=True)
    return order


def _place(portal: Portal, address: str, action: str, body: dict[str, Any]) -> dict[str, Any]:
    """Place the order. Where somebody else has drained the node, ask first; a script has to say --replace."""
    try:
        order: dict[str, Any] = portal.post(address, json=body)
    except Trouble as error:
        if error.problem.get("type") != DRAINED:
            raise
        standing = str(error).partition(" Send ")[0]
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise Trouble(f"{standing} Add --replace to {action} it all the same.", status=409) from None
        echo(standing, err=True)
        if not click.confirm(f"{action.capitalize()} it all the same?", err=True):
            raise click.exceptions.Exit(1) from None
        order = portal.post(address, json={**body, "replace": True})
    return order


def _look(portal: Portal, node: str, order: dict[str, Any]) -> dict[str, Any]:
    """Reads the order anew; somebody else may have asked for another one since."""
    found = (item for item in portal.items(f"{node}/orders", most=50) if item["id"] == order["id"])
    return next(found, order)
