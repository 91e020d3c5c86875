"""What of a run's configuration is changed: by dotted path, as applied and in the words that a person writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from training.config import choices
from training.config import shape as shapes
from training.config.run_config import RunConfig

Change = Mapping[str, Any]
"""Dotted path below [run] → its value, or None to leave it out. A path without a dot may be a whole table's."""


def changed(config: RunConfig, change: Change) -> RunConfig:
    """Validated, and without the options of parallelisms and communications that are out of use with it."""
    data = config.model_dump()
    for path, value in change.items():
        table, _, name = path.rpartition(".")
        place = data.setdefault(table, {}) if table else data
        if value is not None:
            place[name] = value
        else:
            place.pop(name, None)
    if data["parallelism"] != shapes.AUTO:
        used = set(shapes.owners(data["parallelism"], data.get("mesh", {})).values())
        data = _less(data, set(choices.names("parallel")) - used)
    return RunConfig.model_validate(_less(data, set(choices.names("comm")) - {data["communication"]}))


def _less(data: Mapping[str, Any], tables: set[str]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in tables}


def without(change: Change, path: str) -> Change:
    return {other: value for other, value in change.items() if other != path}


def words(config: RunConfig, change: Change) -> list[str]:
    """`dtype = "bf16"`, `[run.fsdp] offload = true`, `no mesh.tp`."""
    left_out = {path for path, value in change.items() if value is None}
    is_bare = bool(config.mesh) and {f"mesh.{axis}" for axis in config.mesh} <= left_out
    listed = []
    for path, value in change.items():
        table, _, name = path.rpartition(".")
        if value is not None:
            listed.append(f"{f'[run.{table}] ' if table else ''}{name} = {json.dumps(value)}")
        elif table == "mesh" and is_bare:
            listed.append("no [run.mesh]")
        else:
            listed.append(f"no [run.{path}]" if path in choices.names("parallel") else f"no {path}")
    if "communication" in change and _has_own_table(config):
        listed.append(f"no [run.{config.communication}]")
    return list(dict.fromkeys(listed))


def _has_own_table(config: RunConfig) -> bool:
    """Whether somebody has written one: of defaults nobody can tell, and they need not be taken out."""
    own = config.options_of(config.communication)
    return own != choices.get("comm", config.communication).with_defaults({})
