"""Shared parameters of the commands, with forgiving parsing. No Django here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from vigil_cli.portal import CliError
from vigil_cli.terminal import echo
from vigil_core import formatting, installation

Command = TypeVar("Command", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def out(answer: Any, lines: Callable[[Any], list[str]], as_json: bool) -> None:
    """Print a response as JSON, or as these lines of text."""
    echo(json.dumps(answer, indent=2) if as_json else "\n".join(lines(answer)))


def confirm(question: str, is_confirmed: bool, otherwise: str) -> None:
    """Ask at a terminal, unless it is confirmed already; a script gets the error `otherwise`."""
    if is_confirmed:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CliError(formatting.plain_spaces(otherwise))
    if not click.confirm(formatting.plain_spaces(question), err=True):
        raise click.exceptions.Exit(1)


class JobId(click.IntRange):
    """Parse a job's number, with or without a leading #."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        bare: Any = value.removeprefix("#") if isinstance(value, str) else value
        try:
            return super().convert(bare, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is not a job number. `vigil jobs` lists them.", param, ctx)


class SweepId(click.IntRange):
    """Parse a sweep's number."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is not a sweep number. `vigil sweeps` lists them.", param, ctx)


job_id = click.argument("job_id", metavar="ID", type=JobId())
node_names = click.argument("nodes", metavar="NODES…", nargs=-1, required=True)


def limit_option(default: int, most: int | None = None) -> Callable[[Command], Command]:
    """Return the option -n of a list, with the default number of rows and the highest that the portal answers."""
    return click.option(
        "-n", "--limit", type=click.IntRange(1, most), default=default, show_default=True, help="At most this many."
    )


def single_node(nodes: tuple[str, ...]) -> str | None:
    """Return the node if exactly one is named; None for several names or a host expression."""
    return nodes[0] if len(nodes) == 1 and not any(letter in nodes[0] for letter in "[, ") else None


FOREIGN_COMMANDS = {
    **dict.fromkeys(("ls", "list", "ps"), "jobs"),
    **dict.fromkeys(("show", "status", "info"), "job"),
    **dict.fromkeys(("run", "sbatch", "srun"), "submit"),
    **dict.fromkeys(("stop", "scancel"), "cancel"),
    **dict.fromkeys(("log", "tail"), "logs"),
    "squeue": "queue",
    "sinfo": "nodes",
    "login": "login-link",
    "serve": "up",
}
"""Commands of other tools, and which command does the same here."""


class Commands(click.Group):
    """A group of commands that suggests the intended command after a typo."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        commands = self.list_commands(ctx)
        if args and args[0] not in commands and not args[0].startswith("-"):
            import difflib

            habit = [FOREIGN_COMMANDS[args[0]]] if FOREIGN_COMMANDS.get(args[0]) in commands else []
            close = habit or difflib.get_close_matches(args[0], commands, n=1)
            path = ctx.command_path
            remedy = f"Did you mean `{path} {close[0]}`?" if close else f"`{path} --help` lists them."
            ctx.fail(f"No such command: {args[0]}. {remedy}")
        name, command, rest = super().resolve_command(ctx, args)
        self._refuse_own_options(ctx, name, command)
        return name, command, rest

    def _refuse_own_options(self, ctx: click.Context, name: str | None, command: click.Command | None) -> None:
        """Refuse options of the group before a subcommand, which would have no effect there."""
        for option in self.params:
            if ctx.get_parameter_source(option.name or "") is not ParameterSource.COMMANDLINE:
                continue
            flag = option.opts[0]
            has_it = command is not None and any(flag in other.opts for other in command.params)
            there = f"{ctx.command_path} {name}"
            ctx.fail(f"Put {flag} after `{there}`." if has_it else f"`{there}` has no option {flag}.")


def print_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"vigil {installation.version()}")
        raise click.exceptions.Exit(0)
