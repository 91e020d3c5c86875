"""What people type on the command line, slips included. No Django here."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from vigil_cli.terminal import echo
from vigil_core import formatting

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def out(answer: Any, lines: Callable[[Any], list[str]], as_json: bool) -> None:
    """Print an answer: as JSON, or as these lines of text."""
    echo(json.dumps(answer, indent=2) if as_json else "\n".join(lines(answer)).replace(formatting.NBSP, " "))


class JobId(click.IntRange):
    """A job's number, with or without the # that Vigil writes before it."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        bare: Any = value.removeprefix("#") if isinstance(value, str) else value
        try:
            return super().convert(bare, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is no job's number. `vigil jobs` lists them.", param, ctx)


class SweepId(click.IntRange):
    """A sweep's number."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is no sweep's number. `vigil sweeps` lists them.", param, ctx)


HABITS = {
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
"""What people are used to from other tools, by which command does it here."""


class Commands(click.Group):
    """Commands that guess which one was meant."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            import difflib

            habit = [HABITS[args[0]]] if HABITS.get(args[0]) in known else []
            close = habit or difflib.get_close_matches(args[0], known, n=1)
            remedy = f"Did you mean `vigil {close[0]}`?" if close else "`vigil --help` lists them."
            ctx.fail(f"There is no command {args[0]}. {remedy}")
        return super().resolve_command(ctx, args)


def say_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            said = version("vigil")
        except PackageNotFoundError:
            said = "of a checkout that is not installed"
        click.echo(f"vigil {said}")
        raise click.exceptions.Exit(0)
