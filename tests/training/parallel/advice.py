"""Apply the advice of a refusal as a person would: in the file, or with other machines."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from typing import Any

from training.planning.layouts import Ranks
from training.units import GIB

SETTING = (
    r'(?:\[run\.\w+\] )?(?:\w+ = (?:"\w+"|\d+|true|false)|no \[run\.\w+\]|no [\w.]+|\d+ such ranks|ranks with \d+ GiB)'
)


def remedies(message: str) -> list[str]:
    """Return each remedy, without and with the bracket that states its result."""
    return re.findall(rf"{SETTING}(?: and {SETTING})* \(\w[^()]*\)", message.partition(" would work: ")[2])


def applied(remedy: str, table: dict[str, Any], ranks: Ranks) -> tuple[dict[str, Any], Ranks]:
    changed = {name: {**value} if isinstance(value, dict) else value for name, value in table.items()}
    for setting in remedy.partition(" (")[0].split(" and "):
        if setting.endswith("such ranks"):
            ranks = replace(ranks, world_size=int(setting.split()[0]))
        elif setting.startswith("ranks with"):
            ranks = replace(ranks, memory_bytes=int(setting.split()[2]) * GIB)
        elif setting.startswith("no [run."):
            changed.pop(setting.removeprefix("no [run.").removesuffix("]"))
        elif setting.startswith("no "):
            *within, name = setting.removeprefix("no ").split(".")
            del (changed[within[0]] if within else changed)[name]
        elif setting.startswith("[run."):
            name, _, line = setting.removeprefix("[run.").partition("] ")
            changed[name] = {**changed.get(name, {}), **tomllib.loads(line)}
        else:
            changed |= tomllib.loads(setting)
    return changed, ranks
