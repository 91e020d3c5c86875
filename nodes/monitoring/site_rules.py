"""Read the rules in force: the shipped ones, with the site's additions and replacements."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from nodes.health.rules.catalogue import active_rules
from nodes.health.rules.rule import BadRule, Rule, parse_rules
from nodes.models import SiteRule

logger = logging.getLogger(__name__)


def rules_in_force() -> Mapping[str, Rule]:
    """Return the enabled rules by name.

    A site's rule that an upgrade made unreadable is logged and left out: it must not stop the others.
    """
    site: list[Rule] = []
    for row in SiteRule.objects.all():
        try:
            site += parse_rules(row.toml, is_site=True)
        except ValueError as error:  # BadRule, or no TOML
            logger.error("the health rule %s cannot be read and is left out: %s", row.name, error)
    try:
        return active_rules(site)
    except BadRule:  # two rows define one name
        return active_rules({rule.name: rule for rule in site}.values())
