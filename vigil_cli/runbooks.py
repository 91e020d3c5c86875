"""`vigil runbook`: what to do about a cause; `vigil outbox`: e-mail, Slack and webhook messages. No Django here."""

from __future__ import annotations

import json
from typing import Any

import click

from vigil_cli.params import as_json, limit_option, out
from vigil_cli.portal import CliError, find_portal
from vigil_cli.tables.columns import local, table
from vigil_cli.terminal import echo, echo_whole


@click.command()
@click.argument("code", required=False, metavar="CODE")
@click.option("--built-in", "--own", "built_in", is_flag=True, help="Ignore the site's own runbook; needs no portal.")
@as_json
def runbook(code: str | None, built_in: bool, as_json: bool) -> None:
    """Print what to do about a cause, such as gpu.off_bus.

    Without CODE, list the causes. Without a portal, or with --built-in, print the runbook that ships with Vigil.
    """
    from diagnosis import runbook as shipped
    from diagnosis.causes import CAUSES

    if code is None:
        rows = [[cause.code, cause.owner, cause.title] for cause in CAUSES.values()]
        items = [{"code": cause.code, "owner": cause.owner, "title": cause.title} for cause in CAUSES.values()]
        out({"items": items}, lambda _: table(["CAUSE", "OWNER", "WHAT HAPPENED"], rows, ""), as_json)
        return
    if code not in CAUSES:
        raise CliError(f"Unknown cause {code}. `vigil runbook` lists them.")
    cause = CAUSES[code]
    answer: dict[str, Any] = {
        "code": code, "title": cause.title, "owner": cause.owner, "advice": cause.advice,
        "markdown": shipped.shipped_runbook(code), "is_site": False, "changed_at": None, "changed_by": None,
    }  # fmt: skip
    if not built_in:
        try:
            answer = find_portal().get(f"runbooks/{code}")
        except CliError as error:
            echo(f"vigil: showing the built-in runbook instead of the site's. {error}", err=True)
    if as_json:
        echo(json.dumps(answer, indent=2))
    else:
        echo_whole(answer["markdown"].rstrip("\n"))


@click.command()
@click.option(
    "--state", type=click.Choice(["held", "waiting", "sent", "gathered", "dropped", "given_up"]),
    help="Only messages in this state.",
)  # fmt: skip
@limit_option(50)
@click.option("--resend", type=click.IntRange(min=1), metavar="ID", help="Send a message again.")
@click.option("--give-up", "give_up", type=click.IntRange(min=1), metavar="ID", help="Stop trying to send a message.")
@as_json
def outbox(state: str | None, limit: int, resend: int | None, give_up: int | None, as_json: bool) -> None:
    """List messages to external channels, newest first.

    E-mail, Slack and webhooks: your own and your projects'; for sysadmins everybody's.
    """
    portal = find_portal()
    if resend is not None and give_up is not None:
        raise click.UsageError("Choose one of --resend and --give-up.")
    if resend is not None:
        out(
            portal.post(f"outbox/{resend}/resend"),
            lambda message: [f"Message {message['id']} will be sent again within seconds."],
            as_json,
        )
    elif give_up is not None:
        out(
            portal.post(f"outbox/{give_up}/give-up"),
            lambda message: [f"Message {message['id']} will not be sent."],
            as_json,
        )
    else:
        found = list(portal.items("outbox", most=limit, state=state, limit=min(limit, 200)))
        out({"items": found}, _messages, as_json)


def _messages(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "STATE", "TO", "OWNER", "TRIES>", "CREATED", "MESSAGE"]
    rows = [
        [
            *(str(message["id"]), message["state"].replace("_", " "), f"{message['channel_kind']} {message['where']}"),
            *(
                message["person"] or f"project {message['project']}",
                str(message["tries"]),
                local(message["created_at"]),
            ),
            message["title"] + (f" ({message['error']})" if message["error"] else ""),
        ]
        for message in answer["items"]
    ]
    return table(head, rows, "No messages in the last 30 days.")


ALL = (runbook, outbox)
