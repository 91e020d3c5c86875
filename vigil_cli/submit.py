"""`vigil submit`: the spec as the person means it, the folder of its code, and sending both. No Django here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vigil_cli.code_archive import Packed, Unpackable, pack
from vigil_cli.portal import Portal, Trouble
from vigil_core import bounded

TABLES = ("script", "client")
"""Of a specification, that ask for somebody's own code."""
MOST_LETTERS = 16 * 2**20
"""More than any portal takes."""


def read(path: Path, changes: list[str]) -> str:
    """The spec's text with the changes ("run.steps=400") made in it."""
    try:
        with path.open() as file:
            text = file.read(MOST_LETTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}.") from error
    if len(text) > MOST_LETTERS:
        raise click.UsageError(f"{path} cannot be read: it is far too long for a specification.")
    if not changes:
        return text
    from jobs.errors import SpecError
    from jobs.spec import set_values

    try:
        return set_values(text, dict(map(_change, changes)))
    except SpecError as error:
        raise Trouble(str(error)) from error


def pack_for(spec: Path, text: str) -> Packed | None:
    """The folder of its own code that a job runs, packed; named from where the spec lies. None for all other jobs."""
    try:
        asked = bounded.toml(text)
    except (ValueError, RecursionError):
        return None  # the portal says what is wrong
    code: dict[str, Any] = next((asked[table] for table in TABLES if isinstance(asked.get(table), dict)), {})
    directory = "" if code.get("git") else code.get("directory")
    if not isinstance(directory, str) or not directory:
        return None
    try:
        packed = pack(spec.parent / Path(directory).expanduser())
    except Unpackable as error:
        raise Trouble(str(error)) from error
    if packed.left_out and (lacking := sorted(_entries(text) & {*packed.left_out})):
        named = " ".join(lacking)
        raise Trouble(f"git does not track {named}, so {_it(lacking)} would not be sent: git add {named}")
    return packed


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "they"


def _entries(text: str) -> set[str]:
    """The files that the code has to have; none where the specification is wrong, which the portal says."""
    from jobs.errors import SpecError
    from jobs.spec import JobSpec, SweepSpec

    try:
        sweep = SweepSpec.parse_toml(text) if is_sweep(text) else None
        specs = [point.spec for point in sweep.points] if sweep else [JobSpec.parse_toml(text)]
    except SpecError:
        return set()
    return {entry for spec in specs for entry in spec.entries.values()}


def is_sweep(text: str) -> bool:
    """Whether it has [sweep]; what is no TOML is told by the portal."""
    try:
        return "sweep" in bounded.toml(text)
    except (ValueError, RecursionError):
        return False


def check(portal: Portal, text: str) -> dict[str, Any]:
    """What the portal would do with it."""
    answer: dict[str, Any] = portal.post("jobs/check", json={"spec_toml": text})
    return answer


def submit(portal: Portal, text: str, packed: Packed | None, key: str) -> dict[str, Any]:
    """The job, or the sweep; sent again with the same key if the portal does not answer, so that there is one."""
    to = "sweeps" if is_sweep(text) else "jobs"
    if packed is None:
        made: dict[str, Any] = portal.post(to, json={"spec_toml": text}, key=key)
    else:
        files = {"code": ("code.tar.gz", packed.code, "application/gzip")}
        made = portal.post(to, data={"spec_toml": text}, files=files, key=key)
    return made


def _change(text: str) -> tuple[str, Any]:
    """("run.steps", 400) from "run.steps=400": TOML on the right, and what is no TOML is a text."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip() or not all(path.strip().split(".")):
        raise click.UsageError(f"--set {text!r}: write it as run.steps=400.")
    try:
        parsed = bounded.toml(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value
    # 00:10:00 is a time of day to TOML; in a spec it is a text.
    return path.strip(), parsed if isinstance(parsed, bool | int | float | str | list | dict) else value
