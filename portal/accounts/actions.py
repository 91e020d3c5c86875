"""Manage accounts: sign-in, the first start, one-time links, API tokens. The pages are in portal/accounts/views.py."""

import contextlib
import getpass
import json
import os
import secrets
import tomllib
from datetime import timedelta
from pathlib import Path

from allauth.account.adapter import DefaultAccountAdapter
from django.conf import settings
from django.contrib.auth.hashers import make_password
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from portal.access import note
from portal.accounts import projects
from portal.audit import Change
from portal.models import LoginLink, Membership, Token, TokenQuerySet, User, digest

LINK_LIFE = timedelta(hours=1)
TOKEN_DAYS = 90
CLI_TOKEN, CLI_TOKEN_DAYS = "cli.toml", 365


class Adapter(DefaultAccountAdapter):
    """Disable sign-up: only sysadmins create accounts."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False


# Failed sign-ins


def guessed_username(request: HttpRequest, credentials: dict[str, str] | None = None) -> str | None:
    """Return the user name, normalised as allauth does: otherwise each spelling would get a fresh set of attempts."""
    name = (credentials or {}).get("username") or request.POST.get("login") or request.POST.get("username")
    return name.strip().lower() if name else None


def locked_out(
    request: HttpRequest, response: HttpResponse, credentials: dict[str, str] | None = None, *args: object
) -> HttpResponse:
    """Return the page shown after too many failed sign-ins."""
    minutes = round(settings.AXES_COOLOFF_TIME * 60)
    answer = render(request, "account/locked.html", {"minutes": minutes}, status=429)
    answer.headers["Retry-After"] = str(minutes * 60)
    return answer


# One-time links


def make_link(user: User, *, at: str = "") -> str:
    """Return the address of a new one-time sign-in link on the portal `at`; the person's older links stop working."""
    secret = secrets.token_urlsafe(32)
    now = timezone.now()
    with transaction.atomic():
        user.login_links.filter(used_at=None).update(used_at=now)
        LoginLink.objects.create(user=user, digest=digest(secret), expires_at=now + LINK_LIFE)
    # Not by reverse(), which loads every page: half a second of each start.
    return f"{at or settings.VIGIL_PUBLIC_URL}/accounts/link/{secret}/"


def last_address() -> str:
    """Return the address of this installation's portal: this process's own, or the one it was last started with."""
    if not os.environ.get("VIGIL_PUBLIC_URL") and not os.environ.get("VIGIL_PORT"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(tomllib.loads((Path(settings.VIGIL_HOME) / "cli.toml").read_text())["url"])
    return str(settings.VIGIL_PUBLIC_URL)


def valid_link(secret: str) -> LoginLink | None:
    alive = LoginLink.objects.filter(used_at=None, expires_at__gt=timezone.now(), user__is_active=True)
    return alive.select_related("user").filter(digest=digest(secret)).first()


def consume_link(secret: str) -> User | None:
    """Mark the link used and return the person whom it signs in; None if it is invalid or was used before."""
    link = valid_link(secret)
    # If two requests use the link at once, the conditional update lets one of them win.
    if link is None or not LoginLink.objects.filter(pk=link.pk, used_at=None).update(used_at=timezone.now()):
        return None
    return link.user


# Tokens


def tokens_of(user: User) -> TokenQuerySet:
    """Return the tokens that a person's page lists: all that are not revoked, including expired ones."""
    return Token.objects.filter(user=user, revoked_at=None)


class TokenRefused(ValueError):
    """Raised for a token that may not be created; names the invalid field."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


def make_token(user: User, name: str, scope: str, days: int | None = None) -> tuple[Token, str]:
    """Create a token; return it and its secret. Raises TokenRefused."""
    most = settings.VIGIL_TOKEN_MAX_DAYS
    days = min(TOKEN_DAYS, most) if days is None else days
    if scope == Token.Scope.ADMIN and not user.is_sysadmin:
        raise TokenRefused("scope", "Only sysadmins can have tokens with scope admin. Use write.")
    if days > most:
        raise TokenRefused("days", f"A token is valid for at most {most} days here. Choose {most} or fewer.")
    token, secret = Token.issue(user, name, scope=scope, days=days)
    if scope == Token.Scope.ADMIN:
        about = {"scope": scope, "expires_at": token.expires_at}
        note(user, "token.made", token, change=Change(after=about))
    return token, secret


def revoke_all_tokens(user: User) -> int:
    """Revoke every token of a person, as after a change of password. Return how many there were.

    The token in this machine's cli.toml is replaced, so that `vigil` keeps working here.
    """
    has_file = tokens_of(user).filter(name=CLI_TOKEN).exists()
    revoked = tokens_of(user).update(revoked_at=timezone.now())
    if has_file and (Path(settings.VIGIL_HOME) / CLI_TOKEN).exists():
        transaction.on_commit(lambda: _write_cli_token(user), robust=True)
    return revoked


def revoke_token(user: User, token_id: int) -> bool:
    """Revoke one of the person's tokens and return whether it existed."""
    return bool(tokens_of(user).filter(pk=token_id).update(revoked_at=timezone.now()))


# The first start


def first_start() -> str | None:
    """Create the first sysadmin with a project and the CLI's token; return a sign-in link until somebody has signed in.

    Safe to call at every start: it creates only what is missing.
    """
    with transaction.atomic():
        sysadmin = User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()
        if sysadmin is None:
            sysadmin = _first_sysadmin()
        project, made = projects.ensure_default()
        if made:
            Membership.objects.get_or_create(user=sysadmin, project=project, defaults={"role": Membership.Role.LEAD})
    _write_cli_token(sysadmin)
    unseen = sysadmin.last_login is None and not sysadmin.has_usable_password()
    return make_link(sysadmin) if unseen else None


def _first_sysadmin() -> User:
    name = _starting_user()
    if User.objects.filter(username=name).exists():
        name = f"{name}-admin"
    fields = {"is_superuser": True, "is_staff": True, "slurm_user": _slurm_user(name), "password": make_password(None)}
    # If two processes start at once, the second finds the first one's row.
    user, made = User.objects.get_or_create(username=name, defaults=fields)
    if made:
        note(None, "sysadmin.made", user.username, "first start")
    return user


def _starting_user() -> str:
    try:
        name = getpass.getuser()
        User.username_validator(name)
    except (OSError, KeyError, ValidationError):
        return "admin"
    return "admin" if name == "root" else name


def _slurm_user(name: str) -> str | None:
    """Return the first sysadmin's Slurm user: the one that polls, until somebody changes it."""
    wanted = settings.VIGIL_SLURM_USER
    taken = User.objects.filter(slurm_user=wanted).exists()
    return wanted if wanted and wanted != "root" and not taken else None


def _write_cli_token(user: User) -> None:
    """Write `$VIGIL_HOME/cli.toml` with this address and a valid token, so that `vigil` works on this machine."""
    path = Path(settings.VIGIL_HOME) / CLI_TOKEN
    secret = _valid_secret(path)
    if secret is None:
        user.tokens.filter(name=CLI_TOKEN, revoked_at=None).update(revoked_at=timezone.now())
        scope = Token.Scope.ADMIN if user.is_sysadmin else Token.Scope.WRITE
        _, secret = Token.issue(user, CLI_TOKEN, scope=scope, days=CLI_TOKEN_DAYS)
    # JSON strings are valid TOML strings.
    text = f"url = {json.dumps(settings.VIGIL_PUBLIC_URL)}\ntoken = {json.dumps(secret)}\n"
    if not path.exists() or path.read_text() != text:
        _write_private(path, text)


def _valid_secret(path: Path) -> str | None:
    try:
        secret = tomllib.loads(path.read_text())["token"]
    except (OSError, ValueError, KeyError):
        return None
    return secret if isinstance(secret, str) and Token.objects.alive().filter(digest=digest(secret)).exists() else None


def _write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600 from the start, atomically."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)
