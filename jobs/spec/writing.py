"""Write a specification as a person would: values that differ from the defaults, and the most important ones."""

from __future__ import annotations

from typing import Any

import tomlkit

from jobs.spec.code import ClientCode, Script
from jobs.spec.model import JobSpec
from training.config.base import BaseRunConfig
from training.config.choices import CHOICE_FIELDS
from training.config.run_config import RunConfig


def write_toml(spec: JobSpec, *, defaults: bool = False) -> str:
    """Return the spec as text. Without `defaults`, only values that differ from them and the most important ones."""
    always = {"name", "kind", "project", "resources.nodes", "resources.gpus_per_node", "resources.time_limit"}
    always |= {"resources.ranks_per_node"} if not spec.resources.gpus_per_node else set()
    always |= {"restart.max_restarts", "run.recipe", "run.steps", *spec.entries}
    always |= {"run.rounds", "run.clients", "run.algorithm", "run.split"}
    plain = spec.model_dump(mode="json", exclude_none=True)
    base = {} if defaults else _defaults(spec)
    document = tomlkit.document()
    _write(document, plain, base, always, "")
    return tomlkit.dumps(document)


def _defaults(spec: JobSpec) -> dict[str, Any]:
    """Return the defaults of everything that has one, in the shape of a dumped spec."""
    base = JobSpec.model_construct(name="").model_dump(mode="json", exclude_none=True)
    model: type[BaseRunConfig] = type(spec.run) if spec.run is not None else RunConfig
    run = model.model_validate(_deciding(spec)).model_dump(mode="json", exclude_none=True)
    base["run"] = run | {
        field: model.model_fields[field].get_default(call_default_factory=True) for field in CHOICE_FIELDS[model.KIND]
    }
    for code in (Script, ClientCode):
        base[code.TABLE] = code.model_construct().model_dump(mode="json", exclude_none=True)
    return base


def _deciding(spec: JobSpec) -> dict[str, Any]:
    """Return what a run's defaults depend on: its choices, and its steps, for the warm-up."""
    if spec.run is None:
        return {}
    length = ("steps",) if isinstance(spec.run, RunConfig) else ()
    return {field: getattr(spec.run, field) for field in (*CHOICE_FIELDS[spec.run.KIND], *length)}


def _write(
    into: tomlkit.TOMLDocument | tomlkit.items.Table, values: dict[str, Any], base: Any, always: set[str], at: str
) -> None:
    """Write plain values first, then tables: in TOML nothing follows a table but another one."""
    base = base if isinstance(base, dict) else {}
    for key, value in sorted(values.items(), key=lambda item: isinstance(item[1], dict)):
        path = f"{at}.{key}" if at else key
        if isinstance(value, dict):
            table = tomlkit.table()
            _write(table, value, base.get(key), always, path)
            if len(table):
                into.add(key, table)
        elif path in always or key not in base or base[key] != value:
            into.add(key, _multiline(value))


def _multiline(value: Any) -> Any:
    if isinstance(value, str) and "\n" in value:
        return tomlkit.string(value, multiline=True)
    return value
