"""Hold a game day from the command line: `vigil gameday [--partition canary]`. No Django."""

from __future__ import annotations

import time
from typing import Any

import click

from vigil_cli.node_tests import poll
from vigil_cli.params import as_json, out
from vigil_cli.portal import Portal, find_portal
from vigil_cli.tables import table
from vigil_cli.terminal import echo
from vigil_core import formatting

POLL_S = 2.0
FAULTS = "kill, stop, exception, disk, network, xid, nvml or mount"


@click.command()
@click.option("--partition", default="", help="Where its jobs run; the scheduler's default without it.")
@click.option("--project", default="", help="The project of its jobs; required if you may submit in several.")
@click.option("--fault", "faults", multiple=True, metavar="FAULT", help=f"Only this one; may be repeated: {FAULTS}.")
@click.option("--no-wait", is_flag=True, help="Print the address of its page and do not follow it.")
@as_json
def gameday(partition: str, project: str, faults: tuple[str, ...], no_wait: bool, as_json: bool) -> None:
    """Break test jobs and check how Vigil reacts (sysadmins).

    Jobs of two ranks run one after the other; each but the first breaks in another way. Then a node's agent plants
    xid, nvml and mount, if it allows that (VIGIL_AGENT_GAMEDAY=yes). Nobody else's jobs are touched.
    Exits with 1 if a fault was handled wrongly. Ctrl-C stops following; the game day goes on.
    """
    portal = find_portal()
    body = {"partition": partition, "project": project, "faults": list(faults)}
    found: dict[str, Any] = portal.post("gamedays", json=body)
    echo(f"Game day {found['id']}: {found['url']}", err=True)
    if not no_wait:
        found = _follow(portal, found)
    out(found, _lines, as_json)
    if not no_wait and (found["problem"] or any(drill["state"] == "failed" for drill in found["drills"])):
        raise click.exceptions.Exit(1)


def _follow(portal: Portal, found: dict[str, Any]) -> dict[str, Any]:
    """Return the game day once it has ended; each result goes to stderr as it comes."""
    shown: set[str] = {drill["fault"] for drill in found["drills"] if drill["state"] == "not tried"}
    while True:
        for drill in found["drills"]:
            if drill["state"] in {"passed", "failed"} and drill["fault"] not in shown:
                shown.add(drill["fault"])
                echo(f"{drill['title']}: {drill['state']}. {drill['detail']}".strip(), err=True)
        if found["ended_at"]:
            return found
        time.sleep(POLL_S)
        found = poll(portal, f"gamedays/{found['id']}", POLL_S)


def _lines(found: dict[str, Any]) -> list[str]:
    rows = [
        [
            drill["title"], drill["state"], _seconds(drill, "noticed_s"), _answer(drill["is_cause_right"]),
            _seconds(drill, "training_again_s"), _seconds(drill, "in_service_s"),
            _answer(drill["are_losses_identical"]), drill["action"] or "–",
        ]
        for drill in found["drills"]
    ]  # fmt: skip
    head = [
        "FAULT", "RESULT", "NOTICED", "VERDICT RIGHT", "TRAINING AGAIN", "IN SERVICE", "LOSSES IDENTICAL", "ACTION"
    ]  # fmt: skip
    details = [f"{drill['title']}: {drill['detail']}" for drill in found["drills"] if drill["detail"]]
    problem = [found["problem"]] if found["problem"] else []
    return [*table(head, rows, "No faults."), *details, *problem]


def _seconds(drill: dict[str, Any], name: str) -> str:
    """Return a time with that of the last game day."""
    if drill[name] is None:
        return "–"
    earlier = (drill["earlier"] or {}).get(name)
    before = "" if earlier is None else f" (before: {formatting.duration(earlier)})"
    return f"{formatting.duration(drill[name])}{before}"


def _answer(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "NO"


ALL = (gameday,)
