"""Identify who sends a request from its headers alone, before Django reads its body."""

from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, parse_cookie

from portal.models import Token, User, digest


def is_signed_in(authorization: str, cookies: str) -> bool:
    """Return whether a person's token or session comes with the request; whether they may do it, others ask."""
    if authorization:
        scheme, _, secret = authorization.partition(" ")
        return scheme.lower() == "bearer" and user_of_token(digest(secret)).is_authenticated
    key = parse_cookie(cookies).get(settings.SESSION_COOKIE_NAME)
    return bool(key) and user_of_session(key).is_authenticated


def user_of_token(token_digest: str) -> User | AnonymousUser:
    """Return whose living token it is; nobody's where it is unknown, revoked or expired."""
    found = Token.objects.alive().select_related("user").filter(digest=token_digest).first()
    return found.user if found else AnonymousUser()


def user_of_session(key: str | None) -> User | AnonymousUser:
    """Return who is signed in there now, as the database has it."""
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(key)
    user = get_user(request)
    return user if isinstance(user, User) else AnonymousUser()
