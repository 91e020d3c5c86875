"""Build fields of the submit form from the spec's JSON schema, or from the module that declares the option."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from jobs.presenting.submit_form.fields import NEAREST, FormField
from jobs.spec import JobSpec
from training.config import choices

MAX_SUGGESTIONS = 200  # number of names suggested by a text box
MAX_IN_HINT = 4  # up to this many are listed below it
_WORDS = {"tags", "after", "environment.modules", "run.attackers"}
_HOSTS = {"resources.require_nodes", "resources.exclude_nodes"}
_SOURCE = re.compile(r" \([^()]*\)$")  # explained in docs/; too long for a form
_SPELLED = {"fp8": "FP8", "kv": "KV", "lora": "LoRA", "lr": "LR", "mib": "(MiB)", "mtbf": "MTBF", "rope": "RoPE"}


@cache
def schema() -> dict[str, Any]:
    return JobSpec.model_json_schema()


def folder_of(path: str) -> str:
    """Return the folder of modules that a field chooses from; "" for any other field."""
    table, _, name = path.partition(".")
    of = {field: folder for chosen in choices.CHOICE_FIELDS.values() for field, folder in chosen.items()}
    return of.get(name, "") if table == "run" else ""


def chosen_names(value: object) -> list[object]:
    """Return the chosen names as a list; a single choice becomes a list of one."""
    return value if isinstance(value, list) else [value]


def option_field(table: str, option: choices.Option, value: object, wrong: dict[str, str]) -> FormField:
    path = f"run.{table}.{option.name}"
    allowed = ("true", "false") if option.type == "bool" else tuple(str(v) for v in option.values)
    kind = "choice" if allowed else {"int": "number", "float": "decimal"}.get(option.type, "text")
    default = _shown(option.default)
    allowed = ("", *allowed) if allowed and option.default is None else allowed  # "": not set
    return FormField(
        path=path,
        title=_title(option.name),
        kind=kind,
        value=default if value is None else _shown(value),
        default=default,
        hint=_hint(option.description, kind),
        choices=allowed,
        **_problem_fields(wrong.get(path, "")),
    )


def undeclared_option(name: str, value: object) -> choices.Option:
    """Describe an option that only custom code knows; nothing is known of it except its current type."""
    return choices.Option(name, type(value).__name__, None, optional=True, description="An option of your own")


def field(path: str, described: dict[str, Any], value: object, wrong: dict[str, str]) -> FormField:
    default, kind = _shown(described.get("default")), _kind(path, described)
    return FormField(
        path=path,
        title=_title(described.get("title", path.rpartition(".")[2])),
        kind=kind,
        value=default if value is None else _shown(value, "\n" if kind == "lines" else " "),
        default=default,
        hint=_hint(described.get("description", ""), kind),
        choices=_choices(described),
        **_problem_fields(wrong.get(path, "")),
    )


def _problem_fields(message: str) -> dict[str, Any]:
    """Return the message, and the valid values that it suggests."""
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
    """Return the allowed values; "" first if the field may be left out."""
    if described.get("type") == "boolean":
        return ("false", "true")
    if "enum" in described:
        return tuple(map(str, described["enum"]))
    for variant in described.get("anyOf", ()):
        if "enum" in variant:
            return ("", *map(str, variant["enum"]))
    return ()


def with_suggestions(drawn: FormField, suggest: Callable[[str], list[str]] | None) -> FormField:
    """Return the field with existing names as suggestions; a few of them are also named in the hint."""
    names = suggest(drawn.path.partition(".")[2])[:MAX_SUGGESTIONS] if suggest is not None else []
    hint = f"{drawn.hint}. Here: {', '.join(names)}" if 0 < len(names) <= MAX_IN_HINT else drawn.hint
    return replace(drawn, suggestions=tuple(names), hint=hint)


def as_choice(drawn: FormField, names: list[str], *, folder: str = "") -> FormField:
    """Return the field as a choice among these names; the current value stays selectable even if it is invalid.

    With `folder`, the names are modules and the hint is the description of the chosen one.
    """
    offered = names if drawn.value in names or not drawn.value else [*names, drawn.value]
    hint = drawn.hint
    if folder and drawn.value in choices.names(folder):
        hint = _SOURCE.sub("", choices.get(folder, drawn.value).description.rstrip("."))
    return replace(drawn, kind="choice", choices=tuple(offered), hint=hint)


def _title(name: str) -> str:
    """Return a field's title.

    "Global Batch" and "global_batch" become "Global batch", "lora_rank" becomes "LoRA rank".
    """
    if not ("_" in name or name.islower() or name.istitle()):
        return name
    text = " ".join(_SPELLED.get(word, word) for word in name.lower().replace("_", " ").split())
    return text[:1].upper() + text[1:]


def _hint(description: str, kind: str) -> str:
    """Return the hint below a box, without a full stop.

    That is the description up to its first semicolon or sentence, or for a choice the whole description.
    """
    return (description if kind == "choice" else re.split(r"; |\. ", description, maxsplit=1)[0]).rstrip(".")


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
