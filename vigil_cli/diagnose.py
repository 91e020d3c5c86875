"""`vigil diagnose`: why a run died, from the logs at hand, without a portal; `vigil postmortem`: as the portal found.

No Django here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vigil_cli import tables
from vigil_cli.params import JobId, as_json, out
from vigil_cli.portal import Trouble, find_portal, kind_of
from vigil_cli.terminal import echo, echo_whole
from vigil_core import formatting

if TYPE_CHECKING:
    from diagnosis.signatures.catalogue import Catalogue

SHOWN = 12  # pieces of evidence


@click.command()
@click.argument("files", nargs=-1, metavar="FILE…")
@click.option(
    "--evaluate", "is_exam", is_flag=True, help="FILEs are cases with known causes: say how often it is right."
)
@click.option("--without", "each", is_flag=True, help="With --evaluate: also with each framework's entries taken out.")
@click.option("--catalogue", "more", multiple=True, metavar="FILE.toml", help="More entries to go by; may be repeated.")
@as_json
def diagnose(files: tuple[str, ...], is_exam: bool, each: bool, more: tuple[str, ...], as_json: bool) -> None:
    """Say why a run died, from its logs.

    FILE may be logs of one run or of each of its ranks, folders of them, compressed ones, "-" for standard input, and
    what else is at hand: kernel logs (dmesg, journalctl -k), sacct, scontrol show job, nvidia-smi -q, df, stacks.
    """
    if not files:
        raise click.UsageError("Name a log, a folder of logs, or - for standard input.")
    known = _known(more)
    if is_exam:
        _evaluate(files, known, each, as_json)
        return
    from diagnosis import offline

    logs, trouble = offline.logs_of(files)
    for one in trouble:
        echo(f"vigil: {one}", err=True)
    if not logs:
        raise Trouble("There is nothing to read: no file that is named is a log that can be read.")
    out(offline.verdict_on(logs, known).told(), _lines, as_json)


@click.command()
@click.argument("job_id", metavar="ID", type=JobId())
@click.option("--attempt", type=click.IntRange(min=1), help="Its number; the newest that ended badly.")
@click.option("--markdown", is_flag=True, help="Print the whole document as Markdown.")
@as_json
def postmortem(job_id: int, attempt: int | None, markdown: bool, as_json: bool) -> None:
    """Say why a job ended badly, and what it cost."""
    if markdown and as_json:
        raise click.UsageError("Ask for --markdown or --json, not both.")
    portal, wanted = find_portal(), {"attempt": attempt} if attempt is not None else {}
    if markdown:
        echo_whole(portal.ask("GET", f"jobs/{job_id}/postmortem.md", tries=2, params=wanted).text)
        return
    answer = portal.get(f"jobs/{job_id}/postmortem", **wanted)
    out(answer, lambda told: _postmortem_lines(told, kind_of(portal, job_id).many), as_json)


@click.command()
@click.option("--project", multiple=True, help="Its short name; may be repeated.")
@click.option("--cause", multiple=True, help="Such as gpu.off_bus; may be repeated.")
@click.option("--owner", type=click.Choice(["researcher", "sysadmin", "both", "nobody"]), help="Who must act.")
@click.option("--node", help="Its name.")
@click.option("--published/--draft", default=None, help="Only those; both, unless said.")
@click.option("-n", "--limit", type=click.IntRange(min=1), default=20, show_default=True)
@as_json
def postmortems(limit: int, as_json: bool, **filters: Any) -> None:
    """List what went wrong, newest first."""
    found = list(find_portal().items("postmortems", most=limit, limit=min(limit, 200), **filters))
    out({"items": found}, tables.incidents, as_json)


def _postmortem_lines(told: dict[str, Any], many: str) -> list[str]:
    """The verdict as `vigil diagnose` says it, then how it went on and what it cost. `many`: what the job counts."""
    figures, overruled = told["figures"], told["overruled"]
    lines = _lines(told)
    if overruled:
        confirmed = (
            "" if told.get("is_confirmed", True) or told["owner"] != "sysadmin" else " (its machine says nothing)"
        )
        lines[1] = f"{told['cause']} by {overruled['by'] or 'somebody'}{confirmed}: {overruled['why']}"
        lines.insert(2, f"The evidence said {told['evidence_cause']}, {told['confidence']:.0%} sure")
    for what, key in (("Noticed after", "detect"), ("Trained again after", "again"), ("Caught up after", "catch_up")):
        if figures[f"{key}_seconds"] is not None:
            lines.append(f"{what}: {formatting.duration(figures[f'{key}_seconds'])}")
    if figures["steps_lost"] is not None:
        lines.append(f"{many.capitalize()} lost: {figures['steps_lost']:,}, from {figures['kept_step']:,} on")
    if figures["gpu_hours"] is not None:
        money = formatting.money(figures["money"], figures["currency"]) if figures["money"] is not None else ""
        lines.append(f"Cost: {formatting.measure(figures['gpu_hours'])} GPU-hours{f', {money}' if money else ''}")
    return [*lines, told["follows"], told["url"]]


def _lines(verdict: dict[str, Any]) -> list[str]:
    from diagnosis.verdict import reported_by

    sure = f"{verdict['confidence']:.0%} sure" if verdict["cause"] != "unknown" else "not enough to go by"
    owner = {"both": "researcher and sysadmin", "nobody": "nobody has to act"}.get(verdict["owner"], verdict["owner"])
    lines = [verdict["says"], f"{verdict['cause']} · {sure} · {owner}"]
    if witness := reported_by(verdict):
        lines.append(f"Reported by {witness}")
    lines.append("")
    for one in verdict["evidence"][:SHOWN]:
        count = f" ({one['count']:,} times)" if one.get("count", 1) > 1 else ""
        place = f"{one['file']}:{one['line']}" if one["line"] else one["file"]
        lines.append(f"{one['role']:<13}{place}{count}")
        lines += [f"    {line}" for line in one["text"].splitlines()[:3]]
    if (more := len(verdict["evidence"]) - SHOWN) > 0:
        lines.append(f"and {more} more; --json has all of it")
    lines += ["", f"What to do: {verdict['advice']}"]
    if verdict["frame"]:
        lines.append(f"Innermost own code: {verdict['frame']}")
    if other := verdict["runner_up"]:
        lines.append(f"Considered: {other['cause']}: {other['why']}")
    lines += [f"Ruled out: {one['cause']}: {one['why']}" for one in verdict["ruled_out"] if one != verdict["runner_up"]]
    lines += [f"Not looked at: {one}" for one in verdict["not_seen"]]
    return lines


def _known(more: tuple[str, ...]) -> Catalogue:
    """What ships with Vigil, and the entries of these files."""
    import re2

    from diagnosis.signatures.catalogue import extended
    from diagnosis.signatures.entry import BadEntry
    from diagnosis.signatures.prefilter import sieve_of
    from vigil_cli.catalogue import entries_in

    entries = tuple(entry for name in more for entry in entries_in(name))
    try:
        known = extended(entries)
        if more:
            known.on(b"")
            sieve_of(known)
    except (re2.error, BadEntry) as error:
        raise Trouble(f"The entries can't be used: {error}. `vigil catalogue check FILE.toml` says which.") from None
    return known


def _evaluate(files: tuple[str, ...], known: Catalogue, each: bool, as_json: bool) -> None:
    from diagnosis import evaluate
    from diagnosis.logs.files import Unreadable

    try:
        several = [case for name in files for case in evaluate.cases(Path(name))]
    except Unreadable as error:
        raise Trouble(str(error)) from None
    if not several:
        raise Trouble(
            f"There is no case in {', '.join(files)}: a case is a folder with {evaluate.CASE} beside its logs."
        )
    out(evaluate.evaluate(several, known, without=each).told(), _score_lines, as_json)


def _score_lines(score: dict[str, Any]) -> list[str]:
    lines = [
        f"{score['right']} of {score['cases']} right ({score['accuracy']:.1%}), {score['owners']} with the right owner",
        "",
    ]
    width = max(len(code) for code in score["by_code"])
    lines += [f"{code:<{width}}  {one['right']:>3} of {one['of']}" for code, one in score["by_code"].items()]
    if score["confusion"]:
        lines += ["", "Taken for something else:"]
        lines += [f"  {one['is']} for {one['said']}: {one['count']}" for one in score["confusion"]]
        lines += [f"    {one['case']} ({one['confidence']:.0%} sure of {one['said']})" for one in score["wrong"]]
    lines += ["", "Right, by how sure it was:"]
    lines += [
        f"  {one['from']:.0%} to {one['to']:.0%}: {one['right']} of {one['of']}"
        for one in score["calibration"]
        if one["of"]
    ]
    if score["without"]:
        lines += ["", "Still right with a framework's own entries taken out:"]
        lines += [f"  {name}: {one['right']} of {one['of']}" for name, one in score["without"].items()]
    return lines


ALL = (diagnose, postmortem, postmortems)
