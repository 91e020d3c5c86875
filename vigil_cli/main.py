"""Define the `vigil` command. Imports neither Django nor anything heavy up front: help must appear at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import click

from vigil_cli import (
    accept,
    agent,
    announce,
    attach,
    burnin,
    cancel,
    catalogue,
    checkpoints,
    cluster,
    diagnose,
    gameday,
    health,
    inventory,
    maintenance,
    notices,
    profiles,
    reliability,
    rounds,
    runbooks,
    spares,
    sweeps,
    telemetry,
    waste,
)
from vigil_cli import check as check_commands
from vigil_cli.drains import commands as drains
from vigil_cli.params import Commands, as_json, job_id, limit_option, out, print_version
from vigil_cli.portal import CliError, Portal, find_portal
from vigil_cli.site import needs_site
from vigil_cli.tables import jobs as job_tables
from vigil_cli.tables import portal as portal_tables
from vigil_cli.terminal import echo, echo_whole
from vigil_core import installation, kinds


class _Vigil(Commands):
    """Print an error from the portal as one clear line and exit with code 1."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except CliError as error:
            _print_error(error)
            raise click.exceptions.Exit(1) from None


@click.group("vigil", cls=_Vigil, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version, help="Print the version."
)
def main() -> None:
    """Vigil: submit training jobs, watch them, and find out why they failed.

    The portal's address and your token are read from VIGIL_URL and VIGIL_TOKEN, or else from cli.toml in VIGIL_HOME or
    ~/.config/vigil. Exit codes: 0 success, 1 failure, 2 wrong usage; `accept` and
    `acceptance`: 3 if the result is inconclusive; `attach`: the command's own.
    """


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.pass_context
def up(context: click.Context) -> None:
    """Run the portal on this machine until Ctrl-C."""
    needs_site("up")
    from console.up import main as run

    raise click.exceptions.Exit(run(context.args))


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.pass_context
def compare(context: click.Context) -> None:
    """Compare parallelisms by training on this machine.

    Speed, memory, losses and checkpoints, as printed by `python -m training compare`. Needs torch, but no portal.
    """
    needs_site("compare")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "training", "compare", *context.args])


@main.command()
@click.argument("spec", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="SPEC.toml")
@click.option("--set", "changes", multiple=True, metavar="a.b=c", help="Change a value of the spec; may be repeated.")
@click.option("--name", help="The job's name, instead of the spec's.")
@click.option("--watch", is_flag=True, help="Wait until the job ends; exit with 1 if it ends badly.")
@click.option("--check", "--dry-run", "check", is_flag=True, help="Show what would happen without submitting.")
@click.option("--key", help="Idempotency key: the same key and spec create only one job.")
@as_json
def submit(
    spec: Path, changes: tuple[str, ...], name: str | None, watch: bool, check: bool, key: str | None, as_json: bool
) -> None:
    """Submit the job described by SPEC.toml.

    If it has a [sweep] table, submit one job for each combination of values.
    """
    from vigil_cli import submit as sending

    text = sending.read(spec, [*changes, *([f"name={json.dumps(name)}"] if name else [])])
    portal = find_portal()
    if check:
        found = sending.check(portal, text)
        out(found, job_tables.findings, as_json)
        raise click.exceptions.Exit(1 if any(f["level"] == "error" for f in found["findings"]) else 0)
    packed = sending.pack_for(spec, text)
    if packed and packed.left_out:
        echo(f"Left out (not tracked by git): {', '.join(packed.left_out[:10])}", err=True)
    job = sending.submit(portal, text, packed, key or str(uuid.uuid4()))
    if sending.is_sweep(text):
        message = f"Submitted sweep {job['id']} {job['name']} with {job['jobs']} jobs: {job['url']}"
        (sweeps.follow if watch else sweeps.show)(portal, job, as_json, lead=message)
        return
    if not watch:
        out(job, lambda job: [f"Submitted #{job['id']} {job['name']}: {job['url']}"], as_json)
        return
    _watch(portal, job, as_json, f"Submitted #{job['id']} {job['name']}: {job['url']}")


@main.command()
@click.option("--state", multiple=True, help="A state, or alive, ended, bad; may be repeated.")
@click.option("--project", multiple=True, help="Its short name; may be repeated.")
@click.option("--owner", help="A user name.")
@click.option("--kind", type=click.Choice([kind.name for kind in kinds.ALL]), help="What sort of job.")
@click.option("--tag", multiple=True, help="A tag that the job has; may be repeated.")
@click.option("-q", "--search", "q", help="Search names, numbers, tags, projects and people.")
@click.option(
    "--sort", default="-created", show_default=True, help="created, name, state, started, ended …; - reverses."
)
@limit_option(20)
@as_json
def jobs(limit: int, as_json: bool, **filters: Any) -> None:
    """List jobs, newest first."""
    portal = find_portal()
    found = list(portal.items("jobs", most=limit, limit=min(limit, 200), **filters))
    if not found and not as_json and any(value for name, value in filters.items() if name != "sort"):
        click.echo("No matching jobs. `vigil jobs` lists all.")
        return
    out({"items": found}, job_tables.jobs, as_json)


@main.command()
@job_id
@as_json
def job(job_id: int, as_json: bool) -> None:
    """Show one job."""
    out(find_portal().get(f"jobs/{job_id}"), job_tables.job, as_json)


@main.command()
@job_id
@as_json
def why(job_id: int, as_json: bool) -> None:
    """Explain why a job is pending.

    Also prints which variants of it could start now.
    """
    out(find_portal().get(f"jobs/{job_id}/why"), job_tables.why, as_json)


@main.command()
@job_id
@click.option("-f", "--follow", is_flag=True, help="Follow until the job ends.")
@click.option("--rank", type=int, default=0, show_default=True, help="Negative: the launcher of node −rank−1.")
@click.option("--attempt", type=click.IntRange(min=1), help="Its number; default: the latest.")
@click.option("--incarnation", type=click.IntRange(min=0), help="Default: the latest.")
@click.option("-n", "--lines", type=click.IntRange(min=1), default=1000, show_default=True, help="Number of lines.")
@click.option("-q", "--search", help="Only lines that contain this text.")
@as_json
def logs(job_id: int, follow: bool, as_json: bool, **options: Any) -> None:
    """Print a rank's log."""
    from vigil_cli.logs import LogQuery, show

    show(find_portal(), job_id, LogQuery(**options), follow=follow, as_json=as_json)


@main.command()
@job_id
@click.option("--series", "names", multiple=True, metavar="NAME", help="Default: all; may be repeated.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose metrics.")
@click.option("--all", "superseded", is_flag=True, help="Include superseded values of steps that were run twice.")
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print every point as CSV: attempt,incarnation,rank,step,time,value."
)
@as_json
def metrics(job_id: int, as_json: bool, **options: Any) -> None:
    """Print a job's metrics.

    By default: the newest value, the steps or rounds and the number of points of each series. --csv prints every point
    of one series, --json the curves with at most about 20,000 points each.
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
    """Show the environment of an attempt.

    Machine, driver, code and packages, and what changed since the previous attempt.
    """
    portal = find_portal()
    number = attempt or portal.get(f"jobs/{job_id}")["attempt"]["number"]
    out(portal.get(f"jobs/{job_id}/attempts/{number}/environment"), job_tables.environment, as_json)


@main.command()
@job_id
@click.option("--pinned", is_flag=True, help="For a script from git: replace its ref with the commit that was fetched.")
@as_json
def spec(job_id: int, pinned: bool, as_json: bool) -> None:
    """Print a job's specification (TOML) as it was submitted.

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
    "--step", "--round", "step", type=click.IntRange(min=0), help="Checkpoint to resume from; default: the newest."
)
@click.option("--steps", "--rounds", "steps", type=click.IntRange(min=1), help="New total number of steps or rounds.")
@click.option("--watch", is_flag=True, help="Wait until the job ends; exit with 1 if it ends badly.")
@as_json
def resume(job_id: int, step: int | None, steps: int | None, watch: bool, as_json: bool) -> None:
    """Resume an ended job from a checkpoint."""
    portal = find_portal()
    body = {name: value for name, value in {"step": step, "steps": steps}.items() if value is not None}
    attempt = portal.post(f"jobs/{job_id}/resume", json=body, key=str(uuid.uuid4()))
    message = f"Resumed #{job_id} as attempt {attempt['number']}."
    if watch:
        _watch(portal, portal.get(f"jobs/{job_id}"), as_json, message)
    else:
        out(attempt, lambda attempt: [message], as_json)


@main.command()
@as_json
def tokens(as_json: bool) -> None:
    """List your API tokens. Create them on the page /me/."""
    out(find_portal().get("tokens"), portal_tables.tokens, as_json)


@main.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@as_json
def backup(file: Path, force: bool, as_json: bool) -> None:
    r"""Back up the running portal to FILE. Run this on the portal's own machine.

    FILE is one gzipped tar that only you can read: the database as of one moment (SQLite or PostgreSQL), the key that
    signs sessions, and a manifest. It is written completely or not at all. Run directories (logs, checkpoints) are NOT
    included: they stay where VIGIL_RUNS points. PostgreSQL needs pg_dump on PATH. `vigil restore FILE` restores it.

    For example, from cron:  vigil backup /backups/vigil-$(date +\%F).tar.gz
    """
    needs_site("backup")
    from vigil_cli import backup as command

    out(command.backup(file, force=force), portal_tables.backup, as_json)


@main.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--force", is_flag=True, help="Restore even if a database exists; the old one is set aside.")
@as_json
def restore(file: Path, force: bool, as_json: bool) -> None:
    """Restore the portal's data from the backup FILE. Run this on the portal's machine, with the portal stopped.

    FILE is checked completely first. The database and the key that signs sessions are restored, and migrations are
    applied; a restore that fails or is killed leaves either the old or the new state. Only restore archives that you
    trust: whoever made one decides who is sysadmin. PostgreSQL needs pg_restore and psql on PATH.
    """
    needs_site("restore")
    from vigil_cli import backup as command

    out(command.restore(file, force=force), portal_tables.restored, as_json)


@main.command("login-link")
@click.argument("user", required=False)
@as_json
def login_link(user: str | None, as_json: bool) -> None:
    """Print a link that signs USER in once, valid for an hour. Run this on the portal's machine."""
    needs_site("login-link")
    command = installation.manage("login_link", *([user] if user else []))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        output = done.stderr.strip().splitlines() or ["The command failed."]
        raise CliError(output[-1].removeprefix("CommandError: "))
    link = done.stdout.strip()
    out({"url": link.removeprefix("Sign in: ")}, lambda answer: [link], as_json)


def _watch(portal: Portal, job: dict[str, Any], as_json: bool, message: str) -> None:
    """Follow the job until it ends; exit with code 1 if it ends badly."""
    from vigil_cli import watch

    screen = watch.Screen()
    screen.print_line(message)

    def changed(job: dict[str, Any]) -> None:
        screen.show(job)
        if as_json:
            attempt = job["attempt"]["number"]
            line = {"type": "progress", "job": job["id"], "attempt": attempt, "state": job["state"]}
            click.echo(json.dumps({**line, **job["progress"], "latest": job["latest"]}))

    try:
        last = watch.follow(portal, job["id"], changed=changed)
    except KeyboardInterrupt:
        screen.print_line(f"#{job['id']} continues. Cancel it with `vigil cancel {job['id']}`.")
        raise click.exceptions.Exit(1) from None
    screen.end(last)
    if as_json:
        click.echo(json.dumps(last))
    raise click.exceptions.Exit(0 if last["state"] == "completed" else 1)


def _print_error(trouble: CliError) -> None:
    """Print the error; with field errors, one line per field that says how to fix it."""
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
    *drains.ALL,
    *spares.ALL,
    *maintenance.ALL,
    *announce.ALL,
    *health.ALL,
    *accept.ALL,
    *burnin.ALL,
    *inventory.ALL,
    *gameday.ALL,
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
