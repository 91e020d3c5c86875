"""Endpoints for sysadmins only, with a token of scope admin."""

from __future__ import annotations

from portal.access import CLUSTER, can
from portal.http.api import ApiRequest
from portal.http.problems import Problem
from portal.models import Token


def only_sysadmins(request: ApiRequest, what: str) -> None:
    """Raise Problem 403 for everybody else. `what` completes "Only sysadmins can …", as in "drain nodes"."""
    if not can(request.auth, "change", CLUSTER):
        raise Problem(403, f"Only sysadmins can {what}. Ask one of them.")
    if request.token_scope not in {None, Token.Scope.ADMIN}:
        raise Problem(403, f"This token cannot {what}. Create one with scope admin.", kind="scope")
