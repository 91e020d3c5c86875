"""Turn pydantic's errors into Vigil's: the field by its dotted path, what is wrong, and the fix."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from jobs.errors import Problem

_KINDS = {
    "int_type": ("a whole number", "16"),
    "int_parsing": ("a whole number", "16"),
    "int_from_float": ("a whole number", "16"),
    "float_type": ("a number", "0.5"),
    "float_parsing": ("a number", "0.5"),
    "bool_type": ("true or false", "true"),
    "bool_parsing": ("true or false", "true"),
    "string_type": ("a text", '"…"'),
    "list_type": ("a list", '["…"]'),
    "dict_type": ("a table", "{ … }"),
    "model_type": ("a table", "{ … }"),
    "model_attributes_type": ("a table", "{ … }"),
    "finite_number": ("a finite number", "0.5"),
}


def problems_of(error: ValidationError, model: type[BaseModel], data: dict[str, Any]) -> list[Problem]:
    """Return one problem per field, in the order of the spec, at most 50."""
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False)[:200]:
        path = _path(detail["loc"])
        found.setdefault(path, Problem(path, _message(dict(detail), model, path, data)))
    return list(found.values())[:50]


def _path(loc: tuple[int | str, ...]) -> str:
    """Return the dotted path as a person writes it, without the names of union members that pydantic adds."""
    parts: list[str] = []
    for part in loc:
        if isinstance(part, str) and part in {"int", "str", "float", "bool"} and parts:
            continue
        if isinstance(part, str) and (part.startswith("function-") or (part == "options" and parts == ["run"])):
            continue
        parts.append(f"[{part}]" if isinstance(part, int) else part)
    return ".".join(parts).replace(".[", "[")


def _model_of(model: type[BaseModel], field: str, kind: object) -> type[BaseModel] | None:
    """Return the model of a field, also if it may be None; of several the one of this kind of job."""
    if field not in model.model_fields:
        return None
    annotation = model.model_fields[field].annotation
    choices = get_args(annotation) if get_origin(annotation) in {Union, types.UnionType} else (annotation,)
    models = [c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)]
    return next((c for c in models if getattr(c, "KIND", kind) == kind), models[0] if models else None)


def has_field(model: type[BaseModel], path: str, kind: object) -> bool:
    """Return whether the model has such a field for this kind of job; anything in a free table counts as one."""
    inside: type[BaseModel] | None = model
    for part in path.split("."):
        if inside is None:
            return True
        if part not in inside.model_fields:
            return False
        inside = _model_of(inside, part, kind)
    return True


def _message(detail: dict[str, Any], model: type[BaseModel], path: str, data: dict[str, Any]) -> str:
    kind, context, value = detail["type"], detail.get("ctx") or {}, _shown(_at(data, path))
    key = path.rpartition(".")[2]
    if kind == "missing":
        return f"Missing. Write {key} = …"
    if kind == "extra_forbidden":
        return _unknown_field(model, path, data.get("kind"))
    if kind in _KINDS:
        wanted, example = _KINDS[kind]
        if path.startswith("run.mesh."):
            example = "2"  # ranks along an axis
        return f"{value} is not {wanted}. Write it like {key.split('[')[0]} = {example}."
    if kind in {"literal_error", "enum"}:
        given, allowed = _at(data, path), re.findall(r"'([^']*)'", context["expected"])
        if isinstance(given, str) and (close := difflib.get_close_matches(given[:80], allowed, n=1, cutoff=0.6)):
            return f'{value} is not a valid value. Did you mean "{close[0]}"?'
        return f"{value} is not a valid value. Choose one of {context['expected']}."
    if kind in {"greater_than_equal", "greater_than"}:
        limit = f"at least {_amount(context['ge'])}" if "ge" in context else f"more than {_amount(context['gt'])}"
        return f"{value} is too small: {limit}."
    if kind in {"less_than_equal", "less_than"}:
        limit = f"at most {_amount(context['le'])}" if "le" in context else f"less than {_amount(context['lt'])}"
        return f"{value} is too large: {limit}."
    if kind in {"string_too_long", "too_long"}:
        return f"Too long: at most {context['max_length']:,}."
    if kind in {"string_too_short", "too_short"}:
        return f"Too short: at least {context['min_length']:,}."
    if kind in {"value_error", "assertion_error"}:
        return str(context.get("error", detail["msg"])).removeprefix("Value error, ")
    message: str = detail["msg"]
    return message.removeprefix("Value error, ")


def _unknown_field(model: type[BaseModel], path: str, kind: object) -> str:
    """Describe an unknown key, with the key that was probably meant: in the same table, else in another one."""
    *tables, key = path.split(".")
    inside: type[BaseModel] | None = model
    for table in tables:
        inside = _model_of(inside, table, kind) if inside is not None else None
    names = list(inside.model_fields) if inside is not None else []
    unknown = f'Unknown field "{key[:80]}"' + (f" in [{'.'.join(tables)}]." if tables else ".")
    for other, other_names in _tables(model, kind):
        if key in other_names and other != ".".join(tables):
            return f"{unknown} It belongs under [{other}]."
    if close := difflib.get_close_matches(key, names, n=1, cutoff=0.6):
        return f'{unknown} Did you mean "{close[0]}"?'
    fields = ", ".join(names)
    return f"{unknown} Known fields: {fields}." if fields else unknown


def _tables(model: type[BaseModel], kind: object) -> Iterator[tuple[str, list[str]]]:
    """Yield the tables with their fields, those of this kind of job first."""
    found = [(name, inner) for name in model.model_fields if (inner := _model_of(model, name, kind)) is not None]
    for name, inner in sorted(found, key=lambda table: getattr(table[1], "KIND", kind) != kind):
        yield name, list(inner.model_fields)


def _at(data: Any, path: str) -> Any:
    """Return the value that the person gave at a path, for quoting; None if there is none."""
    for part in path.replace("[", ".[").split("."):
        if part.startswith("[") and isinstance(data, list):
            index = int(part[1:-1])
            data = data[index] if index < len(data) else None
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def _amount(limit: float) -> str:
    return f"{int(limit):,}" if float(limit).is_integer() else f"{limit:g}"


def _shown(value: Any) -> str:
    if value is None:
        return "This"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value[:80]}"'
    if isinstance(value, dict):
        return "A table"
    return str(value)[:80]
