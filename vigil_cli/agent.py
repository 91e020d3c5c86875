"""`vigil agent`: tokens for nodes' agents, and the agent itself as one file. No Django here."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from vigil_cli.params import Commands, as_json, out
from vigil_cli.portal import CliError, find_portal, node_path
from vigil_cli.site import needs_site

FOLDER = "/etc/vigil-agent"
FILE = "vigil-agent.pyz"


@click.group(cls=Commands)
def agent() -> None:
    """Enrol node agents; build the agent as one file."""


@agent.command()
@click.argument("node", required=False)
@click.option("--many", is_flag=True, help="Create a secret with which nodes enrol themselves, each name once.")
@as_json
def enroll(node: str | None, many: bool, as_json: bool) -> None:
    """Create the token for NODE's agent (sysadmins).

    It is printed once, with the commands to run on the node, and is valid for that node only. A previous token of the
    node is revoked.
    """
    if many == (node is not None):
        raise click.UsageError("Name a NODE as the scheduler spells it, or pass --many.")
    portal = find_portal()
    if many:
        made = portal.post("agents/secret")
        out({**made, "url": portal.url}, _lines_of_secret, as_json)
        return
    made = portal.post(f"{node_path(node or '')}/token")
    out({**made, "url": portal.url}, _lines_of_token, as_json)


@agent.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default=Path(FILE), metavar="[FILE]")
@as_json
def bundle(file: Path, as_json: bool) -> None:
    """Build the agent as one file, vigil-agent.pyz unless FILE is given.

    Copy it to a node's local disk, so that a hanging shared file system does not stop the agent. It needs Python 3.11
    or newer and nothing else.
    """
    needs_site("agent bundle")
    from nodes.agent.bundle import BundleError, write_bundle
    from nodes.agent.version import VERSION

    try:
        size = write_bundle(file)
    except BundleError as error:
        raise CliError(str(error)) from error
    out({"file": str(file), "bytes": size, "version": VERSION}, _lines_of_bundle, as_json)


def _lines_of_token(made: dict[str, Any]) -> list[str]:
    return [
        f"The token of {made['node']}, shown only once. Run on {made['node']}, as root:",
        "",
        *_lines_on_node(made["token"], made["url"]),
        f"echo {shlex.quote('VIGIL_AGENT_NODE=' + made['node'])} >> {FOLDER}/environment",
    ]


def _lines_of_secret(made: dict[str, Any]) -> list[str]:
    return [
        f"A secret for many nodes, shown only once and valid until {made['expires_at']}. Run on each node, as root:",
        "",
        *_lines_on_node(made["secret"], made["url"]),
    ]


def _lines_on_node(token: str, url: str) -> list[str]:
    return [
        f"install -d -m 700 {FOLDER}",
        f"(umask 077 && echo {shlex.quote(token)} > {FOLDER}/token)",
        f"echo {shlex.quote('VIGIL_AGENT_URL=' + url)} > {FOLDER}/environment",
        f"echo VIGIL_AGENT_TOKEN_FILE={FOLDER}/token >> {FOLDER}/environment",
    ]


def _lines_of_bundle(made: dict[str, Any]) -> list[str]:
    kib = made["bytes"] / 1024
    return [
        f"{made['file']}: the agent {made['version']}, {kib:.0f} KiB.",
        f"Copy it to each node, for example to /opt/{FILE}. The unit is docs/agent/vigil-agent.service.",
    ]
