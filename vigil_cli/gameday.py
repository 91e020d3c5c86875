"""Run a game day from the command line: `vigil gameday [--partition canary]`. No Django."""

from __future__ import annotations

from typing import Any

import click

from vigil_cli.node_tests import continues_on_interrupt
from vigil_cli.params import as_json, out
from vigil_cli.portal import Portal, find_portal
from vigil_cli.tables.columns import table
from vigil_cli.terminal import echo
from vigil_cli.watch import Record, poll_until
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

    Runs jobs of two ranks one after another: the first undisturbed, each other with one injected fault. If a node's
    agent allows it (VIGIL_AGENT_GAMEDAY=yes), it then injects xid, nvml and mount. Other people's jobs are not touched.
    Exits with 1 if a fault was handled wrongly. Ctrl-C only stops following; the game day continues.
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


def _follow(portal: Portal, game_day: Record) -> Record:
    """Return the game day once it has ended; each result goes to stderr as it comes."""
    shown = {drill["fault"] for drill in game_day["drills"] if drill["state"] == "not tried"}

    def show_results(game_day: Record) -> None:
        for drill in game_day["drills"]:
            if drill["state"] in {"passed", "failed"} and drill["fault"] not in shown:
                shown.add(drill["fault"])
                echo(f"{drill['title']}: {drill['state']}. {drill['detail']}".strip(), err=True)

    with continues_on_interrupt("Game day", game_day):
        return poll_until(
            portal, f"gamedays/{game_day['id']}", is_over=lambda found: bool(found["ended_at"]),
            key=lambda found: [drill["state"] for drill in found["drills"]], changed=show_results, every_s=POLL_S,
        )  # fmt: skip


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
        "FAULT", "RESULT", "NOTICED", "CAUSE CORRECT", "TRAINING RESUMED", "IN SERVICE", "LOSSES IDENTICAL", "ACTION"
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
