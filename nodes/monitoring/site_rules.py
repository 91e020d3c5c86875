"""Read the rules in force: the shipped ones, with the site's additions and replacements."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache

from django.conf import settings

from nodes.health.rules.catalogue import active_rules
from nodes.health.rules.rule import BadRule, Rule, parse_rules
from nodes.models import SiteRule

logger = logging.getLogger(__name__)


def rules_in_force() -> Mapping[str, Rule]:
    """Return the enabled rules by name.

    A site's rule that an upgrade made unreadable is logged and left out, and the shipped one of its name applies: one
    rule must not stop the others.
    """
    is_strict = settings.VIGIL_HEALTH_STRICT
    site: list[Rule] = []
    for row in SiteRule.objects.all():
        try:
            site.append(read_site_rule(row.name, row.toml))
        except Exception as error:  # whatever is wrong with one rule, the others go on
            logger.error("the health rule %s cannot be read and is left out: %s", row.name, error)
    return active_rules(site, is_strict=is_strict)


@lru_cache(maxsize=512)
def read_site_rule(name: str, toml: str) -> Rule:
    """Return the rule that a row stores. Raises BadRule, or tomllib.TOMLDecodeError."""
    found = parse_rules(toml, is_site=True)
    if len(found) != 1 or found[0].name != name:
        raise BadRule(f"{name}: the text must have one [[rule]] of this name")
    return found[0]
