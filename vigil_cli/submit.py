"""`vigil submit`: apply --set to the specification, pack the folder of its code, send both. No Django here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vigil_cli.code_archive import PackedCode, Unpackable, pack
from vigil_cli.portal import CliError, Portal
from vigil_core import bounded

TABLES = ("script", "client")
"""Tables of a specification that name custom code."""
MAX_CHARACTERS = 16 * 2**20
"""More than any portal accepts."""


def read(path: Path, changes: list[str]) -> str:
    """Return the specification's text with the changes ("run.steps=400") applied."""
    try:
        with path.open() as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{path} cannot be read: {error}.") from error
    if len(text) > MAX_CHARACTERS:
        raise CliError(f"{path} is far too long for a specification.")
    if not changes:
        return text
    from vigil_core import toml_edit

    try:
        return toml_edit.set_values(text, dict(map(_change, changes)))
    except (ValueError, RecursionError) as error:
        raise CliError(f"{path}: {error}") from error


def pack_for(spec: Path, text: str) -> PackedCode | None:
    """Pack the folder of custom code that the job runs, relative to the specification; None for jobs without one."""
    try:
        document = bounded.toml(text)
    except (ValueError, RecursionError):
        return None  # the portal reports what is wrong
    code: dict[str, Any] = next((document[table] for table in TABLES if isinstance(document.get(table), dict)), {})
    directory = "" if code.get("git") else code.get("directory")
    if not isinstance(directory, str) or not directory:
        return None
    try:
        packed = pack(spec.parent / Path(directory).expanduser())
    except Unpackable as error:
        raise CliError(str(error)) from error
    if packed.left_out and (lacking := sorted(_entries(text) & {*packed.left_out})):
        named = " ".join(lacking)
        raise CliError(f"git does not track {named}, so {_pronoun(lacking)} would not be sent: git add {named}")
    return packed


def _pronoun(names: list[str]) -> str:
    return "it" if len(names) == 1 else "they"


def _entries(text: str) -> set[str]:
    """Return the files that the code must contain; none if the specification is wrong, which the portal reports."""
    try:
        from jobs.errors import SpecError
        from jobs.spec import JobSpec, SweepSpec
    except ModuleNotFoundError:  # vigil-client: the portal checks that they were sent
        return set()
    try:
        sweep = SweepSpec.parse_toml(text) if is_sweep(text) else None
        specs = [point.spec for point in sweep.points] if sweep else [JobSpec.parse_toml(text)]
    except SpecError:
        return set()
    return {entry for spec in specs for entry in spec.entries.values()}


def is_sweep(text: str) -> bool:
    """Return whether the specification has [sweep]. Invalid TOML is left to the portal to report."""
    try:
        return "sweep" in bounded.toml(text)
    except (ValueError, RecursionError):
        return False


def check(portal: Portal, text: str) -> dict[str, Any]:
    """Ask the portal what it would do with the specification."""
    answer: dict[str, Any] = portal.post("jobs/check", json={"spec_toml": text})
    return answer


def submit(portal: Portal, text: str, packed: PackedCode | None, key: str) -> dict[str, Any]:
    """Submit the job or sweep. A retry sends the same key, so that only one is created."""
    to = "sweeps" if is_sweep(text) else "jobs"
    if packed is None:
        made: dict[str, Any] = portal.post(to, json={"spec_toml": text}, key=key)
    else:
        files = {"code": ("code.tar.gz", packed.code, "application/gzip")}
        made = portal.post(to, data={"spec_toml": text}, files=files, key=key)
    return made


def _change(text: str) -> tuple[str, Any]:
    """Parse "run.steps=400" to ("run.steps", 400): the right side is TOML, or plain text if it is not."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip() or not all(path.strip().split(".")):
        raise click.UsageError(f"--set {text!r}: write it as run.steps=400.")
    try:
        parsed = bounded.toml(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value
    # 00:10:00 is a time of day to TOML; in a spec it is a text.
    return path.strip(), parsed if isinstance(parsed, bool | int | float | str | list | dict) else value
