"""Refuse REST requests of everybody but sysadmins, and of tokens without scope admin."""

from __future__ import annotations

from portal.access import CLUSTER, can
from portal.http.api import ApiRequest
from portal.http.problems import Problem
from portal.models import Token

FORBIDDEN = {403: "Only for sysadmins; a token needs scope admin to change something."}
"""The described error of their endpoints."""


def only_sysadmins(request: ApiRequest, what: str) -> None:
    """Raise Problem 403 for everybody else. `what` completes "Only sysadmins can …", as in "drain nodes"."""
    if not can(request.auth, "change", CLUSTER):
        raise Problem(403, f"Only sysadmins can {what}. Ask one of them.")
    if request.token_scope not in {None, Token.Scope.ADMIN}:
        raise Problem(403, f"This token cannot {what}. Create one with scope admin.", kind="scope")


def only_sysadmins_see(request: ApiRequest, what: str) -> None:
    """Raise Problem 403 for everybody else. `what` completes "Only sysadmins see …", as in "burn-ins"."""
    if not request.auth.is_sysadmin:
        raise Problem(403, f"Only sysadmins see {what}. Ask one of them.")
