"""Read the form of the pages that order something for many nodes, and tell the person what was ordered."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from django.contrib import messages
from django.http import HttpRequest

from console.pages import forms
from nodes.cluster import drain as orders
from nodes.drains import bulk
from nodes.drains.bulk import BulkOutcome
from vigil_core import formatting, host_expression
from vigil_core.host_expression import BadHostExpression
from vigil_core.untrusted import plain


class BulkPreview(Protocol):
    """What an order for many nodes would do."""

    @property
    def reasons(self) -> dict[str, str]: ...


MAX_PROBLEMS = 3
REQUESTED = {"drain": "Requested the drain of", "undrain": "Requested the return of"}
Preview = TypeVar("Preview", bound=BulkPreview)


@dataclass(frozen=True)
class BulkForm(Generic[Preview]):
    """A form as it was sent. `found` is what the order would do; None without nodes, or if `mistake` says why not."""

    expression: str
    reason: str
    mistake: str = ""
    found: Preview | None = None

    @classmethod
    def read(cls, request: HttpRequest, preview: Callable[[str], Preview]) -> BulkForm[Preview]:
        sent = request.POST if request.method == "POST" else request.GET
        expression = plain(sent.get("nodes", "")).strip()[: host_expression.MAX_CHARACTERS + 1]
        reason = forms.line(request, "reason")
        try:
            return cls(expression, reason, found=preview(expression) if expression else None)
        except (BadHostExpression, bulk.UnknownNodes) as error:
            return cls(expression, reason, str(error))

    def may_order(self, request: HttpRequest) -> bool:
        """Return whether the order is requested and has a reason; tell the person if only that is missing."""
        if request.method != "POST" or self.found is None:
            return False
        try:
            forms.reason(request)
        except forms.BadReason as error:
            messages.error(request, str(error))
            return False
        return True

    def replaces(self, request: HttpRequest) -> dict[str, str]:
        """Return the reasons of others, by node, that the person saw and means to replace."""
        if not request.POST.get("replace"):
            return {}
        try:
            seen = json.loads(request.POST.get("replaces", ""))
        except (ValueError, RecursionError):
            return {}
        return {name: text for name, text in seen.items() if isinstance(text, str)} if isinstance(seen, dict) else {}

    def context(self) -> dict[str, Any]:
        """Return the values that the templates of these pages share."""
        return {
            "section": "cluster",
            "place": "drains",
            "expression": self.expression,
            "mistake": self.mistake,
            "found": self.found,
            "reasons": json.dumps(self.found.reasons) if self.found is not None else "",
            "most_reason": orders.MAX_REASON,
            "most_characters": host_expression.MAX_CHARACTERS,
            "most_nodes": host_expression.MAX_NODES,
        }


def show_outcomes(request: HttpRequest, action: str, outcomes: Sequence[BulkOutcome]) -> None:
    """Show how many nodes were ordered to drain or undrain, and which were left as they are."""
    ordered = sum(outcome.order is not None for outcome in outcomes)
    text = f"{REQUESTED[action]} {formatting.plural(ordered, 'node')}."
    by_others = [outcome.node for outcome in outcomes if outcome.is_by_another]
    others = [o.problem for o in outcomes if o.order is None and not o.is_in_service and not o.is_by_another]
    if by_others:
        text += f" Left as they are, because somebody else drained them: {formatting.listed(by_others, 5)}."
    if len(others) > MAX_PROBLEMS:
        others = [*others[:MAX_PROBLEMS], f"And {len(others) - MAX_PROBLEMS} more were left as they are."]
    text = " ".join((text, *others))
    if by_others or others:
        messages.warning(request, text)
    else:
        messages.success(request, text)
