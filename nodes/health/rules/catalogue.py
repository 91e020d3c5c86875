"""Read the rules that ship with Vigil (nodes/health/catalogue/*.toml), and add the site's."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from nodes.health.rules.rule import BadRule, Rule, parse_rules

SHIPPED = Path(__file__).parents[1] / "catalogue"


@cache
def shipped_rules() -> Mapping[str, Rule]:
    """Return the shipped rules by name, in the order of their files. Raises BadRule."""
    return by_name(rule for path in sorted(SHIPPED.glob("*.toml")) for rule in read_shipped_file(path))


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


def active_rules(site: Iterable[Rule] = ()) -> dict[str, Rule]:
    """Return the enabled rules: the site's replace shipped ones of the same name, and may so switch them off."""
    merged = {**shipped_rules(), **by_name(site)}
    return {name: rule for name, rule in merged.items() if rule.is_enabled}
