"""`vigil runbook`: what to do about a cause; `vigil outbox`: messages to channels outside. No Django here."""

from __future__ import annotations

import json
from typing import Any

import click

from vigil_cli.params import as_json, out
from vigil_cli.portal import Trouble, find_portal
from vigil_cli.tables import local, table
from vigil_cli.terminal import echo, echo_whole


@click.command()
@click.argument("code", required=False, metavar="CODE")
@click.option("--own", is_flag=True, help="Vigil's own, without asking the portal whether the site has another.")
@as_json
def runbook(code: str | None, own: bool, as_json: bool) -> None:
    """Say what to do about a cause, such as gpu.off_bus.

    Without CODE it lists the causes. Needs no portal: without one, or with --own, it prints Vigil's own page.
    """
    from diagnosis import runbook as shipped
    from diagnosis.causes import CAUSES

    if code is None:
        rows = [[cause.code, cause.owner, cause.title] for cause in CAUSES.values()]
        told = [{"code": one.code, "owner": one.owner, "title": one.title} for one in CAUSES.values()]
        out({"items": told}, lambda _: table(["CAUSE", "WHO ACTS", "WHAT HAPPENED"], rows, ""), as_json)
        return
    if code not in CAUSES:
        raise Trouble(f"There is no cause {code}. `vigil runbook` lists them.")
    cause = CAUSES[code]
    answer: dict[str, Any] = {
        "code": code, "title": cause.title, "owner": cause.owner, "advice": cause.advice,
        "markdown": shipped.own(code), "is_site": False, "changed_at": None, "changed_by": None,
    }  # fmt: skip
    if not own:
        try:
            answer = find_portal().get(f"runbooks/{code}")
        except Trouble as trouble:
            echo(f"vigil: Vigil's own, as the portal was not asked: {trouble}", err=True)
    if as_json:
        echo(json.dumps(answer, indent=2))
    else:
        echo_whole(answer["markdown"].rstrip("\n"))


@click.command()
@click.option("--state", type=click.Choice(["held", "waiting", "sent", "gathered", "dropped", "given_up"]))
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--resend", type=click.IntRange(min=1), metavar="ID", help="Send a message again.")
@click.option("--give-up", "give_up", type=click.IntRange(min=1), metavar="ID", help="Leave a message unsent.")
@as_json
def outbox(state: str | None, limit: int, resend: int | None, give_up: int | None, as_json: bool) -> None:
    """List messages to channels outside, newest first.

    E-mail, Slack and webhooks: your own and your projects'; for sysadmins everybody's.
    """
    portal = find_portal()
    if resend is not None and give_up is not None:
        raise click.UsageError("Choose one of --resend and --give-up.")
    if resend is not None:
        out(portal.post(f"outbox/{resend}/resend"), lambda one: [f"{one['id']} is sent again within seconds."], as_json)
    elif give_up is not None:
        out(portal.post(f"outbox/{give_up}/give-up"), lambda one: [f"{one['id']} is left unsent."], as_json)
    else:
        found = list(portal.items("outbox", most=limit, state=state, limit=min(limit, 200)))
        out({"items": found}, _messages, as_json)


def _messages(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "STATE", "TO", "WHOSE", "TRIES>", "MADE", "MESSAGE"]
    rows = [
        [
            *(str(one["id"]), one["state"].replace("_", " "), f"{one['channel_kind']} {one['where']}"),
            *(one["person"] or f"project {one['project']}", str(one["tries"]), local(one["created_at"])),
            one["title"] + (f" ({one['error']})" if one["error"] else ""),
        ]
        for one in answer["items"]
    ]
    return table(head, rows, "Nothing: no message was made in the last 30 days.")


ALL = (runbook, outbox)
