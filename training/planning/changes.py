"""Changes to a run's configuration: applied by dotted path, and described as a person would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from training.config import choices
from training.config import shape as shapes
from training.config.run_config import RunConfig

Change = Mapping[str, Any]
"""Dotted path below [run] → value, or None to remove it. A path without a dot may name a whole table."""


def apply_change(config: RunConfig, change: Change) -> RunConfig:
    """Return the changed, validated configuration, without options of modules that are no longer used."""
    data = config.model_dump()
    for path, value in change.items():
        table, _, name = path.rpartition(".")
        target = data.setdefault(table, {}) if table else data
        if value is not None:
            target[name] = value
        else:
            target.pop(name, None)
    if data["parallelism"] != shapes.AUTO:
        used = set(shapes.modules_by_axis(data["parallelism"], data.get("mesh", {})).values())
        data = _without_tables(data, set(choices.names("parallel")) - used)
    return RunConfig.model_validate(_without_tables(data, set(choices.names("comm")) - {data["communication"]}))


def _without_tables(data: Mapping[str, Any], tables: set[str]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in tables}


def without(change: Change, path: str) -> Change:
    return {other: value for other, value in change.items() if other != path}


def change_texts(config: RunConfig, change: Change) -> list[str]:
    """Describe changes: `dtype = "bf16"`, `[run.fsdp] offload = true`, `no mesh.tp`."""
    removed = {path for path, value in change.items() if value is None}
    is_bare = bool(config.mesh) and {f"mesh.{axis}" for axis in config.mesh} <= removed
    texts = []
    for path, value in change.items():
        table, _, name = path.rpartition(".")
        if value is not None:
            texts.append(f"{f'[run.{table}] ' if table else ''}{name} = {json.dumps(value)}")
        elif table == "mesh" and is_bare:
            texts.append("no [run.mesh]")
        else:
            texts.append(f"no [run.{path}]" if path in choices.names("parallel") else f"no {path}")
    if "communication" in change and _has_own_table(config):
        texts.append(f"no [run.{config.communication}]")
    return list(dict.fromkeys(texts))


def _has_own_table(config: RunConfig) -> bool:
    """Return whether the communication's options differ from the defaults, and so must be removed."""
    options = config.options_of(config.communication)
    return options != choices.get("comm", config.communication).with_defaults({})
