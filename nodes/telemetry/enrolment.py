"""Manage who may report for a machine: a token per node, and secrets with which agents obtain theirs."""

from __future__ import annotations

import re
import secrets
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from nodes.models import Agent, EnrolmentSecret
from portal.access import note
from portal.http.problems import Problem
from portal.models import User, digest

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
TOKEN, SECRET = "vga_", "vge_"
SECRET_LIFE = timedelta(days=30)


def enroll(node: str, *, by: User) -> str:
    """Issue a token for this machine, replacing the previous one. The token cannot be read again later."""
    check_name(node)
    with transaction.atomic():
        agent, _ = Agent.objects.select_for_update().get_or_create(node=node)
        token = _issue(agent, by.username)
        note(by, "agent.enroll", node)
    return token


def enroll_by_secret(node: str, secret: str) -> str:
    """Issue a token for a machine whose agent has the site's secret, once per name. Raises Problem."""
    valid = EnrolmentSecret.objects.filter(digest=digest(secret), revoked_at=None, expires_at__gt=timezone.now())
    found = valid.first()
    if found is None:
        raise Problem(401, "This enrolment secret is unknown, revoked or expired.", kind="unauthorized")
    check_name(node)
    with transaction.atomic():
        agent, _ = Agent.objects.select_for_update().get_or_create(node=node)
        if agent.token_digest:
            remedy = f"If its disk was wiped, a sysadmin creates a new token with `vigil agent enroll {node}`."
            raise Problem(409, f"{node} is already enrolled, and a secret enrols each name only once. {remedy}")
        return _issue(agent, found.hint)


def make_secret(by: User) -> tuple[EnrolmentSecret, str]:
    """Create a secret for many machines; return its row and the secret."""
    secret = f"{SECRET}{secrets.token_urlsafe(32)}"
    row = EnrolmentSecret.objects.create(
        hint=secret[:8], digest=digest(secret), made_by=by, expires_at=timezone.now() + SECRET_LIFE
    )
    note(by, "agent.secret", row.hint)
    return row, secret


def enroll_here(node: str) -> str:
    """Issue a token for the portal's own machine, on behalf of the user who starts the portal."""
    agent, _ = Agent.objects.get_or_create(node=node)
    return _issue(agent, "vigil up")


def _issue(agent: Agent, by: str) -> str:
    token = f"{TOKEN}{secrets.token_urlsafe(32)}"
    agent.token_digest, agent.enrolled_at, agent.enrolled_by = digest(token), timezone.now(), by[:255]
    agent.save(update_fields=["token_digest", "enrolled_at", "enrolled_by"])
    return token


def check_name(node: str) -> None:
    """Raise Problem for an invalid name. The scheduler need not know it: a login node may have an agent too."""
    if not NAME.fullmatch(node):
        raise Problem(
            422, f"{node!r} is not a valid machine name.", errors=[{"field": "name", "message": "Use its host name."}]
        )
