"""A field of the submit form as it is described: by the spec's JSON schema, or by the module that has the option."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from jobs.presenting.form_fields import NEAREST, Field
from jobs.spec import JobSpec
from training.config import choices

MOST_KNOWN = 200  # names that a box offers …
NAMED = 4  # … and up to which they stand below it
_WORDS = {"tags", "after", "environment.modules", "run.attackers"}
_HOSTS = {"resources.require_nodes", "resources.exclude_nodes"}
_SOURCE = re.compile(r" \([^()]*\)$")  # whose it is, in docs/; too long for a form
_SPELLED = {"fp8": "FP8", "kv": "KV", "lora": "LoRA", "lr": "LR", "mib": "(MiB)", "mtbf": "MTBF", "rope": "RoPE"}


@cache
def schema() -> dict[str, Any]:
    return JobSpec.model_json_schema()


def folder_of(path: str) -> str:
    """The folder that a field names a module of; "" for any other field."""
    table, _, name = path.partition(".")
    of = {field: folder for chosen in choices.CHOSEN.values() for field, folder in chosen.items()}
    return of.get(name, "") if table == "run" else ""


def named(value: object) -> list[object]:
    """The one choice, or those in a list."""
    return value if isinstance(value, list) else [value]


def option(table: str, option: choices.Option, value: object, wrong: dict[str, str]) -> Field:
    path = f"run.{table}.{option.name}"
    allowed = ("true", "false") if option.type == "bool" else tuple(str(v) for v in option.values)
    kind = "choice" if allowed else {"int": "number", "float": "decimal"}.get(option.type, "text")
    default = _shown(option.default)
    allowed = ("", *allowed) if allowed and option.default is None else allowed  # "": left unsaid
    return Field(
        path=path,
        title=_title(option.name),
        kind=kind,
        value=default if value is None else _shown(value),
        default=default,
        hint=_brief(option.description, kind),
        choices=allowed,
        **_trouble(wrong.get(path, "")),
    )


def undeclared(name: str, value: object) -> choices.Option:
    """One that only somebody's own code knows: of it there is no more to say than of what type it was written."""
    return choices.Option(name, type(value).__name__, None, optional=True, description="An option of your own")


def field(path: str, described: dict[str, Any], value: object, wrong: dict[str, str]) -> Field:
    default, kind = _shown(described.get("default")), _kind(path, described)
    return Field(
        path=path,
        title=_title(described.get("title", path.rpartition(".")[2])),
        kind=kind,
        value=default if value is None else _shown(value, "\n" if kind == "lines" else " "),
        default=default,
        hint=_brief(described.get("description", ""), kind),
        choices=_choices(described),
        **_trouble(wrong.get(path, "")),
    )


def _trouble(message: str) -> dict[str, Any]:
    """The message, and the values that it says would do."""
    nearest = NEAREST.search(message)
    values = tuple(v.replace(",", "") for v in nearest.groups() if v) if nearest else ()
    return {"problem": message, "nearest": values}


def _kind(path: str, described: dict[str, Any]) -> str:
    if path == "notes":
        return "area"
    if _choices(described):
        return "choice"
    variants = [v for v in described.get("anyOf", [described]) if v.get("type") != "null"]
    kinds = {variant.get("type") for variant in variants}
    if kinds == {"array"}:
        return "words" if path in _WORDS else "hosts" if path in _HOSTS else "lines"
    if kinds == {"object"}:
        return "pairs"
    if kinds == {"integer"}:
        return "number"
    return "decimal" if kinds == {"number"} else "text"


def _choices(described: dict[str, Any]) -> tuple[str, ...]:
    """What a field can be at all; "" where it may be left unsaid."""
    if described.get("type") == "boolean":
        return ("false", "true")
    if "enum" in described:
        return tuple(map(str, described["enum"]))
    for variant in described.get("anyOf", ()):
        if "enum" in variant:
            return ("", *map(str, variant["enum"]))
    return ()


def offering(drawn: Field, known: Callable[[str], list[str]] | None) -> Field:
    """Offers what there is to choose; a few are named, for nobody looks for a list in a box of text."""
    names = known(drawn.path.partition(".")[2])[:MOST_KNOWN] if known is not None else []
    said = f"{drawn.hint}. Here: {', '.join(names)}" if 0 < len(names) <= NAMED else drawn.hint
    return replace(drawn, known=tuple(names), hint=said)


def choose(drawn: Field, names: list[str], *, folder: str = "") -> Field:
    """A choice among these; what was written stays visible even if it is none of them.

    `folder`: where they are modules of it, what the chosen one is stands below.
    """
    offered = names if drawn.value in names or not drawn.value else [*names, drawn.value]
    hint = drawn.hint
    if folder and drawn.value in choices.names(folder):
        hint = _SOURCE.sub("", choices.get(folder, drawn.value).description.rstrip("."))
    return replace(drawn, kind="choice", choices=tuple(offered), hint=hint)


def _title(name: str) -> str:
    """ "Global Batch" and "global_batch" are "Global batch" here, and "lora_rank" is "LoRA rank"."""
    if not ("_" in name or name.islower() or name.istitle()):
        return name
    text = " ".join(_SPELLED.get(word, word) for word in name.lower().replace("_", " ").split())
    return text[:1].upper() + text[1:]


def _brief(description: str, kind: str) -> str:
    """What stands below a box, without a full stop: up to the first semicolon; of a choice what each of them means."""
    return (description if kind == "choice" else description.partition(";")[0]).rstrip(".")


def _shown(value: object, between: str = " ") -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, Mapping):
        return "\n".join(f"{name}={text}" for name, text in value.items())
    if isinstance(value, list):
        return between.join(map(str, value))
    return str(value)
