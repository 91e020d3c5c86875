"""Read the rules in force: the shipped ones, with the site's additions and replacements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from django.conf import settings

from nodes.health.rules.catalogue import active_rules, shipped_rules, shipped_text
from nodes.health.rules.rule import BadRule, Rule, parse_rules
from nodes.models import SiteRule
from nodes.telemetry import warn


def rules_in_force() -> Mapping[str, Rule]:
    """Return the enabled rules by name.

    A site's rule that an upgrade made unreadable is logged and left out, and the shipped one of its name applies: one
    rule must not stop the others.
    """
    site: list[Rule] = []
    off: set[str] = set()
    for row in SiteRule.objects.all():
        if not row.is_enabled:
            off.add(row.name)
            continue
        try:
            site.append(read_site_rule(row.name, row.toml))
        except BadRule as error:
            warn.once((row.name, row.toml), "the health rule %s cannot be read and is left out: %s", row.name, error)
    found = active_rules(site, is_strict=settings.VIGIL_HEALTH_STRICT)
    return {name: rule for name, rule in found.items() if name not in off}


def unreadable_rules() -> frozenset[str]:
    """Return the names of the site's rules that cannot be read and replace no shipped one."""
    shipped = shipped_rules(settings.VIGIL_HEALTH_STRICT)
    rows = [_listed(row, shipped) for row in SiteRule.objects.filter(is_enabled=True)]
    return frozenset(listed.name for listed in rows if listed.problem and not listed.is_shipped)


@dataclass(frozen=True)
class ListedRule:
    """A rule by name, shipped or the site's. `problem` says why the site's text cannot be read; then `rule` is None."""

    name: str
    rule: Rule | None
    row: SiteRule | None = None
    problem: str = ""
    is_shipped: bool = False

    @property
    def is_enabled(self) -> bool:
        return self.rule is not None and self.rule.is_enabled and (self.row is None or self.row.is_enabled)

    @property
    def toml(self) -> str:
        return self.row.toml if self.row else shipped_text(self.name, settings.VIGIL_HEALTH_STRICT)


def listed_rules(name: str | None = None) -> list[ListedRule]:
    """Return all rules, also those that are off or cannot be read; only that of this name if it is given."""
    if name is not None and "\0" in name:  # PostgreSQL refuses to compare it
        return []
    shipped = shipped_rules(settings.VIGIL_HEALTH_STRICT)
    rows = SiteRule.objects.select_related("changed_by")
    found = {row.name: _listed(row, shipped) for row in (rows if name is None else rows.filter(name=name))}
    for rule in shipped.values():
        if rule.name not in found and name in (None, rule.name):
            found[rule.name] = ListedRule(rule.name, rule, is_shipped=True)
    return list(found.values())


def _listed(row: SiteRule, shipped: Mapping[str, Rule]) -> ListedRule:
    try:
        return ListedRule(row.name, read_site_rule(row.name, row.toml), row, is_shipped=row.name in shipped)
    except BadRule as error:
        return ListedRule(row.name, None, row, str(error), row.name in shipped)


def read_site_rule(name: str, toml: str) -> Rule:
    """Return the rule that a row stores. Raises BadRule for whatever is wrong with it."""
    found = _rule_or_problem(name, toml)
    if isinstance(found, str):
        raise BadRule(found)
    return found


@lru_cache(maxsize=512)
def _rule_or_problem(name: str, toml: str) -> Rule | str:
    """Return the rule, or why it cannot be read: each evaluation needs all of them."""
    try:
        found = parse_rules(toml, is_site=True)
    except Exception as error:  # an upgrade may have changed anything
        return str(error) or repr(error)
    if len(found) != 1 or found[0].name != name:
        return f"{name}: the text must have one [[rule]] of this name"
    return found[0]
