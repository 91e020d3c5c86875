"""Apply changes from the submit form to the spec's TOML text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from jobs.presenting.submit_form.fields import FormField
from jobs.presenting.submit_form.schema_fields import chosen_names, folder_of
from jobs.presenting.submit_form.sections import sections
from jobs.spec import read_toml
from training.config import choices
from training.federation import custom

_HOST = re.compile(r"(?:[^\s,\[]|\[[^\]]*\]?)+")  # commas within brackets belong to the name
MAX_ITEMS = 1_000
"""Most items of one text box in a list or table: a script has at most this many arguments, and tomlkit's time to write
them grows with their square (12,000 take 30 s)."""
_WORD, _LINE = re.compile(r"[^\s,]+"), re.compile(r"\n|\Z")
_ITEMS = {"words": _WORD, "hosts": _WORD, "lines": _LINE, "pairs": _LINE}
_NUMBER = re.compile(r"-?\d[\d_,]*\Z")


def merge_form(text: str, posted: Mapping[str, str]) -> str:
    """Return the text with the form's changes; comments, order and everything else stay.

    Raises SpecError if not TOML.
    """
    data = read_toml(text)
    changes: dict[str, Any] = {}
    for section in sections(data, projects=[posted.get("project", "")]):
        for drawn in section.all:
            raw = posted.get(drawn.path)
            if raw is not None and _normalised(raw) != _normalised(drawn.value):
                changes[drawn.path] = _field_value(drawn, raw)
    return _apply_changes(text, _with_recipe(changes, data)) if changes else text


def _with_recipe(changes: dict[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Write down the recipe that [client] implies, before a change of another part would stop implying it."""
    is_another = any(f"run.{part.field}" in changes for part in custom.PARTS)
    if "client" not in data or not is_another or "run.recipe" in changes:
        return changes
    shown = next(drawn.value for section in sections(data) for drawn in section.all if drawn.path == "run.recipe")
    return {"run.recipe": shown, **changes}


def _normalised(text: str) -> str:
    return text.replace("\r\n", "\n").strip()


def _apply_changes(text: str, changes: dict[str, Any]) -> str:
    try:
        document = tomlkit.parse(text)
    except TOMLKitError:  # tomlkit is stricter than tomllib in places; validation reports what is wrong
        return text
    for path, value in changes.items():
        *tables, key = path.split(".")
        place: Any = document
        for name in tables:
            if not isinstance(place.get(name), dict):
                place[name] = tomlkit.table()
            place = place[name]
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
        _remove_unused_tables(document, path, value)
    return tomlkit.dumps(document)


def _remove_unused_tables(document: tomlkit.TOMLDocument, path: str, value: Any) -> None:
    """Remove tables that another kind or recipe would refuse."""
    if path == "kind":
        document.pop("run", None)  # other kinds have other fields
        if value != "script":
            document.pop("script", None)
        if value != "federated":
            document.pop("client", None)
        if value == "script" and "script" not in document:
            document["script"] = tomlkit.table()
            document["script"]["entry"] = "train.py"
    run = document.get("run")
    kind = folder_of(path)
    if kind and isinstance(run, dict):
        for name in choices.names(kind):
            if name not in chosen_names(value):
                run.pop(name, None)
        if path in {f"run.{part.field}" for part in custom.PARTS}:
            _sync_client_table(document, run)


def _sync_client_table(document: tomlkit.TOMLDocument, run: Mapping[str, Any]) -> None:
    """Keep the [client] table exactly as long as something uses it."""
    if not custom.chosen(run):
        document.pop("client", None)
    elif "client" not in document:
        document["client"] = tomlkit.table()
        document["client"]["directory"] = "."


def _field_value(drawn: FormField, raw: str) -> Any:
    """Return a box's text as its typed value; unparsable text stays text, for the spec to reject."""
    raw = _normalised(raw)
    item = _ITEMS.get(drawn.kind)
    if item is not None and len(item.findall(raw)) > MAX_ITEMS:
        return raw
    if drawn.kind == "words":
        words = [word for word in re.split(r"[\s,]+", raw) if word]
        return (
            [_numeric(word.lstrip("#"), whole=True) for word in words] or None
            if drawn.path in {"after", "run.attackers"}
            else words or None
        )
    if drawn.kind == "hosts":
        return _HOST.findall(raw) or None
    if drawn.kind == "lines":
        return raw.split("\n") if raw else None
    if drawn.kind == "pairs":
        pairs = (line.partition("=") for line in raw.split("\n") if line.strip())
        table = tomlkit.inline_table()
        counts = drawn.path == "run.mesh"
        for name, _, value in pairs:
            table[name.strip()] = _numeric(value.strip(), whole=True) if counts else value.strip()
        return table if table else None
    if drawn.kind == "area":
        return tomlkit.string(raw, multiline="\n" in raw) if raw else None
    if raw == "":
        return None if not drawn.required else ""
    if drawn.kind in {"number", "decimal"} or drawn.path == "resources.nodes":
        return _numeric(raw, whole=drawn.kind != "decimal")
    if drawn.kind == "choice" and {*drawn.choices} <= {"", "true", "false"}:
        return raw == "true"
    return raw


def _numeric(raw: str, *, whole: bool) -> int | float | str:
    if _NUMBER.match(raw):
        number = int(raw.replace(",", "").replace("_", ""))
        return number if whole or abs(number) > 2**53 else float(number)
    try:
        return raw if whole else float(raw)
    except ValueError:
        return raw
