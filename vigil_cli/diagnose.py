"""`vigil diagnose`: why a run died, from logs alone, without a portal; `vigil postmortem`: the portal's post-mortem.

No Django here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vigil_cli.params import as_json, job_id, limit_option, out
from vigil_cli.portal import CliError, find_portal, kind_of
from vigil_cli.tables import jobs as job_tables
from vigil_cli.tables.columns import current
from vigil_cli.terminal import echo, echo_whole
from vigil_core import formatting

if TYPE_CHECKING:
    from diagnosis.signatures.catalogue import Catalogue

MAX_EVIDENCE = 12  # pieces of evidence


@click.command()
@click.argument("files", nargs=-1, metavar="FILE…")
@click.option("--evaluate", "evaluates", is_flag=True, help="FILEs are cases with known causes: measure the accuracy.")
@click.option("--without", "each", is_flag=True, help="With --evaluate: also without each framework's entries in turn.")
@click.option(
    "--catalogue", "more", multiple=True, metavar="FILE.toml", help="Additional catalogue entries; may be repeated."
)
@as_json
def diagnose(files: tuple[str, ...], evaluates: bool, each: bool, more: tuple[str, ...], as_json: bool) -> None:
    """Diagnose why a run died, from its logs.

    FILE may be a log of the run or of each of its ranks, folders of logs, compressed files, "-" for standard input, and
    further evidence: kernel logs (dmesg, journalctl -k), sacct, scontrol show job, nvidia-smi -q, df, stack dumps.
    """
    if not files:
        raise click.UsageError("Name a log, a folder of logs, or - for standard input.")
    entries = _load_catalogue(more)
    if evaluates:
        _evaluate(files, entries, each, as_json)
        return
    from diagnosis import offline

    logs, problems = offline.open_logs(files)
    for problem in problems:
        echo(f"vigil: {problem}", err=True)
    if not logs:
        raise CliError("Nothing to read: none of the files is a readable log.")
    out(offline.diagnose_logs(logs, entries).as_report(), _lines, as_json)


@click.command()
@job_id
@click.option("--attempt", type=click.IntRange(min=1), help="Attempt number; default: the newest that ended badly.")
@click.option("--markdown", is_flag=True, help="Print the whole document as Markdown.")
@as_json
def postmortem(job_id: int, attempt: int | None, markdown: bool, as_json: bool) -> None:
    """Show why a job ended badly, and what it cost."""
    if markdown and as_json:
        raise click.UsageError("Choose one of --markdown and --json.")
    portal, wanted = find_portal(), {"attempt": attempt} if attempt is not None else {}
    if markdown:
        echo_whole(portal.request("GET", f"jobs/{job_id}/postmortem.md", tries=2, params=wanted).text)
        return
    answer = portal.get(f"jobs/{job_id}/postmortem", **wanted)
    out(answer, lambda document: _postmortem_lines(document, kind_of(portal, job_id).units), as_json)


@click.command()
@click.option("--project", multiple=True, help="Its short name; may be repeated.")
@click.option("--cause", multiple=True, help="Such as gpu.off_bus; may be repeated.")
@click.option("--owner", type=click.Choice(["researcher", "sysadmin", "both", "nobody"]), help="Who must act.")
@click.option("--node", help="Its name.")
@click.option("--published/--draft", default=None, help="Only published post-mortems, or only drafts.")
@limit_option(20)
@as_json
def postmortems(limit: int, as_json: bool, **filters: Any) -> None:
    """List incidents, newest first."""
    found = list(find_portal().items("postmortems", most=limit, limit=min(limit, 200), **filters))
    out({"items": found}, job_tables.incidents, as_json)


def _postmortem_lines(document: dict[str, Any], units: str) -> list[str]:
    """Return the verdict as `vigil diagnose` prints it, then recovery and cost. `units`: "steps" or "rounds"."""
    figures, overruled = document["figures"], document["overruled"]
    lines = _lines(document)
    if overruled:
        confirmed = (
            ""
            if document.get("is_confirmed", True) or document["owner"] != "sysadmin"
            else " (not confirmed by machine evidence)"
        )
        lines[1] = f"{document['cause']} by {overruled['by'] or 'somebody'}{confirmed}: {overruled['why']}"
        lines.insert(
            2, f"The evidence pointed to {document['evidence_cause']}, {document['confidence']:.0%} confidence"
        )
    for what, seconds in (
        ("Detected after", figures["detect_seconds"]),
        ("Training resumed after", current(figures, "resume_seconds", "again_seconds")),
        ("Caught up after", figures["catch_up_seconds"]),
    ):
        if seconds is not None:
            lines.append(f"{what}: {formatting.duration(seconds)}")
    if figures["steps_lost"] is not None:
        since = current(figures, "resume_step", "kept_step")
        lines.append(f"{units.capitalize()} lost: {figures['steps_lost']:,}, since {since:,}")
    if figures["gpu_hours"] is not None:
        money = formatting.money(figures["money"], figures["currency"]) if figures["money"] is not None else ""
        lines.append(f"Cost: {formatting.measure(figures['gpu_hours'])} GPU-hours{f', {money}' if money else ''}")
    return [*lines, document["follows"], document["url"]]


def _lines(verdict: dict[str, Any]) -> list[str]:
    from diagnosis.verdict import reported_by

    sure = f"{verdict['confidence']:.0%} confidence" if verdict["cause"] != "unknown" else "not enough evidence"
    owner = {"both": "researcher and sysadmin", "nobody": "no action needed"}.get(verdict["owner"], verdict["owner"])
    lines = [current(verdict, "summary", "says"), f"{verdict['cause']} · {sure} · {owner}"]
    if witness := reported_by(verdict):
        lines.append(f"Reported by {witness}")
    lines.append("")
    for item in verdict["evidence"][:MAX_EVIDENCE]:
        count = f" ({item['count']:,} times)" if item.get("count", 1) > 1 else ""
        place = f"{item['file']}:{item['line']}" if item["line"] else item["file"]
        lines.append(f"{item['role']:<13}{place}{count}")
        lines += [f"    {line}" for line in item["text"].splitlines()[:3]]
    if (more := len(verdict["evidence"]) - MAX_EVIDENCE) > 0:
        lines.append(f"and {more} more; --json has all of it")
    lines += ["", f"What to do: {verdict['advice']}"]
    if verdict["frame"]:
        lines.append(f"Innermost user code: {verdict['frame']}")
    if other := verdict["runner_up"]:
        lines.append(f"Considered: {other['cause']}: {other['why']}")
    lines += [
        f"Ruled out: {item['cause']}: {item['why']}" for item in verdict["ruled_out"] if item != verdict["runner_up"]
    ]
    lines += [f"Not available: {item}" for item in current(verdict, "unavailable", "not_seen")]
    return lines


def _load_catalogue(more: tuple[str, ...]) -> Catalogue:
    """Return the built-in catalogue extended by the entries of these files."""
    import re2

    from diagnosis.signatures.catalogue import extended_catalogue
    from diagnosis.signatures.entry import BadEntry
    from diagnosis.signatures.prefilter import prefilter_of
    from vigil_cli.catalogue import entries_in

    entries = tuple(entry for name in more for entry in entries_in(name))
    try:
        combined = extended_catalogue(entries)
        if more:
            combined.entries_matching(b"")
            prefilter_of(combined)
    except (re2.error, BadEntry) as error:
        raise CliError(
            f"The entries cannot be used: {error}. `vigil catalogue check FILE.toml` shows which one."
        ) from None
    return combined


def _evaluate(files: tuple[str, ...], entries: Catalogue, each: bool, as_json: bool) -> None:
    from diagnosis import evaluate
    from diagnosis.logs.files import Unreadable

    try:
        cases = [case for name in files for case in evaluate.read_cases(Path(name))]
    except Unreadable as error:
        raise CliError(str(error)) from None
    if not cases:
        raise CliError(f"No cases in {', '.join(files)}: a case is a folder with {evaluate.CASE} next to its logs.")
    out(evaluate.evaluate(cases, entries, without_frameworks=each).as_json(), _score_lines, as_json)


def _score_lines(score: dict[str, Any]) -> list[str]:
    lines = [
        f"{score['right']} of {score['cases']} correct ({score['accuracy']:.1%}),"
        f" {score['owners']} with the correct owner",
        "",
    ]
    width = max(len(code) for code in score["by_code"])
    lines += [f"{code:<{width}}  {item['right']:>3} of {item['of']}" for code, item in score["by_code"].items()]
    if score["confusion"]:
        lines += ["", "Misdiagnosed:"]
        lines += [f"  {item['expected']} as {item['verdict']}: {item['count']}" for item in score["confusion"]]
        lines += [
            f"    {item['case']} ({item['confidence']:.0%} confidence in {item['verdict']})" for item in score["wrong"]
        ]
    lines += ["", "Correct, by confidence:"]
    lines += [
        f"  {item['from']:.0%} to {item['to']:.0%}: {item['right']} of {item['of']}"
        for item in score["calibration"]
        if item["of"]
    ]
    if score["without"]:
        lines += ["", "Correct without a framework's own entries:"]
        lines += [f"  {name}: {item['right']} of {item['of']}" for name, item in score["without"].items()]
    return lines


ALL = (diagnose, postmortem, postmortems)
