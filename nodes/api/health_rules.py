"""REST: health rules, which are tried on the past before they are saved, and the policies of their actions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Literal

from ninja import Query, Router, Schema, Status
from pydantic import Field

from nodes.api.nodes import Reason
from nodes.models import SiteRule
from nodes.monitoring import edit_rules, policies
from nodes.monitoring.dry_run.run import DAYS, RuleDryRun, dry_run_for
from nodes.monitoring.edit_rules import RuleConflict, RuleRefused
from nodes.monitoring.site_rules import ListedRule, listed_rules
from portal.http.api import ApiRequest, bad_field
from portal.http.openapi import described
from portal.http.problems import Problem
from portal.sysadmins import FORBIDDEN, only_sysadmins
from vigil_core import duration

router = Router(tags=["health"])
policy_router = Router(tags=["health"])
NO_RULE = {404: "No such rule."}
CHANGED = {409: "Somebody else changed the rule, or it exists already."}
Version = Annotated[int, Field(ge=0, lt=2**31, description="Version of the site's rule; 0: there is none.")]


class RuleShape(Schema):
    """A health rule, shipped or the site's."""

    name: str
    title: str
    severity: str
    action: str
    signals: list[str]
    clears: str
    needs_burn_in: bool
    advice: str
    source: str
    is_site: bool
    is_enabled: bool = Field(description="Whether it applies.")
    problem: str = Field(description="Why the site's rule cannot be read: then the shipped one applies.")
    version: int = Field(description="Of the site's rule; 0: it is a shipped one.")
    changed_by: str | None
    changed_at: datetime | None


class RuleWithText(RuleShape):
    toml: str


class Rules(Schema):
    items: list[RuleShape]
    next: str | None = None


class RuleText(Schema):
    """A rule's text, as docs/reference/health-rules.md describes it."""

    model_config = {"extra": "forbid"}
    toml: str = Field(max_length=edit_rules.MAX_CHARACTERS, pattern=r"^[^\x00]*$")


class DryRunRequest(RuleText):
    days: int = Field(DAYS, ge=1, le=DAYS)


class NewRule(RuleText):
    dry_run: str = Field(max_length=500, description="`proof` of the dry run of this text, at most an hour old.")
    reason: Reason = Field(description="Why; it goes to the audit log.")


class ChangedRule(Schema):
    model_config = {"extra": "forbid"}
    toml: str | None = Field(None, max_length=edit_rules.MAX_CHARACTERS, pattern=r"^[^\x00]*$")
    dry_run: str = Field("", max_length=500, description="`proof` of the dry run of this text.")
    is_enabled: bool = Field(True, description="False: the rule is switched off; needs neither text nor dry run.")
    version: Version
    reason: Reason


class RemovalQuery(Schema):
    version: Version
    reason: Reason


class DryRunEntryShape(Schema):
    """A finding that the rule would have opened."""

    node: str
    gpu: int | None
    gpu_uuid: str
    item: str
    opened_at: datetime
    cleared_at: datetime | None = Field(description="Null: it would still be open.")
    severity: str
    action: str
    count: int
    signal: str
    observed: dict[str, bool | int | float | str]
    outcome: Literal["none", "drained", "already_drained", "held_back"] = Field(
        description="What Vigil would have done with VIGIL_HEALTH=act, if nothing else had been out of service."
    )
    held_back: str = Field(description="Which limit would have stopped it.")
    jobs: list[str] = Field(description="The scheduler's ids of the jobs that ran there.")


class DryRunShape(Schema):
    """What a rule would have found."""

    rule: str
    start: datetime
    end: datetime
    nodes: int = Field(description="Nodes with an agent; 0: nothing of the rule could be tried.")
    nodes_read: int
    found: int = Field(description="Findings, of which the first 200 are listed.")
    entries: list[DryRunEntryShape]
    outcomes: dict[str, int]
    nodes_drained: int
    tripped_at: datetime | None = Field(description="When the breaker would have tripped.")
    recorded: int = Field(description="Findings that the current rule of this name opened in that time.")
    untried: list[str] = Field(description="What no history is stored for.")
    cut: str = Field(description="Why it ended early; empty: it did not.")
    seconds: float
    proof: str = Field(description="`dry_run` of the request that saves this text.")


class PolicyShape(Schema):
    """How far Vigil goes with an action."""

    action: str
    mode: Literal["act", "propose", "ignore"]
    effective: Literal["act", "propose", "ignore"] = Field(description="What holds under VIGIL_HEALTH.")
    changed_by: str | None
    changed_at: datetime | None


class Policies(Schema):
    items: list[PolicyShape]
    next: str | None = None


class PolicyRequest(Schema):
    model_config = {"extra": "forbid"}
    modes: dict[Annotated[str, Field(max_length=16)], Literal["act", "propose", "ignore"]] = Field(
        description='By action: {"drain": "propose"}. Others stay as they are.', min_length=1, max_length=5
    )
    reason: Reason


@router.get("", response=Rules, summary="The health rules")
def rules(request: ApiRequest) -> dict[str, Any]:
    """List the shipped rules and the site's, also those that are switched off."""
    return {"items": [rule_shape(listed) for listed in listed_rules()]}


@router.post(
    "/try",
    response=DryRunShape,
    summary="Try a rule on the past (sysadmins)",
    openapi_extra=described(errors=FORBIDDEN | {429: "Your previous dry run is still running."}),
)
def try_rule(request: ApiRequest, body: DryRunRequest) -> dict[str, Any]:
    """Apply a rule to what is stored of the last days. Nothing is changed. It takes up to half a minute."""
    only_sysadmins(request, "try health rules")
    with _refusals():
        rule = edit_rules.checked(edit_rules.normalised(body.toml))
    found = dry_run_for(request.auth, rule, days=body.days)
    if found is None:
        raise Problem(429, "Your previous dry run is still running. Wait until it has ended.")
    return dry_run_shape(found) | {"proof": edit_rules.proof_of(request.auth, body.toml)}


@router.post(
    "",
    response={201: RuleWithText},
    summary="Add a rule of the site (sysadmins)",
    openapi_extra=described(errors=FORBIDDEN | CHANGED),
)
def add_rule(request: ApiRequest, body: NewRule) -> Status[dict[str, Any]]:
    """Add a rule. One with the name of a shipped rule replaces that."""
    only_sysadmins(request, "change health rules")
    with _refusals():
        row = edit_rules.save(request.auth, body.toml, proof=body.dry_run, version=0, reason=body.reason)
    return Status(201, _rule(row.name))


@router.get("/{name}", response=RuleWithText, summary="One rule", openapi_extra=described(errors=NO_RULE))
def rule(request: ApiRequest, name: str) -> dict[str, Any]:
    """Return a rule with its text."""
    return _rule(name)


@router.put(
    "/{name}",
    response=RuleWithText,
    summary="Change a rule of the site, or switch a rule off (sysadmins)",
    openapi_extra=described(errors=FORBIDDEN | NO_RULE | CHANGED),
)
def change_rule(request: ApiRequest, name: str, body: ChangedRule) -> dict[str, Any]:
    """Replace the text of the site's rule, or switch a rule off. Open findings of a rule that is off end."""
    only_sysadmins(request, "change health rules")
    listed = _listed(name)
    with _refusals():
        if not body.is_enabled:
            edit_rules.switch_off(request.auth, name, version=body.version, reason=body.reason)
        else:
            edit_rules.save(
                request.auth, listed.toml if body.toml is None else body.toml, proof=body.dry_run,
                version=body.version, reason=body.reason, name=name,
            )  # fmt: skip
    return _rule(name)


@router.delete(
    "/{name}",
    response={204: None},
    summary="Delete a rule of the site (sysadmins)",
    openapi_extra=described(errors=FORBIDDEN | NO_RULE | CHANGED),
)
def delete_rule(request: ApiRequest, name: str, query: Query[RemovalQuery]) -> Status[None]:
    """Delete the site's rule: the shipped one of its name applies again."""
    only_sysadmins(request, "change health rules")
    _listed(name)
    with _refusals():
        edit_rules.delete(request.auth, name, version=query.version, reason=query.reason)
    return Status(204, None)


@policy_router.get("", response=Policies, summary="How far Vigil goes with each action of health rules")
def read_policies(request: ApiRequest) -> dict[str, Any]:
    """List for each action whether Vigil acts, proposes or ignores, and what VIGIL_HEALTH leaves of that."""
    return {"items": [asdict(policy) for policy in policies.policies()]}


@policy_router.put(
    "",
    response=Policies,
    summary="Change how far Vigil goes with actions (sysadmins)",
    openapi_extra=described(errors=FORBIDDEN),
)
def change_policies(request: ApiRequest, body: PolicyRequest) -> dict[str, Any]:
    """Set the policies of some actions. They apply to findings that open from now on."""
    only_sysadmins(request, "change policies")
    try:
        policies.set_modes(request.auth, body.modes, body.reason)
    except policies.BadPolicy as error:
        raise bad_field("modes", str(error)) from None
    return {"items": [asdict(policy) for policy in policies.policies()]}


@contextmanager
def _refusals() -> Iterator[None]:
    """Answer what cannot be saved with the field and the reason."""
    try:
        yield
    except RuleRefused as error:
        raise bad_field("toml", str(error)) from None
    except RuleConflict as error:
        raise Problem(409, str(error)) from None
    except SiteRule.DoesNotExist as error:
        raise Problem(404, f"The site has no rule {error}.") from None


def _listed(name: str) -> ListedRule:
    found = listed_rules(name)
    if not found:
        raise Problem(404, f"There is no rule {name:.80}. GET /api/v1/health/rules lists them.")
    return found[0]


def _rule(name: str) -> dict[str, Any]:
    listed = _listed(name)
    return rule_shape(listed) | {"toml": listed.toml}


def rule_shape(listed: ListedRule) -> dict[str, Any]:
    rule, row = listed.rule, listed.row
    after = f" after {duration.write(rule.clearing.after_s)}" if rule and rule.clearing.after_s else ""
    return {
        "name": listed.name, "title": rule.title if rule else listed.name, "severity": rule.severity if rule else "",
        "action": rule.action if rule else "", "signals": sorted(rule.signals) if rule else [],
        "clears": f"{rule.clearing.ending}{after}" if rule else "",
        "needs_burn_in": rule.needs_burn_in if rule else False, "advice": rule.advice if rule else "",
        "source": rule.source if rule else "", "is_site": row is not None, "is_enabled": listed.is_enabled,
        "problem": listed.problem, "version": row.version if row else 0,
        "changed_by": row.changed_by.username if row and row.changed_by else None,
        "changed_at": row.changed_at if row else None,
    }  # fmt: skip


def dry_run_shape(found: RuleDryRun) -> dict[str, Any]:
    return {
        name: getattr(found, name)
        for name in (
            "rule", "start", "end", "nodes", "nodes_read", "found", "outcomes", "nodes_drained", "tripped_at",
            "recorded", "untried", "cut", "seconds",
        )
    } | {"entries": [asdict(entry) for entry in found.entries]}  # fmt: skip
