"""`vigil catalogue`: the site's additions to the failure catalogue. `check` needs no portal. No Django here."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from vigil_cli.params import Commands, as_json, out
from vigil_cli.portal import CliError, Portal, find_portal
from vigil_cli.tables.columns import local, table
from vigil_cli.terminal import echo, echo_whole

if TYPE_CHECKING:
    from diagnosis.signatures.entry import Entry

POLL_S = 1.0
MARKS = {"error": "✗", "warn": "!", "notice": "·"}
entry_file = click.argument("file", metavar="FILE.toml", type=click.Path(exists=True, dir_okay=False))


@click.group(cls=Commands)
def catalogue() -> None:
    """Manage the site's own failure signatures (sysadmins).

    FILE.toml has tables [[entry]], as docs/how-to/catalogue.md describes.
    """


@catalogue.command("list")
@click.option("--toml", "as_toml", is_flag=True, help="Print the enabled entries as a file for `add`.")
@click.option("--all", "are_all", is_flag=True, help="With --toml: disabled entries too.")
@as_json
def list_entries(as_toml: bool, are_all: bool, as_json: bool) -> None:
    """List the site's entries."""
    if as_toml and as_json:
        raise click.UsageError("Choose one of --toml and --json.")
    found = find_portal().get("catalogue/entries")
    if not as_toml:
        out(found, _table, as_json)
        return
    from diagnosis.signatures.entry import FIELDS, parse_entry
    from diagnosis.signatures.toml_export import to_toml

    rows = [row for row in found["items"] if row["is_enabled"] or are_all]
    entries = [parse_entry({name: row[name] for name in FIELDS}) for row in rows]
    echo_whole(to_toml(entries).removesuffix("\n"))


@catalogue.command()
@entry_file
@as_json
def check(file: str, as_json: bool) -> None:
    """Check the entries of a file locally: their examples and their speed; exit with 1 if one fails.

    Each entry is checked together with Vigil's built-in entries and those before it in the file.
    """
    from diagnosis.trial.subprocess_trial import entry_as_json, try_entry

    entries = entries_in(file)
    results = []
    for number, entry in enumerate(entries):
        others = {other.name: other for other in entries[:number]}
        trial = try_entry(entry_as_json(entry), others.values())
        if entry.name in others:
            trial.add("error", "name", "An earlier entry of the file has the same name.")
        results.append({"name": entry.name, **trial.as_json()})
    out(results, lambda results: [line for result in results for line in _trial_lines(result)], as_json)
    if not all(result["is_fit"] for result in results):
        raise click.exceptions.Exit(1)


@catalogue.command()
@entry_file
@click.option("--replace", "may_replace", is_flag=True, help="Overwrite entries that exist already.")
@as_json
def add(file: str, may_replace: bool, as_json: bool) -> None:
    """Add the entries of a file to the site's. They apply from the next diagnosis on."""
    from diagnosis.trial.subprocess_trial import entry_as_json

    entries, portal = entries_in(file), find_portal()
    there = {item["name"] for item in portal.get("catalogue/entries")["items"]} if may_replace else set()
    added = []
    for entry in entries:
        try:
            added.append(_send(portal, entry_as_json(entry), entry.name in there))
        except CliError:
            echo(f"vigil: {entry.name} was refused; later entries were not sent.", err=True)
            raise
        if not as_json:
            echo(f"{'Replaced' if entry.name in there else 'Added'}: {entry.name}")
    if as_json:
        out({"items": added}, lambda _: [], as_json)


@catalogue.command()
@entry_file
@click.option("--name", help="Name of the entry, if the file has several.")
@click.option("-n", "--limit", type=click.IntRange(1, 500), default=500, show_default=True, help="Incidents.")
@as_json
def replay(file: str, name: str | None, limit: int, as_json: bool) -> None:
    """Show which past verdicts an entry would change, without changing any. Ctrl-C stops it."""
    from diagnosis.trial.subprocess_trial import entry_as_json

    entries = [entry for entry in entries_in(file) if name in {None, entry.name}]
    if len(entries) != 1:
        names = ", ".join(entry.name for entry in entries) or "no entry has that name"
        raise CliError(f"Choose an entry of {file} with --name: {names}.")
    portal = find_portal()
    replay_status = portal.post("catalogue/replays", json={**entry_as_json(entries[0]), "most": limit})
    where = f"catalogue/replays/{replay_status['id']}"
    try:
        while replay_status["state"] == "going":
            echo(
                f"{replay_status['done']:,} of {replay_status['of']:,} incidents, {_change_count(replay_status)}",
                err=True,
            )
            time.sleep(POLL_S)
            replay_status = portal.get(where)
    except KeyboardInterrupt:
        portal.request("DELETE", where)
        raise CliError("Stopped.") from None
    out(replay_status, _replay_lines, as_json)


@catalogue.command()
@click.argument("name")
@as_json
def remove(name: str, as_json: bool) -> None:
    """Remove one of the site's entries."""
    find_portal().request("DELETE", _path(name))
    out({"name": name, "removed": True}, lambda _: [f"Removed: {name}"], as_json)


@catalogue.command()
@click.argument("name")
@as_json
def enable(name: str, as_json: bool) -> None:
    """Enable an entry again."""
    out(find_portal().patch(_path(name), json={"is_enabled": True}), lambda _: [f"Enabled: {name}"], as_json)


@catalogue.command()
@click.argument("name")
@as_json
def disable(name: str, as_json: bool) -> None:
    """Disable an entry without deleting it."""
    out(find_portal().patch(_path(name), json={"is_enabled": False}), lambda _: [f"Disabled: {name}"], as_json)


@catalogue.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Write a folder of cases instead of JSON lines.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=1000, show_default=True, help="The newest.")
def examples(folder: Path | None, limit: int) -> None:
    """Print incidents that people judged, as cases with known causes. `vigil diagnose --evaluate` scores them.

    For example:  vigil catalogue examples > cases.jsonl && vigil diagnose --evaluate cases.jsonl
    """
    pieces = find_portal().stream("catalogue/examples", limit=limit)
    if folder is None:
        for piece in pieces:
            click.echo(piece, nl=False)
        return
    cases = [json.loads(line) for line in "".join(pieces).splitlines()]
    try:
        for case in cases:
            _write_case(folder, case)
    except OSError as error:
        raise CliError(f"{folder}: {error.strerror or error}") from None
    echo(f"{len(cases):,} cases in {folder}", err=True)


ALL = (catalogue,)


def entries_in(file: str) -> Sequence[Entry]:
    """Return the entries of a file; raise CliError if it has none or cannot be read."""
    from diagnosis.signatures.entry import BadEntry, read_entries

    try:
        found = read_entries(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CliError(f"{file} is not UTF-8 text.") from None
    except (tomllib.TOMLDecodeError, BadEntry, RecursionError) as error:
        raise CliError(f"{file}: {error}") from None
    if not found:
        raise CliError(f"{file} has no table [[entry]].")
    return found


def _path(name: str) -> str:
    return f"catalogue/entries/{quote(name, safe='')}"


def _send(portal: Portal, entry: dict[str, Any], is_there: bool) -> dict[str, Any]:
    if is_there:
        found: dict[str, Any] = portal.request("PUT", _path(entry["name"]), tries=2, json=entry).json()
    else:
        found = portal.post("catalogue/entries", json=entry)
    return found


def _table(answer: dict[str, Any]) -> list[str]:
    head = ["NAME", "ROLE", "CAUSE", "ENABLED", "BY", "CHANGED", "PATTERN"]
    rows = [
        [
            *(
                entry["name"],
                entry["role"],
                entry["cause"],
                "yes" if entry["is_enabled"] else "no",
                entry["changed_by"],
            ),
            *(local(entry["changed_at"])[:16], entry["pattern"] or entry["exception"]),
        ]
        for entry in answer["items"]
    ]
    return table(
        head, rows, "No entries: this site uses only the built-in catalogue. Add entries with `vigil catalogue add`."
    )


def _trial_lines(trial: dict[str, Any]) -> list[str]:
    took = "" if trial["seconds"] is None else f": {trial['seconds']:.2f} s for {trial['megabytes']:.0f} MB"
    lines = [f"{trial['name']} {'passed' if trial['is_fit'] else 'failed'}{took}"]
    return [
        *lines,
        *(f"  {MARKS[finding['level']]} {finding['field']}: {finding['text']}" for finding in trial["findings"]),
    ]


def _change_count(replay_status: dict[str, Any]) -> str:
    count = len(replay_status["changes"])
    return f"{count:,} {'verdict' if count == 1 else 'verdicts'} would change"


def _replay_lines(replay_status: dict[str, Any]) -> list[str]:
    lead = f"{_change_count(replay_status)} of {replay_status['read']:,} incidents read again;"
    lead += f" the entry would name the root cause of {replay_status['named']:,}."
    rows = [
        [
            *(f"#{change['job']}", change["name"], str(change["attempt"]), change["before"], change["after"]),
            *(f"{change['confidence']:.0%}", change["by_person"]),
        ]
        for change in replay_status["changes"]
    ]
    lines = [lead, *([replay_status["outcome"]] if replay_status["outcome"] else [])]
    head = ["JOB", "NAME", "ATTEMPT>", "BEFORE", "AFTER", "CONFIDENCE>", "JUDGED BY PEOPLE"]
    return [*lines, *(table(head, rows, "") if rows else [])]


def _write_case(folder: Path, case: dict[str, Any]) -> None:
    import re

    import tomlkit

    where = folder / re.sub(r"[^\w-]", "_", str(case["id"]))[:100]
    where.mkdir(parents=True, exist_ok=True)
    words = {"cause": case["label"], "said": case["said"], "why": case["why"]}
    (where / "case.toml").write_text(tomlkit.dumps(words), encoding="utf-8")
    for name, text in (case.get("logs") or {"0.0.log": case["log"]}).items():
        (where / re.sub(r"[^\w.-]", "_", name).lstrip(".")[:200]).write_text(text, encoding="utf-8")
