"""Render /health/rules: the rules with what they do, the site's own, tried on the past before saving; policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from console.pages import forms
from console.pages.health.page import GLYPHS
from nodes.cluster.drain import MAX_REASON
from nodes.health.rules.rule import SEVERITIES, Rule
from nodes.models import SiteRule
from nodes.monitoring import edit_rules, policies
from nodes.monitoring.dry_run.run import DryRunEntry, RuleDryRun, dry_run_for
from nodes.monitoring.edit_rules import RuleConflict, RuleRefused
from nodes.monitoring.site_rules import ListedRule, listed_rules
from nodes.presenting.observations import observed_text
from portal.access import CLUSTER, can, sysadmin_of, user_of
from vigil_core import duration, formatting
from vigil_core.untrusted import whole

CHANGE = "change health rules"
OUTCOMES = {
    "drained": "Vigil would have drained the node",
    "already_drained": "the node would have been drained already",
    "held_back": "not drained automatically",
}
NEW_RULE = """[[rule]]
name = "hot-in-rack-b"
title = "GPU is close to its slowdown temperature"
advice = "Check fans and inlet air."
source = "our own experience with rack B"
severity = "warning"        # info, warning, critical, fatal
action = "watch"            # ignore, watch, exclude, drain, reset, replace
signal = "gpu_samples"
where = { margin_c = "<= 3" }
for = "5m"
clears = "recovered"
clears_after = "10m"

[[rule.example]]
fires = true
steps = [{ margin_c = 3 }, { at = "5m", margin_c = 2 }]

[[rule.example]]
fires = false
steps = [{ margin_c = 3 }, { at = "2m", margin_c = 9 }]
"""


@dataclass(frozen=True)
class RuleRow:
    """A rule as the list shows it."""

    listed: ListedRule

    @property
    def rule(self) -> Rule | None:
        return self.listed.rule

    @property
    def glyph(self) -> str:
        return GLYPHS[self.rule.severity] if self.rule else "warn"

    @property
    def clears(self) -> str:
        return _clears(self.rule) if self.rule else ""


@dataclass(frozen=True)
class DryRunRow:
    """A finding of a dry run as the page shows it."""

    entry: DryRunEntry

    @property
    def where(self) -> str:
        return f"GPU{formatting.NBSP}{self.entry.gpu}" if self.entry.gpu is not None else self.entry.item

    @property
    def lasted(self) -> str:
        if self.entry.cleared_at is None:
            return "still open"
        return f"for {formatting.duration((self.entry.cleared_at - self.entry.opened_at).total_seconds())}"

    @property
    def outcome(self) -> str:
        text = OUTCOMES.get(self.entry.outcome, "")
        return f"{text}: {self.entry.held_back}" if self.entry.held_back else text

    @property
    def observed(self) -> str:
        shown = {name: value for name, value in self.entry.observed.items() if name not in ("user", "program")}
        if self.entry.signal in ("xid", "sxid"):
            return f"{'Xid' if self.entry.signal == 'xid' else 'SXid'} {shown.get('code', '–')}"
        return observed_text(shown)


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    rows = [RuleRow(listed) for listed in sorted(listed_rules(), key=_urgency)]
    context = {
        "section": "cluster",
        "place": "health",
        "rows": rows,
        "may_change": can(user_of(request), "change", CLUSTER),
        "policies": [(policy, policies.choices(policy.action)) for policy in policies.policies()],
        "most_reason": MAX_REASON,
    }
    return render(request, "nodes/health_rules.html", context)


@login_required
@require_http_methods(["GET", "POST"])
def edit(request: HttpRequest, name: str = "") -> HttpResponse:
    """Show a rule's text; try it on the past, then save it. Everybody may read it."""
    listed = _listed(name) if name else None
    if request.method == "GET":
        return _page(request, listed, listed.toml if listed else NEW_RULE, version=_version(listed))
    user = sysadmin_of(request, CHANGE)
    text, version = request.POST.get("text", ""), whole(request.POST.get("version")) or 0
    try:
        rule = edit_rules.checked(edit_rules.normalised(text))
        if name and rule.name != name:
            raise RuleRefused(f"name: must stay {name}. Add {rule.name} as a rule of its own.")
        if request.POST.get("do") == "save":
            return _save(request, listed, text, version, name)
    except (RuleRefused, RuleConflict) as error:
        return _page(request, listed, text, version=version, problem=str(error))
    found = dry_run_for(user, rule)
    if found is None:
        problem = "Your previous dry run is still running. Wait until it has ended."
        return _page(request, listed, text, version=version, problem=problem)
    return _page(request, listed, text, version=version, found=found, proof=edit_rules.proof_of(user, text))


@login_required
@require_POST
def switch_off(request: HttpRequest, name: str) -> HttpResponse:
    return _changed(request, name, "off")


@login_required
@require_POST
def delete(request: HttpRequest, name: str) -> HttpResponse:
    return _changed(request, name, "delete")


@login_required
@require_POST
def set_policies(request: HttpRequest) -> HttpResponse:
    user = sysadmin_of(request, "change policies")
    wanted: dict[str, str] = {action: request.POST[action] for action in policies.GOVERNED if action in request.POST}
    try:
        policies.set_modes(user, wanted, forms.reason(request))
    except (forms.BadReason, policies.BadPolicy) as error:
        messages.error(request, f"Nothing was changed. {error}")
    return redirect("health_rules")


def _changed(request: HttpRequest, name: str, action: str) -> HttpResponse:
    user, version = sysadmin_of(request, CHANGE), whole(request.POST.get("version")) or 0
    _listed(name)
    change = edit_rules.switch_off if action == "off" else edit_rules.delete
    try:
        change(user, name, version=version, reason=forms.reason(request))
    except SiteRule.DoesNotExist:
        raise Http404(f"There is no rule {name}.") from None
    except (forms.BadReason, RuleRefused, RuleConflict) as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"{name} is off." if action == "off" else f"Deleted the site’s rule {name}.")
    return redirect("health_rules")


def _save(request: HttpRequest, listed: ListedRule | None, text: str, version: int, name: str) -> HttpResponse:
    """Save a rule that was tried. Without a reason it stays tried: the dry run need not be repeated."""
    proof = request.POST.get("proof", "")[:500]
    try:
        reason = forms.reason(request)
    except forms.BadReason as error:
        return _page(request, listed, text, version=version, proof=proof, reason_problem=str(error))
    row = edit_rules.save(user_of(request), text, proof=proof, version=version, reason=reason, name=name)
    messages.success(request, f"Saved the rule {row.name}. It applies within seconds.")
    return redirect("health_rules")


def _page(
    request: HttpRequest, listed: ListedRule | None, text: str, *, version: int, problem: str = "",
    found: RuleDryRun | None = None, proof: str = "", reason_problem: str = "",
) -> HttpResponse:  # fmt: skip
    context: dict[str, Any] = {
        "section": "cluster",
        "place": "health",
        "listed": listed,
        "text": text,
        "version": version,
        "problem": problem,
        "found": found,
        "rows": [DryRunRow(entry) for entry in found.entries] if found else [],
        "headline": headline(found) if found else None,
        "proof": proof,
        "reason": forms.line(request, "reason"),
        "reason_problem": reason_problem,
        "may_change": can(user_of(request), "change", CLUSTER),
        "most": edit_rules.MAX_CHARACTERS,
        "most_reason": MAX_REASON,
    }
    return render(request, "nodes/health_rule.html", context, status=422 if problem or reason_problem else 200)


def headline(found: RuleDryRun) -> tuple[str, str]:
    """Return what the rule would have done, and how much was read."""
    days = round((found.end - found.start).total_seconds() / 86_400)
    if not found.nodes:
        return "Nothing could be tried on the past.", "The rule’s examples were checked."
    read = f"Read {days} days of {found.nodes_read:,} of {found.nodes:,} nodes in {found.seconds:.1f} s."
    if not found.found:
        return "It would have found nothing.", read
    nodes = len({entry.node for entry in found.entries})
    lead = f"It would have opened {formatting.plural(found.found, 'finding')}"
    lead += f" on {formatting.plural(nodes, 'node')}" if found.found == len(found.entries) else ""
    drains = found.outcomes.get("drained", 0)
    if drains:
        lead += f", and Vigil would have drained {formatting.plural(found.nodes_drained, 'node')}"
        lead += f" {drains:,} times" if drains > found.nodes_drained else ""
    held_back = found.outcomes.get("held_back", 0)
    more = f" Limits would have held back {formatting.plural(held_back, 'drain')}." if held_back else ""
    return f"{lead}.", f"{read}{more}"


def _listed(name: str) -> ListedRule:
    found = listed_rules(name)
    if not found:
        raise Http404(f"There is no rule {name}.")
    return found[0]


def _version(listed: ListedRule | None) -> int:
    return listed.row.version if listed and listed.row else 0


def _urgency(listed: ListedRule) -> tuple[int, int, str]:
    """Sort unreadable rules first, then by severity."""
    severity = -SEVERITIES.index(listed.rule.severity) if listed.rule else 0
    return (0 if listed.problem else 1, severity, listed.name)


def _clears(rule: Rule) -> str:
    """Return when a finding of the rule is over: "a passed burn-in", "1h after a reset"."""
    after = f"{duration.write(rule.clearing.after_s)} " if rule.clearing.after_s else ""
    if rule.needs_burn_in or rule.clearing.ending == "burn-in":
        return "a passed burn-in, or a person"
    return {
        "quiet": f"after {after}without another" if after else "without another",
        "recovered": f"when normal for {after.strip()}" if after else "when normal",
        "reset": f"{after}after a reset of the GPU".strip(),
        "boot": f"{after}after a boot".strip(),
    }.get(rule.clearing.ending, "a person")
