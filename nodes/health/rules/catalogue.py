"""Read the rules that ship with Vigil (nodes/health/catalogue/*.toml), and add the site's."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from nodes.health.rules.rule import BadRule, Rule, parse_rules

SHIPPED = Path(__file__).parents[1] / "catalogue"
STRICT = SHIPPED / "strict"
"""Rules of VIGIL_HEALTH_STRICT=yes, which replace those of the same name."""


@cache
def shipped_rules(is_strict: bool = False) -> Mapping[str, Rule]:
    """Return the shipped rules by name, in the order of their files. Raises BadRule."""
    found = by_name(rule for path in sorted(SHIPPED.glob("*.toml")) for rule in read_shipped_file(path))
    return {**found, **_strict_rules()} if is_strict else found


def shipped_text(name: str, is_strict: bool = False) -> str:
    """Return the TOML of a shipped rule, with what its file says of all rules; "" if there is none."""
    for path in [*(sorted(STRICT.glob("*.toml")) if is_strict else ()), *sorted(SHIPPED.glob("*.toml"))]:
        shared, *tables = path.read_text(encoding="utf-8").split(_HEADER)
        for table in tables:
            keys: dict[str, object] = tomllib.loads(_HEADER + table)["rule"][0]
            if keys["name"] == name:
                more = [line for line in shared.splitlines() if _is_setting(line) and line.split(" = ")[0] not in keys]
                return "\n".join([_HEADER.strip(), *more, table.strip(), ""])
    return ""


_HEADER = "[[rule]]\n"


def _is_setting(line: str) -> bool:
    return " = " in line and not line.startswith("#")


def _strict_rules() -> dict[str, Rule]:
    return by_name(rule for path in sorted(STRICT.glob("*.toml")) for rule in read_shipped_file(path))


def read_shipped_file(path: Path) -> list[Rule]:
    """Return the rules of one of the catalogue's files. Raises BadRule."""
    try:
        return parse_rules(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise BadRule(f"{path.name}: {error}") from None


def by_name(rules: Iterable[Rule]) -> dict[str, Rule]:
    """Return the rules by name. Raises BadRule if two have the same."""
    found: dict[str, Rule] = {}
    for rule in rules:
        if rule.name in found:
            raise BadRule(f"{rule.name}: two rules have this name")
        found[rule.name] = rule
    return found


def active_rules(site: Iterable[Rule] = (), *, is_strict: bool = False) -> dict[str, Rule]:
    """Return the enabled rules: the site's replace shipped ones of the same name, and may so switch them off."""
    merged = {**shipped_rules(is_strict), **by_name(site)}
    return {name: rule for name, rule in merged.items() if rule.is_enabled}
