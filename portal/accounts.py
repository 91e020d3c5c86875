"""Signing in: allauth's adapter, and what axes says to somebody who guesses."""

from allauth.account.adapter import DefaultAccountAdapter
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render


class Adapter(DefaultAccountAdapter):
    """Accounts are made by sysadmins; nobody signs up by themselves."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False


def locked_out(
    request: HttpRequest, credentials: dict[str, str] | None = None, *args: object, **kwargs: object
) -> HttpResponse:
    """The page that a guesser sees."""
    return render(request, "account/locked.html", status=429)
