"""`vigil catalogue`: what this site adds to the catalogue of failures. `check` needs no portal. No Django here."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from vigil_cli import tables
from vigil_cli.params import Commands, as_json, out
from vigil_cli.portal import Portal, Trouble, find_portal
from vigil_cli.terminal import echo, echo_whole

if TYPE_CHECKING:
    from diagnosis.signatures.entry import Entry

LOOK_S = 1.0
MARKS = {"error": "✗", "warn": "!", "notice": "·"}
entry_file = click.argument("file", metavar="FILE.toml")


@click.group(cls=Commands)
def catalogue() -> None:
    """The entries by which this site knows failures (sysadmins).

    FILE.toml has tables [[entry]], as docs/postmortems.md describes.
    """


@catalogue.command("list")
@click.option("--toml", "as_toml", is_flag=True, help="Those that count, as a file that `add` takes.")
@click.option("--all", "are_all", is_flag=True, help="With --toml: those, too, that do not count.")
@as_json
def list_entries(as_toml: bool, are_all: bool, as_json: bool) -> None:
    """List the site's entries."""
    found = find_portal().get("catalogue/entries")
    if not as_toml:
        out(found, _table, as_json)
        return
    from diagnosis.signatures.entry import FIELDS, entry_of
    from diagnosis.signatures.toml_export import written

    rows = [one for one in found["items"] if one["is_enabled"] or are_all]
    entries = [entry_of({name: one[name] for name in FIELDS}) for one in rows]
    echo_whole(written(entries).removesuffix("\n"))


@catalogue.command()
@entry_file
@as_json
def check(file: str, as_json: bool) -> None:
    """Try the entries of a file, here: their lines, and the time that they take; 1 if one is not fit.

    Each is tried beside what ships with Vigil and those before it in the file.
    """
    from diagnosis.trial.subprocess_trial import plain, try_entry

    entries = entries_in(file)
    told = []
    for number, entry in enumerate(entries):
        others = {other.name: other for other in entries[:number]}
        trial = try_entry(plain(entry), others.values())
        if entry.name in others:
            trial.say("error", "name", "One before it in the file has this name, too.")
        told.append({"name": entry.name, **trial.told()})
    out(told, lambda told: [line for one in told for line in _tried(one)], as_json)
    if not all(one["is_fit"] for one in told):
        raise click.exceptions.Exit(1)


@catalogue.command()
@entry_file
@click.option("--replace", "may_replace", is_flag=True, help="Write those anew that the site has.")
@as_json
def add(file: str, may_replace: bool, as_json: bool) -> None:
    """Add the entries of a file to the site's; they count from the next diagnosis on."""
    from diagnosis.trial.subprocess_trial import plain

    entries, portal = entries_in(file), find_portal()
    there = {one["name"] for one in portal.get("catalogue/entries")["items"]} if may_replace else set()
    added = []
    for entry in entries:
        try:
            added.append(_send(portal, plain(entry), entry.name in there))
        except Trouble:
            echo(f"vigil: {entry.name} is not taken, nor what comes after it.", err=True)
            raise
        if not as_json:
            echo(f"{'Written anew' if entry.name in there else 'Added'}: {entry.name}")
    if as_json:
        out({"items": added}, lambda told: [], as_json)


@catalogue.command()
@entry_file
@click.option("--name", help="Which, where the file has several.")
@click.option("-n", "--limit", type=click.IntRange(1, 500), default=500, show_default=True, help="Incidents.")
@as_json
def replay(file: str, name: str | None, limit: int, as_json: bool) -> None:
    """See which verdicts of the past an entry would change; none is changed. Ctrl-C stops it."""
    from diagnosis.trial.subprocess_trial import plain

    entries = [entry for entry in entries_in(file) if name in {None, entry.name}]
    if len(entries) != 1:
        names = ", ".join(entry.name for entry in entries) or "none of that name"
        raise Trouble(f"Say which entry of {file} by --name: {names}.")
    portal = find_portal()
    told = portal.post("catalogue/replays", json={**plain(entries[0]), "most": limit})
    where = f"catalogue/replays/{told['id']}"
    try:
        while told["state"] == "going":
            echo(f"{told['done']:,} of {told['of']:,} incidents, {_changed(told)}", err=True)
            time.sleep(LOOK_S)
            told = portal.get(where)
    except KeyboardInterrupt:
        portal.ask("DELETE", where)
        raise Trouble("Stopped.") from None
    out(told, _replayed, as_json)


@catalogue.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove an entry of the site."""
    find_portal().ask("DELETE", _path(name))
    echo(f"Removed: {name}")


@catalogue.command()
@click.argument("name")
def enable(name: str) -> None:
    """Let an entry count again."""
    find_portal().patch(_path(name), json={"is_enabled": True})
    echo(f"Counts: {name}")


@catalogue.command()
@click.argument("name")
def disable(name: str) -> None:
    """Keep an entry, but let it no longer count."""
    find_portal().patch(_path(name), json={"is_enabled": False})
    echo(f"Does not count: {name}")


@catalogue.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Write a folder of cases instead of lines of JSON.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=1000, show_default=True, help="The newest.")
def examples(folder: Path | None, limit: int) -> None:
    """Print what people judged, as cases with known causes; `vigil diagnose --evaluate` scores them.

    For example:  vigil catalogue examples > cases.jsonl && vigil diagnose --evaluate cases.jsonl
    """
    pieces = find_portal().stream("catalogue/examples", limit=limit)
    if folder is None:
        for piece in pieces:
            click.echo(piece, nl=False)
        return
    told = [json.loads(line) for line in "".join(pieces).splitlines()]
    try:
        for one in told:
            _write_case(folder, one)
    except OSError as error:
        raise Trouble(f"{folder}: {error.strerror or error}") from None
    echo(f"{len(told):,} cases in {folder}", err=True)


ALL = (catalogue,)


def entries_in(file: str) -> Sequence[Entry]:
    """The entries of a file; Trouble where it is none."""
    from diagnosis.signatures.entry import BadEntry, read

    try:
        found = read(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise Trouble(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise Trouble(f"{file} is no text in UTF-8.") from None
    except (tomllib.TOMLDecodeError, BadEntry, RecursionError) as error:
        raise Trouble(f"{file}: {error}") from None
    if not found:
        raise Trouble(f"{file} has no table [[entry]].")
    return found


def _path(name: str) -> str:
    return f"catalogue/entries/{quote(name, safe='')}"


def _send(portal: Portal, entry: dict[str, Any], is_there: bool) -> dict[str, Any]:
    if is_there:
        found: dict[str, Any] = portal.ask("PUT", _path(entry["name"]), tries=2, json=entry).json()
    else:
        found = portal.post("catalogue/entries", json=entry)
    return found


def _table(answer: dict[str, Any]) -> list[str]:
    head = ["NAME", "ROLE", "CAUSE", "COUNTS", "BY", "CHANGED", "PATTERN"]
    rows = [
        [
            *(one["name"], one["role"], one["cause"], "yes" if one["is_enabled"] else "no", one["changed_by"]),
            *(tables.local(one["changed_at"])[:16], one["pattern"] or one["exception"]),
        ]
        for one in answer["items"]
    ]
    return tables.table(
        head, rows, "None: this site goes by what ships with Vigil. Add some with `vigil catalogue add`."
    )


def _tried(one: dict[str, Any]) -> list[str]:
    took = "" if one["seconds"] is None else f": {one['seconds']:.2f} s for {one['megabytes']:.0f} MB"
    lines = [f"{one['name']} is {'fit' if one['is_fit'] else 'not fit'}{took}"]
    return [*lines, *(f"  {MARKS[each['level']]} {each['field']}: {each['text']}" for each in one["findings"])]


def _changed(told: dict[str, Any]) -> str:
    many = len(told["changes"])
    return f"{many:,} {'verdict' if many == 1 else 'verdicts'} would change"


def _replayed(told: dict[str, Any]) -> list[str]:
    lead = (
        f"{_changed(told)} of {told['read']:,} that could be read again; it would name the root of {told['named']:,}."
    )
    rows = [
        [
            *(f"#{one['job']}", one["name"], str(one["attempt"]), one["before"], one["after"]),
            *(f"{one['confidence']:.0%}", one["by_person"]),
        ]
        for one in told["changes"]
    ]
    lines = [lead, *([told["outcome"]] if told["outcome"] else [])]
    head = ["JOB", "NAME", "ATTEMPT>", "BEFORE", "AFTER", "SURE>", "A PERSON SAID"]
    return [*lines, *(tables.table(head, rows, "") if rows else [])]


def _write_case(folder: Path, case: dict[str, Any]) -> None:
    import re

    import tomlkit

    where = folder / re.sub(r"[^\w-]", "_", str(case["id"]))[:100]
    where.mkdir(parents=True, exist_ok=True)
    words = {"cause": case["label"], "said": case["said"], "why": case["why"]}
    (where / "case.toml").write_text(tomlkit.dumps(words), encoding="utf-8")
    for name, text in (case.get("logs") or {"0.0.log": case["log"]}).items():
        (where / re.sub(r"[^\w.-]", "_", name).lstrip(".")[:200]).write_text(text, encoding="utf-8")
