"""The `vigil` command. Imports no Django, and nothing heavy before it is needed: help must come at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from vigil_cli import (
    agent,
    attach,
    cancel,
    catalogue,
    checkpoints,
    cluster,
    diagnose,
    notices,
    profiles,
    reliability,
    rounds,
    runbooks,
    sweeps,
    tables,
    telemetry,
    waste,
)
from vigil_cli import check as check_commands
from vigil_cli.params import Commands, JobId, as_json, out, say_version
from vigil_cli.portal import CHECKOUT, Portal, Trouble, find_portal
from vigil_cli.terminal import echo, echo_whole
from vigil_core import kinds

Command = TypeVar("Command", bound=Callable[..., Any])
job_id = click.argument("job_id", metavar="ID", type=JobId())


class _Vigil(Commands):
    """Turns what the portal refuses into one clear line and exit code 1."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except Trouble as trouble:
            _complain(trouble)
            raise click.exceptions.Exit(1) from None


@click.group(cls=_Vigil, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=say_version, help="Say which Vigil this is."
)
def main() -> None:
    """Vigil: submit training jobs, watch them, and read what became of them.

    The portal's address and your token come from VIGIL_URL and VIGIL_TOKEN, else from cli.toml in VIGIL_HOME or
    ~/.config/vigil. Exit codes: 0 done, 1 it failed, 2 wrong usage.
    """


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.pass_context
def up(context: click.Context) -> None:
    """Run the portal on this machine until Ctrl-C."""
    from console.up import main as run

    raise click.exceptions.Exit(run(context.args))


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.pass_context
def compare(context: click.Context) -> None:
    """Train in several ways here, and see them side by side.

    Speed, memory, losses and checkpoints, as `python -m training compare` tells them. Needs torch and no portal.
    """
    os.execv(sys.executable, [sys.executable, "-P", "-m", "training", "compare", *context.args])


@main.command()
@click.argument("spec", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="SPEC.toml")
@click.option("--set", "changes", multiple=True, metavar="a.b=c", help="Change a value of the spec; may be repeated.")
@click.option("--name", help="The job's name, instead of the spec's.")
@click.option("--watch", is_flag=True, help="Stay until the job is over; 1 if it ends badly.")
@click.option("--check", "--dry-run", "check", is_flag=True, help="Only say what would happen.")
@click.option("--key", help="Idempotency key: the same key and spec make one job, however often sent.")
@as_json
def submit(
    spec: Path, changes: tuple[str, ...], name: str | None, watch: bool, check: bool, key: str | None, as_json: bool
) -> None:
    """Submit the job that SPEC.toml describes.

    With [sweep] in it, a job for each combination of its values.
    """
    from vigil_cli import submit as sending

    text = sending.read(spec, [*changes, *([f"name={json.dumps(name)}"] if name else [])])
    portal = find_portal()
    if check:
        found = sending.check(portal, text)
        out(found, tables.findings, as_json)
        raise click.exceptions.Exit(1 if any(f["level"] == "error" for f in found["findings"]) else 0)
    packed = sending.pack_for(spec, text)
    if packed and packed.left_out:
        echo(f"Left out, as git does not track them: {', '.join(packed.left_out[:10])}", err=True)
    job = sending.submit(portal, text, packed, key or str(uuid.uuid4()))
    if sending.is_sweep(text):
        said = f"Submitted sweep {job['id']} {job['name']} with {job['jobs']} jobs: {job['url']}"
        (sweeps.follow if watch else sweeps.show)(portal, job, as_json, lead=said)
        return
    if not watch:
        out(job, lambda job: [f"Submitted #{job['id']} {job['name']}: {job['url']}"], as_json)
        return
    _watch(portal, job, as_json, f"Submitted #{job['id']} {job['name']}: {job['url']}")


@main.command()
@click.option("--state", multiple=True, help="A state, or alive, ended, bad; may be repeated.")
@click.option("--project", multiple=True, help="Its short name; may be repeated.")
@click.option("--owner", help="A user name.")
@click.option("--kind", type=click.Choice([kind.name for kind in kinds.ALL]))
@click.option("--tag", multiple=True, help="A tag that the job has; may be repeated.")
@click.option("-q", "--search", "q", help="Words in the name; or a number, tag, project or person.")
@click.option(
    "--sort", default="-created", show_default=True, help="created, name, state, started, ended …; - reverses."
)
@click.option("-n", "--limit", type=click.IntRange(min=1), default=20, show_default=True)
@as_json
def jobs(limit: int, as_json: bool, **filters: Any) -> None:
    """List jobs, newest first."""
    portal = find_portal()
    found = list(portal.items("jobs", most=limit, limit=min(limit, 200), **filters))
    if not found and not as_json and any(value for name, value in filters.items() if name != "sort"):
        click.echo("No job matches. Ask for less, or see all with `vigil jobs`.")
        return
    out({"items": found}, tables.jobs, as_json)


@main.command()
@job_id
@as_json
def job(job_id: int, as_json: bool) -> None:
    """Show one job."""
    out(find_portal().get(f"jobs/{job_id}"), tables.job, as_json)


@main.command()
@job_id
@as_json
def why(job_id: int, as_json: bool) -> None:
    """Say why a job waits, and what would start now."""
    out(find_portal().get(f"jobs/{job_id}/why"), tables.why, as_json)


@main.command()
@job_id
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over.")
@click.option("--rank", type=int, default=0, show_default=True, help="Negative: the launcher of node −rank−1.")
@click.option("--attempt", type=click.IntRange(min=1), help="Its number; default: the latest.")
@click.option("--incarnation", type=click.IntRange(min=0), help="Default: the latest.")
@click.option("-n", "--lines", type=click.IntRange(min=1), default=1000, show_default=True, help="From the end.")
@click.option("-q", "--search", help="Only lines that hold this text.")
@as_json
def logs(job_id: int, as_json: bool, **options: Any) -> None:
    """Print a rank's log."""
    from vigil_cli.logs import show

    show(find_portal(), job_id, as_json=as_json, **options)


@main.command()
@job_id
@click.option("--series", "names", multiple=True, metavar="NAME", help="Default: every one; may be repeated.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--all", "ghosts", is_flag=True, help="Superseded values too, of steps done twice.")
@click.option(
    "--csv", "as_csv", is_flag=True, help="attempt,incarnation,rank,step,time,value: every point, for machines."
)
@as_json
def metrics(job_id: int, as_json: bool, **options: Any) -> None:
    """Print what a job measured.

    For people the newest value, the steps or rounds and how many points of each series; --csv prints every point of
    one, --json the curves, in about 20,000 points each at most.
    """
    from vigil_cli.metrics import show

    if options["as_csv"] and as_json:
        raise click.UsageError("Choose one of --csv and --json.")
    show(find_portal(), job_id, as_json=as_json, **options)


@main.command()
@job_id
@click.option("--attempt", type=click.IntRange(min=1), help="Its number; default: the latest.")
@as_json
def environment(job_id: int, attempt: int | None, as_json: bool) -> None:
    """Show what an attempt ran with.

    Machine, driver, code and packages, and what changed since the attempt before.
    """
    portal = find_portal()
    number = attempt or portal.get(f"jobs/{job_id}")["attempt"]["number"]
    out(portal.get(f"jobs/{job_id}/attempts/{number}/environment"), tables.environment, as_json)


@main.command()
@job_id
@click.option("--pinned", is_flag=True, help="Of a script from git: with the commit that was fetched, for its ref.")
@as_json
def spec(job_id: int, pinned: bool, as_json: bool) -> None:
    """Print a job's TOML as it was submitted.

    To run it again: vigil spec 7 > again.toml && vigil submit again.toml
    """
    found = find_portal().get(f"jobs/{job_id}/spec", pinned="true" if pinned else None)
    if as_json:
        out(found, lambda found: [], as_json)
    else:
        echo_whole(found["spec_toml"].removesuffix("\n"))


@main.command()
@job_id
@click.option(
    "--step", "--round", "step", type=click.IntRange(min=0), help="A checkpoint's; default: the newest on its line."
)
@click.option("--steps", "--rounds", "steps", type=click.IntRange(min=1), help="Run up to this many instead.")
@click.option("--watch", is_flag=True, help="Stay until the job is over; 1 if it ends badly.")
@as_json
def resume(job_id: int, step: int | None, steps: int | None, watch: bool, as_json: bool) -> None:
    """Resume a job that has ended from a checkpoint."""
    portal = find_portal()
    body = {name: value for name, value in {"step": step, "steps": steps}.items() if value is not None}
    attempt = portal.post(f"jobs/{job_id}/resume", json=body, key=str(uuid.uuid4()))
    said = f"Resumed #{job_id} as attempt {attempt['number']}."
    if watch:
        _watch(portal, portal.get(f"jobs/{job_id}"), as_json, said)
    else:
        out(attempt, lambda attempt: [said], as_json)


@main.command()
@as_json
def tokens(as_json: bool) -> None:
    """List your API tokens; they are made on the page /me/."""
    out(find_portal().get("tokens"), tables.tokens, as_json)


@main.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@as_json
def backup(file: Path, force: bool, as_json: bool) -> None:
    """Back the portal up into FILE, while it runs. On the portal's own machine.

    FILE becomes one gzipped tar, readable by you alone: the database as of one moment (SQLite or PostgreSQL), the key
    that signs sessions, and a manifest. It appears whole or not at all. Run directories (logs, checkpoints) are NOT in
    it: they stay where VIGIL_RUNS says. PostgreSQL needs pg_dump on PATH. `vigil restore FILE` takes it back.

    For example, from cron:  vigil backup /backups/vigil-$(date +\\%F).tar.gz
    """
    from vigil_cli import backup as command

    out(command.backup(file, force=force), tables.backup, as_json)


@main.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--force", is_flag=True, help="Even where a database is: the old one is kept aside.")
@as_json
def restore(file: Path, force: bool, as_json: bool) -> None:
    """Put the backup FILE in place of the portal's data. On its own machine, with the portal stopped.

    Everything in FILE is checked first. The database and the key that signs sessions come back, and migrations are
    applied; a restore that fails or is killed leaves the old state or the new one. Restore only archives of your own:
    whoever makes one decides who is sysadmin. PostgreSQL needs pg_restore and psql on PATH.
    """
    from vigil_cli import backup as command

    out(command.restore(file, force=force), tables.restored, as_json)


@main.command("login-link")
@click.argument("user", required=False)
@as_json
def login_link(user: str | None, as_json: bool) -> None:
    """Print a link that signs USER in once, within the hour. On the portal's own machine."""
    manage = CHECKOUT / "manage.py"
    command = [sys.executable, str(manage), "login_link", *([user] if user else [])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["manage.py failed."]
        raise Trouble(said[-1].removeprefix("CommandError: "))
    link = done.stdout.strip()
    out({"url": link.removeprefix("Sign in: ")}, lambda answer: [link], as_json)


def _watch(portal: Portal, job: dict[str, Any], as_json: bool, said: str) -> None:
    """Follow the job to its end; leaves with 1 if that is a bad one."""
    from vigil_cli import watch

    screen = watch.Screen()
    screen.say(said)

    def changed(job: dict[str, Any]) -> None:
        screen.show(job)
        if as_json:
            attempt = job["attempt"]["number"]
            line = {"type": "progress", "job": job["id"], "attempt": attempt, "state": job["state"]}
            click.echo(json.dumps({**line, **job["progress"], "latest": job["latest"]}))

    try:
        last = watch.follow(portal, job["id"], changed=changed)
    except KeyboardInterrupt:
        screen.say(f"#{job['id']} goes on. Cancel it with `vigil cancel {job['id']}`.")
        raise click.exceptions.Exit(1) from None
    screen.end(last)
    if as_json:
        click.echo(json.dumps(last))
    raise click.exceptions.Exit(0 if last["state"] == "completed" else 1)


def _complain(trouble: Trouble) -> None:
    """The message, and each field with its fix on a line of its own."""
    errors = trouble.problem.get("errors") or []
    if not errors:
        echo(f"vigil: {trouble}", err=True)
    for error in errors:
        where = f"{error['field']}: " if error["field"] else ""
        echo(f"vigil: {where}{error['message']}", err=True)


OTHERS = (
    *cancel.ALL,
    *diagnose.ALL,
    *catalogue.ALL,
    *checkpoints.ALL,
    *cluster.ALL,
    *sweeps.ALL,
    *profiles.ALL,
    *notices.ALL,
    *telemetry.ALL,
    *waste.ALL,
    *runbooks.ALL,
    *reliability.ALL,
    *rounds.ALL,
)
for command in (*OTHERS, attach.attach, check_commands.check, agent.agent):
    main.add_command(command)

if __name__ == "__main__":
    main()
