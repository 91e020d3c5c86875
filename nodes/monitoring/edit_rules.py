"""Add, change, switch off and delete the site's health rules.

A rule is saved only after a dry run of that very text by the same person, for which `proof_of` signs: nobody learns
afterwards that a rule drains half the cluster. A change names the version that its author has seen; if somebody else
changed the rule meanwhile, it is refused.
"""

from __future__ import annotations

import hashlib
import tomllib
from datetime import timedelta

from django.conf import settings
from django.core import signing
from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone

from nodes.health.examples import broken_examples
from nodes.health.requesters import is_health_rule
from nodes.health.rules.catalogue import shipped_text
from nodes.health.rules.rule import BadRule, Rule, parse_rules
from nodes.models import SiteRule
from portal.access import note
from portal.audit import Change
from portal.models import User

MAX_CHARACTERS = 20_000
MAX_RULES = 200
PROOF_LASTS = timedelta(hours=1)
_ADDRESSES = frozenset({"new", "try", "policies"})
_SALT = "nodes.health.dry_run"


class RuleRefused(ValueError):
    """Raised for a rule that cannot be saved; the message tells its author why."""


class RuleConflict(Exception):
    """Raised if the rule exists already, is gone, or was changed by somebody else; the message says which."""


def normalised(text: str) -> str:
    """Return the text as it is stored: browsers send other line ends than files have."""
    return "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n")).strip() + "\n"


def checked(text: str) -> Rule:
    """Return the rule that a text writes, with its examples checked. Raises RuleRefused."""
    if len(text) > MAX_CHARACTERS:
        raise RuleRefused(f"The text has {len(text):,} characters. A rule may have {MAX_CHARACTERS:,}.")
    try:
        found = parse_rules(text, is_site=True)
    except tomllib.TOMLDecodeError as error:
        raise RuleRefused(f"This is not TOML: {error}.") from None
    except BadRule as error:
        raise RuleRefused(f"{error}.") from None
    if len(found) != 1:
        raise RuleRefused(f"The text has {len(found)} rules. Write one table [[rule]].")
    (rule,) = found
    if rule.name in _ADDRESSES:
        raise RuleRefused(f"name: {rule.name} is an address of these pages. Choose another name.")
    if not is_health_rule(rule.name):
        raise RuleRefused(f"name: Vigil itself drains nodes under the name {rule.name}. Choose another name.")
    if {example.fires for example in rule.examples} != {True, False}:
        raise RuleRefused(f"{rule.name} needs two examples: one that must fire (fires = true) and one that must not.")
    if broken := broken_examples(rule):
        raise RuleRefused(" ".join(broken))
    return rule


def proof_of(user: User, text: str) -> str:
    """Return the proof that this person saw a dry run of this text; it is valid for an hour."""
    return signing.dumps([user.pk, _digest(text)], salt=_SALT)


def save(user: User, text: str, *, proof: str, version: int, reason: str, name: str = "") -> SiteRule:
    """Store a rule. `version` is that of the stored rule which this one replaces, 0: there is none.

    `name` is the rule's name if the caller knows it: a rule cannot be renamed. Raises RuleRefused and RuleConflict.
    """
    text = normalised(text)
    rule = checked(text)
    if name and rule.name != name:
        raise RuleRefused(f"The rule is called {name}: a name cannot be changed. Add {rule.name} as a rule of its own.")
    _require_proof(user, text, proof)
    return _store(user, rule.name, version, reason, toml=text, is_enabled=True)


def switch_off(user: User, name: str, *, version: int, reason: str) -> SiteRule:
    """Let neither the site's rule nor the shipped one of this name apply."""
    stored = SiteRule.objects.filter(name=name).first()
    text = stored.toml if stored else shipped_text(name, settings.VIGIL_HEALTH_STRICT)
    if not text:
        raise SiteRule.DoesNotExist(name)
    return _store(user, name, version, reason, toml=text, is_enabled=False)


def delete(user: User, name: str, *, version: int, reason: str) -> None:
    """Delete the site's rule: the shipped one of its name applies again."""
    with transaction.atomic():
        row = SiteRule.objects.filter(name=name).first()
        if row is None:
            raise SiteRule.DoesNotExist(name)
        if not SiteRule.objects.filter(pk=row.pk, version=version).delete()[0]:
            raise _changed(name)
        note(user, "health_rule.deleted", name, reason, Change(before={"toml": row.toml}))


def _store(user: User, name: str, version: int, reason: str, *, toml: str, is_enabled: bool) -> SiteRule:
    after = {"toml": toml, "is_enabled": is_enabled}
    with transaction.atomic():
        if version == 0:
            row = _create(user, name, after)
            note(user, "health_rule.added" if is_enabled else "health_rule.disabled", name, reason, Change(after=after))
            return row
        old = SiteRule.objects.filter(name=name).first()
        changed = SiteRule.objects.filter(name=name, version=version).update(
            **after, version=F("version") + 1, changed_by=user, changed_at=timezone.now()
        )
        if old is None or not changed:
            raise _changed(name)
        before = {"toml": old.toml, "is_enabled": old.is_enabled}
        action = "health_rule.changed" if is_enabled else "health_rule.disabled"
        note(user, action, name, reason, Change(before=before, after=after))
        return SiteRule.objects.get(name=name)


def _create(user: User, name: str, values: dict[str, object]) -> SiteRule:
    if SiteRule.objects.count() >= MAX_RULES:
        raise RuleRefused(f"The site already has {MAX_RULES} rules. Delete one first.")
    try:
        with transaction.atomic():
            return SiteRule.objects.create(name=name, changed_by=user, **values)
    except IntegrityError:
        raise RuleConflict(f"The site has a rule {name} already. Open it to change it.") from None


def _changed(name: str) -> RuleConflict:
    row = SiteRule.objects.filter(name=name).select_related("changed_by").first()
    if row is None:
        return RuleConflict(f"The site has no rule {name}: somebody has deleted it.")
    by = f" by {row.changed_by.username}" if row.changed_by else ""
    return RuleConflict(f"{name} was changed{by} since you opened it (version {row.version}). Open it again.")


def _require_proof(user: User, text: str, proof: str) -> None:
    try:
        shown = signing.loads(proof, salt=_SALT, max_age=PROOF_LASTS)
    except signing.SignatureExpired:
        raise RuleRefused("The dry run is more than an hour old. Run it again before you save.") from None
    except signing.BadSignature:
        shown = None
    if shown != [user.pk, _digest(text)]:
        raise RuleRefused("This text has not been tried yet. Do a dry run of it before you save it.")


def _digest(text: str) -> str:
    return hashlib.sha256(normalised(text).encode()).hexdigest()
