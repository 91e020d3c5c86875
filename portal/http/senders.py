"""Identify who sends a request from its headers alone, before Django reads its body."""

from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, parse_cookie

from portal.models import Token, User, digest


def writer_of(authorization: str, cookies: str) -> int | None:
    """Return the primary key of the person whose session or write token comes with the request; None if anonymous.

    Whether they are authorised is decided by the view.
    """
    user: User | AnonymousUser = AnonymousUser()
    if authorization:
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() == "bearer":
            user = user_of_token(digest(secret), but=Token.Scope.READ)
    elif key := parse_cookie(cookies).get(settings.SESSION_COOKIE_NAME):
        user = user_of_session(key)
    return user.pk


def user_of_token(token_digest: str, *, but: str = "") -> User | AnonymousUser:
    """Return the owner of a valid token; AnonymousUser if it is unknown, revoked, expired, or of the scope `but`."""
    found = Token.objects.alive().select_related("user").filter(digest=token_digest).exclude(scope=but).first()
    return found.user if found else AnonymousUser()


def user_of_session(key: str | None) -> User | AnonymousUser:
    """Return the person who is signed in with this session, according to the database."""
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(key)
    user = get_user(request)
    return user if isinstance(user, User) else AnonymousUser()
